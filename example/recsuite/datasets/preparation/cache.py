"""Columns of a configured data set: found beside its files, checked, and made if they are missing.

They are written from the data read, and get their name in one rename.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.config.config import Config
from recsuite.config.sections import EVALUATIONS, TOP, DataConfig
from recsuite.datasets.columns import DIGEST_THREADS, MANIFEST, VERSION, Columns, load_columns
from recsuite.datasets.leakage import leakage_of_item, leakage_of_label
from recsuite.datasets.metrics import Metrics, finite
from recsuite.datasets.preparation.arrays import (
    Own,
    chunks,
    counts_of,
    create_column,
    gather,
    temporary,
    write_counts,
    write_records,
)
from recsuite.datasets.preparation.baselines import (
    Stored,
    baselines_of,
    by_items,
    by_users,
    oracle_of,
    write_all_lists,
)
from recsuite.datasets.preparation.splits import rule_for_seen, split, stream_order
from recsuite.datasets.preparation.vocabulary import (
    Written,
    features_of_events,
    write_features,
    write_vocabulary,
)
from recsuite.datasets.schema import (
    HISTORY,
    ITEM,
    ITEM_HISTORY,
    SCHEMA_FILE,
    USER,
    RawData,
    Schema,
    Table,
    record_of,
)
from recsuite.datasets.source import DATA_DEADLINE, NUM_EVENTS, locate, read, with_flags
from recsuite.datasets.streams import EMPTY_STREAM_STATE, HEAD, StreamState, digests_of, keys_of
from recsuite.errors import UserError, escaped
from recsuite.files import (
    digest_of,
    digest_of_bytes,
    explained,
    flush,
    flushed,
    flushing,
    locked,
    place_for,
    plain,
    replace_file,
    sealed,
)
from recsuite.runtime.console import say, stage

if TYPE_CHECKING:
    from recsuite.datasets.tables.source import TableFile, TableSource

# Name of an unfinished folder, with the process id, and the names of its files. A temporary file is among
# them if the system cannot make an unnamed one.
LEFTOVER = re.compile(r"\.making-\d+")
CONTENT = re.compile(r"\w+\.npy|(vocabulary|schema|manifest)\.json|tmp\w{8}")
# The parts of making columns, and the percent of the time that each takes for very many events.
PARTS = {"order": 6, "events": 5, "features": 2, "lists": 32, "baselines": 55}


def newest_of(cache: Path, name: str) -> Path:
    """Return the path of columns of this name: the last successor of the folder, if it has any."""
    numbers = [int(path.suffix[1:]) for path in cache.glob(f"{name}.*") if path.suffix[1:].isdecimal()]
    return cache / (f"{name}.{max(numbers)}" if numbers else name)


def _successor_of(folder: Path) -> Path:
    number = folder.suffix[1:]
    return folder.with_suffix(f".{int(number) + 1 if number else 2}")


def make_columns(
    folder: Path,
    raw: RawData,
    schema: Schema,
    config: DataConfig,
    seed: int,
    there: Columns | None = None,
    stream_state: StreamState | None = None,
) -> None:
    """Write columns and move them to their folder. The caller must hold the lock.

    there: the intact columns in the folder, if any. New columns with the same bits replace them; others go to
    a successor. past: of a stream, whose events are in the order of time only.
    """
    # This process holds the lock, so any unfinished folder was left by a process that died.
    for leftover in filter(_is_leftover, folder.parent.iterdir()):
        shutil.rmtree(leftover)
    making = folder.parent / f".making-{os.getpid()}"
    making.mkdir()
    try:
        with stage("making columns", sum(PARTS.values()), "percent") as reached:
            # Written under another name: a process that dies here leaves no columns that look complete.
            manifest = _write_columns(making, raw, schema, config, seed, reached, stream_state)
        # The files must be on the disk before the rename.
        written = [flushed(path) for path in sorted(making.iterdir())]
        files = [dataclasses.asdict(entry) for entry in written]
        # Last, because it holds the digests of all other files. Columns without it are ignored.
        (making / MANIFEST).write_text(
            json.dumps(sealed({**manifest, "files": files}), indent=1, allow_nan=False)
        )
        flush(making / MANIFEST)
        flush(making)
        # A process that uses the old columns may open one of their files later, and must find the same bits.
        if there is not None and {entry.name: entry.xxh3_128 for entry in written} != there.files:
            folder = _successor_of(folder)
        # The rename itself is not flushed: after a power cut the columns are made again.
        _publish(making, folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _is_leftover(path: Path) -> bool:
    """True if `make_columns` made this folder: --cache_dir may contain folders of other programs."""
    if not LEFTOVER.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return all(CONTENT.fullmatch(found.name) for found in path.iterdir())


def _publish(making: Path, folder: Path) -> None:
    """Give new columns their name. Replace existing ones file by file: a process may be reading them."""
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
        making.rename(folder)
        return
    # The manifest last: until then the old manifest does not match the files, so a mixture is refused.
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


def _done(reached: Callable[[int], None], part: str) -> Callable[[float], None]:
    """Return a function that reports the finished share of a part."""
    names = list(PARTS)
    before = sum(PARTS[name] for name in names[: names.index(part)])
    return lambda share: reached(before + round(share * PARTS[part]))


def _write_columns(
    folder: Path,
    raw: RawData,
    schema: Schema,
    config: DataConfig,
    seed: int,
    reached: Callable[[int], None],
    stream_state: StreamState | None,
) -> dict[str, Any]:
    order, sizes, notes = (
        stream_order(raw, schema, stream_state) if stream_state else split(raw, schema, config, seed, folder)
    )
    num_late = (
        int(np.count_nonzero(stream_state.is_late(raw.events.time, raw.events_per_file)))
        if stream_state
        else 0
    )
    stored = _write_events(folder, raw, order, _done(reached, "events"))
    oracle = oracle_of(raw, order, sizes[2], config.split)
    num_train = sizes[0]
    written, own = _write_features(folder, raw, stored, order, num_train, schema, stream_state)
    num_head = min(num_train, HEAD) if stream_state else num_train
    weight = _weight(folder, raw, order, num_head) | _more_labels(folder, raw, order)
    item_leakage = _leakage_or_keys(folder, raw, stored, order[:num_train], schema, stream_state)
    label_leakage = leakage_of_label(raw.events, order[:num_head], stored.label[:num_head], schema)
    # Frees as much memory as a column.
    del order
    by_user, by_item = by_users(folder, stored), by_items(folder, stored, len(raw.items))
    seen, said = rule_for_seen(config, by_user, num_train, schema, is_stream=stream_state is not None)
    schema = dataclasses.replace(schema, seen=seen)
    features = [*(table.feature for table in written.tables), *written.numbers]
    (folder / SCHEMA_FILE).write_text(json.dumps(record_of(schema, features), indent=1, allow_nan=False))
    rows, progress = _rows_of_ids(folder, written, schema), _done(reached, "lists")
    places, longest = write_all_lists(folder, stored, (by_user, by_item), rows, sizes, progress)
    fields = {"user": stored.user, "item": stored.item, "label": stored.label}
    write_records(folder / "rows.npy", {**fields, **places, **weight}, own)
    del places, weight, fields, own
    baselines: dict[str, dict[str, Metrics]] = {name: {} for name in EVALUATIONS}
    if not stream_state:
        with flushing(folder):
            progress = _done(reached, "baselines")
            baselines = baselines_of(stored, by_user, by_item, sizes, oracle, schema, progress)
    return {
        # Digest of the meaning of a position in the training: a checkpoint stores its progress as a position.
        "digest": f"{digest_of(folder / 'rows.npy')}-{num_train}-{sizes[1]}",
        **dict(zip(("num_train", "num_validation", "num_test"), sizes, strict=True)),
        # Includes the events of a stream that are held back.
        "num_skipped": raw.num_skipped + len(raw.events.user) - sum(sizes) - num_late,
        "num_users": len(raw.users),
        f"num_{schema.items}": len(raw.items),
        **longest,
        # The model starts from it, so it must not depend on later events.
        "mean_rating": float(stored.label[:num_head].mean(dtype=np.float64)),
        "tables": [_recorded(table, schema) for table in written.tables],
        "numbers": [plain(schema.recorded(feature)) for feature in written.numbers],
        "baselines": {
            way: {name: finite(metrics) for name, metrics in found.items()}
            for way, found in baselines.items()
        },
        "seen": schema.seen,
        "item_leakage": item_leakage,
        "label_leakage": label_leakage,
        "notes": [*map(escaped, (*raw.skipped, *notes, *said, *_notes_on(written)))],
        "num_late": num_late,
        "events_per_file": raw.events_per_file if stream_state else {},
    }


def _notes_on(written: Written) -> list[str]:
    left_out = ", ".join(written.left_out)
    return [f"skipped the features that the files do not have: {left_out}"] if left_out else []


def _rows_of_ids(folder: Path, written: Written, schema: Schema) -> list[np.ndarray]:
    """Table rows of users, and of items, int32."""
    features = [table.feature for table in written.tables]
    return [
        np.load(folder / f"{schema.name_of(entity)}_features.npy")["features"][
            :, schema.place_of(entity, features)
        ]
        for entity in (USER, ITEM)
    ]


def _write_features(
    folder: Path,
    raw: RawData,
    stored: Stored,
    order: np.ndarray,
    num_train: int,
    schema: Schema,
    stream_state: StreamState | None,
) -> tuple[Written, Own]:
    """Write the features of users and items, and the vocabulary. Returns the features of events too.

    past: of a stream, with the vocabulary of its earlier columns.
    """
    entities = {
        entity: (frame, np.flatnonzero(counts_of(column[:num_train], len(frame))))
        for entity, frame, column in ((USER, raw.users, stored.user), (ITEM, raw.items, stored.item))
    }
    written = write_features(folder, entities, schema, stream_state.known if stream_state else {})
    own = features_of_events(folder, written, raw.events, order, num_train, schema)
    # The tables of events are the last ones at this point.
    write_counts(folder, written.tables[len(written.tables) - len(own.features) :], own, num_train)
    write_vocabulary(folder, written)
    written.tables.sort(key=lambda table: table.feature.multi)
    return written, own


def _write_events(folder: Path, raw: RawData, order: np.ndarray, done: Callable[[float], None]) -> Stored:
    """Write labels and times. Returns the events."""
    events, number = raw.events, len(order)
    # Users and items are written in records later, when the ends of the histories are known. Labels are
    # written both here and in the records: code that scans all labels then reads a quarter of the bytes.
    user = gather(events.user, order, temporary(folder, number, np.int32))
    done(0.2)
    item = gather(events.item, order, temporary(folder, number, np.int32))
    done(0.4)
    label = gather(events.label, order, create_column(folder / "rating.npy", (number,), np.float32))
    done(0.6)
    time = gather(events.time, order, create_column(folder / "time.npy", (number,), np.int64))
    done(1)
    return Stored(user, item, label, time)


def _leakage_or_keys(
    folder: Path,
    raw: RawData,
    stored: Stored,
    trained: np.ndarray,
    schema: Schema,
    stream_state: StreamState | None,
) -> dict[str, float]:
    """Return the leakage of the item by features of the event. For a stream, write its keys instead."""
    if stream_state is not None:
        _write_keys(folder, raw, stored, schema)
        return {}
    return leakage_of_item(raw.events, trained, stored.item[: len(trained)], len(raw.items), schema)


def _write_keys(folder: Path, raw: RawData, stored: Stored, schema: Schema) -> None:
    """Write the hashes by which a stream recognises its events."""
    users, items = (
        digests_of(frame[schema.column_of(entity)])
        for entity, frame in ((USER, raw.users), (ITEM, raw.items))
    )
    keys = create_column(folder / "keys.npy", (len(stored.user),), np.uint64)
    for part in chunks(len(keys), keys):
        user, item = users[stored.user[part]], items[stored.item[part]]
        keys[part] = keys_of(user, item, stored.label[part], stored.time[part])


def _weight(folder: Path, raw: RawData, order: np.ndarray, num_train: int) -> dict[str, np.ndarray]:
    """Weight of each event in the loss, float32, with mean 1; empty if the data have no weights."""
    if raw.events.weight is None:
        return {}
    weight = gather(raw.events.weight, order, temporary(folder, len(order), np.float32))
    # Mean 1, so that learning rates and decays have the same effect with weights as without.
    mean = weight[:num_train].mean(dtype=np.float64)
    if not mean > 0:
        raise UserError("The weights of all training events are 0; give some of them a weight above 0.")
    for part in chunks(len(weight), weight):
        weight[part] /= mean
    return {"weight": weight}


def _more_labels(folder: Path, raw: RawData, order: np.ndarray) -> dict[str, np.ndarray]:
    """Labels after the first, float32, NaN for a missing one, and their own weights."""
    events = raw.events
    return {
        f"{field}_{place}": gather(found[name], order, temporary(folder, len(order), np.float32))
        for place, name in enumerate(events.more_labels, 2)
        for field, found in (("label", events.more_labels), ("weight", events.more_weights))
        if name in found
    }


def _recorded(table: Table, schema: Schema) -> dict[str, Any]:
    """Return a table in the form of the manifest."""
    recorded: dict[str, Any] = plain(dataclasses.replace(table, feature=schema.recorded(table.feature)))
    return recorded


# The split of a stream, used in the name of its columns.
STREAM, VOCABULARY = "stream", "vocabulary.json"
# Subfolder of the folder of the files with the columns.
COLUMNS = ".columns"
# Names by `_name` of this and earlier versions, with the number of a successor.
NAME = re.compile(r"\w+-[0-9a-f]{12}(?:-(?P<version>v\d+|[0-9a-f]{12})(?:\.\d+)?)?")


def open_columns(config: Config, launch: str = "", stream_state: StreamState = EMPTY_STREAM_STATE) -> Columns:
    """Return the columns of the configured data set. Make them first if they are missing or damaged.

    Reads every byte of the files and of the columns, so call it once on a machine. Safe when several
    processes call it at once: one makes the columns, the others wait with a deadline.

    launch: identifies the launch. --rebuild makes columns again once for each launch, or at each call if it
    is empty.

    past: of a stream that continues.

    Raises:
        UserError: when the data cannot be obtained, read or stored.
    """
    data, seed = config.data, config.runtime.seed
    if config.stream.stream:
        # A stream has one part, and keeps every event.
        data = dataclasses.replace(data, split=STREAM, duplicates="keep")
    source = with_flags(locate(data, seed), config.tables, data)
    known = stream_state if config.stream.stream else None
    if known is not None and not source.has_times:
        raise UserError("The events have no times, so --stream has no order to follow; leave it out.")
    cache = Path(data.cache_dir) if data.cache_dir else place_for(source.folder, COLUMNS)
    digests = _digests(source.files)
    name = _name(digests, source.key, data, seed, known)

    def read_again() -> RawData:
        with stage("reading the files"):
            raw = read(source, data, cache)
        # The name of the folder contains the digests of the files.
        if _digests(source.files) != digests:
            raise UserError(f"The files in {source.folder} changed while they were read; start again.")
        return raw

    columns = None
    for before in stream_state.before:
        found = newest_of(cache, _name(digests, source.key, data, seed, before))
        columns = columns or _unchanged(found, source, stream_state)
    # First without the lock: most runs find their columns, even in a read-only folder.
    if columns is None and not _is_due(data, cache, name, launch):
        columns = _found(cache, name, source, bool(data.cache_dir))
    if columns is None:
        advice = "give --cache_dir a folder with space that can be written"
        with explained(f"The columns of {source.folder} cannot be stored in {cache}", advice):
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / ".lock", f"writing columns to {cache}", DATA_DEADLINE):
                columns = _with_lock(cache, name, source, (data, seed), launch, read_again, known)
    number = columns.num_train + columns.num_validation + columns.num_test + columns.num_skipped
    number += columns.num_late
    expected = NUM_EVENTS.get(data.dataset, number)
    # A stream may have grown.
    if number != expected and not (data.split == STREAM and number > expected):
        raise UserError(
            f"{columns.source} holds {number:,} {columns.schema.labels}, but {data.dataset} has "
            f"{expected:,}; remove the folder to download it again, or leave --dataset out to read it as it "
            "is."
        )
    schema, rows = columns.schema, {table.name: table.rows for table in columns.tables}
    longest = {HISTORY: columns.longest_history, ITEM_HISTORY: columns.longest_audience}
    # At most the longest list in the data: a worker's slots have room for this many values in every row.
    lists = [
        Table(
            feature,
            # A model that reads the order uses the rows of the item table, also for the history.
            0 if config.model.reads_order else rows[schema.vocabulary_of(feature.name)],
            most if data.shares_lists or config.model.reads_order else min(most, longest[feature.name]),
        )
        for feature in (schema.history, schema.item_history)
        if (most := data.lists[feature.name])
    ]
    return dataclasses.replace(columns, tables=(*columns.tables, *lists))


def _unchanged(folder: Path, source: TableSource, stream_state: StreamState) -> Columns | None:
    """Return the columns of a stream if they exist and match its state; else None."""
    columns, _ = load_columns(folder, source.folder, source.schema)
    if columns is None or columns.events_per_file != stream_state.events_per_file:
        return None
    is_same = (folder / VOCABULARY).read_text() == stream_state.vocabulary
    return columns if is_same else None


def _with_lock(
    cache: Path,
    name: str,
    source: TableSource,
    settings: tuple[DataConfig, int],
    launch: str,
    read_again: Callable[[], RawData],
    stream_state: StreamState | None,
) -> Columns:
    """Return the columns of this name. Make them unless the previous holder of the lock did.

    settings: of the data, and the seed.
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
    make_columns(folder, read_again(), source.schema, data, seed, there, stream_state)
    made = newest_of(cache, name)
    if data.rebuild:
        replace_file(_mark_of(cache, name), launch.encode())
    _report_kept_folder(folder, made, there)
    # Every byte was read for its digest when it was written.
    columns, _ = load_columns(made, source.folder, source.schema, every_byte=False)
    assert columns is not None
    return columns


def _mark_of(cache: Path, name: str) -> Path:
    """Path of the file with the launch that last rebuilt columns of this name.

    Other modes and restarts of the launch do not rebuild them.
    """
    return cache / f".rebuilt-{name}"


def _is_due(config: DataConfig, cache: Path, name: str, launch: str) -> bool:
    """True if --rebuild was given and this launch has not done it yet."""
    if not config.rebuild:
        return False
    try:
        return not launch or _mark_of(cache, name).read_bytes() != launch.encode()
    except OSError:
        # The file is missing or not readable.
        return True


def _report_kept_folder(folder: Path, made: Path, there: Columns | None) -> None:
    """Report the result of a --rebuild of existing columns, and columns of other versions in the folder."""
    if there is not None and made == folder:
        say("the new columns are the same as before, to the last bit")
    elif there is not None:
        say(f"the new columns differ and lie in {made}; the earlier ones stay for running processes")
    found = [NAME.fullmatch(path.parent.name) for path in sorted(folder.parent.glob(f"*/{MANIFEST}"))]
    others = [match[0] for match in found if match and match["version"] != f"v{VERSION}"]
    # Another checkout may be using them, so only the user may remove them.
    if others:
        say(
            f"{folder.parent} has files of other versions of the program: {', '.join(others)}; remove "
            "the unused ones"
        )


def _found(cache: Path, name: str, source: TableSource, is_named: bool) -> Columns | None:
    """Return columns of this name from their folder or from the folder of the files, or None."""
    # With --cache_dir only that folder is searched.
    for place in (cache,) if is_named else dict.fromkeys((cache, source.folder / COLUMNS)):
        columns, _ = load_columns(newest_of(place, name), source.folder, source.schema)
        if columns is not None:
            return columns
    return None


def _name(
    digests: dict[str, str],
    key: object,
    config: DataConfig,
    seed: int,
    stream_state: StreamState | None = None,
) -> str:
    """Name of the folder for columns of files with these digests, made by this version of the program."""
    # A flag without an effect on the columns must not make a second copy. So --history, --item_history and
    # --co_occurrence are not in the name: lists are stored whole, and a batch uses a part of each.
    drawn = config.split in ("time", "random")
    made_from = {
        "schema": key,
        # It affects the baselines of rankings.
        "top": TOP,
        "files": digests,
        "bad_rows": (config.bad_rows, config.max_bad_rows),
        "duplicates": config.duplicates,
        "seen": config.seen,
        "test_fraction": config.test_fraction if drawn else None,
        "validation_fraction": config.validation_fraction,
        # Always, because validation is drawn by it for every split.
        "seed": seed,
    }
    if stream_state is not None:
        made_from["past"] = stream_state.key
    digest = hashlib.sha256(json.dumps(made_from, allow_nan=False).encode()).hexdigest()[:12]
    whose = (
        f"{config.split}_{stream_state.owner}"
        if stream_state is not None and stream_state.owner
        else config.split
    )
    return f"{whose}-{digest}-v{VERSION}"


def owner_of(name: str) -> str:
    """Owner in the name of columns of one training alone, see `Past.owner`. name: identifies the training."""
    return digest_of_bytes(name.encode())[:12]


def remove_owned(cache: Path, owner: str, used: Path | None = None) -> None:
    """Remove the columns that a training made for itself alone, see `Past.owner`, except `used`."""
    for path in cache.glob(f"{STREAM}_{owner}-*"):
        if path != used:
            shutil.rmtree(path, ignore_errors=True)


def _digests(files: Sequence[TableFile]) -> dict[str, str]:
    """Map the name of each file to its digest."""
    with stage("checking the files"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
        found = pool.map(lambda file: file.digest(), files)
        return dict(zip([file.name for file in files], found, strict=True))
