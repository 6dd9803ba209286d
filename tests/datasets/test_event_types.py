"""Events of several types: which are predicted, which are only in histories, and how they are served."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from example import make_model
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.source import locate
from recsuite.errors import UserError
from recsuite.extras.chain.cases import cases_of
from recsuite.extras.chain.chain import ModelChain
from recsuite.extras.graph.flags import GraphConfig
from recsuite.extras.guess.guessing import guess
from recsuite.models.tasks import ModelData
from recsuite.serving.export import write_export
from recsuite.serving.reader import checked_head, made_head
from recsuite.serving.request import SEEN
from recsuite.serving.served import ServedModel
from tests.support.launch import ROOT, python, read_json, succeeded

# The client beside the scripts.
sys.path.append(str(ROOT / "example"))

SCHEMA = """
[user]
column = "user"
[item]
column = "item"
[label]
kind = "clicks"
noun = "purchase"
[timestamp]
column = "time"
format = "unix"
[events]
type = "kind"
target = "buy"
context = ["view", "cart"]
"""
# Of one user, as (type, item), one event in each second; "a" to "e" are in the training.
EVENTS = [
    *(
        ("view", "a"),
        ("buy", "a"),
        ("view", "b"),
        ("cart", "b"),
        ("refund", "a"),
        ("buy", "b"),
        ("view", "c"),
    ),
    *(("buy", "a"), ("buy", "d"), ("view", "e"), ("cart", "f"), ("buy", "e")),
]


def write(folder: Path, events: list[tuple[Any, ...]], schema: str = SCHEMA) -> list[str]:
    """Write events of a user each (the first, if none is named), and return the flags that read them."""
    rows = [(*event, "u")[:3] for event in events]
    frame = pandas.DataFrame(rows, columns=["kind", "item", "user"])
    folder.mkdir(exist_ok=True)
    frame.assign(time=np.arange(len(frame))).to_parquet(folder / "events.parquet")
    (folder / "schema.toml").write_text(schema)
    return ["--data_path", str(folder), "--cache_dir", str(folder / "columns"), "--validation_fraction", "0"]


@pytest.fixture
def columns(tmp_path: Path) -> Columns:
    return open_columns(parse_args([*write(tmp_path, EVENTS), "--task", "ranking"]))


def test_only_the_target_is_split_and_the_context_is_in_histories(columns: Columns) -> None:
    # Of five purchases the newest fifth is the test.
    assert (columns.num_train, columns.num_validation, columns.num_test) == (4, 0, 1)
    ids = np.array(["a", "b", "c", "d", "e", "f"])
    rows = columns.column("rows")
    assert [*ids[rows["item"]]] == ["a", "b", "a", "d", "e"]
    assert columns.column("time").tolist() == [1, 5, 7, 8, 11]
    listed = columns.column("history")
    types = listed[:, 1].copy().view(np.float32)
    items = columns.column("seen")
    # All but the refund and the test; a view and a cart are no purchases.
    assert [*ids[np.where(items < 0, ~items, items)]] == [*"aabbbcadef"]
    assert types.tolist() == [3, 1, 3, 2, 1, 3, 1, 1, 3, 2]
    assert (items < 0).tolist() == (types > 1).tolist()
    assert rows["history_end"].tolist() == [1, 4, 6, 7, 10]
    assert "skipped 1 event of other types than buy, cart, view" in columns.notes
    assert "events: 5 of type buy; in histories also 2 of type cart, 4 of type view" in columns.notes
    assert columns.num_skipped == 1
    # All purchases count, and a fourth of those of the training is repeated.
    assert columns.schema.seen == "allow"


def test_items_that_were_only_viewed_have_rows_if_the_training_knows_them(columns: Columns) -> None:
    own = columns.column("item_features")["features"][:, columns.place_of("item")]
    # The view of e and the cart with f are newer than the training.
    assert (own > 0).tolist() == [True, True, True, True, False, False]
    assert columns.column("item_counts").tolist() == [2, 1, 0, 1, 0, 0]


WRONG = {
    'column = "kind"': ('type = "kind"', 'type = "kinds"', "kinds"),
    "no such type": (
        '"buy"',
        '"bye"',
        "No event has the kind bye, which .* name one of buy, cart, refund, view",
    ),
    "target in the context": ('["view", ', '["buy", ', 'context = "buy" is the target too'),
    "another label": ('"clicks"', '"count"\ncolumn = "time"', r'\[events\] requires kind = "clicks"'),
    "no times": ('[timestamp]\ncolumn = "time"\nformat = "unix"', "", r"\[events\] requires \[timestamp\]"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_sections_are_refused(fault: str, tmp_path: Path) -> None:
    before, after, message = WRONG[fault]
    flags = write(tmp_path, EVENTS, SCHEMA.replace(before, after))
    with pytest.raises(UserError, match=message):
        open_columns(parse_args([*flags, "--task", "ranking"]))


@pytest.mark.parametrize("flags", [["--task", "sequence"], ["--stream"]])
def test_what_cannot_read_types_is_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{flags[0]}.* does not support events of several types"):
        open_columns(parse_args([*write(tmp_path, EVENTS)[:4], *flags]))


def test_the_order_of_the_context_and_a_type_without_events_change_nothing(tmp_path: Path) -> None:
    found = []
    for name, context in (
        ("a", '["view", "cart"]'),
        ("b", '["cart", "view"]'),
        ("c", '["cart", "share", "view"]'),
    ):
        flags = write(tmp_path / name, EVENTS, SCHEMA.replace('["view", "cart"]', context))
        columns = open_columns(parse_args([*flags, "--task", "ranking"]))
        found.append(columns.column("history")[:, 1].copy().view(np.float32).tolist())
    assert found[0] == found[1]
    # By the names in order: buy, cart, share, view.
    assert found[2] == [4.0 if place == 3 else place for place in found[0]]


def test_a_user_with_later_views_alone_has_no_training_events(tmp_path: Path) -> None:
    events = [(*event, "u") for event in EVENTS] + [("view", "a", "v"), ("view", "b", "v")]
    columns = open_columns(parse_args([*write(tmp_path, events), "--task", "ranking"]))
    assert columns.user_counts().tolist() == [4, 0]


def test_types_are_guessed_from_their_names() -> None:
    import pyarrow

    names = ["view", "addtocart", "transaction", "remove_from_cart"]
    # No item has one type alone: the type would be a feature of it.
    items = [place % 19 for place in range(40)]
    table: dict[str, Any] = {
        "visitor": [1, 2] * 20,
        "item": items,
        "event": names * 10,
        "timestamp": range(40),
    }
    table["timestamp"] = [1_700_000_000 + second for second in table["timestamp"]]
    found = guess({"events": pyarrow.table(table)}).schema
    assert found.events is not None
    assert (found.events.type, found.events.target) == ("event", "transaction")
    assert found.events.context == ("view", "addtocart")
    assert (found.label.kind, found.label.noun) == ("clicks", "transaction")
    # What takes an order back is neither the target nor context.
    table["event"] = ["viewed", "cancel_order", "ordered", "unlike"] * 10
    found = guess({"events": pyarrow.table(table)}).schema
    assert found.events is not None
    assert (found.events.target, found.events.context) == ("ordered", ("viewed",))
    # Without a known target there is nothing to predict.
    table["event"] = ["left", "right"] * 20
    assert guess({"events": pyarrow.table(table)}).schema.events is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of users who buy what is in the cart; a view says nothing."""
    folder, draw = tmp_path_factory.mktemp("types"), np.random.default_rng(0)
    events = []
    for _ in range(2_500):
        user, viewed = draw.integers(300), [f"i{item}" for item in draw.choice(500, 3, replace=False)]
        events += [
            *(("view", item, user) for item in viewed),
            ("cart", viewed[1], user),
            ("buy", viewed[1], user),
        ]
    flags = write(folder / "data", events)[:4]
    script = ROOT / "example" / "retrieval.py"
    small = ("--embedding_dim", 32, "--batch_size", 64, "--negatives", 40, "--num_workers", 0)
    words = (*flags, *small, "--train", "--dump", "--save_dir", folder / "dumps", "--report_dir", folder)
    succeeded(python(script, *words, timeout=200))
    return folder


def test_the_cart_counts_more_than_views_and_is_served_as_it_was_tested(trained: Path) -> None:
    measured = read_json(trained / "metrics.json")["test"]
    # By the three views alone, the item would be any of them: NDCG (1 + 0.63 + 0.5) / 3 = 0.71 at most.
    assert measured["ndcg_at_10"] > 0.95
    flags = ["--data_path", str(trained / "data"), "--cache_dir", str(trained / "data" / "columns")]
    config = parse_args([*flags, "--task", "ranking", "--split", "leave_one_out"])
    raw = read(locate(config.data, 0), config.data)
    cases = cases_of(open_columns(config), raw, "test", 50)
    model = ServedModel.open(trained / "dumps", model=make_model)
    served = cases.metrics(lambda values, k, exclude: model.recommend(values, k, exclude=exclude))
    assert served["ndcg_at_10"] == pytest.approx(measured["ndcg_at_10"], abs=1e-6)


HISTORY: dict[str, list[Any]] = {
    "history": [["i3", "unknown", "i1", "i2", "i4", "i2"], []],
    "history_ratings": [["buy", "buy", "view", "view", "view", "cart"], []],
    "history_ages": [[900, 800, 4, 3, 2, 1], []],
}


@pytest.mark.beside
def test_an_onnx_graph_adds_the_same_for_an_item_of_the_history(trained: Path, tmp_path: Path) -> None:
    model = ServedModel.open(trained / "dumps", model=make_model)
    write_export(model.snapshot, tmp_path / "exported", extras=[GraphConfig(format="onnx")])
    asked = {name: given * 2 for name, given in HISTORY.items()} | {"item": ["i2", "i2", "i3", "i9"]}
    again = importlib.import_module("onnx_client").Client(tmp_path / "exported").score(asked)
    np.testing.assert_allclose(again, model.score(asked).numpy(), rtol=1e-5, atol=1e-5)


def test_each_way_to_a_score_adds_the_same_for_an_item_of_the_history(trained: Path, tmp_path: Path) -> None:
    model, history = ServedModel.open(trained / "dumps", model=make_model), HISTORY
    found, _ = listed = model.recommend(history, 500, exclude=None)
    assert found[0][0] == "i2"
    for item, score in [*found[:3], *found[-3:], *(each for each in found if each[0] in ("i1", "i3"))]:
        one = {**{name: given[:1] for name, given in history.items()}, "item": [item]}
        assert model.score(one).tolist() == pytest.approx([score], abs=1e-5)
    assert model.recommend(history, 5, exclude=None, approximate=True) == [each[:5] for each in listed]
    of_two = model.recommend(history, exclude=None, candidates=["i9", "i2"])
    assert [sorted(mine) for mine in of_two] == [
        sorted(pair for pair in mine if pair[0] in ("i9", "i2")) for mine in listed
    ]
    (left, _) = model.recommend(history, 499, exclude=[["i2"], []], approximate=True)
    assert "i2" not in dict(left)
    chain = ModelChain(model, model, num_candidates=20, weight=0.5)
    doubled = [score for _, score in chain.recommend(history, 3, exclude=None)[0]]
    assert doubled == pytest.approx([1.5 * score for _, score in found[:3]], abs=1e-5)
    # Nothing is added where an item of the history cannot be chosen.
    excluded = dataclasses.replace(model.snapshot.schema, seen="exclude", event_types=())
    features = [each for each in model.snapshot.features if each.name in ("user", "item", "history")]
    args = Config.of(task="ranking", history=50, history_weights="learned").model
    assert make_model(ModelData(excluded, features, history=50), args).own_items is None
    # A checkpoint from before there were such numbers is served without them.
    snapshot, folder = model.snapshot, tmp_path
    kept = {name: each for name, each in snapshot.manifest.tensors.items() if "own_items" not in name}
    assert len(snapshot.manifest.tensors) > len(kept)
    before = dataclasses.replace(snapshot.manifest, tensors=kept)
    empty = made_head(folder, snapshot.schema, snapshot.features, before, make_model)
    assert empty.own_items is not None
    assert checked_head(folder, empty, snapshot.features, before).own_items is None


def test_requests_name_the_types_of_events(trained: Path) -> None:
    model = ServedModel.open(trained / "dumps", model=make_model)
    model.describe_items({"item": [f"i{item}" for item in range(40)]})
    mine = [("i3", "buy"), ("i1", "view"), ("i2", "cart")]
    by_name = model.recommend(events=[mine], exclude=None)
    assert by_name == model.recommend(events=[[("i3", 1), ("i1", 3), ("i2", 2)]], exclude=None)
    # One second after the cart, as in the training.
    of_user = {"history": [["i3", "i1", "i2"]], "history_ratings": [["buy", "view", "cart"]]}
    ((best, _), *_), *_ = model.recommend({**of_user, "history_ages": [[60, 2, 1]]}, exclude=None)
    assert best == "i2"
    left = model.recommend(events=[mine], k=40, exclude=SEEN)
    # What was bought is excluded, and nothing else.
    assert {item for item, _ in by_name[0]} - {item for item, _ in left[0]} <= {"i3"}
    assert len(left[0]) == 39
    wrongs: tuple[Any, ...] = ("viewed", 4, 1.5, None)
    for wrong in wrongs:
        with pytest.raises(UserError, match=r"have the type .*; give one of buy, cart, view"):
            model.recommend(events=[[("i1", wrong)]])
