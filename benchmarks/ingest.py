"""Measure how fast columns are made from Parquet, beside how fast pyarrow reads it, and in how much memory.

    python benchmarks/ingest.py                                       2 million events: a minute
    python benchmarks/ingest.py --events 100000000 --rounds 1 --ids texts      10 GB of disk, half an hour

Writes the events itself: users and items of a skewed popularity, a label, and times that rise but for a day.
In each round pyarrow reads them and columns are made of them, in turns, each in a process of its own; what it
reads lies in the page cache by then. Prints each figure beside its bar. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from drawn_events import DAY, FIRST_TIME, YEAR, blocks_of, skewed_ids, write_parquet
from environment import DOCS, describe, finish, make_parser
from figures import bar, origin, ratio, shown_ratio, table

from recsuite.config.config import Config
from recsuite.datasets.preparation import cache

COLUMNS = ("user_id", "item_id", "stars", "time")
SCHEMA = """\
[user]
column = "user_id"
[item]
column = "item_id"
[label]
kind = "rating"
column = "stars"
lowest = 1.0
highest = 5.0
liked = 4.0
[timestamp]
column = "time"
format = "unix"
"""
EVENTS_PER_USER, EVENTS_PER_ITEM = 100, 500
STAGES = ("reading", "columns", "all")
LEAST_SHARE = 0.5
MOST_MEMORY = 2 * 2**30


def main() -> None:
    """Measure and show, or be one of the processes that are measured."""
    parser = make_parser(__doc__)
    parser.add_argument("--events", type=int, default=2_000_000, help="how many are written")
    parser.add_argument("--ids", choices=("numbers", "texts"), default="texts", help="of users and items")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, in turns")
    parser.add_argument("--folder", type=Path, help="on a disk with room; emptied again (default: temporary)")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print(json.dumps(MEASURES[flags.measure](flags.folder)))
        return
    with tempfile.TemporaryDirectory(dir=flags.folder, prefix="ingest-") as folder:
        result = measure(flags, Path(folder))
    # Of each kind of ids a table of its own.
    name = f"ingest_{flags.ids}"
    marks = f"<!-- {name}: made by benchmarks/ingest.py -->", f"<!-- end of {name} -->"
    finish(name, result, render(result), flags, page=DOCS / "log" / "benchmarks.md", marks=marks)


def measure(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures of one run."""
    write_events(folder / "events.parquet", flags.events, flags.ids == "texts")
    (folder / "schema.toml").write_text(SCHEMA)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MEASURES}
    for _ in range(flags.rounds):
        for name, runs in found.items():
            command = [sys.executable, __file__, "--measure", name, "--folder", str(folder)]
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
            runs.append(json.loads(output.splitlines()[-1]))
    result = {
        **describe(),
        "events": flags.events,
        "ids": flags.ids,
        "file bytes": (folder / "events.parquet").stat().st_size,
        **found,
    }
    result["bars"] = judge(result)
    return result


def write_events(path: Path, number: int, has_texts: bool) -> None:
    """Write so many events, drawn from a seed."""
    draw = np.random.default_rng(0)
    write_parquet(path, (_events(draw, part, number, has_texts) for part in blocks_of(number)))


def _events(draw: np.random.Generator, places: range, number: int, has_texts: bool) -> dict[str, Any]:
    rows = len(places)
    ids = skewed_ids(draw, max(1, number // EVENTS_PER_USER), max(1, number // EVENTS_PER_ITEM), rows)
    rising = FIRST_TIME + np.arange(places.start, places.stop) * YEAR // number
    columns = [
        *(_texts(prefix, each) if has_texts else each for prefix, each in zip("UB", ids, strict=True)),
        draw.integers(1, 6, rows).astype(np.float32),
        rising + draw.integers(0, DAY, rows),
    ]
    return dict(zip(COLUMNS, columns, strict=True))


def _texts(prefix: str, ids: np.ndarray) -> Any:
    """Ids of ten characters, as shops have them."""
    import pyarrow
    from pyarrow import compute

    digits = pyarrow.array(ids).cast(pyarrow.string())
    return compute.binary_join_element_wise(prefix, compute.utf8_lpad(digits, 9, "0"), "")


def read_alone(folder: Path) -> dict[str, float]:
    """How long pyarrow takes to read the columns, batch by batch, on all cores."""
    from pyarrow import dataset

    start, cpu = time.perf_counter(), time.process_time()
    found = dataset.dataset(folder / "events.parquet")
    rows = sum(batch.num_rows for batch in found.to_batches(columns=list(COLUMNS)))
    return {"all": time.perf_counter() - start, "cpu": time.process_time() - cpu, "rows": rows}


def ingest(folder: Path) -> dict[str, float]:
    """How long it takes from `open_columns` to finished columns, of that to read the files and to make the
    columns, and the most memory that the process had.
    """
    import pandas  # noqa: F401
    import pyarrow.dataset  # noqa: F401

    from recsuite.datasets.tables import reading  # noqa: F401

    seconds: dict[str, float] = {}
    imported = peak_memory()
    start, cpu = time.perf_counter(), time.process_time()
    timed = {"read": "reading", "make_columns": "columns"}
    patches = [
        mock.patch.object(cache, name, _timed(getattr(cache, name), seconds, stage))
        for name, stage in timed.items()
    ]
    with patches[0], patches[1]:
        columns = cache.open_columns(Config.of(data_path=str(folder)))
    seconds["all"], seconds["cpu"] = time.perf_counter() - start, time.process_time() - cpu
    shutil.rmtree(folder / ".columns")
    rows = columns.num_train + columns.num_validation + columns.num_test
    return {**seconds, "rows": rows, "imported": imported, "peak": peak_memory()}


def _timed(work: Callable[..., Any], seconds: dict[str, float], stage: str) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = work(*arguments)
        seconds[stage] = time.perf_counter() - start
        return found

    return timed


def peak_memory() -> int:
    """The most bytes that this process had at once, of its own and of mapped files."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {"pyarrow": read_alone, "ingest": ingest}


def _seconds(result: dict[str, Any], name: str, stage: str) -> list[float]:
    return [run[stage] for run in result[name]]


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
    alone = _seconds(result, "pyarrow", "all")
    shares = {stage: ratio(alone, _seconds(result, "ingest", stage)) for stage in STAGES}
    names = {"reading": "reading the files and settling what is repeated", "all": "from files to columns"}
    bars = [
        bar(f"{name}, of pyarrow's own rate", shares[stage], LEAST_SHARE, f"{shares[stage]:.2f}", "0.5")
        for stage, name in names.items()
    ]
    peak = max(_seconds(result, "ingest", "peak"))
    name = f"memory of the process at {result['events']:,} events"
    return [*bars, bar(name, peak, MOST_MEMORY, f"{peak / 2**30:.2f} GiB", "2 GiB", at_most=True)]


def render(result: dict[str, Any]) -> str:
    """All figures, and where they come from."""
    lines = [["", "seconds", "million events/s", "of pyarrow's rate"], ["---", "---:", "---:", "---:"]]
    lines += list(_lines(result))
    peak, imported = (max(_seconds(result, "ingest", name)) for name in ("peak", "imported"))
    memory = (
        f"{peak / 2**20:,.0f} MiB at most, mapped files included, of which {imported / 2**20:,.0f} MiB were "
        f"there before the first event: {(peak - imported) / result['events']:.1f} bytes an event."
    )
    # Of a machine that others use too they say more than the seconds.
    cpu = [statistics.median(_seconds(result, name, "cpu")) for name in MEASURES]
    cores = f"Seconds of a processor: {cpu[0]:.1f} for pyarrow, {cpu[1]:.1f} for all."
    about = (
        f"{result['events']:,} events with {result['ids']} as ids, {result['file bytes'] / 1e6:,.0f} MB of "
        f"Parquet, medians of {len(result['ingest'])} rounds: "
    )
    return "\n\n".join([about, table(lines), cores, memory, f"{origin(result)}."])


def _lines(result: dict[str, Any]) -> Iterator[list[str]]:
    alone = _seconds(result, "pyarrow", "all")
    rows = [("pyarrow alone", alone), *((stage, _seconds(result, "ingest", stage)) for stage in STAGES)]
    for name, seconds in rows:
        median = statistics.median(seconds)
        rate = result["events"] / median / 1e6
        yield [name, f"{median:.2f}", f"{rate:.2f}", shown_ratio(alone, seconds)]


if __name__ == "__main__":
    main()
