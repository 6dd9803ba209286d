"""A checkpoint on other data than those of its training, such as newer ones: to evaluate it there, or to
begin a new training with its rows and its dense part (warm start).

Rows are found by their raw values, because other data give them other numbers. A new value gets the row of
unknown values if that was trained, and otherwise stays as drawn; values that are gone are dropped. Features
that only one side has are named: here they stay as drawn, there they are omitted. The state of the optimizers
comes along; the steps and their learning rates begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from recsuite.checkpoint.chain import (
    check_whole,
    chosen_chain,
    describe_choice,
    requested_kind,
    with_suggestion,
)
from recsuite.checkpoint.folder import BEST
from recsuite.checkpoint.format import VOCABULARY, Manifest, recorded_in
from recsuite.checkpoint.origin import check_origin
from recsuite.checkpoint.shards import RowReader, check_shard_files, reading
from recsuite.checkpoint.writer import dense_of, features_of
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import SCHEMA_FILE, UNKNOWN_ROW, schema_of
from recsuite.errors import UserError, printable
from recsuite.models.tasks import WorkerTask
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, raise_on_all
from recsuite.sharding.table import EmbeddingTable
from recsuite.training.state import ShardedModel


class RenumberedRows(RowReader):
    """Reader of rows by the numbers that other data give to their raw values.

    rows: table to the row in the checkpoint of each row, int64 [rows]; scale: a row is what its table has
    times this; None to give new values the row of unknown ones in any case.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        manifests: Sequence[Manifest],
        rows: Mapping[str, np.ndarray],
        scale: torch.Tensor | None,
    ) -> None:
        super().__init__(folders, manifests)
        self._rows, self._scale = rows, scale

    @override
    def fill_rows(self, table: str, slots: Mapping[str, torch.Tensor], first: int = 0) -> None:
        for slot, target in slots.items():
            shape, _ = self.manifests[-1].tensors[f"tables.{table}.{slot}"]
            # One slot after the other, because each is read as a whole.
            whole = torch.empty(shape, dtype=target.dtype)
            super().fill_rows(table, {slot: whole})
            rows = torch.from_numpy(self._rows[table][first : first + len(target)])
            values = whole[rows]
            if self._scale is not None and slot == "weight" and not whole[UNKNOWN_ROW].any():
                is_new = rows == UNKNOWN_ROW
                # The unknown row itself was drawn as zero.
                values[is_new] = target.cpu()[is_new] / self._scale.cpu()
            target.copy_(values)


def start_from(
    folder: Path,
    train_state: ShardedModel,
    columns: Columns,
    task: WorkerTask,
    context: RuntimeContext,
    checkpoint: str = BEST,
    until: int = -1,
    draws: bool = True,
) -> Manifest:
    """Give a model the rows and the dense part of a checkpoint, and print a line about it. Collective: every
    rank.

    folder, checkpoint, until: see `chosen_chain`; draws: True to keep the drawn rows of new values, see
    above; False to predict them as a server does, as unknown.

    Raises:
        UserError: on every rank, when there is none, or it is damaged or of another model; the model is as
            it was.
    """
    chain = broadcast_from_rank0(
        lambda: with_suggestion(folder, lambda: chosen_chain(folder, checkpoint, until))
    )
    manifests: list[Manifest] = raise_on_all(lambda: check_whole(chain, context.rank, context.world_size))
    manifest = manifests[-1]
    dense = {name: value.detach() for name, value in recorded_in(manifest, dense_of(train_state)).items()}
    tables = {name: table for name, table in train_state.tables.items() if name in manifest.features}
    accepts = train_state.accepts_changed_model
    line = raise_on_all(lambda: check_origin(chain.folder, manifest, train_state.head, accepts))
    raise_on_all(lambda: _check(chain.folder, manifest, train_state, columns, dense, tables))
    raise_on_all(lambda: _check_types(chain.base, columns))
    raise_on_all(lambda: [*map(check_shard_files, chain.folders, manifests)])
    theirs = json.loads((chain.base / VOCABULARY).read_bytes())
    ours = json.loads(Path(columns.folder, VOCABULARY).read_bytes())
    # A history has the rows of items.
    known = {name: columns.schema.vocabulary_of(name) for name in tables}
    rows = {name: _rows_of(theirs[of], ours[of]) for name, of in known.items()}
    scale = train_state.row_scale if draws else None
    reader = RenumberedRows(chain.folders, manifests, rows, scale)
    with reading(chain.folder):
        reader.fill(dense)
        for name, table in train_state.tables.items():
            if name in tables:
                table.load(reader, float(train_state.row_scale))
            elif not draws:
                # The model knew nothing of this feature.
                table.multiply(0)
    new = {name: int((of_table[1:] == UNKNOWN_ROW).sum()) for name, of_table in rows.items()}
    shown = ", ".join(f"{number:,} of {name}" for name, number in new.items() if number)
    chosen = describe_choice(manifest.progress, requested_kind(folder, checkpoint, until), task.main_label)
    lines = [
        f"{'began with' if draws else 'loaded'} {chain.folder}, {chosen}",
        f"new values: {shown or 'none'}",
    ]
    for where, names in (
        ("there, omitted", manifest.features.keys() - train_state.tables.keys()),
        (
            f"here, {'as drawn' if draws else 'without effect'}",
            train_state.tables.keys() - manifest.features.keys(),
        ),
    ):
        lines += [f"features only {where}: {printable(', '.join(sorted(names)))}"] if names else []
    # The scale is that of the training events.
    numbers = [feature.name for feature in columns.numbers]
    rescaled = [name for name in numbers if name in theirs and theirs[name] != ours[name]]
    lines += [f"numbers on another scale than there: {', '.join(rescaled)}"] if rescaled else []
    context.say("; ".join([*lines, line] if line else lines))
    return manifest


def _check(
    folder: Path,
    manifest: Manifest,
    train_state: ShardedModel,
    columns: Columns,
    dense: Mapping[str, torch.Tensor],
    tables: Mapping[str, EmbeddingTable],
) -> None:
    """Refuse a checkpoint of another model or optimizer, or with another feature of the same name."""
    fix = "give the flags, schema and script of its training, or begin without it"
    if manifest.dynamic or any(table.record() for table in tables.values()):
        raise UserError(
            f"{folder} or this program has dynamic tables, which continue with --resume --stream alone; give "
            "--vocabulary fixed in both trainings."
        )
    if manifest.optimizer != train_state.optimizer_name:
        raise UserError(
            f"{folder} was trained with {manifest.optimizer}, and this program has "
            f"{train_state.optimizer_name}; {fix}."
        )
    theirs, ours = manifest.features, features_of(columns)
    for name in theirs.keys() & ours.keys():
        if theirs[name] != ours[name]:
            raise UserError(f"{folder} has the feature {name} as {printable(theirs[name])}; {fix}.")
    shapes = {name: list(value.shape) for name, value in dense.items()}
    for name, table in tables.items():
        # The number of rows may differ, the width must not.
        shapes |= {f"tables.{name}.{slot}": [-1, *value.size()[1:]] for slot, value in table.tensors.items()}
    for name, shape in shapes.items():
        recorded = manifest.tensors.get(name, ([], ""))[0]
        if [-1, *recorded[1:]] != [-1, *shape[1:]] or (name in dense and recorded != shape):
            raise UserError(
                f"{folder} has {recorded or 'nothing'} for {name}, and this model has {shape}; {fix}."
            )


def _check_types(base: Path, columns: Columns) -> None:
    """Refuse a checkpoint of other types of events: a weight is that of the position of a type."""
    path = base / SCHEMA_FILE
    theirs = schema_of(json.loads(path.read_bytes())).event_types if path.exists() else ()
    if theirs != columns.schema.event_types:
        here, there = (", ".join(types) or "none" for types in (columns.schema.event_types, theirs))
        raise UserError(
            f"{base} was trained with the event types {printable(there)}, and the data have "
            f"{printable(here)}; correct [events] of schema.toml, or give retrain another --save_dir."
        )


def _rows_of(theirs: Any, ours: Any) -> np.ndarray:
    """Return the rows of the same raw values. theirs, ours: of one feature, as in vocabulary.json."""
    if isinstance(ours, list):
        row_of = {value: row for row, value in enumerate(theirs, start=1)}
        return np.array([UNKNOWN_ROW, *(row_of.get(value, UNKNOWN_ROW) for value in ours)], np.int64)
    # Of a number: the range that holds the lowest value of each range; the first one has none.
    rows = np.searchsorted(theirs["edges"], ours["edges"], side="right") + 1
    return np.array([UNKNOWN_ROW, 1, *rows], np.int64)
