"""What the parts of benchmarks/checkpoint.py share on a rank: settings, columns, a clock, training steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext

DIM = 64
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


def make_wide_columns(settings: Settings, config: Config, folder: Path) -> None:
    """Columns of the same ratings by users that lie spread over a table of `rows` rows.

    The other files are those of the ratings themselves.
    """
    columns = open_columns(config)
    folder.mkdir()
    for path in Path(columns.folder).iterdir():
        # Links: tables of ten million rows need no more ratings than small ones.
        (folder / path.name).symlink_to(path)
    raw_values = json.loads((folder / "vocabulary.json").read_text())
    users = np.load(folder / "user_features.npy")
    # Row 0 is that of no user.
    rows = 1 + np.arange(len(users)) * (settings.rows - 1) // len(users)
    users["features"][:, columns.place_of("user")] = rows
    for name in ("vocabulary.json", "user_features.npy"):
        (folder / name).unlink()
    (folder / "vocabulary.json").write_text(
        json.dumps({**raw_values, "user": list(range(1, settings.rows))}, indent=None)
    )
    np.save(folder / "user_features.npy", users)


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
        # The slowest rank counts: a checkpoint is there when the last one has written its share.
        self.barrier()
        start = time.perf_counter()
        action()
        self.barrier()
        return time.perf_counter() - start


@contextlib.contextmanager
def training_steps(
    state: Any, columns: Columns, config: Config, context: RuntimeContext
) -> Iterator[Callable[[], float]]:
    """A function that makes the next training step and returns its seconds, without those of its batch."""
    # Not at the top: benchmarks/checkpoint.py imports this file as well, and needs no torch and no TorchRec.
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.training.steps import InputPipeline

    dataset = EventBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        inputs = InputPipeline(loader)
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
