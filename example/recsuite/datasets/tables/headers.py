"""First lines of texts: told from rows of data, and names for columns where no line has them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from recsuite.datasets.tables.guessing import Content, contents_of, is_constant
from recsuite.datasets.tables.schema_file import UNITS

VALUE = re.compile(r"\s*(?:[+-]?\d+\.?\d*(?:[eE][+-]?\d+)?|\d{4}-\d{2}-\d{2}.*)\s*")
# Rows whose columns are named.
NAMED_ROWS = 20_000
# A smaller number of seconds since 1970, of 1992, may as well be an id.
FIRST_SECONDS = 7e8
# Labels have at most so many distinct values, and none is above the highest.
MOST_GRADES, HIGHEST_GRADE = 11, 10
# With fewer distinct values, each in as many rows on average, a column holds kinds of things, not ids.
LEAST_IDS, ROWS_OF_A_KIND = 12, 10
# Several numbers in one value.
NUMBERS = re.compile(r"\d+(?:[\s,;|]+\d+)+")
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


def suggested(rows: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """Return names for the columns of rows that fit their values, and a sentence on those that are guesses.

    A column whose role its values do not tell is called column_N: training then asks for it.
    """
    table = pa.table(
        {f"column_{place}": [*column] for place, column in enumerate(zip(*rows, strict=True), 1)}
    )
    rest = {name: each for name, each in contents_of(table).items() if each.distinct > 1}
    # Which of several numbers is the time cannot be told: another one may be an id.
    texts = [name for name, each in rest.items() if each.is_time]
    times = texts or [name for name, each in rest.items() if _are_seconds(each)]
    names = {times[0]: "timestamp"} if texts or len(times) == 1 else {}
    rest = {name: each for name, each in rest.items() if name not in times}
    grades = [name for name, each in rest.items() if _are_grades(each)]
    ids = [name for name, each in rest.items() if name not in grades and _are_ids(each)]
    if len(ids) > 2:
        # Each row has its own value, as with the ids of events.
        ids = [name for name in ids if rest[name].distinct < rest[name].size]
    if len(ids) == 2:
        names |= dict(zip(ids, ("user", "item"), strict=True))
        grades = [name for name in grades if not any(is_constant(table, name, of) for of in ids)]
    # A scale of several values over yes and no.
    grades = [name for name in grades if rest[name].distinct > 2] or grades
    if len(grades) == 1:
        names[grades[0]] = "label" if {*rest[grades[0]].numbers} == {0, 1} else "rating"
    found = [names.get(name, name) for name in table.column_names]
    guesses = [name for name in found if name in ("user", "item", "rating", "label")]
    verb = "are guesses" if len(guesses) > 1 else "is a guess"
    by = f"{' and '.join(guesses)} {verb} by values and order, so exchange what is wrong"
    told = [by] if guesses else []
    told += ["the values do not tell which columns hold users and items: call these user and item"] * (
        len(ids) != 2
    )
    return found, "; ".join([*told, *["call a column to predict rating"] * (len(grades) != 1)])


def _are_seconds(content: Content) -> bool:
    """True for numbers that are likely times."""
    least = FIRST_SECONDS * UNITS.get(content.time_format, 0)
    return bool(content.time_format) and content.numbers.min(initial=math.inf) >= least


def _are_grades(content: Content) -> bool:
    numbers = np.abs(content.numbers)
    return 0 < content.distinct <= MOST_GRADES and bool(numbers.size) and numbers.max() <= HIGHEST_GRADE


def _are_ids(content: Content) -> bool:
    """True for texts and whole numbers, of which there are not only a few, and not several in a value."""
    is_few = content.distinct <= LEAST_IDS and content.distinct * ROWS_OF_A_KIND <= content.size
    is_list = 2 * sum(map(bool, map(NUMBERS.fullmatch, content.texts))) > content.distinct
    return not (is_few or is_list) and (content.kind == "text" or content.is_whole)
