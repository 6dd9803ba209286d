"""Deltas: the rows that changed since the last checkpoint, and the dense part, which always changes.

    delta-000000900/
        part-00001.safetensors   the first rank's rows of every table, may be none: "tables.user.rows" int64
        part-00002.safetensors   [n], ascending, "tables.user.ids" [n], their raw values, "tables.user.weight"
                                 [n, D], "tables.user.momentum1" [n]; the first file also holds the dense
                                 part, as a full checkpoint has it
        config.json              the configuration of the training
        manifest.json            as of a full checkpoint, and the link to the parent

As in a full checkpoint, a row is its "weight" times the number "dense.row_scale". Each delta has a new scale,
by which all rows decay, also rows that are not in the delta.

For dynamic tables a delta has the rows that changed and the ids that left, see `storage/dynamic.py`.

Raw values that are numbers are int64 or float64; row 0, which has no raw value, gets the smallest number or
nan. Texts are uint8 [n, longest], in UTF-8 and padded with zeros.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.checkpoint.dynamic import DynamicTables
from recsuite.checkpoint.full import Tensors, write_config
from recsuite.checkpoint.storage.dynamic import PREFIX, name_of
from recsuite.checkpoint.storage.manifest import Manifest, write_manifest
from recsuite.checkpoint.storage.shards import shard_file_name, shard_files_of, tables_of, write_shard_file
from recsuite.config.config import Config
from recsuite.datasets.schema import Schema
from recsuite.errors import UserError
from recsuite.files import FileEntry, reason_of
from recsuite.runtime.process import all_gather_object, raise_on_all

UNKNOWN_NUMBER = np.iinfo(np.int64).min


class TouchedRows(ModelDeltaTrackerTrec):
    """TorchRec's tracker of the rows that a step looked up, which are the rows that it changed.

    It differs in its store: a mark per row of this rank's shards, instead of all ids of all steps, which grow
    without a bound and must be sorted in the end. Evaluation changes no row and is not tracked.
    """

    def __init__(self, model: DistributedModelParallel, tensors: Tensors) -> None:
        super().__init__(model)
        self.marks = {
            table: torch.zeros(shard.tensor.size(0), dtype=torch.bool, device=shard.tensor.device)
            for table, shards in shards_of(tensors).items()
            for shard in shards["weight"]
        }

    def record_lookup(
        self,
        kjt: KeyedJaggedTensor,
        states: torch.Tensor,
        emb_module: nn.Module | None = None,
        raw_ids: torch.Tensor | None = None,
    ) -> None:
        """Mark the rows of a lookup; TorchRec calls this with ids that are rows of this rank's shards."""
        assert emb_module is not None
        if emb_module.training:
            # A table has one feature, of the same name. Ids may repeat: marking a row twice changes nothing,
            # so they need not be made unique first.
            for table, jagged in kjt.to_dict().items():
                # Dynamic tables track their own changes.
                if table in self.marks:
                    self.marks[table].index_fill_(0, jagged.values(), True)

    # This and `clear` have the names that TorchRec's trackers give them.
    def get_unique_ids(self, consumer: str | None = None) -> dict[str, torch.Tensor]:
        """Return table to local rows, int64, ascending, of all steps since `clear`."""
        return {table: marks.nonzero().flatten() for table, marks in self.marks.items()}

    def clear(self, consumer: str | None = None) -> None:
        """Clear all marks."""
        for marks in self.marks.values():
            marks.zero_()


def shards_of(tensors: Tensors) -> dict[str, dict[str, list[Shard]]]:
    """Return table to slot ("weight", "momentum1") to the shards that this rank holds, one or none."""
    found: dict[str, dict[str, list[Shard]]] = {}
    for name, value in tensors.items():
        if isinstance(value, ShardedTensor):
            _, table, slot = name.split(".")
            found.setdefault(table, {})[slot] = value.local_shards()
    return found


class Vocabulary:
    """Raw values of table rows, in the form in which a shard file has them."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._schema = schema
        found = json.loads(path.read_bytes())
        self._ids = {name: _with_unknown(np.array(_values_of(ids))) for name, ids in found.items()}

    def raw_ids(self, table: str, rows: np.ndarray) -> np.ndarray:
        """Return the raw values of some rows of a table."""
        return self._ids[self._schema.vocabulary_of(table)][rows]


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


def write_delta(
    folder: Path,
    touched: dict[str, torch.Tensor],
    tensors: Tensors,
    dynamic: DynamicTables,
    manifest: Manifest,
    vocabulary: Vocabulary,
    config: Config,
    publish: Callable[[], None],
    group: Any,
) -> None:
    """Write a delta into an unfinished folder; rank 0 calls `publish` when all is on the disk.

    Collective: every rank of the group, and the folder must be the same one for all.

    Raises:
        UserError: on every rank, with the reason alone, when a file cannot be written.
    """
    rank = dist.get_rank(group)
    arrays = _changed(touched, tensors, vocabulary, manifest)
    counts = {table: len(arrays[f"tables.{table}.rows"]) for table in shards_of(tensors)}
    changed = dynamic.arrays(is_delta=True)
    counts |= {table: len(changed[name_of(table, "ids")]) for table in dynamic.tables}
    arrays |= changed
    # The dense part is the same on every rank, so rank 0 writes it.
    if rank == 0:
        dense = {name: value for name, value in tensors.items() if not isinstance(value, ShardedTensor)}
        arrays |= {name: value.detach().cpu().numpy() for name, value in dense.items()}

    def write() -> tuple[FileEntry, dict[str, int]]:
        # All ranks write at the same time, and the first one makes the folder.
        folder.mkdir(exist_ok=True)
        return write_shard_file(folder / shard_file_name(rank), arrays), counts

    # Also a barrier: rank 0 describes and publishes the files only when each rank's file is on the disk.
    written = all_gather_object(lambda: _in_words(write), group)

    def finish() -> None:
        rows = {table: sum(counts[table] for _, counts in written) for table in counts}
        files = (write_config(folder, config), *(entry for entry, _ in written))
        about = {**manifest.about, "rows": rows}
        write_manifest(folder, dataclasses.replace(manifest, files=files, about=about))
        publish()

    # All ranks learn whether it was published: otherwise the next delta could build on different checkpoints.
    raise_on_all(lambda: _in_words(finish) if rank == 0 else None, group)


def _in_words(action: Callable[[], Any]) -> Any:
    # A collective passes on only a UserError. A full disk as an OSError would end this rank; as a UserError
    # it reaches all ranks, and the training continues.
    try:
        return action()
    except OSError as error:
        raise UserError(reason_of(error)) from error


def _changed(
    touched: dict[str, torch.Tensor], tensors: Tensors, vocabulary: Vocabulary, manifest: Manifest
) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for table, slots in shards_of(tensors).items():
        # A rank that holds no shard of a table has no marks for it.
        local = touched.get(table, torch.zeros(0, dtype=torch.int64))
        first = slots["weight"][0].metadata.shard_offsets[0] if slots["weight"] else 0
        rows = local.cpu().numpy() + first
        arrays[f"tables.{table}.rows"] = rows
        arrays[f"tables.{table}.ids"] = vocabulary.raw_ids(table, rows)
        # A rank without a shard of a table writes 0 rows of it: readers need each table in each file.
        for slot, (shape, _) in tables_of(manifest)[table].items():
            values = np.zeros((0, *shape[1:]), np.float32)
            for shard in slots.get(slot, ()):
                values = shard.tensor.detach()[local].cpu().numpy()
            arrays[f"tables.{table}.{slot}"] = values
    return arrays


def apply_delta(folder: Path, manifest: Manifest, tensors: Tensors) -> None:
    """Write a delta that was checked into this rank's shards and dense part. Not collective."""
    shards = shards_of(tensors)
    for file in shard_files_of(folder, manifest):
        for table, slots in shards.items():
            rows = file.get_tensor(f"tables.{table}.rows")
            for slot, held in slots.items():
                for shard in held:
                    _put(shard, rows, file.get_tensor(f"tables.{table}.{slot}"))
        for name in file.keys():  # noqa: SIM118
            if not name.startswith(("tables.", PREFIX)):
                # In place: the model and its optimizer hold these tensors.
                tensors[name].detach().copy_(file.get_tensor(name))


def _put(shard: Shard, rows: torch.Tensor, values: torch.Tensor) -> None:
    # Row numbers are of the whole table: the ranks that read may hold other shards than those that wrote.
    first = shard.metadata.shard_offsets[0]
    target = shard.tensor.detach()
    here = (rows >= first) & (rows < first + target.size(0))
    target[(rows[here] - first).to(target.device)] = values[here].to(target.device)
