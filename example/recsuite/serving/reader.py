"""Reader of a model from checkpoints or an export, in one process; each file is checked before it is used."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from recsuite.checkpoint.chain import (
    CheckpointChain,
    ChoiceError,
    chain_at,
    check_chain,
    check_name,
    check_whole,
    chosen_chain,
    retrying_if_moved,
    with_suggestion,
)
from recsuite.checkpoint.format import (
    ADDED_LATER,
    CONFIG,
    FEATURES_FILE,
    INDEX,
    MANIFEST,
    VOCABULARY,
    Manifest,
    ParentLink,
    check_files,
    link_after,
    parsing,
    read_config,
    read_manifest,
)
from recsuite.checkpoint.origin import FIX, check_origin, no_maker
from recsuite.checkpoint.shards import RowReader, check_shard_files, reading, shape_of, widths_in
from recsuite.config.sections import ModelConfig
from recsuite.datasets.preparation.vocabulary import Buckets, Encoding, encoding_of
from recsuite.datasets.schema import (
    BUCKETS,
    ENTITIES,
    EVENT,
    HISTORY,
    SCHEMA_FILE,
    UNKNOWN_ROW,
    Feature,
    Schema,
    schema_of,
)
from recsuite.datasets.schema import DENSE as DENSE_NUMBER
from recsuite.datasets.source import FIRST_SCHEMA
from recsuite.errors import UserError, printable, with_article
from recsuite.files import LARGEST, parsed, typed
from recsuite.hooks import extra
from recsuite.models.rows import with_row_scale
from recsuite.models.tasks import ModelData, ModelMaker, widths_of
from recsuite.runtime.console import say
from recsuite.serving.snapshot import IdTable, ServedTable, Snapshot, TableChange, VocabularyTable


def read_snapshot(
    chain: CheckpointChain, maker: ModelMaker | None, accepts_changed: bool = False
) -> Snapshot:
    """Return the model of a checkpoint, with its deltas replayed.

    maker: makes the model, None is refused; accepts_changed: see `ServedModel.open`.

    Raises:
        UserError: when anything is missing, damaged, or of another run or model.
    """
    # Before any tensor is read: the manifests show a gap in the chain.
    newest = check_chain(chain)[-1]
    with checked(chain.base) as manifest:
        snapshot = _read_base(chain.base, manifest, maker, newest, accepts_changed)
    for delta in chain.deltas:
        change = read_change(delta, snapshot)
        # None only if a chain has the delta twice, which `check_chain` refuses.
        assert change is not None
        snapshot = put(snapshot, delta, change)
    return snapshot


def read_settled(
    folder: Path, checkpoint: str, maker: ModelMaker | None, accepts_changed: bool = False
) -> Snapshot:
    """Return `read_snapshot` of the checkpoint chosen in a folder, also while a trainer writes there."""

    def read() -> Snapshot:
        return read_snapshot(chosen_chain(folder, checkpoint), maker, accepts_changed)

    # No other rank waits here, so every byte of a checkpoint is checked before it is suggested.
    return with_suggestion(
        folder, lambda: retrying_if_moved(folder, read), lambda other: check_whole(chain_at(other))
    )


def _read_base(
    folder: Path, manifest: Manifest, maker: ModelMaker | None, newest: Manifest, accepts_changed: bool
) -> Snapshot:
    """Return the model of a full checkpoint. newest: the last manifest of its chain."""
    row_type = manifest.about.get("row_type", "float32")
    if row_type != "float32":
        raise UserError(
            f"{folder} was exported with --row_type {row_type}, which only other programs read. Fix: export "
            "it again without --row_type."
        )
    # An export has no configuration of its training.
    named = any(entry.name == CONFIG for entry in manifest.files)
    config = read_config(folder) if named else {}
    schema = _read_schema(folder, manifest)
    features = _read_features(folder, manifest, schema)
    model = model_of(folder, manifest)[0]
    held = with_tables(features, model.reads_order)
    if maker is None:
        raise no_maker(folder, newest)
    head = made_head(folder, schema, features, manifest, maker)
    if line := check_origin(folder, newest, head, accepts_changed):
        say(line)
    head = checked_head(folder, head, features, manifest)
    vocabulary, encodings = _read_vocabulary(folder, manifest)
    _check_encodings(folder, [*held, *(each for each in features if not each.has_table)], encodings)
    reader = RowReader([folder], [manifest])
    tables: dict[str, ServedTable] = {}
    for name, is_dynamic in ((feature.name, feature.is_dynamic) for feature in held):
        if is_dynamic:
            tables[name] = IdTable.read(reader, name, keeps_texts=name == schema.item)
        else:
            values = vocabulary.get(schema.vocabulary_of(name), {})
            tables[name] = VocabularyTable.read(reader, name, values, encodings.get(name))
    return Snapshot(
        folder=folder,
        schema=schema,
        features=features,
        tables=tables,
        head=read_head(reader, head),
        maker=maker,
        vocabulary=vocabulary,
        encodings=encodings,
        manifest=manifest,
        follows=_follows(folder, manifest),
        trained=folder,
        config=config,
        lists=_lists_in(folder, manifest),
        task_name=model.task,
        accepts_changed=accepts_changed,
    )


def _lists_in(folder: Path, manifest: Manifest) -> Any:
    """Return the lists of the index that was written with a model; None for none."""
    if INDEX not in manifest.about:
        return None
    try:
        index = extra("index")
    except UserError as error:
        # An approximate search is refused by name; all others do not use it.
        warnings.warn(
            f"{folder} has an index that is not read, so each search is exact. {error}", stacklevel=2
        )
        return None
    return index.read_lists(folder, manifest)


def _follows(folder: Path, manifest: Manifest) -> ParentLink:
    """Return the link that the next delta must have; an export records it."""
    follows = manifest.about.get("follows")
    if not follows:
        return link_after(folder)
    with parsing(f"the delta that follows from {folder / MANIFEST}", "export again"):
        link: ParentLink = typed(ParentLink, follows)
    return link


def _read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON object."""
    with parsing(f"{path}"):
        contents: dict[str, Any] = typed(dict, parsed(path.read_bytes()), path.name)
    return contents


def _read_schema(folder: Path, manifest: Manifest) -> Schema:
    """Return the schema of the training; checkpoints of earlier versions have none."""
    if not any(entry.name == SCHEMA_FILE for entry in manifest.files):
        return FIRST_SCHEMA
    with parsing(f"the schema in {folder / SCHEMA_FILE}"):
        return schema_of(_read_json(folder / SCHEMA_FILE))


def _read_vocabulary(
    folder: Path, manifest: Manifest
) -> tuple[dict[str, dict[Any, int]], dict[str, Encoding]]:
    """Return the vocabularies, feature to raw value to row, and the encodings of numbers."""
    named = _read_json(folder / VOCABULARY).items()
    # For a dynamic table the file lists the values in the data, not those with a row.
    recorded = {name: values for name, values in named if name not in manifest.dynamic}
    encodings: dict[str, Encoding] = {}
    for name, values in recorded.items():
        if isinstance(values, dict):
            with parsing(f"the encoding of {printable(name)} in {folder / VOCABULARY}"):
                encodings[name] = encoding_of(values)
            continue
        # One type: the values of a request are compared with the type of the first value, see
        # `request.check_values`.
        kinds = {type(value) for value in values} if isinstance(values, list) else {None}
        if len(kinds) > 1 or not kinds <= {str, int, float}:
            raise UserError(f"{folder / VOCABULARY} has no list of raw values for {printable(name)}.")
    vocabulary = {
        name: {value: row for row, value in enumerate(values, start=UNKNOWN_ROW + 1)}
        for name, values in recorded.items()
        if name not in encodings
    }
    return vocabulary, encodings


def _check_encodings(folder: Path, features: Sequence[Feature], encodings: Mapping[str, Encoding]) -> None:
    """Check that each number of a model has its buckets or its scale."""
    for feature in features:
        encoding = encodings.get(feature.name)
        if (BUCKETS if isinstance(encoding, Buckets) else DENSE_NUMBER if encoding else "") != feature.number:
            raise UserError(
                f"{folder / VOCABULARY} does not say how {feature.name} is encoded, as the model needs it."
            )


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
        ours = (*sorted(schema.features, key=lambda feature: feature.multi), schema.history)
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
                f"{folder} has no feature of {with_article(schema.name_of(entity))}, which a model requires."
            )
    dynamic = {feature.name for feature in with_tables(features, reads_order) if feature.is_dynamic}
    if dynamic != manifest.dynamic.keys():
        said, held = (printable(", ".join(sorted(each)) or "none") for each in (dynamic, manifest.dynamic))
        raise UserError(f"{folder} has the dynamic tables {held}, and its schema names {said}.")
    return (*features, *(feature for feature in schema.features if not feature.has_table))


def _read_exported_features(path: Path, schema: Schema) -> tuple[Feature, ...]:
    with parsing(f"the features in {path}", "export again"):
        tables = typed(list[dict[str, Any]], _read_json(path).get("tables"), "tables")
        # "rows" is for human readers; the table itself has the number. Exports of earlier versions have no
        # "number": no feature was a number then.
        recorded = [
            typed(Feature, {"number": "", **{k: v for k, v in table.items() if k != "rows"}})
            for table in tables
        ]
    known = {*map(schema.name_of, ENTITIES), EVENT, HISTORY}
    for feature in recorded:
        if feature.entity not in known:
            raise UserError(f"{path} has an invalid feature: {printable(feature)}.")
    features = tuple(map(schema.restored, recorded))
    if len({feature.name for feature in features}) < len(features):
        raise UserError(f"{path} has a duplicate feature.")
    return features


# --- parts of a model ---

DENSE = "dense."


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
            f"Cannot read the model in {folder / MANIFEST}: {printable(str(error))}. Fix: write it again "
            "with the program that trained it."
        ) from None


def with_tables(features: Sequence[Feature], reads_order: bool) -> list[Feature]:
    """Return the features that have a table of their own."""
    return [each for each in features if each.has_table and not (reads_order and each.name == HISTORY)]


def made_head(
    folder: Path,
    schema: Schema,
    features: Sequence[Feature],
    manifest: Manifest,
    maker: ModelMaker,
) -> nn.Module:
    """Return the model that the flags of a folder describe, on the device "meta"."""
    config, history = model_of(folder, manifest)
    data = ModelData(schema, features, 0.0, history)
    # A tensor on "meta" has a shape and no numbers, so the widths in the manifest are compared with the model
    # before any memory is allocated.
    with torch.device("meta"):
        return with_row_scale(maker(data, config))


def checked_head(
    folder: Path, empty: nn.Module, features: Sequence[Feature], manifest: Manifest
) -> nn.Module:
    """Return a head on "meta", after a check that its tensors are those of a folder."""
    config, _ = model_of(folder, manifest)
    # A checkpoint from before there were such scores has none, and is served without them.
    if getattr(empty, "own_items", None) and not any(
        name.startswith(ADDED_LATER) for name in manifest.tensors
    ):
        empty.register_module("own_items", None)
    tables = [feature.name for feature in with_tables(features, config.reads_order)]
    recorded = widths_in(manifest)
    for name, width in widths_of(empty, tables, config.embedding_dim).items():
        if recorded.get(name) != width:
            raise ChoiceError(
                f"{folder} has {recorded.get(name, 'no')} numbers in a row of {name}, and its model {width}; "
                f"for a model of your own, {FIX}"
            )
    wanted = {f"{DENSE}{name}": list(value.shape) or [1] for name, value in empty.state_dict().items()}
    weights = [name for name in manifest.tensors if _is_weight(name, wanted)]
    shapes = {name: shape_of(folder, manifest, name) for name in weights}
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise ChoiceError(
                f"{folder} has {shapes.get(name, 'nothing')} for {name}, and its model "
                f"{wanted.get(name, 'nothing')}; for a model of your own, {FIX}"
            )
    return empty.eval().requires_grad_(False)


def _is_weight(name: str, wanted: Mapping[str, object]) -> bool:
    """True for a tensor of the dense part, but not for the state of its optimizer."""
    return name.startswith(DENSE) and (name in wanted or name.rpartition(".")[0] not in wanted)


def read_head(reader: RowReader, empty: nn.Module) -> nn.Module:
    """Return the head with the dense part of a checkpoint. empty: see `checked_head`."""
    # A checkpoint has no tensor of 0 dimensions.
    shapes = {name: list(value.shape) or [1] for name, value in empty.state_dict().items()}
    tensors = {f"{DENSE}{name}": torch.empty(shape) for name, shape in shapes.items()}
    reader.fill(tensors)
    values = {
        name: tensors[f"{DENSE}{name}"].reshape(value.shape).to(value.dtype)
        for name, value in empty.state_dict().items()
    }
    # assign=True: a tensor on "meta" has no memory to copy into.
    empty.load_state_dict(values, assign=True)
    return empty.requires_grad_(False)


# --- deltas ---


@dataclass(frozen=True)
class ModelChange:
    """Changes that a delta makes to a model. tables: by name, of all tables."""

    manifest: Manifest
    tables: dict[str, TableChange]
    head: nn.Module


def read_change(delta: Path, snapshot: Snapshot) -> ModelChange | None:
    """Return the changes that a delta makes to a model; None if the model already has the delta.

    Raises:
        UserError: when it does not come next, is damaged, or does not fit; names both sides.
    """
    # The manifest alone is enough to tell, so a delta that the model already has is not read again.
    if _is_there(delta, read_manifest(delta), snapshot):
        return None
    with checked(delta) as manifest:
        check_same_tables(delta, manifest, snapshot.tables)
        # A new dense part instead of the old one changed: other threads may be scoring with the old one.
        empty = made_head(delta, snapshot.schema, snapshot.features, manifest, snapshot.maker)
        empty = checked_head(delta, empty, snapshot.features, manifest)
        # The whole delta is read before anything changes: a model must not hold half of a delta.
        reader = RowReader([delta], [manifest])
        tables = {
            name: table.after(reader, name, keeps_texts=name == snapshot.schema.item)
            for name, table in snapshot.tables.items()
        }
        return ModelChange(manifest, tables, read_head(reader, empty))


def check_same_tables(delta: Path, manifest: Manifest, tables: Mapping[str, ServedTable]) -> None:
    """Refuse a delta whose dynamic tables are not those of a model.

    Raises:
        UserError: names both sides.
    """
    ours = {name for name, table in tables.items() if table.record}
    if manifest.dynamic.keys() != ours:
        theirs, mine = (", ".join(sorted(names)) or "none" for names in (manifest.dynamic, ours))
        raise UserError(f"{delta} has the dynamic tables {theirs}, and the model {mine}.")


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
            f"{delta} is out of order: number {link.sequence} from step {link.from_step}, expected number "
            f"{follows.sequence} from step {follows.from_step}."
        )
    return False


def put(snapshot: Snapshot, delta: Path, change: ModelChange) -> Snapshot:
    """Return the model after a delta; the rows of the model before are changed in place."""
    # In place: a copy of the tables for every delta would take twice their memory. `read_change` has checked
    # that the rows are within their tables.
    tables = {name: each.put() for name, each in change.tables.items()}
    assert change.manifest.link is not None
    return dataclasses.replace(
        snapshot,
        folder=delta,
        tables=tables,
        head=change.head,
        manifest=change.manifest,
        follows=change.manifest.link.after(change.manifest.progress.step),
    )
