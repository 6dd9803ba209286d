"""The benchmark of recommendations: its short form."""

from __future__ import annotations

from pathlib import Path

from example import train
from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext
from tests.support.benchmarks import measured


def test_recommending_is_measured_beside_scoring_every_item_and_gives_the_same_scores(
    synthetic_folder: Path, context: RuntimeContext, tmp_path: Path
) -> None:
    dumps = tmp_path / "dumps"
    config = Config.of(data_path=str(synthetic_folder), save_dir=str(dumps), dump=True, epochs=1)
    train(config, context)
    found, output = measured("recommend", tmp_path, dumps, "--rounds", 2)
    # Those that the training has seen.
    (movies,) = [table.rows - 1 for table in open_columns(config).tables if table.name == "movie"]
    assert found["items"] == movies
    assert found["difference"] <= 1e-6
    assert min(found["recommend"] + found["score"]) > 0
    assert output.count("times the cost of recommending") == 1
