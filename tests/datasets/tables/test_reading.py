"""Tables as a data set: the same from every format, however many files, and nothing silent."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets import arrays
from recsuite.datasets.columns import load_columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import ITEM, Codes, Events, RawData
from recsuite.datasets.tables import formats, parts
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables.reading import read_tables
from recsuite.datasets.tables.sections import (
    FeatureColumn,
    Files,
    ItemColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
    WeightColumn,
)
from recsuite.datasets.tables.source import TableSource
from recsuite.errors import UserError
from recsuite.extras.guess.writer import write_schema
from recsuite.serving.training_data import KnownFeatures
from tests.support.tables import ENDS, write

DAY = 1_795_132_800
USERS = [str(uuid.UUID(int=number)) for number in (7, 3)]
HOURS = [datetime.datetime(2026, 11, 20, hour, 30) for hour in range(5)]
TABLE = pyarrow.table(
    {
        "user": [USERS[0], USERS[1], USERS[0], USERS[1], USERS[0]],
        "item": [7, -1, 7, 2**62, 3],
        "stars": [1.0, 5, 3.5, 4, 2],
        "time": pyarrow.array(HOURS, pyarrow.timestamp("s")),
        "price": [1.5, 2, 2.5, None, 4],
        "tags": [["x", "y"], ["z"], ["x", "y"], None, ["y"]],
        "device": ["web", None, "app", "web", "web"],
        "released": pyarrow.array([datetime.date(2026, 11, 18)] * 4 + [None]),
        "in_stock": [True, False, True, None, True],
        "number": [1, 2, 1, None, 3],
    }
)
FEATURES = {
    "price": FeatureColumn("item", "price", "number"),
    "tags": FeatureColumn("item", "tags", "list"),
    "stock": FeatureColumn("item", "in_stock", "category"),
    "number": FeatureColumn("item", "number", "category"),
    "device": FeatureColumn("event", "device", "category"),
    "paid": FeatureColumn("event", "price", "number", "dense"),
    "hour": FeatureColumn("event", "hour(timestamp)", "category"),
    "weekday": FeatureColumn("event", "weekday(timestamp)", "category"),
    "age": FeatureColumn("event", "age_days(item.released)", "number"),
}
RATING = LabelColumn("rating", "stars", 1, 5, 4)
SCHEMA = TableSchema(
    UserColumn("user"), ItemColumn("item"), RATING, timestamp=TimestampColumn("time"), features=FEATURES
)
PLAIN = TableSchema(UserColumn("user"), ItemColumn("item"), LabelColumn("clicks"))


def read(path: Path, schema: TableSchema = SCHEMA, **flags: Any) -> RawData:
    return read_tables(find_tables(path, schema.files), schema, DataConfig(**flags))


def plain(raw: RawData) -> dict[str, Any]:
    """A data set as Python's own values, which can be compared."""

    def of(column: Any) -> Any:
        if isinstance(column, Codes):
            return [None if code < 0 else column.values[code] for code in column.codes]
        return None if column is None else [None if value != value else value for value in column.tolist()]

    dicts = raw.events.features, raw.events.more_labels, raw.events.more_weights
    events = {name: of(values) for name, values in vars(raw.events).items() if not isinstance(values, dict)}
    frames = {
        f"{entity}.{name}": of(frame[name].to_numpy(object))
        for entity, frame in (("users", raw.users), ("items", raw.items))
        for name in frame
    }
    return {**events, **frames, **{name: of(values) for found in dicts for name, values in found.items()}}


@pytest.mark.parametrize("end", ENDS)
def test_every_format_gives_the_same_data_set(tmp_path: Path, end: str) -> None:
    raw = read(write(tmp_path / f"a.{end}", TABLE))
    assert plain(raw) == {
        # By the order of the ids, which are as they came.
        "users.user": sorted(USERS),
        "items.item": [-1, 3, 7, 2**62],
        "user": [1, 0, 1, 0, 1],
        "item": [2, 0, 2, 3, 1],
        "label": [1.0, 5.0, 3.5, 4.0, 2.0],
        "time": [DAY + 3600 * hour + 1800 for hour in range(5)],
        "weight": None,
        # The newest event with a value counts.
        "items.price": [2.0, 4.0, 2.5, None],
        "items.tags": [["z"], ["y"], ["x", "y"], []],
        "items.in_stock": ["false", "true", "true", None],
        "items.number": [2, 3, 1, None],
        "items.title": ["-1", "3", "7", str(2**62)],
        # The days, since 1970, from which the ages of events to come are computed.
        "items.age_days(item.released)": [20775.0, None, 20775.0, 20775.0],
        "device": ["web", None, "app", "web", "web"],
        "price": [1.5, 2.0, 2.5, None, 4.0],
        "hour(timestamp)": [0, 1, 2, 3, 4],
        "weekday(timestamp)": [4] * 5,
        "age_days(item.released)": [2.0, 2.0, 2.0, 2.0, None],
    }
    assert raw.skipped == [
        "price varies within 1 item: the value of most rows counts, else the newest one, and 1 row has "
        "another; name it a feature of the event to keep each"
    ]
    assert [raw.events.user.dtype, raw.events.label.dtype, raw.events.time.dtype] == [
        np.int32,
        np.float32,
        np.int64,
    ]


def test_the_number_of_files_and_batches_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(write(tmp_path / "whole/a.csv", TABLE))
    monkeypatch.setattr(parts, "WAITING_BYTES", 1)
    monkeypatch.setattr(arrays, "CHUNK", 2)
    monkeypatch.setattr(arrays, "SMALL_BYTES", 8)
    for row in range(5):
        write(tmp_path / f"parts/part-{row}.csv", TABLE.slice(row, 1))
    several = read(tmp_path / "parts")
    assert plain(several) == plain(whole)
    assert several.skipped == whole.skipped
    # A large column lies on the disk, under no name.
    assert arrays._mapping_of(several.events.time) is not None
    assert {path.suffix for path in tmp_path.rglob(".columns/**/*") if path.is_file()} == {
        ".arrow",
        ".bin",
        ".json",
    }


def test_properties_come_from_the_tables_of_users_and_items(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", {"user": [1, 2], "item": ["B2", "A1"], "country": ["US", "US"]})
    write(tmp_path / "users.csv", {"user": [3, 1], "country": ["FR", "DE"]})
    write(
        tmp_path / "items.jsonl",
        {"item": ["A1", "A1", "C3"], "name": ["old", "new", None], "year": [1, 2, 3]},
    )
    schema = dataclasses.replace(
        PLAIN,
        item=ItemColumn("item", "name"),
        features={
            "country": FeatureColumn("user", "country", "category"),
            "year": FeatureColumn("item", "year", "number"),
        },
    )
    raw = read(tmp_path, schema)
    found = plain(raw)
    assert (found["user"], found["item"]) == ([0, 1], [1, 0])
    assert found["users.country"] == ["DE", None, "FR"]
    assert (found["items.item"], found["items.name"]) == (["A1", "B2", "C3"], ["new", "B2", "C3"])
    assert found["items.year"] == [2.0, None, 3.0]
    assert raw.skipped == [
        "1 user of the events has no row in the table of users: the values of that table are missing",
        "1 item of the events has no row in the table of items: the values of that table are missing",
        "name varies within 1 item: the value of most rows counts, else the last one, and 1 row has another",
        "year varies within 1 item: the value of most rows counts, else the last one, and 1 row has another",
    ]


def test_a_table_of_users_or_items_may_name_its_id_column_differently(tmp_path: Path) -> None:
    features = {
        "country": FeatureColumn("user", "country", "category"),
        "year": FeatureColumn("item", "year", "number"),
    }
    same = dataclasses.replace(PLAIN, features=features, item=ItemColumn("item", "name"))
    other = dataclasses.replace(
        same,
        user=UserColumn("user", table_column="id"),
        item=ItemColumn("item", "name", table_column="id"),
    )
    found = []
    for schema in (same, other):
        folder = tmp_path / (schema.user.table_column or "same")
        # The events may have another column of that name.
        write(folder / "log.csv", {"user": [1, 2], "item": ["B2", "A1"], "id": ["x", "y"]})
        write(folder / "users.csv", {schema.user.own_column: [3, 1], "country": ["FR", "DE"]})
        items = {schema.item.own_column: ["A1", "C3"], "name": ["new", None], "year": [1, 3]}
        write(folder / "items.jsonl", items)
        raw = read(folder, schema)
        found.append((plain(raw), raw.skipped))
    assert found[0] == found[1]
    assert found[0][0]["items.item"] == ["A1", "B2", "C3"]


def test_the_newest_event_counts_for_any_order_of_rows_and_files(tmp_path: Path) -> None:
    whole = plain(read(write(tmp_path / "whole/a.parquet", TABLE)))
    for name, order in (("turned", [4, 3, 2, 1, 0]), ("mixed", [2, 0, 4, 1, 3])):
        write(tmp_path / f"{name}-rows/a.parquet", TABLE.take(order))
        for file, row in enumerate(order):
            write(tmp_path / f"{name}-files/part-{file}.parquet", TABLE.slice(row, 1))
        for kind in ("rows", "files"):
            raw = read(tmp_path / f"{name}-{kind}")
            found = plain(raw)
            for column in ("price", "tags", "in_stock", "number"):
                assert found[f"items.{column}"] == whole[f"items.{column}"]
            assert raw.skipped[0].startswith("price varies within 1 item: ")


def test_for_equal_or_missing_times_the_last_row_counts(tmp_path: Path) -> None:
    table = {"user": [1, 2, 3], "item": [1, 1, 1], "time": [5, 5, 4], "price": [1.0, 2.0, 3.0]}
    features = {"price": FeatureColumn("item", "price", "number")}
    schema = dataclasses.replace(PLAIN, features=features)
    path = write(tmp_path / "a.csv", table)
    raw = read(path, schema)
    assert raw.items["price"].tolist() == [3.0]
    assert "else the last one, and 2 rows have another" in raw.skipped[0]
    timed = dataclasses.replace(schema, timestamp=TimestampColumn("time", "unix"))
    assert read(path, timed).items["price"].tolist() == [2.0]


def test_the_most_frequent_value_of_an_item_is_used_and_different_ones_are_counted(tmp_path: Path) -> None:
    table = {"user": [*range(8)], "item": [1, 1, 2, 1, 2, 2, 2, 3], "time": [*range(8)]}
    table |= {
        "genre": ["a", "a", "b", "x", "b", "y", "", "c"],
        "price": [1.0, 1.0, 2.0, 9.0, 3.0, 3.0, 2.0, 4.0],
    }
    features = {
        "genre": FeatureColumn("item", "genre", "category"),
        "price": FeatureColumn("item", "price", "number"),
    }
    schema = dataclasses.replace(PLAIN, features=features, timestamp=TimestampColumn("time", "unix"))
    for file in range(2):
        write(
            tmp_path / f"part-{file}.csv",
            {name: values[4 * file : 4 * file + 4] for name, values in table.items()},
        )
    raw = read(tmp_path, schema)
    assert raw.items["genre"].tolist() == ["a", "b", "c"]
    # Of the second item no price has more than half.
    assert raw.items["price"].tolist() == [1.0, 2.0, 4.0]
    assert (
        "genre varies within 2 items: the value of most rows counts, else the newest one, and 2 rows"
        in raw.skipped[0]
    )


def test_the_values_of_most_rows_are_counted_over_many_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHUNK", 2)
    chance = np.random.default_rng(7)
    items, genres = chance.integers(0, 4, 300), chance.choice(["a", "b", "c"], 300, p=[0.7, 0.2, 0.1])
    # No value of the last item has more than half of the rows.
    genres[items == 3] = chance.choice(["a", "b", "c"], int((items == 3).sum()))
    path = write(
        tmp_path / "a.csv", {"user": [*range(300)], "item": items.tolist(), "genre": genres.tolist()}
    )
    features = {"genre": FeatureColumn("item", "genre", "category")}
    raw = read(path, dataclasses.replace(PLAIN, features=features))
    expected, others = [], 0
    for item in range(4):
        values = genres[items == item].tolist()
        value, number = Counter(values).most_common(1)[0]
        expected.append(value if 2 * number > len(values) else values[-1])
        others += len(values) - values.count(expected[-1])
    assert raw.items["genre"].tolist() == expected
    assert expected[:3] == ["a"] * 3
    assert (
        f"genre varies within 4 items: the value of most rows counts, else the last one, and {others} "
        in (raw.skipped[0])
    )


def test_a_title_that_is_also_a_feature_keeps_its_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", {"user": [1, 2, 3], "item": [10, 11, 12], "color": [1, None, 3]})
    schema = dataclasses.replace(
        PLAIN,
        item=ItemColumn("item", "color"),
        features={"color": FeatureColumn("item", "color", "category")},
    )
    raw = read(path, schema)
    assert plain(raw)["items.color"] == [1, None, 3]
    assert raw.items[schema.schema().title].tolist() == ["1", "11", "3"]
    called = dataclasses.replace(PLAIN, item=ItemColumn("item", "item"))
    raw = read(path, called)
    assert raw.items["item"].tolist() == [10, 11, 12]
    assert raw.items[called.title_column].tolist() == ["10", "11", "12"]


def test_ids_become_texts_with_a_note_if_some_files_have_texts(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", {"user": [1, 10, 9], "item": [1, 2, 3]})
    write(tmp_path / "b.csv", {"user": ["x", "1", "007"], "item": [1, 2, 3]})
    raw = read(tmp_path, PLAIN)
    assert raw.users["user"].tolist() == ["007", "1", "10", "9", "x"]
    assert plain(raw)["user"] == [1, 2, 3, 4, 1, 0]
    assert raw.skipped == [
        "the ids of the column user are whole numbers in some files and texts in others: all are taken as "
        "texts"
    ]


@pytest.mark.parametrize("whole", [(), ("user", "item", "size")])
@pytest.mark.parametrize(
    ("column", "values"),
    [
        (["10.0", "9.0"], [10, 9]),
        (["10.0", "9.00"], [10, 9]),
        # Beside a word or a fraction in one of the files, all are texts.
        (["10.0", "9.0", "x"], ["10", "9", "x"]),
        (["10.0", "9.5", "9.0"], ["10", "9.5", "9"]),
    ],
)
def test_10_and_10_0_are_one_id_and_one_category(
    tmp_path: Path, whole: tuple[str, ...], column: list[str], values: list[Any]
) -> None:
    if whole and len(column) > 2:
        pytest.skip("a bad row")
    write(tmp_path / "a.csv", {"user": [10, 9], "item": [1, 2], "size": [10, 9]})
    write(tmp_path / "b.csv", {"user": column[:2], "item": ["1.0", "2.0"], "size": column[:2]})
    write(tmp_path / "c.csv", {"user": column[-1:], "item": [1], "size": column[-1:]})
    size_of_event = {"size": FeatureColumn("event", "size", "category")}
    raw = read(tmp_path, dataclasses.replace(PLAIN, features=size_of_event, files=Files(whole=whole)))
    assert {*raw.users["user"]} == {*values}
    assert raw.items["item"].tolist() == [1, 2]
    kind = type(values[0])
    assert plain(raw)["size"] == [kind(10), kind(9), *values[:2], values[-1]]


@pytest.mark.parametrize(
    ("column", "ids"),
    [
        (pyarrow.array([2.0, 1.0]), [1, 2]),
        (pyarrow.array([2**63, 5], pyarrow.uint64()), ["5", str(2**63)]),
        (pyarrow.array([b"b", b"a"]), ["a", "b"]),
        (pyarrow.array(["b", "a"]).dictionary_encode(), ["a", "b"]),
        (pyarrow.array(["2", "10"]), ["10", "2"]),
    ],
)
def test_ids_of_typed_files_are_of_their_type(tmp_path: Path, column: pyarrow.Array, ids: list[Any]) -> None:
    raw = read(write(tmp_path / "a.parquet", {"user": column, "item": [1, 2]}), PLAIN)
    assert raw.users["user"].tolist() == ids


def test_values_of_a_dictionary_without_a_row_are_no_ids(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "WAITING_BYTES", 1)
    monkeypatch.setattr(formats, "BATCH_ROWS", 2)
    indices = pyarrow.array([3, 1, 1, None, 5, 3], pyarrow.int32())
    users = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a", "b", "c", "d", "e", "f"]))
    path = write(tmp_path / "a.arrow", {"user": users, "item": [1, 2, 3, 4, 5, 6]})
    raw = read(path, PLAIN, bad_rows="skip", max_bad_rows=0.5)
    assert raw.users["user"].tolist() == ["b", "d", "f"]
    assert plain(raw)["user"] == [1, 0, 0, 2, 1]


@pytest.mark.parametrize("is_coded", [False, True])
def test_numbers_beyond_int64_become_texts_with_one_note(tmp_path: Path, is_coded: bool) -> None:
    users = pyarrow.array([5, 2**63, 2**64 - 1], pyarrow.uint64())
    column = users.dictionary_encode() if is_coded else users
    raw = read(write(tmp_path / "a.arrow", {"user": column, "item": [1, 2, 3]}), PLAIN)
    assert raw.users["user"].tolist() == [str(2**64 - 1), "5", str(2**63)]
    (note,) = raw.skipped
    assert note.endswith(
        f"a.arrow has {2**64 - 1} in the column user, and whole numbers go up to {2**63 - 1}: all values of "
        "user are taken as texts; write them as signed 64-bit integers to have them as numbers"
    )


def test_unsigned_numbers_within_int64_stay_numbers_without_a_note(tmp_path: Path) -> None:
    users = pyarrow.array([2**63 - 1, 5], pyarrow.uint64())
    raw = read(write(tmp_path / "a.parquet", {"user": users, "item": [1, 2]}), PLAIN)
    assert (raw.users["user"].tolist(), raw.skipped) == ([5, 2**63 - 1], [])


def test_the_value_of_a_partition_is_read_as_a_column(tmp_path: Path) -> None:
    for day in (20, 21):
        write(tmp_path / f"date=2026-11-{day}/a.parquet", {"user": [1], "item": [2]})
    features = {"day": FeatureColumn("event", "date", "category")}
    raw = read(tmp_path, dataclasses.replace(PLAIN, timestamp=TimestampColumn("date"), features=features))
    assert raw.events.time.tolist() == [DAY, DAY + 86_400]
    assert plain(raw)["date"] == ["2026-11-20", "2026-11-21"]


@pytest.mark.parametrize(
    ("label", "column", "labels", "weights"),
    [
        (LabelColumn("clicks"), [1, 2], [1.0, 1.0], None),
        (LabelColumn("yes_no", "y"), ["yes", "False"], [1.0, 0.0], None),
        (LabelColumn("yes_no", "y"), [1, 0], [1.0, 0.0], None),
        (LabelColumn("count", "y"), [0, 7], [0.0, np.log(8)], [1.0, 1 + np.log(8)]),
        (LabelColumn("rating", "y", -1, 10), [-1, 9.5], [-1.0, 9.5], None),
    ],
)
def test_labels_of_every_kind(
    tmp_path: Path, label: LabelColumn, column: list[Any], labels: list[float], weights: list[float] | None
) -> None:
    path = write(tmp_path / "a.parquet", {"user": [1, 2], "item": [1, 2], "y": column})
    events: Events = read(path, dataclasses.replace(PLAIN, label=label)).events
    np.testing.assert_allclose(events.label, labels, rtol=1e-6)
    assert (events.weight is None) == (weights is None)
    if weights is not None and events.weight is not None:
        np.testing.assert_allclose(events.weight, weights, rtol=1e-6)


def test_a_column_of_weights_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", {"user": [1, 2], "item": [1, 2], "w": [0.5, 2]})
    events = read(path, dataclasses.replace(PLAIN, weight=WeightColumn("w"))).events
    assert events.weight is not None
    assert events.weight.tolist() == [0.5, 2.0]


BAD = {"user": ["a", "b", "c", None], "item": [1, 2, 3, 4], "stars": ["1", "1,5", "9", "2"]}


COMMAS = ", unless decimal_commas under [files] of schema.toml lists its column"


@pytest.mark.parametrize(
    ("end", "row"),
    [("csv", "line 3"), ("tsv", "line 3"), ("jsonl", "line 2"), ("parquet", "row 2"), ("arrow", "row 2")],
)
def test_a_bad_row_is_named_by_file_row_column_and_value(tmp_path: Path, end: str, row: str) -> None:
    path = write(tmp_path / f"a.{end}", BAD)
    schema = dataclasses.replace(PLAIN, label=RATING)
    with pytest.raises(UserError) as raised:
        read(path, schema)
    assert str(raised.value) == (
        f"Cannot read {path}, {row}: stars '1,5' is not a number{COMMAS}. "
        "Fix: correct the file, or give --bad_rows skip."
    )
    with pytest.raises(UserError) as raised:
        read(path, schema, bad_rows="skip", max_bad_rows=0.5)
    assert str(raised.value) == (
        f"Cannot read {path}, {row}: stars '1,5' is not a number{COMMAS}; with it 3 of 4 rows of the file "
        "cannot be read, and --max_bad_rows 0.5 allows 2. Fix: correct the file, or give a larger "
        "--max_bad_rows."
    )
    raw = read(path, schema, bad_rows="skip", max_bad_rows=0.75)
    # Who is in a bad row alone is no user.
    assert (raw.users["user"].tolist(), raw.num_skipped) == (["a"], 3)
    assert raw.skipped == [
        f"skipped 3 bad rows of a.{end}, the first being {row} (stars '1,5' is not a number{COMMAS})"
    ]
    # What was read before is judged by the flags of today.
    with pytest.raises(UserError, match="Fix: correct the file, or give --bad_rows skip"):
        read(path, schema)


@pytest.mark.parametrize("mark", [",", "::"])
def test_a_bad_value_has_its_line_where_lines_end_with_carriage_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.setattr(formats, "CSV_BLOCK_BYTES", 101)
    path, schema = tmp_path / "a.csv", dataclasses.replace(PLAIN, label=RATING)
    rows = ["user,item,stars", *(f"u{row},i{row},3" for row in range(60))]
    rows[50] = "u,i,many"
    path.write_text("\r".join(rows).replace(",", mark))
    with pytest.raises(UserError, match="line 51: stars 'many' is not a number"):
        read(path, schema)
    raw = read(path, schema, bad_rows="skip", max_bad_rows=0.5)
    assert raw.skipped[-1].endswith("the first being line 51 (stars 'many' is not a number)")
    assert len(raw.events.label) == 59


def test_a_row_with_too_few_fields_is_reported_before_a_later_bad_value(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,item,stars\na,1,1\nb\nc,2,nine\n")
    with pytest.raises(UserError, match=r"line 3: 1 field instead of 3: 'b'\. Fix: "):
        read(path, dataclasses.replace(PLAIN, label=RATING))
    raw = read(path, dataclasses.replace(PLAIN, label=RATING), bad_rows="skip", max_bad_rows=1.0)
    assert raw.skipped[-1] == "skipped 2 bad rows of a.csv, the first being line 3 (1 field instead of 3)"


def test_an_unclosed_quote_over_several_lines_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('user,item,stars\na,1,1\nb,"2,3\nc,2,4\nd,2,4\n')
    with pytest.raises(UserError, match=r"line 3: 2 fields instead of 3, and a quote that is not closed: 'b"):
        read(path, dataclasses.replace(PLAIN, label=RATING))


def test_values_off_the_scale_and_bad_times_are_reported_with_the_requirement(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", {"user": [1], "item": [2], "stars": ["9"], "at": ["20.11.2026"]})
    with pytest.raises(UserError, match=r"stars '9' is outside of the scale from 1 to 5\. Fix: "):
        read(path, dataclasses.replace(PLAIN, label=RATING))
    for form, shown in (("iso", "iso"), ("%d/%m/%Y", '"%d/%m/%Y"')):
        with pytest.raises(UserError, match=f"at '20.11.2026' is not a time of the form {shown}. Fix: "):
            read(path, dataclasses.replace(PLAIN, timestamp=TimestampColumn("at", form)))


def test_a_zero_time_is_noted_and_a_time_in_another_unit_is_a_bad_row(tmp_path: Path) -> None:
    lines = ["user,item,time", "a,x,1700000000", "b,y,0", "c,z,1700000001"]
    schema = dataclasses.replace(PLAIN, timestamp=TimestampColumn("time", "unix"))
    (tmp_path / "a.csv").write_text("\n".join([*lines, ""]))
    assert read(tmp_path, schema).skipped == [
        "1 event has a time before May 1976, the first 1970-01-01T00:00:00, and all others are later: such "
        "events count as the oldest"
    ]
    (tmp_path / "a.csv").write_text("\n".join([*lines, "c,z,1700000000000", ""]))
    with pytest.raises(UserError, match=r"line 5: time '1700000000000' is in another unit than unix\. Fix: "):
        read(tmp_path, schema)


def test_a_file_that_is_no_table_is_skipped_with_a_note(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", {"user": [1], "item": [2]})
    for name in ("notes.md", "plot.png"):
        (tmp_path / name).write_bytes(b"\0")
    (skipped,) = read(tmp_path, PLAIN).skipped
    assert skipped.startswith("skipped 2 files taken for no table, such as notes.md; ")


def test_a_table_named_in_the_schema_is_not_reported_as_skipped(tmp_path: Path) -> None:
    write(tmp_path / "events.csv", {"user": [1], "item": [2]})
    write(tmp_path / "products.csv", {"item": [2], "kind": ["toy"]})
    assert len(read(tmp_path, PLAIN).skipped) == 1
    assert read(tmp_path, dataclasses.replace(PLAIN, files=Files(items="products.csv"))).skipped == []


def test_tables_of_users_and_items_may_lack_a_line_of_names(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text("1::7\n2::5\n")
    (tmp_path / "users.csv").write_text("1::Ann::4\n2::Bob::3\n")
    (tmp_path / "items.csv").write_text("5::a pan\n7::a pot\n")
    files = Files(
        columns=("user", "item"), user_columns=("user", "name", "age"), item_columns=("item", "label")
    )
    features = {"name": FeatureColumn("user", "name", "category")}
    item = ItemColumn("item", "label")
    raw = read(tmp_path, dataclasses.replace(PLAIN, files=files, item=item, features=features))
    assert plain(raw)["users.name"] == ["Ann", "Bob"]
    assert plain(raw)["items.label"] == ["a pan", "a pot"]
    # What was named was not found out.
    assert raw.skipped == []


@pytest.mark.parametrize("header", ["user_id,item_id\n", "userId,itemId\n", "User ID,Item ID\n", ""])
def test_a_line_with_the_names_that_were_given_is_no_row(tmp_path: Path, header: str) -> None:
    (tmp_path / "events.csv").write_text(f"{header}1,7\n2,5\n")
    schema = TableSchema(UserColumn("user_id"), ItemColumn("item_id"), LabelColumn("clicks"))
    raw = read(tmp_path, dataclasses.replace(schema, files=Files(columns=("user_id", "item_id"))))
    assert plain(raw)["items.item_id"] == [5, 7]
    assert len(raw.events.user) == 2


@pytest.mark.parametrize("value", ["x", "1.5", "1e3", "0x10", "+3", "", "NA", "1" * 19, "9" * 30, "\u0661"])
@pytest.mark.parametrize("other", ["007", " 007 "])
@pytest.mark.parametrize("column", ["item", "age"])
def test_a_value_of_a_whole_column_that_is_no_whole_number_is_a_bad_row(
    tmp_path: Path, column: str, value: str, other: str
) -> None:
    row = {"user": "3", "item": "9", "age": "20", column: value}
    (tmp_path / "a.csv").write_text(f"user,item,age\n1,{other},30\n{','.join(row.values())}\n2,-8,40\n")
    schema = dataclasses.replace(
        PLAIN, files=Files(whole=("item", "age")), features={"age": FeatureColumn("user", "age", "category")}
    )
    with pytest.raises(UserError, match=f"a.csv, line 3: {column} .*is (not a whole number|missing)"):
        read(tmp_path, schema)
    raw = read(tmp_path, schema, bad_rows="skip", max_bad_rows=0.5)
    assert raw.items["item"].tolist() == [-8, 7]
    assert raw.users["age"].tolist() == [30, 40]
    assert raw.users["age"].dtype == raw.items["item"].dtype == np.int64


def test_tables_without_an_event_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item\n")
    with pytest.raises(UserError, match="holds no event: there is no row below its header"):
        read(tmp_path, PLAIN)


YEAR = {"year": FeatureColumn("item", "year", "number")}


@pytest.mark.parametrize("end", ["csv", "jsonl"])
def test_a_word_among_the_numbers_of_a_feature_is_a_missing_value_and_counted(
    tmp_path: Path, end: str
) -> None:
    years = [str(1950 + item) for item in range(20)]
    years[17] = "unknown"
    table = {"user": ["a"] * 20, "item": list(range(20)), "year": years, "paid": years[::-1]}
    write(tmp_path / f"a.{end}", table)
    features = YEAR | {"paid": FeatureColumn("event", "paid", "number")}
    for _ in range(2):
        # The second time from the part that the first one kept.
        raw = read(tmp_path, dataclasses.replace(PLAIN, features=features))
        assert [item for item, year in enumerate(plain(raw)["items.year"]) if year is None] == [17]
        assert plain(raw)["paid"][2:4] == [None, 1966.0]
        # The first line of CSV has the names.
        number = 19 if end == "csv" else 18
        assert raw.skipped == [
            f"{name}: 1 of 20 values count as missing, the first in line {line} of a.{end} ({name} 'unknown' "
            "is not a number)"
            for name, line in (("year", number), ("paid", number - 15))
        ]
        assert raw.num_skipped == 0


def test_a_bad_date_and_an_infinite_number_of_a_feature_are_missing_values(tmp_path: Path) -> None:
    released = ["2026-11-18"] * 19 + ["soon"]
    prices = [float(number) for number in range(19)] + [np.inf]
    table = {"user": ["a"] * 20, "item": list(range(20)), "at": ["2026-11-20"] * 20}
    write(tmp_path / "a.parquet", {**table, "released": released, "price": prices})
    features = {"age": FEATURES["age"], "price": FEATURES["price"]}
    timed = dataclasses.replace(PLAIN, timestamp=TimestampColumn("at"), features=features)
    raw = read(tmp_path, timed)
    found = plain(raw)
    assert found["age_days(item.released)"] == [2.0] * 19 + [None]
    assert found["items.price"][-2:] == [18.0, None]
    assert {note.partition(":")[0] for note in raw.skipped} == {"price", "released"}


def test_a_feature_with_many_words_among_its_numbers_is_refused_with_one(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        years = ["1990"] * (10 - number) + ["unknown"] * number
        write(tmp_path / f"{name}.csv", {"user": ["a"] * 10, "item": list(range(10)), "year": years})
    schema = dataclasses.replace(PLAIN, features=YEAR)
    with pytest.raises(UserError) as refused:
        read(tmp_path, schema)
    assert "a.csv, line 11: year 'unknown' is not a number; 3 of 20 values of" in str(refused.value)
    assert 'kind = "category"' in str(refused.value)
    as_advised = {"year": dataclasses.replace(YEAR["year"], kind="category")}
    assert len(read(tmp_path, dataclasses.replace(schema, features=as_advised)).events.user) == 20


@pytest.mark.parametrize("end", ["parquet", "arrow"])
def test_a_time_outside_the_years_1_to_9999_is_a_counted_bad_row(tmp_path: Path, end: str) -> None:
    times = pyarrow.array([2**60, *range(1_795_132_800_000, 1_795_132_800_199)], pyarrow.timestamp("ms"))
    columns = {"user": [*range(200)], "item": [1] * 200, "time": times}
    path = write(tmp_path / f"a.{end}", pyarrow.table(columns))
    schema = dataclasses.replace(PLAIN, timestamp=TimestampColumn("time"))
    words = rf"row 1: time '{2**60} as timestamp\[ms\]' is outside of the years 1 to 9999"
    with pytest.raises(UserError, match=words):
        read(path, schema)
    raw = read(path, schema, bad_rows="skip")
    assert (len(raw.events.user), raw.num_skipped) == (199, 1)


@pytest.mark.parametrize("end", ["parquet", "arrow", "jsonl", "csv"])
def test_a_column_may_have_any_name(tmp_path: Path, end: str) -> None:
    odd = "\n\"\x07\x1b[31m'"
    columns = {
        "user": [*range(40)] * 2,
        "item": [*range(20)] * 4,
        "title": [f"t{odd}"] * 80,
        "kind": [odd] * 80,
    }
    write(tmp_path / f"a.{end}", pyarrow.table({name + odd: values for name, values in columns.items()}))
    schema = TableSchema(
        UserColumn(f"user{odd}"),
        ItemColumn(f"item{odd}", f"title{odd}"),
        LabelColumn("clicks"),
        features={"kind": FeatureColumn("event", f"kind{odd}", "category")},
    )
    write_schema(schema, tmp_path / "schema.toml")
    config = Config.of(data_path=str(tmp_path), split="random")
    columns_of = open_columns(config, "launch")
    assert columns_of.schema.title == f"title{odd}"
    assert load_columns(Path(columns_of.folder), tmp_path, columns_of.schema)[1] == ""


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_a_column_of_the_items_is_read_without_becoming_a_feature(tmp_path: Path, end: str) -> None:
    columns = {
        "sku": ["b", "a", "c"],
        "stock": [3, 0, None],
        "on_sale": [True, False, None],
        "price": [1, 2, 3],
    }
    write(tmp_path / f"items.{end}", pyarrow.table(columns))
    write(
        tmp_path / "events.csv", pyarrow.table({"user": ["x", "y"], "item": ["a", "b"], "kind": ["p", "q"]})
    )
    features = {"stock": FeatureColumn("item", "price", "number")}
    schema = dataclasses.replace(PLAIN, item=ItemColumn("item", table_column="sku"), features=features)
    tables = find_tables(tmp_path, schema.files)
    source = TableSource(tmp_path, tables, schema, DataConfig(), schema.schema())
    more = source.with_item_columns(["stock", "on_sale", "kind", "price"])
    assert more.schema == source.schema
    items = KnownFeatures(more.read().items, source.schema, ITEM)
    assert items.values == {"item": ["a", "b", "c"], "stock": [2, 1, 3]}
    # By the name of a feature, or else of a column.
    named = {**items.values, **items.others}
    named = {name: named[name] for name in ("stock", "price", "on_sale", "kind")}
    assert named == {
        "stock": [2, 1, 3],
        "price": [2, 1, 3],
        "on_sale": ["false", "true", None],
        "kind": ["p", "q", None],
    }
    with pytest.raises(UserError, match="table of items has no column colour; it has sku, stock, on_sale, p"):
        source.with_item_columns(["colour"])
