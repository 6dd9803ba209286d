"""What events have: the table rows and numbers of their users, of their items and of their own.

Read from memory-mapped columns, by the positions of the events. A worker imports this module: no torch, no
pandas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recsuite.config.sections import DataConfig
from recsuite.datasets.batching.lists import OWNERS, Read, Shared, Turns, before, in_order, others
from recsuite.datasets.batching.order import turns_of
from recsuite.datasets.batching.places import places_of, take_lists
from recsuite.datasets.batching.recency import Ages, ages_of
from recsuite.datasets.columns import NOWHERE, Columns, MappedColumn
from recsuite.datasets.schema import AUDIENCE, ENTITIES, EVENT, HISTORY, ITEM, UNKNOWN_ROW, USER

# One of so many training events counts as that of an unknown user, so that row 0 learns what a new user is
# like, and few enough users lose an event to it.
FORGOTTEN_EVERY = 64


class Lists(NamedTuple):
    """A feature with lists for n events: the values, list after list, and how many are each event's, [n].

    padding: how many unknown rows stand for a row that pads the batch.
    """

    values: np.ndarray
    counts: np.ndarray
    padding: int


class Found(NamedTuple):
    """What was found of n events: table rows of features with one value, [features, n], and dense numbers,
    [n, numbers], of their users, of their items and of their own; and the features with lists.
    """

    single: list[np.ndarray]
    numbers: list[np.ndarray]
    lists: list[Lists]

    def behind(self, other: Found) -> Found:
        """Of others and, behind them, of these."""
        pairs = zip(other.lists, self.lists, strict=True)
        return Found(
            [np.concatenate(both, axis=1) for both in zip(other.single, self.single, strict=True)],
            [np.concatenate(both) for both in zip(other.numbers, self.numbers, strict=True)],
            [
                Lists(
                    np.concatenate([before.values, mine.values]),
                    np.concatenate([before.counts, mine.counts]),
                    mine.padding,
                )
                for before, mine in pairs
            ],
        )


class Asked(NamedTuple):
    """For which events lists are wanted: those of a split; draws: what tells one sample from another."""

    split: str
    draws: tuple[int, ...]


class EventFeatures:
    """The features of events by position. Pickles to paths and names; columns are mapped where they are first
    read.
    """

    def __init__(self, columns: Columns, config: DataConfig) -> None:
        self.folder = columns.folder
        self.num_train = columns.num_train
        self.schema = columns.schema
        self.tables = columns.tables
        # How long they are at most, where each event has one of its own.
        self.lists = {
            name: most
            for name, most in config.lists.items()
            if name in [table.name for table in columns.tables]
        }
        # And where events share them.
        self.most_others = config.others if config.shares_lists else 0
        self._with_lists = {
            entity: [
                table.name for table in self.tables if table.feature.multi and table.feature.entity == entity
            ]
            for entity in ENTITIES
        }
        self._of_events = [table.name for table in self.tables if table.feature.entity == EVENT]
        self._columns: dict[str, MappedColumn] = {}
        self._trained: np.ndarray | None = None
        # By the place of a table, the column with the ids of what is found for it.
        self._ids = {
            place: f"{self.schema.vocabulary_of(table.name)}_ids"
            for place, table in enumerate(self.tables)
            if table.feature.is_dynamic
        }

    def __getstate__(self) -> dict[str, Any]:
        # A mapping cannot be sent to a worker, which makes its own.
        return {**self.__dict__, "_columns": {}, "_trained": None}

    def check(self) -> None:
        """Refuse to continue with a file that was cut: touching a page beyond its end would end the process
        by a signal, and say nothing.

        Raises:
            UserError: see `MappedColumn.check`.
        """
        for column in self._columns.values():
            column.check()

    def events(self, positions: np.ndarray, split: str) -> np.ndarray:
        """The records of some events, see `record_type`, [n]."""
        rows = self.column("rows")
        if split != "catalogue":
            return rows.take(positions)
        # As if the first user had an event with each item, before any other, of which nothing else is known:
        # who asks looks at items alone.
        events = np.zeros(len(positions), rows.dtype)
        events[ITEM], events["features"], events["numbers"] = positions, UNKNOWN_ROW, np.nan
        for name in OWNERS:
            events[f"{name}_place"] = NOWHERE
        # Of an item all that had it.
        events[f"{AUDIENCE}_end"] = self.column(f"{AUDIENCE}_offsets").take(positions + 1)
        return events

    def find(self, events: np.ndarray) -> Found:
        """What the users, the items and the events of some records have."""
        entities = {
            entity: self.column(f"{self.schema.name_of(entity)}_features").take(events[entity])
            for entity in ENTITIES
        }
        records = [*entities.values(), events]
        lists = []
        for entity, record in entities.items():
            places = record["lists"].transpose(1, 2, 0)
            for name, (starts, counts) in zip(self._with_lists[entity], places, strict=True):
                known = self.column(f"{name}_values").take(places_of(starts, counts))
                lists.append(Lists(known, counts, padding=1))
        return Found(
            [record["features"].T for record in records], [record["numbers"] for record in records], lists
        )

    def find_items(self, items: np.ndarray) -> Found:
        """What items alone have, as if of an unknown user without a history. items: their positions, int64
        [n].
        """
        found = self.find(self.events(items, "catalogue"))
        found.single[ENTITIES.index(USER)][:] = UNKNOWN_ROW
        nothing = Lists(np.zeros(0, np.int64), np.zeros(len(items), np.int64), padding=0)
        found.lists.extend([nothing] * len(self.lists))
        return found

    def trained_items(self) -> np.ndarray:
        """The positions of the items that the training has, int32."""
        if self._trained is None:
            offsets = self.column(f"{AUDIENCE}_offsets")
            self._trained = np.flatnonzero(np.diff(offsets)).astype(np.int32)
        return self._trained

    def find_order(self, events: np.ndarray, positions: np.ndarray, turns: Turns | None, split: str) -> Read:
        """What events read of the orders of their users. turns: where they stand, where that is known
        already.
        """
        prefix = "test_" if split == "test" else ""
        if split == "catalogue":
            nowhere = np.zeros(len(events), np.int64)
            turns = Turns(nowhere, nowhere, in_runs=False)
        elif turns is None:
            turns = turns_of(events, positions, self.lists[HISTORY], prefix, self.column)
        # The positions of a catalogue are no events.
        return in_order(turns, self.column("time").take(positions, mode="clip"), prefix, self.column)

    def find_lists(self, events: np.ndarray, asked: Asked) -> dict[str, Shared]:
        """Who had what, by the names of the lists that the tables have."""
        prefix = "test_" if asked.split == "test" else ""
        if self.most_others:
            return {
                name: others(name, events, self.most_others, prefix, self.column, asked.draws)
                for name in self.lists
            }
        return {name: before(name, events, most, prefix, self.column) for name, most in self.lists.items()}

    def ages(self, positions: np.ndarray, history: Shared, split: str) -> Ages:
        """How old the items of the histories of events are."""
        column = self.column("test_history_time" if split == "test" else "history_time")
        times = take_lists(column, history.starts, history.counts)
        # The positions of a catalogue are no events, and its histories are empty.
        event_times = self.column("time").take(positions, mode="clip").repeat(history.counts)
        return ages_of(history, times, event_times)

    def rarities(self, events: np.ndarray, own: np.ndarray, share: float, found: np.ndarray) -> None:
        """Fill in, for each training event, `share` over the number of those of its user, of its item, of
        all, and of those with the same row of each of its own features, float32 [3 + features, n].

        own: the rows of these, int32 [features, n], unknown where the event is to have nothing of its own.
        """
        # Without the event's own weight: how much is known of a row is a matter of its events' number.
        found[:] = share
        for place, (name, owner) in enumerate(OWNERS.items()):
            offsets = self.column(f"{name}_offsets")
            found[place] /= offsets.take(events[owner] + 1) - offsets.take(events[owner])
        found[len(OWNERS)] /= self.num_train
        for name, rows, rarity in zip(self._of_events, own, found[len(OWNERS) + 1 :], strict=True):
            counts = self.column(f"{name}_counts").take(rows)
            # Nearly all that train the unknown row are those that forget what they have.
            counts += (rows == UNKNOWN_ROW) * np.int32(-(-self.num_train // FORGOTTEN_EVERY))
            rarity /= counts

    def join(
        self, batch_size: int, single: list[np.ndarray], lists: list[Lists], empty: Callable[..., np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The values and lengths of a `Batch`, of what was found for its real rows: ids of dynamic tables,
        rows of all others.
        """
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
        self._turn_into_ids(values, [batch_size] * num_single + [_size(part, num_padding) for part in lists])
        return values, lengths.reshape(-1)

    def _turn_into_ids(self, values: np.ndarray, sizes: list[int]) -> None:
        """Put ids in the place of what the columns have of dynamic tables. sizes: values of each table."""
        ends = [0, *itertools.accumulate(sizes)]
        for place, name in self._ids.items():
            part = slice(ends[place], ends[place + 1])
            # What stands for an unknown value has an id too, the first.
            values[part] = self.column(name).take(values[part])

    def column(self, name: str) -> np.ndarray:
        """A column, mapped from disk."""
        if not self._columns:
            # All at once: a training continues when the files are removed, and comes to the test at its end.
            paths = sorted(Path(self.folder).glob("*.npy"))
            self._columns = {path.stem: MappedColumn(path) for path in paths}
        if name not in self._columns:
            self._columns[name] = MappedColumn(Path(self.folder) / f"{name}.npy")
        return self._columns[name].values


def _size(part: Lists, num_padding: int) -> int:
    return len(part.values) + part.padding * num_padding
