"""Write columns from the data read: split, features, histories and baselines. They appear in one rename."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.config.sections import NO_SPLIT, DataConfig
from recsuite.datasets.arrays import (
    FeatureArrays,
    chunks,
    counts_of,
    create_column,
    gather,
    temporary,
    write_records,
)
from recsuite.datasets.columns import MANIFEST, Columns, listed_items
from recsuite.datasets.preparation.baselines import baselines_of, oracle_of
from recsuite.datasets.preparation.histories import StoredEvents, write_histories
from recsuite.datasets.preparation.loops import CONTEXT
from recsuite.datasets.preparation.splits import repeats_in, rule_for_new, rule_for_seen, split
from recsuite.datasets.preparation.vocabulary import (
    WrittenFeatures,
    features_of_events,
    write_features,
    write_vocabulary,
)
from recsuite.datasets.schema import (
    EVALUATIONS,
    EVENT,
    EXCLUDE,
    ITEM,
    SCHEMA_FILE,
    USER,
    RawData,
    Schema,
    Table,
    record_of,
)
from recsuite.datasets.streams import HEAD, StreamSegment
from recsuite.errors import UserError, escaped
from recsuite.files import digest_of, entry_of, flush, flushed, flushing, plain, remove, sealed
from recsuite.hooks import optional
from recsuite.metrics import Metrics, finite
from recsuite.runtime.console import stage

NOT_CHECKED = "features of the event are not checked for leakage: that requires the extra leakage"
# Name of an unfinished folder, with the process id.
LEFTOVER = re.compile(r"\.making-\d+")
# The parts of making columns, and the percent of the time that each takes for very many events.
PARTS = {"order": 15, "events": 12, "features": 5, "histories": 36, "baselines": 32}


@dataclass(frozen=True)
class StreamPart:
    """Events of a segment of a stream.

    order: their places in the data, int [n]; file, row: the place of the file of each, and its row there,
    int [n]; vocabulary: content of vocabulary.json, empty at the beginning of the stream; sums: of the labels
    before the segment, see `recent.RecentEvents.sums_of`; notes: what was skipped.
    """

    order: np.ndarray
    file: np.ndarray
    row: np.ndarray
    vocabulary: str
    sums: Mapping[str, np.ndarray]
    notes: Sequence[str]
    segment: StreamSegment


@dataclass(frozen=True)
class Shared:
    """Values of a data set, for the columns of a part of its events, see the extra `partitions`.

    vocabulary: in the form of vocabulary.json; mean_weight: of the training events; columns, manifest: more
    columns, and entries of the manifest, in place of those of the part alone; baselines: in place of
    `baselines_of`.
    """

    vocabulary: Mapping[str, Any]
    mean_weight: float
    columns: Mapping[str, np.ndarray]
    manifest: Mapping[str, Any]
    baselines: Callable[..., dict[str, dict[str, Metrics]]]


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
    stream: StreamPart | None = None,
    shared: Shared | None = None,
) -> None:
    """Write columns and move them to their folder. The caller must hold the lock.

    there: the intact columns in the folder, if any. New columns with the same bits replace them; others go to
    a successor. stream: of a segment, whose events are in the order of time only; shared: of events that are
    not all of a data set.
    """
    # This process holds the lock, so any unfinished folder was left by a process that died.
    for path in folder.parent.iterdir():
        if LEFTOVER.fullmatch(path.name):
            remove(path)
    making = folder.parent / f".making-{os.getpid()}"
    making.mkdir()
    try:
        with stage("making columns", sum(PARTS.values())) as reached:
            # Written under another name: a process that dies here leaves no columns that look complete.
            manifest = _write_columns(making, raw, schema, config, seed, reached, stream, shared)
        # The files must be on the disk before the rename, but no other training reads those of a stream.
        entry = flushed if stream is None else entry_of
        written = [entry(path) for path in sorted(making.iterdir())]
        files = [dataclasses.asdict(entry) for entry in written]
        # Last, because it holds the digests of all other files. Columns without it are ignored.
        content = json.dumps(sealed({**manifest, "files": files}), indent=1, allow_nan=False)
        (making / MANIFEST).write_text(content)
        if stream is None:
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
    stream: StreamPart | None,
    shared: Shared | None,
) -> dict[str, Any]:
    # A reading may have several segments, and its notes are those of the first one.
    skipped = raw.skipped if stream is None else []
    if stream is None:
        order, sizes, notes = split(raw, schema, config, seed, folder, shared is not None)
    else:
        order, sizes, notes = _order_of(stream)
    stored = _write_events(folder, raw, order, _done(reached, "events"))
    has_test = stream is None and config.split != NO_SPLIT
    oracle = oracle_of(raw, order, sizes[2], config.split) if has_test else None
    num_train = sizes[0]
    written, own = _write_features(folder, raw, stored, order, num_train, schema, stream, shared)
    num_head = min(num_train, HEAD) if stream else num_train
    segment = None if stream is None else stream.segment
    # The model starts from it, so it must not depend on later events.
    labels = stored.label[:num_train]
    mean_label = segment.position.mean_label if segment else float(labels.mean(dtype=np.float64))
    mean_weight = segment.position.mean_weight if segment else shared.mean_weight if shared else None
    weight = _weight(folder, raw, order, num_head, mean_weight) | _more_labels(folder, raw, order)
    item_leakage: dict[str, float] = {}
    label_leakage: dict[str, float] = {}
    has_own = shared is None and any(feature.entity == EVENT for feature in schema.features)
    leakage = optional("leakage") if has_own else None
    if has_own and leakage is None:
        notes = [*notes, NOT_CHECKED]
    if leakage is not None:
        items = stored.item[:num_train]
        if stream is None:
            item_leakage = leakage.leakage_of_item(raw.events, order, items, len(raw.items), schema)
        # Of a stream by its first events alone.
        if stream is None or stream.segment.first == 0:
            label_leakage = leakage.leakage_of_label(raw.events, order, stored.label[:num_head], schema)
    if stream is not None:
        for name, column in {"file": stream.file, "file_row": stream.row, **stream.sums}.items():
            np.save(folder / f"{name}.npy", column)
    # Frees as much memory as a column.
    del order
    seen, said = rule_for_seen(
        config,
        schema,
        stream is not None,
        lambda: repeats_in(stored.user[:num_train], stored.item[:num_train]),
    )
    if written.left_out:
        said.append(f"skipped the features that the files do not have: {', '.join(written.left_out)}")
    features = [*(table.feature for table in written.tables), *written.numbers]
    new_items, said_of_new = rule_for_new(config, schema, features)
    said += said_of_new
    schema = dataclasses.replace(schema, seen=seen, new_items=new_items)
    (folder / SCHEMA_FILE).write_text(json.dumps(record_of(schema, features), indent=1, allow_nan=False))
    item_counts = counts_of(stored.item[:num_train], len(raw.items))
    np.save(folder / "item_counts.npy", item_counts.astype(np.int32))
    for name, column in (shared.columns if shared else {}).items():
        np.save(folder / f"{name}.npy", column)
    rows, progress = _rows_of_items(folder, written, schema), _done(reached, "histories")
    # What a stream keeps came before.
    first_part = 0 if stream is None else CONTEXT
    ends, longest = write_histories(folder, stored, rows, sizes, progress, raw.context, first_part)
    fields = {"user": stored.user, "item": stored.item, "label": stored.label, "history_end": ends, **weight}
    write_records(folder / "rows.npy", fields, own)
    del ends, weight, fields, own
    baselines: dict[str, dict[str, Metrics]] = {name: {} for name in EVALUATIONS}
    if oracle is not None:
        with flushing(folder):
            progress = _done(reached, "baselines")
            tables = [table.feature for table in written.tables]
            is_listed = listed_items(lambda name: np.load(folder / f"{name}.npy"), schema, tables)
            find = shared.baselines if shared else baselines_of
            baselines = find(folder, stored, is_listed, sizes, oracle, schema, progress)
    return {
        # Digest of the meaning of a position in the training: a checkpoint stores its progress as a position.
        "digest": f"{digest_of(folder / 'rows.npy')}-{num_train}-{sizes[1]}",
        **dict(zip(("num_train", "num_validation", "num_test"), sizes, strict=True)),
        "num_skipped": raw.num_skipped + (len(raw.events.user) - sum(sizes) if stream is None else 0),
        "num_users": len(raw.users),
        f"num_{schema.items}": len(raw.items),
        "longest_history": longest,
        "mean_rating": mean_label,
        "tables": [_recorded(table, schema) for table in written.tables],
        "numbers": [plain(schema.recorded(feature)) for feature in written.numbers],
        "baselines": {
            way: {name: finite(metrics) for name, metrics in of_way.items()}
            for way, of_way in baselines.items()
        },
        "seen": schema.seen,
        # Absent where it is the default: the columns are those of earlier versions.
        **({} if schema.new_items == EXCLUDE else {"new_items": schema.new_items}),
        "item_leakage": item_leakage,
        "label_leakage": label_leakage,
        "notes": [*map(escaped, (*skipped, *notes, *said))],
        **({} if segment is None else {"segment": plain(segment)}),
        **(shared.manifest if shared else {}),
    }


def _order_of(stream: StreamPart) -> tuple[np.ndarray, tuple[int, int, int], list[str]]:
    """Return the same as `split` for a segment of a stream."""
    return stream.order, (len(stream.order), 0, 0), [*stream.notes]


def vocabulary_of(folder: Path, raw: RawData, order: np.ndarray, schema: Schema) -> str:
    """Return the content of vocabulary.json of some events, made in a temporary folder."""
    stored = _write_events(folder, raw, order, lambda share: None)
    _write_features(folder, raw, stored, order, len(order), schema, None, None)
    return (folder / "vocabulary.json").read_text()


def _rows_of_items(folder: Path, written: WrittenFeatures, schema: Schema) -> np.ndarray:
    """Return the table row of each item, int32."""
    place = schema.place_of(ITEM, [table.feature for table in written.tables])
    return np.load(folder / f"{schema.item}_features.npy")["features"][:, place]


def _write_features(
    folder: Path,
    raw: RawData,
    stored: StoredEvents,
    order: np.ndarray,
    num_train: int,
    schema: Schema,
    stream: StreamPart | None,
    shared: Shared | None,
) -> tuple[WrittenFeatures, FeatureArrays]:
    """Write the features of users and items, and the vocabulary; return the features, of events too."""
    is_trained = {
        entity: counts_of(column[:num_train], len(frame)) > 0
        for entity, frame, column in ((USER, raw.users, stored.user), (ITEM, raw.items, stored.item))
    }
    if raw.context is not None and stream is None:
        # An item that was only viewed needs a row too: histories hold it.
        newest = max(int(stored.time[part].max()) for part in chunks(num_train, stored.time))
        for part in chunks(len(raw.context.item), raw.context.item, raw.context.time):
            is_trained[ITEM][raw.context.item[part][raw.context.time[part] <= newest]] = True
    frames = {USER: raw.users, ITEM: raw.items}
    entities = {name: (frames[name], np.flatnonzero(trained)) for name, trained in is_trained.items()}
    known = shared.vocabulary if shared else {}
    if stream and stream.vocabulary:
        known = json.loads(stream.vocabulary)
    written = write_features(folder, entities, schema, known, has_ids=shared is not None)
    own = features_of_events(folder, written, raw.events, order, num_train, schema)
    write_vocabulary(folder, written)
    written.tables.sort(key=lambda table: table.feature.multi)
    return written, own


def _write_events(
    folder: Path, raw: RawData, order: np.ndarray, done: Callable[[float], None]
) -> StoredEvents:
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
    return StoredEvents(user, item, label, time)


def _weight(
    folder: Path, raw: RawData, order: np.ndarray, num_train: int, mean: float | None
) -> dict[str, np.ndarray]:
    """Weight of each event in the loss, float32, with mean 1; empty if the data have no weights."""
    if raw.events.weight is None:
        return {}
    weight = gather(raw.events.weight, order, temporary(folder, len(order), np.float32))
    # Mean 1, so that learning rates and decays have the same effect with weights as without.
    mean = weight[:num_train].mean(dtype=np.float64) if mean is None else mean
    if not mean > 0:
        raise UserError("The weights of all training events are 0; give some of them a weight above 0.")
    for part in chunks(len(weight), weight):
        weight[part] /= mean
    return {"weight": weight}


def _more_labels(folder: Path, raw: RawData, order: np.ndarray) -> dict[str, np.ndarray]:
    """Labels after the first, float32, NaN for a missing one, and their own weights."""
    events = raw.events
    return {
        f"{field}_{place}": gather(columns[name], order, temporary(folder, len(order), np.float32))
        for place, name in enumerate(events.more_labels, 2)
        for field, columns in (("label", events.more_labels), ("weight", events.more_weights))
        if name in columns
    }


def _recorded(table: Table, schema: Schema) -> dict[str, Any]:
    """Return a table in the form of the manifest."""
    return plain(dataclasses.replace(table, feature=schema.recorded(table.feature)))
