"""A whole model in memory, of one checkpoint. Needs no process group and no TorchRec.

Shapes: B ratings, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recsuite.checkpoint.storage.manifest import Manifest, ParentLink
from recsuite.datasets.preparation.vocabulary import Encoding
from recsuite.datasets.schema import ENTITIES, EVENT, HISTORY, UNKNOWN_ROW, Feature, Schema
from recsuite.errors import UserError, printable
from recsuite.models.heads import Head
from recsuite.models.tasks.task import task_of_head
from recsuite.serving.request import HISTORY_RATINGS, check_types, length_of, numbers_of

# Whose features a model may have.
EVERYTHING = (*ENTITIES, EVENT, HISTORY)


@dataclass(frozen=True)
class Rows:
    """The rows of one feature for B ratings, see `heads.LookedUp`."""

    found: torch.Tensor
    counts: torch.Tensor

    def values(self) -> torch.Tensor:
        """The rows, float32 [their number, D]."""
        return self.found

    def lengths(self) -> torch.Tensor:
        """How many of them are each rating's, int64 [B]."""
        return self.counts


@dataclass(frozen=True)
class Found:
    """Where the rows of one feature for B ratings are.

    rows: int64 [their number]; counts: how many of them are each rating's, int64 [B].
    """

    rows: torch.Tensor
    counts: torch.Tensor


# Frozen: a delta makes another one, by which `ServedModel.apply` sees whether one came in between.
@dataclass(frozen=True)
class Snapshot:
    """A whole model in memory.

    schema: of the data of its training; features: those that the model has, in the order in which it adds
    them up; tables: name to all rows, float32 [rows, D]; vocabulary: feature to raw value to row; encodings:
    feature to what makes a row or an input of a number; manifest: of the checkpoint; follows: what the next
    delta must say that it builds on; config: that of the training, nothing in an export; trained: the folder
    that says so; folder: where it was read.
    """

    folder: Path
    schema: Schema
    features: tuple[Feature, ...]
    tables: dict[str, torch.Tensor]
    head: Head
    vocabulary: dict[str, dict[Any, int]]
    encodings: dict[str, Encoding]
    manifest: Manifest
    follows: ParentLink
    trained: Path
    config: dict[str, Any]

    @property
    def metric(self) -> str:
        """The name of the validation metric by which the best checkpoint of its training was chosen."""
        return task_of_head(self.head).main_label

    def names_of(self, entities: Collection[str]) -> list[str]:
        """What a caller may give of some entities: their features, and the labels of a history."""
        names = [feature.name for feature in self.features if feature.entity in entities]
        # To a model without a history the ratings of one would make no difference, in silence.
        return sorted([*names, HISTORY_RATINGS] if HISTORY in names else names)

    def look_up(
        self, values: Mapping[str, Sequence[Any]], entities: Collection[str] = EVERYTHING
    ) -> dict[str, Rows]:
        """The rows of raw values; those that are not given count as unknown, and a history as empty.

        entities: whose features are looked up, and may be given.
        """
        return self.rows_of(self.find(values, entities))

    def find(
        self, values: Mapping[str, Sequence[Any]], entities: Collection[str] = EVERYTHING
    ) -> dict[str, Found]:
        """Where the rows of raw values are, see `look_up`. The same after a delta.

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
        """The dense numbers of values that `find` has accepted, float32 [B, numbers]; NaN is none.

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
        """What the model has for a number: table rows, int64, or inputs, float32 [B]."""
        numbers = numbers_of(feature.name, [None] * size if given is None else given)
        return torch.from_numpy(self.encodings[feature.name].encode(numbers))

    def _find(self, feature: Feature, given: Sequence[Any] | None, size: int) -> Found:
        if feature.number:
            rows_of_numbers = self._encoded(feature, given, size).to(torch.int64)
            return Found(rows_of_numbers, torch.ones(size, dtype=torch.int64))
        rows = self.vocabulary[self.schema.vocabulary_of(feature.name)]
        if given is None:
            given = [[] if feature.multi else None] * size
        check_types(feature, given, rows, self.schema)
        # As in training: an item without a value has the value "unknown".
        empty = [] if feature.name == HISTORY else [None]
        lists = [list(value) or empty if feature.multi else [value] for value in given]
        found = torch.tensor([rows.get(value, UNKNOWN_ROW) for values in lists for value in values])
        counts = torch.tensor([len(values) for values in lists], dtype=torch.int64)
        # Of an empty list torch makes a tensor of floats.
        return Found(found.to(torch.int64), counts)

    def rows_of(self, found: Mapping[str, Found]) -> dict[str, Rows]:
        """The rows that were found, copied out of their tables."""
        return {name: Rows(self.tables[name][each.rows], each.counts) for name, each in found.items()}
