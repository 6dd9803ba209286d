"""What tables say of their users and items, and who had what in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.schema import RawData, Schema
from recsuite.datasets.tables.derived import dates_name, derived
from recsuite.serving.display.viewer import last_of

if TYPE_CHECKING:
    import pandas


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
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the last that an owner has, at most `longest`, and their labels; nobody has place -1.

        before: leaves out what is not strictly before this time, in seconds since 1970; without: and who has
        this position.
        """
        first, end = self._ends[place : place + 2] if place >= 0 else (0, 0)
        if before is not None:
            end = first + np.searchsorted(self._times[first:end], before)
        others, labels = self._others[first:end], self._labels[first:end]
        if without >= 0:
            others, labels = others[others != without], labels[others != without]
        last = last_of(len(others), longest)
        return others[last], labels[last]
