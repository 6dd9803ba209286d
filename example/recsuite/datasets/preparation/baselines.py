"""The baselines that a model has to beat: biases for labels, popularity for rankings.

Computed once, when columns are made, and kept with them: they depend on the data and the split alone. Where
what the events were drawn from is known, so is the oracle, which no model beats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.metrics import (
    KNOWN,
    NEW,
    Metrics,
    fit_calibration,
    log_loss_of,
    measure,
    measure_ranks,
    never_found,
    ranks_by_chance,
)
from recsuite.datasets.preparation.arrays.groups import Groups
from recsuite.datasets.preparation.arrays.mapped import chunks, counts_of, release
from recsuite.datasets.preparation.arrays.order import among, sorted_places
from recsuite.datasets.preparation.histories import Stored

if TYPE_CHECKING:
    from recsuite.datasets.schema import RawData, Schema

# Damping of the bias baseline: a user or item with this many events is believed half-way. The usual
# value; weaker and stronger ones gave a weaker baseline on ml-latest-small.
DAMPING = 5.0
BASELINE_ROUNDS = 10
# Of the time that all baselines take.
SHARE_OF_BIASES = 0.7


@dataclass(frozen=True)
class Oracle:
    """labels: expected of all events, in the order in which they are stored, float32 [events]; ranks: the
    best there can be of the items of the test, int64 [test events]. Either None where it is not known.
    """

    labels: np.ndarray | None
    ranks: np.ndarray | None


def oracle_of(raw: RawData, order: np.ndarray, num_test: int, split: str) -> Oracle:
    """The oracle of events that are stored in this order, the test last."""
    labels = None if raw.oracle is None else raw.oracle[order]
    # A ranking for the test knows all that came before it, as these ranks do, where it is the newest event.
    if raw.oracle_ranks is None or split != "leave_one_out":
        return Oracle(labels, None)
    return Oracle(labels, raw.oracle_ranks[order[len(order) - num_test :]].astype(np.int64))


def baselines_of(
    stored: Stored,
    by_user: Groups,
    by_item: Groups,
    sizes: tuple[int, int, int],
    oracle: Oracle,
    schema: Schema,
    done: Callable[[float], object],
) -> dict[str, dict[str, Metrics]]:
    """What a model has to beat on the test events, for each way of evaluation, and for each "/known" and
    "/new": on those of the users with and without a training event, where there are both.

    Fitted on all that is not the test, which makes them harder to beat; but the calibration of a log loss is
    that of predictions of the validation labels, made without them, as for the model.

    by_user, by_item: the same events, see `histories.by_users`. done: called with the share of the work that
    is.
    """
    num_known, num_items = sizes[0] + sizes[1], by_item.ranges[-1].stop
    fitted = fit_biases(
        by_user, by_item, stored.label, (sizes[0], num_known), lambda share: done(SHARE_OF_BIASES * share)
    )
    ranks, candidates = popularity_ranks(
        by_user,
        counts_of(stored.item[:num_known], num_items),
        num_known,
        schema.excludes_seen,
        lambda share: done(1 - (1 - share) * (1 - SHARE_OF_BIASES)),
    )
    num_users = by_user.ranges[-1].stop
    is_known = (counts_of(stored.user[: sizes[0]], num_users) > 0)[stored.user[num_known:]]
    parts: dict[str, Any] = {"": slice(None)}
    if is_known.any() and not is_known.all():
        parts |= {KNOWN: is_known, NEW: ~is_known}
    found: dict[str, dict[str, Metrics]] = {}
    for part, some in parts.items():
        of_labels, of_answers = _measured(stored, sizes, fitted, oracle.labels, schema.liked_label, some)
        of_ranks: dict[str, Metrics] = {
            "a random order": ranks_by_chance(candidates[some]),
            "popularity": measure_ranks(ranks[some]),
        }
        if oracle.ranks is not None:
            of_ranks["oracle"] = measure_ranks(oracle.ranks[some])
        ways = {"predictions": of_labels, "ranks": of_ranks, "answers": of_answers}
        found |= {way + part: of_part for way, of_part in ways.items()}
    return found


def _measured(
    stored: Stored,
    sizes: tuple[int, int, int],
    fitted: Sequence[Biases],
    oracle: np.ndarray | None,
    liked_label: float,
    some: Any,
) -> tuple[dict[str, Metrics], dict[str, Metrics]]:
    """What predictions of the labels are worth on the test, and what they are worth as probabilities once
    they are calibrated. fitted: without the validation events, and with them; some: of which test events,
    bool or a slice.
    """
    num_train, num_validation, num_test = sizes
    num_known = num_train + num_validation
    validation, test = slice(num_train, num_known), slice(num_known, None)
    user, item, label, (early, late) = stored.user, stored.item, stored.label, fitted
    predictions = {
        "global mean": (
            np.broadcast_to(early.mean, num_validation),
            np.broadcast_to(late.mean, num_test),
        ),
        "biases": (
            early.predict(user[validation], item[validation]),
            late.predict(user[test], item[test]),
        ),
    }
    if oracle is not None:
        predictions["oracle"] = oracle[validation], oracle[test]
    liked_before, liked = label[validation] >= liked_label, label[test] >= liked_label

    def measured(name: str) -> Metrics:
        on_validation, on_test = predictions[name]
        calibration = fit_calibration(on_validation, liked_before)
        return measure(on_test[some], label[test][some], liked[some], calibration)

    of_labels = {name: measured(name) for name in predictions}
    of_answers = {
        name: {metric: metrics[metric] for metric in ("log_loss", "auc")}
        for name, metrics in of_labels.items()
    }
    # The share of yes is one already, and that of the few validation events only lies around it.
    num_liked = sum(int((label[part] >= liked_label).sum()) for part in chunks(num_known, label))
    log_loss = log_loss_of(num_liked / num_known, liked[some])
    of_share = {**of_answers.pop("global mean"), "log_loss": log_loss}
    of_answers = {"share of yes": of_share, **of_answers}
    release(user, item, label)
    return of_labels, of_answers


def popularity_ranks(
    by_user: Groups,
    counts: np.ndarray,
    num_known: int,
    excludes: bool = True,
    done: Callable[[float], object] = lambda share: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks, int64, of the events from number `num_known` on, when items are ranked by their number of
    known events; and how many items are ranked, int32, 0 where that of the event is not.

    excludes: True if items that the user is known to have had are not ranked.

    by_user: all events by ranges of users, then their users and items. counts: the known events of each item,
    int64 [items]. Ties count against an item.
    """
    num_items = len(counts)
    # From the left, so that an item which is as popular counts as above, as it does for a model.
    popular = num_items - np.sort(counts).searchsorted(counts)
    num_cases = len(by_user.columns[0]) - num_known
    # Numbers of items, of which there may be as many as an int32 counts.
    ranks, candidates = np.empty(num_cases, np.int64), np.empty(num_cases, np.int32)

    def rank(users: range, places: np.ndarray, user: np.ndarray, item: np.ndarray, *_: np.ndarray) -> None:
        # (user, item) as one number of 64 bits, as users times items exceed 32.
        pairs = (user.astype(np.int64) - users.start) * num_items + item
        first = int(places.searchsorted(num_known))
        if not excludes:
            ranks[places[first:] - num_known], candidates[places[first:] - num_known] = (
                popular[item[first:]],
                num_items,
            )
            return
        known, cases = np.sort(pairs[:first]), pairs[first:]
        known = known[np.flatnonzero(np.diff(known, prepend=-1))]
        # Sorted cases are looked up where the one before was.
        order = sorted_places(cases)
        cases, places = cases[order], places[first:][order] - num_known
        is_seen = among(cases, known)
        # The test item counts once: among the popular ones, where it takes the place of the 1 of the first
        # rank.
        found = popular[item[first:][order]] - _popular_seen(known, cases, counts)
        ranks[places] = np.where(is_seen, never_found(num_items), found)
        begins = cases // num_items * num_items
        num_seen = known.searchsorted(begins + num_items) - known.searchsorted(begins)
        candidates[places] = np.where(is_seen, 0, num_items - num_seen)

    by_user.each(rank, done)
    return ranks, candidates


def _popular_seen(known: np.ndarray, cases: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many items the users of the cases are known to have had that are as popular as the item of the case
    or more, int64 [cases].

    Takes numbers of user and item, int64, in ascending order, each known one once; counts: how popular the
    items are.
    """
    num_items, step = len(counts), int(counts.max(initial=0)) + 1
    # (user, popularity) as one number each.
    user, item = _divided(known, num_items)
    seen = np.sort(user * step + counts[item])
    user, item = _divided(cases, num_items)
    return seen.searchsorted((user + 1) * step) - seen.searchsorted(user * step + counts[item])


def _divided(pairs: np.ndarray, num_items: int) -> tuple[np.ndarray, np.ndarray]:
    # numpy's divmod takes four times as long.
    user = pairs // num_items
    return user, pairs - user * num_items


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
    by_user: Groups,
    by_item: Groups,
    label: np.ndarray,
    numbers: Sequence[int],
    done: Callable[[float], object] = lambda share: None,
) -> list[Biases]:
    """Damped least squares for label = mean + user bias + item bias, by alternation: of so many of the first
    events, for each of the numbers.

    by_user: all events by ranges of users, then their users, items and labels; by_item: by ranges of items,
    then their items, users and labels. label: float [n]. A user or item without an event gets bias 0. done:
    called with the share of the rounds that is.
    """
    means = [float(label[:number].mean(dtype=np.float64)) for number in numbers]
    release(label)
    users, items = (_Side(groups, means, numbers) for groups in (by_user, by_item))
    biases = np.zeros((users.number, len(numbers)))
    # Each line solves for one side exactly while the other is kept.
    for number in range(1, BASELINE_ROUNDS + 1):
        of_items = items.solved(biases)
        biases = users.solved(of_items)
        done(number / BASELINE_ROUNDS)
    return [Biases(*fitted) for fitted in zip(means, biases.T, of_items.T, strict=True)]


class _Side:
    """Users or items, and what their biases are computed from; for several numbers of first events."""

    def __init__(self, groups: Groups, means: Sequence[float], numbers: Sequence[int]) -> None:
        self.groups, self.means, self.numbers = groups, means, numbers
        self.number = groups.ranges[-1].stop
        self.weights = np.full((self.number, len(numbers)), DAMPING)

        def count(owners: range, places: np.ndarray, own: np.ndarray, *_: np.ndarray) -> None:
            for place, number in enumerate(numbers):
                known = own[: places.searchsorted(number)] - owners.start
                self.weights[owners.start : owners.stop, place] += np.bincount(known, minlength=len(owners))

        groups.each(count)

    def solved(self, biases: np.ndarray) -> np.ndarray:
        """The biases of this side, float64 [users or items, numbers], given those of the other."""
        sums = np.empty_like(self.weights)

        def add(
            owners: range,
            places: np.ndarray,
            own: np.ndarray,
            other: np.ndarray,
            label: np.ndarray,
            *_: np.ndarray,
        ) -> None:
            # As numpy takes them, once for all. The biases of all numbers lie side by side: looking them up
            # takes most of the time, and so one access of memory is enough.
            own, others = own.astype(np.intp) - owners.start, biases.take(other, axis=0)
            labels = label.astype(np.float64)
            for place, number in enumerate(self.numbers):
                known = slice(int(places.searchsorted(number)))
                # What is left of the labels without mean and the biases of the other side.
                rest = labels[known] - self.means[place]
                rest -= others[known, place]
                # One after the other, in the order in which events are stored, whatever the ranges are.
                sums[owners.start : owners.stop, place] = np.bincount(own[known], rest, len(owners))

        self.groups.each(add)
        return sums / self.weights
