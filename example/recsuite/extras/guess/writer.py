"""Text of a schema.toml, with comments for the person who corrects it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsuite.datasets.schema import (
    CLICKS,
    COUNT,
    RATING,
    YES_NO,
)
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.schema_file import KEYS_OF_KINDS, WRITTEN, toml_of
from recsuite.datasets.tables.sections import (
    FEATURES,
    LIKED_COUNT,
    SECTIONS,
    FeatureColumn,
    LabelColumn,
    TableSchema,
    WeightColumn,
)
from recsuite.datasets.tables.validation import MOST_FEATURES, validate
from recsuite.errors import printable
from recsuite.files import explained, replace_file

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
# section to use it; of several [weight] use one. A column of the event has to be known before the label is:
# what happens with it or later gives the label away.
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
    """Unused column: the name and the section that it would have, the reason, and some values as text.

    is_weight: true if its section would be [weight], not that of the feature.
    """

    name: str
    feature: FeatureColumn
    why: str
    values: str = ""
    is_weight: bool = False

    @property
    def section(self) -> tuple[str, FeatureColumn | WeightColumn]:
        """Name and content of the section that would use it."""
        if self.is_weight:
            return "weight", WeightColumn(self.feature.column)
        return f"{FEATURES}.{self.name}", self.feature


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
    keys_of = {name: _keys_of(section) for name, section in sections.items() if section is not None}
    return {name: keys for name, keys in keys_of.items() if keys}


def _keys_of(section: Any) -> dict[str, Any]:
    """Return the keys of a section to write: those with another value than the default, and some more."""
    kinds = KEYS_OF_KINDS.get(type(section))
    keys = {"of", "kind", "column", "noun", *kinds[section.kind]} if kinds else None
    written = {}
    for key in dataclasses.fields(section):
        value = getattr(section, key.name)
        is_written = value != "" and (value != key.default or key.name in WRITTEN)
        if is_written and (keys is None or key.name in keys):
            written[key.name] = value
    if isinstance(section, FeatureColumn) and derived(section.column):
        written.pop("separator", None)
    # The default is not written, so a user who corrects the kind need not remove it.
    if isinstance(section, LabelColumn) and section.kind == COUNT and section.liked == LIKED_COUNT:
        del written["liked"]
    return written


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
        written = _section_text(omission.section[0], _keys_of(omission.section[1]))
        lines = [f"{printable(omission.why)}; values, say: {printable(omission.values)}"]
        yield "\n" + _commented([*lines, *written.split("\n")[:-1]])
    if len(left_out) > MOST_FEATURES:
        yield f"\n# {len(left_out) - MOST_FEATURES:,} columns more are not listed.\n"


def _section_text(name: str, values: Mapping[str, Any]) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {toml_of(value)}\n" for key, value in values.items())])


def text_of_sections(sections: Mapping[str, Any]) -> str:
    """Return sections and their keys as the text of a schema.toml, which may be incomplete."""
    features = {f"{FEATURES}.{toml_of(name)}": keys for name, keys in sections.get(FEATURES, {}).items()}
    named = {name: keys for name, keys in sections.items() if name != FEATURES} | features
    return "\n".join(_section_text(name, keys) for name, keys in named.items())


def _commented(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
