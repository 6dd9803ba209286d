"""Measure what full checkpoints, deltas and loading cost, beside plain writing and reading of as many bytes.

    python benchmarks/checkpoint.py --write       everything: ten minutes on two cores, 10 GB of disk
    python benchmarks/checkpoint.py --rows 20000 --ratings 20000 --loads 1 --rounds 1 --blocks 1

Prints each figure beside its bar; with --write it also writes docs/checkpoint.json, docs/checkpoint.png and
the part of docs/log/benchmarks.md between the checkpoint marks. All else lies in a folder that is removed.
Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from checkpoint_setup import DIM, Settings, make_wide_columns
from checkpoint_tables import draw, judge, render
from environment import DOCS, describe, finish, make_parser, torchrun

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns

PAGE = DOCS / "log" / "benchmarks.md"
MARKS = ("<!-- checkpoint: made by benchmarks/checkpoint.py -->", "<!-- end of checkpoint -->")
NUM_RANKS = 2


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    result = measure(flags)
    result["bars"] = judge(result)
    finish("checkpoint", result, render(result), flags, draw, PAGE, MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the default is that of /tmp")
    parser.add_argument(
        "--rows", type=_numbers, default=[1_000_000, 10_000_000], help="of the large table, one or more"
    )
    # As many as wrote the checkpoint, fewer, and more.
    parser.add_argument("--loads", type=_numbers, default=[2, 1, 3], help="numbers of ranks that load")
    parser.add_argument("--ratings", type=int, default=1_000_000, help="of the data set of the steps")
    parser.add_argument("--rounds", type=int, default=6, help="measurements of each figure, in turns")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks of steps, for the tracking")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=flags.folder) as name:
        folder = Path(name)
        ratings = str(folder / "ratings")
        open_columns(Config.of(dataset="synthetic", synthetic_ratings=flags.ratings, data_path=ratings))
        settings = Settings(ratings, str(folder), 0, flags.rounds, flags.blocks)
        return {
            **describe(),
            "dim": DIM,
            "ranks": NUM_RANKS,
            "ratings": flags.ratings,
            "tracking": launch(1, "tracking", settings),
            "sizes": [measure_size(rows, flags.loads, settings) for rows in flags.rows],
        }


def measure_size(rows: int, loads: list[int], settings: Settings) -> dict[str, Any]:
    """What a table of so many rows costs; removes what it wrote."""
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        settings = dataclasses.replace(settings, folder=folder, rows=rows)
        make_wide_columns(settings, Config.of(data_path=settings.ratings_folder), Path(folder) / "columns")
        found = launch(NUM_RANKS, "dumps", settings)
        return {
            "rows": rows,
            **found,
            "loads": [launch(number, "loads", settings) for number in loads],
        }


def launch(num_ranks: int, part: str, settings: Settings) -> Any:
    """What benchmarks/checkpoint_ranks.py finds on so many ranks."""
    settings_file, results = (Path(settings.folder) / name for name in ("settings.json", "results.json"))
    settings_file.write_text(json.dumps(dataclasses.asdict(settings)))
    script = str(Path(__file__).with_name("checkpoint_ranks.py"))
    command = [*torchrun(num_ranks), script, part, str(settings_file), str(results)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return json.loads(results.read_text())


if __name__ == "__main__":
    main()
