"""Batches as a pure function of position.

An element of the data set is a whole batch, asked for by (split, epoch, step): nothing is drawn, nothing is
remembered, so any number of workers of any start method gives the same batches, bit for bit. A worker reads
memory-mapped columns and fills numpy arrays in shared memory; they become tensors in the main process. What
this module imports, a worker imports: no torch, no TorchRec, no pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.batching.batch import Batch, largest_batch, num_rarities, to_tensors
from recsuite.datasets.batching.features import FORGOTTEN_EVERY, Asked, EventFeatures, Lists
from recsuite.datasets.batching.had import bytes_of_group, mark_had
from recsuite.datasets.batching.lists import MEMBERS, Shared, links_of, with_own
from recsuite.datasets.batching.recency import NO_AGES
from recsuite.datasets.batching.shuffle import shuffled
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import AUDIENCE, ENTITIES, HISTORY, UNKNOWN_ROW, USER

SPLITS = ("train", "validation", "test", "catalogue")
# Small batches are shuffled together: numpy's overhead for each would be more than the work.
POSITIONS_AT_ONCE = 32_768


class Request(NamedTuple):
    """Which batch: step `step` of pass `epoch` over the split "train", "validation" or "test", both counted
    from 0; or over the "catalogue", where each item has a row.

    first: the place in the pass at which step 0 begins; a pass that was interrupted continues from there, on
    any number of ranks. noun: what an event, or an item, is called. window: the positions of the events in
    columns that have one stretch of all events alone, (begin, end), instead of those of the split.
    """

    # The epoch travels with each request: a worker that remembered one could be asked for a step of another.
    split: str
    epoch: int
    step: int
    first: int = 0
    noun: str = "event"
    window: tuple[int, int] | None = None

    def __str__(self) -> str:
        begin = f", counted from {self.noun} {self.first:,}" if self.first else ""
        what = f"{self.noun}s" if self.split == "catalogue" else f"{self.split} {self.noun}s"
        return f"step {self.step + 1} of epoch {self.epoch + 1} over the {what}{begin}"


class EventBatches:
    """The batches of one rank. Pickles to paths and numbers; columns are mapped where they are first read."""

    def __init__(self, columns: Columns, config: Config, rank: int, world_size: int) -> None:
        self.schema = columns.schema
        self.tables = columns.tables
        self.ranges = {split: columns.range_of(split) for split in SPLITS}
        self.batch_size = config.loader.batch_size
        # Each training and validation event is in one list at most.
        self.most_shared = (columns.num_train + columns.num_validation) if config.data.shares_lists else 0
        self.is_stream = config.stream.stream
        self.num_items, self.model = columns.num_items, config.model
        self.is_two_sided = AUDIENCE in [table.name for table in columns.tables]
        self.seed = config.runtime.seed
        self.rank = rank
        self.world_size = world_size
        self.numbers = columns.numbers
        # Of the features that tell users, and items, apart.
        self._places = [columns.place_of(entity) for entity in ENTITIES]
        self.features = EventFeatures(columns, config.data)
        # The positions of the last steps asked for, and which steps those are.
        self._block: tuple[tuple[Any, ...], np.ndarray] | None = None

    @property
    def batch_bytes(self) -> int:
        """The most bytes that a batch can take: the longest list of every feature in every row."""
        return largest_batch(self.tables, len(self.numbers), self.batch_size, self.model, self.most_shared)

    def positions_of(self, split: str, window: tuple[int, int] | None = None) -> range:
        """The positions of a pass: those of a split, or of a window where there is one."""
        return self.ranges[split] if window is None else range(*window)

    def num_steps(self, split: str, first: int = 0, window: tuple[int, int] | None = None) -> int:
        """Batches in the pass over a split or a window from place `first` on, as many on every rank."""
        # Rounded up, and of the whole pass: ranks that made different numbers of steps would wait for each
        # other for ever.
        number = len(self.positions_of(split, window)) - first
        return -(-number // (self.batch_size * self.world_size))

    def step_sizes(self, split: str, first: int = 0, window: tuple[int, int] | None = None) -> list[int]:
        """Events in each global batch of a pass: all are alike but the last."""
        full, left = self.batch_size * self.world_size, len(self.positions_of(split, window)) - first
        return [min(full, left - step * full) for step in range(self.num_steps(split, first, window))]

    def __getitem__(self, request: Request) -> Batch:
        """The batch of a request, as tensors in memory of this process."""
        return to_tensors(self.make(request))

    def make(self, request: Request, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[np.ndarray]:
        """The arrays of a `Batch`, in its order, allocated by `empty`.

        Training events come in an order shuffled anew each epoch, each once. Padding has the unknown row of
        every feature, once: with weight 0 it gets no gradient.
        """
        # Before each batch: a file that was cut meanwhile would end the process by a signal, and say nothing.
        features = self.features
        features.check()
        positions = self._positions(request)
        events = features.events(positions, request.split)
        num_real = len(events)
        single, numbers, lists = features.find(events)
        # Another sample in each step, counted from the beginning of the pass for the sake of one that is
        # resumed; but a model that is measured is told the same of an event at any time.
        begin = request.first + request.step * self.batch_size * self.world_size
        step = (request.epoch, begin) if request.split == "train" else ()
        shared = features.find_lists(events, Asked(request.split, (self.seed, *step)))
        ages = NO_AGES
        if self.model.learns_history_weights:
            ages = features.ages(positions, shared[HISTORY], request.split)
        # Their own rows before some are forgotten: an event stands in the list with its user.
        lists += [self._listed(name, found, single) for name, found in shared.items()]
        history_labels = self._labels_of(shared, events, empty)
        if request.split == "train":
            self._forget(single, numbers, request)
        values, lengths = features.join(self.batch_size, single, lists, empty)
        labels, weights = empty(self.batch_size, np.float32), empty(self.batch_size, np.float32)
        labels[:num_real], labels[num_real:] = events["label"], 0
        step_size = self._step_size(request)
        share = self.batch_size * self.world_size / step_size
        weights[:num_real] = share
        weights[num_real:] = 0
        if "weight" in (events.dtype.names or ()) and request.split == "train":
            # Whatever is measured counts each event once.
            weights[:num_real] *= events["weight"]
        all_numbers = empty((self.batch_size, len(self.numbers)), np.float32)
        all_numbers[num_real:] = 0
        np.concatenate(numbers, axis=1, out=all_numbers[:num_real])
        links = links_of([*shared.values()] if self.is_two_sided else [], self.batch_size, empty)
        rarities = empty((num_rarities(self.tables) if self.is_two_sided else 0, self.batch_size), np.float32)
        rarities[:] = 0
        # A stream does not know how many events there will be.
        if self.is_two_sided and request.split == "train" and not self.is_stream:
            features.rarities(events, single[-1], share, rarities[:, :num_real])
        had = self._had(request, events, empty)
        return values, lengths, labels, weights, history_labels, *ages, all_numbers, *links, rarities, had

    def _had(self, request: Request, events: np.ndarray, empty: Callable[..., np.ndarray]) -> np.ndarray:
        """The last array of a `Batch`."""
        competitors = self.model.competitors
        had = empty((self.batch_size, bytes_of_group(self.batch_size, competitors)), np.uint8)
        had[:] = 0
        if competitors and request.split == "train":
            mark_had(had, events, self.num_items, self.features.column)
        return had

    def _listed(self, name: str, found: Shared, single: list[np.ndarray]) -> Lists:
        """The values of a list, with each event's own behind its."""
        entity = ENTITIES.index(MEMBERS[name])
        own = single[entity][self._places[entity]]
        # The first number of a member of a history is its row; an audience has no other.
        rows = found.records[:, 0] if name == HISTORY else found.records
        if not self.is_two_sided:
            return Lists(rows, found.counts, padding=0)
        return Lists(with_own(rows, found.counts, own), found.counts + 1, padding=1)

    def _labels_of(
        self, shared: Mapping[str, Shared], events: np.ndarray, empty: Callable[..., np.ndarray]
    ) -> np.ndarray:
        """A label for each value of the history, also of padding."""
        if HISTORY not in shared:
            return np.zeros(0, np.float32)
        found = shared[HISTORY]
        known = found.records[:, 1].view(np.float32)
        if not self.is_two_sided:
            labels = empty(len(known), np.float32)
            labels[:] = known
            return labels
        # Its own label only to be subtracted again: elsewhere it is what is to be predicted.
        own = np.where(found.own > 0, events["label"], 0).astype(np.float32)
        known = with_own(known, found.counts, own)
        labels = empty(len(known) + self.batch_size - len(events), np.float32)
        labels[: len(known)], labels[len(known) :] = known, 0
        return labels

    def _forget(self, single: list[np.ndarray], numbers: list[np.ndarray], request: Request) -> None:
        """Let a few events be of an unknown user, and a few others have nothing of their own.

        So training learns what such are like.
        """
        # Counted from the beginning of the pass, so that any number of ranks, and a pass that is resumed,
        # forget the same events; and of a stream from its own, or each window's first would be forgotten.
        begin = self.positions_of(request.split, request.window).start + request.first
        begin += (request.step * self.world_size + self.rank) * self.batch_size
        # The order is another one in each pass, so these are others too.
        of_user = single[ENTITIES.index(USER)]
        of_user[self._places[ENTITIES.index(USER)], -begin % FORGOTTEN_EVERY :: FORGOTTEN_EVERY] = UNKNOWN_ROW
        others = slice((FORGOTTEN_EVERY // 2 - begin) % FORGOTTEN_EVERY, None, FORGOTTEN_EVERY)
        for of_event in single[len(ENTITIES) :]:
            of_event[:, others] = UNKNOWN_ROW
        for of_event in numbers[len(ENTITIES) :]:
            of_event[others] = np.nan

    def __getstate__(self) -> dict[str, Any]:
        # A block would make what is sent to a worker large.
        return {**self.__dict__, "_block": None}

    def _step_size(self, request: Request) -> int:
        full, number = (
            self.batch_size * self.world_size,
            len(self.positions_of(request.split, request.window)),
        )
        return min(full, number - request.first - request.step * full)

    def _positions(self, request: Request) -> np.ndarray:
        """Positions in the columns of events, int64 [at most batch_size]: this rank's slice of the step."""
        num_steps = max(1, POSITIONS_AT_ONCE // self.batch_size)
        block, place = divmod(request.step, num_steps)
        wanted = (request.split, request.epoch, request.first, request.window, block)
        # Steps are asked for in their order, so this block has the positions of the next ones too.
        if self._block is None or self._block[0] != wanted:
            self._block = (
                wanted,
                self._block_positions(request, range(num_steps * block, num_steps * (block + 1))),
            )
        return self._block[1][place * self.batch_size : (place + 1) * self.batch_size]

    def _block_positions(self, request: Request, steps: range) -> np.ndarray:
        split = self.positions_of(request.split, request.window)
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
