"""Full checkpoints of a training: complete or absent, for any number of ranks, without pickle.

    step-000000784/
        part-00001.safetensors   shards of the first rank: rows of the tables ("tables.user.weight"), their
        part-00002.safetensors   optimizer's state ("tables.user.momentum1"); each tensor of the dense part
                                 ("dense.mlp.0.weight") and its optimizer ("dense.mlp.0.weight.exp_avg") once
        config.json              the configuration of the training
        vocabulary.json          for every feature the raw values of table rows 1, 2, ..., or how a number is
                                 encoded
        schema.json              the schema of the data set: users, items and events
        manifest.json            progress, run, tensors, files with sizes and digests, plan, versions

Dynamic tables are in the shard files by their ids, see `storage/dynamic.py`.

A row is its weights in the table times "dense.row_scale", the scale by which all rows decay.

The shard files are those of `torch.distributed.checkpoint`: all ranks write their own shards at the same
time, and any number of ranks can read the slices that they need. Between two steps no random generator is in
use, so none is written.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from recsuite.checkpoint.dynamic import DynamicTable, DynamicTables
from recsuite.checkpoint.storage.manifest import CONFIG, VOCABULARY, Manifest, write_manifest
from recsuite.checkpoint.storage.shards import OFFSETS_KEY, shard_file_name, widths_in, write_shard_file
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import SCHEMA_FILE, Feature
from recsuite.errors import UserError, printable
from recsuite.files import FileEntry, digest_of, digest_of_bytes, flushed
from recsuite.runtime.process import all_gather_object
from recsuite.sharding.dynamic_ranks import dynamic_rows
from recsuite.training.state import ShardedModel

# Tensors that are written, by their names in the shard files.
Tensors = dict[str, "torch.Tensor | ShardedTensor"]


def tensors_of(train_state: ShardedModel) -> Tensors:
    """Return all tensors of a checkpoint except dynamic tables, not copied. Not collective."""
    dynamic = dynamic_rows(train_state.model)
    return {name: value for name, value in _named(train_state).items() if _table_of(name) not in dynamic}


def _table_of(name: str) -> str:
    """Return the table that a tensor belongs to; "" if it belongs to none."""
    whole, *rest = name.split(".")
    return rest[0] if whole == "tables" else ""


def dynamic_of(train_state: ShardedModel) -> DynamicTables:
    """Return the dynamic tables of a checkpoint, not copied. Not collective."""
    shares = dynamic_rows(train_state.model)
    return DynamicTables({name: DynamicTable(rows) for name, rows in shares.items()})


def _named(train_state: ShardedModel) -> Tensors:
    found = {_name(key): value for key, value in train_state.model.state_dict().items()}
    for key, slots in train_state.optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            # TorchRec repeats the table's name in its optimizer state. Weights and optimizer state of a table
            # share the prefix "tables.NAME.".
            name = _name(key).removesuffix(".weight") if isinstance(value, ShardedTensor) else _name(key)
            found[f"{name}.{slot.rpartition('.')[2]}"] = value
    # The reader cannot slice a tensor of 0 dimensions.
    return {
        name: value if isinstance(value, ShardedTensor) or value.dim() else value.view(1)
        for name, value in found.items()
    }


def _name(key: str) -> str:
    # Without the wrappers of a training: a server makes only the head, and finds its tensors by these names.
    name = key.removeprefix("recommender.")
    if name.startswith("embeddings."):
        # The name follows the number of the collection, which has the tables of one width.
        return f"tables.{name.split('.', 3)[3]}"
    name = name.removeprefix("head.")
    # A loss with parameters of its own, which no server needs, keeps its name.
    return name if name == key and name.startswith("loss.") else f"dense.{name}"


def shapes_of(tensors: Tensors) -> dict[str, tuple[list[int], str]]:
    """Return name to the shape of the whole tensor and its dtype, for a manifest. Collective: every rank.

    A rank without rows of a table has no optimizer state of it, so the shapes of all ranks are gathered.
    """
    mine = {
        name: (list(value.size()), str(value.dtype).removeprefix("torch.")) for name, value in tensors.items()
    }
    return dict(sorted(item for shapes in all_gather_object(lambda: mine) for item in shapes.items()))


def write_config(folder: Path, config: Config) -> FileEntry:
    """Write the configuration into the folder of a checkpoint, and wait until it is on the disk."""
    path = folder / CONFIG
    path.write_text(json.dumps(dataclasses.asdict(config), indent=1, allow_nan=False))
    return flushed(path)


class FullWriter(HuggingFaceStorageWriter):
    """Writer of each rank's shard file without copies of tensors; torch's own writer copies them twice."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        dynamic: dict[str, np.ndarray],
        columns: Path,
        config: Config,
        publish: Callable[[], None],
    ) -> None:
        super().__init__(path=str(folder), save_distributed=True)
        self.folder = folder
        self.manifest = manifest
        # Arrays of this rank's dynamic tables, by their names in its shard file.
        self.dynamic = dynamic
        self.columns = columns
        self.config = config
        self.publish = publish
        self.beside: tuple[FileEntry, ...] = ()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shard file of this rank, and wait until it is on the disk."""
        done: Future[list[WriteResult]] = Future()
        # The raw values of large tables take long to write, so they are written in a thread.
        with ThreadPoolExecutor(1) as pool:
            # torch numbers the ranks of a plan from 1.
            first = plan.storage_data["shard_index"] == 1
            beside = pool.submit(self._write_beside) if first else None
            done.set_result(self._write_tensors(plan, planner))
            if beside:
                self.beside = beside.result()
        return done

    def _write_beside(self) -> tuple[FileEntry, ...]:
        beside = [self.folder / VOCABULARY, self.folder / SCHEMA_FILE]
        for path in beside:
            shutil.copyfile(self.columns / path.name, path)
        return (*map(flushed, beside), write_config(self.folder, self.config))

    def _write_tensors(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        arrays, offsets = {}, {}
        for item in plan.items:
            name = item.index.fqn
            assert item.tensor_data is not None
            # Names are unique in a file. The plan gives a rank one shard of a table, or none.
            assert name not in arrays, f"two shards of {name} on one rank"
            arrays[name] = _array(planner.resolve_data(item))
            offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        for name, value in self.dynamic.items():
            arrays[name] = value
            # Not a slice of a larger tensor.
            offsets[name] = {"saved_offsets": [0] * value.ndim}
        # A rank may have nothing to write: a table that is not split is on one rank, and one rank writes a
        # dense tensor for all. Such a rank writes no file.
        if arrays:
            path = self.folder / shard_file_name(plan.storage_data["shard_index"] - 1)
            entry = write_shard_file(path, arrays, {OFFSETS_KEY: json.dumps(offsets, allow_nan=False)})
        indices = [*(item.index for item in plan.items), *map(MetadataIndex, self.dynamic)]
        return [WriteResult(index, 0, entry) for index in indices]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and publish the checkpoint; rank 0 calls this when all files are on the disk."""
        # Each tensor's result has the entry of its file, so a file with many tensors is there many times.
        entries = {result.storage_data.name: result.storage_data for of_rank in results for result in of_rank}
        files = sorted([*entries.values(), *self.beside], key=lambda entry: entry.name)
        write_manifest(self.folder, dataclasses.replace(self.manifest, files=tuple(files)))
        self.publish()


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().contiguous().numpy()


def read_full(folder: Path, tensors: Tensors) -> None:
    """Fill this rank's shards and the dense part from a checkpoint that was checked. Not collective."""
    with warnings.catch_warnings():
        # Each rank finds its own slices: exchanging all plans takes longer than reading a small checkpoint.
        # torch warns that this may be a mistake; here it is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        try:
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:
            # Errors of files; any other error is a bug of the program.
            (reason, _), *_ = error.failures.values()
            raise reason if isinstance(reason, (OSError, SafetensorError)) else error from error


def features_of(columns: Columns) -> dict[str, Any]:
    """Return table to the feature of its rows, as a manifest records it."""
    return {table.name: _recorded(columns.schema.recorded(table.feature)) for table in columns.tables}


def digest_of_vocabulary(columns: Columns) -> str:
    """Return the digest of the vocabularies of static tables; the ids of dynamic tables change over time."""
    path = Path(columns.folder) / VOCABULARY
    dynamic = {table.name for table in columns.tables if table.feature.is_dynamic}
    if not dynamic:
        return digest_of(path)
    static = {name: held for name, held in json.loads(path.read_bytes()).items() if name not in dynamic}
    return digest_of_bytes(json.dumps(static, allow_nan=False).encode())


def _recorded(feature: Feature) -> dict[str, Any]:
    # Checkpoints of earlier versions do not record "number" and "ids": no feature was a number, and all had a
    # fixed vocabulary.
    left_out = {"number": "", "ids": Feature.ids}
    return {name: value for name, value in vars(feature).items() if left_out.get(name) != value}


# The fix for data other than those of the training, and the maximum number of features in a message.
SAME_DATA, MOST_NAMED = f"give the --data_path that its {CONFIG} names", 5


def check_fit(
    folder: Path,
    manifest: Manifest,
    shapes: Mapping[str, tuple[list[int], str]],
    columns: Columns,
    optimizer: str,
    widths: Mapping[str, int],
) -> None:
    """Refuse a checkpoint of another model, optimizer or data than these.

    shapes: see `shapes_of`; widths: numbers in a row of each table.

    Raises:
        UserError: names both sides.
    """
    # The state of another optimizer may have the same names and shapes.
    if manifest.optimizer != optimizer:
        raise UserError(
            f"{folder} was trained with {manifest.optimizer}, and this program has {optimizer}. Fix: give "
            "shard or restore the same tables= and dense=."
        )
    theirs, ours = manifest.features, features_of(columns)
    if others := [*(theirs.keys() ^ ours.keys())]:
        parts = [f"{printable(name)} only {'there' if name in theirs else 'here'}" for name in sorted(others)]
        shown = ", ".join(parts[:MOST_NAMED])
        raise UserError(
            f"{folder} was trained with other features than {columns.source} has: {shown}; "
            f"{SAME_DATA}, write the same [features] into schema.toml, or train anew."
        )
    # Equal shapes are not enough: a table may be of another column with the same number of values.
    for name, feature in ours.items():
        if theirs[name] != feature:
            raise UserError(
                f"{folder} has the feature {name} as {printable(theirs[name])}, and this program has it as "
                f"{feature}; {SAME_DATA}, or train anew."
            )
    # Rows have only numbers, and with other raw values row 7 belongs to another value.
    if manifest.vocabulary != digest_of_vocabulary(columns):
        raise UserError(
            f"{folder} was trained on other data than {columns.source}: {_describe_rows(manifest, shapes)}; "
            f"{SAME_DATA}, with the same --split and --seed; for new ids train anew on all files, or from "
            "the start with --vocabulary dynamic, and with --stream to go on with new files."
        )
    # Before the check of all tensors: this message is clearer than one about shapes of the dense part.
    recorded = widths_in(manifest)
    for name, width in widths.items():
        if recorded.get(name, width) != width:
            raise UserError(
                f"{folder} has {recorded[name]} numbers in a row of {name}, and this model has {width}; give "
                "the --embedding_dim of its training, and a model of your own the same embedding_dims."
            )
    for name in sorted({*manifest.tensors, *shapes}):
        if manifest.tensors.get(name) != shapes.get(name):
            raise UserError(
                f"{folder} has {_shown(manifest.tensors.get(name))} for {name}, and this model has "
                f"{_shown(shapes.get(name))}; give the flags and the data that its {CONFIG} names, "
                "or load it with the script whose model it is."
            )


def _describe_rows(manifest: Manifest, shapes: Mapping[str, tuple[list[int], str]]) -> str:
    """Describe the first table whose number of rows differs."""
    for table in manifest.features:
        name = f"tables.{table}.weight"
        # A dynamic table has no tensor.
        rows, here = (found[name][0][0] if name in found else 0 for found in (manifest.tensors, shapes))
        if rows != here:
            return f"its table {table} has {rows:,} rows, and here there are {here:,}"
    return "the ids are others"


def _shown(tensor: tuple[list[int], str] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[1]} {tensor[0]}"
