"""The benchmark of the loader, in its short form: all is measured; how long it took is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import measured
from tests.support.documents import PAGES, short_form
from tests.support.launch import ROOT, read_json

# It measures for long; nothing but its own script depends on it.
pytestmark = pytest.mark.soak


def test_the_benchmark_of_the_loader_shows_every_bar_and_writes_only_its_report(tmp_path: Path) -> None:
    before = [page.read_text() for page in PAGES]
    short = [*short_form("feed"), "--folder", tmp_path / "data"]
    found, printed = measured("feed", tmp_path, *short, timeout=280)
    bars = read_json(ROOT / "docs" / "feed.json")["bars"]
    # But for those that name a number of ratings, which are fewer here.
    assert all(bar["name"] in printed for bar in bars if " ratings" not in bar["name"])
    assert "Million rows/s, 100,000 ratings" in printed
    assert {"date", "machine", "versions"} <= set(found)
    assert (tmp_path / "feed.png").stat().st_size > 10_000
    # It was not asked to write.
    assert [page.read_text() for page in PAGES] == before
