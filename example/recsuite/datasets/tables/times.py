"""A column of times, however it is written, as seconds since 1970 in UTC."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

import numpy as np

from recsuite.datasets.tables.values import (
    FAR_TIME,
    MISSING,
    NO_TIME,
    Parsed,
    cast,
    categories,
    numbers,
    plain,
)

if TYPE_CHECKING:
    import pyarrow

# The seconds at which the years 1 and 10000 begin.
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
# Whatever a pattern holds besides is read by Python, value by value: Arrow knows no zones and no fractions.
QUICK_PATTERN = set("YmdHMSyBbjTFD")


def times(column: pyarrow.Array, name: str, form: str) -> Parsed:
    """int64, seconds since 1970 in UTC; one that is missing is a fault.

    form: iso, unix, unix_ms or a pattern of strptime. A column of times is what it is, whatever the form; a
    time without a zone is one in UTC.
    """
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    column = plain(column, name)
    if types.is_date(column.type):
        column = column.cast(pyarrow.timestamp("s"))
    if types.is_timestamp(column.type):
        return _in_range(_seconds(column), np.zeros(len(column), np.int8))
    if form in ("unix", "unix_ms"):
        found = numbers(column, name)
        seconds = np.floor(found.values / 1000 if form == "unix_ms" else found.values)
        return _in_range(seconds, found.faults)
    # A year or 20201131, read as a number, is a text to a pattern.
    texts = categories(column, name).values.cast(pyarrow.string())
    texts = pc.utf8_trim_whitespace(texts)
    seconds = _iso(texts) if form == "iso" else _patterned(texts, form)
    faults = np.zeros(len(column), np.int8)
    faults[np.isnan(seconds) & ~texts.is_null().to_numpy(zero_copy_only=False)] = NO_TIME
    return _in_range(seconds, faults)


def _in_range(seconds: np.ndarray, faults: np.ndarray) -> Parsed:
    """Seconds, float64 with NaN, as int64."""
    # Of nothing but good ones, as they mostly are, it is known in a third of the time; NaN is not between.
    if not faults.any() and ((seconds >= FIRST_SECOND) & (seconds <= LAST_SECOND)).all():
        return Parsed(seconds.astype(np.int64), faults)
    faults[np.isnan(seconds) & (faults == 0)] = MISSING
    with np.errstate(invalid="ignore"):
        faults[(faults == 0) & ((seconds < FIRST_SECOND) | (seconds > LAST_SECOND))] = FAR_TIME
    return Parsed(np.where(faults == 0, seconds, 0).astype(np.int64), faults)


def _seconds(column: pyarrow.Array) -> np.ndarray:
    """Whole seconds, float64, NaN where a time is missing. A float holds the seconds of all years exactly."""
    import pyarrow

    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[column.type.unit]
    whole = column.cast(pyarrow.int64())
    is_missing = whole.is_null().to_numpy(zero_copy_only=False)
    ticks = whole.fill_null(0).to_numpy(zero_copy_only=False)
    return np.where(is_missing, np.nan, ticks // per_second)


def _iso(texts: pyarrow.Array) -> np.ndarray:
    """Seconds of texts such as 2026-11-20, 2026-11-20 10:00 and 2026-11-20T10:00:00.5+01:00."""
    import pyarrow
    import pyarrow.compute as pc

    try:
        return _seconds(texts.cast(pyarrow.timestamp("us")))
    except pyarrow.ArrowInvalid:
        pass
    # Seconds are whole below, and a fraction may have more digits than Arrow takes.
    texts = pc.replace_substring_regex(texts, r"(:\d\d)[.,]\d+", r"\1")
    has_zone = pc.match_substring_regex(texts, r":\d\d ?(Z|[-+]\d\d(:?\d\d)?)$")
    texts = pc.replace_substring_regex(texts, r" (Z|[-+]\d\d(:?\d\d)?)$", r"\1")
    pattern = r"^\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d)?)?)?(Z|[-+]\d\d(:?\d\d)?)?$"
    local, _ = cast(pc.if_else(has_zone, None, texts), pyarrow.timestamp("s"), pattern)
    zoned, _ = cast(pc.if_else(has_zone, texts, None), pyarrow.timestamp("s", "UTC"), pattern)
    first, second = _seconds(local), _seconds(zoned)
    return np.where(np.isnan(first), second, first)


def _patterned(texts: pyarrow.Array, pattern: str) -> np.ndarray:
    """Seconds of texts that a pattern of strptime describes; NaN where it does not."""
    import pyarrow.compute as pc

    directives = {part[:1] for part in pattern.replace("%%", "").split("%")[1:]}
    if directives <= QUICK_PATTERN:
        found = pc.strptime(texts, format=pattern, unit="s", error_is_null=True)
        # The 31 February becomes a day in March, which is not what was written.
        same = pc.fill_null(pc.equal(pc.strftime(found, format=pattern), texts), False)
        if same.true_count == len(texts) - texts.null_count:
            return _seconds(found)
    coded = texts.dictionary_encode()
    known = np.array([_by_python(text, pattern) for text in coded.dictionary.to_pylist()] + [np.nan])
    return known[coded.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False)]


def _by_python(text: str, pattern: str) -> float:
    try:
        found = datetime.strptime(text, pattern)
    except ValueError:
        return float("nan")
    zoned = found if found.tzinfo else found.replace(tzinfo=timezone.utc)
    return float(np.floor(zoned.timestamp()))
