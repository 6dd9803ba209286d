"""The place and the age of each item of a history."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.time_buckets import time_buckets_of

LENGTH = 6
# An item of a history: its row, how many came after it, and the bucket of its age.
Item = tuple[int, int, int]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Planted ratings: each user's times lie as far apart as powers of a number, some in one second."""
    rng = np.random.default_rng(0)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(30):
        movies = rng.permutation(50)[: 5 + user]
        times = 1_000 + np.cumsum(4 ** rng.integers(0, 10, len(movies)) - 1)
        lines += [f"{user},{movie},4.0,{time}" for movie, time in zip(movies, times, strict=True)]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies_csv = [f"{movie},Title (1990),Drama" for movie in range(50)]
    (tmp_path / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies_csv]) + "\n")
    return Config.of(
        data_path=str(tmp_path),
        task="ranking",
        split="leave_one_out",
        history_weights="learned",
        history=LENGTH,
        batch_size=48,
    )


def histories(columns: Columns, config: Config, split: str, ranks: int = 1) -> dict[int, list[Item]]:
    """By the position of each event of a split, its history as batches have it."""
    found: dict[int, list[Item]] = {}
    for rank in range(ranks):
        dataset = EventBatches(columns, config.replaced(batch_size=48 // ranks), rank, ranks)
        for step in range(dataset.num_steps(split)):
            request = Request(split, 1, step)
            batch, positions = dataset[request], dataset._positions_of_step(request)[0]
            lengths = batch.lengths.view(len(columns.tables), -1).numpy()
            assert columns.tables[-1].name == "history"
            rows = batch.values.numpy()[lengths[:-1].sum() :]
            ends = lengths[-1].cumsum()
            assert (
                len(rows)
                == len(batch.places)
                == len(batch.time_buckets)
                == len(batch.history_labels)
                == ends[-1]
            )
            items = [*zip(rows.tolist(), batch.places.tolist(), batch.time_buckets.tolist(), strict=True)]
            for place, position in enumerate(positions.tolist()):
                found[position] = items[ends[place] - lengths[-1, place] : ends[place]]
    return found


def by_hand(columns: Columns, position: int) -> list[Item]:
    """By brute force, the oldest first."""
    num_known = columns.num_train + columns.num_validation
    is_known = np.arange(len(columns.column("time"))) < (
        columns.num_train if position < num_known else num_known
    )
    events, time = columns.column("rows"), columns.column("time")
    mine = is_known & (events["user"] == events["user"][position]) & (time < time[position])
    last = sorted(np.flatnonzero(mine).tolist(), key=lambda place: int(time[place]))[-LENGTH:]
    rows = columns.column("movie_features")["features"][:, 0]
    return [
        (
            int(rows[events["item"][place]]),
            after,
            int(1 + time[position] - time[place]).bit_length() - 1,
        )
        for after, place in zip(reversed(range(len(last))), last, strict=True)
    ]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_each_item_of_a_history_has_its_place_and_its_age(config: Config, split: str) -> None:
    columns = open_columns(config)
    found = histories(columns, config, split)
    assert sorted(found) == [*columns.range_of(split)]
    for position, items in found.items():
        expected = by_hand(columns, position)
        # Of one second any order will do, but each place is somebody's.
        assert {item[::2] for item in items} == {item[::2] for item in expected}
        assert [item[1:] for item in items] == [item[1:] for item in expected]


def test_ages_are_the_same_for_any_number_of_ranks(config: Config) -> None:
    columns = open_columns(config)
    assert histories(columns, config, "train") == histories(columns, config, "train", ranks=3)


def test_time_buckets_double_in_length() -> None:
    seconds = np.array([-5, 0, 1, 2, 3, 6, 7, 2**20 - 2, 2**20 - 1, 2**62])
    assert time_buckets_of(seconds).tolist() == [0, 0, 1, 1, 2, 2, 3, 19, 20, 31]


def test_ages_are_absent_without_learned_weights(config: Config) -> None:
    plain = config.replaced(history_weights="equal")
    batch = EventBatches(open_columns(plain), plain, 0, 1)[Request("train", 0, 0)]
    assert len(batch.places) == len(batch.time_buckets) == 0
