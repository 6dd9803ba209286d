"""Where ratings come from: the MovieLens file formats, read into columns.

Finds or obtains the files and reads them whole; every row that cannot be read is named. Knows nothing of
batches or models. A data worker never imports it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from recsuite.checkout import DATA_ROOT
from recsuite.config.sections.data import OFFICIAL_SPLITS, DataConfig
from recsuite.datasets.movielens.parsing.entities import read_movies, read_users
from recsuite.datasets.movielens.parsing.ratings import read_ratings
from recsuite.datasets.movielens.parsing.reader import LAYOUTS, Layout, Reader
from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.datasets.schema import Events, RawData, Schema
from recsuite.errors import UserError
from recsuite.files import digest_of, explained, locked

if TYPE_CHECKING:
    import pandas

# Below the working directory where there is no repository, as --save_dir and --report_dir are.
# Long enough for the largest archive on a slow line; a wait beyond it is a fault.
DATA_DEADLINE = 3600.0
# Waiting for another launch, a download, waiting for its columns, and parsing, one after the other.
PREPARATION_DEADLINE = 4 * DATA_DEADLINE

# As GroupLens states them; ml-latest grows and is not checked.
NUM_RATINGS = {
    "ml-100k": 100_000,
    "ml-1m": 1_000_209,
    "ml-10m": 10_000_054,
    "ml-20m": 20_000_263,
    "ml-25m": 25_000_095,
    "ml-32m": 32_000_204,
}

# How a file of float32 begins that numpy wrote.
COLUMN = re.compile(
    rb"\x93NUMPY....?.?\{'descr': '<f4', 'fortran_order': False, 'shape': \(\d{1,18},\), \}", re.DOTALL
)


@dataclass(frozen=True)
class MovieLensFile:
    """See `datasets.source.SourceFile`."""

    path: Path

    @property
    def name(self) -> str:
        """See `SourceFile`."""
        return self.path.name

    @property
    def size(self) -> int:
        """See `SourceFile`."""
        return self.path.stat().st_size

    def open(self) -> IO[bytes]:
        """See `SourceFile`."""
        return self.path.open("rb")

    def digest(self) -> str:
        """See `SourceFile`."""
        with explained(f"{self.path} cannot be read", "give another --data_path"):
            return digest_of(self.path)


@dataclass(frozen=True)
class MovieLens:
    """A MovieLens set, or one in its form. See `datasets.source.Source`."""

    folder: Path
    layout: Layout
    config: DataConfig

    @property
    def schema(self) -> Schema:
        """See `Source`."""
        return SCHEMA

    @property
    def key(self) -> dict[str, Any]:
        """See `Source`."""
        return dataclasses.asdict(self.schema)

    @property
    def has_times(self) -> bool:
        """See `Source`."""
        return True

    @property
    def files(self) -> list[MovieLensFile]:
        """See `Source`."""
        layout = self.layout
        names = [*_rating_files(layout, self.config.split), layout.movies, layout.users]
        names += ["u.genre", "oracle.npy", "ranks.npy"]
        return [
            MovieLensFile(self.folder / name) for name in names if name and (self.folder / name).is_file()
        ]

    def read(self) -> RawData:
        """See `Source`."""
        return read(self.folder, self.layout, self.config)


def locate(config: DataConfig, seed: int) -> MovieLens:
    """The configured set, obtained first where a name was given and nothing lies there.

    Writes that folder, and a lock and unfinished work beside it under hidden names; safe when two launches
    start at once.

    Raises:
        UserError: when there is nothing to read, or it cannot be had.
    """
    dataset, folder, layout = _look(config, seed)
    if layout is None:
        _obtain(dataset, folder, config, seed)
        layout = _find_layout(folder)
    # A named set may have been asked for with the folder of another one.
    if layout is None or (dataset and dataset not in layout.datasets):
        raise UserError(
            f"{folder} does not hold {dataset} but {layout.ratings if layout else 'other files'}; "
            "give another --data_path, or leave --dataset out to read what lies there."
        )
    if dataset == "synthetic":
        from recsuite.datasets.movielens.synthetic import check_synthetic

        check_synthetic(folder, config.synthetic_ratings, seed, config.world)
    return MovieLens(folder, layout, config)


def look(config: DataConfig, seed: int) -> tuple[Path, MovieLens | None]:
    """The folder of the configured set, and the set if its files lie there now; obtains nothing.

    Raises:
        UserError: when there is nothing to read, and no set to obtain was named.
    """
    _, folder, layout = _look(config, seed)
    return folder, None if layout is None else MovieLens(folder, layout, config)


def _look(config: DataConfig, seed: int) -> tuple[str, Path, Layout | None]:
    dataset = "synthetic" if config.is_synthetic else config.dataset
    name = f"synthetic-{config.synthetic_ratings}-seed{seed}" if dataset == "synthetic" else dataset
    name += "" if config.is_default("world") else f"-{config.world}"
    folder = Path(config.data_path) if config.data_path else DATA_ROOT / name
    # A folder such as "." has no name until then.
    folder = folder.absolute()
    layout = _find_layout(folder)
    if layout is None and not dataset:
        names = ", ".join(layout.ratings for layout in LAYOUTS)
        raise UserError(
            f"--data_path {folder} holds no MovieLens ratings ({names}); give the folder of the unpacked "
            "files, or --dataset NAME to download a set there."
        )
    return dataset, folder, layout


def read(folder: Path, layout: Layout, config: DataConfig) -> RawData:
    """Read all files of a set, as they are: `datasets.source` settles what is repeated.

    Raises:
        UserError: for a missing, empty or malformed file, with --bad_rows error for the first bad row, and
            with skip for more than the share --max_bad_rows of them.
    """
    reader = Reader(folder, config.bad_rows == "skip", config.max_bad_rows)
    movies = read_movies(reader, layout)
    users = read_users(reader, layout)
    known_users = users["user_id"].to_numpy() if users is not None else None
    known_movies = movies["movie_id"].to_numpy()

    parts = _rating_files(layout, config.split)
    tables = [read_ratings(reader, part, layout, known_users, known_movies) for part in parts]
    user, movie, label, time = (np.concatenate(columns) for columns in zip(*tables, strict=True))
    official_test = None
    if len(parts) == 2:
        official_test = np.arange(len(label)) >= len(tables[0][0])
    # The later sets have no file of users.
    if users is None:
        import pandas

        users = pandas.DataFrame({"user_id": np.unique(user)})
    # In the order of the ids: positions, and so every tie between them, must not come from that of a file.
    users, movies = (
        frame.sort_values(name, ignore_index=True)
        for frame, name in ((users, "user_id"), (movies, "movie_id"))
    )
    events = Events(_positions(users["user_id"], user), _positions(movies["movie_id"], movie), label, time)
    oracle, ranks = (_read_oracle(reader, name, len(events.label)) for name in ("oracle", "ranks"))
    return RawData(
        events,
        movies,
        users,
        official_test,
        oracle,
        reader.notes,
        reader.num_skipped_ratings,
        {part: len(table[0]) for part, table in zip(parts, tables, strict=True)},
        ranks,
    )


def _positions(ids: pandas.Series, wanted: np.ndarray) -> np.ndarray:
    """Where each wanted raw id, all of which are there, stands among the ids, int32."""
    import pandas

    found = ids.to_numpy()
    first, last = int(found[0]), int(found[-1])
    # Ids with few gaps are looked up in an array, which takes a quarter of the time that hashing takes.
    if last - first < 4 * len(wanted):
        places = np.empty(last - first + 1, np.int32)
        places[found - first] = np.arange(len(found), dtype=np.int32)
        return places[wanted - first]
    return pandas.Index(ids).get_indexer(wanted).astype(np.int32)


def _rating_files(layout: Layout, split: str) -> list[str]:
    if split in OFFICIAL_SPLITS:
        return [f"{split}.base", f"{split}.test"]
    return [layout.ratings]


def is_known(folder: Path) -> bool:
    """Whether a folder holds MovieLens files; others may have a ratings.csv too."""
    layout = _find_layout(folder)
    if layout is None:
        # What is left of a set is refused by the name of what is missing.
        return any(isfile(folder / layout.movies) for layout in LAYOUTS if not layout.header)
    return not layout.header or isfile(folder / layout.movies) or _begins_with(folder, layout)


def _begins_with(folder: Path, layout: Layout) -> bool:
    """Whether the ratings have the header that the set has."""
    with (
        explained(f"{folder} cannot be read", "give another --data_path"),
        (folder / layout.ratings).open("rb") as file,
    ):
        return layout.header.encode() in file.readline(1024)


def _find_layout(folder: Path) -> Layout | None:
    # That of pathlib raises where a folder forbids to look, or a name is too long.
    return next((layout for layout in LAYOUTS if isfile(folder / layout.ratings)), None)


def _obtain(dataset: str, folder: Path, config: DataConfig, seed: int) -> None:
    from recsuite.datasets.movielens.download import download
    from recsuite.datasets.movielens.synthetic import WORLDS, write_synthetic

    with explained(f"{folder} cannot be made", "give a --data_path that can be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, because the folder itself appears in one rename.
        with locked(folder.parent / f".{folder.name}.lock", f"preparing {folder}", DATA_DEADLINE):
            # Again: whoever had the lock may have obtained the files.
            if _find_layout(folder) is not None:
                return
            if dataset == "synthetic":
                write_synthetic(folder, config.synthetic_ratings, seed, WORLDS[config.world])
            else:
                download(dataset, folder)


def _read_oracle(reader: Reader, name: str, num_ratings: int) -> np.ndarray | None:
    """What the oracle says beside synthetic ratings, float32, one a rating."""
    path = reader.folder / f"{name}.npy"
    if not path.is_file():
        return None
    try:
        # Mapped: a damaged head that claims a wrong size is then found out by the size of the file.
        oracle = np.load(path, mmap_mode="r") if _is_column(path) else None
    except ValueError:
        oracle = None
    if oracle is None:
        raise UserError(f"{path} is damaged: it is not a column of float32; remove it, or the folder.")
    if len(oracle) != num_ratings:
        reader.notes.append(f"left out the {name}: it knows {len(oracle):,} ratings, not {num_ratings:,}")
        return None
    return np.array(oracle)


def _is_column(path: Path) -> bool:
    """Whether a file begins as one that numpy wrote; what else it may hold, numpy reads with any error."""
    with path.open("rb") as file:
        return COLUMN.match(file.read(256)) is not None
