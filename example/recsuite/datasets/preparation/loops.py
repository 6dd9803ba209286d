"""Loops over events that numpy has no function for, compiled by numba at their first use.

They run without Python's lock. Most get events by chunks, which the caller releases, so that mapped columns
may be larger than memory. `mark_repeats`, `count_common` and `rank_by_popularity` get all events at once: at
most 9 bytes for each are in memory then, and Ctrl-C waits for their end, a second for 50 million events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from recsuite.compiled import compiled
from recsuite.datasets.arrays import chunks, counts_of, highest, release, temporary

# Values of the first axis of the arguments of `list_events`: lists for the training, and for the test.
TRAINING, TEST = 0, 1
# The last of the parts in which `list_events` takes events: those that are only in histories.
CONTEXT = 3
# Approximate number of events of a range of users, and of repeated events at a time.
RANGE_EVENTS = 2**20


@compiled
def group_events(owners: np.ndarray, first: int, next_place: np.ndarray, events: np.ndarray) -> None:
    """Write events to the next free places of their owners.

    owners: int [n], of the events `first`, `first + 1`, ...; next_place: int64 [number of owners], increased
    by each event; events: int32 [all events].
    """
    for number in range(len(owners)):
        owner = owners[number]
        events[next_place[owner]] = first + number
        next_place[owner] += 1


@compiled
def mark_repeats(
    offsets: np.ndarray, events: np.ndarray, items: np.ndarray, num_items: int, is_repeated: np.ndarray
) -> None:
    """Mark the events whose user has the same item in several events.

    offsets: int64 [users + 1], begins of the users' events among `events`; is_repeated: bool, in the order of
    `events`.
    """
    had, had_again = np.full(num_items, -1, np.int32), np.full(num_items, -1, np.int32)
    for user in range(len(offsets) - 1):
        has_repeats = False
        for place in range(offsets[user], offsets[user + 1]):
            item = items[events[place]]
            if had[item] == user:
                had_again[item] = user
                has_repeats = True
            had[item] = user
        if has_repeats:
            for place in range(offsets[user], offsets[user + 1]):
                is_repeated[place] = had_again[items[events[place]]] == user


@compiled
def count_common(
    offsets: np.ndarray, events: np.ndarray, items: np.ndarray, num_items: int, is_test: np.ndarray
) -> int:
    """Number of test events whose user has the same item in an event outside the test.

    offsets, events: see `mark_repeats`; is_test: bool, of each event.
    """
    had = np.full(num_items, -1, np.int32)
    number = 0
    for user in range(len(offsets) - 1):
        for event in events[offsets[user] : offsets[user + 1]]:
            if not is_test[event]:
                had[items[event]] = user
        for event in events[offsets[user] : offsets[user + 1]]:
            number += is_test[event] and had[items[event]] == user
    return number


@compiled
def list_events(
    owners: np.ndarray,
    time: np.ndarray,
    cursors: np.ndarray,
    ends: np.ndarray,
    most: int,
    offsets: np.ndarray,
    next_place: np.ndarray,
    first_place: np.ndarray,
    newest: np.ndarray,
    end: np.ndarray,
    before: np.ndarray,
    place: np.ndarray,
    first_part: int,
) -> int:
    """Find the places of at most `most` events in the lists of their owners, in the order of time.

    Events are stored as training, validation, test and context, each in the order of time. Validation events
    are in the lists for the test only, test events in none, and events of the context in all of them.

    Returns the largest number of older events in a list.

    cursors, ends: int64 [4], next event of each part, and its end. offsets: int64 [2, owners + 1], begins of
    the lists. next_place, first_place: int64 [2, owners], next free place in a list of an owner, and that of
    its first event of the time `newest`. Results by event, int32: end of the list that an event sees, and
    place before which it comes, of all but the context; and its own place in both lists, [2, events], if it
    is in them. first_part: the part whose events come before those of the others at the same time.
    """
    longest = 0
    for _ in range(most):
        part = -1
        for number in range(4):
            other = (first_part + number) % 4
            if cursors[other] < ends[other] and (part < 0 or time[cursors[other]] < time[cursors[part]]):
                part = other
        if part < 0:
            break
        event = cursors[part]
        cursors[part] += 1
        owner = owners[event]
        # Events of one time are not in each other's lists.
        if newest[owner] != time[event]:
            newest[owner] = time[event]
            for kind in range(2):
                first_place[kind, owner] = next_place[kind, owner]
        if part != CONTEXT:
            seen = TEST if part == 2 else TRAINING
            end[event] = first_place[seen, owner]
            longest = max(longest, end[event] - offsets[seen, owner])
            before[event] = next_place[seen, owner]
        for kind in range(2):
            place[kind, event] = next_place[kind, owner]
            next_place[kind, owner] += part <= kind or part == CONTEXT
    return longest


@compiled
def add_rests(
    own: np.ndarray, other: np.ndarray, labels: np.ndarray, mean: float, biases: np.ndarray, sums: np.ndarray
) -> float:
    """Add labels minus the mean and the bias of the other side to the sums of their owners.

    Returns the sum of their squares. own, other: int [n], e.g. users and items; biases: of the other side.
    """
    squares = 0.0
    for event in range(len(own)):
        rest = labels[event] - mean - biases[other[event]]
        sums[own[event]] += rest
        squares += rest * rest
    return squares


@compiled
def rank_by_popularity(
    offsets: np.ndarray,
    seen: np.ndarray,
    case_offsets: np.ndarray,
    cases: np.ndarray,
    items: np.ndarray,
    counts: np.ndarray,
    popular: np.ndarray,
    is_listed: np.ndarray,
    ranks: np.ndarray,
    candidates: np.ndarray,
) -> None:
    """Rank the items of cases by popularity among the listed ones, without the items that their users had.

    offsets, seen: the items that each user had; case_offsets, cases: the cases of each user, see
    `mark_repeats`; items: of the cases; counts: of events with each item; popular: number of items that are
    as popular or more; is_listed: of each item, bool. An item that the user had, and one that is not listed,
    get no candidates, and keep their ranks.
    """
    had, num_listed = np.full(len(counts), -1, np.int32), is_listed.sum()
    for user in range(len(offsets) - 1):
        if case_offsets[user] == case_offsets[user + 1]:
            continue
        popularity = np.empty(offsets[user + 1] - offsets[user], counts.dtype)
        number = 0
        for item in seen[offsets[user] : offsets[user + 1]]:
            # Of the context, see `histories`.
            if item < 0 or not is_listed[item]:
                continue
            if had[item] != user:
                popularity[number] = counts[item]
                number += 1
            had[item] = user
        popularity = np.sort(popularity[:number])
        for case in cases[case_offsets[user] : case_offsets[user + 1]]:
            item = items[case]
            if had[item] != user and is_listed[item]:
                ranks[case] = popular[item] - (number - np.searchsorted(popularity, counts[item]))
                candidates[case] = num_listed - number


@dataclass(frozen=True)
class Grouped:
    """Events of users (or items).

    offsets: int64 [users + 1], begins of the users' events among `events`; events: int32, user after user, of
    one user in ascending order.
    """

    offsets: np.ndarray
    events: np.ndarray


def grouped(owners: np.ndarray, number: int, folder: Path | None = None) -> Grouped:
    """Group events by their users (or items), of range(number). owners: of each event, int32 [events].

    folder: for an unnamed file; without one the result is in memory.

    Raises:
        OSError: when the disk has no room for it.
    """
    offsets = np.concatenate([[0], np.cumsum(counts_of(owners, number))])
    events = np.empty(len(owners), np.int32) if folder is None else temporary(folder, len(owners), np.int32)
    next_place = offsets[:-1].copy()
    for part in chunks(len(owners), owners, events):
        group_events(owners[part], part.start, next_place, events)
    return Grouped(offsets, events)


def repeated_events(user: np.ndarray, item: np.ndarray, folder: Path | None = None) -> Iterator[np.ndarray]:
    """Yield the events whose user has the same item in several events, those of some users at a time.

    The arrays are int32, in ascending order, of about `RANGE_EVENTS` events. user, item: int32 [events];
    folder: as for `grouped`.
    """
    by_user = grouped(user, highest(user) + 1, folder)
    is_repeated = np.zeros(len(user), bool)
    mark_repeats(by_user.offsets, by_user.events, item, highest(item) + 1, is_repeated)
    release(item, by_user.events)
    firsts = np.unique(by_user.offsets[:-1] // RANGE_EVENTS, return_index=True)[1].tolist()
    pending, number = [], 0
    for first, last in pairwise([*firsts, len(by_user.offsets) - 1]):
        part = slice(by_user.offsets[first], by_user.offsets[last])
        pending.append(by_user.events[part][is_repeated[part]])
        release(by_user.events)
        number += len(pending[-1])
        # Mostly few are repeated, and the caller looks up all of these in columns that may be mapped.
        if number >= RANGE_EVENTS or (number and last == len(by_user.offsets) - 1):
            yield np.sort(np.concatenate(pending))
            pending, number = [], 0
