"""The raw values of features, and the table rows that stand for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.schema import Schema, Table

if TYPE_CHECKING:
    import pandas


def write_features(
    folder: Path, entities: dict[str, tuple[pandas.DataFrame, np.ndarray]], schema: Schema
) -> tuple[list[Table], list[str]]:
    """Write table rows for all users and items.

    A table has a row for each value that the training events show, and row 0 for any other: a row that
    training never touches would be noise in the test.
    """
    tables: list[Table] = []
    left_out: list[str] = []
    vocabulary: dict[str, list[Any]] = {}
    # Those with lists last, so that all others are joined at once.
    features = sorted(schema.features, key=lambda feature: feature.multi)
    for entity, (frame, trained) in entities.items():
        rows: list[np.ndarray] = []
        for feature in (feature for feature in features if feature.entity == entity):
            if feature.column not in frame:
                left_out.append(feature.name)
                continue
            column = frame[feature.column]
            values = column.explode() if feature.multi else column
            known = np.unique(values.loc[trained].dropna())
            positions = _rows_of(values, known)
            if feature.multi:
                # An item without a value has the value "unknown": no list is empty.
                counts = column.str.len().clip(lower=1).to_numpy(np.int32)
                np.save(folder / f"{feature.name}_values.npy", positions)
                rows += [(np.cumsum(counts) - counts).astype(np.int32), counts]
                longest = int(counts.max())
            else:
                rows.append(positions)
                longest = 1
            # Sorted, as np.unique gives them: the same data have the same rows on every machine.
            vocabulary[feature.name] = known.tolist()
            tables.append(Table(feature, len(known) + 1, longest))
        np.save(folder / f"{schema.name_of(entity)}_features.npy", np.stack(rows, axis=1))
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    return sorted(tables, key=lambda table: table.feature.multi), left_out


def _rows_of(values: pandas.Series, known: np.ndarray) -> np.ndarray:
    """Table rows, int32: 1 and up for the known values, 0 for others (get_indexer says -1 for those)."""
    import pandas

    return (pandas.Index(known).get_indexer(pandas.Index(values)) + 1).astype(np.int32)
