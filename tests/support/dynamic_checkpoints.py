"""Checkpoints of a dynamic table on simulated ranks, of an invented training."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsuite.checkpoint.format import DynamicRecord, Manifest, ParentLink
from recsuite.checkpoint.restore import check_tables
from recsuite.checkpoint.shards import (
    RowReader,
    check_shard_files,
    name_of,
    shard_file_name,
    write_shard_file,
)
from recsuite.sharding.dynamic import DynamicSpec, DynamicTable
from recsuite.sharding.table import SINCE_BEGINNING, IdCounters
from recsuite.training.progress import Progress
from tests.support.dynamic_oracle import Shares, tensors

SPEC = DynamicSpec("user", 3, 64, 256, seed=3, admit=2, evict="lfu", ttl=40, half_life=16, grow=0.75)


def arrays_of(rank: DynamicTable, is_delta: bool) -> dict[str, np.ndarray]:
    """The arrays of a rank's shard file."""
    return {name_of("user", slot): value.numpy() for slot, value in rank.export(is_delta).items()}


def record_of(rank: DynamicTable, counts: IdCounters) -> DynamicRecord:
    """The record of the table in a manifest. counts: of all ranks."""
    since_beginning = {name: getattr(counts, name) for name in SINCE_BEGINNING}
    return DynamicRecord(**rank.record(), has_texts=False, live=counts.live, counts=since_beginning)


class Table:
    """A dynamic table on simulated ranks, with what checkpoints need of it."""

    def __init__(self, spec: DynamicSpec, world_size: int) -> None:
        self.shares = Shares(spec, world_size)
        unknown = self.shares.ranks[0].unknown
        assert unknown is not None
        self.unknown = unknown
        for held in self.unknown:
            held.zero_()
        self.ranks = self.shares.ranks

    def write(self, folder: Path, is_delta: bool) -> Manifest:
        """Write a checkpoint of all rows, or a delta of those that changed since the last call."""
        folder.mkdir()
        entries = [
            write_shard_file(folder / shard_file_name(number), arrays_of(rank, is_delta))
            for number, rank in enumerate(self.ranks)
        ]
        counts = [dataclasses.astuple(rank.counts()) for rank in self.ranks]
        record = record_of(self.ranks[0], IdCounters(*(sum(many) for many in zip(*counts, strict=True))))
        link = ParentLink("step-000000000", "digest", 1, 0) if is_delta else None
        files = tuple(entries)
        manifest = Manifest("run", Progress(), {}, files, "", "", {}, link, dynamic={"user": record})
        check_shard_files(folder, manifest)
        self.shares.clear_changes()
        return manifest

    def load(self, folders: list[Path], manifests: list[Manifest]) -> int:
        """Load a checkpoint and its deltas, and return the number of rows without a place."""
        reader = RowReader(folders, manifests)
        check_tables(folders[-1], reader, {"user": self.ranks[0]})
        dropped = [rank.load(reader, 0.5) for rank in self.ranks]
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
        table.shares.find_or_insert(ids * 7919 - 3000, step)
        table.unknown[0].add_(step)
        table.unknown[1].add_(1)
