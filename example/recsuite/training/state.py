"""Sharded model with its loss and its optimizers, and the conditions to continue a training.

    tables      see `table_rules`, inside the backward   --lr, --weight_decay
    dense part  AdamW, after the backward                --dense_lr, --dense_weight_decay

Both rates fall linearly to zero over the run, counted in events and not in steps, so that they are the same
on any number of ranks. In a stream they are constant. The tables decay through one number, the row scale; see
`RowScale`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsuite.config.config import Config
from recsuite.config.sections import OptimizerConfig, TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError, require
from recsuite.models.tasks import TASKS, ModelMaker, require_shape
from recsuite.runtime.process import RuntimeContext, profiler_range
from recsuite.sharding.plan import build_model, embedding_tables
from recsuite.sharding.recommender import Metric, ModelInput
from recsuite.sharding.table import EmbeddingTable
from recsuite.sharding.table_rules import RowWiseAdagrad, TableRule
from recsuite.training.progress import Progress

# A stream has no passes: its tables decay by --weight_decay over so many events.
EVENTS_OF_DECAY = 1_000_000
# Offsets of the GPU's generator that a step has for itself, a multiple of 4. If the draws of a step took more
# of them, the next step would repeat some; no step has so many. An offset has 64 bits, for 2^40 steps.
OFFSETS_OF_STEP = 2**24
# The parts of the combined optimizer, in their order.
PARAMETER_GROUPS = ("tables", "dense")


# Function that makes the optimizer of the dense part from its parameters.
DenseOptimizer = Callable[[Any], torch.optim.Optimizer]


def make_optimizer(
    model: DistributedModelParallel, config: OptimizerConfig, dense: DenseOptimizer | None = None
) -> CombinedOptimizer:
    """Return the tables' optimizer, which the model has already, and that of the dense part, combined.

    dense: makes the latter from its parameters; None for AdamW by the flags.
    """
    # Fused: one call for all tensors, instead of about ten for each.
    dense = dense or functools.partial(
        torch.optim.AdamW, lr=config.dense_lr, weight_decay=config.dense_weight_decay, fused=True
    )
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    if not parameters:
        # A model may have tables alone. torch refuses an empty list of parameters, but not an empty group.
        dense = _of_nothing
    wrapped = KeyedOptimizerWrapper(parameters, dense)
    _make_state(wrapped)
    # In the order of `PARAMETER_GROUPS`.
    optimizer = CombinedOptimizer([model.fused_optimizer, wrapped])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _of_nothing(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": []}], lr=0.0)


def _make_state(optimizer: KeyedOptimizerWrapper) -> None:
    """Create the state that most optimizers create in their first step."""
    # So a checkpoint always has the same tensors. This makes a step without gradients and decay, restores the
    # weights, and resets the step count.
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
        # mu_product is NAdam's product of momenta.
        for name, start in (("step", 0), ("mu_product", 1)):
            if name in state:
                state[name].fill_(start)


@dataclass(frozen=True)
class Schedule:
    """Schedule of rates and decay. Rates fall linearly to zero, or are constant in a stream.

    num_events: of an epoch; in a stream those over which the tables decay by --weight_decay. epochs: after
    which the rates are zero, None for constant ones. decay_power: see the flag.
    """

    num_events: int = EVENTS_OF_DECAY
    epochs: int | None = None
    decay_power: float = 0.0

    def left(self, progress: Progress) -> float:
        """Return the factor of the initial rates in the next step."""
        if self.epochs is None:
            return 1.0
        # Of the configured epochs, so an early stop ends at a rate above zero.
        return 1 - (progress.epoch + progress.samples / self.num_events) / self.epochs

    def decay_left(self, progress: Progress) -> float:
        """Return the factor of --weight_decay in the next step."""
        # Not divided by the power, which may be too large for a number.
        return self.left(progress) * (progress.epoch + 1) ** -self.decay_power


def set_rates(optimizer: CombinedOptimizer, left: float, scale: float, step: int = 0) -> None:
    """Set the rates to a share `left` of the initial ones; scale: the row scale; step: steps before."""
    for group in optimizer.param_groups:
        # Separate from "lr", which for the tables is divided by the scale below: callbacks get the scheduled
        # rate.
        group["lr"] = group["scheduled_lr"] = group["initial_lr"] * left
    _, tables = optimizer.optimizers[0]
    for group in tables.param_groups:
        # The tables hold rows divided by the scale, so their step is the step of the rows divided by it.
        group["lr"] /= scale
    for kernel in kernels_of(optimizer):
        # Step number for Adam. FBGEMM's own count includes evaluations, and is in no checkpoint.
        kernel.iter_cpu.fill_(step)
        if not step:
            # FBGEMM takes the number from `iter` if `iter_cpu` is zero.
            kernel.iter.zero_()


def place_draws(optimizer: CombinedOptimizer, step: int) -> None:
    """Set where the GPU's generator draws in a step: FBGEMM rounds rows of 16 bits by it. step: steps before.

    A resumed training must draw the same numbers.
    """
    if any(each.weights_precision == SparseType.FP16 and not each.use_cpu for each in kernels_of(optimizer)):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.set_offset(step * OFFSETS_OF_STEP)


def kernels_of(optimizer: CombinedOptimizer) -> list[Any]:
    """Return FBGEMM's kernels of the tables, which update rows in the backward."""
    _, tables = optimizer.optimizers[0]
    return [fused._emb_module for _, part in tables.optimizers for _, fused in part.optimizers]


def scheduled_rates(optimizer: CombinedOptimizer) -> dict[str, float]:
    """Return the learning rates of each of `PARAMETER_GROUPS`.

    Those of the tables are as scheduled; a rank without rows has none. Those of the dense part are as used,
    because a script may have set another one.
    """
    rates = ("scheduled_lr", "lr")
    return {
        name: part.param_groups[0][rate]
        for name, rate, (_, part) in zip(PARAMETER_GROUPS, rates, optimizer.optimizers, strict=True)
        if part.param_groups
    }


class RowScale:
    """Decay of the tables: the factor from the contents of the tables to the rows.

    A decoupled decay shrinks every row in every step, but a step looks up only a few thousand of possibly
    millions of rows. So the common factor of all rows is kept once, in a buffer of the model, and a step
    multiplies only that. The result is that of the textbook: lookups multiply by the scale, gradients are
    passed on as those of the rows, and `set_rates` divides the tables' rate by the scale.
    """

    def __init__(self, buffer: torch.Tensor, weight_decay: float) -> None:
        self.buffer = buffer
        self.weight_decay = weight_decay
        # A copy on the host, so that no step waits for the device.
        self.value = float(buffer)

    def decay(self, left: float, share_of_pass: float) -> None:
        """Shrink all rows by a step at a share `left` of the decay.

        share_of_pass: size of the step.
        """
        scale = self.value * math.exp(-self.weight_decay * left * share_of_pass)
        # Rounded like the stored buffer, so that a resumed training continues with the same number.
        self.value = float(np.float32(scale))
        self.buffer.fill_(self.value)


class ShardedModel:
    """Model with sharded tables, its loss and its optimizers.

        loss = model(batch)      # forward; the rows come from the ranks that have them
        loss.backward()          # also updates the rows of the tables
        model.step()             # the dense part learns

    For a loss of your own: `output = model.output(batch)`, and `model.step(loss)` at the end. All of these
    are collective: every rank calls them equally often.

    model: TorchRec's DistributedModelParallel; optimizer: of the tables and of the dense part, combined
    (a step calls that of the dense part alone);
    weight_decay: the decay of the tables in the first pass, see `RowScale`; rule: the name of their
    optimizer; tables: this rank's share of each table, by its name; table_optimizer: is a part of their
    backward;
    dense_optimizer: of the dense part; head: computes with looked-up rows, without a parallel wrapper;
    row_scale: factor from the contents of the tables to the rows, float32 [], the model's buffer itself;
    rates: the learning rates in words; accepts_changed_model: see the flag.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        weight_decay: float,
        rule: str,
        rates: str,
    ) -> None:
        self.model, self.optimizer, self.weight_decay = model, optimizer, weight_decay
        self.rates, self.accepts_changed_model = rates, False
        # Found once for the whole training: training and restoring change their tensors in place.
        self.tables: dict[str, EmbeddingTable] = embedding_tables(model)
        self.table_optimizer: Any
        self.dense_optimizer: Any
        (_, self.table_optimizer), (_, self.dense_optimizer) = optimizer.optimizers
        # DistributedModelParallel wraps our model.
        self.head: Any = model.module.recommender.head
        self.row_scale: torch.Tensor = self.head.row_scale
        dense = type(self.dense_optimizer._optimizer).__name__
        # A checkpoint can be loaded only with the same optimizers.
        self.optimizer_name = (
            f"{rule} for the tables, {dense} for the dense part, decoupled decay of all rows"
        )
        # Loss of the current batch, detached.
        self.loss: torch.Tensor | None = None
        # True from a forward until the step that uses its gradients.
        self.is_pending = False
        # Work of a pipeline between a forward and its backward.
        self.after_forward: Callable[[], None] | None = None
        # Range of a profile from a forward to its step.
        self._between = contextlib.ExitStack()

    def __call__(self, batch: ModelInput) -> torch.Tensor:
        """Return the loss of this rank's events, float32 []. Collective: every rank."""
        with profiler_range("dense"):
            loss, _ = self.model(batch)
        require_shape(loss, 0, "A loss must be one number", "return (batch.weights * losses).mean()")
        self.loss = loss.detach()
        self._end_forward()
        return loss

    def output(self, batch: ModelInput) -> Any:
        """Return the model's output for this rank's events, with its gradient. Collective: every rank."""
        output = self.model.module.recommender(batch)
        self._end_forward()
        return output

    def _end_forward(self) -> None:
        if self.after_forward is not None:
            self.after_forward()
        # The time until the step is mostly the backward.
        self.is_pending = True
        self._between.close()
        self._between.enter_context(profiler_range("backward"))

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Update the dense part by the gradients since the last step, and clear them. Collective.

        loss: of the batch, if the model did not compute it; only for reports.
        """
        self._between.close()
        if loss is not None:
            self.loss = loss.detach()
        self.is_pending = False
        with profiler_range("optimizer"):
            # The tables have made their step in the backward.
            self.dense_optimizer.step()
            self.dense_optimizer.zero_grad()

    def train_on(self, batch: ModelInput) -> torch.Tensor:
        """Make a step with a batch; return its loss, float32 []. Collective: every rank."""
        loss = self(batch)
        loss.backward()
        self.step()
        return loss

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the dense part, for example to clip gradients."""
        for _, value in in_backward_optimizer_filter(self.model.named_parameters()):
            yield value


def build_train_state(
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    maker: ModelMaker,
    loss: nn.Module | None = None,
    tables: TableRule | None = None,
    dense: DenseOptimizer | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> ShardedModel:
    """Return the model of a data set and its optimizers, untrained. Collective: every rank.

    maker: makes the model; loss: None where nothing is trained, or the loop has its own; tables, dense: the
    optimizers, None for those of the flags; metrics: of predictions and labels, besides those of the task.

    Raises:
        UserError: when the tables do not fit the memory of the ranks, or the optimizer is unsupported.
    """
    check_precision(config.training, context.device)
    is_tf32 = config.training.precision == "tf32"
    # Of the whole process: torch has no setting of a module.
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    tables = tables or RowWiseAdagrad(config.optimizer.lr)
    model = build_model(columns, config, context, tables, maker, loss)
    if metrics and TASKS[config.model.task].evaluation == "ranks":
        raise UserError(
            f"metrics requires predictions and labels, and --task {config.model.task} has only ranks."
        )
    model.module.metrics = dict(metrics or {})
    optimizer = make_optimizer(model, config.optimizer, dense)
    rates = describe_rates(tables, optimizer)
    train_state = ShardedModel(model, optimizer, config.optimizer.weight_decay, tables.name, rates)
    train_state.accepts_changed_model = config.checkpoint.accept_changed_model
    return train_state


def check_precision(config: TrainingConfig, device: torch.device) -> None:
    """Refuse --precision tf32 without a GPU."""
    require(
        config.precision != "tf32" or device.type == "cuda",
        "--precision tf32 requires a GPU; give fp32 or bf16",
    )


def describe_rates(tables: TableRule, optimizer: CombinedOptimizer) -> str:
    """Describe the learning rates of the tables and of the groups of the dense part."""
    dense = dict.fromkeys(str(group["initial_lr"]) for group in optimizer.optimizers[1][1].param_groups)
    return f"learning rates of {tables.lr} (tables) and {', '.join(dense)} (dense part)"


def has_epochs_left(progress: Progress, config: TrainingConfig) -> bool:
    """Return True if there are epochs left to train."""
    return progress.epoch < config.epochs and not stops_early(progress, config)


def stops_early(progress: Progress, config: TrainingConfig) -> bool:
    """Return True if the last --patience epochs were no better than an earlier one."""
    # Without any finite result there is no best epoch to restore, and no value to compare with.
    is_impatient = 0 < config.patience <= progress.epochs_since_best and progress.best is not None
    # From good initial rows training may first get worse, so it has twice as many epochs to become better.
    if config.patience > 1 and progress.epochs_since_best == progress.epoch < 2 * config.patience:
        return False
    # After the last epoch the training is over, and not stopped early.
    return is_impatient and progress.epoch < config.epochs
