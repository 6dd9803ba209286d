"""A part: what one file says, read once and kept on the disk as columns of numbers.

    PART/
      part.json   how many rows, what is wrong with some, and the digests of the other files
      0.bin       a column: numbers as they are, or codes of distinct values
      0.arrow     the distinct values that the codes of 0.bin count

It is named after the bytes of the file, what is read of it and the version of the program, so a file that
was read stays read, also when others come beside it. A part takes 4 bytes for each event and column of ids,
categories and labels, 8 for numbers and times, and its distinct values once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from recsuite.datasets.tables.formats import BadRow, Batch, Faults, Source, ahead, batches, names_of, opened
from recsuite.datasets.tables.parts.coding import Coder
from recsuite.datasets.tables.parts.wanted import DATE, Wanted
from recsuite.datasets.tables.remote import File
from recsuite.datasets.tables.schema_file import CATEGORY, LIST, NUMBER
from recsuite.datasets.tables.values import DROPPED, beyond_int64
from recsuite.errors import UserError, counted, printable
from recsuite.files import FileEntry, check_file, digest_of, written_aside

if TYPE_CHECKING:
    import pyarrow

DESCRIPTION = "part.json"
# In which distinct values are looked up, column by column: Arrow does it without Python's lock.
THREADS = 2


@dataclass(frozen=True)
class Part:
    """What one file says.

    num_rows: of those that could be read. untyped: of each column, whether its texts may be meant as numbers.
    notes: what was found out on the way.
    """

    folder: Path
    file: File
    wanted: tuple[Wanted, ...]
    num_rows: int
    untyped: tuple[bool, ...]
    faults: Faults = field(default_factory=Faults)
    notes: tuple[str, ...] = ()

    def column(self, wanted: Wanted, first: int, number: int) -> np.ndarray:
        """Some rows of a column: numbers as they are, or codes."""
        place = self.wanted.index(wanted)
        path, dtype = self.folder / f"{place}.bin", wanted.dtype
        return np.fromfile(path, dtype, number, offset=first * dtype.itemsize)

    def values(self, wanted: Wanted) -> pyarrow.RecordBatch:
        """The distinct values of a column of codes, and their codes: `value` and `code`."""
        from pyarrow import ipc

        with ipc.open_file(self.folder / f"{self.wanted.index(wanted)}.arrow") as reader:
            return reader.get_batch(0)

    def is_untyped(self, wanted: Wanted) -> bool:
        """Whether the texts of a column may be meant as numbers, as those of CSV."""
        return self.untyped[self.wanted.index(wanted)]


def make_part(
    folder: Path, file: File, wanted: tuple[Wanted, ...], skip: bool, reached: Callable[[int], None]
) -> Part:
    """Read a file into a folder, which appears complete or not at all.

    skip: whether bad rows are left out. reached: is called with the bytes that were read.

    Raises:
        UserError: for a file that cannot be read, a column that is missing, and without `skip` a bad row.
    """
    with opened(file) as source, written_aside(folder) as aside, contextlib.ExitStack() as stack:
        aside.mkdir(parents=True)
        files = [stack.enter_context((aside / f"{place}.bin").open("wb")) for place in range(len(wanted))]
        # A thread for each core: the next batches are read meanwhile.
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
    """Takes the batches of a file apart into columns, without their bad rows."""

    def __init__(
        self, source: Source, wanted: tuple[Wanted, ...], files: Sequence[BinaryIO], pool: Executor
    ) -> None:
        self.source, self.wanted, self.files = source, wanted, files
        self.coders = {place: Coder(files[place], pool) for place, each in enumerate(wanted) if each.is_coded}
        # Rows whose label is none, as the schema says, are no bad ones.
        self.num_rows, self.broken, self.dropped = 0, 0, 0
        self.faults = Faults(source.unit)
        texts = set(source.names) if source.file.is_text else set()
        texts |= {*names_of(source)} - {*source.names}
        self.untyped = [each.column in texts for each in wanted]
        # The columns whose numbers int64 cannot hold.
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
        """Count the rows that could not be split into columns, of which there are so many so far."""
        rows = self.source.bad[self.broken : number]
        self.faults.add(rows, len(rows))
        self.broken = number

    def end(self) -> dict[int, pyarrow.RecordBatch]:
        """Write what is left; the distinct values of the coded columns, with their codes."""
        label = next((each.label for each in self.wanted if each.label), None)
        if label and self.dropped:
            rows = counted(self.dropped, "event")
            self.source.notes.append(
                f"left out {rows} of {Path(str(self.source.file)).name} whose {printable(label.column)} is "
                f'"{label.drop}", as drop says'
            )
        return {place: coder.end() for place, coder in self.coders.items()}

    def _note_type(self, place: int, batch: Batch) -> None:
        """Entries of lists are kept as texts, also where they are numbers."""
        from pyarrow import types

        kind = batch.columns.schema.field(self.wanted[place].column).type
        if self.wanted[place].kind == LIST and not types.is_null(kind) and self.num_rows == 0:
            self.untyped[place] |= hasattr(kind, "value_type") and types.is_integer(kind.value_type)

    def _note_large(self, name: str, batch: Batch) -> None:
        """Say once of a column that its numbers become texts: a model is asked for other ids then."""
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
    """Write the distinct values, and what a reader has to know."""
    from pyarrow import ipc

    for place, batch in values.items():
        with ipc.new_file(folder / f"{place}.arrow", batch.schema) as file:
            file.write_batch(batch)
    # Not waited for: what a power cut takes is found out by its digest, and read again.
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
    """A part that was made before; none where it is not there, or is damaged. Reads every byte."""
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
    # It is made again, whatever is wrong with it.
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
