"""What each rank of a launch of benchmarks/checkpoint.py runs: checkpoint_ranks.py PART SETTINGS RESULTS

PART is one of `PARTS`; SETTINGS is a JSON file, see `Settings`; rank 0 writes what was found to RESULTS. What
is measured is what users run: the checkpointer of dumps, its tracker, and the loading of a state.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime

DIM = 64
SHARES = (0.001, 0.01, 0.1)
# Steps with tracking, then as many without, and so on.
BLOCK_STEPS = 20
# One request of the kernel moves less than 2 GiB.
MOST_AT_ONCE = 2**30


@dataclass(frozen=True)
class Settings:
    """What the benchmark tells its ranks.

    ratings_folder: of the synthetic ratings; folder: where to write; rounds: measurements of each figure;
    blocks: pairs of blocks of steps with tracking and without.
    """

    ratings_folder: str
    folder: str
    rows: int
    rounds: int
    blocks: int


def main() -> None:
    """Measure what the command line names; rank 0 writes it."""
    part, settings_file, results = sys.argv[1:]
    settings = Settings(**json.loads(Path(settings_file).read_text()))
    config = Config.of(
        data_path=settings.ratings_folder,
        save_dir=str(Path(settings.folder) / "dumps"),
        batch_size=4096,
        history=0,
        embedding_dim=DIM,
        inc_dump=True,
        dump_every=1,
        # The benchmark removes the dump before the newest itself, so that it can time that apart.
        keep=2,
    )
    context = init_runtime(config)
    found = PARTS[part](settings, config, context)
    cleanup_runtime()
    if context.rank == 0:
        Path(results).write_text(json.dumps(found))


def make_wide_columns(settings: Settings, config: Config, folder: Path) -> None:
    """Columns of the same ratings by users that lie spread over a table of `rows` rows.

    The other files are those of the ratings themselves.
    """
    columns = open_columns(config)
    folder.mkdir()
    for path in Path(columns.folder).iterdir():
        (folder / path.name).symlink_to(path)
    raw_values = json.loads((folder / "vocabulary.json").read_text())
    features = np.load(folder / "user_features.npy")
    # Row 0 is that of no user.
    features[:, columns.place_of("user")] = 1 + np.arange(len(features)) * (settings.rows - 1) // len(
        features
    )
    for name in ("vocabulary.json", "user_features.npy"):
        (folder / name).unlink()
    (folder / "vocabulary.json").write_text(
        json.dumps({**raw_values, "user": list(range(1, settings.rows))}, indent=None)
    )
    np.save(folder / "user_features.npy", features)


def wide_columns(settings: Settings, config: Config) -> Columns:
    """What `make_wide_columns` made."""
    columns = open_columns(config)
    tables = tuple(
        dataclasses.replace(table, rows=settings.rows) if table.name == "user" else table
        for table in columns.tables
    )
    return dataclasses.replace(columns, folder=str(Path(settings.folder) / "columns"), tables=tables)


class Clock:
    """Seconds that all ranks need for something they do at the same time."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.barrier = dist.barrier

    def __call__(self, action: Callable[[], Any]) -> float:
        """From when all are ready until the last one is done."""
        self.barrier()
        start = time.perf_counter()
        action()
        self.barrier()
        return time.perf_counter() - start


def measure_dumps(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Dumps and deltas beside plain writes, and what a dump costs in memory and steps. Leaves a dump."""
    from recsuite.checkpoint.checkpointer import Checkpointer
    from recsuite.checkpoint.full import tensors_of
    from recsuite.training.state import build_train_state

    columns = wide_columns(settings, config)
    learner = build_train_state(columns, config, context)
    shard = _gathered(sum(len(array) for array in _shard_bytes(tensors_of(learner))))
    checkpointer = Checkpointer(None, "benchmark", columns, config, context)
    checkpointer.begin(learner)
    write = checkpointer.writer.write_full
    memory = {"while steps wait": peak_memory(lambda: write(checkpointer.start), max(shard))}
    rounds = Rounds(checkpointer, settings, context)
    found = {"shard bytes": shard, **rounds.measure()}
    config = config.replaced(inc_dump=False, async_dump=True)
    beside = Checkpointer(None, "benchmark", columns, config, context)
    beside.begin(learner)
    found["beside"] = steps_beside(beside, learner, columns, config, context, rounds.progress())

    def dump_beside() -> None:
        beside.writer.write_full(rounds.progress())
        beside.close()

    memory["beside steps"] = peak_memory(dump_beside, max(shard))
    return {**found, "memory": memory}


def _shard_bytes(tensors: Any) -> list[np.ndarray]:
    """The tables and their optimizer's state on this rank, as the bytes that they are."""
    from recsuite.checkpoint.delta import shards_of

    return [
        shard.tensor.detach().numpy().reshape(-1).view(np.uint8)
        for slots in shards_of(tensors).values()
        for shards in slots.values()
        for shard in shards
    ]


def _gathered(mine: Any) -> list[Any]:
    """What each rank has."""
    import torch.distributed as dist

    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


class Rounds:
    """Plain write, full dump and a delta of each share, in turns, so that what the machine does meanwhile
    meets them alike.
    """

    def __init__(self, checkpointer: Any, settings: Settings, context: RuntimeContext) -> None:
        self.checkpointer = checkpointer
        self.settings = settings
        self.context = context
        self.clock = Clock()
        self.draw = np.random.default_rng(context.rank)
        self.save_dir = Path(checkpointer.config.checkpoint.save_dir)
        self.step = 0

    def progress(self) -> Any:
        """The next one, in the middle of an epoch."""
        from recsuite.checkpoint.storage.manifest import Progress

        self.step += 1
        return Progress(self.step, 0, samples=1)

    def measure(self) -> dict[str, Any]:
        """All rounds, after one that warms up."""
        from recsuite.checkpoint.storage.directory import deltas_in, full_checkpoints_in
        from recsuite.checkpoint.storage.writer import retire

        found: dict[str, Any] = {"plain": [], "dump": [], "removing": []}
        found["deltas"] = {str(share): [] for share in SHARES}
        for number in range(-1, self.settings.rounds):
            # Who comes second may still meet what the first one left behind, so they take turns.
            order = (self.plain, self.dump) if number % 2 else (self.dump, self.plain)
            seconds = {name: value for measure in order for name, value in measure().items()}
            deltas = {str(share): self.delta(share) for share in SHARES[:: 1 if number % 2 else -1]}
            if self.context.rank == 0:
                for delta in reversed(deltas_in(self.save_dir)):
                    retire(delta)
            if number >= 0:
                for name, value in seconds.items():
                    found[name].append(value)
                for share, figures in deltas.items():
                    found["deltas"][share].append(figures)
        found["dump bytes"] = _bytes_in(full_checkpoints_in(self.save_dir)[-1])
        return found

    def prepare(self) -> None:
        """Write plainly and remove it: whatever is measured then finds the same free memory and disk.

        The first one after a pause is slower by half on a machine that takes back what is long unused.
        """
        self.clock(self._write_plain)
        self._plain_file().unlink()
        self.clock.barrier()

    def dump(self) -> dict[str, float]:
        """Seconds of a full dump, and of removing the one before it."""
        from recsuite.checkpoint.storage.directory import full_checkpoints_in
        from recsuite.checkpoint.storage.writer import retire

        self.prepare()
        progress = self.progress()
        seconds = self.clock(lambda: self.checkpointer.writer.write_full(progress))
        (old,) = full_checkpoints_in(self.save_dir)[:-1]
        removing = self.clock(lambda: retire(old) if self.context.rank == 0 else None)
        return {"dump": seconds, "removing": removing}

    def plain(self) -> dict[str, float]:
        """Seconds until the bytes of the shards, as they lie, are on the disk, in a file a rank."""
        self.prepare()
        seconds = self.clock(self._write_plain)
        self._plain_file().unlink()
        return {"plain": seconds}

    def _write_plain(self) -> None:
        with open(self._plain_file(), "wb", buffering=0) as file:
            for array in _shard_bytes(self.checkpointer.tensors):
                for start in range(0, len(array), MOST_AT_ONCE):
                    written = file.write(array.data[start : start + MOST_AT_ONCE])
                    assert written == len(array[start : start + MOST_AT_ONCE])
            os.fsync(file.fileno())

    def _plain_file(self) -> Path:
        return self.save_dir / f"plain-{self.context.rank}"

    def delta(self, share: float) -> dict[str, float]:
        """An increment after a share of each rank's rows of the large table was touched."""
        import torch

        from recsuite.training.callbacks import Step

        marks = self.checkpointer.writer.touched.marks["user"]
        touched = max(1, round(share * len(marks)))
        marks[self.draw.permutation(len(marks))[:touched]] = True
        progress = self.progress()
        step = Step(progress, torch.tensor(0.5), {})
        seconds = self.clock(lambda: self.checkpointer.on_step(step))
        size = _bytes_in(self.save_dir / f"delta-{progress.step:09d}")
        # Gathered last: what all have looked at may be removed.
        return {"bytes": size, "seconds": seconds, "rows": sum(_gathered(touched))}


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def peak_memory(action: Callable[[], None], shard_bytes: int) -> dict[str, float]:
    """Anonymous memory at the peak of an action beyond that before it, of the rank that needs most.

    Watched from a process of its own, which no lock of the interpreter stops.
    """
    # What was freed and kept for later would hide what is taken.
    ctypes.CDLL(None).malloc_trim(0)
    command = [sys.executable, str(Path(__file__).with_name("peak.py")), str(os.getpid())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as watcher:  # type: ignore[call-overload]
        before = int(watcher.stdout.readline())
        action()
        output, _ = watcher.communicate()
    extra = max(_gathered(int(output) - before))
    return {"bytes": extra, "of the shard": extra / shard_bytes}


def steps_beside(
    checkpointer: Any, learner: Any, columns: Columns, config: Config, context: RuntimeContext, progress: Any
) -> dict[str, float]:
    """Seconds of a step before a dump, and of one while it is written from a copy; and of making the copy."""
    import torch
    import torch.distributed as dist

    final = Path(config.checkpoint.save_dir) / f"step-{progress.step:09d}"
    with training_steps(learner, columns, config, context) as step:
        before = [step() for _ in range(2 * BLOCK_STEPS)][BLOCK_STEPS:]
        dist.barrier()
        start = time.perf_counter()
        checkpointer.writer.write_full(progress)
        # Not until all are done, as for other figures: the writing has begun and would be in it.
        copying = time.perf_counter() - start
        during: list[float] = []
        done = torch.tensor(0)
        while not done:
            during.append(step())
            # Seen by one and told to all, as a step needs all.
            done = torch.tensor(int(context.rank == 0 and final.is_dir()))
            dist.all_reduce(done, dist.ReduceOp.MAX)
    checkpointer.close()
    return {
        "step before": statistics.median(before),
        "step during": statistics.median(during),
        "longest during": max(during),
        "steps during": len(during),
        "copying": max(_gathered(copying)),
    }


@contextlib.contextmanager
def training_steps(
    learner: Any, columns: Columns, config: Config, context: RuntimeContext
) -> Iterator[Callable[[], float]]:
    """A function that makes the next training step and returns its seconds, without those of its batch."""
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.training.input_pipeline import InputPipeline
    from recsuite.training.steps import make_pipeline

    dataset = EventBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        feed = InputPipeline(loader)
        batches = (batch for epoch in range(2**31) for batch in feed.batches("train", epoch))
        learner.model.train()
        pipeline = make_pipeline(learner, config.training, context)

        def step() -> float:
            batch = iter([next(batches)])
            start = time.perf_counter()
            pipeline.progress(batch)
            return time.perf_counter() - start

        yield step


def measure_loads(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Seconds to load the newest dump beside reading as many bytes, from the page cache and from the disk."""
    from recsuite.checkpoint.restore import restore
    from recsuite.checkpoint.storage.chain import chain_at
    from recsuite.training.state import build_train_state

    columns = wide_columns(settings, config)
    learner = build_train_state(columns, config, context)
    state = chain_at(Path(config.checkpoint.save_dir))
    parts = sorted(state.base.glob("*.safetensors"))
    clock, plain = Clock(), PlainRead(parts, context)
    found: dict[str, Any] = {"ranks": context.world_size, "bytes": sum(path.stat().st_size for path in parts)}
    for cache in ("cached", "from disk"):
        seconds: dict[str, list[float]] = {"plain": [], "load": []}
        for number in range(-1, settings.rounds):
            for name in ("plain", "load") if number % 2 else ("load", "plain"):
                if cache == "from disk":
                    forget(state.base, context)
                took = clock(plain if name == "plain" else lambda: restore(state, learner, columns, context))
                if number >= 0:
                    seconds[name].append(took)
        found[cache] = seconds
    return found


class PlainRead:
    """Reads this rank's share of some files' bytes into memory that it has already."""

    def __init__(self, paths: list[Path], context: RuntimeContext) -> None:
        self.pieces = []
        for path in paths:
            size = path.stat().st_size
            bounds = [size * rank // context.world_size for rank in (context.rank, context.rank + 1)]
            self.pieces.append((path, bounds[0], bounds[1] - bounds[0]))
        # Written, so that every page is there, as those of the tables are.
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


def measure_tracking(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Seconds of a training step with a tracker and without, in blocks that take turns in one process."""
    from recsuite.checkpoint.delta import TouchedRows
    from recsuite.checkpoint.full import tensors_of
    from recsuite.training.state import build_train_state

    columns = open_columns(config)
    learner = build_train_state(columns, config, context)
    tracker = TouchedRows(learner.model, tensors_of(learner))
    found: dict[str, list[float]] = {"with": [], "without": []}
    with training_steps(learner, columns, config, context) as step:
        for number in range(-1, settings.blocks):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                for module in tracker.tracked_modules.values():
                    module.post_lookup_tracker_fn = tracker.record_lookup if name == "with" else None
                seconds = statistics.median(step() for _ in range(BLOCK_STEPS))
                if number >= 0:
                    found[name].append(seconds)
    return {**found, "batch size": config.loader.batch_size}


PARTS = {"dumps": measure_dumps, "loads": measure_loads, "tracking": measure_tracking}


if __name__ == "__main__":
    main()
