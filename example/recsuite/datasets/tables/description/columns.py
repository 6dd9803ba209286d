"""Whether the files have the columns that a schema names, each where it is looked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.description.faults import Place, nearest
from recsuite.datasets.tables.schema_file import TableSchema

EVENTS, USERS, ITEMS = "events", "users", "items"
# Where a property is looked for, first to last: it may stand in every event too.
TABLES_OF = {USER: (USERS, EVENTS), ITEM: (ITEMS, EVENTS), EVENT: (EVENTS,)}


def check_columns(schema: TableSchema, columns: Mapping[str, Sequence[str]], place: Place) -> None:
    """Refuse a schema that names a column which is not there.

    columns: those of each table that there is, by "events", "users" and "items".

    Raises:
        UserError: names the section, the column, where it was looked for, and the nearest one there.
    """
    for section in ("user", "item", "label", "weight", "timestamp"):
        column = getattr(getattr(schema, section), "column", "")
        if column:
            _check(place.at(section), "column", column, (EVENTS,), columns)
    for number, label in enumerate(schema.more_labels, 2):
        for key in ("column", "weight"):
            if column := getattr(label, key):
                _check(place.at(f"label {number}"), key, column, (EVENTS,), columns)
    for section, table in ((USER, USERS), (ITEM, ITEMS)):
        named = getattr(schema, section)
        key = "table_column" if named.table_column else "column"
        if table in columns:
            _check(place.at(section), key, named.own_column, (table,), columns)
        elif named.table_column:
            raise place.at(section).wrong(
                key,
                named.table_column,
                f"is of a table that is not there; name its file as {table} in [files]",
            )
    if schema.item.title:
        _check(place.at("item"), "title", schema.item.title, TABLES_OF[ITEM], columns)
    for name, feature in schema.features.items():
        call = derived(feature.column)
        of, column = (call.of, call.column) if call else (feature.of, feature.column)
        if column:
            _check(place.at(f"features.{name}"), "column", column, TABLES_OF[of], columns)


def _check(
    place: Place, key: str, column: str, tables: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> None:
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
