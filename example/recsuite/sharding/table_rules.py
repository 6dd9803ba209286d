"""Optimizers of the tables: they update rows by their gradients, inside the backward.

    rs.SGD            no state                        any device
    rs.Adagrad        momentum1, D numbers a row      any device
    rs.RowWiseAdagrad momentum1, one number a row     any device; the one of dynamic tables
    rs.Adam           momentum1 and exp_avg_sq        our CPU tables and FBGEMM's on a GPU
    rs.RowWiseAdam    the same, exp_avg_sq of one     our CPU tables and FBGEMM's on a GPU

A step changes only the rows that it looked up, each once, by the sum of its gradients over all ranks. The
state has TorchRec's names, is sharded like the rows, and is in checkpoints and deltas.

All of them change a row by the rate times a function of its gradients. The rate is divided by the row scale
(see `RowScale`). So the decay of rows is exact with any of them, and decoupled as in AdamW. A rule of your
own must not depend on the rows either, and its `step` does not get them.

n: distinct rows of a step; D: numbers in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from typing_extensions import override

from recsuite.errors import require

# Global batch at which a rule uses exactly its `lr`, and the smallest one for which a rate falls.
REFERENCE_BATCH, LEAST_RATED_BATCH = 4096, 512
# Prevents a division by zero for a row without a gradient; too small to matter otherwise.
TABLE_EPS = 1e-8
# FBGEMM's optimizers on a CPU; on a GPU it has all that have an `EmbOptimType` here.
FBGEMM_ON_CPU = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)

# Optimizer state of rows, by its name.
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class TableRule:
    """Base of the optimizers of tables; derive from it for one of your own, for tables on a CPU.

    Class attributes: `name` identifies the optimizer in checkpoints. `slots` is the state of a row, by its
    name in checkpoints: True for one number, False for D of them, all zero at first. `fbgemm` is FBGEMM's
    own optimizer, None if there is none.

    Args:
        lr: Learning rate for a global batch of 4,096 events, before the schedule.

    Example:
        class SignSGD(rs.TableRule):
            name = "sign SGD"

            def step(self, gradients, state, rate, number):
                return gradients.sign_() * -rate
    """

    name: ClassVar[str]
    slots: ClassVar[Mapping[str, bool]] = {}
    fbgemm: ClassVar[EmbOptimType | None] = None

    lr: float

    def rate(self, global_batch: int) -> float:
        """Return the learning rate for a global batch, before the schedule.

        It grows with the root of the batch, and is constant below 512 events.

        Args:
            global_batch: Events in a step of all ranks, at most a fiftieth of an epoch's.

        Returns:
            The rate.
        """
        # A step of Adagrad or Adam has the size of the rate for any gradient, so the way of a row grows with
        # the root of the number of its updates. In a small batch a row is seldom there twice, so an even
        # smaller one gives it no more updates.
        return self.lr * math.sqrt(max(global_batch, LEAST_RATED_BATCH) / REFERENCE_BATCH)

    def options(self) -> dict[str, Any]:
        """Return FBGEMM's options besides the rate.

        Returns:
            The options by name.
        """
        betas = zip(("beta1", "beta2"), getattr(self, "betas", ()), strict=False)
        return {**({"eps": self.eps} if hasattr(self, "eps") else {}), **dict(betas)}

    def step(self, gradients: Tensor, state: State, rate: Tensor, number: int) -> Tensor:
        """Return the change of n distinct rows. Not collective.

        Args:
            gradients: Of the rows, float32 [n, D]; may be overwritten.
            state: Of the rows, by name float32 [n, 1] or [n, D] as in `slots`; to be changed in place.
            rate: Scheduled learning rate, float32 [].
            number: Of the step, from 1.

        Returns:
            float32 [n, D], added to the rows.
        """
        raise NotImplementedError

    def update(
        self, weights: Tensor, state: State, rows: Tensor, gradients: Tensor, rate: Tensor, number: int
    ) -> None:
        """Make a step on a CPU: change some rows and their state in place. Not collective.

        Args:
            weights: All rows, float32 [all rows, D].
            state: Of all rows, by name float32 [all rows] or [all rows, D].
            rows: Distinct rows to change, int64 [n].
            gradients: Of these rows, float32 [n, D]; may be overwritten.
            rate: Scheduled learning rate, float32 [].
            number: Of the step, from 1.
        """
        kept = {name: held.index_select(0, rows) for name, held in state.items()}
        shown = {name: part if part.dim() > 1 else part.unsqueeze(1) for name, part in kept.items()}
        steps = self.step(gradients, shown, rate, number)
        for name, part in kept.items():
            state[name].index_copy_(0, rows, part)
        # With an alpha other than 1, index_add_ adds row by row, which takes ten times as long.
        weights.index_add_(0, rows, steps)


class SGD(TableRule):
    """Plain gradient descent, without state, as `torch.optim.SGD` without momentum.

    Args:
        lr: Learning rate for a global batch of 4,096 events, and in proportion for another batch, up to a
            fiftieth of an epoch's events: the loss is a mean, so twice the batch halves the number of steps
            and does not change the gradients.

    Example:
        model = training.shard(make_model, loss=MyLoss(), tables=rs.SGD(lr=1.0))
    """

    name = "SGD"
    fbgemm = EmbOptimType.EXACT_SGD

    @override
    def rate(self, global_batch: int) -> float:
        return self.lr * global_batch / REFERENCE_BATCH

    @override
    def step(self, gradients: Tensor, state: State, rate: Tensor, number: int) -> Tensor:
        return gradients.mul_(-rate)


@dataclass(frozen=True)
class Adagrad(TableRule):
    """Adagrad with a sum of squares for each number of a row.

    Source: Duchi et al., 2011; `torch.optim.Adagrad`.

    Args:
        lr: See `TableRule`.
        eps: Added to the root of the sum.

    Example:
        model = training.shard(make_model, loss=MyLoss(), tables=rs.Adagrad(lr=0.04))
    """

    name = "Adagrad"
    slots: ClassVar = {"momentum1": False}
    fbgemm = EmbOptimType.EXACT_ADAGRAD

    eps: float = TABLE_EPS

    @override
    def step(self, gradients: Tensor, state: State, rate: Tensor, number: int) -> Tensor:
        sums = state["momentum1"].add_(squares(gradients, self.slots["momentum1"]))
        return gradients.mul_(-rate / sums.sqrt().add_(self.eps))


class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum for each row, of the mean of its squares; the only optimizer for dynamic tables.

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD, at three times its speed on a CPU.

    Args:
        lr: See `TableRule`.
        eps: Added to the root of the sum.

    Example:
        model = training.shard(make_model, loss=MyLoss(), tables=rs.RowWiseAdagrad(lr=0.04))
    """

    name = "row-wise Adagrad"
    slots: ClassVar = {"momentum1": True}
    fbgemm = EmbOptimType.EXACT_ROWWISE_ADAGRAD

    @override
    def update(
        self, weights: Tensor, state: State, rows: Tensor, gradients: Tensor, rate: Tensor, number: int
    ) -> None:
        # Compiled, because it is the default rule.
        if type(self) is not RowWiseAdagrad:
            super().update(weights, state, rows, gradients, rate, number)
            return
        # Not at the top: this module is imported on a GPU too.
        from recsuite.sharding.kernels import update_by_adagrad

        sums, numbers = state["momentum1"].numpy(), (np.float32(float(rate)), np.float32(self.eps))
        update_by_adagrad(weights.numpy(), sums, rows.numpy(), gradients.numpy(), *numbers)


@dataclass(frozen=True)
class Adam(TableRule):
    """Adam for the rows that a step looks up; the state of other rows does not change ("lazy").

    The bias is corrected by the number of the step in the training. Source: Kingma and Ba, 2015;
    `torch.optim.SparseAdam`, FBGEMM's ADAM.

    Args:
        lr: See `TableRule`.
        betas: Of the means of gradients and of their squares, in [0, 1).
        eps: Added to the root of the mean of squares.

    Example:
        model = training.shard(make_model, loss=MyLoss(), tables=rs.Adam(lr=0.01))
    """

    name = "Adam"
    slots: ClassVar = {"momentum1": False, "exp_avg_sq": False}
    fbgemm = EmbOptimType.ADAM

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = TABLE_EPS

    @override
    def step(self, gradients: Tensor, state: State, rate: Tensor, number: int) -> Tensor:
        (first, second), means, variances = self.betas, state["momentum1"], state["exp_avg_sq"]
        means.lerp_(gradients, 1 - first)
        variances.lerp_(squares(gradients, self.slots["exp_avg_sq"]), 1 - second)
        roots = (variances / (1 - second**number)).sqrt_().add_(self.eps)
        return means * (-rate / (1 - first**number) / roots)


class RowWiseAdam(Adam):
    """Adam with one mean of squares for each row. Source: FBGEMM's PARTIAL_ROWWISE_ADAM.

    Args:
        lr: See `TableRule`.
        betas: See `Adam`.
        eps: See `Adam`.

    Example:
        model = training.shard(make_model, loss=MyLoss(), tables=rs.RowWiseAdam(lr=0.01))
    """

    name = "row-wise Adam"
    slots: ClassVar = {"momentum1": False, "exp_avg_sq": True}
    fbgemm = EmbOptimType.PARTIAL_ROWWISE_ADAM


RULES = (SGD, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam)


def squares(gradients: Tensor, is_of_row: bool) -> Tensor:
    """Return the squares of gradients, float32 [n, D], or the mean of each row's, float32 [n, 1]."""
    if is_of_row:
        return torch.linalg.vector_norm(gradients, dim=1, keepdim=True).square_().div_(gradients.size(1))
    return gradients.square()


def check_rule(rule: Any, tables: str, has_dynamic: bool) -> None:
    """Refuse a table optimizer that is not available for the tables, before any of them is allocated.

    tables: "vectorised" for our own tables on a CPU, "torchrec" for FBGEMM's there, "gpu"; has_dynamic: True
    if some are dynamic.

    Raises:
        UserError: names the available ones; also for an lr or betas out of range.
    """

    def is_available(kind: type[TableRule]) -> bool:
        if has_dynamic:
            # Dynamic tables move, evict and store one number for each row, and update the unknown row with
            # it.
            return kind is RowWiseAdagrad
        if tables == "vectorised":
            return kind.step is not TableRule.step
        return kind.fbgemm in FBGEMM_ON_CPU or (tables == "gpu" and kind.fbgemm is not None)

    names = ", ".join(f"rs.{kind.__name__}" for kind in RULES if is_available(kind))
    where = {"vectorised": "", "torchrec": " with --cpu_tables torchrec", "gpu": " on a GPU"}[tables]
    require(
        isinstance(rule, TableRule) and is_available(type(rule)),
        f"The optimizer of {'dynamic ' * has_dynamic}tables{where} must be one of {names}, got {rule!r}",
    )
    is_sound = 0 <= rule.lr < math.inf and all(0 <= beta < 1 for beta in getattr(rule, "betas", ()))
    require(is_sound, f"lr must be at least 0 and finite, betas at least 0 and below 1, got {rule!r}")
