"""Memory of a rank beside torch and TorchRec, which take more than all the rest."""

from __future__ import annotations

from pathlib import Path

from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from tests.support.launch import EXAMPLE, python, succeeded

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
