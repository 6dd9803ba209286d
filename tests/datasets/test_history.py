"""The history of an event: earlier items of its user, none of the test or of itself."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import Batch, EventBatches, Request
from recsuite.datasets.batching import MASKED_EVERY, NEW_USER_EVERY
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.time_buckets import time_buckets_of
from tests.support.batches import lists_of
from tests.support.csv_ratings import write_ratings

LENGTH = 3
SPLITS = ("train", "validation", "test")


class Member(NamedTuple):
    """An item of a history: its table row and label, the items after it, and the bucket of its age."""

    row: int
    label: float
    place: int
    bucket: int


History = list[Member]


@functools.cache
def in_memory(folder: str, name: str) -> np.ndarray:
    array: np.ndarray = np.load(Path(folder) / f"{name}.npy")
    return array


@pytest.fixture(params=["time", "random", "leave_one_out"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Planted ratings: each user's times lie as far apart as powers of a number, some in one second."""
    rng = np.random.default_rng(0)
    ratings = []
    for user in range(40):
        movies = rng.permutation(60)[: 5 + user].tolist()
        times = 1_000 + np.cumsum(4 ** rng.integers(0, 10, len(movies)) - 1)
        ratings += [
            (user, movie, 0.5 + movie % 10 / 2, time)
            for movie, time in zip(movies, times.tolist(), strict=True)
        ]
    write_ratings(tmp_path, ratings)
    return Config.of(
        data_path=str(tmp_path),
        task="ranking",
        split=request.param,
        validation_fraction=0.05,
        history_weights="learned",
        history=LENGTH,
        batch_size=48,
    )


def histories(columns: Columns, config: Config, split: str, ranks: int = 1) -> dict[int, History]:
    """By the position of each event of a split, its history as batches have it."""
    found: dict[int, History] = {}
    for rank in range(ranks):
        dataset = EventBatches(columns, config, rank, ranks)
        for step in range(dataset.num_steps(split)):
            request = Request(split, 1, step)
            batch, positions = dataset[request], dataset._positions_of_step(request)[0]
            lists = lists_of(columns.tables, batch)["history"]
            rows = np.concatenate(lists)
            of_rows = (rows, batch.history_labels, batch.places, batch.time_buckets)
            members = [Member(*each) for each in zip(*(part.tolist() for part in of_rows), strict=True)]
            ends = np.cumsum([len(rows) for rows in lists]).tolist()
            for position, end, rows in zip(positions.tolist(), ends, lists, strict=False):
                found[position] = members[end - len(rows) : end]
            # Padding has no history.
            assert ends[len(positions) - 1] == len(members)
    return found


def earlier(columns: Columns, position: int) -> list[int]:
    """By brute force: positions of the earlier events of the user that may be in its history, by time."""
    num_known = columns.num_train + columns.num_validation
    events, time = in_memory(columns.folder, "rows"), in_memory(columns.folder, "time")
    is_known = np.arange(len(time)) < (columns.num_train if position < num_known else num_known)
    mine = is_known & (events["user"] == events["user"][position]) & (time < time[position])
    return sorted(np.flatnonzero(mine).tolist(), key=lambda place: int(time[place]))


def expected(columns: Columns, position: int) -> History:
    """By brute force, the oldest first."""
    events, time = in_memory(columns.folder, "rows"), in_memory(columns.folder, "time")
    rows = in_memory(columns.folder, "movie_features")["features"][:, 0]
    last = earlier(columns, position)[-LENGTH:]
    return [
        Member(
            int(rows[events["item"][place]]),
            float(events["label"][place]),
            after,
            int(1 + time[position] - time[place]).bit_length() - 1,
        )
        for after, place in zip(reversed(range(len(last))), last, strict=True)
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_a_history_has_the_last_earlier_items_with_their_places_and_ages(config: Config, split: str) -> None:
    columns = open_columns(config)
    found = histories(columns, config, split)
    assert sorted(found) == [*columns.range_of(split)]
    # Of users that are hidden in training, see below.
    hidden = [place for place, members in found.items() if not members and expected(columns, place)]
    assert len(hidden) <= (-(-len(found) // NEW_USER_EVERY) if split == "train" else 0)
    for position, members in found.items():
        wanted = [] if position in hidden else expected(columns, position)
        # Of one second any order will do.
        assert {(each.row, each.label, each.bucket) for each in members} == {
            (each.row, each.label, each.bucket) for each in wanted
        }
        assert [each[2:] for each in members] == [each[2:] for each in wanted]
    # The planted data have all cases.
    lengths = {len(members) for members in found.values()}
    assert lengths == {0, 1, 2, LENGTH} if split == "train" else LENGTH in lengths


def training_lists(config: Config, task: str) -> list[dict[str, list[int]]]:
    """The rows of each feature of each training event of a pass."""
    weights = config.model.history_weights if task == "ranking" else "equal"
    config = config.replaced(task=task, history_weights=weights, day_feature="user")
    columns = open_columns(config)
    dataset, found = EventBatches(columns, config, 0, 1), []
    for step in range(dataset.num_steps("train")):
        batch = dataset[Request("train", 1, step)]
        lists = lists_of(columns.tables, batch)
        real = np.flatnonzero(batch.weights.numpy() > 0)
        found += [{name: rows[place].tolist() for name, rows in lists.items()} for place in real]
    return found


@pytest.mark.parametrize(("task", "every"), [("ranking", NEW_USER_EVERY), ("rating", MASKED_EVERY)])
def test_hidden_users_of_a_ranking_are_new_ones_without_a_history(
    config: Config, task: str, every: int
) -> None:
    events = training_lists(config, task)
    hidden = [event for event in events if event["user"] == [UNKNOWN_ROW]]
    assert len(hidden) == -(-len(events) // every)
    assert max(len(event["history"]) for event in hidden) == (0 if task == "ranking" else LENGTH)
    # No event loses both its user and its own features.
    without_day = [event for event in events if event["user_day"] == [UNKNOWN_ROW]]
    assert without_day
    assert not any(event["user"] == [UNKNOWN_ROW] for event in without_day)


def test_a_training_rating_is_not_in_its_own_history(config: Config) -> None:
    columns = open_columns(config)
    rows = columns.column("movie_features")["features"][:, 0]
    items = columns.column("rows")["item"]
    # Each user has a movie once, so a rating that knew itself would show its movie.
    for position, members in histories(columns, config, "train").items():
        assert rows[items[position]] not in [each.row for each in members]


def test_the_values_of_test_ratings_change_no_history(config: Config) -> None:
    # The newest fifth is the test of the split by time: other stars there, and no history may differ.
    config = config.replaced(split="time")
    before = open_columns(config)
    shown = histories(before, config, "test")
    path = Path(config.data.data_path) / "ratings.csv"
    lines = path.read_text().splitlines()
    assert len(lines) - 1 == len(before.column("rows"))
    cut = before.column("time")[before.range_of("test").start]
    changed = [
        line
        if int(line.split(",")[3]) <= cut
        else ",".join([*line.split(",")[:2], "0.5", line.split(",")[3]])
        for line in lines[1:]
    ]
    path.write_text("\n".join([lines[0], *changed]) + "\n")
    after = open_columns(config)
    assert after.folder != before.folder
    assert histories(after, config, "test") == shown


def test_a_longer_history_begins_earlier_and_ends_the_same(config: Config) -> None:
    short = histories(open_columns(config), config, "test")
    long_config = config.replaced(history=10)
    long = histories(open_columns(long_config), long_config, "test")
    for position, members in short.items():
        assert len(long[position]) <= 10
        assert long[position][-len(members) :] == members if members else long[position] == []


def test_histories_are_the_same_for_any_number_of_ranks(config: Config) -> None:
    columns = open_columns(config)
    alone = histories(columns, config, "train")
    assert all(histories(columns, config, "train", ranks) == alone for ranks in (2, 3))


def test_histories_and_ages_are_absent_unless_asked_for(config: Config) -> None:
    without = config.replaced(history=0, history_weights="equal")
    columns = open_columns(without)
    assert "history" not in [table.name for table in columns.tables]
    batch: Batch = EventBatches(columns, without, 0, 1)[Request("train", 0, 0)]
    assert len(batch.history_labels) == 0
    equal = config.replaced(history_weights="equal")
    batch = EventBatches(open_columns(equal), equal, 0, 1)[Request("train", 0, 0)]
    assert len(batch.history_labels) > len(batch.places) == len(batch.time_buckets) == 0


def test_no_more_room_is_kept_than_the_longest_history_needs(config: Config) -> None:
    columns = open_columns(config.replaced(history=1000))
    numbers = range(columns.range_of("test").stop)
    assert columns.tables[-1].longest == max(len(earlier(columns, position)) for position in numbers)
    assert open_columns(config).tables[-1].longest == LENGTH


def test_time_buckets_double_in_length() -> None:
    seconds = np.array([-5, 0, 1, 2, 3, 6, 7, 2**20 - 2, 2**20 - 1, 2**62])
    assert time_buckets_of(seconds).tolist() == [0, 0, 1, 1, 2, 2, 3, 19, 20, 31]
