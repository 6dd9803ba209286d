"""The baselines that a model has to beat: biases for labels, popularity for rankings.

Computed once, when columns are made, and kept with them: they depend on the data and the split alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from recsuite.datasets.metrics import Metrics, fit_calibration, log_loss_of, measure, measure_ranks
from recsuite.datasets.preparation.arrays.mapped import chunks, counts_of, highest, release
from recsuite.datasets.preparation.arrays.order import among, events_of, for_ranges, sorted_places
from recsuite.datasets.preparation.histories import Stored

# Damping of the bias baseline: a user or item with this many events is believed half-way. The usual
# value; weaker and stronger ones gave a weaker baseline on ml-latest-small.
DAMPING = 5.0
BASELINE_ROUNDS = 10
# Of the time that all baselines take.
SHARE_OF_BIASES = 0.7


def baselines_of(
    stored: Stored,
    sizes: tuple[int, int, int],
    num_items: int,
    oracle: np.ndarray | None,
    liked_label: float,
    done: Callable[[float], object],
) -> dict[str, dict[str, Metrics]]:
    """What a model has to beat on the test events, for each way of evaluation.

    Fitted on all that is not the test, which makes them harder to beat; but the calibration of a log loss is
    that of predictions of the validation labels, made without them, as for the model. done: called with the
    share of the work that is.
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    validation, test = slice(num_train, num_known), slice(num_known, None)
    user, item, label = stored.user, stored.item, stored.label
    early, late = _fit_both(stored, (num_train, num_known), num_items, done)
    predictions = {
        "global mean": (np.full(num_validation, early.mean), np.full(sizes[2], late.mean)),
        "biases": (
            early.predict(user[validation], item[validation]),
            late.predict(user[test], item[test]),
        ),
    }
    if oracle is not None:
        predictions["oracle"] = oracle[validation], oracle[test]
    liked_before, liked = label[validation] >= liked_label, label[test] >= liked_label
    of_labels = {
        name: measure(on_test, label[test], liked, fit_calibration(on_validation, liked_before))
        for name, (on_validation, on_test) in predictions.items()
    }
    # What a calibrated prediction is worth as a probability.
    of_answers = {
        name: {metric: metrics[metric] for metric in ("log_loss", "auc")}
        for name, metrics in of_labels.items()
    }
    # The share of yes is one already, and that of the few validation events only lies around it.
    num_liked = sum(int((label[part] >= liked_label).sum()) for part in chunks(num_known, label))
    of_share = {**of_answers.pop("global mean"), "log_loss": log_loss_of(num_liked / num_known, liked)}
    of_answers = {"share of yes": of_share, **of_answers}
    release(user, item, label)
    ranks = popularity_ranks(
        user, item, num_known, num_items, lambda share: done(1 - (1 - share) * (1 - SHARE_OF_BIASES))
    )
    popularity = measure_ranks(ranks)
    return {"predictions": of_labels, "ranks": {"popularity": popularity}, "answers": of_answers}


def _fit_both(
    stored: Stored, numbers: tuple[int, int], num_items: int, done: Callable[[float], object]
) -> tuple[Biases, Biases]:
    """The bias baselines of so many of the first events each."""
    num_users = highest(stored.user) + 1
    rounds: list[int] = []

    def fit(number: int) -> Biases:
        def round_done() -> None:
            rounds.append(number)
            done(SHARE_OF_BIASES * len(rounds) / (len(numbers) * BASELINE_ROUNDS))

        user, item, label = stored.user[:number], stored.item[:number], stored.label[:number]
        return fit_biases(user, item, label, num_users, num_items, round_done)

    # At once: numpy gathers without Python's lock.
    with ThreadPoolExecutor(len(numbers)) as pool:
        early, late = pool.map(fit, numbers)
    return early, late


def popularity_ranks(
    user: np.ndarray,
    item: np.ndarray,
    num_known: int,
    num_items: int,
    done: Callable[[float], object] = lambda share: None,
) -> np.ndarray:
    """Ranks, int64, of the events from number `num_known` on, when items are ranked by their number of
    known events; of those that the user is known to have had only the test item itself is ranked.

    Takes int [n] and int [n]. Ties count against an item.
    """
    counts = counts_of(item[:num_known], num_items)
    ordered = np.sort(counts)
    ranks = np.empty(len(user) - num_known, np.int64)

    def rank(users: range) -> None:
        places, user_of, item_of = events_of(users, user, item)
        # (user, item) as one number of 64 bits, as users times items exceed 32.
        pairs = user_of.astype(np.int64) * num_items + item_of
        known, cases = pairs[places < num_known], pairs[places >= num_known]
        # Sorted cases are looked up where the one before was.
        order = sorted_places(cases)
        popular_seen = _popular_seen(np.sort(known), cases[order], counts)
        # From the left, so that an item which is as popular counts as above, as it does for a model.
        popular = num_items - ordered.searchsorted(counts[cases[order] % num_items])
        # The test item counts once: among the popular ones, where it takes the place of the 1 of the first
        # rank.
        ranks[places[places >= num_known][order] - num_known] = popular - popular_seen

    for_ranges(counts_of(user, highest(user) + 1), rank, done)
    return ranks


def _popular_seen(known: np.ndarray, cases: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many items the users of the cases are known to have had that are as popular as the item of the case
    or more, that one left out, int64 [cases].

    Takes numbers of user and item, int64, in ascending order; counts: how popular the items are.
    """
    num_items, step = len(counts), int(counts.max(initial=0)) + 1
    known = known[np.diff(known, prepend=-1) != 0]
    # (user, popularity) as one number each.
    seen = np.sort(known // num_items * step + counts[known % num_items])
    user, item = np.divmod(cases, num_items)
    popular = seen.searchsorted((user + 1) * step) - seen.searchsorted(user * step + counts[item])
    return popular - among(cases, known)


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
    user: np.ndarray,
    item: np.ndarray,
    label: np.ndarray,
    num_users: int,
    num_items: int,
    round_done: Callable[[], object] = lambda: None,
) -> Biases:
    """Damped least squares for label = mean + user bias + item bias, by alternation.

    Takes int [n], int [n] and float [n]; a user or item without an event gets bias 0.
    """
    mean = float(label.mean(dtype=np.float64))
    release(label)
    user_bias, item_bias = np.zeros(num_users), np.zeros(num_items)
    user_weight = DAMPING + counts_of(user, num_users)
    item_weight = DAMPING + counts_of(item, num_items)

    def sums(of: np.ndarray, other: np.ndarray, bias: np.ndarray, number: int) -> np.ndarray:
        """What is left of the labels without mean and the biases of the other side, by user or item."""
        found = np.zeros(number)
        for part in chunks(len(of), of, other, label):
            # One after the other, so the sums are the same to the last bit however long a chunk is.
            np.add.at(found, of[part], label[part].astype(np.float64) - mean - bias[other[part]])
        return found

    # Each line solves for one side exactly while the other is kept.
    for _ in range(BASELINE_ROUNDS):
        item_bias = sums(item, user, user_bias, num_items) / item_weight
        user_bias = sums(user, item, item_bias, num_users) / user_weight
        round_done()
    return Biases(mean, user_bias, item_bias)
