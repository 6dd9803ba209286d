"""Events of a stream: some of them, those of two readings together, and the histories of their users."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.preparation.recent import RecentEvents
from recsuite.datasets.schema import ITEM, USER, Codes, Events, RawData, Schema, with_columns

if TYPE_CHECKING:
    import pandas


def restricted(raw: RawData, order: np.ndarray) -> RawData:
    """Return the data with some events, in their order, and the users and items of these alone.

    order: places of the events, int [n].
    """
    events = with_columns(raw.events, lambda column: column[order])
    frames = []
    for name, frame in ((USER, raw.users), (ITEM, raw.items)):
        used, positions = np.unique(getattr(events, name), return_inverse=True)
        # A table of nothing has no longest list.
        used = used if len(used) or not len(frame) else np.zeros(1, np.int64)
        frames.append(frame.iloc[used].reset_index(drop=True))
        setattr(events, name, positions.astype(np.int32))
    users, items = frames
    return dataclasses.replace(raw, events=events, users=users, items=items)


def with_histories(raw: RawData, schema: Schema, recent: RecentEvents) -> RawData:
    """Return the data with the histories of their users as the context, and with the items of these."""
    if not recent.number:
        return raw
    slots = recent.users.find(raw.users[schema.column_of(USER)].tolist())
    known = np.flatnonzero(slots >= 0)
    owner, item, label, times = recent.lists.of(slots[known])
    distinct, positions = np.unique(item, return_inverse=True)
    ids = [recent.items.ids[slot] for slot in distinct]
    # In the order of their ids, which is the same on any machine.
    by_id = sorted(range(len(ids)), key=ids.__getitem__)
    items, place = _with_ids(raw.items, schema.column_of(ITEM), [ids[number] for number in by_id])
    place = place[np.argsort(by_id)] if ids else place
    context = Events(
        known[owner].astype(np.int32), place[positions].astype(np.int32), label.astype(np.float32), times
    )
    return dataclasses.replace(raw, items=items, context=context)


def _with_ids(frame: pandas.DataFrame, column: str, ids: list[Any]) -> tuple[pandas.DataFrame, np.ndarray]:
    """Return a frame of items with rows for some ids too, and the positions of these, int64 [n].

    Rows that are added have no features: batches have only the ids of items of histories.
    """
    import pandas

    index = pandas.Index(frame[column])
    places = index.get_indexer(pandas.Index(ids, dtype=index.dtype)) if ids else np.zeros(0, np.int64)
    missing = np.flatnonzero(places < 0)
    if len(missing):
        added = [ids[place] for place in missing]
        empty = {
            name: added if name == column else [_missing_like(values.iloc[0])] * len(added)
            for name, values in frame.items()
        }
        places[missing] = len(frame) + np.arange(len(missing))
        frame = pandas.concat([frame, pandas.DataFrame(empty)], ignore_index=True)
    return frame, places


def _missing_like(value: Any) -> Any:
    """Return the missing value of a column with a value."""
    if isinstance(value, list):
        return []
    if isinstance(value, np.ndarray):
        return np.full_like(value, np.nan)
    return None


def joined(first: RawData, second: RawData, schema: Schema) -> RawData:
    """Return the events of two readings, the first ones first; the features are those of the second."""
    frames, moved = [], []
    for name in (USER, ITEM):
        frame, positions = _joined_frames(
            getattr(first, f"{name}s"), getattr(second, f"{name}s"), schema.column_of(name)
        )
        frames.append(frame)
        moved.append(positions)
    before, after = first.events, second.events
    number = len(before.user), len(after.user)
    joined = Events(
        np.concatenate([moved[0][before.user], after.user]).astype(np.int32),
        np.concatenate([moved[1][before.item], after.item]).astype(np.int32),
        np.concatenate([before.label, after.label]),
        np.concatenate([before.time, after.time]),
        _joined_numbers(before.weight, after.weight, number),
        {
            name: _joined_features(before.features.get(name), after.features.get(name), number)
            for name in {**before.features, **after.features}
        },
        {
            name: _joined_numbers(before.more_labels.get(name), after.more_labels.get(name), number)
            for name in {**before.more_labels, **after.more_labels}
        },
        {
            name: _joined_numbers(before.more_weights.get(name), after.more_weights.get(name), number)
            for name in {**before.more_weights, **after.more_weights}
        },
    )
    counts = {**first.events_per_file}
    for name, count in second.events_per_file.items():
        counts[name] = counts.get(name, 0) + count
    return dataclasses.replace(
        second, events=joined, users=frames[0], items=frames[1], events_per_file=counts
    )


def _joined_frames(
    first: pandas.DataFrame, second: pandas.DataFrame, column: str
) -> tuple[pandas.DataFrame, np.ndarray]:
    """Return the rows of both frames, and the positions in it of the rows of the first, int64."""
    import pandas

    positions = pandas.Index(second[column]).get_indexer(pandas.Index(first[column]))
    missing = np.flatnonzero(positions < 0)
    positions[missing] = len(second) + np.arange(len(missing))
    if not len(missing):
        return second, positions
    return pandas.concat([second, first.iloc[missing]], ignore_index=True), positions


def _joined_features(first: Any, second: Any, number: tuple[int, int]) -> Any:
    """Return a feature of the events of two readings; it is missing in a reading without it."""
    some = second if first is None else first
    if not isinstance(some, Codes):
        return _joined_numbers(first, second, number)
    before, after = (
        Codes(np.full(size, -1, np.int32), []) if codes is None else codes
        for codes, size in zip((first, second), number, strict=True)
    )
    values = sorted({*before.values, *after.values})
    place = {value: code for code, value in enumerate(values)}
    moved = [
        # The last entry is that of code -1.
        np.array([*(place[value] for value in codes.values), -1], np.int32)[codes.codes]
        for codes in (before, after)
    ]
    return Codes(np.concatenate(moved), values)


def _joined_numbers(first: Any, second: Any, number: tuple[int, int]) -> Any:
    if first is None and second is None:
        return None
    return np.concatenate(
        [
            np.full(size, np.nan, np.float32) if column is None else column
            for column, size in zip((first, second), number, strict=True)
        ]
    )
