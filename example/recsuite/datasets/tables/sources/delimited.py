"""CSV and TSV: by Arrow's reader, every column as text; the lines of bad rows are looked up when needed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.datasets.tables.sources.batch import Batch, Source, check_names
from recsuite.datasets.tables.sources.text import TextFile, explained_damage
from recsuite.errors import UserError, counted, printable

if TYPE_CHECKING:
    from recsuite.datasets.tables.sources.file import File

# Of bytes that Arrow parses at once; no row may be longer.
BLOCK_BYTES = 2**23
# Blanks come last: they stand in names and values too.
NAMES = {",": "a comma", "\t": "a tab", ";": "a semicolon", "|": "a bar", "::": "::", " ": "blanks"}
# Stands for separators that are no single character: no text has it.
JOINT = "\x1f"
# Of the first rows, so many have as many fields as the first one.
SNIFFED_ROWS, LEAST_ALIKE = 50, 0.8
# How RecBole writes the type of a column behind its name.
TYPED = re.compile(r"(.+):(?:token|token_seq|float|float_seq)")
VALUE = re.compile(r"\s*(?:[+-]?\d+\.?\d*(?:[eE][+-]?\d+)?|\d{4}-\d{2}-\d{2}.*)\s*")
# Seconds to nanoseconds since 1970.
UNIX = re.compile(r"\d{9,19}(?:\.\d+)?|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*")
# Of a line, in a message.
SHOWN = 100
# With more columns, blocks are as large as Arrow asks for.
WIDE = 500
# What Arrow says of a row that is longer than a block.
STRADDLING = "straddling"


class Delimited(Source):
    """A file of CSV or TSV, whose first row names the columns."""

    unit = "line"

    def __init__(self, file: File) -> None:
        super().__init__(file)
        text = TextFile(file)
        head = text.head.decode("utf-8", "ignore")
        self._mark = file.delimiter or _sniffed(head)
        # Names of all its columns leave no doubt of what is between them.
        if self._mark not in (",", file.delimiter) and not file.columns:
            self.notes.append(f"{file} has {NAMES[self._mark]} between its columns")
        # Each batch costs time for each column.
        text.is_wide = head.partition("\n")[0].count(self._mark) > WIDE
        self._text = _one_character(text, self._mark)
        self._delimiter = JOINT if self._mark in ("::", " ") else self._mark
        rows = _rows(head, self._mark)
        first = next(rows, [])
        if not any(first):
            what = "" if file.columns else " with the names of its columns"
            raise UserError(f"{file} has no first line{what}; add one.")
        self._has_header = not file.columns or _letters(first) == _letters(file.columns)
        names, second = [*(file.columns or first)], next(rows, [])
        # A first row that differs from the second as well is a bad one.
        if len(names) not in (len(first), len(second)):
            raise UserError(
                f"columns under [files] of schema.toml must name each of the {len(first)} columns of {file}, "
                f"and names {len(names)}; if that is another table than the events, write events = "
                f'"FILE" there too. Line 1 is {printable(self._mark.join(first)[:SHOWN])!r}.'
            )
        # Of a header alone Arrow says that it is no table.
        self._has_rows = bool(second) or not self._has_header
        if not file.columns and _is_data(first, second):
            raise UserError(_of_data(file, first, self._mark))
        if all(TYPED.fullmatch(name) for name in names):
            names = [name.rpartition(":")[0] for name in names]
        self._names = [name for name in names if name.strip()]
        if len(self._names) < len(names):
            number = counted(len(names) - len(self._names), "column without a name", "columns without a name")
            self.notes.append(f"{file}: {number} skipped")
        check_names(file, self._names)
        # Arrow asks for a name of each.
        self._all_names = [name if name.strip() else f"{JOINT}{place}" for place, name in enumerate(names)]
        # The numbers of the rows that are left out.
        self._invalid: list[int] = []

    @property
    def names(self) -> list[str]:
        """Those of the first row, or of the schema, without the unnamed ones."""
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
                skip_rows_after_names=int(self._has_header),
            ),
            arrow_csv.ParseOptions(
                delimiter=self._delimiter,
                quote_char=False if self._mark == "::" else '"',
                newlines_in_values=True,
                invalid_row_handler=self._note_invalid,
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
        self.bad.append(BadRow(number, row.text[:200].replace(self._delimiter, self._mark), reason))
        return "skip"

    def number_of(self, batch: Batch, place: int) -> int:
        """The line on which a row begins."""
        # The header is a row; so are those that were left out.
        row = batch.first + place + 1 + self._has_header
        for invalid in self._invalid:
            if invalid > row:
                break
            row += 1
        return self._line_of(row)

    def _line_of(self, wanted: int) -> int:
        """The line on which a row begins, both counted from 1; empty lines are no rows."""
        text = _one_character(TextFile(self.file), self._mark)
        lines = io.TextIOWrapper(io.BufferedReader(_Raw(text)), encoding="utf-8", newline="")
        rows = csv.reader(lines, delimiter=self._delimiter, quoting=_quoting(self._mark))
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


class _Joined:
    """A text whose separators are several characters, with one in their place."""

    def __init__(self, text: TextFile, mark: str) -> None:
        self._text, self._mark, self._ready, self._rest = text, mark, b"", b""
        self.closed = False

    @property
    def done(self) -> int:
        return self._text.done

    def read(self, size: int) -> bytes:
        while not self._ready:
            block = self._text.read(BLOCK_BYTES)
            lines, end, rest = (self._rest + block).rpartition(b"\n")
            self._ready, self._rest = (lines + end, rest) if block else (self._rest, b"")
            self._ready = joined(self._ready.decode(), self._mark).encode()
            if not block:
                break
        found, self._ready = self._ready[:size], self._ready[size:]
        return found

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self._text.close()


def joined(text: str, mark: str) -> str:
    """Whole lines with one character between their columns."""
    if mark == "::":
        return text.replace(mark, JOINT)
    text = re.sub("^[ \t]+|[ \t]+(?=\r?$)", "", text, flags=re.MULTILINE)
    if '"' not in text:
        return re.sub("[ \t]+", JOINT, text)
    # Blanks within quotes are of a value.
    return re.sub('("[^"\n]*")|[ \t]+', lambda found: found[1] or JOINT, text)


def _one_character(text: TextFile, mark: str) -> Any:
    return _Joined(text, mark) if mark in ("::", " ") else text


def _quoting(mark: str) -> Literal[0, 3]:
    return csv.QUOTE_NONE if mark == "::" else csv.QUOTE_MINIMAL


def _rows(head: str, mark: str) -> Iterator[list[str]]:
    """The rows of a text, without empty lines; a field that Python finds too long is a row of its own."""
    if mark in ("::", " "):
        head, delimiter = joined(head, mark), JOINT
    else:
        delimiter = mark
    rows = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, quoting=_quoting(mark))
    try:
        yield from (row for row in rows if row)
    except csv.Error:
        yield [""]


def _sniffed(head: str) -> str:
    """What stands between the columns: of the separators that most of the first rows have as often as the
    first one, that which makes the most columns; blanks where there is no other.
    """
    # A row may be a megabyte; the last one may be cut.
    lines = head[: 2**20].lstrip("\r\n").split("\n", SNIFFED_ROWS)
    head = "\n".join(lines[: max(1, min(SNIFFED_ROWS, len(lines) - 1))])
    found: dict[str, tuple[bool, int]] = {}
    for mark in NAMES:
        if mark == " " and any(number > 1 for _, number in found.values()):
            continue
        counts = [len(row) for row in _rows(head, mark)] or [0]
        found[mark] = (counts.count(counts[0]) >= LEAST_ALIKE * len(counts) and counts[0] > 1, counts[0])
    return max(found, key=lambda mark: found[mark])


def _letters(names: Sequence[str]) -> list[str]:
    """Names as they are the same to a reader: user_id and userId."""
    return [re.sub(r"[\W_]", "", name).lower() for name in names]


def _is_data(first: list[str], second: list[str]) -> bool:
    """Whether a first row has numbers or times where the second has, so that it names no columns."""
    values = [bool(VALUE.fullmatch(field)) for field in first]
    numbers = [field for field, is_value in zip(first, values, strict=True) if is_value]
    # Beside names, columns of vectors, or of years, are called by numbers that count.
    if len(numbers) > 1 and not all(values) and all(field.isdecimal() for field in numbers):
        counted_on = [*range(int(numbers[0]), int(numbers[0]) + len(numbers))]
        if [int(field) for field in numbers] == counted_on:
            return False
    return bool(numbers) and values == [bool(VALUE.fullmatch(field)) for field in second or first]


def _of_data(file: File, first: list[str], mark: str) -> str:
    """What to say of a file without a header, with names of its columns that may be right."""
    names = ["user", "item"][: len(first)]
    for place, field in enumerate(first[2:], start=3):
        name = "timestamp" if UNIX.fullmatch(field) else "rating" if VALUE.fullmatch(field) else ""
        names.append(name if name and name not in names else f"column_{place}")
    return (
        f"Line 1 of {file} looks like data, not like the names of columns: "
        f"{printable(mark.join(first)[:SHOWN])!r}. Write the names of its {len(first)} columns in their "
        f"order under [files] of schema.toml, such as columns = {json.dumps(names)} (user_columns and "
        "item_columns of other tables); or add a line of names."
    )
