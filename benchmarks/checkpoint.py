"""Measure full checkpoints, deltas and loading, beside plain writing and reading of as many bytes.

    python benchmarks/checkpoint.py --write       everything: ten minutes on two cores, 10 GB of disk
    python benchmarks/checkpoint.py --rows 20000 --ratings 20000 --loads 1 --rounds 1 --blocks 1

Prints each figure beside its bar; with --write it also writes docs/checkpoint.json, docs/checkpoint.png and
the part of docs/log/benchmarks.md between the checkpoint marks. All else lies in a folder that is removed.
The ranks run what users run: the checkpointer, its tracker, and the loading of a state.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    DOCS,
    bar,
    comma_separated,
    describe,
    finish,
    in_turns,
    make_parser,
    new_figure,
    origin,
    ratio,
    ratios,
    shown_ratio,
    table,
    torchrun,
)

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext, all_gather_object, cleanup_runtime, init_runtime

PAGE = DOCS / "log" / "benchmarks.md"
NUM_RANKS = 2
CACHES = ("cached", "from disk")


def main() -> None:
    """Measure and show, and write if that is asked for; or be a rank of a launch."""
    if sys.argv[1:2] == ["rank"]:
        run_rank(PARTS, *sys.argv[2:])
        return
    if sys.argv[1:2] == ["watch"]:
        watch_memory(Path("/proc", sys.argv[2], "status"))
        return
    parser = make_parser(__doc__)
    add_flags(parser, [1_000_000, 10_000_000], ratings=1_000_000, rounds=6)
    # As many as wrote the checkpoint, fewer, and more.
    parser.add_argument("--loads", type=comma_separated(int), default=[2, 1, 3], help="ranks that load")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks of steps, for the tracking")
    finish("checkpoint", parser.parse_args(), measure, judge, render, PAGE, draw)


def add_flags(parser: argparse.ArgumentParser, rows: list[int], ratings: int, rounds: int) -> None:
    """Add the flags that `open_settings` reads, and --rows."""
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary one)")
    parser.add_argument("--rows", type=comma_separated(int), default=rows, help="of the large table")
    parser.add_argument("--ratings", type=int, default=ratings, help="of the data set")
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each figure, in turns")


@contextlib.contextmanager
def open_settings(flags: argparse.Namespace, blocks: int = 0) -> Iterator[CheckpointSettings]:
    """Settings with synthetic ratings, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=flags.folder) as folder:
        ratings = str(Path(folder) / "ratings")
        open_columns(Config.of(dataset="synthetic", synthetic_ratings=flags.ratings, data_path=ratings))
        yield CheckpointSettings(ratings, folder, 0, flags.rounds, blocks)


@contextlib.contextmanager
def table_of(settings: CheckpointSettings, rows: int) -> Iterator[CheckpointSettings]:
    """Settings with columns whose large table has `rows` rows, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        settings = dataclasses.replace(settings, folder=folder, rows=rows)
        make_wide_columns(settings, Config.of(data_path=settings.ratings_folder), Path(folder) / "columns")
        yield settings


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with open_settings(flags, flags.blocks) as settings:
        return {
            **describe(),
            "dim": DIM,
            "ranks": NUM_RANKS,
            "ratings": flags.ratings,
            "tracking": launch(1, "tracking", settings),
            "sizes": [measure_size(rows, flags.loads, settings) for rows in flags.rows],
        }


def measure_size(rows: int, loads: list[int], settings: CheckpointSettings) -> dict[str, Any]:
    """Costs of a table of one size."""
    with table_of(settings, rows) as settings:
        found = launch(NUM_RANKS, "dumps", settings)
        loaded = [launch(number, "loads", settings) for number in loads]
    return {"rows": rows, **found, "loads": loaded}


def launch(num_ranks: int, part: str, settings: CheckpointSettings, script: str = __file__) -> Any:
    """Result of a part, measured on some ranks that run a script, see `run_rank`."""
    settings_file, results = (Path(settings.folder) / name for name in ("settings.json", "results.json"))
    settings_file.write_text(json.dumps(dataclasses.asdict(settings)))
    command = [*torchrun(num_ranks), script, "rank", part, str(settings_file), str(results)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return json.loads(results.read_text())


def run_rank(parts: Mapping[str, Part], part: str, settings_file: str, results: str) -> None:
    """Measure a part as one rank of a launch; rank 0 writes what was found.

    Args:
        settings_file: JSON of `CheckpointSettings`.
        results: file that is written.
    """
    settings = CheckpointSettings(**json.loads(Path(settings_file).read_text()))
    config = Config.of(
        data_path=settings.ratings_folder,
        save_dir=str(Path(settings.folder) / "dumps"),
        local_batch_size=4096,
        history=0,
        embedding_dim=DIM,
        inc_dump=True,
        dump_every=1,
        # The benchmark removes the checkpoint before the newest itself, so that it can time that apart.
        keep=2,
    )
    context = init_runtime(config)
    found = parts[part](settings, config, context)
    cleanup_runtime()
    if context.rank == 0:
        Path(results).write_text(json.dumps(found))


# --- settings, columns and steps of a rank ---

DIM = 64
# Steps with tracking, then as many without, in turns.
BLOCK_STEPS = 20
# One request of the kernel moves less than 2 GiB.
MOST_AT_ONCE = 2**30


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of the ranks.

    ratings_folder: of the synthetic ratings; folder: where to write; rows: of the large table; rounds:
    measurements of each figure; blocks: pairs of blocks of steps with tracking and without.
    """

    ratings_folder: str
    folder: str
    rows: int
    rounds: int
    blocks: int


def make_wide_columns(settings: CheckpointSettings, config: Config, folder: Path) -> None:
    """Write columns of the same ratings, with the rows of users spread over a table of `rows` rows.

    The other files are links to those of the ratings.
    """
    columns = open_columns(config)
    folder.mkdir()
    for path in Path(columns.folder).iterdir():
        (folder / path.name).symlink_to(path)
    raw_values = json.loads((folder / "vocabulary.json").read_text())
    users = np.load(folder / "user_features.npy")
    # Row 0 is the unknown row.
    rows = 1 + np.arange(len(users)) * (settings.rows - 1) // len(users)
    users["features"][:, columns.place_of("user")] = rows
    for name in ("vocabulary.json", "user_features.npy"):
        (folder / name).unlink()
    (folder / "vocabulary.json").write_text(
        json.dumps({**raw_values, "user": list(range(1, settings.rows))}, indent=None)
    )
    np.save(folder / "user_features.npy", users)


def wide_columns(settings: CheckpointSettings, config: Config) -> Columns:
    """Columns that `make_wide_columns` wrote."""
    columns = open_columns(config)
    tables = tuple(
        dataclasses.replace(table, rows=settings.rows) if table.name == "user" else table
        for table in columns.tables
    )
    return dataclasses.replace(columns, folder=str(Path(settings.folder) / "columns"), tables=tables)


# Measurement of a rank, from settings, config and context.
Part = Callable[[CheckpointSettings, Config, RuntimeContext], Any]


class AllRanksClock:
    """Seconds of an action of all ranks, from when all are ready until the last one has ended."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.barrier = dist.barrier

    def __call__(self, action: Callable[[], Any]) -> float:
        """Run the action; collective."""
        # The slowest rank counts: a checkpoint is complete when the last rank has written its share.
        self.barrier()
        start = time.perf_counter()
        action()
        self.barrier()
        return time.perf_counter() - start


@contextlib.contextmanager
def training_steps(
    state: Any, columns: Columns, config: Config, context: RuntimeContext
) -> Iterator[Callable[[], float]]:
    """Function that makes the next training step and returns its seconds, without those of its batch."""
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.training.steps import BatchFeed

    dataset = EventBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        inputs = BatchFeed(loader)
        batches = (batch for epoch in itertools.count() for batch in inputs.batches("train", epoch))
        state.model.train()

        def step() -> float:
            batch = next(batches)
            start = time.perf_counter()
            state.table_optimizer.zero_grad()
            state(batch.to(context.device, non_blocking=True)).backward()
            state.step()
            return time.perf_counter() - start

        yield step


# --- full checkpoints and deltas beside plain writes ---

SHARES = (0.001, 0.01, 0.1)


def measure_dumps(settings: CheckpointSettings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Full checkpoints and deltas beside plain writes; memory and training steps during a checkpoint.

    Leaves a full checkpoint.
    """
    from example import make_loss, make_model
    from recsuite.checkpoint.checkpointer import Checkpointer
    from recsuite.training.state import build_train_state

    columns = wide_columns(settings, config)
    # Untrained: bytes and seconds do not depend on the values of rows.
    state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    checkpointer = Checkpointer(None, "benchmark", columns, config, context)
    checkpointer.begin(state, checkpointer.start)
    shard = all_gather_object(lambda: sum(len(array) for array in _shard_bytes(checkpointer.writer.tables)))
    write = checkpointer.writer.write_full
    memory = {"while steps wait": peak_memory(lambda: write(checkpointer.start), max(shard))}
    rounds = Rounds(checkpointer, settings, context)
    found = {"shard bytes": shard, **rounds.measure()}
    config = config.replaced(inc_dump=False, async_dump=True)
    beside = Checkpointer(None, "benchmark", columns, config, context)
    beside.begin(state, beside.start)
    found["beside"] = steps_beside(beside, state, columns, config, context, rounds.progress())

    def write_beside() -> None:
        beside.writer.write_full(rounds.progress())
        beside.close()

    memory["beside steps"] = peak_memory(write_beside, max(shard))
    return {**found, "memory": memory}


def _shard_bytes(tables: Mapping[str, Any]) -> list[np.ndarray]:
    """Bytes of the tables and optimizer states on this rank, uint8 each."""
    return [
        value.numpy().reshape(-1).view(np.uint8)
        for table in tables.values()
        for value in table.export().values()
    ]


class Rounds:
    """Plain write, full checkpoint and a delta of each share, in turns."""

    def __init__(self, checkpointer: Any, settings: CheckpointSettings, context: RuntimeContext) -> None:
        self.checkpointer = checkpointer
        self.settings = settings
        self.context = context
        self.clock = AllRanksClock()
        self.draw = np.random.default_rng(context.rank)
        self.save_dir = Path(checkpointer.config.checkpoint.save_dir)
        self.step = 0

    def progress(self) -> Any:
        """Return the next progress, in the middle of an epoch."""
        from recsuite.training.progress import Progress

        self.step += 1
        return Progress(self.step, 0, samples=1)

    def measure(self) -> dict[str, Any]:
        """Return the results of all rounds, after one that warms up."""
        from recsuite.checkpoint.folder import deltas_in, full_checkpoints_in, remove_checkpoint

        found: dict[str, Any] = {"plain": [], "dump": [], "removing": []}
        found["deltas"] = {str(share): [] for share in SHARES}
        for number in range(-1, self.settings.rounds):
            # In turns: the second one may meet what the first one left behind.
            order = (self.plain, self.dump) if number % 2 else (self.dump, self.plain)
            seconds = {name: value for measure in order for name, value in measure().items()}
            deltas = {str(share): self.delta(share) for share in SHARES[:: 1 if number % 2 else -1]}
            if self.context.rank == 0:
                # Newest first: none is ever without its base.
                for delta in reversed(deltas_in(self.save_dir)):
                    remove_checkpoint(delta)
            if number >= 0:
                for name, value in seconds.items():
                    found[name].append(value)
                for share, figures in deltas.items():
                    found["deltas"][share].append(figures)
        found["dump bytes"] = _bytes_in(full_checkpoints_in(self.save_dir)[-1])
        return found

    def prepare(self) -> None:
        """Write plainly and remove it, so that each measurement finds the same free memory and disk.

        The first write after a pause is slower by half on a machine that takes unused memory back.
        """
        self.clock(self._write_plain)
        self._plain_file().unlink()
        self.clock.barrier()

    def dump(self) -> dict[str, float]:
        """Seconds of a full checkpoint, and of removing the one before it."""
        from recsuite.checkpoint.folder import full_checkpoints_in, remove_checkpoint

        self.prepare()
        progress = self.progress()
        seconds = self.clock(lambda: self.checkpointer.writer.write_full(progress))
        (old,) = full_checkpoints_in(self.save_dir)[:-1]
        removing = self.clock(lambda: remove_checkpoint(old) if self.context.rank == 0 else None)
        return {"dump": seconds, "removing": removing}

    def plain(self) -> dict[str, float]:
        """Seconds until the bytes of the shards, as they lie, are on the disk, in a file a rank."""
        self.prepare()
        seconds = self.clock(self._write_plain)
        self._plain_file().unlink()
        return {"plain": seconds}

    def _write_plain(self) -> None:
        with open(self._plain_file(), "wb", buffering=0) as file:
            for array in _shard_bytes(self.checkpointer.writer.tables):
                for start in range(0, len(array), MOST_AT_ONCE):
                    written = file.write(array.data[start : start + MOST_AT_ONCE])
                    assert written == len(array[start : start + MOST_AT_ONCE])
            # A checkpoint waits for the disk too.
            os.fsync(file.fileno())

    def _plain_file(self) -> Path:
        return self.save_dir / f"plain-{self.context.rank}"

    def delta(self, share: float) -> dict[str, float]:
        """Write a delta after a share of the rows of the large table was touched."""
        import torch

        from recsuite.training.callbacks import Step

        marks = self.checkpointer.writer.tables["user"].marks
        touched = max(1, round(share * len(marks)))
        # Marked as the tracker does: a step touches the rows of its batch, and no share of a table.
        marks[self.draw.permutation(len(marks))[:touched]] = True
        progress = self.progress()
        step = Step(progress, torch.tensor(0.5), {})
        seconds = self.clock(lambda: self.checkpointer.on_step(step))
        size = _bytes_in(self.save_dir / f"delta-{progress.step:09d}")
        # Gathered last: then all have read the folder, and it may be removed.
        return {"bytes": size, "seconds": seconds, "rows": sum(all_gather_object(lambda: touched))}


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def peak_memory(action: Callable[[], None], shard_bytes: int) -> dict[str, float]:
    """Peak of the anonymous memory in an action beyond that before it, of the rank with the largest.

    Another process watches it, which the interpreter lock does not stop.
    """
    # Freed memory that the allocator keeps would hide an allocation.
    ctypes.CDLL(None).malloc_trim(0)
    command = [sys.executable, __file__, "watch", str(os.getpid())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as watcher:  # type: ignore[call-overload]
        before = int(watcher.stdout.readline())
        action()
        output, _ = watcher.communicate()
    extra = max(all_gather_object(lambda: int(output) - before))
    return {"bytes": extra, "of the shard": extra / shard_bytes}


def watch_memory(status: Path) -> None:
    """Print the anonymous memory of a process, and its peak since then when the standard input ends."""

    def anonymous() -> int:
        found = re.search(r"RssAnon:\s*(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1]) * 1024

    peak = anonymous()
    print(peak, flush=True)
    # Short, because a copy of the tables may live for some hundredths of a second.
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        peak = max(peak, anonymous())
    print(peak)


def steps_beside(
    checkpointer: Any, state: Any, columns: Columns, config: Config, context: RuntimeContext, progress: Any
) -> dict[str, float]:
    """Seconds of a step before a checkpoint and while it is written from a copy, and of making the copy."""
    import torch
    import torch.distributed as dist

    final = Path(config.checkpoint.save_dir) / f"step-{progress.step:09d}"
    with training_steps(state, columns, config, context) as step:
        # The first half warms up.
        before = [step() for _ in range(2 * BLOCK_STEPS)][BLOCK_STEPS:]
        dist.barrier()
        start = time.perf_counter()
        checkpointer.writer.write_full(progress)
        # Without waiting for all ranks: their writing has begun and would be in it.
        copying = time.perf_counter() - start
        during: list[float] = []
        done = torch.tensor(0)
        while not done:
            during.append(step())
            # Seen by one rank and told to all, as a step needs all.
            done = torch.tensor(int(context.rank == 0 and final.is_dir()))
            dist.all_reduce(done, dist.ReduceOp.MAX)
    checkpointer.close()
    return {
        "step before": statistics.median(before),
        "step during": statistics.median(during),
        "longest during": max(during),
        "steps during": len(during),
        "copying": max(all_gather_object(lambda: copying)),
    }


# --- loading beside plain reading ---


def measure_loads(settings: CheckpointSettings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Seconds to load the newest checkpoint beside reading as many bytes, from page cache and from disk."""
    from example import make_loss, make_model
    from recsuite.checkpoint.chain import chain_at
    from recsuite.checkpoint.restore import restore
    from recsuite.training.state import build_train_state

    columns = wide_columns(settings, config)
    state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    chain = chain_at(Path(config.checkpoint.save_dir))
    shard_files = sorted(chain.base.glob("*.safetensors"))
    clock, plain = AllRanksClock(), PlainRead(shard_files, context)
    found: dict[str, Any] = {
        "ranks": context.world_size,
        "bytes": sum(path.stat().st_size for path in shard_files),
    }

    def seconds_of(action: Callable[[], Any], cache: str) -> float:
        if cache == "from disk":
            forget(chain.base, context)
        return clock(action)

    actions: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "load": lambda: restore(chain, state, columns, context),
    }
    for cache in CACHES:
        measures = {name: partial(seconds_of, action, cache) for name, action in actions.items()}
        found[cache] = in_turns(measures, settings.rounds, warm_up=1)
    return found


class PlainRead:
    """Read of this rank's share of the bytes of some files, into memory that is allocated already."""

    def __init__(self, paths: list[Path], context: RuntimeContext) -> None:
        # As many bytes of every file as the other ranks: all start and end together, as in a load.
        self.pieces = []
        for path in paths:
            size = path.stat().st_size
            bounds = [size * rank // context.world_size for rank in (context.rank, context.rank + 1)]
            self.pieces.append((path, bounds[0], bounds[1] - bounds[0]))
        # Written, so that every page exists, as those of the tables do.
        self.into = np.ones(sum(length for _, _, length in self.pieces), np.uint8)

    def __call__(self) -> None:
        """Read all of it."""
        place = 0
        for path, start, length in self.pieces:
            with open(path, "rb", buffering=0) as file:
                file.seek(start)
                end = place + length
                while place < end:
                    place += file.readinto(self.into.data[place : min(end, place + MOST_AT_ONCE)])


def forget(folder: Path, context: RuntimeContext) -> None:
    """Drop a folder's files from the page cache."""
    if context.rank == 0:
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- tracking of touched rows ---


def measure_tracking(settings: CheckpointSettings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Seconds of a training step with a tracker and without, block by block."""
    from example import make_loss, make_model
    from recsuite.sharding.plan import embedding_tables
    from recsuite.sharding.table import track_changes
    from recsuite.training.state import build_train_state

    columns = open_columns(config)
    state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    # In one process: two processes may differ by more than the tracking costs.
    track_changes(state.model, embedding_tables(state.model))
    tracked = [module for module in state.model.modules() if getattr(module, "post_lookup_tracker_fn", None)]
    trackers = [module.post_lookup_tracker_fn for module in tracked]
    with training_steps(state, columns, config, context) as step:

        def block(tracks: bool) -> float:
            for module, tracker in zip(tracked, trackers, strict=True):
                module.post_lookup_tracker_fn = tracker if tracks else None
            return statistics.median(step() for _ in range(BLOCK_STEPS))

        kinds = {"with": True, "without": False}
        blocks = {name: partial(block, record) for name, record in kinds.items()}
        found = in_turns(blocks, settings.blocks, warm_up=1)
    return {**found, "batch size": config.loader.local_batch_size}


PARTS: dict[str, Part] = {"dumps": measure_dumps, "loads": measure_loads, "tracking": measure_tracking}


# --- bars, table and figure; computed from the JSON alone ---

# Share of the rows that a delta of the bars touches.
SHARE = "0.01"


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    bars: list[dict[str, Any]] = []

    def add(name: str, measured: float, limit: float, unit: str = "", at_most: bool = False) -> None:
        bars.append(bar(name, measured, limit, f"{measured:.2f}{unit}", f"{limit:g}{unit}", at_most))

    for size in result["sizes"]:
        rows = f"{size['rows']:,} rows"
        add(
            f"full checkpoint, {result['ranks']} ranks, {rows}, of the plain write",
            ratio(size["plain"], size["dump"]),
            0.7,
        )
        for load in size["loads"]:
            for cache in CACHES:
                name = f"load, {load['ranks']} rank{'s' if load['ranks'] > 1 else ''}, {cache}, {rows}"
                add(f"{name}, of the plain read", ratio(load[cache]["plain"], load[cache]["load"]), 0.5)
        delta = summary(size["deltas"][SHARE])
        name = f"delta of 1 % of {rows}"
        share = 100 * delta["bytes"] / size["dump bytes"]
        add(f"{name}, bytes of a full checkpoint", share, 2, " %", at_most=True)
        share = 100 * delta["seconds"] / median(size["dump"])
        add(f"{name}, time of a full checkpoint", share, 5, " %", at_most=True)
        for how, peak in size["memory"].items():
            name = f"peak extra memory of a full checkpoint {how}, {rows}, of the rank's shard"
            add(name, peak["of the shard"], 1.1, at_most=True)
    tracking = result["tracking"]
    cost = 100 * (ratio(tracking["with"], tracking["without"]) - 1)
    add("tracking, of the step without", cost, 3, " %", at_most=True)
    return bars


def summary(deltas: list[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds."""
    return {name: median(delta[name] for delta in deltas) for name in deltas[0]}


def render(result: dict[str, Any]) -> str:
    """Table, explanation and origin."""
    sizes = result["sizes"]
    lines = [
        [f"full checkpoint, {result['ranks']} ranks / plain write", ">= 0.7", *map(_full_cell, sizes)],
    ]
    for place, load in enumerate(sizes[0]["loads"]):
        for cache in CACHES:
            cells = [_load_cell(size["loads"][place], cache) for size in sizes]
            name = f"load, {load['ranks']} rank{'s' if load['ranks'] > 1 else ''}, {cache} / plain read"
            lines.append([name, ">= 0.5", *cells])
    lines += [
        ["delta of 1 % of the rows / full checkpoint, bytes", "<= 2 %", *map(_delta_bytes_cell, sizes)],
        ["delta of 1 % of the rows / full checkpoint, time", "<= 5 %", *map(_delta_time_cell, sizes)],
        *(
            [
                f"peak extra memory of a full checkpoint {how} / shard",
                "<= 1.1",
                *(_peak_cell(size, how) for size in sizes),
            ]
            for how in sizes[0]["memory"]
        ),
        ["step during / before an --async_dump", "", *map(_beside_cell, sizes)],
        ["cost of tracking in a step", "<= 3 %", *[_tracking_cell(result["tracking"])] * len(sizes)],
    ]
    heads = ["what", "bar", *(f"{size['rows']:,} rows" for size in sizes)]
    return f"{table(heads, lines, left=(0, 1))}\n\n{_explanation(result)}\n\n{origin(result)}."


def _full_cell(size: dict[str, Any]) -> str:
    bytes_written = sum(size["shard bytes"])
    rates = [f"{_rate(bytes_written, size[name]):.2f}" for name in ("dump", "plain")]
    return f"{shown_ratio(size['plain'], size['dump'])} ({rates[0]} of {rates[1]} GB/s)"


def _load_cell(load: dict[str, Any], cache: str) -> str:
    seconds = load[cache]
    rates = [f"{_rate(load['bytes'], seconds[name]):.2f}" for name in ("load", "plain")]
    return f"{shown_ratio(seconds['plain'], seconds['load'])} ({rates[0]} of {rates[1]} GB/s)"


def _rate(num_bytes: float, seconds: list[float]) -> float:
    return num_bytes / median(seconds) / 1e9


def _delta_bytes_cell(size: dict[str, Any]) -> str:
    delta = summary(size["deltas"][SHARE])
    return f"{100 * delta['bytes'] / size['dump bytes']:.2f} % ({delta['bytes'] / 1e6:.1f} MB)"


def _delta_time_cell(size: dict[str, Any]) -> str:
    seconds = summary(size["deltas"][SHARE])["seconds"]
    return f"{100 * seconds / median(size['dump']):.1f} % ({1e3 * seconds:.0f} ms)"


def _peak_cell(size: dict[str, Any], how: str) -> str:
    peak = size["memory"][how]
    return f"{peak['of the shard']:.2f} ({peak['bytes'] / 1e6:.0f} MB)"


def _beside_cell(size: dict[str, Any]) -> str:
    beside = size["beside"]
    before, during = beside["step before"], beside["step during"]
    return f"{during / before:.2f} ({1e3 * during:.0f} of {1e3 * before:.0f} ms)"


def _tracking_cell(tracking: dict[str, Any]) -> str:
    shares = [100 * (part - 1) for part in ratios(tracking["with"], tracking["without"])]
    without = 1e3 * median(tracking["without"])
    return f"{median(shares):.1f} [{min(shares):.1f}, {max(shares):.1f}] % of {without:.1f} ms"


def _explanation(result: dict[str, Any]) -> str:
    """Explanation of the figures."""
    sentences = [
        f"One large table with rows of {result['dim']} numbers, beside the small ones of "
        f"{result['ratings']:,} ratings. Medians over rounds, of ratios within a round, and [least, most]. A "
        "plain write or read has as many bytes and processes, each with one thread (a single rank loads with "
        "one thread a core); a write ends when the disk has the bytes. Cached: from the page cache; from "
        "disk: after the files were dropped from it."
    ]
    for size in result["sizes"]:
        few, many = (summary(size["deltas"][share]) for share in ("0.001", "0.1"))
        # From a difference: the rest of a delta is in both.
        a_row = (many["bytes"] - few["bytes"]) / (many["rows"] - few["rows"])
        sentences.append(
            f"At {size['rows']:,} rows a delta takes {a_row:.0f} bytes a touched row, and "
            f"{1e3 * few['seconds']:.0f} ms for {few['rows']:,.0f} rows, {1e3 * many['seconds']:.0f} ms for "
            f"{many['rows']:,.0f}; "
            f"removing an old checkpoint takes {1e3 * median(size['removing']):.0f} ms, and the copy of an "
            f"--async_dump, for which steps wait, {1e3 * size['beside']['copying']:.0f} ms; the "
            f"longest of the {size['beside']['steps during']} steps after it took "
            f"{1e3 * size['beside']['longest during']:.0f} ms."
        )
    return " ".join(sentences)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw rates beside plain ones on the left, bytes and seconds of deltas by touched rows on the right."""
    figure = new_figure(11, 4.5)
    rates, sizes, times = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    _draw_rates(rates, result)
    for size in result["sizes"]:
        found = [summary(deltas) for deltas in size["deltas"].values()]
        touched = [delta["rows"] for delta in found]
        label = f"table of {size['rows']:,} rows"
        sizes.plot(touched, [delta["bytes"] / 1e6 for delta in found], "o-", label=label)
        times.plot(touched, [delta["seconds"] for delta in found], "o-", label=label)
    for axes, unit in ((sizes, "MB"), (times, "s")):
        axes.set(xscale="log", yscale="log", xlabel="rows touched", ylabel=unit, title=f"delta, {unit}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(origin(result), fontsize="x-small")
    figure.savefig(path)


def _draw_rates(axes: Any, result: dict[str, Any]) -> None:
    labels: list[str] = []
    plain: list[float] = []
    ours: list[float] = []
    for size in result["sizes"]:
        rows = f"{size['rows']:,} rows"
        labels.append(f"full checkpoint\n{rows}")
        plain.append(_rate(sum(size["shard bytes"]), size["plain"]))
        ours.append(_rate(sum(size["shard bytes"]), size["dump"]))
        for cache in CACHES:
            load = size["loads"][0]
            labels.append(f"load, {cache}\n{rows}")
            plain.append(_rate(load["bytes"], load[cache]["plain"]))
            ours.append(_rate(load["bytes"], load[cache]["load"]))
    places = range(len(labels))
    axes.barh([place - 0.2 for place in places], plain, 0.4, color="0.7", label="plain write or read")
    axes.barh([place + 0.2 for place in places], ours, 0.4, color="C0", label="checkpoint or load")
    axes.set_yticks(list(places), labels, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="GB/s", title=f"{result['ranks']} ranks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


if __name__ == "__main__":
    main()
