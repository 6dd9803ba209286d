"""The command that writes a schema.toml beside somebody's tables."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest

from recsuite.config.sections.data import DataConfig
from recsuite.datasets.tables.description.reader import read_schema
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables.guessing.proposal import propose
from recsuite.datasets.tables.reading import read_tables
from recsuite.datasets.tables.schema_file import FeatureColumn, Files, ItemColumn, UserColumn, schema_path
from recsuite.errors import UserError
from tests.support.launch import EXAMPLE, python, succeeded

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
    assert lines[0].split() == ["role", "or", "feature", "column", "kind", "of", "values,", "say"]
    assert lines[1].split() == ["user", "user_id", "id", "user", "u0,", "u1,", "u2"]
    assert (
        lines[-2]
        == "the column note of the events is left out: it holds long texts, and nothing reads texts yet"
    )
    assert lines[-1] == f"wrote {written} from the first rows; correct there what is wrong"
    schema = read_schema(written)
    assert (schema.files, schema.item.title) == (Files(), "name")
    assert schema.features == {"tags": FeatureColumn("item", "tags", "list")}
    before = written.read_bytes()
    again = python(EXAMPLE, "--schema", tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.splitlines()[-1].endswith(
        f"{written} is there already, perhaps with corrections; remove it to have another one guessed."
    )
    assert written.read_bytes() == before


def test_what_else_could_be_the_label_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: Rows = [
        ["user", "item", "quantity", "returned"],
        *([r % 17, r % 23, r % 4 + 1, r % 7 // 6] for r in range(300)),
    ]
    write(tmp_path / "orders.csv", rows)
    propose(tmp_path).show()
    assert "quantity (count) could be the label too; name it in [label]\n" in capsys.readouterr().out


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
    with pytest.raises(UserError, match="Nothing says where the ids of users are among 3 columns"):
        propose(tmp_path)
    with pytest.raises(UserError, match="is not there; give a file, a folder or a URL"):
        propose(tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_tables_without_telling_names_are_told_apart_by_their_columns(tmp_path: Path) -> None:
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
def test_ids_that_a_table_of_its_own_calls_otherwise_are_found_by_their_values(
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


def test_an_unrelated_table_with_ids_of_its_own_stays_left_out(tmp_path: Path) -> None:
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
def test_ids_that_are_counted_from_one_are_those_of_whom_a_name_says(
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


def test_parts_of_one_table_are_all_taken(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"part-{part}.csv", [EVENTS[0], *EVENTS[1 + 100 * part : 101 + 100 * part]])
    assert propose(tmp_path).schema.files == Files()
