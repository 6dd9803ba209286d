"""The day of its user on which an event was: what the columns and batches have of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.batching import MASKED_EVERY
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.datasets.tables.derived import with_user_day
from recsuite.errors import UserError
from tests.support.csv_ratings import write_ratings

DAY = 86_400
NUM_USERS, NUM_DAYS = 6, 3


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Each of six users rates 40 movies within three days, which begin on the last of a year."""
    rng = np.random.default_rng(0)
    begin = int(np.datetime64("1999-12-31").astype("datetime64[s]").astype(int))
    ratings = [
        (user, movie, 1 + movie % 5, begin + int(rng.integers(0, NUM_DAYS * DAY)))
        for user in range(NUM_USERS)
        for movie in range(40)
    ]
    write_ratings(tmp_path, ratings)
    return Config.of(
        data_path=str(tmp_path),
        split="random",
        validation_fraction=0.1,
        batch_size=64,
        day_feature="user",
    )


def test_each_day_of_each_user_has_a_row(config: Config) -> None:
    columns = open_columns(config)
    names = json.loads((Path(columns.folder) / "vocabulary.json").read_bytes())
    users = [names["user"][row] for row in columns.column("rows")["user"]]
    days = columns.column("time").astype("datetime64[s]").astype("datetime64[D]")
    expected = [f"{user} {day}" for user, day in zip(users, days, strict=True)]
    assert len(set(expected)) == NUM_USERS * NUM_DAYS
    rows = columns.column("rows")["features"][:, 0]
    found = [None, *names["user_day"]]
    assert [found[row] for row in rows] == expected


def test_training_events_have_the_row_of_their_day_except_a_few_with_the_unknown_row(config: Config) -> None:
    columns = open_columns(config)
    place = [table.name for table in columns.tables].index("user_day")
    batches = EventBatches(columns, config, rank=0, world_size=1)
    found = Counter[int]()
    for step in range(batches.num_steps("train")):
        batch = batches[Request("train", 0, step)]
        rows = batch.values[place * 64 : (place + 1) * 64]
        found.update(rows[batch.weights > 0].tolist())
    wanted = Counter(columns.column("rows")["features"][: columns.num_train, 0].tolist())
    num_unknown = found.pop(UNKNOWN_ROW)
    assert num_unknown == pytest.approx(columns.num_train / MASKED_EVERY, abs=1)
    assert found <= wanted
    assert (wanted - found).total() == num_unknown


def test_columns_without_days_stay_apart_from_those_with_them(config: Config) -> None:
    without = open_columns(config.replaced(day_feature="none"))
    assert "user_day" not in [table.name for table in without.tables]
    assert open_columns(config).folder != without.folder


def test_days_that_have_one_event_each_are_skipped_and_reported(config: Config) -> None:
    ratings = [
        (user, movie, 3, (40 * user + movie) * DAY) for user in range(NUM_USERS) for movie in range(40)
    ]
    write_ratings(Path(config.data.data_path), ratings)
    columns = open_columns(config)
    assert [note for note in columns.notes if "day" in note] == [
        "--day_feature user has no effect: the 240 events are of 240 days of users, so most would have a row "
        "of their own"
    ]
    assert "user_day" not in [table.name for table in columns.tables]


def test_a_feature_of_the_same_name_is_refused() -> None:
    with pytest.raises(
        UserError, match="have a feature user_day, as the one of --day_feature user is called"
    ):
        with_user_day(with_user_day(SCHEMA))
