"""Compare --precision bf16 and --row_precision fp16 with fp32, by the validation of trainings.

    python benchmarks/precision.py --real FOLDER [--write]      a folder of ml-latest-small: half an hour

The trainings of a seed differ in nothing else. They have the tables of FBGEMM on a CPU, which rounds rows of
16 bits to the nearest number; a GPU rounds them at random. Choices in the synthetic ratings tell nothing of
taste, so they have no ranking. Needs the package recbole, of requirements-dev.txt, for ml-100k.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import DOCS, bar, describe, finish, make_parser, mean, origin, spread, table, timed, train
from peers import add_sets, data_sets

from recsuite.datasets.movielens.synthetic import write_synthetic

PAGE = DOCS / "log" / "benchmarks.md"
WAYS = {
    "fp32": (),
    "bf16 dense part": ("--precision", "bf16"),
    "fp16 rows": ("--row_precision", "fp16"),
}
TASKS = {
    "ratings": ("--split", "random", "--validation_fraction", "0.1"),
    "ranking": ("--task", "ranking", "--split", "leave_one_out"),
}
NUM_RATINGS = 100_000
# Bars of rows of 16 bits: the most RMSE above that of fp32, and the least NDCG@10 over it.
ABOVE, LEAST = 0.002, 0.98


class Trained(NamedTuple):
    """Validation of the trainings of a set by its task. values: by way, one of each seed."""

    data: str
    task: str
    metric: str
    values: dict[str, list[float]]

    def above(self, way: str) -> float:
        """Mean difference to fp32."""
        return mean(self.values[way]) - mean(self.values["fp32"])


def main() -> None:
    """Train, compare and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    add_sets(parser, seeds=3)
    parser.add_argument("--ratings", type=int, default=NUM_RATINGS, help="number of synthetic ratings")
    finish("precision", parser.parse_args(), measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Validation of each set, way and seed."""
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_synthetic(folder / "synthetic", flags.ratings, seed=0)
        sets = [(task, data) for data in data_sets(flags, folder) for task in TASKS]
        for task, data in [*sets, ("ratings", folder / "synthetic")]:
            command = ("--data_path", data, "--cpu_tables", "torchrec", *TASKS[task])
            for way, more in WAYS.items():
                seconds, found = timed(reports_of, flags.seeds, *command, *more)
                print(f"{data.name}, {task}, {way}: {seconds:.0f} s", file=sys.stderr, flush=True)
                runs.append({"data": data.name, "task": task, "way": way, **found})
    return {**describe(), "seeds": flags.seeds, "runs": runs}


def reports_of(seeds: int, *command: object) -> dict[str, Any]:
    """Main metric, and its value on the validation of the best epoch for each seed."""
    reports = [train(*command, "--seed", seed) for seed in range(seeds)]
    metric = reports[0]["main_metric"]
    best = [report["epochs"][report["test_epoch"] - 1]["validation"][metric] for report in reports]
    return {"metric": metric, "values": best, "epochs": [report["test_epoch"] for report in reports]}


def results_of(result: dict[str, Any]) -> list[Trained]:
    """Results by set and task."""
    found: dict[tuple[str, str], Trained] = {}
    for run in result["runs"]:
        key = run["data"], run["task"]
        found.setdefault(key, Trained(*key, run["metric"], {})).values[run["way"]] = run["values"]
    return [*found.values()]


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    bars = []
    for each in results_of(result):
        for way in (way for way in WAYS if way != "fp32"):
            name = f"{each.data}, {each.task}, {way}"
            if each.metric == "rmse":
                above = each.above(way)
                bars.append(bar(f"{name}, RMSE above fp32", above, ABOVE, f"{above:+.5f}", f"{ABOVE}", True))
            else:
                over = mean(each.values[way]) / mean(each.values["fp32"])
                bars.append(bar(f"{name}, NDCG@10 / fp32", over, LEAST, f"{over:.3f}", f"{LEAST}"))
    return bars


def render(result: dict[str, Any]) -> str:
    """Table, and origin."""
    lines = []
    for each in results_of(result):
        shown = "RMSE" if each.metric == "rmse" else "NDCG@10"
        cells = [spread(each.values[way]) for way in WAYS]
        differences = [f"{each.above(way):+.5f}" for way in WAYS if way != "fp32"]
        lines.append([f"{each.data}, {each.task}, {shown}", *cells, *differences])
    heads = ["validation", *WAYS, *(f"{way} - fp32" for way in WAYS if way != "fp32")]
    return f"{table(heads, lines)}\n\n{result['seeds']} seeds; {origin(result, fbgemm=True)}."


if __name__ == "__main__":
    main()
