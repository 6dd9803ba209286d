"""What each user had before each event: of the training events, and for the test of those of validation too.

Stored once for each user, not once for each event: an event knows where in it its own history ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recsuite.datasets.preparation.arrays.groups import Groups, grouped
from recsuite.datasets.preparation.arrays.mapped import counts_of, create_column, highest, release
from recsuite.datasets.preparation.arrays.order import sorted_places


@dataclass(frozen=True)
class Stored:
    """The events in the order in which they are stored: positions of users and items, int32 [events]; label,
    float32; time, int64.
    """

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    time: np.ndarray


class _History:
    """The files that hold what users had of the events that are known: the first `num_known`."""

    def __init__(self, folder: Path, prefix: str, known_users: np.ndarray, num_users: int) -> None:
        self.num_known = number = len(known_users)
        self.offsets = np.concatenate([[0], np.cumsum(counts_of(known_users, num_users))])
        np.save(folder / f"{prefix}history_offsets.npy", self.offsets)
        self.history = create_column(folder / f"{prefix}history.npy", (number, 2), np.int32)
        self.seen = create_column(folder / f"{prefix}seen.npy", (number,), np.int32)

    def write(self, users: range, items: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> None:
        """Write the known events of a range of users, user after user, each in the order of time."""
        part = slice(self.offsets[users.start], self.offsets[users.stop])
        # Table rows, not positions of items, so that a history goes into a batch as it is.
        self.history[part, 0], self.history[part, 1] = rows, labels.view(np.int32)
        self.seen[part] = items
        release(self.history, self.seen)


def by_users(folder: Path, stored: Stored) -> Groups:
    """The events by ranges of users: their places, users, items, labels and times."""
    columns = stored.user, stored.item, stored.label, stored.time
    return grouped(folder, stored.user, highest(stored.user) + 1, *columns)


def write_histories(
    folder: Path,
    stored: Stored,
    groups: Groups,
    item_rows: np.ndarray,
    sizes: tuple[int, int, int],
    done: Callable[[float], object],
) -> tuple[np.ndarray, int]:
    """Write what users had, as training and validation know it, and as the test does; returns where the
    histories of all events end, int32 [events], and how long the longest is.

    groups: the same events, see `by_users`; item_rows: the table row of each item, int32 [items]; done:
    called with the share that is.
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    num_users = groups.ranges[-1].stop
    in_training = _History(folder, "", stored.user[:num_train], num_users)
    # A model in use knows the validation events when a test event comes. A training event must not: under a
    # random split they lie between those of the training.
    in_test = _History(folder, "test_", stored.user[:num_known], num_users)
    ends = np.empty(len(stored.user), np.int32)
    lengths: list[int] = []

    def write(users: range, *columns: np.ndarray) -> None:
        # User after user, each in the order of time.
        order = sorted_places(columns[1], columns[4])
        places, user, item, label, time = (column[order] for column in columns)
        first = _first_of_time(user, time)
        for history, is_own in ((in_training, places < num_known), (in_test, places >= num_known)):
            # Known events are stored first, so their place tells.
            is_known = places < history.num_known
            known, own = np.flatnonzero(is_known), np.flatnonzero(is_own)
            history.write(users, item[known], item_rows[item[known]], label[known])
            # How many known events stand before each one in this order: it is a place in the stored history.
            before = history.offsets[users.start] + np.cumsum(is_known) - is_known
            end = before[first[own]]
            ends[places[own]] = end
            lengths.append(int((end - history.offsets[user[own]]).max(initial=0)))

    groups.each(write, done)
    return ends, max(lengths)


def _first_of_time(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """For events in the order of user and time: the place of the first one of the same user and time, int64.

    Such events do not know of each other: the histories of all of them end where that of the first does.
    """
    is_first = np.ones(len(user), bool)
    is_first[1:] = (np.diff(user) != 0) | (np.diff(time) != 0)
    return np.maximum.accumulate(np.where(is_first, np.arange(len(user)), 0))
