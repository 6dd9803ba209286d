"""Pools of workers that make numbers, and what they made."""

from __future__ import annotations

from typing import Any

from recsuite.workers.pool import WorkerPool
from tests.support.sources import SIZE


def make_pool(source: Any, num_workers: int = 2, **options: Any) -> WorkerPool:
    """A pool as rank 3 would have it."""
    settings = {"prefetch_factor": 2, "timeout": 60, "mp_context": "spawn", "rank": 3, **options}
    return WorkerPool(source, num_workers=num_workers, **settings)


def numbers(batches: Any) -> list[int]:
    """The step that each batch shows; all of its values are alike."""
    found = []
    for values, nothing in batches:
        assert values.shape == (SIZE,)
        assert nothing.shape == (0,)
        assert (values == values[0]).all()
        found.append(int(values[0]))
    return found
