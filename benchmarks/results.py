"""Make the picture and the table on the first screen of the README.

    python benchmarks/results.py [--write]                                    synthetic ratings
    python benchmarks/results.py --real FOLDER_OF_ML_LATEST_SMALL [--write]   and real ones

Trains with the defaults, two processes a run; with --write it writes docs/results.json, docs/curves.png and
the part of README.md between the result marks.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, describe_machine, finish, make_parser, origin, table, train

NUM_RANKS = 2
PAGE = ROOT / "README.md"


def main() -> None:
    """Train and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, help="folder that holds ml-latest-small")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "curves.png"

        def measure(flags: argparse.Namespace) -> dict[str, Any]:
            return measure_all(flags, Path(folder))

        def draw(result: dict[str, Any], path: Path) -> None:
            shutil.copyfile(picture, path)

        flags = parser.parse_args()
        drawn = None if flags.figures else draw
        finish("results", flags, measure, None, render, PAGE, drawn, picture="curves")


def measure_all(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Reports of all trainings; leaves the picture of the first one in a folder."""
    runs = {"synthetic, newest 20 %": report_of("--dataset", "synthetic", folder=folder)}
    if flags.real:
        data = ("--data_path", flags.real)
        random = ("--split", "random", "--test_fraction", "0.1")
        runs["ml-latest-small, newest 20 %"] = report_of(*data)
        runs["ml-latest-small, random 10 %"] = report_of(*data, *random)
    return runs


def report_of(*flags: object, folder: Path | None = None) -> dict[str, Any]:
    """Report of one training, without paths of this machine."""
    report: dict[str, Any] = train(*flags, ranks=NUM_RANKS, report=folder)
    report["data"]["source"] = Path(report["data"]["source"]).name
    for name in ("data_path", "report_dir", "cache_dir"):
        del report["config"][name]
    report["machine"] = describe_machine()
    return report


def render(runs: dict[str, Any]) -> str:
    """Table and origin."""
    lines = []
    for name, run in runs.items():
        baselines = run["baselines"]
        cells = [f"{baselines[of]['rmse']:.4f}" for of in ("global mean", "biases")]
        oracle = f"{baselines['oracle']['rmse']:.4f}" if "oracle" in baselines else "not known"
        seconds = sum(epoch["seconds"] for epoch in run["epochs"])
        lines.append([name, *cells, f"**{run['test']['rmse']:.4f}**", oracle, f"{seconds:.0f} s"])
    heads = ["test ratings", "global mean", "biases", "this model", "oracle", "training"]
    epochs = ", ".join(str(len(run["epochs"])) for run in runs.values())
    run = next(iter(runs.values()))
    about = (
        f"RMSE in stars, {epochs} epochs, {run['world_size']} processes on {run['device']}, seed "
        f"{run['config']['seed']}; {origin(run, fbgemm=True)}."
    )
    return f"{table(heads, lines)}\n\n{about}"


if __name__ == "__main__":
    main()
