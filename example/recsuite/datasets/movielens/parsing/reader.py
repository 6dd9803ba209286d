"""The text files of MovieLens: how they lie in a folder, and their rows.

Reads files and nothing else. A data worker never imports it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recsuite.datasets.tables.sources.bad_rows import BadRow, Faults
from recsuite.errors import UserError, counted
from recsuite.files import explained

# How files begin that are not text in UTF-8 or ISO-8859-1, what they are, and what helps. Of UTF-16 without a
# mark, see `_refuse_foreign`.
FOREIGN = (
    (b"\x1f\x8b", "compressed by gzip", "unpack it"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"\xfd7zXZ\x00", "compressed by xz", "unpack it"),
    (b"BZh", "compressed by bzip2", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"PAR1", "a Parquet file", "write its rows as text"),
    (b"\xff\xfe\x00\x00", "text in UTF-32", "convert it with iconv -f UTF-32 -t UTF-8"),
    (b"\x00\x00\xfe\xff", "text in UTF-32", "convert it with iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)


@dataclass(frozen=True)
class Layout:
    """How one family of MovieLens sets lies in its folder."""

    ratings: str
    movies: str
    users: str
    separator: str
    header: str
    num_movie_fields: int
    datasets: tuple[str, ...]


LAYOUTS = (
    Layout("u.data", "u.item", "u.user", "\t", "", 24, ("ml-100k",)),
    Layout("ratings.dat", "movies.dat", "users.dat", "::", "", 3, ("ml-1m", "ml-10m", "synthetic")),
    Layout(
        "ratings.csv",
        "movies.csv",
        "",
        ",",
        "userId,movieId,rating,timestamp",
        3,
        ("ml-20m", "ml-25m", "ml-32m", "ml-latest-small", "ml-latest"),
    ),
)


class Reader:
    """Reads text files row by row and decides, for all of them, what a bad row does."""

    def __init__(self, folder: Path, skip: bool, max_share: float) -> None:
        self.folder = folder
        self.skip = skip
        self.max_share = max_share
        self.notes: list[str] = []
        self.num_skipped_ratings = 0

    def read_bytes(self, name: str) -> bytes:
        """A file's content without the mark of UTF-8; empty, missing and packed files are refused by name."""
        path = self.folder / name
        advice = f"place the unpacked MovieLens files in {self.folder}, or give another --data_path"
        with explained(f"{path} cannot be read", advice):
            content = path.read_bytes()
        if not content.strip():
            raise UserError(f"{path} is empty; place the unpacked MovieLens files there again.")
        _refuse_foreign(path, content)
        return content.removeprefix(b"\xef\xbb\xbf")

    def bad_rows(self, name: str, rows: list[BadRow], num_rows: int) -> None:
        """Refuse the first of the bad rows, or count them all; refuse them, too, where they are too many."""
        faults = Faults("line", len(rows), rows[0] if rows else None)
        if not self.skip:
            faults.refuse(self.folder / name)
        self.notes += faults.accepted(self.folder / name, num_rows, self.max_share)

    def rows(
        self, name: str, separator: str, num_fields: int
    ) -> tuple[list[tuple[int, list[str]]], list[BadRow]]:
        """Line numbers and fields of a small file; and the rows with another number of fields."""
        good: list[tuple[int, list[str]]] = []
        bad: list[BadRow] = []
        try:
            for line, fields in _split_lines(_decode(self.read_bytes(name)), separator):
                if len(fields) == num_fields:
                    good.append((line, fields))
                else:
                    reason = f"{counted(len(fields), 'field')} instead of {num_fields}"
                    bad.append(BadRow(line, separator.join(fields), reason))
        except csv.Error as error:
            # A quote that is never closed makes one field of the rest of the file.
            raise UserError(
                f"{self.folder / name} cannot be split into rows ({error}), as when a quote is not closed; "
                "place the original file there."
            ) from None
        return good, bad


def _refuse_foreign(path: Path, content: bytes) -> None:
    found = next(((what, help) for start, what, help in FOREIGN if content.startswith(start)), None)
    # The first character of every file is an ASCII one.
    if found is None and b"\0" in content[:2]:
        found = "text in UTF-16", "convert it with iconv -f UTF-16LE -t UTF-8, or UTF-16BE"
    if found:
        raise UserError(
            f"{path} is {found[0]}, not text in UTF-8; {found[1]}, and place what comes of it there."
        )


def _decode(content: bytes) -> str:
    # ml-1m and ml-100k are ISO-8859-1, the later sets UTF-8; accented ISO-8859-1 is never valid UTF-8.
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("iso-8859-1")


def _split_lines(text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    if separator == ",":
        lines = csv.reader(io.StringIO(text))
        yield from ((lines.line_num, fields) for fields in lines if fields)
        return
    # Not splitlines, which ends a line also at characters that a title may have, such as \x85.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r").split(separator)
