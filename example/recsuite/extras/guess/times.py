"""Guess the format of times from their texts."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow

from recsuite.datasets.tables.derived import SECONDS_PER_DAY
from recsuite.datasets.tables.sections import ISO, UNITS
from recsuite.datasets.tables.values import FIRST_LIKELY, FRACTION, LAST_LIKELY, times

# Parts of a time in a text: the time of the day with AM or PM and a zone, words, and digits.
PART = re.compile(
    r"(?<!\d)\d{1,2}:\d\d(?P<second>:\d\d)?(?P<half> ?[AaPp][Mm]\b)?(?P<zone> ?([+-]\d\d:?\d\d|Z)\b)?"
    r"|(?P<word>[A-Za-z]+)|(?P<digits>\d+)|[%{}]"
)
# Directives for digits, by their number; one or two digits are ambiguous.
DIGITS = {1: "{}", 2: "{}", 4: "%Y", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
NAMES = (
    *(("%B", calendar.month_name), ("%b", calendar.month_abbr)),
    *(("%A", calendar.day_name), ("%a", calendar.day_abbr)),
)
# For May, the short name is taken.
WORDS = {name: directive for directive, names in NAMES for name in names if name}


class TimeFormat(NamedTuple):
    """Format of texts as times; the name is empty for texts that are no times.

    number: number of texts with this format. example: one of them. other: another format that reads as many
    of them, as other times.
    """

    name: str
    number: int
    example: str
    other: str = ""


def forms_of(texts: Sequence[str]) -> list[TimeFormat]:
    """Return the time formats of texts, the most frequent one first."""
    # If there are very many columns, most hold numbers that cannot be times.
    if texts and not any(map(_candidates, texts)):
        return [TimeFormat("", len(texts), texts[0])]
    forms, unread = [], []
    while texts:
        form, is_read = _form_of_first(texts)
        if form.name:
            forms.append(form)
        else:
            unread.append(texts[0])
        texts = [text for text, done in zip(texts, is_read, strict=True) if not done]
    forms += [TimeFormat("", len(unread), unread[0])] if unread else []
    return sorted(forms, key=lambda form: -form.number)


def _form_of_first(texts: Sequence[str]) -> tuple[TimeFormat, np.ndarray]:
    """Return the format of the first text that reads most texts, and a mask of those it reads, bool [n]."""
    read = {}
    for name in _candidates(texts[0]):
        seconds, faults = times(pyarrow.array(texts, pyarrow.string()), "", name)
        if faults[0] == 0:
            # Prefer a format with times in the past: events have already happened.
            is_past, is_read = seconds < time.time() + SECONDS_PER_DAY, faults == 0
            read[name] = (int(is_read.sum()), int((is_past & is_read).sum())), seconds, is_read
    if not read:
        return TimeFormat("", 1, texts[0]), np.arange(len(texts)) == 0
    # The first of several equally good ones.
    best = max(read, key=lambda name: read[name][0])
    # Digits that are a date are not read as a number.
    equal = (name for name in read if read[name][0] == read[best][0] and name not in UNITS)
    other = next((name for name in equal if not np.array_equal(read[name][1], read[best][1])), "")
    return TimeFormat(best, read[best][0][0], texts[0], other), read[best][2]


def _candidates(text: str) -> list[str]:
    """Return the possible formats of a text, the likeliest first."""
    try:
        number = abs(float(text))
    except ValueError:
        return [*([ISO] if text[:4].isdigit() else []), *_patterns(text)]
    whole = text.removesuffix(".0")
    pattern = [DIGITS[len(whole)]] if whole.isdigit() and len(whole) >= 8 and len(whole) in DIGITS else []
    units = [name for name, ticks in UNITS.items() if FIRST_LIKELY * ticks <= number <= LAST_LIKELY * ticks]
    return pattern + units


def _patterns(text: str) -> Iterator[str]:
    """Yield the possible strptime patterns of a text."""
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
        # After a year, the month comes first.
        options = ("%m %d", "%d %m") if year > form.find("{}") else ("%m %d", "%m %d %H %M %S")
    for option in options:
        parts = option.split()
        if len(parts) == form.count("{}"):
            pattern = form.format(*parts)
            directives = re.findall("%.", pattern)
            if "%d" in directives and len({*directives}) == len(directives):
                # May is both the short and the long name of a month.
                yield from dict.fromkeys([pattern, pattern.replace("%b", "%B")])


def _meaning(part: re.Match[str]) -> str:
    """Return the directive for a part of a text; NUL if it is no part of a time."""
    if part["digits"]:
        return DIGITS.get(len(part["digits"]), "\0")
    if word := part["word"]:
        return word if word in ("T", "UTC", "GMT") else WORDS.get(word.capitalize(), "\0")
    if ":" not in part[0]:
        return "\0"
    clock = ("%I:%M" if part["half"] else "%H:%M") + ":%S" * bool(part["second"])
    return clock + re.sub(r"\w+", "%p", part["half"] or "") + re.sub(r"[-+Z].*", "%z", part["zone"] or "")
