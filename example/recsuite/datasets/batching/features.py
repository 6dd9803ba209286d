"""What events have: the table rows and numbers of their users, of their items and of their own.

Read from memory-mapped columns, by the positions of the events. A worker imports this module: no torch, no
pandas.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recsuite.datasets.columns import Columns, MappedColumn
from recsuite.datasets.schema import ENTITIES, EVENT, UNKNOWN_ROW


class Lists(NamedTuple):
    """A feature with lists for n events: the values, list after list, and how many are each event's, [n].

    padding: how many unknown rows stand for a row that pads the batch.
    """

    values: np.ndarray
    counts: np.ndarray
    padding: int


class EventFeatures:
    """The features of events by position. Pickles to paths and names; columns are mapped where they are first
    read.
    """

    def __init__(self, columns: Columns, history: int) -> None:
        self.folder = columns.folder
        self.schema = columns.schema
        self.tables = columns.tables
        self.numbers = columns.numbers
        self.history = history
        self._with_lists = {
            entity: [
                table.name for table in self.tables if table.feature.multi and table.feature.entity == entity
            ]
            for entity in ENTITIES
        }
        self._has_event_features = any(table.feature.entity == EVENT for table in self.tables)
        self._columns: dict[str, MappedColumn] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A mapping cannot be sent to a worker, which makes its own.
        return {**self.__dict__, "_columns": {}}

    def check(self) -> None:
        """Refuse to continue with a file that was cut: touching a page beyond its end would end the process
        by a signal, and say nothing.

        Raises:
            UserError: see `MappedColumn.check`.
        """
        for column in self._columns.values():
            column.check()

    def rows(self, positions: np.ndarray, split: str) -> np.ndarray:
        """What `rows.npy` holds of some events, int32 [n, 4]."""
        if split != "catalogue":
            return self.column("rows").take(positions, axis=0)
        # As if the first user had an event with each item, before any other: who asks looks at items alone.
        rows = np.zeros((len(positions), 4), np.int32)
        rows[:, 1] = positions
        return rows

    def find(
        self, rows: np.ndarray, positions: np.ndarray, split: str
    ) -> tuple[list[np.ndarray], list[Lists]]:
        """Table rows of the features with one value, [features, n] for users, items and, where they have some
        of their own, events; and those with lists.
        """
        single, lists = [], []
        # Of the four columns the first two are users and items.
        for entity, ids in zip(ENTITIES, rows.T, strict=False):
            features = self.column(f"{self.schema.name_of(entity)}_features").take(ids, axis=0).T
            names = self._with_lists[entity]
            num_single = len(features) - 2 * len(names)
            single.append(features[:num_single])
            # A feature with lists has two columns: where its values begin, and how many they are.
            pairs = zip(features[num_single::2], features[num_single + 1 :: 2], strict=True)
            for name, (starts, counts) in zip(names, pairs, strict=True):
                known = self.column(f"{name}_values").take(places_of(starts, counts))
                lists.append(Lists(known, counts, padding=1))
        if self._has_event_features:
            single.append(self._of_events("features", positions, split).T)
        return single, lists

    def _of_events(self, kind: str, positions: np.ndarray, split: str) -> np.ndarray:
        """The "features" or "numbers" of some events, [n, columns]; those of a catalogue are unknown."""
        column = self.column(f"{EVENT}_{kind}")
        if split != "catalogue":
            return column.take(positions, axis=0)
        nothing = np.nan if kind == "numbers" else UNKNOWN_ROW
        return np.full((len(positions), column.shape[1]), nothing, column.dtype)

    def find_numbers(self, rows: np.ndarray, positions: np.ndarray, split: str) -> list[np.ndarray]:
        """The dense numbers of users, items and events, float32 [n, numbers] each."""
        having = {feature.entity for feature in self.numbers}
        # Of the four columns the first two are users and items.
        found = [
            self.column(f"{self.schema.name_of(entity)}_numbers").take(ids, axis=0)
            if entity in having
            else np.zeros((len(rows), 0), np.float32)
            for entity, ids in zip(ENTITIES, rows.T, strict=False)
        ]
        if EVENT in having:
            found.append(self._of_events("numbers", positions, split))
        return found

    def find_history(self, rows: np.ndarray, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """What the users had before, event after event: table rows and the bits of labels, [sum, 2]; and how
        many each event has of them, [n]. prefix: of the columns that hold it.
        """
        begins, ends = self.column(f"{prefix}history_offsets").take(rows[:, 0]), rows[:, 3]
        starts = np.maximum(begins, ends - self.history)
        counts = ends - starts
        return self.column(f"{prefix}history").take(places_of(starts, counts), axis=0), counts

    def join(
        self, batch_size: int, single: list[np.ndarray], lists: list[Lists], empty: Callable[..., np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The values and lengths of a `Batch`, of what was found for its real rows."""
        num_real, num_single = single[0].shape[1], sum(map(len, single))
        num_padding = batch_size - num_real
        lengths = empty((len(self.tables), batch_size), np.int32)
        last = num_single * batch_size
        values = empty(last + sum(len(part.values) + part.padding * num_padding for part in lists), np.int64)
        lengths[:num_single] = 1
        # All features with one value are joined by one call: a small batch costs calls more than bytes.
        columns = values[:last].reshape(num_single, batch_size)
        np.concatenate(single, out=columns[:, :num_real])
        columns[:, num_real:] = UNKNOWN_ROW
        for place, part in enumerate(lists, start=num_single):
            lengths[place, :num_real], lengths[place, num_real:] = part.counts, part.padding
            first, last = last, last + len(part.values)
            values[first:last] = part.values
            first, last = last, last + part.padding * num_padding
            values[first:last] = UNKNOWN_ROW
        return values, lengths.reshape(-1)

    def column(self, name: str) -> np.ndarray:
        """A column, mapped from disk."""
        folder = Path(self.folder)
        if not self._columns:
            # All at once: a training continues when the files are removed, and comes to the test at its end.
            self._columns = {path.stem: MappedColumn(path) for path in sorted(folder.glob("*.npy"))}
        if name not in self._columns:
            self._columns[name] = MappedColumn(folder / f"{name}.npy")
        return self._columns[name].values


def places_of(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places start, start + 1, ... of every list, list after list, int64 [sum of counts]."""
    # They may be columns of a table of int32: numpy is slow where types differ and numbers lie apart.
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    ends = counts.cumsum()
    places = np.arange(ends[-1] if len(ends) else 0)
    # The n-th value of a list lies n places after its start.
    places += (starts - (ends - counts)).repeat(counts)
    return places
