"""What a column of a sample holds: numbers, times, lists or texts. A text file's columns are all texts."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsuite.datasets.tables.description.validator import can_be_named
from recsuite.datasets.tables.guessing import words
from recsuite.datasets.tables.times import forms_of, times
from recsuite.datasets.tables.values import NO_VALUE, plain
from recsuite.errors import UserError

TRUE, FALSE = ("true", "yes", "t", "y"), ("false", "no", "f", "n")
NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
# Numbers as they are written where the point stands between thousands.
DECIMAL_COMMA = r"^\s*[+-]?\d+(\.\d{3})*,\d{1,2}\s*$"
SEPARATORS = ("|", ";", ",")
NOTHING = {*NO_VALUE}
# Of the values of a column: how many may be damaged, and how many of a list have several entries.
MOST_DAMAGED, LEAST_SEVERAL = 0.01, 0.05
# Values with a decimal comma are no lists of two entries where so many are such.
LEAST_COMMAS = 0.9
# Texts with more characters on average are sentences, and so are entries of a list with more words.
LONG_TEXT, LONG_ENTRY = 40, 3
# Values of which one at least is of the form that nearly all are of; fewer than yes and no have spellings.
LOOKED_AT, MOST_ANSWERS = 5, 20
# What a name becomes a part of, as a date.
LONGEST_CALL = "age_days(user.)"
# Values that forms of times are tried on, and the share of times in a column whose name says that it is one.
TRIED, LEAST_TIMES = 200, 0.5


@dataclass(frozen=True)
class Content:
    """What a column holds, where it holds anything.

    kind: "number", "comma" (numbers with a decimal comma), "flag" (true and false), "text", "time", "list" or
    "other". size: its values, missing ones
    aside; distinct: how many of these differ. numbers: float64, the finite ones of numbers and flags.
    values: the distinct ones, in the order of their first places. time_format: how a timestamp is written,
    empty where it is none; of numbers too, which may be times. separator: between entries of lists in texts.
    codes: of a column of texts or numbers, see `encoded`.
    """

    name: str
    kind: str
    size: int
    distinct: int
    numbers: np.ndarray
    values: Sequence[object] = ()
    time_format: str = ""
    separator: str = ""
    codes: np.ndarray | None = None

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """Its distinct values as texts, in the order of their first places."""
        return tuple(map(str, self.values))

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether all of its numbers are whole."""
        return bool(self.numbers.size and np.all(self.numbers == np.floor(self.numbers)))

    @property
    def is_long(self) -> bool:
        """Whether its texts are sentences rather than names."""
        return self.kind == "text" and sum(map(len, self.texts)) > LONG_TEXT * max(1, len(self.texts))

    @property
    def is_time(self) -> bool:
        """Whether its values are times whatever the column is called."""
        return self.kind == "time"


def contents_of(table: pa.Table) -> dict[str, Content]:
    """What each column of a sample holds, of those whose names a schema can hold."""
    return {
        name: content_of(name, table[name])
        for name in table.column_names
        if can_be_named(f"{name}{LONGEST_CALL}") and name
    }


def plain_table(table: pa.Table) -> pa.Table:
    """A sample in which texts, numbers and UUIDs are what they are, however they are stored."""
    columns = [_plain(name, column) for name, column in zip(table.column_names, table.columns, strict=True)]
    return pa.table(columns, names=table.column_names)


def _plain(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        chunks = [plain(chunk, name) for chunk in column.chunks]
    # Bytes and structures stay what they are: no feature.
    except UserError:
        return column
    return pa.chunked_array(chunks) if chunks else column


def content_of(name: str, column: pa.ChunkedArray) -> Content:
    """What a column of a sample holds."""
    kind = column.type
    if is_text(kind):
        return _of_texts(name, column)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _of_numbers(name, "number", column)
    column = column.drop_null()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return Content(name, "list", len(column), len(column), np.empty(0))
    if pa.types.is_boolean(kind):
        return _of_numbers(name, "flag", column)
    if pa.types.is_temporal(kind) and not (pa.types.is_time(kind) or pa.types.is_duration(kind)):
        texts = tuple(str(value) for value in pc.unique(column).to_pylist())
        return Content(name, "time", len(column), len(texts), np.empty(0), texts, "iso")
    return Content(name, "other", len(column), len(column), np.empty(0))


def encoded(found: pa.DictionaryArray) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column of texts as codes, int32 [n], -1 where a value is missing, and the texts that they count."""
    places: dict[str, int] = {}
    table = [
        -1 if (text := each.strip()) in NOTHING else places.setdefault(text, len(places))
        for each in found.dictionary.to_pylist()
    ]
    # The last is the place of -1.
    return np.array([*table, -1], np.int32)[indices_of(found)], tuple(places)


def indices_of(found: pa.DictionaryArray) -> np.ndarray:
    """The place of each row in a dictionary, int32 [n], -1 where it has none."""
    rows = found.indices.fill_null(-1) if found.null_count else found.indices
    return rows.to_numpy(zero_copy_only=False)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of a type holds texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _of_numbers(name: str, kind: str, column: pa.ChunkedArray) -> Content:
    # Of integers with 64 bits the distinct ones are counted before they become floats.
    found = column.combine_chunks().dictionary_encode()
    numbers = found.dictionary.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return _numeric(name, kind, numbers, found.dictionary.to_pylist(), indices_of(found))


def _numeric(
    name: str, kind: str, numbers: np.ndarray, values: Sequence[object], codes: np.ndarray
) -> Content:
    """A column of numbers; numbers: float64, of each distinct value."""
    numbers = numbers[codes[codes >= 0]]
    finite, form = numbers[np.isfinite(numbers)], _time_format(name, values)
    return Content(name, kind, len(numbers), len(values), finite, values, form, codes=codes)


def _of_texts(name: str, column: pa.ChunkedArray) -> Content:
    # Each distinct value is looked at once, however many rows have it: there may be very many columns.
    found = column.combine_chunks().dictionary_encode()
    with contextlib.suppress(pa.ArrowInvalid):
        numbers = found.dictionary.cast(pa.float64()).to_numpy(zero_copy_only=False)
        # Most columns of numbers hold nothing else; NaN is a missing value.
        if len(numbers) and np.isfinite(numbers).all():
            return _numeric(name, "number", numbers, found.dictionary.to_pylist(), indices_of(found))
    codes, texts = encoded(found)
    size = int((codes >= 0).sum())
    counts, column = np.bincount(codes[codes >= 0], minlength=len(texts)), pa.array(texts, pa.string())
    if _may_be(texts, NUMBER) and _share(column, NUMBER, counts) >= 1 - MOST_DAMAGED:
        is_number = pc.match_substring_regex(column, NUMBER)
        numbers = pc.utf8_ltrim(pc.if_else(is_number, column, None), "+").cast(pa.float64())
        numbers = numbers.to_numpy(zero_copy_only=False)
        return _numeric(name, "number", numbers, texts, codes)
    if 0 < len(texts) < MOST_ANSWERS and {text.lower() for text in texts} <= {*TRUE, *FALSE}:
        numbers = np.array([text.lower() in TRUE for text in texts], np.float64)[codes[codes >= 0]]
        return Content(name, "flag", size, len(texts), numbers, texts, codes=codes)
    if form := _time_format(name, texts):
        return Content(name, "time", size, len(texts), np.empty(0), texts, form, codes=codes)
    if _may_be(texts, DECIMAL_COMMA) and _share(column, DECIMAL_COMMA, counts) >= LEAST_COMMAS:
        return Content(name, "comma", size, len(texts), np.empty(0), texts, codes=codes)
    separator = _separator_of(column, texts, counts)
    kind = "list" if separator else "text"
    return Content(name, kind, size, len(texts), np.empty(0), texts, "", separator, codes)


def _may_be(texts: Sequence[str], pattern: str) -> bool:
    """Whether one of the first values is of a form, as of those that nearly all are of."""
    return any(re.match(pattern, text) for text in texts[:LOOKED_AT])


def _share(column: pa.Array, pattern: str, counts: np.ndarray | None = None) -> float:
    """The share of values of a form; counts: of how many rows each is, int64 [n]."""
    matches = pc.match_substring_regex(column, pattern).to_numpy(zero_copy_only=False)
    return float(np.average(matches, weights=counts)) if len(matches) else 0.0


def _time_format(name: str, values: Sequence[object]) -> str:
    """How most values of a column are written as times; empty where they are none."""
    is_called = words.says_time(name)
    if not values or not (is_called or forms_of([*map(str, values[:2])])[0].name):
        return ""
    tried, least = [*map(str, some_of(values))], LEAST_TIMES if is_called else 1 - MOST_DAMAGED
    most = forms_of(tried)[0]
    return most.name if most.number >= least * len(tried) else ""


def some_of(values: Sequence[Any]) -> Sequence[Any]:
    """About so many values as forms of times are tried on, from everywhere."""
    return values[:: 1 + len(values) // TRIED]


def _separator_of(column: pa.Array, texts: Sequence[str], counts: np.ndarray) -> str:
    """What stands between the entries of lists, which are short and come again; empty without any."""
    for separator in SEPARATORS:
        if not any(separator in text for text in texts):
            continue
        several = _share(column, re.escape(separator), counts)
        entries = [entry.strip() for text in texts for entry in text.split(separator)]
        is_short = sum(len(entry.split()) for entry in entries) <= LONG_ENTRY * len(entries)
        # Parts of a sentence hardly ever come again.
        if several >= LEAST_SEVERAL and is_short and len({*entries}) <= len(entries) / 2:
            return separator
    return ""


def tells_time_of_day(content: Content) -> bool:
    """Whether times differ within a day, rather than only name days."""
    hours = np.unique(hours_of(content))
    num_days = len(np.unique(hours // 24))
    # A busy log may be of one hour; of its days a few may be damaged.
    return len(hours) > num_days or content.distinct > 2 * num_days > 0


def hours_of(content: Content) -> np.ndarray:
    """Whole hours since 1970, int64, of a column of times: of its distinct values."""
    seconds, faults = times(pa.array(content.texts, pa.string()), content.name, content.time_format)
    return seconds[faults == 0] // 3_600
