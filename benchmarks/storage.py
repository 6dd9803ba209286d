"""Measure tables on a disk beside tables in memory and in a plain mapped file, in one run.

    python benchmarks/storage.py --write     a quarter of an hour, 10 GB of disk, as root
    python benchmarks/storage.py --rows 100000 --ratings 20000 --rounds 1

Each measurement is a process: it trains a pass, which fills the rows in memory, and then one that counts.
It has all memory for the kernel's cache of files, or it is "limited": in a group of processes with as much
memory as the training in memory took without its tables, 1.1 times the budget, and 200 MB for all files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import train_here
from common import DOCS, Result, bar, describe, finish, make_parser, origin, ratio, shown_ratio, table
from train_here import DEFAULT, MODELS, TWO_TABLES, columns_of, make_columns, rows_of

from recsuite.config.config import Config
from recsuite.errors import counted
from recsuite.runtime.process import init_runtime

PAGE = DOCS / "larger_than_memory.md"
GROUPS = Path("/sys/fs/cgroup/memory")
# Share of the ids, the most popular first, and share of the ratings of ml-latest-small that they have.
SHARES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1)
OF_USERS = (0, 0.126, 0.199, 0.346, 0.477, 0.651, 0.762, 0.889, 0.954, 1)
OF_MOVIES = (0, 0.178, 0.269, 0.441, 0.6, 0.765, 0.852, 0.931, 0.96, 1)
# What tables may take of memory / budget, and bytes for files, such as libraries.
BESIDE, FOR_FILES = 1.1, 200 * 10**6
BATCH = 2048
VARIANTS = {"memory": "in memory", "disk": "on disk", "limited": "limited", "mapped": "mapped file, limited"}
# Name, model, table / budget, and whether all ids are equally likely.
CASES = (
    ("default model", DEFAULT.name, 4, False),
    ("user and movie alone", TWO_TABLES.name, 4, False),
    ("user and movie alone, uniform ids", TWO_TABLES.name, 10, True),
)


def main() -> None:
    """Measure and show, and write if that is asked for; or be a process that is measured."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="users, and as many movies")
    parser.add_argument("--ratings", type=int, default=1_500_000, help="of a pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", nargs=3, metavar=("FOLDER", "MODEL", "FLAGS"), help=argparse.SUPPRESS)
    parser.add_argument("--is_mapped", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.train:
        folder, model, given = flags.train
        train(Path(folder), model, json.loads(given), flags.is_mapped)
    else:
        finish("storage", flags, measure, judge, render, PAGE)


# --- a process that is measured ---


def train(folder: Path, name: str, given: dict[str, Any], is_mapped: bool) -> None:
    """Train two passes and print the rate of the second one, memory and counts."""
    context = init_runtime(Config())
    from example import make_loss, make_model
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.sharding import cpu_tables
    from recsuite.sharding.storage import TableRows
    from recsuite.training.progress import Progress
    from recsuite.training.state import Schedule, build_train_state
    from recsuite.training.steps import BatchFeed, Pass, learn

    def mapped(module: Any, sharder: Any, is_split: bool) -> TableRows:
        weights = module.emb_module.weights_host.detach().view(-1, module.emb_module.max_D)
        return TableRows(weights, cpu_tables.make_state(sharder.rule, module, sharder.storage.zeros))

    columns = columns_of(folder, MODELS[name])
    config = MODELS[name].config.replaced(batch_size=BATCH, **given)
    with mock.patch.object(cpu_tables, "_rows_of", mapped) if is_mapped else contextlib.nullcontext():
        state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    sampler = EpochSampler(EventBatches(columns, config, 0, 1))
    inputs = BatchFeed(build_dataloader(sampler.dataset, sampler, config))
    rows = next((table.rows.on_disk for table in state.tables.values() if table.rows.on_disk), None)
    for epoch in range(2):
        before = vars(rows.counts).copy() if rows else {}
        begun = time.perf_counter()
        part = Pass(state, inputs, Progress(0, epoch), Schedule(columns.num_train), config.training, context)
        losses = learn(part)
        seconds = time.perf_counter() - begun
    counts = {name: value - before[name] for name, value in vars(rows.counts).items()} if rows else {}
    result = {"rate": columns.num_train / seconds, "loss": float(losses.mean()), "counts": counts}
    os.write(1, f"\nresult {json.dumps(result)}\n".encode())
    os._exit(0)


# --- measurements ---


def measure(flags: argparse.Namespace) -> Result:
    """Rates, memory and counts of all variants of all cases, in turns."""
    cases = {}
    for name, model, factor, is_uniform in CASES:
        with tempfile.TemporaryDirectory() as folder:
            # Fewer, because a step on a mapped file takes half a second.
            ratings = flags.ratings // (8 if is_uniform else 1)
            make(Path(folder), flags.rows, ratings, model, is_uniform)
            found = measure_case(Path(folder), model, factor, flags)
            cases[name] = {"factor": factor, "ratings": ratings, **found}
    about = {"about": describe(), "rows": flags.rows, "ratings": flags.ratings}
    return {**about, "disk_reads": disk_reads(), "cases": cases}


def disk_reads() -> float:
    """Pages at random places of a file that the disk gives in a second, to as many readers as a rank has."""
    from recsuite.sharding.storage import READERS

    size, number = 2**28, 2**15
    places = np.random.default_rng(0).permutation(size // mmap.PAGESIZE)[:number]
    with tempfile.TemporaryFile(buffering=0) as file, ThreadPoolExecutor(READERS) as readers:
        file.write(os.urandom(size))
        os.fsync(file.fileno())
        # Out of the kernel's cache, and no page beside the one that is read.
        for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM):
            os.posix_fadvise(file.fileno(), 0, size, advice)

        def read(part: np.ndarray) -> None:
            for place in part:
                os.pread(file.fileno(), mmap.PAGESIZE, int(place) * mmap.PAGESIZE)

        begun = time.perf_counter()
        for _ in readers.map(read, np.array_split(places, READERS)):
            pass
        return number / (time.perf_counter() - begun)


def make(folder: Path, rows: int, ratings: int, name: str, is_uniform: bool) -> None:
    """Write columns with ids of the popularity of MovieLens, or all equally likely."""

    def draw(
        generator: np.random.Generator, of_events: tuple[float, ...], number: int, size: int
    ) -> np.ndarray:
        places = generator.uniform(size=size)
        if not is_uniform:
            places = np.interp(places, of_events, SHARES)
        # Popular ones lie anywhere in the table.
        mixed = generator.permutation(number).astype(np.int32)
        return mixed[np.minimum((places * number).astype(np.int64), number - 1)]

    def movies(generator: np.random.Generator, number: int, size: int, model: Any) -> np.ndarray:
        return draw(np.random.default_rng(1), OF_MOVIES, number, size)

    with mock.patch.object(train_here, "_movies", movies):
        make_columns(folder, rows, rows, ratings, MODELS[name])
    events = np.load(folder / "rows.npy", mmap_mode="r+")
    events["user"] = draw(np.random.default_rng(2), OF_USERS, rows, len(events))
    if history := MODELS[name].history:
        events["history_end"] = np.load(folder / "history_offsets.npy")[events["user"]] + history


def measure_case(folder: Path, name: str, factor: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Results of the variants, by variant a list with one of each round."""
    model = MODELS[name]
    tables = 4 * (model.dim + 1) * rows_of(model, flags.rows, flags.rows)
    budget = tables // factor
    disk = {"storage": "user,movie" + ",history" * bool(model.history), "memory_budget": f"{budget}B"}
    found: dict[str, Any] = {"tables": tables, "budget": budget}
    variants: dict[str, dict[str, Any]] = {"memory": {}, "disk": disk, "limited": disk}
    if factor > 4:
        variants = {"memory": {}, "limited": disk, "mapped": disk}
    limit = 2**40
    for _ in range(flags.rounds):
        for variant, given in variants.items():
            within = limit if variant in ("limited", "mapped") else 2**40
            result = run(folder, name, given, variant == "mapped", within)
            found.setdefault(variant, []).append(result)
            print(name, variant, result, file=sys.stderr, flush=True)
            if variant == "memory":
                limit = int(found["memory"][0]["memory"] - tables + BESIDE * budget) + FOR_FILES
    return found


def run(folder: Path, name: str, given: dict[str, Any], is_mapped: bool, limit: int) -> dict[str, Any]:
    """Train in a process with at most so many bytes of memory; return its results and its most memory."""
    words = [sys.executable, __file__, "--train", str(folder), name, json.dumps(given)]
    with group(limit) as (enter, most):
        command = [*enter, *words, *["--is_mapped"] * is_mapped]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            largest = 0
            while process.poll() is None:
                largest = max(largest, most())
                time.sleep(0.02)
            assert process.stdout is not None
            output = process.stdout.read()
    lines = [line for line in output.splitlines() if line.startswith("result ")]
    if not lines:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}: {output[-2000:]}")
    return {**json.loads(lines[-1].removeprefix("result ")), "memory": largest}


@contextlib.contextmanager
def group(limit: int) -> Iterator[tuple[list[str], Any]]:
    """A command that enters a new group of processes with a limit of memory, and a function that returns the
    memory of these without files.
    """
    lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    folder = GROUPS / lines["memory"].lstrip("/") / f"storage-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(limit))

    def most() -> int:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(stat["rss"])

    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"], most
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


# --- results ---


def of(case: dict[str, Any], variant: str, name: str = "rate") -> list[float]:
    """A figure of each round."""
    return [result[name] for result in case[variant]]


def share(case: dict[str, Any], name: str, of_name: str) -> float:
    """Share of a count in another one, in all rounds."""
    counts = [result["counts"] for result in case["limited"]]
    return 1 - sum(each[name] for each in counts) / max(1, sum(each[of_name] for each in counts))


def beside_budget(case: dict[str, Any]) -> float:
    """Memory of tables on a disk / budget."""
    others = min(of(case, "memory", "memory")) - case["tables"]
    return (min(of(case, "limited", "memory")) - others) / case["budget"]


def judge(result: Result) -> list[Result]:
    """Each bar beside its figure."""
    bars = []
    for name, case in result["cases"].items():
        title = f"{name}, tables {case['factor']} x the budget"
        limited, memory = of(case, "limited"), of(case, "memory")
        if "mapped" in case:
            mapped = of(case, "mapped")
            shown = shown_ratio(limited, mapped)
            bars.append(bar(f"{title}: / a mapped file, limited", ratio(limited, mapped), 1.5, shown, "1.5"))
        else:
            for label, rates in (("", of(case, "disk")), (", limited", limited)):
                shown = shown_ratio(rates, memory)
                bars.append(bar(f"{title}: / memory{label}", ratio(rates, memory), 0.5, shown, "0.5"))
            early = share(case, "late", "loaded")
            bars.append(bar(f"{title}: rows before their step", early, 0.95, f"{early:.3f}", "0.95"))
        beside = beside_budget(case)
        bars.append(bar(f"{title}: memory / budget", beside, 1.1, f"{beside:.2f}", "1.1", at_most=True))
        equal = len(
            {each["loss"] for variant in case.values() if isinstance(variant, list) for each in variant}
        )
        bars.append(bar(f"{title}: different losses", equal, 1, str(equal), "1", at_most=True))
    return bars


def render(result: Result) -> str:
    """Table and origin."""
    heads = ["", "tables, MB", "budget, MB", *VARIANTS.values(), "/ memory", "limited / memory"]
    heads += ["rows in memory", "others before their step", "memory / budget"]
    lines = []
    for name, case in result["cases"].items():
        rates = [f"{np.median(of(case, each)):,.0f}" if each in case else "" for each in VARIANTS]
        memory = of(case, "memory")
        found = [shown_ratio(of(case, each), memory) if each in case else "" for each in ("disk", "limited")]
        sizes = f"{case['tables'] / 1e6:,.0f}", f"{case['budget'] / 1e6:,.0f}"
        shares = f"{share(case, 'loaded', 'requested'):.1%}", f"{share(case, 'late', 'loaded'):.1%}"
        lines.append([name, *sizes, *rates, *found, *shares, f"{beside_budget(case):.2f}"])
    rounds = len(next(iter(result["cases"].values()))["memory"])
    loads = max(
        each["counts"]["loaded"] * each["rate"] / case["ratings"]
        for case in result["cases"].values()
        for each in case["limited"]
    )
    return (
        f"{table(heads, lines)}\n\nRatings/s of one process, batches of {BATCH:,}, the second pass over "
        f"{result['ratings']:,} ratings, an eighth with uniform ids; medians of {counted(rounds, 'round')}. "
        f"The disk gave {result['disk_reads']:,.0f} pages/s, and limited trainings loaded up to "
        f"{loads:,.0f} rows/s with their states; {origin(result['about'])}."
    )


if __name__ == "__main__":
    main()
