"""Dynamic tables from checkpoints: from any ranks and policy to any, of any capacity that fits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from recsuite.checkpoint.dynamic.tables import (
    SINCE_BEGINNING,
    DynamicTable,
    DynamicTables,
    live_of,
)
from recsuite.checkpoint.storage.chain import CheckpointChain
from recsuite.checkpoint.storage.dynamic.files import everybody, opened, replayed, unknown_of, with_texts
from recsuite.checkpoint.storage.dynamic.record import DynamicRecord
from recsuite.checkpoint.storage.dynamic.texts import Texts
from recsuite.checkpoint.storage.manifest import read_manifest
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError
from recsuite.sharding.dynamic import BUCKET_WIDTH, DynamicRows, bucket_of

Files = list[list[safe_open]]


def check_tables(folder: Path, records: Mapping[str, DynamicRecord], tables: DynamicTables) -> None:
    """Refuse a checkpoint whose dynamic tables are not those of a model.

    Raises:
        UserError: names both sides.
    """
    ours = {name: each.rows.spec for name, each in tables.tables.items()}
    if records.keys() != ours.keys():
        raise UserError(
            f"{folder} has the dynamic tables {', '.join(sorted(records)) or 'none'}, and this model has "
            f"{', '.join(sorted(ours)) or 'none'}; give the --ids of its training."
        )
    for name, record in records.items():
        if record.bucket_width != BUCKET_WIDTH:
            raise UserError(
                f"{folder} has buckets of {record.bucket_width} places for {name}, and this program has "
                f"{BUCKET_WIDTH}; load it with the program that wrote it."
            )
        if record.unit != ours[name].unit and (ours[name].ttl or ours[name].half_life):
            raise UserError(
                f"{folder} counts the age of rows of {name} in {record.unit}, and --ttl or --half_life in "
                f"{ours[name].unit}; give them in {record.unit}."
            )


def capacity_for(rows: DynamicRows, capacity: int) -> int:
    """How many places a table gets that had `capacity` when it was written."""
    # What it may have grown to since its first capacity, it keeps: a resume goes on as if nothing had been.
    grown, spec = rows.first_capacity, rows.spec
    while grown < min(capacity, spec.max_capacity):
        grown *= 2
    return capacity if spec.grow and grown == capacity <= spec.max_capacity else rows.first_capacity


def check_room(
    folder: Path, files: Files, records: Mapping[str, DynamicRecord], tables: DynamicTables
) -> None:
    """Refuse a checkpoint with more rows than a table has places, where nobody may be let go for that.

    Raises:
        UserError: names the capacity that fits.
    """
    for name, record in records.items():
        rows = tables.tables[name].rows
        spec, capacity = rows.spec, capacity_for(rows, record.capacity)
        # In as many places as they had, or twice as many, all of them have one.
        if not spec.keeps_all or capacity % record.capacity == 0:
            continue
        ids = torch.cat([part["ids"] for part in replayed(files, name, everybody, ("ids",))])
        if not _fit(ids, capacity):
            enough = record.capacity
            for places in range(capacity, record.capacity, max(BUCKET_WIDTH, capacity // 64 * BUCKET_WIDTH)):
                if _fit(ids, places):
                    enough = places
                    break
            raise UserError(
                f"{folder} has {len(ids):,} rows of {name}, for which the {capacity:,} places of this "
                f"training are too few with --evict {spec.evict}; {enough:,} fit: give --capacity "
                f"{name}={enough}, or --evict lru."
            )


def _fit(ids: torch.Tensor, capacity: int) -> bool:
    """Whether each bucket of so many places has one for each of its ids."""
    num_buckets = capacity // BUCKET_WIDTH
    return not len(ids) or int(bucket_of(ids, num_buckets).bincount().max()) <= BUCKET_WIDTH


def load_tables(
    files: Files, records: Mapping[str, DynamicRecord], tables: DynamicTables, scale: float
) -> dict[str, int]:
    """Put this rank's share of what was checked into tables, in place of what they held; how many rows of
    each found no place. scale: what a row is of what a table holds. Not collective.
    """
    return {name: _load(files, name, record, tables.tables[name], scale) for name, record in records.items()}


def _load(files: Files, name: str, record: DynamicRecord, table: DynamicTable, scale: float) -> int:
    rows = table.rows
    rows.clear()
    # Empty as it is, nothing has to move.
    rows.resized(capacity_for(rows, record.capacity))
    rows.begin_step(record.now, scale)
    if rows.unknown is not None:
        for held, value in zip(rows.unknown, unknown_of(files[-1], name), strict=True):
            held.copy_(value)

    def is_mine(ids: torch.Tensor) -> torch.Tensor:
        return rows.placement.owner_of(ids) == rows.rank

    dropped = sum(rows.put(live_of(slots, rows.device)) for slots in replayed(files, name, is_mine))
    # Of those that had expired when the last delta was written; whether one is still there, where nobody
    # sees it, would depend on the ranks.
    rows.let_expired_go()
    rows.clear_changes()
    for counter in SINCE_BEGINNING:
        setattr(rows, counter, record.counts.get(counter, 0) if rows.rank == 0 else 0)
    return dropped


def add_texts(tables: DynamicTables, columns: Columns, chain: CheckpointChain | None) -> None:
    """Say of tables what more ids stand for: those in the data, and in the checkpoint on which they go on.

    Raises:
        UserError: when two texts have the same id.
    """
    if not tables:
        return
    tables.add_texts(columns)
    folders = () if chain is None else chain.folders
    manifests = [read_manifest(folder) for folder in folders]
    with opened(folders, manifests) as files:
        for name, table in tables.tables.items():
            if any(manifest.dynamic[name].has_texts for manifest in manifests):
                table.texts = with_texts([*itertools.chain(*files)], name, table.texts or Texts.none())
