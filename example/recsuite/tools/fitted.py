"""A model that knows the tables it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.config.sections.data import DataConfig
from recsuite.datasets.schema import AUDIENCE, EVENT, HISTORY, ITEM, RATING, USER, Feature, RawData, Schema
from recsuite.datasets.tables.derived import (
    AGE_DAYS,
    HOUR,
    USER_DAY,
    age_days,
    dates_name,
    derived,
    hour,
    user_days,
    weekday,
)
from recsuite.datasets.tables.parts.frame import frame_of, parsed, raw_values
from recsuite.datasets.tables.parts.wanted import ID, TIME, Wanted
from recsuite.datasets.tables.schema_file import CATEGORY, NUMBER
from recsuite.errors import UserError, printable
from recsuite.serving.display.events import EventsOf, ages_in
from recsuite.serving.export import write_export
from recsuite.serving.request import HISTORY_AGES, HISTORY_RATINGS, SEEN, check_values, length_of, type_of
from recsuite.serving.served import ServedModel
from recsuite.serving.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas
    import torch

    from recsuite.datasets.metrics import Metrics
    from recsuite.datasets.tables.schema_file import TableSchema


class FittedModel(ServedModel):
    """A `ServedModel` that knows the tables it was trained on: what its users had, and what its items are.

    lists: the flags that say which lists the model receives; metrics: on the test, by name.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        raw: RawData,
        tables: TableSchema,
        lists: DataConfig,
        metrics: Metrics,
    ) -> None:
        super().__init__(snapshot)
        self._tables = tables
        self.metrics = metrics
        self._users = Known(raw.users, snapshot.schema, USER)
        self._items = Known(raw.items, snapshot.schema, ITEM)
        events = raw.events
        self._events = EventsOf(events.user, events.item, raw, len(raw.users))
        self._audiences = EventsOf(events.item, events.user, raw, len(raw.items))
        # Where events share lists all counts, whenever it was.
        self._shares, self._longest = lists.shares_lists, lists.lists
        described: dict[str, Any] = self._items.values
        if AUDIENCE in snapshot.tables:
            who = [self._audiences.of(place, self._longest[AUDIENCE])[0] for place in range(len(raw.items))]
            described = {**described, AUDIENCE: [self._named(places) for places in who]}
        self.describe_items(described)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        users, items = len(self._users.ids), len(self._items.ids)
        return f"FittedModel({users:,} users, {items:,} items, test: {shown})"

    def _named(self, places: np.ndarray) -> list[Any]:
        """The raw ids of users by their positions."""
        return [self._users.ids[place] for place in places.tolist()]

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
        coming = self._coming(event)
        if users is None or isinstance(users, Mapping):
            return super().recommend(_with(users, coming, options), k, exclude=exclude, **options)
        length_of(self.snapshot.schema.user, users, self.snapshot.schema)
        known = self._ids([*users], USER)
        values = {**self._told(known), **{name: [value] * len(known) for name, value in coming.items()}}
        if isinstance(exclude, str) and exclude == SEEN:
            exclude = [self._seen(user) for user in known]
        return super().recommend(values, k, exclude=exclude, **options)

    def score(self, values: Any) -> torch.Tensor:
        """As `ServedModel.score`; or of a table of events as `fit` takes it, with its columns.

        Of users and items all is known that the tables say, and of the event what the frame says. Where it
        has the column of times, a user's history ends strictly before the row's own; without it, all that
        the user had counts, the row's own event too if it is in the tables, and what is computed of times is
        missing. To the reported metrics nothing of the test was known; here what a user had of the test
        before a row is. Where events share lists (--others) all that a user had counts, whenever it was, but
        never the row's own item, and likewise all who had the item. Predicted ratings lie on the scale of the
        labels.
        """
        if isinstance(values, Mapping):
            return super().score(values)
        schema, frame = self.snapshot.schema, frame_of(values, "values")
        users, items = (self._ids(self._column(frame, entity), entity) for entity in (USER, ITEM))
        time = self._times(frame)
        told = {**self._told(users, time, items if self._shares else None), **self._items.of(items)}
        if AUDIENCE in self.snapshot.tables:
            told[AUDIENCE] = self._who_had(items, users, time)
        for feature in schema.features:
            if feature.entity == EVENT and feature.column in frame:
                told[feature.name] = self._event_values(feature, frame[feature.column])
            elif feature.entity == EVENT and time is not None and derived(feature.column):
                told[feature.name] = self._computed(feature, time, {USER: users, ITEM: items})
        scores = super().score(told)
        if schema.label_kind == RATING:
            return scores.clamp(schema.lowest_label, schema.highest_label)
        return scores

    def _times(self, frame: pandas.DataFrame) -> np.ndarray | None:
        """When each event was, int64 [n] in seconds since 1970; None where the frame does not say."""
        timestamp = self._tables.timestamp
        if timestamp is None or timestamp.column not in frame:
            return None
        found: np.ndarray = parsed(
            frame[timestamp.column], Wanted(timestamp.column, TIME, EVENT, timestamp.format)
        )
        return found

    def _computed(self, feature: Feature, time: np.ndarray, ids: Mapping[str, list[Any]]) -> list[Any]:
        """A feature that is computed of the times of events, and of whose users and items they are."""
        call = derived(feature.column)
        assert call is not None
        if feature.column == USER_DAY:
            return list(user_days(ids[USER], time))
        if call.function != AGE_DAYS:
            return list((hour if call.function == HOUR else weekday)(time).tolist())
        known = self._users if call.of == USER else self._items
        ages = age_days(time, known.days(call.column, ids[call.of]))
        return [None if np.isnan(age) else age for age in ages.tolist()]

    def _coming(self, event: Any) -> dict[str, Any]:
        """The features of the event that is to come, as the training has such values."""
        if event is not None and not isinstance(event, Mapping):
            raise UserError(
                'event takes features of the coming event by their names, such as {"device": "phone"}, and '
                f"got {printable(repr(event))}."
            )
        features = {each.name: each for each in self.snapshot.schema.features if each.entity == EVENT}
        return {
            name: self._event_values(features[name], [value])[0] if name in features else value
            for name, value in (event or {}).items()
        }

    def _event_values(self, feature: Feature, values: Any) -> list[Any]:
        kind = NUMBER if feature.number else CATEGORY
        is_held = feature in self.snapshot.features and not feature.number
        known = self.snapshot.kind_of(feature.name) if is_held else None
        return raw_values(values, Wanted(feature.column, kind, EVENT), known)

    def save(self, folder: str | Path) -> None:
        """Write the model into a new folder, which `ServedModel.open` reads without the tables.

        Raises:
            UserError: when the folder is taken, or cannot be written.
        """
        write_export(self.snapshot, Path(folder))

    def _column(self, frame: pandas.DataFrame, entity: str) -> Any:
        column = self.snapshot.schema.column_of(entity)
        if column not in frame:
            raise UserError(f"The events to score have no column {printable(column)}; add it.")
        return frame[column]

    def _ids(self, values: Any, entity: str) -> list[Any]:
        """Ids as the training has them."""
        schema, known = self.snapshot.schema, (self._users if entity == USER else self._items).places
        # Arrow would call them a column of lists.
        nested = [each for each in values if isinstance(each, (list, tuple, set, dict))]
        check_values(schema.name_of(entity), nested, type_of(known))
        return raw_values(values, Wanted(schema.column_of(entity), ID, entity), type_of(known))

    def _told(
        self, users: list[Any], time: np.ndarray | None = None, items: list[Any] | None = None
    ) -> dict[str, Any]:
        """What a model receives of users: their features and, where it takes one, their history.

        time: strictly before which each history ends, int64 [n]; None takes all of it. items: those of the
        events, which are in no history that holds what came later.
        """
        values = self._users.of(users)
        if self.snapshot.takes_history:
            ends, own = self._ends(time, len(users)), self._own(items, self._items, len(users))
            found = [
                self._events.of(self._users.places.get(user, -1), self._longest[HISTORY], end, item)
                for user, end, item in zip(users, ends, own, strict=True)
            ]
            ids, shown = self._items.ids, self.snapshot.schema.shown
            values[HISTORY] = [[ids[place] for place in places.tolist()] for places, _, _ in found]
            values[HISTORY_RATINGS] = [[shown(label) for label in labels.tolist()] for _, labels, _ in found]
            if self.snapshot.head.takes_ages:
                values[HISTORY_AGES] = [
                    ages_in(times, end) for (_, _, times), end in zip(found, ends, strict=True)
                ]
        return values

    def _who_had(self, items: list[Any], users: list[Any], time: np.ndarray | None) -> list[list[Any]]:
        """Who had some items: all others, or those strictly before a time."""
        ends, own = self._ends(time, len(items)), self._own(users, self._users, len(items))
        return [
            self._named(
                self._audiences.of(self._items.places.get(item, -1), self._longest[AUDIENCE], end, user)[0]
            )
            for item, end, user in zip(items, ends, own, strict=True)
        ]

    def _ends(self, time: np.ndarray | None, number: int) -> list[int | None]:
        """Before when lists end: never where events share them."""
        return [None] * number if time is None or self._shares else time.tolist()

    def _own(self, ids: list[Any] | None, known: Known, number: int) -> list[int]:
        """Who is in no list of others: positions, -1 for nobody."""
        return [-1] * number if ids is None else [known.places.get(each, -1) for each in ids]

    def _seen(self, user: Any) -> list[Any]:
        places, *_ = self._events.of(self._users.places.get(user, -1))
        return [self._items.ids[place] for place in places.tolist()]


def _with(
    users: Mapping[str, Sequence[Any]] | None, coming: Mapping[str, Any], options: Mapping[str, Any]
) -> Mapping[str, Sequence[Any]] | None:
    """Users by their features, or by the `events` of the options, with the event that is to come."""
    given = next(iter((users or {}).values()), options.get("events"))
    if not coming or given is None:
        return users
    return {**(users or {}), **{name: [value] * len(given) for name, value in coming.items()}}


class Known:
    """What the tables say of users or items."""

    def __init__(self, frame: pandas.DataFrame, schema: Schema, entity: str) -> None:
        self.name = schema.name_of(entity)
        self.values = {
            feature.name: [None if _is_missing(value) else value for value in frame[feature.column].tolist()]
            for feature in schema.features
            if feature.entity == entity and feature.column in frame
        }
        self._days = {str(name): frame[name].to_numpy() for name in frame if derived(str(name))}
        self._entity = entity
        self.ids: list[Any] = self.values[self.name]
        self.places = {each: place for place, each in enumerate(self.ids)}

    def days(self, column: str, ids: Sequence[Any]) -> np.ndarray:
        """The dates of some of them in a column, float64 [n] in days since 1970; NaN where there is none."""
        days = np.append(self._days[dates_name(self._entity, column)], np.nan)
        found: np.ndarray = days[[self.places.get(each, -1) for each in ids]]
        return found

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
