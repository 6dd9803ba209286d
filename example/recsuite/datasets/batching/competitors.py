"""Which items compete for an event beside its own: those of its group, and some that are drawn for a step;
and which of them its user had before.

What a user had is no competitor where it is not recommended, see `Schema.seen`.
A worker imports this module: no torch, no pandas.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from recsuite.datasets.batching.lists import OWNERS
from recsuite.datasets.batching.places import places_of
from recsuite.datasets.batching.shuffle import shuffled
from recsuite.datasets.schema import HISTORY, ITEM

# Rows that are held against what their users had at once.
ROWS = 256


def bytes_of_group(batch_size: int, competitors: int) -> int:
    """How many bytes have a bit for each row of a group, see `Batch`."""
    return -(-min(batch_size, competitors) // 8)


def drawn(items: np.ndarray, number: int, *draws: int) -> np.ndarray:
    """So many of some items, each at most once, all of them in their order where there are no more.

    draws: numbers by which one sample differs from another.
    """
    if number >= len(items):
        return items
    # The first places of a permutation are a sample, of which no rank needs to know more.
    return items[shuffled(np.arange(number), len(items), *draws)]


def mark_had(
    found: np.ndarray,
    events: np.ndarray,
    ends: np.ndarray,
    negatives: np.ndarray,
    num_items: int,
    read: Callable[[str], np.ndarray],
) -> None:
    """Fill in what training events had before, see `Batch`. Takes time for all that each of their users had.

    found: uint8 [B, bytes of a group and of the negatives], of zeros; events: records, [n]; ends: the places
    in histories before which what came before each ends, [n]; negatives: positions of items, [N]; read: a
    column by its name.
    """
    group = found.shape[1] - bytes_of_group(len(negatives), len(negatives))
    # Without a group any number will do: so many are held against the negatives at once.
    size = 8 * group or ROWS
    for begin in range(0, len(events), size):
        rows, some = found[begin : begin + size], events[begin : begin + size]
        in_group = some[ITEM] if group else some[ITEM][:0]
        items = np.concatenate([in_group, negatives])
        had = _had(some, ends[begin : begin + size], items, num_items, read)
        for first, found_of in ((0, had[:, : len(in_group)]), (group, had[:, len(in_group) :])):
            packed = np.packbits(found_of, axis=1, bitorder="little")
            rows[: len(packed), first : first + packed.shape[1]] = packed


def _had(
    events: np.ndarray,
    ends: np.ndarray,
    items: np.ndarray,
    num_items: int,
    read: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Whether the user of each event had each item before, bool [events, items]."""
    distinct, inverse = np.unique(items, return_inverse=True)
    # Each item's place among those that are asked for, from 1 on; 0 for all others. All that users had is
    # held against it, which is the whole cost: nothing is sorted or searched for.
    place_of = np.zeros(num_items, np.int32)
    place_of[distinct] = np.arange(1, len(distinct) + 1)
    starts = read(f"{HISTORY}_offsets").take(events[OWNERS[HISTORY]])
    counts = ends - starts
    places = place_of.take(read("seen").take(places_of(starts, counts)))
    there = np.flatnonzero(places)
    rows = np.searchsorted(counts.cumsum(), there, side="right")
    found = np.zeros((len(events), len(distinct)), bool)
    found[rows, places[there] - 1] = True
    return found.take(inverse, axis=1)
