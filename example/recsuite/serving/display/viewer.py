"""One user of a data set, and the items to show: what was had, what is recommended, what is popular.

Somebody of whom the model knows nothing is shown the popular items: the highest means of their labels, each
damped by DAMPING events at the mean of all, so that one enthusiast makes no favourite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from recsuite.datasets.schema import CLICKS, COUNT, ITEM, RATING, RawData, Schema
from recsuite.errors import UserError, counted
from recsuite.serving.display.events import Told
from recsuite.serving.request import type_of
from recsuite.serving.served import ServedModel
from recsuite.serving.snapshot import Snapshot

DAMPING = 20
MOST_SHOWN = 5
# Labels that say that something happened, or how often, and not how it was.
HAPPENINGS = (CLICKS, COUNT)


@dataclass(frozen=True)
class Listing:
    """Items in their order: positions in `RawData.items`, int64 [n], and a number for each, [n]."""

    items: np.ndarray
    numbers: np.ndarray


class Viewer:
    """One user, in the data or not: what was rated. told: what a model is told by the data."""

    def __init__(self, raw: RawData, schema: Schema, user: str, told: Told) -> None:
        self.raw = raw
        self.schema = schema
        self.name = user
        self.told = told
        # Ids are texts in some data sets; there any name is one.
        self.id = user if type_of(told.users.ids) is str else _id_of(user)
        # The oldest first: positions in `RawData.items`.
        self.items, self.labels, self.times = told.events(self.id)
        self._shown = np.array([schema.shown(label) for label in self.labels.tolist()])

    def others(self, number: int, least: int) -> list[Viewer]:
        """So many users of the same data at most, from all over it, who had at least so many items.

        Raises:
            UserError: when nobody had so many.
        """
        counts = np.bincount(self.raw.events.user, minlength=len(self.told.users.ids))
        found = np.flatnonzero(counts >= least)
        if not len(found):
            raise UserError(f"No {self.schema.user} had {counted(least, self.schema.item)}; give more data.")
        some = found[np.linspace(0, len(found) - 1, min(number, len(found))).astype(np.int64)]
        names = [str(self.told.users.ids[place]) for place in some]
        return [Viewer(self.raw, self.schema, name, self.told) for name in names]

    @property
    def item_ids(self) -> np.ndarray:
        """The raw ids of the user's items, the oldest first."""
        return self.raw.items[self.schema.column_of(ITEM)].to_numpy()[self.items]

    def liked(self) -> Listing:
        """The items with the highest labels, each with its newest one or the sum of its counts; of equal ones
        the newest first.
        """
        items, newest, which = np.unique(self.items[::-1], return_index=True, return_inverse=True)
        numbers = self._shown[::-1]
        totals = np.bincount(which, numbers) if self.schema.label_kind == COUNT else numbers[newest]
        best = np.lexsort([newest, -totals])[:MOST_SHOWN]
        return Listing(items[best], totals[best])

    def latest(self) -> Listing:
        """The newest items, the newest first."""
        return Listing(self.items[::-1][:MOST_SHOWN], self._shown[::-1][:MOST_SHOWN])

    def is_known_to(self, model: ServedModel) -> bool:
        """Whether a model learned of this user, or can be told what the user rated."""
        return model.knows(self.schema.user, self.id) or (
            model.snapshot.takes_history and len(self.labels) > 0
        )

    def unseen(self, model: ServedModel) -> np.ndarray:
        """The items that may be shown: the training has seen them and the user has not, int64 [n]."""
        # Of any other item the model has no row that it learned.
        trained = model.snapshot.known(self.schema.item, self.told.items.ids).numpy()
        trained[self.items] &= not self.schema.excludes_seen
        return np.flatnonzero(trained)

    def values(self, snapshot: Snapshot) -> dict[str, list[Any]]:
        """What the model is told about this user."""
        return self.told.of_users([self.id], snapshot)


def _id_of(user: str) -> int | None:
    """The id that a user's name is, a whole number of 64 bits: 5, or 5.0 as in a file; None for others."""
    # Python refuses to read a number of some thousand digits.
    found = re.fullmatch(r"([+-]?)0*(\d{1,19})(?:\.0+)?", user.strip(), re.ASCII)
    number = int(found[1] + found[2]) if found else 2**63
    return number if -(2**63) <= number < 2**63 else None


def best_for(viewer: Viewer, model: ServedModel, top: int, approximate: bool = False) -> Listing:
    """The items with the highest predictions for a user of the data that the model takes users from.

    approximate: see `ServedModel.recommend`.
    """
    (found,) = model.recommend([viewer.id], top, approximate=approximate)
    places = np.array([viewer.told.items.places[item] for item, _ in found], np.int64)
    scores = np.array([score for _, score in found], np.float32)
    schema = model.snapshot.schema
    if schema.label_kind == RATING and model.snapshot.task.evaluation == "predictions":
        # Ranked by what was predicted; what people see lies on their scale.
        scores = scores.clip(schema.lowest_label, schema.highest_label)
    return Listing(places, scores)


def popular(viewer: Viewer, model: ServedModel, top: int) -> Listing:
    """The items with the highest damped means, or of clicks and counts the most events, of those that may be
    shown to a user.
    """
    events, number = viewer.raw.events, len(viewer.raw.items)
    counts = np.bincount(events.item, minlength=number)
    unseen = viewer.unseen(model)
    if viewer.schema.label_kind in HAPPENINGS:
        return _highest(unseen, counts[unseen], top)
    sums = np.bincount(events.item, weights=events.label, minlength=number)
    mean = events.label.mean(dtype=np.float64)
    return _highest(unseen, ((sums + DAMPING * mean) / (counts + DAMPING))[unseen], top)


def _highest(items: np.ndarray, numbers: np.ndarray, top: int) -> Listing:
    # Stable, so that of equal items the one with the lower id comes first on every machine: `read` orders
    # them so.
    order = np.argsort(-numbers, kind="stable")[:top]
    return Listing(items[order], numbers[order])
