"""The files of ratings, by Arrow's reader; and line by line where that finds a bad row."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recsuite.datasets.movielens.parsing.entities import WHOLE
from recsuite.datasets.movielens.parsing.reader import Layout, Reader
from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.errors import UserError, counted
from recsuite.runtime.progress_bar import stage

LOWEST_RATING, HIGHEST_RATING = SCHEMA.lowest_label, SCHEMA.highest_label
# The last second of the year 9999: what lies beyond was not counted in seconds.
LAST_TIME = 253_402_300_799
DECIMAL = re.compile(r"[ \t]*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[ \t]*", re.ASCII)
# What Arrow parses at once, for the progress to be seen.
BLOCK_BYTES = 2**26
RATING_NAMES = ("user", "movie", "rating", "time")
# user_id, movie_id, rating, time: int64, int64, float32, int64, one entry a rating.
RatingColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


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
    # Only Arrow is quick, and it names no row; the lines are slow, and name each.
    bad, good, num_rows = _inspect_ratings(content, layout, known_users, known_movies)
    reader.bad_rows(name, bad, num_rows)
    # A set of a known name must have its known number of ratings, those left out included.
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
    # A block at a time, so that a progress bar has something to show.
    parts: list[list[np.ndarray]] = [[] for _ in RATING_NAMES]
    with stage("reading ratings", len(content), "bytes") as reached:
        for first, last in _blocks(content):
            try:
                table = pyarrow.csv.read_csv(
                    # A slice of Arrow's buffer: one of the bytes would be a copy of the block.
                    pyarrow.BufferReader(pyarrow.py_buffer(content)[first:last]),
                    pyarrow.csv.ReadOptions(column_names=names),
                    pyarrow.csv.ParseOptions(delimiter=layout.separator[0], quote_char=is_quoted and '"'),
                    # Arrow's own list of what means nothing has "NA" and "nan" too, which it would accept
                    # between the colons.
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
        # Whatever the bytes are, the sentence that refuses a line has to show it.
        text = line.decode("utf-8", "backslashreplace")
        if not text.strip():
            continue
        reason = _rating_fault(_fields(text, layout.separator), layout, users, movies)
        if reason:
            bad.append(BadRow(number, text, reason))
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
