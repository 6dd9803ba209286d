"""Rows on their way between ranks, when a table has got another capacity."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from recsuite.sharding.dynamic.contents import LiveRows, Marks, Moving, Waiting
from recsuite.sharding.dynamic.placement import Placement

# What one rank has, one value for each of its ids -> what has come to it.
Send = Callable[[torch.Tensor], torch.Tensor]


def exchanged(moving: Moving, placement: Placement) -> Moving:
    """What belongs to this rank by a placement, of what all ranks bring. Collective: every rank."""
    if placement.world_size == 1:
        return moving

    def send(ids: torch.Tensor) -> Send:
        return _sender(placement.owner_of(ids), placement.world_size)

    live, waiting = moving.live, moving.live.waiting
    rows, waits = send(live.ids), send(waiting.ids)
    arrived = LiveRows(
        rows(live.ids),
        rows(live.weight),
        rows(live.state),
        rows(live.seen),
        rows(live.count),
        Waiting(waits(waiting.ids), waits(waiting.count), waits(waiting.seen)),
    )
    return Moving(arrived, _marks(moving.marks, send), _marks(moving.waiting_marks, send))


def _marks(marks: Marks, send: Callable[[torch.Tensor], Send]) -> Marks:
    return Marks(*(send(ids)(ids) for ids in (marks.touched, marks.fresh, marks.gone)))


def _sender(ranks: torch.Tensor, world_size: int) -> Send:
    """A function that sends each of n values, [n, ...], to its rank, and returns those that came."""
    order = ranks.argsort(stable=True)
    leaving = ranks.bincount(minlength=world_size)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    num_out, num_in = leaving.tolist(), arriving.tolist()

    def send(values: torch.Tensor) -> torch.Tensor:
        found = values.new_empty(sum(num_in), *values.shape[1:])
        dist.all_to_all_single(found, values[order].contiguous(), num_in, num_out)
        return found

    return send
