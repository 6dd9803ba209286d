"""Checks of a schema: impossible values, and columns that the tables lack."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from recsuite.datasets.schema import (
    BUCKETS,
    CLICKS,
    COUNT,
    DENSE,
    ENTITIES,
    EVENT,
    HISTORY,
    IDS,
    ITEM,
    LABEL_KINDS,
    RATING,
    USER,
    VOCABULARY,
)
from recsuite.datasets.tables.derived import FUNCTIONS, TIMESTAMP, Derived, derived
from recsuite.datasets.tables.sections import (
    CATEGORY,
    DROP,
    EVENTS,
    ISO,
    ITEMS,
    LIST,
    LONGEST_VECTOR,
    NUMBER,
    SECTIONS,
    SHORTEST_VECTOR,
    UNITS,
    USERS,
    VECTOR,
    FeatureColumn,
    Files,
    ItemColumn,
    LabelColumn,
    TableSchema,
    UserColumn,
)
from recsuite.errors import UserError, printable

# Limits of a value and of a list of names in a message.
MOST_CHARACTERS, MOST_NAMES = 60, 8
# An integer with more bits is not shown: Python refuses to write one with thousands of digits.
MOST_BITS = 256


@dataclass(frozen=True)
class SchemaPlace:
    """Place in a schema: a file and one of its sections; an empty section means the whole file."""

    path: str
    section: str = ""

    def fault(self, why: str) -> UserError:
        """Return the error to raise, with the place and the reason."""
        where = f"{self.path}: [{shortened(self.section)}]" if self.section else f"{self.path}:"
        return UserError(f"{where} {why}{'' if why.endswith('?') else '.'}")

    def at(self, section: str) -> SchemaPlace:
        """Return the place of another section of the same file."""
        return SchemaPlace(self.path, section)

    def wrong(self, key: str, value: object, why: str) -> UserError:
        """Return an error about the value of a key."""
        return self.fault(f"{shortened(key)} = {shown(value)} {why}")


def place_of(path: Path | str) -> SchemaPlace:
    """Return the place of a whole schema, given by its path or another name."""
    return SchemaPlace(printable(path))


def shortened(text: str) -> str:
    """Return the beginning of a text from a file, in one line."""
    return printable(text[:MOST_CHARACTERS]) + "..." * (len(text) > MOST_CHARACTERS)


def shown(value: object) -> str:
    """Return a value as it is written in a schema.toml, shortened if it is long."""
    if isinstance(value, str):
        # Invisible spaces, such as one at the end, may be the only mistake.
        is_plain = " ".join(value[:MOST_CHARACTERS].split()) == value[:MOST_CHARACTERS]
        return f'"{shortened(value)}"' if is_plain else shortened(ascii(value))
    # It may be nested as deeply as Python's stack.
    if isinstance(value, dict | list):
        return "(a section)" if isinstance(value, dict) else "(a list)"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return "(a huge number)"
    return shortened(str(value).lower() if isinstance(value, bool) else str(value))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the most similar name, as the end of a sentence; all known names if none is similar."""
    known = _comparable(names)
    listed = ", ".join(shortened(each) for each in known[:MOST_NAMES])
    return meant(name, known) or f"known are {listed or 'none'}{', ...' * (len(known) > MOST_NAMES)}"


def meant(name: str, names: Iterable[str]) -> str:
    """Return the most similar name, as a question; empty if none is similar."""
    known = {each.lower(): each for each in _comparable(names)}
    like = difflib.get_close_matches(name[: 2 * MOST_CHARACTERS].lower(), known, 1)
    return f"did you mean {shown(known[like[0]])}?" if like else ""


def _comparable(names: Iterable[str]) -> list[str]:
    # The time of a comparison is proportional to both lengths.
    return sorted({name for name in names if len(name) <= 2 * MOST_CHARACTERS})


# Tables that may hold a property, in the order of the search: it may be a column of the events too.
TABLES_OF = {USER: (USERS, EVENTS), ITEM: (ITEMS, EVENTS), EVENT: (EVENTS,)}


def check_columns(schema: TableSchema, columns: Mapping[str, Sequence[str]], place: SchemaPlace) -> None:
    """Refuse a schema that names a missing column.

    columns: the columns of each existing table, by "events", "users" and "items".

    Raises:
        UserError: names the section, the column, where it was looked for, and the nearest one there.
    """
    for section in ("user", "item", "label", "weight", "timestamp"):
        column = getattr(getattr(schema, section), "column", "")
        if column:
            check_column(place.at(section), "column", column, (EVENTS,), columns)
    if schema.events:
        check_column(place.at("events"), "type", schema.events.type, (EVENTS,), columns)
    for number, label in enumerate(schema.more_labels, 2):
        for key in ("column", "weight"):
            if column := getattr(label, key):
                check_column(place.at(f"label {number}"), key, column, (EVENTS,), columns)
    for section, table in ((USER, USERS), (ITEM, ITEMS)):
        named = getattr(schema, section)
        key = "table_column" if named.table_column else "column"
        if table in columns:
            check_column(place.at(section), key, named.own_column, (table,), columns)
        elif named.table_column:
            raise place.at(section).wrong(
                key,
                named.table_column,
                f"is of a table that is not there; name its file as {table} in [files]",
            )
    for key in ("decimal_commas", "grouping_commas"):
        for column in getattr(schema.files, key):
            check_column(place.at("files"), key, column, tuple(columns), columns)
    if schema.item.title:
        check_column(place.at("item"), "title", schema.item.title, TABLES_OF[ITEM], columns)
    for name, feature in schema.features.items():
        call = derived(feature.column)
        of, column = (call.of, call.column) if call else (feature.of, feature.column)
        if call and call.is_text:
            of, column = feature.of, call.argument
        if column:
            check_column(place.at(f"features.{name}"), "column", column, TABLES_OF[of], columns)


def check_column(
    place: SchemaPlace, key: str, column: str, tables: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> None:
    """Refuse a column that none of these tables has. columns: of each existing table."""
    present = [table for table in tables if table in columns]
    known = [name for table in present for name in columns[table]]
    if column in known:
        return
    where = f"is not a column of the {' or the '.join(present)}"
    if key == "column" and present in ([USERS], [ITEMS]) and "features" not in place.section:
        where += ", where table_column can name another one"
    others = [table for table, names in columns.items() if column in names]
    if others and key == "column" and "features" in place.section:
        raise place.wrong(key, column, f"{where} but of the {others[0]}; change of = to match")
    raise place.wrong(key, column, f"{where}; {nearest(column, known)}")


TYPES = {
    "str": (str, "text"),
    "float": (float, "a number"),
    "int": (int, "a whole number"),
    "tuple[str, ...]": (tuple, "a list of texts"),
}
# Allowed values of keys; other keys take any value of their type.
CHOICES: dict[tuple[type, str], tuple[str, ...]] = {
    (Files, "encoding"): ("utf-8", "utf-16", "latin-1"),
    (UserColumn, "ids"): IDS,
    (ItemColumn, "ids"): IDS,
    (LabelColumn, "kind"): LABEL_KINDS,
    (FeatureColumn, "of"): (*ENTITIES, EVENT),
    (FeatureColumn, "input"): (BUCKETS, DENSE),
    (FeatureColumn, "ids"): IDS,
}
TIME_FORMATS = (ISO, *UNITS)
KINDS = (CATEGORY, LIST, NUMBER, VECTOR)
# A name of an embedding table, of files and of keys in requests.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
MOST_FEATURES, LONGEST_NAME = 1_000, 1_000
# Labels are float32: the ends of a scale must be far from its limits and from each other.
LARGEST_END, SMALLEST_SHARE = 1e9, 1e-4
MOST_EXACT_BITS = 53
STRANGE_DIRECTIVE = re.compile(r"%(?![A-Za-z%])")
# A day that no pattern of strptime can mistake for another day.
SOME_DAY = datetime(2001, 2, 23, 4, 5, 6, tzinfo=timezone.utc)


def validate(
    schema: TableSchema, columns: Mapping[str, Sequence[str]] | None = None, path: Path | str = "schema.toml"
) -> None:
    """Refuse a schema with an impossible value or a missing column.

    columns: the columns of each existing table, by "events", "users" and "items"; None if they are not
    known yet. path: the name of the schema in messages.

    Raises:
        UserError: one sentence for the first fault found.
    """
    place = place_of(path)
    for name, section in sections_of(schema).items():
        _check_values(place.at(name), section)
    _check_files(place.at("files"), schema)
    _check_nouns(place, schema)
    _check_label(place.at("label"), schema.label)
    _check_more_labels(place, schema)
    if schema.timestamp:
        _check_time_format(place.at("timestamp"), schema.timestamp.format)
    if schema.events:
        _check_events(place.at("events"), schema)
    _check_features(place, schema)
    if columns is not None:
        check_columns(schema, columns, place)


def sections_of(schema: TableSchema) -> dict[str, object]:
    """Return the sections of a schema, by their names in the file."""
    sections = {name: getattr(schema, name) for name in SECTIONS}
    labels = {f"label {number}": label for number, label in enumerate(schema.more_labels, 2)}
    features = {f"features.{name}": feature for name, feature in schema.features.items()}
    return {name: section for name, section in (sections | labels | features).items() if section is not None}


def _check_events(place: SchemaPlace, schema: TableSchema) -> None:
    types = schema.events
    assert types is not None
    if schema.label.kind != CLICKS:
        raise place.fault(f'requires kind = "{CLICKS}" under [label], got "{schema.label.kind}"')
    if schema.timestamp is None:
        raise place.fault("requires [timestamp]: a history has the events before another one")
    if types.target in types.context:
        raise place.wrong("context", types.target, "is the target too; remove it here")


def can_be_named(column: str) -> bool:
    """True if a schema can name the column."""
    return 0 < len(column) <= LONGEST_NAME and "\0" not in column


def _check_values(place: SchemaPlace, section: object) -> None:
    """Refuse a value of another type, an empty or impossible name, and one that is not among the choices."""
    for key in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, key.name)
        kind, noun = TYPES[str(key.type)]
        if not (isinstance(value, kind) or (kind is float and _is_whole(value))):
            raise place.wrong(key.name, value, f"is not {noun}")
        if value == "" and key.default is dataclasses.MISSING:
            raise place.wrong(key.name, value, "is empty; write the name")
        if isinstance(value, str) and value and not can_be_named(value):
            raise place.wrong(key.name, value, f"is longer than {LONGEST_NAME:,} characters, or has a zero")
        for number, name in enumerate(value if kind is tuple else ()):
            if not isinstance(name, str) or not can_be_named(name) or name in value[:number]:
                raise place.wrong(key.name, name, "is no name, or is there twice; give each column its own")
        if (type(section), key.name) in CHOICES:
            _choose(place, key.name, value, CHOICES[type(section), key.name])


def _is_whole(value: object) -> bool:
    """True for an integer that a float holds exactly; a schema made in Python may have one."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= MOST_EXACT_BITS


def _choose(place: SchemaPlace, key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        question = meant(value, choices)
        raise place.wrong(key, value, f"is not one of {', '.join(choices)}{question and f'; {question}'}")


def _check_files(place: SchemaPlace, schema: TableSchema) -> None:
    files = schema.files
    mark = files.delimiter
    is_one = len(mark) == 1 and mark.isascii() and (mark.isprintable() or mark == "\t") and mark != '"'
    if mark and not is_one and mark != "::":
        raise place.wrong(
            "delimiter", mark, 'is no delimiter; write one character such as ";", "\\t", or "::"'
        )
    for constant in files.constants:
        if "=" not in constant[1:]:
            raise place.wrong("constants", constant, 'is no NAME=VALUE; write "user=all", say')
    for other in ("users", "items"):
        if getattr(files, other) and getattr(files, other) == files.events:
            raise place.wrong(other, files.events, "is the file of the events; remove it")


def _check_nouns(place: SchemaPlace, schema: TableSchema) -> None:
    for section, others in ((USER, (ITEM, EVENT, HISTORY)), (ITEM, (USER, EVENT, HISTORY, schema.user.noun))):
        noun = getattr(schema, section).noun
        if not NAME.fullmatch(noun) or noun in others:
            raise place.at(section).wrong(
                "noun", noun, "is not a name for it; write a word of letters that nothing else is called"
            )
    if schema.user.column == schema.item.column:
        raise place.at(ITEM).wrong("column", schema.item.column, "is the column of the users too")


def _check_label(place: SchemaPlace, label: LabelColumn) -> None:
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


def _check_scale(place: SchemaPlace, label: LabelColumn) -> None:
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


def _check_more_labels(place: SchemaPlace, schema: TableSchema) -> None:
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


def _check_time_format(place: SchemaPlace, pattern: str) -> None:
    if "%" not in pattern:
        _choose(place, "format", pattern, TIME_FORMATS)
        return
    try:
        # Some systems read a number after the % as a width, and pad with zeros.
        if STRANGE_DIRECTIVE.search(pattern):
            raise ValueError
        read = datetime.strptime(SOME_DAY.strftime(pattern), pattern)
    # A pattern becomes a regular expression; a directive that is there twice is an error in it.
    except (ValueError, re.error):
        read = datetime.min
    if (read.year, read.month, read.day) != (2001, 2, 23):
        raise place.wrong(
            "format", pattern, 'does not read a year, month and day; write a pattern such as "%Y-%m-%d %H:%M"'
        )


def _check_features(place: SchemaPlace, schema: TableSchema) -> None:
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


def _check_name(place: SchemaPlace, name: str, schema: TableSchema) -> None:
    if name in (USER, ITEM, schema.user.noun, schema.item.noun):
        raise place.fault("is a feature already, by its ids; give this one another name")
    if name.startswith(HISTORY):
        raise place.fault(
            f"has the name of what --{HISTORY} adds; give it one that does not begin with {HISTORY}"
        )
    if not NAME.fullmatch(name):
        raise place.fault("is not a name for a table; write up to 64 letters, digits and _, a letter first")


def _check_kind(place: SchemaPlace, feature: FeatureColumn) -> None:
    if feature.kind == "text":
        raise place.wrong(
            "kind", "text", "cannot be learned from: nothing reads texts yet; remove the feature"
        )
    _choose(place, "kind", feature.kind, KINDS)
    if feature.kind in (NUMBER, VECTOR) and feature.ids != VOCABULARY:
        raise place.wrong("ids", feature.ids, f'says nothing where kind = "{feature.kind}"; remove it')
    if feature.kind == LIST and not feature.separator:
        raise place.wrong(
            "separator", feature.separator, 'is empty; write what is between the entries, such as "|"'
        )
    if feature.kind in (LIST, VECTOR) and feature.of == EVENT:
        raise place.wrong(
            "kind", feature.kind, "is for users and items; an event has one value of each feature"
        )
    if feature.kind == VECTOR and not SHORTEST_VECTOR <= feature.length <= LONGEST_VECTOR:
        raise place.wrong(
            "length",
            feature.length,
            f"is not between {SHORTEST_VECTOR} and {LONGEST_VECTOR:,}, the numbers of a vector",
        )


def _check_column(place: SchemaPlace, feature: FeatureColumn, schema: TableSchema) -> None:
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
    # Another column of the events may have the name of the id column of the users' or items' table.
    if feature.of in ENTITIES:
        named = schema.user if feature.of == USER else schema.item
        taken[named.own_column] = f"the ids of {feature.of}s, a feature already"
    if feature.column in taken:
        raise place.wrong("column", feature.column, f"holds {taken[feature.column]}; remove the feature")
    if feature.of == ITEM and feature.column == schema.item.title and feature.kind != CATEGORY:
        raise place.wrong("kind", feature.kind, f'is not right for the titles of items; write "{CATEGORY}"')
    if schema.timestamp and feature.column == schema.timestamp.column:
        raise place.wrong(
            "column", feature.column, "holds times; write hour(timestamp) or weekday(timestamp)"
        )


def _check_derived(place: SchemaPlace, feature: FeatureColumn, call: Derived, schema: TableSchema) -> None:
    if call.function not in FUNCTIONS:
        raise place.wrong(
            "column", feature.column, f"calls no known function; {nearest(call.function, FUNCTIONS)}"
        )
    if not call.fits:
        raise place.wrong("column", feature.column, f"is not complete; write {FUNCTIONS[call.function]}")
    if call.is_text:
        for name, other in schema.features.items():
            if (other.of, other.column) == (feature.of, call.argument) and other.kind != CATEGORY:
                raise place.wrong(
                    "column", feature.column, f"is of a column that is the {other.kind} [features.{name}]"
                )
        if feature.kind != LIST or feature.of == EVENT:
            raise place.fault(
                f'must have kind = "{LIST}" and of = "{ITEM}" or "{USER}", because of {call.function}'
            )
        return
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
            "says which item an event is of, which is not known before one is chosen; remove the feature, "
            f'or write a column with the age as a number of = "{ITEM}"',
        )
    if call.column and feature.kind != NUMBER:
        raise place.wrong("kind", feature.kind, f'is not right for {call.function}; write "{NUMBER}"')
    for name, other in schema.features.items():
        if call.column and (other.of, other.column, other.kind) == (call.of, call.column, NUMBER):
            raise place.wrong(
                "column", feature.column, f"is of a column without dates, the number [features.{name}]"
            )
