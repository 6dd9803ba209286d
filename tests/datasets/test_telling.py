"""What a column of the events says of their items: known answers, chance, and items of very many events."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite.datasets import telling as measure
from recsuite.datasets.schema import EVENT, ITEM, USER, Events, Feature, Schema
from recsuite.datasets.telling import MOST_TOLD, telling, told_by_features

FEATURES = (
    Feature("user", USER, "user"),
    Feature("item", ITEM, "item"),
    Feature("price", EVENT, "price", number="dense"),
)


@pytest.mark.parametrize(("size", "share"), [(100, 0.05), (300, 0.02), (1_000, 0.02), (1_000, 0.01)])
def test_a_rare_flag_that_has_nothing_to_do_with_items_says_nothing_of_them(size: int, share: float) -> None:
    popularity = 1 / np.arange(1, 501)
    for seed in range(40):
        draw = np.random.default_rng(seed)
        items = draw.choice(500, size, p=popularity / popularity.sum())
        flags = (draw.random(size) < share).astype(np.int64)
        assert telling(flags, items, is_number=False).share < MOST_TOLD, seed


@pytest.mark.parametrize("hot", [0, 7, 99])
def test_an_item_with_nearly_all_events_hides_nothing(hot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_EVENTS", 1_000)
    monkeypatch.setattr(measure, "MOST_OF_ITEM", 100)
    # Half of the items have no event at all.
    items = np.concatenate([np.full(20_000, hot), np.repeat(np.arange(0, 100), 10)]).astype(np.int32)
    price = np.random.default_rng(0).random(200)[items].astype(np.float32)
    events = Events(items, items, items.astype(np.float32), items.astype(np.int64), None, {"price": price})
    schema = Schema(FEATURES, "user", "item", "title", "label", 1.0, 5.0, 4.0)
    told = told_by_features(events, np.arange(len(items)), items, 200, schema)
    assert told["price"] > 0.9
