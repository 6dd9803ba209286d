"""A miniature of the comparison of precisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import benchmark, measured


def test_precisions_are_compared_on_the_same_validation(tmp_path: Path) -> None:
    found, output = measured("precision", tmp_path, "--only_real", "--seeds", 1, "--ratings", 2_000)
    (each,) = benchmark("precision").results_of(found)
    assert (each.data, each.task, each.metric) == ("synthetic", "ratings", "rmse")
    assert each.values.keys() == benchmark("precision").WAYS.keys()
    (whole,), *others = each.values.values()
    for (other,) in others:
        # Another training, and nearly as good.
        assert other != whole
        assert other == pytest.approx(whole, abs=0.02)
    assert "not judged" in output
