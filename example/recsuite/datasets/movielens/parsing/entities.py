"""The files of movies and users."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recsuite.datasets.movielens.parsing.reader import Layout, Reader
from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.errors import UserError

if TYPE_CHECKING:
    import pandas

OLDEST = 150
# ASCII, because \d is any script's digit otherwise.
YEAR = re.compile(r"\((\d{4})\)\s*$", re.ASCII)
# What Arrow reads as numbers, without those in base 16.
WHOLE = re.compile(r"[ \t]*(-?\d+)[ \t]*", re.ASCII)


def read_movies(reader: Reader, layout: Layout) -> pandas.DataFrame:
    """One row per movie: movie_id int64, title, year (NaN where the title has none), genres (names)."""
    separator = "|" if layout.ratings == "u.data" else layout.separator
    genre_names = _read_genre_names(reader, layout) if layout.ratings == "u.data" else []

    def parse(fields: list[str]) -> dict[str, Any]:
        title = fields[1]
        year = YEAR.search(title)
        if genre_names:
            # Number, title, two dates and an address stand before the marks of the genres.
            genres = [name for name, flag in zip(genre_names, fields[5:], strict=True) if flag == "1"]
        else:
            genres = fields[2].split("|")
        # Each set has a word of its own for a movie without a genre.
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
        # The fifth field is a postal code, which no feature uses.
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
            bad.append(BadRow(line, separator.join(fields), str(error)))
            continue
        # Which of two rows is right cannot be known.
        if entity[key] in found:
            bad.append(BadRow(line, separator.join(fields), f"{key} {entity[key]} a second time"))
            continue
        found[entity[key]] = entity
    # Two checks found them; a refusal names the first one of the file.
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
            f"{reader.folder / 'u.genre'} names {len(rows)} genres, and {layout.movies} has {wanted}; "
            "place the original file there."
        )
    return [fields[0] for _, fields in rows]
