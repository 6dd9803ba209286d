"""Measure the way from partitions to the first step, on one and two ranks, beside the same data in one piece.

    python benchmarks/partitions.py --write                   13 GB of disk, a quarter of an hour on two cores
    python benchmarks/partitions.py --events 1000000                                             two minutes

Writes partitions of events, by user, with the splits train, validation and test. Each variant is launched
twice: with no columns yet, and with those of the first launch. A launch ends after some steps. Each rank has
a core of its own, as each has a machine; one variant has all cores. A small set shows what of a start does
not grow with the data; pyarrow reads the same files alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    DOCS,
    EVENTS_PER_ITEM,
    EVENTS_PER_USER,
    FIRST_TIME,
    STAR_COLUMNS,
    STAR_SCHEMA,
    YEAR,
    bar,
    describe,
    finish,
    make_parser,
    origin,
    peak_memory,
    read_plainly,
    skewed_ids,
    table,
    torchrun,
    write_parquet,
)

SMALL = 1_000
# Shares of the newest events, and of the others.
TEST, VALIDATION = 0.2, 0.05
# Whether each rank reads its own partitions, the number of ranks, and whether each has one core.
VARIANTS = {
    "partitions, 1 rank": (True, 1, True),
    "partitions, 2 ranks": (True, 2, True),
    "one piece, 1 rank": (False, 1, True),
    "one piece, 1 rank on all cores": (False, 1, False),
}
ONE, TWO = list(VARIANTS)[:2]
TRAINING = ("--split", "files", "--preset", "none", "--initial_rows", "random", "--num_workers", "0")
MOST_MEMORY, MOST_SECONDS, LEAST_SPEEDUP = 2.5 * 2**30, 5.0, 1.6
PAGE = DOCS / "extras" / "prepare.md"


def main() -> None:
    """Measure and show, and write if that is asked for; or be one of the measured processes."""
    if sys.argv[1:2] == ["--rank"]:
        if sys.argv[2] == "one core":
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
        train_shortly(Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
        return
    parser = make_parser(__doc__)
    parser.add_argument("--events", type=int, default=100_000_000, help="number of events")
    parser.add_argument("--partitions", type=int, default=64, help="number of partitions")
    parser.add_argument("--batch_size", type=int, default=16_384, help="events of a step of all ranks")
    parser.add_argument("--steps", type=int, default=100, help="measured steps after the first one")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each")
    parser.add_argument("--folder", type=Path, help="on a disk with room; emptied again (default: temporary)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print(json.dumps(read_plainly(flags.measure)["all"]))
        return
    finish("partitions", flags, measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory(dir=flags.folder, prefix="partitions-") as name:
        folder, small = Path(name, "events"), Path(name, "small")
        write_partitions(folder, flags.events, flags.partitions)
        write_partitions(small, max(flags.events // SMALL, flags.partitions * SMALL), flags.partitions)
        runs = [run(Path(name), folder, small, flags) for _ in range(flags.rounds)]
        size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
    about = {**describe(), "events": flags.events, "partitions": flags.partitions, "file bytes": size}
    return {**about, "batch_size": flags.batch_size, "steps": flags.steps, "rounds": runs}


def run(folder: Path, events: Path, small: Path, flags: argparse.Namespace) -> dict[str, Any]:
    """One round: seconds of pyarrow, and for each variant its ranks without and with columns."""
    command = [sys.executable, __file__, "--measure", str(events / "events")]
    found: dict[str, Any] = {"pyarrow": json.loads(subprocess.check_output(command))}
    for name, variant in VARIANTS.items():
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            found[name] = [launch(events, Path(cache), variant, flags) for _ in range(2)]
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        found["small"] = [launch(small, Path(cache), VARIANTS[TWO], flags) for _ in range(2)]
    return found


def launch(data: Path, cache: Path, variant: tuple[bool, int, bool], flags: argparse.Namespace) -> list[Any]:
    """Train for some steps; return what `train_shortly` writes, of each rank. variant: see `VARIANTS`."""
    is_cut, ranks, has_one_core = variant
    words = ["--data_path", data, "--cache_dir", cache, "--batch_size", flags.batch_size, *TRAINING]
    words += ["--partitions", flags.partitions] if is_cut else []
    with tempfile.TemporaryDirectory() as results:
        cores = "one core" if has_one_core else "all cores"
        command = [*torchrun(ranks), __file__, "--rank", cores, results, time.time(), flags.steps, *words]
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
        return [json.loads(file.read_text()) for file in sorted(Path(results).iterdir())]


def train_shortly(results: Path, begun: float, most_steps: int, flags: list[str]) -> None:
    """Make columns and some steps; write seconds since the launch to the first step, rate and memory."""
    import recsuite as rs
    from example import make_loss, make_model
    from recsuite.runtime.process import end_process

    anonymous = [0]
    threading.Thread(target=watch, args=(anonymous,), daemon=True).start()

    def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
        with rs.session(args, runtime, rs.build_dataloader) as training:
            model = training.shard(make_model, loss=make_loss(training.columns, args))
            step = training.step(model.train_on)
            for number, batch in enumerate(next(iter(training.epochs()))):
                step(batch)
                if number == 0:
                    first = time.time()
                if number == most_steps:
                    break
            rate = number * args.global_batch(0, runtime.world_size) / (time.time() - first)
            found = {"first": first - begun, "events": rate}
            found |= {"peak": peak_memory(), "anonymous": max(anonymous), "cpu": time.process_time()}
            (results / f"{runtime.rank}.json").write_text(json.dumps(found))
            # In the middle of an epoch.
            end_process(0)

    rs.run_modes(flags, {"train": train}, make_model)


def watch(anonymous: list[int]) -> None:
    """Note the most anonymous memory of this process: the kernel keeps a peak of all memory alone."""
    while True:
        found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        anonymous[0] = max(anonymous[0], int(found[1]) * 1024)
        time.sleep(0.02)


def write_partitions(folder: Path, number: int, partitions: int) -> None:
    """Write events that are drawn from a seed, each user in one partition."""
    folder.mkdir()
    (folder / "schema.toml").write_text(STAR_SCHEMA)
    draw = np.random.default_rng(0)
    for part in range(partitions):
        rows = number * (part + 1) // partitions - number * part // partitions
        users, items = skewed_ids(
            draw, max(1, rows // EVENTS_PER_USER), max(1, number // EVENTS_PER_ITEM), rows
        )
        time_of = FIRST_TIME + np.sort(draw.integers(0, YEAR, rows))
        stars = draw.integers(1, 6, rows).astype(np.float32)
        columns: dict[str, np.ndarray] = dict(
            zip(STAR_COLUMNS, (users * partitions + part, items, stars, time_of), strict=True)
        )
        is_test = time_of >= FIRST_TIME + (1 - TEST) * YEAR
        is_validation = ~is_test & (draw.random(rows) < VALIDATION)
        splits = {"train": ~(is_test | is_validation), "validation": is_validation, "test": is_test}
        for split, chosen in splits.items():
            path = folder / "events" / f"part={part:05d}" / f"split={split}" / "0.parquet"
            path.parent.mkdir(parents=True)
            write_parquet(path, [{name: column[chosen] for name, column in columns.items()}])


# --- showing ---


def of_runs(result: dict[str, Any], name: str, has_columns: bool, key: str) -> float:
    """Median over rounds of a figure of a variant, of the rank with the highest one."""
    return median(max(rank[key] for rank in each[name][has_columns]) for each in result["rounds"])


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    memory = max(of_runs(result, TWO, has_columns, "anonymous") for has_columns in (False, True))
    more = of_runs(result, TWO, True, "first") - of_runs(result, "small", True, "first")
    # What a launch without columns takes longer, by the clock and of a processor.
    reading, of_cpu = (
        (of_runs(result, ONE, False, key) - of_runs(result, ONE, True, key))
        / (of_runs(result, TWO, False, key) - of_runs(result, TWO, True, key))
        for key in ("first", "cpu")
    )
    training = of_runs(result, TWO, True, "events") / of_runs(result, ONE, True, "events")
    shown, least = f"{memory / 2**30:.2f} GiB", f"{LEAST_SPEEDUP}"
    return [
        bar("memory of a rank, without mapped columns", memory, MOST_MEMORY, shown, "2.5 GiB", at_most=True),
        bar("start above that of a small set", more, MOST_SECONDS, f"{more:.1f} s", "5.0 s", at_most=True),
        bar("two ranks over one, in reading", reading, LEAST_SPEEDUP, f"{reading:.2f}", least),
        bar("two ranks over one, in reading, of a processor", of_cpu, LEAST_SPEEDUP, f"{of_cpu:.2f}", least),
        bar("two ranks over one, in training", training, LEAST_SPEEDUP, f"{training:.2f}", least),
    ]


def render(result: dict[str, Any]) -> str:
    """Table and origin."""
    heads = [
        "",
        "to the first step",
        "million events/s",
        "CPU",
        "with columns",
        "training",
        "memory",
        "anonymous",
    ]
    size, steps = f"{result['file bytes'] / 1e6:,.0f} MB of Parquet", f"{result['steps']} steps"
    about = (
        f"{result['events']:,} events in {result['partitions']} partitions, {size}. Seconds from launch to "
        "the first step, without and with columns, and of a processor without; million events a second of "
        f"{steps} of {result['batch_size']:,}; most memory of a rank, and of that without files."
    )
    return "\n\n".join([about, table(heads, _lines(result)), f"{origin(result)}."])


def _lines(result: dict[str, Any]) -> Iterator[list[str]]:
    alone = median(each["pyarrow"] for each in result["rounds"])
    yield ["pyarrow alone", f"{alone:.1f} s", f"{result['events'] / alone / 1e6:.2f}", "", "", "", "", ""]
    for name in (*VARIANTS, "small"):
        fresh, known = (of_runs(result, name, has_columns, "first") for has_columns in (False, True))
        rate = f"{result['events'] / fresh / 1e6:.2f}" if name in VARIANTS else ""
        memory = [
            max(of_runs(result, name, made, key) for made in (False, True)) for key in ("peak", "anonymous")
        ]
        shown = [f"{each / 2**30:.2f} GiB" for each in memory]
        training = f"{of_runs(result, name, True, 'events') / 1e6:.2f}"
        label = name if name in VARIANTS else "a small set, 2 ranks"
        cpu = f"{of_runs(result, name, False, 'cpu'):.1f} s"
        yield [label, f"{fresh:.1f} s", rate, cpu, f"{known:.1f} s", training, *shown]


if __name__ == "__main__":
    main()
