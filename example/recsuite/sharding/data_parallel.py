"""The dense part on every rank: the same weights, and gradients that are the mean over all ranks.

torch's DistributedDataParallel lays its buckets out anew after its first backward, in the order in which the
gradients came. How a sum over three ranks is rounded depends on where in a bucket a number lies, so a
training that is resumed would continue with other last bits than one that was never interrupted. Here the
order is that of the parameters, from the first step on.
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
from recsuite.sharding.exchange import Exchange

# A bucket goes out while the backward continues; as many bytes as DistributedDataParallel takes.
BYTES_OF_A_BUCKET = 25 * 2**20


class FixedBuckets(DataParallelWrapper):
    """What TorchRec's DistributedModelParallel is to do with all that is not sharded."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Begin with the weights of rank 0, and average gradients from now on. Collective: every rank."""
        model = dmp.module.to(device)
        # All but the tables, whose optimizer runs in the backward: each of their rows is on one rank only.
        dense = [value for _, value in in_backward_optimizer_filter(dmp.named_parameters())]
        if env.world_size == 1:
            return
        # As DistributedDataParallel does: a rank that began with other weights would keep the difference for
        # good.
        with torch.no_grad():
            for value in (*dense, *model.buffers()):
                dist.broadcast(value.data, 0, env.process_group)
        buckets = buckets_of(dense, BYTES_OF_A_BUCKET)
        GradientMean(buckets, _exchange_of(model, len(buckets), env.process_group)).attach()


def _exchange_of(model: nn.Module, num_buckets: int, group: Any) -> Exchange:
    """That of the tables on the CPU, which ranks of one machine make in memory; elsewhere torch's own."""
    found = [module.exchange for module in model.modules() if isinstance(module, CpuTables)]
    # A step has one slot there. A second message would take that of a step which others may still read.
    return found[0] if found and num_buckets == 1 else Exchange(group)


class GradientMean:
    """Replaces the gradients of a backward by their means over all ranks, in buckets that never change."""

    def __init__(self, buckets: list[list[nn.Parameter]], exchange: Exchange) -> None:
        self.exchange = exchange
        self.buckets = buckets
        # Of the backward that runs: which gradients are there, and the buckets that are on their way.
        self.arrived: set[torch.Tensor] = set()
        self.sent: list[Callable[[], torch.Tensor]] = []

    def attach(self) -> None:
        """Take part in every backward from now on."""
        for bucket in self.buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self._after_gradient)

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        if not self.arrived:
            # A callback from within a backward is called at its end.
            Variable._execution_engine.queue_callback(self._finish)
        self.arrived.add(parameter)
        # In their order, which is the same on all ranks: a collective has no other name.
        while len(self.sent) < len(self.buckets) and self.arrived.issuperset(self.buckets[len(self.sent)]):
            self._send()

    def _send(self) -> None:
        """Send the next bucket; parameters without a gradient count as zeros."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.buckets[len(self.sent)]
        ]
        # One message for many small tensors, each of which would cost a message of its own. Divided before
        # the sum, as in DistributedDataParallel.
        flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.exchange.world_size)
        # Not waited for: it travels while the backward computes the gradients of the layers before.
        self.sent.append(self.exchange.add_up(flat))

    def _finish(self) -> None:
        """Send what waits for a gradient that this model has none of, and take the means."""
        while len(self.sent) < len(self.buckets):
            self._send()
        for bucket, wait in zip(self.buckets, self.sent, strict=True):
            means = wait().split([parameter.numel() for parameter in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                # Without one, as on a single rank, it is not to learn.
                if parameter.grad is not None:
                    parameter.grad = mean.view_as(parameter)
        self.arrived, self.sent = set(), []


def buckets_of(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters, the last ones first as a backward comes to them, in parts of so many bytes or more."""
    buckets: list[list[nn.Parameter]] = []
    bytes_left = 0
    for parameter in reversed(parameters):
        if bytes_left <= 0:
            buckets.append([])
            bytes_left = most_bytes
        buckets[-1].append(parameter)
        bytes_left -= parameter.numel() * parameter.element_size()
    return buckets
