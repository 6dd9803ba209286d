"""Read a user's own tables as a data set of users, items and events, in bounded memory.

Each file is read once into a part on the disk, see `parts.make_part`: columns of codes for its distinct
values. Then the distinct values of all parts are merged and sorted, and the columns of the events are made
from those of the parts, block by block. So the same rows give the same data set for any number of files and
batches. If a property of a user or an item has several values, the value of most rows is taken, else the
newest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.compute as pc
from pyarrow import types

from recsuite.config.sections import DataConfig
from recsuite.datasets.arrays import chunks, counts_of, gather, only, release, temporary, where
from recsuite.datasets.schema import COUNT, ENTITIES, EVENT, ITEM, USER, Codes, Events, RawData
from recsuite.datasets.tables.derived import (
    AGE_DAYS,
    HOUR,
    Derived,
    age_days,
    dates_name,
    derived,
    hour,
    parts_of_text,
    weekday,
)
from recsuite.datasets.tables.files import File, Tables, split_part
from recsuite.datasets.tables.formats import columns_of
from recsuite.datasets.tables.parts import Part, kept, parts_of, same_type, together, unfinished
from recsuite.datasets.tables.sections import CATEGORY, EVENTS, LIST, NUMBER, VECTOR, LabelColumn, TableSchema
from recsuite.datasets.tables.values import (
    DATE,
    DECIMAL,
    ENTRY,
    FIRST_LIKELY,
    ID,
    LABEL,
    TABLE_OF,
    TIME,
    WEIGHT,
    WHOLE_NUMBER,
    ColumnSpec,
    shortest,
    typed,
    wanted_of,
    wanted_of_label,
)
from recsuite.errors import UserError, counted, escaped, printable
from recsuite.files import explained
from recsuite.places import is_remote
from recsuite.runtime.console import say, stage

HOURS, WEEKDAYS = 24, 7

# Weights of which the median is taken: of more than that, some in equal distances.
MOST_OF_MEDIAN = 1_000_000


def read_tables(
    tables: Tables, schema: TableSchema, config: DataConfig, parts_folder: Path | None = None
) -> RawData:
    """Read the tables that a schema describes. Large columns are memory-mapped from unnamed files.

    parts_folder: for what is read of each file; None for one beside the columns, which is kept.

    Raises:
        UserError: for a file that cannot be read, a column that is missing, and for bad rows as --bad_rows
            and --max_bad_rows say.
    """
    wanted = wanted_of(schema, columns_of(tables))
    roles = [(role, file, wanted[role]) for role, files in tables.roles.items() for file in files]
    home = kept(tables, config) if parts_folder is None else contextlib.nullcontext(parts_folder)
    with home as folder, unfinished(folder) as reading:
        parts, notes = parts_of(folder, [(file, columns) for _, file, columns in roles], config)
        if tables.ignored:
            name = Path(tables.ignored[0]).name
            number = counted(len(tables.ignored), "file", "files")
            notes.append(
                f"skipped {number} taken for no table, such as {name}; to read one, name it under [files] of "
                "schema.toml"
            )
        by_role: dict[str, list[Part]] = {role: [] for role in wanted}
        for (role, _, _), part in zip(roles, parts, strict=True):
            by_role[role].append(part)
        if not any(part.num_rows or part.file.is_more for part in by_role[EVENTS]):
            raise UserError(f"{tables.events[0]} holds no event: there is no row below its header.")
        with stage("bringing the tables together"):
            raw = _Reading(schema, wanted, by_role, reading, notes, config).raw_data()
        sizes = {tables.name_of(part.file): part.num_rows for part in by_role[EVENTS]}
        raw = dataclasses.replace(raw, events_per_file=sizes)
        raw = _with_split_of_files(raw) if config.split == "files" else raw
        raw = _by_type(raw, schema, reading) if schema.events else raw
    # Arrow keeps memory that it has freed; sorting the events needs it.
    pyarrow.default_memory_pool().release_unused()
    return raw


def read_items(tables: Tables, schema: TableSchema, config: DataConfig) -> pandas.DataFrame:
    """Read the table of items alone, as it is now; return the columns of `RawData.items` that it has.

    Raises:
        UserError: see `read_tables`.
    """
    # Their digests are kept, and these files may have changed.
    files = tuple(dataclasses.replace(file, size=_size_of(file)) for file in tables.items)
    tables = dataclasses.replace(tables, events=(), users=(), items=files)
    wanted = wanted_of(schema, columns_of(tables))
    ids = tuple(each for each in wanted[EVENTS] if each.kind == ID and each.of == ITEM)
    role = TABLE_OF[ITEM]
    # Not beside the parts of all tables, of which those of other files would be removed.
    with tempfile.TemporaryDirectory(prefix="items-") as name, unfinished(Path(name)) as reading:
        parts, notes = parts_of(Path(name), [(file, wanted[role]) for file in files], config)
        columns = {EVENTS: ids, role: wanted[role]}
        read = _Reading(schema, columns, {EVENTS: [], role: parts}, reading, notes, config)
        frame = read.items()
    for note in notes:
        say(escaped(note))
    return frame


def _size_of(file: File) -> int:
    return file.size if is_remote(file.path) else Path(file.path).stat().st_size


def _with_split_of_files(raw: RawData) -> RawData:
    """Mark the events of files whose names say validation or test."""
    parts = {name: split_part(name) for name in raw.events_per_file}
    unknown = [name for name, part in parts.items() if not part]
    if unknown or not {"train", "test"} <= {*parts.values()}:
        reason = f"{unknown[0]} is none of these" if unknown else f"there are {', '.join(parts)} alone"
        raise UserError(
            f"--split files needs files that are called train, valid (if any) and test, and {reason}; "
            "rename them, name those to read under [files], or give --split time or random."
        )
    marks = {
        part: np.repeat([of_file == part for of_file in parts.values()], [*raw.events_per_file.values()])
        for part in ("validation", "test")
    }
    validation = marks["validation"] if "validation" in parts.values() else None
    return dataclasses.replace(raw, official_test=marks["test"], official_validation=validation)


def _by_type(raw: RawData, schema: TableSchema, folder: Path) -> RawData:
    """Keep the events of the target, of which there must be one, as events, and the others as context."""
    types, events = schema.events, raw.events
    assert types is not None
    column = events.features[types.type]
    assert isinstance(column, Codes)
    if all((each.of, each.column) != (EVENT, types.type) for each in schema.features.values()):
        del events.features[types.type]
    codes, names = {str(value): code for code, value in enumerate(column.values)}, schema.schema().event_types
    if types.target not in codes:
        raise UserError(
            f"No event has the {types.type} {printable(types.target)}, which [events] of schema.toml names. "
            f"Fix: name one of {printable(', '.join(codes))}."
        )
    # The last entry is that of code -1, a missing type.
    place_of = np.zeros(len(column.values) + 1, np.int8)
    for place, name in enumerate(names, 1):
        # A day may have no event of a type.
        if name in codes:
            place_of[codes[name]] = place
    kinds = np.empty(len(column.codes), np.int8)
    for part in chunks(len(kinds), column.codes):
        kinds[part] = place_of[column.codes[part]]
    numbers, context_rows = counts_of(kinds, len(names) + 1).tolist(), where(kinds > 1)
    user, item, label, time = (
        gather(values, context_rows, temporary(folder, len(context_rows), np.dtype(dtype)))
        for values, dtype in ((events.user, "i4"), (events.item, "i4"), (kinds, "f4"), (events.time, "i8"))
    )
    listed = [
        f"{number:,} of type {printable(name)}" for name, number in zip(names, numbers[1:], strict=True)
    ]
    notes = [f"events: {listed[0]}; in histories also {', '.join(listed[1:]) or 'none'}"]
    notes += [f"no event is of type {printable(name)}" for name in names if name not in codes]
    if numbers[0]:
        notes.append(
            f"skipped {counted(numbers[0], 'event')} of other types than {printable(', '.join(names))}"
        )
    kept = only(raw, kinds == 1)
    return dataclasses.replace(
        kept,
        context=Events(user, item, label, time),
        skipped=[*raw.skipped, *notes],
        # Those of the context are not skipped.
        num_skipped=raw.num_skipped + numbers[0],
    )


def gathered(blocks: Iterable[np.ndarray], number: int, dtype: str, folder: Path) -> np.ndarray:
    """Join blocks into one column of `number` rows, see `temporary`.

    Raises:
        UserError: when the disk is full.
    """
    with explained(f"Cannot write the columns to {folder}", "make room there, or give --cache_dir"):
        column, first = temporary(folder, number, np.dtype(dtype)), 0
        for block in blocks:
            column[first : first + len(block)] = block
            first += len(block)
            release(column)
    assert first == number
    return column


TRUTHS = ("true", "false")


@dataclass(frozen=True)
class DistinctValues:
    """Sorted distinct values: whole numbers (int64) or texts.

    places: for each part, the position of each code's value, int32; the last entry is -1, for code -1.
    is_mixed: true if some parts have whole numbers and others texts, so that all are texts.
    """

    values: pyarrow.Array
    places: list[np.ndarray]
    is_mixed: bool = False


def joined(columns: Sequence[tuple[Part, ColumnSpec]]) -> DistinctValues:
    """Join the values of one column of several parts, or of several columns of ids."""
    batches = [part.values(wanted) for part, wanted in columns]
    raw = [batch.column("value") for batch in batches]
    untyped = [part.is_untyped(wanted) for part, wanted in columns]
    # True and true are one category, but may be two ids.
    if all(wanted.kind != ID for _, wanted in columns):
        raw = _truths(raw, untyped)
    wholes = [_as_whole(values) if may else values for values, may in zip(raw, untyped, strict=True)]
    filled = [values.type for values in wholes if len(values)]
    is_mixed = len(set(filled)) > 1
    dictionaries = same_type(wholes)
    if not dictionaries:
        return DistinctValues(pyarrow.array([], pyarrow.string()), [])
    values, ranks = _sorted(dictionaries)
    codes = [batch.column("code").to_numpy() for batch in batches]
    return DistinctValues(values, [_table(*each) for each in zip(codes, ranks, strict=True)], is_mixed)


def _sorted(dictionaries: list[pyarrow.Array]) -> tuple[pyarrow.Array, list[np.ndarray]]:
    """Return all distinct values, sorted, and for each array the positions of its values among them."""
    if types.is_integer(dictionaries[0].type):
        # Sorting takes a fifth of the memory of a look-up.
        numbers = [each.to_numpy() for each in dictionaries]
        # The values of a part are mostly in order, so sorting is fast.
        ordered = np.sort(np.concatenate(numbers), kind="stable")
        known = ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]
        return pyarrow.array(known), [np.searchsorted(known, each) for each in numbers]
    values, positions = together(dictionaries)
    order = pc.array_sort_indices(values).to_numpy()
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    return values.take(pyarrow.array(order)), [ranks[place] for place in positions]


def _table(codes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the rank of each code, int32, with -1 at the end, for code -1."""
    table = np.full(int(codes.max(initial=-1)) + 2, -1, np.int32)
    table[codes] = ranks
    return table


def _as_whole(values: pyarrow.Array) -> pyarrow.Array:
    """Return texts as int64 if all are whole numbers of 64 bits; 10.0 as 10 if all are numbers."""
    if not types.is_string(values.type) or not len(values):
        return values
    if not pc.all(pc.match_substring_regex(values, DECIMAL)).as_py():
        return values
    values = shortest(values)
    if not pc.all(pc.match_substring_regex(values, WHOLE_NUMBER)).as_py():
        return values
    try:
        return values.cast(pyarrow.int64())
    except pyarrow.ArrowInvalid:
        return values


def _truths(raw: list[pyarrow.Array], untyped: list[bool]) -> list[pyarrow.Array]:
    """Return texts of text formats in lower case, as in typed formats, if all values are true or false."""
    known = pyarrow.array(TRUTHS)
    lowered = [
        pc.utf8_lower(values) if may and types.is_string(values.type) else values
        for values, may in zip(raw, untyped, strict=True)
    ]
    are_truths = all(
        types.is_string(values.type) and pc.all(pc.is_in(values, known), min_count=0).as_py()
        for values in lowered
    )
    return lowered if are_truths else raw


def property_of(
    wanted: ColumnSpec,
    parts: Sequence[Part],
    entity: Sequence[np.ndarray],
    key: ColumnSpec,
    number: int,
    time: ColumnSpec | None = None,
) -> tuple[np.ndarray, int, int]:
    """Return a column of `number` users or items, from all parts that have it.

    If a user or an item has several values, that of more than half of its rows is taken, else the newest. The
    column holds numbers (float64 with NaN), categories (objects with None), or lists of those. Also return
    the number of users or items with several values, and of rows with a value not taken.

    entity: for each part, the user or item of each code of the column `key`, int32, with -1 at the end. time:
    the times of the rows; for equal times, and without times, the last row is the newest.
    """
    values = joined([(part, wanted) for part in parts]) if wanted.is_coded else None
    missing = -1 if values else np.nan
    first = np.full(number, missing, np.int32 if values else np.float64)
    taken = _Seen(first, first.copy(), np.full(number, np.iinfo(np.int64).min), np.zeros(number, bool))

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the owner, the value and the time of the rows with a value."""
        for order, part in enumerate(parts):
            for rows in chunks(part.num_rows):
                owners = entity[order][part.column(key, rows)]
                entries = part.column(wanted, rows)
                entries = values.places[order][entries] if values else entries
                is_there = entries != -1 if values else ~np.isnan(entries)
                times = part.column(time, rows) if time else np.zeros(len(entries), np.int64)
                yield owners[is_there], entries[is_there], times[is_there]

    for block in blocks():
        taken.add(*block)
    num_others = _settle(taken, blocks()) if taken.varied.any() else 0
    column = taken.newest
    if values is not None:
        is_untyped = all(part.is_untyped(wanted) for part in parts)
        column = _decoded(values.values.to_pylist(), column, wanted.kind == LIST, is_untyped)
    return column, int(taken.varied.sum()), num_others


def vectors_of(
    wanted: ColumnSpec, parts: Sequence[Part], entity: Sequence[np.ndarray], key: ColumnSpec, number: int
) -> list[np.ndarray]:
    """Return the vector of each user or item, float32 [length], of NaN if it has none; the last row counts.

    Arguments as for `property_of`.
    """
    table = np.full((number, wanted.length), np.nan, np.float32)
    for order, part in enumerate(parts):
        for rows in chunks(part.num_rows):
            vectors = part.column(wanted, rows)
            is_there = ~np.isnan(vectors[:, 0])
            table[entity[order][part.column(key, rows)][is_there]] = vectors[is_there]
    return list(table)


def _decoded(known: list[Any], codes: np.ndarray, is_list: bool, is_untyped: bool) -> np.ndarray:
    """Return the values of codes, None for -1; int64 if all are whole numbers and none is missing."""
    if is_list:
        return _lists(known, is_untyped)[codes]
    if len(known) and codes.min(initial=0) >= 0 and isinstance(known[0], int):
        return np.array(known, np.int64)[codes]
    table = np.empty(len(known) + 1, object)
    table[:-1] = known
    return table[codes]


# Chunks whose counts of values are added up at once: memory holds the counts of so many.
ADDED_CHUNKS = 16


def _settle(taken: _Seen, blocks: Iterator[tuple[np.ndarray, ...]]) -> int:
    """Give an owner with several values that of over half of its rows; return the number of other rows."""
    counted_blocks = (
        pandas.DataFrame({"owner": owners, "value": values})[taken.varied[owners]].value_counts(sort=False)
        for owners, values, _ in blocks
    )
    counts: list[pandas.Series] = []
    while some := [*itertools.islice(counted_blocks, ADDED_CHUNKS)]:
        counts = [pandas.concat([*counts, *some]).groupby(level=[0, 1]).sum()]
    pairs = counts[0].reset_index(name="count")
    most = pairs[2 * pairs["count"] > pairs.groupby("owner")["count"].transform("sum")]
    taken.newest[most["owner"]] = most["value"]
    return int(pairs["count"][taken.newest[pairs["owner"]] != pairs["value"]].sum())


@dataclass(frozen=True)
class _Seen:
    """First and newest value of each user or item, the time of the newest, and a mark if values differ."""

    first: np.ndarray
    newest: np.ndarray
    time: np.ndarray
    varied: np.ndarray

    def add(self, owners: np.ndarray, values: np.ndarray, times: np.ndarray) -> None:
        """Add values. If a position is assigned several times, NumPy keeps the last value."""
        known = self.first[owners]
        is_new = known == -1 if known.dtype == np.int32 else np.isnan(known)
        self.first[owners[is_new][::-1]] = values[is_new][::-1]
        self.varied[owners[self.first[owners] != values]] = True
        np.maximum.at(self.time, owners, times)
        is_newest = times == self.time[owners]
        self.newest[owners[is_newest]] = values[is_newest]


def _lists(known: list[Any], is_untyped: bool) -> np.ndarray:
    """Return the lists of texts, and [] at the end; entries are whole numbers if all of them are."""
    split: list[list[Any]] = [
        [entry for part in str(text).split(ENTRY) if (entry := part.strip())] for text in known
    ]
    if is_untyped and all(re.fullmatch(WHOLE_NUMBER, entry) for entries in split for entry in entries):
        split = [[int(entry.partition(".")[0]) for entry in entries] for entries in split]
    table = np.empty(len(known) + 1, object)
    for place, entries in enumerate([*split, []]):
        table[place] = entries
    return table


@dataclass
class _Entity:
    """Users or items: their ids, and the rows of each part's codes."""

    name: str
    # The id column, by role.
    keys: dict[str, ColumnSpec]
    ids: DistinctValues
    # Row of each code, int32, by role, one array per part.
    places: dict[str, list[np.ndarray]]
    days: dict[str, np.ndarray] = field(default_factory=dict)


class _Reading:
    """Merge parts into a data set."""

    def __init__(
        self,
        schema: TableSchema,
        wanted: dict[str, tuple[ColumnSpec, ...]],
        parts: dict[str, list[Part]],
        folder: Path,
        notes: list[str],
        config: DataConfig,
    ) -> None:
        self.schema, self.wanted, self.parts, self.folder, self.notes = schema, wanted, parts, folder, notes
        self.config = config
        self.num_events = sum(part.num_rows for part in parts[EVENTS])

    def raw_data(self) -> RawData:
        """Return the whole data set."""
        entities = {name: self._entity(name) for name in ENTITIES}
        frames = {name: self._frame(entity) for name, entity in entities.items()}
        events = self._events(entities)
        num_bad = sum(part.faults.number for part in self.parts[EVENTS])
        return RawData(events, frames[ITEM], frames[USER], skipped=self.notes, num_skipped=num_bad)

    def items(self) -> pandas.DataFrame:
        """Return the items alone."""
        return self._frame(self._entity(ITEM))

    def _entity(self, name: str) -> _Entity:
        roles = [role for role in (EVENTS, TABLE_OF[name]) if role in self.parts]
        keys = {
            role: next(each for each in self.wanted[role] if each.kind == ID and each.of == name)
            for role in roles
        }
        ids = joined([(part, keys[role]) for role in roles for part in self.parts[role]])
        if ids.is_mixed:
            self.notes.append(
                f"the ids of the column {printable(keys[EVENTS].column)} are whole numbers in some files and "
                "texts in others: all are taken as texts"
            )
        positions = iter(ids.places)
        entity = _Entity(
            name, keys, ids, {role: [next(positions) for _ in self.parts[role]] for role in roles}
        )
        if len(roles) == 2:
            self._note_missing(entity, roles[1])
        return entity

    def _note_missing(self, entity: _Entity, role: str) -> None:
        """Add a note with the number of ids of the events without a row in the table of their properties."""
        known = np.zeros(len(entity.ids.values) + 1, bool)
        for rows in entity.places[role]:
            known[rows] = True
        if number := int((~known[:-1]).sum()):
            self.notes.append(
                f"{counted(number, entity.name)} of the events {'has' if number == 1 else 'have'} no row in "
                f"the table of {role}: the values of that table are missing"
            )

    def _frame(self, entity: _Entity) -> pandas.DataFrame:
        """Return a frame with one row for each id, and the columns that the schema names."""
        ids = entity.ids.values.to_numpy(zero_copy_only=False)
        columns: dict[str, Any] = {entity.keys[EVENTS].column: ids}
        for role in (EVENTS, TABLE_OF[entity.name]):
            for wanted in self.wanted.get(role, ()):
                if wanted.of == entity.name and wanted.kind != ID:
                    values = self._property(entity, role, wanted)
                    if wanted.kind == DATE:
                        entity.days[wanted.column] = values
                        # Not a feature: the dates from which ages in later events are computed.
                        columns[dates_name(entity.name, wanted.column)] = values
                    else:
                        columns[wanted.column] = values
        for feature in self.schema.features.values():
            call = derived(feature.column)
            # A column of the events is not read with the table of items alone.
            if call and call.is_text and feature.of == entity.name and call.argument in columns:
                columns[feature.column] = [
                    parts_of_text(text, call.function) for text in columns[call.argument]
                ]
        if entity.name == ITEM:
            columns[self.schema.title_column] = _titles(columns.get(self.schema.item.title), ids)
        return pandas.DataFrame(columns)

    def _property(self, entity: _Entity, role: str, wanted: ColumnSpec) -> Any:
        time = self._wanted(TIME) if role == EVENTS else None
        number = len(entity.ids.values)
        parts, rows, key = self.parts[role], entity.places[role], entity.keys[role]
        if wanted.kind == VECTOR:
            vectors = vectors_of(wanted, parts, rows, key, number)
            if lacking := sum(bool(np.isnan(vector[0])) for vector in vectors):
                of = counted(number, entity.name)
                self.notes.append(f"{printable(wanted.column)}: {lacking:,} of {of} have no vector")
            return vectors
        column, num_varied, num_others = property_of(wanted, parts, rows, key, number, time)
        if num_varied:
            newest, others = "newest" if time else "last", counted(num_others, "row")
            self.notes.append(
                f"{printable(wanted.column)} varies within {counted(num_varied, entity.name)}: the "
                f"value of most rows counts, else the {newest} one, and {others} "
                f"{'has' if num_others == 1 else 'have'} another"
                + ("; name it a feature of the event to keep each" if role == EVENTS else "")
            )
        return column

    def _events(self, entities: dict[str, _Entity]) -> Events:
        owners = (entities[name] for name in ENTITIES)
        user, item = (self._mapped(owner.keys[EVENTS], owner.places[EVENTS]) for owner in owners)
        label = self._numbers(LABEL, "float32")
        time = self._numbers(TIME, "int64")
        weight = self._numbers(WEIGHT, "float32")
        if weight is not None:
            self._note_weights(weight)
        if label is None:
            label = self._made(lambda part: np.ones(part.stop - part.start, np.float32), "float32")
        elif weight is None and self.schema.label.kind == COUNT:
            # The label is already a logarithm.
            counts = label
            weight = self._made(lambda part: 1 + counts[part], "float32", counts)
        if time is None and self.config.order == "rows":
            time = self._made(lambda part: np.arange(part.start, part.stop), "int64")
        elif time is None:
            time = np.zeros(self.num_events, np.int64)
        else:
            self._note_early(time)
        events = Events(user, item, label, time, weight)
        for wanted in self.wanted[EVENTS]:
            if wanted.of == EVENT and wanted.kind == CATEGORY:
                events.features[wanted.column] = self._codes(wanted)
            elif wanted.of == EVENT and wanted.kind == NUMBER:
                events.features[wanted.column] = self._column(wanted, "float32")
        self._add_labels(events)
        self._derive(events, entities)
        return events

    def _add_labels(self, events: Events) -> None:
        """Add the labels after the first, and a note with the number of events that lack each."""
        for label in self.schema.more_labels:
            columns = (typed(wanted, self.schema) for wanted in wanted_of_label(label))
            values, *own = (self._column(wanted, "float32") for wanted in columns)
            events.more_labels[label.key] = values
            for weights in own:
                events.more_weights[label.key] = weights
                _check_weights(label, values, weights)
            lacking = sum(int(np.isnan(values[part]).sum()) for part in chunks(len(values), values))
            if lacking == len(values):
                raise UserError(f"No event has the label {label.key}; remove it from the schema.")
            if lacking:
                self.notes.append(
                    f"{lacking:,} of {counted(len(values), 'event')} lack the label {printable(label.key)}, "
                    "and do not count for it"
                )

    def _note_early(self, time: np.ndarray) -> None:
        """Add a note with the number of times that look like a 0, a -1 or another unit."""
        early = sum(int(np.count_nonzero(time[part] < FIRST_LIKELY)) for part in chunks(len(time), time))
        if 0 < early < len(time):
            first = np.datetime64(int(time.min()), "s")
            self.notes.append(
                f"{counted(early, 'event has', 'events have')} a time before May 1976, the first {first}, "
                "and all others are later: such events count as the oldest"
            )

    def _note_weights(self, weight: np.ndarray) -> None:
        """Add a note with the range of the weights: a column of another meaning may distort the training."""
        wanted = self._wanted(WEIGHT)
        assert wanted is not None
        some = weight[:: max(1, len(weight) // MOST_OF_MEDIAN)]
        self.notes.append(
            f"an event counts as much as its {printable(wanted.column)} says: from {weight.min():g} to "
            f"{weight.max():g}, the median is {np.median(some):g}; without [weight] all events count alike"
        )

    def _codes(self, wanted: ColumnSpec) -> Codes:
        values = joined([(part, wanted) for part in self.parts[EVENTS]])
        return Codes(self._mapped(wanted, values.places), values.values.to_pylist())

    def _mapped(self, wanted: ColumnSpec, positions: Sequence[np.ndarray]) -> np.ndarray:
        """Return the codes of a column as positions among the values of all parts, int32."""
        blocks = (
            positions[order][codes]
            for order, part in enumerate(self.parts[EVENTS])
            for codes in part.blocks(wanted)
        )
        return gathered(blocks, self.num_events, "int32", self.folder)

    def _numbers(self, kind: str, dtype: str) -> np.ndarray | None:
        wanted = self._wanted(kind)
        return None if wanted is None else self._column(wanted, dtype)

    def _wanted(self, kind: str) -> ColumnSpec | None:
        return next((each for each in self.wanted[EVENTS] if each.kind == kind), None)

    def _column(self, wanted: ColumnSpec, dtype: str) -> np.ndarray:
        blocks = (block for part in self.parts[EVENTS] for block in part.blocks(wanted))
        return gathered(blocks, self.num_events, dtype, self.folder)

    def _made(self, block: Callable[[slice], np.ndarray], dtype: str, *columns: np.ndarray) -> np.ndarray:
        """Return a column computed from these columns. block: computes a range of its rows."""
        blocks = (block(part) for part in chunks(self.num_events, *columns))
        return gathered(blocks, self.num_events, dtype, self.folder)

    def _derive(self, events: Events, entities: dict[str, _Entity]) -> None:
        """Add the event features that are computed from the time."""
        for feature in self.schema.features.values():
            call = derived(feature.column)
            if call is not None and not call.is_text:
                column = self._derived(call, feature.kind == NUMBER, events, entities)
                events.features[feature.column] = column

    def _derived(
        self, call: Derived, is_number: bool, events: Events, entities: dict[str, _Entity]
    ) -> np.ndarray | Codes:
        time = events.time
        if call.function == AGE_DAYS:
            place = events.user if call.of == USER else events.item
            days = entities[call.of].days[call.column]
            return self._made(lambda part: age_days(time[part], days[place[part]]), "float32", time, place)
        part_of, number = (hour, HOURS) if call.function == HOUR else (weekday, WEEKDAYS)
        column = self._made(lambda part: part_of(time[part]), "float32" if is_number else "int32", time)
        return column if is_number else Codes(column, [*range(number)])


def _check_weights(label: LabelColumn, values: np.ndarray, weights: np.ndarray) -> None:
    """Refuse values of a label that have no weight; a value that is missing needs none."""
    parts = chunks(len(values), values, weights)
    number = sum(int((np.isnan(weights[part]) & ~np.isnan(values[part])).sum()) for part in parts)
    if number:
        raise UserError(
            f"{counted(number, 'value')} of the label {printable(label.key)} must have a weight in the "
            f"column {printable(label.weight)}, got none. Fix: write it, or remove weight from the label."
        )


def _titles(given: Any, ids: np.ndarray) -> list[str]:
    """Titles of the items; the id of an item without one."""
    titles = ids if given is None else given
    return [str(item) if title is None else str(title) for title, item in zip(titles, ids, strict=True)]
