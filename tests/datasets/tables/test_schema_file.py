"""A schema.toml: what is read from it, and the one sentence that each fault in it gets."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from recsuite.datasets.schema import EVENT, ITEM, USER, Feature
from recsuite.datasets.tables.schema_file import MOST_BYTES, parse_schema, read_schema
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
from recsuite.datasets.tables.validation import validate
from recsuite.errors import UserError
from recsuite.extras.guess.writer import text_of

# Every section and every key.
WHOLE = """
[files]
events = "events.parquet"
users = "users.csv"
items = "items.csv"
encoding = "utf-16"
delimiter = ";"

[user]
column = "user_id"
noun = "customer"

[item]
column = "product_id"
title = "name"
noun = "product"

[label]
kind = "rating"
column = "stars"
lowest = 1
highest = 5
liked = 4.5
noun = "review"

[weight]
column = "confidence"

[timestamp]
column = "time"
format = "%Y-%m-%d %H:%M"

[features.country]
of = "user"
column = "country"
kind = "category"

[features.price]
of = "item"
column = "price"
kind = "number"
input = "dense"

[features.tags]
of = "item"
column = "tags"
kind = "list"
separator = ";"

[features.weekday]
of = "event"
column = "weekday(timestamp)"
kind = "category"

[features.age]
of = "event"
column = "age_days(item.released)"
kind = "number"
"""
COLUMNS = {
    "events": ["user_id", "product_id", "stars", "confidence", "time"],
    "users": ["user_id", "country"],
    "items": ["product_id", "name", "price", "tags", "released"],
}
SCHEMA = TableSchema(
    files=Files("events.parquet", "users.csv", "items.csv", "utf-16", ";"),
    user=UserColumn("user_id", "customer"),
    item=ItemColumn("product_id", "name", "product"),
    label=LabelColumn("rating", "stars", 1.0, 5.0, 4.5, "review"),
    weight=WeightColumn("confidence"),
    timestamp=TimestampColumn("time", "%Y-%m-%d %H:%M"),
    features={
        "country": FeatureColumn("user", "country", "category"),
        "price": FeatureColumn("item", "price", "number", "dense"),
        "tags": FeatureColumn("item", "tags", "list", separator=";"),
        "weekday": FeatureColumn("event", "weekday(timestamp)", "category"),
        "age": FeatureColumn("event", "age_days(item.released)", "number"),
    },
)
SHORT = '[user]\ncolumn = "u"\n[item]\ncolumn = "i"\n[label]\nkind = "clicks"\n'


AGED = f"""{SHORT}[timestamp]
column = "t"
[features.age]
of = "event"
column = "age_days(item.released)"
kind = "number"
"""


def refusal(text: str, columns: dict[str, list[str]] | None = None) -> str:
    """The one sentence that a schema is refused with, without the name of the file."""
    with pytest.raises(UserError) as refused:
        validate(parse_schema(text, "shop/schema.toml"), columns, "shop/schema.toml")
    sentence = str(refused.value)
    assert sentence.startswith(("shop/schema.toml: ", "shop/schema.toml is not TOML: "))
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence.removeprefix("shop/schema.toml: ")


def test_every_section_and_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(WHOLE)
    assert read_schema(path) == SCHEMA
    validate(SCHEMA, COLUMNS)


def test_a_schema_saved_by_an_editor_of_windows_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_bytes(b"\xef\xbb\xbf" + WHOLE.replace("\n", "\r\n").encode())
    assert read_schema(path) == SCHEMA


def test_the_library_works_with_the_features_nouns_and_labels_of_a_schema() -> None:
    schema = SCHEMA.schema()
    assert schema.features == (
        Feature("customer", USER, "user_id"),
        Feature("country", USER, "country"),
        Feature("product", ITEM, "product_id"),
        Feature("price", ITEM, "price", number="dense"),
        Feature("tags", ITEM, "tags", multi=True),
        Feature("weekday", EVENT, "weekday(timestamp)"),
        Feature("age", EVENT, "age_days(item.released)", number="buckets"),
    )
    assert (schema.user, schema.item, schema.title, schema.label) == ("customer", "product", "name", "review")
    assert (schema.lowest_label, schema.highest_label, schema.liked_label) == (1.0, 5.0, 4.5)
    assert schema.label_kind == "rating"


def test_keys_that_are_not_written_have_default_values() -> None:
    schema = parse_schema(SHORT)
    assert schema == TableSchema(UserColumn("u"), ItemColumn("i"), LabelColumn("clicks"))
    generic = schema.schema()
    assert (generic.user, generic.item, generic.title, generic.label) == ("user", "item", "title", "click")
    assert (generic.lowest_label, generic.highest_label, generic.liked_label) == (0.0, 1.0, 0.5)


def test_the_column_of_titles_is_not_one_that_a_feature_has() -> None:
    schema = parse_schema(f'{SHORT}[features.t]\nof = "item"\ncolumn = "title"\nkind = "number"\n')
    assert schema.schema().title == "title_"


@pytest.mark.parametrize(
    ("label", "liked", "name"),
    [
        ('kind = "rating"\ncolumn = "stars"\nlowest = 1\nhighest = 5', 4.0, "star"),
        ('kind = "rating"\ncolumn = "Score (0-10)"\nlowest = 0\nhighest = 10', 7.5, "Score_0_10"),
        ('kind = "yes_no"\ncolumn = "bought"', 0.5, "bought"),
        ('kind = "count"\ncolumn = "plays"', math.log1p(1), "play"),
        ('kind = "count"\ncolumn = "plays"\nliked = 10', math.log1p(10), "play"),
    ],
)
def test_an_item_is_liked_from_three_quarters_of_the_scale_on(label: str, liked: float, name: str) -> None:
    schema = parse_schema(SHORT.replace('kind = "clicks"', label)).schema()
    assert (schema.liked_label, schema.label) == (liked, name)


def test_unquoted_text_in_a_schema_gets_a_hint() -> None:
    with pytest.raises(
        UserError, match=r"^schema.toml is not TOML: Invalid value .*; texts stand in quotes\.$"
    ):
        parse_schema("[user]\ncolumn = user_id\n")


def test_the_kind_of_a_count_can_be_corrected_alone() -> None:
    schema = TableSchema(UserColumn("u"), ItemColumn("i"), LabelColumn("count", "bought", liked=1.0))
    corrected = text_of(schema).replace('kind = "count"', 'kind = "yes_no"')
    assert parse_schema(corrected).label == LabelColumn("yes_no", "bought")
    liked = dataclasses.replace(schema, label=LabelColumn("count", "bought", liked=3.0))
    assert parse_schema(text_of(liked)) == liked


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("[weight]", "[weigt]", '[weigt] is not a known section; did you mean "weight"?'),
        ("[weight]", "[extra]", "[extra] is not a known section; known are events, features, files, item"),
        (
            'column = "confidence"',
            'column1 = "c"',
            '[weight] column1 = "c" is not a key of this section; did you',
        ),
        ('[user]\ncolumn = "user_id"', "[user]", "[user] has no column; write one."),
        ("[label]\n", "[weight2]\n", '[weight2] is not a known section; did you mean "weight"?'),
        (
            "lowest = 1\n",
            "",
            "[label] has no lowest; write both ends of the scale, such as lowest = 1 and highest = 5.",
        ),
        ('column = "stars"\n', "", "[label] has no column; write one."),
        (
            '"rating"',
            '"ratings"',
            '[label] kind = "ratings" is not one of rating, yes_no, clicks, count; did you',
        ),
        ('"rating"', '"yes_no"', '[label] lowest = 1.0 says nothing where kind = "yes_no"; remove it.'),
        ('"stars"', "5", "[label] column = 5 is not text."),
        ('"stars"', "[1]", "[label] column = (a list) is not text."),
        ('"stars"', '""', "[label] has no column; write one."),
        ('"user_id"', '""', '[user] column = "" is empty; write the name.'),
        ("lowest = 1\n", 'lowest = "1"\n', '[label] lowest = "1" is not a number.'),
        ("lowest = 1\n", "lowest = true\n", "[label] lowest = true is not a number."),
        ("lowest = 1\n", "lowest = nan\n", "[label] lowest = nan is not a number from "),
        ("lowest = 1\n", "lowest = 6\n", "[label] lowest = 6.0 is not below highest = 5.0; write the ends"),
        ("highest = 5\n", "highest = inf\n", "[label] highest = inf is not a number from "),
        ("highest = 5\n", f"highest = 1{'0' * 400}\n", "[label] highest = (a huge number) is not a number."),
        ("liked = 4.5\n", "liked = 7\n", "[label] liked = 7.0 is not from 1.0 to 5.0."),
        ('"customer"', '"user name"', '[user] noun = "user name" is not a name for it; write a word'),
        ('"product"\n\n', '"customer"\n\n', '[item] noun = "customer" is not a name for it'),
        ('"review"', '"a review"', '[label] noun = "a review" is not one word.'),
        ('"product_id"', '"user_id"', '[item] column = "user_id" is the column of the users too.'),
        (
            '"utf-16"',
            '"utf8"',
            '[files] encoding = "utf8" is not one of utf-8, utf-16, latin-1; did you mean "utf-8"?',
        ),
        ('delimiter = ";"', 'delimiter = "=>"', '[files] delimiter = "=>" is no delimiter; write one'),
        ('delimiter = ";"', 'columns = "a"', '[files] columns = "a" is not a list of texts.'),
        ('delimiter = ";"', 'columns = ["a", "a"]', '[files] columns = "a" is no name, or is there twice'),
        (
            'delimiter = ";"',
            'constants = ["user"]',
            '[files] constants = "user" is no NAME=VALUE; write "user=all", say.',
        ),
        ('delimiter = ";"', 'constants = ["=all"]', '[files] constants = "=all" is no NAME=VALUE'),
        ('delimiter = ";"', "columns = [1]", "[files] columns = 1 is no name, or is there twice"),
        ('delimiter = ";"', "item_columns = [1]", "[files] item_columns = 1 is no name, or is there twice"),
        ('delimiter = ";"', 'whole = "id"', '[files] whole = "id" is not a list of texts.'),
        ('"users.csv"', '"events.parquet"', '[files] users = "events.parquet" is the file of the events'),
        (
            '"%Y-%m-%d %H:%M"',
            '"unix_sm"',
            '[timestamp] format = "unix_sm" is not one of iso, unix, unix_ms, unix_us, unix_ns; did',
        ),
        ('"%Y-%m-%d %H:%M"', '"%H:%M"', '[timestamp] format = "%H:%M" does not read a year, month and day'),
        ('"%Y-%m-%d %H:%M"', '"%999999999Y-%m-%d"', "does not read a year, month and day"),
        ('"%Y-%m-%d %H:%M"', '"%Y-%Y"', '[timestamp] format = "%Y-%Y" does not read a year, month and day'),
        (
            'kind = "number"',
            'kind = "text"',
            '[features.price] kind = "text" cannot be learned from: nothing reads',
        ),
        (
            'kind = "number"',
            'kind = "number1"',
            '[features.price] kind = "number1" is not one of category, list, number',
        ),
        (
            'of = "item"',
            'of = "items"',
            '[features.price] of = "items" is not one of user, item, event; did you',
        ),
        (
            '"dense"',
            '"bucket"',
            '[features.price] input = "bucket" is not one of buckets, dense; did you mean',
        ),
        (
            'separator = ";"',
            'separator = ""',
            '[features.tags] separator = "" is empty; write what is between',
        ),
        (
            'separator = ";"',
            'input = "dense"',
            '[features.tags] input = "dense" says nothing where kind = "list"',
        ),
        (
            'of = "item"\ncolumn = "tags"',
            'of = "event"\ncolumn = "tags"',
            '[features.tags] kind = "list" is for users',
        ),
        ("[features.price]", "[features.product]", "[features.product] is a feature already, by its ids"),
        ("[features.price]", "[features.user]", "[features.user] is a feature already, by its ids"),
        ("[features.price]", "[features.history]", "[features.history] has the name of what --history adds"),
        ("[features.price]", '[features."price.eur"]', "[features.price.eur] is not a name for a table"),
        ("[features.price]", '[features."../x"]', "[features.../x] is not a name for a table"),
        ("[features.price]", f"[features.{'x' * 500}]", "is not a name for a table"),
        ("[features.price]", "[features.tags]", "is not TOML: Cannot declare ('features', 'tags') twice"),
        (
            'column = "price"',
            'column = "tags"',
            '[features.tags] column = "tags" is the column of [features.price]',
        ),
        (
            'column = "price"',
            'column = "name"',
            '[features.price] kind = "number" is not right for the titles of items; write "category"',
        ),
        ('column = "price"', 'column = "stars"', '[features.price] column = "stars" holds the label'),
        (
            'column = "price"',
            'column = "user_id"',
            '[features.price] column = "user_id" holds the ids of users',
        ),
        (
            'column = "price"',
            'column = "time"',
            '[features.price] column = "time" holds times; write hour(timestamp)',
        ),
        ('"weekday(timestamp)"', '"wekday(timestamp)"', 'calls no known function; did you mean "weekday"?'),
        (
            '"weekday(timestamp)"',
            '"weekday(time)"',
            '"weekday(time)" is not complete; write weekday(timestamp).',
        ),
        ("age_days(item.released)", "age_days(released)", "is not complete; write age_days(item.COLUMN) or"),
        (
            "age_days(item.released)",
            "age_days(item.price)",
            "is of a column without dates, the number [features.price]",
        ),
        (
            'of = "event"',
            'of = "user"',
            '[features.weekday] of = "user" is not right for weekday, of each event',
        ),
        (
            '[timestamp]\ncolumn = "time"\nformat = "%Y-%m-%d %H:%M"',
            "",
            "needs the times of events; write a section",
        ),
        ("\n[files]", "features = 3\n[files]", "is not TOML: "),
        ("[user]", "[user", "is not TOML: "),
    ],
)
def test_a_fault_gives_one_message(before: str, after: str, sentence: str) -> None:
    assert before in WHOLE
    assert sentence in refusal(WHOLE.replace(before, after, 1))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no section [user]; write one."),
        (
            "user = 3\n" + SHORT[SHORT.index("[item]") :],
            "[user] is 3, and not a section with keys of its own.",
        ),
        (SHORT.replace("clicks", "clicks\u00a0"), r"kind = 'clicks\xa0' is not one of"),
        (SHORT.replace("clicks", "clicks "), "kind = 'clicks ' is not one of"),
        (SHORT.replace("clicks", "stars"), 'kind = "stars" is not one of rating, yes_no, clicks, count.'),
        ("x = " + "9" * 5_000, "holds a number or a date that is too large to be read."),
        ("user = [[1]]\n" + SHORT[SHORT.index("[item]") :], "[user] is (a list), and not a section"),
        (f"{SHORT}[features]\nx = 3", "[features.x] is 3, and not a section"),
        ("features = 3\n" + SHORT, "features = 3 is not a section; write [features.NAME] instead."),
        (SHORT.replace("clicks", "rating"), "[label] has no column; write one."),
        ("x = " + "[" * 5000, "is not"),
    ],
)
def test_a_schema_without_its_parts_gives_one_message(text: str, sentence: str) -> None:
    assert sentence in refusal(text)


@pytest.mark.parametrize(
    ("table", "column", "sentence"),
    [
        (
            "events",
            "user_id",
            '[user] column = "user_id" is not a column of the events; did you mean "user_id2"?',
        ),
        ("events", "product_id", '[item] column = "product_id" is not a column of the events; did you mean'),
        ("events", "stars", '[label] column = "stars" is not a column of the events; did you mean "stars2"?'),
        ("events", "confidence", '[weight] column = "confidence" is not a column of the events; did you'),
        (
            "events",
            "time",
            '[timestamp] column = "time" is not a column of the events; did you mean "time2"?',
        ),
        (
            "users",
            "user_id",
            '[user] column = "user_id" is not a column of the users, where table_column can name another '
            'one; did you mean "user_id2"?',
        ),
        ("items", "product_id", '[item] column = "product_id" is not a column of the items, where table_col'),
        ("items", "name", '[item] title = "name" is not a column of the items or the events; did you mean'),
        (
            "users",
            "country",
            '[features.country] column = "country" is not a column of the users or the events',
        ),
        (
            "items",
            "price",
            '[features.price] column = "price" is not a column of the items or the events; did',
        ),
        (
            "items",
            "released",
            '[features.age] column = "released" is not a column of the items or the events',
        ),
    ],
)
def test_a_column_that_a_file_lacks_is_named_with_the_nearest(table: str, column: str, sentence: str) -> None:
    columns = {**COLUMNS, table: [name + "2" * (name == column) for name in COLUMNS[table]]}
    assert sentence in refusal(WHOLE, columns)


def test_without_user_and_item_tables_features_come_from_the_events() -> None:
    everything = sorted({name for names in COLUMNS.values() for name in names})
    validate(SCHEMA, {"events": everything})
    sentence = refusal(WHOLE, {"events": [name for name in everything if name != "price"]})
    assert sentence.startswith('[features.price] column = "price" is not a column of the events; known are ')


OWN = WHOLE.replace('column = "product_id"', 'column = "product_id"\ntable_column = "id"')


@pytest.mark.parametrize(
    ("text", "items", "sentence"),
    [
        (OWN, ["id", "name", "price", "tags", "released"], ""),
        (OWN, COLUMNS["items"], '[item] table_column = "id" is not a column of the items; known are'),
        (OWN, None, '[item] table_column = "id" is of a table that is not there; name its file as items in'),
        (
            OWN.replace('column = "price"', 'column = "id"'),
            COLUMNS["items"],
            '[features.price] column = "id" holds the ids of items, a feature already; remove',
        ),
    ],
)
def test_table_column_names_the_ids_of_the_item_table(
    text: str, items: list[str] | None, sentence: str
) -> None:
    columns = {**COLUMNS, "items": items} if items else {"events": [*COLUMNS["events"], *COLUMNS["items"]]}
    if sentence:
        assert refusal(text, columns).startswith(sentence)
    else:
        schema = parse_schema(text)
        validate(schema, columns)
        assert parse_schema(text_of(schema)) == schema


def test_a_column_in_the_wrong_table_is_found() -> None:
    text = WHOLE.replace('of = "user"', 'of = "item"')
    assert refusal(text, COLUMNS).endswith(
        "is not a column of the items or the events but of the users; change of = to match."
    )


@pytest.mark.parametrize(
    ("section", "change", "sentence"),
    [
        ("label", {"kind": "stars"}, '[label] kind = "stars" is not one of'),
        ("label", {"lowest": None}, "[label] lowest = None is not a number"),
        ("user", {"column": 7}, "[user] column = 7 is not text"),
        ("timestamp", {"format": "%"}, '[timestamp] format = "%" does not read'),
        ("files", {"events": "x" * 2_000}, "is longer than 1,000 characters"),
    ],
)
def test_a_schema_made_in_python_is_checked_the_same(
    section: str, change: dict[str, Any], sentence: str
) -> None:
    changed = dataclasses.replace(getattr(SCHEMA, section), **change)
    with pytest.raises(UserError) as refused:
        validate(dataclasses.replace(SCHEMA, **{section: changed}))
    assert sentence in str(refused.value)


def test_the_ends_of_a_scale_may_be_whole_numbers_in_python() -> None:
    label = LabelColumn("rating", "stars", 1, 5, 4)
    schema = dataclasses.replace(SCHEMA, label=label)
    validate(schema)
    assert parse_schema(text_of(schema)) == schema
    assert [type(number) for number in (*label.range, label.liked_label)] == [float] * 3


def test_a_file_that_cannot_be_a_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    with pytest.raises(UserError, match=r"Cannot read .*schema.toml: No such file or directory"):
        read_schema(path)
    path.write_bytes(WHOLE.encode("utf-16"))
    with pytest.raises(UserError, match="is not UTF-8 at byte 0; save it as UTF-8"):
        read_schema(path)
    path.write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(UserError, match="is larger than 16,777,216 bytes"):
        read_schema(path)


def test_a_column_with_brackets_in_its_name_is_no_function() -> None:
    text = WHOLE.replace('column = "price"', 'column = "price (EUR)"')
    assert parse_schema(text).features["price"].column == "price (EUR)"


@pytest.mark.parametrize("kind", ["clicks", "count"])
def test_the_age_of_an_item_is_no_feature_of_an_event_to_rank_by(kind: str) -> None:
    text = AGED.replace('"clicks"', f'"{kind}"\ncolumn = "n"' if kind == "count" else '"clicks"')
    assert refusal(text) == (
        '[features.age] column = "age_days(item.released)" says which item an event is of, which is not '
        "known before one is chosen; remove the feature, or write a column with the age as a number of "
        '= "item".'
    )
    parse_schema(text.replace("item.released", "user.born"))
    parse_schema(AGED.replace('"clicks"', '"yes_no"\ncolumn = "bought"'))
