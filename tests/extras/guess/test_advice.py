"""Advice on tables: what a message says to write is written, and a training then has the right roles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import recsuite
from example import make_loss, make_model
from recsuite.datasets.tables.schema_file import read_schema
from recsuite.errors import UserError

ROWS = 240
SMALL = {"epochs": 1, "embedding_dim": 8, "batch_size": 64, "mlp_dims": (), "preset": "none"}
# A key with its value, and the forms of a remedy.
VALUE = r'(?:\[[^\]]*\]|"[^"]*")'
KEY = rf"(\w+) = ({VALUE})"
UNDER = rf"{KEY}(?: or \w+ = {VALUE})? under \[(\w+)\]"
SUCH_AS = rf"under \[(\w+)\] of schema\.toml, such as {KEY}"
LINES = rf"\[(\w+)\](?: and)?((?: \w+ = {VALUE})+)"
# The roles that a followed schema has: kind and column of the label, user, item, time.
Roles = tuple[str, str, str, str, str]


def lines_of(heading: str, *columns: Sequence[object], mark: str = ",") -> str:
    return "\n".join(
        [heading] * bool(heading) + [mark.join(map(str, row)) for row in zip(*columns, strict=True)]
    )


USERS, ITEMS = [row * 7 % 31 + 1 for row in range(ROWS)], [row * 5 % 47 + 101 for row in range(ROWS)]
STARS = [(user + item) % 5 + 1 for user, item in zip(USERS, ITEMS, strict=True)]
SECONDS = [1_600_000_000 + 3_600 * row for row in range(ROWS)]
DAYS = [f"{row % 12 + 1:02d}.{row % 9 + 1:02d}.2021" for row in range(ROWS)]
MISSING = ["NA" if row % 3 else user for row, user in enumerate(USERS)]
RATED: Roles = ("rating", "rating", "user", "item", "")

# What a person writes for NAME.
NAMES = {"user": '"who"', "item": '"what"'}
# Name to the files of a folder, flags, and the roles at the end.
CASES: dict[str, tuple[dict[str, str], dict[str, Any], Roles]] = {
    "no header": (
        {"a.csv": lines_of("", USERS, ITEMS, STARS, SECONDS)},
        {},
        ("rating", "rating", "user", "item", "timestamp"),
    ),
    "another ending": ({"train.rating": lines_of("user,item,rating", USERS, ITEMS, STARS)}, {}, RATED),
    "latin-1": ({"a.csv": lines_of("user,item,rating,café", USERS, ITEMS, STARS, ITEMS)}, {}, RATED),
    "commas of unclear meaning": (
        {"a.tsv": lines_of("user\titem\tplays", USERS, ITEMS, [f"{star},234" for star in STARS], mark="\t")},
        {},
        ("rating", "plays", "user", "item", ""),
    ),
    "a label of texts": (
        {"a.csv": lines_of("user,item,rating", USERS, ITEMS, [f"{star} stars" for star in STARS])},
        {},
        ("clicks", "", "user", "item", ""),
    ),
    "days or months": (
        {"a.csv": lines_of("user,item,rating,date", USERS, ITEMS, STARS, DAYS)},
        {},
        ("rating", "rating", "user", "item", "date"),
    ),
    "most users missing": (
        {
            "a.csv": lines_of(
                "session_id,user,item,rating", [row // 4 for row in range(ROWS)], MISSING, ITEMS, STARS
            )
        },
        {},
        ("rating", "rating", "session_id", "item", ""),
    ),
    "a row without a user": (
        {"a.csv": lines_of("user,item,rating", ["", *USERS[1:]], ITEMS, STARS)},
        {},
        RATED,
    ),
    "two tables of events": (
        {
            "wishes.csv": lines_of("user,item", USERS * 2, ITEMS * 2),
            "ratings.csv": lines_of("user,item,rating", USERS, ITEMS, STARS),
        },
        {},
        ("clicks", "", "user", "item", ""),
    ),
    "words among numbers": (
        {
            "events.csv": lines_of("user,item,rating", USERS, ITEMS, STARS),
            "items.csv": lines_of(
                "item,year", range(101, 148), [*range(1970, 2012), *["new", "?"] * 2, "late"]
            ),
            "schema.toml": '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n[label]\nkind = "rating"\n'
            'column = "rating"\nlowest = 1\nhighest = 5\nliked = 4\n[features.year]\nof = "item"\n'
            'column = "year"\nkind = "number"\n',
        },
        {},
        RATED,
    ),
    "columns without known names": (
        {"a.csv": lines_of("who,what,rating", USERS, ITEMS, STARS)},
        {},
        ("rating", "rating", "who", "what", ""),
    ),
    "a split by time without times": (
        {"a.csv": lines_of("user,item,rating", USERS, ITEMS, STARS)},
        {"split": "time"},
        RATED,
    ),
    "a sequence without times": (
        {"a.csv": lines_of("user,item", USERS, ITEMS)},
        {"task": "sequence", "split": "leave_one_out", "history": 5},
        ("clicks", "", "user", "item", ""),
    ),
}


def with_line(text: str, section: str, key: str, value: str) -> str:
    """Return a schema.toml with a line in a section, instead of the one with the same key."""
    before, head, after = text.partition(f"[{section}]\n")
    own, mark, rest = after.partition("\n[")
    lines = "".join(f"{line}\n" for line in own.splitlines() if not line.startswith(f"{key} ="))
    return f"{before}\n[{section}]\n{key} = {value}\n{lines if head else ''}{mark}{rest}"


def follow(told: str, folder: Path, flags: dict[str, Any]) -> None:
    """Do what the first remedy in a message says."""
    path = folder / "schema.toml"
    text = path.read_text() if path.exists() else ""
    if "replace all lines of schema.toml by [files]" in told:
        text, told = "", told.partition("below it, ")[2].replace(": the", " under [files]")
    lines: list[tuple[str, str, str]] = []
    if under := re.search(UNDER, told):
        lines = [(under[3], under[1], under[2])]
    elif such := re.search(SUCH_AS, told):
        lines = [(such[1], such[2], such[3])]
    elif 'kind = "category" in the section' in told:
        lines = [("features.year", "kind", '"category"')]
    else:
        # Of two remedies the first.
        firsts = [match for match in re.finditer(LINES, told) if not told[: match.start()].endswith('"] or ')]
        lines = [(match[1], *pair) for match in firsts for pair in re.findall(KEY, match[2])]
    for section, key, value in lines:
        text = with_line(text, section, key, NAMES.get(section, "") if value == '"NAME"' else value)
    if lines:
        path.write_text(text)
        return
    given = re.search(
        r"--(split|order|bad_rows) (\w+)", told.rpartition("give --")[1] + told.rpartition("give --")[2]
    )
    assert given, f"no remedy in: {told}"
    flags[given[1]] = given[2]


@pytest.mark.parametrize("name", CASES)
def test_a_training_ends_with_the_right_roles_after_following_what_messages_say(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, flags, wanted = CASES[name]
    flags = {**flags}
    for file, text in files.items():
        (tmp_path / file).write_bytes(text.encode("latin-1"))
    number_followed = 0
    while True:
        try:
            recsuite.fit(tmp_path, model=make_model, loss=make_loss, **{**SMALL, **flags})
            told = capsys.readouterr().out
        except UserError as refused:
            told = f"{capsys.readouterr().out}{refused}"
        else:
            schema = read_schema(tmp_path / "schema.toml")
            time = schema.timestamp.column if schema.timestamp else ""
            label = schema.label
            if (label.kind, label.column, schema.user.column, schema.item.column, time) == wanted:
                break
        number_followed += 1
        assert number_followed <= 3, told
        follow(told, tmp_path, flags)
    assert number_followed
