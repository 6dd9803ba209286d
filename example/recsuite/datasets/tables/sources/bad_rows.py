"""The bad rows of a file: what is wrong with them, and what --bad_rows and --max_bad_rows make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recsuite.errors import UserError, counted, printable

# Of what a row holds.
MOST_SHOWN = 120


class BadRow(NamedTuple):
    """A row that cannot be read: the number of its line or row, counted from 1, what it holds, and why."""

    number: int
    content: str
    reason: str


@dataclass
class Faults:
    """The bad rows of a file: how many, and the first of them. unit: how rows are counted."""

    unit: str = "row"
    number: int = 0
    first: BadRow | None = None

    def add(self, rows: Sequence[BadRow], number: int) -> None:
        """Count some, of which these are known."""
        self.number += number
        self.first = min([*rows, *([self.first] if self.first else [])], default=None)

    def refuse(self, file: object) -> None:
        """Refuse the first of them, if there is one.

        Raises:
            UserError: names it, and says what helps.
        """
        if self.first:
            raise UserError(
                f"{self._described(file)}; mend the file, or give --bad_rows skip to leave such rows out."
            )

    def accepted(self, file: object, num_rows: int, most: float) -> list[str]:
        """What to say of them where they are left out of so many rows.

        Raises:
            UserError: where they are more than a share `most`.
        """
        if not self.first:
            return []
        if self.number > most * num_rows:
            raise UserError(
                f"{self._described(file)}; with it {self.number:,} of {num_rows:,} rows of the file cannot "
                f"be read, and --max_bad_rows {most:g} allows {int(most * num_rows):,}; mend the file, or "
                "give a larger one."
            )
        return [
            f"left out {counted(self.number, 'bad row')} of {Path(str(file)).name}, the first being "
            f"{self.unit} {self.first.number} ({self.first.reason})"
        ]

    def _described(self, file: object) -> str:
        """Which row is the first bad one, and why."""
        assert self.first is not None
        number, content, reason = self.first
        shown = f": {printable(content[:MOST_SHOWN])!r}" if content else ""
        return f"{file}, {self.unit} {number}: {reason}{shown}"
