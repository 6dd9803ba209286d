"""Parts of tables: a new file is read alone, and parts are made again when their inputs change."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import RawData
from recsuite.datasets.tables import parts
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables.reading import read_tables
from recsuite.datasets.tables.sections import (
    FeatureColumn,
    ItemColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
)
from recsuite.errors import UserError
from tests.support.launch import started
from tests.support.tables import write

SCHEMA = TableSchema(
    UserColumn("user"), ItemColumn("item"), LabelColumn("clicks"), timestamp=TimestampColumn("date")
)

# Reads a folder of days, and is killed meanwhile.
KILLED = """
import os, signal, sys
from recsuite.config.sections import DataConfig
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables import parts
from recsuite.datasets.tables.reading import read_tables
from recsuite.datasets.tables.sections import ItemColumn, LabelColumn, TableSchema, UserColumn

parts._describe = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
schema = TableSchema(UserColumn("user"), ItemColumn("item"), LabelColumn("clicks"))
read_tables(find_tables(sys.argv[1]), schema, DataConfig())
"""


@pytest.fixture
def names_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read, in order; a test may clear it."""
    names: list[str] = []
    make_part = parts.make_part

    def counting(folder, file, *rest):  # type: ignore[no-untyped-def]
        names.append(Path(file.path).parent.name)
        return make_part(folder, file, *rest)

    monkeypatch.setattr(parts, "make_part", counting)
    return names


def read(folder: Path, schema: TableSchema = SCHEMA) -> RawData:
    return read_tables(find_tables(folder), schema, DataConfig())


def write_day(folder: Path, day: int) -> None:
    users = [f"u{day}", "u20"]
    write(folder / f"date=2026-11-{day}/a.parquet", {"user": users, "item": [day, 1], "price": [1.0, 2.0]})


def test_a_new_day_reads_the_new_file_alone(tmp_path: Path, names_read: list[str]) -> None:
    for day in (20, 22):
        write_day(tmp_path, day)
    assert len(read(tmp_path).events.label) == 4
    assert names_read == ["date=2026-11-20", "date=2026-11-22"]
    names_read.clear()
    # It comes between the others, and its users are sorted in between theirs.
    write_day(tmp_path, 21)
    raw = read(tmp_path)
    assert names_read == ["date=2026-11-21"]
    assert raw.users["user"].tolist() == ["u20", "u21", "u22"]
    assert raw.events.user.tolist() == [0, 0, 1, 0, 2, 0]
    names_read.clear()
    read(tmp_path)
    assert names_read == []


def test_a_part_is_made_again_when_its_file_columns_or_version_change(
    tmp_path: Path, names_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_day(tmp_path, 20)
    write_day(tmp_path, 21)
    read(tmp_path)
    (folder,) = (tmp_path / ".columns/parts").iterdir()
    names_read.clear()
    # The bytes of a file.
    write(tmp_path / "date=2026-11-21/a.parquet", {"user": ["new"], "item": [1], "price": [0.5]})
    assert "new" in read(tmp_path).users["user"].tolist()
    assert names_read == ["date=2026-11-21"]
    # What is read of it; what nothing is read for changes nothing.
    names_read.clear()
    read(tmp_path, dataclasses.replace(SCHEMA, user=UserColumn("user", "customer")))
    assert names_read == []
    priced = dataclasses.replace(SCHEMA, features={"price": FeatureColumn("event", "price", "number")})
    np.testing.assert_array_equal(read(tmp_path, priced).events.features["price"], [1.0, 2.0, 0.5])
    assert len(names_read) == 2
    # Damage.
    names_read.clear()
    damaged = next(folder.rglob("0.bin"))
    damaged.write_bytes(b"\7" * damaged.stat().st_size)
    read(tmp_path, priced)
    assert len(names_read) == 1
    # The program.
    names_read.clear()
    monkeypatch.setattr(parts, "VERSION", 0)
    read(tmp_path, priced)
    assert len(names_read) == 2
    # What no file has any more takes no space.
    assert len([*folder.iterdir()]) == 2


def test_a_part_takes_the_documented_space(tmp_path: Path) -> None:
    number = 10_000
    write(tmp_path / "date=2026-11-20/a.csv", {"user": [*range(number)], "item": [1] * number})
    read(tmp_path)
    sizes = {
        path.name: path.stat().st_size for path in (tmp_path / ".columns").rglob("*.*") if path.is_file()
    }
    # User, item, time.
    assert [sizes["0.bin"], sizes["1.bin"], sizes["2.bin"]] == [4 * number, 4 * number, 8 * number]
    assert sum(sizes.values()) < 16 * number + 12 * number + 5_000


def test_tables_in_a_read_only_folder_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "date=2026-11-20/a.csv", {"user": [1], "item": [1]})
    (tmp_path / ".columns").write_text("a file where a folder is to be")
    assert len(read(tmp_path).events.label) == 1
    assert path.exists()


def test_an_error_of_the_disk_gives_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_day(tmp_path, 20)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "make_part", full)
        with pytest.raises(
            UserError, match=r"^Cannot write the columns to .*: No space left on device\. Fix: "
        ):
            read(tmp_path)
    # An error that nobody explains stays what it is.
    monkeypatch.setattr(parts, "open_part", full)
    with pytest.raises(OSError, match="No space left"):
        read(tmp_path)


def test_the_next_read_removes_only_leftovers_of_killed_reads(tmp_path: Path) -> None:
    write_day(tmp_path, 20)
    # While a part is made, which lies beside its name until it is whole.
    with started([sys.executable, "-c", KILLED, str(tmp_path)]) as child:
        assert child.wait(60) == -signal.SIGKILL
    (folder,) = (tmp_path / ".columns/parts").iterdir()
    assert len([*folder.glob(f".*.{child.pid}*")]) == 2
    # Of a process that runs, and of whatever else.
    others = [folder / f".reading.{os.getppid()}.a1b2c3d4", folder / ".mine"]
    for other in others:
        other.mkdir()
    read(tmp_path)
    assert sorted(path for path in folder.iterdir() if path.name.startswith(".")) == sorted(others)


def test_a_column_may_be_stored_as_codes_and_as_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "WAITING_BYTES", 1)
    values = pyarrow.array(["a", "b", None, "c"])
    unused = pyarrow.DictionaryArray.from_arrays(pyarrow.array([2, None, 0]), pyarrow.array(["d", "e", "b"]))
    batches = [values, unused, pyarrow.array([7, 8]), pyarrow.array(["e"])]
    with (tmp_path / "0.bin").open("wb") as file, ThreadPoolExecutor(1) as pool:
        coder = parts.Coder(file, pool)
        for batch in batches:
            coder.add(batch)
        known = coder.end()
    texts = dict(zip(known["code"].to_pylist(), known["value"].to_pylist(), strict=True))
    found = [texts.get(code) for code in np.fromfile(tmp_path / "0.bin", "<i4").tolist()]
    assert found == ["a", "b", None, "c", "b", None, "d", "7", "8", "e"]
    assert sorted(texts.values()) == ["7", "8", "a", "b", "c", "d", "e"]
