"""Memory of a rank beside torch and TorchRec, which take more than all the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from tests.support.launch import EXAMPLE, python, started, succeeded, wait_for
from tests.support.memory import memory

# Of what no file backs: libraries that are mapped are shared by all who use them. A batch of 64, so that what
# its rows take is next to nothing.
RANK = f"""
import re, sys
import torch, torchrec
def anonymous():
    status = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\\s*(\\d+) kB", status)[1]) / 1024
alone = anonymous()
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from example import main
assert main(["--data_path", sys.argv[1], "--batch_size", "64", "--epochs", "1"]) == 0
print("has", *sorted(set(sys.argv[2:]) & set(sys.modules)))
print(anonymous() - alone)
"""
# Arrow reads source files, pandas holds frames, TensorBoard is for its tracker, matplotlib for benchmarks.
NEVER = ("pyarrow", "pandas", "tensorboard", "matplotlib", "recsuite.extras.guess.proposal")
# Of these numba takes 60, with the loops of the tables on a CPU.
MOST_MIB = 80


def test_a_rank_that_finds_its_columns_imports_and_holds_little_beside_torch_and_torchrec(
    tmp_path: Path,
) -> None:
    write_synthetic(tmp_path, 5_000, seed=0)
    open_columns(Config.of(data_path=str(tmp_path)))
    *_, found, held = succeeded(python("-c", RANK, tmp_path, *NEVER)).splitlines()
    assert found == "has"
    assert 10 < float(held) < MOST_MIB


# Events of a window: the tensors of its step leave large holes beside whatever is kept.
WINDOW, WINDOWS = 1_024, 8
READINGS, WARM_UP = 60, 20
# Beside the results of the windows. What was kept of one, however small, took a whole tensor: 54 MiB.
MOST_GROWTH_MIB = 15
STREAM = ("--stream", "--follow_data", "--window", WINDOW, "--duplicates", "keep", "--num_workers", 0)


@pytest.mark.soak
def test_a_training_that_follows_a_stream_does_not_grow_with_its_readings(tmp_path: Path) -> None:
    path, chunk = tmp_path / "events.csv", WINDOW * WINDOWS
    path.write_text("user,item,rating,timestamp\n")
    generator = np.random.default_rng(0)

    def append(reading: int) -> None:
        user, item, rating = (generator.integers(1, most, chunk) for most in (300, 500, 6))
        rows = zip(user, item, rating, range(10**9 + reading * chunk, 2 * 10**9), strict=False)
        with path.open("a") as file:
            file.writelines(",".join(map(str, row)) + "\n" for row in rows)

    append(0)
    flags = ("--data_path", tmp_path, *STREAM, "--vocabulary", "dynamic", "--capacity", 1_000)
    with started([sys.executable, "-u", str(EXAMPLE), *map(str, flags)]) as process:
        for reading in range(WARM_UP + READINGS + 1):
            wait_for(process, "waiting for more ratings")
            if reading == WARM_UP:
                before = memory(process.pid)["anonymous"]
            append(reading + 1)
        assert memory(process.pid)["anonymous"] - before < MOST_GROWTH_MIB
