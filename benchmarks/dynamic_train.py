"""Measure how fast a training with dynamic tables is, beside the same training with static tables.

    python benchmarks/dynamic_train.py --write         docs/dynamic_train.json and its table
    python benchmarks/dynamic_train.py --sizes 2000+1000 --batch 256 --rounds 1 --seconds 0.02

Both are variants of the same processes, measured in turns in short blocks. The columns have numbers for users
and movies: static tables take them as rows, dynamic tables look up ids that `write_ids` draws. A full table
holds them all before the first step, as after a load, so that no step inserts any; one that fills begins
empty. Tables have room for twice their ids, the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import DOCS, bar, describe, finish, make_parser, origin, processes, ratio, shown_ratio, table
from teams import Job, Team, take_answers, teams
from train import add_sizes, measure_rates
from train_here import TWO_TABLES, Here, columns_of, make_columns, serve_rank

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.runtime.process import RuntimeContext

PAGE = DOCS / "log" / "benchmarks.md"
RANKS = (1, 2)
BAR = 0.85
STATIC, FULL, FILLING = KINDS = ("static", "dynamic", "dynamic, filling")


def main() -> None:
    """Measure and show, and write if that is asked for; or be a rank of a team."""
    if sys.argv[1:2] == ["rank"]:
        serve_kinds(Path(sys.argv[2]))
    parser = make_parser(__doc__)
    add_sizes(parser, "1000000+100000,10000000+1000000")
    parser.add_argument("--batch", type=int, default=4096, help="of each rank")
    finish("dynamic_train", parser.parse_args(), measure, judge, render, PAGE, mark="training")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    sizes = [measure_size(users, movies, flags) for users, movies in flags.sizes]
    return {**describe(), "batch": flags.batch, "sizes": sizes}


def measure_size(users: int, movies: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Ratings a second of each kind of tables, for each number of ranks."""
    rates = {}
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        make_columns(Path(folder), users, movies, TWO_TABLES.num_ratings)
        for name, number in (("user", users), ("movie", movies)):
            write_ids(Path(folder), name, number)
        for ranks in RANKS:
            # One team after the other: three models of the largest size take much of the memory.
            name = f"here {ranks}"
            with teams({name: Team("dynamic_train.py", ranks, "rank", folder)}) as started:
                variants = {kind: (name, Job(kind, flags.batch)) for kind in KINDS}
                rates[str(ranks)] = measure_rates(variants, started, flags.rounds, flags.seconds)
    return {"users": users, "movies": movies, "rates": rates}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    bars = []
    for size in result["sizes"]:
        for ranks, rates in size["rates"].items():
            found = ratio(rates[FULL], rates[STATIC])
            name = f"{_rows(size)}, {processes(int(ranks))}, dynamic / static"
            bars.append(bar(name, found, BAR, f"{found:.2f}", f"{BAR}"))
    return bars


def _rows(size: dict[str, Any]) -> str:
    return f"{size['users']:,} + {size['movies']:,} ids"


def render(result: dict[str, Any]) -> str:
    """Table with a row for each size and number of ranks."""
    lines = []
    for size in result["sizes"]:
        for ranks, rates in size["rates"].items():
            ratios = [shown_ratio(rates[kind], rates[STATIC]) for kind in (FULL, FILLING)]
            lines.append([_rows(size), ranks, f"{round(median(rates[STATIC]), -3):,.0f}", *ratios])
    heads = ["ids", "processes", "static, ratings/s", "dynamic, of static", "filling, of static"]
    about = (
        f"{result['batch']:,} ratings a rank, ids equally likely; filling: most ids of a step are new. "
        f"Medians over rounds, of ratios within a round, and [least, most] of them. {origin(result)}."
    )
    return f"{table(heads, lines)}\n\n{about}"


def write_ids(folder: Path, name: str, number: int) -> None:
    """Draw an id for each value of a feature, and one for row 0, which is never looked up."""
    generator = np.random.default_rng(1)
    # Some more than needed: of 64 bits hardly any are drawn twice.
    ids = np.unique(generator.integers(-(2**63) + 1, 2**63 - 1, size=number + 1000))
    np.save(folder / f"{name}_ids.npy", generator.permutation(ids)[: number + 1])


def dynamic(columns: Columns) -> Columns:
    """The same data for dynamic tables."""
    tables = tuple(
        dataclasses.replace(table, feature=dataclasses.replace(table.feature, ids="dynamic"))
        for table in columns.tables
    )
    return dataclasses.replace(columns, tables=tables)


def fill(trained: Here) -> None:
    """Insert a row for each id of this rank."""
    import torch
    from dynamic import put_ids

    from recsuite.sharding.dynamic_ranks import dynamic_rows

    for name, share in dynamic_rows(trained.state.model).items():
        ids = torch.from_numpy(np.load(Path(trained.columns.folder) / f"{name}_ids.npy")[1:])
        ids = ids[share.placement.owner_of(ids) == share.rank]
        put_ids(share, ids, torch.zeros_like(ids), 0.04)


def serve_kinds(folder: Path) -> None:
    """Serve jobs of the training with each kind of tables."""
    answers = take_answers()
    columns = columns_of(folder)
    # No table becomes too full, and room to grow would need more memory than a small machine has.
    config = TWO_TABLES.config.replaced(max_load_factor=0.0)

    def make(context: RuntimeContext, name: str) -> Here:
        trained = Here(columns if name == STATIC else dynamic(columns), context, config)
        if name == FULL:
            fill(trained)
        return trained

    serve_rank(answers, Config(), make)


if __name__ == "__main__":
    main()
