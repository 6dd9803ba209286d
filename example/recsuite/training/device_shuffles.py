"""The shuffle of `datasets.batching` on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recsuite.datasets.batching import HALF, MULTIPLIERS, grid_of, keys_of

# Numbers of 32 bits are computed in 64, of which only these count.
LOW_BITS = 0xFFFFFFFF
# Keys of the rounds: of one shuffle, or int64 [steps, 1] of as many.
Keys = Sequence[int] | Sequence[torch.Tensor]


def shuffled(positions: torch.Tensor, number: int, *draws: int) -> torch.Tensor:
    """Return `datasets.batching.shuffled` of positions on a device, int64 [n]. Waits for the device."""
    keys = [int(key) for key in keys_of(*draws)]
    result = permuted(positions, number, keys)
    while len(outside := (result >= number).nonzero().view(-1)):
        result[outside] = permuted(result[outside], number, keys)
    return result


def permuted(positions: torch.Tensor, number: int, keys: Keys) -> torch.Tensor:
    """Do one pass through the network of a shuffle of `number`, with numbers of 32 bits in 64.

    A result may be `number` or more: it goes through the network again.
    """
    size, other_size = map(int, grid_of(number))
    changed = positions // other_size
    other = positions - changed * other_size
    for key in keys:
        hashed = ((other ^ key) * int(MULTIPLIERS[0])) & LOW_BITS
        hashed = ((hashed ^ (hashed >> 15)) * int(MULTIPLIERS[1])) & LOW_BITS
        changed = changed + ((hashed >> int(HALF)) * size >> int(HALF))
        changed = torch.where(changed >= size, changed - size, changed)
        changed, other, size, other_size = other, changed, other_size, size
    # The last round swapped the names: `other` is the row, and `changed` is the column.
    return other * int(grid_of(number)[1]) + changed
