"""The rows of every format; and one sentence for every kind of damage."""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from recsuite.datasets.tables import formats
from recsuite.datasets.tables.files import File, find_tables
from recsuite.datasets.tables.formats import BadRow, batches, opened
from recsuite.datasets.tables.schema_file import tomllib
from recsuite.errors import UserError
from tests.support.tables import ENDS, encoded, file_of, rows_of

TABLE = pyarrow.table({"user": [1, -2, 3], "name": ["Zoë", "a,b", 'x\n"y"'], "tags": [["p", "q"], [], ["r"]]})
ROWS = b'a,b\n1,2\n\n3,4,5\n"x\ny",6\n7\n8,9\n'
PARQUET, ARROW = encoded(TABLE, "parquet"), encoded(TABLE, "arrow")


@pytest.mark.parametrize("end", ENDS)
def test_every_format_gives_the_same_rows(tmp_path: Path, end: str) -> None:
    file = file_of(tmp_path / f"a.{end}", encoded(TABLE, end))
    rows, _, bad = rows_of(file)
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
    rows, numbers, bad = rows_of(file_of(tmp_path / "a.csv", content))
    assert [{**row, "a": row["a"].replace("\r", "")} for row in rows] == [
        {"a": "1", "b": "2"},
        {"a": "x\ny", "b": "6"},
        {"a": "8", "b": "9"},
    ]
    assert numbers == [2, 5, 8]
    assert [row.reason for row in bad] == ["3 fields instead of 2", "1 field instead of 2"]
    assert bad[0].number == 4


def test_an_encoding_and_a_delimiter_can_be_named(tmp_path: Path) -> None:
    rows, _, _ = rows_of(
        file_of(tmp_path / "a.csv", "a~b\né~1\n".encode("latin-1"), encoding="latin-1", delimiter="~")
    )
    assert rows == [{"a": "é", "b": "1"}]
    rows, _, _ = rows_of(file_of(tmp_path / "b.csv", "a,b\né,1\n".encode("utf-16-le"), encoding="utf-16"))
    assert rows == [{"a": "é", "b": "1"}]


def test_a_row_of_a_megabyte_is_a_row(tmp_path: Path) -> None:
    long = "x" * 2**20
    for name, content in (
        ("a.csv", f'a,b\n1,{long}\n2,"{long}"\n'),
        ("a.jsonl", f'{{"a": 1, "b": "{long}"}}\n' * 2),
    ):
        rows, _, bad = rows_of(file_of(tmp_path / name, content.encode()))
        assert [len(row["b"]) for row in rows] == [2**20, 2**20]
        assert bad == []


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n\n", "no first line with the names"),
        ("a.csv", b"a,b,a\n1,2,3\n", "two columns with the name 'a'"),
        (
            "a.csv",
            b"a,b\n1,\xff\n",
            '(invalid start byte). Fix: write encoding = "latin-1" or encoding = "utf-16" under [files] of',
        ),
        ("a.csv", b"a,b\n1,\0\n", "holds zero bytes"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16-le"), "holds zero bytes"),
        ("a.csv", "a,b\n1,2\n".encode("utf-32"), "is text in UTF-32"),
        (
            "a.csv",
            b'a,b\n1,"x' + b"x\n" * 10_000_000,
            "as csv: a row has more than 8 MiB, as when a quote is not closed. Fix: ",
        ),
        ("a.csv.gz", gzip.compress(ROWS, mtime=0)[:-12], "Truncated compressed stream"),
        (
            "a.csv.zst",
            bytes(pyarrow.compress(ROWS, "zstd", asbytes=True))[:-4],
            "Truncated compressed stream",
        ),
        (
            "a.csv.gz",
            gzip.compress(ROWS, mtime=0)[:12] + b"\0\0\0" + gzip.compress(ROWS, mtime=0)[15:],
            "as csv: ",
        ),
        ("a.csv", b"PAR1" + ROWS, "is a Parquet file. Fix: give its name the right end"),
        ("a.csv", b"PK\x03\x04" + ROWS, "is a zip archive"),
        ("a.jsonl", ROWS, "line 1: not a JSON object: Expecting value"),
        ("a.jsonl", b'{"a": "\xff"}\n', "is not text in utf-8"),
        ("a.jsonl", b'{"a": 1}' + b" " * 9_000_000, "as jsonl: a line has more than 4 MiB. Fix: "),
        ("a.parquet", ROWS, "Parquet magic bytes not found"),
        ("a.parquet", b"", "as parquet: "),
        ("a.parquet", PARQUET[:100], "as parquet: "),
        ("a.parquet", PARQUET[:-100] + PARQUET[-90:], "as parquet: "),
        ("a.parquet.gz", gzip.compress(PARQUET, mtime=0), "is a packed file"),
        ("a.arrow", ROWS, "as arrow: "),
        ("a.arrow", b"", "as arrow: "),
        ("a.arrow", ARROW[:200], "as arrow: "),
        ("a.feather", b"FEA1" + ARROW, "is Feather of version 1"),
    ],
)
def test_damage_gives_one_message_that_names_the_file(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    with pytest.raises(UserError) as raised:
        rows_of(file_of(tmp_path / name, content))
    text = str(raised.value)
    assert re.match(rf"Cannot read {re.escape(str(tmp_path / name))}(:| as |, line ).*\. Fix: ", text)
    assert sentence in text
    assert "\n" not in text
    assert text.endswith(".")


def test_a_header_alone_is_a_table_without_rows(tmp_path: Path) -> None:
    for content in (b"a,b", b"a,b\n", b"\na,b\r\n\r\n"):
        assert rows_of(file_of(tmp_path / "a.csv", content)) == ([], [], [])


def test_a_missing_column_is_named_with_the_existing_ones(tmp_path: Path) -> None:
    file = file_of(tmp_path / "a.csv", b"user,item\n1,2\n")
    with opened(file) as source, pytest.raises(UserError, match="has no column 'rating'; it has user, item"):
        next(batches(source, ["user", "rating"]))


def test_columns_without_a_name_are_counted(tmp_path: Path) -> None:
    with opened(file_of(tmp_path / "a.csv", b"user,item,,\n1,2,3,4\n")) as source:
        assert [note.partition(": ")[2] for note in source.notes] == ["2 columns without a name skipped"]


@pytest.mark.parametrize("mark", [",", "::"])
@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_lines_may_end_with_a_carriage_return_in_files_of_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, end: str
) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 7)
    monkeypatch.setattr(formats, "CSV_BLOCK_BYTES", 101)
    lines = [f"user{mark}item", *(f"u{row}{mark}i{row}" for row in range(60))]
    expected = [{"user": f"u{row}", "item": f"i{row}"} for row in range(60)]
    content = end.join(lines)
    assert rows_of(file_of(tmp_path / "a.csv", content.encode())) == (expected, [*range(2, 62)], [])
    # Row 40 has too few fields.
    lines[41] = "u40"
    rows, numbers, bad = rows_of(file_of(tmp_path / "b.csv", end.join(lines).encode()))
    assert (rows, bad) == (expected[:40] + expected[41:], [BadRow(42, "u40", "1 field instead of 2")])
    assert numbers == [*range(2, 42), *range(43, 62)]


def test_after_a_line_too_long_for_a_block_rows_have_their_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path / "a.csv", b"a,b\n\n" + b"x" * 400 + b",1\n2,3\n")
    with opened(file) as source:
        (batch,) = batches(source, ["a", "b"])
        assert [source.number_of(batch, place) for place in range(2)] == [3, 4]
        monkeypatch.setattr(formats, "CSV_BLOCK_BYTES", 101)
        assert [source.number_of(batch, place) for place in range(2)] == [2, 3]


def refused_names(file: File) -> tuple[list[str], str]:
    """The columns that the message for a file without a header advises to write, and the message."""
    with pytest.raises(UserError, match=r"Line 1 of .* looks like data") as refused, opened(file):
        pass
    line = re.search(r"columns = \[.*?\]", str(refused.value))
    assert line
    return tomllib.loads(line[0])["columns"], str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        "U8,I7,2,1600000000\nU9,I1,5,1600000007\n",
        "U8::I7::2::1600000000\nU9::I1::5::1600000007\n",
        "U8 I7 2 1600000000\nU9 I1 5 1600000007",
    ],
)
def test_the_advice_for_a_file_without_a_header_works(tmp_path: Path, content: str) -> None:
    advised, _ = refused_names(file_of(tmp_path / "a.csv", content.encode()))
    assert advised == ["user", "item", "rating", "timestamp"]
    rows, numbers, _ = rows_of(file_of(tmp_path / "a.csv", content.encode(), columns=tuple(advised)))
    assert rows[0] == {"user": "U8", "item": "I7", "rating": "2", "timestamp": "1600000000"}
    assert numbers == [1, 2]
    short = file_of(tmp_path / "a.csv", content.encode(), columns=("user", "item"))
    with pytest.raises(UserError, match=r"must name each of the 4 columns of .*, and names 2"), opened(short):
        pass


# Values of a row, by its number, in columns of every role.
USER_ID, ITEM_ID, STARS = (
    (lambda k: k * k % 97),
    (lambda k: 214_500_000 + k * 7 % 89),
    (lambda k: k * k % 5 + 1),
)
SECONDS, ISO = (
    (lambda k: 1_600_000_000 + 37 * k),
    (lambda k: f"2014-04-{1 + k // 40:02}T10:51:{k % 60:02}.277Z"),
)


@pytest.mark.parametrize(
    ("columns", "names", "told"),
    [
        (
            (USER_ID, ISO, ITEM_ID, lambda k: 0),
            ["user", "timestamp", "item", "column_4"],
            "user and item are guesses",
        ),
        (
            (lambda k: SECONDS(k) * 1_000, USER_ID, STARS, ITEM_ID),
            ["timestamp", "user", "rating", "item"],
            "guesses",
        ),
        # The second number is the same for each item.
        (
            (USER_ID, ITEM_ID, lambda k: k * 7 % 89 % 9, SECONDS),
            ["user", "item", "column_3", "timestamp"],
            "call a column to predict rating",
        ),
        (
            (USER_ID, ITEM_ID, lambda k: k * k % 2, lambda k: 0),
            ["user", "item", "label", "column_4"],
            "guesses",
        ),
        ((lambda k: k, USER_ID, ITEM_ID, STARS), ["column_1", "user", "item", "rating"], "guesses"),
        (
            (USER_ID, lambda k: ("view", "buy")[k % 2], ITEM_ID, lambda k: f"{k % 10 / 2 + 0.5}", SECONDS),
            ["user", "column_2", "item", "rating", "timestamp"],
            "guesses",
        ),
        # A number may be missing in the first line.
        (
            (USER_ID, ITEM_ID, lambda k: STARS(k) if k % 7 else "", SECONDS),
            ["user", "item", "rating", "timestamp"],
            "guesses",
        ),
        # The session or the user, the user or the item: which is asked.
        (
            (lambda k: k // 3, USER_ID, ITEM_ID, SECONDS),
            ["column_1", "column_2", "column_3", "timestamp"],
            "do not tell which columns hold users and items",
        ),
        ((USER_ID, lambda k: f"{k} {k + 1} 7"), ["column_1", "column_2"], "do not tell which columns"),
        # Which of two numbers is the time.
        (
            (USER_ID, SECONDS, lambda k: SECONDS(k * k % 83), STARS),
            ["column_1", "column_2", "column_3", "rating"],
            "",
        ),
    ],
)
def test_names_for_columns_without_a_header_fit_their_values(
    tmp_path: Path, columns: Sequence[Callable[[int], object]], names: list[str], told: str
) -> None:
    lines = ["\t".join(str(column(k)) for column in columns) for k in range(400)]
    advised, message = refused_names(file_of(tmp_path / "a.tsv", "\n".join(lines).encode()))
    assert advised == names
    assert told in message


@pytest.mark.parametrize("header", ["", "user items", "user item item item"])
@pytest.mark.parametrize("mark", [" ", ",", "\t"])
def test_lines_of_different_lengths_are_named_with_what_to_write_instead(
    tmp_path: Path, header: str, mark: str
) -> None:
    lists = [[user, *(user * 7 * k % 30 for k in range(1, user * 5 % 11 + 3))] for user in range(1, 60)]
    lines = [header.replace(" ", mark)] * bool(header) + [mark.join(map(str, each)) for each in lists]
    with pytest.raises(
        UserError, match=r"its lines have from \d+ to 1[23] columns, as where a user"
    ) as refused:
        rows_of(file_of(tmp_path / "a.txt", "\n".join(lines).encode()))
    head = re.search("one line for each user and item, below a first line (.*?);", str(refused.value))
    assert head
    pairs = "\n".join([head[1], *(f"{user},{item}" for user, *items in lists for item in items)])
    rows, _, bad = rows_of(file_of(tmp_path / "b.txt", pairs.encode()))
    assert (len(rows), bad) == (sum(map(len, lists)) - len(lists), [])


@pytest.mark.parametrize("header", ["user,item,0,1", "user,2019,2020,2021", "user,item,v1,v2"])
def test_numbered_column_names_are_not_data(tmp_path: Path, header: str) -> None:
    with opened(file_of(tmp_path / "a.csv", f"{header}\n1,5,0.25,0.5\n".encode())) as source:
        assert source.names == header.split(",")


def test_texts_of_large_row_groups_alone_are_read_as_codes(tmp_path: Path) -> None:
    table = pyarrow.table({"device": [("phone", "desk", None)[row % 3] for row in range(10_000)]})
    found = {}
    for size in (10_000, 100):
        path = tmp_path / f"{size}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=size)
        with opened(find_tables(path).events[0]) as source:
            (batch,) = batches(source, ["device"])
        found[size] = batch.columns.column("device")
    assert pyarrow.types.is_dictionary(found[10_000].type)
    # Bringing the codes of many groups together takes ten times as long as reading texts.
    assert pyarrow.types.is_string(found[100].type)
    assert found[10_000].to_pylist() == found[100].to_pylist() == table["device"].to_pylist()


def test_texts_are_read_as_codes_when_the_file_stores_them_as_codes(tmp_path: Path) -> None:
    number = 200_000
    items = [f"item {row % 20_000}" for row in range(number)]
    # The writer stops using codes for these: their distinct texts are too many.
    texts = [f"a text without another one like it, number {row}" for row in range(number)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"item": items, "text": texts}), path)
    with opened(find_tables(path).events[0]) as source:
        (batch,) = batches(source, ["item", "text"])
    assert pyarrow.types.is_dictionary(batch.columns.column("item").type)
    assert pyarrow.types.is_string(batch.columns.column("text").type)
    assert batch.columns.column("item").to_pylist() == items


@pytest.mark.parametrize("more", [1, 2])
@pytest.mark.parametrize("mark", [",", "\t", ";", "|"])
def test_a_separator_at_the_end_of_each_row_is_a_column_without_a_name(
    tmp_path: Path, mark: str, more: int
) -> None:
    end = "tsv" if mark == "\t" else "csv"
    rows = "".join(f"{each},{each + 1},{each}.5{',' * more}\n" for each in range(60))
    file = file_of(tmp_path / f"a.{end}", f"user,item,stars\n{rows}".replace(",", mark).encode())
    found, numbers, bad = rows_of(file)
    assert found[-1] == {"user": "59", "item": "60", "stars": "59.5"}
    assert (len(found), numbers[0], bad) == (60, 2, [])


@pytest.mark.parametrize(
    "above", ["# made by x\n", "# made by x, y\n", "% a\n% b\n", "Orders\n\n", "sep=,\n", "a,b\n", '"a b"\n']
)
def test_a_line_above_the_header_is_named(tmp_path: Path, above: str) -> None:
    rows = "".join(f"{each},{each + 1},{each}.5,x\n" for each in range(9))
    file = file_of(tmp_path / "a.csv", f"{above}user,item,stars,kind\n{rows}".encode())
    with pytest.raises(UserError, match=r"a\.csv, line 1: [01] of .* rows .* as many fields .* Fix: remove"):
        rows_of(file)


@pytest.mark.parametrize("content", [b"\x01\x00\xff\xfe" * 100, b"user,item\n1,2\n", b"not gzip"])
def test_a_file_without_the_compression_of_its_extension_is_refused(tmp_path: Path, content: bytes) -> None:
    file = file_of(tmp_path / "a.csv.gz", content)
    with pytest.raises(
        UserError, match=r"a\.csv\.gz: it is not packed with gzip, as the end of its name says"
    ):
        rows_of(file)
