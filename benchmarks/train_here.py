"""This project's training: a rank of a team of benchmarks/train.py.

    train_here.py FOLDER

The loader, the model, its sharding and the loop are those of the example, with the features user and movie.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from train_team import DIM, MEAN_RATING, MLP_DIMS, serve, take_answers

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.datasets.preparation.arrays.records import Own, write_records
from recsuite.datasets.schema import Table
from recsuite.monitoring.callbacks import Stopwatch
from recsuite.runtime.process import RuntimeContext, end_process, init_runtime


def make_columns(folder: Path, num_users: int, num_movies: int, num_ratings: int) -> None:
    """Write ratings of users and movies that are all as likely, as the columns of a data set."""
    generator = np.random.default_rng(0)
    fields = {
        "user": generator.integers(num_users, size=num_ratings).astype(np.int32),
        "item": generator.integers(num_movies, size=num_ratings).astype(np.int32),
        "label": generator.integers(1, 6, size=num_ratings).astype(np.float32),
        "end": np.zeros(num_ratings, np.int32),
    }
    write_records(folder / "rows.npy", fields, Own())
    for name, number in (("user", num_users), ("movie", num_movies)):
        own = Own(features=[np.arange(1, number + 1, dtype=np.int32)])
        write_records(folder / f"{name}_features.npy", {}, own)


def columns_of(folder: Path) -> Columns:
    """What `make_columns` wrote."""
    numbers = {}
    for name in ("user", "movie"):
        numbers[name] = len(np.load(folder / f"{name}_features.npy", mmap_mode="r"))
    num_ratings = len(np.load(folder / "rows.npy", mmap_mode="r"))
    tables = tuple(
        Table(feature, numbers[feature.name] + 1) for feature in SCHEMA.features if feature.name in numbers
    )
    users, movies = numbers.values()
    nothing: dict[str, Any] = {
        "num_validation": 0,
        "num_test": 0,
        "num_skipped": 0,
        "longest_history": 0,
        "longest_audience": 0,
        "baselines": {},
        "numbers": (),
        "notes": (),
    }
    return Columns(
        folder=str(folder),
        source="",
        schema=SCHEMA,
        num_train=num_ratings,
        num_users=users,
        num_items=movies,
        mean_label=MEAN_RATING,
        tables=tables,
        **nothing,
    )


class Here:
    """The example's training, without its evaluation, its checkpoints and the progress bar."""

    def __init__(self, columns: Columns, context: RuntimeContext, config: Config) -> None:
        from recsuite.sharding.dynamic.sharded.collective import dynamic_rows
        from recsuite.training.state import build_train_state
        from recsuite.training.steps import make_pipeline

        self.columns = columns
        self.context = context
        self.config = config
        state = build_train_state(columns, config, context)
        state.model.train()
        self.state = state
        self.shares = dynamic_rows(state.model)
        self.number = 0
        self.pipeline = make_pipeline(state, config.training, context)
        self.feeds: dict[int, Iterator[Any]] = {}

    def _batches(self, batch_size: int) -> Iterator[Any]:
        """Batches without an end."""
        from recsuite.datasets.batches import EventBatches
        from recsuite.datasets.loader import EpochSampler, build_dataloader
        from recsuite.training.input_pipeline import InputPipeline

        config = self.config.replaced(batch_size=batch_size)
        sampler = EpochSampler(EventBatches(self.columns, config, self.context.rank, self.context.world_size))
        inputs = InputPipeline(build_dataloader(sampler.dataset, sampler, config))
        for epoch in itertools.count():
            yield from inputs.batches("train", epoch)

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps; the last loss."""
        from recsuite.sharding.dynamic.sharded.collective import begin_step, grow
        from recsuite.training.optimizer import set_rates

        if batch_size not in self.feeds:
            self.feeds[batch_size] = self._batches(batch_size)
        for _ in range(number):
            # These lines are what `train_epoch` does around a step, with a rate and a row scale that stay.
            set_rates(self.state.optimizer, 1.0, 1.0)
            begin_step(self.shares, self.number, 0, 1.0)
            loss = self.pipeline.progress(self.feeds[batch_size]).loss
            self.state.row_scale.fill_(1.0)
            self.number += 1
            grow(self.state.model, self.number)
        return float(loss)

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Median seconds of the parts of a step, on a CPU."""
        if self.context.device.type != "cpu":
            return {}
        from recsuite.monitoring.profiler import OTHER, PARTS
        from recsuite.sharding import recommender as model
        from recsuite.sharding.cpu import cpu_tables, request
        from recsuite.training import steps as train

        found: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(number):
            stopwatch = Stopwatch((*PARTS, OTHER))
            with contextlib.ExitStack() as stack:
                for module in (cpu_tables, request, model, train):
                    # By name in each module that imports it. Outside a recording these ranges cost nothing,
                    # and the profiler would slow a step down.
                    stack.enter_context(mock.patch.object(module, "named", stopwatch.part))
                self.steps(1, batch_size)
            split = stopwatch.split()
            for part, seconds in found.items():
                seconds.append(split[part])
        return {part: median(seconds) for part, seconds in found.items()}


def main() -> None:
    """Serve orders."""
    answers = take_answers()
    columns = columns_of(Path(sys.argv[1]))
    context = init_runtime(Config())
    import torch
    import torch.distributed as dist

    def barrier() -> None:
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    config = Config.of(embedding_dim=DIM, mlp_dims=MLP_DIMS, history=0)
    serve(answers, lambda name: Here(columns, context, config), barrier, torch.set_num_threads)


if __name__ == "__main__":
    main()
    end_process(0)
