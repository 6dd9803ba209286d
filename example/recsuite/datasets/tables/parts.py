"""Parts: each holds one file as columns of numbers on the disk, so the file is read once.

    PART/
      part.json   number of rows, descriptions of bad rows, and the digests of the other files
      0.bin       a column: plain numbers, or codes of distinct values
      0.arrow     the distinct values of the codes in 0.bin

The name of a part is a digest of the file's bytes, of what is read and of the program's version. So a file is
not read again when other files are added. A part takes 4 bytes for each event and column of ids, categories
and labels, 8 for numbers and times, and stores its distinct values once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow import ipc, types

from recsuite.config.sections import DataConfig
from recsuite.datasets.arrays import chunks
from recsuite.datasets.columns import VERSION
from recsuite.datasets.tables.files import File, Tables
from recsuite.datasets.tables.formats import (
    BadRow,
    Faults,
    FileBatch,
    FileReader,
    ahead,
    batches,
    names_of,
    opened,
)
from recsuite.datasets.tables.schema_file import toml_of
from recsuite.datasets.tables.sections import CATEGORY, LIST, NUMBER, VECTOR
from recsuite.datasets.tables.values import (
    DATE,
    DROPPED,
    MOST_UNREAD,
    ColumnSpec,
    ParsedValues,
    beyond_int64,
    indices_of,
    shown_value,
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
    replacing,
)
from recsuite.places import is_remote
from recsuite.runtime.console import stage

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
        # True for each known value that occurs. A file that stores codes may have values without a row.
        self._used: np.ndarray | None = None
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
        self._wait()
        if self._waiting:
            self._write_codes(self._waiting)
        small = np.flatnonzero(self._seen)
        known = pyarrow.array([], pyarrow.string()) if self._known is None else self._known
        used = np.arange(len(known)) if self._used is None else np.flatnonzero(self._used[: len(known)])
        known = known if len(used) == len(known) else known.take(pyarrow.array(used))
        values = pyarrow.concat_arrays(same_type([pyarrow.array(small, pyarrow.int64()), known]))
        codes = np.concatenate([small, len(self._seen) + used]).astype(np.int32)
        return pyarrow.record_batch([values, pyarrow.array(codes)], names=["value", "code"])

    def _add_small(self, values: pyarrow.Array) -> bool:
        """Write values as their own codes and return True, if all are small whole numbers."""
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
        codes = (values.fill_null(-1) if values.null_count else values).to_numpy(zero_copy_only=False)
        self._seen[codes[codes >= 0] if values.null_count else codes] = True
        self._file.write(codes.astype("<i4").data)
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
        before = [] if self._known is None else [self._known]
        values = same_type([*before, *(each.dictionary if _is_coded(each) else each for each in waiting)])
        # The known values come first, and so keep their codes.
        self._known, positions = together(values)
        if self._used is not None or any(map(_is_coded, waiting)):
            number = sum(map(len, before))
            used = np.zeros(len(self._known) + 1, bool)
            used[:number] = True if self._used is None else self._used[:number]
            self._used = used
        for array, codes in zip(waiting, positions[len(before) :], strict=True):
            # A missing value keeps the code -1, of the last entry.
            row_codes = np.append(codes, np.int32(-1))[indices_of(array)] if _is_coded(array) else codes
            if self._used is not None:
                self._used[row_codes] = True
            if len(self._seen):
                row_codes = np.where(row_codes < 0, row_codes, row_codes + np.int32(len(self._seen)))
            self._file.write(row_codes.astype("<i4", copy=False).data)


def _is_coded(values: pyarrow.Array) -> bool:
    return bool(types.is_dictionary(values.type))


def same_type(arrays: list[pyarrow.Array]) -> list[pyarrow.Array]:
    """Convert arrays to one type: to texts if some are texts and some whole numbers."""
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
    # Arrow skips arrays without values.
    encoded = pyarrow.chunked_array([each for each in arrays if len(each)], arrays[0].type)
    chunks = iter(encoded.dictionary_encode().chunks)
    positions, known = [], arrays[0][:0]
    for array in arrays:
        chunk = next(chunks) if len(array) else None
        positions.append(np.empty(0, np.int32) if chunk is None else indices_of(chunk))
        known = known if chunk is None else chunk.dictionary
    return known, positions


DESCRIPTION = "part.json"
# Threads: one reads the next batch, and two look up distinct values; Arrow releases Python's lock.
THREADS = 3


@dataclass(frozen=True)
class Part:
    """Content of one file.

    num_rows: number of readable rows. untyped: for each column, true if its texts may stand for numbers.
    faults: bad rows. unread: by column, values of features that count as missing. notes: messages from
    reading.
    """

    folder: Path
    file: File
    wanted: tuple[ColumnSpec, ...]
    num_rows: int
    untyped: tuple[bool, ...]
    faults: Faults = field(default_factory=Faults)
    unread: dict[str, Faults] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def column(self, wanted: ColumnSpec, rows: slice) -> np.ndarray:
        """Return a range of rows of a column: plain numbers, or codes."""
        path, dtype = self.folder / f"{self.wanted.index(wanted)}.bin", wanted.dtype
        return np.fromfile(path, dtype, rows.stop - rows.start, offset=rows.start * dtype.itemsize)

    def blocks(self, wanted: ColumnSpec) -> Iterator[np.ndarray]:
        """Yield the column block by block."""
        return (self.column(wanted, rows) for rows in chunks(self.num_rows))

    def values(self, wanted: ColumnSpec) -> pyarrow.RecordBatch:
        """Return the distinct values of a coded column, and their codes: `value` and `code`."""
        with ipc.open_file(self.folder / f"{self.wanted.index(wanted)}.arrow") as reader:
            return reader.get_batch(0)

    def is_untyped(self, wanted: ColumnSpec) -> bool:
        """True if the texts of a column may stand for numbers, as in CSV."""
        return self.untyped[self.wanted.index(wanted)]


def make_part(
    folder: Path,
    file: File,
    wanted: tuple[ColumnSpec, ...],
    skip: bool,
    pool: Executor,
    reached: Callable[[int], None],
) -> Part:
    """Read a file into a folder, which appears complete or not at all.

    skip: true to skip bad rows. pool: of threads. reached: called with the number of bytes that were read.

    Raises:
        UserError: for a file that cannot be read, a column that is missing, and without `skip` a bad row.
    """
    with opened(file) as source, replacing(folder) as aside, contextlib.ExitStack() as stack:
        aside.mkdir(parents=True)
        files = [stack.enter_context((aside / f"{place}.bin").open("wb")) for place in range(len(wanted))]
        writer = _Writer(source, wanted, files, pool)
        columns = list(dict.fromkeys(each.column for each in wanted))
        optional = {each.column for each in wanted if each.kind in (CATEGORY, LIST, NUMBER, VECTOR, DATE)}
        for batch in ahead(batches(source, columns, optional), pool):
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
    part = open_part(folder, file, wanted, is_new=True)
    assert part is not None
    return part


class _Writer:
    """Writer of the batches of a file as columns, without the bad rows."""

    def __init__(
        self, source: FileReader, wanted: tuple[ColumnSpec, ...], files: Sequence[BinaryIO], pool: Executor
    ) -> None:
        self.source, self.wanted, self.files = source, wanted, files
        self.coders = {place: Coder(files[place], pool) for place, each in enumerate(wanted) if each.is_coded}
        # Rows whose label the schema drops are not bad rows.
        self.num_rows, self.broken, self.dropped = 0, 0, 0
        self.faults = Faults(source.unit)
        self.unread: dict[str, Faults] = {}
        texts = set(source.names) if source.file.is_text else set()
        texts |= {*names_of(source)} - {*source.names}
        self.untyped = [each.column in texts for each in wanted]
        # Columns whose numbers int64 cannot hold.
        self.large: set[str] = set()

    def add(self, batch: FileBatch) -> None:
        """Write the rows of a batch."""
        parsed = [self._parsed(each, batch) for each in self.wanted]
        self.note_broken(batch.num_bad)
        is_good = np.ones(batch.columns.num_rows, bool)
        for column in parsed:
            if column.faults.any():
                is_good &= column.faults == 0
        is_whole = bool(is_good.all())
        if not is_whole:
            self._note_bad(batch, is_good, [each.faults for each in parsed])
        for place, column in enumerate(parsed):
            if place in self.coders:
                self._note_type(place, batch)
                self._note_large(self.wanted[place].column, batch)
                kept = column.values if is_whole else column.values.filter(pyarrow.array(is_good))
                self.coders[place].add(kept)
            else:
                values = column.values if is_whole else column.values[is_good]
                self.files[place].write(values.astype(self.wanted[place].dtype.base, copy=False).data)
        self.num_rows += int(is_good.sum())

    def _parsed(self, wanted: ColumnSpec, batch: FileBatch) -> ParsedValues:
        """Return a column, in which a bad number or date of a feature is a missing one, and counted."""
        parsed_column = wanted.parse(batch.columns.column(wanted.column))
        if wanted.kind not in (NUMBER, DATE) or not parsed_column.faults.any():
            return parsed_column
        is_bad = parsed_column.faults != 0
        first = self._bad_row(batch, int(np.argmax(is_bad)), [wanted], [parsed_column.faults])
        self.unread.setdefault(wanted.column, Faults(self.source.unit)).add([first], int(is_bad.sum()))
        return ParsedValues(
            np.where(is_bad, np.nan, parsed_column.values), np.zeros_like(parsed_column.faults)
        )

    def _note_bad(self, batch: FileBatch, is_good: np.ndarray, faults: list[np.ndarray]) -> None:
        """Count the rows with a fault; those that the schema drops are not bad."""
        is_dropped = np.any([each == DROPPED for each in faults], axis=0)
        self.dropped += int(is_dropped.sum())
        is_bad = ~(is_good | is_dropped)
        if is_bad.any():
            row = self._bad_row(batch, int(np.argmax(is_bad)), self.wanted, faults)
            self.faults.add([row], int(is_bad.sum()))

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
                f"skipped {rows} of {Path(str(self.source.file)).name} whose {printable(label.column)} is "
                f'"{label.drop}", as drop says'
            )
        return {place: coder.end() for place, coder in self.coders.items()}

    def _note_type(self, place: int, batch: FileBatch) -> None:
        """Record the type of a column; entries of lists are stored as texts, even if they are numbers."""
        kind = batch.columns.schema.field(self.wanted[place].column).type
        if self.wanted[place].kind == LIST and not types.is_null(kind) and self.num_rows == 0:
            self.untyped[place] |= hasattr(kind, "value_type") and types.is_integer(kind.value_type)

    def _note_large(self, name: str, batch: FileBatch) -> None:
        """Note once that a column's numbers become texts: ids in requests to a model are then texts too."""
        if name not in self.large and (value := beyond_int64(batch.columns.column(name))):
            self.large.add(name)
            self.source.notes.append(
                f"{self.source.file} has {value} in the column {name}, and whole numbers go up to "
                f"{2**63 - 1}: all values of {name} are taken as texts; write them as signed 64-bit integers "
                "to have them as numbers"
            )

    def _bad_row(
        self, batch: FileBatch, place: int, columns: Sequence[ColumnSpec], faults: Sequence[np.ndarray]
    ) -> BadRow:
        row_faults = [int(of_column[place]) for of_column in faults]
        wanted, fault = next(pair for pair in zip(columns, row_faults, strict=True) if pair[1])
        column = batch.columns.column(wanted.column)
        reason = f"{shown_value(column, place)}{wanted.reason(fault, column, place)}"
        return BadRow(self.source.number_of(batch, place), "", f"{printable(wanted.column)} {reason}")


def _describe(folder: Path, writer: _Writer, values: dict[int, pyarrow.RecordBatch]) -> None:
    """Write the distinct values and part.json."""
    for place, batch in values.items():
        with ipc.new_file(folder / f"{place}.arrow", batch.schema) as file:
            file.write_batch(batch)
    # Not synced: after a power cut the digest shows the damage, and the file is read again.
    entries = [
        FileEntry(path.name, path.stat().st_size, digest_of(path)) for path in sorted(folder.iterdir())
    ]
    description = {
        "num_rows": writer.num_rows,
        "untyped": [bool(each) for each in writer.untyped],
        "notes": writer.source.notes,
        # No column has an empty name.
        "faults": {
            name: [faults.unit, faults.number, faults.first]
            for name, faults in {"": writer.faults, **writer.unread}.items()
        },
        "files": [vars(entry) for entry in entries],
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, allow_nan=False))


def open_part(folder: Path, file: File, wanted: tuple[ColumnSpec, ...], is_new: bool = False) -> Part | None:
    """Open an existing part; None if it is missing or damaged. Reads every byte unless it was just made."""
    try:
        description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_bytes())
        for entry in () if is_new else description["files"]:
            check_file(folder, FileEntry(**entry))
        faults = {
            name: Faults(unit, number, BadRow(*first) if first else None)
            for name, (unit, number, first) in description["faults"].items()
        }
        return Part(
            folder,
            file,
            wanted,
            description["num_rows"],
            tuple(description["untyped"]),
            faults.pop(""),
            faults,
            tuple(description["notes"]),
        )
    # A damaged part is always made again.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None


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
    is_named = config.cache_dir and not is_remote(config.cache_dir)
    cache = Path(config.cache_dir) if is_named else beside
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
    folder: Path, roles: Sequence[tuple[File, tuple[ColumnSpec, ...]]], config: DataConfig
) -> tuple[list[Part], list[str]]:
    """Return the parts of these files, and notes on skipped rows. Missing parts are made.

    Parts of files that no longer exist are removed.

    Raises:
        UserError: for a file that cannot be read, for bad rows as --bad_rows and --max_bad_rows say, and when
            the disk is full.
    """
    names = [_name(file, wanted) for file, wanted in roles]
    by_name = {name: open_part(folder / name, *role) for name, role in zip(names, roles, strict=True)}
    # Of files with the same bytes, only one is read.
    missing = {name: role for name, role in zip(names, roles, strict=True) if by_name[name] is None}
    sizes = {name: max(file.size, 0) for name, (file, _) in missing.items()}
    with (
        stage("reading the tables", sum(sizes.values()), "bytes") as reached,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        before = 0
        for name, (file, wanted) in missing.items():
            remove(folder / name)

            def report(done: int, before: int = before) -> None:
                reached(before + done)

            with explained(f"Cannot write the columns to {folder}", "make room there, or give --cache_dir"):
                by_name[name] = make_part(
                    folder / name, file, wanted, config.bad_rows == "skip", pool, report
                )
            before += sizes[name]
    for path in folder.iterdir():
        # The folder also holds unfinished work.
        if path.name not in names and not path.name.startswith("."):
            remove(path)
    parts = [
        dataclasses.replace(part, file=file)
        for name, (file, _) in zip(names, roles, strict=True)
        if (part := by_name[name]) is not None
    ]
    notes = [note for part in parts for note in (*part.notes, *_accepted(part, config))]
    return parts, [*notes, *_missing(parts)]


def _name(file: File, wanted: tuple[ColumnSpec, ...]) -> str:
    """Name of a part: a digest of the bytes, of what is read of them, and of the version."""
    told = [file.digest, repr(file), repr(wanted), VERSION]
    return digest_of_bytes(json.dumps(told).encode())


def _missing(parts: Sequence[Part]) -> Iterator[str]:
    """Yield a note on each feature with unreadable numbers or dates; too many of them are refused."""
    for column in dict.fromkeys(column for part in parts for column in part.unread):
        lacking = [part for part in parts if column in part.unread]
        number = sum(part.unread[column].number for part in lacking)
        rows = sum(part.num_rows for part in parts if column in {each.column for each in part.wanted})
        told, first = f"{number:,} of {rows:,} values", lacking[0].unread[column].first
        assert first is not None
        place = f"{lacking[0].unread[column].unit} {first.number}"
        if number > MOST_UNREAD * rows:
            raise UserError(
                f"Cannot read {lacking[0].file}, {place}: {first.reason}; {told} of that feature cannot be "
                f"read, and {MOST_UNREAD:.0%} may be so. Fix: correct them, or write "
                f'kind = "category" in the section of schema.toml with column = {toml_of(column)}.'
            )
        name = Path(str(lacking[0].file)).name
        yield f"{printable(column)}: {told} count as missing, the first in {place} of {name} ({first.reason})"


def _accepted(part: Part, config: DataConfig) -> list[str]:
    """Return notes on the bad rows of a file, if there are no more than are allowed."""
    if config.bad_rows != "skip":
        part.faults.refuse(part.file)
    # Of a text that grows, one of few new rows may be bad.
    num_rows = part.file.rows_before + part.num_rows + part.faults.number
    return part.faults.accepted(part.file, num_rows, config.max_bad_rows)
