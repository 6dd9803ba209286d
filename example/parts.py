"""The files that hold tensors, in safetensors: how they are named, written, and read without other ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from errors import UserError
from manifest import FileEntry, Manifest, flushed

# What the reader of torch.distributed.checkpoint looks for in a part: where its tensors begin in the whole.
OFFSETS_KEY = "DCP_SHARDING_INFO"


def part_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"part-{rank + 1:05d}.safetensors"


def write_part(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> FileEntry:
    """Write arrays into one file, from where they lie, and wait until it is on the disk."""
    # The writer makes a file that its owner alone can read; this one is for whoever may read a new file.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(arrays, path, metadata=metadata)
    except SafetensorError as error:
        raise _as_os_error(error) from error
    path.chmod(mode)
    return flushed(path)


def _as_os_error(error: SafetensorError) -> Exception:
    """What the system refused, where that is what happened: safetensors says so in words alone."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else error


def parts_of(folder: Path, manifest: Manifest) -> Iterator[safe_open]:
    """The files of tensors of a folder, opened one after the other."""
    for entry in manifest.files:
        if entry.name.endswith(".safetensors"):
            with safe_open(folder / entry.name, framework="pt") as part:
                yield part


def read_whole(folder: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tensors of a full dump by name, float32, each put together from the shards of all ranks.

    Raises:
        UserError: when one is not there, or not all of it.
    """
    missing = {name: _size(manifest, name) for name in names}
    # Before memory is asked for that no file could fill.
    if 4 * sum(missing.values()) > sum(entry.bytes for entry in manifest.files):
        raise UserError(f"{folder} is no whole model: its tensors are larger than its files.")
    wholes = {name: torch.empty(manifest.tensors[name][0]) for name in names}
    for part in parts_of(folder, manifest):
        offsets = json.loads((part.metadata() or {}).get(OFFSETS_KEY, "{}"))
        for name in wholes.keys() & set(part.keys()):
            shard = part.get_tensor(name)
            begin = offsets[name]["saved_offsets"] if name in offsets else [0] * shard.dim()
            place = tuple(slice(first, first + size) for first, size in zip(begin, shard.shape, strict=True))
            # Refuses a shard that reaches beyond the whole; copy_ might spread it.
            wholes[name][place].view(shard.shape).copy_(shard)
            missing[name] -= shard.numel()
    for name, number in missing.items():
        if number:
            raise UserError(f"{folder} is no whole model: of {name} {abs(number):,} numbers are missing.")
    return wholes


def _size(manifest: Manifest, name: str) -> int:
    shape, dtype = manifest.tensors.get(name, ([], "nothing"))
    if dtype != "float32":
        raise UserError(f"A float32 tensor {name} is needed, and the model has {dtype}.")
    return int(np.prod(shape, dtype=np.int64))
