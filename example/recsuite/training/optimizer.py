"""How a model learns: learning rates and their schedule, and the decay of the tables and of the dense part.

    tables      see `table_rules`, inside the backward   --lr, --weight_decay
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
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.sections import OptimizerConfig

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
