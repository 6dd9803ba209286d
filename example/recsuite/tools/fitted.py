"""A model that knows the tables it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.schema import EVENT, HISTORY, ITEM, RATING, USER, RawData, Schema
from recsuite.errors import UserError, printable
from recsuite.serving.export import write_export
from recsuite.serving.request import HISTORY_RATINGS, SEEN, length_of
from recsuite.serving.served import ServedModel
from recsuite.serving.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas
    import torch

    from recsuite.datasets.metrics import Metrics
    from recsuite.datasets.tables.schema_file import TableSchema


class FittedModel(ServedModel):
    """A `ServedModel` that knows the tables it was trained on: what its users had, and what its items are.

    metrics: on the test, by name.
    """

    def __init__(
        self, snapshot: Snapshot, raw: RawData, tables: TableSchema, history: int, metrics: Metrics
    ) -> None:
        super().__init__(snapshot)
        self._tables = tables
        self.metrics = metrics
        self._users = Known(raw.users, snapshot.schema, USER)
        self._items = Known(raw.items, snapshot.schema, ITEM)
        self._events = EventsOfUsers(raw)
        self._history = history
        self.describe_items(self._items.values)

    def recommend(
        self,
        users: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        k: int = 10,
        *,
        event: Mapping[str, Any] | None = None,
        exclude: Any = SEEN,
        **options: Any,
    ) -> list[list[tuple[Any, float]]]:
        """As `ServedModel.recommend`; of users given by their ids all is known that the tables say, and what
        they had in them is left out.

        event: features of the event that is to come, such as {"device": "phone"}, the same for all users.
        """
        if users is None or isinstance(users, Mapping):
            return super().recommend(users, k, exclude=exclude, **options)
        length_of(self.snapshot.schema.user, users, self.snapshot.schema)
        values = self._told([*users])
        for name, value in (event or {}).items():
            values[name] = [value] * len(users)
        if isinstance(exclude, str) and exclude == SEEN:
            exclude = [self._seen(user) for user in users]
        return super().recommend(values, k, exclude=exclude, **options)

    def score(self, values: Any) -> torch.Tensor:
        """As `ServedModel.score`; or of a pandas.DataFrame of events, with the columns that the tables have.

        Of users and items all is known that the tables say, and of the event what the frame says. Predicted
        ratings lie on the scale of the labels.
        """
        if isinstance(values, Mapping):
            return super().score(values)
        schema, frame = self.snapshot.schema, values
        users, items = (self._ids(frame, entity) for entity in (USER, ITEM))
        told = {**self._told(users), **self._items.of(items)}
        columns = {**self._computed(frame), **frame}
        for feature in schema.features:
            if feature.entity == EVENT and feature.column in columns:
                told[feature.name] = [None if _is_missing(each) else each for each in columns[feature.column]]
        scores = super().score(told)
        if schema.label_kind == RATING:
            return scores.clamp(schema.lowest_label, schema.highest_label)
        return scores

    def _computed(self, frame: pandas.DataFrame) -> dict[str, list[int]]:
        """The features that are computed of the times of events, by their columns."""
        import pyarrow

        from recsuite.datasets.tables.derived import HOUR, WEEKDAY, derived, hour, weekday
        from recsuite.datasets.tables.times import times

        timestamp = self._tables.timestamp
        if timestamp is None or timestamp.column not in frame:
            return {}
        column = pyarrow.array(frame[timestamp.column], from_pandas=True)
        seconds = times(column, timestamp.column, timestamp.format).values
        parts = {HOUR: hour, WEEKDAY: weekday}
        calls = {feature.column: derived(feature.column) for feature in self.snapshot.schema.features}
        return {
            name: parts[call.function](seconds).tolist()
            for name, call in calls.items()
            if call is not None and call.function in parts
        }

    def save(self, folder: str | Path) -> None:
        """Write the model into a new folder, which `ServedModel.open` reads without the tables.

        Raises:
            UserError: when the folder is taken, or cannot be written.
        """
        write_export(self.snapshot, Path(folder))

    def _ids(self, frame: Any, entity: str) -> list[Any]:
        column = self.snapshot.schema.column_of(entity)
        if column not in frame:
            raise UserError(f"The events to score have no column {printable(column)}; add it.")
        ids: list[Any] = frame[column].tolist()
        return ids

    def _told(self, users: list[Any]) -> dict[str, Any]:
        """What a model receives of users: their features and, where it takes one, their history."""
        values = self._users.of(users)
        if HISTORY in self.snapshot.tables:
            items = self._items.ids
            last = [self._events.of(self._users.places.get(user, -1), self._history) for user in users]
            values[HISTORY] = [[items[place] for place in places.tolist()] for places, _ in last]
            shown = self.snapshot.schema.shown
            values[HISTORY_RATINGS] = [[shown(label) for label in labels.tolist()] for _, labels in last]
        return values

    def _seen(self, user: Any) -> list[Any]:
        places, _ = self._events.of(self._users.places.get(user, -1))
        return [self._items.ids[place] for place in places.tolist()]


class Known:
    """What the tables say of users or items."""

    def __init__(self, frame: pandas.DataFrame, schema: Schema, entity: str) -> None:
        self.name = schema.name_of(entity)
        self.values = {
            feature.name: [None if _is_missing(value) else value for value in frame[feature.column].tolist()]
            for feature in schema.features
            if feature.entity == entity and feature.column in frame
        }
        self.ids: list[Any] = self.values[self.name]
        self.places = {each: place for place, each in enumerate(self.ids)}

    def of(self, ids: Sequence[Any]) -> dict[str, Any]:
        """The features of some of them; of one that is not there, nothing but the id."""
        places = [self.places.get(each) for each in ids]
        nothing: dict[str, Any] = {
            name: [] if isinstance(next(iter(values), None), list) else None
            for name, values in self.values.items()
        }
        found = {
            name: [nothing[name] if place is None else values[place] for place in places]
            for name, values in self.values.items()
        }
        return {**found, self.name: [*ids]}


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and np.isnan(value)


class EventsOfUsers:
    """The items and labels of each user, the oldest first."""

    def __init__(self, raw: RawData) -> None:
        events = raw.events
        order = np.lexsort([events.time, events.user])
        self._items, self._labels = events.item[order], events.label[order]
        counts = np.bincount(events.user, minlength=len(raw.users))
        self._ends = np.concatenate([[0], np.cumsum(counts)])

    def of(self, place: int, longest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the last items of a user, at most `longest`, and their labels; nobody has place -1."""
        first, end = self._ends[place : place + 2] if place >= 0 else (0, 0)
        if longest is not None:
            first = max(first, end - longest)
        return self._items[first:end], self._labels[first:end]
