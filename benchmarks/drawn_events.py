"""Events that benchmarks draw and write: block by block, so that any number of them takes little memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_EVENTS = 2**20
# Of 2023.
FIRST_TIME = 1_672_531_200
DAY, YEAR = 86_400, 365 * 86_400


def blocks_of(number: int) -> Iterator[range]:
    """The places of so many events, block by block."""
    for first in range(0, number, BLOCK_EVENTS):
        yield range(first, min(first + BLOCK_EVENTS, number))


def skewed_ids(
    draw: np.random.Generator, num_users: int, num_items: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of users and of items, int64 [rows] each, some of which are popular."""
    # The square and the cube make them so.
    user = (num_users * draw.random(rows) ** 2).astype(np.int64)
    return user, (num_items * draw.random(rows) ** 3).astype(np.int64)


def write_parquet(path: Path, blocks: Iterable[Mapping[str, Any]]) -> None:
    """Write a table whose columns come block by block."""
    # Workers import this file too.
    import pyarrow
    from pyarrow import parquet

    with contextlib.ExitStack() as stack:
        writer = None
        for block in map(pyarrow.table, blocks):
            writer = writer or stack.enter_context(parquet.ParquetWriter(path, block.schema))
            writer.write_table(block)
