"""MovieLens as tables: what is learned of a user and a movie, and in which files each edition has it.

Embedding tables, batches and tests derive from it; adding a feature is one section of the schema.toml beside
this file, if the files have its column. The reader of tables reads them. Imports neither numpy nor Arrow.
"""

from __future__ import annotations

from dataclasses import replace
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
# The files of each edition, and their columns. No delimiter means that it is found.
OF_1M = Files(
    *("ratings.dat", "users.dat", "movies.dat"),
    delimiter="::",
    columns=("user_id", "movie_id", "rating", "timestamp"),
    user_columns=("user_id", "gender", "age", "occupation", "postal_code"),
    item_columns=("movie_id", "title", "genres"),
    whole=("user_id", "movie_id", "age"),
)
OF_100K = Files(
    *("u.data", "u.user", "u.item"),
    columns=OF_1M.columns,
    user_columns=("user_id", "age", "gender", "occupation", "postal_code"),
    item_columns=("movie_id", "title", "released", "video_released", "address", *GENRES),
    whole=OF_1M.whole,
)
OF_20M = replace(OF_1M, events="ratings.csv", users="", items="movies.csv", delimiter=",", user_columns=())
# The first line of the ratings of those, by which their folder is told from others.
HEADER = b"userId,movieId,rating,timestamp"
EDITIONS = {
    "ml-100k": OF_100K,
    **dict.fromkeys(("ml-1m", "ml-10m", "synthetic"), OF_1M),
    **dict.fromkeys(("ml-20m", "ml-25m", "ml-32m", "ml-latest-small", "ml-latest"), OF_20M),
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
    """The files of an edition, if some of them lie in a folder."""
    for files in EDITIONS.values():
        # What is left of a set is refused by the name of what is missing. Others may have a movies.csv.
        # The isfile of pathlib raises where a folder forbids to look, or a name is too long.
        if isfile(folder / files.events) or (files != OF_20M and isfile(folder / files.items)):
            return files
    return None


def is_known(folder: Path) -> bool:
    """True for a folder with MovieLens files; others may have a ratings.csv too."""
    files = files_in(folder)
    if files != OF_20M or isfile(folder / files.items):
        return files is not None
    with explained(f"{folder} cannot be read"), (folder / files.events).open("rb") as file:
        return HEADER in file.readline(1024)
