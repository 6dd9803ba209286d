"""Measure the value of online learning: the error on the newer ratings of a MovieLens folder.

    python benchmarks/online_quality.py --data FOLDER --write     docs/online_quality.json
    python benchmarks/online_quality.py --data FOLDER --every 24  beside it: retrained every 24 windows

All models are tested on the same ratings, those after the windows of the first part:

    online          a stream: each window is predicted before the model learns from it, once
    retrained once  trained in epochs on the first part, stopped early by its newest ratings, and then fixed
    retrained       trained again every so many windows, from scratch on all ratings before

Prints each figure beside its bar.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import DOCS, bar, describe, finish, make_parser, origin, table, train

from recsuite.datasets.movielens.source import OF_20M, files_in

PAGE = DOCS / "dynamic.md"
ONLINE, ONCE, RETRAINED = "online", "retrained once", "retrained every {} windows"


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of MovieLens files")
    parser.add_argument("--window", default="30d", help="of the stream (default: 30d)")
    parser.add_argument("--first", type=float, default=0.5, help="share of the ratings in the first part")
    parser.add_argument("--every", type=int, default=0, help="windows between retrainings; 0 for none")
    parser.add_argument("--batch_size", type=int, default=128, help="of the stream (default: 128)")
    parser.add_argument("--epochs", type=int, default=8, help="of each training that is no stream, at most")
    finish("online_quality", parser.parse_args(), measure, judge, render, PAGE, mark="online quality")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Test error of each model."""
    with tempfile.TemporaryDirectory() as folder:
        return {**describe(), **compare(flags, Path(folder))}


def compare(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train and test each model."""
    stream = ("--stream", "--vocabulary", "dynamic", "--capacity", "100000", "--window", flags.window)
    places = ("--data_path", flags.data, "--cache_dir", folder / "columns")
    report = train(*places, *stream, "--batch_size", flags.batch_size)
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
        # The first one learns from the same ratings as the model that is trained once.
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
    """RMSE of several parts together. parts: number of ratings and RMSE of each."""
    numbers, squares = zip(*((number, number * error**2) for number, error in parts), strict=True)
    return math.sqrt(sum(squares) / sum(numbers))


def retrain(lines: Lines, folder: Path, begin: int, end: int, epochs: int) -> tuple[float, Any]:
    """Train on the oldest `begin` ratings; return the error on those up to `end`, and the baselines."""
    lines.write_oldest(end, folder / "data")
    share = (end - begin) / end
    flags = ("--test_fraction", repr(share), "--duplicates", "keep", "--epochs", str(epochs))
    report = train("--data_path", folder / "data", "--cache_dir", folder / "columns", *flags)
    if report["data"]["num_test"] != end - begin:
        raise RuntimeError(f"the test requires {end - begin} ratings, got {report['data']['num_test']}")
    return report["test"]["rmse"], report["baselines"]


class Lines:
    """Ratings of a folder, line by line in the order of time."""

    def __init__(self, folder: Path) -> None:
        files = files_in(folder)
        assert files is not None
        self.folder, self.name = folder, files.events
        lines = (folder / files.events).read_bytes().splitlines(keepends=True)
        self.head, rows = (lines[:1], lines[1:]) if files == OF_20M else ([], lines)
        # The time is the last field in all formats.
        self.rows = sorted(
            rows, key=lambda row: int(row.replace(b":", b",").replace(b"\t", b",").split(b",")[-1])
        )

    def write_oldest(self, number: int, folder: Path) -> None:
        """Write the oldest ratings, and all files on users and movies, into a folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in self.folder.iterdir():
            # Without an oracle: it has a line for each of the ratings.
            if path.is_file() and path.name != self.name and path.suffix not in (".npy", ".json"):
                shutil.copyfile(path, folder / path.name)
        (folder / self.name).write_bytes(b"".join([*self.head, *self.rows[:number]]))


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar: online learning is better than learning once."""
    online, once = result["rmse"][ONLINE], result["rmse"][ONCE]
    return [bar("RMSE online", online, once, f"{online:.4f}", f"{once:.4f}, {ONCE}", at_most=True)]


def render(result: dict[str, Any]) -> str:
    """Table with a row for each model."""
    heads = ["model", f"RMSE on the newest {result['ratings']['judged']:,} ratings"]
    lines = [[name, f"{error:.4f}"] for name, error in result["rmse"].items()]
    about = (
        f"{result['data']}, {result['ratings']['all']:,} ratings in {result['windows']['all']:,} windows of "
        f"{result['window']}, of which the last {result['windows']['judged']:,} are judged; batches of "
        f"{result['batch_size']} online. {origin(result)}."
    )
    return f"{table(heads, lines)}\n\n{about}"


if __name__ == "__main__":
    main()
