"""Long tests, behind `./run.sh soak`: pools of every kind, for SOAK_SECONDS, with batches that stay the same.

What they do in minutes, `test_pool.py`, `test_memory.py` and `test_failures.py` do in seconds.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.errors import UserError
from recsuite.workers.pool import WorkerError
from tests.support import shared_memory
from tests.support.memory import memory, planted_columns
from tests.support.pools import make_pool, numbers
from tests.support.sources import FAULTS, Numbers

pytestmark = pytest.mark.soak
SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
METHODS = ("spawn", "forkserver", "fork")


def test_pools_leave_no_resources() -> None:
    rng = np.random.default_rng(0)
    faults = ["", *(fault for fault in FAULTS if fault != "sleep")]
    before, deadline = None, time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        source = Numbers(faults[rng.integers(len(faults))])
        pool = make_pool(source, int(rng.integers(1, 9)), mp_context=METHODS[rng.integers(3)])
        try:
            for _ in range(3):
                steps = range(int(rng.integers(60)))
                assert numbers(pool.batches(steps)) == list(steps)
        except (WorkerError, UserError):
            assert source.fault
        pool.close()
        del pool
        gc.collect()
        found = shared_memory.num_descriptors(), set(os.listdir("/dev/shm"))
        # Once each start method has begun, nothing may come on top.
        if before is None or time.monotonic() < deadline - SECONDS * 0.7:
            before = found
        assert found[0] <= before[0] + 2
        assert found[1] <= before[1]


def test_a_long_lived_pool_keeps_its_memory_and_results(tmp_path: Path) -> None:
    config = Config.of(batch_size=8192, num_workers=4)
    columns = planted_columns(tmp_path / "columns", 2_000_000)
    dataset = EventBatches(columns, config, 0, 1)
    sampler, alone = EpochSampler(dataset), config.replaced(num_workers=0)
    deadline, allocated = time.monotonic() + SECONDS, []
    with build_dataloader(dataset, sampler, config) as loader:
        assert loader.pool is not None
        while time.monotonic() < deadline:
            for one, other in zip(loader, build_dataloader(dataset, sampler, alone), strict=True):
                assert all(np.array_equal(mine, yours) for mine, yours in zip(one, other, strict=True))
            allocated.append([memory(pid)["anonymous"] for pid in loader.pool.pids])
            sampler.epoch += 1
    assert len(allocated) > 2
    assert np.max(np.subtract(allocated[-1], allocated[1])) < 2
