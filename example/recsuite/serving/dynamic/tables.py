"""Dynamic tables from checkpoints and deltas, in the memory of one process.

A table is a matrix, float32 [rows, D], with the row of the unknown first, and a `Directory` of ids. A delta
writes into rows of the matrix, also into those of ids that left; where they do not suffice, the matrix gets
larger by a share, so that most deltas copy nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from recsuite.checkpoint.storage.dynamic.files import (
    ROWS,
    UNKNOWN,
    WAITING,
    everybody,
    name_of,
    opened,
    replayed,
    unknown_of,
    with_texts,
)
from recsuite.checkpoint.storage.dynamic.record import DynamicRecord
from recsuite.checkpoint.storage.dynamic.texts import Texts
from recsuite.checkpoint.storage.manifest import Manifest
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.errors import UserError
from recsuite.serving.dynamic.directory import Directory

# By which share of its rows a matrix grows that is too small: memory to which nobody wrote costs nothing.
SPARE = 0.25


@dataclass(frozen=True)
class Contents:
    """A dynamic table. matrix: float32 [rows, D]; directory: which id has which of them."""

    matrix: torch.Tensor
    directory: Directory


@dataclass(frozen=True)
class Changed:
    """What a delta makes of a dynamic table.

    contents: the table, into whose rows, int64 [n], the weights, float32 [n, D], are still to be written.
    """

    contents: Contents
    rows: torch.Tensor
    weights: torch.Tensor


def read_tables(folder: Path, manifest: Manifest, named: str) -> dict[str, Contents]:
    """The dynamic tables of a full checkpoint or an export that was checked, by name.

    named: the table whose ids people are shown; of all others the texts are not kept.
    """
    with opened([folder], [manifest]) as (files,):
        return {name: _read(files, name, record, named) for name, record in manifest.dynamic.items()}


def _read(files: Sequence[safe_open], name: str, record: DynamicRecord, named: str) -> Contents:
    parts = list(replayed([files], name, everybody, ("ids", "seen")))
    ids, seen = (torch.cat([part[slot] for part in parts]) for slot in ("ids", "seen"))
    matrix = torch.empty(len(ids) + 1, record.embedding_dim)
    matrix[UNKNOWN_ROW] = unknown_of(files, name)[0]
    # In the order of the files, and one after the other: no second copy of a large table.
    first = UNKNOWN_ROW + 1
    for part in replayed([files], name, everybody, ("weight",)):
        matrix[first : first + len(part["weight"])] = part["weight"]
        first += len(part["weight"])
    order = ids.argsort()
    texts = with_texts(files, name, Texts.none()) if record.has_texts and name == named else None
    directory = Directory(ids[order], order + UNKNOWN_ROW + 1, seen[order], record, texts)
    return Contents(matrix, directory.without_expired())


def arrays_of(name: str, contents: Contents) -> dict[str, np.ndarray]:
    """A table as a shard file has it, without an optimizer and without ids that wait."""
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
    """What a delta makes of dynamic tables, by name, after `check_records`; they are not changed yet.

    named: see `read_tables`.

    Raises:
        UserError: when one id stands for two texts.
    """
    with opened([delta], [manifest]) as (files,):
        return {
            name: _read_change(files, name, manifest.dynamic[name], each, named)
            for name, each in tables.items()
        }


def _read_change(
    files: Sequence[safe_open], name: str, record: DynamicRecord, before: Contents, named: str
) -> Changed:
    parts = list(replayed([files], name, everybody, ("ids", "seen", "weight")))
    ids, seen, weights = (torch.cat([part[slot] for part in parts]) for slot in ("ids", "seen", "weight"))
    order = ids.argsort()
    ids, seen, weights = ids[order], seen[order], weights[order]
    gone = torch.cat([file.get_tensor(name_of(name, "gone")) for file in files])
    directory = _without(before.directory, gone)
    rows, (places, is_known) = directory.find(ids), directory.places_of(ids)
    is_new = ~is_known
    matrix, rows[is_new] = _with_room(before.matrix, directory, int(is_new.sum()))
    seen_now = directory.seen.clone()
    seen_now[places] = seen[is_known]
    after = dataclasses.replace(directory, seen=seen_now, record=record)
    after = after.with_others(ids[is_new], rows[is_new], seen[is_new]).without_expired()
    if record.has_texts and name == named:
        texts = with_texts(files, name, before.directory.texts or Texts.none())
        after = dataclasses.replace(after, texts=texts.of_ids(after.ids.numpy()))
    return Changed(
        Contents(matrix, after),
        torch.cat([rows, torch.tensor([UNKNOWN_ROW])]),
        torch.cat([weights, unknown_of(files, name)[0][None]]),
    )


def _without(directory: Directory, gone: torch.Tensor) -> Directory:
    """Without ids that left; some of them may not have been there."""
    stays = torch.ones(len(directory), dtype=torch.bool)
    stays[directory.places_of(gone)[0]] = False
    return directory.only(stays)


def _with_room(matrix: torch.Tensor, directory: Directory, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix with `number` rows that nobody has, and where they are, int64 [number]."""
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
