"""The benchmark of the network, in its short form: all is measured; how long it took is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.machines import why_not
from tests.support.benchmarks import measured

# It measures for long; nothing but its own script depends on it.
pytestmark = pytest.mark.soak


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_two_machines_send_little_beyond_the_minimum_and_learn_the_same(tmp_path: Path) -> None:
    short = ["--rounds", 1, "--steps", 4, "--ratings", 20_000, "--without", "crowded"]
    found, printed = measured("wire", tmp_path, *short)
    assert found["rates"].keys() == {"one machine", "two machines"}
    assert found["equal losses"]
    needed = found["bytes a rating that must travel"]
    assert needed.keys() == {"keys", "rows", "gradients of rows", "dense gradients"}
    # Rows of 128 bytes go to whoever asks with 4, and their gradients come back.
    assert needed["rows"] == needed["gradients of rows"] == 32 * needed["keys"]
    least = sum(needed.values())
    assert least < found["bytes a rating"]["two machines"] < 1.15 * least
    assert found["bytes a rating"]["one machine"] < 1
    assert "two machines / one machine" in printed
