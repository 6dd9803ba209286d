"""The command that writes a schema.toml beside tables."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.csv
import pytest
from pyarrow import parquet

from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets.opening import fitted_to_tables
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.tables.files import find_tables, schema_path
from recsuite.datasets.tables.reading import read_tables
from recsuite.datasets.tables.schema_file import parse_schema, read_schema
from recsuite.datasets.tables.sections import (
    FeatureColumn,
    Files,
    ItemColumn,
    LabelColumn,
    TimestampColumn,
    UserColumn,
)
from recsuite.datasets.tables.source import locate
from recsuite.errors import UserError
from recsuite.extras.guess.proposal import propose
from tests.support.launch import EXAMPLE, python, succeeded
from tests.support.stream_reader import read, reader_of

Rows = Sequence[Sequence[object]]
EVENTS: Rows = [["user_id", "product_id", "stars", "note"]] + [
    [f"u{row % 17}", f"p{row % 23}", row % 5 + 1, f"it is the {row} time that I write how well it fits"]
    for row in range(300)
]
PRODUCTS: Rows = [["product_id", "name", "tags"]] + [
    [f"p{item}", f"Product {item}", ("new|sale", "old", "old|sale", "new|old")[item % 4]]
    for item in range(23)
]


def write(path: Path, rows: Rows) -> None:
    """A file of CSV, packed if it is called so."""
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        csv.writer(file).writerows(rows)


def test_the_command_writes_a_schema_and_shows_it_and_writes_no_other_over_it(tmp_path: Path) -> None:
    write(tmp_path / "events.csv.gz", EVENTS)
    write(tmp_path / "items.csv", PRODUCTS)
    written = tmp_path / "schema.toml"
    lines = succeeded(python(EXAMPLE, "--schema", tmp_path)).splitlines()
    assert lines[0].split()[:8] == ["role", "or", "feature", "column", "kind", "of", "values,", "say"]
    assert lines[1].split() == ["user", "user_id", "id", "user", "u0,", "u1,", "u2"]
    assert lines[-2].split()[:5] == ["not", "taken", "note", "category", "event"]
    assert lines[-2].endswith("it holds long texts, and nothing reads texts yet")
    assert lines[-1] == f"wrote {written} from the first rows; correct there what is wrong"
    schema = read_schema(written)
    assert (schema.files, schema.item.title) == (Files(), "name")
    assert schema.features == {"tags": FeatureColumn("item", "tags", "list")}
    before = written.read_bytes()
    again = python(EXAMPLE, "--schema", tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.splitlines()[-1].endswith(
        f"{written} exists already, perhaps with corrections; remove it to have another one guessed."
    )
    assert written.read_bytes() == before


STARS: Rows = [
    ["who", "what", "stars", "day", "color"],
    *(
        [f"u{r % 17}", f"p{r % 23}", r % 5 + 1, f"{r % 28 + 1}.{r % 12 + 1}.2024", "rgb"[r % 23 % 3]]
        for r in range(300)
    ),
]


def followed(message: str, **names: str) -> str:
    """The lines of a schema.toml that a message advises to write."""
    lines: list[str] = []
    for section, pairs in re.findall(r"(\[\w+\])?((?: and)? ?\w+ = (?:\"[^\"]*\"|-?\d+))", message):
        lines += [section] * bool(section) + [pairs.removeprefix(" and").strip()]
    under = re.search(r"under (\[\w+\])", message)
    lines = [under[1], *lines] if under else lines
    for role in ("user", "item"):
        if f"[{role}]" in lines:
            lines[lines.index(f"[{role}]") + 1] = f'column = "{names[role]}"'
    return "\n".join(lines) + "\n"


def test_the_advice_of_messages_completes_a_schema_when_it_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "events.csv", STARS)
    with pytest.raises(UserError, match="Cannot find the ids of users and items") as refused:
        propose(tmp_path)
    advised = followed(str(refused.value), user="who", item="what")
    assert advised == '[user]\ncolumn = "who"\n[item]\ncolumn = "what"\n'
    (tmp_path / "schema.toml").write_text(advised)
    schema = propose(tmp_path).schema
    assert (schema.user.column, schema.item.column, schema.label.column) == ("who", "what", "stars")
    assert schema.timestamp == TimestampColumn("day", "%d.%m.%Y")
    assert schema.features["color"] == FeatureColumn("item", "color", "category")
    # What was written stays, and the file is read again.
    assert (tmp_path / "schema.toml").read_text().startswith(advised.replace("\n[item]", "\n[item]"))
    assert read_schema(tmp_path / "schema.toml") == schema
    with pytest.raises(UserError, match="exists already"):
        propose(tmp_path)


def test_the_encoding_that_a_message_names_is_all_that_has_to_be_written(tmp_path: Path) -> None:
    rows = [
        '"User-ID";"Product";"Rating";"Town"',
        *(f'"{r % 17}";"P{r % 23}";"{r % 5 + 1}";"Málaga"' for r in range(300)),
    ]
    (tmp_path / "events.csv").write_text("\n".join(rows), encoding="latin-1")
    with pytest.raises(UserError, match=r'write encoding = "latin-1" .* under') as refused:
        propose(tmp_path)
    assert 'encoding = "latin-1"' in str(refused.value)
    text = '# My tables.\n[files]\nencoding = "latin-1"  # as Windows has it\ndelimiter = ";"\n'
    (tmp_path / "schema.toml").write_text(text)
    proposal = propose(tmp_path)
    assert (proposal.schema.user.column, proposal.schema.label.column) == ("User-ID", "Rating")
    assert (tmp_path / "schema.toml").read_text().startswith(text)
    found = locate(DataConfig(data_path=str(tmp_path)), tmp_path)
    assert found.table_schema == proposal.schema
    assert len(found.read().events.label) == 300


def test_zeros_without_an_answer_are_skipped_by_the_suggested_line(tmp_path: Path) -> None:
    rated: Rows = [
        ["user", "isbn", "Book-Rating"],
        *([r % 17, r % 23, (r % 2) * (r % 5 + 1) * 2] for r in range(300)),
    ]
    write(tmp_path / "events.csv", rated)
    proposal = propose(tmp_path)
    (note,) = proposal.notes
    assert "150 of 300 values are 0" in note
    proposal.path.write_text(followed(note))
    schema = propose(tmp_path).schema
    assert (schema.label.drop, schema.label.lowest, schema.label.highest) == ("0", 1.0, 10.0)
    raw = read_tables(find_tables(tmp_path, schema.files), schema, DataConfig())
    assert (len(raw.events.label), raw.events.label.min()) == (150, 2.0)
    assert raw.skipped == ['skipped 150 events of events.csv whose Book-Rating is "0", as drop says']


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('[label]\nkind = "clicks"\n', {"label": LabelColumn("clicks")}),
        ('[label]\ncolumn = "stars"\n', {}),
        ("[label]\nhighest = 7\n", {"label": LabelColumn("rating", "stars", 1.0, 7.0, 5.5, "rating")}),
        ('[timestamp]\nformat = "%m.%d.%Y"\n', {"timestamp": TimestampColumn("day", "%m.%d.%Y")}),
        ('[timestamp]\ncolumn = "day"\n', {}),
        ('[item]\ncolumn = "color"', {"item": ItemColumn("color")}),
        ('[user]\nnoun = "reader"\n', {"user": UserColumn("user_id", "reader")}),
        ("# nothing yet\n", {}),
        ('[features.x]\nof = "event"\ncolumn = "hour(timestamp)"\nkind = "category"\n', {}),
    ],
)
def test_a_schema_with_some_sections_is_completed_and_its_lines_count(
    tmp_path: Path, text: str, changed: dict[str, object]
) -> None:
    write(tmp_path / "events.csv", [["user_id", "item_id", *STARS[0][2:]], *STARS[1:]])
    guessed = propose(tmp_path).schema
    (tmp_path / "schema.toml").write_text(text)
    found = propose(tmp_path)
    assert found.is_completed
    sections = {name: getattr(guessed, name) for name in ("user", "item", "label", "timestamp")} | changed
    assert {name: getattr(found.schema, name) for name in sections} == sections
    assert {*text.splitlines()} <= {*found.path.read_text().splitlines()}
    assert read_schema(found.path) == found.schema


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[usr]\ncolumn = "x"\n', "is not a known section; did you mean"),
        (
            '[user]\ncolumn = "user"\n',
            r'\[user\] column = "user" is not a column of the events; did you mean "user_id"',
        ),
        ("[user]\ncolumn = 3\n", r"\[user\] column = 3 is not text"),
        ('[label]\nkind = "stars"\n', r'kind = "stars" is not one of'),
        ('[label]\ncolumn = "stars"\ndrop = "few"\n', r'drop = "few" is not numbers with commas'),
    ],
)
def test_a_fault_in_a_partial_schema_is_reported_and_nothing_is_written(
    tmp_path: Path, text: str, sentence: str
) -> None:
    write(tmp_path / "events.csv", EVENTS)
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(UserError, match=sentence):
        propose(tmp_path)
    assert (tmp_path / "schema.toml").read_text() == text


def test_the_schema_of_tables_in_a_folder_that_forbids_writing_lies_with_their_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recsuite.files.DATA_ROOT", tmp_path / "elsewhere")
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "events.csv", EVENTS)
    folder.chmod(0o555)
    config = Config.of(data_path=str(folder), split="random")
    try:
        first = open_columns(config)
        written = schema_path(folder)
        assert written.is_relative_to(tmp_path / "elsewhere")
        assert f"wrote {written} from the first rows" in capsys.readouterr().out
        assert [path.name for path in folder.iterdir()] == ["events.csv"]
        assert open_columns(config) == first
    finally:
        folder.chmod(0o755)


def test_existing_columns_beside_read_only_tables_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsuite.files.DATA_ROOT", tmp_path / "elsewhere")
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "events.csv", EVENTS)
    config = Config.of(data_path=str(folder), split="random")
    prepared = open_columns(config)
    folder.chmod(0o555)
    try:
        assert open_columns(config) == prepared
        assert not (tmp_path / "elsewhere").exists()
    finally:
        folder.chmod(0o755)


COLUMNS_OF_ANY_KIND = (
    *("rating", "title", "note", "price", "when", "released", "tags", "is_new", "session_id", "Unnamed: 0"),
    *("age", "user", "weekday", "hour", "history_of", "item_2", "quantity", "label", "name", "size (cm)"),
)
VALUES_OF_ANY_KIND: tuple[Callable[[int], object], ...] = (
    lambda row: row % 5 + 1,
    lambda row: ("", "NA", -1, 99)[row % 4],
    lambda row: f"{row % 23 * 1.5:.2f}",
    lambda row: f"2024-0{row % 9 + 1}-1{row % 9}",
    lambda row: f"2024-0{row % 23 % 9 + 1}-11",
    lambda row: "a|b|c"[: 2 * (row % 3) + 1],
    lambda row: "abc"[row % 17 % 3],
    lambda row: f"{row % 9},5",
    lambda row: f"it is the {row} time that I write how well it fits me",
    lambda row: row % 2,
    lambda row: row - 7,
    lambda row: "",
    lambda row: "x" if row else "\x1b[0m",
)


@pytest.mark.parametrize("seed", range(25))
def test_a_guessed_schema_can_be_read(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    columns = draw.sample(COLUMNS_OF_ANY_KIND, 8)
    values = draw.choices(VALUES_OF_ANY_KIND, k=8)
    rows = [[r % 17, f"p{r % 23}", *(value(r) for value in values)] for r in range(300)]
    write(tmp_path / "events.csv", [["user_id", "item_id", *columns], *rows])
    items = [[f"p{r}", *(value(r) for value in values[4:])] for r in range(23)]
    write(tmp_path / "items.csv", [["item_id", *draw.sample(columns, 4)], *items])
    try:
        schema = propose(tmp_path).schema
    except UserError as error:
        # A column that is called a time or a label and is none is asked about.
        if (
            not re.search("called a (time|label)|times of two forms|fit the forms", str(error))
            or (tmp_path / "schema.toml").exists()
        ):
            raise
        return
    config = DataConfig(data_path=str(tmp_path), bad_rows="skip", max_bad_rows=1.0)
    found = locate(config, tmp_path)
    assert found.table_schema == schema
    assert len(found.read().events.user) > 0


ODD_NAMES = [
    "bell\x07",
    "red\x1b[31m",
    'a "quote"',
    "two\nlines",
    "del\x7f",
    "line\u2028end",
    "c1\x9b",
    "back\\slash",
    "#hash",
]


def test_columns_with_odd_names_are_escaped_and_can_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"user_id": [row % 17 for row in range(300)], "item_id": [row % 23 for row in range(300)]}
    own = {
        name: [f"\x1b[2J{(row % 23 + place) % 4}" for row in range(300)]
        for place, name in enumerate(ODD_NAMES)
    }
    of_event = {f"{name} x": [f"v{row % 7}" for row in range(300)] for name in ODD_NAMES}
    parquet.write_table(pyarrow.table({**rows, **own, **of_event}), tmp_path / "events.parquet")
    proposal = propose(tmp_path)
    proposal.show()
    assert all(character.isprintable() or character == "\n" for character in capsys.readouterr().out)
    assert {feature.column for feature in proposal.schema.features.values()} == {*ODD_NAMES}
    # With all comments switched on it is a schema too.
    text = proposal.path.read_text()
    switched = re.sub(r'^# (\[features|\w+ = ")', r"\1", text, flags=re.MULTILINE)
    proposal.path.write_text(switched)
    schema = read_schema(proposal.path)
    assert {feature.column for feature in schema.features.values()} == {*ODD_NAMES, *of_event}
    raw = read_tables(find_tables(tmp_path), schema, DataConfig())
    assert {*of_event} <= {*raw.events.features}


@pytest.mark.parametrize("ends", [("", ".0"), (".0", "")])
def test_whole_numbers_and_floats_of_two_files_are_one_property(
    tmp_path: Path, ends: tuple[str, str]
) -> None:
    for file, end in enumerate(ends):
        numbers = range(200 * file, 200 * file + 200)
        rows = [
            [f"{n % 30}{end}", n % 17, n % 5 + 1, 1_600_000_000 + n * 100, f"{n % 17 * 2}{end}"]
            for n in numbers
        ]
        write(tmp_path / f"{file}.csv", [["user_id", "item_id", "rating", "timestamp", "price"], *rows])
    write(
        tmp_path / "items.csv", [["item_id", "size"], *([f"{item}.0", item % 3 + 0.5] for item in range(17))]
    )
    found = propose(tmp_path).schema
    assert found.features["price"] == FeatureColumn("item", "price", "number")
    raw = locate(DataConfig(data_path=str(tmp_path)), tmp_path).read()
    assert (len(raw.users), len(raw.items)) == (30, 17)
    assert raw.items["price"].tolist() == [2.0 * item for item in range(17)]
    assert raw.items["size"].isna().sum() == 0


def test_advice_on_a_label_with_commas_and_on_missing_users_is_followed(tmp_path: Path) -> None:
    events: Rows = [
        ["user_id", "item_id", "rating"],
        *([n % 30, n % 17, ("1,234", "2,500", "12")[n % 3]] for n in range(300)),
    ]
    for name in ("label", "visits"):
        (tmp_path / name).mkdir()
    write(tmp_path / "label" / "events.csv", events)
    with pytest.raises(UserError) as refused:
        propose(tmp_path / "label")
    for form, highest in (("decimal_commas", 12), ("grouping_commas", 2500)):
        assert f'[files] {form} = ["rating"]' in str(refused.value)
        (tmp_path / "label" / "schema.toml").write_text(f'[files]\n{form} = ["rating"]\n')
        assert propose(tmp_path / "label").schema.label.highest >= highest
        raw = locate(DataConfig(data_path=str(tmp_path / "label")), tmp_path).read()
        assert raw.events.label.max() == highest
    visits = [
        [n // 5, "NA" if n // 5 % 3 else n // 5 + 900, n % 17, f"2024-0{n // 5 % 9 + 1}-11"]
        for n in range(300)
    ]
    head = ["session_id", "user_id", "item_id", "eventdate"]
    write(tmp_path / "visits" / "events.csv", [head, *visits])
    proposal = propose(tmp_path / "visits")
    (line,) = re.findall(r'\[user\] (column = "session_id")$', proposal.notes[0])
    written = proposal.path.read_text()
    # In place of the line that was written, and in a schema with no other line.
    for text in (written.replace('column = "user_id"', line), f"[user]\n{line}\n"):
        proposal.path.write_text(text)
        found = locate(DataConfig(data_path=str(tmp_path / "visits")), tmp_path)
        assert found.table_schema.timestamp == TimestampColumn("eventdate")
        raw = found.read()
        assert (len(raw.users), len(raw.events.user), raw.num_skipped) == (60, 300, 0)


def test_the_schema_of_a_file_names_it(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", EVENTS)
    write(tmp_path / "other.csv", PRODUCTS)
    proposal = propose(tmp_path / "log.csv")
    assert proposal.path == schema_path(tmp_path) == schema_path(tmp_path / "log.csv")
    assert proposal.schema == read_schema(proposal.path)
    assert proposal.schema.files == Files("log.csv")
    (events,) = find_tables(tmp_path, proposal.schema.files).events
    assert events.name == str(tmp_path / "log.csv")


def test_without_users_or_tables_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no table of events"):
        propose(tmp_path)
    write(tmp_path / "log.csv", PRODUCTS)
    with pytest.raises(UserError, match="Cannot find the ids of users among 3 columns"):
        propose(tmp_path)
    with pytest.raises(UserError, match="does not exist; give a file, a folder or a URL"):
        propose(tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_tables_with_neutral_names_are_classified_by_their_columns(tmp_path: Path) -> None:
    shoppers: Rows = [["user_id", "age"], *([f"u{user}", 20 + 2 * user] for user in range(17))]
    codes: Rows = [["product_id", "code"], *([f"p{item}", 3 * item] for item in range(23))]
    towns: Rows = [["town", "height"], ["Rome", 20]]
    own: dict[str, Rows] = {"a": shoppers, "b": codes, "log": EVENTS, "stock": PRODUCTS, "towns": towns}
    for name, rows in own.items():
        write(tmp_path / f"{name}.csv", rows)
    proposal = propose(tmp_path)
    schema = proposal.schema
    assert proposal.unused == tuple(str(tmp_path / name) for name in ("b.csv", "towns.csv"))
    assert schema.files == Files("log.csv", "a.csv", "stock.csv")
    assert schema.features == {
        "age": FeatureColumn("user", "age", "number"),
        "tags": FeatureColumn("item", "tags", "list"),
    }


@pytest.mark.parametrize("name", ["items", "products"])
def test_id_columns_with_different_names_are_matched_by_values(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Numbers of suppliers are told apart too, and so are places in the file.
    head: list[object] = ["supplier_id", "id", "place", "name", "tags"]
    products = [[f"s{item}", *row[:1], 1_000 + item, *row[1:]] for item, row in enumerate(PRODUCTS[1:])]
    write(tmp_path / "events.csv", EVENTS)
    write(tmp_path / f"{name}.csv", [head, *products])
    proposal = propose(tmp_path)
    assert proposal.schema.item == ItemColumn("product_id", "name", table_column="id")
    assert proposal.schema.user == UserColumn("user_id")
    assert [*proposal.schema.features] == ["place", "tags"]
    assert proposal.unused == ()
    proposal.show()
    assert "product_id = items.id " in capsys.readouterr().out
    assert read_schema(proposal.path) == proposal.schema
    raw = read_tables(find_tables(tmp_path, proposal.schema.files), proposal.schema, DataConfig())
    assert raw.items["name"].tolist() == [f"Product {item[1:]}" for item in raw.items["product_id"]]


def test_an_unrelated_table_with_ids_of_its_own_is_not_used(tmp_path: Path) -> None:
    towns: Rows = [["id", "town"], *([f"t{town}", f"Town {town}"] for town in range(23))]
    write(tmp_path / "log.csv", EVENTS)
    write(tmp_path / "towns.csv", towns)
    proposal = propose(tmp_path)
    assert proposal.unused == (str(tmp_path / "towns.csv"),)
    assert proposal.schema.item.table_column == ""


def counted(column: str, number: int, *properties: str) -> Rows:
    """A table of things with whole numbers as ids, and properties that say nothing."""
    return [
        [column, *properties],
        *([each, *(f"{name} {each % 3}" for name in properties)] for each in range(1, number)),
    ]


@pytest.mark.parametrize(
    ("tables", "users", "items"),
    [
        ({"catalogue": ("item_id", 40)}, "", "catalogue.csv"),
        ({"goods": ("id", 40)}, "", "goods.csv"),
        ({"people": ("id", 60)}, "people.csv", ""),
        ({"people": ("id", 60), "goods": ("id", 40)}, "people.csv", "goods.csv"),
        ({"table": ("user_id", 60), "other": ("item_id", 40)}, "table.csv", "other.csv"),
        ({"users": ("id", 60), "goods": ("id", 40)}, "users.csv", "goods.csv"),
        ({"towns": ("id", 90)}, "", ""),
    ],
)
@pytest.mark.parametrize("events", ["log", "events"])
def test_consecutive_ids_belong_to_the_entity_in_the_column_name(
    tmp_path: Path, events: str, tables: dict[str, tuple[str, int]], users: str, items: str
) -> None:
    head: list[object] = ["user_id", "item_id", "rating", "timestamp"]
    log = [[each % 59 + 1, each % 39 + 1, each % 5 + 1, 1_600_000_000 + each] for each in range(600)]
    write(tmp_path / f"{events}.csv", [head, *log])
    for name, (column, number) in tables.items():
        write(tmp_path / f"{name}.csv", counted(column, number, f"color_of_{name}", f"size_of_{name}"))
    proposal = propose(tmp_path)
    found = find_tables(tmp_path, proposal.schema.files)
    assert [Path(file.path).name for file in found.users] == [users] * bool(users)
    assert [Path(file.path).name for file in found.items] == [items] * bool(items)
    assert len(proposal.unused) == len(tables) - bool(users) - bool(items)
    owners = {
        name.rpartition("_of_")[2]: feature.of
        for name, feature in proposal.schema.features.items()
        if "_of_" in name
    }
    assert owners == {
        **({users.removesuffix(".csv"): "user"} if users else {}),
        **({items.removesuffix(".csv"): "item"} if items else {}),
    }


def test_all_parts_of_a_table_are_read(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"part-{part}.csv", [EVENTS[0], *EVENTS[1 + 100 * part : 101 + 100 * part]])
    assert propose(tmp_path).schema.files == Files()


@pytest.mark.parametrize(
    ("name", "later", "pattern"),
    [
        ("events_week1.parquet", "events_week2.parquet", "events_week*.parquet"),
        ("log-2026-03-02.parquet", "log-2026-04-06.parquet", "log-*.parquet"),
        ("log.2026-03-02.parquet", "log.2026-04-06.parquet", "log.*.parquet"),
        ("top100-orders.parquet", "top200-orders.parquet", "top*-orders.parquet"),
        ("purchases.parquet", "purchases-2.parquet", "purchases.parquet"),
    ],
)
def test_a_later_file_of_the_events_is_read_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, later: str, pattern: str
) -> None:
    draw = np.random.default_rng(0)
    events = {
        "customer": draw.integers(0, 50, 400),
        "sku": draw.integers(0, 40, 400),
        "ts": 1_700_000_000 + np.arange(400),
    }
    pandas.DataFrame(events).to_parquet(tmp_path / name)
    pandas.DataFrame({"customer": np.arange(50), "country": ["DE", "FR"] * 25}).to_parquet(
        tmp_path / "customers.parquet"
    )
    assert propose(tmp_path).schema.files.events == pattern
    pandas.DataFrame(events).to_parquet(tmp_path / later)
    config = Config.of(data_path=str(tmp_path), task="ranking")
    found = fitted_to_tables(config, ["data_path"])
    said = capsys.readouterr().out
    is_read = "*" in pattern
    assert len(find_tables(tmp_path, read_schema(tmp_path / "schema.toml").files).events) == (
        2 if is_read else 1
    )
    assert (f"not read: {later}; called like the events" in said) != is_read
    assert found.model.task == "ranking"


def test_tables_with_other_names_are_no_parts_and_the_advice_for_the_other_one_works(tmp_path: Path) -> None:
    head: list[object] = ["User_ID", "Toy_ID", "Rating"]
    pairs = [[each % 59 + 1, each % 39 + 1] for each in range(600)]
    write(tmp_path / "toy_history.csv", [head, *([*pair, 1] for pair in pairs)])
    write(tmp_path / "toy_ratings.csv", [head, *([*pair, sum(pair) % 5 + 1] for pair in pairs)])
    write(tmp_path / "toy_info.csv", counted("toy_ids", 40, "price"))
    proposal = propose(tmp_path)
    assert proposal.schema.files == Files("toy_ratings.csv", "", "toy_info.csv")
    (note,) = (note for note in proposal.notes if "toy_history" in note)
    assert note.startswith("toy_ratings.csv is read as the events; toy_history.csv has users and items too")
    line = re.search('events = ".*?"', note)
    assert line
    text = proposal.path.read_text().replace('events = "toy_ratings.csv"', line[0])
    schema = parse_schema(text)
    (events,) = find_tables(tmp_path, schema.files).events
    assert Path(events.path).name == "toy_history.csv"


def lines_of(note: str) -> str:
    """The whole schema.toml that a note on other events advises."""
    line = re.search(
        'replace all lines of schema.toml by (\\[files\\]) and, below it, (events = ".*?")', note
    )
    assert line
    return f"{line[1]}\n{line[2]}\n"


@pytest.mark.parametrize(
    ("other", "rated"), [("to_read", "ratings"), ("wishes", "books_of_users"), ("events", "ratings")]
)
def test_of_two_tables_of_events_one_with_a_label_is_read_and_the_advice_for_the_other_gives_its_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str, rated: str
) -> None:
    pairs = [[each % 59 + 1, each * 7 % 39 + 1] for each in range(900)]
    write(tmp_path / f"{other}.csv", [["user_id", "book_id"], *pairs, *pairs])
    write(
        tmp_path / f"{rated}.csv",
        [["user_id", "book_id", "rating"], *([*pair, sum(pair) % 5 + 1] for pair in pairs[:500])],
    )
    write(tmp_path / "books.csv", counted("book_id", 40, "shelf"))
    kinds = {}
    text = ""
    for _ in range(2):
        (tmp_path / "schema.toml").write_text(text)
        proposal = propose(tmp_path)
        (events,) = find_tables(tmp_path, proposal.schema.files).events
        raw = read_tables(find_tables(tmp_path, proposal.schema.files), proposal.schema, DataConfig())
        kinds[Path(events.path).stem] = proposal.schema.label.kind, len(raw.events.user)
        assert [*proposal.schema.features] == ["shelf"]
        proposal.show()
        assert "neither" not in capsys.readouterr().out
        notes = [note for note in proposal.notes if "has users and items too" in note]
        # The user has chosen.
        assert len(notes) == (not text)
        text = lines_of(notes[0]) if notes else ""
    # The documented name has the events in any case.
    assert [*kinds] == ([other, rated] if other == "events" else [rated, other])
    assert kinds[other][0] == "clicks"
    assert kinds[rated] == ("rating", 500)


@pytest.mark.parametrize("without", ["train", "test"])
@pytest.mark.parametrize("number", [2, 3])
def test_the_names_of_the_only_header_are_those_of_the_files_without_one(
    tmp_path: Path, without: str, number: int
) -> None:
    head: list[object] = ["user_id", "item_id", "click", "c1", "timestamp"]
    rows = [[row % 17, row % 23, row % 3 % 2, 0, 10**9 + 3_600 * row] for row in range(600)]
    names = ("train", "test", "valid")[:number]
    for place, name in enumerate(names):
        part = rows[place * 200 : place * 200 + 200]
        write(tmp_path / f"{name}.csv", part if name == without else [head, *part])
    proposal = propose(tmp_path)
    assert proposal.schema.files.columns == tuple(head)
    assert [f"{without}.csv has no line with the names" in note for note in proposal.notes] == [True]
    assert proposal.schema.label == LabelColumn("yes_no", "click", noun="event")
    found = locate(DataConfig(data_path=str(tmp_path)), tmp_path)
    assert found.table_schema == proposal.schema
    raw = found.read()
    assert (len(raw.events.label), raw.events.label.sum()) == (
        200 * number,
        sum(row[2] for row in rows[: 200 * number]),
    )
    assert raw.num_skipped == 0


def test_the_names_of_a_header_are_not_those_of_a_file_with_other_values(tmp_path: Path) -> None:
    write(
        tmp_path / "ratings.csv",
        [["user_id", "item_id", "rating"], *([r % 17, r % 23, r % 5] for r in range(99))],
    )
    write(tmp_path / "things.csv", [[r % 23, f"Thing {r % 23}", r % 23] for r in range(23)])
    with pytest.raises(UserError, match=r"Line 1 of .*things\.csv looks like data"):
        propose(tmp_path)


@pytest.mark.parametrize("name", ["train.rating", "u.base", "click.log"])
def test_a_text_of_another_ending_is_read_after_following_the_messages(tmp_path: Path, name: str) -> None:
    rows = [[row % 17, row % 23 + 50, row % 5 + 1, 10**9 + 3_600 * row] for row in range(300)]
    write(tmp_path / name, rows)
    text = "[files]\n"
    for sentence, pattern in (
        ("holds no table of events", 'events = ".*?"'),
        ("like data", r"columns = \[.*?\]"),
    ):
        with pytest.raises(UserError, match=sentence) as refused:
            locate(DataConfig(data_path=str(tmp_path)), tmp_path)
        line = re.search(pattern, str(refused.value))
        assert line
        text += f"{line[0]}\n"
        (tmp_path / "schema.toml").write_text(text)
    found = locate(DataConfig(data_path=str(tmp_path)), tmp_path)
    schema = found.table_schema
    assert (schema.user.column, schema.item.column, schema.label.kind) == ("user", "item", "rating")
    assert (schema.timestamp, len(found.read().events.label)) == (TimestampColumn("timestamp", "unix"), 300)


def test_followed_names_for_clicks_without_a_header_train_and_names_that_are_not_told_are_asked_for(
    tmp_path: Path,
) -> None:
    rows = [
        [row // 4, f"2014-04-01T10:{row % 60:02}:51.277Z", 214_500_000 + row * 7 % 90] for row in range(300)
    ]
    write(tmp_path / "clicks.dat", [[*row, 0] for row in rows])
    with pytest.raises(UserError, match="looks like data") as refused:
        propose(tmp_path)
    line = re.search(r"columns = \[.*?\]", str(refused.value))
    assert line
    (tmp_path / "schema.toml").write_text(f"[files]\n{line[0]}\n")
    schema = propose(tmp_path).schema
    assert (schema.user.column, schema.item.column, schema.label.kind) == ("user", "item", "clicks")
    raw = locate(DataConfig(data_path=str(tmp_path)), tmp_path).read()
    assert {*map(str, raw.items["item"])} == {str(row[2]) for row in rows}
    (tmp_path / "schema.toml").write_text(
        '[files]\ncolumns = ["column_1", "timestamp", "column_3", "column_4"]\n'
    )
    with pytest.raises(UserError, match=r"Cannot find the ids of users and items among 4 columns") as refused:
        propose(tmp_path)
    with (tmp_path / "schema.toml").open("a") as file:
        file.write(followed(str(refused.value), user="column_1", item="column_3"))
    schema = propose(tmp_path).schema
    assert (schema.user.column, schema.item.column) == ("column_1", "column_3")


def test_a_part_of_one_row_or_with_another_column_does_not_decide_for_all(tmp_path: Path) -> None:
    head: list[object] = ["user_id", "item_id", "rating", "device"]
    rows = [[each % 59 + 1, each % 39 + 1, each % 5 + 1, "web"] for each in range(600)]
    write(tmp_path / "ratings_2019.csv", [["user_id", "item_id", "rating"], [1, 1, 1]])
    write(tmp_path / "ratings_2020.csv", [head, *rows[:300]])
    # In another order of columns.
    write(tmp_path / "ratings_2021.csv", [head[::-1], *(row[::-1] for row in rows[300:])])
    proposal = propose(tmp_path)
    assert proposal.schema.files == Files()
    assert (proposal.schema.label.kind, proposal.schema.label.column) == ("rating", "rating")
    schema = dataclasses.replace(
        proposal.schema, features={"device": FeatureColumn("event", "device", "category")}
    )
    raw = read_tables(find_tables(tmp_path), schema, DataConfig())
    assert len(raw.events.user) == 601
    assert [int(label) for label in raw.events.label[1:6]] == [1, 2, 3, 4, 5]
    assert sum("ratings_2019.csv has no column device: it is missing" in note for note in raw.skipped) == 1


def test_tables_without_both_users_and_items_are_not_joined_silently(tmp_path: Path) -> None:
    write(tmp_path / "lines.csv", [["order_id", "product_id"], *([row // 5, row % 7] for row in range(100))])
    write(tmp_path / "orders.csv", [["order_id", "user_id"], *([row, row % 9] for row in range(20))])
    with pytest.raises(UserError, match="No table has columns that are called after users and items"):
        propose(tmp_path)


def test_files_of_a_split_are_named_one_by_one_beside_a_table_of_items(tmp_path: Path) -> None:
    rows = [[f"u{row % 17}", f"p{row % 23}", row % 5 + 1] for row in range(300)]
    for name, part in (("train", rows[:200]), ("test", rows[200:])):
        write(tmp_path / f"{name}.csv", [["user_id", "product_id", "stars"], *part])
    write(tmp_path / "products.csv", PRODUCTS)
    proposal = propose(tmp_path)
    assert proposal.schema.files == Files("test.csv, train.csv", "", "products.csv")
    tables = find_tables(tmp_path, proposal.schema.files)
    assert [Path(file.path).name for file in tables.files] == ["test.csv", "train.csv", "products.csv"]


def test_a_table_of_items_is_found_beside_events_whose_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", [[f"u{row % 17}", f"p{row % 23}", row % 5 + 1] for row in range(300)])
    write(tmp_path / "products.csv", PRODUCTS)
    lines = 'events = "log.csv"\ncolumns = ["user_id", "product_id", "stars"]\n'
    (tmp_path / "schema.toml").write_text(f"[files]\n{lines}")
    proposal = propose(tmp_path)
    assert proposal.schema.files.items == "products.csv"
    assert "tags" in proposal.schema.features


def test_files_without_a_header_can_be_several(tmp_path: Path) -> None:
    for part in range(2):
        write(
            tmp_path / f"part-{part}.csv",
            [[f"u{row % 17}", f"p{row % 23}", row % 5 + 1] for row in range(99)],
        )
    (tmp_path / "schema.toml").write_text('[files]\ncolumns = ["user", "item", "rating"]\n')
    assert len(find_tables(tmp_path, propose(tmp_path).schema.files).events) == 2


def test_a_stream_of_a_file_with_an_odd_name_in_such_a_folder_is_made_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "".join(ODD_NAMES)
    folder.mkdir()
    rows: list[list[object]] = [["user_id", "product_id", "stars", "timestamp"]]
    rows += [[f"u{row % 17}", f"p{row % 23}", row % 5 + 1, 10**9 + 3600 * row] for row in range(300)]
    write(folder / f"{'-'.join(ODD_NAMES)}.csv", rows)
    propose(folder)
    config = Config.of(data_path=str(folder), stream=True, duplicates="keep")
    columns = read(reader_of(config), config)
    assert columns.num_train == 300
    assert all(note.isprintable() for note in columns.notes)


def test_a_file_with_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "bewertung\udce4.csv", EVENTS)
    with pytest.raises(UserError, match=r"bewertung\\udce4\.csv is not UTF-8; rename it"):
        propose(tmp_path)


def test_guessing_ten_thousand_columns_takes_a_few_times_their_reading(tmp_path: Path) -> None:
    draw, rows = np.random.default_rng(0), 200
    columns: dict[str, Any] = {"user_id": draw.integers(0, 40, rows), "item_id": draw.integers(0, 30, rows)}
    columns |= {"rating": draw.integers(1, 6, rows), "timestamp": 10**9 + 60 * np.arange(rows)}
    columns |= {f"x{number}": draw.normal(size=rows).round(4) for number in range(9_996)}
    pyarrow.csv.write_csv(pyarrow.table(columns), tmp_path / "events.csv")

    def seconds_of(call: Callable[[Path], object]) -> float:
        before = time.process_time()
        call(tmp_path / "events.csv")
        return time.process_time() - before

    of_reading = min(seconds_of(pandas.read_csv) for _ in range(2))
    assert seconds_of(propose) < 12 * of_reading
    assert read_schema(tmp_path / "schema.toml").user.column == "user_id"
