"""Split of events into training, validation and test, and treatment of repeated events of a user and an item.

Repeated events are a leak between the splits: with --split random one of them may be a training event and
another a test event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from recsuite.config.sections import NO_SPLIT, DataConfig
from recsuite.datasets.arrays import (
    MOST,
    chunks,
    gather,
    highest,
    only,
    release,
    sorted_places,
    where,
    writeable,
)
from recsuite.datasets.preparation.loops import count_common, grouped, repeated_events
from recsuite.datasets.schema import (
    ALLOW,
    CLICKS,
    COUNT,
    EXCLUDE,
    RATING,
    Events,
    Feature,
    RawData,
    Schema,
)
from recsuite.errors import UserError, counted, with_article
from recsuite.runtime.console import stage

# Explanation of each value of --duplicates.
COUNTS = {
    "last": "the last in time counts",
    "first": "the first in time counts",
    "mean": "their mean counts, at the time of the last",
    "keep": "all of them count",
}

# From this share of repeats among the training events on, items that a user had are allowed.
LEAST_REPEATS = 0.1


def settle(raw: RawData, how: str, schema: Schema, folder: Path | None = None) -> RawData:
    """Return a data set with one event of each user and item, and a note on repeated events.

    With "keep" all events stay. The weights of repeated clicks and counts are added, but not those of later
    events than the one that is kept. The arrays of `raw` are changed in place. folder: for temporary files;
    without one the arrays stay in memory.

    Raises:
        UserError: when there are more events than can be counted.
    """
    events, number = raw.events, len(raw.events.user)
    if number > MOST:
        raise UserError(f"There are {number:,} {schema.labels}, and {MOST:,} is the limit; give fewer.")
    # Not with "first": the other events may be in the time of the test.
    adds_up = schema.label_kind in (CLICKS, COUNT) and how in ("last", "mean")
    if adds_up:
        assert events.weight is not None or schema.label_kind == CLICKS
        events = _with_weights(events)
    # The mean of clicks is a click.
    rule = "last" if how == "mean" and schema.label_kind == CLICKS else how
    if rule == "mean":
        events = dataclasses.replace(events, label=writeable(events.label))
    is_left, num_events, num_pairs = np.ones(number, bool), 0, 0
    # Events without users and items have one of each (`constants` of schema.toml), which is no repetition.
    if highest(events.user) > 0 or highest(events.item) > 0:
        with stage("looking for repeated events"):
            for repeated in repeated_events(events.user, events.item, folder):
                num_pairs += _settle(events, repeated, rule, adds_up, is_left)
                num_events += len(repeated)
    if num_events == 0:
        return raw
    counts = COUNTS[how]
    # Events without times have the time 0.
    if highest(events.time) <= 0:
        counts = counts.replace("in time", "in the files").replace(", at the time of the last", "")
    note = (
        f"{num_events:,} {schema.labels} are of {with_article(schema.item)} that the same {schema.user} "
        f"{'rated' if schema.label_kind == RATING else 'had'} more than once "
        f"({counted(num_pairs, 'such pair')}): {counts}{', with the weight of all' if adds_up else ''} "
        f"(--duplicates {how}{'; keep counts all' if how != 'keep' else ''})"
    )
    raw = dataclasses.replace(raw, events=events, skipped=[*raw.skipped, note])
    return raw if how == "keep" else only(raw, is_left)


def _with_weights(events: Events) -> Events:
    """Return the events with writeable weights. Events without weights are clicks, with labels of 1."""
    if events.weight is not None:
        return dataclasses.replace(events, weight=writeable(events.weight))
    # The labels are all 1, as are the initial weights, and with many events their array is in a file. So the
    # weights reuse it, and the labels become a broadcast number: neither needs memory.
    ones = np.broadcast_to(np.float32(1), len(events.label))
    return dataclasses.replace(events, label=ones, weight=writeable(events.label))


def _settle(events: Events, repeated: np.ndarray, how: str, adds_up: bool, is_left: np.ndarray) -> int:
    """Unmark those of the repeated events that are dropped. Returns the number of pairs."""
    # One after the other: each may touch all of its column.
    keys = events.user, events.item, events.time
    user, item, time = (gather(key, repeated, np.empty(len(repeated), key.dtype)) for key in keys)
    # Stable: events of one time keep the order of the file.
    order = sorted_places(user, item, time)
    user, item, events_of = user[order], item[order], repeated[order]
    begins = np.flatnonzero((np.diff(user, prepend=-1) != 0) | (np.diff(item, prepend=-1) != 0))
    ends = np.append(begins[1:], len(events_of)) - 1
    counting = events_of[begins if how == "first" else ends]
    if how != "keep":
        is_left[events_of] = False
        is_left[counting] = True
    if adds_up:
        assert events.weight is not None
        events.weight[counting] = np.add.reduceat(events.weight[events_of], begins, dtype=np.float64)
    if how == "mean":
        # The last event of the pair gets the mean and keeps its time.
        sums = np.add.reduceat(events.label[events_of], begins, dtype=np.float64)
        events.label[counting] = sums / (ends - begins + 1)
    columns = events.label, events.weight
    release(*(column for column in columns if column is not None))
    return len(begins)


def describe_leak(
    events: Events, is_test: np.ndarray, schema: Schema, folder: Path | None = None
) -> list[str]:
    """Notes on pairs of a user and an item with events on both sides of the test split.

    is_test: bool [events]; folder: as for `settle`.
    """
    # See `settle`.
    if highest(events.user) == highest(events.item) == 0:
        return []
    of_users = grouped(events.user, highest(events.user) + 1, folder)
    number = count_common(of_users.offsets, of_users.events, events.item, highest(events.item) + 1, is_test)
    release(events.item)
    if not number:
        return []
    return [
        f"{number:,} of {int(is_test.sum()):,} test {schema.labels} are of {with_article(schema.user)} "
        f"and {with_article(schema.item)} that training or validation has {with_article(schema.label)} of "
        f"too: metrics of "
        "predicted labels flatter the model, and rankings without what a user had cannot find these"
    ]


def rule_for_seen(
    config: DataConfig, schema: Schema, is_stream: bool, repeats: Callable[[], tuple[int, int]]
) -> tuple[str, list[str]]:
    """Return the rule for items that a user had, EXCLUDE or ALLOW, and a note if it was inferred.

    repeats: returns `repeats_in` of the training events.
    """
    if config.seen != "auto":
        return config.seen, []
    if config.duplicates_of(schema.label_kind, bool(schema.event_types)) != "keep" or is_stream:
        return EXCLUDE, []
    num_repeats, number = repeats()
    if num_repeats == number - 1:
        return EXCLUDE, []
    share = num_repeats / number
    seen = ALLOW if share >= LEAST_REPEATS else EXCLUDE
    does = "are ranked and recommended again" if seen == ALLOW else "are not recommended again"
    return seen, [
        f"--seen {seen}: {share:.1%} of the training {schema.labels} repeat {with_article(schema.item)} of "
        f"their {schema.user} (limit: {LEAST_REPEATS:.0%}), so {schema.items} that "
        f"{with_article(schema.user)} had {does}"
    ]


def rule_for_new(config: DataConfig, schema: Schema, features: Sequence[Feature]) -> tuple[str, list[str]]:
    """Return the rule for items without a row, EXCLUDE or INCLUDE, and a note if it cannot be the given one.

    features: of the data.
    """
    if config.new_items == EXCLUDE or schema.describes_items(features):
        return config.new_items, []
    return EXCLUDE, [
        f"--new_items exclude instead of include: {schema.items} have no feature besides their ids, so all "
        "new ones would have the same score"
    ]


def repeats_in(user: np.ndarray, item: np.ndarray) -> tuple[int, int]:
    """Return the number of events of a pair that had one before, and that of all events, int32 [n] both."""
    num_repeats = 0
    for repeated in repeated_events(user, item):
        pairs = user[repeated].astype(np.int64) << 32 | item[repeated]
        num_repeats += len(pairs) - len(np.unique(pairs))
    return num_repeats, len(user)


def split(
    raw: RawData,
    schema: Schema,
    config: DataConfig,
    seed: int,
    folder: Path | None = None,
    is_part: bool = False,
) -> tuple[np.ndarray, tuple[int, int, int], list[str]]:
    """Return the order in which events are stored, int32 [events], the sizes of the splits, and notes.

    The sizes are those of training, validation and test. folder: for temporary files; is_part: True if a
    split may be empty, because other events are elsewhere.

    Raises:
        UserError: when there are too few events for these fractions.
    """
    number = len(raw.events.user)
    # Stable, so that events of one second keep the order of the file on every machine.
    by_time = sorted_places(raw.events.time)
    is_test, notes = _choose_test(raw, schema, by_time, config, seed)
    if raw.official_validation is None:
        is_validation = _choose_validation(raw.events, by_time, is_test, config, seed)
    else:
        is_validation = gather(raw.official_validation, by_time, np.zeros_like(is_test))
        notes += ["the validation is what the files have; --validation_fraction is not used"]
    if config.split == "time" and raw.official_test is None:
        notes += _describe_cut(raw.events.time, by_time, _cut_of(number, config), schema)
    is_train = ~(is_test | is_validation)
    parts = is_train, is_validation, is_test
    num_train, num_validation, num_test = (int(np.count_nonzero(part)) for part in parts)
    if (num_train == 0 or (num_test == 0 and config.split != NO_SPLIT)) and not is_part:
        raise UserError(
            f"--split {config.split} of {number} {schema.labels} with --test_fraction "
            f"{config.test_fraction} and --validation_fraction {config.validation_fraction} leaves "
            f"{num_train} for training and {num_test} for the test; give fractions that leave some for both."
        )
    if num_validation == 0 and not is_part:
        notes.append(
            f"no {schema.label} is for validation: no validation after each epoch, and no early stopping"
        )
    # With any other value of --duplicates no pair has several events.
    # With several types of events a repeated purchase is what is to be found.
    if config.duplicates_of(schema.label_kind, False) == "keep" and not schema.event_types:
        in_file = np.zeros(number, bool)
        in_file[by_time[is_test]] = True
        notes += describe_leak(raw.events, in_file, schema, folder)
    # One split after the other, so that each is a range of positions: a list of positions would cost a second
    # random read for every event of a batch.
    return np.concatenate([by_time[part] for part in parts]), (num_train, num_validation, num_test), notes


def describe_held(schema: Schema, number: int, row: tuple[str, int], time: int, before: int) -> str:
    """Note on held-back events. row, time: of the first one; before: time of the newest other."""
    wrong, newest = (np.datetime64(seconds, "s") for seconds in (time, before))
    are = f"{schema.label} is" if number == 1 else f"{schema.labels} are"
    return (
        f"{number:,} {are} held back until others are as new, as of a wrong clock: {schema.label} "
        f"{row[1] + 1:,} of {row[0]} has the time {wrong}, and the newest before it {newest}"
    )


def _choose_test(
    raw: RawData, schema: Schema, by_time: np.ndarray, config: DataConfig, seed: int
) -> tuple[np.ndarray, list[str]]:
    """Mark the events of the test, bool [events], in the order of time. Also returns notes."""
    number = len(raw.events.user)
    is_test = np.zeros(number, bool)
    if raw.official_test is not None:
        return gather(raw.official_test, by_time, is_test), []
    if config.split == "leave_one_out":
        newest, notes = _choose_newest_of_each(raw.events, by_time, schema)
        is_test[newest] = True
        return is_test, notes
    is_test[_cut_of(number, config) :] = True
    if config.split == "random":
        # Each draw has its own generator, so that the test does not depend on the draw for validation.
        # Permuting the marks keeps their number, unlike drawing them one by one.
        np.random.default_rng([seed, 1]).shuffle(is_test)
    return is_test, []


def _cut_of(number: int, config: DataConfig) -> int:
    """Place in the order of time at which the test begins, which has the newest of `number` events."""
    return number if config.split == NO_SPLIT else number - round(number * config.test_fraction)


def _describe_cut(time: np.ndarray, by_time: np.ndarray, cut: int, schema: Schema) -> list[str]:
    """Return notes on a test that begins among events of one time; refuse events that all have one time."""
    number = len(time)
    # They would be split in the order of the file, whose end often has users without a training event.
    if number > 1 and time[by_time[0]] == time[by_time[-1]]:
        raise UserError(
            f"All {number:,} {schema.labels} have the time {np.datetime64(int(time[0]), 's')}, so "
            "--split time cannot choose the newest; give --split random."
        )
    if not 0 < cut < number or time[by_time[cut - 1]] != time[by_time[cut]]:
        return []
    of_test = time[by_time[cut]]
    first = sum(int(np.count_nonzero(time[part] < of_test)) for part in chunks(number, time))
    tied = sum(int(np.count_nonzero(time[part] == of_test)) for part in chunks(number, time))
    return [
        f"the test begins among {tied:,} {schema.labels} of one time ({np.datetime64(int(of_test), 's')}): "
        f"the last {first + tied - cut:,} of them in the file are in it"
    ]


def _choose_newest_of_each(
    events: Events, by_time: np.ndarray, schema: Schema
) -> tuple[np.ndarray, list[str]]:
    """Return the places, in the order of time, of the last event of each user, and notes."""
    newest, num_single = _newest_of_each(events.user, by_time)
    notes = []
    if num_single:
        single = counted(num_single, f"{schema.user} has", f"{schema.user}s have")
        notes.append(f"{single} a single {schema.label}, which is for training: the test has none")
    num_tied = _num_tied(events, by_time[newest])
    if num_tied and events.time[by_time[0]] == events.time[by_time[-1]]:
        notes.append(
            f"the {schema.labels} have one time or none: the last of each {schema.user} is in the test"
        )
    elif num_tied:
        notes.append(
            f"{num_tied:,} of {len(newest):,} {schema.user}s have several {schema.labels} of the time of "
            "their newest: the last of them in the file is in the test"
        )
    return newest, notes


def _num_tied(events: Events, newest: np.ndarray) -> int:
    """Number of users with another event at the time of their newest. newest: one event of each user."""
    has_newest = np.zeros(highest(events.user) + 1, bool)
    time_of = np.zeros(len(has_newest), np.int64)
    has_newest[events.user[newest]] = True
    time_of[events.user[newest]] = events.time[newest]
    num_as_new = np.zeros(len(has_newest), np.int64)
    for part in chunks(len(events.user), events.user, events.time):
        user = events.user[part]
        is_as_new = has_newest[user] & (time_of[user] == events.time[part])
        num_as_new += np.bincount(user[is_as_new], minlength=len(has_newest))
    return int(np.count_nonzero(num_as_new > 1))


def _choose_validation(
    events: Events, by_time: np.ndarray, is_test: np.ndarray, config: DataConfig, seed: int
) -> np.ndarray:
    """Mark the validation events, bool [events], in the order of time: drawn, or the newest of each user."""
    # Not the newest for --split time: these are the most informative ones about the test.
    among = where(~is_test)
    wanted = config.num_validation(len(among))
    if config.split == "leave_one_out":
        among = among[_newest_of_each(events.user, by_time[among])[0]]
    np.random.default_rng([seed, 2]).shuffle(among)
    is_validation = np.zeros(len(is_test), bool)
    is_validation[among[:wanted]] = True
    return is_validation


def _newest_of_each(user: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, int]:
    """Return where the last event of each user is, int32, and the number of users with only one event."""
    # places: in the order of time. Users with one event are skipped.
    number = highest(user) + 1
    counts, last = np.zeros(number, np.int64), np.zeros(number, np.int32)
    for part in chunks(len(places)):
        users = user[places[part]]
        counts += np.bincount(users, minlength=number)
        # With several values for one index, numpy keeps the last.
        last[users] = np.arange(part.start, part.stop)
    release(user)
    return last[counts > 1], int(np.count_nonzero(counts == 1))
