"""A sharded model with its loss and its optimizer, and whether there is something left to learn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.config.sections import TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError
from recsuite.models.co_occurrence import Prior
from recsuite.models.tasks import TASKS, ModelMaker, require_shape
from recsuite.runtime.process import RuntimeContext, named
from recsuite.sharding.plan import build_model
from recsuite.sharding.recommender import Metric, ModelInput
from recsuite.sharding.table_rules import RowWiseAdagrad, TableRule
from recsuite.training.optimizer import DenseOptimizer, make_optimizer


class ShardedModel:
    """A model whose tables are shared out over all ranks, with its loss and its optimizers.

        loss = model(batch)      # forward; the rows come from the ranks that have them
        loss.backward()          # the rows learn in here
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

    def expect_noise(self, noise: float | None) -> None:
        """Hold rows by their prior, if they have one, as strongly as is right for this noise."""
        if self.prior is not None and noise is not None:
            self.prior.noise = noise


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
