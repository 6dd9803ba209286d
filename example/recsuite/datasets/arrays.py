"""Arrays of events in bounded memory: mapped from files, sorted, and written as records.

A page of a mapped array counts as memory of this process from its first access until it is released. So
loops over an array work by chunks and release each chunk at its end.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.datasets.columns import record_type
from recsuite.datasets.schema import RawData, with_columns

# Largest place, because places are int32.
MOST = 2**31 - 1
# Entries of a chunk. Its temporary arrays take a few tens of megabytes.
CHUNK = 2**20
# Entries of a block. A few arrays of this size fit into the cache of a core.
BLOCK = 2**14
# Arrays of at most so many bytes stay in memory: a first access to a page of a file costs as much as
# computing its content, and about twenty such arrays exist at once.
SMALL_BYTES = 3 * 2**24


def temporary(folder: Path, number: int, dtype: type | np.dtype[Any]) -> np.ndarray:
    """Return an array [number]; a large one is in an unnamed file of this folder.

    The file is gone when the array is no longer used, and also when the process is killed.

    Raises:
        OSError: when the disk has no room for it.
    """
    if number * np.dtype(dtype).itemsize <= SMALL_BYTES:
        return np.empty(number, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        # Without it, a write to a page when the disk is full would kill the process.
        os.posix_fallocate(file.fileno(), 0, number * np.dtype(dtype).itemsize)
        # As a plain array: each slice of a np.memmap costs a microsecond more.
        return np.asarray(np.memmap(file, dtype, "r+", shape=(number,)))


def create_column(path: Path, shape: tuple[int, ...], dtype: type | np.dtype[Any]) -> np.ndarray:
    """Create a .npy file with the format of np.save, and return it mapped for writing.

    Raises:
        OSError: when the disk has no room for it.
    """
    if 0 in shape:
        np.save(path, np.empty(shape, dtype))
        return np.empty(shape, dtype)
    column = np.asarray(np.lib.format.open_memmap(path, "w+", dtype, shape))
    with path.open("r+b") as file:
        # See `temporary`.
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return column


def chunks(number: int, *columns: np.ndarray) -> Iterator[slice]:
    """Yield slices of at most `CHUNK` that cover range(number). Release these columns after each of them."""
    for first in range(0, number, CHUNK):
        yield slice(first, min(number, first + CHUNK))
        release(*columns)


def blocks(part: slice) -> Iterator[slice]:
    """Yield slices of at most `BLOCK` that cover a slice, for work of several steps."""
    for first in range(part.start, part.stop, BLOCK):
        yield slice(first, min(part.stop, first + BLOCK))


def release(*columns: np.ndarray) -> None:
    """Release the pages of large mapped arrays. Arrays in memory are not changed.

    A later access gets the same values from the page cache or the disk.
    """
    for column in columns:
        mapping = _mapping_of(column)
        if mapping is not None and len(mapping) > SMALL_BYTES:
            mapping.madvise(mmap.MADV_DONTNEED)


def _mapping_of(column: Any) -> mmap.mmap | None:
    """Return the mapping of which an array is a view; None for an array in memory."""
    while column is not None and not isinstance(column, mmap.mmap):
        column = getattr(column, "base", None)
    return column


def gather(column: np.ndarray, places: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write `column[places]` to `out` and return it."""
    for part in chunks(len(places), places, out):
        out[part] = column[places[part]]
    # Only at the end: the places lie anywhere.
    release(column)
    return out


def writeable(column: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if it is read-only."""
    return column if column.flags.writeable else column.copy()


def keep(column: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return the marked entries, moved to the front of the array itself, or as a copy if it is read-only."""
    # A broadcast number takes no memory, and stays broadcast.
    if column.strides == (0,):
        return column[: int(marks.sum())]
    if not column.flags.writeable:
        return column[marks]
    end = 0
    for part in chunks(len(column), column):
        kept = column[part][marks[part]]
        column[end : end + len(kept)] = kept
        end += len(kept)
    return column[:end]


def only(raw: RawData, is_left: np.ndarray) -> RawData:
    """Return the data set with the marked events only."""
    return dataclasses.replace(
        raw,
        events=with_columns(raw.events, lambda column: keep(column, is_left)),
        official_test=None if raw.official_test is None else raw.official_test[is_left],
        official_validation=None if raw.official_validation is None else raw.official_validation[is_left],
        oracle=None if raw.oracle is None else raw.oracle[is_left],
        oracle_ranks=None if raw.oracle_ranks is None else raw.oracle_ranks[is_left],
        num_skipped=raw.num_skipped + int((~is_left).sum()),
    )


def counts_of(column: np.ndarray, number: int) -> np.ndarray:
    """Count of each of range(number) in a column, int64 [number]."""
    counts = np.zeros(number, np.int64)
    for part in chunks(len(column), column):
        counts += np.bincount(column[part], minlength=number)
    return counts


def highest(column: np.ndarray) -> int:
    """Largest entry; -1 for an empty column."""
    return max((int(column[part].max()) for part in chunks(len(column), column)), default=-1)


def where(marks: np.ndarray) -> np.ndarray:
    """Places of the marks that are true, int32, in order."""
    positions, end = np.empty(np.count_nonzero(marks), np.int32), 0
    for part in chunks(len(marks)):
        of_part = np.flatnonzero(marks[part])
        positions[end : end + len(of_part)] = of_part + part.start
        end += len(of_part)
    return positions


def sorted_places(*keys: np.ndarray) -> np.ndarray:
    """Places that sort the keys, int32 [n]: by the first key, ties by the next one, and so on. Stable.

    keys: int [n] each.
    """
    bits = max(0, len(keys[0]) - 1).bit_length()
    ends = [_ends_of(key) for key in keys]
    widths = [(highest - lowest).bit_length() for lowest, highest in ends]
    if sum(widths) + bits < 64:
        return _order_of(keys, [lowest for lowest, _ in ends], widths, bits)
    if len(keys) == 1:
        # For example very many times that span thousands of years.
        return np.argsort(keys[0], kind="stable").astype(np.int32)
    order = sorted_places(keys[-1])
    for key in reversed(keys[:-1]):
        order = order[sorted_places(key[order])]
    return order


def _order_of(
    keys: Sequence[np.ndarray], lowest: Sequence[int], widths: Sequence[int], bits: int
) -> np.ndarray:
    """Places in stable order of keys of these widths in bits, int32 [n]. Places take the last `bits` bits."""
    number = len(keys[0])
    # Keys and place in one number, so all numbers are distinct. numpy sorts them in place, without a
    # workspace, in a tenth of the time of a stable argsort.
    whole = np.empty(number + number % 2, np.int64)
    packed, places = whole[:number], whole.view(np.int32)
    for part in chunks(number, *keys):
        value = np.zeros(part.stop - part.start, np.int64)
        for key, low, width in zip(keys, lowest, widths, strict=True):
            value <<= width
            value |= key[part].astype(np.int64) - low
        packed[part] = value << bits | np.arange(part.start, part.stop)
    packed.sort()
    # Write to the front of the same memory, and free the other half: the write position never passes the read
    # position.
    for part in chunks(number):
        places[part] = packed[part] & (2**bits - 1)
    del packed, places
    whole.resize(len(whole) // 2, refcheck=False)
    return whole.view(np.int32)[:number]


def _ends_of(key: np.ndarray) -> tuple[int, int]:
    ends = [(int(key[part].min()), int(key[part].max())) for part in chunks(len(key), key)]
    return min((low for low, _ in ends), default=0), max((high for _, high in ends), default=0)


@dataclass
class FeatureArrays:
    """Features of users, items or events, an array for each feature. See `record_type`.

    features: table rows, int32 [n]; lists: places of lists, int32 [n, 2]; numbers: dense numbers,
    float32 [n].
    """

    features: list[np.ndarray] = field(default_factory=list)
    lists: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)


def write_records(path: Path, fields: Mapping[str, np.ndarray], own: FeatureArrays) -> None:
    """Write records of some fields, [n] each, and of their own features, block by block.

    Raises:
        OSError: when the disk has no room for them.
    """
    dtype = record_type(
        [(name, column.dtype) for name, column in fields.items()],
        *map(len, (own.features, own.lists, own.numbers)),
    )
    columns = [*fields.values(), *own.features, *own.lists, *own.numbers]
    records = create_column(path, (len(columns[0]),), dtype)
    for part in chunks(len(records), records, *columns):
        for block in blocks(part):
            for name, column in fields.items():
                records[name][block] = column[block]
            for name, of_features in vars(own).items():
                for place, column in enumerate(of_features):
                    records[name][block, place] = column[block]
