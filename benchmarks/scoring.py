"""Measure batch scoring of all users: rate, memory, and equality with `ServedModel.recommend`.

    python benchmarks/scoring.py [--write]                    one million users, 100,000 items: half an hour
    python benchmarks/scoring.py --users 100000             two minutes

Draws clicks on items of skewed popularity, trains a ranking model for one epoch, and scores all users.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet
from common import (
    DAY,
    DOCS,
    FIRST_TIME,
    ROOT,
    bar,
    blocks_of,
    describe,
    finish,
    make_parser,
    origin,
    table,
    torchrun,
    write_parquet,
)

from example import make_model
from recsuite.serving.served import ServedModel

PAGE = DOCS / "serving.md"
EVENTS_PER_USER, K, PARTS_COMPARED = 4, 50, 2
# Of scores: sums in another order round differently.
TOLERANCE = 1e-6
MEASURED = Path(__file__).with_name("peak.py")


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    finish("scoring", parser.parse_args(), measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_parquet(folder / "clicks.parquet", clicks(flags.users, flags.items))
        places = ("--data_path", folder / "clicks.parquet", "--save_dir", folder / "dumps")
        # A small test: every item is ranked for each of its events.
        training = ("--task", "ranking", "--split", "random", "--test_fraction", 0.001, "--epochs", 1)
        run(flags.ranks, "example.py", *places, "--dump", *training, "--cache_dir", folder / "columns")
        output = folder / "recs.parquet"
        shown = run(flags.ranks, "score.py", *places, "--users", "all", "--k", K, "--output", output)
        scored, peak = (
            re.search(r"scored ([\d,]+) users in ([\d.]+) s", shown),
            re.search(r"peak (\d+)", shown),
        )
        assert scored is not None, shown
        assert peak is not None, shown
        return {
            "about": describe(),
            "ranks": flags.ranks,
            "users": int(scored[1].replace(",", "")),
            "items": flags.items,
            "k": K,
            "seconds": float(scored[2]),
            "peak_bytes": 1024 * int(peak[1]),
            "file_bytes": sum(path.stat().st_size for path in output.iterdir()),
            "difference": largest_difference(folder / "dumps", folder / "clicks.parquet", output),
        }


def clicks(num_users: int, num_items: int) -> Iterator[dict[str, np.ndarray]]:
    """Columns of clicks, the same number of each user, block by block."""
    draw = np.random.default_rng(0)
    for block in blocks_of(num_users * EVENTS_PER_USER):
        rows = np.arange(block.start, block.stop)
        # The cube makes some items popular.
        item = (num_items * draw.random(len(rows)) ** 3).astype(np.int64)
        yield {
            "user_id": rows % num_users,
            "item_id": item,
            "timestamp": FIRST_TIME + draw.integers(0, 30 * DAY, len(rows)),
        }


def run(ranks: int, script: str, *flags: object) -> str:
    """Output of a script, and the largest peak memory of its processes."""
    command = [*torchrun(ranks), ROOT / "example" / script, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(MEASURED), *map(str, command)]
    return subprocess.run(words, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout


def largest_difference(save_dir: Path, data: Path, output: Path) -> float:
    """Largest difference between scores in the first files and those of `recommend`; infinite for other
    items."""
    model, worst = ServedModel.open(save_dir, model=make_model, data_path=data), 0.0
    for path in sorted(output.glob("part-*"))[:PARTS_COMPARED]:
        found = pyarrow.parquet.read_table(path).to_pandas()
        users = found["user_id"].unique().tolist()
        wanted = pandas.DataFrame(
            [
                (user, *pair)
                for user, pairs in zip(users, model.recommend(users, K), strict=True)
                for pair in pairs
            ],
            columns=["user_id", "item_id", "score"],
        )
        if not found[["user_id", "item_id"]].equals(wanted[["user_id", "item_id"]]):
            return float("inf")
        worst = max(worst, float((found["score"] - wanted["score"]).abs().max()))
    return worst


def render(result: dict[str, Any]) -> str:
    """Table of one row."""
    heads = (
        "users",
        "items",
        "k",
        "processes",
        "seconds",
        "users per second",
        "MiB of a process",
        "MiB written",
    )
    rate = result["users"] / result["seconds"]
    mib = (f"{result[name] / 2**20:,.0f}" for name in ("peak_bytes", "file_bytes"))
    sizes = (f"{result['users']:,}", f"{result['items']:,}", f"{result['k']}", f"{result['ranks']}")
    shown = table(heads, [(*sizes, f"{result['seconds']:.0f}", f"**{rate:,.0f}**", *mib)], left=())
    return f"{shown}\n\nMeasured on {origin(result['about'])}."


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The bar: the scores of a server."""
    difference = result["difference"]
    return [
        bar("largest difference", difference, TOLERANCE, f"{difference:.1e}", f"{TOLERANCE:g}", at_most=True)
    ]


if __name__ == "__main__":
    main()
