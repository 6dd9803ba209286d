"""Delimited text by Arrow's reader, every column as text; the lines of bad rows are looked up when needed."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.datasets.tables.sources.batch import Batch, Source, check_names
from recsuite.datasets.tables.sources.text import REPLACED, REPLACEMENT, TextFile, explained_damage
from recsuite.errors import UserError, counted, printable

if TYPE_CHECKING:
    from recsuite.datasets.tables.sources.file import File

# Of bytes that Arrow parses at once; no row may be longer.
BLOCK_BYTES = 2**23
# Of two that fit, the first.
DELIMITERS = (",", "\t", ";", "|", "::", " ")
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar", "::": "two colons", " ": "a blank"}
# Rows by which delimiter and header are judged.
LOOKED_AT = 20
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
# What numbers of this many digits count is time, in seconds or parts of them.
DIGITS_OF_TIMES = 9
# As RecBole writes names: https://recbole.io/docs/user_guide/data/atomic_files.html
TYPED_NAME = re.compile(r"(.+):(?:token|token_seq|float|float_seq)")
# What Arrow calls a column that has no name in the file.
UNNAMED = "\x1f"
# What Arrow says of a row that is longer than a block.
STRADDLING = "straddling"


class Delimited(Source):
    """A text file of rows with a delimiter, whose first row names the columns, or `file.columns` does."""

    unit = "line"

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self._text, delimiter = TextFile(file), file.delimiter
        if delimiter == ",":
            delimiter = _found_delimiter(self._text.head.decode("utf-8", "ignore"))
            if delimiter != ",":
                self.notes.append(f"{file} has {NAMES[delimiter]} between its columns")
        self._delimiter, self._replaced = delimiter, ""
        if delimiter in REPLACED:
            self._text.close()
            self._text = TextFile(file, delimiter)
            self._delimiter, self._replaced = REPLACEMENT.decode(), delimiter
        head = self._text.head.decode("utf-8", "ignore")
        reader = csv.reader(io.StringIO(head, newline=""), delimiter=self._delimiter)
        rows = _rows(reader)
        first = next(rows, [])
        self._num_header_lines = 0 if file.columns else reader.line_num
        sample = [*itertools.islice(rows, LOOKED_AT)]
        if not first:
            raise UserError(f"{file} has no first line with the names of its columns; add one.")
        # Of a header alone Arrow says that it is no table.
        self._has_rows = bool(file.columns or sample)
        if file.columns and len(file.columns) != len(first):
            raise UserError(
                f"{file} has {counted(len(first), 'column')}, and columns under [files] names "
                f"{len(file.columns)}; name each of them."
            )
        if not file.columns and _is_data(first, sample):
            raise UserError(
                f"{file} has no line with the names of its columns: its first line looks like data "
                f"({printable(delimiter.join(first)[:80])!r}); write columns = "
                f"{json.dumps(_suggested(first))} under [files] of schema.toml, with the right name in each "
                "place."
            )
        self._all_names = [*(file.columns or _plain_names(first))]
        self._names = [name for name in self._all_names if not name.startswith(UNNAMED)]
        if len(self._names) < len(self._all_names):
            number = len(self._all_names) - len(self._names)
            self.notes.append(f"{file} has {counted(number, 'column')} without a name, skipped")
        check_names(file, self._names)
        # The numbers of the rows that are left out.
        self._invalid: list[int] = []

    @property
    def names(self) -> list[str]:
        """The names of the columns that have one."""
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
            arrow_csv.ReadOptions(
                use_threads=False,
                block_size=BLOCK_BYTES,
                column_names=self._all_names,
                skip_rows=self._num_header_lines,
            ),
            arrow_csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=True, invalid_row_handler=self._note_invalid
            ),
            arrow_csv.ConvertOptions(
                check_utf8=False,
                column_types={name: pyarrow.string() for name in columns},
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
        row = batch.first + place + 1 + (not self.file.columns)
        for invalid in self._invalid:
            if invalid > row:
                break
            row += 1
        return self._line_of(row)

    def _line_of(self, wanted: int) -> int:
        """The line on which a row begins, both counted from 1; empty lines are no rows."""
        text = TextFile(self.file, self._replaced)
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


def _rows(reader: Any) -> Iterator[list[str]]:
    """Rows of Python's reader, without empty lines; a field that is too long for it is a row of its own."""
    try:
        yield from (row for row in reader if row)
    except csv.Error:
        yield [""]


def _found_delimiter(head: str) -> str:
    """Find the delimiter that all first lines have equally often, else the most frequent one of the first."""
    # What stands in quotes separates nothing. The last line may be cut off.
    lines = [re.sub(r'"[^"]*"', "", line) for line in head.splitlines()[: LOOKED_AT + 1] if line.strip()]
    lines = lines[:-1] if len(lines) > LOOKED_AT else lines
    counts = {mark: [_num_delimiters(line, mark) for line in lines] for mark in DELIMITERS}
    same = {mark: found[0] for mark, found in counts.items() if len({*found}) == 1 and found[0]}
    # Blanks stand within texts too, and are taken where nothing else fits.
    plain = {mark: number for mark, number in same.items() if mark != " "}
    if len(lines) > 1 and (plain or same):
        return max(plain or same, key=lambda mark: (plain or same)[mark])
    first = {mark: found[0] for mark, found in counts.items() if found and mark != " "}
    return max(first, key=lambda mark: first[mark], default=",")


def _num_delimiters(line: str, mark: str) -> int:
    return len(line.split()) - 1 if mark == " " else line.count(mark)


def _is_data(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return true for a row of values: a number over numbers, or fields that all look like those below."""
    columns = [[row[place] for row in rows if place < len(row)] for place in range(len(first))]
    is_number = [
        bool(NUMBER.fullmatch(field)) and any(NUMBER.fullmatch(value) for value in column)
        for field, column in zip(first, columns, strict=True)
    ]
    forms = [re.sub(r"\d+", "9", field) for field in first]
    is_alike = [
        "9" in form and form in {re.sub(r"\d+", "9", value) for value in column}
        for form, column in zip(forms, columns, strict=True)
    ]
    return any(is_number) or all(is_alike)


def _suggested(first: Sequence[str]) -> list[str]:
    """Names for the columns of a file without a header, for a person to correct."""
    free, names = ["user", "item", "rating"], []
    for place, field in enumerate(first, start=1):
        digits = re.sub(r"\D", "", field)
        is_time = re.match(r"\d{4}-\d\d-\d\d", field) or (
            NUMBER.fullmatch(field) and len(digits) >= DIGITS_OF_TIMES
        )
        if is_time and "timestamp" not in names:
            names.append("timestamp")
        elif free and (free[0] != "rating" or NUMBER.fullmatch(field)):
            names.append(free.pop(0))
        else:
            names.append(f"column_{place}")
    return names


def _plain_names(header: Sequence[str]) -> list[str]:
    """The names of a header: those of RecBole without their types, and a mark for each that is empty."""
    typed = [TYPED_NAME.fullmatch(name) for name in header]
    if all(typed):
        return [match[1] for match in typed if match]
    return [name if name.strip() else f"{UNNAMED}{place}" for place, name in enumerate(header)]
