"""Baseline of a stream: each window is predicted from the sums of all events before it."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite.datasets.preparation.baselines import DAMPING, PastBiases


def test_a_window_is_predicted_by_damped_mean_deviations_of_earlier_events() -> None:
    biases = PastBiases((3, 2), mean=2.5)
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
    whole, parts = PastBiases((4, 6), 0.0), PastBiases((4, 6), 0.0)
    whole.learn(*events)
    for part in np.array_split(draw.permutation(50), 3):
        parts.learn(*(each[part] for each in events))
    users, items = np.repeat(np.arange(4), 6), np.tile(np.arange(6), 4)
    np.testing.assert_array_equal(whole.predict(users, items), parts.predict(users, items))
