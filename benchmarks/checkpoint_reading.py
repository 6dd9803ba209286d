"""Loading a checkpoint beside plain reading: what a rank of benchmarks/checkpoint.py measures last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_setup import MOST_AT_ONCE, Clock, Settings, wide_columns

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext


def measure_loads(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Seconds to load the newest checkpoint beside reading as many bytes, from page cache and from disk."""
    from recsuite.checkpoint.chain import chain_at
    from recsuite.checkpoint.restore import restore
    from recsuite.training.state import build_train_state

    columns = wide_columns(settings, config)
    state = build_train_state(columns, config, context)
    chain = chain_at(Path(config.checkpoint.save_dir))
    shard_files = sorted(chain.base.glob("*.safetensors"))
    clock, plain = Clock(), PlainRead(shard_files, context)
    found: dict[str, Any] = {
        "ranks": context.world_size,
        "bytes": sum(path.stat().st_size for path in shard_files),
    }
    for cache in ("cached", "from disk"):
        seconds: dict[str, list[float]] = {"plain": [], "load": []}
        for number in range(-1, settings.rounds):
            for name in ("plain", "load") if number % 2 else ("load", "plain"):
                if cache == "from disk":
                    forget(chain.base, context)
                took = clock(plain if name == "plain" else lambda: restore(chain, state, columns, context))
                if number >= 0:
                    seconds[name].append(took)
        found[cache] = seconds
    return found


class PlainRead:
    """Reads this rank's share of some files' bytes into memory that it has already."""

    def __init__(self, paths: list[Path], context: RuntimeContext) -> None:
        # As many bytes of every file as the other ranks read: all start and end together, as in a load.
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
