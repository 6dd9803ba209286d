"""Dialects of CSV: a guess of the separator of the columns, and separators of several characters."""

from __future__ import annotations

import re

from recsuite.datasets.tables import formats
from recsuite.datasets.tables.formats import JOINT, LEAST_ALIKE, SNIFFED_ROWS, TextFile, rows_in, whole_lines

# Blanks come last: names and values contain them too.
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar", "::": "::", " ": "blanks"}


class Joined:
    """Text whose separators of several characters are replaced by one character."""

    def __init__(self, text: TextFile, mark: str) -> None:
        self._text, self._ready, self.closed = text, b"", False
        lines = whole_lines(text, formats.CSV_BLOCK_BYTES)
        self._blocks = (joined(block.decode(), mark).encode() for block in lines)

    @property
    def done(self) -> int:
        """Number of bytes of the file that were read."""
        return self._text.done

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes, none at the end."""
        self._ready = self._ready or next(self._blocks, b"")
        block, self._ready = self._ready[:size], self._ready[size:]
        return block

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self._text.close()


def joined(text: str, mark: str) -> str:
    """Return whole lines with a single character between their columns."""
    if mark == "::":
        return text.replace(mark, JOINT)
    text = re.sub("^[ \t]+|[ \t]+(?=\r?$)", "", text, flags=re.MULTILINE)
    if '"' not in text:
        return re.sub("[ \t]+", JOINT, text)
    # Blanks within quotes belong to a value.
    return re.sub('("[^"\n]*")|[ \t]+', lambda match: match[1] or JOINT, text)


def sniffed(head: str) -> str:
    """Guess the separator of the columns; blanks if there is no other.

    Candidates occur in most of the first rows as often as in the first row. The one with the most columns
    is taken.
    """
    # A row may have a megabyte; the last one may be incomplete.
    lines = head[: 2**20].lstrip("\r\n").split("\n", SNIFFED_ROWS)
    head = "\n".join(lines[: max(1, min(SNIFFED_ROWS, len(lines) - 1))])
    columns: dict[str, tuple[bool, int]] = {}
    for mark in NAMES:
        if mark == " " and any(number > 1 for _, number in columns.values()):
            continue
        counts = [len(row) for row in rows_in(head, mark)] or [0]
        columns[mark] = (counts.count(counts[0]) >= LEAST_ALIKE * len(counts) and counts[0] > 1, counts[0])
    return max(columns, key=lambda mark: columns[mark])
