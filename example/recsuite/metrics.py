"""Metrics over whole splits: of predictions against labels, and of ranks.

Plain numpy on arrays with one entry for each event, so that known answers can be checked by hand.
`training/evaluation.py` gathers the arrays from all ranks; `models/tasks.py` chooses and names the metrics of
a task.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from recsuite.errors import printable

# The K of HR@K and NDCG@K; --cutoffs adds others.
TOP = 10
# Name of a metric to its value, NaN if it is not defined.
Metrics = dict[str, float]
# A metric is an error, the smaller the better, if its name contains one of these; the others are scores.
ERRORS = ("rmse", "mae", "loss")
# Suffixes of a way of evaluation: on the events of users with a training event, and of those without.
KNOWN, NEW = "/known", "/new"

# Newton's method doubles the digits in each round. The ridge keeps a calibration finite if predictions put
# all liked items above all others; otherwise its effect is negligible.
CALIBRATION_ROUNDS = 25
CALIBRATION_RIDGE = 1e-3
# A calibration is fitted to at least so many events, with at least so many of each answer: with fewer, the
# log loss has no meaning.
LEAST_CALIBRATED, LEAST_OF_EACH = 50, 5
# With more events than this it begins with the fit to some of them, and ends when one of a few rounds changes
# it by less than this share: the next change would be the square of it.
CALIBRATION_SAMPLE, SAMPLED_ROUNDS, LEAST_CHANGE = 2**15, 6, 1e-6
# Bootstrap of intervals: number of samples, and of those for the difference of two models; number of groups
# of cases that are drawn together (all cases of a user are in one group).
SAMPLES, PAIRED_SAMPLES, GROUPS = 200, 2_000, 512
# For the interval of the AUC: its half width, in standard errors; users of one of so many clusters count as
# one; the number of cases that others are compared with, at most twice as many.
NORMAL_95, CLUSTERS, MOST_COMPARED = 1.96, 2**16, 2**16
# Share of the items that count as popular; number of items that are named.
POPULAR, MOST_LISTED = 0.01, 3
# Lists hold few items with less than this share of those that they could hold. On ml-latest-small (10 items
# for each user) popularity alone has 0.02, the presets of ratings and rankings 0.13 and 0.25.
LEAST_LISTED = 0.05
# Least number of groups of users for an interval.
LEAST_GROUPS = 20
# Predictions with a smaller standard deviation, in stars, count as equal.
LEAST_SPREAD = 1e-6
# Distance from 1 to the float32 below it; the lower limit of a probability in a log loss.
LEAST_PROBABILITY = 2.0**-24
# Rank of an item that is not ranked because its user had it: beyond any cutoff, so never a hit.
NEVER_FOUND = 2**40
# Sums are computed by chunks, so that metrics of many events need little more memory than their labels.
CHUNK = 2**20


@dataclass(frozen=True)
class Spread:
    """Spread of the entries of lists over the items that can be in one.

    listed: number of items in a list, of `ranked`; entries: number of entries of all lists; popular_share:
    share of these that are of the POPULAR most popular items; new_share: share of these that are of items
    without a row; novelty: mean of -log2 of the share of an item in their events, with one event added to
    each item, in bits; most: the items that are most often in a list, and how often.
    """

    listed: int
    ranked: int
    entries: int
    popular_share: float
    new_share: float
    novelty: float
    most: tuple[tuple[str, int], ...]

    @property
    def coverage(self) -> float:
        """Share of the items that are in a list."""
        return self.listed / self.ranked

    def described(self, items: str, advice: str) -> str:
        """Describe it in one line. items: what they are called; advice: what to do if the lists hold few."""
        most = ", ".join(f"{item} ({number:,})" for item, number in self.most)
        is_few = self.listed < LEAST_LISTED * min(self.ranked, self.entries)
        return (
            f"{self.listed:,} of {self.ranked:,} {items} are in a list (coverage {self.coverage:.3f}); "
            f"{self.popular_share:.1%} of the entries are of the {POPULAR:.0%} most popular, "
            f"{self.new_share:.1%} of new {items}; "
            f"novelty {self.novelty:.2f} bits; most often: {printable(most)}" + f"; {advice}" * is_few
        )


@dataclass(frozen=True)
class Measured:
    """Metrics of a split; `measured["rmse"]` is one of the values.

    values: by name; cases: number of events; intervals: ends of the 95 % interval of each metric, over users.
    groups: of a metric that is a mean, the sums of its values and the numbers of cases of each group of
    users, float64 [2, GROUPS], for `paired_interval`.
    parts: KNOWN and NEW to the metrics of these cases alone, if there are both; segments: name to value to
    the metrics of its cases, see --by. new_users, new_items: shares of the cases whose user, or item, has no
    training event. lists: of a ranking, the spread of the lists of TOP items. missed: of a ranking, number of
    cases whose item no list can hold, see `columns.listed_items`.
    """

    values: Metrics
    cases: int = 0
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    groups: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)
    parts: Mapping[str, Measured] = field(default_factory=dict)
    segments: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)
    new_users: float = 0.0
    new_items: float = 0.0
    lists: Spread | None = None
    missed: int = 0

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def keys(self) -> Iterable[str]:
        """Return the names of the values: `{**measured}` is a dictionary of them."""
        return self.values.keys()


def finite(metrics: Metrics) -> dict[str, float | None]:
    """Return metrics for JSON, with None for NaN and infinities."""
    # JSON has no NaN.
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


@dataclass(frozen=True)
class Calibration:
    """Logistic function from a predicted label to the probability that the item is liked."""

    slope: float
    intercept: float

    def log_losses(self, predictions: np.ndarray, liked: np.ndarray) -> np.ndarray:
        """Negative logarithm of the probability of the true answer, float64 [n]."""
        logits = self.slope * predictions.astype(np.float64) + self.intercept
        # log(1 + exp(z)) for the logit z of the false answer, in a form that does not overflow.
        wrong = np.where(liked, -logits, logits)
        return np.maximum(wrong, 0) + np.log1p(np.exp(-np.abs(wrong)))


def fit_calibration(predictions: np.ndarray, liked: np.ndarray) -> Calibration:
    """Return the calibration of highest likelihood for predictions, float [n], and true answers, bool [n].

    By Newton's method on standardised predictions. With fewer events than LEAST_CALIBRATED, or fewer of one
    answer than LEAST_OF_EACH, slope and intercept are NaN.
    """
    num_liked = int(np.count_nonzero(liked))
    if len(liked) < LEAST_CALIBRATED or min(num_liked, len(liked) - num_liked) < LEAST_OF_EACH:
        return Calibration(float("nan"), float("nan"))
    mean, spread = (float(number(predictions, dtype=np.float64)) for number in (np.mean, np.std))
    spread = spread if spread > LEAST_SPREAD else 1.0
    if len(liked) > CALIBRATION_SAMPLE:
        few = slice(None, None, -(-len(liked) // CALIBRATION_SAMPLE))
        sampled = fit_calibration(predictions[few], liked[few])
        weights = np.array([sampled.slope * spread, sampled.intercept + sampled.slope * mean])
        # Not from a sample with too few of one answer. After one that misleads, all rounds follow.
        for _ in range(SAMPLED_ROUNDS if np.isfinite(weights).all() else 0):
            change = _newton_change(weights, predictions, liked, mean, spread)
            weights = weights - change
            if np.abs(change).max() < LEAST_CHANGE * np.abs(weights).max():
                return _unscaled(weights, mean, spread)
    weights, earlier = np.zeros(2), list[np.ndarray]()
    # Mostly after 7 rounds: then rounding gives weights of an earlier round again, and all others follow.
    while not (same := [place for place, one in enumerate(earlier) if (one == weights).all()]):
        earlier.append(weights)
        if len(earlier) > CALIBRATION_ROUNDS:
            break
        weights = weights - _newton_change(weights, predictions, liked, mean, spread)
    if same:
        weights = earlier[same[0] + (CALIBRATION_ROUNDS - same[0]) % (len(earlier) - same[0])]
    return _unscaled(weights, mean, spread)


def _newton_change(
    weights: np.ndarray, predictions: np.ndarray, liked: np.ndarray, mean: float, spread: float
) -> np.ndarray:
    """Return what a round of Newton's method subtracts from slope and intercept, float64 [2]."""
    gradient, curvature = CALIBRATION_RIDGE * weights, CALIBRATION_RIDGE * np.eye(2)
    for part in _chunks(len(predictions)):
        scaled = (predictions[part].astype(np.float64) - mean) / spread
        inputs = np.stack([scaled, np.ones_like(scaled)])
        # The logistic function in a form that does not overflow.
        probability = (1 + np.tanh(weights @ inputs / 2)) / 2
        gradient += inputs @ (probability - liked[part])
        curvature += (inputs * (probability * (1 - probability))) @ inputs.T
    change: np.ndarray = np.linalg.solve(curvature, gradient)
    return change


def _unscaled(weights: np.ndarray, mean: float, spread: float) -> Calibration:
    slope = float(weights[0]) / spread
    return Calibration(slope, float(weights[1]) - slope * mean)


def measure(
    predictions: np.ndarray,
    labels: np.ndarray,
    liked: np.ndarray,
    calibration: Calibration,
    users: np.ndarray | None = None,
) -> Measured:
    """Exact metrics of predictions, float [n], against labels, float [n], summed in float64.

    liked: bool [n]; if all or none are, auc is NaN. log_loss is NaN if the calibration is. users: of the
    events, int [n], for intervals; None for no intervals.
    """

    def values_of(part: slice) -> tuple[np.ndarray, ...]:
        errors = predictions[part].astype(np.float64) - labels[part]
        losses = calibration.log_losses(predictions[part], liked[part])
        return np.square(errors), np.abs(errors), losses

    names = ("rmse", "mae", "log_loss")
    means = _means(len(predictions), names, values_of, users)
    measured = _with_auc(means, predictions, liked, users)
    intervals = dict(measured.intervals)
    if "rmse" in intervals:
        low, high = intervals["rmse"]
        intervals["rmse"] = math.sqrt(low), math.sqrt(high)
    in_order = {name: measured[name] for name in ("rmse", "mae", "auc", "log_loss")}
    in_order["rmse"] = float(np.sqrt(in_order["rmse"]))
    return replace(measured, values=in_order, intervals=intervals)


def measure_probabilities(
    predictions: np.ndarray, is_yes: np.ndarray, users: np.ndarray | None = None
) -> Measured:
    """Exact metrics of probabilities, float [n].

    is_yes: True if the answer was yes, bool [n]; users: see `measure`. The metric "calibration" is the mean
    probability divided by the share of yes, 1 at best; NaN without a yes.
    """

    def values_of(part: slice) -> tuple[np.ndarray, ...]:
        right = np.where(is_yes[part], predictions[part], 1 - predictions[part].astype(np.float64))
        return (-np.log(np.maximum(right, LEAST_PROBABILITY)),)

    means = _means(len(predictions), ("log_loss",), values_of, users)
    measured = _with_auc(means, predictions, is_yes, users)
    num_yes = np.count_nonzero(is_yes)
    calibration = float(predictions.sum(dtype=np.float64) / num_yes) if num_yes else math.nan
    return replace(measured, values={**measured.values, "calibration": calibration})


def _means(
    number: int,
    names: tuple[str, ...],
    values_of: Callable[[slice], tuple[np.ndarray, ...]],
    users: np.ndarray | None,
) -> Measured:
    """Means of values of the cases, with intervals if their users are given."""
    # values_of: the values of a part of the cases, float64 [cases] for each name.
    totals = [0.0] * len(names)
    groups = np.zeros((GROUPS, 1 + len(names)))
    for part in _chunks(number):
        group = None if users is None else _group_of(users[part])
        for place, values in enumerate(values_of(part)):
            totals[place] += float(values.sum())
            if group is not None:
                groups[:, 1 + place] += np.bincount(group, values, GROUPS)
        if group is not None:
            groups[:, 0] += np.bincount(group, minlength=GROUPS)
    means = {name: total / number for name, total in zip(names, totals, strict=True)}
    if users is None:
        return Measured(means, number)
    samples = _sampled_means(groups, SAMPLES)
    intervals = {name: _ends(samples[:, place]) for place, name in enumerate(names)}
    of_names = {name: groups[:, [1 + place, 0]].T for place, name in enumerate(names)}
    return Measured(means, number, intervals, of_names)


def _sampled_means(groups: np.ndarray, number: int) -> np.ndarray:
    """Return means of the cases of samples of the groups, float64 [samples, m].

    groups: number of cases of each, and sums of their values, float64 [GROUPS, 1 + m].
    """
    # Not BLAS: its sums depend on the number of threads and so on the number of ranks.
    sums = np.einsum("sg,gm->sm", _draws(number), groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        samples = sums[:, 1:] / sums[:, :1]
    # A sample of a few users says nothing about others.
    if np.count_nonzero(groups[:, 0]) < LEAST_GROUPS:
        samples[:] = np.nan
    return samples


def paired_interval(name: str, new: np.ndarray, old: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of how much better one model is than another on the same cases.

    By a bootstrap over users that draws the same users for both. NaN for fewer groups of users than
    LEAST_GROUPS.

    name: of the metric; new, old: `Measured.groups` of the metric, float [2, GROUPS].

    Raises:
        ValueError: for groups of other cases.
    """
    if not np.array_equal(new[1], old[1]):
        raise ValueError("paired_interval requires the same cases of both models.")
    means = _sampled_means(np.stack([new[1], new[0], old[0]], axis=1), PAIRED_SAMPLES)
    values = np.sqrt(means) if name == "rmse" else means
    gains = values[:, 0] - values[:, 1]
    return _ends(-gains if lower_is_better(name) else gains)


def _with_auc(
    measured: Measured, scores: np.ndarray, positive: np.ndarray, users: np.ndarray | None
) -> Measured:
    """Return the metrics with the AUC, and its interval if users are given."""
    # The AUC is a mean over cases of their shares of the pairs in order with cases of the other answer. The
    # cases of a user are alike, so the variance is that of the sums of users (Obuchowski, "Nonparametric
    # analysis of clustered ROC curve data", 1997).
    value = auc(scores, positive)
    measured = replace(measured, values={**measured.values, "auc": value})
    if users is None or math.isnan(value):
        return measured
    # Some of the cases that a case with an answer of no, and of yes, is compared with, in order.
    compared = [
        np.sort(given[:: 1 + len(given) // MOST_COMPARED]) for given in (scores[positive], scores[~positive])
    ]
    numbers, sums, sizes = np.bincount(positive, minlength=2), np.zeros(CLUSTERS), np.zeros(CLUSTERS)
    for part in _chunks(len(scores)):
        cluster = users[part] % CLUSTERS
        sizes += np.bincount(cluster, minlength=CLUSTERS)
        for answer, others in enumerate(compared):
            is_mine = positive[part] == answer
            mine = scores[part][is_mine]
            # Sorted first: a search for the next larger number reads what the last one has read.
            order, below = mine.argsort(), np.empty(len(mine))
            mine = mine[order]
            twice = others.searchsorted(mine, "left") + others.searchsorted(mine, "right")
            below[order] = twice / (2 * len(others))
            added = ((below if answer else 1 - below) - value) / numbers[answer]
            sums += np.bincount(cluster[is_mine], added, CLUSTERS)
    number = np.count_nonzero(sizes)
    # A few users say nothing about others.
    error = math.sqrt(np.square(sums).sum() * number / (number - 1)) if number >= LEAST_GROUPS else math.nan
    low, high = value - NORMAL_95 * error, value + NORMAL_95 * error
    ends = float(np.clip(low, 0, 1)), float(np.clip(high, 0, 1))
    return replace(measured, intervals={**measured.intervals, "auc": ends})


def _group_of(users: np.ndarray) -> np.ndarray:
    # All cases of a user are in one group, since they are alike.
    return users.astype(np.int64) % GROUPS


@functools.cache
def _draws(number: int) -> np.ndarray:
    """Number of times that each sample contains each group, float64 [samples, groups]."""
    return np.random.default_rng(0).poisson(1.0, (number, GROUPS)).astype(np.float64)


def _ends(samples: np.ndarray) -> tuple[float, float]:
    """95 % interval of the finite samples; NaN if fewer than half are finite."""
    known = samples[np.isfinite(samples)]
    if len(known) < len(samples) // 2:
        return math.nan, math.nan
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def log_loss_of(probability: float, is_yes: np.ndarray) -> float:
    """Log loss of one probability for all answers, bool [n]."""
    yes, no = np.log(np.clip([probability, 1 - probability], LEAST_PROBABILITY, 1))
    # Adding 0.0 gives 0 instead of -0 if all answers are the same.
    return float(is_yes.mean() * -yes + (1 - is_yes.mean()) * -no) + 0.0


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Share of (positive, negative) pairs that the scores, float [n], order correctly; ties count half."""
    above, below = np.sort(scores[positive]), np.sort(scores[~positive])
    if len(above) == 0 or len(below) == 0:
        return float("nan")
    # An exact integer: 2 for each pair in order, 1 for each tie.
    twice = 0
    for part in _chunks(len(above)):
        twice += int(below.searchsorted(above[part], "left").sum())
        twice += int(below.searchsorted(above[part], "right").sum())
    return twice / 2 / (len(above) * len(below))


def measure_ranks(
    ranks: np.ndarray, users: np.ndarray | None = None, cutoffs: Sequence[int] = (TOP,)
) -> Measured:
    """Hit rate, NDCG and mean reciprocal rank of the first items, as many as each cutoff says.

    ranks: of the test items, int [n], from 1 on; users: see `measure`. A case has one relevant item, so its
    ideal gain is 1, its recall is the hit rate, and its average precision is the reciprocal rank.
    """
    names = tuple(f"{name}_at_{cutoff}" for cutoff in cutoffs for name in ("hr", "ndcg", "mrr"))
    if len(ranks) == 0:
        return Measured(dict.fromkeys(names, math.nan), 0)

    def values_of(part: slice) -> tuple[np.ndarray, ...]:
        gains = np.ones(len(ranks[part])), 1 / np.log2(1.0 + ranks[part]), 1 / ranks[part]
        return tuple(gain * (ranks[part] <= cutoff) for cutoff in cutoffs for gain in gains)

    return _means(len(ranks), names, values_of, users)


def ranks_by_chance(candidates: np.ndarray) -> Metrics:
    """Expected metrics of `measure_ranks` for a random order of the candidates.

    candidates: number of items that are ranked in each case, int [n]; 0 if the item of the case is not.
    """
    shown = np.minimum(candidates, TOP)
    ranks = np.arange(1, TOP + 1)
    # Sums over the first items, of each metric of a hit at a place.
    sums = (np.cumsum([0.0, *each]) for each in (np.ones(TOP), 1 / np.log2(1 + ranks), 1 / ranks))
    means = (float((each[shown] / np.maximum(candidates, 1)).mean()) for each in sums)
    return dict(zip(("hr_at_10", "ndcg_at_10", "mrr_at_10"), means, strict=True))


def _chunks(number: int) -> Iterator[slice]:
    for first in range(0, number, CHUNK):
        yield slice(first, first + CHUNK)


def lower_is_better(name: str) -> bool:
    """True if a metric of this name is an error."""
    return any(word in name for word in ERRORS)


def spread_of(
    listed: np.ndarray,
    had: np.ndarray,
    is_ranked: np.ndarray,
    has_row: np.ndarray,
    name_of: Callable[[int], Any],
) -> Spread | None:
    """Return the spread of lists, or None if they are empty.

    listed: in how many lists each item is, int64 [items]; had: the number of its events; is_ranked: True if
    it can be in a list; has_row: True if it has a row of its own; name_of: the id of the item at a position.
    """
    if not listed.any():
        return None
    number = int(is_ranked.sum())
    had = had * is_ranked
    popular = np.argsort(-had, kind="stable")[: max(1, round(POPULAR * number))]
    surprise = -np.log2((had + 1) / (had.sum() + number))
    most = [int(place) for place in np.argsort(-listed, kind="stable")[:MOST_LISTED] if listed[place]]
    return Spread(
        int(np.count_nonzero(listed)),
        number,
        int(listed.sum()),
        float(listed[popular].sum() / listed.sum()),
        float(listed[~has_row].sum() / listed.sum()),
        float(listed @ surprise / listed.sum()),
        tuple((str(name_of(place)), int(listed[place])) for place in most),
    )
