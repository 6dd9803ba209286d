"""Overview of a schema as a text table, with some values of each column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from recsuite.datasets.schema import (
    EVENT,
    ITEM,
    USER,
)
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.sections import EVENTS, ITEMS, NUMBER, USERS, VECTOR, FeatureColumn, TableSchema
from recsuite.datasets.tables.validation import TABLES_OF
from recsuite.errors import printable
from recsuite.extras.guess.writer import SkippedColumn

if TYPE_CHECKING:
    import pyarrow as pa

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
    for skipped in left_out[:MOST_LEFT_OUT]:
        column, kind = _short(skipped.feature.column), _kind(skipped.feature)
        rows.append(("not taken", column, kind, skipped.feature.of, skipped.values, skipped.why))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    more = len(left_out) - MOST_LEFT_OUT
    return "\n".join([*lines, f"not taken: {more:,} columns more"] if more > 0 else lines)


def _roles(schema: TableSchema, samples: Mapping[str, pa.Table]) -> Iterator[Row]:
    for of, role, named in ((USER, USERS, schema.user), (ITEM, ITEMS, schema.item)):
        own = f" = {role}.{_short(named.table_column)}" if named.table_column else ""
        yield of, f"{_short(named.column)}{own}", "id", of, first_values(samples, of, named.column), ""
    label, weight, time, types = schema.label, schema.weight, schema.timestamp, schema.events
    roles = [("title", schema.item.title, "text", ITEM)] if schema.item.title else []
    roles += [("label", of_label.column, of_label.kind, EVENT) for of_label in (label, *schema.more_labels)]
    roles += [("weight", weight.column, NUMBER, EVENT)] if weight else []
    roles += [("timestamp", time.column, time.format, EVENT)] if time else []
    roles += [("type", types.type, f"target {types.target}", EVENT)] if types else []
    for role, column, kind, of in roles:
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
    values: dict[str, None] = {}
    # Few rows first: with very many columns, converting all rows to Python objects would be slow.
    for first, number in ((0, 10), (10, 1_000)):
        for value in column.slice(first, number).to_pylist():
            if value is not None and value != "":
                values.setdefault(_short(value, VALUE_CHARACTERS))
            if len(values) == SHOWN:
                return ", ".join(values)
    return ", ".join(values) or "-"


def _short(value: object, most: int = NAME_CHARACTERS) -> str:
    # Only the beginning: a value may be very long.
    text = printable(value[: 2 * most] if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
