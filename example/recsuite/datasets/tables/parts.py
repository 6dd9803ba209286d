"""Parts: each holds one file as columns of numbers on the disk, so the file is read once. Parts are joined.

    PART/
      part.json   number of rows, descriptions of bad rows, and the digests of the other files
      0.bin       a column: plain numbers, or codes of distinct values
      0.arrow     the distinct values of the codes in 0.bin

The name of a part is a digest of the file's bytes, of what is read and of the program's version. So a file is
not read again when other files are added. A part takes 4 bytes for each event and column of ids, categories
and labels, 8 for numbers and times, and stores its distinct values once.

The distinct values of several parts are merged, sorted, and converted to one type. If a property of a user or
an item has several values, the value of most rows is taken, else the newest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from recsuite.config.sections import DataConfig
from recsuite.datasets.columns import VERSION
from recsuite.datasets.preparation.arrays import chunks, release, temporary
from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.derived import derived
from recsuite.datasets.tables.formats import BadRow, Batch, Faults, Source, ahead, batches, names_of, opened
from recsuite.datasets.tables.remote import EVENTS, ITEMS, USERS, File, Tables, is_remote
from recsuite.datasets.tables.schema_file import CATEGORY, LIST, NUMBER, LabelColumn, TableSchema
from recsuite.datasets.tables.values import (
    DROPPED,
    ENTRY,
    FAULTS,
    MISSING,
    NO_TIME,
    OFF_SCALE,
    OTHER_UNIT,
    Parsed,
    beyond_int64,
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
from recsuite.errors import UserError, counted, printable
from recsuite.files import (
    FileEntry,
    check_file,
    digest_of,
    digest_of_bytes,
    explained,
    place_for,
    remove,
    written_aside,
)
from recsuite.runtime.console import stage

if TYPE_CHECKING:
    import pandas
    import pyarrow


def gathered(blocks: Iterable[np.ndarray], number: int, dtype: str, folder: Path) -> np.ndarray:
    """Join blocks into one column of `number` rows, see `temporary`.

    Raises:
        UserError: when the disk is full.
    """
    with explained(f"The columns cannot be written to {folder}", "make room there, or give --cache_dir"):
        column, first = temporary(folder, number, np.dtype(dtype)), 0
        for block in blocks:
            column[first : first + len(block)] = block
            first += len(block)
            release(column)
    assert first == number
    return column


# Bytes of the values that wait to be looked up together.
WAITING_BYTES = 2**26
# Smaller whole numbers are not looked up: a byte for each marks which of them occur.
SMALL = 2**26


class Coder:
    """Writer of the codes of a column to a file, int32, -1 for a missing value.

    Small whole numbers are their own codes. Other values wait until they are as many as the known ones. Then
    a thread of the pool looks them up together with the known ones, while the next values are read. So each
    value is looked up once, or twice including the known ones. Memory holds the values about three times.
    """

    def __init__(self, file: BinaryIO, pool: Executor) -> None:
        self._file, self._pool = file, pool
        # True for each small number that occurs.
        self._seen = np.zeros(0, bool)
        self._all_small = True
        self._known: pyarrow.Array | None = None
        self._waiting: list[pyarrow.Array] = []
        self._bytes = 0
        self._writing: Future[None] | None = None

    def add(self, values: pyarrow.Array) -> None:
        """Add the next values: texts or int64, or codes of such."""
        self._all_small = self._all_small and self._add_small(values)
        if self._all_small or not len(values):
            return
        self._waiting.append(values)
        self._bytes += values.nbytes
        known = 0 if self._known is None else self._known.nbytes
        if self._bytes >= max(WAITING_BYTES, known):
            self._write()

    def end(self) -> pyarrow.RecordBatch:
        """Write the rest; return the distinct values and their codes, int32. A value may have two codes."""
        import pyarrow

        self._write()
        self._wait()
        small = np.flatnonzero(self._seen)
        known = pyarrow.array([], pyarrow.string()) if self._known is None else self._known
        values = pyarrow.concat_arrays(same_type([pyarrow.array(small, pyarrow.int64()), known]))
        codes = np.concatenate([small, len(self._seen) + np.arange(len(known))]).astype(np.int32)
        return pyarrow.record_batch([values, pyarrow.array(codes)], names=["value", "code"])

    def _add_small(self, values: pyarrow.Array) -> bool:
        """Write values as their own codes and return True, if all are small whole numbers."""
        import pyarrow
        import pyarrow.compute as pc

        if values.type != pyarrow.int64():
            return False
        ends = pc.min_max(values).as_py()
        if not 0 <= (ends["min"] or 0) <= (ends["max"] or 0) < SMALL:
            return False
        if (ends["max"] or 0) >= len(self._seen):
            # Doubled each time, so that it is copied only a few times.
            grown = np.zeros(min(SMALL, max(2**12, 2 * ((ends["max"] or 0) + 1))), bool)
            grown[: len(self._seen)] = self._seen
            self._seen = grown
        codes = values.fill_null(-1).to_numpy(zero_copy_only=False)
        self._seen[codes[codes >= 0] if values.null_count else codes] = True
        self._file.write(codes.astype("<i4").tobytes())
        return True

    def _write(self) -> None:
        """Write the waiting values in the thread pool; one write per column at a time, to keep the order."""
        self._wait()
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            self._writing = self._pool.submit(self._write_codes, waiting)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write_codes(self, waiting: list[pyarrow.Array]) -> None:
        coded = [_without_unused(values) if _is_coded(values) else values for values in waiting]
        before = [] if self._known is None else [self._known]
        values = same_type([*before, *(each.dictionary if _is_coded(each) else each for each in coded)])
        # The known values come first, and so keep their codes.
        self._known, places = together(values)
        for each, place in zip(coded, places[len(before) :], strict=True):
            # A missing value keeps the code -1.
            codes = np.where(place < 0, place, place + np.int32(len(self._seen)))
            if _is_coded(each):
                codes = np.append(codes, np.int32(-1))[_indices(each)]
            self._file.write(codes.astype("<i4", copy=False).data)


def _is_coded(values: pyarrow.Array) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_dictionary(values.type))


def _indices(coded: pyarrow.Array) -> np.ndarray:
    """Return the codes, int32, -1 for a missing value."""
    found: np.ndarray = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return found


def _without_unused(coded: pyarrow.Array) -> pyarrow.Array:
    """Return the codes without unused values: those of a file may have some."""
    import pyarrow

    codes = _indices(coded)
    is_used = np.zeros(len(coded.dictionary) + 1, bool)
    is_used[codes] = True
    places = (np.cumsum(is_used) - 1).astype(np.int32)
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(places[codes], mask=codes < 0),
        coded.dictionary.filter(pyarrow.array(is_used[:-1])),
    )


def same_type(arrays: list[pyarrow.Array]) -> list[pyarrow.Array]:
    """Convert arrays to one type: to texts if some are texts and some whole numbers."""
    import pyarrow

    # Arrays with only missing values have the type of texts by chance.
    filled = {each.type for each in arrays if len(each) > each.null_count}
    if len(filled) == 1 and len({each.type for each in arrays}) == 1:
        return arrays
    kind = pyarrow.int64() if filled == {pyarrow.int64()} else pyarrow.string()
    return [each.cast(kind) for each in arrays]


def together(arrays: list[pyarrow.Array]) -> tuple[pyarrow.Array, list[np.ndarray]]:
    """Return the distinct values of arrays of one type, in order of appearance; and for each array the
    positions of its values among them, int32, -1 for a missing value.
    """
    import pyarrow

    # Arrow skips arrays without values.
    encoded = pyarrow.chunked_array([each for each in arrays if len(each)], arrays[0].type)
    chunks = iter(encoded.dictionary_encode().chunks)
    places, known = [], arrays[0][:0]
    for each in arrays:
        chunk = next(chunks) if len(each) else None
        places.append(np.empty(0, np.int32) if chunk is None else _indices(chunk))
        known = known if chunk is None else chunk.dictionary
    return known, places


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


DESCRIPTION = "part.json"
# Threads that look up distinct values, column by column: Arrow releases Python's lock.
THREADS = 2


@dataclass(frozen=True)
class Part:
    """Content of one file.

    num_rows: number of readable rows. untyped: for each column, true if its texts may stand for numbers.
    notes: messages from reading.
    """

    folder: Path
    file: File
    wanted: tuple[Wanted, ...]
    num_rows: int
    untyped: tuple[bool, ...]
    faults: Faults = field(default_factory=Faults)
    notes: tuple[str, ...] = ()

    def column(self, wanted: Wanted, rows: slice) -> np.ndarray:
        """Return a range of rows of a column: plain numbers, or codes."""
        path, dtype = self.folder / f"{self.wanted.index(wanted)}.bin", wanted.dtype
        return np.fromfile(path, dtype, rows.stop - rows.start, offset=rows.start * dtype.itemsize)

    def blocks(self, wanted: Wanted) -> Iterator[np.ndarray]:
        """Yield the column block by block."""
        return (self.column(wanted, rows) for rows in chunks(self.num_rows))

    def values(self, wanted: Wanted) -> pyarrow.RecordBatch:
        """Return the distinct values of a coded column, and their codes: `value` and `code`."""
        from pyarrow import ipc

        with ipc.open_file(self.folder / f"{self.wanted.index(wanted)}.arrow") as reader:
            return reader.get_batch(0)

    def is_untyped(self, wanted: Wanted) -> bool:
        """True if the texts of a column may stand for numbers, as in CSV."""
        return self.untyped[self.wanted.index(wanted)]


def make_part(
    folder: Path, file: File, wanted: tuple[Wanted, ...], skip: bool, reached: Callable[[int], None]
) -> Part:
    """Read a file into a folder, which appears complete or not at all.

    skip: true to skip bad rows. reached: called with the number of bytes that were read.

    Raises:
        UserError: for a file that cannot be read, a column that is missing, and without `skip` a bad row.
    """
    with opened(file) as source, written_aside(folder) as aside, contextlib.ExitStack() as stack:
        aside.mkdir(parents=True)
        files = [stack.enter_context((aside / f"{place}.bin").open("wb")) for place in range(len(wanted))]
        # One thread for each core; the next batches are read meanwhile.
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        writer = _Writer(source, wanted, files, pool)
        columns = list(dict.fromkeys(each.column for each in wanted))
        optional = {each.column for each in wanted if each.kind in (CATEGORY, LIST, NUMBER, DATE)}
        for batch in ahead(batches(source, columns, optional)):
            writer.add(batch)
            if not skip:
                writer.faults.refuse(file)
            reached(source.done)
        writer.note_broken(len(source.bad))
        if not skip:
            writer.faults.refuse(file)
        values = writer.end()
        stack.close()
        _describe(aside, writer, values)
    part = open_part(folder, file, wanted)
    assert part is not None
    return part


class _Writer:
    """Writer of the batches of a file as columns, without the bad rows."""

    def __init__(
        self, source: Source, wanted: tuple[Wanted, ...], files: Sequence[BinaryIO], pool: Executor
    ) -> None:
        self.source, self.wanted, self.files = source, wanted, files
        self.coders = {place: Coder(files[place], pool) for place, each in enumerate(wanted) if each.is_coded}
        # Rows whose label the schema drops are not bad rows.
        self.num_rows, self.broken, self.dropped = 0, 0, 0
        self.faults = Faults(source.unit)
        texts = set(source.names) if source.file.is_text else set()
        texts |= {*names_of(source)} - {*source.names}
        self.untyped = [each.column in texts for each in wanted]
        # Columns whose numbers int64 cannot hold.
        self.large: set[str] = set()

    def add(self, batch: Batch) -> None:
        """Write the rows of a batch."""
        import pyarrow

        parsed = [each.parse(batch.columns.column(each.column)) for each in self.wanted]
        self.note_broken(batch.num_bad)
        is_good = np.ones(batch.columns.num_rows, bool)
        is_dropped = ~is_good
        for each in parsed:
            is_good &= each.faults == 0
            is_dropped |= each.faults == DROPPED
        is_whole = bool(is_good.all())
        self.dropped += int(is_dropped.sum())
        is_bad = ~(is_good | is_dropped)
        if is_bad.any():
            bad = int(np.argmax(is_bad))
            self.faults.add([self._bad_row(batch, bad, [each.faults for each in parsed])], int(is_bad.sum()))
        for place, each in enumerate(parsed):
            if place in self.coders:
                self._note_type(place, batch)
                self._note_large(self.wanted[place].column, batch)
                self.coders[place].add(
                    each.values if is_whole else each.values.filter(pyarrow.array(is_good))
                )
            else:
                values = each.values if is_whole else each.values[is_good]
                self.files[place].write(values.astype(self.wanted[place].dtype).tobytes())
        self.num_rows += int(is_good.sum())

    def note_broken(self, number: int) -> None:
        """Count the rows that could not be split into columns. number: their number so far."""
        rows = self.source.bad[self.broken : number]
        self.faults.add(rows, len(rows))
        self.broken = number

    def end(self) -> dict[int, pyarrow.RecordBatch]:
        """Write the rest, and return the distinct values of the coded columns, with their codes."""
        label = next((each.label for each in self.wanted if each.label), None)
        if label and self.dropped:
            rows = counted(self.dropped, "event")
            self.source.notes.append(
                f"left out {rows} of {Path(str(self.source.file)).name} whose {printable(label.column)} is "
                f'"{label.drop}", as drop says'
            )
        return {place: coder.end() for place, coder in self.coders.items()}

    def _note_type(self, place: int, batch: Batch) -> None:
        """Record the type of a column; entries of lists are stored as texts, even if they are numbers."""
        from pyarrow import types

        kind = batch.columns.schema.field(self.wanted[place].column).type
        if self.wanted[place].kind == LIST and not types.is_null(kind) and self.num_rows == 0:
            self.untyped[place] |= hasattr(kind, "value_type") and types.is_integer(kind.value_type)

    def _note_large(self, name: str, batch: Batch) -> None:
        """Note once that a column's numbers become texts: ids in requests to a model are then texts too."""
        if name not in self.large and (value := beyond_int64(batch.columns.column(name))):
            self.large.add(name)
            self.source.notes.append(
                f"{self.source.file} has {value} in the column {name}, and whole numbers go up to "
                f"{2**63 - 1}: all values of {name} are taken as texts; write them as signed 64-bit integers "
                "to have them as numbers"
            )

    def _bad_row(self, batch: Batch, place: int, faults: list[np.ndarray]) -> BadRow:
        wanted, fault = next(
            (each, int(found[place])) for each, found in zip(self.wanted, faults, strict=True) if found[place]
        )
        column = batch.columns.column(wanted.column)
        value = column[place].as_py()
        shown = "" if value is None or value == "" else f"{printable(value)[:60]!r} "
        reason = f"{printable(wanted.column)} {shown}{wanted.reason(fault, column)}"
        return BadRow(self.source.number_of(batch, place), "", reason)


def _describe(folder: Path, writer: _Writer, values: dict[int, pyarrow.RecordBatch]) -> None:
    """Write the distinct values and part.json."""
    from pyarrow import ipc

    for place, batch in values.items():
        with ipc.new_file(folder / f"{place}.arrow", batch.schema) as file:
            file.write_batch(batch)
    # Not synced: after a power cut the digest shows the damage, and the file is read again.
    entries = [
        FileEntry(path.name, path.stat().st_size, digest_of(path)) for path in sorted(folder.iterdir())
    ]
    found = {
        "num_rows": writer.num_rows,
        "untyped": [bool(each) for each in writer.untyped],
        "notes": writer.source.notes,
        "faults": [writer.faults.unit, writer.faults.number, writer.faults.first],
        "files": [vars(entry) for entry in entries],
    }
    (folder / DESCRIPTION).write_text(json.dumps(found, allow_nan=False))


def open_part(folder: Path, file: File, wanted: tuple[Wanted, ...]) -> Part | None:
    """Open an existing part; None if it is missing or damaged. Reads every byte."""
    try:
        found: dict[str, Any] = json.loads((folder / DESCRIPTION).read_bytes())
        for entry in found["files"]:
            check_file(folder, FileEntry(**entry))
        unit, number, first = found["faults"]
        return Part(
            folder,
            file,
            wanted,
            found["num_rows"],
            tuple(found["untyped"]),
            Faults(unit, number, BadRow(*first) if first else None),
            tuple(found["notes"]),
        )
    # A damaged part is always made again.
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None


# Whole numbers, also written as floats (1.0). 007 and -0 are texts.
WHOLE_NUMBER = r"^(0|-?[1-9]\d{0,18})(\.0+)?$"
TRUTHS = ("true", "false")


@dataclass(frozen=True)
class Joined:
    """Sorted distinct values: whole numbers (int64) or texts.

    places: for each part, the position of each code's value, int32; the last entry is -1, for code -1.
    is_mixed: true if some parts have whole numbers and others texts, so that all are texts.
    """

    values: pyarrow.Array
    places: list[np.ndarray]
    is_mixed: bool = False

    def to_list(self) -> list[Any]:
        """Return the values as a list of Python objects."""
        found: list[Any] = self.values.to_pylist()
        return found


def joined(columns: Sequence[tuple[Part, Wanted]]) -> Joined:
    """Join the values of one column of several parts, or of several columns of ids."""
    import pyarrow

    found = [part.values(wanted) for part, wanted in columns]
    raw = [batch.column("value") for batch in found]
    untyped = [part.is_untyped(wanted) for part, wanted in columns]
    # True and true are one category, but may be two ids.
    if all(wanted.kind != ID for _, wanted in columns):
        raw = _truths(raw, untyped)
    wholes = [_as_whole(values) if may else values for values, may in zip(raw, untyped, strict=True)]
    filled = [values.type for values in wholes if len(values)]
    is_mixed = len(set(filled)) > 1
    dictionaries = same_type(raw if pyarrow.string() in filled else wholes)
    if not dictionaries:
        return Joined(pyarrow.array([], pyarrow.string()), [])
    values, ranks = _sorted(dictionaries)
    codes = [batch.column("code").to_numpy() for batch in found]
    return Joined(values, [_table(*each) for each in zip(codes, ranks, strict=True)], is_mixed)


def _sorted(dictionaries: list[pyarrow.Array]) -> tuple[pyarrow.Array, list[np.ndarray]]:
    """Return all distinct values, sorted, and for each array the positions of its values among them."""
    import pyarrow
    import pyarrow.compute as pc

    if pyarrow.types.is_integer(dictionaries[0].type):
        # Sorting takes a fifth of the memory of a look-up.
        numbers = [each.to_numpy() for each in dictionaries]
        # The values of a part are mostly in order, so sorting is fast.
        ordered = np.sort(np.concatenate(numbers), kind="stable")
        known = ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]
        return pyarrow.array(known), [np.searchsorted(known, each) for each in numbers]
    values, places = together(dictionaries)
    order = pc.array_sort_indices(values).to_numpy()
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    return values.take(pyarrow.array(order)), [ranks[place] for place in places]


def _table(codes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the rank of each code, int32, with -1 at the end, for code -1."""
    table = np.full(int(codes.max(initial=-1)) + 2, -1, np.int32)
    table[codes] = ranks
    return table


def _as_whole(values: pyarrow.Array) -> pyarrow.Array:
    """Return texts as int64 if all are whole numbers of 64 bits; else unchanged."""
    import pyarrow
    import pyarrow.compute as pc

    if not pyarrow.types.is_string(values.type) or not len(values):
        return values
    if not pc.all(pc.match_substring_regex(values, WHOLE_NUMBER)).as_py():
        return values
    try:
        return pc.replace_substring_regex(values, r"\.0+$", "").cast(pyarrow.int64())
    except pyarrow.ArrowInvalid:
        return values


def _truths(raw: list[pyarrow.Array], untyped: list[bool]) -> list[pyarrow.Array]:
    """Return texts of text formats in lower case, as in typed formats, if all values are true or false."""
    import pyarrow
    import pyarrow.compute as pc

    known = pyarrow.array(TRUTHS)
    lowered = [
        pc.utf8_lower(values) if may and pyarrow.types.is_string(values.type) else values
        for values, may in zip(raw, untyped, strict=True)
    ]
    are_truths = all(
        pyarrow.types.is_string(values.type) and pc.all(pc.is_in(values, known), min_count=0).as_py()
        for values in lowered
    )
    return lowered if are_truths else raw


@dataclass(frozen=True)
class Property:
    """Column of users or items: values, or positions among `joined`.

    It also has the number of users or items with several values, and of rows with a value not taken.
    """

    newest: np.ndarray
    num_varied: int
    num_others: int
    joined: Joined | None = None
    # True if entries of lists may stand for numbers.
    is_untyped: bool = False

    def values(self, wanted: Wanted) -> np.ndarray:
        """Return numbers (float64 with NaN), categories (objects with None), or lists of those."""
        if self.joined is None:
            return self.newest
        known: list[Any] = self.joined.to_list()
        if wanted.kind == LIST:
            return _lists(known, self.is_untyped)[self.newest]
        table = np.empty(len(known) + 1, object)
        table[:-1] = known
        if len(known) and self.newest.min(initial=0) >= 0 and isinstance(known[0], int):
            return np.array(known, np.int64)[self.newest]
        return table[self.newest]


def property_of(
    wanted: Wanted,
    parts: Sequence[Part],
    entity: Sequence[np.ndarray],
    key: Wanted,
    number: int,
    time: Wanted | None = None,
) -> Property:
    """Return a column of `number` users or items, from all parts that have it.

    If a user or an item has several values, that of more than half of its rows is taken, else the newest.

    entity: for each part, the user or item of each code of the column `key`, int32, with -1 at the end. time:
    the times of the rows; for equal times, and without times, the last row is the newest.
    """
    values = joined([(part, wanted) for part in parts]) if wanted.is_coded else None
    missing = -1 if values else np.nan
    first = np.full(number, missing, np.int32 if values else np.float64)
    taken = _Taken(first, first.copy(), np.full(number, np.iinfo(np.int64).min), np.zeros(number, bool))

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the owner, the value and the time of the rows with a value."""
        for order, part in enumerate(parts):
            for rows in chunks(part.num_rows):
                places = entity[order][part.column(key, rows)]
                found = part.column(wanted, rows)
                found = values.places[order][found] if values else found
                is_there = found != -1 if values else ~np.isnan(found)
                times = part.column(time, rows) if time else np.zeros(len(found), np.int64)
                yield places[is_there], found[is_there], times[is_there]

    for block in blocks():
        taken.add(*block)
    num_others = _settle(taken, blocks()) if taken.varied.any() else 0
    untyped = all(part.is_untyped(wanted) for part in parts)
    return Property(taken.newest, int(taken.varied.sum()), num_others, values, untyped)


def _settle(taken: _Taken, blocks: Iterator[tuple[np.ndarray, ...]]) -> int:
    """Give an owner with several values that of over half of its rows; return the number of other rows."""
    pairs = []
    for places, found, _ in blocks:
        is_varied = taken.varied[places]
        if is_varied.any():
            pairs.append(_counted(places[is_varied], found[is_varied], np.ones(is_varied.sum(), np.int64)))
    owners, values, counts = _counted(*map(np.concatenate, zip(*pairs, strict=True)))
    totals = np.zeros(len(taken.newest), np.int64)
    np.add.at(totals, owners, counts)
    is_most = 2 * counts > totals[owners]
    taken.newest[owners[is_most]] = values[is_most]
    return int(counts[taken.newest[owners] != values].sum())


def _counted(places: np.ndarray, values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return each distinct pair of an owner and a value, with the sum of its counts."""
    order = np.lexsort((values, places))
    places, values = places[order], values[order]
    is_new = np.append(True, (np.diff(places) != 0) | (np.diff(values) != 0))
    return places[is_new], values[is_new], np.add.reduceat(counts[order], np.flatnonzero(is_new))


@dataclass(frozen=True)
class _Taken:
    """First and newest value of each user or item, the time of the newest, and a mark if values differ."""

    first: np.ndarray
    newest: np.ndarray
    time: np.ndarray
    varied: np.ndarray

    def add(self, places: np.ndarray, found: np.ndarray, times: np.ndarray) -> None:
        """Add values. If a position is assigned several times, NumPy keeps the last value."""
        known = self.first[places]
        is_new = known == -1 if known.dtype == np.int32 else np.isnan(known)
        self.first[places[is_new][::-1]] = found[is_new][::-1]
        self.varied[places[self.first[places] != found]] = True
        np.maximum.at(self.time, places, times)
        is_newest = times == self.time[places]
        self.newest[places[is_newest]] = found[is_newest]


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


# Folder of the parts, beside the columns, which have other names.
FOLDER = "parts"
# Name of unfinished work on a part or a whole reading, with the id of its process.
UNFINISHED = re.compile(r"\.(?:[0-9a-f]{32}|reading)\.(\d+)(?:\.\w+)?")


@contextlib.contextmanager
def kept(tables: Tables, config: DataConfig) -> Iterator[Path]:
    """Yield the folder of the parts of these tables: beside their columns, or temporary if not possible."""
    root = Path(tables.root)
    home = root if root.is_dir() else root.parent
    beside = None if is_remote(tables.root) else place_for(home, ".columns")
    cache = Path(config.cache_dir) if config.cache_dir else beside
    if cache is not None:
        # Several data sets may share a folder for their columns.
        folder = cache / FOLDER / digest_of_bytes(tables.root.encode())[:12]
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir() and os.access(folder, os.W_OK):
            _remove_leftovers(folder)
            yield folder
            return
    with tempfile.TemporaryDirectory(prefix="parts-") as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for reading tables, in the folder of their parts."""
    with tempfile.TemporaryDirectory(prefix=f".reading.{os.getpid()}.", dir=folder) as temporary:
        yield Path(temporary)


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished work of killed processes."""
    for path in folder.iterdir():
        match = UNFINISHED.fullmatch(path.name)
        if match and not _is_another(int(match[1])):
            remove(path)


def _is_another(process: int) -> bool:
    """True if another process with this id is running."""
    # After a restart of a container, the killed process may have had this process's id.
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # It belongs to another user.
        return True
    return True


def parts_of(
    folder: Path, roles: Sequence[tuple[File, tuple[Wanted, ...]]], config: DataConfig
) -> tuple[list[Part], list[str]]:
    """Return the parts of these files, and notes on skipped rows. Missing parts are made.

    Parts of files that no longer exist are removed.

    Raises:
        UserError: for a file that cannot be read, for bad rows as --bad_rows and --max_bad_rows say, and when
            the disk is full.
    """
    names = [_name(file, wanted) for file, wanted in roles]
    found = {name: open_part(folder / name, *role) for name, role in zip(names, roles, strict=True)}
    # Of files with the same bytes, only one is read.
    missing = {name: role for name, role in zip(names, roles, strict=True) if found[name] is None}
    with stage("reading the tables", sum(_size(file) for file, _ in missing.values()), "bytes") as reached:
        before = 0
        for name, (file, wanted) in missing.items():
            remove(folder / name)
            report = functools.partial(_report, reached, before)
            with explained(
                f"The columns cannot be written to {folder}", "make room there, or give --cache_dir"
            ):
                found[name] = make_part(folder / name, file, wanted, config.bad_rows == "skip", report)
            before += _size(file)
    for path in folder.iterdir():
        # The folder also holds unfinished work.
        if path.name not in names and not path.name.startswith("."):
            remove(path)
    parts = [
        dataclasses.replace(part, file=file)
        for name, (file, _) in zip(names, roles, strict=True)
        if (part := found[name]) is not None
    ]
    return parts, [note for part in parts for note in (*part.notes, *_accepted(part, config))]


def _size(file: File) -> int:
    return max(file.size, 0)


def _report(reached: Callable[[int], None], before: int, done: int) -> None:
    reached(before + done)


def _name(file: File, wanted: tuple[Wanted, ...]) -> str:
    """Name of a part: a digest of the bytes, of what is read of them, and of the version."""
    told = [file.digest, repr(file), repr(wanted), VERSION]
    return digest_of_bytes(json.dumps(told).encode())


def _accepted(part: Part, config: DataConfig) -> list[str]:
    """Return notes on the bad rows of a file.

    Raises:
        UserError: where there are more than are allowed.
    """
    if config.bad_rows != "skip":
        part.faults.refuse(part.file)
    return part.faults.accepted(part.file, part.num_rows + part.faults.number, config.max_bad_rows)


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
        raise UserError(f"{wanted.column} {shown}{FAULTS[faults[place]]}; mend it.")
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
