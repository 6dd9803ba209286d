"""Sums over lists that events share: what they are, what their gradients are, and what a prior adds."""

from __future__ import annotations

import pytest
import torch

from recsuite.models.lists import DistinctRows, held_by_prior, shared_sums, sums_over_roots
from recsuite.models.prior import BIAS, FACTOR, LIST_FACTOR, Prior

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


def test_a_centred_gradient_moves_no_row_with_all_others() -> None:
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


def test_alone_a_list_counts_with_the_root_of_its_length() -> None:
    rows = torch.arange(8.0).view(4, 2)
    found = sums_over_roots(DistinctRows(rows, torch.arange(4), torch.tensor([3, 0, 1])), torch.ones(4))
    torch.testing.assert_close(found, torch.stack([rows[:3].sum(0) / 3**0.5, torch.zeros(2), rows[3]]))


def test_a_held_row_comes_to_where_ridge_regression_puts_it() -> None:
    # n labels of one row: their sum over n + noise / variance.
    labels, noise = torch.tensor([1.0, 2.0, 4.0, 2.0, 1.5]), 0.8
    prior = Prior({"user": (0, 1.0)}, noise, unit=1.0)
    rarities = torch.full((3, 5), 1 / 5)
    row = torch.zeros(1, requires_grad=True)
    for _ in range(500):
        rows = row.expand(5).unsqueeze(1)
        held = held_by_prior(rows, prior.strengths("user", rarities, 1))
        ((held.squeeze(1) - labels) ** 2).mean().backward()
        with torch.no_grad():
            assert row.grad is not None
            row -= 0.1 * row.grad
            row.grad = None
    # The only number of a row is its bias.
    assert row.item() == pytest.approx(float(labels.sum()) / (5 + noise / BIAS), rel=1e-4)


def test_strengths_follow_counts_noise_the_unit_of_labels_and_the_scale_of_rows() -> None:
    rarities = torch.tensor([[0.5, 0.1], [0.2, 0.2], [0.01, 0.01]])
    places = {"user": (0, 1.0), "genre": (2, 7.0), "history": (1, 1.0)}
    found = Prior(places, noise=0.6, unit=2.0)
    user = found.strengths("user", rarities, DIM)
    torch.testing.assert_close(user[:, 0], rarities[0] * 0.6 / (BIAS * 4))
    torch.testing.assert_close(user[:, 1], rarities[0] * 0.6 / (FACTOR * 2))
    genre = found.strengths("genre", rarities, DIM, scale=0.5)
    torch.testing.assert_close(genre[:, 2], rarities[2] * 7 * 0.25 * 0.6 / (FACTOR * 2))
    history = found.strengths("history", rarities, DIM)
    torch.testing.assert_close(history[:, 1], rarities[1] * 0.6 / (LIST_FACTOR * 2))
    with_more_noise = Prior(places, noise=1.2, unit=2.0).strengths("user", rarities, DIM)
    torch.testing.assert_close(with_more_noise, 2 * user)
