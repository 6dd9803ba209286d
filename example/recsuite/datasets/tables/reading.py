"""Read a user's own tables as a data set of users, items and events, in bounded memory.

Each file is read once into a part on the disk, see `parts.make_part`: columns of codes for its distinct
values. Then the distinct values of all parts are merged and sorted, and the columns of the events are made
from those of the parts, block by block. So the same rows give the same data set for any number of files and
batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.config.sections import DataConfig
from recsuite.datasets.preparation.arrays import chunks
from recsuite.datasets.schema import ENTITIES, EVENT, ITEM, USER, Codes, Events, RawData
from recsuite.datasets.tables.derived import AGE_DAYS, HOUR, age_days, dates_name, derived, hour, weekday
from recsuite.datasets.tables.files import columns_of, split_part
from recsuite.datasets.tables.parts import (
    DATE,
    ID,
    LABEL,
    TABLE_OF,
    TIME,
    WEIGHT,
    Joined,
    Part,
    Wanted,
    gathered,
    joined,
    kept,
    parts_of,
    property_of,
    unfinished,
    wanted_of,
    wanted_of_label,
)
from recsuite.datasets.tables.remote import EVENTS, Tables
from recsuite.datasets.tables.schema_file import CATEGORY, COUNT, NUMBER, LabelColumn, TableSchema
from recsuite.datasets.tables.values import FIRST_LIKELY
from recsuite.errors import UserError, counted, printable
from recsuite.runtime.console import stage

if TYPE_CHECKING:
    import pandas

HOURS, WEEKDAYS = 24, 7


def read_tables(tables: Tables, schema: TableSchema, config: DataConfig) -> RawData:
    """Read the tables that a schema describes. Large columns are memory-mapped from unnamed files.

    Raises:
        UserError: for a file that cannot be read, a column that is missing, and for bad rows as --bad_rows
            and --max_bad_rows say.
    """
    wanted = wanted_of(schema, columns_of(tables))
    roles = [(role, file, wanted[role]) for role, files in tables.roles.items() for file in files]
    with kept(tables, config) as folder, unfinished(folder) as temporary:
        parts, notes = parts_of(folder, [(file, columns) for _, file, columns in roles], config)
        if tables.ignored:
            name = Path(tables.ignored[0]).name
            number = counted(len(tables.ignored), "file that is no table", "files that are no tables")
            notes.append(f"left out {number}, such as {name}")
        by_role: dict[str, list[Part]] = {role: [] for role in wanted}
        for (role, _, _), part in zip(roles, parts, strict=True):
            by_role[role].append(part)
        if not any(part.num_rows for part in by_role[EVENTS]):
            raise UserError(f"{tables.events[0]} holds no event: there is no row below its header.")
        with stage("bringing the tables together"):
            raw = _Reading(schema, wanted, by_role, temporary, notes).raw_data()
    sizes = {tables.name_of(part.file): part.num_rows for part in by_role[EVENTS]}
    raw = dataclasses.replace(raw, events_per_file=sizes)
    return _with_split_of_files(raw) if config.split == "files" else raw


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
        part: np.repeat([each == part for each in parts.values()], [*raw.events_per_file.values()])
        for part in ("validation", "test")
    }
    validation = marks["validation"] if "validation" in parts.values() else None
    return dataclasses.replace(raw, official_test=marks["test"], official_validation=validation)


@dataclass
class _Entity:
    """Users or items: their ids, and the rows of each part's codes."""

    name: str
    # The id column, by role.
    keys: dict[str, Wanted]
    ids: Joined
    # Row of each code, int32, by role, one array per part.
    places: dict[str, list[np.ndarray]]
    days: dict[str, np.ndarray] = field(default_factory=dict)


class _Reading:
    """Merge parts into a data set."""

    def __init__(
        self,
        schema: TableSchema,
        wanted: dict[str, tuple[Wanted, ...]],
        parts: dict[str, list[Part]],
        folder: Path,
        notes: list[str],
    ) -> None:
        self.schema, self.wanted, self.parts, self.folder, self.notes = schema, wanted, parts, folder, notes
        self.num_events = sum(part.num_rows for part in parts[EVENTS])

    def raw_data(self) -> RawData:
        """Return the whole data set."""
        entities = {name: self._entity(name) for name in ENTITIES}
        frames = {name: self._frame(entity) for name, entity in entities.items()}
        events = self._events(entities)
        num_bad = sum(part.faults.number for part in self.parts[EVENTS])
        return RawData(events, frames[ITEM], frames[USER], skipped=self.notes, num_skipped=num_bad)

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
        places = iter(ids.places)
        entity = _Entity(name, keys, ids, {role: [next(places) for _ in self.parts[role]] for role in roles})
        if len(roles) == 2:
            self._note_missing(entity, roles[1])
        return entity

    def _note_missing(self, entity: _Entity, role: str) -> None:
        """Add a note with the number of ids of the events without a row in the table of their properties."""
        known = np.zeros(len(entity.ids.values) + 1, bool)
        for places in entity.places[role]:
            known[places] = True
        if number := int((~known[:-1]).sum()):
            self.notes.append(
                f"{counted(number, entity.name)} of the events {'has' if number == 1 else 'have'} no row in "
                f"the table of {role}: what it says of others is missing there"
            )

    def _frame(self, entity: _Entity) -> pandas.DataFrame:
        """Return a frame with one row for each id, and the columns that the schema names."""
        import pandas

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
        if entity.name == ITEM:
            columns[self.schema.title_column] = _titles(columns.get(self.schema.item.title), ids)
        return pandas.DataFrame(columns)

    def _property(self, entity: _Entity, role: str, wanted: Wanted) -> np.ndarray:
        time = self._wanted(TIME) if role == EVENTS else None
        number = len(entity.ids.values)
        found = property_of(wanted, self.parts[role], entity.places[role], entity.keys[role], number, time)
        if found.num_varied:
            newest, others = "newest" if time else "last", counted(found.num_others, "row")
            self.notes.append(
                f"{printable(wanted.column)} varies within {counted(found.num_varied, entity.name)}: the "
                f"value of most rows counts, else the {newest} one, and {others} "
                f"{'has' if found.num_others == 1 else 'have'} another"
                + ("; name it a feature of the event to keep each" if role == EVENTS else "")
            )
        return found.values(wanted)

    def _events(self, entities: dict[str, _Entity]) -> Events:
        user, item = (self._places(entities[name]) for name in ENTITIES)
        label = self._numbers(LABEL, "float32")
        time = self._numbers(TIME, "int64")
        weight = self._numbers(WEIGHT, "float32")
        if label is None:
            label = self._made(lambda part: np.ones(part.stop - part.start, np.float32), "float32")
        elif weight is None and self.schema.label.kind == COUNT:
            # The label is already a logarithm.
            counts = label
            weight = self._made(lambda part: 1 + counts[part], "float32", counts)
        if time is None:
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
            values, *own = (self._column(wanted, "float32") for wanted in wanted_of_label(label))
            events.more_labels[label.key] = values
            for weights in own:
                events.more_weights[label.key] = weights
                _check_weights(label, values, weights)
            lacking = sum(int(np.isnan(values[part]).sum()) for part in chunks(len(values), values))
            if lacking == len(values):
                raise UserError(f"No event has the label {label.key}; take it out of the schema.")
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

    def _places(self, entity: _Entity) -> np.ndarray:
        return self._mapped(entity.keys[EVENTS], entity.places[EVENTS])

    def _codes(self, wanted: Wanted) -> Codes:
        values = joined([(part, wanted) for part in self.parts[EVENTS]])
        return Codes(self._mapped(wanted, values.places), values.to_list())

    def _mapped(self, wanted: Wanted, places: Sequence[np.ndarray]) -> np.ndarray:
        """Return the codes of a column as positions among the values of all parts, int32."""
        blocks = (
            places[order][codes]
            for order, part in enumerate(self.parts[EVENTS])
            for codes in part.blocks(wanted)
        )
        return gathered(blocks, self.num_events, "int32", self.folder)

    def _numbers(self, kind: str, dtype: str) -> np.ndarray | None:
        wanted = self._wanted(kind)
        return None if wanted is None else self._column(wanted, dtype)

    def _wanted(self, kind: str) -> Wanted | None:
        return next((each for each in self.wanted[EVENTS] if each.kind == kind), None)

    def _column(self, wanted: Wanted, dtype: str) -> np.ndarray:
        blocks = (block for part in self.parts[EVENTS] for block in part.blocks(wanted))
        return gathered(blocks, self.num_events, dtype, self.folder)

    def _made(self, block: Callable[[slice], np.ndarray], dtype: str, *columns: np.ndarray) -> np.ndarray:
        """Return a column computed from these columns. block: computes a range of its rows."""
        blocks = (block(part) for part in chunks(self.num_events, *columns))
        return gathered(blocks, self.num_events, dtype, self.folder)

    def _derive(self, events: Events, entities: dict[str, _Entity]) -> None:
        """Add the event features that are computed from the time."""
        places = {USER: events.user, ITEM: events.item}
        for feature in self.schema.features.values():
            call = derived(feature.column)
            if call is None:
                continue
            if call.function == AGE_DAYS:
                days = entities[call.of].days[call.column]
                place = places[call.of]
                block = functools.partial(_ages, events.time, place, days)
                events.features[feature.column] = self._made(block, "float32", events.time, place)
                continue
            part_of, number = (hour, HOURS) if call.function == HOUR else (weekday, WEEKDAYS)
            block = functools.partial(_parts_of_time, part_of, events.time)
            is_number = feature.kind == NUMBER
            found = self._made(block, "float32" if is_number else "int32", events.time)
            events.features[feature.column] = found if is_number else Codes(found, [*range(number)])


def _check_weights(label: LabelColumn, values: np.ndarray, weights: np.ndarray) -> None:
    """Refuse values of a label that have no weight; a value that is missing needs none.

    Raises:
        UserError: says how many there are.
    """
    parts = chunks(len(values), values, weights)
    number = sum(int((np.isnan(weights[part]) & ~np.isnan(values[part])).sum()) for part in parts)
    if number:
        raise UserError(
            f"{counted(number, 'value')} of the label {printable(label.key)} must have a weight in the "
            f"column {printable(label.weight)}, got none. Fix: write it, or remove weight from the label."
        )


def _ages(time: np.ndarray, place: np.ndarray, days: np.ndarray, part: slice) -> np.ndarray:
    return age_days(time[part], days[place[part]])


def _parts_of_time(part_of: Callable[[np.ndarray], np.ndarray], time: np.ndarray, part: slice) -> np.ndarray:
    return part_of(time[part])


def _titles(found: Any, ids: np.ndarray) -> list[str]:
    """Titles of the items; the id of an item without one."""
    titles = ids if found is None else found
    return [str(each) if title is None else str(title) for title, each in zip(titles, ids, strict=True)]
