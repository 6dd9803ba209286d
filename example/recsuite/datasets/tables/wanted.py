"""Columns to read of the files of tables, by the roles that a schema gives them, and their values.

Also parses tables in memory, such as a frame of pandas, as files are parsed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.schema_file import (
    CATEGORY,
    EVENTS,
    ITEMS,
    LIST,
    NUMBER,
    USERS,
    LabelColumn,
    TableSchema,
)
from recsuite.datasets.tables.values import (
    DROPPED,
    FAULTS,
    MISSING,
    NO_TIME,
    OFF_SCALE,
    OTHER_UNIT,
    Parsed,
    categories,
    ids,
    labels,
    lists,
    numbers,
    plain,
    times,
    weights,
    wholes,
)
from recsuite.errors import UserError, printable

if TYPE_CHECKING:
    import pandas
    import pyarrow

ID, LABEL, WEIGHT, TIME, DATE = "id", "label", "weight", "time", "date"
# Kinds of the labels after the first; an event may lack them.
MORE_LABEL, MORE_WEIGHT = "more_label", "more_weight"
# Form of ids and categories that are whole numbers, also if stored as texts.
WHOLE = "whole"
# Types of the kinds that are stored as numbers; all others are codes of their distinct values.
DTYPES = {NUMBER: "<f8", DATE: "<f8", TIME: "<i8"} | dict.fromkeys(
    (LABEL, WEIGHT, MORE_LABEL, MORE_WEIGHT), "<f4"
)
TABLE_OF = {USER: USERS, ITEM: ITEMS}
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Wanted:
    """Column of a file, and the way its values are stored.

    kind: id, category, list, number, date, time, label, weight, more_label or more_weight. of: user, item or
    event. form: the format of times, the separator of a list, or WHOLE.
    """

    column: str
    kind: str
    of: str
    form: str = ""
    label: LabelColumn | None = None

    @property
    def is_coded(self) -> bool:
        """True if it is stored as codes of its distinct values."""
        return self.kind not in DTYPES

    @property
    def dtype(self) -> np.dtype:
        """Type of the stored column."""
        return np.dtype(DTYPES.get(self.kind, "<i4"))

    def parse(self, column: pyarrow.Array) -> Parsed:
        """Return the values of a file's column, and their faults.

        Raises:
            UserError: for a column of a type that this kind cannot be made of.
        """
        if self.label:
            found = labels(column, self.column, self.label)
            return found if self.kind == LABEL else _with_gaps(found)
        if self.kind == MORE_WEIGHT:
            return _with_gaps(weights(column, self.column))
        if self.kind in (TIME, DATE):
            found = times(column, self.column, _form(self, column))
            return found if self.kind == TIME else _days(found)
        if self.kind == LIST:
            return lists(column, self.column, self.form)
        if self.form == WHOLE:
            return wholes(column, self.column)
        of_kinds = {ID: ids, WEIGHT: weights, NUMBER: numbers}
        return of_kinds.get(self.kind, categories)(column, self.column)

    def reason(self, fault: int, column: pyarrow.Array) -> str:
        """Describe the fault of a value of a file's column, and the schema's requirement."""
        asked = ""
        if fault in (NO_TIME, OTHER_UNIT):
            form = _form(self, column)
            asked = f' "{form}"' if "%" in form else f" {form}"
        elif fault == OFF_SCALE and self.label:
            asked = f" from {self.label.lowest:g} to {self.label.highest:g}"
        return FAULTS[fault] + asked


def _form(wanted: Wanted, column: pyarrow.Array) -> str:
    """Return the format of times; dates are ISO, unless they are numbers in the timestamp's unit."""
    from pyarrow import types

    if wanted.kind == DATE and types.is_string(plain(column, wanted.column).type):
        return "iso"
    return wanted.form


def _days(found: Parsed) -> Parsed:
    """Return days since 1970, float64, NaN for a missing date."""
    days = np.where(found.faults == MISSING, np.nan, np.floor(found.values / SECONDS_PER_DAY))
    return Parsed(days, np.where(found.faults == MISSING, 0, found.faults).astype(np.int8))


def _with_gaps(found: Parsed) -> Parsed:
    """Return values that an event may lack: NaN if one is missing, or if `drop` of its label names it."""
    lacks = (found.faults == MISSING) | (found.faults == DROPPED)
    return Parsed(np.where(lacks, np.float32(np.nan), found.values), np.where(lacks, 0, found.faults))


def wanted_of(schema: TableSchema, columns: Mapping[str, Sequence[str]]) -> dict[str, tuple[Wanted, ...]]:
    """Return the columns to read of the tables, by role; ids come first.

    columns: the columns of each existing table. A property of a user or an item is read from the table of
    users or items if it has the column, else from the events.

    Raises:
        UserError: when one column is to be two things.
    """
    of_ids = [Wanted(schema.user.column, ID, USER), Wanted(schema.item.column, ID, ITEM)]
    found = {EVENTS: [*of_ids, *_of_events(schema)]}
    for entity, named in ((USER, schema.user), (ITEM, schema.item)):
        if TABLE_OF[entity] in columns:
            found[TABLE_OF[entity]] = [Wanted(named.own_column, ID, entity)]
    for wanted in _properties(schema):
        own = TABLE_OF.get(wanted.of, EVENTS)
        table = own if wanted.column in columns.get(own, ()) else EVENTS
        found[table] += [] if wanted in found[table] else [wanted]
    for each in found.values():
        _refuse_two_kinds(each)
    return {role: tuple(_typed(each, schema) for each in wanted) for role, wanted in found.items()}


def _typed(wanted: Wanted, schema: TableSchema) -> Wanted:
    is_whole = wanted.kind in (ID, CATEGORY) and wanted.column in schema.files.whole
    return dataclasses.replace(wanted, form=WHOLE) if is_whole else wanted


def wanted_of_label(label: LabelColumn) -> list[Wanted]:
    """Return the column of a label after the first, and that of its weights if it has them."""
    weights_of = [Wanted(label.weight, MORE_WEIGHT, EVENT)] if label.weight else []
    return [Wanted(label.column, MORE_LABEL, EVENT, label=label), *weights_of]


def _of_events(schema: TableSchema) -> list[Wanted]:
    found = []
    if schema.label.column:
        found.append(Wanted(schema.label.column, LABEL, EVENT, label=schema.label))
    for label in schema.more_labels:
        found += wanted_of_label(label)
    if schema.weight:
        found.append(Wanted(schema.weight.column, WEIGHT, EVENT))
    if schema.timestamp:
        found.append(Wanted(schema.timestamp.column, TIME, EVENT, schema.timestamp.format))
    return found


def _properties(schema: TableSchema) -> list[Wanted]:
    """Return the columns of features, of the dates of derived features, and of titles."""
    form = schema.timestamp.format if schema.timestamp else "iso"
    # The title may be the id, which is read as an id.
    has_titles = schema.item.title not in ("", schema.item.column, schema.item.own_column)
    found = [Wanted(schema.item.title, CATEGORY, ITEM)] if has_titles else []
    for feature in schema.features.values():
        call = derived(feature.column)
        if call is None:
            separator = feature.separator if feature.kind == LIST else ""
            if feature.kind == LIST and feature.of == EVENT:
                raise UserError(
                    f"The column {feature.column!r} is a list of the event; lists of users and items alone "
                    "are read."
                )
            found.append(Wanted(feature.column, feature.kind, feature.of, separator))
        elif call.of:
            found.append(Wanted(call.column, DATE, call.of, form))
    return found


def _refuse_two_kinds(wanted: Sequence[Wanted]) -> None:
    """Refuse a column with two kinds of features; a column may be an id and a title."""
    properties = [each for each in wanted if each.kind in (CATEGORY, LIST, NUMBER)]
    seen: dict[tuple[str, str], str] = {}
    for each in properties:
        kind = seen.setdefault((each.column, each.of), each.kind)
        if kind != each.kind:
            raise UserError(
                f"The column {each.column!r} is to be a {kind} and a {each.kind} of the {each.of}; name it "
                "once."
            )


def frame_of(values: Any, name: str) -> pandas.DataFrame:
    """Return a table in memory as a pandas.DataFrame, with its types unchanged.

    values: a pandas.DataFrame, or any table that offers Arrow's stream of batches, such as those of polars,
    pyarrow and DuckDB.

    Raises:
        UserError: for what is no table, and for columns that a file of tables cannot have.
    """
    import pandas
    import pyarrow

    if hasattr(values, "__arrow_c_stream__") and not isinstance(values, pandas.DataFrame):
        try:
            # Categories of polars have a text type that Arrow can neither decode nor write.
            values = pyarrow.table(values).to_pandas(
                types_mapper=lambda t: None if pyarrow.types.is_dictionary(t) else pandas.ArrowDtype(t)
            )
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise UserError(f"{name} cannot be read as an Arrow table: {printable(error)}.") from None
    if not isinstance(values, pandas.DataFrame):
        given = printable(repr(type(values)))
        raise UserError(f"{name} must be a table of pandas, polars, pyarrow or DuckDB, got {given}.")
    odd = [column for column in values.columns if not isinstance(column, str)]
    odd += [*values.columns[values.columns.duplicated()]]
    if odd:
        raise UserError(
            f"{name} has a column {printable(repr(odd[0]))}, and takes columns with one name each, a text; "
            "rename it."
        )
    lost = [each for each in values.index.names if each is not None and each not in values.columns]
    if lost:
        raise UserError(
            f"{name} has an index {printable(repr(lost[0]))}, which is not read; call reset_index() to make "
            "it a column, or reset_index(drop=True) to leave it out."
        )
    for column, kind in values.dtypes.items():
        # Columns of plain numbers, booleans and times have a single type.
        if kind.kind not in "biufM":
            column_of(values[column], str(column))
    return values


def column_of(values: Any, name: str) -> pyarrow.Array:
    """Return values of one type as an Arrow array.

    Raises:
        UserError: for values of several types, or of one that no table has.
    """
    import pyarrow

    try:
        found = pyarrow.array(values, from_pandas=True)
    # Arrow's error depends on the value that it finds first.
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
        raise UserError(
            f"The column {printable(name)} holds values of several types, or of one that no table has; give "
            "texts, numbers, truths or times alone."
        ) from None
    return found.combine_chunks() if isinstance(found, pyarrow.ChunkedArray) else found


def parsed(values: Any, wanted: Wanted) -> Any:
    """Return the values of a column as training reads them: a NumPy or Arrow array. No time may be missing.

    Raises:
        UserError: for what the training would call a bad row, but for an id that is missing.
    """
    column = plain(column_of(values, wanted.column), wanted.column)
    found, faults = wanted.parse(column)
    is_bad = faults != 0 if wanted.kind == TIME else (faults != 0) & (faults != MISSING)
    if is_bad.any():
        place = int(np.argmax(is_bad))
        value = column[place].as_py()
        shown = "" if value is None else f"{printable(value)[:60]!r} "
        raise UserError(f"{wanted.column} {shown}{FAULTS[faults[place]]}; fix it.")
    return found


def raw_values(values: Any, wanted: Wanted, known: type[Any] | None) -> list[Any]:
    """Return ids, categories or numbers as a model receives them, None for a missing one.

    known: their type in the training, or None. It is needed because some values of a column may be whole
    numbers although the column as a whole is one of texts.

    Raises:
        UserError: see `parsed`.
    """
    import pyarrow

    found = parsed(values, wanted)
    if isinstance(found, np.ndarray):
        return [None if np.isnan(each) else each for each in found.tolist()]
    if known is str:
        found = found.cast(pyarrow.string())
    is_number = pyarrow.types.is_floating(plain(column_of(values, wanted.column), wanted.column).type)
    raw: list[Any] = found.to_pylist()
    if is_number and known is int and pyarrow.types.is_string(found.type):
        # Values that are not whole are out of vocabulary.
        return [int(each) if each is not None and each.lstrip("-").isdecimal() else None for each in raw]
    return raw
