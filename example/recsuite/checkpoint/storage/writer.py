"""The one trainer that writes into a folder of checkpoints: its lock, what it publishes, keeps and removes.

What is under way has a name of its attempt alone, so that a rank that outlives its attempt cannot write into
a later one's folder. Nothing is touched whose name is not one that a trainer gives, and what is half done is
removed only where a trainer has written before and where it holds nothing but what a trainer writes: a user
may have pointed --save_dir at a folder with other things in it.
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
# Without an attempt, what a trainer left before attempts had names.
LEFTOVER = re.compile(
    r"\.making-(step|delta)-\d{9,}(-[0-9a-f]{12})?|\.removing-(step|delta)-\d{9,}|\.(latest|best)-\d+"
)
# What a trainer writes into the folder of a checkpoint; safetensors writes a file under another name first.
CONTENT = re.compile(
    r"part-\d{5,}\.safetensors|\.tmp[0-9A-Za-z]{6}|(manifest|config|vocabulary|schema)\.json"
)


@contextlib.contextmanager
def writing(save_dir: Path) -> Iterator[None]:
    """Be the only one that writes here; removes what trainers left half done. Call on rank 0.

    Raises:
        UserError: when another one writes, or the folder cannot be written.
    """
    with tidying(save_dir):
        save_dir.mkdir(parents=True, exist_ok=True)
        # Looked for before this trainer makes it: without one, what lies here may be anybody's.
        is_ours = (save_dir / LOCK).is_file()
        # The system gives the lock back when its holder dies, so a killed trainer leaves none behind. Not
        # waited for, because a training may take days.
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
            # Only with the lock: before, what is half done may be the work of a trainer that is still
            # running.
            for path in list(save_dir.iterdir()):
                if LEFTOVER.fullmatch(path.name):
                    _remove_leftover(path, is_ours)
        yield
    finally:
        lock.release()


def _remove_leftover(path: Path, is_ours: bool) -> None:
    """Remove what a trainer left half done; what may be somebody else's stays, and that is said."""
    foreign = _foreign_in(path) if is_ours else f"no trainer has written to {path.parent} before"
    if foreign:
        say(f"{path} stays where it is: {foreign}")
    else:
        _remove(path)


def _foreign_in(path: Path) -> str:
    """Why something with the name of a leftover is none of a trainer's; empty if it is one."""
    if path.name.startswith((f".{LATEST}-", f".{BEST}-")):
        return "" if path.is_symlink() else "it is not a link"
    if path.is_symlink() or not path.is_dir():
        return "it is not a folder"
    foreign = [found for found in path.iterdir() if not CONTENT.fullmatch(found.name) or not found.is_file()]
    return f"it holds {min(foreign).name}, which no trainer writes" if foreign else ""


def tidying(save_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Say in a sentence why the folder cannot be written, if it cannot."""
    return explained(f"--save_dir {save_dir} cannot be written", "give another folder")


def publish(making: Path, final: Path, keep: int) -> None:
    """Give a complete folder its name, point `latest` and `best` at it, and remove what is not kept."""
    # Outside of the `try`, for without its name there is no checkpoint. A folder cannot be renamed over one
    # that is not empty, so a checkpoint of this step that is there stays whole.
    making.rename(final)
    try:
        # Until the folder around it is on the disk, a power cut can take the new name back.
        flush(final.parent)
        # Nobody wants what has learned nothing.
        if step_of(final) > 0:
            point_at(final, LATEST)
        if read_manifest(final).progress.is_best:
            point_at(final, BEST)
        prune(final.parent, keep)
    except (OSError, UserError) as error:
        # The checkpoint is there, and a delta that counted as failed would come a second time.
        reason = reason_of(error) if isinstance(error, OSError) else error
        say(
            f"{final} is whole, but the folders beside it are not tidy ({reason}); the next checkpoint "
            "tries again"
        )


def prune(save_dir: Path, keep: int) -> None:
    """Remove the oldest of more than `keep` full checkpoints; the best one, and those that a delta builds on,
    are kept beside them.

    What has the name of a checkpoint and says nothing of itself is not ours: it neither counts nor goes.
    """
    old = [path for path in full_checkpoints_in(save_dir) if (path / MANIFEST).is_file()][:-keep]
    if not old:
        return
    # One that cannot be read may build on any of them, so its UserError leaves all of them in place.
    links = [read_manifest(delta).link for delta in deltas_in(save_dir)]
    used = {link.base for link in links if link}
    best = best_in(save_dir)
    if best is not None:
        used.add(best.name)
        # Before anything goes: where a trainer was killed, it may still name what is no longer the best.
        point_at(best, BEST)
    for checkpoint in old:
        if checkpoint.name not in used:
            retire(checkpoint)


def set_aside(save_dir: Path) -> Path:
    """Move all checkpoints of an earlier training into a folder of their own; returns it. Call on rank 0.

    Raises:
        UserError: when there is such a folder, and it holds one of them already.
    """
    there = checkpoints_in(save_dir)
    try:
        aside = save_dir / f"run-{read_manifest(there[-1]).run[:8]}"
    except UserError:
        # Moved all the same: a new training must not write among what cannot be read.
        aside = save_dir / "run-unreadable"
    with tidying(save_dir):
        for link in (LATEST, BEST):
            (save_dir / link).unlink(missing_ok=True)
        aside.mkdir(exist_ok=True)
        # The newest first: what is left of a chain, if this is cut short, has no gap.
        for checkpoint in reversed(there):
            if (aside / checkpoint.name).exists():
                raise UserError(f"{aside} holds a {checkpoint.name} already; give another --save_dir.")
            checkpoint.rename(aside / checkpoint.name)
    return aside


def retire(folder: Path) -> None:
    """Remove a checkpoint. Renamed first, because what has the name of a checkpoint is complete."""
    removing = folder.with_name(f".removing-{folder.name}")
    folder.rename(removing)
    _remove(removing)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def point_at(final: Path, name: str) -> None:
    """Have the link LATEST or BEST name this folder, at once and for good."""
    if (final.parent / name).resolve() == final.resolve():
        return
    # A link cannot be changed, only replaced: unlinked first, there would be a moment without one.
    link = final.parent / f".{name}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / name)
    flush(final.parent)
