"""Folder of checkpoints: its names and contents, and the one trainer that writes into it.

    save_dir/
        latest -> delta-000000900    the newest checkpoint, once there was a step
        best -> step-000000784       the best one on the validation ratings, once one was validated
        step-000000784/              a full checkpoint after this many steps
        delta-000000900/             a delta: changes since the checkpoint before it
        .making-delta-000001000-9f86d081c3a2/
                                     under way, or left by a process that died; the next trainer removes it
        run-1b9d6bcd/                checkpoints of an earlier training, moved here when a new one began
        .lock                        held by the trainer that writes here

A checkpoint gets its name by one rename when all of it is on the disk: a folder with such a name is complete.
In an object store its files are uploaded under the final name, and the manifest last: a checkpoint with a
manifest is complete. `latest` and `best` are small objects. A store has no lock that ends with its process:
the newest trainer owns `.lock`, and an earlier one finds its checkpoints refused when it publishes them.

The name of an unfinished folder contains its attempt, so a rank that outlives its attempt cannot write into
the folder of a later one. Only names that a trainer gives are touched. An unfinished folder is removed only
if a trainer has written here before: a user may have pointed --save_dir at a folder with other files in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from recsuite.checkpoint.format import MANIFEST, read_manifest
from recsuite.errors import UserError
from recsuite.files import explained, flush, held, reason_of, resolved
from recsuite.places import ObjectPath
from recsuite.runtime.console import say
from recsuite.runtime.process import launch_name

# At least nine digits, so that a listing is in order.
NAME = re.compile(r"(step|delta)-(\d{9,})")
# Links to folders: each can be given in place of a checkpoint.
LATEST = "latest"
BEST = "best"


def full_name(step: int) -> str:
    """Return the folder name of the full checkpoint after `step` steps."""
    return f"step-{step:09d}"


def delta_name(step: int) -> str:
    """Return the folder name of the delta that ends after `step` steps."""
    return f"delta-{step:09d}"


def making_name(final: Path, attempt: str) -> str:
    """Return the folder name under which an attempt writes a checkpoint, see `new_attempt`."""
    # With a dot in front, so that no reader takes the folder for a checkpoint.
    return f".making-{final.name}-{attempt}"


def new_attempt() -> str:
    """Return a unique name of an attempt to write checkpoints; let one rank choose it for all."""
    return uuid.uuid4().hex[:12]


def step_of(folder: Path) -> int:
    """Return the step in a folder's name."""
    match = NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[2])


def full_checkpoints_in(save_dir: Path) -> list[Path]:
    """Return the full checkpoints, oldest first."""
    return _named(save_dir, "step")


def deltas_in(save_dir: Path) -> list[Path]:
    """Return the deltas, oldest first."""
    return _named(save_dir, "delta")


def _named(save_dir: Path, kind: str) -> list[Path]:
    with explained(f"Cannot read {save_dir}", "give another folder"):
        names = [(NAME.fullmatch(path.name), path) for path in _folders_in(save_dir)]
    # By number: by name, a step of ten digits would come before one of nine.
    return sorted((path for match, path in names if match and match[1] == kind), key=step_of)


def _folders_in(save_dir: Path) -> list[Path]:
    if not isinstance(save_dir, ObjectPath):
        return [path for path in save_dir.iterdir() if path.is_dir()] if save_dir.is_dir() else []
    folders = {save_dir / name for name in save_dir.holding(MANIFEST)}
    # A listing may be older than the last write.
    newest = resolved(save_dir / LATEST)
    return sorted(folders | ({newest} if (newest / MANIFEST).is_file() else set()))


def checkpoints_in(save_dir: Path) -> list[Path]:
    """Return the checkpoints, oldest first; of equal steps, the full checkpoint is the newest."""
    # The sort is stable: of equal steps, the delta stays before the full checkpoint.
    return sorted([*deltas_in(save_dir), *full_checkpoints_in(save_dir)], key=step_of)


def others_in(save_dir: Path, refused: Path) -> list[Path]:
    """Return the checkpoints except the one that was refused, newest first."""
    return [path for path in reversed(checkpoints_in(save_dir)) if path != refused]


def save_dir_of(folder: Path) -> Path:
    """Return the save_dir of a checkpoint; any other folder is a save_dir itself."""
    # Resolved, because the names of links are not names of checkpoints.
    folder = resolved(folder)
    return folder.parent if NAME.fullmatch(folder.name) else folder


def newest_in(save_dir: Path, until: int = -1) -> Path | None:
    """Return the folder of the newest checkpoint, up to step `until` unless it is -1; None without one."""
    there = [path for path in checkpoints_in(save_dir) if until == -1 or step_of(path) <= until]
    return there[-1] if there else None


def best_in(save_dir: Path) -> Path | None:
    """Return the folder of the best checkpoint by validation; None before there is one.

    It is found by the manifests: the newest checkpoint that was the best when it was written. The link "best"
    may be out of date if a trainer was killed. A folder with the name of a checkpoint and no manifest does
    not count.

    Raises:
        UserError: when one that is newer than it cannot be read.
    """
    # Read one by one: manifests older than the best one are not read.
    there = (path for path in reversed(checkpoints_in(save_dir)) if (path / MANIFEST).is_file())
    return next((path for path in there if read_manifest(path).progress.is_best), None)


def seen_in(folder: Path) -> set[tuple[str, int | str]]:
    """Return name and inode, or version, of all checkpoints in the save_dir of a folder."""
    # The inode too: after a new training began, another folder may have the same name.
    where = save_dir_of(folder)
    with explained(f"Cannot read {where}", "give another folder"):
        if isinstance(where, ObjectPath):
            return {each for each in where.holding(MANIFEST).items() if NAME.fullmatch(each[0])}
        if not where.is_dir():
            return set()
        # The listing has the inodes, so no file is opened: a server that follows a training calls this every
        # second.
        return {(entry.name, entry.inode()) for entry in os.scandir(where) if NAME.fullmatch(entry.name)}


# --- writing ---

LOCK = ".lock"
# Why a checkpoint in an object store is refused that is there already.
WRITTEN = "another training has written it"
# The attempt is optional: older versions did not write it.
LEFTOVER = re.compile(
    r"\.making-(step|delta)-\d{9,}(-[0-9a-f]{12})?|\.removing-(step|delta)-\d{9,}|\.(latest|best)-\d+"
)


@contextlib.contextmanager
def writing(save_dir: Path) -> Iterator[None]:
    """Hold the lock to write in a folder, and remove unfinished folders of earlier trainers. Call on rank 0.

    Raises:
        UserError: when another one writes, or the folder cannot be written.
    """
    refusal = (
        f"Another training writes its checkpoints to {save_dir}; wait for it, or give another --save_dir."
    )
    with contextlib.ExitStack() as stack:
        with tidying(save_dir):
            save_dir.mkdir(parents=True, exist_ok=True)
            # Checked before this trainer makes the lock file: without one, files here may not be a trainer's.
            is_ours = (save_dir / LOCK).is_file()
            if isinstance(save_dir, ObjectPath):
                # Before anything is removed: an earlier trainer that still runs must not publish a checkpoint
                # that loses its files.
                (save_dir / LOCK).put(launch_name().encode())
            else:
                # No wait, because a training may take days.
                stack.enter_context(held(save_dir / LOCK, refusal))
            # Only with the lock: before, an unfinished folder may be of a trainer that is still running.
            for path in _unfinished_in(save_dir):
                if is_ours:
                    _remove(path)
                else:
                    say(f"{path} was not removed: no trainer has written to {save_dir} before")
        yield


def _unfinished_in(save_dir: Path) -> list[Path]:
    if not isinstance(save_dir, ObjectPath):
        return [path for path in save_dir.iterdir() if LEFTOVER.fullmatch(path.name)]
    # A later one may be that of an earlier trainer that still runs. A listing may lack a manifest.
    newest = max((step_of(path) for path in checkpoints_in(save_dir)), default=-1)
    there = [path for path in save_dir.iterdir() if NAME.fullmatch(path.name) and step_of(path) <= newest]
    return [path for path in there if not (path / MANIFEST).is_file()]


def tidying(save_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context that raises a UserError if the folder cannot be written."""
    return explained(f"Cannot write to --save_dir {save_dir}", "give another folder")


def publish(making: Path, final: Path, keep: int) -> None:
    """Give a complete folder its name, point `latest` and `best` at it, and remove what is not kept.

    In an object store, the files of `making` are there already, except the manifest.
    """
    # Outside of the `try`, because without its name there is no checkpoint. A folder cannot be renamed over
    # one that is not empty, so an existing checkpoint of this step stays whole.
    if isinstance(final, ObjectPath):
        _put_manifest(making, final)
    else:
        making.rename(final)
    try:
        if not isinstance(final, ObjectPath):
            # Until the parent folder is on the disk, a power cut can undo the rename.
            flush(final.parent)
        # An untrained checkpoint is never `latest`.
        if step_of(final) > 0:
            set_link(final, LATEST)
        if read_manifest(final).progress.is_best:
            set_link(final, BEST)
        prune(final.parent, keep)
    except (OSError, UserError) as error:
        # The checkpoint is written. If this raised, the same delta would be written a second time.
        reason = reason_of(error) if isinstance(error, OSError) else error
        say(
            f"{final} is complete, but the folders beside it were not cleaned up ({reason}); the next "
            "checkpoint tries again"
        )


def _put_manifest(making: Path, final: ObjectPath) -> None:
    """Write the manifest, with which a checkpoint in an object store is complete."""
    check_owner(final.parent)
    content = (making / MANIFEST).read_bytes()
    try:
        (final / MANIFEST).put(content, is_new=True)
    except FileExistsError:
        # A request of ours may have been carried out, its answer lost, and the request sent again.
        if (final / MANIFEST).read_bytes() != content:
            raise UserError(WRITTEN) from None
    try:
        check_owner(final.parent)
    except UserError:
        # The other one does not know of it.
        (final / MANIFEST).unlink()
        raise


def check_owner(save_dir: ObjectPath) -> None:
    """Refuse to write in an object store where another trainer has begun.

    Raises:
        UserError: with the name of its launch.
    """
    owner = (save_dir / LOCK).read_text()
    if owner != launch_name():
        raise UserError(f"another training, {owner}, writes to {save_dir} now")


def prune(save_dir: Path, keep: int) -> None:
    """Remove the oldest full checkpoints, except the newest `keep`, the best one, and bases of deltas.

    A folder with the name of a checkpoint and no manifest is not a trainer's: it is not counted or removed.
    """
    old = [path for path in full_checkpoints_in(save_dir) if (path / MANIFEST).is_file()][:-keep]
    if not old:
        return
    # A delta that cannot be read may build on any of them, so its UserError keeps all of them.
    links = [read_manifest(delta).link for delta in deltas_in(save_dir)]
    used = {link.base for link in links if link}
    best = best_in(save_dir)
    if best is not None:
        used.add(best.name)
        # Before anything is removed: if a trainer was killed, the link may name an older best one.
        set_link(best, BEST)
    for checkpoint in old:
        if checkpoint.name not in used:
            remove_checkpoint(checkpoint)


def archive_checkpoints(save_dir: Path) -> Path:
    """Move all checkpoints of an earlier training into a new folder, and return it. Call on rank 0.

    Raises:
        UserError: when there is such a folder, and it holds one of them already.
    """
    there = checkpoints_in(save_dir)
    try:
        aside = save_dir / f"run-{read_manifest(there[-1]).run[:8]}"
    except UserError:
        # Moved all the same: a new training must not write beside checkpoints that cannot be read.
        aside = save_dir / "run-unreadable"
    with tidying(save_dir):
        for link in (LATEST, BEST):
            (save_dir / link).unlink(missing_ok=True)
        aside.mkdir(exist_ok=True)
        # The newest first: if this is interrupted, the rest of the chain has no gap.
        for checkpoint in reversed(there):
            if _is_taken(aside / checkpoint.name, checkpoint):
                raise UserError(f"{aside} holds a {checkpoint.name} already; give another --save_dir.")
            _move(checkpoint, aside / checkpoint.name)
    return aside


def _is_taken(target: Path, checkpoint: Path) -> bool:
    if not isinstance(target, ObjectPath):
        return target.exists()
    # A move that was interrupted is made again.
    manifest = target / MANIFEST
    return manifest.is_file() and manifest.read_bytes() != (checkpoint / MANIFEST).read_bytes()


def _move(checkpoint: Path, target: Path) -> None:
    if isinstance(checkpoint, ObjectPath) and isinstance(target, ObjectPath):
        # Not those of a listing, which may lack one.
        names = [entry.name for entry in read_manifest(checkpoint).files]
        checkpoint.move_to(target, names, MANIFEST)
    else:
        checkpoint.rename(target)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first: a folder with the name of a checkpoint must be complete."""
    if isinstance(folder, ObjectPath):
        _remove(folder)
        return
    removing = folder.with_name(f".removing-{folder.name}")
    folder.rename(removing)
    _remove(removing)


def _remove(path: Path) -> None:
    if isinstance(path, ObjectPath):
        path.remove(MANIFEST)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def set_link(final: Path, name: str, folder: Path | None = None) -> None:
    """Point a link, such as LATEST or BEST, at this folder, atomically and durably.

    folder: of the link, the parent of the other one or further up; None for its parent.
    """
    folder = folder or final.parent
    if resolved(folder / name) == final.resolve():
        return
    target = str(final).removeprefix(f"{folder}/")
    if isinstance(folder, ObjectPath):
        (folder / name).link_to(target)
        return
    # Replaced by a rename: with unlink first, there would be a moment without a link.
    link = folder / f".{name}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    link.replace(folder / name)
    flush(folder)
