"""Who had what: of each user the items, and of each item the users, in the order of time.

Of the training events, and for the test of those of validation too. Stored once for each user and each item,
not once for each event: an event knows where in it those before it end, and where it is itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recsuite.datasets.columns import NOWHERE
from recsuite.datasets.preparation.arrays.groups import Groups, grouped
from recsuite.datasets.preparation.arrays.mapped import counts_of, create_column, highest, release, temporary
from recsuite.datasets.preparation.arrays.order import sorted_places
from recsuite.datasets.schema import AUDIENCE, HISTORY, LISTS


@dataclass(frozen=True)
class Stored:
    """The events in the order in which they are stored: positions of users and items, int32 [events]; label,
    float32; time, int64.
    """

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    time: np.ndarray


class Listed(NamedTuple):
    """Where events are in the lists of their users, or of their items.

    ends: the place before which what is older than each event ends; places: its own, `NOWHERE` unless it is
    for training; int32 [events]; longest: how many events are older than one of the same list, at most.
    """

    ends: np.ndarray
    places: np.ndarray
    longest: int


# From the other side of events, positions int32 [n], their labels, times and places to what files hold of
# them, by the name of the file, [n, ...].
Content = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Mapping[str, np.ndarray]]


class _Lists:
    """The files that hold what users, or items, had of the events that are known: the first `num_known`."""

    def __init__(
        self, folder: Path, name: str, known_owners: np.ndarray, number: int, content: Content
    ) -> None:
        self.num_known = len(known_owners)
        self.content = content
        self.offsets = np.concatenate([[0], np.cumsum(counts_of(known_owners, number))])
        np.save(folder / f"{name}_offsets.npy", self.offsets)
        prefix = "test_" if name.startswith("test_") else ""
        # Of no event, for types and widths alone.
        empty = content(
            np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int64), np.zeros(0, np.int32)
        )
        self.files = {
            file: create_column(folder / f"{prefix}{file}.npy", (self.num_known, *held.shape[1:]), held.dtype)
            for file, held in empty.items()
        }

    def write(self, owners: range, *columns: np.ndarray) -> None:
        """Write the known events of a range of owners, owner after owner, each in the order of time; columns:
        what `Content` takes of them.
        """
        part = slice(self.offsets[owners.start], self.offsets[owners.stop])
        for file, held in self.content(*columns).items():
            self.files[file][part] = held
        release(*self.files.values())


def by_users(folder: Path, stored: Stored) -> Groups:
    """The events by ranges of users: their places, users, items, labels and times."""
    columns = stored.user, stored.item, stored.label, stored.time
    return grouped(folder, stored.user, highest(stored.user) + 1, *columns)


def by_items(folder: Path, stored: Stored, num_items: int) -> Groups:
    """The events by ranges of items: their places, items, users, labels and times."""
    columns = stored.item, stored.user, stored.label, stored.time
    return grouped(folder, stored.item, num_items, *columns)


def histories(item_rows: np.ndarray) -> Content:
    """What the files of users hold: items. item_rows: the table row of each item, int32 [items]."""

    def content(
        items: np.ndarray, labels: np.ndarray, times: np.ndarray, places: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        # Table rows, not positions of items, so that a history goes into a batch as it is.
        rows_and_labels = np.stack([item_rows[items], labels.view(np.int32)], axis=1)
        # Times and events in files of their own: most models take none, and would read them for nothing.
        return {"history": rows_and_labels, "history_time": times, "history_event": places, "seen": items}

    return content


def audiences(user_rows: np.ndarray) -> Content:
    """What the files of items hold: users. user_rows: the table row of each user, int32 [users]."""
    return lambda users, labels, times, places: {"audience": user_rows[users]}


def write_all_lists(
    folder: Path,
    stored: Stored,
    groups: tuple[Groups, Groups],
    rows: Sequence[np.ndarray],
    sizes: tuple[int, int, int],
    done: Callable[[float], object],
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Write what users had, and who had items; returns what records say of it, and how long the longest are.

    groups: the events by users, and by items; rows: the table rows of users, and of items; done: called with
    the share that is.
    """
    fields, longest = {}, {}
    owners = {HISTORY: stored.user, AUDIENCE: stored.item}
    contents = {HISTORY: histories(rows[1]), AUDIENCE: audiences(rows[0])}
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
    """Write what users or items had, as training and validation know it, and as the test does.

    groups: the events, see `by_users` and `by_items`; owners: their users or items, int32 [events]; done:
    called with the share that is.
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    number = groups.ranges[-1].stop
    in_training = _Lists(folder, name, owners[:num_train], number, content)
    # A model in use knows the validation events when a test event comes. A training event must not: under a
    # random split they lie between those of the training.
    in_test = _Lists(folder, f"test_{name}", owners[:num_known], number, content)
    ends, own_places = (temporary(folder, len(owners), np.int32) for _ in range(2))
    stands = _stands_of(folder, name, len(owners))
    lengths: list[int] = []

    def write(range_of: range, *columns: np.ndarray) -> None:
        # Owner after owner, each in the order of time.
        order = sorted_places(columns[1], columns[4])
        places, owner, other, label, time = (column[order] for column in columns)
        first = _first_of_time(owner, time)
        for lists, is_own in ((in_training, places < num_known), (in_test, places >= num_known)):
            # Known events are stored first, so their place tells.
            is_known = places < lists.num_known
            known, own = np.flatnonzero(is_known), np.flatnonzero(is_own)
            lists.write(range_of, other[known], label[known], time[known], places[known])
            # How many known events stand before each one in this order: it is a place in what is stored.
            before = lists.offsets[range_of.start] + np.cumsum(is_known) - is_known
            end = before[first[own]]
            ends[places[own]] = end
            stands[places[own]] = before[own]
            lengths.append(int((end - lists.offsets[owner[own]]).max(initial=0)))
            if lists is in_training:
                own_places[places] = np.where(is_known, before, NOWHERE)
        release(ends, own_places, stands)

    groups.each(write, done)
    return Listed(ends, own_places, max(lengths))


def _stands_of(folder: Path, name: str, number: int) -> np.ndarray:
    """What is to say of each event before which place of its list it stands, int32: kept of users alone."""
    if name != HISTORY:
        return temporary(folder, number, np.int32)
    return create_column(folder / f"{name}_before.npy", (number,), np.int32)


def _first_of_time(owner: np.ndarray, time: np.ndarray) -> np.ndarray:
    """For events in the order of owner and time: where the first of the same owner and time is, int64.

    Such events do not know of each other: the lists of all of them end where that of the first does.
    """
    is_first = np.ones(len(owner), bool)
    is_first[1:] = (np.diff(owner) != 0) | (np.diff(time) != 0)
    return np.maximum.accumulate(np.where(is_first, np.arange(len(owner)), 0))
