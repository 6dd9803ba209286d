"""Which items of histories look at which, where the histories lie one behind the other without padding.

V items of all histories are cut into blocks of W; an item looks at those of its own block and of the one
before it that are of the same history, not after it, and fewer than W places away. So the shapes depend on V
alone, and no history is padded. Shapes: V items, n blocks, W queries and 2 W keys of a block, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recsuite.config.sections import NUM_GAPS
from recsuite.models.layers import repeated

# There are few biases, and each is for many pairs: they learn so many times faster than other weights.
BIAS_RATE = 10.0
# A score that the softmax makes nothing of, and that is a number where all are such.
NO_SCORE = -1e9


class Window:
    """What pairs of items know of each other.

    is_seen: whether a query looks at a key, bool [n, W, 2 W]; places: how many items the key is away, int64
    [W, 2 W]; gaps: the bucket of the seconds from the key to the event that follows the query, see
    `recsuite.gaps`, int64 [n, W, 2 W].
    """

    def __init__(self, lengths: torch.Tensor, ages: torch.Tensor, width: int) -> None:
        """lengths: of the histories, [B]; ages: of their items, before the last event that reads each, int32
        [V]; width: W.
        """
        self.width, self.number = width, len(ages)
        history = repeated(torch.arange(len(lengths), device=ages.device), lengths, len(ages))
        # The event that follows an item is the next item of its history, or the one that reads all of it.
        following = nn.functional.pad(ages[1:], (0, 1))
        is_last = nn.functional.pad(history[1:], (0, 1), value=-1) != history
        following = following.masked_fill(is_last, 0)
        query = torch.arange(width, device=ages.device).unsqueeze(1)
        self.places = query + width - torch.arange(2 * width, device=ages.device)
        of_query = self.queries(history, -1).unsqueeze(2)
        is_near = (self.places >= 0) & (self.places < width)
        self.is_seen = (of_query == self.keys(history, -2).unsqueeze(1)) & is_near
        self.places = self.places.clamp(0, width - 1)
        seconds = self.keys(ages, 0).unsqueeze(1) - self.queries(following, 0).unsqueeze(2)
        # The exponent of 1 + s in binary, as in `recsuite.gaps`: with 32 bits some would be rounded up to the
        # next power of two.
        exponents = torch.frexp(1.0 + seconds.clamp(min=0).double()).exponent - 1
        self.gaps = exponents.clamp(max=NUM_GAPS - 1).long()

    def queries(self, items: torch.Tensor, filler: float = 0.0) -> torch.Tensor:
        """Of items [V, ...] the blocks, [n, W, ...]; the filler stands behind the last."""
        # One block at least, so that everything that is learned is used where all histories are empty.
        padding = -len(items) % self.width if len(items) else self.width
        padded = nn.functional.pad(items, (*[0] * 2 * (items.dim() - 1), 0, padding), value=filler)
        return padded.view(-1, self.width, *items.shape[1:])

    def keys(self, items: torch.Tensor, filler: float = 0.0) -> torch.Tensor:
        """Of items [V, ...] each block behind the one before it, [n, 2 W, ...]."""
        blocks = self.queries(items, filler)
        before = torch.cat([torch.full_like(blocks[:1], filler), blocks[:-1]])
        return torch.cat([before, blocks], dim=1)

    def items(self, blocks: torch.Tensor) -> torch.Tensor:
        """Of blocks [n, H, W, ...] the items, [V, H * ...]."""
        return blocks.transpose(1, 2).reshape(-1, blocks.size(1) * blocks.size(3))[: self.number]


class PairBias(nn.Module):
    """What is learned of a pair by how many places and how long it is apart: float32 [n, H, W, 2 W].

    slopes: by how much of the logarithm of the place less a far item counts to begin with, of each head.
    """

    def __init__(self, slopes: torch.Tensor, width: int) -> None:
        super().__init__()
        near = torch.arange(1, width + 1, dtype=torch.float32).log()
        self.places = nn.Parameter(-slopes.unsqueeze(1) * near / BIAS_RATE)
        self.gaps = nn.Parameter(torch.zeros(len(slopes), NUM_GAPS))

    def forward(self, window: Window) -> torch.Tensor:
        """See above."""
        return BIAS_RATE * (taken(self.places, window.places) + taken(self.gaps, window.gaps))


def taken(tables: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of each of H tables, [H, m], the entries of an index, [..., W, 2 W]: [..., H, W, 2 W]."""
    return torch.stack([_Taken.apply(table, index) for table in tables], dim=index.dim() - 2)


class _Taken(torch.autograd.Function):
    """The entries of a table of one dimension; the backward is one sum by an index."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.number = len(table)
        return table.index_select(0, index.flatten()).view(index.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        of_table = gradient.new_zeros(ctx.number).index_add_(0, index.flatten(), gradient.flatten())
        return of_table, None
