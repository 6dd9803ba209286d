"""The columns of a configured data set: found beside its files, checked, and made where they are missing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.checkout import place_for
from recsuite.config.config import Config
from recsuite.config.sections import TOP, DataConfig
from recsuite.datasets.columns import DIGEST_THREADS, MANIFEST, VERSION, Columns, load_columns
from recsuite.datasets.preparation.building import make_columns, newest_of
from recsuite.datasets.schema import AUDIENCE, HISTORY, RawData, Table
from recsuite.datasets.source import DATA_DEADLINE, NUM_EVENTS, as_wanted, locate, read
from recsuite.datasets.streams.past import BEGINNING, Past
from recsuite.errors import UserError
from recsuite.files import digest_of_bytes, explained, locked, replace_file
from recsuite.runtime.console import say
from recsuite.runtime.progress_bar import stage

if TYPE_CHECKING:
    from recsuite.datasets.tables.source import Source, TableFile

# The one part that a stream has, by which its columns are called.
STREAM, VOCABULARY = "stream", "vocabulary.json"
# Where columns lie in the folder of the files.
COLUMNS = ".columns"
# What `_name` gives, and what earlier versions gave; then the number of a successor.
NAME = re.compile(r"\w+-[0-9a-f]{12}(?:-(?P<version>v\d+|[0-9a-f]{12})(?:\.\d+)?)?")


def open_columns(config: Config, launch: str = "", past: Past = BEGINNING) -> Columns:
    """The columns of the configured data set, made first if they are not there or are damaged.

    Reads every byte of the files and of the columns: once on a machine is enough. Safe when several processes
    call it at once: one makes them, the others wait with a deadline.

    launch: what tells one launch from another. --rebuild makes columns again once for each, or at each call
    without it.

    past: of a stream that goes on.

    Raises:
        UserError: when the data cannot be had, read or stored.
    """
    data, seed = _data_of(config), config.runtime.seed
    source = as_wanted(locate(data, seed), config.tables, data)
    known = past if config.stream.stream else None
    if known is not None and not source.has_times:
        raise UserError("The events have no times, so --stream has no order to follow; leave it out.")
    cache = _cache_folder(source.folder, data)
    digests = _digests(source.files)
    name = _name(digests, source.key, data, seed, known)

    def read_again() -> RawData:
        with stage("reading the files"):
            raw = read(source, data, cache)
        # What was read must be what the folder is named after.
        if _digests(source.files) != digests:
            raise UserError(f"The files in {source.folder} changed while they were read; start again.")
        return raw

    columns = None
    for before in past.before:
        found = newest_of(cache, _name(digests, source.key, data, seed, before))
        columns = columns or _unchanged(found, source, past)
    # Without the lock first: most runs find their columns, also in a folder that they may not write.
    if columns is None and not _is_due(data, cache, name, launch):
        columns = _found(cache, name, source, bool(data.cache_dir))
    if columns is None:
        advice = "give --cache_dir a folder with space that can be written"
        with explained(f"The columns of {source.folder} cannot be stored in {cache}", advice):
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / ".lock", f"writing columns to {cache}", DATA_DEADLINE):
                columns = _with_lock(cache, name, source, (data, seed), launch, read_again, known)
    return _checked(columns, data, config.model.reads_order)


def _unchanged(folder: Path, source: Source, past: Past) -> Columns | None:
    """The columns of a stream, if they are there and those of the data that it knows."""
    columns, _ = load_columns(folder, source.folder, source.schema)
    if columns is None or columns.events_per_file != past.events_per_file:
        return None
    is_same = (folder / VOCABULARY).read_text() == past.vocabulary
    return columns if is_same else None


def _with_lock(
    cache: Path,
    name: str,
    source: Source,
    settings: tuple[DataConfig, int],
    launch: str,
    read_again: Callable[[], RawData],
    past: Past | None,
) -> Columns:
    """The columns of this name, made unless whoever had the lock before has made them. settings: of the data,
    and the seed.
    """
    (data, seed), folder = settings, newest_of(cache, name)
    there, fault = load_columns(folder, source.folder, source.schema)
    if there is not None and not _is_due(data, cache, name, launch):
        return there
    if fault:
        say(f"the columns in {folder} are damaged and are made again: {fault}")
    elif there is not None:
        say(f"the columns in {folder} are made again, as --rebuild asks")
    say(f"reading {source.folder}; its columns will lie in {folder}")
    make_columns(folder, read_again(), source.schema, data, seed, there, past)
    made = newest_of(cache, name)
    if data.rebuild:
        replace_file(_mark_of(cache, name), launch.encode())
    _say_what_stays(folder, made, there)
    # Every byte was read for its digest when it was written.
    columns, _ = load_columns(made, source.folder, source.schema, every_byte=False)
    assert columns is not None
    return columns


def _mark_of(cache: Path, name: str) -> Path:
    """Where it stands which launch made columns of this name again, for its other modes and restarts."""
    return cache / f".rebuilt-{name}"


def _is_due(config: DataConfig, cache: Path, name: str, launch: str) -> bool:
    """Whether --rebuild was given, and this launch has not done it yet."""
    if not config.rebuild:
        return False
    try:
        return not launch or _mark_of(cache, name).read_bytes() != launch.encode()
    except OSError:
        # Nobody left one, or none that this user may read.
        return True


def _say_what_stays(folder: Path, made: Path, there: Columns | None) -> None:
    """Say what came of a --rebuild of columns that were there, and what else lies beside new ones."""
    if there is not None and made == folder:
        say("the new columns are the same as before, to the last bit")
    elif there is not None:
        say(f"the new columns differ and lie in {made}; the earlier ones stay for whoever uses them")
    found = [NAME.fullmatch(path.parent.name) for path in sorted(folder.parent.glob(f"*/{MANIFEST}"))]
    others = [match[0] for match in found if match and match["version"] != f"v{VERSION}"]
    # Another checkout may train on them at this moment, so nothing but the user removes them.
    if others:
        say(
            f"left in {folder.parent} what other versions of the program made: {', '.join(others)}; remove "
            "what nothing uses any more"
        )


def _data_of(config: Config) -> DataConfig:
    """How the data are read: a stream has one part, and takes every event as it comes."""
    if not config.stream.stream:
        return config.data
    return dataclasses.replace(config.data, split=STREAM, duplicates="keep")


def _checked(columns: Columns, config: DataConfig, reads_order: bool) -> Columns:
    """With the tables of lists that are wanted; refuses a set of a known name and another size."""
    number = columns.num_train + columns.num_validation + columns.num_test + columns.num_skipped
    number += columns.num_late
    wanted = NUM_EVENTS.get(config.dataset, number)
    # A stream may have grown.
    if number != wanted and not (config.split == STREAM and number > wanted):
        raise UserError(
            f"{columns.source} holds {number:,} {columns.schema.labels}, but {config.dataset} has "
            f"{wanted:,}; remove the folder to download it again, or leave --dataset out to read it as it is."
        )
    schema, rows = columns.schema, {table.name: table.rows for table in columns.tables}
    longest = {HISTORY: columns.longest_history, AUDIENCE: columns.longest_audience}
    # No longer than the longest one there is: a worker's slots have room for this many in every row.
    lists = [
        Table(
            feature,
            # In an order items are read by the rows by which they are predicted.
            0 if reads_order else rows[schema.vocabulary_of(feature.name)],
            most if config.shares_lists or reads_order else min(most, longest[feature.name]),
        )
        for feature in (schema.history, schema.audience)
        if (most := config.lists[feature.name])
    ]
    return dataclasses.replace(columns, tables=(*columns.tables, *lists))


def _cache_folder(source: Path, config: DataConfig) -> Path:
    return Path(config.cache_dir) if config.cache_dir else place_for(source, COLUMNS)


def _found(cache: Path, name: str, source: Source, is_named: bool) -> Columns | None:
    """Columns of this name in their folder, or beside the files, where others may have prepared them."""
    # Whoever names a folder means that one.
    for place in (cache,) if is_named else dict.fromkeys((cache, source.folder / COLUMNS)):
        columns, _ = load_columns(newest_of(place, name), source.folder, source.schema)
        if columns is not None:
            return columns
    return None


def _name(
    digests: dict[str, str], key: object, config: DataConfig, seed: int, past: Past | None = None
) -> str:
    """The folder for columns of files with these digests, made by this version of the program."""
    # A flag that changes nothing must not make a second copy. So --history, --audience and --others are not
    # in the name either: lists are stored whole, and a batch takes a part of each.
    drawn = config.split in ("time", "random")
    made_from = {
        "schema": key,
        # It decides the baselines of rankings.
        "top": TOP,
        "files": digests,
        "bad_rows": (config.bad_rows, config.max_bad_rows),
        "duplicates": config.duplicates,
        "seen": config.seen,
        "test_fraction": config.test_fraction if drawn else None,
        "validation_fraction": config.validation_fraction,
        # Always: whatever the split, validation is drawn by it.
        "seed": seed,
    }
    if past is not None:
        made_from["past"] = past.key
    digest = hashlib.sha256(json.dumps(made_from, allow_nan=False).encode()).hexdigest()[:12]
    whose = f"{config.split}_{past.owner}" if past is not None and past.owner else config.split
    return f"{whose}-{digest}-v{VERSION}"


def owner_of(name: str) -> str:
    """What columns of one training alone are called by, see `Past.owner`; name: what tells it from others."""
    return digest_of_bytes(name.encode())[:12]


def remove_owned(cache: Path, owner: str, used: Path | None = None) -> None:
    """Remove columns that a training made for itself alone, see `Past.owner`, but those that it uses."""
    for path in cache.glob(f"{STREAM}_{owner}-*"):
        if path != used:
            shutil.rmtree(path, ignore_errors=True)


def _digests(files: Sequence[TableFile]) -> dict[str, str]:
    """Name to digest."""
    with stage("checking the files"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
        found = pool.map(lambda file: file.digest(), files)
        return dict(zip([file.name for file in files], found, strict=True))
