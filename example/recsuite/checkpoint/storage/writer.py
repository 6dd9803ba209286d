"""Writing into a folder of checkpoints by one trainer: its lock, publishing, and removing old checkpoints.

The name of an unfinished folder contains its attempt, so a rank that outlives its attempt cannot write into
the folder of a later one. Only names that a trainer gives are touched. An unfinished folder is removed only
if a trainer has written here before, and if it holds only files that a trainer writes: a user may have
pointed --save_dir at a folder with other files in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from recsuite.checkpoint.storage.directory import (
    BEST,
    LATEST,
    best_in,
    checkpoints_in,
    deltas_in,
    full_checkpoints_in,
    step_of,
)
from recsuite.checkpoint.storage.manifest import MANIFEST, read_manifest
from recsuite.errors import UserError
from recsuite.files import explained, flush, reason_of
from recsuite.runtime.console import say

LOCK = ".lock"
# The attempt is optional: older versions did not write it.
LEFTOVER = re.compile(
    r"\.making-(step|delta)-\d{9,}(-[0-9a-f]{12})?|\.removing-(step|delta)-\d{9,}|\.(latest|best)-\d+"
)
# Files that a trainer writes into the folder of a checkpoint; safetensors first uses a temporary name.
CONTENT = re.compile(
    r"part-\d{5,}\.safetensors|\.tmp[0-9A-Za-z]{6}|(manifest|config|vocabulary|schema)\.json"
)


@contextlib.contextmanager
def writing(save_dir: Path) -> Iterator[None]:
    """Hold the lock to write in a folder, and remove unfinished folders of earlier trainers. Call on rank 0.

    Raises:
        UserError: when another one writes, or the folder cannot be written.
    """
    with tidying(save_dir):
        save_dir.mkdir(parents=True, exist_ok=True)
        # Checked before this trainer makes the lock file: without one, files here may not be a trainer's.
        is_ours = (save_dir / LOCK).is_file()
        # The system releases the lock when its process dies, so a killed trainer does not keep it. No wait,
        # because a training may take days.
        lock = FileLock(save_dir / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"Another training writes its checkpoints to {save_dir}; wait for it, or give another "
                "--save_dir."
            ) from None
    try:
        with tidying(save_dir):
            # Only with the lock: before, an unfinished folder may be of a trainer that is still running.
            for path in list(save_dir.iterdir()):
                if LEFTOVER.fullmatch(path.name):
                    _remove_leftover(path, is_ours)
        yield
    finally:
        lock.release()


def _remove_leftover(path: Path, is_ours: bool) -> None:
    """Remove an unfinished folder or link of a trainer; print why one that may be another's is kept."""
    foreign = _foreign_in(path) if is_ours else f"no trainer has written to {path.parent} before"
    if foreign:
        say(f"{path} stays where it is: {foreign}")
    else:
        _remove(path)


def _foreign_in(path: Path) -> str:
    """Return the reason why a path with the name of a leftover is not a trainer's; empty if it is."""
    if path.name.startswith((f".{LATEST}-", f".{BEST}-")):
        return "" if path.is_symlink() else "it is not a link"
    if path.is_symlink() or not path.is_dir():
        return "it is not a folder"
    foreign = [found for found in path.iterdir() if not CONTENT.fullmatch(found.name) or not found.is_file()]
    return f"it holds {min(foreign).name}, which no trainer writes" if foreign else ""


def tidying(save_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context that raises a UserError if the folder cannot be written."""
    return explained(f"--save_dir {save_dir} cannot be written", "give another folder")


def publish(making: Path, final: Path, keep: int) -> None:
    """Give a complete folder its name, point `latest` and `best` at it, and remove what is not kept."""
    # Outside of the `try`, because without its name there is no checkpoint. A folder cannot be renamed over
    # one that is not empty, so an existing checkpoint of this step stays whole.
    making.rename(final)
    try:
        # Until the parent folder is on the disk, a power cut can undo the rename.
        flush(final.parent)
        # An untrained checkpoint is never `latest`.
        if step_of(final) > 0:
            point_at(final, LATEST)
        if read_manifest(final).progress.is_best:
            point_at(final, BEST)
        prune(final.parent, keep)
    except (OSError, UserError) as error:
        # The checkpoint is written. If this raised, the same delta would be written a second time.
        reason = reason_of(error) if isinstance(error, OSError) else error
        say(
            f"{final} is whole, but the folders beside it are not tidy ({reason}); the next checkpoint "
            "tries again"
        )


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
        point_at(best, BEST)
    for checkpoint in old:
        if checkpoint.name not in used:
            retire(checkpoint)


def set_aside(save_dir: Path) -> Path:
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
            if (aside / checkpoint.name).exists():
                raise UserError(f"{aside} holds a {checkpoint.name} already; give another --save_dir.")
            checkpoint.rename(aside / checkpoint.name)
    return aside


def retire(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first: a folder with the name of a checkpoint must be complete."""
    removing = folder.with_name(f".removing-{folder.name}")
    folder.rename(removing)
    _remove(removing)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def point_at(final: Path, name: str) -> None:
    """Point the link LATEST or BEST at this folder, atomically and durably."""
    if (final.parent / name).resolve() == final.resolve():
        return
    # Replaced by a rename: with unlink first, there would be a moment without a link.
    link = final.parent / f".{name}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / name)
    flush(final.parent)
