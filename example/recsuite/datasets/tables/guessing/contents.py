"""What a column of a sample holds: numbers, times, lists or texts. A text file's columns are all texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsuite.datasets.tables.description.validator import can_be_named
from recsuite.datasets.tables.values import NO_VALUE, plain
from recsuite.errors import UserError

TRUE, FALSE = ("true", "yes", "t", "y"), ("false", "no", "f", "n")
NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
# Numbers as they are written where the point stands between thousands.
DECIMAL_COMMA = r"^\s*[+-]?\d+(\.\d{3})*,\d{1,2}\s*$"
ISO = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?\s*(Z|[+-]\d{2}(:?\d{2})?)?)?$"
# Other ways to write times; of two that fit, the first.
PATTERNS = (
    *("%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d"),
    *("%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y"),
    *("%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y"),
    *("%d/%m/%Y %H:%M:%S", "%d/%m/%Y %H:%M", "%d/%m/%Y"),
    *("%d-%m-%Y %H:%M:%S", "%d-%m-%Y", "%m %d, %Y", "%b %d, %Y", "%a %b %d %H:%M:%S %z %Y"),
)
SECONDS, MILLISECONDS = (2e8, 4.2e9), (2e11, 4.2e12)
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
# Values that patterns of times are tried on, and that hours are read from.
TRIED, MOST_HOURS = 200, 2_000


@dataclass(frozen=True)
class Content:
    """What a column holds, where it holds anything.

    kind: "number", "comma" (numbers with a decimal comma), "flag" (true and false), "text", "time", "list" or
    "other". size: its values, missing ones
    aside; distinct: how many of these differ. numbers: float64, the finite ones of numbers and flags.
    texts: its distinct values as texts, in the order of their first places. time_format: how a timestamp is
    written, empty where it is none; of numbers too, which may be times. separator: between entries of lists
    in texts. codes: of a column of texts, see `encoded`.
    """

    name: str
    kind: str
    size: int
    distinct: int
    numbers: np.ndarray
    texts: tuple[str, ...] = ()
    time_format: str = ""
    separator: str = ""
    codes: np.ndarray | None = None

    @property
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
    column = column.drop_null()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return Content(name, "list", len(column), len(column), np.empty(0))
    if pa.types.is_boolean(kind):
        return _of_numbers(name, "flag", column)
    if pa.types.is_temporal(kind) and not (pa.types.is_time(kind) or pa.types.is_duration(kind)):
        texts = tuple(str(value) for value in pc.unique(column).to_pylist())
        return Content(name, "time", len(column), len(texts), np.empty(0), texts, "iso")
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _of_numbers(name, "number", column)
    return Content(name, "other", len(column), len(column), np.empty(0))


def encoded(column: pa.ChunkedArray) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column of texts as codes, int32 [n], -1 where a value is missing, and the texts that they count."""
    found = column.combine_chunks().dictionary_encode()
    places: dict[str, int] = {}
    table = [
        -1 if (text := each.strip()) in NOTHING else places.setdefault(text, len(places))
        for each in found.dictionary.to_pylist()
    ]
    rows = found.indices.fill_null(-1) if found.null_count else found.indices
    # The last is the place of -1.
    return np.array([*table, -1], np.int32)[rows.to_numpy(zero_copy_only=False)], tuple(places)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of a type holds texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _of_numbers(name: str, kind: str, column: pa.ChunkedArray) -> Content:
    # Of integers with 64 bits the distinct ones are counted before they become floats.
    texts = tuple(str(value) for value in pc.unique(column).to_pylist())
    return _numeric(name, kind, column.cast(pa.float64(), safe=False).to_numpy(), texts)


def _numeric(
    name: str, kind: str, numbers: np.ndarray, texts: tuple[str, ...], codes: np.ndarray | None = None
) -> Content:
    size, numbers = len(numbers), numbers[np.isfinite(numbers)]
    return Content(name, kind, size, len(texts), numbers, texts, _unix_of(numbers), codes=codes)


def _of_texts(name: str, column: pa.ChunkedArray) -> Content:
    # Each distinct value is looked at once, however many rows have it: there may be very many columns.
    codes, texts = encoded(column)
    size = int((codes >= 0).sum())
    counts, column = np.bincount(codes[codes >= 0], minlength=len(texts)), pa.array(texts, pa.string())
    if _may_be(texts, NUMBER) and _share(column, NUMBER, counts) >= 1 - MOST_DAMAGED:
        is_number = pc.match_substring_regex(column, NUMBER)
        numbers = pc.utf8_ltrim(pc.if_else(is_number, column, None), "+").cast(pa.float64())
        numbers = numbers.to_numpy(zero_copy_only=False)[codes[codes >= 0]]
        return _numeric(name, "number", numbers, texts, codes)
    if 0 < len(texts) < MOST_ANSWERS and {text.lower() for text in texts} <= {*TRUE, *FALSE}:
        numbers = np.array([text.lower() in TRUE for text in texts], np.float64)[codes[codes >= 0]]
        return Content(name, "flag", size, len(texts), numbers, texts, codes=codes)
    pattern = _pattern_of(column, texts)
    if pattern:
        return Content(name, "time", size, len(texts), np.empty(0), texts, pattern, codes=codes)
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


def _unix_of(numbers: np.ndarray) -> str:
    """The unit of numbers that may be times since 1970; empty where they may not."""
    for unit, (first, last) in (("unix", SECONDS), ("unix_ms", MILLISECONDS)):
        if numbers.size and first <= numbers.min() and numbers.max() <= last:
            return unit
    return ""


def _pattern_of(column: pa.ChunkedArray, texts: Sequence[str]) -> str:
    """How the times of a column of texts are written; empty where they are none."""
    if not texts:
        return ""
    if _share(column, ISO) >= 1 - MOST_DAMAGED:
        return "iso"
    tried = texts[:TRIED]
    return next((pattern for pattern in PATTERNS if all(_reads(text, pattern) for text in tried)), "")


def _reads(text: str, pattern: str) -> bool:
    try:
        datetime.strptime(text, pattern)
    except ValueError:
        return False
    return True


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
    """Whole hours since 1970, int64, of a column of times: of all of its numbers, or of its first texts."""
    if content.numbers.size:
        return (content.numbers // (3_600 if content.time_format == "unix" else 3_600_000)).astype(np.int64)
    read = [_hour_of(text, content.time_format) for text in content.texts[:MOST_HOURS]]
    return np.array([hour for hour in read if hour is not None], np.int64)


def _hour_of(text: str, pattern: str) -> int | None:
    try:
        # Python 3.10 does not know the Z.
        plain = text.replace("Z", "+00:00").replace(",", ".") if pattern == "iso" else text
        time = datetime.fromisoformat(plain) if pattern == "iso" else datetime.strptime(text, pattern)
    except ValueError:
        return None
    return int((time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp() // 3_600)
