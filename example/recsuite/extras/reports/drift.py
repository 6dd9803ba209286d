"""Drift: the events of the test beside those of the training, by the share of new values and by distance."""

from __future__ import annotations

import numpy as np

from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import ENTITIES, HISTORY, RATING, UNKNOWN_ROW
from recsuite.datasets.tables.derived import derived
from recsuite.extras.reports.segments import rows_of

# Most events of a split that are compared, evenly spaced.
MOST_EVENTS = 2**20


def drift_of(columns: Columns) -> dict[str, dict[str, float]]:
    """Return the drift of each feature with one value, and of a rating.

    "new": share of the test events whose value has no row, above that share of the training events.
    "distance": half of the sum of the absolute differences between the shares of its values (total
    variation), 0 to 1, and "by_chance": its expectation without drift; not of ids, of which most are rare. Of
    a rating, "training" and "test": its means.
    """
    all_rows = columns.column("rows")
    parts = []
    for split in ("train", "test"):
        part = columns.range_of(split)
        parts.append(all_rows[part.start : part.stop : -(-len(part) // MOST_EVENTS) or 1])
    single = [table.feature for table in columns.tables if not table.feature.multi]
    drift: dict[str, dict[str, float]] = {}
    for feature in single:
        # The test of newest events has other days by its nature.
        if feature.entity == HISTORY or feature.is_dynamic or derived(feature.column):
            continue
        before, now = (rows_of(columns, part, feature, single) for part in parts)
        unknown = (now == UNKNOWN_ROW).mean() - (before == UNKNOWN_ROW).mean()
        drift[feature.name] = {"new": max(0.0, float(unknown))}
        if feature.name not in map(columns.schema.name_of, ENTITIES):
            # The values that occur: a vocabulary may have far more.
            known, which = np.unique(np.concatenate([before, now]), return_inverse=True)
            sides = which[: len(before)], which[len(before) :]
            p, q = (np.bincount(side, minlength=len(known)) / len(side) for side in sides)
            # Of normal differences with the variance of two samples.
            chance = np.sqrt(p * (1 - p) * (1 / len(before) + 1 / len(now)) * 2 / np.pi).sum() / 2
            drift[feature.name] |= {"distance": float(np.abs(p - q).sum() / 2), "by_chance": float(chance)}
    if columns.schema.label_kind == RATING:
        means = (float(part["label"].mean(dtype=np.float64)) for part in parts)
        drift[f"mean {columns.schema.label}"] = dict(zip(("training", "test"), means, strict=True))
    return drift
