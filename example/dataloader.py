"""Batches as a pure function of position, and the pool of workers that makes them.

An item of the data set is a whole batch, asked for by (split, epoch, step): nothing is drawn, nothing is
remembered, so any number of workers of any start method gives the same batches, bit for bit. A worker reads
memory-mapped columns and returns plain tensors. It never sees a device, a process group, TorchRec or the
model: what this module imports, a spawned worker imports.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from columns import Columns
from config import Config
from features import UNKNOWN_ROW, Table
from machine import die_with_parent

SHUFFLE_ROUNDS = 6


class Request(NamedTuple):
    """Which batch: step `step` of pass `epoch` over the split "train" or "test"."""

    split: str
    epoch: int
    step: int


class Batch(NamedTuple):
    """One rank's part of a global batch, B rows, as plain tensors.

    `values` (int64) and `lengths` (int32 [features * B]) are those of a KeyedJaggedTensor whose keys are the
    data set's features in order. `ratings` is float32 [B]. `weights` is float32 [B]: 0 for the rows that pad
    the last batch, and for real rows global batch size / real rows in the global batch, so that the mean
    over ranks of the weighted mean over B is the mean over real rows.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    ratings: torch.Tensor
    weights: torch.Tensor


class RatingBatches(Dataset[Batch]):
    """The batches of one rank. Pickles to paths and numbers; columns are mapped where they are first read."""

    def __init__(self, columns: Columns, config: Config, rank: int, world_size: int) -> None:
        self.folder = columns.folder
        self.tables = columns.tables
        self.ranges = {split: columns.range_of(split) for split in ("train", "test")}
        self.batch_size = config.batch_size
        self.seed = config.seed
        self.rank = rank
        self.world_size = world_size
        self._columns: dict[str, np.ndarray] = {}

    def num_steps(self, split: str) -> int:
        """Batches in one pass over a split: the same number on every rank."""
        return len(self.step_sizes(split))

    def step_sizes(self, split: str) -> list[int]:
        """Ratings in each global batch of a pass: all are alike but the last."""
        full = self.batch_size * self.world_size
        number = len(self.ranges[split])
        return [min(full, number - first) for first in range(0, number, full)]

    def __getitem__(self, request: Request) -> Batch:
        """The batch of a request. Training ratings come in an order shuffled anew each epoch, each once."""
        positions = self._positions(request)
        user, movie = self._map("user")[positions], self._map("movie")[positions]
        lengths, values = [], []
        for table in self.tables:
            entities = user if table.feature.entity == "user" else movie
            rows, counts = self._rows(table, entities)
            values.append(rows)
            lengths.append(counts)
        ratings = np.zeros(self.batch_size, np.float32)
        ratings[: len(positions)] = self._map("rating")[positions]
        return Batch(
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(np.concatenate(lengths)),
            torch.from_numpy(ratings),
            torch.from_numpy(self._weights(request, len(positions))),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": {}}

    def _positions(self, request: Request) -> np.ndarray:
        """Positions in the rating columns, int64 [at most batch_size]: this rank's slice of the step."""
        split = self.ranges[request.split]
        first = (request.step * self.world_size + self.rank) * self.batch_size
        positions = np.arange(first, min(first + self.batch_size, len(split)), dtype=np.int64)
        if request.split == "train":
            positions = shuffled(positions, len(split), self.seed, request.epoch)
        return positions + split.start

    def _weights(self, request: Request, num_real: int) -> np.ndarray:
        weights = np.zeros(self.batch_size, np.float32)
        weights[:num_real] = self.batch_size * self.world_size / self.step_sizes(request.split)[request.step]
        return weights

    def _rows(self, table: Table, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Table rows, int64, and how many of them each of the batch's ratings has, int32 [batch_size].

        Padding has the unknown row, once: with weight 0 it gets no gradient.
        """
        num_padding = self.batch_size - len(entities)
        lengths = np.ones(self.batch_size, np.int32)
        if table.feature.multi:
            offsets = self._map(f"{table.name}_offsets")
            starts, counts = offsets[entities], offsets[entities + 1] - offsets[entities]
            lengths[: len(entities)] = counts
            # The n-th value of a rating lies n places after its start.
            ends = np.cumsum(counts)
            places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)
            rows = self._map(f"{table.name}_values")[places]
        else:
            rows = self._map(f"{table.feature.entity}_features")[entities, self._place(table)]
        padding = np.full(num_padding, UNKNOWN_ROW, np.int64)
        return np.concatenate([rows, padding]), lengths

    def _place(self, table: Table) -> int:
        """The column of a single-valued feature among those of its entity."""
        single = [
            other.name
            for other in self.tables
            if other.feature.entity == table.feature.entity and not other.feature.multi
        ]
        return single.index(table.name)

    def _map(self, name: str) -> np.ndarray:
        if name not in self._columns:
            self._columns[name] = np.load(Path(self.folder) / f"{name}.npy", mmap_mode="r")
        return self._columns[name]


class EpochSampler(Sampler[Request]):
    """The requests of one pass, in order. Lives in the main process, which chooses the pass."""

    def __init__(self, dataset: RatingBatches) -> None:
        self.dataset = dataset
        self.split = "train"
        self.epoch = 0

    def __iter__(self) -> Iterator[Request]:
        for step in range(len(self)):
            yield Request(self.split, self.epoch, step)

    def __len__(self) -> int:
        return self.dataset.num_steps(self.split)


def shuffled(positions: np.ndarray, number: int, seed: int, epoch: int) -> np.ndarray:
    """Where a shuffle of range(number) by (seed, epoch) puts the positions, int64 [n] in and out.

    A Feistel network over pairs (position // side, position % side) permutes a square of at least `number`
    places; whoever lands outside goes through again, which permutes the rest ("cycle walking": Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So any process can compute any part of the
    order, in no memory, and nothing needs `set_epoch`.
    """
    side = int(np.ceil(np.sqrt(number)))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(SHUFFLE_ROUNDS, np.uint64)
    result = positions.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = np.divmod(result[outside], np.uint64(side))
        for key in keys:
            left, right = right, (left + _mix(right, key)) % np.uint64(side)
        result[outside] = left * np.uint64(side) + right
        outside = result >= number
    return result.astype(np.int64)


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash of uint64 values, the finaliser of MurmurHash3 around a key; small enough to add to another."""
    mixed = (values ^ key) * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return mixed >> np.uint64(33)


def build_dataloader(dataset: RatingBatches, sampler: EpochSampler, config: Config) -> DataLoader[Batch]:
    """A loader of whole batches: in this process for --num_workers 0, else from a spawned, persistent pool.

    Spawned, because a forked worker inherits the CUDA context and the locks of every thread. Persistent,
    because a worker costs a second of imports, and one pool serves training and evaluation: the sampler's
    requests say which. Batches come out pinned where there is a CUDA device; the copy to the device is the
    main process's, after `init_runtime` has set it. Not collective.
    """
    pool: dict[str, Any] = {}
    if config.num_workers > 0:
        pool = {
            "num_workers": config.num_workers,
            "multiprocessing_context": "spawn",
            "persistent_workers": True,
            "worker_init_fn": _start_worker,
            "timeout": config.timeout,
        }
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        collate_fn=_as_it_is,
        pin_memory=torch.cuda.is_available(),
        # Its own, so that making an iterator draws nothing from the generator that initial weights use.
        generator=torch.Generator(),
        **pool,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(worker_id: int) -> None:
    """Tie this worker's life to its trainer's."""
    die_with_parent()
    trainer = multiprocessing.parent_process()
    # It may have died before, while this worker was still importing.
    if trainer is None or not trainer.is_alive():
        os._exit(1)
