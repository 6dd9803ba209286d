"""The same model on any number of processes: each script, with nothing changed but their number."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.launch import ROOT, SUPPORT, read_json, succeeded, torchrun
from tests.support.scripts_on_ranks import SCRIPTS

sys.path.append(str(ROOT / "example"))
import criteo_log
import shop_log

# With eight, one of each way to divide a batch: with padding, by windows, and with a rank that has no events.
TRAINED = {1: SCRIPTS, 2: SCRIPTS, 3: SCRIPTS, 8: ("rating", "stream", "few")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Reports of all scripts, by number of ranks."""
    folder = tmp_path_factory.mktemp("any")
    write_synthetic(folder / "ratings", 1_000, seed=0)
    criteo_log.write_log(folder / "clicks", 1_000)
    shop_log.write_log(folder / "shop", rows=1_000)
    for ranks, names in TRAINED.items():
        succeeded(torchrun(ranks, SUPPORT / "scripts_on_ranks.py", folder, *names, timeout=120))
    return {
        ranks: {name: read_json(folder / f"{name} {ranks}" / "metrics.json") for name in names}
        for ranks, names in TRAINED.items()
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_the_same_model_on_any_number_of_processes(
    found: dict[int, dict[str, Any]], name: str
) -> None:
    one = found[1][name]
    for ranks, reports in found.items():
        other = reports.get(name)
        if other is None:
            continue
        assert other["world_size"] == ranks
        assert other["config"] == {**one["config"], "report_dir": other["config"]["report_dir"]}
        for before, after in zip(one["epochs"], other["epochs"], strict=True):
            assert after["steps"] == before["steps"]
            assert after["train_loss"] == pytest.approx(before["train_loss"], rel=1e-5)
        # Two scores that differ by rounding alone may change places, which is one case of 200.
        assert other["test"] == pytest.approx(one["test"], abs=6e-3, nan_ok=True)
