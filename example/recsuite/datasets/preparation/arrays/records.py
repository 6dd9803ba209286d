"""Records: what users, items or events have, written side by side into one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recsuite.datasets.columns import record_type
from recsuite.datasets.preparation.arrays.mapped import chunks, create_column


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
