"""What a worker costs: the same for any number of ratings, flat over the epochs, nothing in /dev/shm."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.datasets.schema import Table
from tests.support.launch import python, succeeded

MIB = 2**20
NUM_USERS, NUM_MOVIES = 6000, 4000
EPOCHS = 5


def planted_columns(folder: Path, number: int) -> Columns:
    """Columns of random ratings, without the files that they would come from."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.int32, (number, 4))
    rows[:, 0], rows[:, 1] = rng.integers(0, NUM_USERS, number), rng.integers(0, NUM_MOVIES, number)
    rows[:, 2], rows[:, 3] = np.ones(number, np.float32).view(np.int32), 0
    rows.flush()
    np.save(folder / "user_features.npy", rng.integers(0, 9, (NUM_USERS, 4)).astype(np.int32))
    # Movie, year, and where one of its genres lies.
    movie_features = rng.integers(0, 9, (NUM_MOVIES, 4)).astype(np.int32)
    movie_features[:, 3] = 1
    np.save(folder / "movie_features.npy", movie_features)
    np.save(folder / "genres_values.npy", np.arange(9, dtype=np.int32))
    tables = tuple(Table(feature, 9) for feature in SCHEMA.features)
    num_train = number - 1000
    return Columns(
        str(folder), "", SCHEMA, num_train, 0, 1000, 0, NUM_USERS, NUM_MOVIES, 3.5, 0, tables, {}, ()
    )


def memory(pid: int | str) -> dict[str, float]:
    """MiB of a process by what they are: its own, the ring, the columns (page cache, shared by all).

    Its own are PSS, so that they change with the processes that share its libraries; what it has allocated
    is "anonymous".
    """
    found = {"own": 0.0, "ring": 0.0, "columns": 0.0, "anonymous": 0.0}
    kind = "own"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            kind = "columns" if line.endswith(".npy") else "ring" if "memfd:batches" in line else "own"
        elif line.startswith("Pss:"):
            found[kind] += int(line.split()[1]) / 1024
        elif line.startswith("Anonymous:") and kind == "own":
            found["anonymous"] += int(line.split()[1]) / 1024
    return found


def alone(module: str) -> float:
    """MiB of a process that has only imported a module."""
    code = f"import {module}; print(open('/proc/self/smaps_rollup').read())"
    match = re.search(r"^Pss: +(\d+) kB", succeeded(python("-c", code)), re.MULTILINE)
    assert match
    return int(match.group(1)) / 1024


@pytest.mark.parametrize("number", [1_000_000, 10_000_000])
def test_a_workers_memory_is_small_and_flat(tmp_path: Path, number: int) -> None:
    config = Config.of(batch_size=8192, history=0, num_workers=2)
    dataset = EventBatches(planted_columns(tmp_path / "columns", number), config, 0, 1)
    sampler = EpochSampler(dataset)
    shared_memory = sorted(os.listdir("/dev/shm"))
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
        assert sorted(os.listdir("/dev/shm")) == shared_memory
    assert np.max(own) < alone("torch")
    # The same for both sizes, so at most 12 MB more than its imports for any; no growth once all is warm.
    assert np.max(own) - alone("numpy") < 12
    assert np.max(anonymous) < 25
    assert np.max(np.subtract(anonymous[-1], anonymous[1])) < 1
    assert all(numbers == descriptors[1] for numbers in descriptors[1:])
