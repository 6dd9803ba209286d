"""A delta put into a model in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recsuite.checkpoint.storage.chain import check_name
from recsuite.checkpoint.storage.manifest import Manifest, read_manifest
from recsuite.checkpoint.storage.shards import shape_of, shard_files_of
from recsuite.errors import UserError
from recsuite.models.heads import Head
from recsuite.serving.model_files import checked, dense_names, empty_head, filled
from recsuite.serving.snapshot import Snapshot


@dataclass(frozen=True)
class Change:
    """What a delta puts in place.

    tables: name to rows, int64 [n], and their new weights, float32 [n, D].
    """

    manifest: Manifest
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    head: Head


def read_change(delta: Path, snapshot: Snapshot) -> Change | None:
    """What a delta changes in a model; None if the model has it already.

    Raises:
        UserError: when it does not come next, is damaged, or does not fit; names both sides.
    """
    # First, by the manifest alone: what the model has already is not read again.
    if _is_there(delta, read_manifest(delta), snapshot):
        return None
    with checked(delta) as manifest:
        # A new dense part, not the old one changed: others may be scoring with that.
        empty = empty_head(delta, snapshot.features, manifest)
        for name, table in snapshot.tables.items():
            shape = shape_of(delta, manifest, f"tables.{name}.weight")
            if shape != list(table.shape):
                raise UserError(f"{delta} has {shape} for {name}, and the model {list(table.shape)}.")
        names = dense_names(empty)
        dense: dict[str, torch.Tensor] = {}
        tables: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in snapshot.tables}
        # All of it is read before anything changes: a model must not be left with half of a delta.
        for file in shard_files_of(delta, manifest):
            for name, found in tables.items():
                rows, weights = (file.get_tensor(f"tables.{name}.{slot}") for slot in ("rows", "weight"))
                found.append((rows, weights))
            held = set(file.keys())
            dense |= {name: file.get_tensor(name) for name in names if name in held}
        return Change(
            manifest, {name: _joined(found) for name, found in tables.items()}, filled(empty, dense)
        )


def _is_there(delta: Path, manifest: Manifest, snapshot: Snapshot) -> bool:
    """Whether a model has a delta already; refuses one that does not come next."""
    check_name(delta, manifest)
    link, follows = manifest.link, snapshot.follows
    if link is None:
        raise UserError(f"{delta} is a full checkpoint, not a delta; open it instead.")
    if manifest.run != snapshot.manifest.run:
        raise UserError(f"{delta} is of run {manifest.run}, and the model of run {snapshot.manifest.run}.")
    # Rows are changed by their numbers, which stand for other values in another vocabulary.
    if manifest.vocabulary != snapshot.manifest.vocabulary:
        raise UserError(f"{delta} was trained on other data than the model; open it instead.")
    if link.base_digest != follows.base_digest:
        raise UserError(
            f"{delta} builds on a {link.base} with digest {link.base_digest}, and the model on a "
            f"{follows.base} with {follows.base_digest}."
        )
    if link.sequence < follows.sequence:
        return True
    if (link.sequence, link.from_step) != (follows.sequence, follows.from_step):
        raise UserError(
            f"{delta} is number {link.sequence} and begins at step {link.from_step}, and what comes next is "
            f"number {follows.sequence} after step {follows.from_step}."
        )
    return False


def _joined(changes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that all ranks changed of a table, and their weights."""
    # No row comes twice: of two files with the same row the delta was refused when its headers were checked.
    rows, weights = (torch.cat(tensors) for tensors in zip(*changes, strict=True))
    return rows, weights


def put(snapshot: Snapshot, delta: Path, change: Change) -> Snapshot:
    """The model after a delta; its tables are those of the model before, changed in place."""
    # In place: a copy of the tables for every delta would take twice their memory. That the rows lie in their
    # tables was checked when the delta was read.
    for name, (rows, weights) in change.tables.items():
        snapshot.tables[name][rows] = weights
    assert change.manifest.link is not None
    return dataclasses.replace(
        snapshot,
        folder=delta,
        head=change.head,
        manifest=change.manifest,
        follows=change.manifest.link.after(change.manifest.progress.step),
    )
