"""The lists of an index as a file of an export, which a model does not need.

items.index holds the tensors of `Lists` as a safetensors file; the manifest names it with its digest, beside
the files that are needed. Where it is missing, damaged, or that of another model, an index is made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from recsuite.checkpoint.storage.manifest import Manifest
from recsuite.checkpoint.storage.shards import write_shard_file
from recsuite.errors import UserError, printable
from recsuite.files import FileEntry, check_file, plain, typed
from recsuite.runtime.console import say
from recsuite.serving.index.lists import Lists

# Not under a name by which readers of models know their files: those of before there were indexes pass it by.
FILE = "items.index"
# The place among what a manifest tells of.
INDEX = "index"
TENSORS = ("centres", "keys", "numbers", "prints")


@dataclass(frozen=True)
class Written:
    """What a manifest tells of an index: its file, and of its `Lists` what is no tensor."""

    file: FileEntry
    length: float
    made_of: int
    came: int


def write_lists(folder: Path, lists: Lists) -> dict[str, Any]:
    """Write lists into a folder, and wait until they are on the disk; returns what its manifest tells."""
    arrays = {name: getattr(lists, name).contiguous().numpy() for name in TENSORS}
    entry = write_shard_file(folder / FILE, arrays)
    return {INDEX: plain(Written(entry, lists.length, lists.made_of, lists.came))}


def read_lists(folder: Path, manifest: Manifest) -> Lists | None:
    """The lists that were written with a model; None where there are none, and where what is there is not
    what was written, which is said.
    """
    if INDEX not in manifest.about:
        return None
    try:
        return _read(folder, manifest.about[INDEX])
    except (UserError, OSError, SafetensorError, TypeError, ValueError) as error:
        say(f"{folder} has no index that can be used ({printable(error)}); one will be made anew")
        return None


def _read(folder: Path, told: Any) -> Lists:
    written: Written = typed(Written, told)
    check_file(folder, written.file)
    with safe_open(folder / written.file.name, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in TENSORS}
    lists = Lists(length=written.length, made_of=written.made_of, came=written.came, **tensors)
    _check(lists)
    return lists


def _check(lists: Lists) -> None:
    """Refuse lists that do not fit together: what is wrong in them would be memory of somebody else's."""
    keys, numbers = lists.keys, lists.numbers
    whole = [tensor.dtype == torch.int64 and tensor.ndim == 1 for tensor in (keys, numbers, lists.prints)]
    fits = (
        lists.centres.dtype == torch.float32
        and lists.centres.ndim == 2
        and min(lists.centres.shape) > 0
        and all(whole)
        and len(keys) == len(numbers) == len(lists.prints)
        and bool((keys[1:] > keys[:-1]).all())
        and bool(((numbers >= 0) & (numbers <= len(lists.centres))).all())
        and lists.length > 0
    )
    if not fits:
        raise ValueError("its lists do not fit together")
