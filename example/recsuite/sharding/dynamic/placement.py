"""Where an id lives: the bucket that its hash names, and the rank that has this bucket.

The bucket depends on the id and the capacity alone, so which ids compete for a place, and with that all of
training, is the same on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from recsuite.sharding.dynamic.spec import BUCKET_WIDTH, DynamicSpec

# The finaliser of splitmix64, by Sebastiano Vigna; as signed numbers, because torch shifts no others.
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64
# Any odd number will do: it parts the second mix, of buckets, from the first, of ids.
SECOND_MIX = 0x632BE59BD9B4E019
CPU = torch.device("cpu")


def mix64(values: torch.Tensor) -> torch.Tensor:
    """A number whose every bit depends on every bit of the value, int64; a bijection."""
    mixed = _without_high_bits(values, 30).mul_(FIRST_FACTOR)
    mixed = _without_high_bits(mixed, 27).mul_(SECOND_FACTOR)
    return _without_high_bits(mixed, 31)


def _without_high_bits(values: torch.Tensor, shift: int) -> torch.Tensor:
    # torch shifts the sign along; the mask takes it away.
    return (values >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(values)


def bucket_of(ids: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """The bucket of each id, int64, of fewer than 2^31 buckets."""
    # The high half of the hash as a fraction of all buckets, which is quicker than a division. Twice as many
    # buckets split bucket b into 2 b and 2 b + 1, so in growth a continuous range stays about where it is.
    return (mix64(ids) >> 32).bitwise_and_(0xFFFFFFFF).mul_(num_buckets).bitwise_right_shift_(32)


@dataclass(frozen=True)
class Placement:
    """Which rank has which of the buckets."""

    distribution: str
    num_buckets: int
    world_size: int

    def rank_of(self, buckets: torch.Tensor) -> torch.Tensor:
        """The rank that has each bucket, int64."""
        if self.world_size == 1:
            return torch.zeros_like(buckets)
        if self.distribution == "continuous":
            return buckets // self._per_rank
        if self.distribution == "roundrobin":
            return buckets % self.world_size
        # Of a bucket's number alone, so more buckets leave those that were there on their ranks.
        return mix64(buckets ^ SECOND_MIX).remainder_(self.world_size)

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank that has the bucket of each id, int64."""
        return self.rank_of(bucket_of(ids, self.num_buckets))

    def local_bucket(self, buckets: torch.Tensor) -> torch.Tensor:
        """The number of each bucket among those of its rank, int64."""
        if self.world_size == 1:
            return buckets
        if self.distribution == "continuous":
            return buckets % self._per_rank
        if self.distribution == "roundrobin":
            return buckets // self.world_size
        if buckets.device not in self._numbers:
            self._numbers[buckets.device] = self._numbers[CPU].to(buckets.device)
        return self._numbers[buckets.device].index_select(0, buckets)

    def buckets_on(self, rank: int) -> int:
        """How many buckets a rank has."""
        if self.distribution == "continuous":
            return max(0, min(self.num_buckets - rank * self._per_rank, self._per_rank))
        if self.distribution == "roundrobin":
            return len(range(rank, self.num_buckets, self.world_size))
        return int((self._owners == rank).sum())

    @property
    def places_per_rank(self) -> int:
        """Places of the rank with the most buckets."""
        return BUCKET_WIDTH * max(self.buckets_on(rank) for rank in range(self.world_size))

    @property
    def _per_rank(self) -> int:
        return -(-self.num_buckets // self.world_size)

    @cached_property
    def _owners(self) -> torch.Tensor:
        return self.rank_of(torch.arange(self.num_buckets))

    @cached_property
    def _numbers(self) -> dict[torch.device, torch.Tensor]:
        """The number of each bucket among those of its rank, int64, where it was asked for."""
        numbers = torch.empty(self.num_buckets, dtype=torch.int64)
        for rank in range(self.world_size):
            mine = self._owners == rank
            numbers[mine] = torch.arange(int(mine.sum()))
        return {CPU: numbers}


def rows_per_rank(spec: DynamicSpec, world_size: int) -> int:
    """Rows that a table has on every rank: a place each at its largest capacity, and one for the unknown."""
    num_buckets = spec.max_capacity // BUCKET_WIDTH
    return Placement(spec.distribution, num_buckets, world_size).places_per_rank + 1
