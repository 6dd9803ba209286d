"""User histories: the items of each user in the order of time.

They hold the training events, and for the test also the validation events. They are stored once for each
user, not once for each event: an event has the end of its part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
from recsuite.datasets.preparation.loops import list_events
from recsuite.datasets.schema import HISTORY

# Prefixes of the files of the histories for training, and for the test.
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


# Functions from a range of events to their content in a file, [n, ...], by the name of the file.
Content = Mapping[str, Callable[[slice], np.ndarray]]


def _content_of(stored: StoredEvents, item_rows: np.ndarray) -> Content:
    """Return the content of the files. item_rows: the table row of each item, int32 [items]."""

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


def write_histories(
    folder: Path,
    stored: StoredEvents,
    item_rows: np.ndarray,
    sizes: tuple[int, int, int],
    done: Callable[[float], object],
) -> tuple[np.ndarray, int]:
    """Write the user histories.

    Returns the end of the history of each event, int32 [events], and the length of the longest history.

    item_rows: the table row of each item, int32 [items]; sizes: of the splits; done: called with the finished
    share.
    """
    # A deployed model knows the validation events when a test event comes. A training event must not: in a
    # random split they lie between the training events.
    num_listed = sizes[0], sizes[0] + sizes[1]
    num_users, num_events = highest(stored.user) + 1, len(stored.user)
    offsets = np.zeros((len(num_listed), num_users + 1), np.int64)
    for prefix, of_kind, number in zip(PREFIXES, offsets, num_listed, strict=True):
        np.cumsum(counts_of(stored.user[:number], num_users), out=of_kind[1:])
        np.save(folder / f"{prefix}{HISTORY}_offsets.npy", of_kind)
    ends = temporary(folder, num_events, np.int32)
    # Places in the histories for the training and in those for the test.
    places = temporary(folder, 2 * num_events, np.int32).reshape(2, num_events)
    before = create_column(folder / f"{HISTORY}_before.npy", (num_events,), np.int32)
    next_places = offsets[:, :-1].copy()
    first_places = next_places.copy()
    newest = np.full(num_users, np.iinfo(np.int64).min)
    cursors, bounds = np.array([0, *num_listed]), np.array([*num_listed, num_events])
    lists, longest = (offsets, next_places, first_places, newest), 0
    for part in chunks(num_events, stored.user, stored.time, ends, places, before):
        size = part.stop - part.start
        of_part = list_events(stored.user, stored.time, cursors, bounds, size, *lists, ends, before, places)
        longest = max(longest, of_part)
    done(0.5)
    _write_content(folder, stored, _content_of(stored, item_rows), places, num_listed)
    done(1)
    return ends, longest


def _write_content(
    folder: Path, stored: StoredEvents, content: Content, places: np.ndarray, num_listed: tuple[int, int]
) -> None:
    """Write the files of histories: the content of each listed event, at its place."""
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
