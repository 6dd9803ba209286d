"""Leakage of items and labels by columns of events: known answers, chance, and very frequent items."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest

from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import EVENT, ITEM, USER, Codes, Events, Feature, Schema
from recsuite.errors import UserError
from recsuite.extras import leakage as measure
from recsuite.extras.leakage import (
    MOST_ITEM_LEAKAGE,
    MOST_LABEL_LEAKAGE,
    check_leaks,
    describe_leaks,
    leakage,
    leakage_of_item,
    leakage_of_label,
)

FEATURES = (
    Feature("user", USER, "user"),
    Feature("item", ITEM, "item"),
    Feature("price", EVENT, "price", number="dense"),
)


@pytest.mark.parametrize(("size", "share"), [(100, 0.05), (1_000, 0.01)])
def test_a_rare_flag_independent_of_items_has_no_leakage(size: int, share: float) -> None:
    popularity = 1 / np.arange(1, 501)
    for seed in range(40):
        draw = np.random.default_rng(seed)
        items = draw.choice(500, size, p=popularity / popularity.sum())
        flags = (draw.random(size) < share).astype(np.int64)
        assert leakage(flags, items, is_number=False) < MOST_ITEM_LEAKAGE, seed


@pytest.mark.parametrize("hot", [0, 99])
def test_a_dominant_item_does_not_hide_leakage(hot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_EVENTS", 1_000)
    monkeypatch.setattr(measure, "MOST_OF_ITEM", 100)
    # Half of the items have no event at all.
    items = np.concatenate([np.full(20_000, hot), np.repeat(np.arange(0, 100), 10)]).astype(np.int32)
    price = np.random.default_rng(0).random(200)[items].astype(np.float32)
    events = Events(items, items, items.astype(np.float32), items.astype(np.int64), None, {"price": price})
    schema = Schema(FEATURES, "user", "item", "title", "label", 1.0, 5.0, 4.0)
    found = leakage_of_item(events, np.arange(len(items)), items, 200, schema)
    assert found["price"] > 0.9


def test_features_that_leak_the_label_are_reported_above_the_metrics() -> None:
    draw, size = np.random.default_rng(0), 5_000
    stars = draw.integers(1, 6, size).astype(np.float32)
    headline = (3 * (stars - 1) + draw.integers(0, 3, size)).astype(np.int32)
    clicked = (stars > 3).astype(np.float32)
    play_time = np.where(clicked == 1, draw.exponential(60, size), 0).astype(np.float32)
    honest = (stars + draw.normal(0, 2, size)).astype(np.float32)
    columns: dict[str, np.ndarray | Codes] = {
        "headline": Codes(headline, [*range(15)]),
        "play_time": play_time,
        "device": Codes(draw.integers(0, 4, size).astype(np.int32), [*range(4)]),
        "honest": honest,
        "rare": Codes(draw.permutation(size).astype(np.int32), [*range(size)]),
    }
    features = [
        Feature(name, EVENT, name, number="" if isinstance(each, Codes) else "dense")
        for name, each in columns.items()
    ]
    schema = Schema((*FEATURES[:2], *features), "user", "item", "title", "label", 1.0, 5.0, 4.0)
    nobody = np.zeros(size, np.int32)
    leaking: dict[int, set[str]] = {}
    for label in (stars, clicked):
        events = Events(nobody, nobody, label, nobody.astype(np.int64), None, columns)
        found = leakage_of_label(events, np.arange(size), label, schema)
        leaking[len(leaking)] = {name for name, share in found.items() if share > MOST_LABEL_LEAKAGE}
    assert leaking == {0: {"headline"}, 1: {"headline", "play_time"}}
    (sentence,) = describe_leaks(SimpleNamespace(schema=schema, label_leakage={"headline": 0.97, "x": 0.4}))  # type: ignore[arg-type]
    assert sentence.startswith(
        "the feature headline of the event reveals 97% of the information on the label"
    )
    assert "remove [features.headline] from schema.toml" in sentence


RATING = 'kind = "rating"\ncolumn = "stars"\nlowest = 1\nhighest = 5'


def test_the_age_of_an_item_cannot_be_known_where_items_are_ranked(tmp_path: Path) -> None:
    draw, size = np.random.default_rng(0), 1_000
    columns = {"user_id": draw.integers(0, 50, size), "product_id": draw.integers(0, 40, size)}
    times = {"time": 1_700_000_000 + np.arange(size) * 1_000, "released": ["2020-01-01"] * size}
    frame = pandas.DataFrame({**columns, "stars": draw.integers(1, 6, size), **times})
    frame.to_parquet(tmp_path / "events.parquet")
    (tmp_path / "schema.toml").write_text(
        f'[user]\ncolumn = "user_id"\n[item]\ncolumn = "product_id"\n[label]\n{RATING}\n'
        '[timestamp]\ncolumn = "time"\nformat = "unix"\n'
        '[features.shelved]\nof = "event"\ncolumn = "age_days(item.released)"\nkind = "number"\n'
    )
    found = open_columns(Config.of(data_path=str(tmp_path)))
    check_leaks(found, "rating")
    with pytest.raises(UserError, match=r"the feature shelved .* 100% .* remove \[features.shelved\]"):
        check_leaks(found, "ranking")


# A feature of the event by name: which of its values an event has, of the item and of nothing.
LEAKS = {
    "price": lambda draw, item, price: price,
    "noisy price": lambda draw, item, price: price * draw.normal(1, 0.3, len(item)),
    "price with very much noise": lambda draw, item, price: price * np.exp(draw.normal(0, 1.5, len(item))),
    "price or minus the price": lambda draw, item, price: price * draw.choice([-1, 1], len(item)),
    "brand": lambda draw, item, price: [f"brand {each % 20}" for each in item],
    "brand and size": lambda draw, item, price: [f"{each % 20}/{draw.integers(5)}" for each in item],
}
NO_LEAKS = {
    "any number": lambda draw, item, price: draw.normal(0, 1, len(item)),
    "any category": lambda draw, item, price: [f"device {each}" for each in draw.integers(0, 20, len(item))],
    "hardly any price": lambda draw, item, price: price * np.exp(draw.normal(0, 4, len(item))),
}


@pytest.mark.parametrize("name", [*LEAKS, *NO_LEAKS])
def test_features_that_leak_the_item_are_refused_for_rankings(name: str, tmp_path: Path) -> None:
    draw, num_items, size = np.random.default_rng(0), 100, 4_000
    item = draw.integers(0, num_items, size)
    price = np.exp(draw.normal(3, 1, num_items))[item]
    given = {**LEAKS, **NO_LEAKS}[name](draw, item, price)
    kind = "category" if isinstance(given, list) else "number"
    columns = {"user_id": draw.integers(0, 200, size), "product_id": item, "stars": draw.integers(1, 6, size)}
    pandas.DataFrame({**columns, "given": given}).to_parquet(tmp_path / "events.parquet")
    (tmp_path / "schema.toml").write_text(
        f'[user]\ncolumn = "user_id"\n[item]\ncolumn = "product_id"\n[label]\n{RATING}\n'
        f'[features.given]\nof = "event"\ncolumn = "given"\nkind = "{kind}"\n'
    )
    flags = ["--data_path", str(tmp_path), "--task", "ranking", "--split", "random"]
    if name in LEAKS:
        sentence = (
            r"--task ranking cannot use the feature given of the event: it reveals \d+% of .* the limit is "
            r'10%.* remove \[features.given\], or write of = "item"'
        )
        with pytest.raises(UserError, match=sentence):
            check_leaks(open_columns(parse_args(flags)), "ranking")
    else:
        check_leaks(open_columns(parse_args(flags)), "ranking")
