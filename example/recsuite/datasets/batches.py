"""Batches as a pure function of position.

An element of the data set is a whole batch, requested by (split, epoch, step). There is no random state, so
any number of workers with any start method gives the same batches, bit for bit. A worker reads memory-mapped
columns and fills numpy arrays in shared memory; they become tensors in the main process. A worker imports
this module, so it imports neither torch nor TorchRec nor pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.batching import (
    MASKED_EVERY,
    NEW_USER_EVERY,
    NO_HISTORIES,
    Batch,
    EventFeatures,
    EventOrder,
    HistoryArrays,
    InvertedLists,
    PassPart,
    ReadPositions,
    bytes_of_bits,
    largest_batch,
    mark_seen_items,
    mix_bits,
    places_of,
    reads_of,
    sample_items,
    to_tensors,
    whole_groups,
)
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import ENTITIES, HISTORY, ITEM, UNKNOWN_ROW, USER

SPLITS = ("train", "validation", "test", "catalogue")


class Request(NamedTuple):
    """Key of a batch: step `step` of pass `epoch` over a split, both counted from 0.

    split: "train", "validation" or "test"; or "catalogue", with a row for each item. first: the place in the
    pass at which step 0 begins; an interrupted pass continues from there, on any number of ranks. noun: the
    word for an event, or for an item. window: (begin, end), positions of the events in columns with one part,
    instead of those of the split.
    """

    # Each request has the epoch: a worker may be asked for steps of different epochs.
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
    """Batches of one rank. Pickles to paths and numbers. A process maps the columns on first use.

    A step is a range of `batch_size` events of the pass. Each rank has an equal part of it in
    `local_batch_size` rows, rounded up; rows without an event are padding. So the events of a step, their
    weights and their negatives are the same on any number of ranks.
    """

    def __init__(self, columns: Columns, config: Config, rank: int, world_size: int) -> None:
        self.schema = columns.schema
        self.tables = columns.tables
        self.ranges = {split: columns.range_of(split) for split in SPLITS}
        self.batch_size = config.global_batch(columns.num_train, world_size)
        self.local_batch_size = -(-self.batch_size // world_size)
        self.num_items, self.model = columns.num_items, config.model
        self.seed = config.runtime.seed
        self.rank = rank
        self.world_size = world_size
        # Number of events of a stream before these.
        self.first_event = columns.segment.first if columns.segment else 0
        self.num_numbers = columns.num_numbers
        self.user_place = columns.place_of(USER)
        self.features = EventFeatures(columns, config.data)
        longest = config.data.history if config.model.reads_order else 0
        begin, end = (min(number * self.local_batch_size, self.batch_size) for number in (rank, rank + 1))
        # The numbers of this rank's events in a step; and those of their groups, whose items are negatives.
        self.part = range(begin, end)
        self._of_groups = whole_groups(self.part, self.batch_size, self.model.in_batch_negatives)
        self._order = EventOrder(self.batch_size, self._of_groups, self.seed, longest)

    @property
    def has_groups_of_ranks(self) -> bool:
        """True if the events of a group, whose items are negatives, may be on several ranks."""
        return self.world_size > 1

    @property
    def batch_bytes(self) -> int:
        """Most bytes that a batch can take: the longest list of every feature in every row."""
        most_negatives = self.model.num_negatives(self.num_items)
        sizes = self.num_numbers, self.local_batch_size, self.model, most_negatives, self._bytes_of_group
        return largest_batch(self.tables, *sizes, len(self.schema.more_labels))

    @property
    def _bytes_of_group(self) -> int:
        return bytes_of_bits(self.batch_size, self.model.in_batch_negatives)

    def positions_of(self, split: str, window: tuple[int, int] | None = None) -> range:
        """Positions of a pass: those of the window if given, else of the split."""
        return self.ranges[split] if window is None else range(*window)

    def num_events(self, split: str, window: tuple[int, int] | None = None) -> int:
        """Number of events of a pass, of all ranks."""
        return len(self.positions_of(split, window))

    def in_order(self, everyones: Any, split: str, window: tuple[int, int] | None = None) -> Any:
        """Return results of the batches of all ranks in the order of the events of a pass, [n, ...].

        everyones: torch.Tensor [steps, ranks, B, ...].
        """
        # Step after step, and within a step rank after rank: this is the order in which batches are cut from
        # the split. Padding comes after the last event of a step.
        steps = everyones.flatten(1, 2)[:, : self.batch_size]
        return steps.flatten(0, 1)[: self.num_events(split, window)]

    def num_steps(self, split: str, first: int = 0, window: tuple[int, int] | None = None) -> int:
        """Number of batches in a pass over a split or window from place `first` on, equal on every rank."""
        # Rounded up, from the whole pass: ranks with different numbers of steps would wait for each other
        # forever.
        number = len(self.positions_of(split, window)) - first
        return -(-number // self.batch_size)

    def step_sizes(self, split: str, first: int = 0, window: tuple[int, int] | None = None) -> list[int]:
        """Number of events in each global batch of a pass. Only the last may differ."""
        full, left = self.batch_size, len(self.positions_of(split, window)) - first
        return [min(full, left - step * full) for step in range(self.num_steps(split, first, window))]

    def local_sizes(self, split: str) -> np.ndarray:
        """Number of this rank's events in each batch of a pass over a split, int64 [steps]."""
        sizes = np.array(self.step_sizes(split), np.int64)
        return np.maximum(np.minimum(sizes, self.part.stop) - self.part.start, 0)

    def numbers_of(self, split: str) -> np.ndarray:
        """Numbers of this rank's events in a pass over a split that is not shuffled, in order, int64 [n]."""
        sizes = self.local_sizes(split)
        return places_of(np.arange(len(sizes)) * self.batch_size + self.part.start, sizes)

    def __getitem__(self, request: Request) -> Batch:
        """Return the batch of a request, as tensors in memory of this process."""
        return to_tensors(self.make(request))

    def make(self, request: Request, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[np.ndarray]:
        """Return the arrays of a `Batch`, in its order, allocated by `empty`.

        Training events are shuffled in each epoch, and each comes once. Padding has the unknown row of every
        feature, once: with weight 0 it gets no gradient.
        """
        # Before each batch: access to a file that was truncated meanwhile would kill the process by a signal.
        features, trains = self.features, request.split == "train"
        features.check()
        positions, read_positions = self._positions_of_step(request)
        events = features.events(positions, request.split)
        if trains and self.hides_histories:
            self._hide_histories(events, request)
        keys = features.find(events)
        negatives = self._negatives(request)
        num_rows, num_real = len(negatives) + self.local_batch_size, len(negatives) + len(events)
        rows = range(len(negatives), num_rows)
        histories = NO_HISTORIES
        if features.longest:
            listed, histories = self._histories_of(request, events, positions, read_positions, rows, empty)
            keys.lists.append(listed)
        if trains:
            self._mask_ids(keys.single, keys.numbers, request)
        if len(negatives):
            keys = keys.behind(features.find_items(negatives))
        values, lengths = features.join(num_rows, keys.single, keys.lists, empty)
        labels, weights, *more = self._labels_and_weights(events, self._weight_of(request), trains, empty)
        numbers = empty((num_rows, self.num_numbers), np.float32)
        numbers[num_real:] = 0
        np.concatenate(keys.numbers, axis=1, out=numbers[:num_real])
        seen_bits = self._had(request, events, read_positions, negatives, empty)
        return values, lengths, labels, weights, *histories, numbers, seen_bits, *more

    def _weight_of(self, request: Request) -> float:
        """Return the weight of an event of a step, see `Batch`."""
        num_rows, full = self.local_batch_size * self.world_size, self.batch_size
        if request.window is not None:
            return num_rows / full
        left = len(self.positions_of(request.split)) - request.first - request.step * full
        return num_rows / min(full, left)

    def _begin_of(self, request: Request) -> int:
        """Return the place in the pass of the first event of a step of all ranks."""
        return request.first + request.step * self.batch_size

    def _negatives(self, request: Request) -> np.ndarray:
        """Positions of the items drawn as negatives of a step, int32; none outside of training."""
        number = self.model.num_negatives(self.num_items)
        if request.split != "train" or number == 0:
            return np.zeros(0, np.int32)
        # The place in the pass identifies the step, on any number of ranks and in a resumed pass.
        begin = self._begin_of(request)
        return sample_items(self.features.trained_items(), number, self.seed, request.epoch, begin)

    def _histories_of(
        self,
        request: Request,
        events: np.ndarray,
        positions: np.ndarray,
        read_positions: ReadPositions | None,
        rows: range,
        empty: Callable[..., np.ndarray],
    ) -> tuple[InvertedLists, HistoryArrays]:
        """Return the user histories of events. rows: of the batch, the first of which are the events'."""
        features, told = self.features, dict[str, np.ndarray]()
        if self.model.reads_order:
            read = features.find_order(events, positions, read_positions, request.split)
            history, told = read.history, reads_of(read, rows, empty)
            # Drawn by the place in the user histories: the same in any batch, on any number of ranks.
            draws = mix_bits(read.places, (self._order.seed, request.epoch)).astype(np.int32)
            told |= {"ages": read.ages, "draws": draws}
        else:
            history = features.find_histories(events, request.split)
            if self.model.learns_history_weights:
                told = features.ages(positions, history, request.split)
        labels = empty(len(history.records), np.float32)
        labels[:] = history.records[:, 1].view(np.float32)
        listed = InvertedLists(history.records[:, 0], history.counts, padding=0)
        return listed, NO_HISTORIES._replace(history_labels=labels, **told)

    def _labels_and_weights(
        self, events: np.ndarray, weight: float, trains: bool, empty: Callable[..., np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """Labels and weights of a `Batch`, and those of the labels after the first; weight: of each event."""
        number = self.local_batch_size
        labels, weights = empty(number, np.float32), empty(number, np.float32)
        labels[: len(events)], labels[len(events) :] = events["label"], 0
        weights[: len(events)], weights[len(events) :] = weight, 0
        names = events.dtype.names or ()
        if "weight" in names and trains:
            # Metrics count each event once.
            weights[: len(events)] *= events["weight"]
        shape = number, len(self.schema.more_labels)
        more_labels, more_weights = empty(shape, np.float32), empty(shape, np.float32)
        more_labels[:], more_weights[:] = 0, 0
        for place in range(shape[1]):
            values = events[f"label_{place + 2}"]
            more_labels[: len(events), place] = np.nan_to_num(values)
            more_weights[: len(events), place] = weights[: len(events)] * ~np.isnan(values)
            if (name := f"weight_{place + 2}") in names:
                # A label that is missing may have no weight either.
                more_weights[: len(events), place] *= np.nan_to_num(events[name])
        return labels, weights, more_labels, more_weights

    def _had(
        self,
        request: Request,
        events: np.ndarray,
        read_positions: ReadPositions | None,
        negatives: np.ndarray,
        empty: Callable[..., np.ndarray],
    ) -> np.ndarray:
        """Array `seen_bits` of a `Batch`."""
        width = self._bytes_of_group + -(-len(negatives) // 8)
        seen_bits = empty((self.local_batch_size, width), np.uint8)
        seen_bits[:] = 0
        if request.split == "train" and width and self.schema.excludes_seen:
            # If the order is read, earlier items of the same second count too.
            ends = events[f"{HISTORY}_end"] if read_positions is None else read_positions.places
            # Other ranks have the other events of a group, and their places are known here too.
            of_groups = events
            if self._of_groups != self.part:
                of_groups = self.features.events(self._positions_of_groups(request)[0], request.split)
            first, read = self.part.start - self._of_groups.start, self.features.column
            mark_seen_items(seen_bits, events, ends, of_groups[ITEM], first, negatives, self.num_items, read)
        return seen_bits

    @property
    def hides_histories(self) -> bool:
        """True if events with a hidden user have no history: in a ranking whose events are in no order."""
        return bool(self.model.in_batch_negatives)

    @property
    def hidden_every(self) -> int:
        """Number of training events of which one has a hidden user."""
        return NEW_USER_EVERY if self.hides_histories else MASKED_EVERY

    def _hidden_users(self, request: Request) -> slice:
        """Return the events of a step whose user is hidden."""
        return slice(-self._place_of(request) % self.hidden_every, None, self.hidden_every)

    def _place_of(self, request: Request) -> int:
        """Return the place of this rank's first event of a step, from the beginning of the pass or stream."""
        # Not from the first step here: then the same events are chosen on any number of ranks and in a
        # resumed pass. A stream counts from its beginning, or the first event of each window would be chosen.
        begin = self.first_event + self.positions_of(request.split, request.window).start
        return begin + self._begin_of(request) + self.part.start

    def _hide_histories(self, events: np.ndarray, request: Request) -> None:
        """Remove the histories of hidden users: new users have none. Changes the events in place."""
        hidden = self._hidden_users(request)
        begins = self.features.column(f"{HISTORY}_offsets")
        events[f"{HISTORY}_end"][hidden] = begins.take(events[USER][hidden])

    def _mask_ids(self, single: list[np.ndarray], numbers: list[np.ndarray], request: Request) -> None:
        """Hide the user of a few events, and the own features of others, so that unknown rows are trained."""
        # The order differs in each pass, so other events are chosen.
        of_user = single[ENTITIES.index(USER)]
        of_user[self.user_place, self._hidden_users(request)] = UNKNOWN_ROW
        # Between the hidden users.
        others = slice((self.hidden_every // 2 - self._place_of(request)) % MASKED_EVERY, None, MASKED_EVERY)
        for of_event in single[len(ENTITIES) :]:
            of_event[:, others] = UNKNOWN_ROW
        for of_event in numbers[len(ENTITIES) :]:
            of_event[others] = np.nan

    def _positions_of_step(self, request: Request) -> tuple[np.ndarray, ReadPositions | None]:
        """Return this rank's events of a step, int64 [at most its part], and their turns in runs, or None."""
        positions, turns = self._positions_of_groups(request)
        first = self.part.start - self._of_groups.start
        part = slice(first, first + len(self.part))
        return positions[part], turns.part(part) if turns else None

    def _positions_of_groups(self, request: Request) -> tuple[np.ndarray, ReadPositions | None]:
        """Return the same of all events of the groups of this rank's events."""
        positions = self.positions_of(request.split, request.window)
        stretch = PassPart(request.split, request.epoch, request.first, positions)
        return self._order.of_step(stretch, request.step, self.features.column)
