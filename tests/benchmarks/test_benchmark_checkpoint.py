"""The benchmark of dumps, in its short form: what it says of bytes is exact; times are not looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarks import measured
from tests.support.documents import short_form
from tests.support.launch import read_json

# It measures for long; nothing but its own script depends on it.
pytestmark = pytest.mark.soak

ROWS = 20_000
DIM = 64
# Its number and its raw value, its weights, and the state of its optimizer.
BYTES_OF_A_ROW = 8 + 8 + 4 * DIM + 4
BARS = (
    "full checkpoint, 2 ranks",
    "load, 1 rank, cached",
    "load, 1 rank, from disk",
    "delta of 1 %",
    "peak",
    "tracking",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Output of the benchmark, its report, and its working folder."""
    folder, report = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("report")
    _, printed = measured("checkpoint", report, *short_form("checkpoint"), "--folder", folder)
    return printed, report, folder


@pytest.fixture(scope="module")
def size(run: tuple[str, Path, Path]) -> Any:
    """Results for the single size of the table."""
    (size,) = read_json(run[1] / "checkpoint.json")["sizes"]
    return size


def test_the_benchmark_of_dumps_shows_every_bar_and_leaves_a_picture(run: tuple[str, Path, Path]) -> None:
    printed, report, _ = run
    found = read_json(report / "checkpoint.json")
    assert {"date", "machine", "versions"} <= set(found)
    for name in BARS:
        assert any(bar["name"].startswith(name) for bar in found["bars"]), name
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert f"{ROWS:,} rows" in lines[0]
    assert (report / "checkpoint.png").stat().st_size > 10_000


def test_the_benchmark_of_dumps_leaves_nothing_else(run: tuple[str, Path, Path]) -> None:
    assert list(run[2].iterdir()) == []


def test_the_bytes_of_a_delta_are_those_of_the_rows_touched(size: Any) -> None:
    few, some, many = (size["deltas"][share][0] for share in ("0.001", "0.01", "0.1"))
    assert [delta["rows"] for delta in (few, some, many)] == [20, 200, 2000]
    # Beside the rows only numbers of another length differ.
    for more, less in ((many, some), (some, few)):
        in_rows = BYTES_OF_A_ROW * (more["rows"] - less["rows"])
        assert more["bytes"] - less["bytes"] == pytest.approx(in_rows, abs=100)


def test_a_dump_holds_the_bytes_of_all_shards(size: Any) -> None:
    assert sum(size["shard bytes"]) >= ROWS * (DIM + 1) * 4
    (load,) = size["loads"]
    assert sum(size["shard bytes"]) < load["bytes"] < size["dump bytes"]
