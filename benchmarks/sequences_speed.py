"""Measure how fast a model of the next item learns, beside the SASRec of other packages.

    python benchmarks/sequences_speed.py                       a synthetic world
    python benchmarks/sequences_speed.py --real FOLDER         or a MovieLens set
    python benchmarks/sequences_speed.py --rectools PYTHON     with the SASRec of that package as well

All have two blocks of the same width with as many heads, read the last 50 items, compare the next item with
all items, and learn from as many targets in a step, with one thread a process. A target is a predicted event;
padding does not count. The package `recbole` reads a sequence again for each target; `rectools`, like this
project, predicts at every place of it. Measured in turns, in short blocks; medians of ratios within a round.
The other packages are measured without their loaders, loggers and progress bars.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import DOCS, bar, describe, finish, in_turns, make_parser, origin, ratio, shown_ratio, table
from sequences import LONGEST, SETTINGS, SasrecTraining, known_before
from teams import Job, Team, Variant, take_answers, teams
from train_here import Here, serve_rank

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext

PAGE = DOCS / "sequential.md"
THIS, RECBOLE = "this", "recbole"
ONE, TWO, RECTOOLS = "this, 1 process", "this, 2 processes", "rectools"
# Width, depth and heads of recbole.
SHAPE = {
    "--embedding_dim": SETTINGS["hidden_size"],
    "--num_blocks": SETTINGS["n_layers"],
    "--num_heads": SETTINGS["n_heads"],
    "--mlp_dims": SETTINGS["inner_size"],
    "--history": LONGEST,
}
# The SASRec of `rectools`: its defaults, but with the width, the heads and the length of recbole.
SHIFTED = {"n_factors": 64, "n_heads": 2, "session_max_len": 50, "threads": 1}
BARS = {"peer": 1.5, "ranks": 1.6}


def main() -> None:
    """Measure and show, and write if that is asked for; or be a rank of a team."""
    if sys.argv[1:2] == ["rank"]:
        serve_sequences(sys.argv[2:])
    parser = make_parser(__doc__, RECBOLE)
    parser.add_argument("--real", type=Path, help="folder of a MovieLens set")
    parser.add_argument("--ratings", type=int, default=300_000, help="of the world that is drawn")
    parser.add_argument("--batch", type=int, default=2048, help="targets of each process and step")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each, in turns")
    parser.add_argument("--steps", type=int, default=2, help="of a measurement of recbole; others 8 times it")
    parser.add_argument("--task", default="sequence", help="of this project (default: sequence)")
    parser.add_argument("--rectools", type=Path, help="Python of an environment that has the package")
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], help="flags of the example, the last"
    )
    finish("sequences_speed", parser.parse_args(), measure, judge, render, PAGE, mark="speed")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory() as folder:
        data = flags.real or Path(folder) / "synthetic"
        if not flags.real:
            write_synthetic(data, flags.ratings, seed=0)
        command = command_of(flags, data, Path(folder))
        columns = open_columns(parse_args(command))
        ranks = {ONE: 1, TWO: 2, RECBOLE: 1}
        started = {name: Team("sequences_speed.py", n, "rank", *command) for name, n in ranks.items()}
        if flags.rectools:
            np.savez(Path(folder) / "events.npz", train=np.stack(known_before(columns, "validation")))
            # Sequences of a step that hold as many targets.
            settings = {**SHIFTED, "seed": 0, "batch_size": max(1, flags.batch // LONGEST)}
            arguments = (folder, json.dumps(settings))
            python = str(flags.rectools)
            started[RECTOOLS] = Team("sequences_rectools.py", 1, *arguments, python=python)
        with teams(started):
            measures = {name: partial(rate_of, name, team, flags) for name, team in started.items()}
            rates = in_turns(measures, flags.rounds, warm_up=1)
    return {
        **describe(),
        "data": "synthetic" if not flags.real else data.resolve().name,
        "events": columns.num_train,
        "items": columns.num_items,
        "batch": flags.batch,
        "rates": rates,
    }


def command_of(flags: argparse.Namespace, data: Path, folder: Path) -> list[str]:
    """Flags of the training of this project."""
    shape = [word for name, value in SHAPE.items() for word in (name, str(value))] if not flags.train else []
    places = ["--data_path", str(data), "--cache_dir", str(folder / "columns")]
    return ["--task", flags.task, "--split", "leave_one_out", *places, *shape, *flags.train]


def rate_of(name: str, team: Team, flags: argparse.Namespace) -> float:
    """Targets a second of some steps."""
    steps = flags.steps if name == RECBOLE else 8 * flags.steps
    variant = THIS if name in (ONE, TWO) else name
    answer = team.ask("steps", Job(variant, flags.batch, steps=steps))
    # rectools answers with its targets instead of the loss.
    targets = answer["loss"] if name == RECTOOLS else flags.batch * len(team.ranks)
    return float(targets * steps / answer["seconds"])


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Bars of this project beside the others, one process each, and of two processes beside one."""
    rates = result["rates"]
    bars = [
        compared(f"this / {peer}, one process each", rates[ONE], rates[peer], BARS["peer"])
        for peer in (RECBOLE, RECTOOLS)
        if peer in rates
    ]
    return [*bars, compared("2 processes / 1", rates[TWO], rates[ONE], BARS["ranks"])]


def compared(name: str, ours: list[float], theirs: list[float], least: float) -> dict[str, Any]:
    """Bar of the median ratio."""
    return bar(name, ratio(ours, theirs), least, shown_ratio(ours, theirs), f"{least}")


def render(result: dict[str, Any]) -> str:
    """Table with a row for each training, and its data and origin."""
    rates = result["rates"]
    lines = [(name, f"{median(found):,.0f}", shown_ratio(rates[ONE], found)) for name, found in rates.items()]
    about = (
        f"{result['data']}: {result['events']:,} events, {result['items']:,} items; {result['batch']:,} "
        f"targets of each process and step. Medians over rounds, and [least, most]. {origin(result)}."
    )
    return f"{table(('training', 'targets/s', 'this, 1 process / it'), lines)}\n\n{about}"


class Prefixes:
    """SASRec of `recbole`, of which each target of a batch is a sequence of its own."""

    def __init__(self, columns: Columns) -> None:
        self.training = SasrecTraining(columns, {}, 0)
        self.losses: dict[int, Iterator[float]] = {}

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        if batch_size not in self.losses:
            epochs = (self.training.losses(batch_size) for _ in itertools.count())
            self.losses[batch_size] = itertools.chain.from_iterable(epochs)
        return [*itertools.islice(self.losses[batch_size], number)][-1]


def serve_sequences(flags: list[str]) -> None:
    """Serve jobs of this project and of recbole. flags: of the example."""
    answers = take_answers()
    config = parse_args(flags)
    columns = open_columns(config)

    def make(context: RuntimeContext, name: str) -> Variant:
        return Here(columns, context, config) if name == THIS else Prefixes(columns)

    serve_rank(answers, config, make)


if __name__ == "__main__":
    main()
