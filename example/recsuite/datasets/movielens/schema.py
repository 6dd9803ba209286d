"""MovieLens as tables: what is learned of a user and a movie, and in which files each edition has it.

Embedding tables, batches and tests derive from it; adding a feature is one section of the schema.toml beside
this file, if the files have its column. The reader of tables reads them. Imports neither numpy nor Arrow.
"""

from __future__ import annotations

from os.path import isfile
from pathlib import Path

from recsuite.datasets.tables.description.reader import read_schema
from recsuite.datasets.tables.schema_file import Files
from recsuite.files import explained

TABLES = read_schema(Path(__file__).with_name("schema.toml"))
SCHEMA = TABLES.schema()
# Long enough for the largest archive on a slow line; a wait beyond it is a fault.
DATA_DEADLINE = 3600.0
# Of ml-100k, whose movies have a column of 0 and 1 for each.
GENRES = [
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War"),
    "Western",
]
# The files of each group of editions, and their columns. Those of the last group also stand in a first line.
EDITIONS = {
    ("ml-100k",): Files(
        *("u.data", "u.user", "u.item"),
        columns=("user_id", "movie_id", "rating", "timestamp"),
        user_columns=("user_id", "age", "gender", "occupation", "postal_code"),
        item_columns=("movie_id", "title", "released", "video_released", "address", *GENRES),
        whole=("user_id", "movie_id", "age"),
    ),
    ("ml-1m", "ml-10m", "synthetic"): Files(
        *("ratings.dat", "users.dat", "movies.dat"),
        delimiter="::",
        columns=("user_id", "movie_id", "rating", "timestamp"),
        user_columns=("user_id", "gender", "age", "occupation", "postal_code"),
        item_columns=("movie_id", "title", "genres"),
        whole=("user_id", "movie_id", "age"),
    ),
    ("ml-20m", "ml-25m", "ml-32m", "ml-latest-small", "ml-latest"): Files(
        *("ratings.csv", "", "movies.csv"),
        delimiter=",",
        columns=("userId", "movieId", "rating", "timestamp"),
        item_columns=("movieId", "title", "genres"),
        whole=("userId", "movieId"),
    ),
}
# As GroupLens states them; ml-latest grows and is not checked.
NUM_RATINGS = {
    "ml-100k": 100_000,
    "ml-1m": 1_000_209,
    "ml-10m": 10_000_054,
    "ml-20m": 20_000_263,
    "ml-25m": 25_000_095,
    "ml-32m": 32_000_204,
}


def files_in(folder: Path) -> Files | None:
    """The files of the editions of which the ratings lie in a folder."""
    # That of pathlib raises where a folder forbids to look, or a name is too long.
    return next((files for files in EDITIONS.values() if isfile(folder / files.events)), None)


def is_known(folder: Path) -> bool:
    """True for a folder with MovieLens files; others may have a ratings.csv too."""
    files = files_in(folder)
    if files is None:
        # What is left of a set is refused by the name of what is missing.
        return any(isfile(folder / each.items) for each in EDITIONS.values() if each.delimiter != ",")
    if files.delimiter != "," or isfile(folder / files.items):
        return True
    with (
        explained(f"{folder} cannot be read", "give another --data_path"),
        (folder / files.events).open("rb") as file,
    ):
        return ",".join(files.columns).encode() in file.readline(1024)
