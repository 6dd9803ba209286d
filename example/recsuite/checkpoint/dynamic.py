"""Dynamic tables of a training in its checkpoints: rows by id, and the unknown row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from recsuite.checkpoint.storage.chain import CheckpointChain
from recsuite.checkpoint.storage.dynamic import (
    Texts,
    everybody,
    name_of,
    opened,
    replayed,
    unknown_of,
    with_texts,
)
from recsuite.checkpoint.storage.manifest import DynamicRecord, read_manifest
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError
from recsuite.sharding.dynamic import BUCKET_WIDTH, Counts, DynamicRows, LiveRows, Waiting, bucket_of
from recsuite.sharding.dynamic_ranks import counts_of

# Counters since the beginning of the training.
SINCE_BEGINNING = ("admitted", "evicted", "expired", "unplaced", "unadmitted")


@dataclass
class DynamicTable:
    """This rank's share of a dynamic table.

    texts: of its ids, and maybe of other ids; None if the ids are numbers.
    """

    rows: DynamicRows
    texts: Texts | None = None

    def arrays(self, table: str, is_delta: bool) -> dict[str, np.ndarray]:
        """Return a copy of all rows, or of the changes, as arrays of a shard file."""
        if is_delta:
            changes = self.rows.changes()
            live, gone = changes.rows, {"gone": changes.gone, "waiting.gone": changes.waiting_gone}
        else:
            live, gone = self.rows.live(), {}
        slots = {**_slots_of(live), **gone}
        if self.rows.unknown is not None:
            # The other slots are copies already.
            weight, state = (held.detach().clone() for held in self.rows.unknown)
            slots |= {"unknown.weight": weight[None], "unknown.momentum1": state.view(1)}
        arrays = {slot: value.detach().cpu().numpy() for slot, value in slots.items()}
        if self.texts is not None:
            arrays |= self.texts.of_ids(arrays["ids"]).arrays()
        return {name_of(table, slot): value for slot, value in arrays.items()}

    def record(self, counts: Counts) -> DynamicRecord:
        """Return the record of the table for a manifest. counts: of all ranks."""
        spec = self.rows.spec
        return DynamicRecord(
            embedding_dim=spec.embedding_dim,
            capacity=spec.capacity,
            bucket_width=BUCKET_WIDTH,
            distribution=spec.distribution,
            admit=spec.admit,
            evict=spec.evict,
            ttl=spec.ttl,
            half_life=spec.half_life,
            unit=spec.unit,
            has_texts=self.texts is not None,
            now=self.rows.clock.now,
            live=counts.live,
            counts={name: getattr(counts, name) for name in SINCE_BEGINNING},
        )


def _slots_of(live: LiveRows) -> dict[str, torch.Tensor]:
    return {
        "ids": live.ids,
        "weight": live.weight,
        "momentum1": live.state,
        "seen": live.seen,
        "count": live.count,
        "waiting.ids": live.waiting.ids,
        "waiting.count": live.waiting.count,
        "waiting.seen": live.waiting.seen,
    }


def live_of(slots: Mapping[str, torch.Tensor], device: torch.device) -> LiveRows:
    """Return rows from the slots of a shard file."""
    found = {slot: value.to(device) for slot, value in slots.items()}
    waiting = Waiting(found["waiting.ids"], found["waiting.count"], found["waiting.seen"])
    return LiveRows(found["ids"], found["weight"], found["momentum1"], found["seen"], found["count"], waiting)


@dataclass
class DynamicTables:
    """Dynamic tables of a training, by name; there may be none."""

    tables: dict[str, DynamicTable] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tables)

    @property
    def shares(self) -> dict[str, DynamicRows]:
        """This rank's share of each table, by its name."""
        return {name: each.rows for name, each in self.tables.items()}

    def add_texts(self, columns: Columns) -> None:
        """Add the texts of ids in some data to each table. Not collective.

        Raises:
            UserError: when two texts have the same id.
        """
        for name, each in self.tables.items():
            found = texts_of(columns, name)
            if found is not None:
                each.texts = found if each.texts is None else each.texts.with_others(found, name)

    def arrays(self, is_delta: bool) -> dict[str, np.ndarray]:
        """Return a copy of this rank's rows of all tables, or of their changes, as arrays of a shard file."""
        return {
            name: value
            for table, each in self.tables.items()
            for name, value in each.arrays(table, is_delta).items()
        }

    def clear_changes(self) -> None:
        """Clear the changes of all tables."""
        for each in self.tables.values():
            each.rows.clear_changes()

    def records(self, group: Any) -> dict[str, DynamicRecord]:
        """Return the tables' records for a manifest. Collective if there are any: every rank of the group."""
        for each in self.tables.values():
            # Expired rows are not written, and a training that continues from here could not count them.
            each.rows.let_expired_go()
        counts = counts_of(self.shares, group)
        return {name: each.record(counts[name]) for name, each in self.tables.items()}


def texts_of(columns: Columns, table: str) -> Texts | None:
    """Return the texts of a feature in the data, by their ids; None if its values are numbers."""
    ids = columns.ids_of(table)
    assert ids is not None
    path = Path(columns.folder) / "vocabulary.json"
    values = json.loads(path.read_bytes())[columns.schema.vocabulary_of(table)]
    if not values or not isinstance(values[0], str):
        return None
    # The first id is UNKNOWN_ID.
    return Texts.of(np.asarray(ids)[1:], [value.encode("utf-8", "surrogatepass") for value in values])


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
            f"{', '.join(sorted(ours)) or 'none'}; give the --vocabulary of its training."
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
    """Return the capacity of a table that had `capacity` when it was written."""
    # A table keeps a capacity that it may have grown to, so a resume continues exactly.
    grown, spec = rows.first_capacity, rows.spec
    while grown < min(capacity, spec.max_capacity):
        grown *= 2
    return capacity if spec.grow and grown == capacity <= spec.max_capacity else rows.first_capacity


def check_room(
    folder: Path, files: Files, records: Mapping[str, DynamicRecord], tables: DynamicTables
) -> None:
    """Refuse a checkpoint with more rows than a table has places, if the table may not evict any.

    Raises:
        UserError: names the capacity that fits.
    """
    for name, record in records.items():
        rows = tables.tables[name].rows
        spec, capacity = rows.spec, capacity_for(rows, record.capacity)
        # With the same capacity, or a multiple of it, every row has a place.
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
                f"training are too few with --eviction {spec.evict}; {enough:,} fit: give --capacity "
                f"{name}={enough}, or --eviction lru."
            )


def _fit(ids: torch.Tensor, capacity: int) -> bool:
    """Return True if every id has a place in its bucket."""
    num_buckets = capacity // BUCKET_WIDTH
    return not len(ids) or int(bucket_of(ids, num_buckets).bincount().max()) <= BUCKET_WIDTH


def load_tables(
    files: Files, records: Mapping[str, DynamicRecord], tables: DynamicTables, scale: float
) -> dict[str, int]:
    """Replace the contents of tables with this rank's share of a checkpoint that was checked. Not collective.

    Returns the number of rows of each table that found no place. scale: a row is its weights times this.
    """
    return {name: _load(files, name, record, tables.tables[name], scale) for name, record in records.items()}


def _load(files: Files, name: str, record: DynamicRecord, table: DynamicTable, scale: float) -> int:
    rows = table.rows
    rows.clear()
    # The table is empty, so no row has to move.
    rows.resized(capacity_for(rows, record.capacity))
    rows.begin_step(record.now, scale)
    if rows.unknown is not None:
        for held, value in zip(rows.unknown, unknown_of(files[-1], name), strict=True):
            held.copy_(value)

    def is_mine(ids: torch.Tensor) -> torch.Tensor:
        return rows.placement.owner_of(ids) == rows.rank

    dropped = sum(rows.put(live_of(slots, rows.device)) for slots in replayed(files, name, is_mine))
    # Remove rows that had expired when the last delta was written: otherwise it would depend on the number of
    # ranks whether such a row is still there.
    rows.let_expired_go()
    rows.clear_changes()
    for counter in SINCE_BEGINNING:
        setattr(rows, counter, record.counts.get(counter, 0) if rows.rank == 0 else 0)
    return dropped


def add_texts(tables: DynamicTables, columns: Columns, chain: CheckpointChain | None) -> None:
    """Add the texts of ids in the data, and in the checkpoint that the training continues from.

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
