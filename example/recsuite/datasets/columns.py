"""A data set as columns on disk: parsed once, memory-mapped by every process of the machine.

    <cache>/<split>-<digest>-v<version>/
        rows.npy                   a record for each event: its user, item and label, where it is among what
                                   its user and its item had, how much it counts in the loss, and its own
                                   features; see `record_type`
        rating.npy  time.npy       float32, int64 [events]: label, time
        <user>_features.npy        a record for each user: its features
        <item>_features.npy        a record for each item: its features
        <feature>_values.npy       int32: table rows of a multi-valued feature, item after item
        <feature>_counts.npy       int32 [rows]: of a feature of events, how many of the training have each
        <feature>_ids.npy          int64: the ids of a dynamic feature's values, of which all other files have
                                   the numbers instead of table rows; first that of "unknown"
        history.npy                int32 [training events, 2]: row of the items' table, bits of the label;
                                   user after user, each in the order of time
        history_time.npy           int64 [training events]: their times, in the same order
        history_event.npy          int32 [training events]: their positions, likewise
        history_before.npy         int32 [events]: before which place there each event comes, of those of one
                                   time in the order in which they are stored
        seen.npy                   int32 [training events]: their items, likewise
        history_offsets.npy        int64 [users that rated + 1]: where each user's history begins
        audience.npy               int32 [training events]: row of the users' table, item after item, each
                                   in the order of time
        audience_offsets.npy       int64 [items + 1]: where each item's audience begins
        test_history.npy ...       the same seven of training and validation events, for the test
        vocabulary.json            feature -> raw values in the order of their table rows 1, 2, ..., or the
                                   edges of a number's buckets, or its scale
        schema.json                the schema, its features in the order in which a model adds them up
        manifest.json              what `Columns` holds

where <user> and <item> are what the schema of the data set calls them.

The training events come first, then those for validation, then the test, each part in the order of time: a
split is a range of positions. What is gathered is stored in records, so that an event costs one random
access; what is scanned, the labels, in a column too. An event's history ends before the first event of its
user that is not older than it; so does an audience. They hold training events alone, and for a test event
also validation events, which a model in use would know of: no test event can be in them.

The folder appears in one rename. Its name holds a digest of all that it was made from (every byte of the
source files, schema, split and other flags) and the version of the code that made it, so a changed source
or formula is another folder, and none is ever stale. Where --rebuild finds other bits, `.2`, `.3` and so on
follow the name, and the highest number counts. The manifest has a digest of itself and of every file: columns
that do not match are made again, file by file, each in one rename, so that whoever uses them meanwhile finds
the same bits in either.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.config.sections import EVALUATIONS
from recsuite.datasets.metrics import Metrics
from recsuite.datasets.schema import ENTITIES, ITEM, Feature, Schema, Table
from recsuite.errors import UserError, printable
from recsuite.files import SEAL, FileEntry, check_file, parsed, reason_of, sealed, typed
from recsuite.runtime.console import stage

MANIFEST = "manifest.json"
# Of what columns and the parts of tables hold. Raise it with every change of a reader, a formula or a file; a
# test holds the digest of some columns against it.
VERSION = 1
# The place of an event in a list that does not have it.
NOWHERE = -1
# Files whose digests are taken at once.
DIGEST_THREADS = 4


def record_type(
    fields: Sequence[tuple[str, Any]] = (), features: int = 0, lists: int = 0, numbers: int = 0
) -> np.dtype[Any]:
    """What a record of an event, a user or an item holds: some fields, and what it has of its own features.

    The fields of an event are "user" and "item", positions int32; "label", float32; "history_end", the place
    in what its user had before which its own history ends, "history_place", its own place there, -1 where it
    has none, and "audience_end" and "audience_place", the same of its item, int32; and where the data say so,
    "weight", float32, and for each label after the first "label_2", "weight_2" and so on, float32, NaN for a
    label that an event lacks.
    "features" are the table rows of features with one value; "lists" are two numbers for each feature with
    lists: where its values begin in `<feature>_values.npy`, and how many they are; "numbers" are the dense
    ones, on a common scale, NaN where there is none.
    """
    own = [
        ("features", np.int32, (features,)),
        ("lists", np.int32, (lists, 2)),
        ("numbers", np.float32, (numbers,)),
    ]
    return np.dtype([*fields, *own])


@dataclass(frozen=True)
class Columns:
    """One data set on disk: where it lies, how long its splits are, which tables its features need.

    numbers: the features that are dense inputs; baselines: way of evaluation, such as "ranks", to name to
    metrics on the test, and "ranks/known" and "ranks/new" to those of the users with and without a training
    event, where there are both; told: feature of the event to how much it says of which item that is of, see
    `datasets.telling`; label_told: likewise of the label; num_late: events of a stream that came too late,
    and are left out; events_per_file: of a stream, those included; digest: of the events in their order, and
    of where the splits begin; files: name to digest, of the columns.
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
    longest_audience: int
    tables: tuple[Table, ...]
    numbers: tuple[Feature, ...]
    baselines: dict[str, dict[str, Metrics]]
    notes: tuple[str, ...]
    told: dict[str, float] = field(default_factory=dict)
    label_told: dict[str, float] = field(default_factory=dict)
    num_late: int = 0
    events_per_file: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    files: dict[str, str] = field(default_factory=dict)

    def range_of(self, split: str) -> range:
        """The positions of "train", "validation" or "test" in the columns of events, or of "catalogue": all
        items.
        """
        sizes = {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}
        if split == "catalogue":
            return range(self.num_items)
        names = list(sizes)
        first = sum(sizes[name] for name in names[: names.index(split)])
        return range(first, first + sizes[split])

    def labels(self, split: str) -> np.ndarray:
        """The labels of a split, float32, mapped from disk."""
        positions = self.range_of(split)
        return self.column("rating")[positions.start : positions.stop]

    def all_labels(self, positions: range) -> np.ndarray:
        """All L labels of some events, float32 [n, L], NaN where an event lacks one."""
        rows = self.column("rows")[positions.start : positions.stop]
        names = ["label", *(f"label_{place}" for place in range(2, len(self.schema.label_names) + 1))]
        return np.stack([rows[name] for name in names], axis=1)

    def column(self, name: str) -> np.ndarray:
        """A column, mapped from disk."""
        return np.load(Path(self.folder) / f"{name}.npy", mmap_mode="r")

    def place_of(self, entity: str) -> int:
        """The place in "features" of `<entity>_features.npy` of the one that tells users or items apart."""
        return self.schema.place_of(entity, [table.feature for table in self.tables])

    def ids_of(self, table: str) -> np.ndarray | None:
        """The ids of a dynamic table's values, int64 [rows], by the numbers that the columns have for them;
        None where those are table rows.
        """
        feature = next(each.feature for each in self.tables if each.name == table)
        return self.column(f"{self.schema.vocabulary_of(table)}_ids") if feature.is_dynamic else None

    def item_ids(self) -> np.ndarray | None:
        """`ids_of` the items."""
        return self.ids_of(self.schema.item)

    def item_shares(self) -> np.ndarray:
        """The share of the training events that is of each row of the items' table, float32 [rows]; of
        dynamic items, of each of `item_ids`.

        A row that no training event has, such as that of unknown items, counts as one event: the
        loss of a ranking takes the logarithm.
        """
        row_of_item = self.column(f"{self.schema.item}_features")["features"][:, self.place_of(ITEM)]
        rows = row_of_item[self.column("rows")["item"][: self.num_train]]
        counts = np.bincount(rows, minlength=int(row_of_item.max()) + 1)
        return (np.maximum(counts, 1) / self.num_train).astype(np.float32)


class MappedColumn:
    """One .npy file, mapped for reading. It may be removed while it is mapped; it must not be cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not np.load: the mapping itself is wanted, which can tell the size of its file at any time, even
            # of one that was removed.
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
        """Refuse to continue with a file that was cut: touching a page beyond its end would kill the process.

        Raises:
            UserError: names the file and both sizes.
        """
        # The file's size now, against the mapping's.
        if self._map.size() < len(self._map):
            raise UserError(
                f"{self.path} had {len(self._map):,} bytes when it was opened and has {self._map.size():,} "
                "now; leave the columns alone while they are used, and start again to have them made again."
            )


def load_columns(
    folder: Path, source: Path, schema: Schema, every_byte: bool = True
) -> tuple[Columns | None, str]:
    """The columns that a manifest describes; or None and why they are refused: "" where there are none."""
    if not folder.exists():
        return None, ""
    try:
        content = (folder / MANIFEST).read_bytes()
    except OSError as error:
        return None, f"{MANIFEST} cannot be read ({reason_of(error)})."
    try:
        manifest = parsed(content)
        entries, columns = _described(manifest, folder, source, schema)
    except (ValueError, TypeError, RecursionError) as error:
        return None, f"{MANIFEST} does not describe columns ({type(error).__name__}: {printable(error)})."
    if manifest.get(SEAL) != sealed(manifest)[SEAL]:
        return None, f"{MANIFEST} is not what was written."
    try:
        _check_files(folder, entries, every_byte)
    except UserError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename or folder} cannot be read ({reason_of(error)})."
    return columns, ""


def _described(
    manifest: Any, folder: Path, source: Path, schema: Schema
) -> tuple[tuple[FileEntry, ...], Columns]:
    """The files and the columns that a manifest describes, from what JSON held for it.

    Raises:
        TypeError, ValueError: when it describes none.
    """
    if not isinstance(manifest, dict):
        raise TypeError("it holds no names with their values")
    entries = typed(tuple[FileEntry, ...], manifest.get("files"), "files")
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    files = {entry.name: entry.xxh3_128 for entry in entries}
    # What a data set calls its items is the name under which it counts them.
    rest["num_items"] = rest.pop(f"num_{schema.items}", None)
    # The key stays as it was first written: with another one every cache would be made again.
    rest["mean_label"] = rest.pop("mean_rating", None)
    schema = dataclasses.replace(schema, seen=str(rest.pop("seen", "")))
    # JSON has no NaN: null is a metric that is not defined.
    rest["baselines"] = _with_nan(rest.get("baselines"))
    # Folder and source are filled in below: a path may be of any length and letters, which `typed` refuses.
    named = {"folder": "", "source": "", "schema": schema, "files": files}
    columns = typed(Columns, {**rest, **named})
    tables = tuple(
        dataclasses.replace(table, feature=schema.restored(table.feature)) for table in columns.tables
    )
    # The folder may have been moved or copied since, so no path in it is believed.
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


def _with_nan(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _with_nan(value) for name, value in found.items()}
    # The one object, by which two equal data sets stay equal.
    return math.nan if found is None else found


def _check_files(folder: Path, entries: Sequence[FileEntry], every_byte: bool) -> None:
    """Refuse files that are not those that were written, and columns beside them.

    Raises:
        UserError, OSError: for the first one.
    """
    # Sizes first: to look at them costs nothing.
    for entry in entries:
        if (folder / entry.name).stat().st_size != entry.bytes:
            raise UserError(f"{entry.name} has another size than when it was written.")
    # A batch maps every column that lies in the folder.
    strange = {path.name for path in folder.glob("*.npy")} - {entry.name for entry in entries}
    if strange:
        raise UserError(f"{min(strange)} is not one of its files.")
    if every_byte:
        with stage("checking the columns"), ThreadPoolExecutor(DIGEST_THREADS) as pool:
            list(pool.map(lambda entry: check_file(folder, entry), entries))
