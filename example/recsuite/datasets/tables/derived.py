"""Features of an event that are computed: its hour, its weekday, and how old its item or user was then."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsuite.datasets.schema import ENTITIES

# For types alone: reading a schema must not take an import of numpy.
if TYPE_CHECKING:
    import numpy as np

TIMESTAMP = "timestamp"
HOUR, WEEKDAY, AGE_DAYS = "hour", "weekday", "age_days"
# The functions, each as it is written in a schema.
FUNCTIONS = {
    HOUR: "hour(timestamp)",
    WEEKDAY: "weekday(timestamp)",
    AGE_DAYS: "age_days(item.COLUMN) or age_days(user.COLUMN)",
}
SECONDS_PER_HOUR, SECONDS_PER_DAY = 3_600, 86_400
# 1 January 1970 was a Thursday, the fourth day of a week that begins on Monday.
FIRST_WEEKDAY = 3
CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)


@dataclass(frozen=True)
class Derived:
    """A call as a schema has it, such as age_days(item.released).

    function: its name, known or not. argument: what stands in the brackets.
    """

    function: str
    argument: str

    @property
    def of(self) -> str:
        """Whose column the argument is, "user" or "item"; empty for the time of the event."""
        entity, point, column = self.argument.partition(".")
        return entity if point and column and entity in ENTITIES else ""

    @property
    def column(self) -> str:
        """The column of dates that it takes; empty for the time of the event."""
        return self.argument.partition(".")[2] if self.of else ""

    @property
    def fits(self) -> bool:
        """Whether the function takes such an argument."""
        return bool(self.column) if self.function == AGE_DAYS else self.argument == TIMESTAMP


def derived(column: str) -> Derived | None:
    """The call that a feature's column is; None for the name of a column of a file."""
    match = CALL.fullmatch(column)
    if not match:
        return None
    call = Derived(match[1], match[2].strip())
    # A file may have a column such as "price (EUR)".
    is_call = call.function in FUNCTIONS or call.argument == TIMESTAMP or call.of
    return call if is_call else None


def dates_name(entity: str, column: str) -> str:
    """What the parsed users or items call a column of dates, days since 1970, that is no feature itself."""
    # No column of a file is called so, for a schema takes that for the call.
    return f"{AGE_DAYS}({entity}.{column})"


def hour(time: np.ndarray) -> np.ndarray:
    """The hour of the day in UTC, int64 [n], 0 to 23, of times int64 [n] in seconds since 1970."""
    return time % SECONDS_PER_DAY // SECONDS_PER_HOUR


def weekday(time: np.ndarray) -> np.ndarray:
    """The day of the week in UTC, int64 [n], 0 for Monday to 6 for Sunday, of times int64 [n] in seconds."""
    return (time // SECONDS_PER_DAY + FIRST_WEEKDAY) % 7


def age_days(time: np.ndarray, day: np.ndarray) -> np.ndarray:
    """Whole days from a date to an event, float32 [n]; below zero where the event came first.

    time: int64 [n], seconds since 1970, UTC. day: float64 [n], days since 1970, NaN where there is no date,
    which gives NaN.
    """
    return (time // SECONDS_PER_DAY - day).astype("float32")
