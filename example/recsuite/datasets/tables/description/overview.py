"""A schema as the table that a person is shown: what each column is taken for, with some of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.description.columns import EVENTS, ITEMS, TABLES_OF, USERS
from recsuite.datasets.tables.schema_file import NUMBER, FeatureColumn, TableSchema
from recsuite.errors import printable

# For types alone: who reads a schema does not need what reads tables.
if TYPE_CHECKING:
    import pyarrow as pa

HEAD = ("role or feature", "column", "kind", "of", "values, say")
# Of each column: how many values, and how many characters of one, and of a name.
SHOWN, VALUE_CHARACTERS, NAME_CHARACTERS = 3, 20, 30

Row = tuple[str, str, str, str, str]


def describe(schema: TableSchema, samples: Mapping[str, pa.Table]) -> str:
    """A table in text, a line for each role and feature, with up to three values of each column.

    samples: the first rows of the "events", and of the "users" and "items" where there are such.
    """
    rows = [HEAD, *_roles(schema, samples), *_features(schema, samples)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEAD))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _roles(schema: TableSchema, samples: Mapping[str, pa.Table]) -> Iterator[Row]:
    for of, role, named in ((USER, USERS, schema.user), (ITEM, ITEMS, schema.item)):
        own = f" = {role}.{named.table_column}" if named.table_column else ""
        yield of, f"{_short(named.column)}{own}", "id", of, _values(samples, of, named.column)
    if schema.item.title:
        yield "title", _short(schema.item.title), "text", ITEM, _values(samples, ITEM, schema.item.title)
    label = schema.label
    yield "label", _short(label.column) or "-", label.kind, EVENT, _values(samples, EVENT, label.column)
    if schema.weight:
        yield "weight", schema.weight.column, NUMBER, EVENT, _values(samples, EVENT, schema.weight.column)
    if schema.timestamp:
        time = schema.timestamp
        yield "timestamp", _short(time.column), time.format, EVENT, _values(samples, EVENT, time.column)


def _features(schema: TableSchema, samples: Mapping[str, pa.Table]) -> Iterator[Row]:
    for name, feature in schema.features.items():
        call = derived(feature.column)
        values = "computed" if call else _values(samples, feature.of, feature.column)
        yield name, _short(feature.column), _kind(feature), feature.of, values


def _kind(feature: FeatureColumn) -> str:
    return f"{feature.kind} ({feature.input})" if feature.kind == NUMBER else feature.kind


def _values(samples: Mapping[str, pa.Table], of: str, column: str) -> str:
    """The first different values of a column, of the table that it is read from."""
    tables = [
        samples[role] for role in TABLES_OF[of] if role in samples and column in samples[role].column_names
    ]
    if not tables:
        return "-" if not column else f"not in the {EVENTS}"
    found: dict[str, None] = {}
    for value in tables[0][column].slice(0, 1_000).to_pylist():
        if value is not None and value != "":
            found.setdefault(_short(value, VALUE_CHARACTERS))
        if len(found) == SHOWN:
            break
    return ", ".join(found) or "-"


def _short(value: object, most: int = NAME_CHARACTERS) -> str:
    # Only the beginning: a value may be a book.
    text = printable(value[: 2 * most] if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
