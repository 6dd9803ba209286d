"""What a manifest says of a dynamic table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DynamicRecord:
    """A dynamic table as it was when its checkpoint was written.

    capacity: places on all ranks, in buckets of bucket_width; has_texts: whether its ids are those of texts,
    which lie beside the rows; now: its clock, in `unit`, "steps" or "seconds"; live: rows on all ranks;
    counts: what became of ids since the beginning of the training, by the names of
    `sharding.dynamic.contents.Counts`. The rest is as in `sharding.dynamic.spec.DynamicSpec`.
    """

    embedding_dim: int
    capacity: int
    bucket_width: int
    distribution: str
    admit: int
    evict: str
    ttl: int
    half_life: int
    unit: str
    has_texts: bool
    now: int
    live: int
    counts: dict[str, int] = field(default_factory=dict)
