"""Guessed roles, kinds and features of common tables, and the reasons why columns are unused."""

from __future__ import annotations

import dataclasses
import datetime
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsuite.config.sections import DataConfig
from recsuite.datasets.tables.schema_file import given_in, parse_schema, tomllib
from recsuite.datasets.tables.sections import (
    EventTypes,
    FeatureColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
)
from recsuite.datasets.tables.source import locate
from recsuite.datasets.tables.validation import validate
from recsuite.datasets.tables.values import times
from recsuite.errors import UserError
from recsuite.extras.guess.guessing import (
    AGE_TELLS,
    OF_EVENT,
    OUTCOME,
    SAME_NAME,
    guess,
    table_name,
    words_of,
)
from recsuite.extras.guess.overview import describe
from recsuite.extras.guess.proposal import propose
from recsuite.extras.guess.writer import SkippedColumn, text_of

ROWS, USERS, ITEMS = 2_000, 150, 60
RNG = np.random.default_rng(0)
USER, ITEM = RNG.integers(0, USERS, ROWS), RNG.integers(0, ITEMS, ROWS)
UUIDS = [str(uuid.UUID(int=7919 * user**9 + user)) for user in range(USERS)]
SECONDS = 1_700_000_000 + np.cumsum(RNG.integers(60, 9_000, ROWS))
ISO = [datetime.datetime.fromtimestamp(int(time), datetime.timezone.utc).isoformat() for time in SECONDS]
TIMES = {
    "weekday": FeatureColumn("event", "weekday(timestamp)", "category"),
    "hour": FeatureColumn("event", "hour(timestamp)", "category"),
}
SENTENCE = "It arrived late, was smaller than it looked, and still I like it very much, number {}."


def texts(columns: Mapping[str, Any]) -> pa.Table:
    """A table as a text file gives it."""
    return pa.table(
        {name: ["" if each is None else str(each) for each in column] for name, column in columns.items()}
    )


def guessed(columns: Mapping[str, Any], typed: bool = False, **own: pa.Table) -> TableSchema:
    """Return the guess for some events, after a check that a validator accepts it and a file holds it."""
    schema, left_out, _ = guess({"events": pa.table(columns) if typed else texts(columns), **own})
    names = {"events": [*columns], **{role: table.column_names for role, table in own.items()}}
    validate(schema, names)
    text = text_of(schema, left_out)
    assert parse_schema(text) == schema
    # Whatever was left out can be switched on, but for a second use of a name.
    switched = re.sub(r"\n# (?=\[(features\.|weight\])|(of|column|kind|input|separator) = )", "\n", text)
    num_weights = sum(omission.is_weight for omission in left_out)
    if num_weights < 2 and not any(omission.why == SAME_NAME for omission in left_out):
        whole = parse_schema(switched)
        assert len(whole.features) == len(schema.features) + len(left_out) - num_weights
        assert bool(whole.weight) == bool(schema.weight or num_weights)
    return schema


def left_out(columns: Mapping[str, Any], **own: pa.Table) -> dict[str, str]:
    """The reasons why columns are left out."""
    found: list[SkippedColumn] = guess({"events": texts(columns), **own})[1]
    return {omission.feature.column: omission.why for omission in found}


RATINGS = {
    "userId": USER + 1,
    "movieId": ITEM + 1,
    "rating": RNG.choice([0.5, 2, 3.5, 4, 5], ROWS),
    "timestamp": SECONDS,
}
RATED = {"user": USER, "item": ITEM, "rating": RNG.choice([1, 2, 3, 4, 5], ROWS), "timestamp": SECONDS}
SHOP = {
    "customer_id": [UUIDS[user] for user in USER],
    "product_id": [f"B{item:04}X" for item in ITEM],
    "purchased": RNG.integers(0, 2, ROWS),
    "price": [round(2.5 * item + 0.99, 2) for item in ITEM],
    "country": [("DE", "FR", "US")[user % 3] for user in USER],
    "category": [f"shoes-{item % 9}" for item in ITEM],
    "device": RNG.choice(["phone", "desktop"], ROWS),
    "discount": RNG.random(ROWS).round(3),
    "event_time": ISO,
}


@pytest.mark.parametrize("typed", [False, True])
def test_ratings_of_films(typed: bool) -> None:
    schema = guessed(RATINGS, typed)
    assert (schema.user.column, schema.item.column) == ("userId", "movieId")
    assert schema.label == LabelColumn("rating", "rating", 0.5, 5.0, 3.875)
    assert schema.timestamp == TimestampColumn("timestamp", "unix")
    assert (schema.features, schema.weight) == (TIMES, None)


@pytest.mark.parametrize("typed", [False, True])
def test_a_shop_with_texts_as_ids_and_features_of_all_three(typed: bool) -> None:
    schema = guessed(SHOP, typed)
    assert (schema.user.column, schema.item.column) == ("customer_id", "product_id")
    assert schema.label == LabelColumn("yes_no", "purchased", noun="event")
    assert schema.timestamp == TimestampColumn("event_time", "iso")
    assert schema.features == {
        "country": FeatureColumn("user", "country", "category"),
        "price": FeatureColumn("item", "price", "number"),
        "category": FeatureColumn("item", "category", "category"),
        **TIMES,
    }
    assert left_out(SHOP) == {"device": OF_EVENT, "discount": OF_EVENT}


def test_clicks_are_events_without_a_label() -> None:
    schema = guessed({"visitorid": USER, "itemid": ITEM, "timestamp": SECONDS * 1000})
    assert (schema.user.column, schema.item.column) == ("visitorid", "itemid")
    assert schema.label == LabelColumn("clicks")
    assert schema.timestamp == TimestampColumn("timestamp", "unix_ms")


@pytest.mark.parametrize("name", ["plays", "play_count", "score"])
def test_counts_have_a_few_large_values_or_a_name_of_counts(name: str) -> None:
    counts = np.minimum(RNG.zipf(1.6, ROWS), 5_000)
    schema = guessed({"user": [f"u{user}" for user in USER], "track": [f"t{i}" for i in ITEM], name: counts})
    assert (schema.user.column, schema.item.column, schema.timestamp) == ("user", "track", None)
    assert (schema.label.kind, schema.label.column, schema.label.liked) == ("count", name, 1.0)


@pytest.mark.parametrize("values", [("true", "false"), ("Yes", "No"), (True, False), (1, 0), ("1.0", "0.0")])
def test_yes_and_no(values: tuple[Any, Any]) -> None:
    answers = [values[each] for each in RNG.integers(0, 2, ROWS)]
    schema = guessed(
        {"uid": USER, "ad": [f"ad{item}" for item in ITEM], "is_click": answers, "slot": USER % 4}
    )
    assert (schema.user.column, schema.item.column) == ("uid", "ad")
    assert (schema.label.kind, schema.label.column) == ("yes_no", "is_click")
    assert schema.features == {"slot": FeatureColumn("user", "slot", "category")}


REVIEWS = {
    "overall": RNG.integers(1, 6, ROWS).astype(float),
    "reviewTime": [f"{1 + i % 12:02} {1 + i % 28}, 2014" for i in range(ROWS)],
    "reviewerID": [f"A{user:05}" for user in USER],
    "asin": [f"B00{item:04}" for item in ITEM],
    "style": [("red", "blue", None)[each] for each in RNG.integers(0, 3, ROWS)],
    "reviewText": [SENTENCE.format(i) for i in range(ROWS)],
    "unixReviewTime": SECONDS // 86_400 * 86_400,
}


def test_reviews_with_texts() -> None:
    schema = guessed(REVIEWS)
    assert (schema.user.column, schema.item.column) == ("reviewerID", "asin")
    assert schema.label == LabelColumn("rating", "overall", 1.0, 5.0, 4.0, "rating")
    assert schema.timestamp == TimestampColumn("unixReviewTime", "unix")
    # The times are days, so there is no hour.
    assert schema.features == {"weekday": TIMES["weekday"]}
    assert left_out(REVIEWS) == {
        "style": OF_EVENT,
        "reviewTime": "it holds times, and the events have others",
        "reviewText": "it holds long texts, and nothing reads texts yet",
    }


SONGS = {
    "song_id": range(ITEMS),
    "title": [f"Song {song}, part {song % 3}" for song in range(ITEMS)],
    "genres": [("Rock|Pop", "Pop", "Jazz|Rock|Soul", "Jazz|Pop|Rock")[song % 4] for song in range(ITEMS)],
    "released": [f"{1990 + song % 30}-03-0{1 + song % 9}" for song in range(ITEMS)],
    "seconds": [180.5 + song for song in range(ITEMS)],
    "code": [f"{song:03}-x" for song in range(ITEMS)],
    "reissue_of": [f"{song:03}-x" if song % 3 else "" for song in range(ITEMS)],
    "empty": [""] * ITEMS,
    "label": ["EMI"] * ITEMS,
}


def test_music_with_lists_and_dates_in_an_item_table() -> None:
    events = {"listener": [UUIDS[user] for user in USER], "song_id": ITEM, "at": ISO}
    schema = guessed(events, items=texts(SONGS))
    assert (schema.user.column, schema.item.column, schema.item.title) == ("listener", "song_id", "title")
    assert schema.label == LabelColumn("clicks")
    assert schema.features == {
        "genres": FeatureColumn("item", "genres", "list"),
        "seconds": FeatureColumn("item", "seconds", "number"),
        **TIMES,
    }
    assert left_out(events, items=texts(SONGS)) == {
        "released": AGE_TELLS,
        "code": "nearly all of its values differ, as those of an id do",
        "reissue_of": "nearly all of its values differ, as those of an id do",
        "empty": "it is empty",
        "label": "it has one value",
    }
    del events["at"]
    assert left_out(events, items=texts(SONGS))["released"] == (
        "it holds dates, and without times of the events these tell no age"
    )
    # Where no items are ranked, the age of one gives nothing away.
    rated = guessed({**events, "at": ISO, "rating": RNG.integers(1, 6, ROWS)}, items=texts(SONGS))
    assert rated.features["released_age"] == FeatureColumn("event", "age_days(item.released)", "number")


def test_a_column_of_the_event_is_written_as_a_comment_with_its_reason_and_three_values() -> None:
    events = {**RATINGS, "device": ["phone", "desktop", "tablet", "tv"] * (ROWS // 4)}
    schema, omissions, _ = guess({"events": texts(events)})
    assert "device" not in schema.features
    comment = (
        f"# {OF_EVENT}; values, say: phone, desktop, tablet\n"
        '# [features.device]\n# of = "event"\n# column = "device"\n# kind = "category"\n'
    )
    assert comment in text_of(schema, omissions)
    (row,) = [
        line
        for line in describe(schema, {"events": texts(events)}, omissions).splitlines()
        if "phone" in line
    ]
    assert row.startswith("not taken")
    assert row.endswith(OF_EVENT)


@pytest.mark.parametrize(
    "name",
    [
        *("is_like", "isLike", "long_view", "play_time_ms", "helpful_vote", "Review-Count", "average_stars"),
        *("useful", "num_reviews", "popularity", "ratings_count", "members", "returned", "liked_at_all"),
    ],
)
def test_a_column_that_could_be_a_label_is_not_a_feature(name: str) -> None:
    people = texts({"user": range(USERS), name: RNG.random(USERS), "age": RNG.random(USERS)})
    events = {"user": USER, "item": ITEM, "is_click": RNG.integers(0, 2, ROWS), "x": RNG.random(ROWS)}
    of_items = 7 * (ITEM % 9) + 1
    for found in (
        left_out(events, users=people),
        left_out({**events, name: of_items}),
        left_out({**events, name: RNG.random(ROWS)}),
    ):
        assert found[name] == OUTCOME


@pytest.mark.parametrize("number", [1, 5])
def test_a_few_contradictions_leave_a_property_with_its_item_and_are_counted(number: int) -> None:
    genre = np.array([f"g{item % 7}" for item in ITEM], object)
    genre[50 : 50 + number] = "other"
    found = guess({"events": texts({**RATINGS, "genre": genre})})
    assert found.schema.features["genre"] == FeatureColumn("item", "genre", "category")
    (note,) = found.notes
    assert note.startswith(f"the column genre of the items: in {number} event")


@pytest.mark.parametrize(
    "values",
    [
        # Nearly always the same, whoever and whatever it is of.
        (RNG.random(ROWS) < 0.004).astype(int),
        # Of the item in nine of ten events.
        np.where(RNG.random(ROWS) < 0.1, "other", [f"g{item % 7}" for item in ITEM]),
    ],
)
def test_a_column_with_many_contradictions_is_of_the_event(values: np.ndarray) -> None:
    assert left_out({**RATINGS, "promo": values})["promo"] == OF_EVENT


@pytest.mark.parametrize("missing", ["NA", "n/a", "#N/A", "<NA>", "", "null", "None", "\\N"])
def test_events_without_a_user_are_counted_with_the_flag_that_skips_them(missing: str) -> None:
    users = [f"u{row % 90}" if row % 3 > 1 else missing for row in range(ROWS)]
    found = guess({"events": texts({**RATINGS, "userId": users})})
    (note,) = found.notes
    assert "the column userId has no id in 1,334 of 2,000 events" in note
    assert "--bad_rows skip --max_bad_rows 0.75 skips them" in note


@pytest.mark.parametrize(
    ("values", "ends", "drop", "line"),
    [
        ([-1, 2, 4, 6, 8, 10], (1, 10), "-1", 'drop = "-1"'),
        ([-1, 1, 2, 3, 4, 5], (1, 5), "-1", 'drop = "-1"'),
        ([1, 2, 3, 4, 5, 99], (1, 5), "99", 'drop = "99"'),
        ([-9.5, -3, 0.5, 9.5, 99], (-10, 10), "99", 'drop = "99"'),
        ([0, 0, 0, 0, 0, 2, 4, 6, 8, 10], (0, 10), "", 'write drop = "0" and lowest = 1 under [label]'),
        ([0, 0, 0, 0, 1, 2, 3, 4, 5], (0, 5), "", 'write drop = "0" and lowest = 1 under [label]'),
        ([-1, 0, 1], (-1, 1), "", ""),
        ([-2, -1, 0, 1, 2], (-2, 2), "", ""),
        ([0, 1, 2, 3, 4, 5], (0, 5), "", ""),
        ([1, 2, 3, 4, 5], (1, 5), "", ""),
    ],
)
def test_values_apart_from_the_scale_are_counted_with_the_line_to_write(
    values: list[float], ends: tuple[float, float], drop: str, line: str
) -> None:
    for name in ("rating", "Book-Rating"):
        found = guess({"events": texts({"user": USER, "item": ITEM, name: RNG.choice(values, ROWS)})})
        label = found.schema.label
        assert (label.kind, label.column, label.lowest, label.highest, label.drop) == (
            "rating",
            name,
            *ends,
            drop,
        )
        assert line in "".join(found.notes)
        assert len(found.notes) == bool(line)


def test_negative_quantities_are_counted_and_skipped() -> None:
    quantity = np.where(RNG.random(ROWS) < 0.02, -6, RNG.integers(1, 12, ROWS))
    found = guess({"events": texts({"Customer ID": USER, "StockCode": ITEM, "Quantity": quantity})})
    assert (found.schema.label.kind, found.schema.label.drop) == ("count", "<0")
    assert f"{(quantity < 0).sum()} of 2,000 values are below 0" in found.notes[0]


def test_lists_and_times_of_typed_files() -> None:
    tags = [["new", "sale"], ["new"], [], ["old"]]
    columns = {
        "user_id": USER,
        "item_id": ITEM,
        "tags": [tags[item % 4] for item in ITEM],
        "seen": [["a"], ["b"]] * (ROWS // 2),
        "ts": pa.array(SECONDS, pa.timestamp("s", "UTC")),
        "shelf": pa.array([f"s{item % 5}" for item in ITEM]).dictionary_encode(),
        "session_key": pa.array([uuid.UUID(UUIDS[user]).bytes for user in USER], pa.uuid()),
        "box": pa.array([{"width": int(item)} for item in ITEM]),
        "color": pa.array([b"red", b"blue"] * (ROWS // 2)),
    }
    schema = guessed(columns, typed=True)
    assert schema.timestamp == TimestampColumn("ts", "iso")
    assert schema.features == {
        "tags": FeatureColumn("item", "tags", "list"),
        "shelf": FeatureColumn("item", "shelf", "category"),
        **TIMES,
    }


@pytest.mark.parametrize("separator", ["|", ";", ","])
def test_the_separator_of_lists_is_found(separator: str) -> None:
    genres = [separator.join(("Rock", "Pop", "Soul")[: 1 + item % 3]) for item in ITEM]
    schema = guessed({"user": USER, "item": ITEM, "genres": genres})
    assert schema.features["genres"] == FeatureColumn("item", "genres", "list", separator=separator)


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ((1, 2, 3, 4, 5), (1.0, 5.0)),
        ((0, 1, 5), (0.0, 5.0)),
        ((0.5, 5), (0.5, 5.0)),
        ((1, 7, 10), (1.0, 10.0)),
        ((0, 7.5, 9.5), (0.0, 10.0)),
        ((3.5, 88.0, 99.5), (1.0, 100.0)),
        ((0.1, 0.9), (0.0, 1.0)),
        ((-9.5, 9.2), (-10.0, 10.0)),
    ],
)
def test_the_ends_of_a_scale(values: tuple[float, ...], ends: tuple[float, float]) -> None:
    schema = guessed({"user": USER, "item": ITEM, "score": RNG.choice(values, ROWS)})
    assert (schema.label.kind, schema.label.lowest, schema.label.highest) == ("rating", *ends)


def test_a_column_is_no_weight_of_events_by_its_name_alone() -> None:
    events = {"user": USER, "product": ITEM, "clicked": RNG.integers(0, 2, ROWS)}
    # Plays, or the physical weight of a product, as much as a weight in the loss.
    found = guess({"events": texts({**events, "weight": RNG.random(ROWS)})})
    assert (found.schema.weight, found.schema.features) == (None, {})
    assert [(column.name, "[weight]" in column.why) for column in found.left_out] == [("weight", True)]
    schema = guessed({**events, "weight": 1.5 * ITEM})
    assert (schema.weight, schema.features) == (None, {"weight": FeatureColumn("item", "weight", "number")})


def test_a_few_damaged_or_missing_values_do_not_change_the_guess_for_a_column() -> None:
    price = [str(each) for each in RNG.random(ROWS)]
    price[7], price[9] = "?", "NA"
    (omission,) = guess({"events": texts({"user": USER, "item": ITEM, "price": price})}).left_out
    assert omission.feature == FeatureColumn("event", "price", "number")


def test_ids_of_events_and_tables_are_joined() -> None:
    people = texts(
        {"member_id": range(USERS), "uuid": UUIDS, "age": [20 + user % 40 for user in range(USERS)]}
    )
    schema = guessed(
        {"user": UUIDS * 10, "member_id": [*range(USERS)] * 10, "sku": [*ITEM[:1500]]}, users=people
    )
    assert (schema.user.column, schema.item.column) == ("member_id", "sku")
    assert schema.features["age"] == FeatureColumn("user", "age", "number")


def test_the_same_tables_give_the_same_schema() -> None:
    assert guess({"events": texts(SHOP)}) == guess({"events": texts(SHOP)})


@pytest.mark.parametrize(
    ("times", "names"),
    [
        (SECONDS, ["weekday", "hour"]),
        (SECONDS // 86_400 * 86_400, ["weekday"]),
        # A busy log, whose first rows are of one hour.
        (SECONDS[0] + np.arange(ROWS) // 10, ["weekday", "hour"]),
        (np.full(ROWS, SECONDS[0]), []),
    ],
)
def test_the_hour_and_the_weekday_are_taken_where_times_have_them(
    times: np.ndarray, names: list[str]
) -> None:
    assert [*guessed({"user": USER, "item": ITEM, "time": times}).features] == names


# Ways to write a time, and the form that is taken; the first as strftime writes it.
WAYS = {
    "%Y-%m-%d %H:%M:%S UTC": "iso",
    "%Y-%m-%d %H:%M:%S.250 GMT": "iso",
    "%Y-%m-%d %H:%M:%S +00:00": "iso",
    "%Y%m%dT%H%M%SZ": "iso",
    "%-m/%-d/%Y %-I:%M:%S %p": "%m/%d/%Y %I:%M:%S %p",
    "%b %-d %Y %I:%M:%S%p": "%b %d %Y %I:%M:%S%p",
    "%Y-%-m-%-d %-H:%M:%S": "%Y-%m-%d %H:%M:%S",
    "%a, %d %b %Y %H:%M:%S GMT": "%a, %d %b %Y %H:%M:%S GMT",
    "%a %b %d %H:%M:%S +0000 %Y": "%a %b %d %H:%M:%S %z %Y",
    "%d/%b/%Y:%H:%M:%S +0000": "%d/%b/%Y:%H:%M:%S %z",
    "%A, %B %d, %Y at %H:%M:%S": "",
    "%A, %B %d, %Y, %H:%M:%S": "%A, %B %d, %Y, %H:%M:%S",
    "%d-%b-%y %H:%M:%S": "%d-%b-%y %H:%M:%S",
    "%d.%m.%y %H:%M:%S": "%d.%m.%y %H:%M:%S",
    "%Y/%m/%d %H:%M:%S.125": "%Y/%m/%d %H:%M:%S",
    "%Y-%m-%d_%H-%M-%S": "%Y-%m-%d_%H-%M-%S",
    "%Y%m%d%H%M%S": "%Y%m%d%H%M%S",
    "%s": "unix",
    "%s.75": "unix",
    "%s000": "unix_ms",
    "%s000000": "unix_us",
    "%s000000000": "unix_ns",
}
DAYS = {
    **{way: way for way in ("%d %b %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%y", "%m/%d/%y", "%d.%m.%Y")},
    **{way: way for way in ("%d/%m/%Y", "%m-%d-%Y", "%Y.%m.%d", "%m %d, %Y", "%d%b%Y", "%Y%m%d")},
    "%Y%m%d.0": "%Y%m%d",
}


def written(way: str) -> list[str]:
    """The times as strftime writes them."""
    times = [datetime.datetime.fromtimestamp(int(time), datetime.timezone.utc) for time in SECONDS]
    # %s is of the zone of the machine.
    return [time.strftime(way.replace("%s", str(int(time.timestamp())))) for time in times]


@pytest.mark.parametrize(("way", "form"), [*WAYS.items(), *DAYS.items()])
def test_times_in_common_formats_are_read_and_a_bad_one_is_a_bad_row(way: str, form: str) -> None:
    column = [*written(way)[:-1], "0000-00-00"]
    events = {"user": USER, "item": ITEM, "time": column}
    if not form:
        with pytest.raises(UserError, match="The column time is called a time, but its value "):
            guessed(events)
        return
    schema = guessed(events)
    assert schema.timestamp == TimestampColumn("time", form)
    read = times(pa.array(column), "time", form)
    unit = 86_400 if way in DAYS else 1
    assert (read.values[:-1] == SECONDS[:-1] // unit * unit).all()
    assert [*np.flatnonzero(read.faults)] == [ROWS - 1]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("timestamp", np.arange(ROWS)),
        ("eventdate", SECONDS % 3_600),
        ("created_at", ["1. M\xe4rz", "2. M\xe4rz"] * 1_000),
        ("Time (ms)", [*map("{}th".format, SECONDS)]),
        ("unixReviewTime", np.arange(ROWS)),
        ("ts", SECONDS % 3_600),
    ],
)
def test_a_column_named_as_a_time_without_times_is_refused_with_a_value(name: str, column: Any) -> None:
    with pytest.raises(UserError) as refused:
        guessed({"user": USER, "item": ITEM, name: column})
    value, advice = texts({name: column})[name][0], f'[timestamp] column = "{name}" format = '
    assert f"The column {name} is called a time, but its value {str(value)!r} is " in str(refused.value)
    assert advice in str(refused.value)


@pytest.mark.parametrize(
    "name", ["play_time", "runtime", "timeframe", "time_spent", "release year", "times", "update"]
)
def test_a_duration_is_not_a_time(name: str) -> None:
    assert guessed({"user": USER, "item": ITEM, name: SECONDS % 3_600}).timestamp is None
    # And a time of the day is none beside a day.
    events = {"user": USER, "item": ITEM, "time": SECONDS % 3_600, "date": written("%Y%m%d")}
    assert guessed({**events, name: SECONDS % 3_600}).timestamp == TimestampColumn("date", "%Y%m%d")


@pytest.mark.parametrize(
    ("column", "form"),
    [
        (np.arange(ROWS), "unix"),
        ([way.replace("/", ".", 1) for way in written("%d/%m/%Y-%H")], "%d.%m/%Y-%H"),
        ([f"{day:02}/02/2023" for day in range(1, 13)], "%d/%m/%Y"),
    ],
)
def test_the_time_format_suggested_for_a_column_reads_it(column: Any, form: str) -> None:
    number = len(column)
    with pytest.raises(UserError) as refused:
        guessed({"user": USER[:number] * 0 + np.arange(number) % 2, "item": ITEM[:number], "time": column})
    found = re.search(r"\[timestamp\] (column = .*?) format = ", str(refused.value))
    assert found
    roles = '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n[label]\nkind = "clicks"\n'
    schema = parse_schema(f'{roles}[timestamp]\n{found[1]}\nformat = "{form}"\n')
    assert schema.timestamp == TimestampColumn("time", form)
    read = times(pa.array([*map(str, column)]), "time", form)
    assert not read.faults.any()
    assert (np.diff(read.values) >= 0).all()


def test_dates_that_are_not_read_are_no_age() -> None:
    items = texts(
        {"item": range(ITEMS), "released": [f"{item % 9 + 1:02}-Jan-1995" for item in range(ITEMS)]}
    )
    events = {"user": USER, "item": ITEM, "rating": RNG.integers(1, 6, ROWS), "timestamp": SECONDS}
    assert "2026-11-20, which are not read" in left_out(events, items=items)["released"]


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (("%s", "%s000"), r"times of two forms: '\d{10}' \(unix\) and '\d{13}' \(unix_ms\)"),
        (("%Y-%m-%d", "%d.%m.%Y"), r"'\d{4}-\d\d-\d\d' \(iso\) and '\d\d\.\d\d.\d{4}' \(%d.%m.%Y\)"),
        (("%d/%m/%Y", "%m/%d/%Y"), r"times of two forms: .*%[dm]/%[dm]/%Y.*%[dm]/%[dm]/%Y"),
        (("01/%m/%Y", "02/%m/%Y"), r"fit the forms %m/%d/%Y and %d/%m/%Y; write into schema.toml, .* \[time"),
        (("01.%m.05",), r"fit the forms %m.%d.%y and %d.%m.%y; "),
    ],
)
def test_mixed_and_ambiguous_time_formats_are_reported(ways: tuple[str, ...], said: str) -> None:
    each = [written(way) for way in ways]
    column = [each[place % len(ways)][place] for place in range(ROWS)]
    with pytest.raises(UserError, match=said):
        guessed({"user": USER, "item": ITEM, "time": column})


def test_any_value_in_any_column_is_read_unchanged() -> None:
    odd = {
        "infinite": [float("inf"), 1.0, float("nan")],
        "huge": [1e308, -1e308, 5.0],
        "": [1, 2, 3],
        "x" * 1_000: [1, 2, 3],
        "no": pa.nulls(3),
        "bytes": [b"\xff", b"\xfe", None],
        "long": pa.array([2**64 - 1, 0, None], pa.uint64()),
    }
    schema = guessed({"user": [1, 1, 2], "item": [-1, 2**62, 2], "rating": [1e300, 2, 3], **odd}, typed=True)
    assert schema.label == LabelColumn("clicks")


def test_a_column_of_an_item_table_named_like_the_label_is_not_a_feature() -> None:
    events = {"user": USER, "item": ITEM, "rating": RNG.integers(1, 6, ROWS)}
    items = texts({"item": range(ITEMS), "rating": RNG.random(ITEMS), "size": RNG.random(ITEMS)})
    assert [*guessed(events, items=items).features] == ["size"]
    assert left_out(events, items=items) == {
        "rating": "the events have a column with a role under this name; give it another one in its file"
    }


def test_unrecognised_tables_give_one_message_with_columns_and_a_fix() -> None:
    with pytest.raises(UserError) as refused:
        guess({"events": texts({"temperature": RNG.random(9), "town": ["Rome"] * 9})})
    assert str(refused.value) == (
        "Cannot find the ids of users and items among 2 columns: temperature, town; write a "
        'schema.toml beside the data with the lines [user] and column = "NAME", then [item] and column = '
        '"NAME"; what it does not say is guessed.'
    )
    with pytest.raises(UserError, match=r"ids of items among 2 columns: user, x; .* lines \[item\] and"):
        guess({"events": texts({"user": USER, "x": RNG.random(ROWS)})})
    with pytest.raises(UserError, match="The events have no rows"):
        guess({"events": texts({"user": [], "item": []})})


# Forms of public data: columns with values, then user, item, label and its kind, or what is asked for.
STARS_OF, TEXTS = RNG.integers(1, 6, ROWS), [f"t{each}" for each in range(ROWS)]
FORMS: list[tuple[dict[str, Any], Any]] = [
    (
        {"User-ID": USER, "ISBN": [f"0{item:05}X" for item in ITEM], "Book-Rating": 2 * STARS_OF},
        ("User-ID", "ISBN", "Book-Rating", "rating"),
    ),
    (
        {"review_id": TEXTS, "user_id": USER, "business_id": ITEM, "stars": STARS_OF, "useful": STARS_OF},
        ("user_id", "business_id", "stars", "rating"),
    ),
    (
        {
            **{"beer_beerid": ITEM, "review_overall": STARS_OF, "review_aroma": STARS_OF},
            **{"review_profilename": [f"n{user}" for user in USER], "beer_style": ITEM % 5},
        },
        ("review_profilename", "beer_beerid", "review_overall", "rating"),
    ),
    (
        {"Invoice": TEXTS, "StockCode": ITEM, "Quantity": STARS_OF, "Price": 2.5 * ITEM, "Customer ID": USER},
        ("Customer ID", "StockCode", "Quantity", "count"),
    ),
    (
        {"app_id": ITEM, "user_id": USER, "is_recommended": STARS_OF > 2, "hours": RNG.random(ROWS)},
        ("user_id", "app_id", "is_recommended", "yes_no"),
    ),
    (
        {"customer_id": USER, "article_id": ITEM, "price": RNG.random(ROWS)},
        ("customer_id", "article_id", "", "clicks"),
    ),
    (
        {"visitorid": USER, "event": ["view", "buy"] * (ROWS // 2), "itemid": ITEM, "transactionid": TEXTS},
        ("visitorid", "itemid", "", "clicks"),
    ),
    ({"user_id": USER, "movie_id": ITEM, "rating": STARS_OF}, ("user_id", "movie_id", "rating", "rating")),
    ({"user_id": USER, "gadget_id": ITEM, "rating": STARS_OF}, ("user_id", "gadget_id", "rating", "rating")),
    ({"user-id": USER, "game-title": [f"g{item}" for item in ITEM]}, ("user-id", "game-title", "", "clicks")),
    # The users of orders stand in another table.
    ({"order_id": USER, "product_id": ITEM, "reordered": STARS_OF > 2}, "users"),
    ({"user_id": USER, "gadget_id": ITEM, "gizmo_id": ITEM // 2}, "items"),
    ({"id": TEXTS, "click": STARS_OF > 2, "site_id": ITEM, "device_id": USER}, "users and items"),
]


@pytest.mark.parametrize(("columns", "roles"), FORMS)
def test_roles_of_common_tables_are_guessed_or_requested(columns: dict[str, Any], roles: Any) -> None:
    if isinstance(roles, str):
        with pytest.raises(UserError, match=f"Cannot find the ids of {roles}"):
            guess({"events": texts(columns)})
        return
    schema = guessed(columns)
    found = schema.user.column, schema.item.column, schema.label.column, schema.label.kind
    assert found == roles


def test_times_of_the_day_come_before_the_days_of_partitions() -> None:
    bought = [f"2026-11-20T{hour:02}:15:00+01:00" for hour in range(24)] * 20
    schema = guessed(
        {"user": USER[:480], "item": ITEM[:480], "date": ["2026-11-20"] * 480, "purchased_at": bought}
    )
    assert schema.timestamp == TimestampColumn("purchased_at", "iso")
    assert {*schema.features} == {"hour", "weekday"}
    within_an_hour = SECONDS[0] // 3600 * 3600 + np.arange(480)
    events = {"user": USER[:480], "item": ITEM[:480], "date": ["2026-11-20"] * 480}
    assert guessed({**events, "created": within_an_hour}).timestamp == TimestampColumn("created", "unix")
    assert guessed(events).timestamp == TimestampColumn("date", "iso")


ANSWERS = RNG.integers(0, 2, ROWS)
QUANTITIES = RNG.integers(1, 5, ROWS)
STARS = RNG.integers(1, 6, ROWS)


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"quantity": QUANTITIES, "returned": ANSWERS}, [("yes_no", "returned"), ("count", "quantity")]),
        ({"quantity": QUANTITIES}, [("count", "quantity")]),
        ({"returned": ANSWERS, "plays": QUANTITIES}, [("count", "plays"), ("yes_no", "returned")]),
        (
            {"returned": ANSWERS, "quantity": RNG.zipf(1.6, ROWS)},
            [("count", "quantity"), ("yes_no", "returned")],
        ),
        (
            {"quantity": QUANTITIES, "returned": ANSWERS, "clicked": ANSWERS, "stars": STARS},
            [("rating", "stars"), ("yes_no", "clicked"), ("yes_no", "returned"), ("count", "quantity")],
        ),
        # An answer alone may be anything, and one of the users is not of the event.
        ({"mobile": ANSWERS}, [("clicks", ""), ("yes_no", "mobile")]),
        ({"member": USER % 2, "quantity": QUANTITIES}, [("count", "quantity")]),
    ],
)
def test_names_of_labels_precede_answers_and_these_precede_small_amounts(
    columns: dict[str, Any], labels: list[tuple[str, str]]
) -> None:
    found = guess({"events": texts({"user": USER, "item": ITEM, **columns})})
    assert (found.schema.label.kind, found.schema.label.column) == labels[0]
    # Nothing else that could be the label is a feature.
    assert {column for _, column in labels[1:]} <= {each.feature.column for each in found.left_out}


# Most answers are high on the scale, or in its middle.
HIGH = np.clip(np.rint(RNG.normal(7, 2, ROWS)), 2, 10).astype(int)
MIDDLE = np.clip(np.rint(RNG.normal(3, 0.7, ROWS)), 1, 5).astype(int)


@pytest.mark.parametrize(
    ("name", "values", "taken"),
    [
        ("Feedback", HIGH, "rating"),
        ("response", MIDDLE, "count"),
        ("opinion", HIGH, "clicks"),
        # Small counts, and names that say what they are.
        ("interaction", RNG.geometric(0.5, ROWS).clip(1, 10), ""),
        ("plays", HIGH, ""),
        ("rating", HIGH, ""),
        ("size_code", HIGH, ""),
        # A property of the item.
        ("age", ITEM % 4 + 7 * (ITEM % 4 > 0), ""),
    ],
)
def test_a_scale_under_another_name_is_asked_about_with_the_lines_for_each_reading(
    name: str, values: np.ndarray, taken: str
) -> None:
    samples = {"events": texts({"user_id": USER, "item_id": ITEM, name: values})}
    schema, _, notes = guess(samples)
    asked = [note for note in notes if "may be a scale, or count events" in note]
    assert len(asked) == bool(taken)
    for note in asked:
        assert schema.label.kind == taken
        assert name in note
        for kind, lines in zip(("rating", "count"), note.split(", or else "), strict=True):
            pairs = re.findall(r'\w+ = (?:"[^"]*"|\d[\d.]*)', lines.partition("write under")[2] or lines)
            # Written into the guessed section, or as the only lines.
            given = tomllib.loads("[label]\n" + "\n".join(pairs))
            label = guess(samples, given).schema.label
            edited = parse_schema(text_of(dataclasses.replace(schema, label=LabelColumn(**given["label"]))))
            ends = (1.0, 10.0 if values is HIGH else 5.0)
            for found in (label, edited.label):
                assert (found.kind, found.column) == (kind, name)
                assert found.kind == "count" or (found.lowest, found.highest) == ends
            assert label.liked == edited.label.liked


def test_the_type_after_a_name_decides_the_kind_of_a_column(tmp_path: Path) -> None:
    """The header of RecBole's files; a label stays one."""
    items = [
        "item_id:token\tclass:token_seq\tyear:token\tprice:float\tfew:float\tvector:float_seq\ttitle:token_seq"
    ]
    shelves = ("Drama War", "Comedy Crime Drama", "War", "")
    items += [
        f"{item}\t{shelves[item % 4]}\t{1950 + item % 30}\t{item / 4}\t{item % 3}\t0.5 {item} 1\tThing {item}"
        for item in range(ITEMS)
    ]
    events = ["user_id:token\titem_id:token\trating:token\ttimestamp:float"]
    events += [f"{u}\t{i}\t{u * i % 5 + 1}\t{t}" for u, i, t in zip(USER, ITEM, SECONDS, strict=True)]
    (tmp_path / "x.item").write_text("\n".join(items))
    (tmp_path / "x.inter").write_text("\n".join(events))
    schema = propose(tmp_path).schema
    assert {name: each for name, each in schema.features.items() if each.of == "item"} == {
        "class": FeatureColumn("item", "class", "list", separator=" "),
        "year": FeatureColumn("item", "year", "category"),
        "price": FeatureColumn("item", "price", "number"),
        "few": FeatureColumn("item", "few", "number"),
        "vector": FeatureColumn("item", "vector", "vector", length=3),
    }
    assert (schema.item.title, schema.label.kind, schema.label.column) == ("title", "rating", "rating")
    found = locate(DataConfig(data_path=str(tmp_path)), tmp_path)
    assert found.table_schema == schema
    assert {*np.stack([*found.read().items["vector"]])[:, 0]} == {0.5}


def test_texts_in_the_place_of_names_are_said_to_be_values() -> None:
    columns = {"u0": [f"u{user}" for user in USER], "i0": [f"i{item}" for item in ITEM]}
    with pytest.raises(UserError, match="if the first line holds values, as it seems, add one with names"):
        guess({"events": texts(columns)})


def test_the_click_on_an_advertisement_is_the_label_and_its_opposite_no_feature() -> None:
    clicked = RNG.integers(0, 2, ROWS)
    columns = {"user": USER, "time_stamp": SECONDS, "adgroup_id": ITEM, "pid": [f"43{u % 2}_7" for u in USER]}
    columns |= {"nonclk": 1 - clicked, "clk": clicked}
    schema = guessed(columns)
    assert (schema.user.column, schema.item.column) == ("user", "adgroup_id")
    assert schema.label == LabelColumn("yes_no", "clk", noun="event")
    assert "nonclk" not in schema.features
    assert left_out(columns)["nonclk"] == OUTCOME
    # Without an advertisement it is a product.
    assert guessed({"user": USER, "pid": ITEM, "clk": clicked}).item.column == "pid"


LOG_RNG = np.random.default_rng(1)
KINDS = LOG_RNG.choice(3, ROWS, p=[0.7, 0.18, 0.12])
IS_LAST = KINDS == 2
# Zeros for views and carts.
BOUGHT = LOG_RNG.geometric(0.5, ROWS) * IS_LAST
LOG = {"user_id": USER, "item_id": ITEM, "timestamp": SECONDS}


def typed_log(column: str, words: Sequence[object], **more: Any) -> dict[str, Any]:
    """A log whose last type is that of the purchases."""
    return LOG | {column: [words[kind] for kind in KINDS]} | more


def found_types(columns: dict[str, Any]) -> tuple[str, str, str, set[str]]:
    """The kind of the label, and the types: column, target and context."""
    schema = guessed(columns)
    assert schema.weight is None
    types = schema.events
    return (schema.label.kind, *((types.type, types.target, {*types.context}) if types else ("", "", set())))


@pytest.mark.parametrize(
    "amounts", [USER % 4 + 1, LOG_RNG.pareto(1, ROWS).astype(int) + 1, LOG_RNG.integers(0, 2, ROWS), BOUGHT]
)
@pytest.mark.parametrize("amount", ["quantity", "n_purchased"])
def test_types_of_events_are_used_rather_than_a_count(amounts: np.ndarray, amount: str) -> None:
    columns = typed_log("event_type", ["view", "cart", "purchase"], **{amount: amounts})
    if amounts.max() > 1 or amount == "quantity":
        assert found_types(columns) == ("clicks", "event_type", "purchase", {"view", "cart"})
        assert guessed(columns).label.noun == "purchase"
    else:
        # An answer that differs among purchases is a label.
        assert found_types(columns)[0] == "yes_no"
    # Written by hand it is the label; and a rating is one beside types.
    label = guess({"events": texts(columns)}, {"label": {"column": amount}}).schema.label
    assert label.column == amount
    rated = guessed(columns | {"stars": LOG_RNG.integers(1, 6, ROWS)})
    assert (rated.label.column, rated.events) == ("stars", None)


@pytest.mark.parametrize(
    ("column", "words", "amount"),
    [
        ("action", ["view", "cart", "purchase"], {"qty": BOUGHT}),
        ("event", ["view", "cart", "purchase"], {"amount": BOUGHT}),
        ("type", ["view", "cart", "purchase"], {"price": BOUGHT * 1.25}),
        ("event_typ", ["Ansicht", "Warenkorb", "Bestellung"], {"menge": BOUGHT}),
        ("EVENT_TYPE", ["VIEW", "CART", "SALE"], {"QTY": BOUGHT}),
        ("event_type", ["view", "cart", "purchase"], {"bought": IS_LAST.astype(int)}),
        # The amounts tell which type it is.
        ("typ", ["angesehen", "gemerkt", "gekauft"], {"quantity": BOUGHT}),
        ("event_type", [1, 2, 3], {"quantity": BOUGHT}),
        ("behavior_type", [1, 1, 4], {"quantity": np.where(IS_LAST, BOUGHT, None)}),
        ("event_type", [0, 0, 1], {"quantity": BOUGHT}),
        ("status", ["seen", "kept", "sold"], {"revenue": BOUGHT * 2.5}),
    ],
)
def test_types_of_events_are_found_by_words_or_by_the_only_type_with_amounts(
    column: str, words: list[object], amount: dict[str, Any]
) -> None:
    found = typed_log(column, words, **amount)
    context = {*map(str, words[:2])}
    assert found_types(found) == ("clicks", column, str(words[2]), context)
    told = [note for note in guess({"events": texts(found)}).notes if "is above 0 there alone" in note]
    assert len(told) == (words[2] in (1, 3, 4, "gekauft", "sold"))


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        # Of the item, of the user, with amounts for two types or half of one, and with another name.
        ({"type": [("book", "film")[item % 2] for item in ITEM], "quantity": BOUGHT}, "count"),
        ({"type": [("like", "play")[user % 2] for user in USER], "quantity": BOUGHT}, "count"),
        ({"event_type": KINDS, "quantity": BOUGHT + (KINDS == 1)}, "count"),
        ({"event_type": KINDS, "quantity": BOUGHT * LOG_RNG.integers(0, 2, ROWS)}, "count"),
        ({"device": ["phone" if last else "web" for last in IS_LAST], "version": BOUGHT}, "clicks"),
        ({"device_type": KINDS, "quantity": BOUGHT}, "count"),
    ],
)
def test_other_columns_are_no_types_of_events(columns: dict[str, Any], kind: str) -> None:
    assert found_types(LOG | columns) == (kind, "", "", set())


def test_a_column_that_may_have_types_is_asked_about_with_the_lines_to_write() -> None:
    columns = typed_log("event_type", ["seen", "kept", "had"], quantity=LOG_RNG.integers(1, 5, ROWS))
    assert found_types(columns)[0] == "count"
    (note,) = guess({"events": texts(columns)}).notes
    assert all(
        line in note for line in ('kind = "clicks"', 'type = "event_type"', '"seen"', '"kept"', '"had"')
    )
    given: dict[str, dict[str, Any]] = {
        "label": {"kind": "clicks"},
        "events": {"type": "event_type", "target": "had", "context": ["seen"]},
    }
    followed = guess({"events": texts(columns)}, given)
    assert (followed.schema.label.kind, followed.schema.events) == (
        "clicks",
        EventTypes("event_type", "had", ("seen",)),
    )
    assert not followed.notes
    # Also where the types are known, and the events have no times.
    del columns["timestamp"]
    notes = guess(
        {"events": texts(columns | {"event_type": [("view", "buy")[u % 2] for u in range(ROWS)]})}
    ).notes
    assert ["[timestamp]" in note for note in notes] == [True]


def test_an_amount_beside_types_is_offered_as_the_weight_of_events() -> None:
    log = typed_log("event_type", ["view", "cart", "purchase"], quantity=BOUGHT)
    (omission,) = (each for each in guess({"events": texts(log)}).left_out if each.is_weight)
    assert omission.feature.column == "quantity"
    # With gaps, the number of events that lack one is told; a weight of 0 or more is what is read.
    gaps = log | {"quantity": np.where(IS_LAST, BOUGHT, None)}
    assert f"{(~IS_LAST).sum():,} of the first 2,000 events" in left_out(gaps)["quantity"]
    below = guess({"events": texts(log | {"quantity": BOUGHT - 1})}).left_out
    assert not any(each.is_weight for each in below)
    # With a weight of one's own there is no other, and without types an amount is none.
    given = {"weight": {"column": "w"}}
    assert not any(each.is_weight for each in guess({"events": texts(log | {"w": BOUGHT})}, given).left_out)
    assert not any(each.is_weight for each in guess({"events": texts(LOG | {"price": BOUGHT})}).left_out)
    by_name = guess({"events": texts(LOG | {"weight": BOUGHT})}).left_out
    assert [each.is_weight for each in by_name] == [True]


def test_many_zeros_of_a_count_are_told_with_their_share_and_the_line_that_skips_them() -> None:
    returned = np.where(LOG_RNG.random(ROWS) < 0.02, -1, BOUGHT)
    for counts, drop in ((BOUGHT, "0"), (returned, "<0, 0")):
        note = guess({"events": texts(LOG | {"quantity": counts})}).notes[-1]
        assert f"{(counts == 0).sum():,} of 2,000 values are 0 ({np.mean(counts == 0):.0%})" in note
        assert f'drop = "{drop}"' in note
    few = np.where(np.arange(ROWS) < 30, 0, LOG_RNG.integers(1, 5, ROWS))
    assert not guess({"events": texts(LOG | {"quantity": few})}).notes


def test_indices_of_pandas_and_numbers_of_orders_are_skipped() -> None:
    orders = {"user": USER, "item": ITEM, "Unnamed: 0": USER, "__index_level_0__": range(ROWS)}
    orders["order_number"] = RNG.permutation(ROWS)
    assert left_out(orders) == {
        "Unnamed: 0": "it is the index that pandas wrote, and numbers the rows",
        "__index_level_0__": "it is the index that pandas wrote, and numbers the rows",
        "order_number": OF_EVENT,
    }
    guessed(orders)


@pytest.mark.parametrize(
    ("write", "form"),
    [
        (lambda item: f"{item % 3},{40 + item % 9}", "decimal_commas"),
        (lambda item: f"1.{200 + item},{item % 9}", "decimal_commas"),
        (lambda item: f"-{60 + item},753,{100 + item}", "grouping_commas"),
        (lambda item: f"{item % 30},{100 + item}.50", "grouping_commas"),
        # Nearly all are plain, and only large ones have a comma.
        (lambda item: f"1,00{item}.5" if item < 2 else f"{500 + item}.25", "grouping_commas"),
    ],
)
def test_numbers_with_commas_are_numbers_of_a_form_and_no_lists(
    write: Callable[[int], str], form: str
) -> None:
    schema = guessed({"user": USER, "item": ITEM, "price": [write(item) for item in ITEM]})
    assert schema.features == {"price": FeatureColumn("item", "price", "number")}
    assert getattr(schema.files, form) == ("price",)


@pytest.mark.parametrize(
    "write",
    [
        # Thousands or decimals; codes of three digits, or thousands; a list of codes or a number, twice.
        lambda item: f"1,{200 + item}" if item % 2 else str(item),
        lambda item: f"{100 + item % 9},{200 + item % 5}",
        lambda item: f"{100 + item % 9},{200 + item % 5},{300 + item % 4}",
        lambda item: f"{item % 7},{item % 5}" if item % 2 else str(item % 7),
    ],
)
def test_numbers_that_may_be_of_two_forms_are_asked_about(write: Callable[[int], str]) -> None:
    columns = {"user": USER, "item": ITEM, "codes": [write(item) for item in ITEM]}
    assert "in decimal_commas or grouping_commas under [files]" in left_out(columns)["codes"]
    for form in ("decimal_commas", "grouping_commas"):
        schema, left, _ = guess({"events": texts(columns)}, {"files": {form: ["codes"]}})
        assert getattr(schema.files, form) == ("codes",)
        # A list has no form that fits most values.
        assert schema.features == {"codes": FeatureColumn("item", "codes", "number")} or left


@pytest.mark.parametrize("name", ["rating", "place_rating", "play_count", "score"])
@pytest.mark.parametrize(
    ("values", "kind", "lowest"), [(("3,00", "5,00", "1,00"), "rating", 1), (("3", "3,5", "1"), "rating", 1)]
)
def test_a_label_with_decimal_commas_is_read(
    name: str, values: tuple[str, ...], kind: str, lowest: float
) -> None:
    schema = guessed({"user": USER, "item": ITEM, name: RNG.choice(values, ROWS)})
    if name != "play_count":
        assert (schema.label.kind, schema.label.lowest) == (kind, lowest)
    assert (schema.label.column, schema.files.decimal_commas) == (name, (name,))


@pytest.mark.parametrize(
    ("values", "value", "line"),
    [
        (("1,234", "999", "12,345"), "1,234", '[files] decimal_commas = ["rating"] or [files] grouping'),
        (("4 stars", "5 stars", "1 star"), "4 stars", '[label] kind = "clicks"'),
        (("4/5", "3/5", "1/5"), "4/5", '[label] kind = "clicks"'),
        (("good", "bad"), "good", '[label] kind = "clicks"'),
    ],
)
def test_a_column_called_a_label_without_numbers_is_refused_with_a_value_and_the_line_to_write(
    values: tuple[str, ...], value: str, line: str
) -> None:
    columns = texts({"user": USER, "item": ITEM, "rating": [value, *RNG.choice(values, ROWS - 1)]})
    for given in ({}, {"label": {"column": "rating"}}):
        with pytest.raises(UserError) as refused:
            guess({"events": columns}, given)
        assert f"is called a label, and its value {value!r} is not a number" in str(refused.value)
        assert line in str(refused.value)
    assert guess({"events": columns}, {"label": {"kind": "clicks"}}).schema.label.kind == "clicks"


@pytest.mark.parametrize(("place", "number"), [(0, 1), (11, 1), (7, 5)])
def test_one_word_among_the_numbers_of_an_item_leaves_it_a_number(place: int, number: int) -> None:
    years = [str(1950 + item) for item in range(50)]
    years[place : place + number] = ["unknown"] * number
    items = texts({"item": range(50), "year": years})
    schema = guessed({"user": USER, "item": ITEM % 50}, items=items)
    assert schema.features["year"] == FeatureColumn("item", "year", "number")
    # Points in a word are none of a number.
    items = texts({"item": range(50), "year": [year.replace("unknown", "n.a.") for year in years]})
    schema = guessed({"user": USER, "item": ITEM % 50}, items=items)
    assert schema.features["year"].kind == "number"
    assert not schema.files.grouping_commas + schema.files.decimal_commas


def test_dates_of_which_many_are_none_are_no_age() -> None:
    days = [f"2024-01-{1 + item % 28:02}" if item % 5 else "soon" for item in range(ITEMS)]
    items = texts({"item": range(ITEMS), "updated_at": days})
    why = {each.feature.column: each.why for each in guess({"events": texts(RATED), "items": items}).left_out}
    assert "which are not read" in why["updated_at"]


@pytest.mark.parametrize(
    ("users", "why"),
    [
        # Of users who come once, and of a value that hardly varies.
        (np.arange(ROWS) // 1.004, "too few users come twice to tell whether it is of the user"),
        (USER, "its values do not tell whether it is of the user"),
    ],
)
def test_a_column_whose_owner_cannot_be_told_is_not_said_to_differ_from_event_to_event(
    users: np.ndarray, why: str
) -> None:
    value = np.where(users.astype(int) % 3, "F", "M") if users is not USER else np.full(ROWS, "F")
    value[:2] = "M"
    found = left_out({"user": users.astype(int), "item": ITEM, "gender": value})["gender"]
    assert found == f'{why}; if so, write of = "user"'


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("eventdate", {"user": USER}),
        ("order_date", {"user": USER}),
        ("started", {"session_id": USER}),
        ("day_of_visit", {"session_id": USER, "user": USER // 2}),
    ],
)
def test_a_date_of_a_session_is_the_time_of_its_events(name: str, columns: dict[str, np.ndarray]) -> None:
    dates = [f"2024-{1 + user % 12:02}-{1 + user % 28:02}" for user in USER]
    schema = guessed({**columns, "item": ITEM, name: dates})
    assert schema.timestamp == TimestampColumn(name, "iso")


def test_a_date_of_a_user_is_no_time_of_an_event_and_the_reason_says_how_to_make_it_one() -> None:
    dates = [f"2024-{1 + user % 12:02}-{1 + user % 28:02}" for user in USER]
    why = left_out({"user": USER, "item": ITEM, "signup_date": dates})["signup_date"]
    assert why == "a user has one; if it is the time of the events, name it as the column of [timestamp]"


@pytest.mark.parametrize("shares", [(3, 1), (10, 1)])
def test_where_most_events_have_no_user_the_session_is_suggested(shares: tuple[int, int]) -> None:
    every, _ = shares
    columns = {
        "session_id": np.arange(ROWS) // 4,
        "user_id": ["NA" if row // 4 % every else str(row // 4 % 50) for row in range(ROWS)],
        "item": ITEM,
    }
    note = guess({"events": texts(columns)}).notes[0]
    assert note.endswith('into schema.toml instead: [user] column = "session_id"')
    assert "--bad_rows" not in note
    # A few missing users are skipped.
    columns["user_id"] = ["NA" if row % 10 == 0 else str(row % 50) for row in range(ROWS)]
    assert "--bad_rows skip" in guess({"events": texts(columns)}).notes[0]


def test_the_words_of_a_name() -> None:
    assert words_of("userId") == words_of("USER_ID") == words_of("userid") == ["user", "id"]
    assert words_of("HTTPStatus code") == ["http", "status", "code"]
    assert table_name("Price (EUR)", []) == "price_eur"
    assert table_name("user", ["user", "user_2"]) == "user_3"
    assert table_name("2nd choice", []) == "x_2nd_choice"
    assert table_name("Größe", []) == "gr_e"
    assert table_name("***", []) == "feature"
    assert table_name("history", []) == "x_history"


def test_the_shown_table_has_each_column_with_three_values() -> None:
    events = texts({**SHOP, "bell\x07": ["\x1b[31m" + "x" * 99] * ROWS})
    schema = guess({"events": events}).schema
    lines = describe(schema, {"events": events}).splitlines()
    assert lines[0].split() == ["role", "or", "feature", "column", "kind", "of", "values,", "say"]
    assert [line.split()[0] for line in lines[1:]] == ["user", "item", "label", "timestamp", *schema.features]
    price = next(line for line in lines if line.startswith("price"))
    assert price.split()[1:5] == ["price", "number", "(buckets)", "item"]
    assert price.count(",") == 2
    assert all(line.isprintable() and len(line) < 130 for line in lines)


def test_the_suggested_time_formats_are_accepted_in_a_schema(tmp_path: Path) -> None:
    name = 'event\\"time"'
    days = [f"{1 + row % 11:02}/{1 + row % 9:02}/2021 10:{row % 60:02}" for row in range(ROWS)]
    events = texts({"user_id": USER, "item_id": ITEM, "rating": USER % 5 + 1, name: days})
    with pytest.raises(UserError, match="all fit the forms") as refusal:
        guess({"events": events})
    advice = str(refusal.value).partition("each on a line: ")[2].removesuffix(".")
    lines, other = re.sub(r" (column|format) =", r"\n\1 =", advice).split(" or\n")
    for number, text in enumerate((lines, re.sub("format = .*", other, lines))):
        (tmp_path / "schema.toml").write_text(text)
        _, given = given_in(tmp_path / "schema.toml")
        form = ("%m/%d/%Y %H:%M", "%d/%m/%Y %H:%M")[number]
        assert given["timestamp"] == {"column": name, "format": form}
