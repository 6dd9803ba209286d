"""Leakage of items and labels by columns of events: known answers, chance, and very frequent items."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from recsuite.datasets import leakage as measure
from recsuite.datasets.leakage import (
    MOST_ITEM_LEAKAGE,
    MOST_LABEL_LEAKAGE,
    leakage,
    leakage_of_item,
    leakage_of_label,
)
from recsuite.datasets.schema import EVENT, ITEM, USER, Codes, Events, Feature, Schema
from recsuite.training.results import describe_leaks

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
