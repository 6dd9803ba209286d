"""How long something lasts, as a flag says it: a time such as `90d` or `12h`, or a number of something."""

from __future__ import annotations

import re
from dataclasses import dataclass

from recsuite.config.section import require

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
# Beyond it lie no times of events: a hundred years, and as many numbers as anything could count.
MOST_SECONDS, MOST_NUMBER = 36_525 * 86_400, 2**40
PATTERN = re.compile(r"(\d+)([smhdw]?)", re.ASCII)


@dataclass(frozen=True)
class Duration:
    """An amount of seconds of event time, or of a number of something, such as steps or events."""

    amount: int
    is_time: bool


def duration(flag: str, text: str, things: str) -> Duration:
    """What a flag's text means; things: what a number without a unit counts, as in "steps".

    Raises:
        UserError: when it is neither a time nor a number, or beyond what either may be.
    """
    found = PATTERN.fullmatch(text.strip())
    require(
        found is not None and len(found[1]) <= 15,
        f"--{flag} {text} is neither a time nor a number; give a time such as 12h or 90d (s, m, h, d or w), "
        f"or a number of {things}",
    )
    assert found is not None
    amount, is_time = int(found[1]) * SECONDS.get(found[2], 1), bool(found[2])
    most = MOST_SECONDS if is_time else MOST_NUMBER
    require(amount <= most, f"--{flag} {text} is too large; give at most {'36525d' if is_time else most}")
    return Duration(amount, is_time)
