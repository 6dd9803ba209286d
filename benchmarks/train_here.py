"""This project's training: a rank of a team of benchmarks/train.py.

    train_here.py FOLDER MODEL

The loader, the model, its sharding and the loop are those of the example; MODEL is one of
`train_models.MODELS`.
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

from train_models import MODELS, columns_of
from train_team import serve, take_answers

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.monitoring.callbacks import Stopwatch
from recsuite.runtime.process import RuntimeContext, end_process, init_runtime


class Here:
    """The example's training, without its evaluation, its checkpoints and the progress bar."""

    def __init__(self, columns: Columns, context: RuntimeContext, config: Config) -> None:
        from recsuite.sharding.dynamic_ranks import dynamic_rows
        from recsuite.training.state import build_train_state

        self.columns = columns
        self.context = context
        self.config = config
        state = build_train_state(columns, config, context)
        state.model.train()
        self.state = state
        self.shares = dynamic_rows(state.model)
        self.number = 0
        self.feeds: dict[int, Iterator[Any]] = {}

    def _batches(self, batch_size: int) -> Iterator[Any]:
        """Batches without an end."""
        from recsuite.datasets.batches import EventBatches
        from recsuite.datasets.loader import EpochSampler, build_dataloader
        from recsuite.training.steps import InputPipeline

        config = self.config.replaced(batch_size=batch_size)
        sampler = EpochSampler(EventBatches(self.columns, config, self.context.rank, self.context.world_size))
        inputs = InputPipeline(build_dataloader(sampler.dataset, sampler, config))
        for epoch in itertools.count():
            yield from inputs.batches("train", epoch)

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps; the last loss."""
        from recsuite.sharding.dynamic_ranks import begin_step, grow
        from recsuite.training.state import set_rates

        if batch_size not in self.feeds:
            self.feeds[batch_size] = self._batches(batch_size)
        for _ in range(number):
            # These lines are what a pass does around a step, with a rate and a row scale that stay.
            set_rates(self.state.optimizer, 1.0, 1.0)
            begin_step(self.shares, self.number, 0, 1.0)
            self.state.table_optimizer.zero_grad()
            loss = self.state(next(self.feeds[batch_size]).to(self.context.device))
            loss.backward()
            self.state.step()
            self.state.row_scale.fill_(1.0)
            self.number += 1
            grow(self.state.model, self.number)
        return float(loss)

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Median seconds of the parts of a step, on a CPU."""
        if self.context.device.type != "cpu":
            return {}
        from recsuite.monitoring.profiler import OTHER, PARTS
        from recsuite.sharding import cpu_tables
        from recsuite.sharding import recommender as model
        from recsuite.training import steps as train

        found: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(number):
            stopwatch = Stopwatch((*PARTS, OTHER))
            with contextlib.ExitStack() as stack:
                for module in (cpu_tables, model, train):
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
    model = MODELS[sys.argv[2]]
    columns = columns_of(Path(sys.argv[1]), model)
    context = init_runtime(Config())
    import torch
    import torch.distributed as dist

    def barrier() -> None:
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    serve(answers, lambda name: Here(columns, context, model.config), barrier, torch.set_num_threads)


if __name__ == "__main__":
    main()
    end_process(0)
