"""Features derived from the times of events: hours, weekdays, and days since a date."""

from __future__ import annotations

from datetime import date, datetime, timezone

import numpy as np
import pytest

from recsuite.datasets.tables.derived import Derived, age_days, derived, hour, weekday

# Before 1970 too, a leap day, and the last second of a day.
TIMES = [
    datetime(2026, 11, 20, 8, 30),
    datetime(1970, 1, 1),
    datetime(1969, 12, 31, 23, 59, 59),
    datetime(2024, 2, 29, 12),
    datetime(1912, 6, 23, 5),
]
SECONDS = np.array([int(time.replace(tzinfo=timezone.utc).timestamp()) for time in TIMES])


def test_hours_and_weekdays_are_those_of_the_calendar_in_utc() -> None:
    assert hour(SECONDS).tolist() == [time.hour for time in TIMES]
    assert weekday(SECONDS).tolist() == [time.weekday() for time in TIMES]


def test_an_age_is_in_whole_days_negative_before_the_date_and_nan_without_one() -> None:
    dates = [date(2026, 11, 20), date(1970, 1, 11), date(1969, 1, 1), None, date(1912, 6, 1)]
    days = np.array([np.nan if each is None else (each - date(1970, 1, 1)).days for each in dates])
    ages = age_days(SECONDS, days)
    assert ages.dtype == np.float32
    np.testing.assert_array_equal(ages, [0, -10, 364, np.nan, 22])


@pytest.mark.parametrize(
    ("column", "call"),
    [
        ("hour(timestamp)", Derived("hour", "timestamp")),
        (" weekday ( timestamp ) ", Derived("weekday", "timestamp")),
        ("age_days(item.released (EUR))", Derived("age_days", "item.released (EUR)")),
        ("month(timestamp)", Derived("month", "timestamp")),
        ("hour(time)", Derived("hour", "time")),
        ("size(user.age)", Derived("size", "user.age")),
        ("price (EUR)", None),
        ("hour", None),
        ("(timestamp)", None),
    ],
)
def test_a_call_is_distinguished_from_a_column_name(column: str, call: Derived | None) -> None:
    assert derived(column) == call


@pytest.mark.parametrize(
    ("column", "of", "argument", "fits"),
    [
        ("age_days(item.released)", "item", "released", True),
        ("age_days(user.a.b)", "user", "a.b", True),
        ("age_days(timestamp)", "", "", False),
        ("age_days(event.x)", "", "", False),
        ("age_days(item.)", "", "", False),
        ("hour(timestamp)", "", "", True),
        ("hour(item.x)", "item", "x", False),
    ],
)
def test_an_age_is_of_a_column_of_users_or_items(column: str, of: str, argument: str, fits: bool) -> None:
    call = derived(column)
    assert call
    assert (call.of, call.column, call.fits) == (of, argument, fits)
