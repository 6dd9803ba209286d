"""What a training step has to do at least, and the time that a machine takes for that. Imports no torch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from train_models import Model, columns_of

from recsuite.datasets.batches import Batch, EventBatches, Request

MEMORY, PRODUCTS = "memory", "products"
# Of the arrays of a measurement of the memory, together: far more than a cache has.
BYTES = 3 * 2**26
# Of a measurement of products of matrices.
WIDTH = 1024
OPERATIONS = 2 * WIDTH**3
# How often a step reads or writes a row or what is as large: the lookup reads it and writes it for the rank
# that asked, which reads it; that rank writes its gradient, and the owner reads that; the update reads and
# writes the row.
TIMES_A_ROW = 7


def work_of(folder: Path, model: Model, batch_size: int) -> dict[str, float]:
    """What one of two ranks does in a step: ids; distinct rows; bytes and operations, if all that a step
    makes and uses again stays in caches but for the batch and the rows.
    """
    config = model.config.replaced(batch_size=batch_size)
    batches = EventBatches(columns_of(folder, model), config, 0, 2)
    arrays = batches.make(Request("train", 0, 0))
    batch = dict(zip(Batch._fields, arrays, strict=True))
    counts = batch["lengths"].reshape(len(batches.tables), -1).sum(1)
    parts = np.split(batch["values"], counts.cumsum()[:-1])
    rows = sum(len(np.unique(part)) for part in parts)
    row_bytes = 4 * model.dim
    moved = 2 * sum(array.nbytes for array in arrays) + rows * (TIMES_A_ROW * row_bytes + 2 * 4)
    widths = [3 * (model.dim - 1), *model.mlp_dims, 1]
    # The backward is two products for each of the forward's.
    products = 3 * 2 * batch_size * sum(first * second for first, second in pairwise(widths))
    # A product and a sum for each number of an id's row, and for that of its gradient.
    sums = 2 * 2 * len(batch["values"]) * model.dim
    return {"ids": len(batch["values"]), "rows": rows, "bytes": moved, "operations": products + sums}


def bounds_of(size: dict[str, Any], batch_size: int, rate: float) -> dict[str, float]:
    """Milliseconds that a step of two ranks takes, at so many ratings a second, and those that what it has to
    do takes their machine.
    """
    work, machine = size["work"], size["machine"]
    return {
        "measured": 2e3 * batch_size / rate,
        "bytes": 2e3 * work["bytes"] / median(machine[MEMORY]),
        "operations": 2e3 * work["operations"] / median(machine[PRODUCTS]),
    }


def bound_lines(sizes: list[dict[str, Any]], batch_size: int, name: str) -> list[list[str]]:
    """The cells of a table: name is that of the measured variant."""
    found = [bounds_of(size, batch_size, median(size["rates"][name])) for size in sizes]
    machines = [size["machine"] for size in sizes]
    works = [size["work"] for size in sizes]

    def cells(title: str, shown: list[str]) -> list[str]:
        return [title, *shown]

    return [
        cells("ids of a rank, and distinct rows", [f"{w['ids']:,} and {w['rows']:,}" for w in works]),
        cells("MB that it has to move", [f"{w['bytes'] / 1e6:.1f}" for w in works]),
        cells("million operations", [f"{w['operations'] / 1e6:.0f}" for w in works]),
        cells("GB/s of the memory, both ranks", [f"{median(m[MEMORY]) / 1e9:.1f}" for m in machines]),
        cells("GFLOP/s of the cores", [f"{median(m[PRODUCTS]) / 1e9:.0f}" for m in machines]),
        cells("ms for the bytes", [f"{each['bytes']:.2f}" for each in found]),
        cells("ms for the operations", [f"{each['operations']:.2f}" for each in found]),
        cells("ms of a step", [f"{each['measured']:.2f}" for each in found]),
        cells(
            "share of the bound, were neither to wait for the other",
            [f"{max(each['bytes'], each['operations']) / each['measured']:.2f}" for each in found],
        ),
    ]
