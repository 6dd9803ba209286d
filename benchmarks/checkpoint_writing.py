"""Full checkpoints and deltas beside plain writes: what a rank of benchmarks/checkpoint.py measures first."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_setup import BLOCK_STEPS, MOST_AT_ONCE, Clock, Settings, training_steps, wide_columns

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.runtime.process import RuntimeContext, all_gather_object

SHARES = (0.001, 0.01, 0.1)


def measure_dumps(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Full checkpoints and deltas beside plain writes, and what a checkpoint costs in memory and steps.

    Leaves a full checkpoint.
    """
    from recsuite.checkpoint.checkpointer import Checkpointer
    from recsuite.training.state import build_train_state

    columns = wide_columns(settings, config)
    # Untrained: bytes and seconds do not depend on what the rows say.
    state = build_train_state(columns, config, context)
    shard = all_gather_object(lambda: sum(len(array) for array in _shard_bytes(state.model)))
    checkpointer = Checkpointer(None, "benchmark", columns, config, context)
    checkpointer.begin(state)
    write = checkpointer.writer.write_full
    memory = {"while steps wait": peak_memory(lambda: write(checkpointer.start), max(shard))}
    rounds = Rounds(checkpointer, settings, context)
    found = {"shard bytes": shard, **rounds.measure()}
    config = config.replaced(inc_dump=False, async_dump=True)
    beside = Checkpointer(None, "benchmark", columns, config, context)
    beside.begin(state)
    found["beside"] = steps_beside(beside, state, columns, config, context, rounds.progress())

    def write_beside() -> None:
        beside.writer.write_full(rounds.progress())
        beside.close()

    memory["beside steps"] = peak_memory(write_beside, max(shard))
    return {**found, "memory": memory}


def _shard_bytes(model: Any) -> list[np.ndarray]:
    """The tables and their optimizer's state on this rank, as the bytes that they are."""
    from recsuite.sharding.plan import embedding_tables

    return [
        value.numpy().reshape(-1).view(np.uint8)
        for table in embedding_tables(model).values()
        for value in table.export().values()
    ]


class Rounds:
    """Plain write, full checkpoint and a delta of each share, in turns: a slow machine is slow for all."""

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
        from recsuite.training.progress import Progress

        self.step += 1
        return Progress(self.step, 0, samples=1)

    def measure(self) -> dict[str, Any]:
        """All rounds, after one that warms up."""
        from recsuite.checkpoint.folder import deltas_in, full_checkpoints_in, retire

        found: dict[str, Any] = {"plain": [], "dump": [], "removing": []}
        found["deltas"] = {str(share): [] for share in SHARES}
        for number in range(-1, self.settings.rounds):
            # Who comes second may still meet what the first one left behind, so they take turns.
            order = (self.plain, self.dump) if number % 2 else (self.dump, self.plain)
            seconds = {name: value for measure in order for name, value in measure().items()}
            deltas = {str(share): self.delta(share) for share in SHARES[:: 1 if number % 2 else -1]}
            if self.context.rank == 0:
                # Newest first, so that none is ever without the one that it builds on.
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
        """Seconds of a full checkpoint, and of removing the one before it."""
        from recsuite.checkpoint.folder import full_checkpoints_in, retire

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
            for array in _shard_bytes(self.checkpointer.model):
                for start in range(0, len(array), MOST_AT_ONCE):
                    written = file.write(array.data[start : start + MOST_AT_ONCE])
                    assert written == len(array[start : start + MOST_AT_ONCE])
            # A checkpoint waits for the disk, so what it is compared with has to wait too.
            os.fsync(file.fileno())

    def _plain_file(self) -> Path:
        return self.save_dir / f"plain-{self.context.rank}"

    def delta(self, share: float) -> dict[str, float]:
        """A delta after a share of each rank's rows of the large table was touched."""
        import torch

        from recsuite.training.callbacks import Step

        marks = self.checkpointer.writer.tables["user"].marks
        touched = max(1, round(share * len(marks)))
        # Marked as the tracker would have it, because a step touches as many rows as its batch has, and no
        # share.
        marks[self.draw.permutation(len(marks))[:touched]] = True
        progress = self.progress()
        step = Step(progress, torch.tensor(0.5), {})
        seconds = self.clock(lambda: self.checkpointer.on_step(step))
        size = _bytes_in(self.save_dir / f"delta-{progress.step:09d}")
        # Gathered last: what all have looked at may be removed.
        return {"bytes": size, "seconds": seconds, "rows": sum(all_gather_object(lambda: touched))}


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
    extra = max(all_gather_object(lambda: int(output) - before))
    return {"bytes": extra, "of the shard": extra / shard_bytes}


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
        "copying": max(all_gather_object(lambda: copying)),
    }
