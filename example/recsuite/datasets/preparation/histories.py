"""What each user had before each event: of the training events, and for the test of those of validation too.

Stored once for each user, not once for each event: an event knows where in it its own history ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Stored:
    """The events in the order in which they are stored: positions of users and items, int32 [events]; label,
    float32; time, int64.
    """

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    time: np.ndarray


def write_histories(
    folder: Path, stored: Stored, item_rows: np.ndarray, sizes: tuple[int, int, int]
) -> tuple[np.ndarray, int]:
    """Write what users had, as training and validation know it, and as the test does; returns where the
    histories of all events end, int32 [events], and how long the longest is.

    item_rows: the table row of each item, int32 [items].
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    ends, lengths = _write_history(folder, "", stored, item_rows, num_train)
    # A model in use knows the validation events when a test event comes. A training event must not: under a
    # random split they lie between those of the training.
    ends_in_test, lengths_in_test = _write_history(folder, "test_", stored, item_rows, num_known)
    ends[num_known:], lengths[num_known:] = ends_in_test[num_known:], lengths_in_test[num_known:]
    return ends, int(lengths.max())


def _write_history(
    folder: Path, prefix: str, stored: Stored, item_rows: np.ndarray, num_known: int
) -> tuple[np.ndarray, np.ndarray]:
    """Write the first events, which are known, user after user; returns for all events where their histories
    end, int32 [events], and how long they are.
    """
    # User after user, each in the order of time: lexsort goes by its last key first, and is stable.
    order = np.lexsort([stored.time, stored.user])
    # Known events are stored first, so their place tells.
    is_known = order < num_known
    # How many known events stand before each one in this order: it is a place in the stored history.
    before: np.ndarray = np.cumsum(is_known) - is_known
    # Events of one user in one second do not know of each other: the histories of all of them end where that
    # of the first does.
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(stored.user[order]) != 0) | (np.diff(stored.time[order]) != 0)
    ends = np.empty(len(order), np.int32)
    ends[order] = before[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    known = order[is_known]
    # Table rows, not positions of items, so that a history goes into a batch as it is.
    rows, bits = item_rows[stored.item[known]], stored.label[known].view(np.int32)
    np.save(folder / f"{prefix}history.npy", np.stack([rows, bits], axis=1))
    np.save(folder / f"{prefix}seen.npy", stored.item[known])
    counts = np.bincount(stored.user[known], minlength=int(stored.user.max()) + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    np.save(folder / f"{prefix}history_offsets.npy", offsets)
    return ends, ends - offsets[stored.user]
