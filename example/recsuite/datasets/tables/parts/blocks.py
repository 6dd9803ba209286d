"""Long columns that are made block by block, and lie in memory or, where they are large, in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from recsuite.files import explained

BLOCK_ROWS = 2**20
# A column of more bytes is mapped from a file.
LARGE_BYTES = 2**26


def spans(number: int) -> Iterator[tuple[int, int]]:
    """Where blocks of so many rows begin, and how long each is."""
    for first in range(0, number, BLOCK_ROWS):
        yield first, min(BLOCK_ROWS, number - first)


def gathered(blocks: Iterable[np.ndarray], number: int, dtype: str, folder: Path) -> np.ndarray:
    """All blocks as one column of so many rows.

    A large one is written to a file in the folder, which has no name any more when this returns: the space is
    free again when nothing holds the column.

    Raises:
        UserError: when the disk is full.
    """
    kind = np.dtype(dtype)
    if number * kind.itemsize <= LARGE_BYTES:
        column, first = np.empty(number, kind), 0
        for block in blocks:
            column[first : first + len(block)] = block
            first += len(block)
        assert first == number
        return column
    path = folder / "column.bin"
    with explained(f"The columns cannot be written to {folder}", "make room there, or give --cache_dir"):
        # Written, not filled in through a map: its pages would count as memory of this process.
        with path.open("wb") as file:
            for block in blocks:
                file.write(block.astype(kind, copy=False).tobytes())
        mapped = np.memmap(path, kind, "r+", shape=(number,))
        path.unlink()
    return mapped
