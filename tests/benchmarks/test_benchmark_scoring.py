"""The benchmark of batch scoring: its short form."""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmarks import measured


def test_all_users_are_scored_as_they_are_served(tmp_path: Path) -> None:
    found, output = measured("scoring", tmp_path, "--users", 300, "--items", 60, "--ranks", 1)
    assert (found["users"], found["items"], found["ranks"]) == (300, 60, 1)
    assert found["difference"] <= 1e-6
    assert min(found["seconds"], found["peak_bytes"], found["file_bytes"]) > 0
    assert output.count("largest difference") == 1
