"""Read the rows of a file of any format, batch by batch: only the wanted columns, in bounded memory.

Text is decompressed and converted to UTF-8 without a byte order mark; its bytes are counted. Arrow reads CSV
and TSV, every column as text; the lines of bad rows are looked up when needed. Parquet and Arrow files have
typed columns. An extra reads JSON lines.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow
from pyarrow import csv as arrow_csv
from pyarrow import ipc, parquet, types

from recsuite.datasets.tables.files import MISSING_PARTITION, File, Tables
from recsuite.datasets.tables.headers import NAMED_ROWS, is_data, lengths
from recsuite.errors import UserError, counted, printable
from recsuite.hooks import extra, reader_of
from recsuite.places import is_remote, open_raw

# Characters of a row in a message.
MOST_SHOWN = 120


class BadRow(NamedTuple):
    """Row that cannot be read: the number of its line or row, counted from 1, its text, and the reason."""

    number: int
    content: str
    reason: str


@dataclass
class Faults:
    """Number of bad rows of a file, and the first of them. unit: of the row numbers, "line" or "row"."""

    unit: str = "row"
    number: int = 0
    first: BadRow | None = None

    def add(self, rows: Sequence[BadRow], number: int) -> None:
        """Count bad rows. rows: the known ones among them."""
        self.number += number
        self.first = min([*rows, *([self.first] if self.first else [])], default=None)

    def refuse(self, file: object) -> None:
        """Refuse the first bad row, if there is one.

        Raises:
            UserError: names it, and says what helps.
        """
        if self.first:
            raise UserError(
                f"Cannot read {self._described(file)}. Fix: correct the file, or give --bad_rows skip."
            )

    def accepted(self, file: object, num_rows: int, most: float) -> list[str]:
        """Return notes on the skipped rows of a file with so many rows.

        Raises:
            UserError: where they are more than a share `most`.
        """
        if not self.first:
            return []
        if self.number > most * num_rows:
            raise UserError(
                f"Cannot read {self._described(file)}; with it {self.number:,} of {num_rows:,} rows of the "
                f"file cannot be read, and --max_bad_rows {most:g} allows {int(most * num_rows):,}. Fix: "
                "correct the file, or give a larger --max_bad_rows."
            )
        return [
            f"skipped {counted(self.number, 'bad row')} of {Path(str(file)).name}, the first being "
            f"{self.unit} {self.first.number} ({self.first.reason})"
        ]

    def _described(self, file: object) -> str:
        """Describe the first bad row, with the reason."""
        assert self.first is not None
        number, content, reason = self.first
        shown = f": {printable(content[:MOST_SHOWN])!r}" if content else ""
        return f"{file}, {self.unit} {number}: {reason}{shown}"


@dataclass(frozen=True)
class FileBatch:
    """Rows of a file, in order.

    first: number of rows before these. num_bad: number of rows of the file that could not be split so far.
    lines: line of each row, int64; None if lines are looked up only for bad rows.
    """

    columns: pyarrow.RecordBatch
    first: int
    num_bad: int = 0
    lines: np.ndarray | None = None


class FileReader:
    """Reader of one file: its columns, then batches of the wanted ones.

    names: the columns of the file itself. bad: the rows that could not be split into columns, in order; it
    grows with the batches.
    """

    # Unit of the numbers in messages: text has lines, the other formats have rows.
    unit = "row"

    def __init__(self, file: File) -> None:
        self.file, self._done = file, 0
        self.names: list[str] = []
        self.bad: list[BadRow] = []
        self.notes: list[str] = []
        # By the name of a column, as the file itself says.
        self.types: dict[str, str] = {}

    @property
    def done(self) -> int:
        """Number of its bytes that were read, estimated for a file with typed columns."""
        return self._done

    def batches(self, columns: Sequence[str]) -> Iterator[FileBatch]:
        """Yield the rows with only these columns of the file."""
        raise NotImplementedError

    def number_of(self, batch: FileBatch, place: int) -> int:
        """Return the number of the line or row at a position of a batch, counted from 1."""
        return batch.first + place + 1 if batch.lines is None else int(batch.lines[place])

    def close(self) -> None:
        """Close the file."""


def check_names(file: File, names: Sequence[str]) -> None:
    """Refuse columns with the same name or without one.

    Raises:
        UserError: names the first that is there twice, or has no name at all.
    """
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise UserError(
            f"Cannot read {file}: it has two columns with the name {twice!r}. Fix: rename one of them."
        )


BLOCK_BYTES = 2**20
# Bytes of a text in which its first line is searched.
HEAD_BYTES = 2**23
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
# First bytes of files of unsupported formats.
FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"BZh": "compressed by bzip2",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"FEA1": "a Feather file of version 1",
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "text in UTF-32"),
}
# Encodings that a schema.toml may name; the most common besides UTF-8 first.
ENCODINGS = ("latin-1", "utf-16", "utf-8")
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@contextlib.contextmanager
def explained_damage(file: File) -> Iterator[None]:
    """Turn any error of a reader into a UserError of one sentence.

    Raises:
        UserError: names the file.
    """
    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, MemoryError, OverflowError) as error:
        reason = printable(str(error).split("\n")[0].rstrip(".")) or type(error).__name__
        if STRADDLING in reason:
            reason = f"a row has more than {CSV_BLOCK_BYTES // 2**20} MiB, as when a quote is not closed"
        raise UserError(
            f"Cannot read {file} as {file.format}: {reason}. Fix: write it again, or remove it."
        ) from error


class FilePart(io.RawIOBase):
    """Part of a local text that grows: its first line if that is a header, and some bytes."""

    def __init__(self, file: File) -> None:
        assert file.part is not None
        self._file, (begin, end) = io.FileIO(file.path), file.part
        header = header_of(file)
        self._spans = [(0, len(header)), (max(begin, len(header)), end)]
        self._file.seek(0)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer; return their number, 0 at the end."""
        while self._spans and self._file.tell() >= self._spans[0][1]:
            del self._spans[0]
            if self._spans:
                self._file.seek(self._spans[0][0])
        if not self._spans:
            return 0
        left = self._spans[0][1] - self._file.tell()
        return self._file.readinto(memoryview(buffer)[:left]) or 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def can_be_cut(file: File) -> bool:
    """Return True for a text of this machine whose line ends are a byte, so that a part of it can be read."""
    if not file.is_of_lines or is_remote(file.path) or file.encoding.lower().startswith("utf-16"):
        return False
    with Path(file.path).open("rb") as opened_file:
        start = opened_file.read(BLOCK_BYTES)
    # Its name need not tell that it is packed, or of another encoding.
    return not start.startswith((*PACKED, *UTF16)) and (b"\n" in start or b"\r" not in start)


def header_of(file: File) -> bytes:
    """Return the first line of a text whose columns it names; b"" for others."""
    if not file.is_text or file.columns:
        return b""
    with Path(file.path).open("rb") as opened_file:
        return opened_file.readline(HEAD_BYTES)


class CountedFile(io.BufferedReader):
    """Bytes of a local or remote file, with the number of those that were read."""

    def __init__(self, file: File) -> None:
        super().__init__(FilePart(file) if file.part else open_raw(file.path), BLOCK_BYTES)
        self.done = 0

    def read(self, size: int | None = -1) -> bytes:
        """Read up to `size` bytes."""
        block = super().read(size)
        self.done += len(block)
        return block


class TextFile:
    """Text of a file in blocks of UTF-8, without a byte order mark. Not for random access.

    is_wide: if true, blocks have the requested size, which takes more memory.

    Raises:
        UserError: for a file that is empty, not text, or not in its encoding.
    """

    def __init__(self, file: File) -> None:
        self.file, self.closed, self.is_wide = file, False, False
        with explained_damage(file):
            self._counted = CountedFile(file)
        start = self._counted.peek(8)
        if not start:
            raise UserError(f"Cannot read {file}: it is empty. Fix: write it again, or remove it.")
        packed = next((kind for mark, kind in PACKED.items() if start.startswith(mark)), "")
        if file.compression and not packed:
            raise UserError(
                f"Cannot read {file}: it is not packed with {file.compression}, as the end of its name says. "
                "Fix: give its name the right end, or write it again."
            )
        self._source: Any = self._unpacked(packed) if packed else self._counted
        # UTF-8's byte order mark is not text in any other encoding either.
        self._rest = self._raw_block().removeprefix(codecs.BOM_UTF8)
        self._decoder = self._decoder_of(self._rest)
        # The byte order mark of any encoding becomes this one.
        self._rest = self._decoded(self._rest).removeprefix(codecs.BOM_UTF8)
        while b"\n" not in self._rest and len(self._rest) < HEAD_BYTES and (block := self._raw_block()):
            self._rest += self._decoded(block)

    @property
    def head(self) -> bytes:
        """Beginning of the text, with all of the first line up to 8 MiB; `read` still returns it."""
        return self._rest

    @property
    def done(self) -> int:
        """Number of bytes of the (compressed) file that were read."""
        return self._counted.done

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, none at the end; -1 reads the rest."""
        if size < 0:
            return b"".join(iter(lambda: self.read(BLOCK_BYTES), b""))
        while not self._rest or (self.is_wide and len(self._rest) < size):
            block = self._raw_block()
            self._rest += self._decoded(block)
            if not block:
                break
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self._counted.close()

    def _unpacked(self, kind: str) -> Any:
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(self._counted, mode="r"), kind)

    def _raw_block(self) -> bytes:
        with explained_damage(self.file):
            return bytes(self._source.read(BLOCK_BYTES))

    def _decoder_of(self, start: bytes) -> codecs.IncrementalDecoder:
        """Return the decoder for the bytes."""
        what = next((what for mark, what in FOREIGN.items() if start.startswith(mark)), "")
        if what:
            text = "convert it with iconv -f UTF-32 -t UTF-8"
            fix = text if "UTF-32" in what else "give its name the right end, or unpack it"
            raise UserError(f"Cannot read {self.file}: it is {what}. Fix: {fix}.")
        name = "utf-16" if start.startswith(UTF16) else self.file.encoding
        # Without a mark, the first character shows the byte order: it is an ASCII one.
        if name.lower().replace("_", "-") == "utf-16" and not start.startswith(UTF16):
            name = "utf-16-be" if start.startswith(b"\0") else "utf-16-le"
        try:
            return codecs.getincrementaldecoder(name)()
        except LookupError:
            raise UserError(
                f"{self.file.encoding!r} is an unknown encoding; name utf-8, utf-16 or latin-1 under [files]."
            ) from None

    def _decoded(self, block: bytes) -> bytes:
        try:
            # UTF-8 is decoded too: Arrow's readers check none or only some of the columns.
            text = self._decoder.decode(block, final=not block)
        except UnicodeError as error:
            others = " or ".join(f'encoding = "{name}"' for name in ENCODINGS if name != self.file.encoding)
            raise UserError(
                f"Cannot read {self.file}: it is not text in {self.file.encoding} "
                f"({getattr(error, 'reason', error)}). Fix: write {others} under [files] of schema.toml."
            ) from None
        if "\0" in text:
            raise UserError(
                f"Cannot read {self.file}: it holds zero bytes, as a damaged file does, or one in UTF-16 "
                'without a mark. Fix: write the file again, or encoding = "utf-16" under [files].'
            )
        return text.encode()


class TextReader(FileReader):
    """Reader of a text; its rows have the numbers of their lines."""

    unit = "line"

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self._text: Any = TextFile(file)

    @property
    def done(self) -> int:
        """Number of its bytes that were read."""
        return self._text.done

    @functools.cached_property
    def lines_before(self) -> int:
        """Number of lines between the header and the part that is read."""
        if self.file.part is None:
            return 0
        header, begin = header_of(self.file), self.file.part[0]
        with Path(self.file.path).open("rb") as opened_file:
            blocks = iter(lambda: opened_file.read(min(BLOCK_BYTES, begin - opened_file.tell())), b"")
            return sum(block.count(b"\n") for block in blocks) - len(header[-1:])

    def close(self) -> None:
        """Close the file."""
        self._text.close()


def whole_lines(text: Any, size: int, is_csv: bool = True) -> Iterator[bytes]:
    r"""Yield blocks of whole lines, of about this size; the last line may have no line end.

    is_csv: if true, lines may also end with only "\r".
    """
    rest = b""
    while block := text.read(size):
        rest += block
        end = rest.rfind(b"\n") + 1
        if is_csv and not end:
            # A final "\r" may be half of "\r\n".
            end = rest.rfind(b"\r", 0, -1) + 1
        lines, rest = rest[:end], rest[end:]
        if lines:
            yield lines
        elif len(rest) > size:
            raise ValueError(f"a line has more than {size // 2**20} MiB")
    if rest:
        yield rest


# Bytes that Arrow parses at once; no row may be longer.
CSV_BLOCK_BYTES = 2**23
# Separators of several characters: blanks, and one of old MovieLens sets.
LONG_MARKS = ("::", " ")
# Replaces them: no text has it.
JOINT = "\x1f"
# Number of first rows to examine, and the share of them with as many fields as the first.
SNIFFED_ROWS, LEAST_ALIKE = 50, 0.8
# RecBole writes the type of a column after its name.
TYPED = re.compile(r"(.+):(token|token_seq|float|float_seq)")
# Characters of a line in a message.
CSV_SHOWN = 100
# With more columns, blocks have the size that Arrow requests.
WIDE = 500
# Word in Arrow's error for a row that is longer than a block.
STRADDLING = "straddling"


class NoHeaderError(UserError):
    """Text without a line of names. row: its first line."""

    def __init__(self, message: str, row: Sequence[str]) -> None:
        super().__init__(message)
        self.row = row


class Delimited(TextReader):
    """CSV or TSV file, whose first row names the columns."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        text = self._text
        head = text.head.decode("utf-8", "ignore")
        self._mark = file.delimiter or _separator_of(head)
        # If all columns have names, the separator is certain.
        if self._mark not in (",", file.delimiter) and not file.columns:
            self.notes.append(f"{file} has {extra('dialects').NAMES[self._mark]} between its columns")
        # A batch costs time for each column.
        text.is_wide = head.partition("\n")[0].count(self._mark) > WIDE
        self._text = _one_character(text, self._mark)
        self._delimiter = JOINT if self._mark in LONG_MARKS else self._mark
        rows = [*islice(rows_in(head, self._mark), SNIFFED_ROWS)]
        first, second = [*rows, [], []][:2]
        if not any(first):
            what = "" if file.columns else " with the names of its columns"
            raise UserError(f"Cannot read {file}: it has no first line{what}. Fix: add one.")
        self._has_header = not file.columns or _letters(first) == _letters(file.columns)
        # The last row may be incomplete.
        if ends := lengths(rows[: max(1, len(rows) - 1)]):
            raise UserError(
                f"Cannot read {file}: its lines have from {ends[0]} to {ends[1]} columns, as where a user "
                "and all of its items are on a line. Fix: write one line for each user and item, below a "
                "first line user,item; where another character is between the columns, write delimiter under "
                "[files] of schema.toml; where it is no table, move it to another folder."
            )
        names = [*(file.columns or first)]
        # A first row whose width also differs from the second is a bad row.
        if len(names) not in (len(first), len(second)):
            raise UserError(
                f"columns under [files] of schema.toml must name each of the {len(first)} columns of {file}, "
                f"and names {len(names)}; if that is another table than the events, write events = "
                f'"FILE" there too. Line 1 is {printable(self._mark.join(first)[:CSV_SHOWN])!r}.'
            )
        if not file.columns:
            # The last row may be incomplete.
            whole = rows_in(head[: head.rfind("\n") + 1], self._mark)
            names += self._unnamed(first, [row for row in islice(whole, 1, SNIFFED_ROWS) if any(row)])
        # Arrow refuses a file with only a header.
        self._has_rows = bool(second) or not self._has_header
        if not file.columns and is_data(first, second):
            message = _of_data(file, [*islice(rows_in(head, self._mark), NAMED_ROWS)], self._mark)
            raise NoHeaderError(message, first)
        self.first_row = second
        typed = [match for name in names if (match := TYPED.fullmatch(name))]
        if len(typed) == len(names):
            names = [match[1] for match in typed]
            self.types = {match[1]: match[2] for match in typed}
        self.names = [name for name in names if name.strip()]
        if len(self.names) < len(names):
            number = counted(len(names) - len(self.names), "column without a name", "columns without a name")
            self.notes.append(f"{file}: {number} skipped")
        check_names(file, self.names)
        # Arrow requires a name for each column.
        self._all_names = [name if name.strip() else f"{JOINT}{place}" for place, name in enumerate(names)]
        # Numbers of the skipped rows.
        self._invalid: list[int] = []

    def batches(self, columns: Sequence[str]) -> Iterator[FileBatch]:
        """Yield the rows with the right number of fields."""
        first = 0
        with explained_damage(self.file):
            for batch in self._reader(columns) if self._has_rows else ():
                if batch.num_rows:
                    yield FileBatch(batch, first, len(self.bad))
                first += batch.num_rows

    def _unnamed(self, first: list[str], rows: list[list[str]]) -> list[str]:
        """Return empty names for the fields of the first rows beyond the header, if all of them are empty."""
        num_alike = sum(len(row) == len(first) for row in rows)
        if not rows or num_alike >= (1 - LEAST_ALIKE) * len(rows):
            return []
        widest = max(map(len, rows))
        if all(len(first) < len(row) == widest and not any(row[len(first) :]) for row in rows):
            return [""] * (widest - len(first))
        shown = printable(self._mark.join(first)[:CSV_SHOWN])
        raise UserError(
            f"Cannot read {self.file}, line 1: {num_alike} of the {len(rows)} rows below it have as many "
            f"fields ({len(first)}), so it does not name the columns: {shown!r}. Fix: remove each line above "
            "the names of the columns, and write a name for each column."
        )

    def _reader(self, columns: Sequence[str]) -> Any:
        """Return Arrow's reader of the rows."""
        return arrow_csv.open_csv(
            pyarrow.PythonFile(self._text, mode="r"),
            # With threads, rows have no numbers. The other core parses the columns meanwhile.
            arrow_csv.ReadOptions(
                use_threads=False,
                block_size=CSV_BLOCK_BYTES,
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
                column_types={name: pyarrow.string() for name in self.names},
                include_columns=list(columns),
                strings_can_be_null=False,
            ),
        )

    def _note_invalid(self, row: Any) -> str:
        """Record a row with another number of fields, and skip it."""
        reason = f"{counted(row.actual_columns, 'field')} instead of {row.expected_columns}"
        # Such a row may contain many other lines.
        if row.text.count('"') % 2:
            reason += ", and a quote that is not closed"
        # Its line is looked up when a message needs it.
        self._invalid.append(row.number)
        number = self._line_of(row.number) + self.lines_before if not self.bad else row.number
        self.bad.append(BadRow(number, row.text[:200].replace(self._delimiter, self._mark), reason))
        return "skip"

    def number_of(self, batch: FileBatch, place: int) -> int:
        """Return the line on which a row begins."""
        # The header and the skipped rows count as rows.
        row = batch.first + place + 1 + self._has_header
        for invalid in self._invalid:
            if invalid > row:
                break
            row += 1
        return self._line_of(row) + self.lines_before

    def _line_of(self, wanted: int) -> int:
        """Return the line on which a row begins, both counted from 1; empty lines are not rows."""
        blocks = whole_lines(_one_character(TextFile(self.file), self._mark), CSV_BLOCK_BYTES)
        lines = (line for block in blocks for line in io.StringIO(block.decode(), newline=""))
        rows = csv.reader(lines, delimiter=self._delimiter, quoting=_quoting(self._mark))
        number, before = 0, 0
        # Python's reader refuses a field of a megabyte, and a block without a line end has no whole lines;
        # then the row number is returned.
        with contextlib.suppress(csv.Error, ValueError):
            for row in rows:
                number += bool(row)
                if number == wanted:
                    return before + 1
                before = rows.line_num
        return wanted


class _Joined:
    """Text whose separators of several characters are replaced by one character."""

    def __init__(self, text: TextFile, mark: str) -> None:
        self._text, self._ready, self.closed = text, b"", False
        lines = whole_lines(text, CSV_BLOCK_BYTES)
        self._blocks = (_joined(block.decode(), mark).encode() for block in lines)

    @property
    def done(self) -> int:
        """Number of bytes of the file that were read."""
        return self._text.done

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes, none at the end."""
        self._ready = self._ready or next(self._blocks, b"")
        block, self._ready = self._ready[:size], self._ready[size:]
        return block

    def close(self) -> None:
        """Close the file."""
        self.closed = True
        self._text.close()


def _joined(text: str, mark: str) -> str:
    """Return whole lines with a single character between their columns."""
    if mark == "::":
        return text.replace(mark, JOINT)
    text = re.sub("^[ \t]+|[ \t]+(?=\r?$)", "", text, flags=re.MULTILINE)
    if '"' not in text:
        return re.sub("[ \t]+", JOINT, text)
    # Blanks within quotes belong to a value.
    return re.sub('("[^"\n]*")|[ \t]+', lambda match: match[1] or JOINT, text)


def _one_character(text: TextFile, mark: str) -> Any:
    return _Joined(text, mark) if mark in LONG_MARKS else text


def _quoting(mark: str) -> Literal[0, 3]:
    return csv.QUOTE_NONE if mark == "::" else csv.QUOTE_MINIMAL


def rows_in(head: str, mark: str) -> Iterator[list[str]]:
    """Yield the rows of a text, without empty lines; a field too long for Python is a row of its own."""
    if mark in LONG_MARKS:
        head, delimiter = _joined(head, mark), JOINT
    else:
        delimiter = mark
    rows = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, quoting=_quoting(mark))
    try:
        yield from (row for row in rows if row)
    except csv.Error:
        yield [""]


def _separator_of(head: str) -> str:
    """Return the separator of the columns: a comma, unless the first line has another candidate."""
    line = re.split("[\r\n]", head.lstrip("\r\n"), maxsplit=1)[0]
    # An open quote continues on the next line.
    is_plain = line.count('"') % 2 == 0 and not any(mark in line for mark in ("\t", ";", "|", "::"))
    # A name may contain blanks, where commas are between names.
    if is_plain and (" " not in line or len(next(rows_in(line, ","), [])) > 1):
        return ","
    return str(extra("dialects").sniffed(head))


def _letters(names: Sequence[str]) -> list[str]:
    """Return names in a form that is equal for spellings such as user_id and userId."""
    return [re.sub(r"[\W_]", "", name).lower() for name in names]


def _of_data(file: File, rows: Sequence[list[str]], mark: str) -> str:
    """Return the message for a file without a header, with suggested names for its columns."""
    names, told = extra("names").suggested([row for row in rows if len(row) == len(rows[0])])
    return (
        f"Line 1 of {file} looks like data, not like the names of columns: "
        f"{printable(mark.join(rows[0])[:CSV_SHOWN])!r}. Write the names of its {len(names)} columns in "
        f"their order under [files] of schema.toml, such as columns = {json.dumps(names)} (user_columns and "
        f"item_columns of other tables), or add a line of names; {told}."
    )


def has_times(kind: Any) -> bool:
    """True for times and dates, and for lists and objects with some."""
    is_time = types.is_timestamp(kind) or types.is_date(kind)
    return is_time or any(has_times(kind.field(place).type) for place in range(kind.num_fields))


def without_times(kind: Any) -> Any:
    """Return a type with texts instead of all single values."""
    if types.is_struct(kind):
        return pyarrow.struct([part.with_type(without_times(part.type)) for part in kind])
    is_list = hasattr(kind, "value_type") and not types.is_dictionary(kind)
    return pyarrow.list_(without_times(kind.value_type)) if is_list else pyarrow.string()


def text_of(value: Any) -> str:
    """Return a value as a text, a list or an object as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


BATCH_ROWS = 2**18
# Compressed bytes of a column that are read at once; most bytes of all columns.
BUFFER_BYTES, MOST_BUFFERED = 2**20, 2**26
# Least rows of a row group of a Parquet file, on average, whose texts are read as codes.
LEAST_GROUP_ROWS = 2**13
# Bytes of the length of a text in a Parquet file.
LENGTH_BYTES = 4


class Typed(FileReader):
    """File with typed columns, of a format with its own compression."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        if file.compression:
            raise UserError(
                f"Cannot read {file}: it is a packed file of a format that is packed by itself. "
                "Fix: unpack it."
            )


class Parquet(Typed):
    """Parquet file, read row group by row group."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        with explained_damage(file):
            metadata = parquet.read_metadata(_opened(file))
            schema = metadata.schema.to_arrow_schema()
            self.names = [str(name) for name in schema.names]
            # Texts that the file stores as codes are read as codes, without a look-up for each row. Codes of
            # many small groups take long to bring together.
            is_large = metadata.num_rows >= LEAST_GROUP_ROWS * metadata.num_row_groups
            stored = _coded(metadata) if is_large else set()
            texts = [field.name for field in schema if types.is_string(field.type) and field.name in stored]
            self._parquet = parquet.ParquetFile(
                _opened(file),
                metadata=metadata,
                buffer_size=min(BUFFER_BYTES, max(1, MOST_BUFFERED // max(1, len(self.names)))),
                # It would keep the bytes of all row groups until the last one is read.
                pre_buffer=False,
                page_checksum_verification=True,
                read_dictionary=texts,
            )
        check_names(file, self.names)

    def batches(self, columns: Sequence[str]) -> Iterator[FileBatch]:
        """Yield the rows; one that cannot be read means that the file is damaged."""
        first, num_rows = 0, self._parquet.metadata.num_rows
        with explained_damage(self.file):
            # With two threads: columns are decompressed in parallel.
            for batch in self._parquet.iter_batches(BATCH_ROWS, columns=list(columns)):
                _check(batch)
                if batch.num_rows:
                    yield FileBatch(batch.select(list(columns)), first)
                first += batch.num_rows
                self._done = max(self.file.size, 0) * first // max(num_rows, 1)

    def close(self) -> None:
        """Close the file."""
        self._parquet.close(force=True)


class Arrow(Typed):
    """Arrow file (also Feather) or Arrow stream."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        with explained_damage(file):
            # Memory-mapped: only the wanted columns are read.
            self._source = _opened(file) if is_remote(file.path) else pyarrow.memory_map(file.path)
            start = self._source.read(8)
            self._source.seek(0)
            if start.startswith(b"FEA1"):
                raise UserError(
                    f"Cannot read {file}: it is Feather of version 1. "
                    "Fix: write it again with a newer library."
                )
            self._is_file = start.startswith(b"ARROW1")
            with self._opened(None) as reader:
                self.names = [str(name) for name in reader.schema.names]
        check_names(file, self.names)

    def batches(self, columns: Sequence[str]) -> Iterator[FileBatch]:
        """Yield the rows; one that cannot be read means that the file is damaged."""
        first = 0
        indices = [self.names.index(name) for name in columns]
        with explained_damage(self.file), self._opened(indices) as reader:
            number = reader.num_record_batches if self._is_file else 0
            parts = map(reader.get_batch, range(number)) if self._is_file else reader
            for place, whole in enumerate(parts, start=1):
                for start in range(0, whole.num_rows, BATCH_ROWS):
                    batch = whole.select(list(columns)).slice(start, BATCH_ROWS)
                    # The format has no checksums, and a wrong offset would crash the process.
                    _check(batch)
                    yield FileBatch(batch, first + start)
                first += whole.num_rows
                # A stream does not say how many batches it has.
                self._done = max(self.file.size, 0) * place // number if number else 0

    def _opened(self, indices: list[int] | None) -> Any:
        """Return Arrow's reader of the columns at these indices; None for all."""
        self._source.seek(0)
        options = ipc.IpcReadOptions(included_fields=indices)
        return (ipc.open_file if self._is_file else ipc.open_stream)(self._source, options=options)

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def _coded(metadata: Any) -> set[str]:
    """Return the columns whose texts a Parquet file stores as codes in all row groups."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    return {
        metadata.schema.column(place).path
        for place in range(metadata.num_columns)
        # A writer stops using codes when there are many. Then each text takes its length and its characters.
        if all(
            chunk.has_dictionary_page and chunk.total_uncompressed_size < LENGTH_BYTES * chunk.num_values
            for chunk in (group.column(place) for group in groups)
        )
    }


def _opened(file: File) -> Any:
    return pyarrow.PythonFile(open_raw(file.path), mode="r") if is_remote(file.path) else file.path


def _check(batch: pyarrow.RecordBatch) -> None:
    for column in batch.columns:
        column.validate(full=True)


# By the format of a file; `hooks.READERS` has those of extras.
READERS: dict[str, type[FileReader]] = {
    "csv": Delimited,
    "tsv": Delimited,
    "parquet": Parquet,
    "arrow": Arrow,
}
# Files of a table that are examined to find its columns: the first, the last and some between.
MOST_SAMPLED = 10
T = TypeVar("T")


def opened(file: File) -> contextlib.closing[FileReader]:
    """Open a file for reading, in a `with` statement.

    Raises:
        UserError: for a file that cannot be read, is damaged, or is not what its name says.
    """
    reader = READERS.get(file.format) or reader_of(file.format)
    return contextlib.closing(reader(file))


def names_of(source: FileReader) -> list[str]:
    """Return the columns of a file, then those of its partition folders."""
    partitions = [name for name, _ in source.file.partitions if name not in {*source.names}]
    check_names(source.file, partitions)
    return [*source.names, *partitions]


def batches(
    source: FileReader, columns: Sequence[str], optional: Collection[str] = ()
) -> Iterator[FileBatch]:
    """Yield the rows of a file with these columns, in this order; those of partitions are constant.

    optional: columns that are null if the file lacks them; this is noted.

    Raises:
        UserError: for another column that is missing, and a damaged file.
    """
    # A few lines of JSON may lack columns that others have.
    known = {*columns} if source.file.is_more else {*names_of(source)}
    missing = [column for column in columns if column not in known]
    needed = [column for column in missing if column not in optional]
    if needed:
        has = printable(", ".join(names_of(source)[:20]))
        raise UserError(f"{source.file} has no column {needed[0]!r}; it has {has}.")
    source.notes += [f"{source.file} has no column {column}: it is missing in its rows" for column in missing]
    of_file = {*source.names}
    own = [column for column in columns if column in of_file]
    # A file with none of the columns is read too, to count its rows.
    for batch in source.batches(own or source.names[:1] or columns):
        yield FileBatch(_completed(batch.columns, source, columns), batch.first, batch.num_bad, batch.lines)


def ahead(items: Iterator[T], pool: Executor) -> Iterator[T]:
    """Yield items, while a thread makes the next one; its exceptions are raised here. No item is None."""
    following = pool.submit(next, items, None)
    try:
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item
    finally:
        # The caller may close what the thread reads.
        wait([following])


def names_in(files: Sequence[File]) -> list[str]:
    """Return the columns of up to `MOST_SAMPLED` files of a table, in order of appearance. Reads no rows.

    Raises:
        UserError: for a file that cannot be read, or names a column twice.
    """
    names: dict[str, None] = {}
    for file in sampled(files):
        with opened(file) as source:
            names.update(dict.fromkeys(names_of(source)))
    return [*names]


def sampled(files: Sequence[File]) -> list[File]:
    """Return sample files of a table: the first, the last and some between."""
    indices = {len(files) * number // MOST_SAMPLED for number in range(MOST_SAMPLED)} | {len(files) - 1}
    return [files[place] for place in sorted(indices)]


def columns_of(tables: Tables) -> dict[str, list[str]]:
    """Return the columns of each role's files, including those of partitions; empty for a role without files.

    Raises:
        UserError: for a file that cannot be read, or names a column twice.
    """
    return {role: names_in(files) for role, files in tables.roles.items() if files}


def _completed(batch: pyarrow.RecordBatch, source: FileReader, columns: Sequence[str]) -> pyarrow.RecordBatch:
    """Return a batch with all columns: also those of partitions, and nulls for those that the file lacks."""
    if batch.schema.names == list(columns):
        return batch
    values = {name: value for name, value in source.file.partitions if value != MISSING_PARTITION}
    indices = {name: place for place, name in enumerate(batch.schema.names)}
    # By position: finding each of thousands of columns by name would be slow.
    arrays = [
        batch.column(indices[column])
        if column in indices
        else pyarrow.repeat(pyarrow.scalar(values.get(column), pyarrow.string()), batch.num_rows)
        for column in columns
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns))
