"""Test the benchmark of the order of training with few ratings: it trains in both orders, which differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import measured


@pytest.mark.soak
def test_a_true_permutation_trains_in_another_order(tmp_path: Path) -> None:
    short = ("--ratings", 2_000, "--seeds", 1, "--epochs", 1, "--folder", tmp_path / "data")
    found, printed = measured("order", tmp_path, *short, result="shuffle")
    (pair,) = found["test_rmse"]
    assert 0.5 < pair["ours"] < 2
    # The same weights and ratings in another order give another model.
    assert 0 < abs(pair["ours"] - pair["true"]) < 0.2
    assert "mean difference" in printed
