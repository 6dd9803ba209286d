"""Features whose batches have ids: the same values as those that have rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import xxhash

from recsuite import ids as ids_module
from recsuite.config.config import Config
from recsuite.datasets.batches import Batch, EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import DYNAMIC, SCHEMA_FILE, Feature, schema_of
from recsuite.datasets.tables.schema_file import parse_schema
from recsuite.errors import UserError
from recsuite.extras.guess.writer import text_of
from recsuite.files import plain, typed
from recsuite.ids import UNKNOWN_ID, ids_of
from recsuite.models.losses import SampledSoftmax
from tests.support.batches import lists_of

SCHEMA = """
[user]
column = "user_id"
[item]
column = "sku"
[label]
kind = "rating"
column = "stars"
lowest = 1
highest = 5
[timestamp]
column = "time"
format = "unix"
[features.tags]
of = "item"
column = "tags"
kind = "list"
[features.age]
of = "user"
column = "age"
kind = "number"
[features.device]
of = "event"
column = "device"
kind = "category"
"""
SPLITS = ("train", "validation", "test", "catalogue")


def write_tables(folder: Path, schema: str = SCHEMA, **columns: Any) -> Path:
    """Events of users with numbers, some below zero, and of items with texts; as time passes others come."""
    draw = np.random.default_rng(0)
    number = 2_000
    moment = np.arange(number)
    user = 40 * moment // number + draw.integers(0, 10, number) - 20
    item = 20 * moment // number + draw.integers(0, 12, number)
    tags = np.array([f"{each % 3}|{'x' * (each % 4)}y|z" if each % 5 else "" for each in item])
    table = {
        "user_id": user * 2**56,
        "sku": [f"SKU-{each}" for each in item],
        "stars": draw.integers(1, 6, number),
        "time": 1_700_000_000 + moment * 60,
        "tags": tags,
        "age": np.where(user % 7 == 0, np.nan, user + 40.0),
        "device": draw.choice(["phone", "desktop", ""], number),
    }
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame({**table, **columns}).to_csv(folder / "events.csv", index=False)
    (folder / "schema.toml").write_text(schema)
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = write_tables(tmp_path_factory.mktemp("ids") / "tables")
    return Config.of(
        data_path=str(folder), batch_size=60, history=4, vocabulary="dynamic", validation_fraction=0.05
    )


@pytest.fixture(scope="module")
def columns(config: Config) -> Columns:
    return open_columns(config)


def vocabulary_of(columns: Columns) -> dict[str, Any]:
    """The raw values of each feature."""
    found: dict[str, Any] = json.loads((Path(columns.folder) / "vocabulary.json").read_text())
    return found


def values_of(columns: Columns, batch: Batch) -> dict[str, np.ndarray]:
    """Of each table, what a batch has of it."""
    return {name: np.concatenate(lists) for name, lists in lists_of(columns.tables, batch).items()}


def test_every_category_is_dynamic_and_no_number(columns: Columns) -> None:
    found = {table.name: table.feature.ids for table in columns.tables}
    dynamic = dict.fromkeys(("user", "item", "device", "tags", "history"), "dynamic")
    assert found == {**dynamic, "age": "vocabulary"}


def test_batches_have_the_ids_of_the_values_whose_rows_a_vocabulary_has(
    config: Config, columns: Columns
) -> None:
    static = open_columns(config.replaced(vocabulary="fixed"))
    known = vocabulary_of(static)
    ids = {
        table.name: np.concatenate([[UNKNOWN_ID], ids_of(known[static.schema.vocabulary_of(table.name)])])
        for table in static.tables
        if table.name != "age"
    }
    unseen = 0
    for split in SPLITS:
        dynamic_batches, batches = (EventBatches(each, config, 0, 1) for each in (columns, static))
        for step in range(batches.num_steps(split)):
            found, expected = (each[Request(split, 1, step)] for each in (dynamic_batches, batches))
            for name, tensor in expected._asdict().items():
                if name != "values":
                    torch.testing.assert_close(getattr(found, name), tensor, rtol=0, atol=0, equal_nan=True)
            found_values = values_of(columns, found)
            for name, rows in values_of(static, expected).items():
                if name == "age":
                    np.testing.assert_array_equal(found_values[name], rows)
                    continue
                # A value that no training event shows has an id all the same.
                trained = np.isin(found_values[name], ids[name])
                np.testing.assert_array_equal(found_values[name][trained], ids[name][rows[trained]])
                assert (rows[~trained] == 0).all()
                unseen += int(np.count_nonzero(~trained))
            # Training has no other values, and a few events of unknown users.
            assert split != "train" or (unseen == 0 and UNKNOWN_ID in found_values["user"])
    assert unseen > 0


def test_padding_has_the_unknown_id_and_no_history(config: Config, columns: Columns) -> None:
    dataset = EventBatches(columns, config, 0, 1)
    last = dataset[Request("test", 0, dataset.num_steps("test") - 1)]
    padding = last.weights.numpy() == 0
    assert 0 < padding.sum() < len(padding)
    values = values_of(columns, last)
    for name in ("user", "item", "device"):
        assert (values[name][padding] == UNKNOWN_ID).all()
    assert values["tags"][-1] == UNKNOWN_ID


def test_all_values_of_the_files_are_known_and_each_has_its_id(columns: Columns) -> None:
    events = pandas.read_csv(Path(columns.source) / "events.csv")
    found = vocabulary_of(columns)
    assert found["user"] == sorted({*events["user_id"].tolist()})
    assert found["item"] == sorted({*events["sku"]})
    assert found["device"] == ["desktop", "phone"]
    for table in columns.tables:
        if table.feature.is_dynamic:
            known = found[columns.schema.vocabulary_of(table.name)]
            ids = columns.ids_of(table.name)
            assert ids is not None
            assert ids.dtype == np.int64
            assert ids.tolist() == [UNKNOWN_ID, *ids_of(known).tolist()]
            assert table.rows == len(known) + 1
    assert min(found["user"]) < 0


def test_the_ranking_loss_uses_the_shares_of_ids(config: Config, columns: Columns) -> None:
    static = open_columns(config.replaced(vocabulary="fixed"))
    known = vocabulary_of(static)["item"]
    by_id, by_row = SampledSoftmax.of(columns), SampledSoftmax.of(static)
    rows = torch.arange(len(known) + 1)
    ids = torch.from_numpy(np.concatenate([[UNKNOWN_ID], ids_of(known)]))
    assert torch.equal(by_id._log_shares_of(ids), by_row._log_shares_of(rows))
    # Those that no data have are as rare as one event.
    strange = torch.tensor([UNKNOWN_ID + 1, 5, 2**63 - 1])
    assert torch.equal(
        by_id._log_shares_of(strange), by_row._log_shares_of(torch.zeros(3, dtype=torch.int64))
    )


def test_ids_of_each_kind_have_columns_of_their_own_and_are_found_again(config: Config) -> None:
    folders = {
        ids: open_columns(config.replaced(vocabulary=ids)).folder for ids in ("schema", "fixed", "dynamic")
    }
    assert folders["schema"] == folders["fixed"] != folders["dynamic"]
    for ids, folder in folders.items():
        assert open_columns(config.replaced(vocabulary=ids)).folder == folder
    recorded = schema_of(json.loads((Path(folders["dynamic"]) / SCHEMA_FILE).read_text()))
    assert {feature.name for feature in recorded.features if feature.is_dynamic} >= {"user", "item", "tags"}


def test_a_schema_sets_dynamic_ids_for_each_feature(config: Config, tmp_path: Path) -> None:
    text = SCHEMA.replace('column = "sku"', 'column = "sku"\nids = "dynamic"')
    text = text.replace('kind = "category"', 'kind = "category"\nids = "dynamic"')
    folder = write_tables(tmp_path / "tables", text)
    config = config.replaced(data_path=str(folder), vocabulary="schema")
    tables = open_columns(config).tables
    assert {each.name for each in tables if each.feature.is_dynamic} == {"item", "device", "history"}
    tables = open_columns(config.replaced(vocabulary="fixed")).tables
    assert not any(each.feature.is_dynamic for each in tables)
    schema = parse_schema(text)
    assert parse_schema(text_of(schema)) == schema
    assert "ids" not in "\n".join(
        line for line in text_of(parse_schema(SCHEMA)).splitlines() if not line.startswith("#")
    ).replace("user_id", "")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('kind = "category"', 'kind = "category"\nids = "hashed"', ("hashed", "vocabulary, dynamic")),
        ('column = "sku"', 'column = "sku"\nids = "any"', ("[item]", "any", "vocabulary, dynamic")),
        ('kind = "number"', 'kind = "number"\nids = "dynamic"', ("ids", "number", "remove it")),
    ],
)
def test_ids_that_a_schema_cannot_ask_for_are_refused(
    before: str, after: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refusal:
        parse_schema(SCHEMA.replace(before, after))
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_record_has_the_kind_of_ids_only_if_they_are_dynamic() -> None:
    feature = Feature("genres", "item", "genres", multi=True)
    assert "ids" not in plain(feature)
    dynamic = dataclasses.replace(feature, ids=DYNAMIC)
    assert plain(dynamic)["ids"] == "dynamic"
    for each in (feature, dynamic):
        assert typed(Feature, plain(each)) == each
    with pytest.raises(ValueError, match="instead of"):
        typed(Feature, {name: value for name, value in plain(feature).items() if name != "multi"})


def test_numbers_are_their_own_ids_up_to_the_ends_of_64_bits() -> None:
    numbers = [UNKNOWN_ID + 1, -1, 0, 1, 2**53 + 1, 2**63 - 1]
    assert ids_of(numbers).tolist() == ids_of(np.array(numbers)).tolist() == numbers
    assert ids_of([1995.0, 2.0]).tolist() == [1995, 2]
    assert ids_of([]).dtype == np.int64


def test_texts_of_any_length_have_the_64_bits_of_their_digest() -> None:
    texts = ["", "a", "Größe", "\ud800", "x" * 10**6, "5"]
    for text, found in zip(texts, ids_of(texts).tolist(), strict=True):
        assert found % 2**64 == xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
    assert len({*ids_of(texts).tolist(), 5}) == len(texts) + 1
    assert ids_of(np.array(texts[:3], object)).tolist() == ids_of(texts[:3]).tolist()


@pytest.mark.parametrize("value", [UNKNOWN_ID, 2**63, -(2**63) - 1, 0.5])
def test_a_number_that_cannot_be_an_id_is_refused(value: float) -> None:
    with pytest.raises(UserError) as refusal:
        ids_of([3, value])
    assert str(value) in str(refusal.value)
    assert "--vocabulary fixed" in str(refusal.value)


def test_the_sentinel_as_a_raw_id_is_refused_in_the_files(config: Config, tmp_path: Path) -> None:
    ends = np.array([UNKNOWN_ID, 2**63 - 1, -5, 7])[np.arange(2_000) % 4]
    config = config.replaced(data_path=str(write_tables(tmp_path / "tables", user_id=ends)))
    with pytest.raises(UserError, match=f"{UNKNOWN_ID} is reserved"):
        open_columns(config)
    write_tables(tmp_path / "tables", user_id=np.where(ends == UNKNOWN_ID, UNKNOWN_ID + 1, ends))
    assert vocabulary_of(open_columns(config))["user"] == [UNKNOWN_ID + 1, -5, 7, 2**63 - 1]


def test_two_texts_with_one_id_are_refused_by_their_names(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.replaced(data_path=str(write_tables(tmp_path / "tables")))
    digest = ids_module.id_of_bytes
    monkeypatch.setattr(
        ids_module, "id_of_bytes", lambda content: digest(content.replace(b"SKU-17", b"SKU-4"))
    )
    with pytest.raises(UserError) as refusal:
        open_columns(config)
    for word in ("'SKU-17'", "'SKU-4'", "item", "rename"):
        assert word in str(refusal.value)
