"""Measure the value of capacity: the test error with dynamic tables of several capacities beside static ones.

    python benchmarks/dynamic_quality.py --data FOLDER --write    docs/dynamic_quality.json and two tables
    python benchmarks/dynamic_quality.py --data FOLDER --seeds 1 --epochs 1

FOLDER has a MovieLens set. Each training is one process with the batch of the defaults, on a core of its
own. A seed draws the random split and the initial weights, and all kinds of tables share it: differences
are between trainings of one seed. Years and genres always have room. No setting is chosen by the results.
Prints each figure beside its bar.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common import DOCS, bar, describe, finish, make_parser, mean, origin, spread, table, train
from quality import RANDOM

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns

PAGE = DOCS / "log" / "benchmarks.md"
SPLITS = {"random 90/10": RANDOM, "time 80/20": ("--split", "time")}
STATIC, DYNAMIC = "static", "dynamic"
# Share of the ids that has a place; the default is two places for each id.
ROOMS = {"all": None, "1/2": 2, "1/4": 4, "1/8": 8}
# Tables that grow with the data; the history has a row for each movie too.
TABLES = ("user", "movie", "history")
TIGHT = (
    "--vocabulary",
    "dynamic",
    "--max_load_factor",
    "0",
    "--eviction",
    "lfu",
    "--admission_threshold",
    "2",
)


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of MovieLens files")
    parser.add_argument("--seeds", type=int, default=3, help="of each training (default: 3)")
    epochs = Config().training.epochs
    parser.add_argument("--epochs", type=int, default=epochs, help=f"of a training (default: {epochs})")
    finish("dynamic_quality", parser.parse_args(), measure, judge, render, PAGE, mark="capacity")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Test error of every kind of tables, by split and then by seed."""
    with tempfile.TemporaryDirectory() as folder:
        return {**describe(), **compare(flags, Path(folder))}


def compare(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with every kind of tables."""
    ids = ids_of_tables(flags.data, folder)
    common = ("--epochs", str(flags.epochs))
    trainings = {
        (split, kind, seed): (*SPLITS[split], *kind_flags, *common, "--seed", str(seed))
        for seed in range(flags.seeds)
        for split in SPLITS
        for kind, kind_flags in kinds(ids).items()
    }
    # A training on each core is faster than one after the other on all.
    cores: SimpleQueue[int] = SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)

    def on_a_core(of_training: Sequence[str]) -> float:
        core = cores.get()
        # Of this thread; the process that it starts inherits it.
        os.sched_setaffinity(0, {core})
        places = ("--data_path", flags.data, "--cache_dir", folder / str(core))
        report = train(*places, *of_training)
        cores.put(core)
        return float(report["test"]["rmse"])

    with ThreadPoolExecutor(cores.qsize()) as pool:
        errors = list(pool.map(on_a_core, trainings.values()))
    rmse: dict[str, dict[str, list[float]]] = {split: {} for split in SPLITS}
    for (split, kind, _), error in zip(trainings, errors, strict=True):
        rmse[split].setdefault(kind, []).append(error)
    return {"data": flags.data.resolve().name, "ids": ids, "epochs": flags.epochs, "rmse": rmse}


def ids_of_tables(data: Path, folder: Path) -> dict[str, int]:
    """Number of ids in the data for each of the tables."""
    config = Config.of(data_path=str(data), cache_dir=str(folder / "ids"), vocabulary="dynamic", split="time")
    return {table.name: table.rows - 1 for table in open_columns(config).tables if table.name in TABLES}


def kinds(ids: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """Flags of each kind of tables."""
    found: dict[str, tuple[str, ...]] = {
        STATIC: ("--vocabulary", "fixed"),
        DYNAMIC: ("--vocabulary", "dynamic"),
    }
    for room, part in ROOMS.items():
        places = ",".join(f"{name}={number // part}" for name, number in ids.items()) if part else "auto"
        found[room] = (*TIGHT, "--capacity", places)
    return found


def differences(errors: dict[str, list[float]], kind: str) -> list[float]:
    """Differences of a kind of tables to static ones, seed by seed."""
    return [error - static for error, static in zip(errors[kind], errors[STATIC], strict=True)]


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar: with room for all ids, dynamic tables differ from static ones by no more than seeds do."""
    bars = []
    for split, errors in result["rmse"].items():
        found = abs(mean(differences(errors, DYNAMIC)))
        limit = max(errors[STATIC]) - min(errors[STATIC])
        name = f"{split}, RMSE, dynamic - static"
        shown = f"{limit:.4f}, the range of {len(errors[STATIC])} seeds"
        bars.append(bar(name, found, limit, f"{found:.4f}", shown, at_most=True))
    return bars


def render(result: dict[str, Any]) -> str:
    """Table of static and dynamic tables, and table of capacities."""
    return f"{_beside(result)}\n\n{_curve(result)}\n\n{_about(result)}"


def _beside(result: dict[str, Any]) -> str:
    lines = []
    for split, errors in result["rmse"].items():
        apart = differences(errors, DYNAMIC)
        of_seeds = ", ".join(f"{value:+.4f}" for value in apart)
        lines.append(
            [split, spread(errors[STATIC]), spread(errors[DYNAMIC]), f"{mean(apart):+.4f}", of_seeds]
        )
    return table(["split", "static, RMSE", "dynamic, RMSE", "difference", "by seed"], lines)


def _curve(result: dict[str, Any]) -> str:
    heads = [head for split in result["rmse"] for head in (f"{split}, RMSE", "difference to static")]
    lines = []
    for room, part in ROOMS.items():
        places = [f"{result['ids'][name] // part:,}" if part else "auto" for name in TABLES[:2]]
        cells = [
            cell
            for errors in result["rmse"].values()
            for cell in (spread(errors[room]), f"{mean(differences(errors, room)):+.4f}")
        ]
        lines.append([f"{room} of the ids" if part else "all ids", *places, *cells])
    return table(["capacity for", "rows of users", "rows of movies", *heads], lines)


def _about(result: dict[str, Any]) -> str:
    seeds = len(next(iter(result["rmse"].values()))[STATIC])
    users, movies = (f"{result['ids'][name]:,}" for name in TABLES[:2])
    return (
        f"{result['data']}, {users} users and {movies} movies, {result['epochs']} epochs; mean and standard "
        f"deviation of {seeds} seeds, and means of differences within a seed. {origin(result)}."
    )


if __name__ == "__main__":
    main()
