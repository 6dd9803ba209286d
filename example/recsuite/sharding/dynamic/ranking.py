"""Order by several keys, of which the first matters most, in rows of few columns."""

from __future__ import annotations

import torch

from recsuite.sharding.dynamic.clock import MOST


def lowest(keys: list[torch.Tensor]) -> torch.Tensor:
    """The column of the lowest in each row of keys, int64 [n, w], that together are distinct; int64 [n]."""
    left = torch.ones_like(keys[0], dtype=torch.bool)
    for key in keys:
        key = torch.where(left, key, MOST)
        left &= key == key.gather(1, key.argmin(1, keepdim=True))
    return left.long().argmax(1)


def slots_in_order(keys: list[torch.Tensor]) -> torch.Tensor:
    """The columns of each row of keys, int64 [n, w], from the lowest to the highest; int64 [n, w]."""
    columns = torch.arange(keys[0].size(1), device=keys[0].device).expand_as(keys[0])
    # All with all: torch takes longer to sort many short rows.
    pairs = [(key.unsqueeze(1), key.unsqueeze(2)) for key in [*keys, columns]]
    before = is_lower([key for key, _ in pairs], [other for _, other in pairs])
    return torch.empty_like(keys[0]).scatter_(1, before.sum(2), columns)


def is_lower(keys: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    """Whether keys come before other ones."""
    lower = keys[-1] < others[-1]
    for key, other in zip(reversed(keys[:-1]), reversed(others[:-1]), strict=True):
        lower = (key < other) | ((key == other) & lower)
    return lower


def turns(home: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a list where each bucket's are neighbours: the buckets; of each its bucket's index, and its turn
    there.
    """
    buckets, inverse, counts = home.unique_consecutive(return_inverse=True, return_counts=True)
    firsts = counts.cumsum(0) - counts
    return buckets, inverse, torch.arange(len(home), device=home.device) - firsts[inverse]
