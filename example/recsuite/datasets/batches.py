"""Batches as a pure function of position.

An element of the data set is a whole batch, asked for by (split, epoch, step): nothing is drawn, nothing is
remembered, so any number of workers of any start method gives the same batches, bit for bit. A worker reads
memory-mapped columns and fills numpy arrays in shared memory; they become tensors in the main process. What
this module imports, a worker imports: no torch, no TorchRec, no pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns, MappedColumn
from recsuite.datasets.schema import ENTITIES, UNKNOWN_ROW, USER, Table
from recsuite.datasets.shuffle import shuffled

if TYPE_CHECKING:
    import torch

SPLITS = ("train", "validation", "test", "catalogue")
# Small batches are shuffled together: numpy's overhead for each would be more than the work.
POSITIONS_AT_ONCE = 32_768
# One of so many training events counts as that of an unknown user, so that row 0 learns what a new user is
# like, and few enough users lose an event to it.
FORGOTTEN_EVERY = 64


class Request(NamedTuple):
    """Which batch: step `step` of pass `epoch` over the split "train", "validation" or "test", both counted
    from 0; or over the "catalogue", where each item has a row.

    first: the place in the pass at which step 0 begins; a pass that was interrupted continues from there, on
    any number of ranks. noun: what an event, or an item, is called.
    """

    # The epoch travels with each request: a worker that remembered one could be asked for a step of another.
    split: str
    epoch: int
    step: int
    first: int = 0
    noun: str = "event"

    def __str__(self) -> str:
        begin = f", counted from {self.noun} {self.first:,}" if self.first else ""
        what = f"{self.noun}s" if self.split == "catalogue" else f"{self.split} {self.noun}s"
        return f"step {self.step + 1} of epoch {self.epoch + 1} over the {what}{begin}"


class Batch(NamedTuple):
    """One rank's part of a global batch, B rows, as plain tensors.

    `values` (int64) and `lengths` (int32 [features * B]) are those of a KeyedJaggedTensor whose keys are the
    data set's features in order. `labels` is float32 [B]. `weights` is float32 [B]: 0 for the rows that pad
    the last batch, and for real rows global batch size / real rows in the global batch, so that the mean
    over ranks of the weighted mean over B is the mean over real rows. `history_labels` is float32, one for
    each value of the feature "history".
    """

    values: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    history_labels: torch.Tensor


class Lists(NamedTuple):
    """A feature with lists for n events: the values, list after list, and how many are each event's, [n].

    padding: how many unknown rows stand for a row that pads the batch.
    """

    values: np.ndarray
    counts: np.ndarray
    padding: int


def largest_batch(tables: Sequence[Table], batch_size: int, history: int) -> int:
    """The most bytes that a batch can take, for a slot of the workers' ring: it is allocated once."""
    values = sum(table.longest for table in tables)
    row = 8 * values + 4 * len(tables) + 4 + 4 + 4 * history
    # Each array begins on a cache line.
    return batch_size * row + 64 * len(Batch._fields)


class EventBatches:
    """The batches of one rank. Pickles to paths and numbers; columns are mapped where they are first read."""

    def __init__(self, columns: Columns, config: Config, rank: int, world_size: int) -> None:
        self.folder = columns.folder
        self.schema = columns.schema
        self.tables = columns.tables
        self.ranges = {split: columns.range_of(split) for split in SPLITS}
        self.batch_size = config.loader.batch_size
        self.history = config.data.history
        self.seed = config.runtime.seed
        self.rank = rank
        self.world_size = world_size
        self._with_lists = {
            entity: [
                table.name for table in self.tables if table.feature.multi and table.feature.entity == entity
            ]
            for entity in ENTITIES
        }
        self._place_of_user = columns.place_of(USER)
        self._columns: dict[str, MappedColumn] = {}
        # The positions of the last steps asked for, and which steps those are.
        self._block: tuple[tuple[str, int, int, int], np.ndarray] | None = None

    @property
    def batch_bytes(self) -> int:
        """The most bytes that a batch can take: the longest list of every feature in every row."""
        return largest_batch(self.tables, self.batch_size, self.history)

    def num_steps(self, split: str, first: int = 0) -> int:
        """Batches in the pass over a split from place `first` on: the same number on every rank."""
        # Rounded up, and of the whole pass: ranks that made different numbers of steps would wait for each
        # other for ever.
        return -(-(len(self.ranges[split]) - first) // (self.batch_size * self.world_size))

    def step_sizes(self, split: str, first: int = 0) -> list[int]:
        """Events in each global batch of a pass: all are alike but the last."""
        return [self._step_size(split, step, first) for step in range(self.num_steps(split, first))]

    def __getitem__(self, request: Request) -> Batch:
        """The batch of a request, as tensors in memory of this process."""
        return to_tensors(self.make(request))

    def make(self, request: Request, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[np.ndarray]:
        """The arrays of a `Batch`, in its order, allocated by `empty`.

        Training events come in an order shuffled anew each epoch, each once. Padding has the unknown row of
        every feature, once, and no history: with weight 0 it gets no gradient.
        """
        # Before each batch: a file that was cut meanwhile would end the process by a signal, and say nothing.
        for column in self._columns.values():
            column.check()
        rows = self._rows(request)
        num_real = len(rows)
        single, lists = self._find(rows)
        if request.split == "train":
            self._forget_users(single, request)
        history_labels = np.zeros(0, np.float32)
        if self.history:
            # A model in use knows the validation events by then, so the test may; training must not.
            known, counts = self._find_history(rows, "test_" if request.split == "test" else "")
            lists.append(Lists(known[:, 0], counts, padding=0))
            history_labels = empty(len(known), np.float32)
            history_labels[:] = known[:, 1].view(np.float32)
        values, lengths = self._join(single, lists, empty)
        labels, weights = empty(self.batch_size, np.float32), empty(self.batch_size, np.float32)
        # The four numbers of a row are int32, so that they lie together in 16 bytes and an event costs one
        # cache line; this one holds the bits of a float32.
        labels[:num_real], labels[num_real:] = rows[:, 2].view(np.float32), 0
        step_size = self._step_size(request.split, request.step, request.first)
        weights[:num_real] = self.batch_size * self.world_size / step_size
        weights[num_real:] = 0
        return values, lengths, labels, weights, history_labels

    def _forget_users(self, single: list[np.ndarray], request: Request) -> None:
        """Let a few events be of an unknown user, so that training learns what a new one is like."""
        # Counted from the beginning of the pass, so that any number of ranks, and a pass that is resumed,
        # forget the same events.
        begin = request.first + (request.step * self.world_size + self.rank) * self.batch_size
        # The order is another one in each pass, so these are others too.
        of_user = single[ENTITIES.index(USER)]
        of_user[self._place_of_user, -begin % FORGOTTEN_EVERY :: FORGOTTEN_EVERY] = UNKNOWN_ROW

    def __getstate__(self) -> dict[str, Any]:
        # A mapping cannot be sent to a worker, which makes its own; and a block would make what is sent
        # large.
        return {**self.__dict__, "_columns": {}, "_block": None}

    def _step_size(self, split: str, step: int, first: int) -> int:
        full = self.batch_size * self.world_size
        return min(full, len(self.ranges[split]) - first - step * full)

    def _positions(self, request: Request) -> np.ndarray:
        """Positions in the columns of events, int64 [at most batch_size]: this rank's slice of the step."""
        num_steps = max(1, POSITIONS_AT_ONCE // self.batch_size)
        block, place = divmod(request.step, num_steps)
        wanted = (request.split, request.epoch, request.first, block)
        # Steps are asked for in their order, so this block has the positions of the next ones too.
        if self._block is None or self._block[0] != wanted:
            self._block = (
                wanted,
                self._block_positions(request, range(num_steps * block, num_steps * (block + 1))),
            )
        return self._block[1][place * self.batch_size : (place + 1) * self.batch_size]

    def _block_positions(self, request: Request, steps: range) -> np.ndarray:
        split = self.ranges[request.split]
        # A step is one stretch of the pass, cut into a slice for each rank: what it holds depends on the size
        # of the global batch alone, not on the number of ranks.
        begins = (np.arange(steps.start, steps.stop) * self.world_size + self.rank) * self.batch_size
        positions = (request.first + begins[:, None] + np.arange(self.batch_size)).reshape(-1)
        # They rise, so what lies beyond the end of the split is behind one place.
        positions = positions[: np.searchsorted(positions, len(split))]
        if request.split == "train":
            # Training alone: predictions are held against labels in the order of the disk.
            positions = shuffled(positions, len(split), self.seed, request.epoch)
        positions += split.start
        return positions

    def _rows(self, request: Request) -> np.ndarray:
        """What `rows.npy` holds of the events of a request, int32 [n, 4]."""
        positions = self._positions(request)
        if request.split != "catalogue":
            return self._column("rows").take(positions, axis=0)
        # As if the first user had an event with each item, before any other: who asks looks at items alone.
        rows = np.zeros((len(positions), 4), np.int32)
        rows[:, 1] = positions
        return rows

    def _find(self, rows: np.ndarray) -> tuple[list[np.ndarray], list[Lists]]:
        """Table rows of the features with one value, [features, n] for each entity; and those with lists."""
        single, lists = [], []
        # Of the four columns the first two are users and items.
        for entity, ids in zip(ENTITIES, rows.T, strict=False):
            features = self._column(f"{self.schema.name_of(entity)}_features").take(ids, axis=0).T
            names = self._with_lists[entity]
            num_single = len(features) - 2 * len(names)
            single.append(features[:num_single])
            # A feature with lists has two columns: where its values begin, and how many they are.
            pairs = zip(features[num_single::2], features[num_single + 1 :: 2], strict=True)
            for name, (starts, counts) in zip(names, pairs, strict=True):
                known = self._column(f"{name}_values").take(places_of(starts, counts))
                lists.append(Lists(known, counts, padding=1))
        return single, lists

    def _find_history(self, rows: np.ndarray, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """What the users had before, event after event: table rows and the bits of labels, [sum, 2]; and how
        many each event has of them, [n]. prefix: of the columns that hold it.
        """
        begins, ends = self._column(f"{prefix}history_offsets").take(rows[:, 0]), rows[:, 3]
        starts = np.maximum(begins, ends - self.history)
        counts = ends - starts
        return self._column(f"{prefix}history").take(places_of(starts, counts), axis=0), counts

    def _join(
        self, single: list[np.ndarray], lists: list[Lists], empty: Callable[..., np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The values and lengths of a `Batch`, of what was found for its real rows."""
        num_real, num_single = single[0].shape[1], sum(map(len, single))
        num_padding = self.batch_size - num_real
        lengths = empty((len(self.tables), self.batch_size), np.int32)
        last = num_single * self.batch_size
        values = empty(last + sum(len(part.values) + part.padding * num_padding for part in lists), np.int64)
        lengths[:num_single] = 1
        # All features with one value are joined by one call: a small batch costs calls more than bytes.
        columns = values[:last].reshape(num_single, self.batch_size)
        np.concatenate(single, out=columns[:, :num_real])
        columns[:, num_real:] = UNKNOWN_ROW
        for place, part in enumerate(lists, start=num_single):
            lengths[place, :num_real], lengths[place, num_real:] = part.counts, part.padding
            first, last = last, last + len(part.values)
            values[first:last] = part.values
            first, last = last, last + part.padding * num_padding
            values[first:last] = UNKNOWN_ROW
        return values, lengths.reshape(-1)

    def _column(self, name: str) -> np.ndarray:
        folder = Path(self.folder)
        if not self._columns:
            # All at once: a training continues when the files are removed, and comes to the test at its end.
            self._columns = {path.stem: MappedColumn(path) for path in sorted(folder.glob("*.npy"))}
        if name not in self._columns:
            self._columns[name] = MappedColumn(folder / f"{name}.npy")
        return self._columns[name].values


def places_of(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places start, start + 1, ... of every list, list after list, int64 [sum of counts]."""
    # They may be columns of a table of int32: numpy is slow where types differ and numbers lie apart.
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    ends = counts.cumsum()
    places = np.arange(ends[-1] if len(ends) else 0)
    # The n-th value of a list lies n places after its start.
    places += (starts - (ends - counts)).repeat(counts)
    return places


def to_tensors(arrays: Sequence[np.ndarray]) -> Batch:
    """The arrays of a batch as tensors that share their memory."""
    import torch

    return Batch(*map(torch.from_numpy, arrays))
