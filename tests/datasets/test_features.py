"""The table of features may stand in any order: what a user or a movie is, is found by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from example import make_model
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW, Feature, Schema
from recsuite.errors import UserError
from recsuite.extras.recommend.recommend import open_viewer, page
from recsuite.runtime.process import RuntimeContext
from recsuite.serving.served import ServedModel
from tests.support.batches import lists_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

USER, GENDER, _, _, MOVIE, YEAR, GENRES = SCHEMA.features
# Each entity's own feature before and after another one, in either order of entities.
TABLES = [(USER, GENDER, MOVIE, YEAR, GENRES), (GENRES, YEAR, MOVIE, GENDER, USER)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    write_synthetic(folder, 3_000, seed=0)
    return Config.of(
        data_path=str(folder), batch_size=256, history=3, epochs=2, mlp_dims=(8,), embedding_dim=8
    )


def schema_of(table: Sequence[Feature]) -> Schema:
    return dataclasses.replace(SCHEMA, features=tuple(table))


def opened(config: Config, table: Sequence[Feature], patch: pytest.MonkeyPatch) -> Columns:
    patch.setattr("recsuite.datasets.movielens.source.SCHEMA", schema_of(table))
    return open_columns(config)


def by_name(columns: Columns, config: Config, request: Request) -> dict[str, Any]:
    """Return the values of a batch by the names of its features."""
    batch = EventBatches(columns, config, 0, 1)[request]
    lists = lists_of(columns.tables, batch)
    return {
        **{name: [rows.tolist() for rows in of_feature] for name, of_feature in lists.items()},
        "ratings": (batch.labels.tolist(), batch.history_labels.tolist()),
    }


def test_batches_hold_the_same_of_every_feature_for_every_order_of_the_table(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = opened(config, TABLES[0], monkeypatch)
    requests = [
        Request("train", 0, 0),
        Request("train", 1, 3),
        Request("test", 0, 0),
        Request("catalogue", 0, 0),
    ]
    expected = [by_name(usual, config, request) for request in requests]
    # Some ratings are of nobody, and others are of somebody of each gender.
    assert expected[0]["user"].count([UNKNOWN_ROW]) == 256 // 64
    assert [UNKNOWN_ROW] not in expected[0]["gender"]
    for place, table in enumerate([*permutations((USER, GENDER, MOVIE, YEAR))][::5]):
        # Lists stand last in a batch, wherever they are in the table.
        found = opened(config, [*table[: place % 5], GENRES, *table[place % 5 :]], monkeypatch)
        assert [by_name(found, config, request) for request in requests] == expected
        np.testing.assert_array_equal(found.item_shares(), usual.item_shares())


def test_recommended_and_known_items_are_the_same_for_any_order_of_the_table(
    config: Config, context: RuntimeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from example import train

    pages = []
    for place, table in enumerate(TABLES):
        monkeypatch.setattr("recsuite.datasets.movielens.source.SCHEMA", schema_of(table))
        save_dir = str(tmp_path / str(place))
        train(config.replaced(save_dir=save_dir, dump=True), context)
        model = ServedModel.open(Path(save_dir), model=make_model)
        asked = Config.of(recommend=True, user="7", data_path=config.data.data_path)
        viewer = open_viewer(model, asked, ["data_path"])
        # The first line says how old the model is.
        pages.append(page(model, viewer, top=5).splitlines()[1:])
    assert pages[1] == pages[0]
    assert sum(line.startswith("| ") for line in pages[0]) == 6
    assert pages[0][0].startswith("user 7 rated")


def test_files_use_the_data_sets_names_of_users_and_items(config: Config) -> None:
    entities = {"user": "user", "item": "movie", "history": "history"}
    for feature in (*SCHEMA.features, SCHEMA.history):
        recorded = SCHEMA.recorded(feature)
        assert recorded == dataclasses.replace(feature, entity=entities[feature.entity])
        assert SCHEMA.restored(recorded) == feature
    columns = open_columns(config)
    manifest = json.loads((Path(columns.folder) / "manifest.json").read_bytes())
    assert manifest["num_movies"] == columns.num_items
    assert {table["feature"]["entity"] for table in manifest["tables"]} == {"user", "movie"}
    assert (Path(columns.folder) / "movie_features.npy").is_file()


@pytest.mark.parametrize("missing", ["user", "movie"])
def test_a_table_without_an_entitys_own_feature_is_refused(
    config: Config, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"user": "gender, age, occupation for a user", "movie": "year for a movie"}
    table = [feature for feature in SCHEMA.features if feature.name != missing]
    with pytest.raises(UserError, match=f'{others[missing]}, and not the feature "{missing}" itself'):
        opened(config, table, monkeypatch)
