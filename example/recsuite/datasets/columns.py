"""A data set as columns on disk: parsed once, memory-mapped by every process of the machine.

    <cache>/<split>-<digest>-v<version>/
        rows.npy                   a record for each event: its user, item and label, the end of its history,
                                   its weight in the loss, and its own features; see `record_type`
        rating.npy  time.npy       float32, int64 [events]: label, time
        <user>_features.npy        a record for each user: its features
        <item>_features.npy        a record for each item: its features
        <feature>_values.npy       int32: table rows of a multi-valued feature, item after item
        <feature>_ids.npy          int64: the ids of a dynamic feature's values; the first is that of
                                   "unknown". All other files have places in this file instead of table rows
        history.npy                int32 [training events, 2]: row of the items' table, bits of the label;
                                   user after user, each in the order of time
        history_time.npy           int64 [training events]: their times, in the same order
        history_event.npy          int32 [training events]: their positions, likewise
        history_before.npy         int32 [events]: the place there before which each event comes; events of
                                   one time in the order in which they are stored
        seen.npy                   int32 [training events]: their items, likewise
        history_offsets.npy        int64 [users that rated + 1]: where each user's history begins
        test_history.npy ...       the same five (without history_before) of training and validation events,
                                   for the test
        item_counts.npy            int32 [items]: number of training events of each item
        vocabulary.json            feature -> raw values in the order of their table rows 1, 2, ..., or the
                                   edges of a number's buckets, or its scale
        schema.json                the schema, its features in the order in which a model adds them up
        manifest.json              the fields of `Columns`

where <user> and <item> are their names in the schema of the data set. "history" is the user history.

The training events come first, then validation, then the test, each part in the order of time: a split is a
range of positions. Values that are gathered are stored in records, so that an event costs one random access.
Labels, which are also scanned, have a column too. The user history of an event ends before the first event of
its user that is not older than it. Histories hold training events only, and for a test event also validation
events, which a deployed model would know. They never hold test events.

The folder appears in one rename. Its name holds a digest of all its inputs (every byte of the source files,
schema, split and other flags) and the version of the code. So a changed source or formula gives another
folder, and none is ever stale. If --rebuild gives other bits, `.2`, `.3` and so on follow the name, and the
highest number is used. The manifest has a digest of itself and of every file. Columns that do not match are
made again, file by file, each in one rename, so that a process that uses them meanwhile finds the same bits
in the old and the new file.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.datasets.schema import (
    ENTITIES,
    EVALUATIONS,
    EXCLUDE,
    HISTORY,
    ITEM,
    UNKNOWN_ROW,
    USER,
    Feature,
    Schema,
    Table,
)
from recsuite.datasets.streams import StreamSegment
from recsuite.errors import UserError, printable
from recsuite.files import (
    OPTIONAL,
    SEAL,
    FileEntry,
    check_file,
    digest_of_bytes,
    parsed,
    reason_of,
    sealed,
    typed,
)
from recsuite.metrics import Metrics
from recsuite.runtime.console import stage

MANIFEST = "manifest.json"
# Version of the content of columns and of parts of tables. Increase it with every change of a reader, a
# formula or a file. A test compares the digest of some columns.
VERSION = 7
# Files whose digests are taken at once.
DIGEST_THREADS = 4


def record_type(
    fields: Sequence[tuple[str, Any]] = (), features: int = 0, lists: int = 0, numbers: int = 0
) -> np.dtype[Any]:
    """Type of the record of an event, a user or an item: some fields, and its own features.

    The fields of an event are "user" and "item", positions int32; "label", float32; "history_end", the place
    in the history of its user at which its own history ends, int32; if the data have them, "weight", float32,
    and for each label after the first "label_2", "weight_2" and so on, float32, NaN for a label that an event
    lacks.
    "features" are the table rows of features with one value; "lists" are two numbers for each feature with
    lists: the begin of its values in `<feature>_values.npy`, and their number; "numbers" are dense numbers on
    a common scale, NaN for a missing one.
    """
    own = [
        ("features", np.int32, (features,)),
        ("lists", np.int32, (lists, 2)),
        ("numbers", np.float32, (numbers,)),
    ]
    return np.dtype([*fields, *own])


def trained_items(
    column: Callable[[str], np.ndarray], schema: Schema, features: Sequence[Feature]
) -> np.ndarray:
    """Return a mask of the items with a row of their own in the items' table, bool [items]: the negatives.

    The rows of dynamic ids are known only to the table; here they are those of the items with a training
    event.

    column: returns a column by its name; features: of the tables, in their order.
    """
    place = schema.place_of(ITEM, features)
    if next(each for each in features if each.name == schema.item).is_dynamic:
        return column("item_counts") > 0
    return column(f"{schema.item}_features")["features"][:, place] != UNKNOWN_ROW


def listed_items(
    column: Callable[[str], np.ndarray], schema: Schema, features: Sequence[Feature]
) -> np.ndarray:
    """Return a mask of the items that a list can hold, bool [items], as recommendations can.

    Baselines and evaluated lists have these items alone: those with a row, or all, see `Schema.new_items`.
    The arguments are those of `trained_items`.
    """
    trained = trained_items(column, schema, features)
    return np.ones_like(trained) if schema.lists_new_items else trained


@dataclass(frozen=True)
class Columns:
    """One data set on disk: its folder, the sizes of its splits, and the tables of its features.

    numbers: the features that are dense inputs; baselines: way of evaluation, such as "ranks", to name to
    metrics on the test, and "ranks/known" and "ranks/new" to those of the users with and without a training
    event, if there are both; item_leakage: feature of the event to its leakage of the item, see
    the extra `leakage`; label_leakage: likewise of the label; digest: of the events in order, and of the
    begins of the splits; files: name of each column to digest; segment: of a stream, whose events all are
    for training.
    """

    folder: str
    source: str
    schema: Schema
    num_train: int
    num_validation: int
    num_test: int
    num_skipped: int
    num_users: int
    num_items: int
    mean_label: float
    longest_history: int
    tables: tuple[Table, ...]
    numbers: tuple[Feature, ...]
    baselines: dict[str, dict[str, Metrics]]
    notes: tuple[str, ...]
    item_leakage: dict[str, float] = field(default_factory=dict)
    label_leakage: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    files: dict[str, str] = field(default_factory=dict)
    segment: StreamSegment | None = field(default=None, metadata=OPTIONAL)

    @property
    def is_part(self) -> bool:
        """True if other ranks have other events, see the extra `partitions`."""
        return False

    def range_of(self, split: str) -> range:
        """Positions of "train", "validation" or "test" in the columns of events; "catalogue": all items."""
        sizes = {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}
        if split == "catalogue":
            return range(self.num_items)
        names = list(sizes)
        first = sum(sizes[name] for name in names[: names.index(split)])
        return range(first, first + sizes[split])

    def events(self, split: str) -> np.ndarray:
        """Records of the events of a split, see `record_type`, mapped from disk."""
        positions = self.range_of(split)
        return self.column("rows")[positions.start : positions.stop]

    def labels(self, split: str) -> np.ndarray:
        """Labels of a split, float32, mapped from disk."""
        positions = self.range_of(split)
        return self.column("rating")[positions.start : positions.stop]

    def all_labels(self, split: str) -> np.ndarray:
        """All L labels of a split, float32 [n, L], NaN for a label that an event lacks."""
        rows = self.events(split)
        names = ["label", *(f"label_{place}" for place in range(2, len(self.schema.label_names) + 1))]
        return np.stack([rows[name] for name in names], axis=1)

    def joined(self, values: np.ndarray) -> np.ndarray:
        """Return values of the events of all ranks, of those of events here, [n, ...]: here they are all."""
        return values

    def digest_of_test(self) -> str:
        """Return a digest of users, items and labels of the test events; of a stream, of all events."""
        # The columns of a stream are gone when it ends.
        if self.segment is not None:
            return self.digest
        events = self.events("test")
        return digest_of_bytes(*(np.ascontiguousarray(events[name]) for name in (USER, ITEM, "label")))

    def user_numbers(self, split: str) -> np.ndarray:
        """Return a number for the user of each event of a split, int64 or int32 [n]."""
        events = self.events(split)
        # For intervals; if all events have the same user, events are the independent units instead.
        return np.array(events[USER]) if self.num_users > 1 else np.arange(len(events))

    def continued(self, progress: Any, has_same_steps: bool, epochs: int) -> Any:
        """Return the `Progress` at which a training of so many epochs continues from that of a checkpoint.

        has_same_steps: True if the number of ranks and the batch size are those of the checkpoint.
        """
        return progress

    def user_counts(self) -> np.ndarray:
        """Number of training events of each user, int64 [users]."""
        if self.schema.event_types:
            # Histories have other events too.
            return np.bincount(self.column("rows")[USER][: self.num_train], minlength=self.num_users)
        return np.diff(self.column(f"{HISTORY}_offsets"))

    @property
    def num_numbers(self) -> int:
        """Number of dense numbers of an event, its user and its item, with those of vectors."""
        return sum(feature.width for feature in self.numbers)

    def column(self, name: str) -> np.ndarray:
        """Column, mapped from disk."""
        return np.load(Path(self.folder) / f"{name}.npy", mmap_mode="r")

    def place_of(self, entity: str) -> int:
        """Place of the id feature of users or items in "features" of `<entity>_features.npy`."""
        return self.schema.place_of(entity, [table.feature for table in self.tables])

    def trained_items(self) -> np.ndarray:
        """Mask of the items with a row of their own, bool [items], see `trained_items`."""
        return trained_items(self.column, self.schema, [table.feature for table in self.tables])

    def ids_of(self, table: str) -> np.ndarray | None:
        """Ids of a dynamic table's values, int64 [rows], indexed by the numbers in the columns.

        None if the numbers are table rows.
        """
        feature = next(each.feature for each in self.tables if each.name == table)
        return self.column(f"{self.schema.vocabulary_of(table)}_ids") if feature.is_dynamic else None

    def item_ids(self) -> np.ndarray | None:
        """`ids_of` of the items."""
        return self.ids_of(self.schema.item)

    def item_shares(self) -> np.ndarray:
        """Share of the training events of each row of the items' table, float32 [rows].

        For dynamic items, of each of `item_ids`. A row without training events, such as the unknown row,
        counts as one event, because the loss of a ranking takes the logarithm.
        """
        row_of_item = self.column(f"{self.schema.item}_features")["features"][:, self.place_of(ITEM)]
        counts = np.bincount(row_of_item, self.column("item_counts"))
        return (np.maximum(counts, 1) / self.num_train).astype(np.float32)


class MappedColumn:
    """One .npy file, mapped for reading. It may be removed while it is mapped, but not truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not np.load: only the mapping itself gives the size of its file at any time, even of a removed
            # one.
            with path.open("rb") as file:
                # np.save writes version 1.0 of its format unless the header is huge.
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self.values = np.frombuffer(self._map, dtype, int(np.prod(shape)), file.tell()).reshape(shape)
        except (OSError, ValueError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            raise UserError(
                f"The columns of the data set are gone or damaged: {path} ({reason}); start again to have "
                "them made again."
            ) from None

    def check(self) -> None:
        """Refuse a truncated file: access beyond its end would kill the process.

        Raises:
            UserError: names the file and both sizes.
        """
        # Compare the current size of the file with that of the mapping.
        if self._map.size() < len(self._map):
            raise UserError(
                f"{self.path} had {len(self._map):,} bytes when it was opened and has {self._map.size():,} "
                "now; leave the columns alone while they are used, and start again to have them made again."
            )


def load_columns(
    folder: Path, source: Path, schema: Schema, every_byte: bool = True
) -> tuple[Columns | None, str]:
    """Return the columns of a manifest, or None and the reason for refusing them, "" if there are none."""
    if not folder.exists():
        return None, ""
    try:
        content = (folder / MANIFEST).read_bytes()
    except OSError as error:
        return None, f"Cannot read {MANIFEST}: {reason_of(error)}."
    try:
        manifest = parsed(content)
        entries, columns = _described(manifest, folder, source, schema)
    except (ValueError, TypeError, RecursionError) as error:
        return None, f"{MANIFEST} does not describe columns ({type(error).__name__}: {printable(error)})."
    if manifest.get(SEAL) != sealed(manifest)[SEAL]:
        return None, f"{MANIFEST} has a checksum mismatch."
    try:
        _check_files(folder, entries, every_byte)
    except UserError as error:
        return None, str(error)
    except OSError as error:
        return None, f"Cannot read {error.filename or folder}: {reason_of(error)}."
    return columns, ""


def _described(
    manifest: Any, folder: Path, source: Path, schema: Schema
) -> tuple[tuple[FileEntry, ...], Columns]:
    """Return the files and columns of a parsed manifest; TypeError or ValueError if it describes none."""
    if not isinstance(manifest, dict):
        raise TypeError("it holds no names with their values")
    entries = typed(tuple[FileEntry, ...], manifest.get("files"), "files")
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    files = {entry.name: entry.xxh3_128 for entry in entries}
    # The key contains the data set's word for items.
    rest["num_items"] = rest.pop(f"num_{schema.items}", None)
    # The key keeps its first name: with another one every cache would be made again.
    rest["mean_label"] = rest.pop("mean_rating", None)
    seen, new_items = str(rest.pop("seen", "")), str(rest.pop("new_items", EXCLUDE))
    schema = dataclasses.replace(schema, seen=seen, new_items=new_items)
    # JSON has no NaN: an undefined metric is null.
    rest["baselines"] = _with_nan(rest.get("baselines"))
    # Folder and source are set below: `typed` refuses long paths and unprintable characters.
    named = {"folder": "", "source": "", "schema": schema, "files": files}
    columns = typed(Columns, {**rest, **named})
    tables = tuple(
        dataclasses.replace(table, feature=schema.restored(table.feature)) for table in columns.tables
    )
    # The folder may have been moved or copied, so paths in the manifest are not used.
    numbers = tuple(map(schema.restored, columns.numbers))
    columns = dataclasses.replace(
        columns, folder=str(folder), source=str(source), tables=tables, numbers=numbers
    )
    for what, needed, there in (
        ("baselines for", EVALUATIONS, columns.baselines),
        ("table of the feature", map(schema.name_of, ENTITIES), [table.name for table in columns.tables]),
    ):
        missing = [name for name in needed if name not in there]
        if missing:
            raise ValueError(f"it has no {what} {missing[0]}")
    return entries, columns


def _with_nan(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {name: _with_nan(value) for name, value in entry.items()}
    # Always the same NaN object, so that two equal data sets compare equal.
    return math.nan if entry is None else entry


def _check_files(folder: Path, entries: Sequence[FileEntry], every_byte: bool) -> None:
    """Refuse files that changed since they were written, and other .npy files in the folder."""
    # Sizes first: checking them is cheap.
    for entry in entries:
        if (folder / entry.name).stat().st_size != entry.bytes:
            raise UserError(f"{entry.name} has another size than when it was written.")
    # A batch maps every column in the folder.
    strange = {path.name for path in folder.glob("*.npy")} - {entry.name for entry in entries}
    if strange:
        raise UserError(f"{min(strange)} is not one of its files.")
    if every_byte:
        with stage("checking the columns"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
            list(pool.map(lambda entry: check_file(folder, entry), entries))
