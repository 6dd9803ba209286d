"""What every folder of a model has, full or not: files that are checked before use, and a dense part."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from recsuite.checkpoint.storage.manifest import Manifest, check_files, read_manifest
from recsuite.checkpoint.storage.shards import check_shard_files, reading, shape_of
from recsuite.datasets.schema import Feature
from recsuite.errors import UserError, printable
from recsuite.models.heads import Head
from recsuite.models.tasks.task import all_tasks


@contextlib.contextmanager
def checked(folder: Path) -> Iterator[Manifest]:
    """A folder whose every byte and header was checked, and which in the end is still the one that it was."""
    with reading(folder):
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        check_shard_files(folder, manifest)
        yield manifest
        if read_manifest(folder) != manifest:
            raise UserError(f"{folder} was replaced while it was read.")


def empty_head(folder: Path, features: Sequence[Feature], manifest: Manifest) -> Head:
    """A head as wide as a model says, without memory yet; that of a model for ranking has a tower."""
    # Neither a manifest nor an export says which task it is; the names of the layers do.
    tasks = {task.dense_layers: task for task in all_tasks()}
    pattern = re.compile(rf"dense\.({'|'.join(tasks)})\.(\d{{1,9}})\.weight")
    layers = sorted(
        (match for match in map(pattern.fullmatch, manifest.tensors) if match),
        key=lambda match: int(match[2]),
    )
    tables = [f"tables.{feature.name}.weight" for feature in features]
    shapes = {name: shape_of(folder, manifest, name) for name in (*tables, *(match[0] for match in layers))}
    flat = [name for name, shape in shapes.items() if len(shape) != 2 or min(shape) < 1]
    embedding_dims = set() if flat else {shapes[name][1] for name in tables}
    if len(embedding_dims) != 1 or min(embedding_dims) < 2:
        raise UserError(f"{folder} has tables and layers of {printable(shapes)}, which do not make a model.")
    (embedding_dim,) = embedding_dims
    # The width of the last layer is none of --mlp_dims: the head decides it.
    widths = [shapes[match[0]][0] for match in layers][:-1]
    # On "meta" tensors have shapes and no numbers, so what the manifest says of widths is held against the
    # model before it can cost memory.
    with torch.device("meta"):
        # Without layers any head says in what its tensors differ.
        task = tasks[layers[0][1]] if layers else next(iter(tasks.values()))
        empty = task.make_head(features, embedding_dim, widths)
    for name, value in empty.state_dict().items():
        found, wanted = shape_of(folder, manifest, f"dense.{name}"), list(value.shape) or [1]
        if found != wanted:
            raise UserError(f"{folder} has {found} for dense.{name}, and its model needs {wanted}.")
    return empty.eval().requires_grad_(False)


def dense_names(head: Head) -> list[str]:
    """What a checkpoint calls the tensors of the dense part."""
    return [f"dense.{name}" for name in head.state_dict()]


def filled(empty: Head, tensors: Mapping[str, torch.Tensor]) -> Head:
    """The head with the dense part of a checkpoint."""
    # A checkpoint has no tensor without a dimension. Copied: what was read may still lie in the file.
    values = {
        name: tensors[f"dense.{name}"].reshape(value.shape).to(value.dtype, copy=True)
        for name, value in empty.state_dict().items()
    }
    # Assigned: a tensor on "meta" has no memory to copy into.
    empty.load_state_dict(values, assign=True)
    return empty.requires_grad_(False)
