"""One loop for training, one for evaluation, and their metrics over all ranks. Every mode uses these two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from columns import Columns
from config import Config
from data import Data
from dataloader import Batch, BatchLoader
from errors import UserError
from metrics import Metrics, measure
from model import RatingBatch
from report import describe_epoch, progress_bar
from runtime import RuntimeContext
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


def train(data: Data, config: Config, context: RuntimeContext) -> Run:
    """Train a model and evaluate it after every epoch. Collective: every rank.

    Raises:
        UserError: when the tables do not fit, or the training diverges.
        WorkerError: when a data worker fails.
    """
    feed, columns = Feed(data.loader), data.columns
    # The workers make the first batches while the model is built.
    feed.prepare("train", epoch=0)
    model = build_model(columns, config, context)
    optimizer = make_optimizer(model, config)
    plan = describe_plan(model, columns, config)
    context.say(plan)
    # Mapped once: like the loader, the training goes on when the files are removed.
    test_ratings = columns.ratings("test")
    step_sizes = data.loader.dataset.step_sizes("train")
    epochs = []
    for number in range(config.epochs):
        start = time.perf_counter()
        with progress_bar(columns.num_train, f"epoch {number + 1}/{config.epochs}", context) as bar:
            losses = train_epoch(model, optimizer, feed, number, config, context, bar.update)
        seconds = time.perf_counter() - start
        _check_finite(losses, number, config)
        data_wait = _largest(feed.seconds_waited / seconds, context)
        test = evaluate(model, feed, number, test_ratings, context)
        train_rmse = float(np.sqrt(np.average(losses, weights=step_sizes)))
        rate = columns.num_train / seconds
        epochs.append(Epoch(number + 1, losses, train_rmse, test, seconds, rate, data_wait))
        context.say(describe_epoch(epochs[-1], config))
    return Run(columns, plan, epochs)


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

    Each pass is a fresh iterator: TorchRec's pipeline knows an exhausted one by its identity, and would take
    a second pass of the same object for empty (torchrec issue 2327).
    """

    def __init__(self, loader: BatchLoader) -> None:
        self.loader = loader
        self.keys = [table.name for table in loader.dataset.tables]
        self.seconds_waited = 0.0
        self._prepared: tuple[str, int, Iterator[Batch]] | None = None

    def prepare(self, split: str, epoch: int) -> None:
        """Have the workers begin a pass whose batches will be asked for later."""
        self.loader.sampler.split, self.loader.sampler.epoch = split, epoch
        self._prepared = (split, epoch, iter(self.loader))

    def batches(self, split: str, epoch: int) -> Iterator[RatingBatch]:
        """One pass over a split, on the host; counts the seconds that its consumer waits."""
        self.seconds_waited = 0.0
        start = time.perf_counter()
        if self._prepared is None or self._prepared[:2] != (split, epoch):
            self.prepare(split, epoch)
        assert self._prepared is not None
        source, self._prepared = self._prepared[2], None
        for batch in source:
            self.seconds_waited += time.perf_counter() - start
            yield self.to_model_input(batch)
            start = time.perf_counter()

    def to_model_input(self, batch: Batch) -> RatingBatch:
        """A worker's plain tensors as what the model takes, still on the host."""
        features = KeyedJaggedTensor(keys=self.keys, values=batch.values, lengths=batch.lengths)
        # Counts the ids of each key here, so that the device need not be asked for them.
        features.sync()
        return RatingBatch(features, batch.ratings, batch.weights, batch.history_ratings)


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
    step_sizes = feed.loader.dataset.step_sizes("train")
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
    model: DistributedModelParallel, feed: Feed, epoch: int, ratings: np.ndarray, context: RuntimeContext
) -> Metrics:
    """Exact metrics over all test ratings, float32 in their order, each counted once, the same on every rank.
    The batches do not depend on the epoch: it is what a failure is reported with.

    Collective: every rank.
    """
    model.eval()
    # Allocated once: tensors of each step, kept between its temporaries, would leave a heap full of holes.
    dataset = feed.loader.dataset
    mine = torch.empty(dataset.num_steps("test"), dataset.batch_size, device=context.device)
    for step, batch in enumerate(feed.batches("test", epoch)):
        mine[step] = model(batch.to(context.device, non_blocking=True))[1][1]
    everyones = [torch.empty_like(mine) for _ in range(context.world_size)]
    dist.all_gather(everyones, mine)
    # From ranks of [steps, B] to the order of the ratings; what follows the last rating is padding.
    in_order = torch.stack(everyones, dim=1).flatten()[: len(ratings)]
    return measure(in_order.cpu().numpy(), ratings)
