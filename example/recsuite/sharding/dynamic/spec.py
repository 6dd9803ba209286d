"""What a dynamic table is told: how many places it has, who gets one, and who has to leave."""

from __future__ import annotations

from dataclasses import dataclass

from recsuite.ids import UNKNOWN_ID

# Ids whose hash leads to the same bucket compete for its places, and for no others.
BUCKET_WIDTH = 16
# Of a raw id this marks a place that nobody has. `recsuite.ids` refuses it as an id of the data.
EMPTY = UNKNOWN_ID
# Instead of the row of an id that has none.
NO_ROW = -1


@dataclass(frozen=True)
class DynamicSpec:
    """One dynamic table.

    capacity, max_capacity: places on all ranks, now and after all growth, multiples of BUCKET_WIDTH; admit:
    sightings before an id gets a row; evict: "lru", "lfu", "ttl" or "none"; ttl: how long a row stays that is
    not seen, and half_life: after how long half of a count is left, both in `unit` ("steps" or "seconds"), 0
    for never; distribution: "continuous", "roundrobin" or "hash"; grow: the share of the places that may be
    taken before the capacity doubles, 0 for never.
    """

    name: str
    embedding_dim: int
    capacity: int
    max_capacity: int
    seed: int = 0
    init_std: float = 0.025
    admit: int = 1
    evict: str = "lru"
    ttl: int = 0
    half_life: int = 0
    unit: str = "steps"
    distribution: str = "continuous"
    grow: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether nobody is let go to make room."""
        return self.evict in ("none", "ttl")
