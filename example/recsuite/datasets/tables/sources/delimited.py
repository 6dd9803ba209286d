"""CSV and TSV: by Arrow's reader, every column as text; the lines of bad rows are looked up when needed."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.datasets.tables.sources.batch import Batch, Source, check_names
from recsuite.datasets.tables.sources.text import TextFile, explained_damage
from recsuite.errors import UserError, counted

if TYPE_CHECKING:
    from recsuite.datasets.tables.sources.file import File

# Of bytes that Arrow parses at once; no row may be longer.
BLOCK_BYTES = 2**23
DELIMITERS = ",\t;|"
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar"}
# What Arrow says of a row that is longer than a block.
STRADDLING = "straddling"


class Delimited(Source):
    """A file of CSV or TSV, whose first row names the columns."""

    unit = "line"

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self._text = TextFile(file)
        self._delimiter = file.delimiter
        head = self._text.head.decode("utf-8", "ignore")
        line = head.lstrip("\r\n").partition("\n")[0]
        if file.delimiter == ",":
            self._delimiter = _sniffed(line)
            if self._delimiter != ",":
                self.notes.append(f"{file} has {NAMES[self._delimiter]} between its columns")
        rows = _rows(head, self._delimiter)
        self._names = next(rows, [])
        # Of a header alone Arrow says that it is no table.
        self._has_rows = bool(next(rows, []))
        if not self._names:
            raise UserError(f"{file} has no first line with the names of its columns; add one.")
        check_names(file, self._names)
        # The numbers of the rows that are left out.
        self._invalid: list[int] = []

    @property
    def names(self) -> list[str]:
        """The first row."""
        return self._names

    @property
    def done(self) -> int:
        """How many of its bytes were read."""
        return self._text.done

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """The rows with the right number of fields."""
        first = 0
        with explained_damage(self.file), _explained_length(self.file):
            for batch in self._reader(columns) if self._has_rows else ():
                if batch.num_rows:
                    yield Batch(batch, first, len(self.bad))
                first += batch.num_rows

    def _reader(self, columns: Sequence[str]) -> Any:
        """Arrow's reader of the rows."""
        import pyarrow
        from pyarrow import csv as arrow_csv

        return arrow_csv.open_csv(
            pyarrow.PythonFile(self._text, mode="r"),
            # With threads rows have no numbers; the other core has the columns to look at meanwhile.
            arrow_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            arrow_csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=True, invalid_row_handler=self._note_invalid
            ),
            arrow_csv.ConvertOptions(
                check_utf8=False,
                column_types={name: pyarrow.string() for name in self._names},
                include_columns=list(columns),
                strings_can_be_null=False,
            ),
        )

    def _note_invalid(self, row: Any) -> str:
        """Take note of a row with another number of fields, and leave it out."""
        reason = f"{counted(row.actual_columns, 'field')} instead of {row.expected_columns}"
        # Such a row may hold the lines of many others.
        if row.text.count('"') % 2:
            reason += ", and a quote that is not closed"
        # Their lines are looked up when one is named.
        self._invalid.append(row.number)
        number = self._line_of(row.number) if not self.bad else row.number
        self.bad.append(BadRow(number, row.text[:200], reason))
        return "skip"

    def number_of(self, batch: Batch, place: int) -> int:
        """The line on which a row begins."""
        # The header is a row; so are those that were left out.
        row = batch.first + place + 2
        for invalid in self._invalid:
            if invalid > row:
                break
            row += 1
        return self._line_of(row)

    def _line_of(self, wanted: int) -> int:
        """The line on which a row begins, both counted from 1; empty lines are no rows."""
        text = TextFile(self.file)
        lines = io.TextIOWrapper(io.BufferedReader(_Raw(text)), encoding="utf-8", newline="")
        rows = csv.reader(lines, delimiter=self._delimiter)
        number, before = 0, 0
        # Of a field of a megabyte Python's reader wants nothing; the row is then as good a place as any.
        with contextlib.suppress(csv.Error):
            for row in rows:
                number += bool(row)
                if number == wanted:
                    return before + 1
                before = rows.line_num
        return wanted

    def close(self) -> None:
        """End it."""
        self._text.close()


class _Raw(io.RawIOBase):
    """A text as Python's own reader of lines wants it."""

    def __init__(self, text: TextFile) -> None:
        self._text = text

    def readable(self) -> bool:
        return True

    def readinto(self, block: Any) -> int:
        found = self._text.read(len(block))
        block[: len(found)] = found
        return len(found)


@contextlib.contextmanager
def _explained_length(file: File) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except pyarrow.ArrowInvalid as error:
        if STRADDLING not in str(error):
            raise
        raise UserError(
            f"{file} has a row of more than {BLOCK_BYTES // 2**20} MiB, as when a quote is not closed; mend "
            "the file."
        ) from None


def _rows(head: str, delimiter: str) -> Iterator[list[str]]:
    """The rows of a text, without empty lines; a field that Python finds too long is a row of its own."""
    rows = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter)
    try:
        yield from (row for row in rows if row)
    except csv.Error:
        yield [""]


def _sniffed(header: str) -> str:
    """What stands between the names of the first line: the one of the known delimiters that is there most."""
    quoted = header.split('"')[::2]
    counts = {delimiter: sum(part.count(delimiter) for part in quoted) for delimiter in DELIMITERS}
    return max(counts, key=lambda delimiter: counts[delimiter])
