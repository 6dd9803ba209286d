"""A MovieLens set where it lies: obtained where it is missing, and read as tables, see `schema`.

What is no table is added here: years from titles, genres as one list, and the oracle of synthetic ratings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from itertools import compress
from pathlib import Path

import numpy as np

from recsuite.checkout import DATA_ROOT
from recsuite.config.sections import OFFICIAL_SPLITS, DataConfig
from recsuite.datasets.movielens.schema import DATA_DEADLINE, EDITIONS, GENRES, SCHEMA, TABLES, files_in
from recsuite.datasets.schema import ITEM, RawData
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables.schema_file import CATEGORY, FeatureColumn
from recsuite.datasets.tables.source import Source, TableFile
from recsuite.datasets.tables.sources.file import File
from recsuite.datasets.tables.sources.text import TextFile
from recsuite.errors import UserError
from recsuite.files import explained, locked

# ASCII, because \d is any script's digit otherwise.
YEAR = re.compile(r"\((\d{4})\)\s*$", re.ASCII)
# Each set has a word of its own for a movie without a genre.
NO_GENRE = ("unknown", "(no genres listed)")
# What lies beside synthetic ratings: expected labels, and ranks.
ORACLES = ("oracle.npy", "ranks.npy")


class MovieLens(Source):
    """A MovieLens set, or one in its form."""

    @property
    def files(self) -> list[TableFile]:
        """See `Source`."""
        found = [path for name in ORACLES if (path := self.folder / name).is_file()]
        oracles = (File(str(path), "npy", size=path.stat().st_size) for path in found)
        return [*super().files, *(TableFile(file, Path(file.path).name) for file in oracles)]

    def read(self) -> RawData:
        """See `Source`."""
        tables = dataclasses.replace(self.tables, items=tuple(map(_decoded, self.tables.items)))
        # Only now, as in `Source`.
        from recsuite.datasets.tables.reading import read_tables

        raw = read_tables(tables, self.table_schema, self.config)
        items = raw.items
        if "occupation" in raw.users:
            # Of ml-1m they are numbers, which stand for texts as those of ml-100k do.
            raw.users["occupation"] = raw.users["occupation"].map(str, na_action="ignore")
        if "genres" not in items:
            marks = items[GENRES].astype(str).to_numpy() == "1"
            items["genres"] = [[*compress(GENRES, row)] for row in marks]
        items["genres"] = [[name for name in names if name not in NO_GENRE] for names in items["genres"]]
        items["year"] = [int(year[1]) if (year := YEAR.search(title)) else None for title in items["title"]]
        raw.items = items.drop(columns=GENRES, errors="ignore")
        if self.config.split in OFFICIAL_SPLITS:
            raw.official_test = np.arange(len(raw.events.label)) >= next(iter(raw.events_per_file.values()))
        raw.oracle, raw.oracle_ranks = (self._oracle(name, raw) for name in ORACLES)
        return raw

    def _oracle(self, name: str, raw: RawData) -> np.ndarray | None:
        """What lies beside synthetic ratings, float32, one a rating; None where that is not there."""
        path, number = self.folder / name, len(raw.events.label)
        if not path.is_file():
            return None
        try:
            # Mapped: a damaged head that claims a wrong size is then found out by the size of the file.
            oracle = np.load(path, mmap_mode="r")
            is_column = oracle.dtype == np.float32 and oracle.ndim == 1
        # NumPy raises errors of many kinds where a head is damaged.
        except Exception:
            is_column = False
        if not is_column:
            raise UserError(f"{path} is damaged: it is not a column of float32; remove it, or the folder.")
        if len(oracle) != number:
            raw.skipped.append(f"left out the {path.stem}: it knows {len(oracle):,} ratings, not {number:,}")
            return None
        return np.array(oracle)


def locate(config: DataConfig, seed: int) -> MovieLens:
    """The configured set, obtained first where a name was given and nothing lies there.

    Writes that folder, and a lock and unfinished work beside it under hidden names; safe when two launches
    start at once.

    Raises:
        UserError: when there is nothing to read, or it cannot be had.
    """
    dataset = "synthetic" if config.is_synthetic else config.dataset
    folder, found = look(config, seed)
    if found is None:
        _obtain(dataset, folder, config, seed)
        folder, found = look(config, seed)
    # A named set may have been asked for with the folder of another one.
    if found is None or (dataset and files_in(folder) != EDITIONS[dataset]):
        raise UserError(
            f"{folder} does not hold {dataset} but {found.files[0].name if found else 'other files'}; "
            "give another --data_path, or leave --dataset out to read what lies there."
        )
    if dataset == "synthetic":
        from recsuite.datasets.movielens.synthetic import check_synthetic

        check_synthetic(folder, config.synthetic_ratings, seed, config.world)
    return found


def look(config: DataConfig, seed: int) -> tuple[Path, MovieLens | None]:
    """The folder of the configured set, and the set if its files lie there now; obtains nothing.

    Raises:
        UserError: when a file of it is missing there.
    """
    name = f"synthetic-{config.synthetic_ratings}-seed{seed}" if config.is_synthetic else config.dataset
    name += "" if config.is_default("world") else f"-{config.world}"
    # A folder such as "." has no name until then.
    folder = (Path(config.data_path) if config.data_path else DATA_ROOT / name).absolute()
    files = files_in(folder)
    if files is None:
        return folder, None
    # ml-10m and the later sets have no file of users.
    if not (folder / files.users).is_file():
        files = dataclasses.replace(files, users="", user_columns=())
    if config.split in OFFICIAL_SPLITS:
        files = dataclasses.replace(files, events=f"{config.split}.base, {config.split}.test")
    # A byte of the ratings that is not ASCII is then in a bad row, as what else is wrong with one.
    tables = find_tables(folder, dataclasses.replace(files, encoding="latin-1"))
    known = {*files.user_columns, *files.item_columns}
    features = {name: feature for name, feature in TABLES.features.items() if feature.column in known}
    features |= {name: FeatureColumn(ITEM, name, CATEGORY) for name in GENRES if name in known}
    schema = dataclasses.replace(TABLES, files=files, features=features)
    return folder, MovieLens(folder, tables, schema, config, SCHEMA)


def _decoded(file: File) -> File:
    """A file of ISO-8859-1, as of ml-1m and ml-100k, or UTF-8, which accents of the former never are."""
    decoded = dataclasses.replace(file, encoding="utf-8")
    with contextlib.suppress(UserError), contextlib.closing(TextFile(decoded)) as text:
        text.read()
        return decoded
    return file


def _obtain(dataset: str, folder: Path, config: DataConfig, seed: int) -> None:
    from recsuite.datasets.movielens.download import download
    from recsuite.datasets.movielens.synthetic import WORLDS, write_synthetic

    with explained(f"{folder} cannot be made", "give a --data_path that can be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, because the folder itself appears in one rename.
        with locked(folder.parent / f".{folder.name}.lock", f"preparing {folder}", DATA_DEADLINE):
            # Again: whoever had the lock may have obtained the files.
            if files_in(folder) is not None:
                return
            if dataset == "synthetic":
                write_synthetic(folder, config.synthetic_ratings, seed, WORLDS[config.world])
            else:
                download(dataset, folder)
