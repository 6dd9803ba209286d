"""The benchmark of training, in its short form: all is measured; how long it took is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.documents import short_form
from tests.support.launch import ROOT, python, read_json, succeeded

# It measures for long; nothing but its own script depends on it.
pytestmark = pytest.mark.soak

BARS = ("2 processes / plain", "2 processes / 1 process, 256", "2 processes / 1 process, 512", "peak memory")
# Numbers in a row, and the rows of all tables: the default model has features and a history too.
MODELS = {"default": (32, 2001 + 2 * 1001 + 3 + 8 + 22 + 82 + 19), "two_tables": (64, 2001 + 1001)}


def test_the_benchmark_of_training_shows_every_bar_and_leaves_a_picture(tmp_path: Path) -> None:
    benchmark, short = ROOT / "benchmarks" / "train.py", short_form("train")
    printed = succeeded(python(benchmark, *short, "--report", tmp_path, timeout=170))
    found = read_json(tmp_path / "train.json")
    assert {"date", "machine", "versions", "device"} <= set(found)
    assert found["models"].keys() == MODELS.keys()
    for name, (dim, num_rows) in MODELS.items():
        model = found["models"][name]
        for bar in BARS:
            assert any(bar in each["name"] and model["title"] in each["name"] for each in found["bars"]), bar
        (size,) = model["sizes"]
        assert size["table bytes"] == num_rows * (dim + 1) * 4
        assert all(rate > 0 for rates in size["rates"].values() for rate in rates)
        # What a step has to do takes its time whatever else it does.
        assert 0 < size["work"]["rows"] <= size["work"]["ids"]
        assert all(rate > 0 for rates in size["machine"].values() for rate in rates)
        # Two ranks exchange, and one has nobody to exchange with.
        alone, together = (size["parts"][f"here, {name}"] for name in ("1 process", "2 processes"))
        assert alone.keys() == together.keys()
        assert alone["output exchange"] < together["output exchange"]
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {3, 4}
    for part in together:
        assert sum(line.startswith(f"| {part} |") for line in tables) == len(MODELS), part
    assert (tmp_path / "train.png").stat().st_size > 10_000
