"""Tables with features of the event, numbers and weights: columns, batches and trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from example import make_loss, make_model
from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets.batches import Batch, EventBatches, Request
from recsuite.datasets.columns import Columns, record_type
from recsuite.datasets.opening import fitted_to_tables, open_data
from recsuite.datasets.preparation.cache import name_of_columns, open_columns
from recsuite.datasets.preparation.vocabulary import Scale, encoding_of, fit
from recsuite.datasets.schema import BUCKETS, DENSE, UNKNOWN_ROW
from recsuite.datasets.source import locate
from recsuite.errors import UserError
from recsuite.metrics import finite
from recsuite.runtime.process import RuntimeContext
from recsuite.training.loop import Training
from tests.support.batches import lists_of
from tests.support.launch import EXAMPLE, read_json, succeeded, torchrun

NUM_EVENTS, NUM_USERS, NUM_ITEMS = 3_000, 60, 40
SCHEMA = """
[user]
column = "user_id"
[item]
column = "product_id"
[label]
{label}
[timestamp]
column = "time"
format = "unix"
[features.price]
of = "item"
column = "price"
kind = "number"
input = "dense"
[features.age]
of = "user"
column = "age"
kind = "number"
input = "buckets"
[features.discount]
of = "event"
column = "discount"
kind = "number"
input = "dense"
[features.device]
of = "event"
column = "device"
kind = "category"
[features.hour]
of = "event"
column = "hour(timestamp)"
kind = "category"
{more}
"""
RATING = 'kind = "rating"\ncolumn = "stars"\nlowest = 1\nhighest = 5'
KINDS = {
    "rating": RATING,
    "yes_no": 'kind = "yes_no"\ncolumn = "clicked"',
    "clicks": 'kind = "clicks"',
    "count": 'kind = "count"\ncolumn = "plays"',
}


def events() -> pandas.DataFrame:
    """Each pair of a user and an item at most once; stars and clicks follow price, discount and device."""
    draw = np.random.default_rng(0)
    pairs = draw.permutation(NUM_USERS * NUM_ITEMS)[: NUM_EVENTS // 2]
    user, item = pairs // NUM_ITEMS, pairs % NUM_ITEMS
    price, age = np.exp(draw.normal(3, 1, NUM_ITEMS)), draw.integers(18, 80, NUM_USERS).astype(float)
    price[7], age[3] = np.nan, np.nan
    discount = draw.random(len(user))
    discount[::9] = np.nan
    device = draw.choice(["phone", "desktop", "tablet"], len(user))
    liking = 2 * np.nan_to_num(discount) + (device == "phone") - np.nan_to_num(price[item] > 20) * 1.0
    return pandas.DataFrame(
        {
            "user_id": [f"user-{each}" for each in user],
            "product_id": [f"SKU-{each:02}" for each in item],
            "time": 1_700_000_000 + np.arange(len(user)) * 1_000,
            "stars": (3 + liking).clip(1, 5),
            "clicked": draw.random(len(user)) < 1 / (1 + np.exp(-2 * liking)),
            "plays": draw.integers(0, 50, len(user)),
            "price": price[item],
            "age": age[user],
            "discount": discount,
            "device": device,
            "trust": draw.integers(1, 4, len(user)).astype(float),
        }
    )


def write_tables(folder: Path, kind: str = "rating", more: str = "") -> Path:
    """The events with a schema.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    events().to_parquet(folder / "events.parquet")
    (folder / "schema.toml").write_text(SCHEMA.format(label=KINDS[kind], more=more))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("own") / "tables")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return Config.of(data_path=str(folder), batch_size=128)


@pytest.fixture(scope="module")
def columns(config: Config) -> Columns:
    return open_columns(config)


def vocabulary_of(columns: Columns) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(columns.folder) / "vocabulary.json").read_text())
    return found


def rows_of(batch: Batch, columns: Columns, name: str) -> np.ndarray:
    """The table rows of a feature with one value."""
    return np.concatenate(lists_of(columns.tables, batch)[name])


def test_a_batch_has_the_values_of_the_table_row_of_each_event(columns: Columns, config: Config) -> None:
    (batch,) = [EventBatches(columns, config.replaced(batch_size=300), 0, 1)[Request("test", 0, 0)]]
    newest = events().iloc[-columns.num_test :].reset_index(drop=True)
    real = slice(columns.num_test)
    found = vocabulary_of(columns)
    devices = [None, *found["device"]]
    assert [devices[row] for row in rows_of(batch, columns, "device")[real]] == newest["device"].tolist()
    hours = [None, *found["hour"]]
    assert [hours[row] for row in rows_of(batch, columns, "hour")[real]] == (
        newest["time"] // 3_600 % 24
    ).tolist()
    edges = np.array(found["age"]["edges"])
    expected = np.where(newest["age"].isna(), UNKNOWN_ROW, np.searchsorted(edges, newest["age"], "right") + 1)
    assert rows_of(batch, columns, "age")[real].tolist() == expected.tolist()
    assert [feature.name for feature in columns.numbers] == ["price", "discount"]
    for place, name in enumerate(("price", "discount")):
        scale = encoding_of(found[name])
        assert isinstance(scale, Scale)
        values = np.log1p(newest[name]) if scale.is_log else newest[name]
        np.testing.assert_allclose(
            batch.numbers[real, place], (values - scale.mean) / scale.spread, rtol=1e-5, atol=1e-5
        )
    assert [found[name]["is_log"] for name in ("price", "discount")] == [True, False]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('column = "stars"', 'column = "plays"\nnoun = "stars"'),
        ("[features.price]", '[weight]\ncolumn = "trust"\n[features.price]'),
        ('kind = "number"\ninput = "dense"', 'kind = "number"\ninput = "buckets"'),
        ("[user]", '[files]\nencoding = "latin-1"\n[user]'),
    ],
)
def test_an_edited_schema_is_another_set_of_columns(
    folder: Path, tmp_path: Path, before: str, after: str
) -> None:
    schema = (folder / "schema.toml").read_text()
    assert before in schema
    first = write_tables(tmp_path / "tables")
    names = []
    for text in (schema, schema.replace(before, after, 1)):
        (first / "schema.toml").write_text(text)
        source = locate(DataConfig(data_path=str(first)), 0)
        names.append(name_of_columns({}, source.key, DataConfig(), 0))
    assert names[0] != names[1]


def test_a_number_is_encoded_equally_in_columns_and_requests(columns: Columns) -> None:
    values = np.array([0.1, 0.2, 0.7, 1.1, 19.99, 4.4, 9.95, np.nan, 1e300])
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    for number in (BUCKETS, DENSE):
        encoding = fit(stored, number)
        np.testing.assert_array_equal(encoding.encode(stored), encoding.encode(values))


def test_numbers_are_scaled_by_the_training_events_alone(folder: Path, tmp_path: Path) -> None:
    changed = events()
    later = changed.index >= len(changed) * 0.8
    changed.loc[later, "discount"] += 1_000
    other = write_tables(tmp_path / "other")
    changed.to_parquet(other / "events.parquet")
    scales = [vocabulary_of(open_columns(Config.of(data_path=str(path)))) for path in (folder, other)]
    assert scales[0]["discount"] == scales[1]["discount"]


def test_some_training_events_have_masked_ids_and_no_evaluated_ones(columns: Columns, config: Config) -> None:
    dataset = EventBatches(columns, config, 0, 1)
    unknown = {"device": 0, "discount": 0}
    for step in range(dataset.num_steps("train")):
        batch = dataset[Request("train", 0, step)]
        real = batch.weights.numpy() > 0
        is_unknown = rows_of(batch, columns, "device")[real] == UNKNOWN_ROW
        unknown["device"] += int(is_unknown.sum())
        # Whatever else the event has is unknown with it.
        assert batch.numbers[torch.from_numpy(real), 1][torch.from_numpy(is_unknown)].isnan().all()
        assert (rows_of(batch, columns, "hour")[real][is_unknown] == UNKNOWN_ROW).all()
    assert columns.num_train // 64 <= unknown["device"] <= columns.num_train // 64 + 1
    catalogue = dataset[Request("catalogue", 0, 0)]
    assert (rows_of(catalogue, columns, "device") == UNKNOWN_ROW).all()
    assert catalogue.numbers[: columns.num_items, 1].isnan().all()
    assert not catalogue.numbers[: columns.num_items, 0].isnan().all()


def test_more_ranks_make_the_same_batches(columns: Columns, config: Config) -> None:
    whole = EventBatches(columns, config.replaced(batch_size=192), 0, 1)
    parts = [EventBatches(columns, config.replaced(batch_size=192), rank, 3) for rank in range(3)]
    for step in range(whole.num_steps("train")):
        batch = whole[Request("train", 0, step)]
        of_ranks = [part[Request("train", 0, step)] for part in parts]
        joined = np.concatenate([each.numbers for each in of_ranks])
        np.testing.assert_array_equal(batch.numbers, joined)
        for name in ("device", "age", "user"):
            rows = np.concatenate([rows_of(each, columns, name) for each in of_ranks])
            np.testing.assert_array_equal(rows_of(batch, columns, name), rows)


def test_weights_count_in_training_in_the_proportion_that_the_table_gives_and_nowhere_else(
    tmp_path: Path,
) -> None:
    config = Config.of(
        data_path=str(write_tables(tmp_path / "weighted", more='[weight]\ncolumn = "trust"')), batch_size=2048
    )
    columns = open_columns(config)
    dataset = EventBatches(columns, config, 0, 1)
    train, test = dataset[Request("train", 0, 0)], dataset[Request("test", 0, 0)]
    assert any("its trust says: from 1 to 3, the median is 2;" in note for note in columns.notes)
    weights = train.weights.numpy()[: columns.num_train]
    assert weights.mean() == pytest.approx(2048 / columns.num_train, rel=1e-5)
    assert np.unique((weights / weights.min()).round(4)).tolist() == [1, 2, 3]
    assert len(np.unique(test.weights.numpy()[: columns.num_test])) == 1


def test_all_that_a_batch_needs_of_an_event_lies_in_its_record(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "recorded", more='[weight]\ncolumn = "trust"')
    columns = open_columns(Config.of(data_path=str(folder)))
    rows = columns.column("rows")
    fields = [("user", np.int32), ("item", np.int32), ("label", np.float32), ("history_end", np.int32)]
    # The device and the hour, and the discount.
    assert rows.dtype == record_type([*fields, ("weight", np.float32)], features=2, numbers=1)
    assert rows.dtype.itemsize == 4 * 8
    np.testing.assert_array_equal(rows["label"], columns.column("rating"))
    newest = slice(columns.range_of("test").start, len(rows))
    told = events().iloc[-columns.num_test :]
    assert (rows["weight"][newest] / rows["weight"].min()).round(4).tolist() == told["trust"].tolist()
    assert np.isnan(rows["numbers"][newest, 0]).tolist() == told["discount"].isna().tolist()
    # Prices are numbers of the items.
    items = columns.column(f"{columns.schema.item}_features")
    assert items.dtype == record_type(features=1, numbers=1)


@pytest.mark.parametrize(
    ("kind", "task"),
    [("rating", "rating"), ("yes_no", "response"), ("clicks", "ranking"), ("count", "ranking")],
)
def test_the_task_follows_the_labels_unless_one_is_given_that_fits(
    tmp_path: Path, kind: str, task: str
) -> None:
    config = Config.of(data_path=str(write_tables(tmp_path / kind, kind)))
    assert fitted_to_tables(config, []).model.task == task
    other = "rating" if task == "response" else "response"
    sentence = f"--task {other} does not support labels of the kind {kind}; give --task {task}"
    with pytest.raises(UserError, match=sentence):
        fitted_to_tables(config.replaced(task=other), ["task"])


def test_open_data_refuses_to_predict_ratings_from_clicks(tmp_path: Path, context: RuntimeContext) -> None:
    # No task is given, so it is that of ratings.
    config = Config.of(data_path=str(write_tables(tmp_path / "clicks", "clicks")))
    sentence = "--task rating does not support labels of the kind clicks; give --task ranking"
    with pytest.raises(UserError, match=sentence), open_data(config, context):
        pass


def test_leakage_is_refused_before_training(tmp_path: Path, context: RuntimeContext) -> None:
    price = '[features.paid]\nof = "event"\ncolumn = "price"\nkind = "number"'
    config = Config.of(data_path=str(write_tables(tmp_path / "leaking", more=price)), task="ranking")
    with (
        pytest.raises(UserError, match="--task ranking cannot use the feature paid"),
        open_data(config, context),
    ):
        pass


def test_tables_without_times_are_split_at_random_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tables(tmp_path / "timeless")
    schema = (folder / "schema.toml").read_text()
    begin, end = schema.index("[timestamp]"), schema.index("[features.price]")
    hour = schema.index("[features.hour]")
    (folder / "schema.toml").write_text(schema[:begin] + schema[end:hour])
    config = Config.of(data_path=str(folder))
    assert fitted_to_tables(config, []).data.split == "random"
    assert "--split random, because the events have no times" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--split time requires events in order.* give --split random"):
        fitted_to_tables(config, ["split"])


def test_events_without_times_are_in_order_only_where_order_rows_says_so(tmp_path: Path) -> None:
    draw, columns = np.random.default_rng(3), {}
    rows = [f"{user},{item}" for user, item in draw.integers(0, 30, (400, 2)).tolist()]
    for name, heading in (("timeless", "user_id,item_id"), ("timed", "user_id,item_id,timestamp")):
        # The second file comes after the first.
        for file, part in (("1.csv", range(250)), ("2.csv", range(250, 400))):
            lines = [
                f"{rows[place]},{1_600_000_000 + place}" if name == "timed" else rows[place] for place in part
            ]
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_text("\n".join([heading, *lines]))
        order = "rows" if name == "timeless" else "time"
        flags: dict[str, Any] = {"data_path": str(tmp_path / name), "task": "sequence", "order": order}
        config = Config.of(**flags, split="leave_one_out")
        assert fitted_to_tables(config, []) == config
        columns[name] = open_columns(config)
        refusal = "requires events in order" if name == "timeless" else "requires events without times"
        with pytest.raises(UserError, match=refusal):
            fitted_to_tables(config.replaced(order="time" if name == "timeless" else "rows"), [])
        # The newest is the last row.
        assert fitted_to_tables(Config.of(**flags), ["split"]).data.split == "time"
    by_rows, by_times = (columns[name].column("rows") for name in ("timeless", "timed"))
    for name in ("user", "item", "history_end"):
        assert by_rows[name].tolist() == by_times[name].tolist()
    for name in ("history", "history_before"):
        assert columns["timeless"].column(name).tolist() == columns["timed"].column(name).tolist()


def test_ranks_train_the_same_model_of_events_features_and_numbers(
    folder: Path, tmp_path: Path, context: RuntimeContext
) -> None:
    flags: dict[str, Any] = {"data_path": str(folder), "epochs": 1, "lr": 0.1, "preset": "none"}
    config = Config.of(**flags, batch_size=192)
    with open_data(config, context) as data:
        run = Training(data, config, context).run(make_model, make_loss)
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    succeeded(torchrun(2, EXAMPLE, *words, "--batch_size", 192, "--report_dir", tmp_path))
    found = read_json(tmp_path / "metrics.json")
    assert found["test"] == pytest.approx(finite(run.test.values), abs=1e-4)
    assert found["epochs"][0]["train_loss"] == pytest.approx(run.epochs[0].train_loss, abs=1e-4)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("train.csv", "valid.csv", "test.csv"), (60, 20, 30)),
        (
            ("train_test/shop-training.csv", "train_test/shop-dev.csv", "train_test/shop-testing.csv"),
            (60, 20, 30),
        ),
        (("ratings_train.csv", "ratings_train_2.csv", "ratings_test.csv"), (72, 8, 30)),
    ],
)
def test_the_files_of_a_split_are_that_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], sizes: tuple[int, int, int]
) -> None:
    for name, first, number in zip(names, (0, 60, 80), (60, 20, 30), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        # Each pair comes in several files, and the test is no later than the training.
        rows = [
            f"{row % 7},{row % 5},{row % 3 + 1},{1_600_000_000 + row % 60}"
            for row in range(first, first + number)
        ]
        (tmp_path / name).write_text("\n".join(["user,item,rating,time", *rows]))
    label = '[label]\nkind = "rating"\ncolumn = "rating"\nlowest = 1\nhighest = 3\n'
    time = '[timestamp]\ncolumn = "time"\nformat = "unix"\n'
    ids = '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n'
    (tmp_path / "schema.toml").write_text(ids + label + time)
    config = fitted_to_tables(Config.of(data_path=str(tmp_path), task="rating"), ["task"])
    assert config.data.split == "files"
    assert "--split files, because the files are called train and test" in capsys.readouterr().out
    # Also where a script has another default than the flag.
    of_script = Config.of(data_path=str(tmp_path), task="rating", split="leave_one_out")
    assert fitted_to_tables(of_script, ["task"]).data.split == "files"
    columns = open_columns(config)
    assert (columns.num_train, columns.num_validation, columns.num_test) == sizes
    assert sorted(columns.column("time")[-30:]) == sorted(1_600_000_000 + row % 60 for row in range(80, 110))
    # Whoever names another split has it.
    named = config.replaced(split="random")
    assert fitted_to_tables(named, ["task", "split"]).data.split == "random"
    (tmp_path / names[-1]).unlink()
    with pytest.raises(UserError, match="--split files needs files that are called train, valid"):
        open_columns(config)


def test_the_split_of_a_checkpoint_holds_for_any_file_names(tmp_path: Path) -> None:
    for name in ("train", "test"):
        rows = [f"{row % 7},{row % 5},{row % 3 + 1},{1_600_000_000 + row}" for row in range(50)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["user,item,rating,timestamp", *rows]))
    config = Config.of(data_path=str(tmp_path), split="time")
    assert fitted_to_tables(config, [], is_recorded=True).data.split == "time"
    # A training that is to be resumed, and has no checkpoint yet, begins as any other.
    assert fitted_to_tables(config.replaced(resume=True), []).data.split == "files"
