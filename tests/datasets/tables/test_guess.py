"""What is guessed of tables that people have: roles, kinds, features, and what is left out, and why."""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsuite.datasets.tables.description.overview import describe
from recsuite.datasets.tables.description.reader import parse_schema
from recsuite.datasets.tables.description.validator import validate
from recsuite.datasets.tables.description.writer import text_of
from recsuite.datasets.tables.guessing.features import AGE_TELLS, TELLS, LeftOut
from recsuite.datasets.tables.guessing.guess import SAME_NAME, guess
from recsuite.datasets.tables.guessing.words import table_name, words_of
from recsuite.datasets.tables.schema_file import FeatureColumn, LabelColumn, TableSchema, TimestampColumn
from recsuite.datasets.tables.times import times
from recsuite.errors import UserError

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
    """What is guessed of some events, which a validator accepts and a file holds."""
    schema, left_out, _ = guess({"events": pa.table(columns) if typed else texts(columns), **own})
    names = {"events": [*columns], **{role: table.column_names for role, table in own.items()}}
    validate(schema, names)
    text = text_of(schema, left_out)
    assert parse_schema(text) == schema
    # Whatever was left out can be switched on, but for a second use of a name.
    switched = text.replace("\n# [features.", "\n[features.").replace("\n# of =", "\nof =")
    for key in ("column", "kind", "input", "separator"):
        switched = switched.replace(f"\n# {key} = ", f"\n{key} = ")
    if not any(omission.why == SAME_NAME for omission in left_out):
        assert len(parse_schema(switched).features) == len(schema.features) + len(left_out)
    return schema


def left_out(columns: Mapping[str, Any], **own: pa.Table) -> dict[str, str]:
    """The reasons why columns are left out."""
    found: list[LeftOut] = guess({"events": texts(columns), **own})[1]
    return {omission.feature.column: omission.why for omission in found}


RATINGS = {
    "userId": USER + 1,
    "movieId": ITEM + 1,
    "rating": RNG.choice([0.5, 2, 3.5, 4, 5], ROWS),
    "timestamp": SECONDS,
}
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
        "device": FeatureColumn("event", "device", "category"),
        "discount": FeatureColumn("event", "discount", "number"),
        **TIMES,
    }


def test_clicks_are_events_without_a_label() -> None:
    schema = guessed({"visitorid": USER, "itemid": ITEM, "timestamp": SECONDS * 1000})
    assert (schema.user.column, schema.item.column) == ("visitorid", "itemid")
    assert schema.label == LabelColumn("clicks")
    assert schema.timestamp == TimestampColumn("timestamp", "unix_ms")


@pytest.mark.parametrize("name", ["plays", "play_count", "score"])
def test_counts_have_a_few_large_values_or_a_name_that_says_so(name: str) -> None:
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
    assert schema.features == {
        "style": FeatureColumn("event", "style", "category"),
        "weekday": TIMES["weekday"],
    }
    assert left_out(REVIEWS) == {
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


def test_music_with_lists_and_dates_in_a_table_of_its_own() -> None:
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


# What depends on the item, exactly and nearly, and what does not.
PRICE = np.exp(RNG.normal(3, 1, ITEMS))[ITEM] * RNG.normal(1, 0.02, ROWS)
VISIT = {
    "user_id": USER,
    "item_id": ITEM,
    "time": SECONDS,
    "price": PRICE,
    "brand": np.where(RNG.random(ROWS) < 0.02, "b0", [f"b{item % 12}" for item in ITEM]),
    "paid": PRICE * RNG.choice([1, 0.4, 0.1], ROWS),
    "variant": [f"{item}/{size}" for item, size in zip(ITEM, RNG.integers(0, 6, ROWS), strict=True)],
    "copy_of_item": ITEM,
    "device": RNG.choice(["phone", "desktop", "tablet"], ROWS),
    "delay": RNG.exponential(1, ROWS),
    # One event in five is on the screen that the item belongs to, and the others are on any.
    "screen": np.where(RNG.random(ROWS) < 0.2, ITEM % 3, RNG.integers(0, 3, ROWS)),
}


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("label", [{}, {"plays": np.minimum(RNG.zipf(1.6, ROWS), 5_000)}])
def test_what_says_which_item_is_chosen_is_no_feature_of_an_event_to_rank_by(
    typed: bool, label: dict[str, Any]
) -> None:
    features = guessed({**VISIT, **label}, typed).features
    assert features["price"] == FeatureColumn("item", "price", "number")
    assert features["brand"] == FeatureColumn("item", "brand", "category")
    events = {name for name, feature in features.items() if feature.of == "event"}
    assert events == {"device", "delay", "screen", *TIMES}
    reasons = left_out({**VISIT, **label})
    assert (reasons["paid"], reasons["variant"]) == (TELLS, TELLS)


def test_ratings_and_answers_keep_what_depends_on_the_item() -> None:
    for label in ({"rating": RNG.integers(1, 6, ROWS)}, {"clicked": RNG.integers(0, 2, ROWS)}):
        features = guessed({**VISIT, **label}).features
        assert all(features[name].of == "event" for name in ("price", "brand", "paid", "variant", "delay"))


@pytest.mark.parametrize("repeated", [2, 5])
def test_of_a_few_events_an_item_chance_is_taken_away(repeated: int) -> None:
    items = np.arange(ROWS) // repeated
    events = {"user": USER, "item": items, "delay": VISIT["delay"], "device": VISIT["device"]}
    town = [f"t{each}" for each in RNG.integers(0, 300, ROWS)]
    features = guessed(
        {**events, "town": town, "price": np.sqrt(items + 1) * RNG.normal(1, 0.02, ROWS)}
    ).features
    assert {name: feature.of for name, feature in features.items()} == {
        **{"price": "item", "delay": "event", "device": "event", "town": "event"}
    }


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
        "color": FeatureColumn("event", "color", "category"),
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


def test_a_weight_is_of_the_event_and_not_of_the_product() -> None:
    events = {"user": USER, "product": ITEM, "clicked": RNG.integers(0, 2, ROWS)}
    weight = guessed({**events, "weight": RNG.random(ROWS)}).weight
    assert weight
    assert weight.column == "weight"
    schema = guessed({**events, "weight": 1.5 * ITEM})
    assert (schema.weight, schema.features) == (None, {"weight": FeatureColumn("item", "weight", "number")})


def test_a_few_damaged_values_and_missing_ones_do_not_change_what_a_column_is() -> None:
    price = [str(each) for each in RNG.random(ROWS)]
    price[7], price[9] = "?", "NA"
    schema = guessed({"user": USER, "item": ITEM, "price": price})
    assert schema.features == {"price": FeatureColumn("event", "price", "number")}


def test_one_id_is_known_by_both_tables() -> None:
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
def test_times_are_read_as_people_write_them_but_for_one_that_is_bad(way: str, form: str) -> None:
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
    "name", ["timestamp", "eventdate", "created_at", "Time (ms)", "unixReviewTime", "ts"]
)
@pytest.mark.parametrize(
    "column",
    [np.arange(ROWS), SECONDS % 3_600, ["1. M\xe4rz", "2. M\xe4rz"] * 1_000, [*map("{}th".format, SECONDS)]],
)
def test_a_column_that_is_called_a_time_and_is_none_is_refused_with_a_value(name: str, column: Any) -> None:
    with pytest.raises(UserError) as refused:
        guessed({"user": USER, "item": ITEM, name: column})
    value, advice = texts({name: column})[name][0], f'[timestamp] column = "{name}" format = '
    assert f"The column {name} is called a time, but its value {str(value)!r} is " in str(refused.value)
    assert advice in str(refused.value)


@pytest.mark.parametrize(
    "name", ["play_time", "runtime", "timeframe", "time_spent", "release year", "times", "update"]
)
def test_a_duration_is_no_time(name: str) -> None:
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
def test_what_a_column_of_times_is_told_to_get_is_read(column: Any, form: str) -> None:
    number = len(column)
    with pytest.raises(UserError) as refused:
        guessed({"user": USER[:number] * 0 + np.arange(number) % 2, "item": ITEM[:number], "time": column})
    found = re.search(r"\[timestamp\] (column = .*) format = ", str(refused.value))
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
def test_times_of_two_forms_or_of_one_that_may_be_two_are_named(ways: tuple[str, ...], said: str) -> None:
    each = [written(way) for way in ways]
    column = [each[place % len(ways)][place] for place in range(ROWS)]
    with pytest.raises(UserError, match=said):
        guessed({"user": USER, "item": ITEM, "time": column})


def test_any_value_in_any_column_is_taken_as_it_is() -> None:
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


def test_a_column_of_an_own_table_that_is_called_like_the_label_is_left_out() -> None:
    events = {"user": USER, "item": ITEM, "rating": RNG.integers(1, 6, ROWS)}
    items = texts({"item": range(ITEMS), "rating": RNG.random(ITEMS), "size": RNG.random(ITEMS)})
    assert [*guessed(events, items=items).features] == ["size"]
    assert left_out(events, items=items) == {
        "rating": "the events have a column with a role under this name; give it another one in its file"
    }


def test_where_nothing_is_recognised_one_sentence_names_the_columns_and_what_to_write() -> None:
    with pytest.raises(UserError) as refused:
        guess({"events": texts({"temperature": RNG.random(9), "town": ["Rome"] * 9})})
    assert str(refused.value) == (
        "Nothing says where the ids of users and items are among 2 columns: temperature, town; write a "
        'schema.toml beside the data with these parts, each on a line: [user] column = "NAME" [item] '
        'column = "NAME" [label] kind = "clicks"'
    )
    with pytest.raises(
        UserError, match=r'ids of items are among 2 columns: user, x; .* column = "user" \[item'
    ):
        guess({"events": texts({"user": USER, "x": RNG.random(ROWS)})})
    with pytest.raises(UserError, match="The events have no rows"):
        guess({"events": texts({"user": [], "item": []})})


def test_the_label_that_is_there_is_in_the_text_to_copy() -> None:
    events = {"who": ["a", "b"] * 10, "what": ["c", "d"] * 10, "stars": [1, 2, 4, 5] * 5, "when": ISO[:20]}
    with pytest.raises(UserError) as refused:
        guess({"events": texts(events)})
    assert str(refused.value).endswith(
        'each on a line: [user] column = "NAME" [item] column = "NAME" [label] kind = "rating" '
        'column = "stars" lowest = 1 highest = 5'
    )


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
def test_names_of_labels_come_before_answers_and_these_before_small_amounts(
    columns: dict[str, Any], labels: list[tuple[str, str]]
) -> None:
    found = guess({"events": texts({"user": USER, "item": ITEM, **columns})})
    assert [(each.kind, each.column) for each in (found.schema.label, *found.other_labels)] == labels


def test_indices_of_pandas_and_numbers_of_orders_are_left_out() -> None:
    orders = {"user": USER, "item": ITEM, "Unnamed: 0": USER, "__index_level_0__": range(ROWS)}
    orders["order_number"] = RNG.permutation(ROWS)
    assert left_out(orders) == {
        "Unnamed: 0": "it is the index that pandas wrote, and numbers the rows",
        "__index_level_0__": "it is the index that pandas wrote, and numbers the rows",
        "order_number": "nearly all of its values differ, as those of an id do",
    }
    guessed(orders)


def test_numbers_with_decimal_commas_are_left_out_and_are_no_lists() -> None:
    prices = [f"{item % 3},{40 + item % 9}" for item in ITEM]
    assert left_out({"user": USER, "item": ITEM, "price": prices}) == {
        "price": "it holds numbers with decimal commas, which are not read; write them with points"
    }


def test_the_words_of_a_name() -> None:
    assert words_of("userId") == words_of("USER_ID") == words_of("userid") == ["user", "id"]
    assert words_of("HTTPStatus code") == ["http", "status", "code"]
    assert table_name("Price (EUR)", []) == "price_eur"
    assert table_name("user", ["user", "user_2"]) == "user_3"
    assert table_name("2nd choice", []) == "x_2nd_choice"
    assert table_name("Größe", []) == "gr_e"
    assert table_name("***", []) == "feature"
    assert table_name("history", []) == "x_history"


def test_a_person_is_shown_each_column_with_three_of_its_values() -> None:
    events = texts({**SHOP, "bell\x07": ["\x1b[31m" + "x" * 99] * ROWS})
    schema = guess({"events": events}).schema
    lines = describe(schema, {"events": events}).splitlines()
    assert lines[0].split() == ["role", "or", "feature", "column", "kind", "of", "values,", "say"]
    assert [line.split()[0] for line in lines[1:]] == ["user", "item", "label", "timestamp", *schema.features]
    price = next(line for line in lines if line.startswith("price"))
    assert price.split()[1:5] == ["price", "number", "(buckets)", "item"]
    assert price.count(",") == 2
    assert all(line.isprintable() and len(line) < 130 for line in lines)
