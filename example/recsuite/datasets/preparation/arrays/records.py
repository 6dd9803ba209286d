"""Records: what users, items or events have, written side by side into one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recsuite.datasets.columns import record_type
from recsuite.datasets.preparation.arrays.mapped import chunks, counts_of, create_column
from recsuite.datasets.schema import Table


@dataclass
class Own:
    """What users, items or events have of features of their own, an array for each feature: table rows,
    int32 [n]; places of lists, int32 [n, 2]; dense numbers, float32 [n]. See `record_type`.
    """

    features: list[np.ndarray] = field(default_factory=list)
    lists: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)


def write_records(path: Path, fields: Mapping[str, np.ndarray], own: Own) -> None:
    """Write records of some fields, [n] each, and of what they have of their own, block by block.

    Raises:
        OSError: when the disk has no room for them.
    """
    dtype = record_type(
        [(name, column.dtype) for name, column in fields.items()],
        *map(len, (own.features, own.lists, own.numbers)),
    )
    columns = [*fields.values(), *own.features, *own.lists, *own.numbers]
    records = create_column(path, (len(columns[0]),), dtype)
    for part in chunks(len(records), records, *columns):
        for name, column in fields.items():
            records[name][part] = column[part]
        for name, of_features in vars(own).items():
            for place, column in enumerate(of_features):
                records[name][part, place] = column[part]


def write_counts(folder: Path, tables: Sequence[Table], own: Own, num_train: int) -> None:
    """Write how many training events have each row of the tables, in whose order `own` has their features."""
    for table, rows in zip(tables, own.features, strict=True):
        counts = counts_of(rows[:num_train], table.rows)
        np.save(folder / f"{table.name}_counts.npy", counts.astype(np.int32))
