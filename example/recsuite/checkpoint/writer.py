"""Writer of the checkpoints of one training: full checkpoints, and deltas that build on the one before.

    step-000000784/
        part-00001.safetensors   rows of all tables on the first rank, and the dense part with its optimizer
        part-00002.safetensors   rows of all tables on the second rank; see `shards.py`
        config.json              the configuration of the training
        vocabulary.json          for every feature the raw values of table rows 1, 2, ..., or how a number is
                                 encoded
        schema.json              the schema of the data set: users, items and events
        manifest.json            progress, run, tensors, files with sizes and digests, plan, versions
    delta-000000900/
        part-00001.safetensors   rows that changed since the checkpoint before, and the whole dense part
        config.json
        manifest.json            as of a full checkpoint, and the link to the parent

A row is its weights in the table times the tensor "dense.row_scale". Each delta has a new scale, by which all
rows decay, also rows that are not in the delta.

All ranks write their own rows at the same time, and any number of ranks can read the rows that they need.
torch.distributed.checkpoint can read the shard files of a full checkpoint too. Between two steps no random
generator is in use, so none is written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsuite.checkpoint.chain import CheckpointChain
from recsuite.checkpoint.folder import (
    WRITTEN,
    check_owner,
    delta_name,
    full_name,
    making_name,
    new_attempt,
    publish,
)
from recsuite.checkpoint.format import (
    CONFIG,
    MANIFEST,
    STREAM_FILE,
    VOCABULARY,
    DynamicRecord,
    Manifest,
    ParentLink,
    link_after,
    read_manifest,
    write_manifest,
)
from recsuite.checkpoint.origin import ORIGIN, origin_of
from recsuite.checkpoint.shards import OFFSETS_KEY, RowReader, Texts, shard_file_name, write_shard_file
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.stream_reader import StreamReader
from recsuite.datasets.schema import SCHEMA_FILE, Feature, Schema
from recsuite.errors import UserError
from recsuite.files import FileEntry, digest_of, digest_of_bytes, flushed, plain, reason_of
from recsuite.places import ObjectPath, folder_at
from recsuite.runtime.host import installed_versions
from recsuite.runtime.process import RuntimeContext, all_gather_object, broadcast_from_rank0, raise_on_all
from recsuite.sharding.dynamic_ranks import counts_of
from recsuite.sharding.plan import describe_plan
from recsuite.sharding.table import SINCE_BEGINNING, EmbeddingTable, track_changes
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel

# Bytes per second of the slowest disk that ranks wait for.
SLOWEST_DISK = 5 * 10**6
# Raw value of row 0 of a table whose raw values are whole numbers.
UNKNOWN_NUMBER = np.iinfo(np.int64).min
# Texts of a table's ids from which on those that are in no use are removed.
LEAST_TEXTS = 2**16

# Tensors that are written, by their names in the shard files.
Tensors = dict[str, "torch.Tensor | ShardedTensor"]


def dense_of(train_state: ShardedModel) -> dict[str, torch.Tensor]:
    """Return the dense part with its optimizer by the names in shard files, not copied. Not collective."""
    tensors = {_name(key): value for key, value in train_state.model.state_dict().items()}
    for key, slots in train_state.optimizer.state_dict()["state"].items():
        tensors |= {f"{_name(key)}.{slot}": value for slot, value in slots.items()}
    # The reader cannot slice a tensor of 0 dimensions.
    return {
        name: value if value.dim() else value.view(1)
        for name, value in tensors.items()
        if not isinstance(value, ShardedTensor)
    }


def _name(key: str) -> str:
    # Without the wrappers of a training: a server makes only the head, and finds its tensors by these names.
    name = key.removeprefix("recommender.").removeprefix("head.")
    # A loss with parameters of its own, which no server needs, keeps its name.
    return name if name == key and name.startswith("loss.") else f"dense.{name}"


def tensors_of(train_state: ShardedModel) -> Tensors:
    """Return all tensors of a checkpoint except tables by id, not copied. Not collective."""
    return named_tensors(train_state.tables, dense_of(train_state))


def named_tensors(tables: Mapping[str, EmbeddingTable], dense: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors of tables by number together with those of the dense part."""
    rows = {
        f"{table.prefix}.{name}.{slot}": value
        for name, table in tables.items()
        for slot, value in table.tensors.items()
    }
    return {**rows, **dense}


def shapes_of(tensors: Tensors) -> dict[str, tuple[list[int], str]]:
    """Return name to the shape of the whole tensor and its dtype, for a manifest. Collective: every rank.

    A rank without rows of a table has no optimizer state of it, so the shapes of all ranks are gathered. Rows
    are float32 in files, see `_rows`.
    """
    mine = {
        name: (
            list(value.size()),
            "float32" if isinstance(value, ShardedTensor) else str(value.dtype).removeprefix("torch."),
        )
        for name, value in tensors.items()
    }
    return dict(sorted(item for shapes in all_gather_object(lambda: mine) for item in shapes.items()))


def features_of(columns: Columns) -> dict[str, Any]:
    """Return table to the feature of its rows, as a manifest records it."""
    return {table.name: _recorded(columns.schema.recorded(table.feature)) for table in columns.tables}


def _recorded(feature: Feature) -> dict[str, Any]:
    # Checkpoints of earlier versions do not record these: no feature was a number, and all had a fixed
    # vocabulary.
    omitted = {"number": "", "ids": Feature.ids, "width": Feature.width}
    return {name: value for name, value in vars(feature).items() if omitted.get(name) != value}


def digest_of_vocabulary(columns: Columns) -> str:
    """Return the digest of the fixed vocabularies; the ids of dynamic ones change over time."""
    path = Path(columns.folder) / VOCABULARY
    dynamic = {table.name for table in columns.tables if table.feature.is_dynamic}
    if not dynamic:
        return digest_of(path)
    fixed = {name: values for name, values in json.loads(path.read_bytes()).items() if name not in dynamic}
    return digest_of_bytes(json.dumps(fixed, allow_nan=False).encode())


def texts_of(columns: Columns, table: str) -> Texts | None:
    """Return the texts of a feature in the data, by their ids; None if it has no ids, or ids of numbers."""
    ids = columns.ids_of(table)
    if ids is None:
        return None
    path = Path(columns.folder) / VOCABULARY
    values = json.loads(path.read_bytes())[columns.schema.vocabulary_of(table)]
    if not values or not isinstance(values[0], str):
        return None
    # The first id is UNKNOWN_ID.
    return Texts.of(np.asarray(ids)[1:], [value.encode("utf-8", "surrogatepass") for value in values])


class RawValues:
    """Raw values of rows with numbers, in the form in which a delta has them. path: of a vocabulary.json."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._schema = schema
        vocabulary = json.loads(path.read_bytes())
        self._values = {name: _with_unknown(np.array(_values_of(held))) for name, held in vocabulary.items()}

    def of(self, table: str, rows: np.ndarray) -> np.ndarray:
        """Return the raw values of some rows of a table."""
        return self._values[self._schema.vocabulary_of(table)][rows]


def _values_of(held: list[Any] | dict[str, Any]) -> list[Any]:
    """Return the raw values of table rows 1, 2, ...; for a number, the lowest value of each bucket."""
    return held if isinstance(held, list) else [-np.inf, *held.get("edges", ())]


def _with_unknown(values: np.ndarray) -> np.ndarray:
    """Return the values of all rows, with the value of row 0 first."""
    if values.dtype.kind in "iu":
        return np.concatenate([[UNKNOWN_NUMBER], values])
    if values.dtype.kind == "f":
        return np.concatenate([[np.nan], values])
    # safetensors supports only numbers.
    texts = np.char.encode(np.concatenate([[""], values]), "utf-8")
    return texts.view(np.uint8).reshape(len(texts), -1)


@dataclasses.dataclass
class ShardContents:
    """Contents of this rank's shard file.

    arrays: by name; offsets: of each array in the whole tensor; counts: rows of each table; stream: arrays of
    `STREAM_FILE`, None on other ranks than 0 and without a stream.
    """

    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    offsets: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    stream: dict[str, np.ndarray] | None = None

    def add(self, name: str, array: np.ndarray, first: int = 0) -> None:
        """Add an array with the rows from `first` on of a whole tensor."""
        self.arrays[name] = array
        self.offsets[name] = [first, *[0] * (array.ndim - 1)]


class CheckpointWriter:
    """Writer of checkpoints into --save_dir, from the tensors of a train state.

    If a checkpoint fails because of space or permissions, one line is printed and the training continues; the
    next checkpoint tries again. chain: the checkpoint that the train state was restored from, if any; the
    first delta builds on it. stream_reader: of a stream, on the first rank of each machine. Collective: every
    rank.
    """

    def __init__(
        self,
        train_state: ShardedModel,
        run: str,
        chain: CheckpointChain | None,
        columns: Columns,
        config: Config,
        context: RuntimeContext,
        stream_reader: StreamReader | None = None,
    ) -> None:
        self.run = run
        # Rank 0 alone writes what the stream keeps, but each machine counts its changes.
        self.stream_reader = stream_reader
        self.columns = columns
        self.config = config.with_global_batch(columns.num_train, context.world_size)
        self.context = context
        self.save_dir = folder_at(config.checkpoint.save_dir)
        # Files are made on this machine, and uploaded to an object store from here.
        self.is_uploaded = isinstance(self.save_dir, ObjectPath)
        if self.is_uploaded:
            self._staging = tempfile.TemporaryDirectory(prefix="checkpoint-")
        # The reason why the last checkpoint could not be written; empty if it was written.
        self.failure = ""
        self.tables = train_state.tables
        # Collected once for the whole training: training and restoring change these tensors in place.
        self.dense = dense_of(train_state)
        self.optimizer = train_state.optimizer_name
        # Texts of ids, of the tables that have such ids.
        self.texts: dict[str, Texts] = {}
        # Number of texts of a table beyond which those that no row needs are removed.
        self._most_texts: dict[str, int] = {}
        raise_on_all(lambda: self._add_texts(columns, chain))
        self.shapes = shapes_of(named_tensors(self.tables, self.dense))
        self.plan = describe_plan(train_state.model, columns)
        # Looked up once: this takes as long as writing a small delta.
        self.versions = installed_versions()
        self.vocabulary_digest = digest_of_vocabulary(columns)
        self.origin = plain(origin_of(train_state.head))
        # A rank on another machine can outlive its attempt. Its late writes must not get into a folder of
        # this attempt, so the names of unfinished folders contain the attempt, which all ranks must share.
        self.attempt: str = broadcast_from_rank0(new_attempt)
        # A separate group: an --async_dump uses it in a thread while the training uses the other groups. Its
        # timeout is longer, because one rank may have everything to write. On gloo, because it carries only
        # messages between processors.
        self.group = dist.new_group(backend="gloo", timeout=self._writing_deadline())
        # The parent of the next delta; None if there is none, and the next checkpoint must be full.
        self.link: ParentLink | None = None
        # The full checkpoint that is being written, and a function that waits for it.
        self._under_way: tuple[Path, Callable[[], None]] | None = None
        self._thread = ThreadPoolExecutor(1)
        if config.checkpoint.inc_dump:
            # Only if deltas are written: the marks take a byte for each row, and are set in every lookup.
            track_changes(train_state.model, self.tables)
            self.raw_values = RawValues(Path(columns.folder) / VOCABULARY, columns.schema)
            # No delta can build on a checkpoint with fewer tensors, of an earlier version.
            if chain is not None and self.shapes.keys() <= read_manifest(chain.folder).tensors.keys():
                self.link = link_after(chain.folder)

    def _add_texts(self, columns: Columns, chain: CheckpointChain | None = None) -> None:
        """Add the texts of ids in the data, and in the checkpoint that the training continues from."""
        for name in self.tables:
            texts = texts_of(columns, name)
            if texts is not None:
                known = self.texts.get(name, Texts.none())
                self.texts[name] = known.with_others(texts, name)
        if chain is not None:
            manifests = [read_manifest(folder) for folder in chain.folders]
            reader = RowReader(chain.folders, manifests)
            for name in manifests[-1].dynamic:
                if any(manifest.dynamic[name].has_texts for manifest in manifests):
                    self.texts[name] = reader.texts(name, self.texts.get(name))

    def continue_with(self, columns: Columns) -> None:
        """Continue with data that have grown; fixed vocabularies are the same as before. Collective.

        Raises:
            UserError: when two texts have the same id.
        """
        # A checkpoint under way may still copy files of the old data.
        self.finish()
        self.columns = columns
        raise_on_all(lambda: self._add_texts(columns))
        self._drop_texts(columns)

    def _drop_texts(self, columns: Columns) -> None:
        """Remove the texts of ids without a row of this rank that the data do not have, if they are many."""
        for name, texts in self.texts.items():
            if len(texts.ids) > self._most_texts.get(name, LEAST_TEXTS):
                used = [self.tables[name].ids().cpu().numpy()]
                used += [np.asarray(ids)] if (ids := columns.ids_of(name)) is not None else []
                self.texts[name] = left = texts.of_ids(np.concatenate(used))
                # So that each text is looked at a few times at most.
                self._most_texts[name] = max(LEAST_TEXTS, 2 * len(left.ids))

    @property
    def next_is_delta(self) -> bool:
        """True if the next checkpoint is a delta; call `finish` before."""
        return self.config.checkpoint.inc_dump and self.link is not None

    def write(self, progress: Progress, in_full: bool = False) -> None:
        """Write a delta if deltas are asked for and there is a parent, else a full checkpoint."""
        if self.next_is_delta and not in_full:
            self.write_delta(progress)
        else:
            self.write_full(progress)

    def write_full(self, progress: Progress) -> None:
        """Write a full checkpoint; with --async_dump it may not be complete before `finish`."""
        final, is_async = self.save_dir / full_name(progress.step), self.config.checkpoint.async_dump
        # If this one fails, the next one must be full again: a delta holds the rows that changed since the
        # last checkpoint, and their marks are cleared below, before it is known whether this one succeeds.
        self.link = None
        manifest = self._describe(progress, None)
        # A copy, so that the next step may change the tensors while a thread writes.
        contents = self._contents(progress, is_delta=False, copy=is_async)

        def write() -> None:
            self._write_files(final, contents, manifest)

        self._under_way = final, self._thread.submit(write).result if is_async else write
        # Changes from here on, while the copy is written, are not in it.
        self._clear_changes()
        if not is_async:
            self.finish()

    def write_delta(self, progress: Progress) -> None:
        """Write a delta: the rows that changed since the last checkpoint, and the dense part."""
        assert self.link is not None
        final, manifest = self.save_dir / delta_name(progress.step), self._describe(progress, self.link)
        try:
            self._write_files(final, self._contents(progress, is_delta=True), manifest)
        except UserError as error:
            if self.is_uploaded:
                # It may be published although its answer was lost: the next one must not build on another.
                self.link = None
            self._note_failure(final, str(error))
            return
        # Only after success: the changes of a delta that failed belong to the next one.
        self._clear_changes()
        self.link = self.link.after(progress.step)
        self._note_success(final)

    def _clear_changes(self) -> None:
        for table in self.tables.values():
            table.clear_changes()
        if self.stream_reader is not None:
            self.stream_reader.recent.clear_changes()

    def finish(self) -> None:
        """Wait for the full checkpoint that is under way, and print whether it was written."""
        if self._under_way is None:
            return
        (final, wait), self._under_way = self._under_way, None
        try:
            wait()
        except UserError as error:
            self._note_failure(final, str(error))
            return
        if self.config.checkpoint.inc_dump:
            # Only after the write: the link holds the digest of the manifest, which is written last.
            self.link = link_after(final)
        self._note_success(final)

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: when it failed. An earlier one may have: what it held is in those after it.
        """
        self.finish()
        if self.is_uploaded:
            self._staging.cleanup()
        if self.failure:
            raise UserError(self.failure)

    def _contents(self, progress: Progress, is_delta: bool, copy: bool = False) -> ShardContents:
        """Return the contents of this rank's shard file; tensors on the CPU are not copied unless asked."""
        contents = ShardContents()
        for name, table in self.tables.items():
            # The rows of a delta are copies already.
            must_copy = copy and not is_delta and not table.exports_copies
            slots = {slot: _rows(value, must_copy) for slot, value in table.export(is_delta).items()}
            if "rows" in slots:
                slots["ids"] = self.raw_values.of(name, slots["rows"])
            if name in self.texts:
                slots |= self.texts[name].of_ids(slots["ids"]).arrays()
            contents.counts[name] = len(slots.get("ids", ()))
            for slot, value in slots.items():
                # A rank without rows of a table writes none in a full checkpoint.
                if is_delta or len(value) or "ids" in slots:
                    contents.add(f"{table.prefix}.{name}.{slot}", value, table.first)
        if is_delta:
            # Readers need all tensors of each table in each file, also if this rank has no rows of it.
            for name, (shape, _) in self.shapes.items():
                if name.startswith("tables.") and name not in contents.arrays:
                    contents.add(name, np.zeros((0, *shape[1:]), np.float32))
        if self.stream_reader is not None and progress.stream is not None and self.context.rank == 0:
            contents.stream = self.stream_reader.arrays(progress.stream.begin, is_delta)
        # The dense part is the same on every rank, so rank 0 writes it.
        if self.context.rank == 0:
            for name, tensor in self.dense.items():
                contents.add(name, _array(tensor, copy))
        return contents

    def _write_files(self, final: Path, contents: ShardContents, manifest: Manifest) -> None:
        """Write a checkpoint; rank 0 publishes it when all is on the disk. Collective: with one folder."""
        making, rank, is_delta = self._making(final), self.context.rank, manifest.link is not None
        # Objects of an earlier attempt may lie there: none is written again under its name.
        name = shard_file_name(rank, f"-{self.attempt}" if self.is_uploaded else "")
        # Not for a delta: its tensors are whole.
        offsets = {name: {"saved_offsets": offset} for name, offset in contents.offsets.items()}
        metadata = None if is_delta else {OFFSETS_KEY: json.dumps(offsets, allow_nan=False)}

        def write() -> list[FileEntry]:
            # All ranks write at the same time, and the first one makes the folder.
            making.mkdir(parents=True, exist_ok=True)
            # The raw values of large tables take long to write, so they are written in a thread.
            with ThreadPoolExecutor(1) as pool:
                beside = pool.submit(self._write_beside, making, is_delta, contents) if rank == 0 else None
                # A rank may have no rows, and then writes no file of a full checkpoint.
                paths = [making / name] if contents.arrays else []
                entries = [write_shard_file(path, contents.arrays, metadata) for path in paths]
                entries += beside.result() if beside else ()
            if isinstance(final, ObjectPath):
                for entry in entries:
                    # Before each file: what is published stays as it is, and only one training writes.
                    check_owner(final.parent)
                    if (final / MANIFEST).is_file():
                        raise UserError(WRITTEN)
                    (final / entry.name).upload(making / entry.name)
            return entries

        # Also a barrier: rank 0 describes and publishes the files only when each rank's file is on the disk.
        written = all_gather_object(lambda: (_in_words(write), contents.counts), self.group)

        def finish() -> None:
            files = sorted((entry for entries, _ in written for entry in entries), key=lambda each: each.name)
            rows = {name: sum(counts[name] for _, counts in written) for name in contents.counts}
            about = {**manifest.about, "rows": rows} if is_delta else manifest.about
            write_manifest(making, dataclasses.replace(manifest, files=tuple(files), about=about))
            publish(making, final, self.config.checkpoint.keep)

        # All ranks learn whether it was published: otherwise the next delta could build on different
        # checkpoints.
        raise_on_all(lambda: _in_words(finish) if rank == 0 else None, self.group)
        if self.is_uploaded:
            shutil.rmtree(making, ignore_errors=True)

    def _write_beside(self, making: Path, is_delta: bool, contents: ShardContents) -> list[FileEntry]:
        """Write the files of a checkpoint without tensors, and wait until they are on the disk."""
        config = making / CONFIG
        config.write_text(json.dumps(self.config.recorded, indent=1, allow_nan=False))
        copied = [] if is_delta else [making / VOCABULARY, making / SCHEMA_FILE]
        for path in copied:
            shutil.copyfile(Path(self.columns.folder) / path.name, path)
        entries = [*map(flushed, [config, *copied])]
        if contents.stream is not None:
            entries.append(write_shard_file(making / STREAM_FILE, contents.stream))
        return entries

    def _making(self, final: Path) -> Path:
        name = making_name(final, self.attempt)
        if self.is_uploaded:
            return Path(self._staging.name, name)
        return final.with_name(name)

    def _writing_deadline(self) -> timedelta:
        """Return the time that a rank waits for shard files of the others; one rank may write all bytes."""
        # A weight has 4 bytes.
        num_bytes = 4 * sum(math.prod(shape) for shape, _ in self.shapes.values())
        return timedelta(seconds=self.config.runtime.timeout + num_bytes / SLOWEST_DISK)

    def _describe(self, progress: Progress, link: ParentLink | None) -> Manifest:
        """Return the manifest without its files. Collective if there are tables by id."""
        # Flags from which a server makes the model, with the length of a history.
        model = {**dataclasses.asdict(self.config.model), "history": self.config.data.history}
        return Manifest(
            run=self.run,
            progress=progress,
            tensors=self.shapes,
            # Added when the files are written.
            files=(),
            vocabulary=self.vocabulary_digest,
            optimizer=self.optimizer,
            about={
                "plan": self.plan.splitlines(),
                "versions": self.versions,
                "model": model,
                ORIGIN: self.origin,
            },
            link=link,
            features=features_of(self.columns),
            ratings=self.columns.digest,
            # A resume needs it to compute the previous global batch, on which the tables' learning rate
            # depends.
            world_size=self.context.world_size,
            dynamic=self._records(),
        )

    def _records(self) -> dict[str, DynamicRecord]:
        records = {
            name: record for name, table in self.tables.items() if (record := table.record()) is not None
        }
        counts = counts_of(self.tables, self.group)
        return {
            name: DynamicRecord(
                **record,
                has_texts=name in self.texts,
                live=counts[name].live,
                counts={counter: getattr(counts[name], counter) for counter in SINCE_BEGINNING},
            )
            for name, record in records.items()
        }

    def _note_success(self, final: Path) -> None:
        self.failure = ""
        self.context.say(f"dumped {final}")

    def _note_failure(self, final: Path, reason: str) -> None:
        # The next checkpoint may need the space.
        if self.context.rank == 0 or self.is_uploaded:
            shutil.rmtree(self._making(final), ignore_errors=True)
        first = "restore the access" if self.is_uploaded else "make room"
        self.failure = (
            f"Cannot write {final}: {reason}. Fix: {first}, or give a --save_dir that can be written, and "
            "--resume; the checkpoints before it are whole."
        )
        self.context.say(self.failure)


def _rows(value: torch.Tensor, copy: bool) -> np.ndarray:
    """Return values of rows as files have them: numbers of 16 bits as float32, which every reader takes."""
    if value.dtype == torch.float16:
        # On the host, where there is more room; a copy already.
        return _array(value.cpu().float(), copy=False)
    return _array(value, copy)


def _array(value: torch.Tensor, copy: bool) -> np.ndarray:
    return value.detach().to("cpu", copy=copy).contiguous().numpy()


def _in_words(action: Callable[[], Any]) -> Any:
    # A collective passes on only a UserError. A full disk as an OSError would end this rank; as a UserError
    # it reaches all ranks, and the training continues.
    try:
        return action()
    except OSError as error:
        raise UserError(reason_of(error)) from error
