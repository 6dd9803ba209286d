"""Several events of one user and one item: which of them count.

Kept apart, such events give the answer of a test away: under --split random one of them may be trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from recsuite.config.sections import DataConfig
from recsuite.datasets.preparation.arrays.groups import Groups, grouped
from recsuite.datasets.preparation.arrays.mapped import MOST, highest, keep, release, writeable
from recsuite.datasets.preparation.arrays.order import among, sorted_places
from recsuite.datasets.schema import (
    ALLOW,
    CLICKS,
    COUNT,
    EXCLUDE,
    RATING,
    Events,
    RawData,
    Schema,
    with_columns,
)
from recsuite.errors import UserError, an, counted
from recsuite.runtime.progress_bar import stage

# What counts, by the value of --duplicates.
COUNTS = {
    "last": "the last in time counts",
    "first": "the first in time counts",
    "mean": "their mean counts, at the time of the last",
    "keep": "all of them count",
}

# The share of repeats among the training events from which on items that a user had are allowed.
LEAST_REPEATS = 0.1


def settle(raw: RawData, how: str, schema: Schema, folder: Path | None = None) -> RawData:
    """A data set with one event of a user and an item, or with "keep" as it is; says what was repeated.

    What happened several times counts so many times as much: the weights of clicks and of counts add up, but
    for those of later events than the one that counts. Its arrays are those of `raw`, changed. folder: for
    files that are gone at the end; without one memory has all of them.

    Raises:
        UserError: when there are more events than can be counted.
    """
    events, number = raw.events, len(raw.events.user)
    if number > MOST:
        raise UserError(f"There are {number:,} {schema.labels}, and {MOST:,} is the limit; give fewer.")
    # With "first" the others may lie in the time of the test.
    adds_up = schema.label_kind in (CLICKS, COUNT) and how in ("last", "mean")
    if adds_up:
        assert events.weight is not None or schema.label_kind == CLICKS
        events = _with_weights(events)
    # The mean of clicks is a click.
    rule = "last" if how == "mean" and schema.label_kind == CLICKS else how
    if rule == "mean":
        events = dataclasses.replace(events, label=writeable(events.label))
    is_left = np.ones(number, bool)
    repeated: list[tuple[int, int]] = []

    def settle_pairs(places: np.ndarray, pairs: np.ndarray, time: np.ndarray) -> None:
        repeated.append(_settle(events, places, pairs, time, rule, adds_up, is_left))

    _for_pairs(events, "looking for repeated events", folder, settle_pairs)
    num_events, num_pairs = (sum(numbers[place] for numbers in repeated) for place in (0, 1))
    if num_events == 0:
        return raw
    note = (
        f"{num_events:,} {schema.labels} are of {an(schema.item)} that the same {schema.user} "
        f"{'rated' if schema.label_kind == RATING else 'had'} more than once "
        f"({counted(num_pairs, 'such pair')}): {COUNTS[how]}{', with the weight of all' if adds_up else ''} "
        f"(--duplicates {how})"
    )
    raw = dataclasses.replace(raw, events=events, skipped=[*raw.skipped, note])
    return raw if how == "keep" else _only(raw, is_left)


def _with_weights(events: Events) -> Events:
    """The events with weights that can be written. Without any they are clicks, the labels of which are 1."""
    if events.weight is not None:
        return dataclasses.replace(events, weight=writeable(events.weight))
    # The array of the labels has what the weights are at first, and for many events lies in a file: so no
    # memory is needed for the weights, nor for labels that are all one number.
    ones = np.broadcast_to(np.float32(1), len(events.label))
    return dataclasses.replace(events, label=ones, weight=writeable(events.label))


def _settle(
    events: Events,
    places: np.ndarray,
    pairs: np.ndarray,
    time: np.ndarray,
    how: str,
    adds_up: bool,
    is_left: np.ndarray,
) -> tuple[int, int]:
    """Unmark the events of these pairs that do not count; how many events repeat one, and how many pairs."""
    order = sorted_places(pairs)
    ordered = pairs[order]
    is_same = np.concatenate([[False], ordered[1:] == ordered[:-1], [False]])
    repeated = order[is_same[1:] | is_same[:-1]]
    if not len(repeated):
        return 0, 0
    del order, ordered, is_same
    # In the order of the file again, which events of one time keep.
    repeated.sort()
    places, pairs = places[repeated], pairs[repeated]
    order = sorted_places(pairs, time[repeated])
    places, pairs = places[order], pairs[order]
    begins = np.flatnonzero(np.diff(pairs, prepend=-1))
    ends = np.append(begins[1:], len(pairs)) - 1
    counting = places[begins if how == "first" else ends]
    if how != "keep":
        is_left[places] = False
        is_left[counting] = True
    if adds_up:
        assert events.weight is not None
        events.weight[counting] = np.add.reduceat(events.weight[places], begins, dtype=np.float64)
    if how == "mean":
        # The mean goes to the last of the pair, and so to its time.
        sums = np.add.reduceat(events.label[places], begins, dtype=np.float64)
        events.label[counting] = sums / (ends - begins + 1)
    release(*(column for column in (events.label, events.weight) if column is not None))
    return len(places), len(begins)


def describe_leak(
    events: Events, is_test: np.ndarray, schema: Schema, folder: Path | None = None
) -> list[str]:
    """What to say where a split comes between events of one pair. is_test: bool [events]; folder: as for
    `settle`.
    """
    leaks: list[int] = []

    def count(places: np.ndarray, pairs: np.ndarray, _: np.ndarray) -> None:
        is_case = is_test[places]
        leaks.append(int(among(np.sort(pairs[is_case]), np.sort(pairs[~is_case])).sum()))

    _for_pairs(events, "looking for leaks", folder, count)
    if not sum(leaks):
        return []
    return [
        f"{sum(leaks):,} of {int(is_test.sum()):,} test {schema.labels} are of {an(schema.user)} and "
        f"{an(schema.item)} that training or validation has {an(schema.label)} of too: metrics of "
        "predicted labels flatter the model, and rankings without what a user had cannot find these"
    ]


def rule_for_seen(
    config: DataConfig, by_user: Groups, num_train: int, schema: Schema, is_stream: bool
) -> tuple[str, list[str]]:
    """The rule for items that a user had, EXCLUDE or ALLOW, and what to say where it was guessed.

    by_user: all events by ranges of users, then their users and items.
    """
    if config.seen != "auto":
        return config.seen, []
    if not config.keeps_repeats or is_stream:
        return EXCLUDE, []
    repeats: list[int] = []

    def count(users: range, places: np.ndarray, user: np.ndarray, item: np.ndarray, *_: np.ndarray) -> None:
        known = slice(int(places.searchsorted(num_train)))
        pairs = (user[known].astype(np.int64) - users.start) << 32 | item[known]
        repeats.append(int(np.count_nonzero(np.diff(np.sort(pairs)) == 0)))

    by_user.each(count)
    if sum(repeats) == num_train - 1:
        return EXCLUDE, []
    share = sum(repeats) / num_train
    seen = ALLOW if share >= LEAST_REPEATS else EXCLUDE
    does = "are ranked and recommended again" if seen == ALLOW else "are not recommended again"
    return seen, [
        f"--seen {seen}: {share:.1%} of the training {schema.labels} repeat {an(schema.item)} of their "
        f"{schema.user} (limit: {LEAST_REPEATS:.0%}), so {schema.items} that {an(schema.user)} had {does}"
    ]


def _for_pairs(
    events: Events,
    title: str,
    folder: Path | None,
    work: Callable[[np.ndarray, np.ndarray, np.ndarray], object],
) -> None:
    """Do some work for the events of ranges of users: their places, int32, a number for user and item, int64,
    and their times. title: what it is called meanwhile.
    """
    num_items = highest(events.item) + 1
    # Events without users and items have one of each (`constants` of schema.toml), and repeat nothing.
    if num_items == 1 and highest(events.user) == 0:
        return

    def of_range(
        users: range, places: np.ndarray, user: np.ndarray, item: np.ndarray, time: np.ndarray
    ) -> None:
        work(places, (user.astype(np.int64) - users.start) * num_items + item, time)

    with stage(title, 100, "percent") as reached:
        columns = events.user, events.item, events.time
        groups = grouped(folder, events.user, highest(events.user) + 1, *columns)
        groups.each(of_range, lambda share: reached(round(100 * share)))


def _only(raw: RawData, is_left: np.ndarray) -> RawData:
    """The events that are left."""
    return dataclasses.replace(
        raw,
        events=with_columns(raw.events, lambda column: keep(column, is_left)),
        official_test=None if raw.official_test is None else raw.official_test[is_left],
        official_validation=None if raw.official_validation is None else raw.official_validation[is_left],
        oracle=None if raw.oracle is None else raw.oracle[is_left],
        oracle_ranks=None if raw.oracle_ranks is None else raw.oracle_ranks[is_left],
        num_skipped=raw.num_skipped + int((~is_left).sum()),
    )
