"""Tables of JSON lines: every value is kept, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recsuite.datasets.tables.formats import opened
from recsuite.errors import UserError
from tests.support.tables import file_of, rows_of


def test_json_lines_keep_every_value_and_name_the_bad_lines(tmp_path: Path) -> None:
    lines = ['{"a": 18446744073709551615, "b": "2020-01-01"}', "", '{"a": "x"}', "bad", "[1]", '{"b": "c"}']
    rows, numbers, bad = rows_of(file_of(tmp_path / "a.jsonl", "\n".join(lines).encode()))
    assert rows == [
        {"a": "18446744073709551615", "b": "2020-01-01"},
        {"a": "x", "b": None},
        {"a": None, "b": "c"},
    ]
    assert numbers == [1, 3, 6]
    assert [(row.number, row.reason[:17]) for row in bad] == [
        (4, "not a JSON object"),
        (5, "not a JSON object"),
    ]


def test_texts_that_look_like_times_stay_texts(tmp_path: Path) -> None:
    rows, _, _ = rows_of(
        file_of(tmp_path / "a.jsonl", b'{"a": "2020-01-01"}\n{"a": "2020-01-01T10:00:00Z"}\n')
    )
    assert rows == [{"a": "2020-01-01"}, {"a": "2020-01-01T10:00:00Z"}]


def test_deep_brackets_are_a_bad_line_and_do_not_end_the_process(tmp_path: Path) -> None:
    content = b'{"a": 1}\n{"a": ' + b"[" * 300_000 + b"]" * 300_000 + b'}\n{"a": 3}\n'
    rows, numbers, bad = rows_of(file_of(tmp_path / "a.jsonl", content))
    assert (rows, numbers) == ([{"a": 1}, {"a": 3}], [1, 3])
    assert [(row.number, row.reason) for row in bad] == [(2, "brackets nested too deeply")]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b'[\n{"user": 1},\n{"user": 2}\n]\n',
            "line 1: not a JSON object: .*Fix: write one object on each line",
        ),
        (b'{"user": 1,}\n{"user": 2,}\n', "line 1: not a JSON object: .*jq -c"),
        (b"\n// log\n# of users\n", r"line 2: not a JSON object: .*: '// log'\. Fix: "),
    ],
)
def test_json_that_is_not_lines_is_refused_with_its_first_bad_line(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as refused, opened(file_of(tmp_path / "a.json", content)):
        pass
    assert "\n" not in str(refused.value)


def test_a_list_among_single_values_is_a_bad_row(tmp_path: Path) -> None:
    lines = [{"user": 1, "item": "a"}, {"user": 2, "item": ["b"]}, {"user": 3, "item": None}]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    rows, numbers, bad = rows_of(file_of(tmp_path / "a.jsonl", content.encode()))
    assert ([row["user"] for row in rows], numbers) == ([1, 3], [1, 3])
    assert [(row.number, row.reason) for row in bad] == [
        (2, "item is a list or object, and one value in rows before")
    ]
