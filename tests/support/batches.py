"""Batches by feature and event."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recsuite.datasets.batches import Batch
from recsuite.datasets.columns import Table


def lists_of(tables: Sequence[Table], batch: Batch) -> dict[str, list[np.ndarray]]:
    """The table rows, or ids, that each event of a batch has of each feature."""
    lists = np.split(batch.values.numpy(), batch.lengths.numpy().cumsum())[:-1]
    size = len(lists) // len(tables)
    return {table.name: lists[place * size : (place + 1) * size] for place, table in enumerate(tables)}
