"""The baselines that a model has to beat: biases for labels, popularity for rankings.

Computed once, when columns are made, and kept with them: they depend on the data and the split alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recsuite.datasets.metrics import Metrics, fit_calibration, measure, measure_ranks
from recsuite.datasets.preparation.histories import Stored

# Damping of the bias baseline: a user or item with this many events is believed half-way. The usual
# value; weaker and stronger ones gave a weaker baseline on ml-latest-small.
DAMPING = 5.0
BASELINE_ROUNDS = 10


def baselines_of(
    stored: Stored, sizes: tuple[int, int, int], num_items: int, oracle: np.ndarray | None, liked_label: float
) -> dict[str, dict[str, Metrics]]:
    """What a model has to beat on the test events, for each way of evaluation.

    Fitted on all that is not the test, which makes them harder to beat; but the calibration of a log loss is
    that of predictions of the validation labels, made without them, as for the model.
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    validation, test = slice(num_train, num_known), slice(num_known, None)
    user, item, label = stored.user, stored.item, stored.label
    early, late = (
        fit_biases(user[:number], item[:number], label[:number], int(user.max()) + 1, num_items)
        for number in (num_train, num_known)
    )
    predictions = {
        "global mean": (np.full(num_validation, early.mean), np.full(sizes[2], late.mean)),
        "biases": (
            early.predict(user[validation], item[validation]),
            late.predict(user[test], item[test]),
        ),
    }
    if oracle is not None:
        predictions["oracle"] = oracle[validation], oracle[test]
    liked = label >= liked_label
    of_labels = {
        name: measure(on_test, label[test], liked[test], fit_calibration(on_validation, liked[validation]))
        for name, (on_validation, on_test) in predictions.items()
    }
    popularity = measure_ranks(popularity_ranks(user, item, num_known, num_items))
    # What a calibrated prediction is worth as a probability.
    of_answers = {
        name: {metric: metrics[metric] for metric in ("log_loss", "auc")}
        for name, metrics in of_labels.items()
    }
    return {"predictions": of_labels, "ranks": {"popularity": popularity}, "answers": of_answers}


def popularity_ranks(user: np.ndarray, item: np.ndarray, num_known: int, num_items: int) -> np.ndarray:
    """Ranks, int64, of the events from number `num_known` on, when items are ranked by their number of
    known events; of those that the user is known to have had only the test item itself is ranked.

    Takes int [n] and int [n]. Ties count against an item.
    """
    known, cases = slice(None, num_known), slice(num_known, None)
    counts = np.bincount(item[known], minlength=num_items)
    # (user, item) and (user, popularity) as one number each, of 64 bits: users times items exceed 32.
    pairs = np.unique(user[known].astype(np.int64) * num_items + item[known])
    step = int(counts.max(initial=0)) + 1
    seen = np.sort(pairs // num_items * step + counts[pairs % num_items])
    case_user, own = user[cases].astype(np.int64), counts[item[cases]]
    # From the left, so that an item which is as popular counts as above, as it does for a model.
    popular = num_items - np.sort(counts).searchsorted(own)
    popular_seen = seen.searchsorted((case_user + 1) * step) - seen.searchsorted(case_user * step + own)
    is_seen = np.isin(case_user * num_items + item[cases], pairs)
    # The test item counts once: among the popular ones, where it takes the place of the 1 of the first rank.
    return popular - (popular_seen - is_seen)


@dataclass(frozen=True)
class Biases:
    """The bias baseline: mean label, and how far each user and item lies from it, float64."""

    mean: float
    user: np.ndarray
    item: np.ndarray

    def predict(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Predicted labels, float64 [n], for positions of users and items, int [n]."""
        return self.mean + self.user[user] + self.item[item]


def fit_biases(
    user: np.ndarray, item: np.ndarray, label: np.ndarray, num_users: int, num_items: int
) -> Biases:
    """Damped least squares for label = mean + user bias + item bias, by alternation.

    Takes int [n], int [n] and float [n]; a user or item without an event gets bias 0.
    """
    mean = float(label.mean(dtype=np.float64))
    residual = label.astype(np.float64) - mean
    user_bias, item_bias = np.zeros(num_users), np.zeros(num_items)
    user_weight = DAMPING + np.bincount(user, minlength=num_users)
    item_weight = DAMPING + np.bincount(item, minlength=num_items)
    # Each line solves for one side exactly while the other is kept.
    for _ in range(BASELINE_ROUNDS):
        item_bias = np.bincount(item, residual - user_bias[user], num_items) / item_weight
        user_bias = np.bincount(user, residual - item_bias[item], num_users) / user_weight
    return Biases(mean, user_bias, item_bias)
