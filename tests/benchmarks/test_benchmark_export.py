"""The benchmark of exports with a graph: its short form."""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmarks import measured


def test_an_export_scores_as_a_server_and_short_rows_lose_little(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    found, _ = measured("export", tmp_path, "--data_path", synthetic_folder, "--epochs", 1)
    assert [each["rows"] for each in found["types"]] == ["float32", "float16", "int8"]
    # Each with the rows that it has.
    assert max(each["difference"] for each in found["types"]) <= 1e-5
    assert found["types"][0]["test"] > 0
    assert found["types"][2]["bytes"] < found["types"][1]["bytes"] < found["types"][0]["bytes"]
