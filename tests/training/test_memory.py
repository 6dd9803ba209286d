"""Memory of a rank beside torch and TorchRec, which take more than all the rest."""

from __future__ import annotations

from pathlib import Path

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from tests.support.launch import EXAMPLE, python, succeeded

# Of what no file backs: libraries that are mapped are shared by all who use them.
TELL = """
import re, sys
def anonymous():
    status = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\\s*(\\d+) kB", status)[1]) / 1024
"""
ALONE = f"{TELL}import torch, torchrec; print(anonymous())"
# A batch of 64, so that what its rows take is next to nothing.
RANK = f"""{TELL}
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
from example import main
assert main(["--data_path", sys.argv[1], "--batch_size", "64", "--epochs", "1"]) == 0
print("has", *sorted(set(sys.argv[2:]) & set(sys.modules)))
print(anonymous())
"""
# Arrow reads source files, pandas holds frames, TensorBoard is for its tracker, matplotlib for benchmarks.
NEVER = ("pyarrow", "pandas", "tensorboard", "matplotlib", "recsuite.extras.guess.proposal")
# Of these numba takes 60, with the loops of the tables on a CPU.
MOST_MIB = 80


def test_a_rank_that_finds_its_columns_imports_and_holds_little_beside_torch_and_torchrec(
    synthetic_folder: Path,
) -> None:
    open_columns(Config.of(data_path=str(synthetic_folder)))
    alone = float(succeeded(python("-c", ALONE)))
    *_, found, trained = succeeded(python("-c", RANK, synthetic_folder, *NEVER)).splitlines()
    assert found == "has"
    assert float(trained) - alone < MOST_MIB
