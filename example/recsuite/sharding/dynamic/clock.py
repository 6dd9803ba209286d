"""What time it is for a table: who has expired, what is left of a count, and whose place goes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recsuite.sharding.dynamic.spec import DynamicSpec

LEAST, MOST = -(2**63), 2**63 - 1
# When a place was last seen: never, which makes it the first to be given away; and by the step that chooses
# now, which cannot give it away.
NEVER, PINNED = LEAST, MOST
# One sighting: counts are whole numbers that still have something left after they were halved.
SIGHTING = 2**8
MOST_COUNTED = 2**31 - 1 - SIGHTING


class Clock:
    """The time of a table, in the unit of its spec; `now` moves it."""

    def __init__(self, spec: DynamicSpec) -> None:
        self.now = 0
        self.ttl, self.half_life, self.counts = spec.ttl, spec.half_life, spec.evict == "lfu"

    @property
    def horizon(self) -> int:
        """What was last seen before this time is not there: it has expired, or nobody has its place."""
        return self.now - self.ttl if self.ttl else NEVER + 1

    def counted(self, count: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Counts with one sighting more, int32."""
        return self.aged(count, seen).clamp(max=MOST_COUNTED).add_(SIGHTING)

    def aged(self, count: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Counts, int32, as they are now that they were halved at each multiple of the half-life since."""
        if not self.half_life:
            return count
        passed = self.now // self.half_life - torch.div(seen, self.half_life, rounding_mode="floor")
        return count >> passed.clamp_(0, 31).int()

    def order(self) -> Order:
        """Whose row goes first."""
        return Order(self.aged if self.counts else None)


@dataclass(frozen=True)
class Order:
    """Who goes first: by the count first, if it has a say, then by when they were seen, and then by id.

    count: what (count, seen) says, int32; larger_first: of two ids.
    """

    count: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    larger_first: bool = False

    def first_key(self, seen: torch.Tensor, count: torch.Tensor, horizon: int) -> torch.Tensor:
        """The key that matters most, int64: lowest where nobody is or has expired, highest where pinned."""
        if self.count is None:
            return seen
        key = self.count(count, seen).long()
        # Empty places before those of ids that have expired: which of the two is taken is counted.
        key.masked_fill_(seen < horizon, NEVER + 1).masked_fill_(seen == NEVER, NEVER)
        return key.masked_fill_(seen == PINNED, PINNED)

    def keys(
        self, ids: torch.Tensor, seen: torch.Tensor, count: torch.Tensor, horizon: int
    ) -> list[torch.Tensor]:
        """All keys, the one that matters most first."""
        others = [~ids if self.larger_first else ids]
        if self.count is not None:
            others.insert(0, seen)
        return [self.first_key(seen, count, horizon), *others]


def order_of_waiting() -> Order:
    """Who has to make room for another one that waits."""
    # Of equals the larger id gives way: a step lets ids wait in ascending order, and the first come to wait.
    return Order(lambda count, seen: count, larger_first=True)
