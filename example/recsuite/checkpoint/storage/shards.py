"""Shard files of tensors, in safetensors: their names, and writing, checking and reading them on one rank."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from recsuite.checkpoint.storage.dynamic import check_dynamic
from recsuite.checkpoint.storage.manifest import TYPES, Manifest
from recsuite.errors import UserError, printable
from recsuite.files import LARGEST, FileEntry, explained, flushed, parsed

# Key of the metadata where the reader of torch.distributed.checkpoint finds the offsets of a file's tensors
# in the whole ones; without it, it takes each for a whole tensor.
OFFSETS_KEY = "DCP_SHARDING_INFO"
# Type and number of dimensions of raw values, see `delta.py`.
ID_TYPES = (("int64", 1), ("float64", 1), ("uint8", 2))


def shard_file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"part-{rank + 1:05d}.safetensors"


def write_shard_file(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> FileEntry:
    """Write arrays into one file without copying them, and wait until it is on the disk."""
    # safetensors makes a file that only its owner can read, but a server may run as another user: the file
    # gets the mode that the user's umask gives to any new file.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(arrays, path, metadata=metadata)
    except SafetensorError as error:
        raise _as_os_error(error) from error
    path.chmod(mode)
    return flushed(path)


def _as_os_error(error: SafetensorError) -> Exception:
    """Return the OSError behind an error of safetensors, which has it only as text; else the same error."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else error


def shard_files_of(folder: Path, manifest: Manifest) -> Iterator[safe_open]:
    """Yield the shard files of a folder, opened one after the other."""
    for entry in _entries(manifest):
        with safe_open(folder / entry.name, framework="pt") as file:
            yield file


def _entries(manifest: Manifest) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.name.endswith(".safetensors")]


def read_whole(folder: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read tensors of a full checkpoint, float32, each put together from all ranks' shards.

    Call `check_shard_files` before: the headers are not checked here.

    Raises:
        UserError: when one is not there.
    """
    # Not initialized: `check_shard_files` has found every number of them in a shard.
    wholes = {name: torch.empty(shape_of(folder, manifest, name)) for name in names}
    for file in shard_files_of(folder, manifest):
        begins = _begins(folder, file)
        for name in wholes.keys() & begins.keys():
            shard = file.get_tensor(name)
            place = tuple(
                slice(first, first + size) for first, size in zip(begins[name], shard.shape, strict=True)
            )
            wholes[name][place] = shard
    return wholes


def shape_of(folder: Path, manifest: Manifest, name: str) -> list[int]:
    """Return the shape of a float32 tensor.

    Raises:
        UserError: when there is none of that name.
    """
    shape, dtype = manifest.tensors.get(name, ([], "nothing"))
    if dtype != "float32":
        raise UserError(f"A float32 tensor {name} is needed, and {folder} has {dtype}.")
    return shape


# --- headers of shard files, compared with the manifest ---


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise a UserError for errors of the system or of safetensors when reading a file."""
    try:
        with explained(f"{folder} cannot be read"):
            yield
    except SafetensorError as error:
        raise UserError(f"{folder} cannot be read ({printable(error)}).") from error


@dataclass(frozen=True)
class Piece:
    """Entry of a tensor in the header of a shard file. begin: its offsets in the whole tensor."""

    path: Path
    name: str
    shape: list[int]
    dtype: str
    begin: list[int]

    @property
    def end(self) -> list[int]:
        """End of the piece in the whole tensor."""
        return [first + size for first, size in zip(self.begin, self.shape, strict=True)]

    def meets(self, other: Piece) -> bool:
        """Return True if a number of the whole tensor is in both pieces."""
        sides = zip(self.begin, self.end, other.begin, other.end, strict=True)
        return all(max(first, begin) < min(last, end) for first, last, begin, end in sides)


def check_shard_files(folder: Path, manifest: Manifest) -> None:
    """Compare the headers of shard files with the manifest, after their bytes were checked.

    Checks names, types, shapes and offsets, and in a delta also the numbers of the changed rows.

    Raises:
        UserError: names the file, and what in it does not fit.
    """
    with reading(folder):
        pieces = check_dynamic(folder, manifest, list(_pieces(folder, manifest)))
        if manifest.link is None:
            _check_shards(folder, manifest, pieces)
        else:
            _check_changes(folder, manifest, pieces)


def _pieces(folder: Path, manifest: Manifest) -> Iterator[Piece]:
    for entry, file in zip(_entries(manifest), shard_files_of(folder, manifest), strict=True):
        for name, begin in _begins(folder / entry.name, file).items():
            # This reads the header of the file, not the tensor.
            header = file.get_slice(name)
            yield Piece(
                folder / entry.name, name, header.get_shape(), TYPES.get(header.get_dtype(), "no type"), begin
            )


def _begins(path: Path, file: safe_open) -> dict[str, list[int]]:
    """Return the offsets of each tensor of a shard file in the whole one."""
    dims = {name: len(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    text = (file.metadata() or {}).get(OFFSETS_KEY)
    # The files of deltas and exports hold whole tensors, and have no offsets.
    if not text:
        return {name: [0] * number for name, number in dims.items()}
    try:
        said = parsed(text.encode())
        begins = {name: said[name]["saved_offsets"] for name in dims}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} does not say where its tensors begin ({printable(error)}).") from None
    for name, begin in begins.items():
        if type(begin) is not list or len(begin) != dims[name] or not all(map(_is_place, begin)):
            raise UserError(
                f"{path} has {printable(name)} begin at {printable(begin)}, which is not a place in it."
            )
    return begins


def _is_place(value: Any) -> bool:
    # Not isinstance: in Python, True is an int.
    return type(value) is int and 0 <= value <= LARGEST


def _check_shards(folder: Path, manifest: Manifest, pieces: Sequence[Piece]) -> None:
    """Check that each number of every tensor in the manifest is there once, and no other tensor."""
    found: dict[str, list[Piece]] = {name: [] for name in manifest.tensors}
    for piece in pieces:
        shape, dtype = _wanted(manifest, piece)
        if len(piece.shape) != len(shape) or any(map(operator.gt, piece.end, shape)) or piece.dtype != dtype:
            raise _misfit(piece, f"of a {dtype} {shape}")
        found[piece.name].append(piece)
    for name, shards in found.items():
        missing = math.prod(manifest.tensors[name][0]) - sum(math.prod(shard.shape) for shard in shards)
        if missing > 0:
            raise UserError(f"{folder} is not a whole model: of {name} {missing:,} numbers are missing.")
        # Otherwise a number that is there twice would hide one that is missing.
        _check_apart(sorted(shards, key=lambda shard: shard.begin))


def _check_apart(shards: Sequence[Piece]) -> None:
    """Refuse a number of the whole tensor that two shards have. shards: sorted by their offsets."""
    # Each shard is compared only with the next ones until one begins after its end: with many ranks, not all
    # pairs are compared.
    for number, shard in enumerate(shards):
        for later in shards[number + 1 :]:
            if later.begin[:1] >= shard.end[:1]:
                break
            if shard.meets(later):
                raise _misfit(later, f"which {shard.path.name} has too")


def _wanted(manifest: Manifest, piece: Piece) -> tuple[list[int], str]:
    """Return shape and type of the whole tensor of a piece."""
    if piece.name not in manifest.tensors:
        raise _misfit(piece, "that its manifest does not name")
    return manifest.tensors[piece.name]


def _misfit(piece: Piece, wanted: str) -> UserError:
    held = f"{piece.dtype} {piece.shape} from {piece.begin} on for {printable(piece.name)}"
    return UserError(f"{piece.path} does not fit its manifest: it has {held}, {wanted}.")


def _check_changes(folder: Path, manifest: Manifest, pieces: Sequence[Piece]) -> None:
    """Check that each file has a row for every row number of each table, and one file the dense part."""
    files: dict[Path, dict[str, Piece]] = {folder / entry.name: {} for entry in _entries(manifest)}
    for piece in pieces:
        files[piece.path][piece.name] = piece
    tables = tables_of(manifest)
    for path, own in files.items():
        for table, slots in tables.items():
            _check_rows(path, table, slots, own)
    dense = [piece for own in files.values() for piece in own.values()]
    for piece in dense:
        # The pieces of tables were removed above, so any other piece with such a name is unknown.
        if piece.name.startswith("tables.") or (piece.shape, piece.dtype) != _wanted(manifest, piece):
            raise _misfit(piece, "which is not a part of it")
    names = sorted(piece.name for piece in dense)
    if names != sorted(name for name in manifest.tensors if not name.startswith("tables.")):
        raise UserError(f"{folder} has not every tensor of the dense part once, but {len(names)} of them.")
    _check_row_numbers(folder, manifest, tables)


def tables_of(manifest: Manifest) -> dict[str, dict[str, tuple[list[int], str]]]:
    """Return table to slot ("weight", "momentum1") to shape and type of the whole tensor."""
    found: dict[str, dict[str, tuple[list[int], str]]] = {}
    for name, tensor in manifest.tensors.items():
        if name.startswith("tables."):
            _, _, rest = name.partition(".")
            table, _, slot = rest.partition(".")
            found.setdefault(table, {})[slot] = tensor
    return found


def widths_in(manifest: Manifest) -> dict[str, int]:
    """Return the numbers in a row of each table; 0 if the shape is not that of a table."""
    weights = {name: slots["weight"] for name, slots in tables_of(manifest).items() if "weight" in slots}
    widths = {name: shape[1] if len(shape) == 2 else 0 for name, (shape, _) in weights.items()}
    return {**widths, **{name: record.embedding_dim for name, record in manifest.dynamic.items()}}


def _check_rows(
    path: Path, table: str, slots: dict[str, tuple[list[int], str]], own: dict[str, Piece]
) -> None:
    """Check the tensors of a table in a file against the manifest, and remove them from `own`."""
    found = {slot: own.pop(f"tables.{table}.{slot}", None) for slot in ("rows", "ids", *slots)}
    for slot, piece in found.items():
        if piece is None:
            raise UserError(f"{path} does not fit its manifest: it has no tables.{table}.{slot}.")
    rows, ids, *held = (piece for piece in found.values() if piece)
    if rows.dtype != "int64" or len(rows.shape) != 1:
        raise _misfit(rows, "and numbers of rows are int64 in one dimension")
    if (ids.dtype, len(ids.shape)) not in ID_TYPES or ids.shape[:1] != rows.shape:
        raise _misfit(ids, f"which are not raw values of {rows.shape[0]:,} rows")
    for piece, (shape, dtype) in zip(held, slots.values(), strict=True):
        if piece.shape != [*rows.shape, *shape[1:]] or not shape or piece.dtype != dtype:
            raise _misfit(piece, f"which are not {rows.shape[0]:,} rows of a {dtype} {shape}")


def _check_row_numbers(
    folder: Path, manifest: Manifest, tables: dict[str, dict[str, tuple[list[int], str]]]
) -> None:
    """Check that row numbers ascend in each file, are there once, and are within their table."""
    spans: dict[str, list[tuple[int, int]]] = {table: [] for table in tables}
    for entry, file in zip(_entries(manifest), shard_files_of(folder, manifest), strict=True):
        for table, slots in tables.items():
            rows = file.get_tensor(f"tables.{table}.rows")
            if not len(rows):
                # The delta has no changed row of this file's rank.
                continue
            first, last = int(rows[0]), int(rows[-1])
            most = min(shape[0] for shape, _ in slots.values())
            if first < 0 or last >= most or not bool((rows[1:] > rows[:-1]).all()):
                raise UserError(
                    f"{folder / entry.name} has rows of {table} that do not ascend from 0 to {most - 1:,}."
                )
            spans[table].append((first, last))
    # Each rank has a contiguous range of the rows of a table, so comparing the ranges is enough.
    for table, found in spans.items():
        for (_, last), (first, _) in itertools.pairwise(sorted(found)):
            if first <= last:
                raise UserError(f"{folder} has row {first:,} of {table} in two shard files.")
