"""Measure how quality follows the batch: the default example with multiples of its default batch.

    python benchmarks/batches.py [--write]                                    synthetic ratings
    python benchmarks/batches.py --real FOLDER_OF_ML_LATEST_SMALL [--write]   and real ones
    python benchmarks/batches.py --ratings 20000 --multiples 1,4 --seeds 1    a quick look

Everything else has its default, so the rate of the tables follows the batch by the root. With --write it
writes docs/batches.json, and the part of docs/quality.md between the marks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import (
    DOCS,
    comma_separated,
    describe,
    finish,
    make_parser,
    mean,
    origin,
    spread,
    table,
    train,
    training_seconds,
)

from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.errors import counted

PAGE = DOCS / "quality.md"
TASKS = {"rating": "rmse", "ranking": "ndcg_at_10"}


def main() -> None:
    """Train and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, help="folder that holds ml-latest-small")
    parser.add_argument("--ratings", type=int, default=200_000, help="synthetic ones (default: 200000)")
    parser.add_argument("--multiples", type=comma_separated(int), default=[1, 4, 16, 64], help="1,4,16,64")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each case (default: 3)")
    finish("batches", parser.parse_args(), measure, None, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the results of all trainings."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        # The seeds are those of trainings on the same ratings.
        synthetic = Path(folder, "synthetic")
        write_synthetic(synthetic, flags.ratings, seed=0)
        data: dict[str, tuple[object, ...]] = {
            f"synthetic, {flags.ratings:,} ratings": ("--data_path", synthetic)
        }
        if flags.real:
            data["ml-latest-small"] = ("--data_path", flags.real, "--cache_dir", f"{folder}/real")
        for name, files in data.items():
            for task in TASKS:
                for seed in range(flags.seeds):
                    given = (*files, "--task", task, "--seed", seed, "--split", "time")
                    runs += [{"data": name, **run} for run in trainings(given, task, flags.multiples)]
    return {**describe(), "runs": runs}


def trainings(given: Iterable[object], task: str, multiples: Iterable[int]) -> Iterable[dict[str, Any]]:
    """Yield the results of a training with each multiple of the default batch, which comes first."""
    default = 0
    for multiple in multiples:
        batch = ("--batch_size", default * multiple) if default else ()
        report = train(*given, *batch)
        default = default or report["config"]["batch_size"]
        yield {
            "task": task,
            "multiple": multiple,
            "batch_size": report["config"]["batch_size"],
            "steps": report["epochs"][0]["steps"],
            "test": report["test"][TASKS[task]],
            "seconds": training_seconds(report),
        }


def render(result: dict[str, Any]) -> str:
    """Table and origin."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in result["runs"]:
        cases.setdefault((run["data"], run["task"], run["multiple"]), []).append(run)
    lines = []
    for (data, task, multiple), same in cases.items():
        batch, steps = f"{same[0]['batch_size']:,}", f"{same[0]['steps']:,}"
        tests = [run["test"] for run in same]
        seconds = mean(run["seconds"] for run in same)
        lines.append([data, task, str(multiple), batch, steps, spread(tests), f"{seconds:.1f}"])
    heads = ["data", "task", "multiple", "batch", "steps an epoch", "test", "seconds"]
    seeds = counted(len(next(iter(cases.values()))), "seed")
    about = f"Tests are RMSE and NDCG@10, mean and spread of {seeds}; {origin(result)}."
    return f"{table(heads, lines, left=(0, 1))}\n\n{about}"


if __name__ == "__main__":
    main()
