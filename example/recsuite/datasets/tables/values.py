"""The columns to read of tables, by the roles that a schema gives them, and the parsing of their values.

Roles are ids, numbers, times, labels, lists and categories. The function of each takes an Arrow column of a
file, and returns its values and their faults, int8 [n], 0 for a good value. The values of faulty rows are
meaningless. Times of any format become seconds since 1970 in UTC.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas
import pyarrow
import pyarrow.compute as pc
from pyarrow import types

from recsuite.datasets.schema import CLICKS, COUNT, EVENT, ITEM, RATING, USER, YES_NO
from recsuite.datasets.tables.derived import SECONDS_PER_DAY, derived
from recsuite.datasets.tables.sections import (
    CATEGORY,
    DROP,
    EVENTS,
    ISO,
    ITEMS,
    LIST,
    NUMBER,
    UNITS,
    USERS,
    VECTOR,
    LabelColumn,
    TableSchema,
)
from recsuite.errors import UserError, printable

# Texts of the faults, after the column and the value in a message; `ColumnSpec.reason` adds the requirement.
FAULTS = (
    "",
    "is missing",
    "is not a number",
    "is not finite",
    "is not a whole number that a float holds exactly",
    "is not a time of the form",
    "is outside of the years 1 to 9999",
    "is outside of the scale",
    "is below zero",
    "is neither yes nor no",
    "is in another unit than",
    "is no label, as drop says",
    "is not a whole number of up to 18 digits",
    "is not a list of finite numbers of the length that schema.toml says,",
)
MISSING, NO_NUMBER, INFINITE, NOT_WHOLE, NO_TIME, FAR_TIME, OFF_SCALE, NEGATIVE, NO_ANSWER = range(1, 10)
OTHER_UNIT, DROPPED, NO_WHOLE, NO_VECTOR = 10, 11, 12, 13
# Texts that mean a missing value, for numbers, categories and ids.
NO_VALUE = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "null", "NULL", "NaN", "nan", "None", "\\N")
LONGEST_NO_VALUE = max(map(len, NO_VALUE))
YES, NO = ("1", "true", "yes", "1.0", "t", "y"), ("0", "false", "no", "0.0", "f", "n")
# The finite numbers.
LARGEST = -sys.float_info.max, sys.float_info.max
# From here on, a float cannot hold every whole number.
EXACT = 2.0**53
# Texts that Arrow casts to a float: the fault of a value must not depend on other values.
DECIMAL = r"^[-+]?((\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|(?i:inf|infinity|nan))$"
WHOLE_TEXT = r"^-?0*\d{1,18}$"
# Whole numbers, also written as floats (1.0). 007 and -0 are texts.
WHOLE_NUMBER = r"^(0|-?[1-9]\d{0,18})(\.0+)?$"
# Numbers with commas, by the key of [files] that lists their columns. A point is in the other place.
COMMAS = {
    "decimal_commas": r"^[-+]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?$",
    "grouping_commas": r"^[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?$",
}
# Largest share of a feature's numbers or dates that may be none, and count as missing.
MOST_UNREAD = 0.1
# Separator of the entries of a list in its text: no text has it by chance.
ENTRY = "\x1f"


class ParsedValues(NamedTuple):
    """Values [n], and their faults int8 [n]."""

    values: Any
    faults: np.ndarray


def plain(column: pyarrow.Array, name: str) -> pyarrow.Array:
    """Return a column as texts, whole numbers, floats, booleans, times or lists, independent of its storage.

    Raises:
        UserError: for a column of structures, maps or bytes that are no text.
    """
    kind = column.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        if getattr(kind, "extension_name", "") == "arrow.uuid":
            texts = [None if each is None else str(each) for each in column.to_pylist()]
            return pyarrow.array(texts, pyarrow.string())
        return plain(column.storage, name)
    if types.is_dictionary(kind):
        return plain(column.dictionary_decode(), name)
    if types.is_null(kind):
        return column.cast(pyarrow.string())
    try:
        if types.is_large_string(kind) or types.is_string_view(kind) or types.is_decimal(kind):
            return column.cast(pyarrow.string() if not types.is_decimal(kind) else pyarrow.float64())
        if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
            return column.cast(pyarrow.binary()).cast(pyarrow.string())
    except pyarrow.ArrowInvalid:
        raise UserError(f"The column {name!r} holds bytes that are no text; write it as text.") from None
    if types.is_struct(kind) or types.is_map(kind) or types.is_union(kind):
        raise UserError(f"The column {name!r} holds values with parts of their own; write each as a column.")
    return column


def categories(column: pyarrow.Array, name: str) -> ParsedValues:
    """Return texts or int64, or codes of such; a time outside of the years 1 to 9999 is a fault.

    Floats become whole numbers if all of them are whole; booleans become the texts true and false.
    """
    num_rows = len(column)
    if types.is_dictionary(column.type):
        if types.is_temporal(column.type.value_type):
            return categories(column.dictionary_decode(), name)
        column = _recoded(column, categories(column.dictionary, name).values)
        return ParsedValues(column, np.zeros(num_rows, np.int8))
    column, faults = plain(column, name), np.zeros(num_rows, np.int8)
    if types.is_list(column.type) or types.is_large_list(column.type):
        raise UserError(f"The column {name!r} holds lists, and is to be one value; name it a list.")
    if beyond_int64(column):
        column = column.cast(pyarrow.string())
    elif types.is_integer(column.type):
        column = column.cast(pyarrow.int64())
    elif types.is_floating(column.type):
        column = _texts_of_floats(column)
    # Texts of times, and of booleans as true and false.
    elif not types.is_string(column.type):
        faults, column = is_far(column) * np.int8(FAR_TIME), near(column)
        column = column.cast(pyarrow.string())
    # Texts of ids are mostly longer than all that mean a missing value, and lengths are compared quickly.
    if types.is_string(column.type) and (pc.min(pc.binary_length(column)).as_py() or 0) <= LONGEST_NO_VALUE:
        column = pc.if_else(pc.is_in(column, pyarrow.array(NO_VALUE)), None, column)
    return ParsedValues(column, faults)


def beyond_int64(column: pyarrow.Array) -> int:
    """Return the largest of unsigned numbers, or of the values of codes, if int64 cannot hold it; else 0."""
    values = column.dictionary if types.is_dictionary(column.type) else column
    if not types.is_unsigned_integer(values.type):
        return 0
    largest: int = pc.max(values).as_py() or 0
    return largest if largest >= 2**63 else 0


def indices_of(coded: pyarrow.DictionaryArray) -> np.ndarray:
    """Return the position of each row in the dictionary, int32 [n], -1 for a missing value."""
    indices = coded.indices.fill_null(-1) if coded.indices.null_count else coded.indices
    return indices.to_numpy(zero_copy_only=False)


def _recoded(column: pyarrow.Array, values: pyarrow.Array) -> pyarrow.Array:
    """Return codes of other values, of which some may be null; unused values are removed."""
    if values.null_count == 0:
        return pyarrow.DictionaryArray.from_arrays(column.indices.cast(pyarrow.int32()), values)
    positions = np.cumsum(values.is_valid().to_numpy(zero_copy_only=False)) - 1
    kept = pyarrow.array(positions.astype(np.int32), mask=values.is_null().to_numpy(zero_copy_only=False))
    return pyarrow.DictionaryArray.from_arrays(kept.take(column.indices), pc.drop_null(values))


def _texts_of_floats(column: pyarrow.Array) -> pyarrow.Array:
    """Return floats as int64 if all are whole; else as texts, each as short as possible."""
    numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
    is_whole = (np.floor(numbers) == numbers) & (np.abs(numbers) < EXACT)
    if bool((is_whole | np.isnan(numbers)).all()):
        return _as_int64(numbers, is_whole)
    # Arrow writes 1.0 as 1.
    return pc.if_else(pyarrow.array(np.isnan(numbers)), None, column.cast(pyarrow.string()))


def _as_int64(numbers: np.ndarray, is_whole: np.ndarray) -> pyarrow.Array:
    """Return floats as int64, null for those that are not whole."""
    return pyarrow.array(np.where(is_whole, numbers, 0).astype(np.int64), mask=~is_whole)


def ids(column: pyarrow.Array, name: str) -> ParsedValues:
    """Return texts or int64, or codes of such; a missing value and a float that is not whole are faults."""
    faults = np.zeros(len(column), np.int8)
    if not types.is_dictionary(column.type):
        column = plain(column, name)
    if types.is_floating(column.type):
        numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
        faults[(np.floor(numbers) != numbers) | (np.abs(numbers) >= EXACT)] = NOT_WHOLE
        faults[np.isnan(numbers)] = MISSING
        return ParsedValues(_as_int64(numbers, faults == 0), faults)
    values, faults = categories(column, name)
    if values.null_count:
        faults[values.is_null().to_numpy(zero_copy_only=False) & (faults == 0)] = MISSING
    return ParsedValues(values, faults)


def wholes(column: pyarrow.Array, name: str) -> ParsedValues:
    """Return int64 of texts, ids of other types; a missing value and a text that is no number are faults."""
    texts = plain(column, name)
    if not types.is_string(texts.type):
        return ids(texts, name)
    whole, faults = _cast(texts, pyarrow.int64(), WHOLE_TEXT, NO_WHOLE)
    values = whole.fill_null(0).to_numpy(zero_copy_only=False)
    faults[(values >= 10**18) | (values <= -(10**18))] = NO_WHOLE
    faults[whole.is_null().to_numpy(zero_copy_only=False) & (faults == 0)] = MISSING
    return ParsedValues(whole, faults)


def lists(column: pyarrow.Array, name: str, separator: str) -> ParsedValues:
    """Return lists, each as one text with ENTRY between its entries; faults as those of `categories`.

    separator: of the entries in a column of texts.
    """
    column = plain(column, name)
    kind = column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        texts, faults = categories(column, name)
        return ParsedValues(pc.replace_substring(texts.cast(pyarrow.string()), separator, ENTRY), faults)
    entries, faults_of_entries = categories(pc.list_flatten(column), name)
    entries, faults = entries.cast(pyarrow.string()), np.zeros(len(column), np.int8)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    np.maximum.at(faults, np.repeat(np.arange(len(column)), lengths), faults_of_entries)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    joined = pyarrow.ListArray.from_arrays(offsets, pc.fill_null(entries, ""))
    texts = pc.binary_join(joined, ENTRY)
    # A list without entries is a missing value, as in a text.
    return ParsedValues(pc.if_else(pc.equal(texts, ""), None, texts), faults)


def numbers(column: pyarrow.Array, name: str) -> ParsedValues:
    """Return float64, NaN for a missing number; a text that is no number, and infinity, are faults."""
    column = plain(column, name)
    faults = np.zeros(len(column), np.int8)
    if types.is_string(column.type):
        floats, faults = _cast(column, pyarrow.float64(), DECIMAL, NO_NUMBER)
    elif types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type):
        # Arrow cannot cast booleans to floats.
        floats = column.cast(pyarrow.int8()) if types.is_boolean(column.type) else column
        floats = floats.cast(pyarrow.float64(), safe=False)
    else:
        raise UserError(f"The column {name!r} holds values of the type {column.type}, and no numbers.")
    # A missing number becomes NaN.
    values = floats.to_numpy(zero_copy_only=False)
    if not _within(values, *LARGEST):
        faults[np.isinf(values)] = INFINITE
    return ParsedValues(values, faults)


def shortest(texts: pyarrow.Array) -> pyarrow.Array:
    """Return texts with whole numbers as such: 10.0, as pandas writes after a missing value, is 10."""
    return pc.replace_substring_regex(texts, WHOLE_NUMBER, r"\1")


def forms_with_commas(value: str) -> list[str]:
    """Return the keys of [files] by which a text with commas is a number."""
    return [form for form, pattern in COMMAS.items() if "," in value and re.match(pattern, value.strip())]


def with_points(column: pyarrow.Array, form: str) -> pyarrow.Array:
    """Return texts of numbers in one of the forms `COMMAS` without commas; other values are unchanged."""
    if not types.is_string(column.type):
        return column
    texts = pc.utf8_trim_whitespace(column)
    point, comma = (".", ",") if form == "decimal_commas" else (",", ".")
    plain_texts = pc.replace_substring(pc.replace_substring(texts, point, ""), comma, ".")
    return pc.if_else(pc.match_substring_regex(texts, COMMAS[form]), plain_texts, column)


def vectors(column: pyarrow.Array, name: str, length: int) -> ParsedValues:
    """Return float32 [n, length], NaN for a missing vector; any other list is a fault.

    A text is split at blanks, commas, semicolons and bars, without brackets around it.
    """
    column = plain(column, name)
    if types.is_string(column.type):
        texts = pc.utf8_trim(categories(column, name).values.cast(pyarrow.string()), "[]() ")
        column = pc.split_pattern_regex(pc.if_else(pc.equal(texts, ""), None, texts), r"[\s,;|]+")
    if not hasattr(column.type, "value_type"):
        raise UserError(
            f"The column {name!r} holds values of the type {column.type}, and no lists of numbers."
        )
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    entries, faults = numbers(pc.list_flatten(column), name), np.zeros(len(column), np.int8)
    # A number beyond 32 bits becomes infinite, and is a fault.
    with np.errstate(over="ignore"):
        flat = entries.values.astype(np.float32)
    is_wrong = ~np.isfinite(flat) | (entries.faults != 0)
    # An empty list is a missing vector.
    faults[(lengths != length) & (lengths > 0)] = NO_VECTOR
    faults[np.repeat(np.arange(len(column)), lengths)[is_wrong]] = NO_VECTOR
    matrix = np.full((len(column), length), np.nan, np.float32)
    matrix[lengths == length] = flat[np.repeat(lengths == length, lengths)].reshape(-1, length)
    return ParsedValues(matrix, faults)


def _within(values: np.ndarray, lowest: float, highest: float) -> bool:
    """True if all values are between two numbers, and none is NaN. Mostly, it saves a look at each value."""
    return not len(values) or bool(lowest <= values.min() and values.max() <= highest)


def _cast(texts: pyarrow.Array, kind: Any, pattern: str, fault: int) -> tuple[pyarrow.Array, np.ndarray]:
    """Cast texts to another type, null for a missing value; `fault` marks texts that are not of it."""
    # Arrow would read 0x1 as 1.
    raw, faults = bytes(texts.buffers()[2] or b""), np.zeros(len(texts), np.int8)
    if b"x" not in raw and b"X" not in raw:
        # Casting all at once takes a third of the time. On failure, Arrow does not say which one is wrong.
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return texts.cast(kind), faults
    texts = pc.utf8_trim_whitespace(texts)
    texts = shortest(pc.if_else(pc.is_in(texts, pyarrow.array(NO_VALUE)), None, texts))
    fits = pc.fill_null(pc.match_substring_regex(texts, pattern), True)
    faults[~fits.to_numpy(zero_copy_only=False)] = fault
    return pc.if_else(fits, texts, None).cast(kind), faults


def labels(column: pyarrow.Array, name: str, label: LabelColumn) -> ParsedValues:
    """Return float32: a rating within the ends of its scale, 0 or 1, or log(1 + count)."""
    assert label.kind != CLICKS
    column = plain(column, name)
    if label.kind == YES_NO and types.is_string(column.type):
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(column))
        is_yes, is_no = (pc.is_in(texts, pyarrow.array(words)) for words in (YES, NO))
        column = pc.if_else(is_yes, "1", pc.if_else(is_no, "0", column))
    as_numbers = numbers(column, name)
    values, faults = as_numbers.values, as_numbers.faults
    if label.kind == RATING and not label.drop and _within(values, label.lowest, label.highest):
        return ParsedValues(values.astype(np.float32), faults)
    is_dropped = dropped(values, label.drop)
    faults[np.isnan(values) & (faults == 0)] = MISSING
    is_fine = faults == 0
    if label.kind == YES_NO:
        faults[(is_fine & (values != 0) & (values != 1)) | (faults == NO_NUMBER)] = NO_ANSWER
    elif label.kind == COUNT:
        faults[is_fine & (values < 0)] = NEGATIVE
        values = np.log1p(np.where(faults == 0, values, 0))
    else:
        faults[is_fine & ((values < label.lowest) | (values > label.highest))] = OFF_SCALE
    faults[is_dropped] = DROPPED
    return ParsedValues(values.astype(np.float32), faults)


def dropped(values: np.ndarray, drop: str) -> np.ndarray:
    """Return a mask of the values that `LabelColumn.drop` names, bool [n]."""
    is_dropped = np.zeros(len(values), bool)
    for sign, number in DROP.findall(drop):
        number = float(number)
        is_dropped |= values < number if sign == "<" else values > number if sign == ">" else values == number
    return is_dropped


def weights(column: pyarrow.Array, name: str) -> ParsedValues:
    """Return float32, 0 or more; a missing value is a fault."""
    as_numbers = numbers(column, name)
    as_numbers.faults[np.isnan(as_numbers.values) & (as_numbers.faults == 0)] = MISSING
    as_numbers.faults[(as_numbers.faults == 0) & (as_numbers.values < 0)] = NEGATIVE
    return ParsedValues(as_numbers.values.astype(np.float32), as_numbers.faults)


# Seconds of the start of the years 1 and 10000.
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
# Numbers are likely times if they are of the years 1976 to 2103.
FIRST_LIKELY, LAST_LIKELY = 2e8, 4.2e9
FRACTION = r"(:\d\d)[.,]\d+"


def times(column: pyarrow.Array, name: str, form: str) -> ParsedValues:
    """Return int64, seconds since 1970 in UTC; a missing value is a fault.

    form: iso, one of UNITS or a pattern of strptime; ignored for a column of type time. A time without a zone
    is in UTC.
    """
    column = plain(column, name)
    if types.is_date(column.type) or types.is_timestamp(column.type):
        return _in_range(_seconds(column), np.zeros(len(column), np.int8))
    if form in UNITS:
        if types.is_signed_integer(column.type) and not column.null_count:
            stamps = ParsedValues(column.cast(pyarrow.int64()).to_numpy(), np.zeros(len(column), np.int8))
            seconds = stamps.values // UNITS[form]
        else:
            stamps = numbers(column, name)
            seconds = np.floor(stamps.values / UNITS[form])
        # Seconds read as milliseconds would be in January 1970.
        _mark_other_units(stamps, form)
        return _in_range(seconds, stamps.faults)
    # A pattern needs texts, also for numbers such as a year or 20201131.
    texts = pc.utf8_trim_whitespace(categories(column, name).values.cast(pyarrow.string()))
    coded = texts.dictionary_encode()
    known = _iso(coded.dictionary) if form == ISO else _patterned(coded.dictionary, form)
    seconds = np.append(known, np.nan)[coded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)]
    faults = np.zeros(len(column), np.int8)
    faults[np.isnan(seconds) & ~texts.is_null().to_numpy(zero_copy_only=False)] = NO_TIME
    return _in_range(seconds, faults)


def _mark_other_units(stamps: ParsedValues, form: str) -> None:
    """Mark numbers that are likely times in another unit than `form`."""
    values, faults = stamps
    least, most = (values.min(), values.max()) if len(values) else (0, 0)
    for name, ticks in UNITS.items():
        lowest, highest = FIRST_LIKELY * ticks, LAST_LIKELY * ticks
        # Both are false if a value is NaN.
        if name != form and not (most < lowest or least > highest):
            faults[(values >= lowest) & (values <= highest) & (faults == 0)] = OTHER_UNIT


def _in_range(seconds: np.ndarray, faults: np.ndarray) -> ParsedValues:
    """Return seconds, int64 or float64 with NaN, as int64."""
    if not faults.any() and _within(seconds, FIRST_SECOND, LAST_SECOND):
        return ParsedValues(seconds.astype(np.int64, copy=False), faults)
    faults[np.isnan(seconds) & (faults == 0)] = MISSING
    with np.errstate(invalid="ignore"):
        faults[(faults == 0) & ((seconds < FIRST_SECOND) | (seconds > LAST_SECOND))] = FAR_TIME
    return ParsedValues(np.where(faults == 0, seconds, 0).astype(np.int64), faults)


def _seconds(column: pyarrow.Array) -> np.ndarray:
    """Return whole seconds, float64, NaN for a missing time. A float holds them exactly in all years."""
    kind = column.type
    # Arrow would refuse to cast a date to a time that its unit cannot hold.
    whole = column.cast(pyarrow.int32() if types.is_date32(kind) else pyarrow.int64())
    is_missing = whole.is_null().to_numpy(zero_copy_only=False)
    ticks = whole.fill_null(0).to_numpy(zero_copy_only=False)
    if types.is_date32(kind):
        return np.where(is_missing, np.nan, ticks * float(SECONDS_PER_DAY))
    unit = "ms" if types.is_date64(kind) else kind.unit
    return np.where(is_missing, np.nan, ticks // {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit])


def is_far(column: pyarrow.Array, margin: int = 0) -> np.ndarray:
    """Return a mask of the times that are not within the years 1 to 9999, less a margin in seconds, bool [n].

    It is False for all values of other types.
    """
    if not (types.is_date(column.type) or types.is_timestamp(column.type)):
        return np.zeros(len(column), bool)
    seconds = _seconds(column)
    return (seconds < FIRST_SECOND + margin) | (seconds > LAST_SECOND - margin)


def near(column: pyarrow.Array, margin: int = 0) -> pyarrow.Array:
    """Return a column with null for the times of `is_far`, of which Python has no value."""
    far = is_far(column, margin)
    return pc.if_else(far, None, column) if far.any() else column


def shown_value(column: pyarrow.Array, place: int) -> str:
    """Return a value of a column for a message, with a blank after it; "" for a missing one."""
    try:
        value = column[place].as_py()
    except OverflowError:
        # A time of which Python has no value.
        one = column.slice(place, 1)
        one = one.dictionary_decode() if types.is_dictionary(one.type) else one
        ticks = pyarrow.int32() if types.is_date32(one.type) else pyarrow.int64()
        value = "" if types.is_nested(one.type) else f"{one.cast(ticks)[0]} as {one.type}"
    return "" if value is None or value == "" else f"{printable(value)[:60]!r} "


def _iso(texts: pyarrow.Array) -> np.ndarray:
    """Return the seconds of ISO texts, such as 20261120T100000Z; NaN for others."""
    # The usual form, which Arrow reads in a tenth of the time.
    with contextlib.suppress(pyarrow.ArrowInvalid):
        return _seconds(texts.cast(pyarrow.timestamp("us")))
    texts = pc.replace_substring_regex(texts, FRACTION, r"\1")
    texts = pc.replace_substring_regex(texts, r" ?(UTC|GMT|Z)$", "Z")
    # pandas also reads a year, a month and "now".
    is_iso = pc.match_substring_regex(texts, r"^\d{4}-?\d\d-?\d\d([T ]\d\d:?\d\d|$)")
    return _by_pandas(pc.if_else(is_iso, texts, None), "ISO8601")


def _patterned(texts: pyarrow.Array, pattern: str) -> np.ndarray:
    """Return the seconds of texts that match a pattern of strptime; NaN for others."""
    # Remove ".0" of numbers that were floats, and fractions of seconds.
    texts = pc.replace_substring_regex(texts, r"^(\d+)\.0$", r"\1")
    if not re.search("%S[.,]", pattern):
        texts = pc.replace_substring_regex(texts, FRACTION, r"\1")
    # Not by Arrow's strptime, which ended processes with SIGSEGV now and then.
    return _by_pandas(texts, pattern)


def _by_pandas(texts: pyarrow.Array, form: str) -> np.ndarray:
    """Return the seconds of texts, NaN for those that `pandas.to_datetime` does not read with a format."""
    try:
        stamps = pandas.to_datetime(
            pandas.Index(texts.to_numpy(zero_copy_only=False)), format=form, utc=True, errors="coerce"
        )
    # Values that do not fit are NaT. The error is of the format alone, such as one with both %Z and %z.
    except ValueError as error:
        raise UserError(f"Cannot read times with the format {form!r}: {error}. Fix: write another.") from None
    return np.where(stamps.isna(), np.nan, stamps.floor("s").as_unit("s").asi8)


ID, LABEL, WEIGHT, TIME, DATE = "id", "label", "weight", "time", "date"
# Kinds of the labels after the first; an event may lack them.
MORE_LABEL, MORE_WEIGHT = "more_label", "more_weight"
# Form of ids and categories that are whole numbers, also if stored as texts.
WHOLE = "whole"
# Types of the kinds that are stored as numbers; all others are codes of their distinct values.
DTYPES = {NUMBER: "<f8", DATE: "<f8", TIME: "<i8", VECTOR: "<f4"} | dict.fromkeys(
    (LABEL, WEIGHT, MORE_LABEL, MORE_WEIGHT), "<f4"
)
TABLE_OF = {USER: USERS, ITEM: ITEMS}


@dataclass(frozen=True)
class ColumnSpec:
    """Column of a file, and the way its values are stored.

    kind: id, category, list, number, vector, date, time, label, weight, more_label or more_weight. of: user,
    item or event. form: the format of times, the separator of a list, WHOLE, or one of COMMAS. length: of a
    vector.
    """

    column: str
    kind: str
    of: str
    form: str = ""
    label: LabelColumn | None = None
    length: int = 1

    @property
    def is_coded(self) -> bool:
        """True if it is stored as codes of its distinct values."""
        return self.kind not in DTYPES

    @property
    def dtype(self) -> np.dtype:
        """Type of the stored column."""
        one = np.dtype(DTYPES.get(self.kind, "<i4"))
        return np.dtype((one, (self.length,))) if self.kind == VECTOR else one

    def parse(self, column: pyarrow.Array) -> ParsedValues:
        """Return the values of a file's column, and their faults.

        Raises:
            UserError: for a column of a type that this kind cannot be made of.
        """
        if self.form in COMMAS:
            column = with_points(plain(column, self.column), self.form)
        if self.label:
            parsed_column = labels(column, self.column, self.label)
            return parsed_column if self.kind == LABEL else _with_gaps(parsed_column)
        if self.kind == MORE_WEIGHT:
            return _with_gaps(weights(column, self.column))
        if self.kind in (TIME, DATE):
            parsed_column = times(column, self.column, _form(self, column))
            return parsed_column if self.kind == TIME else _days(parsed_column)
        if self.kind == LIST:
            return lists(column, self.column, self.form)
        if self.kind == VECTOR:
            return vectors(column, self.column, self.length)
        if self.form == WHOLE:
            return wholes(column, self.column)
        of_kinds = {ID: ids, WEIGHT: weights, NUMBER: numbers}
        return of_kinds.get(self.kind, categories)(column, self.column)

    def reason(self, fault: int, column: pyarrow.Array, place: int) -> str:
        """Describe the fault of a value of a file's column, and the schema's requirement."""
        asked = ""
        if fault in (NO_NUMBER, NO_ANSWER) and (forms := forms_with_commas(str(column[place]))):
            asked = f", unless {' or '.join(forms)} under [files] of schema.toml lists its column"
        elif fault in (NO_TIME, OTHER_UNIT):
            form = _form(self, column)
            asked = f' "{form}"' if "%" in form else f" {form}"
        elif fault == OFF_SCALE and self.label:
            asked = f" from {self.label.lowest:g} to {self.label.highest:g}"
        elif fault == NO_VECTOR:
            asked = f" {self.length}"
        return FAULTS[fault] + asked


def _form(wanted: ColumnSpec, column: pyarrow.Array) -> str:
    """Return the format of times; dates are ISO, unless they are numbers in the timestamp's unit."""
    if wanted.kind == DATE and types.is_string(plain(column, wanted.column).type):
        return "iso"
    return wanted.form


def _days(dates: ParsedValues) -> ParsedValues:
    """Return days since 1970, float64, NaN for a missing date."""
    days = np.where(dates.faults == MISSING, np.nan, np.floor(dates.values / SECONDS_PER_DAY))
    return ParsedValues(days, np.where(dates.faults == MISSING, 0, dates.faults).astype(np.int8))


def _with_gaps(parsed_column: ParsedValues) -> ParsedValues:
    """Return values that an event may lack: NaN if one is missing, or if `drop` of its label names it."""
    lacks = (parsed_column.faults == MISSING) | (parsed_column.faults == DROPPED)
    return ParsedValues(
        np.where(lacks, np.float32(np.nan), parsed_column.values), np.where(lacks, 0, parsed_column.faults)
    )


def wanted_of(schema: TableSchema, columns: Mapping[str, Sequence[str]]) -> dict[str, tuple[ColumnSpec, ...]]:
    """Return the columns to read of the tables, by role; ids come first.

    columns: the columns of each existing table. A property of a user or an item is read from the table of
    users or items if it has the column, else from the events.
    """
    of_ids = [ColumnSpec(schema.user.column, ID, USER), ColumnSpec(schema.item.column, ID, ITEM)]
    by_role = {EVENTS: [*of_ids, *_of_events(schema)]}
    for entity, named in ((USER, schema.user), (ITEM, schema.item)):
        if TABLE_OF[entity] in columns:
            by_role[TABLE_OF[entity]] = [ColumnSpec(named.own_column, ID, entity)]
    for wanted in _properties(schema):
        own = TABLE_OF.get(wanted.of, EVENTS)
        table = own if wanted.column in columns.get(own, ()) else EVENTS
        by_role[table] += [] if wanted in by_role[table] else [wanted]
    return {role: tuple(typed(each, schema) for each in wanted) for role, wanted in by_role.items()}


def typed(wanted: ColumnSpec, schema: TableSchema) -> ColumnSpec:
    """Return a column with the form that [files] says of it."""
    if wanted.kind in (ID, CATEGORY) and wanted.column in schema.files.whole:
        return dataclasses.replace(wanted, form=WHOLE)
    if wanted.kind in (NUMBER, LABEL, WEIGHT, MORE_LABEL, MORE_WEIGHT):
        forms = (form for form in COMMAS if wanted.column in getattr(schema.files, form))
        return dataclasses.replace(wanted, form=next(forms, ""))
    return wanted


def wanted_of_label(label: LabelColumn) -> list[ColumnSpec]:
    """Return the column of a label after the first, and that of its weights if it has them."""
    weights_of = [ColumnSpec(label.weight, MORE_WEIGHT, EVENT)] if label.weight else []
    return [ColumnSpec(label.column, MORE_LABEL, EVENT, label=label), *weights_of]


def _of_events(schema: TableSchema) -> list[ColumnSpec]:
    specs = []
    if schema.label.column:
        specs.append(ColumnSpec(schema.label.column, LABEL, EVENT, label=schema.label))
    for label in schema.more_labels:
        specs += wanted_of_label(label)
    if schema.weight:
        specs.append(ColumnSpec(schema.weight.column, WEIGHT, EVENT))
    if schema.timestamp:
        specs.append(ColumnSpec(schema.timestamp.column, TIME, EVENT, schema.timestamp.format))
    if schema.events:
        specs.append(ColumnSpec(schema.events.type, CATEGORY, EVENT))
    return specs


def _properties(schema: TableSchema) -> list[ColumnSpec]:
    """Return the columns of features, of the dates of derived features, and of titles."""
    form = schema.timestamp.format if schema.timestamp else "iso"
    # The title may be the id, which is read as an id.
    has_titles = schema.item.title not in ("", schema.item.column, schema.item.own_column)
    specs = [ColumnSpec(schema.item.title, CATEGORY, ITEM)] if has_titles else []
    for feature in schema.features.values():
        call = derived(feature.column)
        if call is None:
            separator = feature.separator if feature.kind == LIST else ""
            length = feature.length
            specs.append(ColumnSpec(feature.column, feature.kind, feature.of, separator, length=length))
        elif call.is_text:
            specs.append(ColumnSpec(call.argument, CATEGORY, feature.of))
        elif call.of:
            specs.append(ColumnSpec(call.column, DATE, call.of, form))
    return specs
