"""In which order the events of a pass come, of which a step takes one stretch: a slice for each rank.

Training events come shuffled anew in each pass. Where a model reads the order of what a user had, whole
pieces of it are shuffled: each user's events are cut into pieces of at most as many as are read, elsewhere in
each pass, so that an event is read with a short past now and with a long one then. A batch then holds runs,
each of one user, and needs no padding.

Read from memory-mapped columns; a worker imports this module: no torch, no pandas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from recsuite.datasets.batching.lists import OWNERS, Turns, mixed
from recsuite.datasets.batching.places import places_of
from recsuite.datasets.batching.shuffle import shuffled
from recsuite.datasets.schema import HISTORY

# Small batches are shuffled together: numpy's overhead for each would be more than the work.
POSITIONS_AT_ONCE = 32_768


class Stretch(NamedTuple):
    """A stretch of a pass over events: which pass, its epoch, the steps counted from an event, and the range
    of all positions of the pass.
    """

    split: str
    epoch: int
    first: int
    positions: range


class Pieces(NamedTuple):
    """The pieces of one pass in their order: where in histories each begins, and where in the pass it ends,
    int64 [P] both.
    """

    begins: np.ndarray
    ends: np.ndarray

    def turns(self, numbers: np.ndarray) -> Turns:
        """Where the events that have these numbers in the pass stand, int64 [n]."""
        pieces = np.searchsorted(self.ends, numbers, side="right")
        begins = self.begins.take(pieces)
        before = np.concatenate([[0], self.ends]).take(pieces)
        return Turns(begins + (numbers - before), begins, in_runs=True)


def pieces_of(offsets: np.ndarray, longest: int, seed: int, epoch: int) -> Pieces:
    """The pieces of a pass. offsets: where in histories the events of each user begin, int64 [users + 1]."""
    counts = np.diff(offsets)
    # Whoever has few is one piece. Of all others the first piece has some length, the others are full, and
    # the last one is what is left.
    first = mixed(np.arange(len(counts)), (seed, epoch)) % longest + 1
    first = np.where(counts <= longest, counts, first)
    numbers = np.where(counts > 0, 1 - (first - counts) // longest, 0)
    place = places_of(np.zeros_like(numbers), numbers)
    user = np.repeat(np.arange(len(counts)), numbers)
    begins = offsets[user] + np.where(place > 0, first[user] + (place - 1) * longest, 0)
    lengths = np.append(begins[1:], offsets[-1]) - begins
    order = shuffled(np.arange(len(begins)), len(begins), seed, epoch)
    return Pieces(begins[order], lengths[order].cumsum())


class EventOrder:
    """The positions of one rank's batches. Pickles to numbers: what it remembers stays.

    longest: how many of the events before it an event reads at most, where their order counts; else 0.
    """

    def __init__(self, batch_size: int, rank: int, world_size: int, seed: int, longest: int) -> None:
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.longest = longest
        # Of the last steps asked for: which ones, their positions, and where they stand in histories.
        self._block: tuple[Any, np.ndarray, Turns | None] | None = None
        self._pieces: tuple[int, Pieces] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # They would make what is sent to a worker large.
        return {**self.__dict__, "_block": None, "_pieces": None}

    def of_step(
        self, stretch: Stretch, step: int, read: Callable[[str], np.ndarray]
    ) -> tuple[np.ndarray, Turns | None]:
        """Positions in the columns of events, int64 [at most batch_size], this rank's slice of the step; and
        where they stand, of training events whose order counts. read: a column by its name.
        """
        num_steps = max(1, POSITIONS_AT_ONCE // self.batch_size)
        block, place = divmod(step, num_steps)
        wanted = (stretch, block)
        # Steps are asked for in their order, so this block has the positions of the next ones too.
        if self._block is None or self._block[0] != wanted:
            steps = range(num_steps * block, num_steps * (block + 1))
            self._block = wanted, *self._of_steps(stretch, steps, read)
        part = slice(place * self.batch_size, (place + 1) * self.batch_size)
        _, positions, turns = self._block
        return positions[part], turns.part(part) if turns else None

    def _of_steps(
        self, stretch: Stretch, steps: range, read: Callable[[str], np.ndarray]
    ) -> tuple[np.ndarray, Turns | None]:
        number = len(stretch.positions)
        # A step is one stretch of the pass, cut into a slice for each rank: what it holds depends on the size
        # of the global batch alone, not on the number of ranks.
        begins = (np.arange(steps.start, steps.stop) * self.world_size + self.rank) * self.batch_size
        numbers = (stretch.first + begins[:, None] + np.arange(self.batch_size)).reshape(-1)
        # They rise, so what lies beyond the end of the split is behind one place.
        numbers = numbers[: np.searchsorted(numbers, number)]
        if stretch.split == "train" and self.longest:
            turns = self._pieces_of(stretch.epoch, read).turns(numbers)
            return read(f"{HISTORY}_event").take(turns.places).astype(np.int64), turns
        if stretch.split == "train":
            # Training alone: predictions are held against labels in the order of the disk.
            numbers = shuffled(numbers, number, self.seed, stretch.epoch)
        return numbers + stretch.positions.start, None

    def _pieces_of(self, epoch: int, read: Callable[[str], np.ndarray]) -> Pieces:
        if self._pieces is None or self._pieces[0] != epoch:
            self._pieces = epoch, pieces_of(read(f"{HISTORY}_offsets"), self.longest, self.seed, epoch)
        return self._pieces[1]


def turns_of(
    events: np.ndarray, positions: np.ndarray, longest: int, prefix: str, read: Callable[[str], np.ndarray]
) -> Turns:
    """Where events that are not trained on stand, each by itself. events: records, [n]; positions: of them,
    int64 [n]; longest: how many of those before it an event reads at most; prefix: of the columns that hold
    histories.
    """
    places = read(f"{HISTORY}_before").take(positions).astype(np.int64)
    begins = read(f"{prefix}{HISTORY}_offsets").take(events[OWNERS[HISTORY]])
    return Turns(places, np.maximum(begins, places - longest), in_runs=False)
