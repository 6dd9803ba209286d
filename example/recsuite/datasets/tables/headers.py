"""First lines of texts: told from rows of data, and names for columns where no line has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from recsuite.datasets.tables.schema_file import UNITS
from recsuite.datasets.tables.values import NO_VALUE, forms_of

VALUE = re.compile(r"\s*(?:[+-]?\d+\.?\d*(?:[eE][+-]?\d+)?|\d{4}-\d{2}-\d{2}.*)\s*")
# Rows of which columns are named, and values on which forms of times are tried.
NAMED_ROWS, TRIED = 20_000, 200
# A smaller number of seconds since 1970, of 1992, may as well be an id.
FIRST_SECONDS = 7e8
LEAST_TIMES = 0.99
# Labels have at most so many distinct values, and none is above the highest.
MOST_GRADES, HIGHEST_GRADE = 11, 10
# With fewer distinct values, each in as many rows on average, a column holds kinds of things, not ids.
LEAST_IDS, ROWS_OF_A_KIND = 12, 10
# A property of an id has at most this share of its distinct values; least rows that show it.
MOST_OF_IDS, LEAST_AGAIN = 0.25, 5
# Several numbers in one value.
NUMBERS = re.compile(r"\d+(?:[\s,;|]+\d+)+")
# More rows than this tell the lengths of lines.
LEAST_ROWS = 3


def is_data(rows: Sequence[Sequence[str]]) -> bool:
    """True if the first row has numbers or times in the columns where the second has some: it is no header.

    A first row of texts is no header if most of them are values of the same columns below.
    """
    first, second = rows[0], rows[1] if len(rows) > 1 else rows[0]
    values = [bool(VALUE.fullmatch(field)) for field in first]
    numbers = [field for field, is_value in zip(first, values, strict=True) if is_value]
    if not numbers:
        below = [row for row in rows[1:] if row != first and len(row) == len(first)]
        again = [any(row[place] == field for row in below) for place, field in enumerate(first) if field]
        return sum(again) * 2 > len(again)
    # A header may have consecutive numbers beside names, for the columns of a vector or for years.
    if len(numbers) > 1 and not all(values) and all(field.isdecimal() for field in numbers):
        counted_on = [*range(int(numbers[0]), int(numbers[0]) + len(numbers))]
        if [int(field) for field in numbers] == counted_on:
            return False
    return len(numbers) == sum(map(bool, first)) or are_alike(first, second)


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
    columns = [[*map(str.strip, column)] for column in zip(*rows, strict=True)]
    distinct = [{*column} - {*NO_VALUE} for column in columns]
    numbers = [all(map(_is_number, values)) for values in distinct]
    names = {place: f"column_{place + 1}" for place in range(len(columns))}
    times = [place for place, values in enumerate(distinct) if _are_times([*values])]
    # A number in the range of times may be an id; a text that is a time is none.
    texts = [place for place in times if not numbers[place]]
    if texts or len(times) == 1:
        names[(texts or times)[0]] = "timestamp"
    varied = [place for place, values in enumerate(distinct) if len(values) > 1 and place not in texts]
    varied = [place for place in varied if names[place] != "timestamp"]
    grades = [place for place in varied if numbers[place] and _are_grades(distinct[place])]
    ids = [place for place in varied if place not in grades and _may_be_ids(columns[place], distinct[place])]
    if len(ids) > 2:
        # Each row has its own value, as with the ids of events.
        ids = [place for place in ids if len(distinct[place]) < len(rows)]
        ids = [place for place in ids if not any(_is_property(columns[place], columns[of]) for of in ids)]
    is_told = len(ids) == 2
    if is_told:
        names |= dict(zip(ids, ("user", "item"), strict=True))
        grades = [
            place for place in grades if not any(_is_property(columns[place], columns[of]) for of in ids)
        ]
    # A scale of several values over yes and no.
    found = [place for place in grades if len(distinct[place]) > 2] or grades
    if len(found) == 1:
        is_answer = {float(value) for value in distinct[found[0]]} == {0, 1}
        names[found[0]] = "label" if is_answer else "rating"
    told = "their values do not tell which columns hold users and items: call those user and item"
    if is_told:
        told = "user and item are guesses by their order: exchange them where they are the other way round"
    return [*names.values()], told + "; call a column to predict rating" * (len(found) != 1)


def _is_number(text: str) -> bool:
    try:
        return bool(float(text) or True)
    except ValueError:
        return False


def _are_times(values: Sequence[str]) -> bool:
    tried = values[:: 1 + len(values) // TRIED]
    if not tried:
        return False
    form = forms_of(tried)[0]
    if not form.name or form.number < LEAST_TIMES * len(tried):
        return False
    ticks = UNITS.get(form.name)
    return ticks is None or all(float(value) >= FIRST_SECONDS * ticks for value in tried if _is_number(value))


def _are_grades(values: set[str]) -> bool:
    return len(values) <= MOST_GRADES and max(abs(float(value)) for value in values) <= HIGHEST_GRADE


def _may_be_ids(column: Sequence[str], values: set[str]) -> bool:
    """True for texts and whole numbers, of which there are not only a few, and not several in a value."""
    is_few = len(values) <= LEAST_IDS and len(values) * ROWS_OF_A_KIND <= len(column)
    is_broken = any(_is_number(value) and float(value) % 1 != 0 for value in values)
    return not (is_few or is_broken) and 2 * sum(map(bool, map(NUMBERS.fullmatch, values))) <= len(values)


def _is_property(column: Sequence[str], ids: Sequence[str]) -> bool:
    """True if a column has one value for each id, and far fewer values than there are ids."""
    pairs = sorted({*zip(ids, column, strict=True)})
    num_ids = len({*ids})
    is_one = len(pairs) == num_ids and len(column) >= num_ids + LEAST_AGAIN
    return is_one and len({*column}) <= MOST_OF_IDS * num_ids
