"""Baselines of events, computed once, when columns are made, and kept with them.

Biases for labels, popularity for rankings. They depend only on the data and the split. If the distribution of
the events is known, so is the oracle, the best possible prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.arrays import chunks, counts_of, highest, release
from recsuite.datasets.preparation.histories import StoredEvents
from recsuite.datasets.preparation.loops import add_rests, grouped, rank_by_popularity
from recsuite.datasets.schema import HISTORY, LEAST_SHARE
from recsuite.metrics import (
    KNOWN,
    NEVER_FOUND,
    NEW,
    Metrics,
    fit_calibration,
    log_loss_of,
    measure,
    measure_ranks,
    ranks_by_chance,
)

if TYPE_CHECKING:
    from recsuite.datasets.schema import RawData, Schema


# Damping of the bias baseline: with this many events, a bias is half of the mean deviation. The usual value;
# weaker and stronger ones gave a weaker baseline on ml-latest-small.
DAMPING = 5.0
# Rounds end where the RMSE of the fitted events changes by less than this, and after so many at the latest.
LEAST_CHANGE, MOST_ROUNDS = 1e-4, 10
# Share of the time of all baselines.
SHARE_OF_BIASES = 0.3


@dataclass(frozen=True)
class Oracle:
    """Best possible predictions. Either is None if it is not known.

    labels: expected labels of all events, in the order in which they are stored, float32 [events]; ranks:
    best possible ranks of the items of the test, int64 [test events].
    """

    labels: np.ndarray | None
    ranks: np.ndarray | None


def oracle_of(raw: RawData, order: np.ndarray, num_test: int, split: str) -> Oracle:
    """Return the oracle of events that are stored in this order, the test last."""
    labels = None if raw.oracle is None else raw.oracle[order]
    # These ranks use all earlier events of the user. So does a test ranking only if each test event is the
    # newest of its user.
    if raw.oracle_ranks is None or split != "leave_one_out":
        return Oracle(labels, None)
    return Oracle(labels, raw.oracle_ranks[order[len(order) - num_test :]].astype(np.int64))


def baselines_of(
    folder: Path,
    stored: StoredEvents,
    is_listed: np.ndarray,
    sizes: tuple[int, int, int],
    oracle: Oracle,
    schema: Schema,
    done: Callable[[float], object],
) -> dict[str, dict[str, Metrics]]:
    """Baselines on the test events for each way of evaluation.

    With the suffixes "/known" and "/new": on the events of users with and without a training event, if there
    are both. Baselines are fitted to all events except the test, which makes them stronger. As for the model,
    the calibration of a log loss is fitted to predictions of the validation labels that did not use them.

    folder: with the histories of the events; is_listed: of each item, see `columns.listed_items`; done:
    called with the finished share of the work.
    """
    num_known, num_items = sizes[0] + sizes[1], len(is_listed)
    user, item, label = stored.user, stored.item, stored.label
    known_offsets = np.load(folder / f"test_{HISTORY}_offsets.npy")
    shape = len(known_offsets) - 1, num_items
    fitted = fit_biases(
        user, item, label, shape, (sizes[0], num_known), lambda share: done(SHARE_OF_BIASES * share)
    )
    ranked = popularity_ranks(
        known_offsets,
        np.load(folder / "test_seen.npy", mmap_mode="r"),
        user[num_known:],
        item[num_known:],
        counts_of(item[:num_known], num_items),
        is_listed,
        schema.excludes_seen,
    )
    done(1)
    has_trained = counts_of(user[: sizes[0]], highest(user) + 1) > 0
    splits = slice(sizes[0], num_known), slice(num_known, None)
    predictions = {
        "global mean": [np.broadcast_to(fit.mean, size) for fit, size in zip(fitted, sizes[1:], strict=True)],
        "biases": [fit.predict(user[split], item[split]) for fit, split in zip(fitted, splits, strict=True)],
    }
    if oracle.labels is not None:
        predictions["oracle"] = [oracle.labels[split] for split in splits]
    labels = [label[split] for split in splits]
    share = num_liked(label[:num_known], schema.liked_label) / num_known
    results = measured(
        labels, predictions, ranked, has_trained[user[num_known:]], share, schema.liked_label, oracle.ranks
    )
    release(user, item, label)
    return results


def num_liked(label: np.ndarray, liked_label: float) -> int:
    """Return the number of labels that count as liked."""
    return sum(int((label[part] >= liked_label).sum()) for part in chunks(len(label), label))


def measured(
    labels: Sequence[np.ndarray],
    predictions: Mapping[str, Sequence[np.ndarray]],
    ranked: tuple[np.ndarray, np.ndarray],
    is_known: np.ndarray,
    share: float,
    liked_label: float,
    oracle_ranks: np.ndarray | None = None,
) -> dict[str, dict[str, Metrics]]:
    """Return the metrics of baselines, see `baselines_of`.

    labels, predictions: of the validation and the test, float [n]; ranked: `popularity_ranks`; is_known: True
    for a test event of a user with a training event, bool [n]; share: of liked events before the test.
    """
    parts: dict[str, Any] = {"": slice(None)}
    if is_known.any() and not is_known.all():
        parts |= {KNOWN: is_known, NEW: ~is_known}
    ranks, candidates = ranked
    results: dict[str, dict[str, Metrics]] = {}
    for part, some in parts.items():
        of_labels, of_answers = _measured(labels, predictions, share, liked_label, some)
        of_ranks: dict[str, Metrics] = {
            "a random order": ranks_by_chance(candidates[some]),
            "popularity": measure_ranks(ranks[some]).values,
        }
        if oracle_ranks is not None:
            of_ranks["oracle"] = measure_ranks(oracle_ranks[some]).values
        ways = {"predictions": of_labels, "ranks": of_ranks, "answers": of_answers}
        results |= {way + part: of_part for way, of_part in ways.items()}
    return results


def _measured(
    labels: Sequence[np.ndarray],
    predictions: Mapping[str, Sequence[np.ndarray]],
    share: float,
    liked_label: float,
    some: Any,
) -> tuple[dict[str, Metrics], dict[str, Metrics]]:
    """Return metrics of predicted labels on the test, and those of the calibrated probabilities."""
    # some: the test events, bool or a slice.
    tested = labels[1]
    liked_before, liked = (each >= liked_label for each in labels)

    def measured_of(name: str) -> Metrics:
        on_validation, on_test = predictions[name]
        calibration = fit_calibration(on_validation, liked_before)
        return measure(on_test[some], tested[some], liked[some], calibration).values

    of_labels = {name: measured_of(name) for name in predictions}
    of_answers = {
        name: {metric: metrics[metric] for metric in ("log_loss", "auc")}
        for name, metrics in of_labels.items()
    }
    # The share of yes is already a probability. A calibration by the few validation events would add noise.
    of_share = {**of_answers.pop("global mean"), "log_loss": log_loss_of(share, liked[some])}
    return of_labels, {"share of yes": of_share, **of_answers}


def popularity_ranks(
    offsets: np.ndarray,
    seen: np.ndarray,
    user: np.ndarray,
    item: np.ndarray,
    counts: np.ndarray,
    is_listed: np.ndarray,
    excludes: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of items by popularity, int64 [n]. Ties count against an item.

    Also returns the number of ranked items of each, int32 [n], 0 if the item itself is not ranked.

    offsets, seen: the items of the users' known events, user after user; user, item: of the events to rank,
    int32 [n]; counts: number of known events of each item, int64 [items]; is_listed: True for the items that
    are ranked, bool [items]; excludes: True if items of the user's known events are not ranked.
    """
    listed = counts[is_listed]
    # From the left, so that an equally popular item counts as above, as for a model.
    popular = len(listed) - np.sort(listed).searchsorted(counts)
    if not excludes:
        known = is_listed[item]
        return np.where(known, popular[item], NEVER_FOUND), np.where(known, len(listed), 0).astype(np.int32)
    # Ranks are int64: they may exceed the number of items, which may be the largest int32.
    ranks, candidates = np.full(len(item), NEVER_FOUND, np.int64), np.zeros(len(item), np.int32)
    cases = grouped(user, len(offsets) - 1)
    rank_by_popularity(
        offsets, seen, cases.offsets, cases.events, item, counts, popular, is_listed, ranks, candidates
    )
    return ranks, candidates


@dataclass(frozen=True)
class Biases:
    """Bias baseline: mean label, and the deviation of each user and item from it, float64."""

    mean: float
    user: np.ndarray
    item: np.ndarray

    def predict(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Predicted labels, float64 [n], for positions of users and items, int [n]."""
        return self.mean + self.user[user] + self.item[item]


class PastBiases:
    """Bias baseline of a stream: the events of a window are predicted from all events before it.

    The prediction is the mean label plus the damped mean deviations of the user and of the item; of answers,
    yes or no, the same of log-odds. It depends on the earlier events alone, so a resumed stream has the same
    one, except for the mean before the first event.

    user, item, all_events: sum and number of the labels so far, of users and items, float64 [n, 2], and of
    all, [1, 2]; mean: the one before the first event; of_answers: True if the labels are 1 for yes and 0 for
    no.
    """

    def __init__(
        self,
        user: np.ndarray,
        item: np.ndarray,
        all_events: np.ndarray,
        mean: float,
        of_answers: bool = False,
    ) -> None:
        self._mean, self._of_answers = mean, of_answers
        self._sums = [np.array(sums[:, 0]) for sums in (user, item)]
        self._counts = [sums[:, 1].astype(np.int64) for sums in (user, item)]
        self._sum, self._number = float(all_events[0, 0]), int(all_events[0, 1])

    def learn(self, user: np.ndarray, item: np.ndarray, label: np.ndarray) -> None:
        """Add events; user, item: their positions, int [n]; label: float [n]."""
        for rows, sums, counts in zip((user, item), self._sums, self._counts, strict=True):
            np.add.at(sums, rows, label)
            np.add.at(counts, rows, 1)
        self._sum += float(label.sum(dtype=np.float64))
        self._number += len(label)

    def predict(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Return predicted labels, or probabilities of yes, float64 [n]."""
        mean = self._sum / self._number if self._number else self._mean
        of_mean, damping = self._scaled(mean), DAMPING
        scores = np.full(len(user), of_mean)
        if self._of_answers:
            # The rarer one of yes and no is, the less an event tells.
            share = np.clip(mean, LEAST_SHARE, 1 - LEAST_SHARE)
            damping /= share * (1 - share)
        for rows, sums, counts in zip((user, item), self._sums, self._counts, strict=True):
            damped = (sums[rows] + damping * mean) / (counts[rows] + damping)
            scores += self._scaled(damped) - of_mean
        return 1 / (1 + np.exp(-scores)) if self._of_answers else scores

    def _scaled(self, labels: Any) -> Any:
        if not self._of_answers:
            return labels
        labels = np.clip(labels, LEAST_SHARE, 1 - LEAST_SHARE)
        return np.log(labels / (1 - labels))


def fit_biases(
    user: np.ndarray,
    item: np.ndarray,
    label: np.ndarray,
    sizes: tuple[int, int],
    numbers: Sequence[int],
    done: Callable[[float], object] = lambda share: None,
) -> list[Biases]:
    """Fit label = mean + user bias + item bias by damped alternating least squares, see `LEAST_CHANGE`.

    Returns a fit for each of the numbers: of so many of the first events. A user or item without an event has
    bias 0.

    user, item: int32 [n]; label: float32 [n]; sizes: numbers of users and of items; done: called with the
    finished share of the rounds.
    """
    return settled([_rounds(user[:number], item[:number], label[:number], sizes) for number in numbers], done)


def settled(fits: Sequence[Iterator[tuple[Biases, float]]], done: Callable[[float], object]) -> list[Biases]:
    """Return the biases of fits as `_rounds` after as many rounds as it takes. done: see `fit_biases`."""
    before = (math.inf,) * len(fits)
    for number in range(1, MOST_ROUNDS + 1):
        fitted, errors = zip(*map(next, fits), strict=True)
        done(number / MOST_ROUNDS)
        if all(last - now < LEAST_CHANGE for last, now in zip(before, errors, strict=True)):
            break
        before = errors
    return [*fitted]


def _rounds(
    user: np.ndarray, item: np.ndarray, label: np.ndarray, sizes: tuple[int, int]
) -> Iterator[tuple[Biases, float]]:
    """Yield better and better biases, and the RMSE of the events with them."""
    mean = float(label.mean(dtype=np.float64))
    release(label)
    counts = [counts_of(column, size) for column, size in zip((user, item), sizes, strict=True)]
    of_users = np.zeros(sizes[0])
    while True:
        # Each line solves for one side exactly with the other fixed.
        of_items, _ = solved(counts[1], *rests(item, user, label, mean, of_users, sizes[1]))
        of_users, squares = solved(counts[0], *rests(user, item, label, mean, of_items, sizes[0]))
        yield Biases(mean, of_users, of_items), math.sqrt(max(squares, 0.0) / len(label))


def rests(
    own: np.ndarray, other: np.ndarray, label: np.ndarray, mean: float, biases: np.ndarray, number: int
) -> tuple[np.ndarray, float]:
    """Return sums of what the biases of the other side leave of the labels, float64 [number], and of squares.

    own, other: positions of the events on both sides, int32 [n].
    """
    sums, squares = np.zeros(number), 0.0
    for part in chunks(len(own), own, other, label):
        squares += add_rests(own[part], other[part], label[part], mean, biases, sums)
    return sums, squares


def solved(counts: np.ndarray, sums: np.ndarray, squares: float) -> tuple[np.ndarray, float]:
    """Return biases of one side, float64, and the squared error of the events. sums, squares: see `rests`."""
    biases = sums / (counts + DAMPING)
    # The sum of (rest - bias)^2 over the events, without another pass over them.
    return biases, squares + float((biases * (counts * biases - 2 * sums)).sum())
