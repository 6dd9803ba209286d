"""Dialects of CSV: a guess of the separator of the columns."""

from __future__ import annotations

from recsuite.datasets.tables.formats import LEAST_ALIKE, SNIFFED_ROWS, rows_in

# Blanks come last: names and values contain them too.
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar", "::": "::", " ": "blanks"}


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
