"""Baseline of a stream: each window is predicted from the sums of all events before it."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite.datasets.preparation.baselines import DAMPING, PastBiases
from recsuite.training.progress import StreamProgress


def biases_of(num_users: int, num_items: int, mean: float, of_answers: bool = False) -> PastBiases:
    """The baseline before the first event."""
    user, item, of_all = (np.zeros((number, 2)) for number in (num_users, num_items, 1))
    return PastBiases(user, item, of_all, mean, of_answers)


def test_a_window_is_predicted_by_damped_mean_deviations_of_earlier_events() -> None:
    biases = biases_of(3, 2, mean=2.5)
    users, items = np.array([0, 1]), np.array([0, 1])
    assert biases.predict(users, items).tolist() == [2.5, 2.5]
    # Two events of user 0 with the items 0 and 1, one of user 1 with item 0: the mean is 3.
    biases.learn(np.array([0, 0, 1]), np.array([0, 1, 0]), np.array([5.0, 3.0, 1.0]))
    of_user_0, of_item_0 = 2 / (2 + DAMPING), 0.0
    of_user_1, of_item_1 = -2 / (1 + DAMPING), 0.0
    assert biases.predict(np.array([0, 1, 2]), np.array([0, 1, 1])).tolist() == pytest.approx(
        [3 + of_user_0 + of_item_0, 3 + of_user_1 + of_item_1, 3.0]
    )


def test_the_order_and_the_parts_in_which_events_are_learned_change_nothing() -> None:
    draw = np.random.default_rng(0)
    events = draw.integers(0, 4, 50), draw.integers(0, 6, 50), draw.integers(1, 6, 50)
    whole, parts = biases_of(4, 6, 0.0), biases_of(4, 6, 0.0)
    whole.learn(*events)
    for part in np.array_split(draw.permutation(50), 3):
        parts.learn(*(each[part] for each in events))
    users, items = np.repeat(np.arange(4), 6), np.tile(np.arange(6), 4)
    np.testing.assert_array_equal(whole.predict(users, items), parts.predict(users, items))


def test_the_sums_of_earlier_events_continue() -> None:
    draw = np.random.default_rng(0)
    user, item, label = draw.integers(0, 4, 50), draw.integers(0, 6, 50), draw.integers(1, 6, 50)
    whole = biases_of(4, 6, 0.0)
    whole.learn(user, item, label)
    of_users, of_items, of_all = (
        np.stack([np.bincount(rows[:20], label[:20], size), np.bincount(rows[:20], minlength=size)], axis=1)
        for rows, size in ((user, 4), (item, 6), (np.zeros(50, int), 1))
    )
    later = PastBiases(of_users, of_items, of_all, 0.0)
    later.learn(user[20:], item[20:], label[20:])
    users, items = np.repeat(np.arange(4), 6), np.tile(np.arange(6), 4)
    np.testing.assert_array_equal(whole.predict(users, items), later.predict(users, items))


def test_answers_are_predicted_by_damped_log_odds_and_better_than_by_the_share_of_yes() -> None:
    draw = np.random.default_rng(0)
    # One yes in twenty, so most users and items have none so far.
    odds = np.exp(draw.normal(-3.2, 0.7, (400, 1)) + draw.normal(0, 0.7, (1, 300)))
    users, items = draw.integers(0, 400, 20_000), draw.integers(0, 300, 20_000)
    is_yes = draw.random(20_000) < (odds / (1 + odds))[users, items]
    biases, losses = biases_of(400, 300, 0.05, of_answers=True), []
    for window in np.array_split(np.arange(20_000), 20):
        predicted = biases.predict(users[window], items[window])
        share = is_yes[: window[0]].mean() if window[0] else 0.05
        assert ((predicted > 0) & (predicted < 1)).all()
        answers = is_yes[window]
        losses.append([log_loss(predicted, answers), log_loss(np.full(len(window), share), answers)])
        biases.learn(users[window], items[window], answers)
    assert losses[0][0] == pytest.approx(losses[0][1])
    of_biases, of_share = np.mean(losses, axis=0)
    assert of_biases < 0.99 * of_share


def log_loss(predicted: np.ndarray, is_yes: np.ndarray) -> float:
    """Mean of minus the log probability of each answer."""
    return float(-np.log(np.where(is_yes, predicted, 1 - predicted)).mean())


def test_the_baseline_of_a_stream_covers_the_windows_of_the_model_or_is_left_out() -> None:
    stream = StreamProgress().with_window({"rmse": 1.0, "auc": 0.5}, {"rmse": 2.0, "auc": 0.5}, 10)
    stream = stream.with_window({"rmse": 2.0, "auc": 0.7}, {"rmse": 4.0, "auc": float("nan")}, 30)
    assert stream.overall() == {"rmse": pytest.approx(3.25**0.5), "auc": pytest.approx(0.65)}
    assert stream.overall_biases() == {"rmse": pytest.approx(13**0.5)}
    # An earlier version had no baseline, and its streams go on without one.
    older = StreamProgress(sums={"rmse": 10.0}, counts={"rmse": 10})
    assert older.with_window({"rmse": 1.0}, {"rmse": 2.0}, 10).overall_biases() == {}
