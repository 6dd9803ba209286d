"""The row that an id begins with: a function of seed, table and id, whoever admits it when."""

from __future__ import annotations

import functools
import hashlib
import math

import torch

from recsuite.sharding.dynamic.placement import mix64
from recsuite.sharding.dynamic.spec import DynamicSpec

# That of splitmix64: the golden ratio, as a signed number.
STEP = 0x9E3779B97F4A7C15 - 2**64
NUMBERS_PER_WORD = 4


def initial_rows(spec: DynamicSpec, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The first row of each id, float32 [n, D], uniform around zero with the deviation that the spec says.

    scale: what a row means is this times what the table holds; the rows are what it has to hold.
    """
    words = -(-spec.embedding_dim // NUMBERS_PER_WORD)
    keys = mix64(ids ^ _table_key(spec.seed, spec.name)).unsqueeze(1) + _steps(words, ids.device)
    # Sixteen bits a number. Whole numbers up to the one multiplication, so every device has the same bits.
    drawn = mix64(keys).view(torch.int16)[:, : spec.embedding_dim]
    step = spec.init_std * math.sqrt(12) / 2**16 / scale
    return drawn.float().add_(0.5).mul_(step)


# Asked for in nearly every step of a training.
@functools.lru_cache
def _steps(words: int, device: torch.device) -> torch.Tensor:
    """What parts the words of a row, int64 [words]."""
    # Wrapped by hand, since torch takes no number that needs more than 64 bits with the sign.
    steps = [((number + 1) * STEP + 2**63) % 2**64 - 2**63 for number in range(words)]
    return torch.tensor(steps, device=device)


@functools.lru_cache
def _table_key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/dynamic".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
