"""The benchmark of exports with a graph: its short form."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.benchmarks import benchmark
from tests.support.graphs import one_graph
from tests.support.preloaded import preloaded


def test_an_export_scores_as_a_server_and_short_rows_lose_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = benchmark("export")
    monkeypatch.setattr(script, "SECONDS", 0.01)
    write_synthetic(tmp_path / "few", 3_000, seed=0)
    with one_graph(), preloaded():
        found = script.measure(argparse.Namespace(data_path=tmp_path / "few", epochs=1))
    assert [each["rows"] for each in found["types"]] == ["float32", "float16", "int8"]
    # Each with the rows that it has.
    assert max(each["difference"] for each in found["types"]) <= 1e-5
    assert found["types"][0]["test"] > 0
    assert found["types"][2]["bytes"] < found["types"][1]["bytes"] < found["types"][0]["bytes"]
    # The report has a row for each type.
    assert all(f"| {each['rows']} " in script.render(found) for each in found["types"])
    assert len(script.judge(found)) == 2
