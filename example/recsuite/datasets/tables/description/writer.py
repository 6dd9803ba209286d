"""A schema.toml written for a person to correct: each choice with what it means, and what else there is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from recsuite.datasets.schema import CLICKS, COUNT, RATING, VOCABULARY, YES_NO
from recsuite.datasets.tables.description.validator import MOST_FEATURES, validate
from recsuite.datasets.tables.schema_file import (
    LIKED_COUNT,
    LIST,
    NUMBER,
    FeatureColumn,
    Files,
    ItemColumn,
    LabelColumn,
    TableSchema,
    UserColumn,
)
from recsuite.errors import printable
from recsuite.files import explained, replace_file

HEAD = """\
# What the columns of these tables mean. Correct what is wrong here and start again: training reads this file.
# A line that begins with # is a comment. A path is relative to the folder of this file.
"""
FILES = """
# Which files hold what: each a file, a folder of parts, or a pattern such as "days/*.csv". What is not named
# is found by its name. encoding: utf-8, utf-16 or latin-1. delimiter: what stands between columns of text.
# columns: the names of the events' columns, where their files have no line with them; user_columns and
# item_columns of the others. whole: ids and categories that are whole numbers; other values are bad rows.
# constants: columns that no file of the events has, with the value that they have in all events, such as
# "user=all".
"""
USER = """
# The users: the column of the events with their ids, and what one of them is called. table_column: the column
# with the ids in the users' own table, where it is called otherwise.
"""
ITEM = """
# The items: the column of the events with their ids, and what one of them is called. table_column: the column
# with the ids in the items' own table, where it is called otherwise. title: the column with what people call
# an item.
"""
LABEL = """
# What is predicted of an event. kind: rating (a number on a scale), yes_no (0 or 1), clicks (there is no
# column: that the event happened is all that is known), count (how often: 1, 2, 3 ...).
# noun: what one event is called. drop: labels that are none, whose events are left out and counted: numbers
# such as "-1" or "-1, 99", or what is below or above one, as in "<0".
# Of several labels each has a section [[label]]; the first one decides which epoch is the best. An event may
# lack the others: they count where they are. weight: of these, a column with the weights of their values.
"""
# What a kind of label needs besides.
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
TIMESTAMP = """
# When an event happened. format: iso (2026-11-20, 2026-11-20T08:30:00+01:00), unix (seconds since 1970),
# unix_ms, unix_us, unix_ns or a pattern of strptime such as "%d.%m.%Y %H:%M". Columns of times need none.
"""
FEATURES = """
# What else is known, a section for each feature; take one out, or add one. The ids of users and items are
# features already.
# of: what it is a property of: user, item or event (it differs from event to event).
# column: a column, or what is computed for each event from its time: hour(timestamp), weekday(timestamp),
# age_days(item.COLUMN) or age_days(user.COLUMN), the days since the date in that column.
# With labels of kind clicks or count, and with --task ranking, a feature of the event must be known before an
# item is chosen: what depends on the item, such as its price at that time, gives it away and is refused.
# kind: category (one of several values), list (several of them; separator: what stands between them in a
# text) or number (input: buckets learns something of its own for each range of the numbers, dense takes them
# as they are, on a common scale).
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
    "user": USER,
    "item": ITEM,
    "label": LABEL,
    "weight": WEIGHT,
    "timestamp": TIMESTAMP,
}
# Between what a person wrote and what a guess completed.
ADDED = """\
# What the lines above do not say was guessed from the first rows; correct here what is wrong.
"""


class Omission(Protocol):
    """A column that is left out, such as `guessing.features.LeftOut`: the section that it would have."""

    @property
    def name(self) -> str:
        """Of the feature."""

    @property
    def feature(self) -> FeatureColumn:
        """The section."""

    @property
    def why(self) -> str:
        """The reason, without a full stop."""

    @property
    def values(self) -> str:
        """Some values of the column, as text."""


def write_schema(schema: TableSchema, path: Path, left_out: Sequence[Omission] = ()) -> None:
    """Write a schema.toml with comments; a reader gets back the same schema. Appears in one step.

    left_out: columns whose sections are written as comments.

    Raises:
        UserError: when the schema says something impossible, or the file cannot be written.
    """
    validate(schema, path=path)
    with explained(f"{printable(path)} cannot be written"):
        replace_file(path, text_of(schema, left_out).encode())


def completed(text: str, given: Mapping[str, Any], schema: TableSchema, left_out: Sequence[Omission]) -> str:
    """The text of a schema.toml with what it lacks of another schema; its own lines stay.

    given: the sections and keys that the text has.
    """
    sections = _sections_of(schema)
    for name in (name for name in given if name in sections):
        # Whoever wrote the ends of a scale leaves open from where on an item is liked.
        lacking = sections[name].keys() - given[name].keys() - {"liked", "noun" if name != "label" else ""}
        lines = "".join(
            f"{key} = {toml_of(sections[name][key])}\n" for key in sections[name] if key in lacking
        )
        header = re.search(rf"^[ \t]*\[[ \t]*{name}[ \t]*\][^\n]*", text, re.MULTILINE)
        if header and lines:
            text = f"{text[: header.end()]}\n{lines}{text[header.end() :].removeprefix(chr(10))}"
    return f"{text.rstrip()}\n\n{ADDED}{''.join(_sections(schema, left_out, given))}"


def text_of(schema: TableSchema, left_out: Sequence[Omission] = ()) -> str:
    """What `write_schema` writes."""
    return HEAD + "".join(_sections(schema, left_out))


def _sections_of(schema: TableSchema) -> dict[str, dict[str, str | float]]:
    """What is written of each section but the features, by its name."""
    found = {
        "files": _changed(schema.files, Files()),
        "user": _of_user(schema.user),
        "item": _of_item(schema.item),
        "label": _of_label(schema.label),
        "weight": vars(schema.weight) if schema.weight else {},
        "timestamp": vars(schema.timestamp) if schema.timestamp else {},
    }
    return {name: section for name, section in found.items() if section}


def _sections(
    schema: TableSchema, left_out: Sequence[Omission], given: Collection[str] = ()
) -> Iterator[str]:
    for name, section in _sections_of(schema).items():
        if name in given:
            continue
        yield COMMENTS[name]
        if name != "label":
            yield _section(name, section)
            continue
        labels = (schema.label, *schema.more_labels)
        yield from (LABELS.get(kind, "") for kind in dict.fromkeys(label.kind for label in labels))
        name = "[label]" if schema.more_labels else "label"
        yield "\n".join(_section(name, _of_label(label)) for label in labels)
    yield FEATURES
    for name, feature in schema.features.items():
        yield "\n" + _section(f"features.{name}", _of_feature(feature))
    if left_out:
        yield LEFT_OUT
    for omission in left_out[:MOST_FEATURES]:
        written = _section(f"features.{omission.name}", _of_feature(omission.feature))
        lines = [f"{printable(omission.why)}; values, say: {printable(omission.values)}"]
        yield "\n" + _commented([*lines, *written.split("\n")[:-1]])
    if len(left_out) > MOST_FEATURES:
        yield f"\n# {len(left_out) - MOST_FEATURES:,} columns more are not listed.\n"


def _section(name: str, values: Mapping[str, Any]) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {toml_of(value)}\n" for key, value in values.items())])


def toml_of(value: Any) -> str:
    """A value as a schema.toml has it."""
    # The rules of TOML for a text are those of JSON, but for one character.
    return (
        repr(value)
        if isinstance(value, float)
        else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    )


def _commented(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _changed(section: object, default: object) -> dict[str, Any]:
    return {name: value for name, value in vars(section).items() if value != getattr(default, name)}


def _of_user(user: UserColumn | ItemColumn) -> dict[str, str | float]:
    own: dict[str, str | float] = {"table_column": user.table_column} if user.table_column else {}
    return {"column": user.column, **own, "noun": user.noun, **_ids(user)}


def _of_item(item: ItemColumn) -> dict[str, str | float]:
    title: dict[str, str | float] = {"title": item.title} if item.title else {}
    return {**_of_user(item), **title}


def _of_label(label: LabelColumn) -> dict[str, str | float]:
    values: dict[str, str | float] = {"kind": label.kind}
    if label.kind != CLICKS:
        values["column"] = label.column
    if label.kind == RATING:
        values |= {"lowest": label.lowest, "highest": label.highest}
    # What is the usual one need not be taken out by who corrects the kind.
    if label.kind == RATING or (label.kind == COUNT and label.liked != LIKED_COUNT):
        values["liked"] = label.liked
    values |= {key: value for key, value in (("drop", label.drop), ("weight", label.weight)) if value}
    return {**values, **({"noun": label.noun} if label.noun else {})}


def _of_feature(feature: FeatureColumn) -> dict[str, str | float]:
    values: dict[str, str | float] = {"of": feature.of, "column": feature.column, "kind": feature.kind}
    if feature.kind == NUMBER:
        values["input"] = feature.input
    if feature.kind == LIST:
        values["separator"] = feature.separator
    return {**values, **_ids(feature)}


def _ids(section: UserColumn | ItemColumn | FeatureColumn) -> dict[str, str | float]:
    return {"ids": section.ids} if section.ids != VOCABULARY else {}
