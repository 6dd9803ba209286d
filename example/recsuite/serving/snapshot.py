"""A whole model in memory, read from dumps, increments or an export by one process.

Believes no file before it was held against its digest; needs no process group and no TorchRec. Shapes: B
ratings, D numbers in a table row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recsuite.checkpoint.storage.directory import CheckpointChain, check_chain, check_name
from recsuite.checkpoint.storage.manifest import (
    CONFIG,
    FEATURES_FILE,
    VOCABULARY,
    Manifest,
    ParentLink,
    as_link,
    check_files,
    link_after,
    read_config,
    read_manifest,
)
from recsuite.checkpoint.storage.shards import check_parts, parts_of, read_whole, reading, shape_of
from recsuite.datasets.metrics import LABELS, main_metric
from recsuite.datasets.schema import ENTITIES, HISTORY, UNKNOWN_ROW, Feature
from recsuite.datasets.source import SCHEMA
from recsuite.errors import UserError, printable
from recsuite.models.interaction import Interaction
from recsuite.models.two_tower import TwoTower

# What a model takes beside the features: the label of each item of a history.
HISTORY_RATINGS = "history_ratings"


@dataclass(frozen=True)
class Rows:
    """The rows of one feature for B ratings, see `interaction.LookedUp`."""

    found: torch.Tensor
    counts: torch.Tensor

    def values(self) -> torch.Tensor:
        """The rows, float32 [their number, D]."""
        return self.found

    def lengths(self) -> torch.Tensor:
        """How many of them are each rating's, int64 [B]."""
        return self.counts


@dataclass(frozen=True)
class Change:
    """What an increment puts in place.

    tables: name to rows, int64 [n], and their new weights, float32 [n, D].
    """

    manifest: Manifest
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    interaction: Interaction | TwoTower


@dataclass(frozen=True)
class Snapshot:
    """A whole model in memory.

    tables: name to all rows, float32 [rows, D]; vocabulary: feature to raw value to row; manifest: of the
    state; follows: what the next increment must say that it builds on; config: that of the training, nothing
    in an export; trained: the folder that says so; folder: where it was read.
    """

    folder: Path
    features: tuple[Feature, ...]
    tables: dict[str, torch.Tensor]
    interaction: Interaction | TwoTower
    vocabulary: dict[str, dict[Any, int]]
    manifest: Manifest
    follows: ParentLink
    trained: Path
    config: dict[str, Any]

    @property
    def metric(self) -> str:
        """By what the best of its training is chosen."""
        return LABELS[main_metric("ranking" if isinstance(self.interaction, TwoTower) else "rating")[0]]

    def look_up(self, values: Mapping[str, Sequence[Any]]) -> dict[str, Rows]:
        """The rows of raw values; those that are not given count as unknown, and a history as empty."""
        allowed = {feature.name for feature in self.features}
        if HISTORY in allowed:
            allowed.add(HISTORY_RATINGS)
        if not isinstance(values, Mapping) or not values or not values.keys() <= allowed:
            found = sorted(map(str, values.keys() - allowed)) if isinstance(values, Mapping) else []
            odd = printable(", ".join(found)) or "nothing"
            raise UserError(f"There is no feature {odd}; the model has {', '.join(sorted(allowed))}.")
        lengths = {name: _length_of(name, given) for name, given in values.items()}
        size = next(iter(lengths.values()))
        if set(lengths.values()) != {size}:
            raise UserError(f"The features have {lengths} values; give each as many.")
        return {
            feature.name: self._rows_of(feature, values.get(feature.name), size) for feature in self.features
        }

    def _rows_of(self, feature: Feature, given: Sequence[Any] | None, size: int) -> Rows:
        rows = self.vocabulary[SCHEMA.vocabulary_of(feature.name)]
        if given is None:
            given = [[] if feature.multi else None] * size
        _check_types(feature, given, rows)
        # As in training: an item without a value has the value "unknown".
        empty = [] if feature.name == HISTORY else [None]
        lists = [list(value) or empty if feature.multi else [value] for value in given]
        found = torch.tensor([rows.get(value, UNKNOWN_ROW) for values in lists for value in values])
        counts = torch.tensor([len(values) for values in lists], dtype=torch.int64)
        return Rows(self.tables[feature.name][found.to(torch.int64)], counts)


def _length_of(name: str, given: Any) -> int:
    """How many ratings are told of. Arrays may tell of them too."""
    try:
        if isinstance(given, (str, bytes, Mapping)):
            raise TypeError
        return len(given)
    except TypeError:
        shown = printable(repr(given))
        raise UserError(
            f"The feature {name} takes a list with an entry for each rating, and got {shown}."
        ) from None


def check_list(name: str, value: Any) -> None:
    """Refuse what is no list where each rating has one."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise UserError(f"The feature {name} takes a list for each rating, and got {printable(repr(value))}.")


def _check_types(feature: Feature, given: Sequence[Any], rows: Mapping[Any, int]) -> None:
    if not feature.multi:
        check_values(feature.name, given, rows)
        return
    for value in given:
        check_list(feature.name, value)
        check_values(feature.name, value, rows)


def check_values(name: str, values: Sequence[Any], rows: Mapping[Any, int]) -> None:
    """Refuse values of another type than the training's, which would never be known; None is unknown."""
    known = type(next(iter(rows), 0))
    strange = not_of(str if known is str else numbers.Real, [*values], type(None))
    if strange:
        raise UserError(
            f"The feature {name} takes values of type {known.__name__}, not {printable(repr(strange[0]))}."
        )


def not_of(kind: type[Any], values: Sequence[Any], or_else: type[Any] | None = None) -> list[Any]:
    """Those of the values that are of neither type."""
    # A history has a thousand values of one type, and to ask for a `numbers.Real` takes long.
    strange = {each for each in {*map(type, values)} if each is not or_else and not issubclass(each, kind)}
    return [value for value in values if type(value) in strange] if strange else []


def read_snapshot(state: CheckpointChain) -> Snapshot:
    """A state, with its increments replayed.

    Raises:
        UserError: when anything is missing, damaged or of another run.
    """
    check_chain(state)
    with _checked(state.base) as manifest:
        snapshot = _read_base(state.base, manifest)
    for delta in state.deltas:
        change = read_change(delta, snapshot)
        assert change is not None
        snapshot = put(snapshot, delta, change)
    return snapshot


def _read_base(folder: Path, manifest: Manifest) -> Snapshot:
    features = _read_features(folder, manifest)
    tables = {feature.name: f"tables.{feature.name}.weight" for feature in features}
    interaction = _empty_interaction(folder, features, manifest)
    vocabulary = _read_vocabulary(folder)
    _check_rows(folder, features, manifest, vocabulary)
    tensors = read_whole(folder, manifest, [*tables.values(), *_dense_names(interaction)])
    named = any(entry.name == CONFIG for entry in manifest.files)
    return Snapshot(
        folder=folder,
        features=features,
        tables={name: tensors[held] for name, held in tables.items()},
        interaction=_filled(interaction, tensors),
        vocabulary=vocabulary,
        manifest=manifest,
        follows=_follows(folder, manifest),
        trained=folder,
        config=read_config(folder) if named else {},
    )


def _follows(folder: Path, manifest: Manifest) -> ParentLink:
    """What the next increment must say that it builds on; an export was told."""
    follows = manifest.about.get("follows")
    if not follows:
        return link_after(folder)
    try:
        return as_link(follows)
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder} does not say which increment may follow ({printable(error)}).") from None


def _read_json(path: Path) -> dict[str, Any]:
    """What a file of names and values says."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({printable(error)}).") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold names with their values.")
    return found


def _read_vocabulary(folder: Path) -> dict[str, dict[Any, int]]:
    """Of every feature the row of each raw value, all of which have one type."""
    found = _read_json(folder / VOCABULARY)
    for name, values in found.items():
        kinds = {type(value) for value in values} if isinstance(values, list) else {None}
        if len(kinds) > 1 or not kinds <= {str, int, float}:
            raise UserError(f"{folder / VOCABULARY} has no list of raw values for {printable(name)}.")
    return {
        name: {value: row for row, value in enumerate(values, start=UNKNOWN_ROW + 1)}
        for name, values in found.items()
    }


def _check_rows(
    folder: Path, features: Sequence[Feature], manifest: Manifest, vocabulary: Mapping[str, Mapping[Any, int]]
) -> None:
    """Each table must have a row for every raw value, and one more."""
    for feature in features:
        rows = shape_of(folder, manifest, f"tables.{feature.name}.weight")[0]
        known = len(vocabulary.get(SCHEMA.vocabulary_of(feature.name), ())) + 1
        if rows != known:
            raise UserError(f"{folder} has {rows:,} rows for {feature.name}, and {known:,} values.")


def _read_features(folder: Path, manifest: Manifest) -> tuple[Feature, ...]:
    """The features of a model, in the order in which it adds them up."""
    if any(entry.name == FEATURES_FILE for entry in manifest.files):
        features = _read_exported_features(folder / FEATURES_FILE)
    else:
        names = {name.split(".")[1] for name in manifest.tensors if name.startswith("tables.")}
        ours = (*sorted(SCHEMA.features, key=lambda feature: feature.multi), SCHEMA.history)
        strange = names - {feature.name for feature in ours}
        if strange:
            raise UserError(
                f"{folder} has the feature {printable(min(strange))}, which the schema of the data set "
                "does not name."
            )
        features = tuple(feature for feature in ours if feature.name in names)
    for entity in ENTITIES:
        if entity not in {feature.entity for feature in features}:
            raise UserError(f"{folder} has no feature of a {SCHEMA.name_of(entity)}, and a model needs one.")
    return features


def _read_exported_features(path: Path) -> tuple[Feature, ...]:
    tables = _read_json(path).get("tables")
    if not isinstance(tables, list):
        raise UserError(f"{path} does not list the features of a model.")
    fields = {"name": str, "entity": str, "column": str, "multi": bool}
    known = {*map(SCHEMA.name_of, ENTITIES), HISTORY}
    for table in tables:
        fits = isinstance(table, dict) and all(type(table.get(name)) is kind for name, kind in fields.items())
        if not fits or table["entity"] not in known:
            raise UserError(f"{path} has {printable(table)}, which is no feature.")
    features = tuple(SCHEMA.restored(Feature(**{name: table[name] for name in fields})) for table in tables)
    if len({feature.name for feature in features}) < len(features):
        raise UserError(f"{path} has a feature twice.")
    return features


def _empty_interaction(
    folder: Path, features: Sequence[Feature], manifest: Manifest
) -> Interaction | TwoTower:
    """An interaction as wide as a model says, without memory yet; that of a model for ranking has a tower."""
    pattern = re.compile(r"dense\.(mlp|tower)\.(\d{1,9})\.weight")
    layers = sorted(
        (match for match in map(pattern.fullmatch, manifest.tensors) if match),
        key=lambda match: int(match[2]),
    )
    tables = [f"tables.{feature.name}.weight" for feature in features]
    shapes = {name: shape_of(folder, manifest, name) for name in (*tables, *(match[0] for match in layers))}
    flat = [name for name, shape in shapes.items() if len(shape) != 2 or min(shape) < 1]
    embedding_dims = set() if flat else {shapes[name][1] for name in tables}
    if len(embedding_dims) != 1 or min(embedding_dims) < 2:
        raise UserError(f"{folder} has tables and layers of {printable(shapes)}, which make no model.")
    (embedding_dim,) = embedding_dims
    widths = [shapes[match[0]][0] for match in layers][:-1]
    with torch.device("meta"):
        empty: Interaction | TwoTower
        if layers and layers[0][1] == "tower":
            empty = TwoTower(features, embedding_dim, widths)
        else:
            empty = Interaction(features, embedding_dim, widths, 0.0)
    for name, value in empty.state_dict().items():
        found, wanted = shape_of(folder, manifest, f"dense.{name}"), list(value.shape) or [1]
        if found != wanted:
            raise UserError(f"{folder} has {found} for dense.{name}, and its model needs {wanted}.")
    return empty.eval().requires_grad_(False)


def _dense_names(interaction: Interaction | TwoTower) -> list[str]:
    return [f"dense.{name}" for name in interaction.state_dict()]


def _filled(empty: Interaction | TwoTower, tensors: Mapping[str, torch.Tensor]) -> Interaction | TwoTower:
    """The interaction with the dense part of a dump."""
    # A dump has no tensor without a dimension. Copied, for what safetensors gives may still lie in the file.
    values = {
        name: tensors[f"dense.{name}"].reshape(value.shape).to(value.dtype, copy=True)
        for name, value in empty.state_dict().items()
    }
    empty.load_state_dict(values, assign=True)
    return empty.requires_grad_(False)


def read_change(delta: Path, snapshot: Snapshot) -> Change | None:
    """What an increment changes in a model; None if the model has it already.

    Raises:
        UserError: when it does not come next, is damaged, or does not fit; names both sides.
    """
    if _is_there(delta, read_manifest(delta), snapshot):
        return None
    with _checked(delta) as manifest:
        empty = _empty_interaction(delta, snapshot.features, manifest)
        for name, table in snapshot.tables.items():
            shape = shape_of(delta, manifest, f"tables.{name}.weight")
            if shape != list(table.shape):
                raise UserError(f"{delta} has {shape} for {name}, and the model {list(table.shape)}.")
        names = _dense_names(empty)
        dense: dict[str, torch.Tensor] = {}
        tables: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in snapshot.tables}
        for part in parts_of(delta, manifest):
            for name, found in tables.items():
                rows, weights = (part.get_tensor(f"tables.{name}.{slot}") for slot in ("rows", "weight"))
                found.append((rows, weights))
            held = set(part.keys())
            dense |= {name: part.get_tensor(name) for name in names if name in held}
        return Change(
            manifest, {name: _joined(found) for name, found in tables.items()}, _filled(empty, dense)
        )


def _is_there(delta: Path, manifest: Manifest, snapshot: Snapshot) -> bool:
    """Whether a model has an increment already; refuses one that does not come next."""
    check_name(delta, manifest)
    link, follows = manifest.link, snapshot.follows
    if link is None:
        raise UserError(f"{delta} is no increment but a dump; open it instead.")
    if manifest.run != snapshot.manifest.run:
        raise UserError(f"{delta} is of run {manifest.run}, and the model of run {snapshot.manifest.run}.")
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


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that all ranks changed of a table, and their weights."""
    rows, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return rows, weights


def put(snapshot: Snapshot, delta: Path, change: Change) -> Snapshot:
    """The state after an increment; its tables are those of the state before, changed in place."""
    for name, (rows, weights) in change.tables.items():
        snapshot.tables[name][rows] = weights
    assert change.manifest.link is not None
    return dataclasses.replace(
        snapshot,
        folder=delta,
        interaction=change.interaction,
        manifest=change.manifest,
        follows=change.manifest.link.after(change.manifest.position.step),
    )


@contextlib.contextmanager
def _checked(folder: Path) -> Iterator[Manifest]:
    """A folder whose every byte and header was checked, and which in the end is still the one that it was."""
    with reading(folder):
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        check_parts(folder, manifest)
        yield manifest
        if read_manifest(folder) != manifest:
            raise UserError(f"{folder} was replaced while it was read.")
