"""How a model learns: learning rates and their schedule, and the decay of the tables and of the dense part.

    tables      row-wise Adagrad, inside the backward    --lr, --weight_decay
    dense part  AdamW, after the backward                --dense_lr, --dense_weight_decay

Both rates fall linearly to zero over the run, counted in events and not in steps, so that they are the same
on any number of ranks; in a stream they stay as they are. The tables decay through one number, the row scale;
see `RowScale`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.sections.model import OptimizerConfig

# The global batch that --lr is for.
REFERENCE_BATCH = 4096
# Keeps a row without a gradient so far from dividing by zero, and is too small for anything else.
TABLE_EPS = 1e-8
# Over so many events of a stream, which has no passes, the tables decay by --weight_decay.
EVENTS_OF_DECAY = 1_000_000
# The parts of the combined optimizer, in their order.
PARAMETER_GROUPS = ("tables", "dense")


# Makes the optimizer of the dense part from its parameters.
DenseOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class RowWiseAdagrad:
    """Adagrad with one number of state for each row, in the backward of the tables.

    lr: the learning rate for a global batch of 4,096 events; eps: added to the root of the state. Adagrad's
    steps have the size of the rate whatever the gradient, so a row moves with the root of the number of
    steps; with the root of the batch in the rate, it learns as much on any number of ranks.

        model = training.shard(make_model, tables=rs.RowWiseAdagrad(lr=0.04), dense=dense_optimizer)
    """

    lr: float
    eps: float = TABLE_EPS

    def rate(self, global_batch: int) -> float:
        """Return the learning rate for the events in a step of all ranks, at the beginning of a run."""
        return self.lr * math.sqrt(global_batch / REFERENCE_BATCH)

    def parameters(self, global_batch: int) -> dict[str, Any]:
        """Return what FBGEMM takes, whose kernels the optimizer is a part of."""
        return {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": self.rate(global_batch),
            "eps": self.eps,
        }


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
    time. The step is one at the rate zero and without decay, which changes no weight, and is not counted.
    """
    before = [(group["lr"], group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    optimizer.init_state()
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
    for group, (rate, decay) in zip(optimizer.param_groups, before, strict=True):
        group.update(lr=rate, weight_decay=decay)


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


def set_rates(optimizer: CombinedOptimizer, left: float, scale: float) -> None:
    """Learn at a share `left` of the first rates from now on; scale: the row scale."""
    for group in optimizer.param_groups:
        # Kept apart from "lr", which for the tables is divided by the scale below: callbacks are shown the
        # schedule.
        group["lr"] = group["scheduled_lr"] = group["initial_lr"] * left
    _, tables = optimizer.optimizers[0]
    for group in tables.param_groups:
        # The tables hold rows divided by the scale, so a step of the rows is one of theirs divided by it.
        group["lr"] /= scale


def scheduled_rates(optimizer: CombinedOptimizer) -> dict[str, float]:
    """The learning rates as scheduled, of each of `PARAMETER_GROUPS`."""
    return {
        name: part.param_groups[0]["scheduled_lr"]
        for name, (_, part) in zip(PARAMETER_GROUPS, optimizer.optimizers, strict=True)
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
