"""The data that commands of the documents and of deploy/ train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from tests.support.documents import write_default_data


@pytest.fixture(scope="session")
def few_ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `data` whose default data set has few ratings, so that a command takes seconds."""
    data = tmp_path_factory.mktemp("few") / "data"
    write_default_data(data, 4_000)
    # Compiles loops beside their source, from where clones copy the machine code.
    (folder,) = data.iterdir()
    open_columns(Config.of(data_path=str(folder)))
    return data
