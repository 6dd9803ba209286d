"""Derived features: hour, weekday, age of the item or user, day of the user of an event; parts of texts."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsuite.datasets.schema import ENTITIES, EVENT, USER, Codes, Feature, RawData, Schema
from recsuite.errors import UserError

# Only for type checks: reading a schema must not import numpy.
if TYPE_CHECKING:
    import numpy as np

TIMESTAMP = "timestamp"
HOUR, WEEKDAY, AGE_DAYS = "hour", "weekday", "age_days"
# Lists of the parts of a text.
WORDS, LEVELS = TEXTS = ("words", "levels")
# Functions, as written in a schema.
FUNCTIONS = {
    HOUR: "hour(timestamp)",
    WEEKDAY: "weekday(timestamp)",
    AGE_DAYS: "age_days(item.COLUMN) or age_days(user.COLUMN)",
    WORDS: "words(COLUMN)",
    LEVELS: "levels(COLUMN)",
}
# Not available in a schema, see --day_feature.
USER_DAY = f"user_day({TIMESTAMP})"
# Largest number of rows for days, as a share of the events: with more rows, most have a single event.
MOST_DAYS = 0.5
SECONDS_PER_HOUR, SECONDS_PER_DAY = 3_600, 86_400
# 1 January 1970 was a Thursday, the fourth day of a week that begins on Monday.
FIRST_WEEKDAY = 3
CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)


@dataclass(frozen=True)
class Derived:
    """Call in a schema, such as age_days(item.released).

    function: its name, known or not. argument: the text in the brackets.
    """

    function: str
    argument: str

    @property
    def of(self) -> str:
        """Entity of the argument's column, "user" or "item"; empty for the time of the event."""
        entity, point, column = self.argument.partition(".")
        return entity if point and column and entity in ENTITIES else ""

    @property
    def column(self) -> str:
        """Column of dates in the argument; empty for the time of the event."""
        return self.argument.partition(".")[2] if self.of else ""

    @property
    def is_text(self) -> bool:
        """True for a list of the parts of a text of a user or an item; the argument is its column."""
        return self.function in TEXTS

    @property
    def fits(self) -> bool:
        """True if the function accepts this argument."""
        if self.is_text:
            return bool(self.argument)
        return bool(self.column) if self.function == AGE_DAYS else self.argument == TIMESTAMP


def derived(column: str) -> Derived | None:
    """Parse a feature's column as a call; None if it is the name of a column of a file."""
    match = CALL.fullmatch(column)
    if not match:
        return None
    call = Derived(match[1], match[2].strip())
    # A file may have a column such as "price (EUR)".
    is_call = call.function in FUNCTIONS or call.argument == TIMESTAMP or call.of
    return call if is_call else None


def dates_name(entity: str, column: str) -> str:
    """Name of a column of dates (days since 1970) in the parsed users or items; it is not a feature."""
    # No column of a file has this name: a schema reads it as the call.
    return f"{AGE_DAYS}({entity}.{column})"


def hour(time: np.ndarray) -> np.ndarray:
    """The hour of the day in UTC, int64 [n], 0 to 23, of times int64 [n] in seconds since 1970."""
    return time % SECONDS_PER_DAY // SECONDS_PER_HOUR


def weekday(time: np.ndarray) -> np.ndarray:
    """The day of the week in UTC, int64 [n], 0 for Monday to 6 for Sunday, of times int64 [n] in seconds."""
    return (time // SECONDS_PER_DAY + FIRST_WEEKDAY) % 7


def age_days(time: np.ndarray, day: np.ndarray) -> np.ndarray:
    """Whole days from a date to an event, float32 [n]; negative if the event came first.

    time: int64 [n], seconds since 1970, UTC. day: float64 [n], days since 1970. NaN means no date, and gives
    NaN.
    """
    return (time // SECONDS_PER_DAY - day).astype("float32")


def parts_of_text(text: str | None, function: str) -> list[str]:
    """Return the words of a text in lower case, or the levels of a path; none of a missing text.

    parts_of_text("Home > Kitchen", LEVELS)               # ["Home", "Home > Kitchen"]
    """
    if text is None:
        return []
    if function == WORDS:
        # A word that stands twice counts once.
        return list(dict.fromkeys(re.findall(r"\w+", str(text).lower())))
    names = [name for part in str(text).split(">") if (name := part.strip())]
    return [*itertools.accumulate(names, lambda path, name: f"{path} > {name}")]


def user_days(users: Sequence[Any], time: np.ndarray) -> list[str]:
    """User and day of each event as texts, in UTC.

    users: raw ids; time: int64 [n], seconds since 1970.
    """
    days = time.astype("datetime64[s]").astype("datetime64[D]").tolist()
    return [f"{user} {day}" for user, day in zip(users, days, strict=True)]


def with_user_day(schema: Schema) -> Schema:
    """Return the schema with a feature for the user's day of each event, see --day_feature.

    A user's ratings shift from day to day, and the row of a day learns the shift (Koren, "Collaborative
    filtering with temporal dynamics", 2009).
    """
    feature = Feature(f"{schema.user}_day", EVENT, USER_DAY)
    if feature.name in [each.name for each in schema.features]:
        raise UserError(
            f"The data have a feature {feature.name}, as the one of --day_feature user is called; give "
            f"--day_feature none, "
            "or call it otherwise in schema.toml."
        )
    return dataclasses.replace(schema, features=(*schema.features, feature))


def add_user_days(raw: RawData, schema: Schema, folder: Path | None) -> None:
    """Add the column of the days of users to the events, see `with_user_day`.

    If most days of a user have a single event, add a note instead: rows for them would not help, and would
    take as much memory as the events. folder: for an unnamed file; None keeps the column in memory.
    """
    import numpy as np

    from recsuite.datasets.arrays import chunks, release, temporary

    events, number = raw.events, len(raw.events.time)
    columns = events.user, events.time
    parts = [np.unique(events.time[part] // SECONDS_PER_DAY) for part in chunks(number, *columns)]
    all_days = np.unique(np.concatenate(parts))

    # User and day as one number; the days of a user are adjacent.
    def keys(part: slice) -> np.ndarray:
        day = np.searchsorted(all_days, events.time[part] // SECONDS_PER_DAY)
        return events.user[part].astype(np.int64) * len(all_days) + day

    known = np.unique(np.concatenate([np.unique(keys(part)) for part in chunks(number, *columns)]))
    if len(known) > MOST_DAYS * number:
        raw.skipped.append(
            f"--day_feature {schema.user} has no effect: the {number:,} events are of {len(known):,} days of "
            f"{schema.user}s, so most would have a row of their own"
        )
        return
    codes = np.empty(number, np.int32) if folder is None else temporary(folder, number, np.int32)
    for part in chunks(number, *columns, codes):
        codes[part] = np.searchsorted(known, keys(part))
    release(*columns)
    users, days = np.divmod(known, len(all_days))
    ids = raw.users[schema.column_of(USER)].to_numpy()[users].tolist()
    events.features[USER_DAY] = Codes(codes, user_days(ids, all_days[days] * SECONDS_PER_DAY))
