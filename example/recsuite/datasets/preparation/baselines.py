"""Histories and baselines of events, computed once, when columns are made, and kept with them.

Histories: the items of each user, and the users of each item, in the order of time. They hold the training
events, and for the test also the validation events. They are stored once for each user and each item, not
once for each event: an event has the end of its part in them, and its own place.

Baselines: biases for labels, popularity for rankings. They depend only on the data and the split. If the
distribution of the events is known, so is the oracle, the best possible prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsuite.datasets.columns import NOWHERE
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
from recsuite.datasets.preparation.arrays import (
    Groups,
    among,
    chunks,
    counts_of,
    create_column,
    grouped,
    highest,
    release,
    sorted_places,
    temporary,
)
from recsuite.datasets.schema import HISTORY, ITEM_HISTORY, LISTS

if TYPE_CHECKING:
    from recsuite.datasets.schema import RawData, Schema


@dataclass(frozen=True)
class Stored:
    """Events in the order in which they are stored.

    user, item: positions, int32 [events]; label: float32 [events]; time: int64 [events].
    """

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    time: np.ndarray


class Listed(NamedTuple):
    """Places of events in the lists of their users, or of their items.

    ends: end of the events that are older than each event; places: its own place, `NOWHERE` unless it is a
    training event; int32 [events]; longest: largest number of older events in a list.
    """

    ends: np.ndarray
    places: np.ndarray
    longest: int


# Function from the members of lists (positions, int32 [n]), and the labels, times and places of their events,
# to the content of files, [n, ...], by the name of the file.
Content = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Mapping[str, np.ndarray]]


class _Lists:
    """Files with the lists of users, or of items, of the known events, the first `num_known`."""

    def __init__(
        self, folder: Path, name: str, known_owners: np.ndarray, number: int, content: Content
    ) -> None:
        self.num_known = len(known_owners)
        self.content = content
        self.offsets = np.concatenate([[0], np.cumsum(counts_of(known_owners, number))])
        np.save(folder / f"{name}_offsets.npy", self.offsets)
        prefix = "test_" if name.startswith("test_") else ""
        # Without events, for the types and widths only.
        empty = content(
            np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.int32)
        )
        self.files = {
            file: create_column(folder / f"{prefix}{file}.npy", (self.num_known, *held.shape[1:]), held.dtype)
            for file, held in empty.items()
        }

    def write(self, owners: range, *columns: np.ndarray) -> None:
        """Write the known events of a range of owners, owner after owner, each in the order of time.

        columns: the arguments of `Content`.
        """
        part = slice(self.offsets[owners.start], self.offsets[owners.stop])
        for file, held in self.content(*columns).items():
            self.files[file][part] = held
        release(*self.files.values())


def by_users(folder: Path, stored: Stored) -> Groups:
    """Group events by ranges of users: their places, users, items, labels and times."""
    columns = stored.user, stored.item, stored.label, stored.time
    return grouped(folder, stored.user, highest(stored.user) + 1, *columns)


def by_items(folder: Path, stored: Stored, num_items: int) -> Groups:
    """Group events by ranges of items: their places, items, users, labels and times."""
    columns = stored.item, stored.user, stored.label, stored.time
    return grouped(folder, stored.item, num_items, *columns)


def histories(item_rows: np.ndarray) -> Content:
    """Content of the user histories: items. item_rows: the table row of each item, int32 [items]."""

    def content(
        items: np.ndarray, labels: np.ndarray, times: np.ndarray, places: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        # Table rows, not positions of items, so that a history is copied to a batch without a look-up.
        rows_and_labels = np.stack([item_rows.take(items), labels.view(np.int32)], axis=1)
        # Times and events in files of their own, because most models do not read them.
        return {"history": rows_and_labels, "history_time": times, "history_event": places, "seen": items}

    return content


def item_history_content(user_rows: np.ndarray) -> Content:
    """Content of the item histories: users. user_rows: the table row of each user, int32 [users]."""
    return lambda users, labels, times, places: {"audience": user_rows[users]}


def write_all_lists(
    folder: Path,
    stored: Stored,
    groups: tuple[Groups, Groups],
    rows: Sequence[np.ndarray],
    sizes: tuple[int, int, int],
    done: Callable[[float], object],
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Write the user and item histories. Returns their fields of records, and the greatest lengths.

    groups: the events by users, and by items; rows: the table rows of users, and of items; done: called with
    the finished share.
    """
    fields, longest = {}, {}
    owners = {HISTORY: stored.user, ITEM_HISTORY: stored.item}
    contents = {HISTORY: histories(rows[1]), ITEM_HISTORY: item_history_content(rows[0])}
    for number, (name, of_owners) in enumerate(zip(LISTS, groups, strict=True)):

        def of_name(share: float, before: int = number) -> None:
            done((before + share) / len(LISTS))

        found = write_lists(folder, name, of_owners, owners[name], contents[name], sizes, of_name)
        fields.update({f"{name}_end": found.ends, f"{name}_place": found.places})
        longest[f"longest_{name}"] = found.longest
    return fields, longest


def write_lists(
    folder: Path,
    name: str,
    groups: Groups,
    owners: np.ndarray,
    content: Content,
    sizes: tuple[int, int, int],
    done: Callable[[float], object],
) -> Listed:
    """Write the user or item histories, once for training and validation, and once for the test.

    groups: the events, see `by_users` and `by_items`; owners: their users or items, int32 [events]; done:
    called with the finished share.
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    number = groups.ranges[-1].stop
    in_training = _Lists(folder, name, owners[:num_train], number, content)
    # A deployed model knows the validation events when a test event comes. A training event must not: in a
    # random split they lie between the training events.
    in_test = _Lists(folder, f"test_{name}", owners[:num_known], number, content)
    ends, own_places = (temporary(folder, len(owners), np.int32) for _ in range(2))
    stands = _stands_of(folder, name, len(owners))
    lengths: list[int] = []

    def write(range_of: range, *columns: np.ndarray) -> None:
        # Owner after owner, each in the order of time.
        order = sorted_places(columns[1], columns[4]).astype(np.intp)
        places, owner, other, label, time = (column.take(order) for column in columns)
        first = _first_of_time(owner, time)
        for lists, is_user_tables in ((in_training, places < num_known), (in_test, places >= num_known)):
            # Known events are stored first, so the place identifies them.
            is_known = places < lists.num_known
            known, own = np.flatnonzero(is_known), np.flatnonzero(is_user_tables)
            lists.write(range_of, *(column.take(known) for column in (other, label, time, places)))
            # Number of known events before each one in this order, which is a place in the files.
            before = lists.offsets[range_of.start] + np.cumsum(is_known) - is_known
            end, target = before.take(first.take(own)), places.take(own)
            ends[target] = end
            stands[target] = before.take(own)
            lengths.append(int((end - lists.offsets.take(owner.take(own))).max(initial=0)))
            if lists is in_training:
                own_places[places] = np.where(is_known, before, NOWHERE)
        release(ends, own_places, stands)

    groups.each(write, done)
    return Listed(ends, own_places, max(lengths))


def _stands_of(folder: Path, name: str, number: int) -> np.ndarray:
    """Return an array for the place in its list before which each event comes, int32. A file for users."""
    if name != HISTORY:
        return temporary(folder, number, np.int32)
    return create_column(folder / f"{name}_before.npy", (number,), np.int32)


def _first_of_time(owner: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Place of the first event of the same owner and time, int64, for events in the order of owner and time.

    Such events are not in each other's lists: all their lists end at the first of them.
    """
    is_first = np.ones(len(owner), bool)
    is_first[1:] = (np.diff(owner) != 0) | (np.diff(time) != 0)
    return np.maximum.accumulate(np.where(is_first, np.arange(len(owner)), 0))


# Damping of the bias baseline: with this many events, a bias is half of the mean deviation. The usual value;
# weaker and stronger ones gave a weaker baseline on ml-latest-small.
DAMPING = 5.0
# Rounds end where the RMSE of the fitted events changes by less than this, and after so many at the latest.
LEAST_CHANGE, MOST_ROUNDS = 1e-4, 10
# Share of the time of all baselines.
SHARE_OF_BIASES = 0.7


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
    stored: Stored,
    by_user: Groups,
    by_item: Groups,
    sizes: tuple[int, int, int],
    oracle: Oracle,
    schema: Schema,
    done: Callable[[float], object],
) -> dict[str, dict[str, Metrics]]:
    """Baselines on the test events for each way of evaluation.

    With the suffixes "/known" and "/new": on the events of users with and without a training event, if there
    are both. Baselines are fitted to all events except the test, which makes them stronger. As for the model,
    the calibration of a log loss is fitted to predictions of the validation labels that did not use them.

    by_user, by_item: the same events, see `by_users`. done: called with the finished share of the work.
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
    """Metrics of predicted labels on the test, and metrics of the calibrated probabilities.

    fitted: biases without the validation events, and with them; some: the test events, bool or a slice.
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
    # The share of yes is already a probability. A calibration by the few validation events would add noise.
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
    """Ranks of the events from number `num_known` on, int64, with items ranked by their known events.

    Also returns the number of ranked items of each, int32, 0 if the item of the event is not ranked. Ties
    count against an item.

    by_user: all events by ranges of users, then their users and items. counts: number of known events of each
    item, int64 [items]. excludes: True if items of the user's known events are not ranked.
    """
    num_items = len(counts)
    # From the left, so that an equally popular item counts as above, as for a model.
    popular = num_items - np.sort(counts).searchsorted(counts)
    num_cases = len(by_user.columns[0]) - num_known
    # Ranks are int64: they may exceed the number of items, which may be the largest int32.
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
        # Sorted cases make the look-ups local.
        order = sorted_places(cases)
        cases, places = cases[order], places[first:][order] - num_known
        is_seen = among(cases, known)
        # The test item itself is counted in `popular`, so ranks begin at 1.
        found = popular[item[first:][order]] - _popular_seen(known, cases, counts)
        ranks[places] = np.where(is_seen, never_found(num_items), found)
        begins = cases // num_items * num_items
        num_seen = known.searchsorted(begins + num_items) - known.searchsorted(begins)
        candidates[places] = np.where(is_seen, 0, num_items - num_seen)

    by_user.each(rank, done)
    return ranks, candidates


def _popular_seen(known: np.ndarray, cases: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Number of known items of the user of each case that are at least as popular as its item, int64 [cases].

    known, cases: numbers of pairs of user and item, int64, in ascending order, known ones without duplicates;
    counts: popularity of the items.
    """
    num_items, step = len(counts), int(counts.max(initial=0)) + 1
    # (user, popularity) as one number.
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
    """Bias baseline: mean label, and the deviation of each user and item from it, float64."""

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
    """Fit label = mean + user bias + item bias by damped alternating least squares, see `LEAST_CHANGE`.

    Returns a fit for each of the numbers: of so many of the first events. A user or item without an event has
    bias 0.

    by_user: all events by ranges of users, then their users, items and labels; by_item: by ranges of items,
    then their items, users and labels. label: float [n]. done: called with the finished share of the rounds.
    """
    means = [float(label[:number].mean(dtype=np.float64)) for number in numbers]
    release(label)
    users, items = (_Side(groups, means, numbers) for groups in (by_user, by_item))
    biases, before = np.zeros((users.number, len(numbers))), np.full(len(numbers), np.inf)
    for number in range(1, MOST_ROUNDS + 1):
        # Each line solves for one side exactly with the other fixed.
        of_items, _ = items.solved(biases)
        biases, rmse = users.solved(of_items)
        done(number / MOST_ROUNDS)
        if (before - rmse < LEAST_CHANGE).all():
            break
        before = rmse
    return [Biases(*fitted) for fitted in zip(means, biases.T, of_items.T, strict=True)]


class _Side:
    """Users or items with the inputs of their biases, for several numbers of first events."""

    def __init__(self, groups: Groups, means: Sequence[float], numbers: Sequence[int]) -> None:
        self.groups, self.means, self.numbers = groups, means, numbers
        self.number = groups.ranges[-1].stop
        self.weights = np.full((self.number, len(numbers)), DAMPING)

        def count(owners: range, places: np.ndarray, own: np.ndarray, *_: np.ndarray) -> None:
            for place, number in enumerate(numbers):
                known = own[: places.searchsorted(number)] - owners.start
                self.weights[owners.start : owners.stop, place] += np.bincount(known, minlength=len(owners))

        groups.each(count)

    def solved(self, biases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Biases of this side, float64 [users or items, numbers], given those of the other.

        Also returns the RMSE of the events with both, float64 [numbers].
        """
        sums, squares = np.empty_like(self.weights), np.zeros((len(self.groups.ranges), len(self.numbers)))

        def add(
            owners: range,
            places: np.ndarray,
            own: np.ndarray,
            other: np.ndarray,
            label: np.ndarray,
            *_: np.ndarray,
        ) -> None:
            # Convert to the types of numpy once. The biases of all numbers are side by side: the look-up
            # takes most of the time, and this way it is one memory access.
            own, others = own.astype(np.intp) - owners.start, biases.take(other, axis=0)
            labels = label.astype(np.float64)
            for place, number in enumerate(self.numbers):
                known = slice(int(places.searchsorted(number)))
                # Labels minus the mean and the biases of the other side.
                rest = labels[known] - self.means[place]
                rest -= others[known, place]
                # Added in the order in which events are stored, whatever the ranges are.
                sums[owners.start : owners.stop, place] = np.bincount(own[known], rest, len(owners))
                squares[self.groups.ranges.index(owners), place] = rest @ rest

        self.groups.each(add)
        solved = sums / self.weights
        # The sum of (rest - bias)^2 over the events, without another pass over them.
        squared = squares.sum(0) + (solved * ((self.weights - DAMPING) * solved - 2 * sums)).sum(0)
        return solved, np.sqrt(np.maximum(squared, 0) / np.array(self.numbers))
