"""The text files of MovieLens, read into columns; every row that cannot be read is named.

Reads files and nothing else. A data worker never imports it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.errors import UserError, counted
from recsuite.runtime.progress_bar import stage

if TYPE_CHECKING:
    import pandas

LOWEST_RATING, HIGHEST_RATING = 0.5, 5.0
OLDEST = 150
# The last second of the year 9999: what lies beyond was not counted in seconds.
LAST_TIME = 253_402_300_799
YEAR = re.compile(r"\((\d{4})\)\s*$", re.ASCII)
# What Arrow reads as numbers, without those in base 16.
WHOLE = re.compile(r"[ \t]*(-?\d+)[ \t]*", re.ASCII)
DECIMAL = re.compile(r"[ \t]*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[ \t]*", re.ASCII)
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
# What Arrow parses at once, for the progress to be seen.
BLOCK_BYTES = 2**26
RATING_NAMES = ("user", "movie", "rating", "time")
# Line number, content, and what is wrong with it.
BadRow = tuple[int, str, str]
# user_id, movie_id, rating, time: int64, int64, float32, int64, one entry a rating.
RatingColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


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
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}); place the unpacked MovieLens files in "
                f"{self.folder}, or give another --data_path."
            ) from None
        if not content.strip():
            raise UserError(f"{path} is empty; place the unpacked MovieLens files there again.")
        _refuse_foreign(path, content)
        return content.removeprefix(b"\xef\xbb\xbf")

    def bad_rows(self, name: str, rows: list[BadRow], num_rows: int) -> None:
        """Refuse the first of the bad rows, or count them all; refuse them, too, where they are too many."""
        if not rows:
            return
        line, content, reason = rows[0]
        first = f"{self.folder / name}, line {line}: {reason}: {content[:120]!r}"
        if not self.skip:
            raise UserError(f"{first}; mend the file, or give --bad_rows skip to leave such rows out.")
        if len(rows) > self.max_share * num_rows:
            allowed = int(self.max_share * num_rows)
            raise UserError(
                f"{first}; with it {len(rows):,} of {num_rows:,} rows of the file cannot be read, and "
                f"--max_bad_rows {self.max_share:g} allows {allowed:,}; mend the file, or give a larger one."
            )
        self.notes.append(
            f"left out {counted(len(rows), 'bad row')} of {name}, the first being line {line} ({reason})"
        )

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
                    bad.append(
                        (
                            line,
                            separator.join(fields),
                            f"{counted(len(fields), 'field')} instead of {num_fields}",
                        )
                    )
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
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r").split(separator)


def read_movies(reader: Reader, layout: Layout) -> pandas.DataFrame:
    """One row per movie: movie_id int64, title, year (NaN where the title has none), genres (names)."""
    separator = "|" if layout.ratings == "u.data" else layout.separator
    genre_names = _read_genre_names(reader, layout) if layout.ratings == "u.data" else []

    def parse(fields: list[str]) -> dict[str, Any]:
        title = fields[1]
        year = YEAR.search(title)
        if genre_names:
            genres = [name for name, flag in zip(genre_names, fields[5:], strict=True) if flag == "1"]
        else:
            genres = fields[2].split("|")
        genres = [genre for genre in genres if genre not in ("", "unknown", "(no genres listed)")]
        return {
            "movie_id": _whole("movie_id", fields[0]),
            "title": title,
            "year": int(year[1]) if year else None,
            "genres": genres,
        }

    header = "movieId,title,genres" if layout.header else ""
    return _read_entities(
        reader, layout.movies, separator, layout.num_movie_fields, header, "movie_id", parse
    )


def read_users(reader: Reader, layout: Layout) -> pandas.DataFrame | None:
    """One row per user: user_id int64, gender, age (int), occupation; None where the set has no such file."""
    if not layout.users or not (reader.folder / layout.users).is_file():
        return None
    if layout.ratings == "u.data":
        separator, order = "|", ("user_id", "age", "gender", "occupation")
    else:
        separator, order = "::", ("user_id", "gender", "age", "occupation")

    def parse(fields: list[str]) -> dict[str, Any]:
        user = dict(zip(order, fields[:4], strict=True))
        age = _whole("age", user["age"], lowest=0, highest=OLDEST)
        return {**user, "user_id": _whole("user_id", user["user_id"]), "age": age}

    return _read_entities(reader, layout.users, separator, 5, "", "user_id", parse)


def _read_entities(
    reader: Reader,
    name: str,
    separator: str,
    num_fields: int,
    header: str,
    key: str,
    parse: Callable[[list[str]], dict[str, Any]],
) -> pandas.DataFrame:
    import pandas

    found: dict[int, dict[str, Any]] = {}
    rows, bad = reader.rows(name, separator, num_fields)
    num_rows = len(rows) + len(bad)
    for line, fields in rows:
        if line == 1 and header and separator.join(fields) == header:
            continue
        try:
            entity = parse(fields)
        except ValueError as error:
            bad.append((line, separator.join(fields), str(error)))
            continue
        if entity[key] in found:
            bad.append((line, separator.join(fields), f"{key} {entity[key]} a second time"))
            continue
        found[entity[key]] = entity
    reader.bad_rows(name, sorted(bad), num_rows)
    if not found:
        raise UserError(f"{reader.folder / name} has no row that can be read; place the original file there.")
    return pandas.DataFrame(list(found.values()))


def _whole(name: str, text: str, lowest: int = -(2**63), highest: int = 2**63 - 1) -> int:
    match = WHOLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} {text[:40]!r} is not a whole number")
    # Python refuses to count thousands of digits.
    if len(match[1]) > 20 or not lowest <= int(match[1]) <= highest:
        raise ValueError(f"{name} {match[1][:40]} is not between {lowest} and {highest}")
    return int(match[1])


def _read_genre_names(reader: Reader, layout: Layout) -> list[str]:
    rows, bad = reader.rows("u.genre", "|", 2)
    reader.bad_rows("u.genre", bad, len(rows) + len(bad))
    wanted = layout.num_movie_fields - 5
    if len(rows) != wanted:
        raise UserError(
            f"{reader.folder / 'u.genre'} names {len(rows)} genres, and {layout.movies} tells of {wanted}; "
            "place the original file there."
        )
    return [fields[0] for _, fields in rows]


def read_ratings(
    reader: Reader,
    name: str,
    layout: Layout,
    known_users: np.ndarray | None,
    known_movies: np.ndarray,
) -> RatingColumns:
    """user_id, movie_id, rating and time of one file, by Arrow's reader.

    Arrow says that some row is bad, not which one; only then are the lines looked at one by one.
    """
    content = reader.read_bytes(name)
    header, _, rest = content.partition(b"\n")
    if layout.header:
        _check_header(reader.folder / name, header, layout)
        content = rest
    columns, reason = _parse_ratings(content, layout)
    if columns is not None and _all_known(columns, known_users, known_movies):
        return columns
    bad, good, num_rows = _inspect_ratings(content, layout, known_users, known_movies)
    reader.bad_rows(name, bad, num_rows)
    reader.num_skipped_ratings += len(bad)
    if bad:
        columns, reason = _parse_ratings(good, layout)
    if columns is None or len(columns[0]) == 0:
        raise UserError(
            f"{reader.folder / name} holds no rating that can be read ({reason or 'no row is left'}); "
            "place the original file there."
        )
    return columns


def _check_header(path: Path, header: bytes, layout: Layout) -> None:
    found = header.decode("utf-8", "backslashreplace").rstrip("\r")
    if layout.separator.join(_fields(found, layout.separator)) != layout.header:
        raise UserError(
            f"{path}, line 1: {found[:120]!r} is not the header {layout.header!r}; "
            "place the original file there."
        )


def _parse_ratings(content: bytes, layout: Layout) -> tuple[RatingColumns | None, str]:
    import pyarrow
    import pyarrow.csv

    is_quoted = layout.separator == "," and b'"' in content
    # Arrow reads 0x10 as 16, and "1"0 as 10.
    if b"x" in content or b"X" in content or (is_quoted and re.search(rb'[^,\r\n]"[^,\r\n]', content)):
        return None, "not a number"
    names = [*RATING_NAMES]
    types = {
        "user": pyarrow.int64(),
        "movie": pyarrow.int64(),
        "rating": pyarrow.float32(),
        "time": pyarrow.int64(),
    }
    # Arrow knows one-character separators: `::` is a `:` with an empty column on its right.
    if layout.separator == "::":
        names = ["user", "empty1", "movie", "empty2", "rating", "empty3", "time"]
        types.update({name: pyarrow.null() for name in names if name.startswith("empty")})
    parts: list[list[np.ndarray]] = [[] for _ in RATING_NAMES]
    with stage("reading ratings", len(content), "bytes") as reached:
        for first, last in _blocks(content):
            try:
                table = pyarrow.csv.read_csv(
                    pyarrow.BufferReader(pyarrow.py_buffer(content)[first:last]),
                    pyarrow.csv.ReadOptions(column_names=names),
                    pyarrow.csv.ParseOptions(delimiter=layout.separator[0], quote_char=is_quoted and '"'),
                    pyarrow.csv.ConvertOptions(column_types=types, null_values=[""]),
                )
            except pyarrow.ArrowInvalid as error:
                return None, str(error)
            for part, name in zip(parts, RATING_NAMES, strict=True):
                if table[name].null_count:
                    return None, "an empty field"
                part.append(table[name].to_numpy())
            reached(last)
    user, movie, rating, time = map(np.concatenate, parts)
    return (user, movie, rating, time), ""


def _blocks(content: bytes) -> Iterator[tuple[int, int]]:
    """Where blocks of whole lines begin and end; of nothing there is one."""
    first = last = 0
    while not last or first < len(content):
        # A line longer than a block is a block.
        last = content.rfind(b"\n", first, first + BLOCK_BYTES) + 1 or content.find(b"\n", first) + 1
        if len(content) - first <= BLOCK_BYTES or not last:
            last = len(content)
        yield first, last
        if not content:
            return
        first = last


def _all_known(
    columns: RatingColumns,
    known_users: np.ndarray | None,
    known_movies: np.ndarray,
) -> bool:
    import pandas

    user, movie, rating, time = columns
    in_range = (rating >= LOWEST_RATING) & (rating <= HIGHEST_RATING) & (time >= 0) & (time <= LAST_TIME)
    return bool(
        len(rating) > 0
        and in_range.all()
        and np.isin(pandas.unique(movie), known_movies).all()
        and (known_users is None or np.isin(pandas.unique(user), known_users).all())
    )


def _inspect_ratings(
    content: bytes, layout: Layout, known_users: np.ndarray | None, known_movies: np.ndarray
) -> tuple[list[BadRow], bytes, int]:
    """The bad rows, the content without them, and the number of rows, bad ones included."""
    users = None if known_users is None else set(known_users.tolist())
    movies = set(known_movies.tolist())
    bad: list[BadRow] = []
    good: list[bytes] = []
    for number, line in enumerate(content.splitlines(), start=2 if layout.header else 1):
        text = line.decode("utf-8", "backslashreplace")
        if not text.strip():
            continue
        reason = _rating_fault(_fields(text, layout.separator), layout, users, movies)
        if reason:
            bad.append((number, text, reason))
        else:
            good.append(line)
    return bad, b"\n".join(good), len(good) + len(bad)


def _fields(line: str, separator: str) -> list[str]:
    """The fields of one line; none where a quote is not closed, or is inside of a field."""
    if separator != "," or '"' not in line:
        return line.split(separator)
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _rating_fault(fields: list[str], layout: Layout, users: set[int] | None, movies: set[int]) -> str:
    if not fields:
        return "a quote in the wrong place"
    if len(fields) != 4:
        return f"{counted(len(fields), 'field')} instead of 4"
    found = [WHOLE.fullmatch(fields[place]) for place in (0, 1, 3)]
    decimal = DECIMAL.fullmatch(fields[2])
    wholes = [match[1] for match in found if match]
    if decimal is None or len(wholes) != 3:
        return "not a number"
    # Python refuses to count thousands of digits.
    if any(len(whole) > 20 or abs(int(whole)) >= 2**63 for whole in wholes):
        return "a number of more than 64 bits"
    user, movie, time = map(int, wholes)
    if not LOWEST_RATING <= float(decimal[1]) <= HIGHEST_RATING:
        return f"a rating outside {LOWEST_RATING} to {HIGHEST_RATING}"
    if not 0 <= time <= LAST_TIME:
        return f"a time outside 0 to {LAST_TIME} (seconds since 1970)"
    if movie not in movies:
        return f"movie {movie} is not in {layout.movies}"
    if users is not None and user not in users:
        return f"user {user} is not in {layout.users}"
    return ""
