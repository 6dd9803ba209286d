"""The rows of every format; and one sentence for every kind of damage."""

from __future__ import annotations

import codecs
import gzip
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from recsuite.datasets.tables.files import File, find_tables
from recsuite.datasets.tables.formats import ahead, batches, names_of, opened
from recsuite.datasets.tables.schema_file import Files
from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.errors import UserError
from tests.support.tables import ENDS, encoded

TABLE = pyarrow.table({"user": [1, -2, 3], "name": ["Zoë", "a,b", 'x\n"y"'], "tags": [["p", "q"], [], ["r"]]})
ROWS = b'a,b\n1,2\n\n3,4,5\n"x\ny",6\n7\n8,9\n'
PARQUET, ARROW = encoded(TABLE, "parquet"), encoded(TABLE, "arrow")


def file_of(path: Path, content: bytes, **files: str) -> File:
    path.write_bytes(content)
    return find_tables(path, Files(**files)).events[0]


def read(file: File) -> tuple[list[dict[str, Any]], list[int], list[BadRow]]:
    """The rows, the number that each has in the file, and the bad rows."""
    with opened(file) as source:
        rows, numbers = [], []
        for batch in ahead(batches(source, names_of(source))):
            rows += batch.columns.to_pylist()
            numbers += [source.number_of(batch, place) for place in range(batch.columns.num_rows)]
        return rows, numbers, source.bad


@pytest.mark.parametrize("end", ENDS)
def test_every_format_gives_the_same_rows(tmp_path: Path, end: str) -> None:
    file = file_of(tmp_path / f"a.{end}", encoded(TABLE, end))
    rows, _, bad = read(file)
    expected = TABLE.to_pylist()
    if file.is_text:
        expected = [{**row, "user": str(row["user"]), "tags": "|".join(row["tags"])} for row in expected]
    assert (rows, bad) == (expected, [])


@pytest.mark.parametrize(
    "content",
    [
        ROWS,
        codecs.BOM_UTF8 + ROWS,
        ROWS.replace(b"\n", b"\r\n"),
        gzip.compress(ROWS, mtime=0),
        ROWS.decode().encode("utf-16"),
        ROWS.replace(b",", b";"),
        ROWS.replace(b",", b"\t"),
    ],
)
def test_rows_have_the_numbers_of_their_lines_however_the_text_is_written(
    tmp_path: Path, content: bytes
) -> None:
    rows, numbers, bad = read(file_of(tmp_path / "a.csv", content))
    assert [{**row, "a": row["a"].replace("\r", "")} for row in rows] == [
        {"a": "1", "b": "2"},
        {"a": "x\ny", "b": "6"},
        {"a": "8", "b": "9"},
    ]
    assert numbers == [2, 5, 8]
    assert [row.reason for row in bad] == ["3 fields instead of 2", "1 field instead of 2"]
    assert bad[0].number == 4


def test_an_encoding_and_a_delimiter_can_be_named(tmp_path: Path) -> None:
    rows, _, _ = read(
        file_of(tmp_path / "a.csv", "a~b\né~1\n".encode("latin-1"), encoding="latin-1", delimiter="~")
    )
    assert rows == [{"a": "é", "b": "1"}]
    rows, _, _ = read(file_of(tmp_path / "b.csv", "a,b\né,1\n".encode("utf-16-le"), encoding="utf-16"))
    assert rows == [{"a": "é", "b": "1"}]


def test_json_lines_keep_every_value_and_name_the_bad_lines(tmp_path: Path) -> None:
    lines = ['{"a": 18446744073709551615, "b": "2020-01-01"}', "", '{"a": "x"}', "bad", "[1]", '{"b": "c"}']
    rows, numbers, bad = read(file_of(tmp_path / "a.jsonl", "\n".join(lines).encode()))
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
    rows, _, _ = read(file_of(tmp_path / "a.jsonl", b'{"a": "2020-01-01"}\n{"a": "2020-01-01T10:00:00Z"}\n'))
    assert rows == [{"a": "2020-01-01"}, {"a": "2020-01-01T10:00:00Z"}]


def test_a_row_of_a_megabyte_is_a_row(tmp_path: Path) -> None:
    long = "x" * 2**20
    for name, content in (
        ("a.csv", f'a,b\n1,{long}\n2,"{long}"\n'),
        ("a.jsonl", f'{{"a": 1, "b": "{long}"}}\n' * 2),
    ):
        rows, _, bad = read(file_of(tmp_path / name, content.encode()))
        assert [len(row["b"]) for row in rows] == [2**20, 2**20]
        assert bad == []


def test_deep_brackets_are_a_bad_line_and_do_not_end_the_process(tmp_path: Path) -> None:
    content = b'{"a": 1}\n{"a": ' + b"[" * 300_000 + b"]" * 300_000 + b'}\n{"a": 3}\n'
    rows, numbers, bad = read(file_of(tmp_path / "a.jsonl", content))
    assert (rows, numbers) == ([{"a": 1}, {"a": 3}], [1, 3])
    assert [(row.number, row.reason) for row in bad] == [(2, "brackets nested too deeply")]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n\n", "no first line with the names"),
        ("a.csv", b"a,b,a\n1,2,3\n", "two columns with the name 'a'"),
        (
            "a.csv",
            b"a,b\n1,\xff\n",
            '(invalid start byte); write encoding = "latin-1" or encoding = "utf-16" under [files] of',
        ),
        ("a.csv", b"a,b\n1,\0\n", "holds zero bytes"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16-le"), "holds zero bytes"),
        ("a.csv", "a,b\n1,2\n".encode("utf-32"), "is text in UTF-32"),
        ("a.csv", b'a,b\n1,"x' + b"x\n" * 10_000_000, "a row of more than 8 MiB"),
        ("a.csv.gz", gzip.compress(ROWS, mtime=0)[:-12], "Truncated compressed stream"),
        (
            "a.csv.zst",
            bytes(pyarrow.compress(ROWS, "zstd", asbytes=True))[:-4],
            "Truncated compressed stream",
        ),
        (
            "a.csv.gz",
            gzip.compress(ROWS, mtime=0)[:12] + b"\0\0\0" + gzip.compress(ROWS, mtime=0)[15:],
            "cannot be read as csv",
        ),
        ("a.csv", b"PAR1" + ROWS, "is a Parquet file, not text"),
        ("a.csv", b"PK\x03\x04" + ROWS, "is a zip archive"),
        ("a.jsonl", ROWS, "line 1: not a JSON object: Expecting value"),
        ("a.jsonl", b'{"a": "\xff"}\n', "is not text in utf-8"),
        ("a.jsonl", b'{"a": 1}' + b" " * 9_000_000, "a line of more than 4 MiB"),
        ("a.parquet", ROWS, "Parquet magic bytes not found"),
        ("a.parquet", b"", "cannot be read as parquet"),
        ("a.parquet", PARQUET[:100], "cannot be read as parquet"),
        ("a.parquet", PARQUET[:-100] + PARQUET[-90:], "cannot be read as parquet"),
        ("a.parquet.gz", gzip.compress(PARQUET, mtime=0), "is a packed file"),
        ("a.arrow", ROWS, "cannot be read as arrow"),
        ("a.arrow", b"", "cannot be read as arrow"),
        ("a.arrow", ARROW[:200], "cannot be read as arrow"),
        ("a.feather", b"FEA1" + ARROW, "is Feather of version 1"),
    ],
)
def test_damage_is_one_sentence_that_names_the_file(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    with pytest.raises(UserError) as raised:
        read(file_of(tmp_path / name, content))
    text = str(raised.value)
    assert text.startswith(str(tmp_path / name))
    assert sentence in text
    assert "\n" not in text
    assert text.endswith(".")


def test_a_header_alone_is_a_table_without_rows(tmp_path: Path) -> None:
    for content in (b"a,b", b"a,b\n", b"\na,b\r\n\r\n"):
        assert read(file_of(tmp_path / "a.csv", content)) == ([], [], [])


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    file = file_of(tmp_path / "a.csv", b"user,item\n1,2\n")
    with opened(file) as source, pytest.raises(UserError, match="has no column 'rating'; it has user, item"):
        next(batches(source, ["user", "rating"]))
