"""The benchmark of dynamic tables, in its short form: all is measured; how long it took is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.benchmarks import measured

# They measure for long; nothing but their own scripts depends on them.
pytestmark = pytest.mark.soak


def test_a_full_table_is_measured_and_its_memory_matches_its_capacity(tmp_path: Path) -> None:
    short = ["--rows", 40_000, "--rounds", 2, "--batch", 500]
    found, printed = measured("dynamic", tmp_path, *short)
    (size,) = found["sizes"]
    assert all(rate > 0 for rates in size["rates"].values() for rate in rates)
    # One row more than places: that of the unknown.
    assert size["bytes"]["rows"] == 40_001 * 33 * 4
    assert size["bytes"]["places"] == 40_000 * 22 + 40_000 // 16 * 4 == size["waiting"]["counted"]
    assert "| 40,000 |" in printed


def test_a_training_with_dynamic_tables_is_measured_beside_one_with_static_ones(tmp_path: Path) -> None:
    short = ["--sizes", "2000+1000", "--batch", 256, "--rounds", 1, "--seconds", 0.02]
    found, printed = measured("dynamic_train", tmp_path, *short)
    (size,) = found["sizes"]
    for ranks in ("1", "2"):
        rates = size["rates"][ranks]
        assert rates.keys() == {"static", "dynamic", "dynamic, filling"}
        assert all(rate > 0 for of_kind in rates.values() for rate in of_kind)
        assert f"| 2,000 + 1,000 ids | {ranks} |" in printed


def test_a_delta_with_ids_that_left_is_measured_beside_a_static_one(tmp_path: Path) -> None:
    short = ["--rows", 20_000, "--ratings", 20_000, "--rounds", 2]
    found, printed = measured("dynamic_delta", tmp_path, *short)
    (size,) = found["sizes"]
    static, full, half_full = (size["deltas"][kind] for kind in ("static", "full", "half full"))
    assert static["rows"] == full["rows"] == half_full["rows"] == [200, 200]
    # Every place was taken, so each that came made another one leave.
    assert (static["gone"], full["gone"]) == ([0, 0], [100, 100])
    assert all(80 < gone <= 100 for gone in half_full["gone"])
    assert all(1 < more / less < 1.3 for more, less in zip(full["bytes"], static["bytes"], strict=True))
    for kind in size["deltas"]:
        assert f"| 20,000 | {kind} |" in printed


def test_every_capacity_is_measured_beside_static_tables(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "ratings", 3_000, seed=0)
    short = ["--data", tmp_path / "ratings", "--seeds", 1, "--epochs", 3]
    found, printed = measured("dynamic_quality", tmp_path, *short, timeout=300)
    for errors in found["rmse"].values():
        assert list(errors) == ["static", "dynamic", "all", "1/2", "1/4", "1/8"]
        assert all(0.5 < error < 2 for (error,) in errors.values())
    assert f"| {found['ids']['user'] // 8:,} | {found['ids']['movie'] // 8:,} |" in printed
