"""The dynamic tables of a training, as its checkpoints see them: rows by id, and the row of the unknown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsuite.checkpoint.storage.dynamic.files import name_of
from recsuite.checkpoint.storage.dynamic.record import DynamicRecord
from recsuite.checkpoint.storage.dynamic.texts import Texts
from recsuite.datasets.columns import Columns
from recsuite.sharding.dynamic import BUCKET_WIDTH, Counts, DynamicRows, LiveRows, Waiting
from recsuite.sharding.dynamic_ranks import counts_of

# What is counted from the beginning of the training, and not at a moment.
SINCE_BEGINNING = ("admitted", "evicted", "expired", "unplaced", "unadmitted")


@dataclass
class DynamicTable:
    """This rank's share of a dynamic table.

    texts: what its ids stand for, None where they are numbers; it may know others too.
    """

    rows: DynamicRows
    texts: Texts | None = None

    def arrays(self, table: str, is_delta: bool) -> dict[str, np.ndarray]:
        """A copy of what there is, or of what changed, as a shard file has it."""
        if is_delta:
            changes = self.rows.changes()
            live, gone = changes.rows, {"gone": changes.gone, "waiting.gone": changes.waiting_gone}
        else:
            live, gone = self.rows.live(), {}
        slots = {**_slots_of(live), **gone}
        if self.rows.unknown is not None:
            # All else was copied from where it lies already.
            weight, state = (held.detach().clone() for held in self.rows.unknown)
            slots |= {"unknown.weight": weight[None], "unknown.momentum1": state.view(1)}
        arrays = {slot: value.detach().cpu().numpy() for slot, value in slots.items()}
        if self.texts is not None:
            arrays |= self.texts.of_ids(arrays["ids"]).arrays()
        return {name_of(table, slot): value for slot, value in arrays.items()}

    def record(self, counts: Counts) -> DynamicRecord:
        """What a manifest says of it. counts: of all ranks."""
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
    """Rows as a shard file has them."""
    found = {slot: value.to(device) for slot, value in slots.items()}
    waiting = Waiting(found["waiting.ids"], found["waiting.count"], found["waiting.seen"])
    return LiveRows(found["ids"], found["weight"], found["momentum1"], found["seen"], found["count"], waiting)


@dataclass
class DynamicTables:
    """All dynamic tables of a training, by name; there may be none."""

    tables: dict[str, DynamicTable] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tables)

    @property
    def shares(self) -> dict[str, DynamicRows]:
        """This rank's share of each table, by its name."""
        return {name: each.rows for name, each in self.tables.items()}

    def add_texts(self, columns: Columns) -> None:
        """Learn of each table what its ids stand for in some data, beside what is known. Not collective.

        Raises:
            UserError: when two texts have the same id.
        """
        for name, each in self.tables.items():
            found = texts_of(columns, name)
            if found is not None:
                each.texts = found if each.texts is None else each.texts.with_others(found, name)

    def arrays(self, is_delta: bool) -> dict[str, np.ndarray]:
        """A copy of this rank's share of all there is, or of what changed, as a shard file has it."""
        return {
            name: value
            for table, each in self.tables.items()
            for name, value in each.arrays(table, is_delta).items()
        }

    def clear_changes(self) -> None:
        """Forget what changed."""
        for each in self.tables.values():
            each.rows.clear_changes()

    def records(self, group: Any) -> dict[str, DynamicRecord]:
        """What a manifest says of them. Collective where there are any: every rank of the group."""
        for each in self.tables.values():
            # They are not written, and a training that goes on from here could not count them.
            each.rows.let_expired_go()
        counts = counts_of(self.shares, group)
        return {name: each.record(counts[name]) for name, each in self.tables.items()}


def texts_of(columns: Columns, table: str) -> Texts | None:
    """The texts of a feature in the data, by their ids; None where it has numbers."""
    ids = columns.ids_of(table)
    assert ids is not None
    path = Path(columns.folder) / "vocabulary.json"
    values = json.loads(path.read_bytes())[columns.schema.vocabulary_of(table)]
    if not values or not isinstance(values[0], str):
        return None
    # The first is that of the unknown.
    return Texts.of(np.asarray(ids)[1:], [value.encode("utf-8", "surrogatepass") for value in values])
