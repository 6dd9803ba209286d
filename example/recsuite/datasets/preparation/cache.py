"""The columns of a configured data set: found beside its files, checked, and made where they are missing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recsuite.config.config import Config
from recsuite.datasets.columns import DIGEST_THREADS, Columns, load_columns
from recsuite.datasets.preparation.building import make_columns
from recsuite.datasets.schema import Table
from recsuite.datasets.source import (
    DATA_DEADLINE,
    DATA_ROOT,
    NUM_EVENTS,
    SCHEMA,
    find_files,
    locate,
    read,
    source_files,
)
from recsuite.errors import UserError
from recsuite.files import digest_of, reason_of
from recsuite.runtime.console import say
from recsuite.runtime.progress_bar import stage

# To be raised with every change of what columns hold: older ones are then made again, not misread.
FORMAT = 7


def open_columns(config: Config) -> Columns:
    """The columns of the configured data set, made first if they are not there or are damaged.

    Reads every byte of the files and of the columns: once on a machine is enough. Safe when several processes
    call it at once: one makes them, the others wait with a deadline.

    Raises:
        UserError: when the data cannot be had, read or stored.
    """
    from filelock import FileLock, Timeout

    source, layout = locate(config)
    cache = _cache_folder(source, config)
    files = source_files(source, layout, config.data.split)
    digests = _digests(files)
    folder = cache / _name(digests, config)
    # Without the lock first: most runs find their columns, also in a folder that they may not write.
    columns, _ = load_columns(folder, source, SCHEMA)
    if columns is not None:
        return _checked(columns, config)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".lock", timeout=DATA_DEADLINE):
            # Again: whoever had the lock may have made them.
            columns, fault = load_columns(folder, source, SCHEMA)
            if columns is None:
                if fault:
                    say(f"the columns in {folder} are damaged and are made again: {fault}")
                say(f"reading {source}; its columns will lie in {folder}")
                with stage("reading the files"):
                    raw = read(source, layout, config)
                if _digests(files) != digests:
                    raise UserError(f"The files in {source} changed while they were read; start again.")
                make_columns(folder, raw, SCHEMA, config)
                columns, _ = load_columns(folder, source, SCHEMA, every_byte=False)
    except Timeout:
        raise UserError(
            f"Another process has been writing columns to {cache} for {DATA_DEADLINE:.0f} s; "
            "end it and start again."
        ) from None
    except OSError as error:
        raise UserError(
            f"The columns of {source} cannot be stored in {cache} ({reason_of(error)}); "
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
    source, files = find_files(config)
    if not files:
        return Path(config.data.cache_dir or source / ".columns"), None
    cache = _cache_folder(source, config)
    columns, _ = load_columns(cache / _name(_digests(files), config), source, SCHEMA, every_byte=False)
    return cache, None if columns is None else _checked(columns, config)


def _checked(columns: Columns, config: Config) -> Columns:
    """With the table of the history if that is wanted; refuses a set of a known name and another size."""
    number = columns.num_train + columns.num_validation + columns.num_test + columns.num_skipped
    wanted = NUM_EVENTS.get(config.data.dataset, number)
    if number != wanted:
        raise UserError(
            f"{columns.source} holds {number:,} {columns.schema.labels}, but {config.data.dataset} has "
            f"{wanted:,}; remove the folder to download it again, or leave --dataset out to read it as it is."
        )
    if config.data.history == 0:
        return columns
    schema = columns.schema
    items = next(table for table in columns.tables if table.name == schema.item)
    history = Table(schema.history, items.rows, longest=min(config.data.history, columns.longest_history))
    return dataclasses.replace(columns, tables=(*columns.tables, history))


def _cache_folder(source: Path, config: Config) -> Path:
    if config.data.cache_dir:
        return Path(config.data.cache_dir)
    # Root may write anywhere; a folder whose mode forbids it is still not ours to write to.
    if os.access(source, os.W_OK) and source.stat().st_mode & 0o222:
        return source / ".columns"
    name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:12]
    return DATA_ROOT / "columns" / f"{source.resolve().name}-{name}"


def _name(digests: dict[str, str], config: Config) -> str:
    """The folder for columns of files with these digests."""
    drawn = config.data.split in ("time", "random")
    made_from = {
        "format": FORMAT,
        "features": [dataclasses.astuple(SCHEMA.recorded(feature)) for feature in SCHEMA.features],
        "files": digests,
        "bad_rows": (config.data.bad_rows, config.data.max_bad_rows),
        "duplicates": config.data.duplicates,
        "test_fraction": config.data.test_fraction if drawn else None,
        "validation_fraction": config.data.validation_fraction,
        "seed": config.runtime.seed,
    }
    return f"{config.data.split}-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]}"


def _digests(files: Sequence[Path]) -> dict[str, str]:
    """Name to digest. Not the time of change, which a copy keeps and a wrong clock makes meaningless."""
    try:
        with stage("checking the files"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
            return dict(zip([path.name for path in files], pool.map(digest_of, files), strict=True))
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read ({reason_of(error)}); give another --data_path."
        ) from None
