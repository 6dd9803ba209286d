"""`recsuite.fit`: from frames to a model, on one process and on two."""

from __future__ import annotations

import ast
import io
import operator
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest

import recsuite
from example import make_loss, make_model
from recsuite.datasets.schema import EVENT
from recsuite.datasets.tables.sections import (
    FeatureColumn,
    ItemColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
)
from recsuite.datasets.tables.values import TIME, ColumnSpec
from recsuite.errors import UserError
from recsuite.extras.fit import _folder_of_launch, frame_of, in_arguments, parsed
from recsuite.metrics import finite
from recsuite.runtime.process import launch_name
from recsuite.serving.served import ServedModel
from tests.support.launch import read_json, succeeded, torchrun

FLAGS = {"epochs": 1, "batch_size": 256, "embedding_dim": 8, "mlp_dims": (8,)}
SCRIPT = """
import json, os, pathlib, sys
import pandas, recsuite
from example import make_loss, make_model
from recsuite.extras.fit import frame_of
from recsuite.errors import UserError

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    events, items = (pandas.read_parquet(folder / f"{name}.parquet") for name in ("events", "items"))
    found = {}
    try:
        recsuite.fit(events, model=make_model, loss=make_loss, items=items, schema="nope.toml")
    except UserError as error:
        found["mistake"] = str(error)
    model = recsuite.fit(
        events, model=make_model, loss=make_loss, items=items, epochs=1, batch_size=128, embedding_dim=8,
        mlp_dims=(8,),
    )
    found |= {"scores": model.score(events.head(5)).tolist(), "best": model.recommend(["user-3"], k=4)}
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


def frames(number: int = 3_000) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Events of 60 users and 40 items, whose stars follow the price of the item and the device."""
    draw = np.random.default_rng(0)
    user, item = draw.integers(60, size=number), draw.integers(40, size=number)
    price = np.exp(draw.normal(3, 1, 40)).round(2)
    device = draw.choice(["phone", "desktop"], number)
    stars = (
        3
        + np.where(price[item] < 20, 1, -1)
        + np.where(device == "phone", 1, 0)
        + draw.normal(0, 0.3, number)
    )
    events = pandas.DataFrame(
        {
            "user_id": [f"user-{each}" for each in user],
            "product_id": [f"SKU-{each:02}" for each in item],
            "stars": stars.round().clip(1, 5).astype(int),
            "device": device,
            "timestamp": pandas.Timestamp("2026-11-01") + pandas.to_timedelta(np.arange(number) * 600, "s"),
        }
    )
    ids = [f"SKU-{each:02}" for each in range(40)]
    return events, pandas.DataFrame(
        {"product_id": ids, "name": [f"Thing {each}" for each in ids], "price": price}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> recsuite.FittedModel:
    events, items = frames()
    # The rest is guessed, and no column of the event is taken by itself.
    schema = tmp_path_factory.mktemp("schema") / "schema.toml"
    schema.write_text('[features.device]\nof = "event"\ncolumn = "device"\nkind = "category"\n')
    return recsuite.fit(events, model=make_model, loss=make_loss, items=items, schema=schema, **FLAGS)


def test_a_model_of_frames_scores_their_rows_on_the_scale_of_the_labels(model: recsuite.FittedModel) -> None:
    events, _ = frames()
    scores = model.score(events).numpy()
    assert scores.shape == (len(events),)
    assert 1 <= scores.min() < scores.max() <= 5
    assert np.corrcoef(scores, events["stars"])[0, 1] > 0.5
    assert set(model.metrics) == {"rmse", "mae", "auc", "log_loss"}


def test_items_of_a_user_history_are_not_recommended(model: recsuite.FittedModel) -> None:
    events, _ = frames()
    had = set(events.loc[events["user_id"] == "user-7", "product_id"])
    ((*found,), (*everything,)) = model.recommend(["user-7", "nobody"], k=40)
    assert {item for item, _ in found} == set(events["product_id"]) - had
    assert {item for item, _ in everything} == set(events["product_id"])


def test_a_saved_model_scores_the_same_without_the_tables(
    model: recsuite.FittedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other_rank:
        other_rank.setenv("RANK", "1")
        model.save(tmp_path / "served")
    assert not (tmp_path / "served").exists()
    model.save(tmp_path / "served")
    values: dict[str, list[Any]] = {
        "user": ["user-1"],
        "item": ["SKU-05"],
        "device": ["phone"],
        "price": [12.5],
        "hour": [3],
        # Without the tables there is none.
        "history": [[]],
        "history_ratings": [[]],
    }
    served = ServedModel.open(tmp_path / "served", model=make_model)
    assert served.score(values).item() == pytest.approx(model.score(values).item(), abs=1e-6)
    with pytest.raises(UserError, match="exists already"):
        model.save(tmp_path / "served")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"epoch": 1}, "fit takes no flag epoch .did you mean epochs"),
        ({"data_path": "x"}, "fit takes no flag data_path"),
        ({"epochs": 0}, "--epochs must be between 1 and 1,000,000, got 0"),
        ({"epochs": "3"}, "fit takes a value of type int for epochs, and got '3'"),
        ({"schema": "nope.toml"}, "The schema nope.toml is not a file"),
        ({"schema": {"label": 3}}, r"The section label of schema must be a mapping, .* got 3\."),
        ({"schema": {"label": {"column": {1}}}}, "schema must be the path"),
        ({"schema": {"label": {"of": "x"}}}, r'^schema: \{"label": \{"of": "x"\}\} is not a key'),
    ],
)
def test_a_flag_that_cannot_be_gives_one_message(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        recsuite.fit(frames(50)[0], model=make_model, loss=make_loss, **flags)


def test_an_argument_that_is_no_frame_gives_one_message() -> None:
    with pytest.raises(UserError, match="events must be a table of pandas, polars"):
        recsuite.fit([1, 2, 3], model=make_model, loss=make_loss)


def test_a_frame_that_no_table_can_hold_gives_one_message() -> None:
    events, _ = frames(50)
    twice = pandas.concat([events, events[["device"]]], axis=1)
    with pytest.raises(UserError, match="events has a column 'device', and takes columns with one name each"):
        recsuite.fit(twice, model=make_model, loss=make_loss)
    mixed = events.assign(device=["phone", 3] * 25)
    with pytest.raises(UserError, match="The column device holds values of several types"):
        recsuite.fit(mixed, model=make_model, loss=make_loss)
    with pytest.raises(UserError, match="events has an index 'user_id', which is not read; call reset_index"):
        recsuite.fit(events.set_index("user_id"), model=make_model, loss=make_loss)
    with pytest.raises(UserError, match="The column z holds values of several types"):
        recsuite.fit(events.assign(z=1j), model=make_model, loss=make_loss)


class Streamed:
    """A table as polars and DuckDB offer theirs."""

    def __init__(self, frame: pandas.DataFrame) -> None:
        self.table = pyarrow.Table.from_pandas(frame)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def test_categories_as_polars_has_them_are_those_of_pandas() -> None:
    texts = pyarrow.array(["phone", "desktop"], pyarrow.string_view())
    device = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, None], pyarrow.uint32()), texts)
    table = pyarrow.table({"device": device, "stars": pyarrow.array([1, 2, None])})
    found = frame_of(table, "events")
    assert found["device"].tolist()[:2] == ["phone", "desktop"]
    assert found.dtypes.astype(str).to_dict() == {"device": "category", "stars": "int64[pyarrow]"}
    buffer = io.BytesIO()
    found.to_parquet(buffer)
    assert pandas.read_parquet(buffer)["device"].isna().tolist() == [False, False, True]


def held() -> list[int]:
    """The numbers of descriptors and of threads of this process."""
    return [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]


def test_fits_in_other_threads_take_any_arrow_table_and_keep_no_thread_descriptor_or_hook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    events, items = frames(300)
    hook = sys.excepthook
    found: list[recsuite.FittedModel] = []
    kept = []
    for seed in range(3):
        flags = {**FLAGS, "seed": seed}
        call = threading.Thread(
            target=lambda flags=flags: found.append(
                recsuite.fit(
                    Streamed(events),
                    model=make_model,
                    loss=make_loss,
                    items=pyarrow.Table.from_pandas(items),
                    **flags,
                )
            )
        )
        call.start()
        call.join()
        kept.append(held())
    assert len(found) == 3
    # Threads of torch end a moment after what they were for.
    deadline = time.monotonic() + 10
    while not (is_constant := all(map(operator.le, held(), kept[1]))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_constant, (held(), kept)
    assert sys.excepthook is hook
    rows = events.head(5)
    assert found[0].score(Streamed(rows)).tolist() == found[0].score(rows).tolist()
    assert repr(found[0]).startswith("FittedModel(60 users, 40 items, test: rmse ")
    # No file of frames is named, or stays.
    assert capsys.readouterr().out.count("guessed from the first rows") == 3
    assert not [*tmp_path.iterdir()]
    # The guess can be given again.
    tables = found[0].tables
    assert tables.label == LabelColumn("rating", "stars", 1.0, 5.0, 4.0, noun="rating")
    assert (
        recsuite.fit(events, model=make_model, loss=make_loss, schema=tables, items=items, **FLAGS).tables
        == tables
    )


def argument_in(text: str) -> Any:
    """The schema that a message of `fit` suggests."""
    return ast.literal_eval(re.findall(r"schema=(\{.*?\}\})", text)[0])


def test_advice_on_frames_is_an_argument_and_trains_when_it_is_followed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events, _ = frames(300)
    visits = np.arange(300) // 5
    events = events.assign(
        session_id=visits,
        user_id=pandas.Series(visits + 900).where(visits % 3 == 0),
        eventdate=[f"2018-09-{1 + visit % 28:02}" for visit in visits],
        score=[f"{stars} of 5" for stars in events["stars"]],
    )
    unnamed = events.rename(columns={"user_id": "a", "product_id": "b", "session_id": "c"})
    with pytest.raises(UserError) as refused:
        recsuite.fit(unnamed, model=make_model, loss=make_loss, **FLAGS)
    assert argument_in(str(refused.value)) == {"user": {"column": "NAME"}, "item": {"column": "NAME"}}
    unrated = events.drop(columns=["stars", "timestamp"])
    with pytest.raises(UserError) as refused:
        recsuite.fit(unrated, model=make_model, loss=make_loss, **FLAGS)
    label = argument_in(str(refused.value))
    assert label == {"label": {"kind": "clicks"}}
    with pytest.raises(UserError, match="the table events, row 6: user_id is missing") as missing:
        recsuite.fit(unrated, model=make_model, loss=make_loss, schema=label, **FLAGS)
    shown = capsys.readouterr().out
    user = argument_in(shown)
    assert user == {"user": {"column": "session_id"}}
    model = recsuite.fit(unrated, model=make_model, loss=make_loss, schema=label | user, **FLAGS)
    assert (model.tables.user.column, model.tables.label.kind) == ("session_id", "clicks")
    assert model.tables.timestamp == TimestampColumn("eventdate")
    for text in (str(refused.value), str(missing.value), shown, capsys.readouterr().out):
        assert not re.search(r"schema\.toml|\[(user|label|timestamp)\]|recsuite-fit-|/tmp|dumped", text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('drop = "<0", written under [label], leaves', 'drop = "<0", written under schema["label"], leaves'),
        ("no [timestamp] is in schema.toml", 'no schema["timestamp"]'),
        ("which [events] of schema.toml names", 'which schema["events"] names'),
        ("remove [features.price] from it", 'remove schema["features"]["price"] from it'),
        (
            'write into schema.toml, each on a line: [timestamp] column = "at" format = "%d.%m.%Y".',
            'give schema={"timestamp": {"column": "at", "format": "%d.%m.%Y"}}.',
        ),
        (
            'each on a line: [files] decimal_commas = ["a"] or [files] grouping_commas = ["a"].',
            'each on a line: {"files": {"decimal_commas": ["a"]}} or {"files": {"grouping_commas": ["a"]}}.',
        ),
        ("Cannot read /f/data/items.parquet, row 2: x", "Cannot read the table items, row 2: x"),
        (
            "reading /f/data; writing columns to /f/columns/time-5",
            "reading the tables; writing columns to a temporary folder",
        ),
        ("give --resume to continue, or --move_aside", "give resume=True to continue, or move_aside=True"),
        ("the values [1, 2] of [abc] stay", "the values [1, 2] of [abc] stay"),
    ],
)
def test_a_message_on_the_files_of_frames_names_arguments(text: str, told: str) -> None:
    assert in_arguments(text, Path("/f")) == told


def test_frames_with_decimal_commas_and_a_word_are_trained_and_scored() -> None:
    events, items = frames(300)
    events = events.assign(
        stars=[f"{stars},00" for stars in events["stars"]], paid=["3,50", "12,25", "free"] * 100
    )
    items = items.assign(price=[f"{price:.2f}" for price in items["price"][:-1]] + ["unknown"])
    paid = {"features": {"paid": {"of": "event", "column": "paid", "kind": "number"}}}
    model = recsuite.fit(
        events[events["paid"] != "free"], model=make_model, loss=make_loss, items=items, schema=paid, **FLAGS
    )
    assert (model.tables.label.kind, model.tables.files.decimal_commas) == ("rating", ("stars", "paid"))
    rows = events[events["paid"] == "3,50"].head(3)
    same = model.score(rows.assign(paid=3.5)).tolist()
    assert model.score(rows).tolist() == same != model.score(rows.assign(paid=12.25)).tolist()
    with pytest.raises(UserError, match="paid 'free' is not a number"):
        model.score(events[events["paid"] == "free"].head(3))


def test_a_bad_row_is_named_by_its_table_and_place() -> None:
    events, _ = frames(300)
    events.loc[250, "user_id"] = None
    with pytest.raises(UserError) as raised:
        recsuite.fit(events, model=make_model, loss=make_loss, **FLAGS)
    assert str(raised.value) == (
        'Cannot read the table events, row 251: user_id is missing. Fix: correct it, or give bad_rows="skip".'
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda model: model.recommend([["user-1"]]), r"The feature user takes .* not \['user-1'\]"),
        (lambda model: model.recommend(["user-1"], event="phone"), "event takes features of the coming"),
        (lambda model: model.score(None), "values must be a table of pandas.* got "),
        (lambda model: model.score({"price": [10**400]}), "price .* numbers"),
    ],
)
def test_values_that_a_model_cannot_use_give_one_message(
    model: recsuite.FittedModel, call: Callable[[recsuite.FittedModel], object], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        call(model)


@pytest.fixture(scope="module")
def strange() -> tuple[pandas.DataFrame, recsuite.FittedModel]:
    """Events of types that Python has, each user's last one in the test, and a model of them."""
    number, users = 400, 40
    draw = np.random.default_rng(1)
    user, item = np.arange(number) % users, draw.integers(20, size=number)
    when = pandas.Timestamp("2026-11-01") + pandas.to_timedelta(np.arange(number) * 7_000, "s")
    joined = pandas.Timestamp("2026-10-01").date()
    events = pandas.DataFrame(
        {
            "user_id": [uuid.UUID(int=int(each) + 1) for each in user],
            "item_id": [Decimal(int(each)) for each in item],
            "stars": (item % 5 + 1).astype(int),
            "is_new": draw.integers(2, size=number).astype(bool),
            "page": pandas.array([None, 1, 2, 3] * (number // 4), dtype="Int64"),
            "price": [Decimal(f"{each}.5") for each in item],
            "joined": [joined + timedelta(days=int(each)) for each in user],
            "timestamp": when,
        }
    )
    # A wider range than that of the labels: scores are clamped to it, and metrics are not.
    rating = LabelColumn("rating", "stars", 0.0, 6.0, 4.0)
    schema = TableSchema(
        user=UserColumn("user_id"),
        item=ItemColumn("item_id"),
        label=rating,
        timestamp=TimestampColumn("timestamp"),
        features={
            "is_new": FeatureColumn("event", "is_new", "category"),
            "page": FeatureColumn("event", "page", "category"),
            "price": FeatureColumn("event", "price", "number"),
            "hour": FeatureColumn("event", "hour(timestamp)", "category"),
            "age": FeatureColumn("event", "age_days(user.joined)", "number", "dense"),
        },
    )
    flags = {**FLAGS, "epochs": 3, "batch_size": 32, "test_fraction": 0.1, "duplicates": "keep"}
    return events, recsuite.fit(events, model=make_model, loss=make_loss, schema=schema, **flags)


def test_the_rows_of_the_test_have_the_reported_error(
    strange: tuple[pandas.DataFrame, recsuite.FittedModel],
) -> None:
    events, model = strange
    # The newest tenth, one of each user: what came before them is what the test knew.
    test = events.tail(40)
    error = model.score(test).numpy() - test["stars"].to_numpy()
    assert np.sqrt(np.mean(error**2)) == pytest.approx(model.metrics["rmse"], abs=1e-4)
    # What is computed of times makes a difference, and is not left out.
    without = model.score(test.drop(columns="timestamp"))
    assert not np.allclose(without, model.score(test), atol=1e-3)


def test_a_later_row_does_not_change_the_history_of_an_earlier_one(
    strange: tuple[pandas.DataFrame, recsuite.FittedModel],
) -> None:
    events, model = strange
    users, times = model._ids(events["user_id"].head(41), "user"), model._times(events.head(41))
    assert times is not None
    history = model._data.of_users(users, model.snapshot, times.tolist())
    assert [len(items) for items in history["history"]] == [0] * 40 + [1]


def test_the_coming_event_has_values_of_any_type_that_the_frame_may_have(
    strange: tuple[pandas.DataFrame, recsuite.FittedModel],
) -> None:
    events, model = strange
    ids = list(events["user_id"].head(2))
    event = {"is_new": True, "page": pandas.NA, "price": Decimal("3.5")}
    same = {"is_new": "true", "page": None, "price": 3.5}
    assert model.recommend(ids, k=3, event=event) == model.recommend(
        [str(each) for each in ids], 3, event=same
    )
    by_features = model.recommend({"user": [str(each) for each in ids]}, 3, event=event)
    assert by_features == model.recommend({"user": [str(each) for each in ids]}, 3, event=same)


def test_a_path_has_its_columns_beside_the_tables_and_a_report_where_one_is_wanted(tmp_path: Path) -> None:
    events, items = frames(300)
    (tmp_path / "shop").mkdir()
    for name, frame in (("events", events), ("items", items)):
        frame.to_parquet(tmp_path / "shop" / f"{name}.parquet")
    model = recsuite.fit(
        tmp_path / "shop", model=make_model, loss=make_loss, **FLAGS, report_dir=tmp_path / "report"
    )
    assert (tmp_path / "shop" / ".columns").is_dir()
    assert read_json(tmp_path / "report" / "metrics.json")["test"] == finite(model.metrics)


def test_ranks_without_a_common_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="start them with torchrun"):
        recsuite.fit(frames(50)[0], model=make_model, loss=make_loss)


def test_files_of_a_killed_fit_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host = socket.gethostname()
    own = launch_name()
    # The number of this process, but another one that had it before.
    gone = f"recsuite-fit-{host}-{os.getpid()}-1"
    kept = [f"recsuite-fit-elsewhere-{os.getpid()}-1", f"recsuite-fit-{own}", f"recsuite-fit-{host}-x-1"]
    for name in (gone, *kept):
        (tmp_path / name / "data").mkdir(parents=True)
    (tmp_path / f"recsuite-fit-{host}-2-1" / "mine").mkdir(parents=True)
    with _folder_of_launch():
        assert {path.name for path in tmp_path.iterdir()} == {*kept, f"recsuite-fit-{host}-2-1"}


def test_the_same_call_on_two_ranks_gives_every_rank_the_same_model(tmp_path: Path) -> None:
    for name, frame in zip(("events", "items"), frames(), strict=True):
        frame.to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "script.py").write_text(SCRIPT)
    output = succeeded(torchrun(2, tmp_path / "script.py", tmp_path))
    found = [read_json(tmp_path / f"found-{rank}.json") for rank in range(2)]
    assert found[0] == found[1]
    assert len(found[0]["best"][0]) == 4
    # The table of results, by one of them.
    assert output.count("| this model, ") == output.count("| global mean ") == 1
    assert found[0]["mistake"] == "The schema nope.toml is not a file; give the path of a schema.toml."


def test_ctrl_c_in_a_fit_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    from recsuite.checkpoint.checkpointer import Checkpointer

    on_step = Checkpointer.on_step

    def interrupted(self: Any, step: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        on_step(self, step)
        on_step(self, step)

    monkeypatch.setattr(Checkpointer, "on_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        recsuite.fit(frames(300)[0], model=make_model, loss=make_loss, **{**FLAGS, "batch_size": 32})
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("label", [LabelColumn("yes_no", "liked"), LabelColumn("clicks")])
def test_recommendations_have_the_scores_of_the_same_values_with_numbers_and_a_coming_event(
    label: LabelColumn,
) -> None:
    events, items = frames(600)
    events = events.assign(liked=events["stars"] > 3, discount=np.linspace(0, 1, 600))
    features = {
        "price": FeatureColumn("item", "price", "number", "dense"),
        "device": FeatureColumn("event", "device", "category"),
        "discount": FeatureColumn("event", "discount", "number", "dense"),
    }
    schema = TableSchema(UserColumn("user_id"), ItemColumn("product_id"), label, features=features)
    model = recsuite.fit(
        events, model=make_model, loss=make_loss, items=items, schema=schema, **FLAGS, split="random", lr=0.1
    )
    coming = {"device": "phone", "discount": 0.4}
    (found,) = model.recommend(["user-3"], k=40, event=coming, exclude=None)
    ids = [item for item, _ in found]
    assert len(ids) == 40
    data = model._data
    told = {**data.of_users(["user-3"] * 40, model.snapshot), **data.items.of(ids)}
    scores = model.score({**told, **{name: [value] * 40 for name, value in coming.items()}})
    assert scores.tolist() == pytest.approx([score for _, score in found], abs=1e-6)
    (other,) = model.recommend(["user-3"], k=40, event={"device": "desktop", "discount": None}, exclude=None)
    assert other != found


@pytest.mark.parametrize("value", ["soon", 10**15])
def test_a_value_that_is_no_time_is_refused_with_its_column(value: str | int) -> None:
    wanted = ColumnSpec("when", TIME, EVENT, "iso" if isinstance(value, str) else "s")
    with pytest.raises(UserError, match=rf"when '?{value}"):
        parsed([value], wanted)
