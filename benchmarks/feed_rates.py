"""How many rows a second the loader gives, and the limit that it is held against, for benchmarks/feed.py."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from figures import ratio

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.batching import shuffled

# Workers import this file too: nothing heavy at its top level.
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader, EpochSampler, build_dataloader
from recsuite.runtime.host import available_memory

WARM_UP_STEPS = 20


class NextSteps(EpochSampler):
    """The next `number` full steps of training, on from those of the pass before, epoch after epoch."""

    def __init__(self, dataset: EventBatches) -> None:
        super().__init__(dataset)
        self.number = WARM_UP_STEPS
        self.full_steps = max(1, len(dataset.ranges["train"]) // dataset.batch_size)
        self._done = 0

    def __iter__(self) -> Iterator[Request]:
        # On from the last pass, because rows that were read a moment ago would still be in the cache.
        first, self._done = self._done, self._done + self.number
        for place in range(first, self._done):
            epoch, step = divmod(place, self.full_steps)
            yield Request("train", epoch, step)

    def __len__(self) -> int:
        return self.number


class LoaderRate:
    """Rows/s of one loader whose consumer only receives."""

    def __init__(self, loader: BatchLoader, seconds: float) -> None:
        assert isinstance(loader.sampler, NextSteps)
        self.loader, self.sampler, self.seconds = loader, loader.sampler, seconds
        self.rows = min(loader.dataset.batch_size, len(loader.dataset.ranges["train"]))

    def __call__(self) -> float:
        """The rate over a pass, whose length the pass before decides."""
        start = time.perf_counter()
        for batch in self.loader:
            # A name would keep a slot of the ring.
            del batch
        rate = self.sampler.number * self.rows / (time.perf_counter() - start)
        # Every variant is measured for as long, however fast it is.
        self.sampler.number = max(WARM_UP_STEPS, round(self.seconds * rate / self.rows))
        return rate


class Limit:
    """Rows/s of `index_select` at the places of shuffled training ratings, rows as wide as a batch's."""

    def __init__(self, dataset: EventBatches, row_bytes: float, seconds: float) -> None:
        import torch

        self.number = len(dataset.ranges["train"])
        self.batch_size = min(dataset.batch_size, self.number)
        self.width = round(row_bytes / 8)
        self.table_rows = min(self.number, int(available_memory()[0] / 2 / (8 * self.width)))
        # Written, so that every page is there.
        self.table = torch.ones(self.table_rows, self.width, dtype=torch.int64)
        self.out = torch.empty(self.batch_size, self.width, dtype=torch.int64)
        self.seconds = seconds
        self.steps = WARM_UP_STEPS

    def __call__(self) -> float:
        """The rate over some steps, whose number the call before decides."""
        import torch

        places = np.arange(self.steps * self.batch_size) % self.number
        # In the order of training: a limit of rows that lie next to each other would be another one.
        places = shuffled(places, self.number, 0, 0) % self.table_rows
        steps = torch.from_numpy(places).split(self.batch_size)
        start = time.perf_counter()
        for step in steps:
            torch.index_select(self.table, 0, step, out=self.out)
        rate = len(places) / (time.perf_counter() - start)
        self.steps = max(WARM_UP_STEPS, round(self.seconds * rate / self.batch_size))
        return rate


def rates(
    rows: dict[str, tuple[Columns, Config]], batch_size: int, flags: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Rows/s of the limit, of no workers and of workers, for each kind of row: all of them in every round, so
    that what the machine does meanwhile meets them alike.
    """
    with contextlib.ExitStack() as stack:
        kinds = {name: _RowKind(*row, batch_size, flags, stack) for name, row in rows.items()}
        every = [(kind, name) for kind in kinds.values() for name in kind.figures]
        # Twice: the first pass warms up and finds the number of steps, the second touches the pages of those.
        for kind, name in every * 2:
            kind.figures[name]()
        for _ in range(flags.rounds):
            for kind, name in every:
                kind.found[name].append(kind.figures[name]())
    return {name: kind.result() for name, kind in kinds.items()}


class _RowKind:
    """What is measured of one kind of row, and what was found of it, round by round."""

    def __init__(
        self,
        columns: Columns,
        base: Config,
        batch_size: int,
        flags: argparse.Namespace,
        stack: contextlib.ExitStack,
    ) -> None:
        self.columns, self.config = columns, base.replaced(batch_size=batch_size)
        dataset = EventBatches(columns, self.config, rank=0, world_size=1)
        batch = dataset[Request("train", 0, 0)]
        self.row_bytes = sum(part.numel() * part.element_size() for part in batch) / batch_size
        self.limit = Limit(dataset, self.row_bytes, flags.seconds)
        pools = {f"{method} {number}": (method, number) for method, number in flags.pools}
        self.figures: dict[str, Callable[[], float]] = {
            "limit": self.limit,
            "0": self._loader(flags.seconds, stack, num_workers=0),
            **{
                name: self._loader(flags.seconds, stack, num_workers=number, mp_context=method)
                for name, (method, number) in pools.items()
            },
        }
        self.found: dict[str, list[float]] = {name: [] for name in self.figures}

    def _loader(self, seconds: float, stack: contextlib.ExitStack, **choices: Any) -> LoaderRate:
        config = self.config.replaced(**choices)
        dataset = EventBatches(self.columns, config, rank=0, world_size=1)
        return LoaderRate(stack.enter_context(build_dataloader(dataset, NextSteps(dataset), config)), seconds)

    def result(self) -> dict[str, Any]:
        found = self.found
        return {
            "batch size": self.config.loader.batch_size,
            "bytes a row": self.row_bytes,
            "rows of the limit": self.limit.table_rows,
            "rows of the data": self.limit.number,
            "rows/s": {name: spread(values) for name, values in found.items()},
            "of the limit": ratio(found["0"], found["limit"]),
            "of 0 workers": {
                name: ratio(values, found["0"])
                for name, values in found.items()
                if name not in ("0", "limit")
            },
        }


def spread(values: list[float]) -> dict[str, float]:
    """The median of some measurements, the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
