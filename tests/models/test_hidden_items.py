"""A training for new items hides the rows of some items, the same ones on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsuite.datasets.schema import ITEM, USER, Feature
from recsuite.models.heads import HIDDEN_EVERY, SCALE, TwoTower
from tests.support.feature_rows import feature_rows

DIM, DRAWN, EVENTS = 4, 8, 24
FEATURES = [Feature(name, of, name) for name, of in (("user", USER), ("item", ITEM), ("brand", ITEM))]


def vectors_of(head: TwoTower, rows: dict[str, torch.Tensor], which: list[int], first: int) -> torch.Tensor:
    """Vectors of the drawn items and of some events, the first of which has this number in the batch."""
    places = [*range(DRAWN), *(DRAWN + event for event in which)]
    ones = torch.ones(len(places), dtype=torch.int64)
    found = {name: JaggedTensor(values[places], lengths=ones) for name, values in rows.items()}
    batch: Any = SimpleNamespace(weights=torch.ones(len(which)), first=first)
    return head.item_vectors(feature_rows(found), batch)


def test_hidden_items_have_only_their_features_and_are_the_same_on_any_number_of_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {each.name: torch.randn(DRAWN + EVENTS, DIM, generator=generator) for each in FEATURES}
    head = TwoTower(FEATURES, DIM, [], num_places=3, hidden="item")
    whole = vectors_of(head, rows, [*range(EVENTS)], 0)
    alone, both = SCALE * rows["brand"], SCALE * (rows["item"] + rows["brand"])
    is_hidden = (whole - alone).abs().amax(dim=1) < 1e-5
    assert int(is_hidden.sum()) == (DRAWN + EVENTS) // HIDDEN_EVERY
    torch.testing.assert_close(whole[~is_hidden], both[~is_hidden])
    for first, last in ((0, 11), (11, EVENTS)):
        part = vectors_of(head, rows, [*range(first, last)], first)
        torch.testing.assert_close(part[:DRAWN], whole[:DRAWN])
        torch.testing.assert_close(part[DRAWN:], whole[DRAWN + first : DRAWN + last])
    # Only where it is asked for, and in training.
    for other in (TwoTower(FEATURES, DIM, [], num_places=3), head.eval()):
        torch.testing.assert_close(vectors_of(other, rows, [*range(EVENTS)], 0), both)
