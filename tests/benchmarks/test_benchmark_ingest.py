"""The benchmark of the way from files to columns: its short form, and a hundred million events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarks import measured


def results_of(folder: Path, ids: str, *flags: object, timeout: float) -> dict[str, Any]:
    """Results of the benchmark, which leaves no events behind."""
    found: dict[str, Any]
    flags = ("--folder", folder, "--ids", ids, *flags)
    found, _ = measured("ingest", folder / "report", *flags, result=f"ingest_{ids}", timeout=timeout)
    assert [path.name for path in folder.iterdir()] == ["report"]
    return found


@pytest.mark.parametrize("ids", [pytest.param("numbers", marks=pytest.mark.soak), "texts"])
def test_columns_are_made_of_parquet_beside_pyarrow_and_each_figure_has_its_bar(
    tmp_path: Path, ids: str
) -> None:
    found = results_of(tmp_path, ids, "--events", 30_000, "--rounds", 1, timeout=100)
    assert found["pyarrow"][0]["rows"] == 30_000
    made = found["ingest"][0]
    # Some repeat an earlier one.
    assert 10_000 < made["rows"] < 30_000
    assert 0 < made["reading"] < made["all"]
    assert 0 < made["columns"] < made["all"]
    assert 0 < made["imported"] < made["peak"]
    assert [len(bar) for bar in found["bars"]] == [4, 4]


@pytest.mark.soak
def test_a_hundred_million_events_are_read_within_two_gibibytes(tmp_path: Path) -> None:
    found = results_of(tmp_path, "texts", "--events", 100_000_000, "--rounds", 1, timeout=3_600)
    assert found["ingest"][0]["peak"] < 2 * 2**30
