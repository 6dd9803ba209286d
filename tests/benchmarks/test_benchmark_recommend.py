"""The benchmark of recommendations: its short form."""

from __future__ import annotations

from pathlib import Path

from recsuite.runtime.process import RuntimeContext
from tests.support.launch import ROOT, python, read_json, succeeded
from tests.support.trained import make_trained


def test_recommending_is_measured_beside_scoring_every_item_and_gives_the_same_scores(
    synthetic_folder: Path, context: RuntimeContext, tmp_path: Path
) -> None:
    trained = make_trained(synthetic_folder, context, tmp_path / "dumps")
    benchmark = ROOT / "benchmarks" / "recommend.py"
    output = succeeded(python(benchmark, trained.folder, "--rounds", 2, "--report", tmp_path))
    found = read_json(tmp_path / "recommend.json")
    # Those that the training has seen.
    (movies,) = [table.rows - 1 for table in trained.columns.tables if table.name == "movie"]
    assert found["items"] == movies
    assert found["difference"] <= 1e-6
    assert min(found["recommend"] + found["score"]) > 0
    assert output.count("times the cost of recommending") == 1
