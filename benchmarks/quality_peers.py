"""Compare this project with other systems, on the same events in the same run: ratings, and ranks.

    python benchmarks/quality.py --peers                              ml-100k
    python benchmarks/quality.py --peers --real FOLDER... [--write]   and the MovieLens sets in these folders

Ratings are split at random, 90 to 10; for ranks the newest rating of each user is the test. This project has
its defaults and two processes, and its columns say which events are which. It keeps its validation events for
stopping; the others learn from them too before they read the test, which is in their favour. The picture
shows the error on the validation events while every system learns from the training events alone. Needs
requirements-dev.txt. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

from clicks import SPLIT, report_of
from environment import DOCS, describe, make_parser, write_between
from movielens_100k import write_movielens_100k
from peers import ITERATIONS, NUM_POINTS, Ratings, Trace, biases, factorization_machine, ratings_of
from peers_ranking import rank_all
from quality_peers_tables import MARKS, PAGE, PICTURE, draw, render

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import finite
from recsuite.datasets.preparation.cache import open_columns

NUM_RANKS = 2
NUM_SEEDS = 3
RANDOM = ("--split", "random", "--test_fraction", "0.1")
OTHERS = ("myfm", "implicit")

# From known ratings, and those that are asked for, to how the training went.
Peer = Callable[[Ratings, Ratings], Trace]


@dataclass(frozen=True)
class Case:
    """A set, a task and a seed: what all systems are given."""

    data: Path
    task: str
    seed: int
    # Of columns and reports.
    folder: Path

    @property
    def command(self) -> list[str]:
        """The flags of this project."""
        split = RANDOM if self.task == "rating" else SPLIT
        places = ("--data_path", str(self.data), "--cache_dir", str(self.folder / "columns"))
        return [*split, *places, "--seed", str(self.seed)]

    @property
    def columns(self) -> Columns:
        """The events as this project splits them."""
        return open_columns(parse_args(self.command))

    def report(self, columns: Columns) -> dict[str, Any]:
        """That of a training of this project.

        Raises:
            RuntimeError: when it had other events than the columns.
        """
        name = f"{self.data.name}-{self.task}-{self.seed}"
        report = report_of(self.command, NUM_RANKS, self.folder / name)
        kind, baseline = ("predictions", "biases") if self.task == "rating" else ("ranks", "popularity")
        # Of other events these would hardly be the same to the last digit.
        if report["baselines"][baseline] != finite(columns.baselines[kind][baseline]):
            raise RuntimeError(f"the {baseline} of the report are not those of the columns")
        return report

    def run(self, system: str, metrics: dict[str, float], seconds: float, **more: Any) -> dict[str, Any]:
        """What the tables need of one system."""
        about = {"data": self.data.resolve().name, "task": self.task, "seed": self.seed}
        return {**about, "system": system, "metrics": metrics, "seconds": seconds, **more}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all, write, show."""
    flags = parse(arguments)
    runs, curves = [], []
    with tempfile.TemporaryDirectory() as folder:
        for data in data_sets(flags, Path(folder)):
            for seed in range(flags.seeds):
                case = Case(data, "rating", seed, Path(folder))
                found, drawn = compare_ratings(case, flags.iterations)
                runs += found
                curves += drawn
                runs += compare_ranks(Case(data, "ranking", seed, Path(folder)))
    about = describe()
    versions = {**about["versions"], **{name: version(name) for name in OTHERS}}
    result = {**about, "versions": versions, "iterations": flags.iterations, "runs": runs, "curves": curves}
    keep(result, flags)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or what stands behind --peers."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens sets")
    parser.add_argument("--only_real", action="store_true", help="leave ml-100k out")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help=f"of each case (default: {NUM_SEEDS})")
    parser.add_argument(
        "--iterations", type=int, default=ITERATIONS, help=f"draws of myFM (default: {ITERATIONS})"
    )
    return parser.parse_args(arguments)


def data_sets(flags: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """The folders to compare on; ml-100k is written into one."""
    yield from flags.real
    if not flags.only_real:
        write_movielens_100k(folder / "ml-100k")
        yield folder / "ml-100k"


def compare_ratings(case: Case, iterations: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every system on the test; and, of the first seed, how each came down on validation."""
    columns = case.columns
    report = case.report(columns)
    epochs = [epoch["seconds"] for epoch in report["epochs"]]
    runs = [case.run("this", {"rmse": report["test"]["rmse"]}, sum(epochs))]
    known, test = ratings_of(columns, "train", "validation"), ratings_of(columns, "test")
    for name, peer in rating_peers(case.seed, iterations, 1).items():
        trace = peer(known, test)
        runs.append(case.run(name, {"rmse": trace.rmse[-1]}, trace.seconds[-1]))
    if case.seed > 0:
        return runs, []
    errors = [epoch["validation"]["rmse"] for epoch in report["epochs"]]
    traces = {"this": Trace([*accumulate(epochs)], errors)}
    known, validation = ratings_of(columns, "train"), ratings_of(columns, "validation")
    for name, peer in rating_peers(case.seed, iterations, NUM_POINTS).items():
        traces[name] = peer(known, validation)
    data = case.data.resolve().name
    return runs, [{"data": data, "system": name, **vars(trace)} for name, trace in traces.items()]


def rating_peers(seed: int, iterations: int, num_points: int) -> dict[str, Peer]:
    """The other systems by their names in the table."""
    machine = partial(factorization_machine, seed=seed, iterations=iterations, num_points=num_points)
    return {
        "biases": biases,
        "myFM, ids": partial(machine, sets=False),
        "myFM, who rated what": partial(machine, sets=True),
    }


def compare_ranks(case: Case) -> list[dict[str, Any]]:
    """Every system on the test."""
    columns = case.columns
    report = case.report(columns)
    seconds = sum(epoch["seconds"] for epoch in report["epochs"])
    runs = [case.run("this", report["test"], seconds)]
    for name, ranked in rank_all(columns, case.seed).items():
        runs.append(case.run(name, ranked.metrics, ranked.seconds, settings=ranked.settings))
    return runs


def keep(result: dict[str, Any], flags: argparse.Namespace) -> None:
    """Show the tables; put figures and picture into --report, and with --write into docs, with the tables."""
    text = render(result)
    print(text)
    for folder in (flags.report, DOCS if flags.write else None):
        if folder is not None:
            (folder / "quality_peers.json").write_text(json.dumps(result, indent=1) + "\n")
            draw(result, folder / "peers.png")
    if flags.write:
        write_between(PAGE, MARKS, f"{PICTURE}\n\n{text}")


if __name__ == "__main__":
    main()
