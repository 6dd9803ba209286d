"""Whole model of one checkpoint in memory. Needs no process group and no TorchRec.

Shapes: B ratings, D numbers in a table row, n values or ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from recsuite.checkpoint.format import DynamicRecord, Manifest, ParentLink
from recsuite.checkpoint.shards import ROWS, UNKNOWN, WAITING, RowReader, Texts, name_of, shape_of
from recsuite.datasets.preparation.vocabulary import Buckets, Encoding
from recsuite.datasets.schema import ENTITIES, EVENT, HISTORY, UNKNOWN_ROW, Feature, Schema
from recsuite.errors import UserError, printable
from recsuite.ids import UNKNOWN_ID
from recsuite.models.heads import TwoSided
from recsuite.models.inputs import Inputs
from recsuite.models.rows import FeatureRows
from recsuite.models.tasks import TASKS, ModelMaker, WorkerTask, predictions_of
from recsuite.serving.request import (
    HISTORY_AGES,
    HISTORY_RATINGS,
    check_types,
    check_values,
    ids_of_values,
    length_of,
    numbers_of,
    type_of,
)

# Entities that a model may have features of.
EVERYTHING = (*ENTITIES, EVENT, HISTORY)
# Share of its rows by which a matrix that is too small grows: memory that is not written to costs nothing.
SPARE = 0.25


@dataclass(frozen=True)
class VocabularyTable:
    """Table of a fixed vocabulary, see `ServedTable`.

    matrix: float32 [rows, D]. rows: raw value to row, which is also the key; empty for buckets. record: None,
    because the manifest has the shapes of the table instead.
    """

    matrix: torch.Tensor
    rows: Mapping[Any, int]
    record: ClassVar[None] = None

    @classmethod
    def read(
        cls, reader: RowReader, name: str, rows: Mapping[Any, int], encoding: Encoding | None
    ) -> VocabularyTable:
        """Read a table from a full checkpoint or an export that was checked. encoding: of a number, if any.

        Raises:
            UserError: when it has not one row for each raw value or bucket, and the unknown row.
        """
        (folder,), (manifest,) = reader.folders, reader.manifests
        shape = shape_of(folder, manifest, f"tables.{name}.weight")
        # The lookup of a raw value without a row would read beyond the end of the table.
        known = encoding.rows if isinstance(encoding, Buckets) else len(rows) + 1
        if shape[0] != known:
            raise UserError(f"{folder} has {shape[0]:,} rows for {name}, and {known:,} values.")
        # Not initialized: the check of the headers has found every number of it in a shard.
        matrix = torch.empty(shape)
        reader.fill_rows(name, {"weight": matrix})
        return cls(matrix, rows)

    @property
    def kind(self) -> type[Any] | None:
        """Type of the raw values; None if no value was seen."""
        return type_of(self.rows)

    @property
    def num_values(self) -> int:
        """Number of values with a row."""
        return len(self.matrix) - 1

    @property
    def identity(self) -> object:
        """Object whose identity changes if other values have a row, or if they have another order."""
        return self.rows

    def keys_of(self, name: str, values: Sequence[Any]) -> torch.Tensor:
        """Return the keys of raw values, int64 [n]; name: of the feature."""
        return torch.tensor([self.rows.get(value, UNKNOWN_ROW) for value in values], dtype=torch.int64)

    def rows_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows of keys, int64 [n]."""
        return keys

    def raw_values(self) -> list[Any]:
        """Return the raw values with a row, in the order in which equal scores are listed."""
        return list(self.rows)

    def originals(self, values: Sequence[Any], keys: torch.Tensor) -> list[Any]:
        """Return raw values with the type of the training, if it has seen them. keys: theirs."""
        known = [None, *self.rows]
        both = zip(values, keys.tolist(), strict=True)
        return [value if row == UNKNOWN_ROW else known[row] for value, row in both]

    def missing_in(self, values: Sequence[Any]) -> list[Any]:
        """Return raw values of the training that its data must have, and that are not among these."""
        return [*(self.rows.keys() - set(values))]

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of the table for an export, by their names in a shard file."""
        return {f"tables.{name}.weight": self.matrix.numpy()}

    def after(self, reader: RowReader, name: str, keeps_texts: bool) -> TableChange:
        """Return the change by a delta; nothing is changed yet. keeps_texts: the values are shown.

        Raises:
            UserError: when the delta does not fit.
        """
        delta, manifest = reader.folders[-1], reader.manifests[-1]
        shape = shape_of(delta, manifest, f"tables.{name}.weight")
        if shape != list(self.matrix.shape):
            raise UserError(f"{delta} has {shape} for {name}, and the model {list(self.matrix.shape)}.")
        # No row is there twice, because each rank writes its own rows.
        parts = [(rows, slots["weight"]) for rows, slots in reader.changed_rows(-1, name)]
        rows, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return TableChange(self, rows, weights)


@dataclass(frozen=True)
class IdTable:
    """Table of a dynamic vocabulary, after one checkpoint, see `ServedTable`. The key of a value is its id.

    matrix: float32 [rows, D], maybe with unused rows. ids: those with a row, int64 [n], ascending. rows: of
    the ids, int64 [n], never UNKNOWN_ROW, which is the trained unknown row. seen: when each was last seen,
    int64 [n], in the unit of the record, which is that of the manifest. texts: texts of ids, if these are
    shown.
    """

    matrix: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor
    record: DynamicRecord
    texts: Texts | None = None

    @classmethod
    def read(cls, reader: RowReader, name: str, keeps_texts: bool) -> IdTable:
        """Read a table from a full checkpoint or an export that was checked. keeps_texts: see `after`."""
        record = reader.record(name)
        parts = list(reader.rows_of_ids(name, slots=("ids", "seen")))
        ids, seen = (torch.cat([part[slot] for part in parts]) for slot in ("ids", "seen"))
        matrix = torch.empty(len(ids) + 1, record.embedding_dim)
        matrix[UNKNOWN_ROW] = reader.unknown_row(name)[0]
        # One file after the other, in their order: no second copy of a large table is made.
        first = UNKNOWN_ROW + 1
        for part in reader.rows_of_ids(name, slots=("weight",)):
            matrix[first : first + len(part["weight"])] = part["weight"]
            first += len(part["weight"])
        order = ids.argsort()
        texts = reader.texts(name) if record.has_texts and keeps_texts else None
        table = cls(matrix, ids[order], order + UNKNOWN_ROW + 1, seen[order], record, texts)
        return table._without_expired()

    @property
    def kind(self) -> type[Any] | None:
        """Type of the raw values; None if no value was seen."""
        return str if self.record.has_texts else int if len(self.ids) else None

    @property
    def num_values(self) -> int:
        """Number of values with a row."""
        return len(self.ids)

    @property
    def identity(self) -> object:
        """Object whose identity changes if other values have a row, or if they have another order."""
        return self.ids

    def keys_of(self, name: str, values: Sequence[Any]) -> torch.Tensor:
        """Return the keys of raw values, int64 [n].

        Raises:
            UserError: when one cannot be an id; names the feature.
        """
        return torch.from_numpy(ids_of_values(name, values))

    def rows_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows of keys, int64 [n]."""
        positions, is_there = self._positions_of(keys)
        rows = torch.full_like(keys, UNKNOWN_ROW)
        rows[is_there] = self.rows[positions]
        return rows

    def _positions_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions in `self.ids` of the ids found there, int64 [number], and a mask, bool [m]."""
        positions = torch.searchsorted(self.ids, ids)
        is_there = positions < len(self.ids)
        is_there[is_there.clone()] = self.ids[positions[is_there]] == ids[is_there]
        return positions[is_there], is_there

    def raw_values(self) -> list[Any]:
        """Return the raw values with a row, in the order of the ids; ids without a known text are skipped."""
        if self.texts is None:
            return self.ids.tolist()
        known = self.texts.of_ids(self.ids.numpy())
        return [text.decode("utf-8", "surrogatepass") for text in known.texts]

    def originals(self, values: Sequence[Any], keys: torch.Tensor) -> list[Any]:
        """Return raw values with the type of the training, if it has seen them. keys: theirs."""
        both = zip(values, keys.tolist(), strict=True)
        # UNKNOWN_ID is that of a missing value.
        return [value if isinstance(value, str) or key == UNKNOWN_ID else key for value, key in both]

    def missing_in(self, values: Sequence[Any]) -> list[Any]:
        """Return none: some ids with a row may no longer be in the data."""
        return []

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays for an export, without optimizer state and ids before admission."""
        slots: dict[str, np.ndarray] = {
            slot: np.zeros(0 if slot in WAITING else len(self.ids), kind)
            for slot, kind in {**ROWS, **WAITING}.items()
        }
        slots |= {"ids": self.ids.numpy(), "seen": self.seen.numpy()}
        slots |= {"weight": self.matrix[self.rows].numpy()}
        slots |= dict(zip(UNKNOWN, (self.matrix[:1].numpy(), np.zeros(1, np.float32)), strict=True))
        if self.record.has_texts:
            slots |= (self.texts or Texts.none()).arrays()
        return {name_of(name, slot): value for slot, value in slots.items()}

    def after(self, reader: RowReader, name: str, keeps_texts: bool) -> TableChange:
        """Return the change by a delta; nothing is changed yet. keeps_texts: the values are shown.

        Raises:
            UserError: when the delta does not fit, or one id stands for two texts.
        """
        record = reader.record(name)
        self._check(reader.folders[-1], name, record)
        parts = list(reader.rows_of_ids(name, slots=("ids", "seen", "weight")))
        ids, seen, weights = (torch.cat([part[slot] for part in parts]) for slot in ("ids", "seen", "weight"))
        order = ids.argsort()
        ids, seen, weights = ids[order], seen[order], weights[order]
        stays = torch.ones(len(self.ids), dtype=torch.bool)
        # Some of the removed ids may not be here.
        stays[self._positions_of(reader.gone_ids(name))[0]] = False
        table = self._only(stays)
        rows, (positions, is_known) = table.rows_of(ids), table._positions_of(ids)
        is_new = ~is_known
        matrix, rows[is_new] = table._with_room(int(is_new.sum()))
        seen_now = table.seen.clone()
        seen_now[positions] = seen[is_known]
        table = dataclasses.replace(table, matrix=matrix, seen=seen_now, record=record)
        table = table._with_others(ids[is_new], rows[is_new], seen[is_new])._without_expired()
        if record.has_texts and keeps_texts:
            texts = reader.texts(name, self.texts)
            table = dataclasses.replace(table, texts=texts.of_ids(table.ids.numpy()))
        unknown, _ = reader.unknown_row(name)
        return TableChange(
            table, torch.cat([rows, torch.tensor([UNKNOWN_ROW])]), torch.cat([weights, unknown[None]])
        )

    def _check(self, delta: Path, name: str, record: DynamicRecord) -> None:
        """Refuse a delta whose table is not this one."""
        if record.embedding_dim != self.record.embedding_dim:
            raise UserError(
                f"{delta} has {record.embedding_dim} numbers in a row of {name}, and the model "
                f"{self.record.embedding_dim}."
            )
        if record.has_texts != self.record.has_texts and len(self.ids):
            kinds = [("numbers", "texts")[each.has_texts] for each in (record, self.record)]
            raise UserError(f"{delta} has {kinds[0]} for ids of {name}, and the model {kinds[1]}.")

    def _without_expired(self) -> IdTable:
        """Return the table without the ids whose time to live has passed."""
        return self._only(self.seen >= self.record.now - self.record.ttl) if self.record.ttl else self

    def _only(self, which: torch.Tensor) -> IdTable:
        """Return the table with some of the ids. which: bool [n]."""
        # The same tensors if all ids stay: a catalogue compares them to see that the ids have not changed.
        if bool(which.all()):
            return self
        return dataclasses.replace(self, ids=self.ids[which], rows=self.rows[which], seen=self.seen[which])

    def _with_room(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix with at least `number` unused rows, and their positions, int64 [number]."""
        matrix = self.matrix
        if not number:
            return matrix, torch.empty(0, dtype=torch.int64)
        is_free = torch.ones(len(matrix), dtype=torch.bool)
        is_free[UNKNOWN_ROW] = False
        is_free[self.rows] = False
        free = is_free.nonzero().view(-1)
        if len(free) < number:
            size = max(len(matrix) + number - len(free), round(len(matrix) * (1 + SPARE)))
            larger = torch.empty(size, matrix.shape[1])
            larger[: len(matrix)] = matrix
            free, matrix = torch.cat([free, torch.arange(len(matrix), size)]), larger
        return matrix, free[:number]

    def _with_others(self, ids: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> IdTable:
        """Return the table with more ids. ids: new ones, int64 [m], ascending; rows, seen: int64 [m]."""
        if not len(ids):
            return self
        # Merged, not sorted: a delta has few ids, and the table may have many.
        is_new = torch.zeros(len(self.ids) + len(ids), dtype=torch.bool)
        is_new[torch.searchsorted(self.ids, ids) + torch.arange(len(ids))] = True

        def merged(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            both = torch.empty(len(is_new), dtype=torch.int64)
            both[is_new], both[~is_new] = theirs, ours
            return both

        return dataclasses.replace(
            self, ids=merged(self.ids, ids), rows=merged(self.rows, rows), seen=merged(self.seen, seen)
        )


# Rows of a table in memory, and the row of each raw value. A value has a key, which no delta changes, and a
# key has a row. Row UNKNOWN_ROW is that of all other keys.
ServedTable = VocabularyTable | IdTable


@dataclass(frozen=True)
class TableChange:
    """Table after a delta: the weights, float32 [n, D], are still to be written into its rows, int64 [n]."""

    table: ServedTable
    rows: torch.Tensor
    weights: torch.Tensor

    def put(self) -> ServedTable:
        """Write the weights in place, and return the table."""
        self.table.matrix[self.rows] = self.weights
        return self.table


@dataclass(frozen=True)
class ServedRows:
    """Rows of one feature for B ratings, see `LookedUp`."""

    rows: torch.Tensor
    counts: torch.Tensor

    def values(self) -> torch.Tensor:
        """Return the rows, float32 [number of rows, D]."""
        return self.rows

    def lengths(self) -> torch.Tensor:
        """Return the number of rows of each rating, int64 [B]."""
        return self.counts

    def at(self, ratings: torch.Tensor) -> ServedRows:
        """Return the rows of some ratings. ratings: int64 [n]; a rating may be there several times."""
        counts, starts = self.counts[ratings], (self.counts.cumsum(0) - self.counts)[ratings]
        first = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        return ServedRows(self.rows[first + torch.arange(len(first))], counts)


@dataclass(frozen=True)
class FoundKeys:
    """Keys of the rows of one feature for B ratings. A delta does not change them.

    keys: rows of a table with a fixed vocabulary, or ids of a dynamic one, int64 [number of keys]; counts:
    number of keys of each rating, int64 [B].
    """

    keys: torch.Tensor
    counts: torch.Tensor

    def only(self, which: torch.Tensor) -> FoundKeys:
        """Return the keys of some ratings. which: bool [B]."""
        return FoundKeys(self.keys[which.repeat_interleave(self.counts)], self.counts[which])


# Frozen: each delta makes a new one, so `ServedModel.apply` can see whether the model changed meanwhile.
@dataclass(frozen=True)
class Snapshot:
    """Whole model in memory.

    schema: of the data of its training; features: of the model, in the order in which it adds them up;
    tables: by name; maker: makes the head; vocabulary: feature to raw value to row, without dynamic
    features; encodings: feature to the encoding of its numbers as rows or inputs; manifest: of the
    checkpoint; follows: the link that the next delta must have; config: of the training, empty in an export;
    trained: the folder with that config; folder: the folder it was read from; lists: of the index of items
    that was written with it, or with the checkpoint that deltas were applied to; task_name: the --task of the
    training; accepts_changed: see `ServedModel.open`.
    """

    folder: Path
    schema: Schema
    features: tuple[Feature, ...]
    tables: Mapping[str, ServedTable]
    head: Any
    maker: ModelMaker
    vocabulary: dict[str, dict[Any, int]]
    encodings: dict[str, Encoding]
    manifest: Manifest
    follows: ParentLink
    trained: Path
    config: dict[str, Any]
    lists: Any = None
    task_name: str = "rating"
    accepts_changed: bool = False

    @property
    def task(self) -> WorkerTask:
        """Task of the training."""
        return TASKS[self.task_name]

    @property
    def age(self) -> float:
        """Seconds since the checkpoint was written."""
        return (datetime.now(timezone.utc) - datetime.fromisoformat(self.manifest.time)).total_seconds()

    @property
    def metric(self) -> str:
        """Name of the validation metric by which the best checkpoint of its training was chosen."""
        return self.task.main_label

    def predict(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return predictions for B ratings, float32 [B], or [B, L] for a model of L labels."""
        if isinstance(self.head, TwoSided):
            return self.head.predict(rows, batch)
        return predictions_of(self.head, self.task, self.head(rows, batch), self.schema)

    @property
    def dense(self) -> dict[str, torch.Tensor]:
        """The dense part by its names in a checkpoint, which has no tensor of 0 dimensions."""
        return {
            f"dense.{name}": value if value.dim() else value.view(1)
            for name, value in self.head.state_dict().items()
        }

    @property
    def takes_ages(self) -> bool:
        """True if the model takes the age of each item of a history."""
        return getattr(self.head, "takes_ages", False)

    def names_of(self, entities: Collection[str]) -> list[str]:
        """Return the names that a caller may give for entities: features, and a history's labels and ages."""
        names = [feature.name for feature in self.features if feature.entity in entities]
        # A model without a history would silently ignore its ratings, and one without ages would ignore ages.
        if HISTORY in names:
            names += [HISTORY_RATINGS, HISTORY_AGES] if self.takes_ages else [HISTORY_RATINGS]
        return sorted(names)

    def look_up(
        self, values: Mapping[str, Sequence[Any]], entities: Collection[str] = EVERYTHING
    ) -> FeatureRows:
        """Return the rows of raw values; features that are not given are unknown, or empty lists.

        entities: those whose features are looked up, and may be given.
        """
        return self.rows_of(self.find(values, entities))

    def find(
        self, values: Mapping[str, Sequence[Any]], entities: Collection[str] = EVERYTHING
    ) -> dict[str, FoundKeys]:
        """Return the keys of the rows of raw values, see `look_up`. A delta does not change them.

        Raises:
            UserError: see `ServedModel.score`.
        """
        allowed = self.names_of(entities)
        if not isinstance(values, Mapping):
            raise UserError(
                f"A dictionary from features to lists of values is required, got a {type(values).__name__}; "
                f"the model has {', '.join(allowed)}."
            )
        if not values or not values.keys() <= {*allowed}:
            odd = printable(", ".join(sorted(map(str, values.keys() - allowed)))) or "nothing"
            raise UserError(f"There is no feature {odd}; the model has {', '.join(allowed)}.")
        lengths = {name: length_of(name, given, self.schema) for name, given in values.items()}
        size = next(iter(lengths.values()))
        if set(lengths.values()) != {size}:
            raise UserError(f"All features must have the same number of values, got {lengths}.")
        return {
            feature.name: self._find(feature, values.get(feature.name), size)
            for feature in self.features
            if feature.entity in entities and feature.has_table
        }

    def numbers_of(self, values: Mapping[str, Sequence[Any]]) -> torch.Tensor:
        """Return the dense numbers of values that `find` has accepted, float32 [B, numbers]; NaN for none.

        Raises:
            UserError: for a value that is not a number.
        """
        size = len(next(iter(values.values())))
        columns = [
            self._encoded(feature, values.get(feature.name), size).view(size, feature.width)
            for feature in self.features
            if not feature.has_table
        ]
        return torch.cat(columns, dim=1) if columns else torch.empty(size, 0)

    def _encoded(self, feature: Feature, given: Sequence[Any] | None, size: int) -> torch.Tensor:
        """Return a number feature as table rows, int64 [B], or as inputs, float32 [B] or [B, width]."""
        numbers = numbers_of(feature.name, [None] * size if given is None else given, feature.width)
        return torch.from_numpy(self.encodings[feature.name].encode(numbers))

    def _find(self, feature: Feature, given: Sequence[Any] | None, size: int) -> FoundKeys:
        if feature.number:
            rows_of_numbers = self._encoded(feature, given, size).to(torch.int64)
            return FoundKeys(rows_of_numbers, torch.ones(size, dtype=torch.int64))
        if given is None:
            given = [[] if feature.multi else None] * size
        check_types(feature, given, self.kind_of(feature.name), self.schema)
        # As in training: an empty list of values counts as one unknown value.
        empty = [] if feature.name == HISTORY else [None]
        lists = [list(value) or empty if feature.multi else [value] for value in given]
        keys = self.keys_of(feature.name, [value for values in lists for value in values])
        return FoundKeys(keys, torch.tensor([len(values) for values in lists], dtype=torch.int64))

    def kind_of(self, name: str) -> type[Any] | None:
        """Return the type of the raw values of a categorical feature; None if the training has seen none.

        Raises:
            UserError: when the model has no such feature.
        """
        known = self.schema.vocabulary_of(name) if isinstance(name, str) else ""
        if known in self._categorical:
            return self.tables[known].kind
        raise UserError(
            f"There is no feature {printable(name)}; the model has {', '.join(self._categorical)}."
        )

    @property
    def _categorical(self) -> list[str]:
        """Names of the vocabularies, the dynamic ones last."""
        dynamic = {self.schema.vocabulary_of(name) for name, table in self.tables.items() if table.record}
        return [*self.vocabulary, *sorted(dynamic)]

    def keys_of(self, name: str, values: Sequence[Any]) -> torch.Tensor:
        """Return the keys of the rows of raw values, int64 [n], see `FoundKeys`.

        Raises:
            UserError: when one cannot be an id.
        """
        return self.tables[self.schema.vocabulary_of(name)].keys_of(name, values)

    def known(self, name: str, values: Sequence[Any]) -> torch.Tensor:
        """Return a mask of the raw values of a categorical feature that have a trained row, bool [n].

        Raises:
            UserError: when the model has no such feature, or it has values of another type.
        """
        check_values(name, values, self.kind_of(name))
        return self.is_known(name, self.keys_of(name, values))

    def is_known(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        """Return a mask of the keys that have a trained row, bool [n]. keys: int64 [n], see `FoundKeys`."""
        return self.tables[self.schema.vocabulary_of(name)].rows_of(keys) != UNKNOWN_ROW

    def table_of(self, name: str) -> ServedTable:
        """Return the table with the rows of a feature: its own, or the items' table for a history."""
        return self.tables[name if name in self.tables else self.schema.vocabulary_of(name)]

    @property
    def takes_history(self) -> bool:
        """True if the model takes the history of a user."""
        return HISTORY in [feature.name for feature in self.features]

    def rows_of(self, keys: Mapping[str, FoundKeys]) -> FeatureRows:
        """Return the rows of keys, copied out of their tables."""
        rows = {}
        for name, feature_keys in keys.items():
            table = self.table_of(name)
            rows[name] = ServedRows(table.matrix[table.rows_of(feature_keys.keys)], feature_keys.counts)
        return FeatureRows(rows, self.head.row_scale, {each.name for each in self.features if each.multi})

    @property
    def item_table(self) -> ServedTable:
        """Table of the items."""
        return self.tables[self.schema.item]
