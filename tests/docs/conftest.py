"""The data that commands of the documents and of deploy/ train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.launch import read_json

NUM_RATINGS = 30_000


@pytest.fixture(scope="session")
def few_ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `data` whose default data set has few ratings, so that a command takes seconds."""
    data = tmp_path_factory.mktemp("few") / "data"
    folder = data / "synthetic-1000000-seed0"
    write_synthetic(folder, NUM_RATINGS, seed=0)
    says = read_json(folder / "oracle.json")
    (folder / "oracle.json").write_text(json.dumps({**says, "num_ratings": 1_000_000}))
    return data
