"""User histories: the items of each user in the order of time.

They hold the training events, and for the test also the validation events; events of the context types, see
`Schema.event_types`, are in both. They are stored once for each user, not once for each event: an event has
the end of its part in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recsuite.datasets.arrays import (
    blocks,
    chunks,
    counts_of,
    create_column,
    gather,
    highest,
    release,
    sorted_places,
    temporary,
)
from recsuite.datasets.preparation.loops import list_events
from recsuite.datasets.schema import HISTORY, Events

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


def _with_context(folder: Path, stored: StoredEvents, context: Events) -> StoredEvents:
    """Return the events, followed by those of the context in the order of time, in unnamed files."""
    order, number = sorted_places(context.time), len(stored.user)
    joined = {}
    for name, column in vars(stored).items():
        joined[name] = temporary(folder, number + len(order), column.dtype)
        for part in chunks(number, column, joined[name]):
            joined[name][part] = column[part]
        gather(getattr(context, name), order, joined[name][number:])
    return StoredEvents(**joined)


def _content_of(stored: StoredEvents, item_rows: np.ndarray, num_events: int) -> Content:
    """Return the content of the files; item_rows: int32 [items]; num_events: without those of the context."""

    def rows_and_labels(part: slice) -> np.ndarray:
        # Table rows, not positions of items, so that a history is copied to a batch without a look-up.
        rows = item_rows.take(stored.item[part])
        return np.stack([rows, stored.label[part].view(np.int32)], axis=1)

    return {
        "history": rows_and_labels,
        # In files of their own, because most models do not read them.
        "history_time": lambda part: stored.time[part],
        "history_event": lambda part: np.arange(part.start, part.stop, dtype=np.int32),
        # Below 0 for the context: a user who saw an item did not have it.
        "seen": lambda part: stored.item[part] if part.start < num_events else ~stored.item[part],
    }


def write_histories(
    folder: Path,
    stored: StoredEvents,
    item_rows: np.ndarray,
    sizes: tuple[int, int, int],
    done: Callable[[float], object],
    context: Events | None = None,
    first_part: int = 0,
) -> tuple[np.ndarray, int]:
    """Write the user histories.

    Returns the end of the history of each event, int32 [events], and the length of the longest history.

    context: events that are only in histories; item_rows: the table row of each item, int32 [items]; sizes:
    of the splits; done: called with the finished share; first_part: see `loops.list_events`.
    """
    # A deployed model knows the validation events when a test event comes. A training event must not: in a
    # random split they lie between the training events.
    num_listed = sizes[0], sizes[0] + sizes[1]
    num_events = len(stored.user)
    if context is not None:
        stored = _with_context(folder, stored, context)
    num_users, num_all = highest(stored.user) + 1, len(stored.user)
    of_context = counts_of(stored.user[num_events:], num_users)
    offsets = np.zeros((len(num_listed), num_users + 1), np.int64)
    for prefix, of_kind, number in zip(PREFIXES, offsets, num_listed, strict=True):
        np.cumsum(counts_of(stored.user[:number], num_users) + of_context, out=of_kind[1:])
        np.save(folder / f"{prefix}{HISTORY}_offsets.npy", of_kind)
    ends = temporary(folder, num_events, np.int32)
    # Places in the histories for the training and in those for the test.
    places = temporary(folder, 2 * num_all, np.int32).reshape(2, num_all)
    before = create_column(folder / f"{HISTORY}_before.npy", (num_events,), np.int32)
    next_places = offsets[:, :-1].copy()
    first_places = next_places.copy()
    newest = np.full(num_users, np.iinfo(np.int64).min)
    cursors, bounds = np.array([0, *num_listed, num_events]), np.array([*num_listed, num_events, num_all])
    lists, longest = (offsets, next_places, first_places, newest), 0
    for part in chunks(num_all, stored.user, stored.time, ends, places, before):
        size = part.stop - part.start
        of_part = list_events(
            stored.user, stored.time, cursors, bounds, size, *lists, ends, before, places, first_part
        )
        longest = max(longest, of_part)
    done(0.5)
    content = _content_of(stored, item_rows, num_events)
    _write_content(folder, stored, content, places, num_listed, num_events)
    done(1)
    return ends, longest


def _write_content(
    folder: Path,
    stored: StoredEvents,
    content: Content,
    places: np.ndarray,
    num_listed: tuple[int, int],
    num_events: int,
) -> None:
    """Write the files of histories: the content of each listed event, at its place."""
    num_context = len(stored.user) - num_events
    columns = places, *vars(stored).values()
    for prefix, of_kind, number in zip(PREFIXES, places, num_listed, strict=True):
        for name, of_events in content.items():
            # Without events, for the type and the width.
            empty = of_events(slice(0, 0))
            shape = number + num_context, *empty.shape[1:]
            file = create_column(folder / f"{prefix}{name}.npy", shape, empty.dtype)
            # A pair of numbers is written as one, in half of the time.
            pairs = file.view(np.int64).reshape(-1) if file.ndim > 1 else file
            parts = chunks(num_context, *columns)
            of_context = (slice(num_events + part.start, num_events + part.stop) for part in parts)
            for part in itertools.chain(chunks(number, *columns), of_context):
                for block in blocks(part):
                    values = of_events(block)
                    pairs[of_kind[block]] = values.view(np.int64).reshape(-1) if values.ndim > 1 else values
            release(file)
