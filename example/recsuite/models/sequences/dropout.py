"""Dropout that is a function of what is dropped, and not of a generator.

So a training that is resumed, or that is on another number of ranks, drops the same numbers.
"""

from __future__ import annotations

import torch
from torch import nn

# Odd constants with well spread bits, as int32: 2^32 over the golden ratio, and one of xxHash's primes.
MULTIPLIERS = (-1640531535, -2048144789)


class Dropout(nn.Module):
    """Sets a share of numbers to zero, and makes the others larger by what is lost. layer: tells one from
    another.
    """

    def __init__(self, share: float, layer: int) -> None:
        super().__init__()
        self.share, self.layer = share, layer

    def forward(self, items: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """float32 [V, D]; draws: a number drawn for each item, int32 [V]."""
        if not self.training or self.share == 0:
            return items
        return items * (kept(draws, items.size(1), self.layer, self.share) / (1 - self.share))


def kept(draws: torch.Tensor, width: int, layer: int, share: float) -> torch.Tensor:
    """Which of some numbers stay, bool [V, width], by draws, int32 [V], and the number of a layer."""
    column = torch.arange(layer * width, (layer + 1) * width, dtype=torch.int32, device=draws.device)
    hashed = draws.unsqueeze(1) + column * MULTIPLIERS[0]
    # Products wrap around, as is wanted.
    hashed ^= hashed >> 15
    hashed *= MULTIPLIERS[1]
    hashed ^= hashed >> 13
    hashed *= MULTIPLIERS[0]
    hashed ^= hashed >> 16
    # A shift of a negative number brings in ones, so the last of these leaves none negative.
    return hashed >= int(share * 2**31)
