"""Measure what a delta of a dynamic table costs, with the ids that left, beside one of a static table.

    python benchmarks/dynamic_delta.py --write      docs/dynamic_delta.json and its table
    python benchmarks/dynamic_delta.py --rows 20000 --ratings 20000 --rounds 2

Three tables of as many rows in one training each, all in the same processes, write their deltas in turns:

    static         a share of the rows was touched
    full           as many rows, but half of them of ids that are new, each of which made another one leave
    half full      the same in twice the places, the default; ids leave that were not seen for long

All else lies in a folder that is removed. Prints each figure beside its bar; asserts nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint import NUM_RANKS, launch
from checkpoint_setup import DIM, Settings, make_wide_columns
from environment import DOCS, describe, finish, make_parser
from figures import bar, origin, ratio, shown_ratio, table

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns

PAGE = DOCS / "log" / "benchmarks.md"
MARKS = ("<!-- delta -->", "<!-- end of delta -->")
STATIC, FULL, HALF_FULL = KINDS = ("static", "full", "half full")
# The share of the rows that a delta has.
SHARE = 0.01
BAR = 1.3
# What of a delta is held against the bar.
COMPARED = ("bytes", "seconds")


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    result = measure(flags)
    result["bars"] = judge(result)
    finish("dynamic_delta", result, render(result), flags, page=PAGE, marks=MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the default is that of /tmp")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000], help="of each table")
    parser.add_argument("--ratings", type=int, default=100_000, help="of the data set")
    parser.add_argument("--rounds", type=int, default=21, help="deltas of each table, in turns")
    return parser.parse_args()


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    with tempfile.TemporaryDirectory(prefix="delta-", dir=flags.folder) as name:
        ratings = str(Path(name) / "ratings")
        config = Config.of(dataset="synthetic", synthetic_ratings=flags.ratings, data_path=ratings)
        open_columns(config)
        settings = Settings(ratings, name, 0, flags.rounds, 0)
        sizes = [measure_size(rows, settings) for rows in flags.rows]
    return {**describe(), "dim": DIM, "ranks": NUM_RANKS, "share": SHARE, "sizes": sizes}


def measure_size(rows: int, settings: Settings) -> dict[str, Any]:
    """Deltas of tables of so many rows, kind by kind; removes what it wrote."""
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        settings = Settings(settings.ratings_folder, folder, rows, settings.rounds, 0)
        make_wide_columns(settings, Config.of(data_path=settings.ratings_folder), Path(folder) / "columns")
        return {"rows": rows, "deltas": launch(NUM_RANKS, "dynamic deltas", settings)}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
    bars = []
    for size in result["sizes"]:
        static = size["deltas"][STATIC]
        for kind in (FULL, HALF_FULL):
            for what in COMPARED:
                found = ratio(size["deltas"][kind][what], static[what])
                name = f"{size['rows']:,} rows, {kind}, {what} of a static delta"
                bars.append(bar(name, found, BAR, f"{found:.2f}", f"{BAR}", at_most=True))
    return bars


def render(result: dict[str, Any]) -> str:
    """A line for each size and kind of table."""
    lines = [["rows", "table", "rows in a delta", "ids that left", "MiB", "ms"]]
    lines[0] += [f"{what}, of static (bar: {BAR})" for what in ("bytes", "time")]
    lines.append(["---:", "---", *["---:"] * 6])
    for size in result["sizes"]:
        static = size["deltas"][STATIC]
        for kind, found in size["deltas"].items():
            counts = [f"{median(found[what]):,.0f}" for what in ("rows", "gone")]
            usual, best = (1000 * which(found["seconds"]) for which in (median, min))
            amounts = [f"{median(found['bytes']) / 2**20:.2f}", f"{usual:.0f} (best {best:.0f})"]
            ratios = ["" if kind == STATIC else shown_ratio(found[what], static[what]) for what in COMPARED]
            lines.append([f"{size['rows']:,}", kind, *counts, *amounts, *ratios])
    rounds = len(result["sizes"][0]["deltas"][STATIC]["seconds"])
    about = (
        f"Deltas of {100 * result['share']:g} % of the rows of {result['dim']} numbers, {result['ranks']} "
        f"processes; of those of dynamic tables half belong to new ids, and about as many ids left. Medians "
        f"over {rounds} rounds, of ratios within a round, and [least, most] of them. {origin(result)}."
    )
    return f"{table(lines)}\n\n{about}"


if __name__ == "__main__":
    main()
