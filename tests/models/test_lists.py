"""Sums over lists that events share: what they are, what their gradients are, and what a prior adds."""

from __future__ import annotations

import torch

from recsuite.models.layers import DistinctRows, shared_sums, sums_over_root_lengths

DIM = 3
# Five events: the first two share a list of three, the third has none, the others have lists of their own.
LENGTHS = torch.tensor([4, 1, 1, 3, 2])
SOURCES = torch.tensor([0, 0, 2, 3, 4])
SCALES = torch.tensor([0.5, 0.25, 0.0, 2.0, 1.0], dtype=torch.float64)
OWN = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)


# Some rows stand in several lists.
PLACES = torch.tensor([0, 1, 2, 1, 3, 3, 2, 4, 4, 0, 5])


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct rows, and weights of all values."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, DIM, generator=generator, dtype=torch.float64)
    return rows, torch.rand(len(PLACES), generator=generator, dtype=torch.float64)


def summed(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return shared_sums(DistinctRows(rows, PLACES, LENGTHS), weights, (SOURCES, SCALES, OWN), None, None)


def test_each_event_has_the_sum_of_its_list_without_itself() -> None:
    rows, weights = drawn()
    weighted = (rows[PLACES] * weights.unsqueeze(1)).split(LENGTHS.tolist())
    lists = [part[:-1].sum(0) for part in weighted]
    wanted = [
        SCALES[event] * (lists[int(SOURCES[event])] - OWN[event] * weighted[event][-1]) for event in range(5)
    ]
    torch.testing.assert_close(summed(rows, weights), torch.stack(wanted))


def test_the_gradient_is_that_of_the_sums() -> None:
    rows, weights = drawn()
    assert torch.autograd.gradcheck(lambda rows: summed(rows, weights), rows.requires_grad_())


def test_a_centred_gradient_sums_to_zero_over_rows() -> None:
    rows, _ = drawn()
    rows.requires_grad_()
    links = (SOURCES, SCALES, OWN)
    found = DistinctRows(rows, PLACES, LENGTHS)
    ones = torch.ones(len(PLACES), dtype=torch.float64)
    sums = shared_sums(found, ones, links, None, lambda total: total)
    sums.backward(torch.randn(5, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad.sum(0), torch.zeros(DIM, dtype=torch.float64))
    # And yet something is left to learn.
    assert rows.grad.abs().max() > 0.01


def test_a_prior_adds_strength_times_row_to_the_gradient_of_an_events_own_row() -> None:
    rows, weights = drawn()
    strengths = torch.rand(5, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = []
    for held in (None, strengths):
        leaf = rows.clone().requires_grad_()
        found = DistinctRows(leaf, PLACES, LENGTHS)
        shared_sums(found, weights, (SOURCES, SCALES, OWN), held, None).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    ends = LENGTHS.cumsum(0) - 1
    own = PLACES[ends]
    added = torch.zeros_like(rows).index_add_(0, own, rows[own] * strengths)
    torch.testing.assert_close(gradients[1] - gradients[0], added)


def test_a_list_sum_is_divided_by_the_root_of_its_length() -> None:
    rows = torch.arange(8.0).view(4, 2)
    found = sums_over_root_lengths(
        DistinctRows(rows, torch.arange(4), torch.tensor([3, 0, 1])), torch.ones(4)
    )
    torch.testing.assert_close(found, torch.stack([rows[:3].sum(0) / 3**0.5, torch.zeros(2), rows[3]]))
