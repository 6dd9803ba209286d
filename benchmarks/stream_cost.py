"""Measure what a stream costs after few and after many events: delay, CPU seconds and memory.

    python benchmarks/stream_cost.py --write                       docs/stream_cost.json: minutes
    python benchmarks/stream_cost.py --before 2000,4000 --chunks 2
    python benchmarks/stream_cost.py --lasting 1000000,100000000   one training that never ends: hours

A training learns the events that are there in long windows, and ends. Then it is resumed with --follow_data,
and a server follows it. A chunk of events is appended to their file, a window for each, and the time is
measured until the served model has learned it. The users are few: all have whole histories from the first
size on, so what the stream keeps is the same after any number of events. Last, one training follows a file
that grows in long windows, and its memory is measured after the sizes of --lasting. Prints each figure beside
its bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import DOCS, EXAMPLE, bar, comma_separated, describe, finish, make_parser, origin, table
from online_serving import wait_until

from example import make_model
from recsuite.serving.followers import wait_for_first
from recsuite.serving.served import Follower

PAGE = DOCS / "dynamic.md"
NUM_USERS, NUM_ITEMS, FIRST_TIME = 300, 500, 1_700_000_000
# Events of a window before the measured ones, and those that are appended at once in long windows.
LONG_WINDOW, PIECE = 16_384, 2**18
SCHEMA = (
    '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n'
    '[timestamp]\ncolumn = "timestamp"\nformat = "unix"\n'
    '[label]\nkind = "rating"\ncolumn = "rating"\nlowest = 1\nhighest = 5\n'
)
# Events that are written at once.
AT_ONCE = 100_000


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--before",
        type=comma_separated(int),
        default=[10_000, 1_000_000],
        help="events that are learned before, for each measurement (default: 10000,1000000)",
    )
    parser.add_argument(
        "--lasting",
        type=comma_separated(int),
        default=[1_000_000, 10_000_000],
        help="events after which the memory of one training is measured (default: 1000000,10000000)",
    )
    parser.add_argument("--chunks", type=int, default=30, help="chunks, one after the other (default: 30)")
    parser.add_argument("--chunk", type=int, default=256, help="events of a chunk (default: 256)")
    finish("stream_cost", parser.parse_args(), measure, judge, render, PAGE, mark="stream cost")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory() as folder:
        after = [costs(flags, before, Path(folder, str(before))) for before in flags.before]
        lasting = memory_after(flags.lasting, Path(folder, "lasting"))
    return {**describe(), "chunk": flags.chunk, "chunks": flags.chunks, "after": after, "lasting": lasting}


def append(path: Path, begin: int, end: int) -> None:
    """Append the events from one position to before another."""
    with path.open("a") as file:
        for first in range(begin, end, AT_ONCE):
            number, generator = min(AT_ONCE, end - first), np.random.default_rng(first)
            draws = (generator.integers(most, size=number) for most in (NUM_USERS, NUM_ITEMS, 5))
            user, item, rating = (column.tolist() for column in draws)
            times = range(FIRST_TIME + first, FIRST_TIME + first + number)
            rows = zip(user, item, rating, times, strict=True)
            file.writelines(f"{user},{item},{rating + 1},{time}\n" for user, item, rating, time in rows)


def costs(flags: argparse.Namespace, before: int, folder: Path) -> dict[str, Any]:
    """Delays of chunks after so many events, and the CPU seconds and the memory of the training."""
    path, dumps, command = begun(folder)
    append(path, 0, before)
    learned = [*command, "--dump", "--window", LONG_WINDOW]
    subprocess.run([*map(str, learned)], check=True, stdout=subprocess.DEVNULL)
    follows = [*command, "--inc_dump", "--resume", "--follow_data", "--window", flags.chunk]
    delays, end = [], before
    with subprocess.Popen([*map(str, follows)], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for_first(dumps)
            follower = Follower(dumps, model=make_model, checkpoint="latest")
            for number in range(flags.chunks + 1):
                # The first chunk ends the start, and is not measured.
                if number == 1:
                    seconds = cpu_seconds_of(process.pid)
                begin, end = end, end + flags.chunk
                append(path, begin, end)
                delay = wait_until(follower, end // flags.chunk * flags.chunk)
                delays += [delay] if number else []
            seconds = cpu_seconds_of(process.pid) - seconds
            memory = memory_of(process.pid)
        finally:
            process.terminate()
    return {
        "before": before,
        "delays": delays,
        "cpu_seconds": seconds / (flags.chunks * flags.chunk / 1_000),
        "memory": memory,
    }


def begun(folder: Path) -> tuple[Path, Path, list[object]]:
    """Return a file without events, a folder for checkpoints, and the command of a stream of the file."""
    data, dumps = folder / "data", folder / "dumps"
    data.mkdir(parents=True)
    (data / "schema.toml").write_text(SCHEMA)
    path = data / "events.csv"
    path.write_text("user,item,rating,timestamp\n")
    places = ("--data_path", data, "--save_dir", dumps, "--stream")
    tables = ("--vocabulary", "dynamic", "--capacity", 2 * NUM_ITEMS, "--num_workers", 0)
    return path, dumps, [sys.executable, EXAMPLE, *places, *tables]


def memory_after(sizes: list[int], folder: Path) -> list[dict[str, int]]:
    """Memory of one training after so many events, with the events of a folder that grows."""
    path, dumps, command = begun(folder)
    window = min(LONG_WINDOW, *sizes)
    command += ["--inc_dump", "--follow_data", "--window", window]
    memory: list[dict[str, int]] = []
    end = min(PIECE, sizes[0])
    append(path, 0, end)
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for_first(dumps)
            follower = Follower(dumps, model=make_model, checkpoint="latest")
            while len(memory) < len(sizes):
                wait_until(follower, end // window * window)
                if end == sizes[len(memory)]:
                    memory.append({"learned": end, "memory": memory_of(process.pid)})
                    continue
                begin, end = end, min(end + PIECE, sizes[len(memory)])
                append(path, begin, end)
        finally:
            process.terminate()
    return memory


def cpu_seconds_of(process: int) -> float:
    """CPU seconds of a process and its threads so far."""
    # Behind the name of the program, which may have blanks: user and system time are the 12th and 13th.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def memory_of(process: int) -> int:
    """Bytes of memory of a process that are not of files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures beside their bars."""
    first, last = result["after"][0], result["after"][-1]
    delays = [median(each["delays"]) for each in (first, last)]
    longest = max(delays)
    bars = [bar("delay, median of the slower one", longest, 1.5, f"{longest:.2f} s", "1.5 s", at_most=True)]
    for name, value, limit in (
        ("delay, last over first", delays[1] / delays[0], 1.2),
        ("CPU seconds, last over first", last["cpu_seconds"] / first["cpu_seconds"], 1.2),
        ("memory, last over first", last["memory"] / first["memory"], 1.05),
    ):
        bars.append(bar(name, value, limit, f"{value:.3f}", f"{limit}", at_most=True))
    kept = [each["memory"] for each in result["lasting"]]
    ratio = max(kept) / kept[0]
    return [
        *bars,
        bar("memory of one training, most over first", ratio, 1.05, f"{ratio:.3f}", "1.05", at_most=True),
    ]


def render(result: dict[str, Any]) -> str:
    """Costs by the number of events before."""
    rows = [
        [
            f"{each['before']:,}",
            f"{median(each['delays']):.2f} ({max(each['delays']):.2f})",
            f"{each['cpu_seconds']:.2f}",
            f"{each['memory'] / 2**20:,.0f}",
        ]
        for each in result["after"]
    ]
    head = ["events learned before", "delay, s: median (longest)", "CPU s for 1,000 events", "memory, MiB"]
    kept = [f"{each['memory'] / 2**20:,.0f} MiB after {each['learned']:,}" for each in result["lasting"]]
    return (
        f"{table(head, rows)}\n\n{result['chunks']} chunks of {result['chunk']} events; one training, not "
        f"resumed: {', '.join(kept)}. {origin(result)}."
    )


if __name__ == "__main__":
    main()
