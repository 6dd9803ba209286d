"""Run a training or a part of it on the ranks of tests, evaluate it, and read its tensors."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext


def train(
    folder: Path,
    config: Config,
    context: RuntimeContext,
    end_at: int = -1,
    rule: Any = None,
    maker: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train, and return status, positions of the ratings, losses, end, and learned values.

    rule: the optimizer of the tables; maker: makes the model.

    The positions are known only if batches are made in this process.
    """
    from example import make_loss, make_model
    from recsuite.checkpoint.checkpointer import Checkpointer, checkpointing
    from recsuite.checkpoint.folder import newest_in
    from recsuite.checkpoint.format import read_manifest
    from recsuite.checkpoint.writer import named_tensors
    from recsuite.datasets.opening import open_data
    from recsuite.training import loop as training

    class EndingCheckpointer(Checkpointer):
        def on_step(self, step: Any) -> None:
            if step.progress.step == end_at and context.rank == context.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            super().on_step(step)

    config = config.replaced(save_dir=str(folder), **settings)
    found: dict[str, Any] = {"status": 0}
    taken: list[int] = []
    try:
        with open_data(config, context) as data, checkpointing(data.columns, config, context) as checkpointer:
            checkpointer.__class__ = EndingCheckpointer
            with noting(data.loader.dataset, taken):
                begun = training.Training(data, config, context, checkpointer)
                begun.shard = functools.partial(begun.shard, tables=rule)  # type: ignore[method-assign]
                run = begun.run(maker or make_model, make_loss)
            found["losses"] = [float(loss) for epoch in run.epochs for loss in epoch.losses]
            found["test"] = run.test.values
            found["tensors"] = digests(named_tensors(checkpointer.writer.tables, checkpointer.dense), context)
    except SystemExit as ended:
        found["status"] = int(str(ended.code))
    newest = newest_in(folder)
    assert newest is not None
    found["end"] = dataclasses.asdict(read_manifest(newest).progress)
    found["taken"] = sorted(position for positions in gather(taken, context) for position in positions)
    return found


def noting(dataset: Any, taken: list[int]) -> Any:
    """Have a data set note which training ratings are taken from it."""
    make = dataset.make

    def make_and_note(request: Any, *arguments: Any) -> Any:
        if request.split == "train":
            taken.extend(dataset._positions_of_step(request)[0].tolist())
        return make(request, *arguments)

    return mock.patch.object(dataset, "make", make_and_note)


def feed_of(columns: Any, config: Config, context: RuntimeContext) -> Any:
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.training.steps import BatchFeed

    dataset = EventBatches(columns, config, context.rank, context.world_size)
    return BatchFeed(build_dataloader(dataset, EpochSampler(dataset), config))


def evaluate(train_state: Any, columns: Any, config: Config, context: RuntimeContext) -> dict[str, float]:
    from recsuite.training.evaluation import make_evaluator

    evaluator = make_evaluator(feed_of(columns, config, context), columns, config, context)
    return evaluator.test(train_state.model, 0).values


def advance(
    progress: Any,
    num_steps: int,
    train_state: Any,
    columns: Any,
    config: Config,
    context: RuntimeContext,
    after_step: Callable[[Any, float], None] = lambda progress, loss: None,
) -> tuple[list[float], Any]:
    """The losses of some steps from a progress on, over ends of epochs, and the progress after them."""
    import torch.distributed as dist

    from recsuite.training.progress import Progress
    from recsuite.training.state import set_rates
    from tests.support.steps import make_step

    feed = feed_of(columns, config, context)
    train_state.model.train()
    losses: list[float] = []
    while len(losses) < num_steps:
        batches = feed.batches("train", progress.epoch, progress.samples)
        sizes = feed.loader.dataset.step_sizes("train", progress.samples)
        for size in sizes[: num_steps - len(losses)]:
            set_rates(train_state.optimizer, 1.0, float(train_state.row_scale), progress.step)
            loss = make_step(train_state, next(batches).to(context.device)).clone()
            dist.all_reduce(loss)
            losses.append(float(loss) / context.world_size)
            progress = Progress(progress.step + 1, progress.epoch, progress.samples + size)
            if progress.samples == columns.num_train:
                progress = Progress(progress.step, progress.epoch + 1)
            after_step(progress, losses[-1])
    return losses, progress


def digests(tensors: dict[str, Any], context: RuntimeContext) -> dict[str, str]:
    """Of every whole tensor, whoever holds which part of it, on rank 0. Collective."""
    import numpy as np
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    mine = {}
    for name, value in tensors.items():
        if isinstance(value, ShardedTensor):
            shards = value.local_shards()
            mine[name] = [
                (shard.metadata.shard_offsets[0], shard.tensor.cpu().numpy().copy()) for shard in shards
            ]
        elif context.rank == 0:
            mine[name] = [(0, value.detach().cpu().numpy().copy())]
    everyones: list[Any] = [None] * context.world_size
    dist.gather_object(mine, everyones if context.rank == 0 else None)
    found = {}
    for name in sorted({name for parts in everyones for name in parts or ()}):
        parts = sorted(
            (part for parts in everyones for part in parts.get(name, [])), key=lambda part: part[0]
        )
        found[name] = hashlib.sha256(np.concatenate([values for _, values in parts]).tobytes()).hexdigest()
    return found


def gather(mine: Any, context: RuntimeContext) -> list[Any]:
    import torch.distributed as dist

    everyones: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyones, mine)
    return everyones
