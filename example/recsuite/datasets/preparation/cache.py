"""Columns of a configured data set: found beside its files, checked, and made if they are missing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets.columns import DIGEST_THREADS, MANIFEST, VERSION, Columns, load_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import EXCLUDE, RawData, Table
from recsuite.datasets.source import DATA_DEADLINE, NUM_EVENTS, locate, with_flags
from recsuite.errors import UserError, printable
from recsuite.files import digest_of_bytes, explained, locked, place_for, remove, replace_file, replacing
from recsuite.metrics import TOP
from recsuite.places import ObjectPath, folder_at, is_remote
from recsuite.runtime.console import say, stage

if TYPE_CHECKING:
    from recsuite.datasets.tables.source import TableFile, TableSource


def newest_of(cache: Path, name: str) -> Path:
    """Return the path of columns of this name: the last successor of the folder, if it has any."""
    numbers = [int(path.suffix[1:]) for path in cache.glob(f"{name}.*") if path.suffix[1:].isdecimal()]
    return cache / (f"{name}.{max(numbers)}" if numbers else name)


# The split of a stream, in the names of its columns.
STREAM, VOCABULARY = "stream", "vocabulary.json"
# Subfolder of the folder of the files with the columns.
COLUMNS = ".columns"


def open_columns(config: Config, launch: str = "", source: TableSource | None = None) -> Columns:
    """Return the columns of the configured data set. Make them first if they are missing or damaged.

    Reads every byte of the files and of the columns, so call it once on a machine. Safe when several
    processes call it at once: one makes the columns, the others wait with a deadline.

    launch: identifies the launch. --rebuild makes columns again once for each launch, or at each call if it
    is empty. source: with other tables than those of the flags.

    Raises:
        UserError: when the data cannot be obtained, read or stored.
    """
    data, seed = config.data, config.runtime.seed
    source = source or with_flags(locate(data, seed), config.tables, data)
    check_event_types(source, config)
    is_named, cache = bool(data.cache_dir) and not is_remote(data.cache_dir), cache_of(source, data)
    digests = digests_of_files(source.files)
    name = name_of_columns(digests, source.key, data, seed)

    def read_again() -> RawData:
        with stage("reading the files"):
            raw = read(source, data, cache)
        # The name of the folder contains the digests of the files.
        if digests_of_files(source.files) != digests:
            raise UserError(f"The files in {source.folder} changed while they were read; start again.")
        return raw

    columns = None
    # First without the lock: most runs find their columns, even in a read-only folder.
    if columns is None and not is_due(data, cache, name, launch):
        columns = _found(cache, name, source, is_named)
    if columns is None:
        advice = "give --cache_dir a folder with space that can be written"
        with explained(f"Cannot write the columns of {source.folder} to {cache}", advice):
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / ".lock", f"writing columns to {cache}", DATA_DEADLINE):
                columns = _with_lock(cache, name, source, (data, seed), launch, read_again)
    number = columns.num_train + columns.num_validation + columns.num_test + columns.num_skipped
    check_number(source, data, number)
    return with_history(columns, config)


def check_number(source: TableSource, data: DataConfig, number: int) -> None:
    """Refuse a named data set with another number of events.

    Raises:
        UserError: with both numbers.
    """
    expected = NUM_EVENTS.get(data.dataset, number)
    if number < expected or (number > expected and data.split != STREAM):
        raise UserError(
            f"{source.folder} holds {number:,} {source.schema.labels}, but {data.dataset} has "
            f"{expected:,}; remove the folder to download it again, or leave --dataset out to read it as it "
            "is."
        )


def cache_of(source: TableSource, data: DataConfig) -> Path:
    """Return the folder for the columns of a data set."""
    is_named = bool(data.cache_dir) and not is_remote(data.cache_dir)
    return Path(data.cache_dir) if is_named else place_for(source.folder, COLUMNS)


def check_event_types(source: TableSource, config: Config) -> None:
    """Refuse events of several types where only one is possible.

    Raises:
        UserError: names the flag.
    """
    if source.schema.event_types and (config.stream.stream or config.model.reads_order):
        flag = "--stream" if config.stream.stream else f"--task {config.model.task}"
        raise UserError(
            f"{flag} does not support events of several types, and [events] of schema.toml has "
            f"{', '.join(map(printable, source.schema.event_types))}. Fix: remove {flag}, or the section."
        )


def check_stream(source: TableSource, config: Config) -> None:
    """Refuse a data set that is no stream.

    Raises:
        UserError: says why.
    """
    check_event_types(source, config)
    if not source.has_times:
        raise UserError("The events have no times, so --stream has no order to follow; remove it.")


def with_history(columns: Columns, config: Config) -> Columns:
    """Return columns with the table of user histories, if the flags ask for them."""
    data = config.data
    if not data.history:
        return columns
    if config.model.reads_order:
        # The history uses the rows of the items' table.
        history = Table(columns.schema.history, 0, data.history)
    else:
        rows = next(table.rows for table in columns.tables if table.name == columns.schema.item)
        # A worker's slots have room for this many values in every row.
        history = Table(columns.schema.history, rows, min(data.history, columns.longest_history))
    return dataclasses.replace(columns, tables=(*columns.tables, history))


def _with_lock(
    cache: Path,
    name: str,
    source: TableSource,
    settings: tuple[DataConfig, int],
    launch: str,
    read_again: Callable[[], RawData],
) -> Columns:
    """Return the columns of this name. Make them unless the previous holder of the lock did."""
    (data, seed), folder = settings, newest_of(cache, name)
    there, fault = load_columns(folder, source.folder, source.schema)
    if there is not None and not is_due(data, cache, name, launch):
        return there
    if fault:
        say(f"the columns in {folder} are damaged and are made again: {fault}")
    elif there is not None:
        say(f"the columns in {folder} are made again, as --rebuild asks")
    store = folder_at(data.cache_dir) / name if is_remote(data.cache_dir) else None
    if isinstance(store, ObjectPath) and not folder.exists():
        fetched = _fetched(store, folder, source)
        if fetched is not None:
            return fetched
    say(f"reading {source.folder}; writing columns to {folder}")
    # Imported here: with existing columns a rank needs no compiler of loops, and no Arrow.
    from recsuite.datasets.preparation.making import make_columns

    make_columns(folder, read_again(), source.schema, data, seed, there)
    made = newest_of(cache, name)
    if data.rebuild:
        replace_file(mark_of(cache, name), launch.encode())
    report_kept_folder(folder, made, there)
    if isinstance(store, ObjectPath):
        _share(made, store)
    # Every byte was read for its digest when it was written.
    columns, _ = load_columns(made, source.folder, source.schema, every_byte=False)
    assert columns is not None
    return columns


def _fetched(store: ObjectPath, folder: Path, source: TableSource) -> Columns | None:
    """Return columns that another machine put into an object store, copied to a folder; None without any."""
    with explained(f"Cannot read {store}", "give another --cache_dir"):
        if not (store / MANIFEST).is_file():
            return None
        with replacing(folder) as aside:
            aside.mkdir()
            for path in store.iterdir():
                path.download(aside / path.name)
    columns, fault = load_columns(folder, source.folder, source.schema)
    if columns is None:
        say(f"the columns in {store} are damaged and are made again: {fault}")
        remove(folder)
    else:
        say(f"the columns in {folder} are those of {store}")
    return columns


def _share(folder: Path, store: ObjectPath) -> None:
    """Copy columns into an object store, the manifest last."""
    with explained(f"Cannot write the columns to {store}", "give another --cache_dir"):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            (store / path.name).upload(path)
    say(f"the columns are also in {store}")


def mark_of(cache: Path, name: str) -> Path:
    """Return the path of the file with the launch that last rebuilt columns of this name."""
    # Other modes and restarts of the launch do not rebuild them.
    return cache / f".rebuilt-{name}"


def is_due(config: DataConfig, cache: Path, name: str, launch: str) -> bool:
    """True if --rebuild was given and this launch has not done it yet."""
    if not config.rebuild:
        return False
    try:
        return not launch or mark_of(cache, name).read_bytes() != launch.encode()
    except OSError:
        # The file is missing or not readable.
        return True


def report_kept_folder(folder: Path, made: Path, there: Columns | None) -> None:
    """Report the result of a --rebuild of existing columns."""
    if there is not None and made == folder:
        say("the new columns are the same as before, to the last bit")
    elif there is not None:
        say(f"the new columns differ and lie in {made}; the earlier ones stay for running processes")


def _found(cache: Path, name: str, source: TableSource, is_named: bool) -> Columns | None:
    """Return columns of this name from their folder or from the folder of the files, or None."""
    # With --cache_dir only that folder is searched.
    for place in (cache,) if is_named else dict.fromkeys((cache, source.folder / COLUMNS)):
        columns, _ = load_columns(newest_of(place, name), source.folder, source.schema)
        if columns is not None:
            return columns
    return None


def name_of_columns(
    digests: dict[str, str],
    key: object,
    config: DataConfig,
    seed: int,
) -> str:
    """Name of the folder for columns of files with these digests, made by this version of the program."""
    # A flag without an effect on the columns must not make a second copy. So --history is not in the name:
    # histories are stored whole, and a batch uses a part of each.
    drawn = config.split in ("time", "random")
    made_from = {
        "schema": key,
        # It affects the baselines of rankings.
        "top": TOP,
        "files": digests,
        "bad_rows": (config.bad_rows, config.max_bad_rows),
        "duplicates": config.duplicates,
        # Absent where it is the default, so that existing columns are found.
        **({"order": config.order} if config.order != "time" else {}),
        "seen": config.seen,
        **({"new_items": config.new_items} if config.new_items != EXCLUDE else {}),
        "test_fraction": config.test_fraction if drawn else None,
        "validation_fraction": config.validation_fraction,
        # Always, because validation is drawn by it for every split.
        "seed": seed,
    }
    digest = hashlib.sha256(json.dumps(made_from, allow_nan=False).encode()).hexdigest()[:12]
    return f"{config.split}-{digest}-v{VERSION}"


def owner_of(name: str) -> str:
    """Return the owner in the names of the columns of a stream. name: of its training."""
    return digest_of_bytes(name.encode())[:12]


def reading_folder(cache: Path, owner: str) -> Path:
    """Return the folder for what the stream of a training reads."""
    return cache / f".reading-{owner}"


def remove_owned(cache: Path, owner: str, used: Path | None = None) -> None:
    """Remove the columns of the stream of a training, except `used`."""
    for path in cache.glob(f"{STREAM}_{owner}-*"):
        if path != used:
            shutil.rmtree(path, ignore_errors=True)
    if used is None:
        shutil.rmtree(reading_folder(cache, owner), ignore_errors=True)


def digests_of_files(files: Sequence[TableFile]) -> dict[str, str]:
    """Map the name of each file to its digest."""
    with stage("checking the files"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
        digests = pool.map(lambda file: file.digest(), files)
        return dict(zip([file.name for file in files], digests, strict=True))
