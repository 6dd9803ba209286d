"""Checkpoints of an earlier training in the --save_dir of a new one: refused, or moved aside.

Does not import TorchRec, so a training is refused before it reads its data.
"""

from __future__ import annotations

from pathlib import Path

from recsuite.checkpoint.folder import archive_checkpoints, newest_in
from recsuite.checkpoint.format import read_manifest
from recsuite.checkpoint.origin import recorded_origin
from recsuite.config.sections import CheckpointConfig
from recsuite.errors import UserError
from recsuite.places import folder_at
from recsuite.runtime.console import say
from recsuite.training.progress import describe_step


def check_free(section: CheckpointConfig) -> None:
    """Refuse a new training in a folder with checkpoints, unless these may be moved. Call on rank 0.

    Raises:
        UserError: names the folder, what is there, and what to give.
    """
    if section.resume or section.move_aside:
        return
    save_dir = folder_at(section.save_dir)
    if newest := newest_in(save_dir):
        raise UserError(
            f"--save_dir {save_dir} has the checkpoints of an earlier training{_described(newest)}. Fix: "
            "give --resume to continue it, --move_aside to keep it in a folder there and train anew, or "
            "another --save_dir."
        )


def begin(section: CheckpointConfig) -> None:
    """Check a folder as `check_free`, or move its checkpoints aside. Call on rank 0, with the folder's lock.

    Raises:
        UserError: see `check_free`, and when the folder cannot be written.
    """
    check_free(section)
    save_dir = folder_at(section.save_dir)
    if section.move_aside and (newest := newest_in(save_dir)):
        aside = archive_checkpoints(save_dir)
        say(f"moved the checkpoints of an earlier training, up to {newest.name}, to {aside}")


def _described(checkpoint: Path) -> str:
    """Return run, model, step and date of the newest checkpoint of a training, for a message."""
    try:
        manifest = read_manifest(checkpoint)
        model = recorded_origin(checkpoint, manifest)
    except UserError:
        return f", up to {checkpoint.name}, which cannot be read"
    of_model = f" of {model}" if model else ""
    return f": run {manifest.run[:8]}{of_model}, {describe_step(manifest.progress)}, {manifest.time}"
