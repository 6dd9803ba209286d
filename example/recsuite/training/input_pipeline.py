"""The batches of all passes, from one loader: a worker's plain tensors become the model's input here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.datasets.batching.batch import Batch
from recsuite.datasets.loader import BatchLoader
from recsuite.models.lists import Links
from recsuite.models.recency import Members
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
        self.keys = [table.name for table in loader.dataset.tables]
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
        features = KeyedJaggedTensor(keys=self.keys, values=batch.values, lengths=batch.lengths)
        # Counts the ids of each key here, so that the device need not be asked for them.
        features.sync()
        links = Links(batch.sources, batch.scales, batch.own, batch.rarities)
        return ModelInput(
            features,
            batch.labels,
            batch.weights,
            batch.numbers,
            batch.had,
            Members(batch.history_labels, batch.places, batch.gaps),
            links,
        )
