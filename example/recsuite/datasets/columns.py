"""A data set as columns on disk: parsed once, memory-mapped by every process of the machine.

    <cache>/<split>-<digest>/
        rows.npy                   int32 [ratings, 4]: user, movie, bits of the float32 rating, end of history
        rating.npy  time.npy       float32, int64 [ratings]
        user_features.npy          int32 [users, features]: table rows
        movie_features.npy         int32 [movies, features]: table rows; of a multi-valued feature two
                                   columns: where its values begin, and their number
        <feature>_values.npy       int32: table rows of a multi-valued feature, movie after movie
        history.npy                int32 [training ratings, 2]: row of the table "movie", bits of the rating;
                                   user after user, each in the order of time
        seen.npy                   int32 [training ratings]: their movies, in the same order
        history_offsets.npy        int64 [users that rated + 1]: where each user's history begins
        test_history.npy ...       the same three of training and validation ratings, for the test
        vocabulary.json            feature -> raw values in the order of their table rows 1, 2, ...
        manifest.json              what `Columns` holds

The training ratings come first, then those for validation, then the test, each part in the order of time: a
split is a range of positions. What is gathered is stored in rows, so that a rating costs one cache line; what
is scanned, the ratings, in a column too. A rating's history ends before the first rating of its user that is
not older than it. It holds training ratings alone, and for a test rating also validation ratings, which a
model in use would know of: neither a test rating nor the rating itself can be in it.

The folder appears in one rename. Its name holds a digest of all that it was made from (every byte of the
source files, feature table, split, format), so a changed source is another folder, and none is ever stale.
The manifest has a digest of itself and of every file: columns that do not match are made again, file by file,
each in one rename, so that whoever uses them meanwhile finds the same bits in either.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.duplicates import describe_leak
from recsuite.datasets.features import ENTITIES, FEATURES, HISTORY, Table, place_of_identity, vocabulary_of
from recsuite.errors import UserError, counted, printable
from recsuite.runtime.progress_bar import stage
from recsuite.training.metrics import (
    LIKED,
    METRICS,
    Metrics,
    fit_biases,
    fit_link,
    measure,
    measure_ranks,
    popularity_ranks,
)

if TYPE_CHECKING:
    import pandas

    from recsuite.datasets.movielens.formats import RawData
    from recsuite.files import FileEntry

FORMAT = 7
MANIFEST = "manifest.json"
# Files whose digests are taken at once.
DIGEST_THREADS = 4
# What is under way, by the number of its process, and what may be in it.
LEFTOVER = re.compile(r"\.making-\d+")
CONTENT = re.compile(r"\w+\.npy|vocabulary\.json|manifest\.json")
# Positions and ends are int32.
MAX_RATINGS = 2**31 - 1
# On disk: its row, rating and time, and twice its place in a history and among what was seen.
BYTES_OF_A_RATING = 16 + 4 + 8 + 2 * (8 + 4)

# Of making columns, as its progress is told.
NUM_PARTS = 5


@dataclass(frozen=True)
class Columns:
    """One data set on disk: where it lies, how long its splits are, which tables its features need.

    baselines: task to name to metrics on the test; digest: of the ratings in their order, and of where the
    splits begin; files: name to digest.
    """

    folder: str
    source: str
    num_train: int
    num_validation: int
    num_test: int
    num_skipped: int
    num_users: int
    num_movies: int
    mean_rating: float
    longest_history: int
    tables: tuple[Table, ...]
    baselines: dict[str, dict[str, Metrics]]
    notes: tuple[str, ...]
    digest: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def range_of(self, split: str) -> range:
        """The positions of "train", "validation" or "test" in the rating columns, or of "catalogue": all
        movies.
        """
        sizes = {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}
        if split == "catalogue":
            return range(self.num_movies)
        names = list(sizes)
        first = sum(sizes[name] for name in names[: names.index(split)])
        return range(first, first + sizes[split])

    def ratings(self, split: str) -> np.ndarray:
        """The ratings of a split, float32, mapped from disk."""
        positions = self.range_of(split)
        return self.column("rating")[positions.start : positions.stop]

    def column(self, name: str) -> np.ndarray:
        """A column, mapped from disk."""
        return np.load(Path(self.folder) / f"{name}.npy", mmap_mode="r")

    def place_of(self, entity: str) -> int:
        """The column of `<entity>_features.npy` that tells its users or movies apart."""
        return place_of_identity(entity, [table.feature for table in self.tables])

    def movie_shares(self) -> np.ndarray:
        """The share of the training ratings that is of each row of the table "movie", float32 [rows].

        A row that no training rating has, such as that of unknown movies, counts as one rating.
        """
        row_of_movie = self.column("movie_features")[:, self.place_of("movie")]
        rows = row_of_movie[self.column("rows")[: self.num_train, 1]]
        counts = np.bincount(rows, minlength=int(row_of_movie.max()) + 1)
        return (np.maximum(counts, 1) / self.num_train).astype(np.float32)


def open_columns(config: Config) -> Columns:
    """The columns of the configured data set, made first if they are not there or are damaged.

    Reads every byte of the files and of the columns: once on a machine is enough. Safe when several processes
    call it at once: one makes them, the others wait with a deadline.

    Raises:
        UserError: when the data cannot be had, read or stored.
    """
    from filelock import FileLock, Timeout

    from recsuite.datasets.movielens.formats import DATA_DEADLINE, locate, read, source_files

    source, layout = locate(config)
    cache = _cache_folder(source, config)
    files = source_files(source, layout, config)
    digests = _digests(files)
    folder = cache / _name(digests, config)
    columns, _ = _load(folder, source)
    if columns is not None:
        return _checked(columns, config)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".lock", timeout=DATA_DEADLINE):
            columns, fault = _load(folder, source)
            if columns is None:
                if fault:
                    print(f"the columns in {folder} are damaged and are made again: {fault}")
                print(f"reading {source}; its columns will lie in {folder}")
                with stage("reading the files"):
                    raw = read(source, layout, config)
                if _digests(files) != digests:
                    raise UserError(f"The files in {source} changed while they were read; start again.")
                _make(folder, raw, config)
                columns, _ = _load(folder, source, every_byte=False)
    except Timeout:
        raise UserError(
            f"Another process has been writing columns to {cache} for {DATA_DEADLINE:.0f} s; "
            "end it and start again."
        ) from None
    except OSError as error:
        raise UserError(
            f"The columns of {source} cannot be stored in {cache} ({error.strerror or error}); "
            "give --cache_dir a folder with space that can be written."
        ) from error
    assert columns is not None
    return _checked(columns, config)


def find_columns(config: Config) -> tuple[Path, Columns | None]:
    """The folder for the columns of the configured data set, and what lies there now; makes nothing, and
    looks no further into the columns than their sizes.

    Raises:
        UserError: when there are no files that columns could be made from, and no set to obtain was named.
    """
    from recsuite.datasets.movielens.formats import find_files

    source, files = find_files(config)
    if not files:
        return Path(config.data.cache_dir or source / ".columns"), None
    cache = _cache_folder(source, config)
    columns, _ = _load(cache / _name(_digests(files), config), source, every_byte=False)
    return cache, None if columns is None else _checked(columns, config)


def _checked(columns: Columns, config: Config) -> Columns:
    """With the table of the history if that is wanted; refuses a set of a known name and another size."""
    from recsuite.datasets.movielens.formats import NUM_RATINGS

    number = columns.num_train + columns.num_validation + columns.num_test + columns.num_skipped
    wanted = NUM_RATINGS.get(config.data.dataset, number)
    if number != wanted:
        raise UserError(
            f"{columns.source} holds {number:,} ratings, but {config.data.dataset} has {wanted:,}; remove "
            "the folder to download it again, or leave --dataset out to read it as it is."
        )
    if config.data.history == 0:
        return columns
    movies = next(table for table in columns.tables if table.name == vocabulary_of(HISTORY.name))
    history = Table(HISTORY, movies.rows, longest=min(config.data.history, columns.longest_history))
    return dataclasses.replace(columns, tables=(*columns.tables, history))


def _cache_folder(source: Path, config: Config) -> Path:
    if config.data.cache_dir:
        return Path(config.data.cache_dir)
    # Root may write anywhere; a folder whose mode forbids it is still not ours to write to.
    if os.access(source, os.W_OK) and source.stat().st_mode & 0o222:
        return source / ".columns"
    from recsuite.datasets.movielens.formats import DATA_ROOT

    name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:12]
    return DATA_ROOT / "columns" / f"{source.resolve().name}-{name}"


def _name(digests: dict[str, str], config: Config) -> str:
    """The folder for columns of files with these digests."""
    drawn = config.data.split in ("time", "random")
    made_from = {
        "format": FORMAT,
        "features": [dataclasses.astuple(feature) for feature in FEATURES],
        "files": digests,
        "bad_rows": (config.data.bad_rows, config.data.max_bad_rows),
        "duplicates": config.data.duplicates,
        "test_fraction": config.data.test_fraction if drawn else None,
        "validation_fraction": config.data.validation_fraction,
        "seed": config.runtime.seed,
    }
    return f"{config.data.split}-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]}"


def _digests(files: Sequence[Path]) -> dict[str, str]:
    """Name to digest. A file's time says little of it: a copy keeps it, and a clock may stand."""
    from recsuite.files import digest_of

    try:
        with stage("checking the files"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
            return dict(zip([path.name for path in files], pool.map(digest_of, files), strict=True))
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror or error}); give another --data_path."
        ) from None


def _load(folder: Path, source: Path, every_byte: bool = True) -> tuple[Columns | None, str]:
    """What the manifest says; or None and why it is not believed, nothing where there are no columns."""
    from recsuite.checkpoint.storage.manifest import SEAL, sealed

    if not folder.exists():
        return None, ""
    try:
        content = (folder / MANIFEST).read_bytes()
    except OSError as error:
        return None, str(error)
    try:
        manifest = json.loads(content)
        entries, columns = _described(manifest, folder, source)
    except (ValueError, TypeError, RecursionError) as error:
        return None, f"{MANIFEST} does not describe columns ({type(error).__name__}: {printable(error)})."
    if manifest.get(SEAL) != sealed(manifest)[SEAL]:
        return None, f"{MANIFEST} is not what was written."
    try:
        _check_files(folder, entries, every_byte)
    except (OSError, UserError) as error:
        return None, str(error)
    return columns, ""


def _described(manifest: Any, folder: Path, source: Path) -> tuple[tuple[FileEntry, ...], Columns]:
    """The files and the columns of which a manifest tells, of what JSON held for it.

    Raises:
        TypeError, ValueError: when it tells of none.
    """
    from recsuite.checkpoint.storage.manifest import SEAL
    from recsuite.files import FileEntry

    if not isinstance(manifest, dict):
        raise TypeError("it holds no names with their values")
    entries = _made_of(tuple[FileEntry, ...], manifest.get("files"))
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    files = {entry.name: entry.xxh3_128 for entry in entries}
    columns = _made_of(Columns, {**rest, "folder": str(folder), "source": str(source), "files": files})
    for what, needed, there in (
        ("baselines of the task", METRICS, columns.baselines),
        ("table of the feature", ENTITIES, [table.name for table in columns.tables]),
    ):
        missing = [name for name in needed if name not in there]
        if missing:
            raise ValueError(f"it has no {what} {missing[0]}")
    return entries, columns


def _made_of(kind: Any, value: Any) -> Any:
    """A value of a type, such as a dataclass with all its fields, of what JSON held for it.

    Raises:
        TypeError, ValueError: when it is none.
    """
    from recsuite.checkpoint.storage.manifest import LARGEST

    of = get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = get_type_hints(kind)
        if value.keys() != fields.keys():
            raise ValueError(f"it has {', '.join(value)} instead of {', '.join(fields)}")
        return kind(**{name: _made_of(fields[name], held) for name, held in value.items()})
    if get_origin(kind) is tuple and type(value) in (list, tuple):
        return tuple(_made_of(of[0], held) for held in value)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: _made_of(of[1], held) for name, held in value.items()}
    if type(value) is not kind or (kind is int and not 0 <= value <= LARGEST):
        raise TypeError(f"{value!r} is no {kind}")
    return value


def _check_files(folder: Path, entries: Sequence[FileEntry], every_byte: bool) -> None:
    """Refuse files that are not those that were written, and columns beside them.

    Raises:
        UserError, OSError: for the first one.
    """
    from recsuite.files import check_file

    for entry in entries:
        if (folder / entry.name).stat().st_size != entry.bytes:
            raise UserError(f"{entry.name} has another size than when it was written.")
    strange = {path.name for path in folder.glob("*.npy")} - {entry.name for entry in entries}
    if strange:
        raise UserError(f"{min(strange)} is none of them.")
    if every_byte:
        with stage("checking the columns"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
            list(pool.map(lambda entry: check_file(folder, entry), entries))


def _make(folder: Path, raw: RawData, config: Config) -> None:
    """Write columns, and put them where they are to be. Call it with the lock."""
    from recsuite.checkpoint.storage.manifest import sealed
    from recsuite.files import flush, flushed

    # The lock is ours, so whatever lies here unfinished was left by a process that died.
    for leftover in filter(_is_leftover, folder.parent.iterdir()):
        shutil.rmtree(leftover)
    making = folder.parent / f".making-{os.getpid()}"
    making.mkdir()
    try:
        with stage("making columns", NUM_PARTS, "parts", even=False) as reached:
            manifest = _write_columns(making, raw, config, reached)
        # The rename must not get to the disk before what it names.
        files = [dataclasses.asdict(flushed(path)) for path in sorted(making.iterdir())]
        (making / MANIFEST).write_text(json.dumps(sealed({**manifest, "files": files}), indent=1))
        flush(making / MANIFEST)
        flush(making)
        _publish(making, folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _is_leftover(path: Path) -> bool:
    """Whether `_make` made a folder: --cache_dir may be one in which others make things too."""
    if not LEFTOVER.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return all(CONTENT.fullmatch(found.name) for found in path.iterdir())


def _publish(making: Path, folder: Path) -> None:
    """Give new columns their name; where damaged ones lie, file by file, for somebody may be reading them."""
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
        making.rename(folder)
        return
    made = sorted(making.iterdir(), key=lambda path: path.name == MANIFEST)
    names = {path.name for path in made}
    for old in folder.iterdir():
        if old.is_dir() and (old.name in names or old.suffix == ".npy"):
            shutil.rmtree(old)
        elif old.name not in names and old.suffix == ".npy":
            old.unlink()
    for path in made:
        path.replace(folder / path.name)
    making.rmdir()


@dataclass(frozen=True)
class Stored:
    """The ratings in the order in which they are stored: positions of users and movies and table rows of
    movies, int32 [ratings]; ratings, float32; time, int64.
    """

    user: np.ndarray
    movie: np.ndarray
    movie_row: np.ndarray
    rating: np.ndarray
    time: np.ndarray


def _write_columns(
    folder: Path, raw: RawData, config: Config, reached: Callable[[int], None]
) -> dict[str, Any]:
    import pandas

    from recsuite.files import digest_of

    order, sizes, notes = _split(raw, config)
    num_train = sizes[0]
    ratings = raw.ratings
    if len(order) > MAX_RATINGS:
        raise UserError(f"There are {len(order):,} ratings, and {MAX_RATINGS:,} is the limit; give fewer.")
    reached(1)
    # Hashed look-ups of raw ids: ids have gaps, positions have none.
    user = pandas.Index(raw.users["user_id"]).get_indexer(ratings.user_id[order]).astype(np.int32)
    movie = pandas.Index(raw.movies["movie_id"]).get_indexer(ratings.movie_id[order]).astype(np.int32)
    rating = ratings.rating[order]
    np.save(folder / "rating.npy", rating)
    np.save(folder / "time.npy", ratings.time[order])
    reached(2)
    entities = {
        "user": (raw.users, np.unique(user[:num_train])),
        "movie": (raw.movies, np.unique(movie[:num_train])),
    }
    tables, left_out = _write_features(folder, entities)
    place = place_of_identity("movie", [table.feature for table in tables])
    movie_rows = np.load(folder / "movie_features.npy")[:, place]
    stored = Stored(user, movie, movie_rows[movie], rating, ratings.time[order])
    reached(3)
    ends, longest_history = _write_histories(folder, stored, sizes)
    np.save(folder / "rows.npy", np.stack([user, movie, rating.view(np.int32), ends], axis=1))
    reached(4)
    oracle = None if raw.oracle is None else raw.oracle[order]
    if left_out:
        notes.append(f"left out the features that the files do not have: {', '.join(left_out)}")
    return {
        # Of all that a position of the training stands for.
        "digest": f"{digest_of(folder / 'rows.npy')}-{num_train}-{sizes[1]}",
        "num_train": num_train,
        "num_validation": sizes[1],
        "num_test": sizes[2],
        "num_skipped": raw.num_skipped,
        "num_users": len(raw.users),
        "num_movies": len(raw.movies),
        "longest_history": longest_history,
        "mean_rating": float(rating[:num_train].mean(dtype=np.float64)),
        "tables": [dataclasses.asdict(table) for table in tables],
        "baselines": _baselines(stored, sizes, len(raw.movies), oracle),
        "notes": [*raw.skipped, *notes],
    }


def _split(raw: RawData, config: Config) -> tuple[np.ndarray, tuple[int, int, int], list[str]]:
    """The order in which ratings are stored, int64 [ratings]; how many are for training, validation and the
    test; and what there is to say of it.
    """
    # Stable, so that ratings of one second keep the order of the file on every machine.
    by_time = np.argsort(raw.ratings.time, kind="stable")
    user = raw.ratings.user_id[by_time]
    is_test, notes = _choose_test(raw, by_time, config)
    is_validation = _choose_validation(user, ~is_test, config)
    is_train = ~is_test & ~is_validation
    sizes = int(is_train.sum()), int(is_validation.sum()), int(is_test.sum())
    if sizes[0] == 0 or sizes[2] == 0:
        raise UserError(
            f"--split {config.data.split} of {len(user)} ratings with --test_fraction "
            f"{config.data.test_fraction} and --validation_fraction {config.data.validation_fraction} leaves "
            f"{sizes[0]} for training and {sizes[2]} for the test; give fractions that leave some for both."
        )
    if sizes[1] == 0:
        notes.append("no rating is for validation: there are no results on the way, and no early stopping")
    if config.data.duplicates == "keep":
        notes += describe_leak(raw.ratings, by_time[is_test])
    return np.concatenate([by_time[is_train], by_time[is_validation], by_time[is_test]]), sizes, notes


def _choose_test(raw: RawData, by_time: np.ndarray, config: Config) -> tuple[np.ndarray, list[str]]:
    """Whether each rating, in the order of time, is for the test, bool [ratings]; and what to say of it."""
    number = len(by_time)
    if raw.official_test is not None:
        return raw.official_test[by_time], []
    time = raw.ratings.time[by_time]
    if config.data.split == "leave_one_out":
        return _choose_newest_of_each(raw.ratings.user_id[by_time], time)
    num_test = round(number * config.data.test_fraction)
    is_test = np.arange(number) >= number - num_test
    if config.data.split == "random":
        return np.random.default_rng([config.runtime.seed, 1]).permutation(is_test), []
    return is_test, _describe_cut(time, number - num_test)


def _describe_cut(time: np.ndarray, cut: int) -> list[str]:
    """What to say where the test begins among ratings of one time. time: in its order, int64 [ratings].

    Raises:
        UserError: when all have one time, so that none is newer than another.
    """
    if len(time) > 1 and time[0] == time[-1]:
        raise UserError(
            f"--split time of {len(time):,} ratings that all have the time {time[0]} has no newest ones; "
            "give --split random."
        )
    if not 0 < cut < len(time) or time[cut - 1] != time[cut]:
        return []
    first, end = np.searchsorted(time, time[cut], "left"), np.searchsorted(time, time[cut], "right")
    return [
        f"the test begins among {end - first:,} ratings of one time ({time[cut]}): the last {end - cut:,} of "
        "them in the file are in it"
    ]


def _choose_newest_of_each(user: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Whether each rating is the last one of its user, bool [ratings]; and what to say of it."""
    newest, num_single = _newest_of_each(user)
    is_test = np.zeros(len(user), bool)
    is_test[newest] = True
    notes = []
    if num_single:
        single = counted(num_single, "user has", "users have")
        notes.append(f"{single} a single rating, which is for training: the test has none")
    # In the order of their users' ids, as `newest` is.
    place = np.searchsorted(user[newest], user).clip(max=max(0, len(newest) - 1))
    is_as_new = (user[newest][place] == user) & (time[newest][place] == time) if len(newest) else is_test
    num_tied = int((np.bincount(place[is_as_new], minlength=1) > 1).sum())
    if num_tied:
        notes.append(
            f"{num_tied:,} of {len(newest):,} users have several ratings of the time of their newest: the "
            "last of them in the file is in the test"
        )
    return is_test, notes


def _choose_validation(user: np.ndarray, is_left: np.ndarray, config: Config) -> np.ndarray:
    """Whether each rating, in the order of time, is for validation, bool [ratings]: --validation_fraction of
    those that are left beside the test, drawn by the seed; for leave_one_out among the newest left of each
    user.

    Not the newest for --split time: what is newest tells most of the test.
    """
    left = np.flatnonzero(is_left)
    wanted = round(len(left) * config.data.validation_fraction)
    among = left[_newest_of_each(user[left])[0]] if config.data.split == "leave_one_out" else left
    is_validation = np.zeros(len(user), bool)
    is_validation[np.random.default_rng([config.runtime.seed, 2]).permutation(among)[:wanted]] = True
    return is_validation


def _newest_of_each(user: np.ndarray) -> tuple[np.ndarray, int]:
    """The place of the last rating of each user with two or more, int64; and how many users have one."""
    _, from_end, counts = np.unique(user[::-1], return_index=True, return_counts=True)
    return len(user) - 1 - from_end[counts > 1], int((counts == 1).sum())


def _write_histories(folder: Path, stored: Stored, sizes: tuple[int, int, int]) -> tuple[np.ndarray, int]:
    """Write what users rated, as training and validation know it, and as the test does; returns where the
    histories of all ratings end, int32 [ratings], and how long the longest is.
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    ends, lengths = _write_history(folder, "", stored, num_train)
    ends_in_test, lengths_in_test = _write_history(folder, "test_", stored, num_known)
    ends[num_known:], lengths[num_known:] = ends_in_test[num_known:], lengths_in_test[num_known:]
    return ends, int(lengths.max())


def _write_history(folder: Path, prefix: str, stored: Stored, num_told: int) -> tuple[np.ndarray, np.ndarray]:
    """Write the first ratings, which are told of, user after user; returns for all ratings where their
    histories end, int32 [ratings], and how long they are.
    """
    order = np.lexsort([stored.time, stored.user])
    is_told = order < num_told
    before: np.ndarray = np.cumsum(is_told) - is_told
    # Ratings of one user in one second do not know of each other: all of them end where the first does.
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(stored.user[order]) != 0) | (np.diff(stored.time[order]) != 0)
    ends = np.empty(len(order), np.int32)
    ends[order] = before[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    told = order[is_told]
    bits = stored.rating[told].view(np.int32)
    np.save(folder / f"{prefix}history.npy", np.stack([stored.movie_row[told], bits], axis=1))
    np.save(folder / f"{prefix}seen.npy", stored.movie[told])
    counts = np.bincount(stored.user[told], minlength=int(stored.user.max()) + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    np.save(folder / f"{prefix}history_offsets.npy", offsets)
    return ends, ends - offsets[stored.user]


def _write_features(
    folder: Path, entities: dict[str, tuple[pandas.DataFrame, np.ndarray]]
) -> tuple[list[Table], list[str]]:
    """Write table rows for all users and movies.

    A table has a row for each value that the training ratings show, and row 0 for any other: a row that
    training never touches would be noise in the test.
    """
    tables: list[Table] = []
    left_out: list[str] = []
    vocabulary: dict[str, list[Any]] = {}
    # Those with lists last, so that all others are joined at once.
    features = sorted(FEATURES, key=lambda feature: feature.multi)
    for entity, (frame, trained) in entities.items():
        # Refused before anything is written, for all else looks for it.
        place_of_identity(entity, features)
        rows: list[np.ndarray] = []
        for feature in (feature for feature in features if feature.entity == entity):
            if feature.column not in frame:
                left_out.append(feature.name)
                continue
            column = frame[feature.column]
            values = column.explode() if feature.multi else column
            known = np.unique(values.loc[trained].dropna())
            positions = _rows_of(values, known)
            if feature.multi:
                # A movie without a genre has the genre "unknown": no list is empty.
                counts = column.str.len().clip(lower=1).to_numpy(np.int32)
                np.save(folder / f"{feature.name}_values.npy", positions)
                rows += [(np.cumsum(counts) - counts).astype(np.int32), counts]
                longest = int(counts.max())
            else:
                rows.append(positions)
                longest = 1
            vocabulary[feature.name] = known.tolist()
            tables.append(Table(feature, len(known) + 1, longest))
        np.save(folder / f"{entity}_features.npy", np.stack(rows, axis=1))
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    return sorted(tables, key=lambda table: table.feature.multi), left_out


def _rows_of(values: pandas.Series, known: np.ndarray) -> np.ndarray:
    """Table rows, int32: 1 and up for the known values, 0 for others (get_indexer says -1 for those)."""
    import pandas

    return (pandas.Index(known).get_indexer(pandas.Index(values)) + 1).astype(np.int32)


def _baselines(
    stored: Stored, sizes: tuple[int, int, int], num_movies: int, oracle: np.ndarray | None
) -> dict[str, dict[str, Metrics]]:
    """What a model of each task has to beat on the test ratings.

    Fitted on all that is not the test, which makes them harder to beat; but the link of a log loss is that of
    predictions of the validation ratings, made without them, as for the model.
    """
    num_train, num_validation, _ = sizes
    num_known = num_train + num_validation
    validation, test = slice(num_train, num_known), slice(num_known, None)
    user, movie, rating = stored.user, stored.movie, stored.rating
    early, late = (
        fit_biases(user[:number], movie[:number], rating[:number], int(user.max()) + 1, num_movies)
        for number in (num_train, num_known)
    )
    predictions = {
        "global mean": (np.full(num_validation, early.mean), np.full(sizes[2], late.mean)),
        "biases": (
            early.predict(user[validation], movie[validation]),
            late.predict(user[test], movie[test]),
        ),
    }
    if oracle is not None:
        predictions["oracle"] = oracle[validation], oracle[test]
    of_ratings = {
        name: measure(on_test, rating[test], fit_link(on_validation, rating[validation] >= LIKED))
        for name, (on_validation, on_test) in predictions.items()
    }
    popularity = measure_ranks(popularity_ranks(user, movie, num_known, num_movies))
    return {"rating": of_ratings, "ranking": {"popularity": popularity}}
