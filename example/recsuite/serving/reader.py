"""Reader of a model from checkpoints or an export, in one process; each file is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recsuite.checkpoint.chain import (
    CheckpointChain,
    chain_at,
    check_chain,
    check_whole,
    chosen_chain,
    settled,
    suggesting,
)
from recsuite.checkpoint.folder import BEST
from recsuite.checkpoint.format import (
    CONFIG,
    FEATURES_FILE,
    VOCABULARY,
    Manifest,
    ParentLink,
    link_after,
    read_config,
)
from recsuite.checkpoint.shards import RowReader, shape_of
from recsuite.datasets.preparation.vocabulary import Buckets, Encoding, encoding_of
from recsuite.datasets.schema import (
    BUCKETS,
    DENSE,
    ENTITIES,
    EVENT,
    HISTORY,
    LISTS,
    SCHEMA_FILE,
    UNKNOWN_ROW,
    Feature,
    Schema,
    schema_of,
)
from recsuite.datasets.source import FIRST_SCHEMA
from recsuite.errors import UserError, an, printable
from recsuite.files import parsed, typed
from recsuite.models.tasks import ModelMaker
from recsuite.serving.dynamic import read_tables
from recsuite.serving.index import read_lists
from recsuite.serving.model_files import (
    checked,
    dense_names,
    empty_head,
    filled,
    model_of,
    put,
    read_change,
    with_tables,
)
from recsuite.serving.snapshot import Snapshot


def read_snapshot(chain: CheckpointChain, maker: ModelMaker | None = None) -> Snapshot:
    """Return the model of a checkpoint, with its deltas replayed.

    maker: makes the model, if it is not the task's.

    Raises:
        UserError: when anything is missing, damaged or of another run.
    """
    # Before any tensor is read: the manifests show a gap in the chain.
    check_chain(chain)
    with checked(chain.base) as manifest:
        snapshot = _read_base(chain.base, manifest, maker)
    for delta in chain.deltas:
        change = read_change(delta, snapshot)
        # None only if a chain has the delta twice, which `check_chain` refuses.
        assert change is not None
        snapshot = put(snapshot, delta, change)
    return snapshot


def read_settled(folder: Path, checkpoint: str = BEST, maker: ModelMaker | None = None) -> Snapshot:
    """Return `read_snapshot` of the checkpoint chosen in a folder, also while a trainer writes there."""

    def read() -> Snapshot:
        return read_snapshot(chosen_chain(folder, checkpoint), maker)

    # No other rank waits here, so every byte of a checkpoint is checked before it is suggested.
    return suggesting(folder, lambda: settled(folder, read), lambda other: check_whole(chain_at(other)))


def _read_base(folder: Path, manifest: Manifest, maker: ModelMaker | None) -> Snapshot:
    schema = _read_schema(folder, manifest)
    features = _read_features(folder, manifest, schema)
    model = model_of(folder, manifest)[0]
    held = with_tables(features, model.reads_order)
    static = [feature.name for feature in held if not feature.is_dynamic]
    tables = {name: f"tables.{name}.weight" for name in static}
    head = empty_head(folder, schema, features, manifest, maker)
    vocabulary, encodings = _read_vocabulary(folder, manifest)
    _check_rows(
        folder,
        [*held, *(each for each in features if not each.has_table)],
        manifest,
        schema,
        vocabulary,
        encodings,
    )
    # Not initialized: `checked` has found every number of them in a shard.
    tensors = {
        name: torch.empty(shape_of(folder, manifest, name)) for name in [*tables.values(), *dense_names(head)]
    }
    RowReader([folder], [manifest]).fill(tensors)
    dynamic = read_tables(folder, manifest, schema.item)
    # An export has no configuration of its training.
    named = any(entry.name == CONFIG for entry in manifest.files)
    return Snapshot(
        folder=folder,
        schema=schema,
        features=features,
        tables={name: tensors[held] for name, held in tables.items()}
        | {name: each.matrix for name, each in dynamic.items()},
        head=filled(head, tensors),
        vocabulary=vocabulary,
        encodings=encodings,
        manifest=manifest,
        follows=_follows(folder, manifest),
        trained=folder,
        config=read_config(folder) if named else {},
        dynamic={name: each.directory for name, each in dynamic.items()},
        lists=read_lists(folder, manifest),
        task_name=model.task,
        maker=maker,
    )


def _follows(folder: Path, manifest: Manifest) -> ParentLink:
    """Return the link that the next delta must have; an export records it."""
    follows = manifest.about.get("follows")
    if not follows:
        return link_after(folder)
    try:
        link: ParentLink = typed(ParentLink, follows)
        return link
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder} does not say which delta may follow ({printable(error)}).") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON object."""
    try:
        found: dict[str, Any] = typed(dict, parsed(path.read_bytes()), path.name)
        return found
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({printable(error)}).") from None


def _read_schema(folder: Path, manifest: Manifest) -> Schema:
    """Return the schema of the training; checkpoints of earlier versions have none."""
    if not any(entry.name == SCHEMA_FILE for entry in manifest.files):
        return FIRST_SCHEMA
    try:
        return schema_of(_read_json(folder / SCHEMA_FILE))
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder / SCHEMA_FILE} is not a schema ({printable(error)}).") from None


def _read_vocabulary(
    folder: Path, manifest: Manifest
) -> tuple[dict[str, dict[Any, int]], dict[str, Encoding]]:
    """Return the vocabularies, feature to raw value to row, and the encodings of numbers.

    The raw values of a feature have one type. Features with dynamic tables have no vocabulary.
    """
    named = _read_json(folder / VOCABULARY).items()
    # For a dynamic table the file lists the values in the data, not those with a row.
    found = {name: values for name, values in named if name not in manifest.dynamic}
    encodings: dict[str, Encoding] = {}
    for name, values in found.items():
        if isinstance(values, dict):
            try:
                encodings[name] = encoding_of(values)
            except (TypeError, ValueError) as error:
                what = f"how {printable(name)} is encoded ({printable(error)})"
                raise UserError(f"{folder / VOCABULARY} does not say {what}.") from None
            continue
        # One type: the values of a request are compared with the type of the first value, see
        # `request.check_values`.
        kinds = {type(value) for value in values} if isinstance(values, list) else {None}
        if len(kinds) > 1 or not kinds <= {str, int, float}:
            raise UserError(f"{folder / VOCABULARY} has no list of raw values for {printable(name)}.")
    vocabulary = {
        name: {value: row for row, value in enumerate(values, start=UNKNOWN_ROW + 1)}
        for name, values in found.items()
        if name not in encodings
    }
    return vocabulary, encodings


def _check_rows(
    folder: Path,
    features: Sequence[Feature],
    manifest: Manifest,
    schema: Schema,
    vocabulary: Mapping[str, Mapping[Any, int]],
    encodings: Mapping[str, Encoding],
) -> None:
    """Check that each table has a row per raw value or bucket plus one, and each dense number a scale."""
    for feature in features:
        encoding = encodings.get(feature.name)
        if (BUCKETS if isinstance(encoding, Buckets) else DENSE if encoding else "") != feature.number:
            raise UserError(
                f"{folder / VOCABULARY} does not say how {feature.name} is encoded, as the model needs it."
            )
        if not feature.has_table or feature.is_dynamic:
            continue
        # The lookup of a raw value without a row would read beyond the end of its table.
        rows = shape_of(folder, manifest, f"tables.{feature.name}.weight")[0]
        values = len(vocabulary.get(schema.vocabulary_of(feature.name), ())) + 1
        known = encoding.rows if isinstance(encoding, Buckets) else values
        if rows != known:
            raise UserError(f"{folder} has {rows:,} rows for {feature.name}, and {known:,} values.")


def _read_features(folder: Path, manifest: Manifest, schema: Schema) -> tuple[Feature, ...]:
    """Return the features of a model, in the order in which it adds them up."""
    names = {name.split(".")[1] for name in manifest.tensors if name.startswith("tables.")}
    names |= manifest.dynamic.keys()
    reads_order = model_of(folder, manifest)[0].reads_order
    if reads_order:
        names.add(HISTORY)
    if any(entry.name == FEATURES_FILE for entry in manifest.files):
        features = _read_exported_features(folder / FEATURES_FILE, schema)
    else:
        # The order of the columns' tables: sums of floats in another order round differently, and scores
        # would differ from those of the training.
        ours = (*sorted(schema.features, key=lambda feature: feature.multi), schema.history, schema.audience)
        strange = names - {feature.name for feature in ours}
        if strange:
            raise UserError(
                f"{folder} has the feature {printable(min(strange))}, which the schema of the data set "
                "does not name."
            )
        features = tuple(feature for feature in ours if feature.name in names)
    for entity in ENTITIES:
        if entity not in {feature.entity for feature in features}:
            raise UserError(
                f"{folder} has no feature of {an(schema.name_of(entity))}, and a model needs one."
            )
    dynamic = {feature.name for feature in with_tables(features, reads_order) if feature.is_dynamic}
    if dynamic != manifest.dynamic.keys():
        said, held = (printable(", ".join(sorted(each)) or "none") for each in (dynamic, manifest.dynamic))
        raise UserError(f"{folder} has the dynamic tables {held}, and its schema names {said}.")
    return (*features, *(feature for feature in schema.features if not feature.has_table))


def _read_exported_features(path: Path, schema: Schema) -> tuple[Feature, ...]:
    try:
        tables = typed(list[dict[str, Any]], _read_json(path).get("tables"), "tables")
        # "rows" is for human readers; the table itself has the number. Exports of earlier versions have no
        # "number": no feature was a number then.
        recorded = [
            typed(Feature, {"number": "", **{k: v for k, v in table.items() if k != "rows"}})
            for table in tables
        ]
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} does not list the features of a model ({printable(error)}).") from None
    known = {*map(schema.name_of, ENTITIES), EVENT, *LISTS}
    for feature in recorded:
        if feature.entity not in known:
            raise UserError(f"{path} has {printable(feature)}, which is not a feature.")
    features = tuple(map(schema.restored, recorded))
    if len({feature.name for feature in features}) < len(features):
        raise UserError(f"{path} has a feature twice.")
    return features
