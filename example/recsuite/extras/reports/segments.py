"""Segments of the events of a split, by a feature or a number of training events, for metrics of each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import BUCKETS, EVENT, HISTORY, ITEM, USER, Feature
from recsuite.errors import UserError, printable

# Names of the segments by the number of training events of the user, and of the item, and their lower bounds.
HISTORY_LENGTH, ITEM_EVENTS, BOUNDS = "history_length", "item_events", (0, 1, 5, 20, 100)
# Values with a segment of their own, the most frequent ones; ranges of a number.
MOST_VALUES, RANGES = 10, 4


@dataclass(frozen=True)
class Segments:
    """Segments by one name. values: texts; codes: position of each event's value in them, int64 [events]."""

    name: str
    values: tuple[str, ...]
    codes: np.ndarray

    def masks(self) -> dict[str, np.ndarray]:
        """Return a mask of the events of each value that has some, bool [events]."""
        masks: dict[str, np.ndarray] = {}
        for code, value in enumerate(self.values):
            mask = self.codes == code
            # A value may have the same name as the segment of unknown values.
            if mask.any():
                masks[value if value not in masks else f"{value} ({code})"] = mask
        return masks


def segments_of(columns: Columns, split: str, names: Sequence[str]) -> list[Segments]:
    """Return segments of the events of a split. names: of features with one value, HISTORY_LENGTH, or
    ITEM_EVENTS.

    Raises:
        UserError: for any other name.
    """
    events = columns.events(split)
    single = [table.feature for table in columns.tables if not table.feature.multi]
    known = {feature.name: feature for feature in single if feature.entity != HISTORY}
    vocabulary = json.loads((Path(columns.folder) / "vocabulary.json").read_bytes())
    chosen = []
    for name in names:
        if name == HISTORY_LENGTH:
            chosen.append(_by_number(name, columns.joined(columns.user_counts()[events[USER]])))
        elif name == ITEM_EVENTS:
            chosen.append(_by_number(name, columns.joined(columns.column("item_counts")[events[ITEM]])))
        elif name in known:
            rows = columns.joined(rows_of(columns, events, known[name], single))
            chosen.append(_by_value(name, rows, vocabulary[name], known[name].number == BUCKETS))
        else:
            raise UserError(
                f"--by {printable(name)} is no feature with one value; give some of "
                f"{', '.join([HISTORY_LENGTH, ITEM_EVENTS, *known])}."
            )
    return chosen


def _by_number(name: str, numbers: np.ndarray) -> Segments:
    # The first range is 0 alone.
    ranges = [f"{low} to {high - 1}" for low, high in itertools.pairwise(BOUNDS[1:])]
    values = ("0", *ranges, f"{BOUNDS[-1]} or more")
    return Segments(name, values, np.searchsorted(BOUNDS, numbers, side="right") - 1)


def rows_of(columns: Columns, events: np.ndarray, feature: Feature, single: Sequence[Feature]) -> np.ndarray:
    """Return the table row of a feature of each event, int32 [events]."""
    place = [other.name for other in single if other.entity == feature.entity].index(feature.name)
    if feature.entity == EVENT:
        return np.asarray(events["features"][:, place])
    of_entity = columns.column(f"{columns.schema.name_of(feature.entity)}_features")["features"][:, place]
    return np.asarray(of_entity[events[feature.entity]])


def _by_value(name: str, rows: np.ndarray, known: Any, is_number: bool) -> Segments:
    """Return the segments of values with these table rows. known: of the feature, from vocabulary.json."""
    if is_number:
        edges = known["edges"]
        if not edges:
            return Segments(name, ("unknown", "any"), np.minimum(rows, 1))
        # A few ranges of equal numbers of training values, instead of all buckets.
        kept = edges[:: -(-len(edges) // RANGES)][1:] if len(edges) >= RANGES else edges
        texts = [
            f"below {kept[0]:.12g}",
            *(f"{low:.12g} to {high:.12g}" for low, high in itertools.pairwise(kept)),
        ]
        lowest = np.array([-np.inf, *edges])[np.maximum(rows, 1) - 1]
        codes = np.where(rows == 0, 0, 1 + np.searchsorted(kept, lowest, side="right"))
        return Segments(name, ("unknown", *texts, f"{kept[-1]:.12g} or more"), codes)
    counts = np.bincount(rows, minlength=len(known) + 1)
    order = np.argsort(-counts, kind="stable")
    common, others = order[:MOST_VALUES], order[MOST_VALUES:][counts[order[MOST_VALUES:]] > 0]
    code_of = np.full(len(counts), len(common))
    code_of[common] = np.arange(len(common))
    texts = ["unknown" if row == 0 else printable(known[row - 1]) for row in common]
    return Segments(name, (*texts, f"{len(others):,} others"), code_of[rows])
