"""Histories of events: the items of each user, and the users of each item, in the order of time.

They hold the training events, and for the test also the validation events. They are stored once for each user
and each item, not once for each event: an event has the end of its part in them, and its own place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recsuite.datasets.preparation.arrays import (
    blocks,
    chunks,
    counts_of,
    create_column,
    highest,
    release,
    temporary,
)
from recsuite.datasets.preparation.loops import TRAINING, list_events
from recsuite.datasets.schema import HISTORY, ITEM_HISTORY, LISTS

# Prefixes of the files of the lists for training, and for the test.
PREFIXES = ("", "test_")


@dataclass(frozen=True)
class StoredEvents:
    """Events in the order in which they are stored.

    user, item: positions, int32 [events]; label: float32 [events]; time: int64 [events].
    """

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    time: np.ndarray


# Functions from a range of events to what their members of the lists have in a file, [n, ...], by the file.
Content = Mapping[str, Callable[[slice], np.ndarray]]


def user_histories(stored: StoredEvents, item_rows: np.ndarray) -> Content:
    """Content of the user histories: items. item_rows: the table row of each item, int32 [items]."""

    def rows_and_labels(part: slice) -> np.ndarray:
        # Table rows, not positions of items, so that a history is copied to a batch without a look-up.
        rows = item_rows.take(stored.item[part])
        return np.stack([rows, stored.label[part].view(np.int32)], axis=1)

    return {
        "history": rows_and_labels,
        # In files of their own, because most models do not read them.
        "history_time": lambda part: stored.time[part],
        "history_event": lambda part: np.arange(part.start, part.stop, dtype=np.int32),
        "seen": lambda part: stored.item[part],
    }


def item_histories(stored: StoredEvents, user_rows: np.ndarray) -> Content:
    """Content of the item histories: users. user_rows: the table row of each user, int32 [users]."""
    return {"audience": lambda part: user_rows.take(stored.user[part])}


def write_histories(
    folder: Path,
    stored: StoredEvents,
    rows: Sequence[np.ndarray],
    sizes: tuple[int, int, int],
    done: Callable[[float], object],
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Write the user and item histories. Returns their fields of records, and the greatest lengths.

    rows: the table rows of users, and of items, int32; sizes: of the splits; done: called with the finished
    share.
    """
    # A deployed model knows the validation events when a test event comes. A training event must not: in a
    # random split they lie between the training events.
    num_listed = sizes[0], sizes[0] + sizes[1]
    num_users = highest(stored.user) + 1
    of_users = _list(folder, HISTORY, stored.user, num_users, stored.time, num_listed)
    _write_content(folder, stored, user_histories(stored, rows[1]), of_users.places, num_listed)
    done(0.7)
    of_items = _list(folder, ITEM_HISTORY, stored.item, len(rows[1]), stored.time, num_listed)
    _write_content(folder, stored, item_histories(stored, rows[0]), of_items.places, num_listed)
    done(1)
    fields: dict[str, np.ndarray] = {}
    longest = {}
    for name, listed in zip(LISTS, (of_users, of_items), strict=True):
        fields |= {f"{name}_end": listed.ends, f"{name}_place": listed.places[TRAINING]}
        longest[f"longest_{name}"] = listed.longest
    return fields, longest


class ListPlaces(NamedTuple):
    """Places of events in the lists of their users, or of their items.

    ends: end of the events that are older than each event, int32 [events]; places: its own place in the lists
    for training and in those for the test, `NOWHERE` in a list that does not have it, int32 [2, events];
    longest: largest number of older events in a list.
    """

    ends: np.ndarray
    places: np.ndarray
    longest: int


def _list(
    folder: Path, name: str, owners: np.ndarray, number: int, time: np.ndarray, num_listed: tuple[int, int]
) -> ListPlaces:
    """Find the places of events in the lists of their owners, and write the offsets of the lists.

    num_listed: number of the first events that are in the lists for training, and in those for the test.
    """
    counts = [counts_of(owners[:known], number) for known in num_listed]
    offsets = np.zeros((len(counts), number + 1), np.int64)
    np.cumsum(counts, axis=1, out=offsets[:, 1:])
    for prefix, of_kind in zip(PREFIXES, offsets, strict=True):
        np.save(folder / f"{prefix}{name}_offsets.npy", of_kind)
    num_events = len(owners)
    ends = temporary(folder, num_events, np.int32)
    places = temporary(folder, 2 * num_events, np.int32).reshape(2, num_events)
    # A file for users: recommendations show what came before an event.
    before = (
        create_column(folder / f"{name}_before.npy", (num_events,), np.int32)
        if name == HISTORY
        else np.empty(0, np.int32)
    )
    next_places = offsets[:, :-1].copy()
    first_places = next_places.copy()
    newest = np.full(number, np.iinfo(np.int64).min)
    cursors, bounds = np.array([0, *num_listed]), np.array([*num_listed, num_events])
    lists, longest = (offsets, next_places, first_places, newest), 0
    for part in chunks(num_events, owners, time, ends, places, before):
        size = part.stop - part.start
        of_part = list_events(owners, time, cursors, bounds, size, *lists, ends, before, places)
        longest = max(longest, of_part)
    return ListPlaces(ends, places, longest)


def _write_content(
    folder: Path, stored: StoredEvents, content: Content, places: np.ndarray, num_listed: tuple[int, int]
) -> None:
    """Write the files of lists: what each listed event has there, at its place."""
    for prefix, of_kind, number in zip(PREFIXES, places, num_listed, strict=True):
        for name, of_events in content.items():
            # Without events, for the type and the width.
            empty = of_events(slice(0, 0))
            file = create_column(folder / f"{prefix}{name}.npy", (number, *empty.shape[1:]), empty.dtype)
            # A pair of numbers is written as one, in half of the time.
            pairs = file.view(np.int64).reshape(-1) if file.ndim > 1 else file
            for part in chunks(number, places, *vars(stored).values()):
                for block in blocks(part):
                    values = of_events(block)
                    pairs[of_kind[block]] = values.view(np.int64).reshape(-1) if values.ndim > 1 else values
            release(file)
