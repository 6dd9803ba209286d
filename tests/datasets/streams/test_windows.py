"""Windows of a stream are ranges of positions, and its past is known by a digest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.config.durations import Duration
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.datasets.streams.past import BEGINNING, Past, Prefix, check_prefix, digests_of, keys_of
from recsuite.datasets.streams.windows import Window, next_window, num_empty
from recsuite.errors import UserError

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


def test_where_more_may_come_only_whole_windows_are_taken() -> None:
    assert windows(TIMES, Duration(DAY, True), True) == [Window(0, 3), Window(3, 5)]
    assert windows(TIMES, Duration(3, False), True) == [Window(0, 3), Window(3, 6)]
    assert windows(TIMES[:6], Duration(3, False), True) == [Window(0, 3), Window(3, 6)]


def test_after_a_window_that_the_end_of_the_data_cut_short_the_next_one_ends_where_it_would_have() -> None:
    assert windows(TIMES, Duration(DAY, True), False, begin=1) == [Window(1, 3), Window(3, 5), Window(5, 7)]
    assert windows(TIMES, Duration(3, False), False, begin=4) == [Window(4, 6), Window(6, 7)]


def test_windows_without_an_event_are_counted() -> None:
    span = Duration(DAY, True)
    assert [num_empty(TIMES, end, span) for end in (0, 5, 7)] == [0, 0, 2]
    assert num_empty(TIMES, 7, Duration(3, False)) == 0


def test_what_came_behind_known_events_and_is_older_than_what_was_learned_is_late() -> None:
    time, files = np.array([10, 20, 15, 30, 5]), {"a": 5}
    assert BEGINNING.is_late(time, files).tolist() == [False] * 5
    after = Past(events_per_file={"a": 2}, learned=20)
    assert after.is_late(time, files).tolist() == [False, False, True, False, True]
    # An event of the very second that was learned last may be another one of it.
    after = Past(events_per_file={"a": 2}, learned=15)
    assert after.is_late(time, files).tolist() == [False, False, False, False, True]


def test_each_file_may_grow_and_new_ones_may_come_before_and_behind_others() -> None:
    # b and d were there with two and one events, and learned up to 20.
    past = Past(events_per_file={"b": 2, "d": 1}, learned=20)
    files = {"a": 2, "b": 4, "c": 1, "d": 3, "e": 2}
    time = np.array([20, 21, 10, 15, 19, 20, 20, 20, 20, 19, 19, 20])
    late = [True, False, False, False, True, True, True, False, False, True, True, False]
    assert past.is_late(time, files).tolist() == late
    # Remembered, the rules hold when more has come since, and another time is learned.
    again = Past(late=past.rules(files), events_per_file=files, learned=30)
    more = {**files, "d": 4}
    assert again.is_late(np.insert(time, 10, 29), more).tolist() == [*late[:10], True, *late[10:]]


def test_a_stream_that_has_learned_nothing_takes_all_that_comes() -> None:
    past = Past(events_per_file={"b": 1})
    assert not past.is_late(np.zeros(3), {"a": 1, "b": 2}).any()


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


def test_one_event_in_64_is_of_an_unknown_user_however_short_windows_are(synthetic_folder: Path) -> None:
    config = Config.of(data_path=str(synthetic_folder), stream=True, history=0, batch_size=8)
    columns = open_columns(config)
    dataset, place = (
        EventBatches(columns, config, 0, 1),
        [table.name for table in columns.tables].index("user"),
    )
    for length in (1, 3):
        unknown = []
        for begin in range(0, 128 * length, length):
            batch = dataset[Request("train", begin // length, 0, window=(begin, begin + length))]
            first = place * config.loader.batch_size
            assert batch.lengths[first : first + length].tolist() == [1] * length
            values = batch.values[int(batch.lengths[:first].sum()) :][:length]
            unknown += (values == UNKNOWN_ROW).tolist()
        assert np.flatnonzero(unknown).tolist() == [*range(0, 128 * length, 64)]
