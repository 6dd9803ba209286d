"""Measure how fast batches come out of the loader, how soon the first one, and what memory workers take.

    python benchmarks/feed.py --write             everything: twenty minutes on two cores, 11 GB
    python benchmarks/feed.py --quick             a part of it, once

Prints each figure beside its bar; with --write it also writes docs/feed.json, docs/feed.png and the part of
docs/log/benchmarks.md at the feed marks. The ratings are drawn into --folder and kept. Measures; asserts
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import DOCS, EXAMPLE, ROOT, describe, finish, make_parser, torchrun
from feed_own import write_own_tables
from feed_rates import rates, spread
from feed_tables import draw, judge, render

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches

# Workers import this file again: nothing heavy at its top level.
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.host import keep_freed_memory

PAGE = DOCS / "log" / "benchmarks.md"
MARKS = ("<!-- feed: made by benchmarks/feed.py -->", "<!-- end of feed -->")
BATCH_SIZES = (1024, 8192, 65_536)
# Of the light row, beside which that of one's own tables is measured, and of the heavy one.
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
    own = _own_config(flags)
    columns, heavy_columns = open_columns(base), open_columns(heavy)
    kinds = {"light": (columns, base), "own": (open_columns(own), own)}
    return {
        **describe(),
        "ratings": flags.ratings,
        "history": flags.heavy,
        "trained": flags.trained,
        "start": first_batches(columns, base, flags.starts),
        **({} if flags.quick else {"heavy start": first_batches(heavy_columns, heavy, flags.starts)}),
        **_by_size(kinds, flags.batches["light"], flags),
        **_by_size({"heavy": (heavy_columns, heavy)}, flags.batches["heavy"], flags),
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


def _own_config(flags: argparse.Namespace) -> Config:
    folder = flags.folder / f"own-{flags.ratings}"
    write_own_tables(folder, flags.ratings)
    # All of them, as many as the light row has, although some are of the same user and item.
    return Config.of(data_path=str(folder), duplicates="keep", history=0)


def _by_size(
    kinds: dict[str, tuple[Columns, Config]], sizes: tuple[int, ...], flags: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    found = [rates(kinds, size, flags) for size in sizes]
    return {kind: [each[kind] for each in found] for kind in kinds}


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
    return {name: spread([times[name] for times in found]) for name in figures}


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
