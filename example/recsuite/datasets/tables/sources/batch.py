"""What every reader of a file gives: batches of rows, and where each row stands in the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow

    from recsuite.datasets.tables.sources.file import File


@dataclass(frozen=True)
class Batch:
    """Rows of a file, in their order.

    first: how many rows came before. num_bad: how many rows of the file could not be split so far. lines:
    where each stands, int64; None where that is asked for only when a row is bad.
    """

    columns: pyarrow.RecordBatch
    first: int
    num_bad: int = 0
    lines: np.ndarray | None = None


class Source:
    """One file that is read: its columns, then batches of those that are wanted.

    bad: the rows that could not be split into columns, in their order; it grows with the batches.
    """

    # How messages count: an editor shows lines, the other formats have none.
    unit = "row"

    def __init__(self, file: File) -> None:
        self.file = file
        self.bad: list[BadRow] = []
        self.notes: list[str] = []

    @property
    def names(self) -> list[str]:
        """The columns of the file itself."""
        raise NotImplementedError

    @property
    def done(self) -> int:
        """How many of its bytes were read."""
        raise NotImplementedError

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """The rows, with these columns of the file alone."""
        raise NotImplementedError

    def number_of(self, batch: Batch, place: int) -> int:
        """The line or row, counted from 1, at a place of a batch."""
        return batch.first + place + 1 if batch.lines is None else int(batch.lines[place])

    def close(self) -> None:
        """End it."""


def check_names(file: File, names: Sequence[str]) -> None:
    """Refuse columns that cannot be told apart.

    Raises:
        UserError: names the first that is there twice, or has no name at all.
    """
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise UserError(f"{file} has two columns with the name {twice!r}; rename one of them.")
