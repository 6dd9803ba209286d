"""Measure how fast batches come out of the loader, how soon the first one, and what memory workers take.

    python benchmarks/feed.py --write             everything: a quarter of an hour on two cores, 9 GB
    python benchmarks/feed.py --quick             a part of it, once

Prints each figure beside its bar; with --write it also writes docs/feed.json, docs/feed.png and the part of
docs/loader.md between the feed marks. The ratings are drawn into --folder and kept there. Measures; asserts
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from environment import DOCS, EXAMPLE, ROOT, describe, finish, make_parser, torchrun
from feed_tables import draw, judge, render
from figures import ratio

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.batching.shuffle import shuffled

# Workers import this file again: nothing heavy at its top level.
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader, EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.host import available_memory, keep_freed_memory

PAGE = DOCS / "loader.md"
MARKS = ("<!-- feed: made by benchmarks/feed.py -->", "<!-- end of feed -->")
BATCH_SIZES = (1024, 8192, 65_536)
# Of the light row and of the heavy one.
BATCHES = {"light": BATCH_SIZES, "heavy": BATCH_SIZES}
POOLS = tuple((method, number) for method in ("spawn", "forkserver") for number in (1, 2, 4))
# What --quick measures: every bar, once.
QUICK = {
    "ratings": 100_000,
    "memory": [100_000],
    "trained": 5_000,
    "epochs": 1,
    "seconds": 0.05,
    "rounds": 1,
    "starts": 1,
    "batches": {"light": (8192, 65_536), "heavy": (8192,)},
    "pools": (("spawn", 2),),
}
WARM_UP_STEPS = 20
MEMORY_LIMIT = 2 * 2**30


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    # As `init_runtime` does on a rank, for the batches that this process makes without workers.
    keep_freed_memory()
    result = measure(flags)
    result["bars"] = judge(result)
    finish("feed", result, render(result), flags, draw, PAGE, MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "benchmark", help="keeps the ratings")
    parser.add_argument("--ratings", type=int, default=20_000_000, help="for rows/s and the first batch")
    parser.add_argument("--heavy", type=int, default=50, help="--history of the heavy row")
    parser.add_argument("--seconds", type=float, default=0.7, help="of one measurement of a rate")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each rate, in turns")
    parser.add_argument("--starts", type=int, default=5, help="measurements of the first batch")
    parser.add_argument("--quick", action="store_true", help="every bar once, on few ratings")
    parser.set_defaults(batches=BATCHES, pools=POOLS)
    parser.add_argument(
        "--trained", type=int, default=1_000_000, help="ratings of the training that may wait"
    )
    parser.add_argument("--epochs", type=int, default=4, help="of that training")
    parser.add_argument(
        "--memory",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1_000_000, 10_000_000, 100_000_000],
        help="sizes whose workers' memory is shown; the last one is trained on in 2 GiB",
    )
    flags = parser.parse_args()
    vars(flags).update(QUICK if flags.quick else {})
    return flags


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    import torch

    torch.set_num_threads(1)
    base = _config(flags, flags.ratings)
    heavy = base.replaced(history=flags.heavy)
    columns, heavy_columns = open_columns(base), open_columns(heavy)
    return {
        **describe(),
        "ratings": flags.ratings,
        "history": flags.heavy,
        "trained": flags.trained,
        "start": first_batches(columns, base, flags.starts),
        **({} if flags.quick else {"heavy start": first_batches(heavy_columns, heavy, flags.starts)}),
        "light": [rates(columns, base, size, flags) for size in flags.batches["light"]],
        "heavy": [rates(heavy_columns, heavy, size, flags) for size in flags.batches["heavy"]],
        "waits": {str(number): data_waits(number, flags) for number in (0, 2)},
        "memory": {str(number): _memory("workers", flags.folder, number, number) for number in flags.memory},
        "small memory": {
            "ratings": flags.memory[-1],
            **_memory("train", flags.folder, flags.memory[-1], MEMORY_LIMIT),
        },
    }


def _config(flags: argparse.Namespace, ratings: int) -> Config:
    folder = str(flags.folder / str(ratings))
    return Config.of(dataset="synthetic", synthetic_ratings=ratings, data_path=folder, history=0)


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
        places = shuffled(places, self.number, seed=0, epoch=0) % self.table_rows
        steps = torch.from_numpy(places).split(self.batch_size)
        start = time.perf_counter()
        for step in steps:
            torch.index_select(self.table, 0, step, out=self.out)
        rate = len(places) / (time.perf_counter() - start)
        self.steps = max(WARM_UP_STEPS, round(self.seconds * rate / self.batch_size))
        return rate


def rates(columns: Columns, base: Config, batch_size: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Rows/s of the limit, of no workers and of workers: all of them in every round, so that what the machine
    does meanwhile meets them alike.
    """
    figures: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:

        def add(name: str, **choices: Any) -> None:
            config = base.replaced(batch_size=batch_size, **choices)
            dataset = EventBatches(columns, config, rank=0, world_size=1)
            loader = stack.enter_context(build_dataloader(dataset, NextSteps(dataset), config))
            figures[name] = LoaderRate(loader, flags.seconds)

        dataset = EventBatches(columns, base.replaced(batch_size=batch_size), 0, 1)
        batch = dataset[Request("train", 0, 0)]
        row_bytes = sum(part.numel() * part.element_size() for part in batch) / batch_size
        limit = figures["limit"] = Limit(dataset, row_bytes, flags.seconds)
        add("0", num_workers=0)
        for method, number in flags.pools:
            add(f"{method} {number}", num_workers=number, mp_context=method)
        # Twice: the first pass warms up and finds the number of steps, the second touches the pages of those.
        for figure in [*figures.values()] * 2:
            figure()
        found: dict[str, list[float]] = {name: [] for name in figures}
        for _ in range(flags.rounds):
            for name, figure in figures.items():
                found[name].append(figure())
    return {
        "batch size": batch_size,
        "bytes a row": row_bytes,
        "rows of the limit": limit.table_rows,
        "rows of the data": limit.number,
        "rows/s": {name: _spread(values) for name, values in found.items()},
        "of the limit": ratio(found["0"], found["limit"]),
        "of 0 workers": {
            name: ratio(values, found["0"]) for name, values in found.items() if name not in ("0", "limit")
        },
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def first_batches(columns: Columns, base: Config, starts: int) -> dict[str, dict[str, float]]:
    """Seconds from `build_dataloader` to the first batch, beside those of imports in new processes."""

    def first(number: int, method: str) -> float:
        config = base.replaced(num_workers=number, mp_context=method)
        dataset = EventBatches(columns, config, rank=0, world_size=1)
        start = time.perf_counter()
        with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
            # What a user waits for: the start of the workers, their imports, and one batch.
            next(iter(loader))
            return time.perf_counter() - start

    def python(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    figures: dict[str, Callable[[], float]] = {
        "python": lambda: python("pass"),
        "import torch.utils.data": lambda: python("import torch.utils.data"),
        "spawn 1": lambda: first(1, "spawn"),
        "spawn 4": lambda: first(4, "spawn"),
        "forkserver 4": lambda: first(4, "forkserver"),
    }
    # Only the first pool waits for the server of forks. What is measured once needs no other warm-up.
    for name in figures if starts > 1 else ["forkserver 4"]:
        figures[name]()
    found = [{name: figure() for name, figure in figures.items()} for _ in range(starts)]
    return {name: _spread([times[name] for times in found]) for name in figures}


def data_waits(num_workers: int, flags: argparse.Namespace) -> list[float]:
    """The share of each epoch that training in two processes waits for batches."""
    open_columns(_config(flags, flags.trained))
    with tempfile.TemporaryDirectory() as reports:
        command = [*torchrun(2), str(EXAMPLE), "--epochs", str(flags.epochs), "--report_dir", reports]
        command += ["--num_workers", str(num_workers), "--data_path", str(flags.folder / str(flags.trained))]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        report = json.loads((Path(reports) / "metrics.json").read_text())
    return [epoch["data_wait"] for epoch in report["epochs"]]


def _memory(what: str, folder: Path, ratings: int, number: int) -> dict[str, Any]:
    """What benchmarks/memory.py finds, in a process of its own."""
    data_path = str(folder / str(ratings))
    # So that the ratings are there, and lie in no cache because of that process.
    open_columns(Config.of(dataset="synthetic", synthetic_ratings=ratings, data_path=data_path))
    command = [sys.executable, str(Path(__file__).with_name("memory.py")), what, data_path, str(number)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
