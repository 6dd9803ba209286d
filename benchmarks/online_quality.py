"""Measure what it is worth to go on learning: the error on the newer ratings of a MovieLens folder.

    python benchmarks/online_quality.py --data FOLDER --write     docs/online_quality.json
    python benchmarks/online_quality.py --data FOLDER --every 24  beside it: retrained every 24 windows

All models are judged by the same ratings, those behind the windows of the first part:

    online          a stream: each window is predicted before it is learned from, once
    retrained once  trained in epochs on the first part, stopped early by its newest ratings, and then fixed
    retrained       the same again every so many windows, each time from nothing on all ratings before

Prints each figure beside its bar; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from environment import DOCS, EXAMPLE, describe, finish, make_parser
from figures import bar, origin, table

from recsuite.datasets.movielens.source import OF_20M, files_in

PAGE = DOCS / "dynamic.md"
MARKS = ("<!-- online quality -->", "<!-- end of online quality -->")
ONLINE, ONCE, RETRAINED = "online", "retrained once", "retrained every {} windows"


def main() -> None:
    """Train, compare and show, and write if that is asked for."""
    flags = _parse_flags()
    with tempfile.TemporaryDirectory() as folder:
        result = {**describe(), **compare(flags, Path(folder))}
    result["bars"] = judge(result)
    finish("online_quality", result, render(result), flags, page=PAGE, marks=MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of MovieLens files")
    parser.add_argument("--window", default="30d", help="of the stream (default: 30d)")
    parser.add_argument("--first", type=float, default=0.5, help="share of the ratings in the first part")
    parser.add_argument("--every", type=int, default=0, help="windows between retrainings; 0 leaves it out")
    parser.add_argument("--batch_size", type=int, default=128, help="of the stream (default: 128)")
    parser.add_argument("--epochs", type=int, default=8, help="of each training that is no stream, at most")
    return parser.parse_args()


def compare(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The error of each model on the ratings behind the first part."""
    stream = ("--stream", "--vocabulary", "dynamic", "--capacity", "100000", "--window", flags.window)
    report = train(flags.data, folder, (*stream, "--batch_size", str(flags.batch_size)))
    windows = report["windows"]
    ends = [0]
    for window in windows:
        ends.append(ends[-1] + window["events"])
    first = next(number for number, end in enumerate(ends) if end >= flags.first * ends[-1])
    errors = {ONLINE: rmse((window["events"], window["progressive"]["rmse"]) for window in windows[first:])}
    lines = Lines(flags.data)
    once, baselines = retrain(lines, folder, ends[first], ends[-1], flags.epochs)
    errors[ONCE] = once
    if flags.every:
        parts = [
            (ends[begin], ends[min(begin + flags.every, len(windows))])
            for begin in range(first, len(windows), flags.every)
        ]
        # The first of them is on the same ratings as the one that is trained once.
        found = [(end - begin, retrain(lines, folder, begin, end, flags.epochs)[0]) for begin, end in parts]
        errors[RETRAINED.format(flags.every)] = rmse(found)
    return {
        "data": flags.data.resolve().name,
        "window": flags.window,
        "windows": {"all": len(windows), "judged": len(windows) - first},
        "ratings": {"all": ends[-1], "judged": ends[-1] - ends[first]},
        "batch_size": flags.batch_size,
        "rmse": {**errors, "biases, fitted once": baselines["biases"]["rmse"]},
        "all windows": report["test"]["rmse"],
    }


def rmse(parts: Iterable[tuple[int, float]]) -> float:
    """Of all ratings together. parts: how many, and their error."""
    numbers, squares = zip(*((number, number * error**2) for number, error in parts), strict=True)
    return math.sqrt(sum(squares) / sum(numbers))


def train(data: Path, folder: Path, flags: Sequence[str]) -> Any:
    """The report of a training."""
    report = folder / "report"
    shutil.rmtree(report, ignore_errors=True)
    places = ("--data_path", data, "--cache_dir", folder / "columns", "--report_dir", report)
    command = [sys.executable, EXAMPLE, *places, *flags]
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return json.loads((report / "metrics.json").read_text())


def retrain(lines: Lines, folder: Path, begin: int, end: int, epochs: int) -> tuple[float, Any]:
    """The error of a training on the oldest `begin` ratings, on those behind them up to before `end`; and
    the baselines.
    """
    lines.write_oldest(end, folder / "data")
    share = (end - begin) / end
    flags = ("--test_fraction", repr(share), "--duplicates", "keep", "--epochs", str(epochs))
    report = train(folder / "data", folder, flags)
    if report["data"]["num_test"] != end - begin:
        raise RuntimeError(f"the test has {report['data']['num_test']} ratings, and not {end - begin}")
    return report["test"]["rmse"], report["baselines"]


class Lines:
    """The ratings of a folder, line by line in the order of time."""

    def __init__(self, folder: Path) -> None:
        files = files_in(folder)
        assert files is not None
        self.folder, self.name = folder, files.events
        lines = (folder / files.events).read_bytes().splitlines(keepends=True)
        self.head, rows = (lines[:1], lines[1:]) if files == OF_20M else ([], lines)
        # The time stands last in all forms.
        self.rows = sorted(
            rows, key=lambda row: int(row.replace(b":", b",").replace(b"\t", b",").split(b",")[-1])
        )

    def write_oldest(self, number: int, folder: Path) -> None:
        """A folder with so many of the oldest ratings, and all that is known of users and movies."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in self.folder.iterdir():
            # An oracle knows all of the ratings, in the order of their file.
            if path.is_file() and path.name != self.name and path.suffix not in (".npy", ".json"):
                shutil.copyfile(path, folder / path.name)
        (folder / self.name).write_bytes(b"".join([*self.head, *self.rows[:number]]))


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The bar: whoever goes on learning has to be better than whoever learned once."""
    online, once = result["rmse"][ONLINE], result["rmse"][ONCE]
    return [bar("RMSE online", online, once, f"{online:.4f}", f"{once:.4f}, {ONCE}", at_most=True)]


def render(result: dict[str, Any]) -> str:
    """A line for each model."""
    lines = [["model", f"RMSE on the newest {result['ratings']['judged']:,} ratings"], ["---", "---:"]]
    lines += [[name, f"{error:.4f}"] for name, error in result["rmse"].items()]
    about = (
        f"{result['data']}, {result['ratings']['all']:,} ratings in {result['windows']['all']:,} windows of "
        f"{result['window']}, of which the last {result['windows']['judged']:,} are judged; batches of "
        f"{result['batch_size']} online. {origin(result)}."
    )
    return f"{table(lines)}\n\n{about}"


if __name__ == "__main__":
    main()
