"""Data sets of partitions beside the same in one piece, on one, two and three ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import partition_files
from tests.support.launch import SUPPORT, read_json, succeeded, torchrun
from tests.support.partition_ranks import NUMBER

RANKS = (1, 2, 3)
Found = dict[int, dict[str, Any]]


def write_all(folder: Path) -> None:
    """Write the data sets of all cases."""
    events = partition_files.log(number=1_500)
    write = partition_files.write_partitions
    write(folder / "ratings", NUMBER, events)
    write(folder / "clicks", NUMBER, events, partition_files.CLICKS, own_users=False)
    write(folder / "labels", NUMBER, partition_files.with_more_labels(events), partition_files.LABELS)
    write(folder / "texts", NUMBER, partition_files.with_texts(events))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What came of all cases, by number of ranks."""
    folder = tmp_path_factory.mktemp("partitions")
    write_all(folder)
    for ranks in RANKS:
        succeeded(torchrun(ranks, SUPPORT / "partition_ranks.py", folder, timeout=120))
    return {ranks: read_json(folder / f"{ranks}.json") for ranks in RANKS}


def test_dummy(found: Found) -> None:
    assert found
