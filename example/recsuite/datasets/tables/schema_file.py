"""The schema.toml of a user's own tables: its sections, and how they are read, checked, written and shown.

The file has these sections; all but [user], [item] and [label] are optional:

    [files]             the files of the events, users and items
    [user]              the columns with the ids of users
    [item]              the columns with the ids and the titles of items
    [label]             the predicted column, and the ends of its scale; one [[label]] each for several
    [weight]            the column with the weights of the events
    [timestamp]         the column with their times
    [events]            the column with their types, such as view and purchase
    [features.NAME]     a property of users, items or events; one section for each
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
    YES_NO,
    Feature,
    Label,
    Schema,
)
from recsuite.datasets.tables.derived import FUNCTIONS, TIMESTAMP, Derived, derived
from recsuite.errors import UserError, printable
from recsuite.files import explained, replace_file

# Python 3.10 has no tomllib: tomli is the same parser.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import pyarrow as pa

# Roles of tables.
EVENTS, USERS, ITEMS = "events", "users", "items"
# Name of the file, beside the data.
FILENAME = "schema.toml"
CATEGORY, LIST, NUMBER, VECTOR = "category", "list", "number", "vector"
# Largest length of a vector, and smallest.
LONGEST_VECTOR, SHORTEST_VECTOR = 2**14, 2
# Formats of times: texts, and numbers since 1970, with the number of units in a second.
ISO, UNITS = "iso", {"unix": 1, "unix_ms": 10**3, "unix_us": 10**6, "unix_ns": 10**9}
# Entries of `LabelColumn.drop`, between its commas.
DROP = re.compile(r"\s*([<>]?)\s*([-+]?\d+(?:\.\d+)?)\s*")
# A count is stored as log(1 + count); no 64-bit count is above this.
HIGHEST_COUNT = 44.0
# Default share of a scale from which an item counts as liked: 4 on a scale of 1 to 5.
LIKED_SHARE = 0.75
# A single play or purchase counts as liked.
LIKED_COUNT = 1.0


@dataclass(frozen=True)
class Files:
    """Files of each role, relative to the folder of the schema; empty means the files found there.

    events, users, items: a file, a folder of parts or a glob pattern; several are separated by ", ".
    encoding, delimiter: of text files; an empty delimiter is guessed. columns, user_columns, item_columns:
    the names of the columns of the events, users and items, in order, if text files have no header. whole:
    columns of ids and categories that hold whole numbers; another value is a bad row. decimal_commas,
    grouping_commas: columns of numbers such as 1.234,5 and 1,234.5. constants: columns that no file of the
    events has, as NAME=VALUE. For events without a user, "user=all" adds one common user.
    """

    events: str = ""
    users: str = ""
    items: str = ""
    encoding: str = "utf-8"
    delimiter: str = ""
    columns: tuple[str, ...] = ()
    user_columns: tuple[str, ...] = ()
    item_columns: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    decimal_commas: tuple[str, ...] = ()
    grouping_commas: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze_lists(self)


def _freeze_lists(section: object) -> None:
    """Replace the lists of TOML in a section by tuples."""
    for name, value in vars(section).items():
        if isinstance(value, list):
            object.__setattr__(section, name, tuple(value))


@dataclass(frozen=True)
class UserColumn:
    """Column of the events with the ids of users, and the noun for a user.

    table_column: the id column of the users' own table; empty means the same name. ids: one of
    `datasets.schema.IDS`.
    """

    column: str
    noun: str = USER
    table_column: str = ""
    ids: str = VOCABULARY

    @property
    def own_column(self) -> str:
        """Id column of the users' own table."""
        return self.table_column or self.column


@dataclass(frozen=True)
class ItemColumn:
    """Column of the events with the ids of items, and the noun for an item.

    title: the column with the titles of items; empty if there is none. table_column, ids: see `UserColumn`.
    """

    column: str
    title: str = ""
    noun: str = ITEM
    table_column: str = ""
    ids: str = VOCABULARY

    @property
    def own_column(self) -> str:
        """Id column of the items' own table."""
        return self.table_column or self.column


@dataclass(frozen=True)
class LabelColumn:
    """Predicted label: a rating, yes_no, clicks (no column: each event is a 1), or a count.

    lowest, highest: the ends of the scale of a rating. liked: the least rating or count of a liked item, in
    the unit of the column. noun: the name of one event; empty means the name of the column. drop: values that
    are no labels; their events are skipped: numbers, "<0" or ">5", separated by commas. weight: of a label
    after the first, a column with weights of its values, in addition to those of the events.
    """

    kind: str
    column: str = ""
    lowest: float = 0.0
    highest: float = 1.0
    liked: float = 0.5
    noun: str = ""
    drop: str = ""
    weight: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """Least and greatest label that a model may predict, as transformed by reading."""
        return (0.0, HIGHEST_COUNT) if self.kind == COUNT else (float(self.lowest), float(self.highest))

    @property
    def liked_label(self) -> float:
        """Least label of a liked item, as transformed by reading."""
        return math.log1p(self.liked) if self.kind == COUNT else float(self.liked)

    @property
    def name(self) -> str:
        """Noun for one event."""
        # Messages form the plural with an s.
        return self.noun or self.key.removesuffix("s") or "click"

    @property
    def key(self) -> str:
        """Name of a label after the first, and of its metrics."""
        return self.noun or re.sub(r"\W+", "_", self.column).strip("_")


@dataclass(frozen=True)
class WeightColumn:
    """Column of the events with their weights in the loss."""

    column: str


@dataclass(frozen=True)
class TimestampColumn:
    """Column of the events with their times.

    format: iso, unix (seconds since 1970), unix_ms, unix_us, unix_ns or a pattern of strptime.
    """

    column: str
    format: str = "iso"


@dataclass(frozen=True)
class EventTypes:
    """Column of the events with their types, such as view, cart and purchase.

    target: the type that is predicted; context: the types that are only in user histories. Events of other
    types are skipped.
    """

    type: str
    target: str
    context: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze_lists(self)


@dataclass(frozen=True)
class FeatureColumn:
    """Property of a user, an item or an event.

    of: "user", "item" or "event". column: a column of the users', items' or events' table, or a derived one,
    such as hour(timestamp). kind: category, list, number or vector. input: of a number, buckets or dense.
    separator: between the entries of a list in a text; lists of typed files have none. ids: of a category or
    a list, see `UserColumn`. length: of a vector, its numbers.
    """

    of: str
    column: str
    kind: str
    input: str = BUCKETS
    separator: str = "|"
    ids: str = VOCABULARY
    length: int = 1

    def named(self, name: str) -> Feature:
        """Return the feature of the rest of the library, with this name."""
        number = {NUMBER: self.input, VECTOR: DENSE}.get(self.kind, "")
        return Feature(name, self.of, self.column, self.kind == LIST, number, self.ids, self.length)


@dataclass(frozen=True)
class TableSchema:
    """Content of a schema.toml.

    features: by name; their tables have the same names. more_labels: the labels after the first.
    """

    user: UserColumn
    item: ItemColumn
    label: LabelColumn
    files: Files = Files()
    weight: WeightColumn | None = None
    timestamp: TimestampColumn | None = None
    events: EventTypes | None = None
    features: dict[str, FeatureColumn] = field(default_factory=dict)
    more_labels: tuple[LabelColumn, ...] = ()

    @property
    def title_column(self) -> str:
        """Column of the titles in the parsed items.

        It is never a feature's column or the id column, because titles are texts and none is missing.
        """
        title = self.item.title or "title"
        taken = {feature.column for feature in self.features.values() if feature.of == ITEM}
        while title in {self.item.column, *taken}:
            title += "_"
        return title

    def schema(self) -> Schema:
        """Return the schema for the rest of the library: features with entities, nouns, the range of labels.

        Raises:
            UserError: where the features do not tell users or items apart.
        """
        lowest, highest = self.label.range
        return Schema(
            features=(
                Feature(self.user.noun, USER, self.user.column, ids=self.user.ids),
                *self._features_of(USER),
                Feature(self.item.noun, ITEM, self.item.column, ids=self.item.ids),
                *self._features_of(ITEM),
                *self._features_of(EVENT),
            ),
            user=self.user.noun,
            item=self.item.noun,
            title=self.title_column,
            label=self.label.name,
            lowest_label=lowest,
            highest_label=highest,
            liked_label=self.label.liked_label,
            label_kind=self.label.kind,
            **({"answer": self.label.column} if self.label.kind == YES_NO else {}),
            more_labels=tuple(Label(each.key, each.kind) for each in self.more_labels),
            # In any order of the file: a position is a weight of the model.
            event_types=(self.events.target, *sorted(self.events.context)) if self.events else (),
        )

    def _features_of(self, entity: str) -> list[Feature]:
        return [feature.named(name) for name, feature in self.features.items() if feature.of == entity]


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
    for each in files.constants:
        if "=" not in each[1:]:
            raise place.wrong("constants", each, 'is no NAME=VALUE; write "user=all", say')
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


HEAD_TEXT = """\
# What the columns of these tables mean. Correct what is wrong here and start again: training reads this file.
# A line that begins with # is a comment. A path is relative to the folder of this file.
"""
FILES = """
# Which files hold what: each a file, a folder of parts, or a pattern such as "days/*.csv". What is not named
# is found by its name. encoding: utf-8, utf-16 or latin-1. delimiter: what stands between columns of text.
# columns: the names of the events' columns, where their files have no line with them; user_columns and
# item_columns of the others. whole: ids and categories that are whole numbers; other values are bad rows.
# decimal_commas, grouping_commas: the columns of numbers such as 1.234,5 and such as 1,234.5.
# constants: columns that no file of the events has, with the value that they have in all events, such as
# "user=all".
"""
USER_TEXT = """
# The users: the column of the events with their ids, and what one of them is called. table_column: the column
# with the ids in the users' own table, where it is called otherwise.
"""
ITEM_TEXT = """
# The items: the column of the events with their ids, and what one of them is called. table_column: the column
# with the ids in the items' own table, where it is called otherwise. title: the column with what people call
# an item.
"""
LABEL = """
# What is predicted of an event. kind: rating (a number on a scale), yes_no (0 or 1), clicks (there is no
# column: that the event happened is all that is known), count (how often: 1, 2, 3 ...).
# noun: what one event is called. drop: labels that are none, whose events are skipped and counted: numbers
# such as "-1" or "-1, 99", or what is below or above one, as in "<0".
# Of several labels each has a section [[label]]; the first one decides which epoch is the best. An event may
# lack the others: they count where they are. weight: of these, a column with the weights of their values.
"""
# Additional comments for a kind of label.
LABELS = {
    RATING: """\
# lowest, highest: the ends of the scale. liked: from here on, an item counts as liked by the user.
""",
    COUNT: """\
# liked: from this count on, an item counts as liked by the user; 1 where nothing is written.
""",
    YES_NO: "",
    CLICKS: "",
}
WEIGHT = """
# How much each event counts in the training: a column of numbers, 0 or more.
"""
TIMESTAMP_TEXT = """
# When an event happened. format: iso (2026-11-20, 2026-11-20T08:30:00+01:00), unix (seconds since 1970),
# unix_ms, unix_us, unix_ns or a pattern of strptime such as "%d.%m.%Y %H:%M". Columns of times need none.
"""
EVENTS_TEXT = """
# The column with the types of the events, the type to predict (target), and the types that only add to the
# histories of users (context). Training learns how much an event of each type counts in a history. Events of
# other types are skipped. To learn from all types alike, remove this section; to weight them yourself, add a
# column of numbers and name it under [weight].
"""
FEATURES_TEXT = """
# What else is known, a section for each feature; take one out, or add one. The ids of users and items are
# features already.
# of: what it is a property of: user, item or event (it differs from event to event).
# column: a column, or what is computed for each event from its time: hour(timestamp), weekday(timestamp),
# age_days(item.COLUMN) or age_days(user.COLUMN), the days since the date in that column; or a list computed
# from a text of an item or a user: words(COLUMN), such as those of a title, or levels(COLUMN) of a path of
# categories (A > B > C: A, A > B, and all of it).
# With labels of kind clicks or count, and with --task ranking, a feature of the event must be known before an
# item is chosen: what depends on the item, such as its price at that time, gives it away and is refused.
# kind: category (one of several values), list (several of them; separator: what stands between them in a
# text), number (input: buckets learns something of its own for each range of the numbers, dense takes them
# as they are, on a common scale) or vector (a list of as many numbers as length says, such as the embedding
# of a text or an image, of which a projection is learned).
# ids of a category or a list, and of users and items: vocabulary (rows for the values of the training, as
# where nothing is written) or dynamic (the table takes in values as they come).
"""
LEFT_OUT = """
# Columns that are not learned from, with the reason and some values. Take the # away from the lines of a
# section to use it. A column of the event has to be known before the label is: what happens with it or later
# gives the label away.
"""


COMMENTS = {
    "files": FILES,
    "user": USER_TEXT,
    "item": ITEM_TEXT,
    "label": LABEL,
    "weight": WEIGHT,
    "timestamp": TIMESTAMP_TEXT,
    "events": EVENTS_TEXT,
}
# Separates the lines of the user from the guessed ones.
ADDED = """\
# What the lines above do not say was guessed from the first rows; correct here what is wrong.
"""


@dataclass(frozen=True)
class SkippedColumn:
    """Unused column: the name and the section that it would have, the reason, and some values as text."""

    name: str
    feature: FeatureColumn
    why: str
    values: str = ""


def write_schema(schema: TableSchema, path: Path) -> None:
    """Write a schema.toml with comments, in one step. Reading it gives the same schema.

    Raises:
        UserError: when the schema says something impossible, or the file cannot be written.
    """
    validate(schema, path=path)
    with explained(f"Cannot write {printable(path)}"):
        replace_file(path, text_of(schema).encode())


def completed(
    text: str, given: Mapping[str, Any], schema: TableSchema, left_out: Sequence[SkippedColumn]
) -> str:
    """Return the text of a schema.toml, completed from another schema; its own lines stay.

    given: the sections and keys of the text.
    """
    sections = _sections_of(schema)
    for name in (name for name in given if name in sections):
        # The ends of a scale may be given without `liked`.
        lacking = sections[name].keys() - given[name].keys() - {"liked", "noun" if name != "label" else ""}
        lines = "".join(
            f"{key} = {toml_of(sections[name][key])}\n" for key in sections[name] if key in lacking
        )
        header = re.search(rf"^[ \t]*\[[ \t]*{name}[ \t]*\][^\n]*", text, re.MULTILINE)
        if header and lines:
            text = f"{text[: header.end()]}\n{lines}{text[header.end() :].removeprefix(chr(10))}"
    return f"{text.rstrip()}\n\n{ADDED}{''.join(_sections(schema, left_out, given))}"


def text_of(schema: TableSchema, left_out: Sequence[SkippedColumn] = ()) -> str:
    """Return the text that `write_schema` writes. left_out: unused columns, which become comments."""
    return HEAD_TEXT + "".join(_sections(schema, left_out))


def _sections_of(schema: TableSchema) -> dict[str, dict[str, Any]]:
    """Return the keys to write of each section but the features, by section name."""
    sections = {name: getattr(schema, name) for name in SECTIONS}
    found = {name: _keys_of(section) for name, section in sections.items() if section is not None}
    return {name: keys for name, keys in found.items() if keys}


def _keys_of(section: Any) -> dict[str, Any]:
    """Return the keys of a section to write: those with another value than the default, and some more."""
    kinds = KEYS_OF_KINDS.get(type(section))
    keys = {"of", "kind", "column", "noun", *kinds[section.kind]} if kinds else None
    found = {}
    for key in dataclasses.fields(section):
        value = getattr(section, key.name)
        is_written = value != "" and (value != key.default or key.name in WRITTEN)
        if is_written and (keys is None or key.name in keys):
            found[key.name] = value
    if isinstance(section, FeatureColumn) and derived(section.column):
        found.pop("separator", None)
    # The default is not written, so a user who corrects the kind need not remove it.
    if isinstance(section, LabelColumn) and section.kind == COUNT and section.liked == LIKED_COUNT:
        del found["liked"]
    return found


def _sections(
    schema: TableSchema, left_out: Sequence[SkippedColumn], given: Collection[str] = ()
) -> Iterator[str]:
    for name, section in _sections_of(schema).items():
        if name in given:
            continue
        yield COMMENTS[name]
        if name != "label":
            yield _section_text(name, section)
            continue
        labels = (schema.label, *schema.more_labels)
        yield from (LABELS.get(kind, "") for kind in dict.fromkeys(label.kind for label in labels))
        name = "[label]" if schema.more_labels else "label"
        yield "\n".join(_section_text(name, _keys_of(label)) for label in labels)
    yield FEATURES_TEXT
    for name, feature in schema.features.items():
        yield "\n" + _section_text(f"features.{name}", _keys_of(feature))
    if left_out:
        yield LEFT_OUT
    for omission in left_out[:MOST_FEATURES]:
        written = _section_text(f"features.{omission.name}", _keys_of(omission.feature))
        lines = [f"{printable(omission.why)}; values, say: {printable(omission.values)}"]
        yield "\n" + _commented([*lines, *written.split("\n")[:-1]])
    if len(left_out) > MOST_FEATURES:
        yield f"\n# {len(left_out) - MOST_FEATURES:,} columns more are not listed.\n"


def _section_text(name: str, values: Mapping[str, Any]) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {toml_of(value)}\n" for key, value in values.items())])


def text_of_sections(sections: Mapping[str, Any]) -> str:
    """Return sections and their keys as the text of a schema.toml, which may be incomplete."""
    features = {f"{FEATURES}.{toml_of(name)}": each for name, each in sections.get(FEATURES, {}).items()}
    named = {name: each for name, each in sections.items() if name != FEATURES} | features
    return "\n".join(_section_text(name, each) for name, each in named.items())


def toml_of(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, float):
        return repr(value)
    # TOML's rules for a text are those of JSON, except for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _commented(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


SECTIONS = {
    "files": Files,
    "user": UserColumn,
    "item": ItemColumn,
    "label": LabelColumn,
    "weight": WeightColumn,
    "timestamp": TimestampColumn,
    "events": EventTypes,
}
FEATURES = "features"
# A schema with a thousand features and a thousand more as comments has a hundredth of this size.
MOST_BYTES = 2**24
# Keys of one kind of label, or of feature, besides the common ones. With another kind they have no effect.
KEYS_OF_KINDS: dict[type, dict[str, tuple[str, ...]]] = {
    LabelColumn: {
        RATING: ("column", "lowest", "highest", "liked", "drop", "weight"),
        YES_NO: ("column", "drop", "weight"),
        CLICKS: (),
        COUNT: ("column", "liked", "drop", "weight"),
    },
    FeatureColumn: {
        CATEGORY: ("ids",),
        LIST: ("separator", "ids"),
        NUMBER: ("input",),
        VECTOR: ("length",),
    },
}
# The optional ones of them.
OPTIONAL = ("liked", "drop", "weight", "separator", "input", "ids")
# Keys that are written although they have their default value.
WRITTEN = ("noun", "format", "lowest", "highest", "liked", "input", "separator")
# Fix for a rating without its scale.
ENDS = "both ends of the scale, such as lowest = 1 and highest = 5"

S = TypeVar("S")


class IncompleteSchemaError(UserError):
    """Schema that lacks a required section or key; the rest may be right."""


def read_schema(path: Path) -> TableSchema:
    """Read a schema.toml, and check it as far as possible without the files that it describes.

    Raises:
        UserError: one sentence with the section, the key, its value and the nearest one that exists.
    """
    return parse_schema(_text(path), path)


def given_in(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a schema.toml that may be incomplete, and its sections and keys by their names.

    Raises:
        UserError: for what is wrong with those, as far as that is known without the others.
    """
    text = _text(path)
    return text, given_of(text, path)


def given_of(text: str, path: Path | str) -> dict[str, Any]:
    """As `given_in`, of a text; `path` is its name in messages."""
    place = place_of(path)
    found = _parsed(place, text)
    with suppress(IncompleteSchemaError):
        _schema(place, found)
    # If there are several labels, a guess completes only the first.
    found, more = _with_first_label(found)
    return {**found, "more_labels": more}


def parse_schema(text: str, path: Path | str = "schema.toml") -> TableSchema:
    """Read a schema from a text; `path` is its name in messages.

    Raises:
        UserError: see `read_schema`.
    """
    place = place_of(path)
    schema = _schema(place, _parsed(place, text))
    validate(schema, path=path)
    return schema


def _text(path: Path) -> str:
    place = place_of(path)
    with explained(f"Cannot read {place.path}"), path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise place.fault(f"is larger than {MOST_BYTES:,} bytes, which no schema is")
    try:
        # Windows editors write a byte order mark of three bytes.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise place.fault(f"is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None


def _parsed(place: SchemaPlace, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "; texts stand in quotes" * ("Invalid value" in str(error))
        raise UserError(f"{place.path} is not TOML: {printable(error)}{hint}.") from None
    except ValueError:
        raise place.fault("holds a number or a date that is too large to be read") from None
    except RecursionError:
        raise place.fault("is not a schema: its lists are nested too deep") from None


def _with_first_label(found: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the sections with the first of several labels as [label], and the other labels."""
    labels = found.get("label")
    if not isinstance(labels, list) or not labels:
        return found, []
    return {**found, "label": labels[0]}, labels[1:]


def _schema(place: SchemaPlace, found: dict[str, Any]) -> TableSchema:
    for name in found:
        if name not in (*SECTIONS, FEATURES):
            raise place.fault(
                f"[{shortened(name)}] is not a known section; {nearest(name, (*SECTIONS, FEATURES))}"
            )
    features, lacking = _features(place, found.get(FEATURES, {})), None
    found, more = _with_first_label(found)
    read: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        try:
            if name in found:
                read[name] = _section(place.at(name), found[name], kind)
            elif name in ("user", "item", "label"):
                raise IncompleteSchemaError(str(place.fault(f"has no section [{name}]; write one")))
        except IncompleteSchemaError as error:
            # Errors in other sections come first: a guess cannot fix them.
            lacking = lacking or error
    if lacking:
        raise lacking
    read["more_labels"] = tuple(
        _section(place.at(f"label {number}"), each, LabelColumn) for number, each in enumerate(more, 2)
    )
    return TableSchema(**read, features=features)


def _features(place: SchemaPlace, found: object) -> dict[str, FeatureColumn]:
    if not isinstance(found, dict):
        raise place.fault(f"{FEATURES} = {shown(found)} is not a section; write [features.NAME] instead")
    return {
        name: _section(place.at(f"{FEATURES}.{name}"), section, FeatureColumn)
        for name, section in found.items()
    }


def _section(place: SchemaPlace, found: object, kind: type[S]) -> S:
    """Return one section as its dataclass."""
    if not isinstance(found, dict):
        raise place.fault(f"is {shown(found)}, and not a section with keys of its own")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in found:
        if key not in fields:
            raise place.wrong(key, found[key], f"is not a key of this section; {nearest(key, fields)}")
        if fields[key].type == "str" and not isinstance(found[key], str):
            raise place.wrong(key, found[key], "is not text")
    _require(place, found, [name for name, field in fields.items() if field.default is dataclasses.MISSING])
    values = {key: _float(value) if fields[key].type == "float" else value for key, value in found.items()}
    if kind in KEYS_OF_KINDS:
        _check_keys_of_kind(place, values, KEYS_OF_KINDS[kind])
    if kind is LabelColumn:
        values = {**_defaults_of_label(values), **values}
    return kind(**values)


def _require(place: SchemaPlace, found: Mapping[str, object], names: Iterable[str]) -> None:
    for name in names:
        if name not in found:
            what = ENDS if name in ("lowest", "highest") else "one"
            raise IncompleteSchemaError(str(place.fault(f"has no {name}; write {what}")))


def _float(value: object) -> object:
    """Return an integer as a float if it fits; the validator refuses the others."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _check_keys_of_kind(
    place: SchemaPlace, values: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse keys of another kind, and missing keys of this kind."""
    kind = values["kind"]
    # The validator reports the known kinds.
    if not isinstance(kind, str) or kind not in keys:
        return
    for key in values:
        if key not in keys[kind] and any(key in others for others in keys.values()):
            raise place.wrong(key, values[key], f'says nothing where kind = "{kind}"; remove it')
    _require(place, values, [key for key in keys[kind] if key not in OPTIONAL])


def _defaults_of_label(values: Mapping[str, Any]) -> dict[str, float]:
    """Default for `liked` of a rating or a count."""
    if values["kind"] == COUNT:
        return {"liked": LIKED_COUNT}
    ends = values.get("lowest"), values.get("highest")
    if values["kind"] == RATING and isinstance(ends[0], float) and isinstance(ends[1], float):
        return {"liked": ends[0] + LIKED_SHARE * (ends[1] - ends[0])}
    return {}


HEAD = ("role or feature", "column", "kind", "of", "values, say")
# For each column: number of values, characters of a value, characters of a name.
SHOWN, VALUE_CHARACTERS, NAME_CHARACTERS = 3, 20, 30
# Largest number of unused columns to show.
MOST_LEFT_OUT = 40

Row = tuple[str, str, str, str, str, str]


def describe(
    schema: TableSchema, samples: Mapping[str, pa.Table], left_out: Sequence[SkippedColumn] = ()
) -> str:
    """Return a text table with a line for each role, feature and unused column.

    Each line shows up to three values of the column; that of an unused column also shows the reason.

    samples: the first rows of the "events", and of the "users" and "items" if they exist.
    """
    rows = [
        (*HEAD, "why it is not taken" * bool(left_out)),
        *_roles(schema, samples),
        *_rows_of_features(schema, samples),
    ]
    for each in left_out[:MOST_LEFT_OUT]:
        column, kind = _short(each.feature.column), _kind(each.feature)
        rows.append(("not taken", column, kind, each.feature.of, each.values, each.why))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    more = len(left_out) - MOST_LEFT_OUT
    return "\n".join([*lines, f"not taken: {more:,} columns more"] if more > 0 else lines)


def _roles(schema: TableSchema, samples: Mapping[str, pa.Table]) -> Iterator[Row]:
    for of, role, named in ((USER, USERS, schema.user), (ITEM, ITEMS, schema.item)):
        own = f" = {role}.{_short(named.table_column)}" if named.table_column else ""
        yield of, f"{_short(named.column)}{own}", "id", of, first_values(samples, of, named.column), ""
    label, weight, time, types = schema.label, schema.weight, schema.timestamp, schema.events
    found = [("title", schema.item.title, "text", ITEM)] if schema.item.title else []
    found += [("label", each.column, each.kind, EVENT) for each in (label, *schema.more_labels)]
    found += [("weight", weight.column, NUMBER, EVENT)] if weight else []
    found += [("timestamp", time.column, time.format, EVENT)] if time else []
    found += [("type", types.type, f"target {types.target}", EVENT)] if types else []
    for role, column, kind, of in found:
        yield role, _short(column) or "-", _short(kind), of, first_values(samples, of, column), ""


def _rows_of_features(schema: TableSchema, samples: Mapping[str, pa.Table]) -> Iterator[Row]:
    for name, feature in schema.features.items():
        call = derived(feature.column)
        values = "computed" if call else first_values(samples, feature.of, feature.column)
        yield name, _short(feature.column), _kind(feature), feature.of, values, ""


def _kind(feature: FeatureColumn) -> str:
    more = {NUMBER: f" ({feature.input})", VECTOR: f" ({feature.length})"}
    return feature.kind + more.get(feature.kind, "")


def first_values(samples: Mapping[str, pa.Table], of: str, column: str) -> str:
    """Return the first distinct values of a column, from the table that it is read from."""
    # get_field_index is fast; a search in a list of names takes time proportional to its length.
    tables = [
        samples[role]
        for role in TABLES_OF[of]
        if role in samples and samples[role].schema.get_field_index(column) >= 0
    ]
    if not tables:
        return "-" if not column else f"not in the {EVENTS}"
    return _values_of(tables[0][column])


def _values_of(column: pa.ChunkedArray) -> str:
    """Return the first distinct values of a column, as one short text."""
    found: dict[str, None] = {}
    # Few rows first: with very many columns, converting all rows to Python objects would be slow.
    for first, number in ((0, 10), (10, 1_000)):
        for value in column.slice(first, number).to_pylist():
            if value is not None and value != "":
                found.setdefault(_short(value, VALUE_CHARACTERS))
            if len(found) == SHOWN:
                return ", ".join(found)
    return ", ".join(found) or "-"


def _short(value: object, most: int = NAME_CHARACTERS) -> str:
    # Only the beginning: a value may be very long.
    text = printable(value[: 2 * most] if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
