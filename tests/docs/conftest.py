"""The data that commands of the documents and of deploy/ train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.documents import write_default_data


@pytest.fixture(scope="session")
def few_ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `data` whose default data set has few ratings, so that a command takes seconds."""
    data = tmp_path_factory.mktemp("few") / "data"
    write_default_data(data, 30_000)
    return data
