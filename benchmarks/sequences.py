"""Measure how well what comes next is ranked, beside other systems on the same events.

    python benchmarks/sequences.py                               ml-100k
    python benchmarks/sequences.py --real FOLDER... [--write]    and the MovieLens sets in these folders
    python benchmarks/sequences.py --planted [--write]           a world whose order is known
    python benchmarks/sequences.py --also sequences.json         joins what a run of other sets has found
    python benchmarks/sequences.py --only_this --also FILE       measures this project again, and nothing else
    python benchmarks/sequences.py --rectools PYTHON             with the SASRec of that package as well

The newest rating of each user is the test (leave_one_out), or the newest fifth of all (time); ratings of one
second have the order of the file. Each test item is ranked among all items that its user has not had, and
others with the same score count as ranked before it. This project has two processes and the defaults of its
task. Popularity, what is popular of late, EASE, least squares and SASRec are chosen on validation, in their
grids; SASRec's settings with the first seed of each set, and its batch by hand, see `sequences_peers.py`.
Where the newest rating is the test, the package `recbole` computes the metrics once more, from what our
served model recommends. Needs requirements-dev.txt. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clicks import report_of
from environment import DOCS, describe, finish, make_parser
from movielens_100k import write_movielens_100k
from peers_ranking import PENALTIES, Ranked, chosen, ease, least_squares, popularity
from quality_peers import NUM_RANKS, NUM_SEEDS
from quality_peers import Case as AnyCase
from sequences_agree import differences, served_metrics
from sequences_peers import (
    chosen_settings,
    counted_chain,
    most_recent,
    sasrec_of,
    shifted_sasrec,
)
from sequences_tables import MARKS, THIS, judge, render
from threadpoolctl import threadpool_limits

from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import ChainWorld, write_synthetic

SPLITS = ("leave_one_out", "time")
PAGE = DOCS / "log" / "benchmarks.md"
OTHERS = ("implicit", "recbole")
PLANTED = "chain"


@dataclass(frozen=True)
class Case(AnyCase):
    """A set, the split of it as what the others call a task, and a seed.

    trained: flags of the example: the task, and what is not its default.
    """

    trained: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """See `quality_peers.Case`."""
        places = ("--data_path", str(self.data), "--cache_dir", str(self.folder / "columns"))
        return [*self.trained, "--split", self.task, *places, "--seed", str(self.seed)]

    @property
    def save_dir(self) -> Path:
        """Where the checkpoints of this training lie."""
        return self.folder / f"{self.data.name}-{self.task}-{self.seed}-dumps"

    def ours(self, columns: Columns) -> dict[str, Any]:
        """This project; and the greatest difference from what `recbole` finds, where it can be asked.

        Raises:
            RuntimeError: when it had other events than the columns.
        """
        folder = self.folder / f"{self.data.name}-{self.task}-{self.seed}"
        dumped = ["--dump", "--save_dir", str(self.save_dir)]
        report = report_of([*self.command, *dumped], NUM_RANKS, folder)
        if report["baselines"] != columns.baselines["ranks"]:
            raise RuntimeError("the baselines of the report are not those of the columns")
        more: dict[str, Any] = {"epochs": len(report["epochs"])}
        if self.task == "leave_one_out":
            served = served_metrics(self.save_dir, columns)
            more["recbole differs by"] = differences(report["test"], served)
        return self.run(THIS, report["test"], sum(epoch["seconds"] for epoch in report["epochs"]), **more)


def main() -> None:
    """Train all, write, show."""
    flags = parse()
    about = {**describe(), "task": flags.task, "flags": flags.train}
    about["versions"] |= {name: version(name) for name in OTHERS}
    runs = [run for file in flags.also for run in measured_before(file, about)]
    with tempfile.TemporaryDirectory() as folder:
        trained = ("--task", flags.task, *flags.train)
        for data in data_sets(flags, Path(folder)):
            for split in flags.splits:
                cases = [Case(data, split, seed, Path(folder), trained) for seed in range(flags.seeds)]
                runs += planted(cases) if flags.planted else compared(cases, flags)
    # What is measured again is measured once.
    again = {(run["data"], run["task"], run["system"], run["seed"]): run for run in runs}
    runs = [*again.values()]
    result = {**about, "runs": runs}
    name = "sequences_planted" if flags.planted else "sequences"
    finish(name, {**result, "bars": judge(runs)}, render(result), flags, page=PAGE, marks=MARKS[name])


def measured_before(file: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """What another run of this script found.

    Raises:
        ValueError: when it had another machine, other versions or other flags.
    """
    found: dict[str, Any] = json.loads(file.read_text())
    odd = [name for name in about if name != "date" and found[name] != about[name]]
    if odd:
        raise ValueError(f"{file} differs in {', '.join(odd)}; measure it again")
    runs: list[dict[str, Any]] = found["runs"]
    return runs


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens sets")
    parser.add_argument("--only_real", action="store_true", help="leave ml-100k out")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="files of --report, to be joined")
    parser.add_argument("--only_this", action="store_true", help="leave the others out; see --also")
    parser.add_argument("--planted", action="store_true", help="only a world that is drawn from a chain")
    parser.add_argument("--ratings", type=int, default=1_000_000, help="of that world")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS, help="default: both")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help=f"of each case (default: {NUM_SEEDS})")
    parser.add_argument("--task", default="sequence", help="of this project (default: sequence)")
    parser.add_argument("--rectools", type=Path, help="Python of an environment that has the package")
    parser.add_argument(
        "--epochs", type=int, default=50, help="of SASRec at most; of rectools' five times it"
    )
    parser.add_argument("--patience", type=int, default=5, help="of SASRec, likewise")
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], help="flags of the example, the last"
    )
    flags = parser.parse_args()
    # The oracle ranks what comes after all that a user had.
    flags.splits = SPLITS[:1] if flags.planted else tuple(flags.splits)
    return flags


def data_sets(flags: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """The folders to compare on; what no folder holds is written into one."""
    if flags.planted:
        write_synthetic(folder / PLANTED, flags.ratings, seed=0, world=ChainWorld())
        yield folder / PLANTED
        return
    yield from flags.real
    if not flags.only_real:
        write_movielens_100k(folder / "ml-100k")
        yield folder / "ml-100k"


def planted(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """This project between popularity and the oracle, and a chain that is counted."""
    for case in cases:
        columns = case.columns
        for name, metrics in columns.baselines["ranks"].items():
            yield case.run(name, metrics, 0.0)
        yield shown(case, "counted chain", counted_chain(columns))
        yield case.ours(columns)


def compared(cases: Sequence[Case], flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every system on the test, for each seed."""
    if flags.only_this:
        yield from ({**case.ours(case.columns), "notes": case.columns.notes} for case in cases)
        return
    settings = chosen_settings(cases[0].columns, cases[0].seed, flags.epochs, flags.patience)
    for case in cases:
        columns, seed = case.columns, case.seed
        # Its own threads share the cores, so those of the products would only be in their way.
        with threadpool_limits(1, "blas"):
            squares = least_squares(columns, seed)
        found = {
            "popularity": popularity(columns),
            "most recent": most_recent(columns),
            "EASE": chosen(columns, ease, PENALTIES, seed),
            "least squares": squares,
            "counted chain": counted_chain(columns),
            "SASRec, recbole": sasrec_of(columns, settings, seed, flags.epochs, flags.patience),
        }
        if flags.rectools:
            found["SASRec, rectools"] = shifted_sasrec(
                columns, flags.rectools, seed, flags.epochs, flags.patience
            )
        for name, ranked in found.items():
            yield shown(case, name, ranked)
        yield {**case.ours(columns), "notes": columns.notes}


def shown(case: Case, system: str, ranked: Ranked) -> dict[str, Any]:
    """What the tables need of a peer."""
    return case.run(system, ranked.metrics, ranked.seconds, settings=ranked.settings)


if __name__ == "__main__":
    main()
