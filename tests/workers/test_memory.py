"""Memory of a worker: the same for any number of ratings, flat over the epochs, none in /dev/shm."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader
from tests.support import shared_memory
from tests.support.launch import python, succeeded
from tests.support.memory import memory, planted_columns

MIB = 2**20
EPOCHS = 3


@functools.cache
def alone(module: str) -> float:
    """MiB of a process that has only imported a module."""
    code = f"import {module}; print(open('/proc/self/smaps_rollup').read())"
    match = re.search(r"^Pss: +(\d+) kB", succeeded(python("-c", code)), re.MULTILINE)
    assert match
    return int(match.group(1)) / 1024


@pytest.mark.parametrize(
    "number", [1_000_000, *(pytest.param(other, marks=pytest.mark.soak) for other in (200_000, 10_000_000))]
)
def test_a_workers_memory_is_small_and_flat(tmp_path: Path, number: int) -> None:
    config = Config.of(batch_size=8192, history=0, num_workers=2)
    dataset = EventBatches(planted_columns(tmp_path / "columns", number), config, 0, 1)
    sampler = EpochSampler(dataset)
    names = shared_memory.names()
    own, anonymous, descriptors = [], [], []
    with build_dataloader(dataset, sampler, config) as loader:
        assert loader.pool is not None
        for sampler.epoch in range(EPOCHS):
            for _ in loader:
                pass
            found = [memory(pid) for pid in loader.pool.pids]
            own.append([part["own"] for part in found])
            anonymous.append([part["anonymous"] for part in found])
            descriptors.append(
                [len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *loader.pool.pids]]
            )
            # The ring is shared with the trainer, so a worker's part is at most its slots.
            assert max(part["ring"] for part in found) <= loader.pool.ring.num_bytes / 2 / MIB
        shared_memory.check_nothing_stays(names)
    assert np.max(own) < alone("torch")
    # The same for all sizes, so at most 12 MB more than its imports for any; no growth once all is warm.
    assert np.max(own) - alone("numpy") < 12
    assert np.max(anonymous) < 25
    assert np.max(np.subtract(anonymous[-1], anonymous[1])) < 1
    assert all(numbers == descriptors[1] for numbers in descriptors[1:])
