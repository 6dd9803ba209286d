"""One loop for training, for every mode, with an evaluation after each epoch and at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.datasets.batches import Batch
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader
from recsuite.datasets.metrics import Metrics, is_better, main_metric
from recsuite.datasets.opening import Data
from recsuite.errors import UserError
from recsuite.models.task import RatingBatch
from recsuite.monitoring.report import describe_early_stop, describe_epoch
from recsuite.runtime.collectives import all_gather_object, broadcast_from_rank0
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.progress_bar import stage
from recsuite.runtime.ranges import STEP, named
from recsuite.sharding.plan import build_model, describe_plan
from recsuite.training.evaluation import Evaluator, make_evaluator
from recsuite.training.stopwatch import Stopwatch
from recsuite.training.watch import Watch
from recsuite.training.weights import BestInMemory, check_sound, unsound


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training ratings did, the same on every rank.

    losses: mean loss of each step's global batch, float32 [steps]; train_loss: their mean, over ratings;
    data_wait: share of the pass that the rank which waited most spent waiting for batches.
    """

    number: int
    losses: np.ndarray
    train_loss: float
    validation: Metrics
    seconds: float
    ratings_per_second: float
    data_wait: float


@dataclass(frozen=True)
class Run:
    """What a training run leaves for the report, the same on every rank.

    epochs: those of this process, which may be none of a training that was complete; test: of the weights
    after epoch `test_epoch`, the best one by validation; num_epochs: those that are done; stopped_early:
    whether --patience ended it.
    """

    columns: Columns
    plan: str
    epochs: list[Epoch]
    test: Metrics
    test_epoch: int
    num_epochs: int
    stopped_early: bool


@dataclass(frozen=True)
class TrainState:
    """All that learns: the sharded model, and the optimizer of its tables and of its dense part."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer

    @property
    def row_scale(self) -> torch.Tensor:
        """What the rows are of what the tables hold, float32 []."""
        return self.model.module.recommender.head.row_scale

    def set_rates(self, left: float, scale: float) -> None:
        """Learn at a share `left` of the first rates from now on.

        The tables hold rows divided by the scale, and so their "lr" is the scheduled one divided by it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["scheduled_lr"] = group["initial_lr"] * left
        for group in self.model.fused_optimizer.param_groups:
            group["lr"] /= scale


class Keeper(Protocol):
    """Keeps what is learned: it says where a training begins, and is told of every step. Collective."""

    @property
    def start(self) -> Progress:
        """Where the training begins."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor | ShardedTensor]:
        """All that is kept of the learner, once it has begun: the tensors themselves."""

    def begin(self, learner: TrainState) -> None:
        """Put the learner into the state of `start`."""

    def after_step(self, position: Progress, loss: torch.Tensor | float) -> None:
        """A step is done, with this loss, [], on this rank; may end the process.

        At the end of an epoch the losses and `tensors` were looked at, and are those of a trained model.
        """

    def restore_best(self, learner: TrainState) -> Progress | None:
        """Put the learner into its best state; where the training was then, None if that was not kept."""


def build_learner(columns: Columns, config: Config, context: RuntimeContext) -> TrainState:
    """The model of a data set and its optimizer, untrained. Collective: every rank."""
    model = build_model(columns, config, context)
    return TrainState(model, make_optimizer(model, config))


def train(
    data: Data,
    config: Config,
    context: RuntimeContext,
    keeper: Keeper | None = None,
    watch: Watch | None = None,
) -> Run:
    """Train a model, validate it after every epoch, and test it at the end. Collective: every rank.

    Raises:
        UserError: when the tables do not fit, or the training diverges.
        WorkerError: when a data worker fails.
    """
    watch = watch or Watch()
    stopwatch = watch.stopwatch
    feed, columns = InputPipeline(data.loader, stopwatch), data.columns
    position = keeper.start if keeper else Progress()
    if goes_on(position, config):
        # The workers make the first batches while the model is built.
        feed.prepare("train", position.epoch, position.samples)
    with stopwatch.part("model"), stage("building the model", quiet=context.rank != 0):
        learner = build_learner(columns, config, context)
    plan = describe_plan(learner.model, columns, config)
    context.say(plan)
    memory = BestInMemory(learner.model, context)
    if keeper:
        with stopwatch.part("dumps"):
            keeper.begin(learner)
    # Mapped once: like the loader, the training goes on when the files are removed.
    evaluator = make_evaluator(feed, columns, config, context)
    epochs: list[Epoch] = []
    while goes_on(position, config):
        epoch, position = run_epoch(learner, feed, evaluator, position, config, context, keeper, watch)
        if keeper:
            with stopwatch.part("dumps"):
                keeper.after_step(position, float(epoch.losses[-1]))
        elif position.is_best and position.best is not None and goes_on(position, config):
            memory.keep(position)
        epochs.append(epoch)
        watch.after_epoch(epoch)
        context.say(describe_epoch(epoch, config))
    if stops_early(position, config):
        context.say(describe_early_stop(position, config))
    with stopwatch.part("dumps" if keeper else "evaluation"):
        best = take_best(learner, keeper or memory, position, context)
    # Only now: nothing may be chosen by what the test says.
    with stopwatch.part("evaluation"):
        test = evaluator.test(learner.model, best.epoch)
    return Run(columns, plan, epochs, test, best.epoch, position.epoch, stops_early(position, config))


def run_epoch(
    learner: TrainState,
    feed: InputPipeline,
    evaluator: Evaluator,
    position: Progress,
    config: Config,
    context: RuntimeContext,
    keeper: Keeper | None,
    watch: Watch,
) -> tuple[Epoch, Progress]:
    """The rest of a pass and its validation, and the position after both. Collective: every rank."""
    start = time.perf_counter()
    with watch.steps():
        losses = _train_epoch_kept(learner, feed, position, config, context, keeper, watch)
    seconds = time.perf_counter() - start
    check_finite(losses, position.step, config)
    data_wait = _largest(feed.seconds_waited / seconds, context)
    step_sizes = feed.loader.dataset.step_sizes("train", position.samples)
    train_loss = float(np.average(losses, weights=step_sizes))
    rate = sum(step_sizes) / seconds
    position = dataclasses.replace(
        position, step=position.step + len(losses), epoch=position.epoch + 1, samples=0
    )
    # Before the dump, which is to know whether a training that goes on from it has to.
    with watch.stopwatch.part("evaluation"):
        # Not only of what is dumped: such a model may still give a loss that is a number.
        tensors = keeper.tensors if keeper else learner.model.state_dict()
        check_sound(all_gather_object(lambda: unsound(tensors)), position.step, config)
        validation = evaluator.validate(learner.model, position.epoch - 1)
    epoch = Epoch(position.epoch, losses, train_loss, validation, seconds, rate, data_wait)
    return epoch, judged(position, validation, config)


def take_best(
    learner: TrainState, kept: Keeper | BestInMemory, position: Progress, context: RuntimeContext
) -> Progress:
    """Put a learner at the end of its training into the best state that was kept, and say which; where the
    training was then. Collective: every rank.
    """
    if position.is_best:
        return position
    best = kept.restore_best(learner)
    if best is None:
        context.say(
            f"the test is read with the last weights, of epoch {position.epoch}: no better ones were kept"
        )
        return position
    wanted = position.epoch - position.epochs_since_best
    lost = f" of those that are there: epoch {wanted}, which was better, is not"
    context.say(
        f"the test is read with the weights of epoch {best.epoch}, the best on the validation ratings"
        f"{lost if best.epoch < wanted else ''}"
    )
    return best


def judged(position: Progress, validation: Metrics, config: Config) -> Progress:
    """The position at the end of an epoch, with what its validation says. Collective: every rank."""
    value = validation[main_metric(config.model.task)[0]]
    # One rank judges: the machines of others may round otherwise.
    if broadcast_from_rank0(lambda: is_better(config.model.task, value, position.best)):
        return dataclasses.replace(position, best=value, epochs_since_best=0)
    return dataclasses.replace(position, epochs_since_best=position.epochs_since_best + 1)


def goes_on(position: Progress, config: Config) -> bool:
    """Whether there is something left to train."""
    return position.epoch < config.training.epochs and not stops_early(position, config)


def stops_early(position: Progress, config: Config) -> bool:
    """Whether so many epochs in a row were no better than one before that no further one begins."""
    is_impatient = 0 < config.training.patience <= position.epochs_since_best and position.best is not None
    return is_impatient and position.epoch < config.training.epochs


def _train_epoch_kept(
    learner: TrainState,
    feed: InputPipeline,
    position: Progress,
    config: Config,
    context: RuntimeContext,
    keeper: Keeper | None,
    watch: Watch,
) -> np.ndarray:
    """`train_epoch` with a progress bar, a watch, and a keeper that is told of all steps but the last one."""
    num_train = len(feed.loader.dataset.ranges["train"])
    title = f"epoch {position.epoch + 1}/{config.training.epochs}"
    quiet = context.rank != 0
    with stage(title, num_train, "ratings", done=position.samples, quiet=quiet) as reached:

        def after_step(now: Progress, loss: torch.Tensor) -> None:
            reached(now.samples)
            watch.after_step(now.step, learner.optimizer)
            # After the last one the losses of the epoch are looked at first.
            if keeper and now.samples < num_train:
                with watch.stopwatch.part("dumps"):
                    keeper.after_step(now, loss)

        return train_epoch(learner, feed, position, config, context, after_step)


def check_finite(losses: np.ndarray, step: int, config: Config) -> None:
    """Refuse to go on after a loss that is no number; `losses` are those of the steps after `step`.

    Raises:
        UserError: when one is infinite or NaN.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise UserError(
            f"The loss is {losses[bad[0]]} at step {step + bad[0] + 1}: the training diverged with --lr "
            f"{config.optimizer.lr} --dense_lr {config.optimizer.dense_lr}; give smaller ones."
        )


def _largest(value: float, context: RuntimeContext) -> float:
    largest = torch.tensor(value, device=context.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


class InputPipeline:
    """The batches of all passes, from one loader: plain tensors become the model's input here.

    Each pass is a fresh iterator: TorchRec's pipeline knows an exhausted one by its identity, and would take
    a second pass of the same object for empty (torchrec issue 2327).
    """

    def __init__(self, loader: BatchLoader, stopwatch: Stopwatch | None = None) -> None:
        self.loader = loader
        self.stopwatch = stopwatch or Stopwatch()
        self.keys = [table.name for table in loader.dataset.tables]
        self.seconds_waited = 0.0
        self._prepared: tuple[tuple[str, int, int], Iterator[Batch]] | None = None

    def prepare(self, split: str, epoch: int, first: int = 0) -> None:
        """Have the workers begin a pass, from its place `first` on, whose batches will be asked for later."""
        sampler = self.loader.sampler
        sampler.split, sampler.epoch, sampler.first = split, epoch, first
        self._prepared = ((split, epoch, first), iter(self.loader))

    def batches(self, split: str, epoch: int, first: int = 0) -> Iterator[RatingBatch]:
        """One pass over a split, on the host; counts the seconds that its consumer waits."""
        self.seconds_waited = 0.0
        with self._waiting():
            if self._prepared is None or self._prepared[0] != (split, epoch, first):
                self.prepare(split, epoch, first)
            assert self._prepared is not None
            source, self._prepared = self._prepared[1], None
        while True:
            with self._waiting():
                batch = next(source, None)
            if batch is None:
                return
            yield self.to_model_input(batch)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        with self.stopwatch.part("feed"):
            yield
        self.seconds_waited += time.perf_counter() - start

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
        with named("feed"):
            batch = next(batches).to(self.device, non_blocking=True)
        with named("optimizer"):
            self.optimizer.zero_grad()
        with named("dense"):
            loss, output = self.model(batch)
        with named("backward"):
            loss.backward()
        with named("optimizer"):
            self.optimizer.step()
        return output

    def detach(self) -> DistributedModelParallel:
        """The model as it is outside the pipeline."""
        return self.model


def make_optimizer(model: DistributedModelParallel, config: Config) -> CombinedOptimizer:
    """The tables' optimizer, which runs inside the backward, and AdamW for the dense part, as one."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        # The rate is that of the step that makes its state.
        lambda parameters: torch.optim.AdamW(
            parameters, lr=0.0, weight_decay=config.optimizer.dense_weight_decay, fused=True
        ),
    )
    # Adam makes its state in its first step; made now, a dump holds the same tensors at any time. A step at
    # the rate zero changes no weight, and is not counted.
    dense.init_state()
    for state in dense.state.values():
        state["step"].zero_()
    for group in dense.param_groups:
        group["lr"] = config.optimizer.dense_lr
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
    overlap = (
        context.device.type == "cuda"
        if config.training.pipeline == "auto"
        else config.training.pipeline == "sparse_dist"
    )
    if overlap:
        return TrainPipelineSparseDist(model, optimizer, context.device)
    return PlainSteps(model, optimizer, context.device)


def train_epoch(
    learner: TrainState,
    feed: InputPipeline,
    position: Progress,
    config: Config,
    context: RuntimeContext,
    after_step: Callable[[Progress, torch.Tensor], None],
) -> np.ndarray:
    """The rest of a pass over the training ratings; returns the loss of each global batch, float32 [steps].

    Nothing waits for the device but the end: losses stay there until then. Collective: every rank.
    """
    learner.model.train()
    pipeline = make_pipeline(learner.model, learner.optimizer, config, context)
    dataset = feed.loader.dataset
    num_train = len(dataset.ranges["train"])
    step_sizes = dataset.step_sizes("train", position.samples)
    # Known on the host too, so that no step waits for the device.
    scale = float(learner.row_scale)
    losses = torch.zeros(len(step_sizes), device=context.device)
    batches = feed.batches("train", position.epoch, position.samples)
    for place, size in enumerate(step_sizes):
        # By ratings, not by steps: the same on any number of ranks.
        left = 1 - (position.epoch + position.samples / num_train) / config.training.epochs
        learner.set_rates(left, scale)
        with named(STEP):
            losses[place], _ = pipeline.progress(batches)
        # Rounded as it is stored, so that a resumed training goes on with the same number.
        scale = float(np.float32(scale * math.exp(-config.optimizer.weight_decay * left * size / num_train)))
        learner.row_scale.fill_(scale)
        position = dataclasses.replace(position, step=position.step + 1, samples=position.samples + size)
        after_step(position, losses[place])
    # Evaluation needs the model's plain forward, which TorchRec's pipeline replaces.
    pipeline.detach()
    # Not reduced: how a sum over three ranks is rounded would depend on the place of a step in the pass.
    everyones = [torch.empty_like(losses) for _ in range(context.world_size)]
    dist.all_gather(everyones, losses)
    return torch.stack(everyones).mean(dim=0).cpu().numpy()
