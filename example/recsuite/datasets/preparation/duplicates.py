"""Several events of one user and one item: which of them count.

Kept apart, such events give the answer of a test away: under --split random one of them may be trained on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from recsuite.datasets.schema import Events, RawData, Schema, events_at
from recsuite.errors import counted

# What counts, by the value of --duplicates.
COUNTS = {
    "last": "the last in time counts",
    "first": "the first in time counts",
    "mean": "their mean counts, at the time of the last",
    "keep": "all of them count",
}


def settle(raw: RawData, how: str, schema: Schema) -> RawData:
    """A data set with one event of a user and an item, or with "keep" as it is; says what was repeated."""
    pairs = _pairs(raw.events)
    places = np.flatnonzero(_is_repeated(pairs))
    if len(places) == 0:
        return raw
    # Pair after pair, each in the order of time, and of one time in the order of the file.
    places = places[np.lexsort([raw.events.time[places], pairs[places]])]
    begins = np.flatnonzero(np.diff(pairs[places], prepend=-1))
    note = (
        f"{len(places):,} {schema.labels} are of a {schema.item} that the same {schema.user} rated more than "
        f"once ({counted(len(begins), 'such pair')}): {COUNTS[how]} (--duplicates {how})"
    )
    raw = dataclasses.replace(raw, skipped=[*raw.skipped, note])
    if how == "keep":
        return raw
    ends = np.append(begins[1:], len(places)) - 1
    counting = places[begins if how == "first" else ends]
    label = raw.events.label.copy()
    if how == "mean":
        # The mean goes to the last of the pair, and so to its time.
        sums = np.add.reduceat(label[places], begins, dtype=np.float64)
        label[counting] = sums / (ends - begins + 1)
    is_left = np.ones(len(pairs), bool)
    is_left[places] = False
    is_left[counting] = True
    return _only(dataclasses.replace(raw, events=dataclasses.replace(raw.events, label=label)), is_left)


def describe_leak(events: Events, test: np.ndarray, schema: Schema) -> list[str]:
    """What to say where a split comes between events of one pair. test: places of its events."""
    pairs = _pairs(events)
    is_test = np.zeros(len(pairs), bool)
    is_test[test] = True
    number = int(np.isin(pairs[is_test], pairs[~is_test]).sum())
    if number == 0:
        return []
    return [
        f"{number:,} of {len(test):,} test {schema.labels} are of a {schema.user} and a {schema.item} that "
        f"training or validation has a {schema.label} of too: the metrics flatter the model"
    ]


def _pairs(events: Events) -> np.ndarray:
    """A number for each user and item, int64, one an event."""
    pairs: np.ndarray = events.user.astype(np.int64) * (int(events.item.max(initial=0)) + 1) + events.item
    return pairs


def _is_repeated(pairs: np.ndarray) -> np.ndarray:
    """Whether each number is there more than once, bool."""
    # Sorting finds that none is in a tenth of the time that hashing takes, and seldom is one.
    ordered = np.sort(pairs)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.isin(pairs, repeated) if len(repeated) else np.zeros(len(pairs), bool)


def _only(raw: RawData, is_left: np.ndarray) -> RawData:
    return dataclasses.replace(
        raw,
        events=events_at(raw.events, is_left),
        official_test=None if raw.official_test is None else raw.official_test[is_left],
        oracle=None if raw.oracle is None else raw.oracle[is_left],
        num_skipped=raw.num_skipped + int((~is_left).sum()),
    )
