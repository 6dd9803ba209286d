"""Export of a checkpoint into one folder for a server, without its optimizer; `served.py` reads it.

Other programs read one with a graph, an extra.

PATH/
    model.safetensors   all rows of the tables ("tables.user.weight"), the dense part
                        ("dense.mlp.0.weight"), and dynamic tables as in `checkpoint/shards.py`, with
                        zeros for the slots that only a training needs, and the texts of items only
    vocabulary.json     for every feature the raw values of table rows 1, 2, ..., or how a number is encoded
    schema.json         the schema of the data set: users, items and events
    features.json       the tables in the order in which a model adds them up: feature, entity, column,
                        whether it has lists, number of rows
    model.onnx          with --format onnx the graph of the dense part; with --format torch model.pt2
    items.index         the lists of the approximate index, if one was made, see the extra `index`
    manifest.json       run, progress, tensors, files with digests, and the delta that may follow
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.checkpoint.chain import describe_choice, requested_kind
from recsuite.checkpoint.format import FEATURES_FILE, VOCABULARY, Manifest, write_manifest
from recsuite.checkpoint.origin import ORIGIN
from recsuite.checkpoint.shards import PREFIX, write_shard_file
from recsuite.config.config import ExtraSection
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.schema import HISTORY, SCHEMA_FILE, record_of
from recsuite.errors import UserError
from recsuite.files import FileEntry, explained, flush, flushed, plain, replacing
from recsuite.hooks import extra
from recsuite.models.tasks import ModelMaker
from recsuite.places import folder_at
from recsuite.runtime.console import say
from recsuite.serving.reader import read_settled
from recsuite.serving.snapshot import Snapshot

MODEL = "model.safetensors"
# In place of the name of an optimizer; --load refuses an export with these words.
NO_OPTIMIZER = "an optimizer that an export leaves out"


def export(
    source: CheckpointConfig, target: Path, model: ModelMaker, extras: Iterable[ExtraSection] = ()
) -> None:
    """Write the --checkpoint of --save_dir into the new folder `target`, and print a line about it.

    model: see `ServedModel.open`; extras: see `write_export`.

    Raises:
        UserError: when there is no checkpoint, when it is not whole, when the folder is taken or cannot be
            written, and when the model cannot be traced.
    """
    save_dir, target = folder_at(source.save_dir), target.absolute()
    # Before the model is read: reading can take long.
    _check_free(target)
    snapshot = read_settled(save_dir, source.checkpoint, model, source.accept_changed_model)
    size = write_export(snapshot, target, extras=extras)
    asked = requested_kind(save_dir, source.checkpoint)
    choice = describe_choice(snapshot.manifest.progress, asked, snapshot.metric)
    say(f"exported {snapshot.folder}, {choice}, to {target}: {size:,} bytes")


def write_export(
    snapshot: Snapshot, target: Path, lists: Any = None, extras: Iterable[ExtraSection] = ()
) -> int:
    """Write a model into a new folder, and return its size in bytes. It gets its name when all is written.

    lists: `NearestItems.lists` of an index of its items, written too; extras: may add a graph, and convert
    the rows.

    Raises:
        UserError: when the folder is taken or cannot be written, and when the model cannot be traced.
    """
    target = target.absolute()
    _check_free(target)
    aside = target.with_name(f".making-{target.name}-{uuid.uuid4().hex[:12]}")
    with explained(f"Cannot write {target}", "give another folder"):
        with replacing(target, aside) as making:
            making.mkdir(parents=True)
            arrays, added = _arrays_of(snapshot), []
            index = extra("index").write_lists(making, lists) if lists else {}
            about = {**index, "row_type": "float32"}
            for section in extras:
                paths, fields = section.add_to_export(making, snapshot, arrays)
                added += [flushed(path) for path in paths]
                about |= fields
            files = (*_write_files(making, snapshot, arrays), *added)
            write_manifest(making, _describe(snapshot, arrays, files, about))
        # As in `writer.publish`: before this, a power cut can undo the rename.
        flush(target.parent)
    return sum(entry.bytes for entry in files)


def _check_free(target: Path) -> None:
    with explained(f"Cannot read {target}", "give another folder"):
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_taken:
        raise UserError(f"{target} exists already; give a new folder, or remove that one.")


def _write_files(folder: Path, snapshot: Snapshot, arrays: dict[str, np.ndarray]) -> tuple[FileEntry, ...]:
    # In the order of the rows: the file has no row numbers, and the reader counts.
    vocabulary = {name: list(rows) for name, rows in snapshot.vocabulary.items()}
    encodings = {name: dataclasses.asdict(encoding) for name, encoding in snapshot.encodings.items()}
    schema = snapshot.schema
    tables = [
        {**plain(schema.recorded(feature)), "rows": snapshot.table_of(feature.name).num_values + 1}
        for feature in snapshot.features
        if feature.has_table
    ]
    # Histories are not columns of the data.
    features = [feature for feature in snapshot.features if feature.name != HISTORY]
    texts = {
        VOCABULARY: json.dumps({**vocabulary, **encodings}, allow_nan=False),
        SCHEMA_FILE: json.dumps(record_of(schema, features), indent=1, allow_nan=False),
        FEATURES_FILE: json.dumps({"tables": tables}, indent=1, allow_nan=False),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    entry = write_shard_file(folder / MODEL, arrays)
    return entry, *(flushed(folder / name) for name in texts)


def _arrays_of(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """Return all weights under their names in a checkpoint."""
    rows = {
        slot: array for name, table in snapshot.tables.items() for slot, array in table.arrays(name).items()
    }
    return rows | {name: value.numpy() for name, value in snapshot.dense.items()}


def _describe(
    snapshot: Snapshot, arrays: dict[str, np.ndarray], files: tuple[FileEntry, ...], more: dict[str, Any]
) -> Manifest:
    manifest = snapshot.manifest
    # Only what describes the model: nothing about a delta or the ranks of the training.
    about = {name: manifest.about[name] for name in ("versions", "model", ORIGIN) if name in manifest.about}
    records = {name: table.record for name, table in snapshot.tables.items()}
    return dataclasses.replace(
        manifest,
        # Tables by id have a record instead.
        tensors={
            name: (list(array.shape), str(array.dtype))
            for name, array in arrays.items()
            if not name.startswith(PREFIX)
        },
        files=files,
        optimizer=NO_OPTIMIZER,
        about={**about, **more, "follows": dataclasses.asdict(snapshot.follows)},
        dynamic={name: record for name, record in records.items() if record},
        # An export is read on its own. "follows" says which delta may come next.
        link=None,
    )
