"""Windows of a stream are ranges of positions, and its past is known by a digest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.config.units import Duration
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.datasets.streams import (
    EMPTY_STREAM_STATE,
    Prefix,
    StreamState,
    Window,
    check_prefix,
    digests_of,
    keys_of,
    next_window,
    num_empty,
    num_events_of_wrong_clock,
)
from recsuite.errors import UserError
from tests.support.batches import lists_of

DAY = 86_400
TIMES = np.array([5, 6, DAY - 1, DAY, DAY + 1, 4 * DAY, 4 * DAY + 9], np.int64)


def windows(times: np.ndarray, span: Duration, is_open: bool, begin: int = 0) -> list[Window]:
    found = []
    while (window := next_window(times, begin, span, is_open)) is not None:
        found.append(window)
        begin = window.end
    return found


def test_windows_of_a_day_begin_at_midnight() -> None:
    assert windows(TIMES, Duration(DAY, True), False) == [Window(0, 3), Window(3, 5), Window(5, 7)]


def test_windows_of_a_number_have_that_many_events_but_the_last() -> None:
    assert windows(TIMES, Duration(3, False), False) == [Window(0, 3), Window(3, 6), Window(6, 7)]


def test_an_open_stream_gives_only_complete_windows() -> None:
    assert windows(TIMES, Duration(DAY, True), True) == [Window(0, 3), Window(3, 5)]
    assert windows(TIMES, Duration(3, False), True) == [Window(0, 3), Window(3, 6)]
    assert windows(TIMES[:6], Duration(3, False), True) == [Window(0, 3), Window(3, 6)]


def test_the_window_after_a_truncated_one_ends_at_its_usual_boundary() -> None:
    assert windows(TIMES, Duration(DAY, True), False, begin=1) == [Window(1, 3), Window(3, 5), Window(5, 7)]
    assert windows(TIMES, Duration(3, False), False, begin=4) == [Window(4, 6), Window(6, 7)]


def test_windows_without_an_event_are_counted() -> None:
    span = Duration(DAY, True)
    assert [num_empty(TIMES, end, span) for end in (0, 5, 7)] == [0, 0, 2]
    assert num_empty(TIMES, 7, Duration(3, False)) == 0


def test_new_events_older_than_learned_ones_are_late() -> None:
    time, files = np.array([10, 20, 15, 30, 5]), {"a": 5}
    assert EMPTY_STREAM_STATE.is_late(time, files).tolist() == [False] * 5
    after = StreamState(events_per_file={"a": 2}, learned=20)
    assert after.is_late(time, files).tolist() == [False, False, True, False, True]
    # An event of the very second that was learned last may be another one of it.
    after = StreamState(events_per_file={"a": 2}, learned=15)
    assert after.is_late(time, files).tolist() == [False, False, False, False, True]


def test_files_may_grow_and_new_files_may_sort_anywhere() -> None:
    # b and d were there with two and one events, and learned up to 20.
    stream_state = StreamState(events_per_file={"b": 2, "d": 1}, learned=20)
    files = {"a": 2, "b": 4, "c": 1, "d": 3, "e": 2}
    time = np.array([20, 21, 10, 15, 19, 20, 20, 20, 20, 19, 19, 20])
    late = [True, False, False, False, True, True, True, False, False, True, True, False]
    assert stream_state.is_late(time, files).tolist() == late
    # Remembered, the rules hold when more has come since, and another time is learned.
    again = StreamState(late=stream_state.rules(files), events_per_file=files, learned=30)
    more = {**files, "d": 4}
    assert again.is_late(np.insert(time, 10, 29), more).tolist() == [*late[:10], True, *late[10:]]


def test_a_stream_that_has_not_learned_yet_reads_all_events() -> None:
    stream_state = StreamState(events_per_file={"b": 1})
    assert not stream_state.is_late(np.zeros(3), {"a": 1, "b": 2}).any()


def keys(users: list[int]) -> np.ndarray:
    number = len(users)
    item, label = np.arange(number), np.full(number, 3.5, np.float32)
    return keys_of(digests_of(np.array(users)), digests_of(item), label, np.arange(number))


def test_a_prefix_has_one_digest_however_it_grew() -> None:
    found = keys([7, 8, 9, 9, 7])
    grown = Prefix(found)
    assert [grown.extend(end) for end in (1, 3, 5)][-1] == Prefix(found, 5).extend(5)
    check_prefix(keys([7, 8, 9, 1, 1]), 3, Prefix(found, 3).extend(3), "data")


@pytest.mark.parametrize("changed", [[7, 9, 8, 9, 7], [1, 8, 9, 9, 7], [7, 8]])
def test_data_that_changed_in_the_past_are_refused(changed: list[int]) -> None:
    digest = Prefix(keys([7, 8, 9, 9, 7]), 3).extend(3)
    with pytest.raises(UserError, match="The first 3 events in the order of time of data are not those"):
        check_prefix(keys(changed), 3, digest, "data")


def test_ids_that_are_texts_have_digests_too() -> None:
    found = digests_of(["a", "b", "", "a" * 9_999, "a"])
    assert len(set(found.tolist())) == 4
    assert digests_of([-1, 2**62]).tolist() == [2**64 - 1, 2**62]


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
    time = np.array([*newest, *DAYS])
    order = np.argsort(time, kind="stable")
    assert num_events_of_wrong_clock(time, order, -1, NOW) == number
    # Nothing that was learned is.
    assert num_events_of_wrong_clock(time, order, 4_000_000_000, NOW) == 0


def test_no_event_is_held_back_if_most_are_in_the_future() -> None:
    held = [num_events_of_wrong_clock(DAYS, np.arange(200), -1, NOW - days * DAY) for days in (98, 102, 300)]
    assert held == [97, 0, 0]


def test_a_few_events_with_far_later_times_are_held_back_until_more_follow() -> None:
    for number in (1, 2, 3):
        time = np.array([*DAYS, *(NOW + 300 * DAY + np.arange(number))])
        assert num_events_of_wrong_clock(time, np.arange(len(time)), -1, 2 * NOW) == (
            number if number < 3 else 0
        )
    # After a pause no longer than what was before, or shorter than a month.
    for time in (np.array([*DAYS, NOW + 190 * DAY]), np.array([*range(200), 29 * DAY])):
        assert num_events_of_wrong_clock(time, np.arange(201), -1, 2 * NOW) == 0


def test_a_stream_continues_after_an_event_with_a_wrong_clock(tmp_path: Path) -> None:
    def write(times: list[int]) -> Columns:
        rows = (f"{place % 9},{place % 7},{1 + place % 5},{time}\n" for place, time in enumerate(times))
        (tmp_path / "a.csv").write_text("".join(["user,item,rating,timestamp\n", *rows]))
        return open_columns(config, stream_state=stream_state)

    config, stream_state = Config.of(data_path=str(tmp_path), stream=True, history=0), EMPTY_STREAM_STATE
    old = [1_600_000_000 + DAY * day for day in range(40)]
    before = write([*old[:20], 4_000_000_000, *old[20:]])
    assert (before.num_train, before.num_late, before.num_skipped) == (40, 0, 1)
    (note,) = (note for note in before.notes if "held back" in note)
    assert note == (
        "1 rating is held back until others are as new, as of a wrong clock: rating 21 of a.csv has the time "
        "2096-10-02T07:06:40, and the newest before it 2020-10-22T12:26:40"
    )
    vocabulary = Path(before.folder, "vocabulary.json").read_text()
    stream_state = StreamState(vocabulary, events_per_file=before.events_per_file, learned=old[-1])
    after = write([*old[:20], 4_000_000_000, *old[20:], *(old[-1] + np.arange(1, 6)).tolist()])
    assert (after.num_train, after.num_late) == (45, 0)
    check_prefix(after.column("keys"), 40, Prefix(before.column("keys"), 40).extend(40), "data")
