"""Dialects of CSV: separators are found in the text, and a plain text needs no guess."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from recsuite.datasets.tables import formats
from recsuite.extras import dialects
from tests.support.tables import file_of, rows_of


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "user item rating\n1 2 3\n4 5 1\n"),
        ("a.dat", "user  item rating\n   1   2    3 \n4\t5 1\n"),
        ("a.dat", "user::item::rating\n1::2::3\n4::5::1\n"),
        ("a.data", "user\titem\trating\r\n1\t2\t3\r\n4\t5\t1\r\n"),
        ("a.csv", "user|item|rating\n1|2|3\n4|5|1\n"),
        ("a.inter", "user:token\titem:token\trating:float\n1\t2\t3\n4\t5\t1\n"),
        # A column without a name is skipped, wherever it stands.
        ("a.csv", "user,item,rating,\n1,2,3,x\n4,5,1,y\n"),
        ("a.csv", ",user,item,,rating\n0,1,2,x,3\n1,4,5,y,1\n"),
    ],
)
def test_the_separator_and_the_names_are_found_in_the_text(tmp_path: Path, name: str, content: str) -> None:
    rows, numbers, bad = rows_of(file_of(tmp_path / name, content.encode()))
    expected = [{"user": "1", "item": "2", "rating": "3"}, {"user": "4", "item": "5", "rating": "1"}]
    assert (rows, numbers, bad) == (expected, [2, 3], [])


def test_other_separators_within_values_are_no_separators(tmp_path: Path) -> None:
    rows, _, _ = rows_of(
        file_of(tmp_path / "a.dat", b'id::title::genres\n1::"Up", a|film::a|b\n2::Him::a|c\n')
    )
    assert rows == [
        {"id": "1", "title": '"Up", a|film', "genres": "a|b"},
        {"id": "2", "title": "Him", "genres": "a|c"},
    ]


def test_a_separator_may_lie_across_two_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", 7)
    monkeypatch.setattr(formats, "CSV_BLOCK_BYTES", 101)
    content = "user::item\n" + "".join(f"u{row}::i{row}\n" for row in range(200))
    rows, _, bad = rows_of(file_of(tmp_path / "a.dat", content.encode()))
    assert (rows, bad) == ([{"user": f"u{row}", "item": f"i{row}"} for row in range(200)], [])


def test_a_plain_text_has_the_separator_of_the_guess_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, plain = random.Random(0), 0
    texts = ["".join(draw.choices('a1,,,"\n\n\r;| :\t', k=draw.randint(0, 40))) for _ in range(20_000)]
    guesses = [dialects.sniffed(text) for text in texts]
    monkeypatch.setattr(dialects, "sniffed", lambda head: "guess")
    for text, guess in zip(texts, guesses, strict=True):
        if formats._separator_of(text) != "guess":
            plain += 1
            assert guess == ",", text
    assert plain > 1_000
    # Names and values of MovieLens need no guess.
    assert formats._separator_of("movieId,title,genres\n1,Up (2009),Drama|War\n") == ","
