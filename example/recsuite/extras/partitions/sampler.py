"""Batches of a rank from its own partitions. A worker imports this module, so it imports no torch.

A step of all ranks has about --batch_size events. A rank with the share s of the training events gives the
share s of them, from a shuffle of its own events, so all ranks come to their end at about the same step:

    rank 0, 50 events   10 10 10 10 10        a batch is a function of the seed, the epoch, the step,
    rank 1, 23 events    5  5  5  5  3        the rank, and the number of events of each rank
    step of all ranks   15 15 15 15 13

A rank with fewer steps has empty batches at the end. A batch has as many rows on each rank; padding has the
weight 0, and an event of a step the same weight on every rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.batches import SPLITS, EventBatches, Request
from recsuite.datasets.batching import EventOrder, PassPart, ReadPositions, bytes_of_bits
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import USER
from recsuite.errors import counted
from recsuite.runtime.console import say

TRAIN, CATALOGUE = "train", "catalogue"
# Column with a number for each user, the same on any rank.
USER_NUMBERS = "user_numbers"


@dataclass(frozen=True)
class PartColumns(Columns):
    """Columns of the events of one rank. Its sizes are those of the events of all ranks.

    sizes: numbers of training, validation and test events of each rank; rank: of the events here.
    """

    sizes: tuple[tuple[int, int, int], ...] = ()
    rank: int = 0

    @property
    def is_part(self) -> bool:
        """True if other ranks have other events."""
        return len(self.sizes) > 1

    def range_of(self, split: str) -> range:
        """Positions of this rank's events of a split in its columns; "catalogue": all items."""
        if split == CATALOGUE:
            return range(self.num_items)
        place, own = SPLITS.index(split), self.sizes[self.rank]
        return range(sum(own[:place]), sum(own[: place + 1]))

    def digest_of_test(self) -> str:
        """Return a digest of all events, the same on any number of ranks."""
        return self.digest

    def joined(self, values: np.ndarray) -> np.ndarray:
        """Return values of the events of all ranks, rank after rank. Collective: every rank."""
        if not self.is_part:
            return values
        from recsuite.extras.partitions.exchange import joined

        return joined(values)

    def user_numbers(self, split: str) -> np.ndarray:
        """Return a number for the user of each event of a split, int [n]. Collective: every rank."""
        if not self.is_part:
            return super().user_numbers(split)
        if self.num_users == 1:
            return np.arange(sum(sizes[SPLITS.index(split)] for sizes in self.sizes))
        return self.joined(self.column(USER_NUMBERS)[self.events(split)[USER]])

    def continued(self, progress: Any, has_same_steps: bool, epochs: int) -> Any:
        """Return the progress of a checkpoint, or the next epoch if its steps are others than those here.

        The last epoch is repeated: after it no model would be validated.
        """
        if progress.samples == 0:
            return progress
        of_events = f"{progress.samples:,} of {counted(self.num_train, self.schema.label)}"
        if has_same_steps:
            if self.rank == 0:
                say(f"the training continues in the middle of epoch {progress.epoch + 1}, after {of_events}")
            return progress
        epoch = min(progress.epoch + 1, epochs - 1)
        if self.rank == 0:
            how = "continues with" if epoch > progress.epoch else "repeats"
            say(
                f"the training {how} epoch {epoch + 1}: {of_events} of epoch {progress.epoch + 1} were used "
                "by another number of processes or --batch_size, whose steps have other events of the "
                "partitions"
            )
        return dataclasses.replace(progress, epoch=epoch, samples=0)


def seed_of(seed: int, rank: int) -> int:
    """Return the seed of a rank: the orders of two ranks with as many events are not related."""
    return seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])


class Batches(EventBatches):
    """Batches of one rank from its own events, see the module."""

    def __init__(self, columns: PartColumns, config: Config, rank: int, world_size: int) -> None:
        super().__init__(columns, config, rank, world_size)
        sizes = np.array(columns.sizes, np.int64)
        # Numbers of events of each rank in a split, and of those in a step, int64 [ranks] both.
        self._counts = {split: sizes[:, place] for place, split in enumerate(SPLITS[:3])}
        taken = -(-self.batch_size * sizes[:, 0] // columns.num_train)
        self.local_batch_size = most = int(taken.max())
        self._taken = {split: np.full_like(taken, most) for split in SPLITS} | {TRAIN: taken}
        self.part = self._of_groups = range(int(taken[rank]))
        seed, longest = seed_of(self.seed, rank), self._order.longest
        self._order = EventOrder(len(self.part), self.part, seed, longest)
        whole = EventOrder(most, range(most), seed, longest)
        of_items = EventOrder(most * world_size, range(most * rank, most * (rank + 1)), seed, longest)
        self._orders = dict.fromkeys(SPLITS, whole) | {TRAIN: self._order, CATALOGUE: of_items}

    @property
    def has_groups_of_ranks(self) -> bool:
        """False: a rank does not know the histories of the others, so each group is on one rank."""
        return False

    @property
    def _bytes_of_group(self) -> int:
        return bytes_of_bits(self.local_batch_size, self.model.in_batch_negatives)

    def num_events(self, split: str, window: tuple[int, int] | None = None) -> int:
        """Number of events of a pass, of all ranks."""
        return self.num_items if split == CATALOGUE else int(self._counts[split].sum())

    def _before(self, split: str, step: int) -> int:
        """Return the number of events of all ranks before a step of a pass."""
        if split == CATALOGUE:
            return min(step * self.local_batch_size * self.world_size, self.num_items)
        return int(np.minimum(step * self._taken[split], self._counts[split]).sum())

    def _step_at(self, split: str, first: int) -> int:
        """Return the step of a pass before which it has `first` events."""
        low, high = 0, self.num_steps(split)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._before(split, middle) < first else (low, middle)
        assert self._before(split, low) == first
        return low

    def num_steps(self, split: str, first: int = 0, window: tuple[int, int] | None = None) -> int:
        """Number of batches in a pass over a split from place `first` on, equal on every rank."""
        if first:
            return self.num_steps(split) - self._step_at(split, first)
        if split == CATALOGUE:
            return -(-self.num_items // (self.local_batch_size * self.world_size))
        return int((-(-self._counts[split] // self._taken[split])).max())

    def step_sizes(self, split: str, first: int = 0, window: tuple[int, int] | None = None) -> list[int]:
        """Number of events of all ranks in each step of a pass."""
        steps = np.arange(self._step_at(split, first) if first else 0, self.num_steps(split))
        if split == CATALOGUE:
            return [self._before(split, step + 1) - self._before(split, step) for step in steps.tolist()]
        sizes = np.zeros(len(steps), np.int64)
        for count, taken in zip(self._counts[split], self._taken[split], strict=True):
            sizes += np.clip(count - steps * taken, 0, taken)
        return [*map(int, sizes)]

    def local_sizes(self, split: str) -> np.ndarray:
        """Number of this rank's events in each batch of a pass over a split, int64 [steps]."""
        count, taken = self._counts[split][self.rank], self._taken[split][self.rank]
        return np.clip(count - np.arange(self.num_steps(split)) * taken, 0, taken)

    def numbers_of(self, split: str) -> np.ndarray:
        """Numbers of this rank's events in its own pass over a split that is not shuffled, int64 [n]."""
        return np.arange(self._counts[split][self.rank])

    def in_order(self, everyones: Any, split: str, window: tuple[int, int] | None = None) -> Any:
        """Return results of the batches of all ranks, rank after rank, as `Columns.joined` has the events.

        everyones: torch.Tensor [steps, ranks, B, ...].
        """
        steps, ranks, rows = everyones.shape[:3]
        places = [rank * steps * rows + np.arange(count) for rank, count in enumerate(self._counts[split])]
        assert ranks == len(places)
        return everyones.transpose(0, 1).flatten(0, 2)[np.concatenate(places)]

    def _step_of(self, request: Request) -> int:
        """Return the number of a step, counted from the begin of its pass."""
        return request.step + (self._step_at(request.split, request.first) if request.first else 0)

    def _weight_of(self, request: Request) -> float:
        step = self._step_of(request)
        number = self._before(request.split, step + 1) - self._before(request.split, step)
        return self.local_batch_size * self.world_size / number

    def _begin_of(self, request: Request) -> int:
        return self._before(request.split, self._step_of(request))

    def _place_of(self, request: Request) -> int:
        counts, taken = self._counts[request.split], self._taken[request.split]
        return int(counts[: self.rank].sum() + self._step_of(request) * taken[self.rank])

    def _positions_of_step(self, request: Request) -> tuple[np.ndarray, ReadPositions | None]:
        return self._positions_of_groups(request)

    def _positions_of_groups(self, request: Request) -> tuple[np.ndarray, ReadPositions | None]:
        order, step = self._orders[request.split], self._step_of(request)
        stretch = PassPart(request.split, request.epoch, 0, self.ranges[request.split])
        return order.of_step(stretch, step, self.features.column)
