"""Distinct ids of a batch, as the tables of TorchRec on several ranks exchange them."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.ids import UNKNOWN_ID
from recsuite.sharding.torchrec_tables import distinct_ids

LARGEST = 2**63 - 1


def features_of(lists: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    """Features of a batch, with the ids of each event."""
    of_events = [event for events in lists.values() for event in events]
    ids = torch.tensor([number for event in of_events for number in event], dtype=torch.int64)
    lengths = torch.tensor([len(event) for event in of_events], dtype=torch.int32)
    return KeyedJaggedTensor([*lists], ids, lengths=lengths)


def test_an_id_is_requested_once_for_each_feature_that_has_it() -> None:
    lists: dict[str, list[list[int]]] = {
        "user": [[7], [5], [7]],
        "none": [[], [], []],
        "history": [[5, LARGEST, 5], [], [UNKNOWN_ID, 5, -1, 7]],
    }
    features = features_of(lists)
    distinct, places = distinct_ids(features)
    assert distinct.keys() == features.keys()
    assert distinct.length_per_key() == [2, 0, 5]
    assert distinct.values().tolist() == [5, 7, UNKNOWN_ID, -1, 5, 7, LARGEST]
    assert torch.equal(distinct.values()[places], features.values())
    # Each feature finds its own, also an id that another one has.
    assert places.tolist() == [1, 0, 1, 4, 6, 4, 2, 4, 3, 5]
    assert (distinct.lengths().tolist(), distinct.lengths().dtype) == (
        [1, 1, 0, 0, 0, 0, 2, 2, 1],
        torch.int32,
    )


@pytest.mark.parametrize("lists", [{"user": [[]]}, {"user": [[], []], "history": [[], []]}])
def test_a_batch_without_ids_has_no_distinct_ones(lists: dict[str, list[list[int]]]) -> None:
    distinct, places = distinct_ids(features_of(lists))
    assert (len(distinct.values()), len(places), distinct.lengths().sum()) == (0, 0, 0)


@pytest.mark.gpu
def test_a_gpu_finds_the_distinct_ids_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    lists: dict[str, list[list[int]]] = {
        name: [torch.randint(most, (number,), generator=generator).tolist() for number in range(100)]
        for name, most in (("user", 5), ("history", 1_000))
    }
    features = features_of(lists)
    expected, their_places = distinct_ids(features)
    distinct, places = distinct_ids(features.to(torch.device("cuda")))
    assert torch.equal(places.cpu(), their_places)
    assert torch.equal(distinct.values().cpu(), expected.values())
    assert torch.equal(distinct.lengths().cpu(), expected.lengths())
