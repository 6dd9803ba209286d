"""One loop for training, one for evaluation, and their metrics over all ranks. Every mode uses these two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from columns import Columns, open_columns
from config import Config
from dataloader import Batch, EpochSampler, RatingBatches, build_dataloader
from errors import UserError
from machine import allowed_cores
from metrics import Metrics, measure
from model import RatingBatch
from movielens import PREPARATION_DEADLINE
from report import describe_data, describe_epoch, progress_bar
from runtime import RuntimeContext, once_per_node
from sharding import build_model, describe_plan


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training ratings did, the same on every rank.

    losses: mean squared error of each step's global batch, float32 [steps]; data_wait: share of the pass
    that the rank which waited most spent waiting for batches.
    """

    number: int
    losses: np.ndarray
    train_rmse: float
    test: Metrics
    seconds: float
    ratings_per_second: float
    data_wait: float


@dataclass(frozen=True)
class Run:
    """What a training run leaves for the report, the same on every rank."""

    columns: Columns
    plan: str
    epochs: list[Epoch]


def train(config: Config, context: RuntimeContext) -> Run:
    """Train a model and evaluate it after every epoch. Collective: every rank.

    Raises:
        UserError: when the data cannot be had, the tables do not fit, or the training diverges.
    """
    once_per_node(context, lambda: open_columns(config), PREPARATION_DEADLINE)
    columns = open_columns(config)
    _check_same_data(columns, context)
    context.say(describe_data(columns, config))
    model = build_model(columns, config, context)
    optimizer = make_optimizer(model, config)
    plan = describe_plan(model, columns, config)
    context.say(plan)
    num_workers = config.num_workers * context.local_world_size
    if num_workers > allowed_cores():
        context.say(
            f"{num_workers} data workers on this machine share {allowed_cores()} cores with the ranks"
        )
    sampler = EpochSampler(RatingBatches(columns, config, context.rank, context.world_size))
    feed = Feed(build_dataloader(sampler.dataset, sampler, config), sampler)
    epochs = []
    for number in range(config.epochs):
        start = time.perf_counter()
        with progress_bar(columns.num_train, f"epoch {number + 1}/{config.epochs}", context) as bar:
            losses = train_epoch(model, optimizer, feed, number, config, context, bar.update)
        seconds = time.perf_counter() - start
        _check_finite(losses, number, config)
        data_wait = _largest(feed.seconds_waited / seconds, context)
        test = evaluate(model, feed, columns, context)
        train_rmse = float(np.sqrt(np.average(losses, weights=sampler.dataset.step_sizes("train"))))
        rate = columns.num_train / seconds
        epochs.append(Epoch(number + 1, losses, train_rmse, test, seconds, rate, data_wait))
        context.say(describe_epoch(epochs[-1], config))
    return Run(columns, plan, epochs)


def _check_same_data(columns: Columns, context: RuntimeContext) -> None:
    """Refuse machines whose copies of the data differ: their ranks would wait for each other for ever."""
    mine = (columns.num_train, columns.num_test, *(table.rows for table in columns.tables))
    everyones: list[tuple[int, ...]] = [()] * context.world_size
    dist.all_gather_object(everyones, mine)
    for rank, other in enumerate(everyones):
        if other != everyones[0]:
            raise UserError(
                f"Rank {rank} has {other[0]:,} training and {other[1]:,} test ratings, rank 0 has "
                f"{everyones[0][0]:,} and {everyones[0][1]:,}, or their tables differ; give all machines the "
                "same files."
            )


def _check_finite(losses: np.ndarray, epoch: int, config: Config) -> None:
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise UserError(
            f"The loss is {losses[bad[0]]} at step {bad[0]} of epoch {epoch + 1}: the training diverged with "
            f"--lr {config.lr} --dense_lr {config.dense_lr}; give smaller ones."
        )


def _largest(value: float, context: RuntimeContext) -> float:
    largest = torch.tensor(value, device=context.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


class Feed:
    """The batches of all passes, from one loader: plain tensors become the model's input here.

    Each pass is a fresh iterator. TorchRec's pipeline knows an exhausted iterator by its identity, and a
    persistent DataLoader gives the same object every epoch, so without this the second epoch would
    silently be empty (torchrec issue 2327, `test_the_pipeline_sees_no_second_epoch_of_a_bare_loader`).
    """

    def __init__(self, loader: DataLoader[Batch], sampler: EpochSampler) -> None:
        self.loader = loader
        self.sampler = sampler
        self.keys = [table.name for table in sampler.dataset.tables]
        self.seconds_waited = 0.0

    def batches(self, split: str, epoch: int) -> Iterator[RatingBatch]:
        """One pass over a split, on the host; counts the seconds that its consumer waits."""
        self.sampler.split, self.sampler.epoch = split, epoch
        self.seconds_waited = 0.0
        start = time.perf_counter()
        for batch in self.loader:
            self.seconds_waited += time.perf_counter() - start
            yield self.to_model_input(batch)
            start = time.perf_counter()

    def to_model_input(self, batch: Batch) -> RatingBatch:
        """A worker's plain tensors as what the model takes, still on the host."""
        features = KeyedJaggedTensor(keys=self.keys, values=batch.values, lengths=batch.lengths)
        # Counts the ids of each key here, so that the device need not be asked for them.
        features.sync()
        return RatingBatch(features, batch.ratings, batch.weights)


class PlainSteps:
    """A training step as it reads in a textbook, with the interface of TorchRec's pipelines."""

    def __init__(
        self, model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device

    def progress(self, batches: Iterator[RatingBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on the next batch and return the model's output, (loss, predictions)."""
        batch = next(batches).to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss, output = self.model(batch)
        loss.backward()
        self.optimizer.step()
        return output

    def detach(self) -> DistributedModelParallel:
        """The model as it is outside the pipeline."""
        return self.model


def make_optimizer(model: DistributedModelParallel, config: Config) -> CombinedOptimizer:
    """The tables' optimizer, which runs inside the backward, and Adam for the dense part, as one."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=config.dense_lr),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def make_pipeline(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, config: Config, context: RuntimeContext
) -> PlainSteps | TrainPipelineSparseDist:
    """The training loop's engine. TorchRec's pipeline overlaps the copy and the exchange of ids of the next
    batches with this one's computation; on a CPU there is nothing free to overlap with.
    """
    overlap = context.device.type == "cuda" if config.pipeline == "auto" else config.pipeline == "sparse_dist"
    if overlap:
        return TrainPipelineSparseDist(model, optimizer, context.device)
    return PlainSteps(model, optimizer, context.device)


def train_epoch(
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    feed: Feed,
    epoch: int,
    config: Config,
    context: RuntimeContext,
    progress: Callable[[int], None],
) -> np.ndarray:
    """One pass over the training ratings; returns the loss of each global batch, float32 [steps].

    Nothing waits for the device but the end: losses stay there until then. Collective: every rank.
    """
    model.train()
    pipeline = make_pipeline(model, optimizer, config, context)
    step_sizes = feed.sampler.dataset.step_sizes("train")
    num_steps = len(step_sizes)
    losses = torch.zeros(num_steps, device=context.device)
    batches = feed.batches("train", epoch)
    for step in range(num_steps):
        left = 1 - (epoch + step / num_steps) / config.epochs
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * left
        losses[step], _ = pipeline.progress(batches)
        progress(step_sizes[step])
    # Evaluation needs the model's plain forward, which TorchRec's pipeline replaces.
    pipeline.detach()
    dist.all_reduce(losses)
    return (losses / context.world_size).cpu().numpy()


@torch.no_grad()
def evaluate(
    model: DistributedModelParallel, feed: Feed, columns: Columns, context: RuntimeContext
) -> Metrics:
    """Exact metrics over all test ratings, each counted once, the same on every rank.

    Collective: every rank.
    """
    model.eval()
    predictions = [
        model(batch.to(context.device, non_blocking=True))[1][1] for batch in feed.batches("test", epoch=0)
    ]
    mine = torch.stack(predictions)
    everyones = [torch.empty_like(mine) for _ in range(context.world_size)]
    dist.all_gather(everyones, mine)
    # From ranks of [steps, B] to the order of the ratings; what follows the last rating is padding.
    in_order = torch.stack(everyones, dim=1).flatten()[: columns.num_test]
    return measure(in_order.cpu().numpy(), columns.ratings("test"))
