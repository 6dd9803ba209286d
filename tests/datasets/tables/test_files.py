"""Files found for a path, and their properties."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recsuite.config.config import Config
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables.formats import columns_of
from recsuite.datasets.tables.sections import Files
from recsuite.datasets.tables.source import look
from recsuite.errors import UserError
from recsuite.extras.guess.sampling import first_rows
from tests.support.tables import write

EVENTS = {"user": ["a", "b"], "item": [1, 2]}
USERS = {"user": ["a"], "country": ["DE"]}


def test_a_given_file_is_the_events_and_other_files_beside_it_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv.gz", EVENTS)
    write(tmp_path / "users.csv", USERS)
    (file,) = find_tables(path).files
    assert (file.path, file.format, file.compression, file.size) == (
        str(path),
        "csv",
        "gzip",
        path.stat().st_size,
    )


def test_a_folder_holds_events_and_the_tables_of_users_and_items(tmp_path: Path) -> None:
    for name in ("part-1.parquet", "part-0.parquet", "items/a.parquet"):
        write(tmp_path / name, EVENTS)
    write(tmp_path / "users.csv", USERS)
    for name in ("_SUCCESS", "schema.toml", ".part-0.parquet.crc", "notes.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".columns").mkdir()
    write(tmp_path / ".columns/x.parquet", EVENTS)
    tables = find_tables(tmp_path)
    assert [[Path(file.path).name for file in files] for files in tables.roles.values()] == [
        ["part-0.parquet", "part-1.parquet"],
        ["users.csv"],
        ["a.parquet"],
    ]
    assert tables.ignored == (str(tmp_path / "notes.md"),)
    assert columns_of(tables) == {
        "events": ["user", "item"],
        "users": ["user", "country"],
        "items": ["user", "item"],
    }
    assert str(first_rows(tables.events, 1).schema.types) == "[DataType(string), DataType(int64)]"
    assert first_rows(tables.users, 1).to_pydict() == {"user": ["a"], "country": ["DE"]}


def test_the_value_of_a_partition_is_a_column(tmp_path: Path) -> None:
    write(tmp_path / "date=2026-11-20/shop=a%20b/part.csv", EVENTS)
    write(tmp_path / "date=2026-11-21/shop=__HIVE_DEFAULT_PARTITION__/part.csv", EVENTS)
    tables = find_tables(tmp_path)
    assert tables.events[0].partitions == (("date", "2026-11-20"), ("shop", "a b"))
    assert columns_of(tables)["events"] == ["user", "item", "date", "shop"]
    assert first_rows(tables.events, 1).to_pylist() == [
        {"user": "a", "item": "1", "date": "2026-11-20", "shop": "a b"}
    ]


def test_a_schema_names_the_files(tmp_path: Path) -> None:
    for name in ("log/b.csv", "log/a.csv", "products.csv", "old.parquet"):
        write(tmp_path / name, EVENTS)
    tables = find_tables(tmp_path, Files(events="log/*.csv", items="products.csv"))
    assert [Path(file.path).name for file in tables.files] == ["a.csv", "b.csv", "products.csv"]
    with pytest.raises(UserError, match=r"shops\.csv is not there; put the users there"):
        find_tables(tmp_path, Files(users="shops.csv"))


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    digests = set()
    for number in range(2):
        write(tmp_path / "a.csv", {"user": [number]})
        digests.add(find_tables(tmp_path).events[0].digest)
        digests.add(find_tables(tmp_path / "a.csv").events[0].digest)
    assert len(digests) == 2


def test_files_that_are_no_tables_are_named_with_reasons_and_the_advised_entry_reads_one(
    tmp_path: Path,
) -> None:
    for name in ("train.rating", "u.base", "log", "x.7z", "README.txt"):
        (tmp_path / name).write_text("user\titem\trating\n1\t2\t3\n4\t5\t1\n")
    with pytest.raises(UserError, match="holds no table of events") as refused:
        find_tables(tmp_path)
    for reason in (
        "train.rating: the ending .rating is none of",
        "u.base: the ending .base is none of",
        "log: the ending (none) is none of",
        "x.7z: files of the ending .7z are not unpacked",
        "README.txt: it is called like a description",
    ):
        assert reason in str(refused.value)
    found = re.search(r'events = "(.*?)" under \[files\] of schema.toml', str(refused.value))
    assert found
    assert found[1] != "x.7z"
    (file,) = find_tables(tmp_path, Files(events="train.rating")).events
    assert first_rows([file], 9).column_names == ["user", "item", "rating"]


@pytest.mark.parametrize("name", ["2.csv.bz2", "2.csv.xz", "2.CSV.7z", "items.tsv.lz4", "2.csv.tar.gz"])
def test_a_table_with_a_compression_that_is_not_read_is_refused_unless_it_lies_there_unpacked(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / "1.csv", EVENTS)
    (tmp_path / "data.zip").write_bytes(b"PK")
    assert find_tables(tmp_path).ignored == (str(tmp_path / "data.zip"),)
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(UserError, match=rf"Cannot read .*{name}: files of the ending .* Fix: unpack it"):
        find_tables(tmp_path)
    # Each remedy.
    assert len(find_tables(tmp_path, Files(events="1.csv")).files) == 1
    write(tmp_path / ".".join(name.split(".")[:2]).replace("CSV", "csv"), EVENTS)
    (tmp_path / name).rename(tmp_path / name.replace("CSV", "csv"))
    assert len(find_tables(tmp_path).files) == 2


def test_contradictory_files_are_refused_with_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no table of events; give a file or a folder"):
        find_tables(tmp_path)
    with pytest.raises(UserError, match=r"nothing does not exist; give a file, a folder or a URL\."):
        find_tables(tmp_path / "nothing")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        find_tables("/dev/null")
    write(tmp_path / "a.csv", EVENTS)
    write(tmp_path / "b.parquet", EVENTS)
    with pytest.raises(
        UserError, match=r"formats csv \(a.csv\), parquet \(b.parquet\) for the events; name those"
    ):
        find_tables(tmp_path)
    (tmp_path / "b.parquet").unlink()
    write(tmp_path / "date=1/a.csv", EVENTS)
    with pytest.raises(
        UserError, match=r"partitions by date \(date=1/a.csv\), none \(a.csv\) for the events"
    ):
        find_tables(tmp_path)


def test_one_file_of_a_described_folder_is_refused_with_the_folder_to_give(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("user,item\na,b\n")
    kinds = {"user": {"column": "user"}, "item": {"column": "item"}, "label": {"kind": "clicks"}}
    lines = (f'[{name}]\n{key} = "{value}"\n' for name, keys in kinds.items() for key, value in keys.items())
    (tmp_path / "schema.toml").write_text("".join(lines))
    assert look(Config.of(data_path=str(tmp_path)).data, tmp_path) is not None
    with pytest.raises(UserError, match=rf"Fix: give --data_path {re.escape(str(tmp_path))}, or"):
        look(Config.of(data_path=str(tmp_path / "r.csv")).data, tmp_path)
