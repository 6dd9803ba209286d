"""The raw values of a test, as a server is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.checkpoint.format import VOCABULARY
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import USER
from recsuite.datasets.source import locate
from tests.support.states import FLAGS


def raw_test_values(data: Path) -> dict[str, list[Any]]:
    """Raw values of the test ratings, as a server gets them."""
    config = Config.of(data_path=str(data))
    columns = open_columns(config)
    return {**raw_features(columns, config), **raw_histories(columns)}


def raw_histories(columns: Columns) -> dict[str, list[Any]]:
    """The histories of the test ratings, with their ratings."""
    # Of a movie that no training rating has, nothing is known.
    movies = [None, *json.loads((Path(columns.folder) / VOCABULARY).read_bytes())["movie"]]
    begins, held = columns.column("test_history_offsets"), columns.column("test_history")
    ratings = np.ascontiguousarray(held[:, 1]).view(np.float32)
    rows = columns.column("rows")[columns.range_of("test").start :]
    parts = [
        slice(max(begins[row["user"]], row["history_end"] - FLAGS.data.history), row["history_end"])
        for row in rows
    ]
    return {
        "history": [[movies[row] for row in held[part, 0]] for part in parts],
        "history_ratings": [ratings[part].tolist() for part in parts],
    }


def raw_features(columns: Columns, config: Config) -> dict[str, list[Any]]:
    """The features of the users and movies of the test ratings, without lists of who had what."""
    raw = read(locate(config.data, config.runtime.seed), config.data)
    rows = columns.column("rows")[columns.range_of("test").start :]
    entities = {"user": raw.users.iloc[rows["user"]], "item": raw.items.iloc[rows["item"]]}
    return {
        table.name: entities[table.feature.entity][table.feature.column].tolist()
        for table in columns.tables
        if table.feature.entity in entities
    }


def raw_days(columns: Columns) -> dict[str, list[str]]:
    """The days of the users of the test ratings."""
    places = columns.range_of("test")
    users = columns.column("rows")["user"][places.start :]
    names = json.loads((Path(columns.folder) / "vocabulary.json").read_bytes())["user"]
    days = columns.column("time")[places.start :].astype("datetime64[s]").astype("datetime64[D]")
    rows = columns.column("user_features")["features"][users, columns.place_of(USER)]
    return {"user_day": [f"{[None, *names][row]} {day}" for row, day in zip(rows, days, strict=True)]}


def raw_lists(columns: Columns) -> dict[str, list[list[object]]]:
    """All earlier and later items of the users of the test ratings, in raw ids, with their ratings."""
    movies = [None, *json.loads((Path(columns.folder) / "vocabulary.json").read_bytes())["movie"]]
    users = columns.column("rows")["user"][columns.range_of("test").start :]
    offsets, held = columns.column("test_history_offsets"), columns.column("test_history")
    ratings = np.ascontiguousarray(held[:, 1]).view(np.float32)
    parts = [slice(offsets[user], offsets[user + 1]) for user in users]
    return {
        "history": [[movies[row] for row in held[part, 0]] for part in parts],
        "history_ratings": [ratings[part].tolist() for part in parts],
    }
