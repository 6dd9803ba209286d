"""The batches of all passes, from one loader: a worker's plain tensors become the model's input here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.datasets.batching.batch import Batch
from recsuite.datasets.loader import BatchLoader
from recsuite.datasets.schema import HISTORY
from recsuite.models.layers import Links, Members, repeated
from recsuite.sharding.recommender import ModelInput


class InputPipeline:
    """The batches of all passes; each pass is a fresh iterator.

    TorchRec's pipeline knows an exhausted iterator by its identity, and would take a second pass of the same
    object for empty (torchrec issue 2327).

    phase: a context for the name of a phase, see `Callback.phase`; used while this waits for a batch.
    """

    def __init__(
        self,
        loader: BatchLoader,
        phase: Callable[[str], AbstractContextManager[Any]] = lambda name: contextlib.nullcontext(),
    ) -> None:
        self.loader = loader
        self.phase = phase
        dataset = loader.dataset
        self.keys = [table.name for table in dataset.tables]
        # Of a model that reads histories by the rows of the items themselves.
        self.item = dataset.schema.item if dataset.model.reads_order else None
        self.seconds_waited = 0.0
        self._prepared: tuple[tuple[Any, ...], Iterator[Batch]] | None = None

    def prepare(self, split: str, epoch: int, first: int = 0, window: tuple[int, int] | None = None) -> None:
        """Have the workers begin a pass, from event number `first` on, whose batches are asked for later."""
        sampler = self.loader.sampler
        sampler.split, sampler.epoch, sampler.first, sampler.window = split, epoch, first, window
        self._prepared = ((split, epoch, first, window), iter(self.loader))

    def batches(
        self, split: str, epoch: int, first: int = 0, window: tuple[int, int] | None = None
    ) -> Iterator[ModelInput]:
        """One pass over a split, on the host; counts the seconds that its consumer waits."""
        self.seconds_waited = 0.0
        with self._waiting():
            # What was begun ahead is for that very pass alone: an evaluation may come in between.
            if self._prepared is None or self._prepared[0] != (split, epoch, first, window):
                self.prepare(split, epoch, first, window)
            assert self._prepared is not None
            source, self._prepared = self._prepared[1], None
        while True:
            with self._waiting():
                batch = next(source, None)
            if batch is None:
                return
            yield self.to_model_input(batch)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        with self.phase("feed"):
            yield
        self.seconds_waited += time.perf_counter() - start

    def to_model_input(self, batch: Batch) -> ModelInput:
        """A worker's plain tensors as what the model takes, still on the host."""
        keys, values, lengths = self.keys, batch.values, batch.lengths
        if self.item is not None:
            keys, values, lengths = with_histories(keys, values, lengths, self.item)
        features = KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
        # Counts the ids of each key here, so that the device need not be asked for them.
        features.sync()
        links = Links(batch.sources, batch.scales, batch.own, batch.reads, batch.rarities)
        return ModelInput(
            features,
            batch.labels,
            batch.weights,
            batch.numbers,
            batch.had,
            Members(batch.history_labels, batch.places, batch.gaps, batch.ages, batch.draws),
            links,
            batch.more_labels,
            batch.more_weights,
        )


def with_histories(
    keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, item: str
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """The features of a batch with each history behind the event's own item, as values of one key: of two
    keys that shared a table, checkpoints and the tracking of rows would have to know. See
    `models.sequences.head.apart`.
    """
    of_keys = lengths.view(len(keys), -1)
    parts = dict(zip(keys, values.split(of_keys.sum(dim=1).tolist()), strict=True))
    found = dict(zip(keys, of_keys, strict=True))
    counts = found[HISTORY].long()
    # An item for each row, and behind it what was had before.
    own = counts.cumsum(0) - counts + torch.arange(len(counts))
    joined = values.new_empty(len(counts) + len(parts[HISTORY]))
    joined[own] = parts[item]
    rows = repeated(torch.arange(len(counts)), counts, len(parts[HISTORY]))
    joined[torch.arange(len(rows)) + rows + 1] = parts.pop(HISTORY)
    parts[item], found[item] = joined, found.pop(HISTORY) + 1
    return [*parts], torch.cat([*parts.values()]), torch.cat([*found.values()])
