"""Measure how fast a training is whose tables take ids in, beside the same training with static tables.

    python benchmarks/dynamic_train.py --write         docs/dynamic_train.json and its table
    python benchmarks/dynamic_train.py --sizes 2000+1000 --batch 256 --rounds 1 --seconds 0.02

Both are variants of the same processes, measured in turns in short blocks. Tables have room for twice their
ids, the default. Asserts nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from environment import DOCS, describe, finish, make_parser
from figures import bar, origin, ratio, shown_ratio, table
from train import Measurement, sizes_of
from train_dynamic import FILLING, FULL, STATIC, write_ids
from train_models import TWO_TABLES, make_columns
from train_team import Order, Team, teams

PAGE = DOCS / "log" / "benchmarks.md"
MARKS = ("<!-- training -->", "<!-- end of training -->")
RANKS = (1, 2)
BAR = 0.85


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    result = {**describe(), "batch": flags.batch}
    result["sizes"] = [measure_size(users, movies, flags) for users, movies in flags.sizes]
    result["bars"] = judge(result)
    finish("dynamic_train", result, render(result), flags, page=PAGE, marks=MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    sizes = "1000000+100000,10000000+1000000"
    parser.add_argument(
        "--sizes", type=sizes_of, default=sizes_of(sizes), help=f"users+movies (default: {sizes})"
    )
    parser.add_argument("--batch", type=int, default=4096, help="of each rank")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each figure, in turns")
    parser.add_argument("--seconds", type=float, default=0.4, help="about, of one measurement")
    return parser.parse_args()


def measure_size(users: int, movies: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Ratings a second of each kind of tables, by the number of ranks."""
    rates = {}
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        make_columns(Path(folder), users, movies, TWO_TABLES.num_ratings)
        for name, number in (("user", users), ("movie", movies)):
            write_ids(Path(folder), name, number)
        for ranks in RANKS:
            # One team after the other: three models of the largest size take much of the memory.
            name = f"here {ranks}"
            with teams({name: Team("train_dynamic.py", ranks, folder)}) as started:
                variants = {kind: (name, Order(kind, flags.batch, 1, 0)) for kind in (STATIC, FULL, FILLING)}
                rates[str(ranks)] = Measurement(variants, started, flags).rates()
    return {"users": users, "movies": movies, "rates": rates}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
    bars = []
    for size in result["sizes"]:
        for ranks, rates in size["rates"].items():
            found = ratio(rates[FULL], rates[STATIC])
            name = f"{_rows(size)}, {_processes(ranks)}, dynamic / static"
            bars.append(bar(name, found, BAR, f"{found:.2f}", f"{BAR}"))
    return bars


def _rows(size: dict[str, Any]) -> str:
    return f"{size['users']:,} + {size['movies']:,} ids"


def _processes(ranks: str) -> str:
    return "1 process" if ranks == "1" else f"{ranks} processes"


def render(result: dict[str, Any]) -> str:
    """A line for each size and number of ranks."""
    lines = [["ids", "processes", "static, ratings/s", "dynamic, of static", "filling, of static"]]
    lines.append(["---", *["---:"] * 4])
    for size in result["sizes"]:
        for ranks, rates in size["rates"].items():
            ratios = [shown_ratio(rates[kind], rates[STATIC]) for kind in (FULL, FILLING)]
            lines.append([_rows(size), ranks, f"{round(median(rates[STATIC]), -3):,.0f}", *ratios])
    about = (
        f"{result['batch']:,} ratings a rank, ids all as likely; filling: most ids of a step are new. "
        f"Medians over rounds, of ratios within a round, and [least, most] of them. {origin(result)}."
    )
    return f"{table(lines)}\n\n{about}"


if __name__ == "__main__":
    main()
