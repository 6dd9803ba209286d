"""Texts of flags with a unit: durations and sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from recsuite.errors import require

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
# Upper limit of a duration: a hundred years of seconds, and more steps or events than any run has.
MOST_SECONDS, MOST_NUMBER = 36_525 * 86_400, 2**40
PATTERN = re.compile(r"(\d+)([smhdw]?)", re.ASCII)


@dataclass(frozen=True)
class Duration:
    """Seconds of event time, or a number of things such as steps or events."""

    amount: int
    is_time: bool


def duration(flag: str, text: str, things: str) -> Duration:
    """Parse the text of a flag as a duration. things: the unit of a number without one, as in "steps".

    Raises:
        UserError: when it is neither a time nor a number, or too large.
    """
    match = PATTERN.fullmatch(text.strip())
    require(
        match is not None and len(match[1]) <= 15,
        f"--{flag} must be a time such as 12h or 90d (s, m, h, d or w), or a number of {things}, got {text}",
    )
    assert match is not None
    amount, is_time = int(match[1]) * SECONDS.get(match[2], 1), bool(match[2])
    most = MOST_SECONDS if is_time else MOST_NUMBER
    require(amount <= most, f"--{flag} must be at most {'36525d' if is_time else most}, got {text}")
    return Duration(amount, is_time)


SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(?:([kKMGTP])(i?))?([Bb])(/s)?", re.ASCII)


def size_of(text: str, flag: str, is_rate: bool = False) -> int:
    """Parse the text of a flag, such as 512MB, 1.5TB or 16GiB, as a number of bytes.

    is_rate: of a second; then 2GB/s and bits, such as 400Gb, are accepted too.

    Raises:
        UserError: when it is no size, or 0.
    """
    match, size = SIZE.fullmatch(text.strip()), 0
    # 8gb and 8Gb for a memory are bits by their letter, and meant as bytes: refused.
    if match is not None and (is_rate or (match[4], match[5]) == ("B", None)):
        unit = (1024 if match[3] else 1000) ** " KMGTP".index((match[2] or " ").upper())
        size = round(float(match[1]) * unit) // (8 if match[4] == "b" else 1)
    shown = "rate such as 2GB/s or 400Gb/s" if is_rate else "size such as 512MB, 8GB or 16GiB"
    require(size > 0, f"--{flag} must be a {shown}, got {text}")
    return size
