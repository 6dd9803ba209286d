"""Files of a served model: checks before use, the dense part, and changed rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from recsuite.checkpoint.chain import ChoiceError, check_name
from recsuite.checkpoint.format import Manifest, check_files, read_manifest
from recsuite.checkpoint.shards import RowReader, Slots, check_shard_files, reading, shape_of, widths_in
from recsuite.config.sections import ModelConfig
from recsuite.datasets.schema import HISTORY, Feature, Schema
from recsuite.errors import UserError, printable
from recsuite.files import LARGEST, typed
from recsuite.models.rows import with_row_scale
from recsuite.models.tasks import TASKS, ModelData, ModelMaker, widths_of
from recsuite.serving.dynamic import Contents, check_records, read_changes
from recsuite.serving.snapshot import Snapshot

DENSE = "dense."
OWN = (
    "for a model of your own, use the script that trained it, or give the function that made it: "
    "ServedModel.open(folder, model=...)."
)


@contextlib.contextmanager
def checked(folder: Path) -> Iterator[Manifest]:
    """Check every byte and header of a folder, and at the end that the folder was not replaced meanwhile."""
    with reading(folder):
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        check_shard_files(folder, manifest)
        yield manifest
        if read_manifest(folder) != manifest:
            raise UserError(f"{folder} was replaced while it was read.")


def model_of(folder: Path, manifest: Manifest) -> tuple[ModelConfig, int]:
    """Return the flags of a model and the length of a history.

    Raises:
        UserError: when the manifest does not say them.
    """
    try:
        recorded = typed(dict[str, Any], manifest.about.get("model"), "model")
        history = typed(int, recorded.pop("history", 0), "history")
        kinds = get_type_hints(ModelConfig)
        # A flag may be negative here; `validate` refuses it with a message of its own.
        config = ModelConfig(
            **{name: typed(kinds[name], value, name, -LARGEST) for name, value in recorded.items()}
        )
        config.validate()
        return config, history
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(
            f"{folder} does not say which model it has ({printable(str(error))}); write it again with the "
            "program that trained it."
        ) from None


def with_tables(features: Sequence[Feature], reads_order: bool) -> list[Feature]:
    """Return the features that have a table of their own."""
    return [each for each in features if each.has_table and not (reads_order and each.name == HISTORY)]


def empty_head(
    folder: Path,
    schema: Schema,
    features: Sequence[Feature],
    manifest: Manifest,
    maker: ModelMaker | None = None,
) -> nn.Module:
    """Return the model that the flags of a folder describe, on the device "meta".

    maker: makes the model; None for the maker of the task.
    """
    config, history = model_of(folder, manifest)
    data = ModelData(schema, features, 0.0, history)
    # A tensor on "meta" has a shape and no numbers, so the widths in the manifest are compared with the model
    # before any memory is allocated.
    with torch.device("meta"):
        empty = with_row_scale((maker or TASKS[config.task].make_model)(data, config))
    tables = [feature.name for feature in with_tables(features, config.reads_order)]
    recorded = widths_in(manifest)
    for name, width in widths_of(empty, tables, config.embedding_dim).items():
        if recorded.get(name) != width:
            raise ChoiceError(
                f"{folder} has {recorded.get(name, 'no')} numbers in a row of {name}, and its model {width}; "
                f"{OWN}"
            )
    wanted = {f"{DENSE}{name}": list(value.shape) or [1] for name, value in empty.state_dict().items()}
    found = {name: shape_of(folder, manifest, name) for name in manifest.tensors if _is_weight(name, wanted)}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ChoiceError(
                f"{folder} has {found.get(name, 'nothing')} for {name}, and its model "
                f"{wanted.get(name, 'nothing')}; {OWN}"
            )
    return empty.eval().requires_grad_(False)


def _is_weight(name: str, wanted: Mapping[str, object]) -> bool:
    """True for a tensor of the dense part, but not for the state of its optimizer."""
    return name.startswith(DENSE) and (name in wanted or name.rpartition(".")[0] not in wanted)


def dense_names(head: nn.Module) -> list[str]:
    """Return the names of the dense part's tensors in a checkpoint."""
    return [f"{DENSE}{name}" for name in head.state_dict()]


def filled(empty: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the head with the dense part of a checkpoint."""
    # A checkpoint has no tensor of 0 dimensions. Copied: a tensor that was read may be mapped from the file.
    values = {
        name: tensors[f"{DENSE}{name}"].reshape(value.shape).to(value.dtype, copy=True)
        for name, value in empty.state_dict().items()
    }
    # assign=True: a tensor on "meta" has no memory to copy into.
    empty.load_state_dict(values, assign=True)
    return empty.requires_grad_(False)


@dataclass(frozen=True)
class Change:
    """Changes that a delta makes to a model.

    tables: name to rows, int64 [n], and their new weights, float32 [n, D]. dynamic: the directory of each
    dynamic table, and the memory that its rows are in.
    """

    manifest: Manifest
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    head: nn.Module
    dynamic: dict[str, Contents]


def read_change(delta: Path, snapshot: Snapshot) -> Change | None:
    """Return the changes that a delta makes to a model; None if the model already has the delta.

    Raises:
        UserError: when it does not come next, is damaged, or does not fit; names both sides.
    """
    # The manifest alone is enough to tell, so a delta that the model already has is not read again.
    if _is_there(delta, read_manifest(delta), snapshot):
        return None
    with checked(delta) as manifest:
        check_records(delta, manifest.dynamic, snapshot.dynamic)
        # A new dense part instead of the old one changed: other threads may be scoring with the old one.
        empty = empty_head(delta, snapshot.schema, snapshot.features, manifest, snapshot.maker)
        static = {name: table for name, table in snapshot.tables.items() if name not in snapshot.dynamic}
        for name, table in static.items():
            shape = shape_of(delta, manifest, f"tables.{name}.weight")
            if shape != list(table.shape):
                raise UserError(f"{delta} has {shape} for {name}, and the model {list(table.shape)}.")
        # The whole delta is read before anything changes: a model must not hold half of a delta.
        reader = RowReader([delta], [manifest])
        dense = {name: torch.empty(shape_of(delta, manifest, name)) for name in dense_names(empty)}
        reader.fill(dense)
        rows = {name: _joined(list(reader.changed_rows(0, name))) for name in static}
        contents = {name: Contents(snapshot.tables[name], each) for name, each in snapshot.dynamic.items()}
        changed = read_changes(delta, manifest, contents, snapshot.schema.item)
        rows |= {name: (each.rows, each.weights) for name, each in changed.items()}
        dynamic = {name: each.contents for name, each in changed.items()}
        return Change(manifest, rows, filled(empty, dense), dynamic)


def _is_there(delta: Path, manifest: Manifest, snapshot: Snapshot) -> bool:
    """Return True if a model already has a delta; refuse a delta that does not come next."""
    check_name(delta, manifest)
    link, follows = manifest.link, snapshot.follows
    if link is None:
        raise UserError(f"{delta} is a full checkpoint, not a delta; open it instead.")
    if manifest.run != snapshot.manifest.run:
        raise UserError(f"{delta} is of run {manifest.run}, and the model of run {snapshot.manifest.run}.")
    # Rows are changed by their numbers, and another vocabulary gives the same numbers to other values.
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


def _joined(changes: Sequence[tuple[torch.Tensor, Slots]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a table that all ranks changed, and their weights."""
    # No row is there twice: the check of the headers refuses a delta with one row in two files.
    return torch.cat([rows for rows, _ in changes]), torch.cat([slots["weight"] for _, slots in changes])


def put(snapshot: Snapshot, delta: Path, change: Change) -> Snapshot:
    """Return the model after a delta; the tables of the model before are changed in place."""
    # In place: a copy of the tables for every delta would take twice their memory. `read_change` has checked
    # that the rows are within their tables.
    for name, contents in change.dynamic.items():
        # The same matrix, or a larger one with the same rows in it.
        snapshot.tables[name] = contents.matrix
    for name, (rows, weights) in change.tables.items():
        snapshot.tables[name][rows] = weights
    assert change.manifest.link is not None
    return dataclasses.replace(
        snapshot,
        folder=delta,
        head=change.head,
        manifest=change.manifest,
        follows=change.manifest.link.after(change.manifest.progress.step),
        dynamic={name: contents.directory for name, contents in change.dynamic.items()},
    )
