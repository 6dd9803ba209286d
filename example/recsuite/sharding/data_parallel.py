"""The dense part on every rank: equal weights, and gradients averaged over all ranks.

torch's DistributedDataParallel rebuilds its buckets after the first backward, in the order of the gradients.
The rounding of an all-reduce over three ranks depends on the position in a bucket. So a resumed training
would differ in the last bits from one that was never interrupted. Here the order is that of the parameters,
from the first step on.

With tables on the CPU and one bucket the sum is an `Exchange`'s: in the order of the ranks, through shared
memory or through gloo. So ranks on several machines learn what as many ranks on one machine learn, to the
last bit. In all other cases every rank uses torch's all-reduce, wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsuite.sharding.cpu_tables import CpuTables
from recsuite.sharding.exchange import Wait, add_up_by_torch

# A bucket is sent while the backward continues; the same size as in DistributedDataParallel.
BYTES_OF_A_BUCKET = 25 * 2**20


class FixedBuckets(DataParallelWrapper):
    """Wrapper for the part of TorchRec's DistributedModelParallel that is not sharded."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Copy the weights of rank 0, and average gradients from now on. Collective: every rank."""
        model = dmp.module.to(device)
        # All but the tables, which are updated in the backward: each of their rows is on one rank only.
        dense = [value for _, value in in_backward_optimizer_filter(dmp.named_parameters())]
        if env.world_size == 1:
            return
        # As in DistributedDataParallel: a difference between initial weights would stay.
        with torch.no_grad():
            for value in (*dense, *model.buffers()):
                dist.broadcast(value.data, 0, env.process_group)
        buckets = buckets_of(dense, BYTES_OF_A_BUCKET)
        GradientMean(buckets, env.world_size, _sum_of(model, len(buckets), env.process_group)).attach()


# Takes numbers, float32 [n], and returns a function that waits for their sum over the ranks. Collective.
AddUp = Callable[[torch.Tensor], Wait]


def _sum_of(model: nn.Module, num_buckets: int, group: Any) -> AddUp:
    """Return the sum of the CPU tables' exchange, in shared memory within one machine; otherwise torch's."""
    exchanges = [module.exchange for module in model.modules() if isinstance(module, CpuTables)]
    # A channel has one slot for each step. A second message could overwrite a slot that others still read.
    if exchanges and num_buckets == 1:
        return exchanges[0].add_up
    return lambda numbers: add_up_by_torch(numbers, group)


class GradientMean:
    """Average the gradients of a backward over all ranks, in buckets that never change."""

    def __init__(self, buckets: list[list[nn.Parameter]], world_size: int, add_up: AddUp) -> None:
        self.buckets = buckets
        self.world_size, self.add_up = world_size, add_up
        # State of the current backward: the gradients so far, and the buckets being sent.
        self.arrived: set[torch.Tensor] = set()
        self.sent: list[Wait] = []

    def attach(self) -> None:
        """Register for every backward from now on."""
        for bucket in self.buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self._after_gradient)

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        if not self.arrived:
            # A callback that is queued during a backward runs at its end.
            Variable._execution_engine.queue_callback(self._finish)
        self.arrived.add(parameter)
        # In order, which is the same on all ranks: collectives are matched by their order.
        while len(self.sent) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.sent)]):
            self._send()

    def _send(self) -> None:
        """Send the next bucket; parameters without a gradient count as zeros."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.buckets[len(self.sent)]
        ]
        # One message for many small tensors. Divided before the sum, as in DistributedDataParallel.
        flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.world_size)
        # No wait: the sum runs while the backward computes the gradients of earlier layers.
        self.sent.append(self.add_up(flat))

    def _finish(self) -> None:
        """Send the buckets that still wait, since some parameters have no gradient, and copy the means."""
        while len(self.sent) < len(self.buckets):
            self._send()
        for bucket, wait in zip(self.buckets, self.sent, strict=True):
            means = wait().split([parameter.numel() for parameter in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                # A parameter without a gradient is not updated, as on a single rank.
                if parameter.grad is not None:
                    parameter.grad = mean.view_as(parameter)
        self.arrived, self.sent = set(), []


def buckets_of(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters, the last ones first as in a backward, into parts of at least `most_bytes` each."""
    buckets: list[list[nn.Parameter]] = []
    bytes_left = 0
    for parameter in reversed(parameters):
        if bytes_left <= 0:
            buckets.append([])
            bytes_left = most_bytes
        buckets[-1].append(parameter)
        bytes_left -= parameter.numel() * parameter.element_size()
    return buckets
