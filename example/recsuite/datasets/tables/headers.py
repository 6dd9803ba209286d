"""First lines of texts, told from rows of data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

VALUE = re.compile(r"\s*(?:[+-]?\d+\.?\d*(?:[eE][+-]?\d+)?|\d{4}-\d{2}-\d{2}.*)\s*")
# Rows whose columns are named.
NAMED_ROWS = 20_000
# More rows than this tell the lengths of lines.
LEAST_ROWS = 3


def is_data(first: Sequence[str], second: Sequence[str]) -> bool:
    """True if the first row has numbers or times in the same columns as the second: it is no header."""
    values = [bool(VALUE.fullmatch(field)) for field in first]
    numbers = [field for field, is_value in zip(first, values, strict=True) if is_value]
    # A header may have consecutive numbers beside names, for the columns of a vector or for years.
    if len(numbers) > 1 and not all(values) and all(field.isdecimal() for field in numbers):
        counted_on = [*range(int(numbers[0]), int(numbers[0]) + len(numbers))]
        if [int(field) for field in numbers] == counted_on:
            return False
    return bool(numbers) and (len(numbers) == sum(map(bool, first)) or are_alike(first, second or first))


def are_alike(first: Sequence[str], second: Sequence[str]) -> bool:
    """True for rows with as many fields and numbers or times in the same columns; a field may be missing."""
    pairs = [*zip(first, second, strict=False)]
    known = [(bool(VALUE.fullmatch(a)), bool(VALUE.fullmatch(b))) for a, b in pairs if a and b]
    return len(first) == len(second) and all(a == b for a, b in known)


def lengths(rows: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """Return the least and most fields of rows of which no half has as many fields; else None."""
    counts = Counter(map(len, rows))
    is_ragged = len(rows) > LEAST_ROWS and max(counts.values()) * 2 <= len(rows)
    return (min(counts), max(counts)) if is_ragged else None
