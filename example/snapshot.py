"""A whole model in memory, read from dumps, increments or an export by one process.

Believes no file before it was held against its digest; needs no process group and no TorchRec. Shapes: B
ratings, D numbers in a table row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from errors import UserError
from features import FEATURES, HISTORY, UNKNOWN_ROW, Feature, vocabulary_of
from interaction import Interaction
from manifest import (
    CONFIG,
    VOCABULARY,
    Link,
    Manifest,
    check_files,
    link_after,
    read_manifest,
)
from parts import parts_of, read_whole
from save_dir import State, check_chain, check_name
from twotower import TwoTower

# What an export says of its features; a dump has those of `features.py`.
FEATURES_FILE = "features.json"
# What a model takes beside the features: the rating of each movie of a history.
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
    in an export; folder: where it was read.
    """

    folder: Path
    features: tuple[Feature, ...]
    tables: dict[str, torch.Tensor]
    interaction: Interaction | TwoTower
    vocabulary: dict[str, dict[Any, int]]
    manifest: Manifest
    follows: Link
    config: dict[str, Any]

    def look_up(self, values: Mapping[str, Sequence[Any]]) -> dict[str, Rows]:
        """The rows of raw values; those that are not given count as unknown, and a history as empty."""
        allowed = {feature.name for feature in self.features}
        if HISTORY in self.features:
            allowed.add(HISTORY_RATINGS)
        if not values or not values.keys() <= allowed:
            odd = ", ".join(sorted(values.keys() - allowed)) or "nothing"
            raise UserError(f"There is no feature {odd}; the model has {', '.join(sorted(allowed))}.")
        lengths = {name: len(given) for name, given in values.items()}
        size = next(iter(lengths.values()))
        if set(lengths.values()) != {size}:
            raise UserError(f"The features have {lengths} values; give each as many.")
        return {
            feature.name: self._rows_of(feature, values.get(feature.name), size) for feature in self.features
        }

    def _rows_of(self, feature: Feature, given: Sequence[Any] | None, size: int) -> Rows:
        rows = self.vocabulary[vocabulary_of(feature.name)]
        if given is None:
            given = [[] if feature.multi else None] * size
        _check_types(feature, given, rows)
        # As in training: a movie without a genre has the genre "unknown".
        empty = [] if feature == HISTORY else [None]
        lists = [list(value) or empty if feature.multi else [value] for value in given]
        found = torch.tensor([rows.get(value, UNKNOWN_ROW) for values in lists for value in values])
        counts = torch.tensor([len(values) for values in lists], dtype=torch.int64)
        return Rows(self.tables[feature.name][found.to(torch.int64)], counts)


def _check_types(feature: Feature, given: Sequence[Any], rows: Mapping[Any, int]) -> None:
    """Refuse values of another type than the training's: none of them would ever be known."""
    known = type(next(iter(rows), None))
    for value in given:
        if feature.multi and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise UserError(f"The feature {feature.name} takes a list for each rating, and got {value!r}.")
        for one in value if feature.multi else [value]:
            if one is not None and isinstance(one, str) != (known is str):
                raise UserError(
                    f"The feature {feature.name} takes values of type {known.__name__}, not {one!r}."
                )


def read_snapshot(state: State) -> Snapshot:
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
    interaction = _empty_interaction(features, manifest)
    names = [*(f"tables.{feature.name}.weight" for feature in features), *_dense_names(interaction)]
    tensors = read_whole(folder, manifest, names)
    vocabulary = {
        name: {value: row for row, value in enumerate(values, start=UNKNOWN_ROW + 1)}
        for name, values in json.loads((folder / VOCABULARY).read_bytes()).items()
    }
    tables = {feature.name: tensors.pop(f"tables.{feature.name}.weight") for feature in features}
    for feature in features:
        known = len(vocabulary[vocabulary_of(feature.name)]) + 1
        if len(tables[feature.name]) != known:
            raise UserError(
                f"{folder} has {len(tables[feature.name]):,} rows for {feature.name}, and {known:,} values."
            )
    follows = manifest.about.get("follows")
    config = folder / CONFIG
    return Snapshot(
        folder=folder,
        features=features,
        tables=tables,
        interaction=_filled(interaction, tensors),
        vocabulary=vocabulary,
        manifest=manifest,
        follows=Link(**follows) if follows else link_after(folder),
        config=json.loads(config.read_bytes()) if config.is_file() else {},
    )


def _read_features(folder: Path, manifest: Manifest) -> tuple[Feature, ...]:
    """The features of a model, in the order in which it adds them up."""
    if (folder / FEATURES_FILE).is_file():
        fields = [field.name for field in dataclasses.fields(Feature)]
        tables = json.loads((folder / FEATURES_FILE).read_bytes())["tables"]
        return tuple(Feature(**{name: table[name] for name in fields}) for table in tables)
    names = {name.split(".")[1] for name in manifest.tensors if name.startswith("tables.")}
    ours = (*sorted(FEATURES, key=lambda feature: feature.multi), HISTORY)
    strange = names - {feature.name for feature in ours}
    if strange:
        raise UserError(f"{folder} has the feature {min(strange)}, which features.py does not name.")
    return tuple(feature for feature in ours if feature.name in names)


def _empty_interaction(features: Sequence[Feature], manifest: Manifest) -> Interaction | TwoTower:
    """An interaction as wide as a model says, without memory yet; that of a model for ranking has a tower."""
    shapes = {name: shape for name, (shape, _) in manifest.tensors.items()}
    pattern = re.compile(r"dense\.(mlp|tower)\.(\d+)\.weight")
    layers = sorted(
        (match for match in map(pattern.fullmatch, shapes) if match), key=lambda match: int(match[2])
    )
    widths = [shapes[match[0]][0] for match in layers]
    embedding_dim = shapes[f"tables.{features[0].name}.weight"][1]
    with torch.device("meta"):
        if layers and layers[0][1] == "tower":
            empty: Interaction | TwoTower = TwoTower(features, embedding_dim, widths[:-1])
        else:
            empty = Interaction(features, embedding_dim, widths[:-1], 0.0)
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
        dense: dict[str, torch.Tensor] = {}
        tables: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in snapshot.tables}
        for part in parts_of(delta, manifest):
            for name, found in tables.items():
                found.append(tuple(part.get_tensor(f"tables.{name}.{slot}") for slot in ("rows", "weight")))
            held = set(part.keys())
            dense |= {
                name: part.get_tensor(name) for name in _dense_names(snapshot.interaction) if name in held
            }
        changed = {name: _joined(delta, name, found, snapshot) for name, found in tables.items()}
        return Change(
            manifest, changed, _filled(_empty_interaction(snapshot.features, snapshot.manifest), dense)
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


def _joined(
    delta: Path, name: str, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], snapshot: Snapshot
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that all ranks changed of a table; what fits here cannot fail when it is put in place."""
    rows, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    table = snapshot.tables[name]
    fits = rows.dtype == torch.int64 and weights.dtype == table.dtype
    if not fits or weights.shape != (len(rows), table.size(1)):
        raise UserError(f"{delta} has rows of {name} that do not fit a table of {list(table.shape)}.")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(table):
        raise UserError(f"{delta} changes rows of {name} beyond its {len(table):,}.")
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
    """A folder whose every byte was checked, and which in the end is still the one that it was."""
    with in_words(folder):
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        yield manifest
        if read_manifest(folder) != manifest:
            raise UserError(f"{folder} was replaced while it was read.")


@contextlib.contextmanager
def in_words(folder: Path) -> Iterator[None]:
    """Say what a file in no good form makes Python or safetensors say."""
    try:
        yield
    except (
        OSError,
        SafetensorError,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
    ) as error:
        raise UserError(f"{folder} holds no model that can be read ({error}).") from error
