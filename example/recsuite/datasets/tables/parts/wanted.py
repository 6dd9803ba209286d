"""Which columns of which file a schema asks for, and how each is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.remote import EVENTS, ITEMS, USERS
from recsuite.datasets.tables.schema_file import CATEGORY, LIST, NUMBER, LabelColumn, TableSchema
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
from recsuite.errors import UserError

if TYPE_CHECKING:
    import pyarrow

ID, LABEL, WEIGHT, TIME, DATE = "id", "label", "weight", "time", "date"
# Of the labels after the first, which an event may lack.
MORE_LABEL, MORE_WEIGHT = "more_label", "more_weight"
# The form of ids and categories that are whole numbers in texts too.
WHOLE = "whole"
# Of those that are kept as they are; all others are codes of their distinct values.
DTYPES = {NUMBER: "<f8", DATE: "<f8", TIME: "<i8"} | dict.fromkeys(
    (LABEL, WEIGHT, MORE_LABEL, MORE_WEIGHT), "<f4"
)
TABLE_OF = {USER: USERS, ITEM: ITEMS}
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Wanted:
    """A column of a file, and how its values are kept.

    kind: id, category, list, number, date, time, label, weight, more_label or more_weight. of: user, item or
    event. form: of times, what separates a list, or WHOLE.
    """

    column: str
    kind: str
    of: str
    form: str = ""
    label: LabelColumn | None = None

    @property
    def is_coded(self) -> bool:
        """Whether it is kept as numbers of its distinct values."""
        return self.kind not in DTYPES

    @property
    def dtype(self) -> np.dtype:
        """Of what is kept."""
        return np.dtype(DTYPES.get(self.kind, "<i4"))

    def parse(self, column: pyarrow.Array) -> Parsed:
        """The values of a file's column, and what is wrong with them.

        Raises:
            UserError: for a column of a type that this kind cannot be made of.
        """
        if self.label:
            found = labels(column, self.column, self.label)
            return found if self.kind == LABEL else _with_gaps(found)
        if self.kind in (TIME, DATE):
            found = times(column, self.column, _form(self, column))
            return found if self.kind == TIME else _days(found)
        if self.kind == LIST:
            return lists(column, self.column, self.form)
        if self.form == WHOLE:
            return wholes(column, self.column)
        of_kinds = {ID: ids, WEIGHT: weights, MORE_WEIGHT: weights, NUMBER: numbers}
        return of_kinds.get(self.kind, categories)(column, self.column)

    def reason(self, fault: int, column: pyarrow.Array) -> str:
        """What is wrong with a value of a file's column, with what the schema asks of it."""
        asked = ""
        if fault in (NO_TIME, OTHER_UNIT):
            form = _form(self, column)
            asked = f' "{form}"' if "%" in form else f" {form}"
        elif fault == OFF_SCALE and self.label:
            asked = f" from {self.label.lowest:g} to {self.label.highest:g}"
        return FAULTS[fault] + asked


def _form(wanted: Wanted, column: pyarrow.Array) -> str:
    """How times are written; dates are ISO ones, unless they are numbers as the timestamp is."""
    from pyarrow import types

    if wanted.kind == DATE and types.is_string(plain(column, wanted.column).type):
        return "iso"
    return wanted.form


def _days(found: Parsed) -> Parsed:
    """Days since 1970, float64, NaN where there is no date."""
    days = np.where(found.faults == MISSING, np.nan, np.floor(found.values / SECONDS_PER_DAY))
    return Parsed(days, np.where(found.faults == MISSING, 0, found.faults).astype(np.int8))


def _with_gaps(found: Parsed) -> Parsed:
    """Labels that an event may lack: NaN where there is none, or one that drop names."""
    lacks = (found.faults == MISSING) | (found.faults == DROPPED)
    return Parsed(np.where(lacks, np.float32(np.nan), found.values), np.where(lacks, 0, found.faults))


def wanted_of(schema: TableSchema, columns: Mapping[str, Sequence[str]]) -> dict[str, tuple[Wanted, ...]]:
    """What is read of the tables, by role: the ids first.

    columns: those of each table that there is. A property of a user or an item is read from the table of
    those where that has the column, else from the events.

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


def _of_events(schema: TableSchema) -> list[Wanted]:
    found = []
    if schema.label.column:
        found.append(Wanted(schema.label.column, LABEL, EVENT, label=schema.label))
    for label in schema.more_labels:
        found.append(Wanted(label.column, MORE_LABEL, EVENT, label=label))
        if label.weight:
            found.append(Wanted(label.weight, MORE_WEIGHT, EVENT))
    if schema.weight:
        found.append(Wanted(schema.weight.column, WEIGHT, EVENT))
    if schema.timestamp:
        found.append(Wanted(schema.timestamp.column, TIME, EVENT, schema.timestamp.format))
    return found


def _properties(schema: TableSchema) -> list[Wanted]:
    """The columns of features, of derived ones the dates, and of the titles."""
    form = schema.timestamp.format if schema.timestamp else "iso"
    # An item may be called by its id, which is read as one.
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
    """One column may be an id and a title, but in a table of features it is one thing."""
    properties = [each for each in wanted if each.kind in (CATEGORY, LIST, NUMBER)]
    seen: dict[tuple[str, str], str] = {}
    for each in properties:
        kind = seen.setdefault((each.column, each.of), each.kind)
        if kind != each.kind:
            raise UserError(
                f"The column {each.column!r} is to be a {kind} and a {each.kind} of the {each.of}; name it "
                "once."
            )
