"""Windows of a stream are ranges of positions; late events and those of a wrong clock are known by times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.config.units import Duration
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.datasets.streams import (
    Frontier,
    Window,
    next_window,
    num_empty_before,
    num_events_of_wrong_clock,
)
from tests.support.batches import lists_of

DAY = 86_400
TIMES = np.array([5, 6, DAY - 1, DAY, DAY + 1, 4 * DAY, 4 * DAY + 9], np.int64)


def windows(times: np.ndarray, span: Duration, until: int | None, begin: int = 0) -> list[Window]:
    found = []
    while (window := next_window(times, begin, span, until)) is not None:
        found.append(window)
        begin = window.end
    return found


def test_windows_of_a_day_begin_at_midnight() -> None:
    assert windows(TIMES, Duration(DAY, True), None) == [Window(0, 3), Window(3, 5), Window(5, 7)]


def test_windows_of_a_number_have_that_many_events_but_the_last() -> None:
    assert windows(TIMES, Duration(3, False), None) == [Window(0, 3), Window(3, 6), Window(6, 7)]


def test_an_open_stream_gives_only_complete_windows() -> None:
    last = int(TIMES[-1])
    assert windows(TIMES, Duration(DAY, True), last) == [Window(0, 3), Window(3, 5)]
    assert windows(TIMES, Duration(3, False), last) == [Window(0, 3), Window(3, 6)]
    assert windows(TIMES[:6], Duration(3, False), last) == [Window(0, 3), Window(3, 6)]
    # Without an event after it, a window of time is complete when no more are expected before its end.
    assert windows(TIMES[:5], Duration(DAY, True), 2 * DAY - 1) == [Window(0, 3)]
    assert windows(TIMES[:5], Duration(DAY, True), 2 * DAY) == [Window(0, 3), Window(3, 5)]


def test_the_window_after_a_truncated_one_ends_at_its_usual_boundary() -> None:
    assert windows(TIMES, Duration(DAY, True), None, begin=1) == [Window(1, 3), Window(3, 5), Window(5, 7)]
    assert windows(TIMES, Duration(3, False), None, begin=4) == [Window(4, 6), Window(6, 7)]


def test_windows_are_the_same_in_the_columns_of_a_later_segment() -> None:
    for span in (Duration(DAY, True), Duration(3, False)):
        whole = windows(TIMES, span, None)
        for first in (window.begin for window in whole):
            assert next_window(TIMES[first:], first, span, None, first) in whole


def test_windows_without_an_event_are_counted() -> None:
    pairs = zip(TIMES[1:].tolist(), TIMES.tolist(), strict=False)
    assert [num_empty_before(time, before, Duration(DAY, True)) for time, before in pairs] == [
        0,
        0,
        0,
        0,
        2,
        0,
    ]
    assert num_empty_before(4 * DAY, DAY, Duration(3, False)) == 0


def test_events_up_to_the_newest_learned_one_are_known_by_time_file_and_row() -> None:
    names = ["a", "b", "c"]
    time, file = np.array([19, 20, 20, 20, 20, 21]), np.array([2, 0, 1, 1, 2, 0])
    row = np.array([9, 9, 3, 4, 0, 0])
    assert Frontier(20, "b", 3).includes(time, file, row, names).tolist() == [True] * 3 + [False] * 3
    # Nothing is learned before the first event.
    assert not Frontier().includes(time * 0, file, row, names).any()
    # The file of the newest learned event may be gone.
    assert Frontier(20, "b", 3).includes(time[:2], file[:2], row[:2], ["a", "c", "d"]).tolist() == [
        True,
        True,
    ]


def test_one_event_in_64_has_an_unknown_user_for_any_window_length(synthetic_folder: Path) -> None:
    config = Config.of(data_path=str(synthetic_folder), stream=True, history=0, batch_size=8)
    columns = open_columns(config)
    dataset = EventBatches(columns, config, 0, 1)
    for length in (1, 3):
        unknown = []
        for begin in range(0, 128 * length, length):
            batch = dataset[Request("train", begin // length, 0, window=(begin, begin + length))]
            users = lists_of(columns.tables, batch)["user"][:length]
            unknown += (np.concatenate(users) == UNKNOWN_ROW).tolist()
        assert np.flatnonzero(unknown).tolist() == [*range(0, 128 * length, 64)]


NOW = 1_800_000_000
# Two hundred events in as many days, up to now.
DAYS = NOW - DAY * np.arange(200)[::-1]


@pytest.mark.parametrize(
    ("newest", "number"),
    [
        ([], 0),
        # Within a day, as of another zone.
        ([NOW + DAY], 0),
        ([NOW + DAY + 1], 1),
        ([NOW + DAY + 1, 4_000_000_000], 2),
    ],
)
def test_events_with_times_in_the_future_are_held_back(newest: list[int], number: int) -> None:
    time = np.sort([*newest, *DAYS])
    assert num_events_of_wrong_clock(time, NOW) == number
    # Nothing that was learned is.
    assert num_events_of_wrong_clock(time, NOW, learned=4_000_000_000) == 0
    # The same where most events are learned already.
    left = num_events_of_wrong_clock(time[150:], NOW, DAYS[149], DAYS[0], 150)
    assert left == number


def test_no_event_is_held_back_if_most_are_in_the_future() -> None:
    held = [num_events_of_wrong_clock(DAYS, NOW - days * DAY) for days in (98, 102, 300)]
    assert held == [97, 0, 0]


def test_a_few_events_with_far_later_times_are_held_back_until_more_follow() -> None:
    for number in (1, 2, 3):
        time = np.array([*DAYS, *(NOW + 300 * DAY + np.arange(number))])
        held = number if number < 3 else 0
        assert num_events_of_wrong_clock(time, 2 * NOW) == held
        # The same where all others are learned already.
        assert num_events_of_wrong_clock(time[200:], 2 * NOW, NOW, int(DAYS[0]), 200) == held
    # After a pause no longer than what was before, or shorter than a month.
    for time in (np.array([*DAYS, NOW + 190 * DAY]), np.array([*range(200), 29 * DAY])):
        assert num_events_of_wrong_clock(time, 2 * NOW) == 0
        assert num_events_of_wrong_clock(time[200:], 2 * NOW, int(time[199]), int(time[0]), 200) == 0
