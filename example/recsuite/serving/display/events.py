"""What data tell of users and items: their features, what each user had, and which users had each item."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.schema import AUDIENCE, HISTORY, ITEM, USER, RawData, Schema
from recsuite.serving.request import HISTORY_AGES, HISTORY_RATINGS
from recsuite.serving.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas


def last_of(number: int, longest: int | None) -> slice:
    """The last of so many, at most `longest`; None is all."""
    # Not [-longest:], which takes all of them where the longest is 0.
    return slice(0 if longest is None else max(0, number - longest), None)


class EventsOf:
    """What each user had, or who had each item: positions and labels, the oldest first.

    owners, others: positions of whose it is and of what, int32 [events]; number: of owners.
    """

    def __init__(self, owners: np.ndarray, others: np.ndarray, raw: RawData, number: int) -> None:
        order = np.lexsort([raw.events.time, owners])
        self._others, self._labels, self._times = (
            column[order] for column in (others, raw.events.label, raw.events.time)
        )
        counts = np.bincount(owners, minlength=number)
        self._ends = np.concatenate([[0], np.cumsum(counts)])

    def of(
        self, place: int, longest: int | None = None, before: int | None = None, without: int = -1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions of the last that an owner has, at most `longest`, their labels and times; nobody has
        place -1.

        before: leaves out what is not strictly before this time, in seconds since 1970; without: and who has
        this position.
        """
        first, end = self._ends[place : place + 2] if place >= 0 else (0, 0)
        if before is not None:
            end = first + np.searchsorted(self._times[first:end], before)
        others, *rest = (column[first:end] for column in (self._others, self._labels, self._times))
        kept = others != without
        others, labels, times = (column[kept] for column in (others, *rest))
        last = last_of(len(others), longest)
        return others[last], labels[last], times[last]


def ages_in(times: np.ndarray, before: int | None = None) -> list[int]:
    """How many seconds before an event each of a user's was; times: of those, int64 [n], the oldest first.

    before: when the event is; None is at the time of the newest of them, as what comes next in that sitting.
    """
    if before is None:
        before = int(times[-1]) if len(times) else 0
    ages: list[int] = (before - times).tolist()
    return ages


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


class Told:
    """What a model is told of users and items by the data of its training.

    longest: how long the lists are at most, by their names; None is all.
    """

    def __init__(self, raw: RawData, schema: Schema, longest: Mapping[str, int | None]) -> None:
        self._raw, self.longest, self._shown = raw, longest, schema.shown
        self.users, self.items = Known(raw.users, schema, USER), Known(raw.items, schema, ITEM)
        self._events = EventsOf(raw.events.user, raw.events.item, raw, len(raw.users))

    @functools.cached_property
    def _audiences(self) -> EventsOf:
        return EventsOf(self._raw.events.item, self._raw.events.user, self._raw, len(self._raw.items))

    def of_users(
        self,
        users: Sequence[Any],
        snapshot: Snapshot,
        ends: Sequence[int | None] | None = None,
        items: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """What a model receives of users: their features and, where it takes one, their history.

        ends: the time before which each history ends, in seconds since 1970; None takes all of it. items: one
        for each history, which is left out of it.
        """
        names = snapshot.names_of((USER,))
        values = {name: given for name, given in self.users.of(users).items() if name in names}
        if not snapshot.takes_history:
            return values
        ends = [None] * len(users) if ends is None else ends
        found = [
            self._events.of(self.users.places.get(user, -1), self.longest[HISTORY], end, own)
            for user, end, own in zip(users, ends, _places(items, self.items, len(users)), strict=True)
        ]
        ids = self.items.ids
        values[HISTORY] = [[ids[place] for place in places.tolist()] for places, _, _ in found]
        values[HISTORY_RATINGS] = [
            [self._shown(label) for label in labels.tolist()] for _, labels, _ in found
        ]
        if snapshot.takes_ages:
            values[HISTORY_AGES] = [
                ages_in(times, end) for (_, _, times), end in zip(found, ends, strict=True)
            ]
        return values

    def had(self, users: Sequence[Any]) -> list[list[Any]]:
        """The items that each user had, also those that are more than a history takes."""
        found = [self._events.of(self.users.places.get(user, -1))[0] for user in users]
        return [[self.items.ids[place] for place in places.tolist()] for places in found]

    def users_of(
        self,
        items: Sequence[Any],
        ends: Sequence[int | None] | None = None,
        users: Sequence[Any] | None = None,
    ) -> list[list[Any]]:
        """The users that had each item; ends, users: as for `of_users`."""
        ends = [None] * len(items) if ends is None else ends
        found = [
            self._audiences.of(self.items.places.get(item, -1), self.longest[AUDIENCE], end, own)[0]
            for item, end, own in zip(items, ends, _places(users, self.users, len(items)), strict=True)
        ]
        return [[self.users.ids[place] for place in places.tolist()] for places in found]

    def of_items(self, snapshot: Snapshot) -> dict[str, list[Any]]:
        """What a model takes of all items of the data."""
        names = snapshot.names_of((ITEM, AUDIENCE))
        values = {name: given for name, given in self.items.values.items() if name in names}
        return {**values, AUDIENCE: self.users_of(self.items.ids)} if AUDIENCE in names else values


def _places(ids: Sequence[Any] | None, known: Known, number: int) -> list[int]:
    """Positions of ids, -1 for one that is not there."""
    return [-1] * number if ids is None else [known.places.get(each, -1) for each in ids]
