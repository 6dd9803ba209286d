"""The benchmark of tables on a disk, in its short form; how long it took is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import measured
from tests.support.memory_groups import memory_group

# It measures for long; nothing but its own script depends on it.
pytestmark = pytest.mark.soak


def test_tables_on_a_disk_learn_what_tables_in_memory_learn(tmp_path: Path) -> None:
    # Skips where no group can be made.
    with memory_group(2**30):
        pass
    found, printed = measured("storage", tmp_path, "--rows", 100_000, "--ratings", 20_000, "--rounds", 1)
    for case in found["cases"].values():
        results = [case[name][0] for name in ("memory", "disk", "limited", "mapped") if name in case]
        assert len(results) == 3
        assert len({result["loss"] for result in results}) == 1
        assert case["limited"][0]["counts"]["requested"] > 0
    assert "memory / budget" in printed
