"""Times, however they are written: the forms of some values, and columns as seconds since 1970 in UTC."""

from __future__ import annotations

import calendar
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsuite.datasets.tables.schema_file import ISO, UNITS
from recsuite.datasets.tables.values import (
    FAR_TIME,
    MISSING,
    NO_TIME,
    OTHER_UNIT,
    Parsed,
    categories,
    numbers,
    plain,
)

if TYPE_CHECKING:
    import pyarrow

# The seconds at which the years 1 and 10000 begin.
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
# Numbers that are taken for times are of the years 1976 to 2103.
FIRST_LIKELY, LAST_LIKELY = 2e8, 4.2e9
SECONDS_PER_DAY = 86_400
# Whatever a pattern holds besides is read by Python, value by value: Arrow knows no zones and no fractions.
QUICK_PATTERN = set("YmdHMSyBbjTFDIp")
FRACTION = r"(:\d\d)[.,]\d+"
# The parts of a time in a text: the time of the day with AM or PM and a zone, words, and digits.
PART = re.compile(
    r"(?<!\d)\d{1,2}:\d\d(?P<second>:\d\d)?(?P<half> ?[AaPp][Mm]\b)?(?P<zone> ?([+-]\d\d:?\d\d|Z)\b)?"
    r"|(?P<word>[A-Za-z]+)|(?P<digits>\d+)|[%{}]"
)
# What digits are in a pattern, by their number; one or two may be several things.
DIGITS = {1: "{}", 2: "{}", 4: "%Y", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
NAMES = (
    *(("%B", calendar.month_name), ("%b", calendar.month_abbr)),
    *(("%A", calendar.day_name), ("%a", calendar.day_abbr)),
)
# May is the short name.
WORDS = {name: directive for directive, names in NAMES for name in names if name}


class Form(NamedTuple):
    """A form in which texts are written as times; the name is empty for those that are none.

    number: how many texts have it. example: one of them. other: another form that reads as many of them, as
    other times.
    """

    name: str
    number: int
    example: str
    other: str = ""


def forms_of(texts: Sequence[str]) -> list[Form]:
    """The forms in which texts are written as times, the most frequent one first."""
    # Of very many columns most hold numbers that no time could be.
    if texts and not any(map(_candidates, texts)):
        return [Form("", len(texts), texts[0])]
    found, unread = [], []
    while texts:
        form, is_read = _form_of_first(texts)
        if form.name:
            found.append(form)
        else:
            unread.append(texts[0])
        texts = [text for text, done in zip(texts, is_read, strict=True) if not done]
    found += [Form("", len(unread), unread[0])] if unread else []
    return sorted(found, key=lambda form: -form.number)


def _form_of_first(texts: Sequence[str]) -> tuple[Form, np.ndarray]:
    """The form of the first text that reads most of all texts, and which it reads: bool [n]."""
    import pyarrow

    read = {}
    for name in _candidates(texts[0]):
        seconds, faults = times(pyarrow.array(texts, pyarrow.string()), "", name)
        if faults[0] == 0:
            # Of two forms the one in the past: an event is not known before it happens.
            is_past = seconds < time.time() + SECONDS_PER_DAY
            read[name] = (
                (int((faults == 0).sum()), int((is_past & (faults == 0)).sum())),
                seconds,
                faults == 0,
            )
    if not read:
        return Form("", 1, texts[0]), np.arange(len(texts)) == 0
    # The first of several that are as good.
    best = max(read, key=lambda name: read[name][0])
    # Digits alone that are a date are no number, however likely.
    equal = (name for name in read if read[name][0] == read[best][0] and name not in UNITS)
    other = next((name for name in equal if not np.array_equal(read[name][1], read[best][1])), "")
    return Form(best, read[best][0][0], texts[0], other), read[best][2]


def _candidates(text: str) -> list[str]:
    """The forms that a text may have, the likeliest first."""
    try:
        number = abs(float(text))
    except ValueError:
        return [*([ISO] if text[:4].isdigit() else []), *_patterns(text)]
    whole = text.removesuffix(".0")
    pattern = [DIGITS[len(whole)]] if whole.isdigit() and len(whole) >= 8 and len(whole) in DIGITS else []
    units = [name for name, ticks in UNITS.items() if FIRST_LIKELY * ticks <= number <= LAST_LIKELY * ticks]
    return pattern + units


def _patterns(text: str) -> Iterator[str]:
    """The patterns of strptime that a text may have."""
    form = PART.sub(_meaning, re.sub(FRACTION, r"\1", text))
    if "\0" in form:
        return
    year, has_month = form.find("%Y"), "%b" in form.lower()
    options: tuple[str, ...]
    if "{}" not in form:
        options = ("",)
    elif year < 0:
        options = ("%d %y",) if has_month else ("%m %d %y", "%d %m %y", "%y %m %d")
    elif has_month:
        options = ("%d",)
    else:
        # Behind a year the month comes first.
        options = ("%m %d", "%d %m") if year > form.find("{}") else ("%m %d", "%m %d %H %M %S")
    for option in options:
        parts = option.split()
        if len(parts) == form.count("{}"):
            pattern = form.format(*parts)
            directives = re.findall("%.", pattern)
            if "%d" in directives and len({*directives}) == len(directives):
                # May is the short and the long name of a month.
                yield from dict.fromkeys([pattern, pattern.replace("%b", "%B")])


def _meaning(part: re.Match[str]) -> str:
    """What a part of a text is in a pattern; NUL where it is no part of a time."""
    if part["digits"]:
        return DIGITS.get(len(part["digits"]), "\0")
    if word := part["word"]:
        return word if word in ("T", "UTC", "GMT") else WORDS.get(word.capitalize(), "\0")
    if ":" not in part[0]:
        return "\0"
    clock = ("%I:%M" if part["half"] else "%H:%M") + ":%S" * bool(part["second"])
    return clock + re.sub(r"\w+", "%p", part["half"] or "") + re.sub(r"[-+Z].*", "%z", part["zone"] or "")


def times(column: pyarrow.Array, name: str, form: str) -> Parsed:
    """int64, seconds since 1970 in UTC; one that is missing is a fault.

    form: iso, one of UNITS or a pattern of strptime. A column of times is what it is, whatever the form; a
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
    if form in UNITS:
        found = numbers(column, name)
        # Seconds, read as milliseconds, would be in January 1970.
        found.faults[_has_other_unit(found.values, form) & (found.faults == 0)] = OTHER_UNIT
        return _in_range(np.floor(found.values / UNITS[form]), found.faults)
    # A year or 20201131, read as a number, is a text to a pattern.
    texts = pc.utf8_trim_whitespace(categories(column, name).values.cast(pyarrow.string()))
    coded = texts.dictionary_encode()
    known = _iso(coded.dictionary) if form == ISO else _patterned(coded.dictionary, form)
    seconds = np.append(known, np.nan)[coded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)]
    faults = np.zeros(len(column), np.int8)
    faults[np.isnan(seconds) & ~texts.is_null().to_numpy(zero_copy_only=False)] = NO_TIME
    return _in_range(seconds, faults)


def _has_other_unit(values: np.ndarray, form: str) -> np.ndarray:
    """Whether numbers are likely times in another unit, bool [n]."""
    found = np.zeros(len(values), bool)
    for name, ticks in UNITS.items():
        if name != form:
            found |= (values >= FIRST_LIKELY * ticks) & (values <= LAST_LIKELY * ticks)
    return found


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
    """Seconds of texts such as 2026-11-20, 2026-11-20 10:00 UTC, 2026-11-20T10:00:00.5+01:00 and
    20261120T100000Z; NaN for others.
    """
    import pyarrow
    import pyarrow.compute as pc

    # The usual ways, which Arrow reads at once.
    for zone in (None, "UTC", "UTC"):
        try:
            return _seconds(texts.cast(pyarrow.timestamp("us", zone)))
        except pyarrow.ArrowInvalid:
            texts = pc.replace_substring_regex(texts, r" ?(UTC|GMT|Z)$", "Z") if zone else texts
    for pattern, plain_form in (
        # Seconds are whole below, and a fraction may have any number of digits.
        (FRACTION, r"\1"),
        (r"^(\d{4})(\d\d)(\d\d)($|[T ])", r"\1-\2-\3\4"),
        (r"([T ]\d\d)(\d\d)(\d\d)($|[-+Z ])", r"\1:\2:\3\4"),
        (r"([T ]\d\d)(\d\d)($|[-+Z ])", r"\1:\2\3"),
        # Python 3.10 knows no other zones than these.
        ("Z$", "+00:00"),
        (r"(:\d\d) ?([-+]\d\d):?(\d\d)?$", r"\1\2:0\3"),
        (r":0(\d\d)$", r":\1"),
        (r"([-+]\d\d):0$", r"\1:00"),
    ):
        texts = pc.replace_substring_regex(texts, pattern, plain_form)
    # And later ones know weeks.
    is_iso = pc.match_substring_regex(texts, r"^\d{4}-\d\d-\d\d([T ]\d\d:|$)")
    return _by_python(pc.if_else(is_iso, texts, ""), datetime.fromisoformat)


def _patterned(texts: pyarrow.Array, pattern: str) -> np.ndarray:
    """Seconds of texts that a pattern of strptime describes; NaN for others."""
    import pyarrow.compute as pc

    # Numbers that were floats in another table; and fractions of seconds, of which whole ones are kept.
    texts = pc.replace_substring_regex(texts, r"^(\d+)\.0$", r"\1")
    if not re.search("%S[.,]", pattern):
        texts = pc.replace_substring_regex(texts, FRACTION, r"\1")
    directives = {part[:1] for part in pattern.replace("%%", "").split("%")[1:]}
    known, slow = np.full(len(texts), np.nan), np.ones(len(texts), bool)
    if directives <= QUICK_PATTERN:
        found = pc.strptime(texts, format=pattern, unit="s", error_is_null=True)
        # The 31 February becomes a day in March, which is not what was written.
        same = pc.fill_null(pc.equal(pc.strftime(found, format=pattern), texts), False)
        known, slow = _seconds(found), ~same.to_numpy(zero_copy_only=False)
    known[slow] = _by_python(texts.filter(slow), lambda text: datetime.strptime(text, pattern))
    return known


def _by_python(texts: pyarrow.Array, read: Callable[[str], datetime]) -> np.ndarray:
    """Seconds of texts, read one by one; NaN where that is a ValueError."""
    known = np.full(len(texts), np.nan)
    for place, text in enumerate(texts.to_pylist()):
        with contextlib.suppress(ValueError):
            found = read(text)
            known[place] = np.floor(
                (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
            )
    return known
