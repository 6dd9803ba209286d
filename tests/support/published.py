"""Checkpoints of a training, in folders as they were when it wrote them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from recsuite.checkpoint.folder import deltas_in, full_checkpoints_in, publish, step_of
from recsuite.checkpoint.format import MANIFEST, read_manifest, write_manifest
from recsuite.files import FileEntry, digest_of


def state(dumps: Path, step: int) -> Path:
    """The folder of the checkpoint after a step."""
    (found,) = dumps.glob(f"*-{step:09d}")
    return found


def copied(dumps: Path, save_dir: Path, until: int) -> Path:
    """A folder of checkpoints as it was after a step."""
    save_dir.mkdir()
    for folder in (*full_checkpoints_in(dumps), *deltas_in(dumps)):
        if step_of(folder) <= until:
            shutil.copytree(folder, save_dir / folder.name)
    return save_dir


def publish_state(dumps: Path, step: int, save_dir: Path, run: str = "") -> None:
    """Publish a checkpoint as a trainer does; run: name of the run in its manifest."""
    making = save_dir / f".making-{step}"
    shutil.copytree(state(dumps, step), making)
    if run:
        write_manifest(making, dataclasses.replace(read_manifest(making), run=run))
    publish(making, save_dir / state(dumps, step).name, keep=9)


def reseal(folder: Path, **changes: Any) -> None:
    """Have a manifest agree with the files of its folder; changes: of its other fields."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    files = tuple(FileEntry(path.name, path.stat().st_size, digest_of(path)) for path in paths)
    write_manifest(folder, dataclasses.replace(read_manifest(folder), files=files, **changes))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All that a checkpoint holds, by the file and the name."""
    files = sorted(folder.glob("part-*.safetensors"))
    return {f"{file.name}/{name}": array for file in files for name, array in load_file(file).items()}


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Names of tensors that two checkpoints do not both hold, or not bit for bit."""
    found, wanted = tensors_of(one), tensors_of(other)
    both = found.keys() & wanted.keys()
    differ = [name for name in both if found[name].tobytes() != wanted[name].tobytes()]
    return sorted([*differ, *(found.keys() ^ wanted.keys())])


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
