"""A sharded model with its loss and its optimizer, and whether there is something left to learn.

    tables      see `table_rules`, inside the backward   --lr, --weight_decay
    dense part  AdamW, after the backward                --dense_lr, --dense_weight_decay

Both rates fall linearly to zero over the run, counted in events and not in steps, so that they are the same
on any number of ranks; in a stream they stay as they are. The tables decay through one number, the row scale;
see `RowScale`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.config.sections import OptimizerConfig, TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError
from recsuite.models.co_occurrence import Prior
from recsuite.models.tasks import TASKS, ModelMaker, require_shape
from recsuite.runtime.process import RuntimeContext, named
from recsuite.sharding.plan import build_model
from recsuite.sharding.recommender import Metric, ModelInput
from recsuite.sharding.table_rules import RowWiseAdagrad, TableRule

# Over so many events of a stream, which has no passes, the tables decay by --weight_decay.
EVENTS_OF_DECAY = 1_000_000
# The parts of the combined optimizer, in their order.
PARAMETER_GROUPS = ("tables", "dense")


# Makes the optimizer of the dense part from its parameters.
DenseOptimizer = Callable[[Any], torch.optim.Optimizer]


def make_optimizer(
    model: DistributedModelParallel, config: OptimizerConfig, dense: DenseOptimizer | None = None
) -> CombinedOptimizer:
    """Return the tables' optimizer, which the model has already, and that of the dense part, as one.

    dense: makes the latter from its parameters; AdamW by the flags where it is None.
    """
    dense = dense or (
        # Fused: one call for all tensors, instead of some ten for each.
        lambda parameters: torch.optim.AdamW(
            parameters, lr=config.dense_lr, weight_decay=config.dense_weight_decay, fused=True
        )
    )
    wrapped = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), dense)
    _make_state(wrapped)
    # In the order of `PARAMETER_GROUPS`.
    optimizer = CombinedOptimizer([model.fused_optimizer, wrapped])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _make_state(optimizer: KeyedOptimizerWrapper) -> None:
    """Make the state that most optimizers make in their first step: a checkpoint has the same tensors at any
    time. The step is one without gradients and decay; the weights are put back, and it is not counted.
    """
    groups = optimizer.param_groups
    before = [(value, value.detach().clone()) for group in groups for value in group["params"]]
    decays = [group.get("weight_decay", 0.0) for group in groups]
    for group in groups:
        group["weight_decay"] = 0.0
    optimizer.init_state()
    for group, decay in zip(groups, decays, strict=True):
        group["weight_decay"] = decay
    for value, weights in before:
        value.detach().copy_(weights)
    for state in optimizer.state.values():
        # Of NAdam a product of its momenta.
        for name, start in (("step", 0), ("mu_product", 1)):
            if name in state:
                state[name].fill_(start)


class Schedule(Protocol):
    """How fast a training learns while it goes on.

    num_events: over so many the tables decay by --weight_decay.
    """

    @property
    def num_events(self) -> int:
        """See above."""

    def left(self, progress: Progress) -> float:
        """The share of the first rates at which the next step learns."""


@dataclass(frozen=True)
class Falling:
    """Rates that fall to zero over some epochs of so many events each."""

    num_events: int
    epochs: int

    def left(self, progress: Progress) -> float:
        """What is left of the run, in events."""
        # Of the epochs that were asked for, so an early stop ends at a rate above zero.
        return 1 - (progress.epoch + progress.samples / self.num_events) / self.epochs


@dataclass(frozen=True)
class Constant:
    """Rates that stay: a stream has no end to which they could fall."""

    num_events: int = EVENTS_OF_DECAY

    def left(self, progress: Progress) -> float:
        """All of them."""
        return 1.0


def set_rates(optimizer: CombinedOptimizer, left: float, scale: float, step: int = 0) -> None:
    """Learn at a share `left` of the first rates from now on; scale: the row scale; step: steps before."""
    for group in optimizer.param_groups:
        # Kept apart from "lr", which for the tables is divided by the scale below: callbacks are shown the
        # schedule.
        group["lr"] = group["scheduled_lr"] = group["initial_lr"] * left
    _, tables = optimizer.optimizers[0]
    for group in tables.param_groups:
        # The tables hold rows divided by the scale, so a step of the rows is one of theirs divided by it.
        group["lr"] /= scale
    for kernel in (fused._emb_module for _, part in tables.optimizers for _, fused in part.optimizers):
        # Adam's number of a step. Left to FBGEMM it counts evaluations too, and is in no checkpoint.
        kernel.iter_cpu.fill_(step)
        if not step:
            # It is taken from there where the other one is zero.
            kernel.iter.zero_()


def scheduled_rates(optimizer: CombinedOptimizer) -> dict[str, float]:
    """The learning rates of each of `PARAMETER_GROUPS`: of the tables as scheduled, and of the dense part as
    it was used, for a script may have set another one.
    """
    rates = ("scheduled_lr", "lr")
    return {
        name: part.param_groups[0][rate]
        for name, rate, (_, part) in zip(PARAMETER_GROUPS, rates, optimizer.optimizers, strict=True)
    }


class RowScale:
    """The decay of the tables: the number by which what they hold is multiplied to give the rows.

    A decoupled decay shrinks every row in every step, and a table may have millions of rows of which a step
    looks up a few thousand. So the factor that all rows have in common is kept once, in a buffer of the
    model, and a step multiplies that. The arithmetic is the textbook's: lookups multiply by the scale,
    gradients are passed on as those of the rows, and `set_rates` divides the tables' rate by it.
    """

    def __init__(self, buffer: torch.Tensor, weight_decay: float) -> None:
        self.buffer = buffer
        self.weight_decay = weight_decay
        # Known on the host too, so that no step waits for the device.
        self.value = float(buffer)

    def decay(self, left: float, share_of_pass: float) -> None:
        """Shrink all rows by a step at a share `left` of the first rates, over so much of a pass."""
        scale = self.value * math.exp(-self.weight_decay * left * share_of_pass)
        # Rounded as it is stored, so that a resumed training continues with the same number.
        self.value = float(np.float32(scale))
        self.buffer.fill_(self.value)


class ShardedModel:
    """A model whose tables are shared out over all ranks, with its loss and its optimizers.

        loss = model(batch)      # forward; the rows come from the ranks that have them
        loss.backward()          # also updates the rows of the tables
        model.step()             # the dense part learns

    For a loss of your own: `output = model.output(batch)`, and `model.step(loss)` in the end. All of these
    are collective: every rank calls them equally often.

    model: what TorchRec made of it; optimizer: of the tables and of the dense part, as one; weight_decay: the
    decay of the tables in a pass, see `RowScale`; tables: the name of their optimizer.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        weight_decay: float,
        tables: str,
    ) -> None:
        self.model, self.optimizer, self.weight_decay = model, optimizer, weight_decay
        dense = type(self.dense_optimizer._optimizer).__name__
        # A checkpoint is loaded by the same ones alone.
        self.optimizer_name = (
            f"{tables} for the tables, {dense} for the dense part, decoupled decay of all rows"
        )
        # The loss of the batch under way, without its graph.
        self.loss: torch.Tensor | None = None
        # True from a forward until the step that learns from it.
        self.is_pending = False
        # What a pipeline does between a forward and its backward.
        self.after_forward: Callable[[], None] | None = None
        # The name of a profile for what is between a forward and its step.
        self._between = contextlib.ExitStack()

    def __call__(self, batch: ModelInput) -> torch.Tensor:
        """Return the loss of this rank's events, float32 []. Collective: every rank."""
        with named("dense"):
            loss, output = self.model(batch)
        require_shape(loss, 0, "A loss must be one number", "return (batch.weights * losses).mean()")
        self.loss = loss.detach()
        self._end_forward(output)
        return loss

    def output(self, batch: ModelInput) -> Any:
        """Return what the model computes of this rank's events, with its gradient. Collective: every rank."""
        output = self.model.module.recommender(batch)
        self._end_forward(output)
        return output

    def _end_forward(self, output: Any) -> None:
        if self.after_forward is not None:
            self.after_forward()
        # What follows until the step is mostly the backward.
        self.is_pending = True
        self._between.close()
        self._between.enter_context(named("backward"))

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Have the dense part learn from the gradients since the last step, and forget them. Collective.

        loss: of the batch, where the model did not compute it; it is reported.
        """
        self._between.close()
        if loss is not None:
            self.loss = loss.detach()
        self.is_pending = False
        with named("optimizer"):
            self.optimizer.step()
            self.dense_optimizer.zero_grad()

    def learn(self, batch: ModelInput) -> torch.Tensor:
        """Make a whole step on a batch of the device; returns the loss, detached. Collective: every rank."""
        # TorchRec gives the tables' rate to their kernel in here.
        self.table_optimizer.zero_grad()
        loss = self(batch)
        loss.backward()
        self.step()
        return loss.detach()

    @property
    def dense_optimizer(self) -> Any:
        """The optimizer of the dense part."""
        return self.optimizer.optimizers[1][1]

    @property
    def table_optimizer(self) -> Any:
        """The optimizer of the tables, which is a part of their backward."""
        return self.optimizer.optimizers[0][1]

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the dense part, such as for the clipping of gradients."""
        for _, value in in_backward_optimizer_filter(self.model.named_parameters()):
            yield value

    @property
    def row_scale(self) -> torch.Tensor:
        """What the rows are of what the tables hold, float32 []: the model's buffer itself."""
        # DistributedModelParallel wraps our model.
        scale: torch.Tensor = self.model.module.row_scale
        return scale

    @property
    def head(self) -> Any:
        """The model that computes with looked-up rows, without a parallel wrapper."""
        return self.model.module.recommender.head

    @property
    def prior(self) -> Prior | None:
        """The prior of the rows, where the model has one."""
        prior = getattr(self.head, "prior", None)
        return prior if isinstance(prior, Prior) else None


def build_train_state(
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    maker: ModelMaker | None = None,
    loss: nn.Module | None = None,
    tables: TableRule | None = None,
    dense: DenseOptimizer | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> ShardedModel:
    """Return the model of a data set and its optimizers, untrained. Collective: every rank.

    maker, loss: those of the task where they are None; tables, dense: the optimizers, those of the flags
    where they are None; metrics: of predictions and labels, beside those of the task.

    Raises:
        UserError: when the tables do not fit the memory of the ranks, or their optimizer is none there is.
    """
    tables = tables or RowWiseAdagrad(config.optimizer.lr)
    model = build_model(columns, config, context, tables, maker, loss)
    if metrics and TASKS[config.model.task].evaluation == "ranks":
        raise UserError(
            f"metrics takes predictions and labels, and --task {config.model.task} has ranks alone."
        )
    model.module.metrics = dict(metrics or {})
    optimizer = make_optimizer(model, config.optimizer, dense)
    return ShardedModel(model, optimizer, config.optimizer.weight_decay, tables.name)


def has_epochs_left(progress: Progress, config: TrainingConfig) -> bool:
    """Whether there is something left to train."""
    return progress.epoch < config.epochs and not stops_early(progress, config)


def stops_early(progress: Progress, config: TrainingConfig) -> bool:
    """Whether so many epochs in a row were no better than one before that no further one begins."""
    # Without a single finite result there is no best epoch to go back to, and nothing to compare with.
    is_impatient = 0 < config.patience <= progress.epochs_since_best and progress.best is not None
    # After the last epoch nothing is stopped early: the training is simply over.
    return is_impatient and progress.epoch < config.epochs
