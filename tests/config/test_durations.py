"""A duration is a time with a unit, or a number of something."""

from __future__ import annotations

import pytest

from recsuite.config.units import Duration, duration
from recsuite.errors import UserError


@pytest.mark.parametrize(
    ("text", "amount", "is_time"),
    [
        *(("1d", 86_400, True), ("12h", 43_200, True), ("30m", 1_800, True), ("5s", 5, True)),
        *(("2w", 1_209_600, True), ("5000", 5_000, False), ("0", 0, False)),
    ],
)
def test_a_duration_with_a_unit_is_in_seconds_and_without_one_a_number(
    text: str, amount: int, is_time: bool
) -> None:
    assert duration("window", text, "events") == Duration(amount, is_time)


@pytest.mark.parametrize(
    "text", ["", "d", "-1d", "1.5d", "1 d", "1y", "1d2h", "\u0661d", "9" * 400, "40000d"]
)
def test_an_invalid_duration_is_refused_with_the_flag(text: str) -> None:
    with pytest.raises(UserError, match="--window") as refused:
        duration("window", text, "events")
    assert str(refused.value).endswith(".")
