"""Compare a model that is trained online with one that is retrained from time to time, on ratings by time.

    python benchmarks/online_quality.py --real FOLDER... --write     docs/online_quality.json: half an hour
    python benchmarks/online_quality.py --sets drifting --spans 2    some sets, by the start of their names

    set              windows of the stream       retrained every
    folders, --real  1 day, 30 days              30 days
    ml-100k          1 hour, 1 day               1 day
    drifting world   256 ratings, 5,120 ratings  5,120 ratings

All models predict the same ratings, those of the last spans between two retrainings:

    online        a stream: each window is predicted, and then learned. In the longer windows it learns as
                  often as the other model is retrained
    retrained     from scratch on all ratings before, of which one in a hundred is for validation; it predicts
                  those of the next span
    trained once  on all ratings before the first of these spans
    biases        of users and items, fitted when the model is retrained

All have default flags, and one seed: the retrained ones those of `--preset solved`, and a stream those
without a preset. The features of a rating, such as the user history, come from
all ratings before it. CPU seconds are those of the commands, with start and preparation, for each thousand
ratings that they predict. Prints each figure beside its bar. Needs recbole of requirements-dev.txt for
ml-100k.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import DOCS, bar, describe, finish, make_parser, origin, require, table, train

from recsuite.config.units import duration
from recsuite.datasets.movielens.source import OF_20M, files_in
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.extras.drifting import DriftingWorld

PAGE = DOCS / "dynamic.md"
ONLINE, RETRAINED, ONCE, BIASES = "online", "retrained", "trained once", "biases"
NUM_RATINGS = 50_000


@dataclass(frozen=True)
class OnlineSet:
    """Set in order of time.

    windows: values of --window; span: between retrainings, a multiple of each; write: writes the folder of
    the data, None where it exists.
    """

    name: str
    data: Path
    windows: tuple[str, str]
    span: str
    write: Callable[[Path], object] | None = None


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens files")
    parser.add_argument("--sets", nargs="+", default=[""], help="starts of names (default: all)")
    parser.add_argument("--spans", type=int, default=40, help="at most so many (default: 40)")
    parser.add_argument("--ratings", type=int, default=NUM_RATINGS, help="of the drifting world")
    finish("online_quality", parser.parse_args(), measure, judge, render, PAGE, mark="online quality")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Errors and seconds of each model on each set."""
    with tempfile.TemporaryDirectory() as folder:
        sets = online_sets(flags, Path(folder))
        chosen = [each for each in sets if each.name.startswith(tuple(flags.sets))]
        if any(each.write is write_ml_100k for each in chosen):
            require("recbole")
        return {**describe(), "sets": [compare(each, flags.spans, Path(folder)) for each in chosen]}


def online_sets(flags: argparse.Namespace, folder: Path) -> Iterator[OnlineSet]:
    """All sets; folder: of those that are written."""
    for data in flags.real:
        yield OnlineSet(data.resolve().name, data, ("1d", "30d"), "30d")
    yield OnlineSet("ml-100k", folder / "ml-100k", ("1h", "1d"), "1d", write_ml_100k)
    write = partial(write_synthetic, num_ratings=flags.ratings, seed=0, world=DriftingWorld())
    yield OnlineSet("drifting world", folder / "drifting", ("256", "5120"), "5120", write)


def write_ml_100k(folder: Path) -> None:
    """Write ml-100k into a new folder."""
    # Not at the top: the other functions of this file need no requirements-dev.txt.
    from peers import write_movielens_100k

    write_movielens_100k(folder)


def compare(each: OnlineSet, most_spans: int, folder: Path) -> dict[str, Any]:
    """Train and test each model on a set, in at most so many spans."""
    if each.write is not None:
        each.write(each.data)
    lines = Lines(each.data)
    begins, last = lines.begins_of(each.span), len(lines.rows)
    spans = [*begins[max(len(begins) // 2, len(begins) - most_spans) :], last]
    first, columns = spans[0], folder / f"columns {each.name}"
    stream = ("--stream", "--vocabulary", "dynamic", "--capacity", 100_000, "--duplicates", "keep")
    online = []
    for window in each.windows:
        before = cpu_seconds()
        report = train("--data_path", each.data, "--cache_dir", columns, *stream, "--window", window)
        seconds = cpu_seconds() - before
        error = rmse_of(report["windows"], first, last)
        online.append({"window": window, "rmse": error, "cpu_seconds": seconds})
    before, found = cpu_seconds(), []
    for begin, end in itertools.pairwise(spans):
        found.append((end - begin, *retrain(lines, folder, begin, end)))
        print(f"{each.name}: {end:,} of {last:,} ratings", file=sys.stderr, flush=True)
    seconds = cpu_seconds() - before
    return {
        "data": each.name,
        "span": each.span,
        "spans": len(spans) - 1,
        "ratings": {"all": last, "judged": last - first},
        "online": online,
        "rmse": {
            RETRAINED: rmse((number, error) for number, error, _ in found),
            ONCE: retrain(lines, folder, first, last)[0],
            BIASES: rmse((number, error) for number, _, error in found),
        },
        "cpu_seconds": seconds,
    }


def cpu_seconds() -> float:
    """CPU seconds of all ended commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rmse(parts: Iterable[tuple[int, float]]) -> float:
    """RMSE of several parts together. parts: number of ratings and RMSE of each."""
    numbers, squares = zip(*((number, number * error**2) for number, error in parts), strict=True)
    return math.sqrt(sum(squares) / sum(numbers))


def rmse_of(windows: list[dict[str, Any]], first: int, last: int) -> float:
    """RMSE of the windows of a stream from a position on; last: the number of all ratings.

    Raises:
        RuntimeError: when no window begins there, or ratings are missing.
    """
    ends = [0, *itertools.accumulate(window["events"] for window in windows)]
    if first not in ends or ends[-1] != last:
        raise RuntimeError(f"windows of {ends[-1]:,} ratings, of {last:,}; one must begin at {first:,}")
    judged = windows[ends.index(first) :]
    return rmse((window["events"], window["progressive"]["rmse"]) for window in judged)


def retrain(lines: Lines, folder: Path, begin: int, end: int) -> tuple[float, float]:
    """Train on the oldest `begin` ratings; return the error on those up to `end`, and that of biases."""
    lines.write_oldest(end, folder / "data")
    share = (end - begin) / end
    split = ("--split", "time", "--test_fraction", repr(share), "--duplicates", "keep")
    report = train(
        "--data_path", folder / "data", "--cache_dir", folder / "columns", "--preset", "solved", *split
    )
    if report["data"]["num_test"] != end - begin:
        raise RuntimeError(f"the test requires {end - begin} ratings, got {report['data']['num_test']}")
    return report["test"]["rmse"], report["baselines"]["biases"]["rmse"]


class Lines:
    """Ratings of a folder, line by line in the order of time."""

    def __init__(self, folder: Path) -> None:
        files = files_in(folder)
        assert files is not None
        self.folder, self.name = folder, files.events
        lines = (folder / files.events).read_bytes().splitlines(keepends=True)
        self.head, rows = (lines[:1], lines[1:]) if files == OF_20M else ([], lines)
        self.rows = sorted(rows, key=time_of)

    def begins_of(self, span: str) -> list[int]:
        """Position of the first rating of each span with ratings; span: as in --window."""
        length = duration("night", span, "events")
        if not length.is_time:
            return [*range(0, len(self.rows), length.amount)]
        spans = [time_of(row) // length.amount for row in self.rows]
        return [place for place in range(len(spans)) if place == 0 or spans[place] != spans[place - 1]]

    def write_oldest(self, number: int, folder: Path) -> None:
        """Write the oldest ratings, and all files on users and movies, into a folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in self.folder.iterdir():
            # Without an oracle: it has a line for each of the ratings.
            if path.is_file() and path.name != self.name and path.suffix not in (".npy", ".json"):
                shutil.copyfile(path, folder / path.name)
        (folder / self.name).write_bytes(b"".join([*self.head, *self.rows[:number]]))


def time_of(row: bytes) -> int:
    """Time of a rating, the last field in all formats."""
    return int(row.replace(b":", b",").replace(b"\t", b",").split(b",")[-1])


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar: the online model is better than the retrained one."""
    return [
        bar(
            f"{each['data']}, window {online['window']}, RMSE online",
            online["rmse"],
            each["rmse"][RETRAINED],
            f"{online['rmse']:.4f}",
            f"{each['rmse'][RETRAINED]:.4f}, {RETRAINED}",
            at_most=True,
        )
        for each in result["sets"]
        for online in each["online"]
    ]


def render(result: dict[str, Any]) -> str:
    """Table with a row for each set and model."""
    heads = ["set", "model", "RMSE", "CPU s for 1,000 ratings"]
    lines = []
    for each in result["sets"]:
        ratings, span, other = each["ratings"], in_words(each["span"]), each["rmse"]
        name = f"{each['data']}, {ratings['judged']:,} ratings in {each['spans']} spans"
        for online in each["online"]:
            cost = 1000 * online["cpu_seconds"] / ratings["all"]
            window = in_words(online["window"])
            lines.append([name, f"{ONLINE}, learns every {window}", f"{online['rmse']:.4f}", f"{cost:.1f}"])
        cost = 1000 * each["cpu_seconds"] / ratings["judged"]
        lines.append([name, f"{RETRAINED} every {span}", f"{other[RETRAINED]:.4f}", f"{cost:.1f}"])
        lines.append([name, ONCE, f"{other[ONCE]:.4f}", ""])
        lines.append([name, f"{BIASES}, fitted every {span}", f"{other[BIASES]:.4f}", ""])
    return f"{table(heads, lines)}\n\n{origin(result)}."


def in_words(span: str) -> str:
    """Window or span for readers, as "30 days" or "256 ratings"."""
    units = {"d": "days", "h": "hours"}
    number, unit = (span[:-1], units[span[-1]]) if span[-1] in units else (f"{int(span):,}", "ratings")
    return unit.removesuffix("s") if number == "1" else f"{number} {unit}"


if __name__ == "__main__":
    main()
