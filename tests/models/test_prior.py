"""The prior of rows: how strongly it holds them, and how validation events change it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsuite.datasets.schema import HISTORY, ITEM, ITEM_HISTORY, USER, Feature
from recsuite.models.co_occurrence import (
    BIAS,
    FACTOR,
    GROUPS,
    LARGEST_CHANGE,
    LIST_BIAS,
    LIST_FACTOR,
    SPREAD_STD,
    CoOccurrence,
    FeaturePrior,
    Prior,
    learned_spreads,
)
from recsuite.models.layers import Members, with_prior_gradient
from recsuite.models.rows import Inputs
from tests.support.feature_rows import feature_rows

DIM = 3
NO_SPREADS = torch.zeros(len(GROUPS))
HISTORY_HELD = FeaturePrior(1, bias=LIST_BIAS, factor=LIST_FACTOR)


def test_a_row_with_a_prior_converges_to_ridge_regression() -> None:
    # n labels of one row: their sum over n + noise / variance.
    labels, noise = torch.tensor([1.0, 2.0, 4.0, 2.0, 1.5]), 0.8
    prior = Prior({"user": FeaturePrior(0)}, noise, unit=1.0, groups={"user": 0})
    rarities = torch.full((3, 5), 1 / 5)
    row = torch.zeros(1, requires_grad=True)
    for _ in range(500):
        rows = row.expand(5).unsqueeze(1)
        held = with_prior_gradient(rows, prior.strengths("user", rarities, 1, NO_SPREADS))
        ((held.squeeze(1) - labels) ** 2).mean().backward()
        with torch.no_grad():
            assert row.grad is not None
            row -= 0.1 * row.grad
            row.grad = None
    # The only number of a row is its bias.
    assert row.item() == pytest.approx(float(labels.sum()) / (5 + noise / BIAS), rel=1e-4)


def test_strengths_follow_counts_noise_the_unit_of_labels_and_the_scale_of_rows() -> None:
    rarities = torch.tensor([[0.5, 0.1], [0.2, 0.2], [0.01, 0.01]])
    held = {"user": FeaturePrior(0), "genre": FeaturePrior(2, 7.0), "history": HISTORY_HELD}
    groups = {"user": 0, "history": 1}
    found = Prior(held, noise=0.6, unit=2.0, groups=groups)
    user = found.strengths("user", rarities, DIM, NO_SPREADS)
    torch.testing.assert_close(user[:, 0], rarities[0] * 0.6 / (BIAS * 4))
    torch.testing.assert_close(user[:, 1], rarities[0] * 0.6 / (FACTOR * 2))
    genre = found.strengths("genre", rarities, DIM, NO_SPREADS, scale=0.5)
    torch.testing.assert_close(genre[:, 2], rarities[2] * 7 * 0.25 * 0.6 / (FACTOR * 2))
    history = found.strengths("history", rarities, DIM, NO_SPREADS)
    torch.testing.assert_close(history[:, 1], rarities[1] * 0.6 / (LIST_FACTOR * 2))
    with_more_noise = dataclasses.replace(found, noise=1.2).strengths("user", rarities, DIM, NO_SPREADS)
    torch.testing.assert_close(with_more_noise, 2 * user)


def test_the_prior_strength_falls_with_the_square_of_the_spread() -> None:
    rarities = torch.full((3, 2), 0.5)
    held = {"user": FeaturePrior(0), "genre": FeaturePrior(2), "history": HISTORY_HELD}
    prior = Prior(held, noise=1.0, unit=1.0, groups={"user": 0, "history": 1})
    spreads = torch.tensor([math.log(2), math.log(3)])
    user = prior.strengths("user", rarities, DIM, spreads)
    torch.testing.assert_close(user[0], torch.tensor([1 / BIAS, 0.25 / FACTOR, 0.25 / FACTOR]) / 2)
    history = prior.strengths("history", rarities, DIM, spreads)
    torch.testing.assert_close(
        history[0], torch.tensor([1 / LIST_BIAS, 1 / LIST_FACTOR, 1 / LIST_FACTOR]) / 9 / 2
    )
    genre = prior.strengths("genre", rarities, DIM, spreads)
    torch.testing.assert_close(genre, prior.strengths("genre", rarities, DIM, NO_SPREADS))


def test_spreads_balance_evidence_and_prior() -> None:
    # Two groups that have nothing to do with each other; the labels are right for the second at once.
    products, noise = torch.diag(torch.tensor([400.0, 10.0], dtype=torch.float64)), 2.0
    wanted = torch.tensor([0.1, 0.0], dtype=torch.float64)
    found = learned_spreads(torch.zeros(2, dtype=torch.float64), products, products @ wanted, noise)
    weight = 400 / noise / (400 / noise + 1 / SPREAD_STD**2)
    torch.testing.assert_close(found, torch.tensor([0.1 * weight, 0.0], dtype=torch.float64))


def test_without_evidence_spreads_return_to_the_prior() -> None:
    nothing = torch.zeros(2, 2, dtype=torch.float64)
    found = torch.tensor([0.2, -1.0], dtype=torch.float64)
    found = learned_spreads(found, nothing, nothing[0], 1.0)
    torch.testing.assert_close(found, torch.tensor([0.0, -1 + LARGEST_CHANGE], dtype=torch.float64))


def drawn_rows(number: int, lengths: list[int], seed: int) -> JaggedTensor:
    rows = torch.randn(number, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return JaggedTensor(rows, lengths=torch.tensor(lengths))


def test_directions_are_the_derivatives_by_the_logarithm_of_the_factor_of_rows() -> None:
    features = [
        Feature("user", USER, "user"),
        Feature("movie", ITEM, "movie"),
        Feature("genres", ITEM, "genres", multi=True),
        Feature(HISTORY, HISTORY, "movie", multi=True),
        Feature(ITEM_HISTORY, ITEM_HISTORY, "user", multi=True),
    ]
    torch.manual_seed(0)
    head = CoOccurrence(features, DIM, (4,), 3.0, 1.0, ["user", "movie"]).double()
    groups = {"user": 0, "movie": 0, HISTORY: 1, ITEM_HISTORY: 1}
    head.prior = Prior({}, noise=1.0, unit=1.0, groups=groups)
    rows = {
        "user": drawn_rows(2, [1, 1], 1),
        "movie": drawn_rows(2, [1, 1], 2),
        "genres": drawn_rows(3, [2, 1], 3),
        HISTORY: drawn_rows(4, [3, 1], 4),
        ITEM_HISTORY: drawn_rows(2, [0, 2], 5),
    }
    labels, none = torch.tensor([5.0, 3.0, 1.0, 4.0], dtype=torch.float64), torch.zeros(0, dtype=torch.int32)
    inputs = Inputs(Members(labels, *[none] * 4), torch.zeros(2, 0))

    def predicted(times: list[float]) -> torch.Tensor:
        more = {}
        for name, found in rows.items():
            values = found.values().clone()
            if name in groups:
                values[:, 1 if groups[name] == 0 else 0 :] *= times[groups[name]]
            more[name] = JaggedTensor(values, lengths=found.lengths())
        return head.predict(feature_rows(more), inputs)

    with torch.no_grad():
        predictions, directions = head.predict_with_directions(feature_rows(rows), inputs)
        torch.testing.assert_close(predictions, predicted([1, 1]))
        step = 1e-5
        for group in range(len(GROUPS)):
            above, below = [1.0, 1.0], [1.0, 1.0]
            above[group], below[group] = math.exp(step), math.exp(-step)
            slope = (predicted(above) - predicted(below)) / (2 * step)
            torch.testing.assert_close(directions[group], slope, rtol=1e-6, atol=1e-8)
