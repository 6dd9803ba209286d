"""Folder of checkpoints: names and contents.

    save_dir/
        latest -> delta-000000900    the newest checkpoint, once there was a step
        best -> step-000000784       the best one on the validation ratings, once an epoch ended
        step-000000784/              a full checkpoint after this many steps
        delta-000000900/             a delta: changes since the checkpoint before it
        .making-delta-000001000-9f86d081c3a2/
                                     under way, or left by a process that died; the next trainer removes it
        run-1b9d6bcd/                checkpoints of an earlier training, moved here when a new one began
        .lock                        held by the trainer that writes here, see `writer.py`

A checkpoint gets its name by one rename when all of it is on the disk: a folder with such a name is complete.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from recsuite.checkpoint.storage.manifest import MANIFEST, read_manifest
from recsuite.files import explained

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
    found = NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[2])


def full_checkpoints_in(save_dir: Path) -> list[Path]:
    """Return the full checkpoints, oldest first."""
    return _named(save_dir, "step")


def deltas_in(save_dir: Path) -> list[Path]:
    """Return the deltas, oldest first."""
    return _named(save_dir, "delta")


def _named(save_dir: Path, kind: str) -> list[Path]:
    with explained(f"{save_dir} cannot be read"):
        if not save_dir.is_dir():
            return []
        names = [(NAME.fullmatch(path.name), path) for path in save_dir.iterdir() if path.is_dir()]
    # By number: by name, a step of ten digits would come before one of nine.
    return sorted((path for found, path in names if found and found[1] == kind), key=step_of)


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
    folder = folder.resolve()
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


def seen_in(folder: Path) -> set[tuple[str, int]]:
    """Return name and inode of all checkpoints in the save_dir of a folder."""
    # The inode too: after a new training began, another folder may have the same name.
    where = save_dir_of(folder)
    with explained(f"{where} cannot be read"):
        if not where.is_dir():
            return set()
        # The listing has the inodes, so no file is opened: a server that follows a training calls this every
        # second.
        return {(entry.name, entry.inode()) for entry in os.scandir(where) if NAME.fullmatch(entry.name)}
