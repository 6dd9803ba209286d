"""Columns and popularity do not depend on the order of rows in the files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.source import locate

HEADERS = {"ratings.csv": "userId,movieId,rating,timestamp", "movies.csv": "movieId,title,genres"}
NUM_RATINGS, NUM_USERS, NUM_MOVIES = 3_000, 60, 40


def rows() -> dict[str, list[str]]:
    """Ratings of one and the same number, as clicks are, at times of which no two are one."""
    draw = np.random.default_rng(5)
    times = 1_000_000 + 7 * draw.permutation(NUM_RATINGS)
    # Few users and movies: many of them are equally popular.
    users, movies = (draw.integers(1, number, NUM_RATINGS) for number in (NUM_USERS, NUM_MOVIES))
    lines = zip(users, movies, times, strict=True)
    titles = [f"{movie},Film {movie} ({1950 + movie}),Drama|War" for movie in range(1, NUM_MOVIES)]
    return {
        "ratings.csv": [f"{user},{movie},4.0,{time}" for user, movie, time in lines],
        "movies.csv": titles,
    }


def written(folder: Path, order: np.random.Generator | None) -> Config:
    folder.mkdir()
    for name, lines in rows().items():
        shuffled = [*lines] if order is None else [lines[place] for place in order.permutation(len(lines))]
        (folder / name).write_text("\n".join([HEADERS[name], *shuffled]) + "\n")
    return Config.of(data_path=str(folder))


@pytest.mark.parametrize(
    ("split", "duplicates"), [("time", "last"), ("random", "first"), ("leave_one_out", "keep")]
)
def test_shuffled_files_give_the_same_columns_and_popularity(
    tmp_path: Path, split: str, duplicates: str
) -> None:
    flags = {"split": split, "duplicates": duplicates}
    first = open_columns(written(tmp_path / "first", None).replaced(**flags))
    ranks = first.baselines["ranks"]["popularity"]
    assert 0 < ranks["ndcg_at_10"] < ranks["hr_at_10"] < 1
    for seed in range(2):
        other = open_columns(written(tmp_path / str(seed), np.random.default_rng(seed)).replaced(**flags))
        assert other.folder.rpartition("/")[2] != first.folder.rpartition("/")[2]
        assert other.digest == first.digest
        # Every byte of every column.
        assert other.files == first.files
        assert json.dumps(other.baselines) == json.dumps(first.baselines)
        assert other.notes == first.notes


def test_users_and_items_are_read_in_the_order_of_their_ids(tmp_path: Path) -> None:
    config = written(tmp_path / "data", np.random.default_rng(1))
    raw = read(locate(config.data, 0), config.data)
    for frame, name in ((raw.users, SCHEMA.user), (raw.items, SCHEMA.item)):
        ids = frame[f"{name}_id"].tolist()
        assert ids == sorted(ids)
        assert frame.index.tolist() == [*range(len(ids))]
    assert raw.items["title"].tolist()[:2] == ["Film 1 (1951)", "Film 2 (1952)"]
