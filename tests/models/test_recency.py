"""The vector of a history is the sum over its items that is written down, and its gradients are those."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsuite.datasets.schema import HISTORY, ITEM, USER, Feature
from recsuite.models.heads import TwoTower
from recsuite.models.inputs import Inputs, Members
from recsuite.models.layers import OwnItems, Recency, used_slots
from tests.support.feature_rows import feature_rows

DIM, LENGTHS, NUM_PLACES = 6, [3, 0, 1, 5], 4


@pytest.fixture
def recency() -> Recency:
    """Weights that differ from each other."""
    generator = torch.Generator().manual_seed(0)
    found = Recency(NUM_PLACES)
    for parameter in found.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return found


@pytest.fixture
def rows() -> torch.Tensor:
    """A row for each item."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(LENGTHS), DIM, generator=generator, requires_grad=True)


def members() -> Members:
    """The oldest first, as the feed has them."""
    places = [place for length in LENGTHS for place in reversed(range(length))]
    gaps = [(3 * number) % 32 for number in range(sum(LENGTHS))]
    numbers = (torch.tensor(each, dtype=torch.int32) for each in (places, gaps, *[[]] * 4))
    return Members(torch.zeros(0), *numbers)


def by_hand(recency: Recency, rows: torch.Tensor, told: Members) -> torch.Tensor:
    """The formula of the module, item by item."""
    vectors, first = [], 0
    for length in LENGTHS:
        halves = []
        for half, part in enumerate((slice(0, DIM // 2), slice(DIM // 2, DIM))):
            total, size = torch.zeros(DIM // 2), torch.tensor(0.001)
            for number in range(first, first + length):
                place = min(int(told.places[number]), NUM_PLACES - 1)
                weight = (recency.places[half, place] + recency.gaps[half, int(told.gaps[number])]).exp()
                total, size = total + weight * rows[number, part], size + weight
            halves.append(total / size.sqrt())
        vectors.append(torch.cat(halves))
        first += length
    return torch.stack(vectors)


def test_each_half_is_the_weighted_sum_over_the_root_of_the_weights(
    recency: Recency, rows: torch.Tensor
) -> None:
    found = recency(rows, torch.tensor(LENGTHS, dtype=torch.int32), members())
    torch.testing.assert_close(found, by_hand(recency, rows, members()))
    # Nobody's history is nothing.
    assert found[1].tolist() == [0] * DIM


def test_the_gradients_are_those_of_the_formula(recency: Recency, rows: torch.Tensor) -> None:
    told, wanted = members(), [rows, recency.places, recency.gaps]
    directions = torch.randn(len(LENGTHS), DIM, generator=torch.Generator().manual_seed(2))
    found, expected = (
        torch.autograd.grad((vectors * directions).sum(), wanted)
        for vectors in (recency(rows, torch.tensor(LENGTHS), told), by_hand(recency, rows, told))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 0.1


def test_histories_of_one_length_with_unused_slots_have_the_same_vectors_and_gradients(
    recency: Recency, rows: torch.Tensor
) -> None:
    slots, own = max(LENGTHS), OwnItems()
    own.gaps.data = torch.randn(own.gaps.shape, generator=torch.Generator().manual_seed(4))
    counts, event = torch.tensor(LENGTHS), torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    used = used_slots(counts, slots * len(counts))

    def padded(values: torch.Tensor) -> torch.Tensor:
        # What an unused slot has must not count.
        spread = torch.full((len(counts), slots, *values.shape[1:]), 7).to(values.dtype)
        return spread.index_put((event, place), values).flatten(0, 1)

    told, found = members(), []
    spread = told._replace(places=padded(told.places), gaps=padded(told.gaps))
    directions = torch.randn(len(LENGTHS), DIM, generator=torch.Generator().manual_seed(2))
    # Two lists without a slot come first.
    lengths = torch.tensor([0, 0, *[slots] * len(counts)])
    for vectors, added in (
        (recency(rows, counts, told), own(told)),
        (
            recency(padded(rows), lengths, spread, used.view(-1))[2:],
            own(spread, used.view(-1)).view(used.shape)[event, place],
        ),
    ):
        total = (vectors * directions).sum() + added.square().sum()
        wanted = [rows, *recency.parameters(), *own.parameters()]
        found.append([vectors, added, *torch.autograd.grad(total, wanted)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 0.1
    assert own(spread, used.view(-1))[~used.view(-1)].tolist() == [0] * int((~used).sum())


def test_near_weights_depend_on_the_position_and_far_weights_are_equal() -> None:
    weights = Recency(3).places.exp()
    torch.testing.assert_close(weights, torch.tensor([[1, 1 / 2, 1 / 3], [1, 1, 1]]))


def test_a_batch_without_histories_has_zero_vectors(recency: Recency) -> None:
    none = Members(torch.zeros(0), *[torch.zeros(0, dtype=torch.int32)] * 6)
    found = recency(torch.zeros(0, DIM), torch.zeros(2, dtype=torch.int32), none)
    assert found.tolist() == [[0] * DIM] * 2


def test_the_gradient_of_the_weights_is_that_of_rows_as_they_are_scaled(rows: torch.Tensor) -> None:
    features = [
        Feature("user", USER, "user"),
        Feature("movie", ITEM, "movie"),
        Feature(HISTORY, HISTORY, "movie", multi=True),
    ]
    head = TwoTower(features, DIM, (), NUM_PLACES).double()
    assert head.recency is not None
    ones = torch.ones(len(LENGTHS), dtype=torch.int32)
    looked_up = {
        "user": JaggedTensor(torch.ones(len(LENGTHS), DIM, dtype=torch.float64), lengths=ones),
        "movie": JaggedTensor(torch.ones(len(LENGTHS), DIM, dtype=torch.float64), lengths=ones),
        HISTORY: JaggedTensor(rows.detach().double(), lengths=torch.tensor(LENGTHS)),
    }

    def total(gaps: torch.Tensor) -> torch.Tensor:
        parameters = {"recency.gaps": gaps}
        given = feature_rows(looked_up, 0.5), Inputs(members(), torch.zeros(len(LENGTHS), 0))
        vectors: torch.Tensor = torch.func.functional_call(head, parameters, given)
        return vectors.square().sum()

    assert torch.autograd.gradcheck(total, head.recency.gaps.detach().clone().requires_grad_())
