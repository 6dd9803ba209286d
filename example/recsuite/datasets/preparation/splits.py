"""Which events are for training, for validation and for the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsuite.config.sections.data import DataConfig
from recsuite.datasets.preparation.duplicates import describe_leak
from recsuite.errors import UserError, counted

if TYPE_CHECKING:
    from recsuite.datasets.schema import RawData, Schema


def split(
    raw: RawData, schema: Schema, config: DataConfig, seed: int
) -> tuple[np.ndarray, tuple[int, int, int], list[str]]:
    """The order in which events are stored, int64 [events]; how many are for training, validation and the
    test; and what there is to say of it.
    """
    # Stable, so that events of one second keep the order of the file on every machine.
    by_time = np.argsort(raw.events.time, kind="stable")
    user = raw.events.user[by_time]
    is_test, notes = _choose_test(raw, schema, by_time, config, seed)
    is_validation = _choose_validation(user, ~is_test, config, seed)
    is_train = ~is_test & ~is_validation
    sizes = int(is_train.sum()), int(is_validation.sum()), int(is_test.sum())
    if sizes[0] == 0 or sizes[2] == 0:
        raise UserError(
            f"--split {config.split} of {len(user)} {schema.labels} with --test_fraction "
            f"{config.test_fraction} and --validation_fraction {config.validation_fraction} leaves "
            f"{sizes[0]} for training and {sizes[2]} for the test; give fractions that leave some for both."
        )
    if sizes[1] == 0:
        notes.append(
            f"no {schema.label} is for validation: no validation after each epoch, and no early stopping"
        )
    # With any other value no pair has two events that could lie on both sides.
    if config.duplicates == "keep":
        notes += describe_leak(raw.events, by_time[is_test], schema)
    # One split after the other, so each is a range of positions: a list of them would cost a second random
    # read for every event of a batch.
    return np.concatenate([by_time[is_train], by_time[is_validation], by_time[is_test]]), sizes, notes


def _choose_test(
    raw: RawData, schema: Schema, by_time: np.ndarray, config: DataConfig, seed: int
) -> tuple[np.ndarray, list[str]]:
    """Whether each event, in the order of time, is for the test, bool [events]; and what to say of it."""
    number = len(by_time)
    if raw.official_test is not None:
        return raw.official_test[by_time], []
    time = raw.events.time[by_time]
    if config.split == "leave_one_out":
        return _choose_newest_of_each(raw.events.user[by_time], time, schema)
    num_test = round(number * config.test_fraction)
    is_test = np.arange(number) >= number - num_test
    if config.split == "random":
        # Each draw has a stream of its own, so that the test stays the same whatever is drawn for validation.
        # Marks that are permuted stay as many, unlike those drawn one by one.
        return np.random.default_rng([seed, 1]).permutation(is_test), []
    return is_test, _describe_cut(time, number - num_test, schema)


def _describe_cut(time: np.ndarray, cut: int, schema: Schema) -> list[str]:
    """What to say where the test begins among events of one time. time: in its order, int64 [events].

    Raises:
        UserError: when all have one time, so that none is newer than another.
    """
    # Their order would be that of the file, and its end often has users that the training never saw.
    if len(time) > 1 and time[0] == time[-1]:
        raise UserError(
            f"All {len(time):,} {schema.labels} have the time {time[0]}, so --split time cannot choose the "
            "newest; give --split random."
        )
    if not 0 < cut < len(time) or time[cut - 1] != time[cut]:
        return []
    first, end = np.searchsorted(time, time[cut], "left"), np.searchsorted(time, time[cut], "right")
    return [
        f"the test begins among {end - first:,} {schema.labels} of one time ({time[cut]}): the last "
        f"{end - cut:,} of them in the file are in it"
    ]


def _choose_newest_of_each(
    user: np.ndarray, time: np.ndarray, schema: Schema
) -> tuple[np.ndarray, list[str]]:
    """Whether each event is the last one of its user, bool [events]; and what to say of it."""
    newest, num_single = _newest_of_each(user)
    is_test = np.zeros(len(user), bool)
    is_test[newest] = True
    notes = []
    if num_single:
        single = counted(num_single, f"{schema.user} has", f"{schema.user}s have")
        notes.append(f"{single} a single {schema.label}, which is for training: the test has none")
    # In the order of their users' ids, as `newest` is.
    place = np.searchsorted(user[newest], user).clip(max=max(0, len(newest) - 1))
    is_as_new = (user[newest][place] == user) & (time[newest][place] == time) if len(newest) else is_test
    num_tied = int((np.bincount(place[is_as_new], minlength=1) > 1).sum())
    if num_tied:
        notes.append(
            f"{num_tied:,} of {len(newest):,} {schema.user}s have several {schema.labels} of the time of "
            "their newest: the last of them in the file is in the test"
        )
    return is_test, notes


def _choose_validation(user: np.ndarray, is_left: np.ndarray, config: DataConfig, seed: int) -> np.ndarray:
    """Whether each event, in the order of time, is for validation, bool [events]: --validation_fraction of
    those that are left beside the test, drawn by the seed; for leave_one_out among the newest left of each
    user.

    Not the newest for --split time: the newest events are the most informative ones about the test.
    """
    left = np.flatnonzero(is_left)
    wanted = round(len(left) * config.validation_fraction)
    among = left[_newest_of_each(user[left])[0]] if config.split == "leave_one_out" else left
    is_validation = np.zeros(len(user), bool)
    is_validation[np.random.default_rng([seed, 2]).permutation(among)[:wanted]] = True
    return is_validation


def _newest_of_each(user: np.ndarray) -> tuple[np.ndarray, int]:
    """The place of the last event of each user with two or more, int64; and how many users have one."""
    # np.unique says where a value comes first; from the end, that is where it comes last.
    _, from_end, counts = np.unique(user[::-1], return_index=True, return_counts=True)
    return len(user) - 1 - from_end[counts > 1], int((counts == 1).sum())
