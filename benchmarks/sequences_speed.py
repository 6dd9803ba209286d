"""Measure how fast what comes next is learned, beside the SASRec of other packages.

    python benchmarks/sequences_speed.py                       a world whose order is known
    python benchmarks/sequences_speed.py --real FOLDER         or a MovieLens set
    python benchmarks/sequences_speed.py --rectools PYTHON     with the SASRec of that package as well

All have two blocks of the same width with as many heads, read the last 50 items, compare what came next with
all items, and learn from as many targets in a step, one thread a process. A target is an event that is
foreseen: padding is none. The package `recbole` reads a sequence anew for each target; `rectools`, like this
project, foresees at every place of it. Measured in turns, in short blocks; medians of ratios within a round.
The peers are without their loaders, loggers and progress bars. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from environment import DOCS, describe, finish, make_parser
from figures import bar, origin, ratio, shown_ratio, table
from recbole_parts import LONGEST, SETTINGS
from sequences_peers import SHIFTED, write_events
from sequences_rank import RECBOLE, THIS
from train_team import Order, Team, teams

from recsuite.config.parser import parse_args
from recsuite.datasets.movielens.synthetic import ChainWorld, write_synthetic
from recsuite.datasets.preparation.cache import open_columns

PAGE = DOCS / "sequential.md"
MARKS = ("<!-- speed: made by benchmarks/sequences_speed.py -->", "<!-- end of speed -->")
ONE, TWO, RECTOOLS = "this, 1 process", "this, 2 processes", "rectools"
# As wide, as deep and as many heads as the package's.
SHAPE = {
    "--embedding_dim": SETTINGS["hidden_size"],
    "--num_blocks": SETTINGS["n_layers"],
    "--num_heads": SETTINGS["n_heads"],
    "--mlp_dims": SETTINGS["inner_size"],
    "--history": LONGEST,
}
BARS = {"peer": 1.5, "ranks": 1.6}


def main() -> None:
    """Measure and show."""
    flags = parse()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        data = flags.real or Path(folder) / "chain"
        if not flags.real:
            write_synthetic(data, flags.ratings, seed=0, world=ChainWorld())
        command = command_of(flags, data, Path(folder))
        columns = open_columns(parse_args(command))
        started = {
            ONE: Team("sequences_rank.py", 1, *command),
            TWO: Team("sequences_rank.py", 2, *command),
            RECBOLE: Team("sequences_rank.py", 1, *command),
        }
        if flags.rectools:
            write_events(columns, Path(folder))
            # Sequences of a step that hold as many targets.
            settings = {**SHIFTED, "seed": 0, "batch_size": max(1, flags.batch // LONGEST)}
            arguments = ("serve", folder, json.dumps(settings))
            script = "sequences_rectools.py"
            started[RECTOOLS] = Team(script, 1, *arguments, python=str(flags.rectools))
        stack.enter_context(teams(started))
        rates = measured(started, flags)
        result = {
            **describe(),
            "data": "chain" if not flags.real else data.resolve().name,
            "events": columns.num_train,
            "items": columns.num_items,
            "batch": flags.batch,
            "rates": rates,
        }
    finish("sequences_speed", {**result, "bars": judge(rates)}, render(result), flags, None, PAGE, MARKS)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, help="folder of a MovieLens set")
    parser.add_argument("--ratings", type=int, default=300_000, help="of the world that is drawn")
    parser.add_argument("--batch", type=int, default=2048, help="targets of each process and step")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each, in turns")
    parser.add_argument("--steps", type=int, default=2, help="of a measurement of recbole; of others 8 times")
    parser.add_argument("--task", default="sequence", help="of this project (default: sequence)")
    parser.add_argument("--rectools", type=Path, help="Python of an environment that has the package")
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], help="flags of the example, the last"
    )
    return parser.parse_args()


def command_of(flags: argparse.Namespace, data: Path, folder: Path) -> list[str]:
    """The flags of this project's training."""
    shape = [word for name, value in SHAPE.items() for word in (name, str(value))] if not flags.train else []
    places = ["--data_path", str(data), "--cache_dir", str(folder / "columns")]
    return ["--task", flags.task, "--split", "leave_one_out", *places, *shape, *flags.train]


def measured(started: dict[str, Team], flags: argparse.Namespace) -> dict[str, list[float]]:
    """Targets a second of each, round by round."""
    found: dict[str, list[float]] = {name: [] for name in started}
    # One that is not counted: what is allocated, and fetched from the disk, is once.
    for number in range(1 + flags.rounds):
        for name in list(started)[:: 1 if number % 2 else -1]:
            rate = rate_of(name, started[name], flags)
            if number:
                found[name].append(rate)
    return found


def rate_of(name: str, team: Team, flags: argparse.Namespace) -> float:
    """Targets a second of some steps."""
    steps = flags.steps if name == RECBOLE else 8 * flags.steps
    variant = THIS if name in (ONE, TWO) else name
    answer = team.ask("steps", Order(variant, flags.batch, 1, steps))
    # rectools answers with its targets where the others have their loss.
    targets = answer["loss"] if name == RECTOOLS else flags.batch * len(team.ranks)
    return float(targets * steps / answer["seconds"])


def judge(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """This project beside the others, each with one process, and its two processes beside one."""
    bars = [
        compared(f"this / {peer}, one process each", rates[ONE], rates[peer], BARS["peer"])
        for peer in (RECBOLE, RECTOOLS)
        if peer in rates
    ]
    return [*bars, compared("2 processes / 1", rates[TWO], rates[ONE], BARS["ranks"])]


def compared(name: str, ours: list[float], theirs: list[float], least: float) -> dict[str, Any]:
    """The median of the ratios."""
    return bar(name, ratio(ours, theirs), least, shown_ratio(ours, theirs), f"{least}")


def render(result: dict[str, Any]) -> str:
    """A line for each, and what it was measured on."""
    rates = result["rates"]
    lines = [("training", "targets/s", "this, 1 process / it"), ("---", "---:", "---:")]
    lines += [
        (name, f"{median(found):,.0f}", shown_ratio(rates[ONE], found)) for name, found in rates.items()
    ]
    about = (
        f"{result['data']}: {result['events']:,} events, {result['items']:,} items; {result['batch']:,} "
        f"targets of each process and step. Medians over rounds, and [least, most]. {origin(result)}."
    )
    return f"{table(lines)}\n\n{about}"


if __name__ == "__main__":
    main()
