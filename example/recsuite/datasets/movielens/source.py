"""MovieLens: its files, downloaded if they are missing, and read as tables.

Embedding tables, batches and tests derive from the schema.toml beside this file. To add a feature, add a
section to it, if the files have its column. This module adds the rest: years from titles, genres as one list,
and the oracle of synthetic ratings.

A set is downloaded from GroupLens, or from a mirror, completely or not at all. The archive is an unnamed
file, which ends with the process. It is unpacked into a hidden folder beside the final one, which gets its
name in one rename at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import tempfile
import time
import zipfile
from dataclasses import replace
from itertools import compress
from os.path import isfile
from pathlib import Path
from typing import IO

import numpy as np
from typing_extensions import override

from recsuite.config.sections import OFFICIAL_SPLITS, DataConfig
from recsuite.datasets.schema import ITEM, RawData
from recsuite.datasets.tables.files import File, find_tables
from recsuite.datasets.tables.schema_file import read_schema
from recsuite.datasets.tables.sections import CATEGORY, FeatureColumn, Files
from recsuite.datasets.tables.source import TableFile, TableSource
from recsuite.errors import UserError, printable
from recsuite.files import DATA_ROOT, explained, locked, remove, replacing
from recsuite.hooks import extra
from recsuite.places import shown
from recsuite.runtime.console import say

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


SOURCE = "https://files.grouplens.org/datasets/movielens/"
# The md5 of each archive, and its size in MB. Six sets are frozen: their digests are those that GroupLens
# publishes beside the zip. The two others are updated from time to time: "" means the digest that is beside
# the zip at the time of the download, which detects a damaged transfer.
ARCHIVES = {
    "ml-100k": ("0e33842e24a9c977be4e0107933c0723", 5),
    "ml-1m": ("c4d9eecfca2ab87c1945afe126590906", 6),
    "ml-10m": ("ce571fd55effeba0271552578f2648bd", 66),
    "ml-20m": ("cd245b17a1ae2cc31bb14903e1204af3", 199),
    "ml-25m": ("6b51fb2759a8657d3bfcbfc42b592ada", 262),
    "ml-32m": ("d472be332d4daa821edc399621853b57", 239),
    "ml-latest-small": ("", 1),
    "ml-latest": ("", 351),
}
# The deadline is for all attempts together, even while the server sends data. The pause doubles.
DEADLINE_SECONDS, ATTEMPTS, PAUSE_SECONDS = 3600.0, 4, 1.0


def download(name: str, folder: Path) -> None:
    """Download the MovieLens set `name` and unpack its files into `folder`.

    The caller has to make sure that one process at a time does this. The environment variable
    MOVIELENS_MIRROR replaces the address of GroupLens.

    Raises:
        UserError: when the download fails, or `folder` is not empty; then `folder` is as it was.
    """
    url = f"{(os.environ.get('MOVIELENS_MIRROR') or SOURCE).rstrip('/')}/{name}.zip"
    address = printable(shown(url))
    # A link may lead to another disk; the temporary files belong there too.
    home = Path(os.path.realpath(folder))
    aside, end = home.with_name(f".{home.name}.download"), time.monotonic() + DEADLINE_SECONDS
    digest, megabytes = ARCHIVES[name]
    advice = f"place the unpacked files in {folder} by hand, or use --dataset synthetic"
    with explained(f"Cannot get {address}", advice):
        if not url.startswith(("https://", "http://")):
            raise OSError("MOVIELENS_MIRROR must begin with https:// or http://")
        if home.exists() and any(home.iterdir()):
            raise OSError(f"{folder} is not empty, and nothing in it is overwritten")
        home.parent.mkdir(parents=True, exist_ok=True)
        # A killed process may have left one.
        remove(aside)
        with tempfile.TemporaryFile(dir=home.parent) as archive, replacing(home, aside):
            digest = digest or _published_digest(f"{url}.md5", end)
            say(f"Downloading {address} ({megabytes} MB)")
            _fetch(url, archive, end)
            if (md5 := _md5(archive)) != digest:
                raise OSError(f"its md5 is {md5} and must be {digest}")
            _unpack(archive, aside)


def _published_digest(url: str, end: float) -> str:
    beside = io.BytesIO()
    _fetch(url, beside, end)
    # Either `MD5 (ml-latest.zip) = <digest>` or `<digest>  ml-latest.zip`.
    match = re.search(rb"\b[0-9a-f]{32}\b", beside.getvalue().lower())
    if match is None:
        raise OSError(f"{printable(shown(url))} holds no md5")
    return match.group().decode()


def _fetch(url: str, file: IO[bytes], end: float) -> None:
    """Write the content of a URL to a file, with a few attempts until `end`, in `time.monotonic` seconds."""
    urls = extra("urls")
    fs, path = urls.filesystem(url)
    for attempt in range(ATTEMPTS):
        file.seek(0)
        file.truncate()
        try:
            # The timeout of fsspec is for the whole request, not for a single wait.
            fs.get_file(path, file, timeout=max(end - time.monotonic(), 0.001))
            return
        except Exception as error:
            # An error of the disk: network errors have their own classes.
            if type(error) is OSError:
                raise
            left, kind = end - time.monotonic(), type(error).__name__
            reason = urls.reason_of_failure(error)
            if left < 0.01:
                reason = f"it was not complete after {DEADLINE_SECONDS:,g} s"
            # Errors that would come again: an address, a certificate, a refusal.
            lasting = isinstance(error, (FileNotFoundError, ValueError)) or "Redirect" in kind
            if lasting or left < 0.01 or getattr(error, "status", 500) < 500 or attempt == ATTEMPTS - 1:
                # Without the cause: it may contain the address with its secrets.
                raise OSError(reason) from None
            pause = min(PAUSE_SECONDS * 2**attempt, left)
            say(f"Trying {printable(shown(url))} again in {pause:.1f} s: {reason}")
            time.sleep(pause)


def _md5(file: IO[bytes]) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    file.seek(0)
    while block := file.read(2**20):
        md5.update(block)
    return md5.hexdigest()


def _unpack(archive: IO[bytes], into: Path) -> None:
    """Extract the files in the single folder of an archive to a new folder."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            for member in zipped.infolist():
                # zipfile sanitises names with "..", so they stay within the folder.
                member.filename = member.filename.partition("/")[2]
                if member.filename:
                    zipped.extract(member, into)
    except OSError:
        raise
    # Damage may raise any error of zipfile and its decoders.
    except Exception as error:
        raise OSError(f"it is not a zip file that can be read ({printable(error)})") from error


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
    def read(self) -> RawData:
        tables = dataclasses.replace(self.tables, items=tuple(map(_decoded, self.tables.items)))
        # Imported late, as in `TableSource`.
        from recsuite.datasets.tables.reading import read_tables

        raw = read_tables(tables, self.table_schema, self.config)
        items = raw.items
        if "occupation" in raw.users:
            # In ml-1m they are numbers: codes of categories, like the texts of ml-100k.
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
    from recsuite.datasets.movielens.synthetic import WORLDS, write_synthetic

    with explained(f"Cannot make {folder}", "give a --data_path that can be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, because the folder itself appears in one rename.
        with locked(folder.parent / f".{folder.name}.lock", f"preparing {folder}", DATA_DEADLINE):
            # Check again: another process may have obtained the files before this one got the lock.
            if files_in(folder) is not None:
                return
            if dataset == "synthetic":
                write_synthetic(folder, config.synthetic_ratings, seed, WORLDS[config.synthetic_kind])
            else:
                download(dataset, folder)
