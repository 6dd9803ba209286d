"""What a schema must keep to: types, values, names, and the columns that the files have.

One validator for schemas that were read, guessed or made in Python.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from recsuite.datasets.schema import (
    BUCKETS,
    CLICKS,
    COUNT,
    DENSE,
    ENTITIES,
    EVENT,
    IDS,
    ITEM,
    LABEL_KINDS,
    LISTS,
    RATING,
    USER,
    VOCABULARY,
)
from recsuite.datasets.tables.derived import FUNCTIONS, TIMESTAMP, Derived, derived
from recsuite.datasets.tables.description.columns import check_columns
from recsuite.datasets.tables.description.faults import Place, meant, nearest, place_of
from recsuite.datasets.tables.schema_file import (
    CATEGORY,
    DROP,
    ISO,
    LIST,
    NUMBER,
    UNITS,
    FeatureColumn,
    LabelColumn,
    TableSchema,
)

TYPES = {"str": (str, "text"), "float": (float, "a number"), "tuple[str, ...]": (tuple, "a list of texts")}
ENCODINGS = ("utf-8", "utf-16", "latin-1")
TIME_FORMATS = (ISO, *UNITS)
KINDS = (CATEGORY, LIST, NUMBER)
# What is the name of an embedding table, of files and of keys in requests.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
MOST_FEATURES, MOST_CHARACTERS = 1_000, 1_000
# Labels are float32: the ends of a scale must be far from its limits and from each other.
LARGEST_END, SMALLEST_SHARE = 1e9, 1e-4
MOST_BITS = 53
STRANGE_DIRECTIVE = re.compile(r"%(?![A-Za-z%])")
# A day that no pattern of strptime takes for another.
SOME_DAY = datetime(2001, 2, 23, 4, 5, 6, tzinfo=timezone.utc)


def validate(
    schema: TableSchema, columns: Mapping[str, Sequence[str]] | None = None, path: Path | str = "schema.toml"
) -> None:
    """Refuse a schema that says something impossible, or names a column that is not there.

    columns: the columns of each table that there is, by "events", "users" and "items"; None where they are
    not known yet. path: what sentences call the schema.

    Raises:
        UserError: one sentence for the first fault found.
    """
    place = place_of(path)
    for name, section in sections_of(schema).items():
        _check_types(place.at(name), section)
    _check_files(place.at("files"), schema)
    _check_nouns(place, schema)
    _check_label(place.at("label"), schema.label)
    _check_more_labels(place, schema)
    if schema.timestamp:
        _check_time_format(place.at("timestamp"), schema.timestamp.format)
    _check_features(place, schema)
    if columns is not None:
        check_columns(schema, columns, place)


def sections_of(schema: TableSchema) -> dict[str, object]:
    """The sections that a schema has, by their names in the file."""
    sections = {
        name: getattr(schema, name) for name in ("files", "user", "item", "label", "weight", "timestamp")
    }
    labels = {f"label {number}": label for number, label in enumerate(schema.more_labels, 2)}
    features = {f"features.{name}": feature for name, feature in schema.features.items()}
    return {name: section for name, section in (sections | labels | features).items() if section is not None}


def can_be_named(column: str) -> bool:
    """Whether a schema can name a column."""
    return 0 < len(column) <= MOST_CHARACTERS and "\0" not in column


def _check_types(place: Place, section: object) -> None:
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        kind, noun = TYPES[str(field.type)]
        if not (isinstance(value, kind) or (kind is float and _is_whole(value))):
            raise place.wrong(field.name, value, f"is not {noun}")
        if value == "" and field.default is dataclasses.MISSING:
            raise place.wrong(field.name, value, "is empty; write the name")
        if isinstance(value, str) and value and not can_be_named(value):
            raise place.wrong(
                field.name, value, f"is longer than {MOST_CHARACTERS:,} characters, or has a zero"
            )


def _is_whole(value: object) -> bool:
    """Whether it is a whole number that a float holds too; who makes a schema in Python may write such."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= MOST_BITS


def _choose(place: Place, key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        question = meant(value, choices)
        raise place.wrong(key, value, f"is not one of {', '.join(choices)}{question and f'; {question}'}")


def _check_names(place: Place, key: str, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        if not isinstance(name, str) or not can_be_named(name) or name in names[:number]:
            raise place.wrong(key, name, "is no name, or is there twice; give each column its own")


def _check_files(place: Place, schema: TableSchema) -> None:
    files = schema.files
    _choose(place, "encoding", files.encoding, ENCODINGS)
    mark = files.delimiter
    is_one = len(mark) == 1 and mark.isascii() and (mark.isprintable() or mark == "\t") and mark != '"'
    if mark and not is_one and mark != "::":
        raise place.wrong(
            "delimiter", mark, 'is no delimiter; write one character such as ";", "\\t", or "::"'
        )
    for key in ("columns", "user_columns", "item_columns", "whole", "constants"):
        _check_names(place, key, getattr(files, key))
    for each in files.constants:
        if "=" not in each[1:]:
            raise place.wrong("constants", each, 'is no NAME=VALUE; write "user=all", say')
    for other in ("users", "items"):
        if getattr(files, other) and getattr(files, other) == files.events:
            raise place.wrong(other, files.events, "is the file of the events; leave it out")


def _check_nouns(place: Place, schema: TableSchema) -> None:
    for section, others in ((USER, (ITEM, EVENT, *LISTS)), (ITEM, (USER, EVENT, *LISTS, schema.user.noun))):
        noun = getattr(schema, section).noun
        if not NAME.fullmatch(noun) or noun in others:
            raise place.at(section).wrong(
                "noun", noun, "is not a name for it; write a word of letters that nothing else is called"
            )
        _choose(place.at(section), "ids", getattr(schema, section).ids, IDS)
    if schema.user.column == schema.item.column:
        raise place.at(ITEM).wrong("column", schema.item.column, "is the column of the users too")


def _check_label(place: Place, label: LabelColumn) -> None:
    _choose(place, "kind", label.kind, LABEL_KINDS)
    if label.noun and not re.fullmatch(r"\w{1,64}", label.noun):
        raise place.wrong("noun", label.noun, "is not one word")
    if not label.column and label.kind != CLICKS:
        raise place.fault("has no column; write one")
    if label.drop and not all(DROP.fullmatch(each) for each in label.drop.split(",")):
        raise place.wrong(
            "drop", label.drop, 'is not numbers with commas between, such as "-1", "-1, 99" or "<0"'
        )
    if label.kind == RATING:
        _check_scale(place, label)
    if label.kind == COUNT and not 0 <= label.liked <= LARGEST_END:
        raise place.wrong("liked", label.liked, "is not a count; write 1.0 or more")


def _check_scale(place: Place, label: LabelColumn) -> None:
    for key in ("lowest", "highest", "liked"):
        value = getattr(label, key)
        if not (math.isfinite(value) and abs(value) <= LARGEST_END):
            raise place.wrong(key, value, f"is not a number from {-LARGEST_END:.0e} to {LARGEST_END:.0e}")
    size = max(abs(label.lowest), abs(label.highest))
    if label.highest - label.lowest <= SMALLEST_SHARE * size:
        raise place.wrong(
            "lowest", label.lowest, f"is not below highest = {label.highest}; write the ends of a scale"
        )
    if not label.lowest <= label.liked <= label.highest:
        raise place.wrong("liked", label.liked, f"is not from {label.lowest} to {label.highest}")


def _check_more_labels(place: Place, schema: TableSchema) -> None:
    if schema.label.weight:
        raise place.at("label").wrong(
            "weight", schema.label.weight, "is for the labels after the first; write a section [weight]"
        )
    before = [schema.label]
    for number, label in enumerate(schema.more_labels, 2):
        here = place.at(f"label {number}")
        if label.kind == CLICKS:
            raise here.wrong("kind", CLICKS, "has no values of its own; only the first label can be of it")
        _check_label(here, label)
        if label.key in [other.key for other in before]:
            raise here.wrong("noun", label.key, "is the name of another label; write another noun")
        if label.column in [other.column for other in before]:
            raise here.wrong("column", label.column, "is the column of another label")
        before.append(label)


def _check_time_format(place: Place, pattern: str) -> None:
    if "%" not in pattern:
        _choose(place, "format", pattern, TIME_FORMATS)
        return
    try:
        # Some systems write as many zeros as a number after the % says.
        if STRANGE_DIRECTIVE.search(pattern):
            raise ValueError
        read = datetime.strptime(SOME_DAY.strftime(pattern), pattern)
    # A pattern becomes a regular expression, for which a directive that stands there twice is an error.
    except (ValueError, re.error):
        read = datetime.min
    if (read.year, read.month, read.day) != (2001, 2, 23):
        raise place.wrong(
            "format", pattern, 'does not read a year, month and day; write a pattern such as "%Y-%m-%d %H:%M"'
        )


def _check_features(place: Place, schema: TableSchema) -> None:
    if len(schema.features) > MOST_FEATURES:
        raise place.fault(f"has {len(schema.features):,} features, and {MOST_FEATURES:,} is the limit")
    seen: dict[tuple[str, str], str] = {}
    for name, feature in schema.features.items():
        here = place.at(f"features.{name}")
        _check_name(here, name, schema)
        _check_kind(here, feature)
        _check_column(here, feature, schema)
        other = seen.setdefault((feature.of, feature.column), name)
        if other != name:
            raise here.wrong("column", feature.column, f"is the column of [features.{other}] already")


def _check_name(place: Place, name: str, schema: TableSchema) -> None:
    if name in (USER, ITEM, schema.user.noun, schema.item.noun):
        raise place.fault("is a feature already, by its ids; give this one another name")
    for taken in LISTS:
        if name.startswith(taken):
            raise place.fault(
                f"has the name of what --{taken} adds; give it one that does not begin with {taken}"
            )
    if not NAME.fullmatch(name):
        raise place.fault("is not a name for a table; write up to 64 letters, digits and _, a letter first")


def _check_kind(place: Place, feature: FeatureColumn) -> None:
    _choose(place, "of", feature.of, (*ENTITIES, EVENT))
    if feature.kind == "text":
        raise place.wrong(
            "kind", "text", "cannot be learned from: nothing reads texts yet; leave the feature out"
        )
    _choose(place, "kind", feature.kind, KINDS)
    _choose(place, "input", feature.input, (BUCKETS, DENSE))
    _choose(place, "ids", feature.ids, IDS)
    if feature.kind == NUMBER and feature.ids != VOCABULARY:
        raise place.wrong("ids", feature.ids, f'says nothing where kind = "{NUMBER}"; leave it out')
    if feature.kind == LIST and not feature.separator:
        raise place.wrong(
            "separator", feature.separator, 'is empty; write what is between the entries, such as "|"'
        )
    if feature.kind == LIST and feature.of == EVENT:
        raise place.wrong("kind", LIST, "is for users and items; an event has one value of each feature")


def _check_column(place: Place, feature: FeatureColumn, schema: TableSchema) -> None:
    call = derived(feature.column)
    if call:
        _check_derived(place, feature, call, schema)
        return
    taken = {
        schema.user.column: "the ids of users, a feature already",
        schema.item.column: "the ids of items, a feature already",
        **dict.fromkeys(
            [label.column for label in (schema.label, *schema.more_labels)],
            "the label, which is to be predicted",
        ),
    }
    # Another column of the events may have the name that the ids have in the own table.
    if feature.of in ENTITIES:
        named = schema.user if feature.of == USER else schema.item
        taken[named.own_column] = f"the ids of {feature.of}s, a feature already"
    if feature.column in taken:
        raise place.wrong("column", feature.column, f"holds {taken[feature.column]}; leave the feature out")
    if schema.timestamp and feature.column == schema.timestamp.column:
        raise place.wrong(
            "column", feature.column, "holds times; write hour(timestamp) or weekday(timestamp)"
        )


def _check_derived(place: Place, feature: FeatureColumn, call: Derived, schema: TableSchema) -> None:
    if call.function not in FUNCTIONS:
        raise place.wrong(
            "column", feature.column, f"calls no known function; {nearest(call.function, FUNCTIONS)}"
        )
    if not call.fits:
        raise place.wrong("column", feature.column, f"is not complete; write {FUNCTIONS[call.function]}")
    if schema.timestamp is None:
        raise place.wrong(
            "column", feature.column, f"needs the times of events; write a section [{TIMESTAMP}]"
        )
    if feature.of != EVENT:
        raise place.wrong(
            "of", feature.of, f'is not right for {call.function}, of each event; write "{EVENT}"'
        )
    if call.of == ITEM and schema.label.kind in (CLICKS, COUNT):
        raise place.wrong(
            "column",
            feature.column,
            "says which item an event is of, which is not known before one is chosen; leave the feature out, "
            f'or write a column with the age as a number of = "{ITEM}"',
        )
    if call.column and feature.kind != NUMBER:
        raise place.wrong("kind", feature.kind, f'is not right for {call.function}; write "{NUMBER}"')
    for name, other in schema.features.items():
        if call.column and (other.of, other.column, other.kind) == (call.of, call.column, NUMBER):
            raise place.wrong(
                "column", feature.column, f"is of a column without dates, the number [features.{name}]"
            )
