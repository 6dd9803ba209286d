"""Values that ranks send each other while each of them reads its own partitions.

What is sent has the size of the distinct values of a column, or of the test, not of the events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsuite.datasets.source import PREPARATION_DEADLINE
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext, all_gather_object


class PartitionExchange:
    """Collectives of the ranks that read partitions. A mistake of one is raised on all, see `together`."""

    def __init__(self, context: RuntimeContext) -> None:
        self.rank, self.size = context.rank, context.world_size
        # Number of users of all ranks, once it is known.
        self.num_users = 0
        self._is_over = False
        # A separate group, because data may take longer than a collective of the training.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PREPARATION_DEADLINE))

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        return self._attempted(lambda: value)

    def _attempted(self, action: Callable[[], Any]) -> list[Any]:
        try:
            return all_gather_object(action, self.group)
        except UserError:
            self._is_over = True
            raise
        except RuntimeError as error:
            # gloo has no exception type for a timeout.
            if "timed out" not in str(error).lower():
                raise
            # The others do not answer, so they are not told.
            self._is_over = True
            raise UserError(
                f"Rank {self.rank} waited {PREPARATION_DEADLINE:.0f} s for the other ranks to read their "
                "partitions; start again: what they have read stays."
            ) from None

    def fail(self, error: UserError) -> None:
        """Raise a mistake of this rank on all ranks, unless it was one that all ranks have."""

        def refuse() -> None:
            raise UserError(str(error))

        if not self._is_over:
            self._attempted(refuse)

    def first(self, value: Any) -> Any:
        """Return the value of rank 0, on all ranks."""
        self.gathered(None)
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def total(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum over ranks of numbers, [n], as many on each rank."""
        self.gathered(None)
        sums = torch.from_numpy(np.array(numbers))
        dist.all_reduce(sums, group=self.group)
        return sums.numpy()

    def joined(self, values: np.ndarray) -> np.ndarray:
        """Return the values of all ranks, rank after rank, of those here, [n, ...]."""
        self.gathered(None)
        return joined(values, self.group)

    def swapped(self, numbers: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Send each row of numbers, int64 [n, m], to its owner, int [n]; return the rows of this rank."""
        counts = np.bincount(owners, minlength=self.size)
        return self._sent(numbers[np.argsort(owners, kind="stable")], counts)[0]

    def summed(self, ids: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum over ranks of the number of each id here, and of each id that this rank owns.

        ids: distinct, int64 [n]; numbers: int64 [n]. An id is owned by one rank, which alone adds it up.
        """
        owners = self.owners_of(ids)
        order, counts = np.argsort(owners, kind="stable"), np.bincount(owners, minlength=self.size)
        rows, sizes = self._sent(np.stack([ids, numbers], axis=1)[order], counts)
        distinct, places = np.unique(rows[:, 0], return_inverse=True)
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, places, rows[:, 1])
        totals = np.empty_like(numbers)
        totals[order] = self._sent(sums[places][:, None], sizes)[0][:, 0]
        return totals, sums

    def owners_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the rank that owns each id, int64 [n]."""
        return (ids.view(np.uint64) % np.uint64(self.size)).astype(np.int64)

    def _sent(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Send so many rows, int64 [n, m], to each rank; return those for this rank, and how many of each."""
        sizes = np.array(self.gathered(counts))[:, self.rank]
        mine = torch.from_numpy(np.ascontiguousarray(rows))
        others = torch.empty((int(sizes.sum()), rows.shape[1]), dtype=torch.int64)
        dist.all_to_all_single(others, mine, sizes.tolist(), counts.tolist(), group=self.group)
        return others.numpy(), sizes


def joined(values: np.ndarray, group: Any = None) -> np.ndarray:
    """Return the values of all ranks, rank after rank, of those here, [n, ...]. Collective: every rank."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(values)], device=device), group=group)
    ends = np.cumsum([int(size) for size in sizes])
    everyones = np.empty((int(ends[-1]), *values.shape[1:]), values.dtype)
    rank = dist.get_rank(group)
    everyones[ends[rank] - len(values) : ends[rank]] = values
    # Bytes, because a tensor has fewer types.
    parts = torch.from_numpy(everyones.reshape(-1).view(np.uint8))
    width = parts.numel() // max(1, len(everyones))
    for source, (end, size) in enumerate(zip(ends.tolist(), sizes, strict=True)):
        if number := int(size):
            part = parts[(end - number) * width : end * width]
            sent = part.to(device)
            dist.broadcast(sent, src=source, group=group)
            part.copy_(sent)
    return everyones


@contextlib.contextmanager
def together(context: RuntimeContext) -> Iterator[PartitionExchange]:
    """Yield a `PartitionExchange`; a UserError of any rank in the context is raised on all. Collective."""
    exchange = PartitionExchange(context)
    try:
        yield exchange
        exchange.gathered(None)
    except UserError as error:
        exchange.fail(error)
        raise
    finally:
        dist.destroy_process_group(exchange.group)
