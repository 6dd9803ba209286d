"""Table of a schema for a person: the role of each column with some of its values, and what is not taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.description.columns import EVENTS, ITEMS, TABLES_OF, USERS
from recsuite.datasets.tables.description.writer import Omission
from recsuite.datasets.tables.schema_file import NUMBER, FeatureColumn, TableSchema
from recsuite.errors import printable

# For types alone: who reads a schema does not need what reads tables.
if TYPE_CHECKING:
    import pyarrow as pa

HEAD = ("role or feature", "column", "kind", "of", "values, say")
# Of each column: how many values, and how many characters of one, and of a name.
SHOWN, VALUE_CHARACTERS, NAME_CHARACTERS = 3, 20, 30
# Of the columns that are not taken.
MOST_LEFT_OUT = 40

Row = tuple[str, str, str, str, str, str]


def describe(schema: TableSchema, samples: Mapping[str, pa.Table], left_out: Sequence[Omission] = ()) -> str:
    """A table in text, a line for each role and feature, with up to three values of each column, and for each
    column that is left out, with the reason.

    samples: the first rows of the "events", and of the "users" and "items" where there are such.
    """
    rows = [
        (*HEAD, "why it is not taken" * bool(left_out)),
        *_roles(schema, samples),
        *_features(schema, samples),
    ]
    rows += [
        (
            "not taken",
            _short(each.feature.column),
            _kind(each.feature),
            each.feature.of,
            each.values,
            each.why,
        )
        for each in left_out[:MOST_LEFT_OUT]
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    more = len(left_out) - MOST_LEFT_OUT
    return "\n".join([*lines, f"not taken: {more:,} columns more"] if more > 0 else lines)


def _roles(schema: TableSchema, samples: Mapping[str, pa.Table]) -> Iterator[Row]:
    for of, role, named in ((USER, USERS, schema.user), (ITEM, ITEMS, schema.item)):
        own = f" = {role}.{_short(named.table_column)}" if named.table_column else ""
        yield of, f"{_short(named.column)}{own}", "id", of, _values(samples, of, named.column), ""
    label, weight, time = schema.label, schema.weight, schema.timestamp
    found = [("title", schema.item.title, "text", ITEM)] if schema.item.title else []
    found += [("label", each.column, each.kind, EVENT) for each in (label, *schema.more_labels)]
    found += [("weight", weight.column, NUMBER, EVENT)] if weight else []
    found += [("timestamp", time.column, time.format, EVENT)] if time else []
    for role, column, kind, of in found:
        yield role, _short(column) or "-", _short(kind), of, _values(samples, of, column), ""


def _features(schema: TableSchema, samples: Mapping[str, pa.Table]) -> Iterator[Row]:
    for name, feature in schema.features.items():
        call = derived(feature.column)
        values = "computed" if call else _values(samples, feature.of, feature.column)
        yield name, _short(feature.column), _kind(feature), feature.of, values, ""


def _kind(feature: FeatureColumn) -> str:
    return f"{feature.kind} ({feature.input})" if feature.kind == NUMBER else feature.kind


def _values(samples: Mapping[str, pa.Table], of: str, column: str) -> str:
    """The first different values of a column, of the table that it is read from."""
    tables = [
        samples[role]
        for role in TABLES_OF[of]
        if role in samples and samples[role].schema.get_field_index(column) >= 0
    ]
    if not tables:
        return "-" if not column else f"not in the {EVENTS}"
    return values_of(tables[0][column])


def values_of(column: pa.ChunkedArray) -> str:
    """The first different values of a column, as one short text."""
    found: dict[str, None] = {}
    # Few rows first: of very many columns each would be made Python's in vain.
    for first, number in ((0, 10), (10, 1_000)):
        for value in column.slice(first, number).to_pylist():
            if value is not None and value != "":
                found.setdefault(_short(value, VALUE_CHARACTERS))
            if len(found) == SHOWN:
                return ", ".join(found)
    return ", ".join(found) or "-"


def _short(value: object, most: int = NAME_CHARACTERS) -> str:
    # Only the beginning: a value may be a book.
    text = printable(value[: 2 * most] if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
