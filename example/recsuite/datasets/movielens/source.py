"""MovieLens: its files, downloaded if they are missing, and read as tables.

Embedding tables, batches and tests derive from the schema.toml beside this file. To add a feature, add a
section to it, if the files have its column. This module adds the rest: years from titles, genres as one list,
and the oracle of synthetic ratings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import replace
from itertools import compress
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from recsuite.config.sections import OFFICIAL_SPLITS, DataConfig
from recsuite.datasets.schema import ITEM, RawData
from recsuite.datasets.tables.files import File, Tables, find_tables
from recsuite.datasets.tables.schema_file import read_schema
from recsuite.datasets.tables.sections import CATEGORY, FeatureColumn, Files
from recsuite.datasets.tables.source import TableFile, TableSource
from recsuite.errors import UserError
from recsuite.files import DATA_ROOT, explained, locked
from recsuite.hooks import extra

if TYPE_CHECKING:
    import pandas

TABLES = read_schema(Path(__file__).with_name("schema.toml"))
SCHEMA = TABLES.schema()
# Long enough for the largest archive on a slow line; a longer wait is an error.
DATA_DEADLINE = 3600.0
# Genres of ml-100k, whose movies have a column of 0 and 1 for each.
GENRES = [
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War"),
    "Western",
]
# The files of each edition, and their columns. Without a delimiter it is detected.
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
# First line of the ratings of OF_20M sets, by which their folder is recognised.
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
    """Return the files of an edition if some of them are in a folder, else None."""
    for files in EDITIONS.values():
        # One file is enough: an incomplete set is refused later, with the name of the missing file. But other
        # data may have a movies.csv. pathlib's is_file raises for a forbidden folder or a name too long.
        if isfile(folder / files.events) or (files != OF_20M and isfile(folder / files.items)):
            return files
    return None


def is_known(folder: Path) -> bool:
    """True for a folder with MovieLens files. Other data may have a ratings.csv too."""
    files = files_in(folder)
    if files != OF_20M or isfile(folder / files.items):
        return files is not None
    with explained(f"Cannot read {folder}"), (folder / files.events).open("rb") as file:
        return HEADER in file.readline(1024)


# ASCII, because otherwise \d matches the digits of any script.
YEAR = re.compile(r"\((\d{4})\)\s*$", re.ASCII)
# Words of the sets for a movie without a genre.
NO_GENRE = ("unknown", "(no genres listed)")
# Oracle files of synthetic ratings: expected labels, and ranks.
ORACLES = ("oracle.npy", "ranks.npy")


class MovieLens(TableSource):
    """A MovieLens set, or one in its format."""

    @property
    @override
    def files(self) -> list[TableFile]:
        paths = [path for name in ORACLES if (path := self.folder / name).is_file()]
        oracles = (File(str(path), "npy", size=path.stat().st_size) for path in paths)
        return [*super().files, *(TableFile(file, Path(file.path).name) for file in oracles)]

    @override
    def read(self, parts_folder: Path | None = None) -> RawData:
        # Imported late, as in `TableSource`.
        from recsuite.datasets.tables.reading import read_tables

        raw = read_tables(self._decoded_tables(), self.table_schema, self.config, parts_folder)
        if "occupation" in raw.users:
            # In ml-1m they are numbers: codes of categories, like the texts of ml-100k.
            raw.users["occupation"] = raw.users["occupation"].map(str, na_action="ignore")
        raw.items = _with_genres(raw.items)
        if self.config.split in OFFICIAL_SPLITS:
            raw.official_test = np.arange(len(raw.events.label)) >= next(iter(raw.events_per_file.values()))
        raw.oracle, raw.oracle_ranks = (self._oracle(name, raw) for name in ORACLES)
        return raw

    @override
    def read_items(self) -> pandas.DataFrame:
        from recsuite.datasets.tables.reading import read_items

        return _with_genres(read_items(self._decoded_tables(), self.table_schema, self.config))

    def _decoded_tables(self) -> Tables:
        return dataclasses.replace(self.tables, items=tuple(map(_decoded, self.tables.items)))

    def _oracle(self, name: str, raw: RawData) -> np.ndarray | None:
        """Return an oracle of synthetic ratings, float32 [ratings]; None if its file is missing."""
        path, number = self.folder / name, len(raw.events.label)
        if not path.is_file():
            return None
        try:
            # Mapped, so that a damaged header with a wrong size is detected by the size of the file.
            oracle = np.load(path, mmap_mode="r")
            is_column = oracle.dtype == np.float32 and oracle.ndim == 1
        # NumPy raises errors of many kinds for a damaged header.
        except Exception:
            is_column = False
        if not is_column:
            raise UserError(f"{path} is damaged: it is not a column of float32; remove it, or the folder.")
        if len(oracle) != number:
            raw.skipped.append(f"skipped the {path.stem}: it knows {len(oracle):,} ratings, not {number:,}")
            return None
        return np.array(oracle)


def _with_genres(items: pandas.DataFrame) -> pandas.DataFrame:
    """Return items with lists of genres, and with years."""
    if "genres" not in items:
        marks = items[GENRES].astype(str).to_numpy() == "1"
        items["genres"] = [[*compress(GENRES, row)] for row in marks]
    items["genres"] = [[name for name in names if name not in NO_GENRE] for names in items["genres"]]
    items["year"] = [int(year[1]) if (year := YEAR.search(title)) else None for title in items["title"]]
    return items.drop(columns=GENRES, errors="ignore")


def locate(config: DataConfig, seed: int) -> MovieLens:
    """Return the configured set. Obtain a named set that is missing first.

    Writes its folder, and a lock and unfinished files beside it under hidden names. Safe when two launches
    start at once.

    Raises:
        UserError: when there is nothing to read, or it cannot be obtained.
    """
    dataset = "synthetic" if config.is_synthetic else config.dataset
    folder, source = look(config, seed)
    if source is None:
        _obtain(dataset, folder, config, seed)
        folder, source = look(config, seed)
    # --data_path may be the folder of another set than --dataset.
    if source is None or (dataset and files_in(folder) != EDITIONS[dataset]):
        raise UserError(
            f"{folder} does not hold {dataset} but {source.files[0].name if source else 'other files'}; "
            "give another --data_path, or leave --dataset out to read what lies there."
        )
    if dataset == "synthetic":
        from recsuite.datasets.movielens.synthetic import check_synthetic

        check_synthetic(folder, config.synthetic_ratings, seed, config.synthetic_kind)
    return source


def look(config: DataConfig, seed: int) -> tuple[Path, MovieLens | None]:
    """Return the folder of the configured set, and the set if its files are there. Obtains nothing.

    Raises:
        UserError: when a file of it is missing there.
    """
    name = config.dataset
    if config.is_synthetic:
        name = f"synthetic-{config.synthetic_ratings}-seed{seed}-{config.synthetic_kind}"
    # Absolute, because a folder such as "." has no name.
    folder = (Path(config.data_path) if config.data_path else DATA_ROOT / name).absolute()
    files = files_in(folder)
    if files is None:
        return folder, None
    # ml-10m and the later sets have no file of users.
    if not (folder / files.users).is_file():
        files = dataclasses.replace(files, users="", user_columns=())
    if config.split in OFFICIAL_SPLITS:
        files = dataclasses.replace(files, events=f"{config.split}.base, {config.split}.test")
    # With latin-1, a byte of the ratings that is not ASCII makes a bad row, like any other error in a row.
    tables = find_tables(folder, dataclasses.replace(files, encoding="latin-1"))
    known = {*files.user_columns, *files.item_columns}
    features = {name: feature for name, feature in TABLES.features.items() if feature.column in known}
    features |= {name: FeatureColumn(ITEM, name, CATEGORY) for name in GENRES if name in known}
    schema = dataclasses.replace(TABLES, files=files, features=features)
    return folder, MovieLens(folder, tables, schema, config, SCHEMA)


def _decoded(file: File) -> File:
    """Return a file with its encoding, UTF-8 if it is valid, else ISO-8859-1, as in ml-1m and ml-100k."""
    # Accents in ISO-8859-1 are never valid UTF-8.
    from recsuite.datasets.tables.formats import TextFile

    decoded = dataclasses.replace(file, encoding="utf-8")
    with contextlib.suppress(UserError), contextlib.closing(TextFile(decoded)) as text:
        text.read()
        return decoded
    return file


def _obtain(dataset: str, folder: Path, config: DataConfig, seed: int) -> None:
    from recsuite.datasets.movielens.synthetic import world_of, write_synthetic

    with explained(f"Cannot make {folder}", "give a --data_path that can be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, because the folder itself appears in one rename.
        with locked(folder.parent / f".{folder.name}.lock", f"preparing {folder}", DATA_DEADLINE):
            # Check again: another process may have obtained the files before this one got the lock.
            if files_in(folder) is not None:
                return
            if dataset == "synthetic":
                write_synthetic(folder, config.synthetic_ratings, seed, world_of(config.synthetic_kind))
            else:
                extra("download").download(dataset, folder)
