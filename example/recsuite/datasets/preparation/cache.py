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
from recsuite.config.sections.data import DataConfig
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
from recsuite.files import digest_of, explained, locked
from recsuite.runtime.console import say
from recsuite.runtime.progress_bar import stage

# To be raised with every change of what columns hold: older ones are then made again, not misread.
FORMAT = 8


def open_columns(config: Config) -> Columns:
    """The columns of the configured data set, made first if they are not there or are damaged.

    Reads every byte of the files and of the columns: once on a machine is enough. Safe when several processes
    call it at once: one makes them, the others wait with a deadline.

    Raises:
        UserError: when the data cannot be had, read or stored.
    """
    data, seed = config.data, config.runtime.seed
    source, layout = locate(data, seed)
    cache = _cache_folder(source, data)
    files = source_files(source, layout, data.split)
    digests = _digests(files)
    folder = cache / _name(digests, data, seed)
    # Without the lock first: most runs find their columns, also in a folder that they may not write.
    columns, _ = load_columns(folder, source, SCHEMA)
    if columns is not None:
        return _checked(columns, data)
    advice = "give --cache_dir a folder with space that can be written"
    with explained(f"The columns of {source} cannot be stored in {cache}", advice):
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / ".lock", f"writing columns to {cache}", DATA_DEADLINE):
            # Again: whoever had the lock may have made them.
            columns, fault = load_columns(folder, source, SCHEMA)
            if columns is None:
                if fault:
                    say(f"the columns in {folder} are damaged and are made again: {fault}")
                say(f"reading {source}; its columns will lie in {folder}")
                with stage("reading the files"):
                    raw = read(source, layout, data)
                # What was read must be what the folder is named after.
                if _digests(files) != digests:
                    raise UserError(f"The files in {source} changed while they were read; start again.")
                make_columns(folder, raw, SCHEMA, data, seed)
                # Every byte was read for its digest when it was written.
                columns, _ = load_columns(folder, source, SCHEMA, every_byte=False)
    assert columns is not None
    return _checked(columns, data)


def find_columns(config: Config) -> tuple[Path, Columns | None]:
    """The folder for the columns of the configured data set, and what lies there now; makes nothing, and
    looks no further into the columns than their sizes.

    Raises:
        UserError: when there are no files that columns could be made from, and no set to obtain was named.
    """
    source, files = find_files(config.data, config.runtime.seed)
    if not files:
        return Path(config.data.cache_dir or source / ".columns"), None
    cache = _cache_folder(source, config.data)
    name = _name(_digests(files), config.data, config.runtime.seed)
    columns, _ = load_columns(cache / name, source, SCHEMA, every_byte=False)
    return cache, None if columns is None else _checked(columns, config.data)


def _checked(columns: Columns, config: DataConfig) -> Columns:
    """With the table of the history if that is wanted; refuses a set of a known name and another size."""
    number = columns.num_train + columns.num_validation + columns.num_test + columns.num_skipped
    wanted = NUM_EVENTS.get(config.dataset, number)
    if number != wanted:
        raise UserError(
            f"{columns.source} holds {number:,} {columns.schema.labels}, but {config.dataset} has "
            f"{wanted:,}; remove the folder to download it again, or leave --dataset out to read it as it is."
        )
    if config.history == 0:
        return columns
    schema = columns.schema
    items = next(table for table in columns.tables if table.name == schema.item)
    # No longer than the longest one there is: a worker's slots have room for this many in every row.
    history = Table(schema.history, items.rows, longest=min(config.history, columns.longest_history))
    return dataclasses.replace(columns, tables=(*columns.tables, history))


def _cache_folder(source: Path, config: DataConfig) -> Path:
    if config.cache_dir:
        return Path(config.cache_dir)
    # Root may write anywhere; a folder whose mode forbids it is still not ours to write to.
    if os.access(source, os.W_OK) and source.stat().st_mode & 0o222:
        return source / ".columns"
    # Folders elsewhere may have the same name and hold other files.
    name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:12]
    return DATA_ROOT / "columns" / f"{source.resolve().name}-{name}"


def _name(digests: dict[str, str], config: DataConfig, seed: int) -> str:
    """The folder for columns of files with these digests."""
    # A flag that changes nothing must not make a second copy. So --history is not in the name either:
    # histories are stored whole, and a batch takes the end of each.
    drawn = config.split in ("time", "random")
    made_from = {
        "format": FORMAT,
        "features": [dataclasses.astuple(SCHEMA.recorded(feature)) for feature in SCHEMA.features],
        "files": digests,
        "bad_rows": (config.bad_rows, config.max_bad_rows),
        "duplicates": config.duplicates,
        "test_fraction": config.test_fraction if drawn else None,
        "validation_fraction": config.validation_fraction,
        # Always: whatever the split, validation is drawn by it.
        "seed": seed,
    }
    return f"{config.split}-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]}"


def _digests(files: Sequence[Path]) -> dict[str, str]:
    """Name to digest. Not the time of change, which a copy keeps and a wrong clock makes meaningless."""
    with stage("checking the files"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
        return dict(zip([path.name for path in files], pool.map(_digest, files), strict=True))


def _digest(path: Path) -> str:
    with explained(f"{path} cannot be read", "give another --data_path"):
        return digest_of(path)
