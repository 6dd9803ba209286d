"""Whole model of one checkpoint in memory. Needs no process group and no TorchRec.

Shapes: B ratings, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from recsuite.checkpoint.format import Manifest, ParentLink
from recsuite.datasets.preparation.vocabulary import Encoding
from recsuite.datasets.schema import ENTITIES, EVENT, HISTORY, LISTS, UNKNOWN_ROW, Feature, Schema
from recsuite.errors import UserError, printable
from recsuite.models.heads import TwoSided
from recsuite.models.rows import FeatureRows, Inputs
from recsuite.models.tasks import TASKS, ModelMaker, Task, predictions_of
from recsuite.serving.dynamic import Directory
from recsuite.serving.index import Lists
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
EVERYTHING = (*ENTITIES, EVENT, *LISTS)


@dataclass(frozen=True)
class Rows:
    """Rows of one feature for B ratings, see `rows.LookedUp`."""

    found: torch.Tensor
    counts: torch.Tensor

    def values(self) -> torch.Tensor:
        """Return the rows, float32 [number of rows, D]."""
        return self.found

    def lengths(self) -> torch.Tensor:
        """Return the number of rows of each rating, int64 [B]."""
        return self.counts

    def at(self, ratings: torch.Tensor) -> Rows:
        """Return the rows of some ratings. ratings: int64 [n]; a rating may be there several times."""
        counts, starts = self.counts[ratings], (self.counts.cumsum(0) - self.counts)[ratings]
        first = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        return Rows(self.found[first + torch.arange(len(first))], counts)


@dataclass(frozen=True)
class Found:
    """Keys of the rows of one feature for B ratings. A delta does not change them.

    keys: rows of a table with a fixed vocabulary, or ids of a dynamic one, int64 [number of keys]; counts:
    number of keys of each rating, int64 [B].
    """

    keys: torch.Tensor
    counts: torch.Tensor

    def only(self, which: torch.Tensor) -> Found:
        """Return the keys of some ratings. which: bool [B]."""
        return Found(self.keys[which.repeat_interleave(self.counts)], self.counts[which])


# Frozen: each delta makes a new one, so `ServedModel.apply` can see whether the model changed meanwhile.
@dataclass(frozen=True)
class Snapshot:
    """Whole model in memory.

    schema: of the data of its training; features: of the model, in the order in which it adds them up;
    tables: name to all rows, float32 [rows, D], in dynamic tables also unused rows; vocabulary: feature to
    raw value to row, without dynamic features; encodings: feature to the encoding of its numbers as rows or
    inputs; manifest: of the checkpoint; follows: the link that the next delta must have; config: of the
    training, empty in an export; trained: the folder with that config; folder: the folder it was read from;
    dynamic: name of a dynamic table to the directory of its ids; lists: of the index of items that was
    written with it, or with the checkpoint that deltas were applied to; task_name: the --task of the
    training; maker: makes the model, if it is not the task's.
    """

    folder: Path
    schema: Schema
    features: tuple[Feature, ...]
    tables: dict[str, torch.Tensor]
    head: Any
    vocabulary: dict[str, dict[Any, int]]
    encodings: dict[str, Encoding]
    manifest: Manifest
    follows: ParentLink
    trained: Path
    config: dict[str, Any]
    dynamic: Mapping[str, Directory] = field(default_factory=dict)
    lists: Lists | None = None
    task_name: str = "rating"
    maker: ModelMaker | None = None

    @property
    def task(self) -> Task:
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
    ) -> dict[str, Found]:
        """Return the keys of the rows of raw values, see `look_up`. A delta does not change them.

        Raises:
            UserError: see `ServedModel.score`.
        """
        allowed = self.names_of(entities)
        if not isinstance(values, Mapping) or not values or not values.keys() <= {*allowed}:
            found = sorted(map(str, values.keys() - allowed)) if isinstance(values, Mapping) else []
            odd = printable(", ".join(found)) or "nothing"
            raise UserError(f"There is no feature {odd}; the model has {', '.join(allowed)}.")
        lengths = {name: length_of(name, given, self.schema) for name, given in values.items()}
        size = next(iter(lengths.values()))
        if set(lengths.values()) != {size}:
            raise UserError(f"The features have {lengths} values; give each as many.")
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
            self._encoded(feature, values.get(feature.name), size)
            for feature in self.features
            if not feature.has_table
        ]
        return torch.stack(columns, dim=1) if columns else torch.empty(size, 0)

    def _encoded(self, feature: Feature, given: Sequence[Any] | None, size: int) -> torch.Tensor:
        """Return a number feature as the model takes it: table rows, int64 [B], or inputs, float32 [B]."""
        numbers = numbers_of(feature.name, [None] * size if given is None else given)
        return torch.from_numpy(self.encodings[feature.name].encode(numbers))

    def _find(self, feature: Feature, given: Sequence[Any] | None, size: int) -> Found:
        if feature.number:
            rows_of_numbers = self._encoded(feature, given, size).to(torch.int64)
            return Found(rows_of_numbers, torch.ones(size, dtype=torch.int64))
        if given is None:
            given = [[] if feature.multi else None] * size
        check_types(feature, given, self.kind_of(feature.name), self.schema)
        # As in training: an empty list of values counts as one unknown value.
        empty = [] if feature.name in LISTS else [None]
        lists = [list(value) or empty if feature.multi else [value] for value in given]
        keys = self.keys_of(feature.name, [value for values in lists for value in values])
        return Found(keys, torch.tensor([len(values) for values in lists], dtype=torch.int64))

    def kind_of(self, name: str) -> type[Any] | None:
        """Return the type of the raw values of a categorical feature; None if the training has seen none.

        Raises:
            UserError: when the model has no such feature.
        """
        known = self.schema.vocabulary_of(name) if isinstance(name, str) else ""
        if known in self.dynamic:
            return self.dynamic[known].kind
        if known not in self.vocabulary:
            names = sorted({*map(self.schema.vocabulary_of, self.dynamic)})
            raise UserError(
                f"There is no feature {printable(name)}; the model has "
                f"{', '.join([*self.vocabulary, *names])}."
            )
        return type_of(self.vocabulary[known])

    def keys_of(self, name: str, values: Sequence[Any]) -> torch.Tensor:
        """Return the keys of the rows of raw values, int64 [n], see `Found`.

        Raises:
            UserError: when one cannot be an id.
        """
        known = self.schema.vocabulary_of(name)
        if known in self.dynamic:
            return torch.from_numpy(ids_of_values(name, values))
        rows = self.vocabulary[known]
        return torch.tensor([rows.get(value, UNKNOWN_ROW) for value in values], dtype=torch.int64)

    def known(self, name: str, values: Sequence[Any]) -> torch.Tensor:
        """Return a mask of the raw values of a categorical feature that have a trained row, bool [n].

        Raises:
            UserError: when the model has no such feature, or it has values of another type.
        """
        check_values(name, values, self.kind_of(name))
        return self.is_known(name, self.keys_of(name, values))

    def is_known(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        """Return a mask of the keys that have a trained row, bool [n]. keys: int64 [n], see `Found`."""
        return self._rows(self.schema.vocabulary_of(name), keys) != UNKNOWN_ROW

    def originals(self, items: Sequence[Any], keys: torch.Tensor) -> list[Any]:
        """Return the raw ids of items with the type of the training; None for ids out of vocabulary.

        keys: of the items, int64 [n].
        """
        name = self.schema.item
        if name not in self.dynamic:
            known = [None, *self.vocabulary[name]]
            return [known[row] for row in keys.tolist()]
        return [
            item if isinstance(item, str) else key for item, key in zip(items, keys.tolist(), strict=True)
        ]

    def table_of(self, name: str) -> str:
        """Return the table with the rows of a feature: its own, or the items' table for a history."""
        return name if name in self.tables else self.schema.vocabulary_of(name)

    @property
    def takes_history(self) -> bool:
        """True if the model takes the item history of a user."""
        return HISTORY in [feature.name for feature in self.features]

    def _rows(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        table = self.table_of(name)
        return self.dynamic[table].find(keys) if table in self.dynamic else keys

    def rows_of(self, found: Mapping[str, Found]) -> FeatureRows:
        """Return the rows of keys, copied out of their tables."""
        rows = {
            name: Rows(self.tables[self.table_of(name)][self._rows(name, each.keys)], each.counts)
            for name, each in found.items()
        }
        return FeatureRows(rows, self.head.row_scale, {each.name for each in self.features if each.multi})

    @property
    def known_items(self) -> object:
        """Object whose identity changes if other items have a row, or if the vocabulary has another order."""
        return self.dynamic[self.schema.item].ids if self.schema.item in self.dynamic else self.vocabulary

    def items(self) -> list[Any]:
        """Return the raw ids of the items with a row, in the order in which equal scores are listed."""
        name = self.schema.item
        return self.dynamic[name].raw_values() if name in self.dynamic else list(self.vocabulary[name])
