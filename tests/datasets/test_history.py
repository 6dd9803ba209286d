"""The history of a rating: what its user rated before, nothing of the test, nothing of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import Batch, EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns

LENGTH = 3


@pytest.fixture(params=["time", "random"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Planted ratings: 40 users, each with several in one second, and a value that tells the movie."""
    rng = np.random.default_rng(0)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(40):
        movies = rng.permutation(60)[: 5 + user]
        times = 1000 + rng.integers(0, 12, len(movies))
        lines += [
            f"{user},{movie},{0.5 + movie % 10 / 2},{time}" for movie, time in zip(movies, times, strict=True)
        ]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies_csv = [f"{movie},Title (1990),Drama" for movie in range(60)]
    (tmp_path / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies_csv]) + "\n")
    return Config.of(
        data_path=str(tmp_path), split=request.param, validation_fraction=0.05, batch_size=64, history=LENGTH
    )


def histories(columns: Columns, config: Config, split: str) -> list[tuple[list[int], list[float], int]]:
    """For each rating of a split: rows and ratings of its history, and the row of its movie."""
    dataset = EventBatches(columns, config, 0, 1)
    names = [table.name for table in columns.tables]
    found = []
    for step in range(dataset.num_steps(split)):
        batch = dataset[Request(split, 0, step)]
        lengths = batch.lengths.view(len(names), -1).numpy()
        values = dict(zip(names, np.split(batch.values.numpy(), lengths.sum(1).cumsum()[:-1]), strict=True))
        ends = lengths[names.index("history")].cumsum()
        rows = np.split(values["history"], ends)[:-1]
        ratings = np.split(batch.history_labels.numpy(), ends)[:-1]
        for place in np.flatnonzero(batch.weights.numpy()):
            found.append((rows[place].tolist(), ratings[place].tolist(), int(values["movie"][place])))
        # Padding has no history.
        assert (lengths[names.index("history")][batch.weights.numpy() == 0] == 0).all()
    return found


def expected(columns: Columns, position: int) -> tuple[set[tuple[int, float]], int]:
    """By brute force: all earlier ratings of the user that may be told of, and how many there are."""
    folder = Path(columns.folder)
    rows = np.load(folder / "rows.npy")
    user, movie = rows["user"], rows["item"]
    time, rating = np.load(folder / "time.npy"), np.load(folder / "rating.npy")
    movie_rows = np.load(folder / "movie_features.npy")["features"][:, 0]
    num_known = columns.num_train + columns.num_validation
    told = np.arange(len(user)) < (columns.num_train if position < num_known else num_known)
    earlier = np.flatnonzero(told & (user == user[position]) & (time < time[position]))
    last = earlier[np.argsort(time[earlier], kind="stable")][-LENGTH:]
    return {(int(movie_rows[movie[place]]), float(rating[place])) for place in last}, len(earlier)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_user_history_holds_the_last_earlier_ratings_without_leakage(config: Config, split: str) -> None:
    columns = open_columns(config)
    found = histories(columns, config, split)
    positions = columns.range_of(split)
    assert len(found) == len(positions) > 20
    lengths = set()
    for position, (rows, ratings, _) in zip(positions, found, strict=True):
        wanted, number = expected(columns, position)
        assert set(zip(rows, ratings, strict=True)) == wanted
        assert len(rows) == min(number, LENGTH)
        lengths.add(len(rows))
    # The planted data have all cases.
    assert LENGTH in lengths


def test_a_training_rating_is_not_in_its_own_history(config: Config) -> None:
    columns = open_columns(config)
    dataset = EventBatches(columns, config, 0, 1)
    positions = np.concatenate(
        [
            dataset._positions_of_step(Request("train", 0, step))[0]
            for step in range(dataset.num_steps("train"))
        ]
    )
    assert sorted(positions) == list(range(columns.num_train))
    lengths = set()
    for position, (rows, ratings, movie) in zip(positions, histories(columns, config, "train"), strict=True):
        wanted, _ = expected(columns, position)
        assert set(zip(rows, ratings, strict=True)) == wanted
        assert len(rows) == len(wanted)
        # Nobody rates a movie twice here, so a rating that knew itself would show its movie.
        assert movie not in rows
        lengths.add(len(rows))
    assert lengths == {0, 1, 2, LENGTH}


def test_the_values_of_test_ratings_change_no_history(config: Config) -> None:
    # The newest fifth is the test of the split by time: other stars there, and no history may differ.
    config = config.replaced(split="time")
    before = open_columns(config)
    shown = histories(before, config, "test")
    path = Path(config.data.data_path) / "ratings.csv"
    lines = path.read_text().splitlines()
    assert len(lines) - 1 == len(before.column("rows"))
    cut = np.load(Path(before.folder) / "time.npy")[before.range_of("test").start]
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
    columns = open_columns(config)
    short = histories(columns, config, "test")
    long_config = config.replaced(history=10)
    long = histories(open_columns(long_config), long_config, "test")
    for (rows, _, _), (more_rows, _, _) in zip(short, long, strict=True):
        assert len(more_rows) <= 10
        assert more_rows[-len(rows) :] == rows if rows else more_rows == []


def test_a_history_of_length_0_costs_nothing(config: Config) -> None:
    without = config.replaced(history=0)
    columns = open_columns(without)
    assert "history" not in [table.name for table in columns.tables]
    batch: Batch = EventBatches(columns, without, 0, 1)[Request("train", 0, 0)]
    assert len(batch.history_labels) == 0


def test_no_more_room_is_kept_than_the_longest_history_needs(config: Config) -> None:
    columns = open_columns(config.replaced(history=1000))
    numbers = range(columns.range_of("test").stop)
    assert columns.tables[-1].longest == max(expected(columns, position)[1] for position in numbers)
    assert open_columns(config).tables[-1].longest == LENGTH
