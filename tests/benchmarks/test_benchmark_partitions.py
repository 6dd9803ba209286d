"""The benchmark of partitions: a tiny form, and a hundred million events."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import benchmark, measured


def test_variants_are_measured_on_the_same_partitions_and_each_figure_has_its_bar(tmp_path: Path) -> None:
    flags = ("--folder", tmp_path, "--events", 20_000, "--partitions", 4, "--batch_size", 512, "--steps", 3)
    found, text = measured("partitions", tmp_path / "report", *flags, timeout=300)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    (run,) = found["rounds"]
    script = benchmark("partitions")
    for name, (_, ranks, _) in script.VARIANTS.items():
        assert [len(launch) for launch in run[name]] == [ranks, ranks]
        for rank in (rank for launch in run[name] for rank in launch):
            assert 0 < rank["anonymous"] <= rank["peak"]
            assert rank["first"] > 0 < rank["events"]
    assert len(found["bars"]) == 5
    assert "| partitions, 2 ranks |" in text


@pytest.mark.soak
def test_a_rank_of_a_hundred_million_events_stays_below_the_bar_of_memory(tmp_path: Path) -> None:
    flags = ("--folder", tmp_path, "--events", 100_000_000)
    found, _ = measured("partitions", tmp_path / "report", *flags, timeout=7_200)
    assert found["bars"][0]["reached"]
