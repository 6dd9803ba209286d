"""The folder of checkpoints: the names in it, and what is there.

    save_dir/
        latest -> delta-000000900    the newest checkpoint, once there was a step
        best -> step-000000784       the best one on the validation ratings, once an epoch ended
        step-000000784/              a full checkpoint: everything after so many steps
        delta-000000900/             a delta: what changed since the checkpoint before it
        .making-delta-000001000-9f86d081c3a2/
                                     under way, or left by a process that died; the next trainer removes it
        run-1b9d6bcd/                what an earlier training left here, when a new one began
        .lock                        held by the trainer that writes here, see `writer.py`

A checkpoint gets its name in one rename, when all of it is on the disk: what has such a name is complete.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from recsuite.checkpoint.storage.manifest import MANIFEST, read_manifest
from recsuite.files import explained

# Nine digits, so that a listing is in order; a step that needs more has more.
NAME = re.compile(r"(step|delta)-(\d{9,})")
# Links to folders, so that each can be given wherever a checkpoint is.
LATEST = "latest"
BEST = "best"


def full_name(step: int) -> str:
    """The folder name of the full checkpoint after so many steps."""
    return f"step-{step:09d}"


def delta_name(step: int) -> str:
    """The folder name of the delta that ends after so many steps."""
    return f"delta-{step:09d}"


def making_name(final: Path, attempt: str) -> str:
    """The folder name under which an attempt writes a checkpoint, see `new_attempt`."""
    # With a dot in front, so that no reader takes it for a checkpoint.
    return f".making-{final.name}-{attempt}"


def new_attempt() -> str:
    """A name that no other attempt to write checkpoints has had; let one rank choose it for all."""
    return uuid.uuid4().hex[:12]


def step_of(folder: Path) -> int:
    """The step in a folder's name."""
    found = NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[2])


def full_checkpoints_in(save_dir: Path) -> list[Path]:
    """The full checkpoints, oldest first."""
    return _named(save_dir, "step")


def deltas_in(save_dir: Path) -> list[Path]:
    """The deltas, oldest first."""
    return _named(save_dir, "delta")


def _named(save_dir: Path, kind: str) -> list[Path]:
    with explained(f"{save_dir} cannot be read"):
        if not save_dir.is_dir():
            return []
        names = [(NAME.fullmatch(path.name), path) for path in save_dir.iterdir() if path.is_dir()]
    # By number, because by name a step of ten digits would come before one of nine.
    return sorted((path for found, path in names if found and found[1] == kind), key=step_of)


def checkpoints_in(save_dir: Path) -> list[Path]:
    """The checkpoints, oldest first; of one step the full one comes last, and so is the newest."""
    # The sort is stable: of one step the delta stays before the full checkpoint.
    return sorted([*deltas_in(save_dir), *full_checkpoints_in(save_dir)], key=step_of)


def others_in(save_dir: Path, refused: Path) -> list[Path]:
    """The checkpoints beside one that was refused, newest first."""
    return [path for path in reversed(checkpoints_in(save_dir)) if path != refused]


def save_dir_of(folder: Path) -> Path:
    """The folder of checkpoints in which a checkpoint lies; any other folder is one itself."""
    # The links have other names than the checkpoints to which they point.
    folder = folder.resolve()
    return folder.parent if NAME.fullmatch(folder.name) else folder


def newest_in(save_dir: Path, until: int = -1) -> Path | None:
    """The folder of the newest checkpoint, by step `until` where that is not -1; None where there is none."""
    there = [path for path in checkpoints_in(save_dir) if until == -1 or step_of(path) <= until]
    return there[-1] if there else None


def best_in(save_dir: Path) -> Path | None:
    """The folder of the best checkpoint by validation; None before there is one.

    Found in the manifests: the newest of those that were the best when they were written, each better than
    all before it. The link "best" may be late, where a trainer was killed. What has the name of a checkpoint
    and no manifest does not count.

    Raises:
        UserError: when one that is newer than it cannot be read.
    """
    # One after the other: older manifests than that of the best are not read.
    there = (path for path in reversed(checkpoints_in(save_dir)) if (path / MANIFEST).is_file())
    return next((path for path in there if read_manifest(path).progress.is_best), None)


def seen_in(folder: Path) -> set[tuple[str, int]]:
    """Name and inode of the checkpoints of a folder, or of the one in which it is."""
    # The inode too: after a new training began, another folder may have the name.
    where = save_dir_of(folder)
    with explained(f"{where} cannot be read"):
        if not where.is_dir():
            return set()
        # The listing has the inodes already, so nothing is opened: a server that follows a training looks
        # every second.
        return {(entry.name, entry.inode()) for entry in os.scandir(where) if NAME.fullmatch(entry.name)}
