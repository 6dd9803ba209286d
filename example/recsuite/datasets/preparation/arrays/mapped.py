"""Arrays with one entry an event, mapped from files where memory has no room for them.

A page of such an array counts as memory of this process from when it is touched until it is released, so
whoever goes through an array goes by chunks and releases what is behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Places are int32.
MOST = 2**31 - 1
# Entries that are gone through at once: their temporaries take a few tens of megabytes.
CHUNK = 2**20


def temporary(folder: Path, number: int, dtype: type | np.dtype[Any]) -> np.ndarray:
    """An array [number] in a file of this folder that has no name: it is gone when nothing uses the array any
    more, and also when the process is killed.

    Raises:
        OSError: when the disk has no room for it.
    """
    if number == 0:
        return np.empty(0, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        _reserve(file.fileno(), number * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "r+", shape=(number,))


def create_column(path: Path, shape: tuple[int, ...], dtype: type | np.dtype[Any]) -> np.ndarray:
    """A new .npy file with the bytes that np.save would write, mapped to be filled.

    Raises:
        OSError: when the disk has no room for it.
    """
    if 0 in shape:
        np.save(path, np.empty(shape, dtype))
        return np.empty(shape, dtype)
    column = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        _reserve(file.fileno(), path.stat().st_size)
    return column


def _reserve(descriptor: int, size: int) -> None:
    # Without it the process would be killed by the write to the first page that finds the disk full. macOS
    # does not have it.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def chunks(number: int, *columns: np.ndarray) -> Iterator[slice]:
    """Slices of at most `CHUNK` that cover range(number); releases these columns after each of them."""
    for first in range(0, number, CHUNK):
        yield slice(first, min(number, first + CHUNK))
        release(*columns)


def release(*columns: np.ndarray) -> None:
    """Let go of the pages of the mapped ones among these arrays: whoever touches them again gets the same
    values from the page cache or the disk. Does nothing to arrays in memory.
    """
    for column in columns:
        mapping = _mapping_of(column)
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def _mapping_of(column: Any) -> mmap.mmap | None:
    """The mapping that an array is a view of."""
    while column is not None and not isinstance(column, mmap.mmap):
        column = getattr(column, "base", None)
    return column


def gather(column: np.ndarray, places: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`column[places]` into `out`, which it returns."""
    for part in chunks(len(places), places, out):
        out[part] = column[places[part]]
    # Only now: the places lie anywhere.
    release(column)
    return out


def writeable(column: np.ndarray) -> np.ndarray:
    """The array, or a copy where it cannot be written."""
    return column if column.flags.writeable else column.copy()


def keep(column: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """The marked entries: moved to the front of the array itself, or a copy where it cannot be written."""
    # One number for all takes no memory, and stays so.
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


def counts_of(column: np.ndarray, number: int) -> np.ndarray:
    """How often each of range(number) is in a column, int64 [number]."""
    counts = np.zeros(number, np.int64)
    for part in chunks(len(column), column):
        counts += np.bincount(column[part], minlength=number)
    return counts


def highest(column: np.ndarray) -> int:
    """The largest entry; -1 where there is none."""
    return max((int(column[part].max()) for part in chunks(len(column), column)), default=-1)


def where(marks: np.ndarray) -> np.ndarray:
    """The places of the marks that are true, int32, in their order."""
    found = [np.flatnonzero(marks[part]).astype(np.int32) + part.start for part in chunks(len(marks))]
    return np.concatenate([np.empty(0, np.int32), *found])
