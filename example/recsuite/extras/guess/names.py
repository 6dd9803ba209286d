"""Names for the columns of a file without a header, by their values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from recsuite.datasets.tables.sections import UNITS
from recsuite.extras.guess.guessing import Content, contents_of, is_constant

# A smaller number of seconds since 1970, of 1992, may as well be an id.
FIRST_SECONDS = 7e8
# Labels have at most so many distinct values, and none is above the highest.
MOST_GRADES, HIGHEST_GRADE = 11, 10
# With fewer distinct values, each in as many rows on average, a column holds kinds of things, not ids.
LEAST_IDS, ROWS_OF_A_KIND = 12, 10
# Several numbers in one value.
NUMBERS = re.compile(r"\d+(?:[\s,;|]+\d+)+")


def suggested(rows: Sequence[Sequence[str]]) -> tuple[list[str], str]:
    """Return names for the columns of rows that fit their values, and a sentence on those that are guesses.

    A column whose role its values do not tell is called column_N: training then asks for it.
    """
    table = pa.table(
        {f"column_{place}": [*column] for place, column in enumerate(zip(*rows, strict=True), 1)}
    )
    rest = {name: content for name, content in contents_of(table).items() if content.distinct > 1}
    # Which of several numbers is the time cannot be told: another one may be an id.
    texts = [name for name, content in rest.items() if content.is_time]
    times = texts or [name for name, content in rest.items() if _are_seconds(content)]
    names = {times[0]: "timestamp"} if texts or len(times) == 1 else {}
    rest = {name: content for name, content in rest.items() if name not in times}
    grades = [name for name, content in rest.items() if _are_grades(content)]
    ids = [name for name, content in rest.items() if name not in grades and _are_ids(content)]
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
    column_names = [names.get(name, name) for name in table.column_names]
    guesses = [name for name in column_names if name in ("user", "item", "rating", "label")]
    verb = "are guesses" if len(guesses) > 1 else "is a guess"
    by = f"{' and '.join(guesses)} {verb} by values and order, so exchange what is wrong"
    told = [by] if guesses else []
    told += ["the values do not tell which columns hold users and items: call these user and item"] * (
        len(ids) != 2
    )
    return column_names, "; ".join([*told, *["call a column to predict rating"] * (len(grades) != 1)])


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
