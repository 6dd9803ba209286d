"""Collectives of Python values, in which a mistake of the user that one rank finds is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from recsuite.errors import UserError

if TYPE_CHECKING:
    from recsuite.runtime.process import RuntimeContext


def raise_on_all(action: Callable[[], Any], group: Any = None) -> Any:
    """What an action gives on this rank; a user's mistake that any rank finds is all ranks'. Collective.

    group: the ranks that take part; all of them where it is None.

    Raises:
        UserError: the one of the lowest rank that found one.
    """
    # What the action gives stays here: only its sentence travels, so the result need not be picklable.
    found: list[Any] = []
    all_gather_object(lambda: found.append(action()), group)
    return found[0]


def all_gather_object(action: Callable[[], Any], group: Any = None) -> list[Any]:
    """What an action gives on each rank, rank after rank; otherwise as `raise_on_all`. Collective."""
    import torch.distributed as dist

    # An exception on one rank alone would leave the others waiting, so it travels as a sentence. Any other
    # exception is a fault of the program: it ends this rank with its traceback, and torchrun the others.
    result, sentence = None, None
    try:
        result = action()
    except UserError as error:
        sentence = str(error)
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, (result, sentence), group=group)
    # All ranks look at them in the same order, so all raise the same sentence.
    for _, found in everyones:
        if found is not None:
            raise UserError(found)
    return [found for found, _ in everyones]


def broadcast_from_rank0(action: Callable[[], Any]) -> Any:
    """What an action gives on rank 0, for all ranks, where each might find something else. Collective.

    Raises:
        UserError: on every rank, the one that the action raised.
    """
    import torch.distributed as dist

    return all_gather_object(lambda: action() if dist.get_rank() == 0 else None)[0]


def once_per_node(context: RuntimeContext, action: Callable[[], Any], deadline: float) -> list[Any]:
    """Run an action on local rank 0 of every machine while the others wait; returns, for each rank, what it
    gave on the rank's machine. Collective: every rank.

    Raises:
        UserError: on every rank, when the action raised one anywhere; and when it takes longer than the
            deadline, in seconds.
    """
    import torch.distributed as dist

    # A group of its own, because data may take longer than any collective of the training may.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
    try:
        found = all_gather_object(
            lambda: (context.local_rank, None if context.local_rank else action()), group
        )
    except RuntimeError as error:
        # gloo has no exception of its own for it.
        if "timed out" not in str(error).lower():
            raise
        raise UserError(
            f"Rank {context.rank} waited {deadline:.0f} s for the first rank of each machine to prepare the "
            "data; prepare them on each machine with a single process first."
        ) from None
    dist.destroy_process_group(group)
    # Launchers number the ranks of a machine one after the other.
    return [found[rank - local_rank][1] for rank, (local_rank, _) in enumerate(found)]
