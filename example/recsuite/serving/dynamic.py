"""Dynamic tables of a served model: the rows of ids, and their change by a delta."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsuite.checkpoint.format import DynamicRecord, Manifest
from recsuite.checkpoint.shards import ROWS, UNKNOWN, WAITING, RowReader, Texts, name_of
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.errors import UserError


@dataclass(frozen=True)
class Directory:
    """Ids of a dynamic table that have a row, after one checkpoint.

    ids: int64 [n], ascending. rows: positions of their rows in the matrix, int64 [n], never UNKNOWN_ROW,
    which is the trained unknown row. seen: when each was last seen, int64 [n], in the unit of `record`.
    texts: texts of ids, for the table whose ids are shown; None for others.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor
    record: DynamicRecord
    texts: Texts | None = None

    def __len__(self) -> int:
        """Return the number of ids with a row."""
        return len(self.ids)

    @property
    def kind(self) -> type[Any] | None:
        """Type of the raw values; None if no value was seen."""
        return str if self.record.has_texts else int if len(self) else None

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, int64 [m]; UNKNOWN_ROW for an id without a row. ids: int64 [m]."""
        places, is_there = self.places_of(ids)
        found = torch.full_like(ids, UNKNOWN_ROW)
        found[is_there] = self.rows[places]
        return found

    def places_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions in `self.ids` of the ids found there, int64 [number], and a mask, bool [m]."""
        places = torch.searchsorted(self.ids, ids)
        is_there = places < len(self)
        is_there[is_there.clone()] = self.ids[places[is_there]] == ids[is_there]
        return places[is_there], is_there

    def raw_values(self) -> list[Any]:
        """Return the raw values of all ids, in the order of the ids; ids without a known text are skipped."""
        if self.texts is None:
            found: list[Any] = self.ids.tolist()
            return found
        known = self.texts.of_ids(self.ids.numpy())
        return [text.decode("utf-8", "surrogatepass") for text in known.texts]

    def without_expired(self) -> Directory:
        """Return the directory without the ids whose time to live has passed."""
        horizon = self.record.now - self.record.ttl
        return self.only(self.seen >= horizon) if self.record.ttl else self

    def only(self, which: torch.Tensor) -> Directory:
        """Return the directory of some of the ids. which: bool [n]."""
        # The same tensors if all ids stay: a catalogue compares them to see that the ids have not changed.
        if bool(which.all()):
            return self
        return dataclasses.replace(self, ids=self.ids[which], rows=self.rows[which], seen=self.seen[which])

    def free_rows(self, size: int) -> torch.Tensor:
        """Return the rows of a matrix of `size` rows that no id has, int64."""
        is_free = torch.ones(size, dtype=torch.bool)
        is_free[UNKNOWN_ROW] = False
        is_free[self.rows] = False
        return is_free.nonzero().view(-1)

    def with_others(self, ids: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> Directory:
        """Return the directory with more ids. ids: new ones, int64 [m], ascending; rows, seen: int64 [m]."""
        if not len(ids):
            return self
        # Merged, not sorted: a delta has few ids, and the table may have many.
        is_new = torch.zeros(len(self) + len(ids), dtype=torch.bool)
        is_new[torch.searchsorted(self.ids, ids) + torch.arange(len(ids))] = True

        def merged(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            both = torch.empty(len(is_new), dtype=torch.int64)
            both[is_new], both[~is_new] = theirs, ours
            return both

        return dataclasses.replace(
            self, ids=merged(self.ids, ids), rows=merged(self.rows, rows), seen=merged(self.seen, seen)
        )


# Share of its rows by which a matrix that is too small grows: memory that is not written to costs nothing.
SPARE = 0.25


@dataclass(frozen=True)
class Contents:
    """Dynamic table. matrix: float32 [rows, D]; directory: the row of each id."""

    matrix: torch.Tensor
    directory: Directory


@dataclass(frozen=True)
class Changed:
    """Dynamic table after a delta.

    contents: the table; the weights, float32 [n, D], are still to be written into its rows, int64 [n].
    """

    contents: Contents
    rows: torch.Tensor
    weights: torch.Tensor


def read_tables(folder: Path, manifest: Manifest, named: str) -> dict[str, Contents]:
    """Read the dynamic tables of a full checkpoint or an export that was checked, by name.

    named: the table whose ids are shown; the texts of other tables are not kept.
    """
    reader = RowReader([folder], [manifest])
    return {name: _read(reader, name, record, named) for name, record in manifest.dynamic.items()}


def _read(reader: RowReader, name: str, record: DynamicRecord, named: str) -> Contents:
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
    texts = reader.texts(name) if record.has_texts and name == named else None
    directory = Directory(ids[order], order + UNKNOWN_ROW + 1, seen[order], record, texts)
    return Contents(matrix, directory.without_expired())


def arrays_of(name: str, contents: Contents) -> dict[str, np.ndarray]:
    """Return the arrays of a table for a shard file, without optimizer state and ids before admission."""
    directory, number = contents.directory, len(contents.directory)
    slots: dict[str, np.ndarray] = {
        slot: np.zeros(0 if slot in WAITING else number, kind) for slot, kind in {**ROWS, **WAITING}.items()
    }
    slots |= {"ids": directory.ids.numpy(), "seen": directory.seen.numpy()}
    slots |= {"weight": contents.matrix[directory.rows].numpy()}
    slots |= dict(zip(UNKNOWN, (contents.matrix[:1].numpy(), np.zeros(1, np.float32)), strict=True))
    if directory.record.has_texts:
        slots |= (directory.texts or Texts.none()).arrays()
    return {name_of(name, slot): value for slot, value in slots.items()}


def check_records(
    delta: Path, records: Mapping[str, DynamicRecord], directories: Mapping[str, Directory]
) -> None:
    """Refuse a delta whose dynamic tables are not those of a model.

    Raises:
        UserError: names both sides.
    """
    if records.keys() != directories.keys():
        theirs, ours = (", ".join(sorted(names)) or "none" for names in (records, directories))
        raise UserError(f"{delta} has the dynamic tables {theirs}, and the model {ours}.")
    for name, record in records.items():
        ours_of = directories[name].record
        if record.embedding_dim != ours_of.embedding_dim:
            raise UserError(
                f"{delta} has {record.embedding_dim} numbers in a row of {name}, and the model "
                f"{ours_of.embedding_dim}."
            )
        if record.has_texts != ours_of.has_texts and len(directories[name]):
            kinds = [("numbers", "texts")[each.has_texts] for each in (record, ours_of)]
            raise UserError(f"{delta} has {kinds[0]} for ids of {name}, and the model {kinds[1]}.")


def read_changes(
    delta: Path, manifest: Manifest, tables: Mapping[str, Contents], named: str
) -> dict[str, Changed]:
    """Read the changes of a delta to dynamic tables, by name, after `check_records`; no table is changed yet.

    named: see `read_tables`.

    Raises:
        UserError: when one id stands for two texts.
    """
    reader = RowReader([delta], [manifest])
    return {
        name: _read_change(reader, name, manifest.dynamic[name], each, named) for name, each in tables.items()
    }


def _read_change(
    reader: RowReader, name: str, record: DynamicRecord, before: Contents, named: str
) -> Changed:
    parts = list(reader.rows_of_ids(name, slots=("ids", "seen", "weight")))
    ids, seen, weights = (torch.cat([part[slot] for part in parts]) for slot in ("ids", "seen", "weight"))
    order = ids.argsort()
    ids, seen, weights = ids[order], seen[order], weights[order]
    gone = reader.gone_ids(name)
    directory = _without(before.directory, gone)
    rows, (places, is_known) = directory.find(ids), directory.places_of(ids)
    is_new = ~is_known
    matrix, rows[is_new] = _with_room(before.matrix, directory, int(is_new.sum()))
    seen_now = directory.seen.clone()
    seen_now[places] = seen[is_known]
    after = dataclasses.replace(directory, seen=seen_now, record=record)
    after = after.with_others(ids[is_new], rows[is_new], seen[is_new]).without_expired()
    if record.has_texts and name == named:
        texts = reader.texts(name, before.directory.texts)
        after = dataclasses.replace(after, texts=texts.of_ids(after.ids.numpy()))
    return Changed(
        Contents(matrix, after),
        torch.cat([rows, torch.tensor([UNKNOWN_ROW])]),
        torch.cat([weights, reader.unknown_row(name)[0][None]]),
    )


def _without(directory: Directory, gone: torch.Tensor) -> Directory:
    """Return the directory without the ids in `gone`; some of these may not be in it."""
    stays = torch.ones(len(directory), dtype=torch.bool)
    stays[directory.places_of(gone)[0]] = False
    return directory.only(stays)


def _with_room(matrix: torch.Tensor, directory: Directory, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix with at least `number` unused rows, and their positions, int64 [number]."""
    if not number:
        return matrix, torch.empty(0, dtype=torch.int64)
    free = directory.free_rows(len(matrix))
    if len(free) < number:
        size = max(len(matrix) + number - len(free), round(len(matrix) * (1 + SPARE)))
        larger = torch.empty(size, matrix.shape[1])
        larger[: len(matrix)] = matrix
        free = torch.cat([free, torch.arange(len(matrix), size)])
        matrix = larger
    return matrix, free[:number]
