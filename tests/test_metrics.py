"""Metrics against answers that can be worked out by hand or by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from metrics import LIKED, auc, fit_biases, measure


def test_rmse_and_mae_have_the_values_worked_out_by_hand() -> None:
    metrics = measure(np.array([3.0, 5.0, 1.0, 4.0]), np.array([3.0, 4.0, 3.0, 5.0]))
    assert metrics.rmse == pytest.approx(np.sqrt(6 / 4))
    assert metrics.mae == pytest.approx(1.0)


def test_auc_equals_counting_every_pair_ties_included() -> None:
    draw = np.random.default_rng(0)
    scores = draw.integers(0, 20, 300).astype(np.float32)
    positive = draw.random(300) < 0.4
    above = scores[positive][:, None] - scores[~positive][None, :]
    assert auc(scores, positive) == pytest.approx(((above > 0) + 0.5 * (above == 0)).mean(), abs=1e-12)


def test_auc_is_one_zero_and_half_for_right_reversed_and_constant_scores() -> None:
    positive = np.array([False, False, True, True])
    assert auc(np.array([1.0, 2.0, 3.0, 4.0]), positive) == 1
    assert auc(np.array([4.0, 3.0, 2.0, 1.0]), positive) == 0
    assert auc(np.ones(4), positive) == 0.5


def test_auc_of_a_single_class_is_not_a_number() -> None:
    assert np.isnan(measure(np.array([1.0, 2.0]), np.array([LIKED, 5.0])).auc)


def test_order_does_not_change_any_metric() -> None:
    draw = np.random.default_rng(1)
    predictions, ratings = draw.normal(3, 1, 5000).astype(np.float32), draw.integers(1, 6, 5000)
    order = draw.permutation(5000)
    first, second = measure(predictions, ratings), measure(predictions[order], ratings[order])
    assert first.rmse == pytest.approx(second.rmse, abs=1e-12)
    assert first.auc == pytest.approx(second.auc, abs=1e-12)


def test_the_bias_baseline_finds_planted_biases() -> None:
    draw = np.random.default_rng(2)
    users, movies = draw.normal(0, 0.5, 50), draw.normal(0, 0.5, 40)
    users, movies = users - users.mean(), movies - movies.mean()
    # Every user rates every movie a hundred times, so that damping hardly counts.
    user = np.tile(np.repeat(np.arange(50), 40), 100)
    movie = np.tile(np.tile(np.arange(40), 50), 100)
    biases = fit_biases(user, movie, 3.5 + users[user] + movies[movie], 50, 40)
    assert biases.mean == pytest.approx(3.5)
    np.testing.assert_allclose(biases.user, users, atol=2e-3)
    np.testing.assert_allclose(biases.movie, movies, atol=2e-3)


def test_a_user_without_ratings_has_bias_zero() -> None:
    biases = fit_biases(np.array([0]), np.array([0]), np.array([5.0]), 2, 2)
    assert biases.user[1] == 0
    assert biases.movie[1] == 0
