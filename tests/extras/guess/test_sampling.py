"""First rows of the files of a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from recsuite.extras.guess.sampling import first_rows
from tests.support.tables import encoded, file_of


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(
    "values", [(1, "a"), (True, 3), (1, [2]), ([1.5], ["a"]), ([1], {"a": 1}), ({"a": 1}, 2)]
)
def test_first_rows_of_several_types_are_texts_with_and_without_a_last_line_end(
    tmp_path: Path, values: tuple[Any, Any], end: str
) -> None:
    rows = [{"user": number, "x": values[number % 2]} for number in range(4)]
    content = "\n".join(map(json.dumps, rows)) + end
    found = first_rows([file_of(tmp_path / "a.jsonl", content.encode())], 10)
    assert found["user"].to_pylist()[:1] == [0]
    assert pyarrow.types.is_integer(found["user"].type)
    if pyarrow.types.is_string(found["x"].type):
        assert {*found["x"].to_pylist()} <= {
            value if isinstance(value, str) else json.dumps(value) for value in values
        }


def test_first_rows_have_no_time_that_python_lacks(tmp_path: Path) -> None:
    far = pyarrow.array([2**60, 5], pyarrow.timestamp("ms", "Asia/Tokyo"))
    parts = pyarrow.StructArray.from_arrays([far], ["at"])
    listed = pyarrow.ListArray.from_arrays([0, 1, 2], far)
    table = pyarrow.table({"user": [1, 2], "when": far, "seen": listed, "parts": parts})
    found = first_rows([file_of(tmp_path / "a.parquet", encoded(table, "parquet"))], 10)
    assert found["when"].is_valid().to_pylist() == [False, True]
    assert len(found.to_pylist()) == 2
