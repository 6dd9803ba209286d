"""Checkpoints of a dynamic table on simulated ranks, of an invented training."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch

from recsuite.checkpoint.dynamic import DynamicTable, DynamicTables, check_room, load_tables
from recsuite.checkpoint.storage.dynamic import check_dynamic, opened
from recsuite.checkpoint.storage.manifest import Manifest, ParentLink, Progress
from recsuite.checkpoint.storage.shards import _pieces, shard_file_name, write_shard_file
from recsuite.sharding.dynamic import Counts, DynamicSpec
from tests.support.dynamic_oracle import Shares, tensors

SPEC = DynamicSpec("user", 3, 64, 256, seed=3, admit=2, evict="lfu", ttl=40, half_life=16, grow=0.75)


class Table:
    """A dynamic table on simulated ranks, with what checkpoints need of it."""

    def __init__(self, spec: DynamicSpec, world_size: int) -> None:
        self.shares = Shares(spec, world_size)
        unknown = self.shares.ranks[0].unknown
        assert unknown is not None
        self.unknown = unknown
        for held in self.unknown:
            held.zero_()
        self.ranks = [DynamicTables({"user": DynamicTable(rank)}) for rank in self.shares.ranks]

    def write(self, folder: Path, is_delta: bool) -> Manifest:
        """Write a checkpoint of all rows, or a delta of those that changed since the last call."""
        folder.mkdir()
        entries = [
            write_shard_file(folder / shard_file_name(number), rank.arrays(is_delta))
            for number, rank in enumerate(self.ranks)
        ]
        counts = [rank.rows.counts() for rank in (one.tables["user"] for one in self.ranks)]
        total = Counts(*(sum(many) for many in zip(*map(dataclasses.astuple, counts), strict=True)))
        record = self.ranks[0].tables["user"].record(total)
        link = ParentLink("step-000000000", "digest", 1, 0) if is_delta else None
        files = tuple(entries)
        manifest = Manifest("run", Progress(), {}, files, "", "", {}, link, dynamic={"user": record})
        pieces = list(_pieces(folder, manifest))
        assert check_dynamic(folder, manifest, pieces) == []
        self.shares.clear_changes()
        return manifest

    def load(self, folders: list[Path], manifests: list[Manifest]) -> int:
        """Load a checkpoint and its deltas, and return the number of rows without a place."""
        with opened(folders, manifests) as files:
            check_room(folders[-1], files, manifests[-1].dynamic, self.ranks[0])
            dropped = [load_tables(files, manifests[-1].dynamic, rank, 0.5)["user"] for rank in self.ranks]
        self.shares.placement = self.shares.ranks[0].placement
        return sum(dropped)

    def state(self) -> list[Any]:
        """All that it knows."""
        live = [value.tolist() for value in tensors(self.shares.live())]
        spec = self.shares.ranks[0].spec
        counts = [dataclasses.astuple(rank.counts()) for rank in self.shares.ranks]
        total = [sum(many) for many in zip(*counts, strict=True)]
        return [*live, spec.capacity, total, *(value.tolist() for value in self.unknown)]


def advance(table: Table, chance: random.Random, first: int, last: int) -> None:
    """Steps of a training whose ids come and go."""
    for step in range(first, last):
        table.shares.begin_step(step, 0.5)
        ids = torch.tensor(sorted(chance.sample(range(step // 2, step // 2 + 120), 25)), dtype=torch.int64)
        table.shares.take_in(ids * 7919 - 3000, step)
        table.unknown[0].add_(step)
        table.unknown[1].add_(1)
