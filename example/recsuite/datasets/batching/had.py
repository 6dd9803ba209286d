"""Which of the items that compete for an event its user had before.

They are no competitors: nobody chooses again what he had, and who is shown items is not shown those. A worker
imports this module: no torch, no pandas.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from recsuite.datasets.batching.lists import OWNERS
from recsuite.datasets.batching.places import places_of
from recsuite.datasets.schema import HISTORY, ITEM


def bytes_of_group(batch_size: int, competitors: int) -> int:
    """How many bytes have a bit for each row of a group, see `Batch`."""
    return -(-min(batch_size, competitors) // 8)


def mark_had(
    found: np.ndarray, events: np.ndarray, num_items: int, read: Callable[[str], np.ndarray]
) -> None:
    """Fill in what training events had before, see `Batch`. Takes time for all that each of their users had.

    found: uint8 [B, bytes], of zeros; events: records, [n]; read: a column by its name.
    """
    size = 8 * found.shape[1]
    for begin in range(0, len(events), size):
        rows = found[begin : begin + size]
        had = _had(events[begin : begin + size], num_items, read)
        packed = np.packbits(had, axis=1, bitorder="little")
        rows[: len(packed), : packed.shape[1]] = packed


def _had(events: np.ndarray, num_items: int, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Whether the user of each event had the item of each other one, strictly before, bool [n, n]."""
    distinct, inverse = np.unique(events[ITEM], return_inverse=True)
    # Each item's place among those of the group, from 1 on; 0 for all others. All that users had is held
    # against it, which is the whole cost: nothing is sorted or searched for.
    place_of = np.zeros(num_items, np.int32)
    place_of[distinct] = np.arange(1, len(distinct) + 1)
    starts = read(f"{HISTORY}_offsets").take(events[OWNERS[HISTORY]])
    counts = events[f"{HISTORY}_end"] - starts
    places = place_of.take(read("seen").take(places_of(starts, counts)))
    there = np.flatnonzero(places)
    rows = np.searchsorted(counts.cumsum(), there, side="right")
    found = np.zeros((len(events), len(distinct)), bool)
    found[rows, places[there] - 1] = True
    return found.take(inverse, axis=1)
