"""The row of the unknown where TorchRec looks rows up: each rank has a copy, and all learn from all.

TorchRec's lookup finds rows on the rank that is asked, so an id without a row looks at a copy there, from
which FBGEMM's optimizer takes a step of its own. What it took tells the gradient, and with the sum of all
gradients the step is taken again: the same as on one rank, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recsuite.sharding.dynamic.rows import DynamicRows


class UnknownRows:
    """The unknown's rows of dynamic tables on this rank. kernels: FBGEMM's of each, which learns."""

    def __init__(self, shares: Sequence[DynamicRows], kernels: Sequence[Any], group: Any) -> None:
        self.shares, self.kernels, self.group = shares, kernels, group
        self._before: torch.Tensor | None = None
        for share in shares:
            # Learned like any other, and zero to begin with.
            share.weights[-1].zero_()

    @property
    def _is_alone(self) -> bool:
        return not self.shares or dist.get_world_size(self.group) == 1

    @torch.no_grad()
    def share(self) -> None:
        """Give every rank the rows of rank 0, which may have loaded them. Collective: every rank."""
        if self._is_alone:
            return
        held = self._held()
        dist.broadcast(held, group_src=0, group=self.group)
        self._put(held)
        self._before = held

    @torch.no_grad()
    def settle(self) -> None:
        """Learn from what all ranks have learned since `share`. Collective: every rank."""
        if self._is_alone or self._before is None:
            return
        before, after = self._before, self._held()
        rates = torch.stack([kernel.learning_rate_tensor for kernel in self.kernels]).view(-1, 1)
        eps = self.kernels[0].optimizer_args.eps
        gradients = (before - after)[:, :-1] * ((after[:, -1:].sqrt() + eps) / rates.to(after))
        # Where nobody learns, because the rate is zero, there is nothing to learn from.
        gradients.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        dist.all_reduce(gradients, group=self.group)
        state = before[:, -1:] + gradients.square().mean(dim=1, keepdim=True)
        step = gradients * (rates.to(after) / (state.sqrt() + eps))
        self._put(torch.cat([before[:, :-1] - step, state], dim=1))
        self._before = None

    def _held(self) -> torch.Tensor:
        """Rows with the optimizer's number of each, float32 [tables, D + 1]."""
        return torch.stack([torch.cat([share.weights[-1], share.state[-1:]]) for share in self.shares])

    def _put(self, held: torch.Tensor) -> None:
        for share, row in zip(self.shares, held, strict=True):
            share.weights[-1].copy_(row[:-1])
            share.state[-1].copy_(row[-1])
