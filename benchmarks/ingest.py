"""Measure how fast columns are made from Parquet, beside the reader of pyarrow, and in how much memory.

    python benchmarks/ingest.py                                       2 million events: a minute
    python benchmarks/ingest.py --events 100000000 --rounds 1 --ids texts      10 GB of disk, half an hour

Writes the events itself: users and items of a skewed popularity, a label, and times that rise but for a day.
In each round pyarrow reads them and columns are made of them, in turns, each in a process of its own, from
the page cache. Prints each figure beside its bar.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import (
    DAY,
    DOCS,
    EVENTS_PER_ITEM,
    EVENTS_PER_USER,
    FIRST_TIME,
    STAR_COLUMNS,
    STAR_SCHEMA,
    YEAR,
    bar,
    blocks_of,
    describe,
    finish,
    in_turns,
    make_parser,
    origin,
    peak_memory,
    ratio,
    read_plainly,
    shown_ratio,
    skewed_ids,
    table,
    write_parquet,
)

from recsuite.config.config import Config

STAGES = ("reading", "columns", "all")
# From files to columns, of pyarrow's own rate of reading.
LEAST_SHARES = {"texts": 0.25, "numbers": 0.1}
MOST_MEMORY = 2 * 2**30
PAGE = DOCS / "log" / "benchmarks.md"


def main() -> None:
    """Measure and show, and write if that is asked for; or be one of the measured processes."""
    parser = make_parser(__doc__)
    parser.add_argument("--events", type=int, default=2_000_000, help="number of events")
    parser.add_argument("--ids", choices=("numbers", "texts"), default="texts", help="of users and items")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, in turns")
    parser.add_argument("--folder", type=Path, help="on a disk with room; emptied again (default: temporary)")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print(json.dumps(MEASURES[flags.measure](flags.folder)))
        return
    # Each kind of ids has a table of its own.
    finish(f"ingest_{flags.ids}", flags, measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory(dir=flags.folder, prefix="ingest-") as name:
        folder = Path(name)
        write_events(folder / "events.parquet", flags.events, flags.ids == "texts")
        (folder / "schema.toml").write_text(STAR_SCHEMA)

        def run(kind: str) -> dict[str, float]:
            command = [sys.executable, __file__, "--measure", kind, "--folder", str(folder)]
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
            found: dict[str, float] = json.loads(output.splitlines()[-1])
            return found

        size = (folder / "events.parquet").stat().st_size
        found = in_turns({kind: partial(run, kind) for kind in MEASURES}, flags.rounds)
    return {**describe(), "events": flags.events, "ids": flags.ids, "file bytes": size, **found}


def write_events(path: Path, number: int, has_texts: bool) -> None:
    """Write events that are drawn from a seed."""
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
    return dict(zip(STAR_COLUMNS, columns, strict=True))


def _texts(prefix: str, ids: np.ndarray) -> Any:
    """Text ids of ten characters."""
    import pyarrow
    from pyarrow import compute

    digits = pyarrow.array(ids).cast(pyarrow.string())
    return compute.binary_join_element_wise(prefix, compute.utf8_lpad(digits, 9, "0"), "")


def read_alone(folder: Path) -> dict[str, float]:
    """Read the columns by pyarrow; return seconds."""
    return read_plainly(folder / "events.parquet")


def ingest(folder: Path) -> dict[str, float]:
    """Make columns; return seconds in all, of reading and of making columns, and the peak memory."""
    import pandas  # noqa: F401
    import pyarrow.dataset  # noqa: F401

    from recsuite.datasets.preparation import cache, making
    from recsuite.datasets.tables import reading  # noqa: F401

    seconds: dict[str, float] = {}
    imported = peak_memory()
    start, cpu = time.perf_counter(), time.process_time()
    timed_read = _timed(cache.read, seconds, "reading")
    timed_making = _timed(making.make_columns, seconds, "columns")
    with (
        mock.patch.object(cache, "read", timed_read),
        mock.patch.object(making, "make_columns", timed_making),
    ):
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


MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {"pyarrow": read_alone, "ingest": ingest}


def _seconds(result: dict[str, Any], name: str, stage: str) -> list[float]:
    return [run[stage] for run in result[name]]


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    alone, least = _seconds(result, "pyarrow", "all"), LEAST_SHARES[result["ids"]]
    share = ratio(alone, _seconds(result, "ingest", "all"))
    of_rate = bar("from files to columns, of pyarrow's own rate", share, least, f"{share:.2f}", f"{least}")
    peak = max(_seconds(result, "ingest", "peak"))
    name = f"memory of the process at {result['events']:,} events"
    return [of_rate, bar(name, peak, MOST_MEMORY, f"{peak / 2**30:.2f} GiB", "2 GiB", at_most=True)]


def render(result: dict[str, Any]) -> str:
    """Table, memory and origin."""
    heads = ["", "seconds", "million events/s", "of pyarrow's rate"]
    peak, imported = (max(_seconds(result, "ingest", name)) for name in ("peak", "imported"))
    memory = (
        f"{peak / 2**20:,.0f} MiB at most, mapped files included, of which {imported / 2**20:,.0f} MiB were "
        f"there before the first event: {(peak - imported) / result['events']:.1f} bytes an event."
    )
    # On a shared machine they are more exact than the clock.
    cpu = [statistics.median(_seconds(result, name, "cpu")) for name in MEASURES]
    cores = f"Seconds of a processor: {cpu[0]:.1f} for pyarrow, {cpu[1]:.1f} for all."
    about = (
        f"{result['events']:,} events with {result['ids']} as ids, {result['file bytes'] / 1e6:,.0f} MB of "
        f"Parquet, medians of {len(result['ingest'])} rounds: "
    )
    return "\n\n".join([about, table(heads, _lines(result)), cores, memory, f"{origin(result)}."])


def _lines(result: dict[str, Any]) -> Iterator[list[str]]:
    alone = _seconds(result, "pyarrow", "all")
    rows = [("pyarrow alone", alone), *((stage, _seconds(result, "ingest", stage)) for stage in STAGES)]
    for name, seconds in rows:
        median = statistics.median(seconds)
        rate = result["events"] / median / 1e6
        yield [name, f"{median:.2f}", f"{rate:.2f}", shown_ratio(alone, seconds)]


if __name__ == "__main__":
    main()
