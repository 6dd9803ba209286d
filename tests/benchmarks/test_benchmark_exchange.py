"""The benchmark of what ranks send, in its short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import measured

# It counts for long; nothing but its own script depends on it.
pytestmark = pytest.mark.soak


def test_distinct_ids_are_fewer_bytes_and_those_of_the_plan(tmp_path: Path) -> None:
    short = ["--ranks", 2, "--ratings", 20_000, "--items", 20_000, "--batch", 256, "--steps", 2]
    found, printed = measured("exchange", tmp_path, *short)
    assert found["largest difference to the plan"] == 0
    for by_ranks in found["bytes"].values():
        for kind in ("ids", "rows", "gradients"):
            assert 0 < by_ranks["2"]["distinct ids"][kind] < by_ranks["2"]["each id"][kind]
    assert "counted bytes and those of the plan" in printed
