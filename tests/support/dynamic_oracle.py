"""A dynamic table as a Python dictionary says it, and the shares of one that simulated ranks have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from recsuite.sharding.dynamic import (
    CPU,
    BucketPlacement,
    BucketPlaces,
    ChangeMarks,
    DynamicSpec,
    DynamicTable,
    LiveRows,
    ResizedShare,
    SeenIds,
    initial_rows,
)
from recsuite.sharding.storage import TableRows
from recsuite.sharding.table import IdCounters, RowSlots

BITS = 2**64 - 1


def plain_mix(value: int) -> int:
    """The finaliser of splitmix64, as its author wrote it."""
    value &= BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & BITS
    return value ^ (value >> 31)


@dataclass
class Row:
    """State of an id."""

    seen: int
    count: int
    weight: torch.Tensor
    state: float


@dataclass
class Oracle:
    """The whole table: id to row, and id to (sightings, seen) of those that wait."""

    spec: DynamicSpec
    now: int = 0
    scale: float = 1.0
    rows: dict[int, Row] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    admitted: int = 0
    evicted: int = 0
    expired: int = 0
    unplaced: int = 0
    unadmitted: int = 0

    def counts(self) -> IdCounters:
        """Numbers of rows, and of ids by what happened to them."""
        return IdCounters(
            len(self.rows),
            len(self.waiting),
            self.admitted,
            self.evicted,
            self.expired,
            self.unplaced,
            self.unadmitted,
        )

    def bucket(self, one: int) -> int:
        """Bucket of an id."""
        return ((plain_mix(one) >> 32) * (self.spec.capacity // 16)) >> 32

    def begin_step(self, now: int, scale: float) -> None:
        """Forget what has expired."""
        self.now, self.scale = now, scale
        if self.spec.ttl:
            before = len(self.rows)
            self.rows = {one: row for one, row in self.rows.items() if now - row.seen <= self.spec.ttl}
            self.expired += before - len(self.rows)
            self.waiting = {
                one: (n, seen) for one, (n, seen) in self.waiting.items() if now - seen <= self.spec.ttl
            }

    def aged(self, row: Row) -> int:
        """Its count, after halvings."""
        if not self.spec.half_life:
            return row.count
        return row.count >> max(0, self.now // self.spec.half_life - row.seen // self.spec.half_life)

    def score(self, one: int) -> tuple[int, ...]:
        """Order of evictions: the lowest first."""
        row = self.rows[one]
        return (self.aged(row), row.seen, one) if self.spec.evict == "lfu" else (row.seen, one)

    def find_or_insert(self, ids: list[int]) -> list[bool]:
        """True for each id with a row after this step."""
        pinned = {one for one in ids if one in self.rows}
        for one in pinned:
            row = self.rows[one]
            row.count, row.seen = self.aged(row) + 256, self.now
        # Those that wait come before those that were never seen.
        known = [one for one in ids if one not in pinned and one in self.waiting]
        new = [one for one in ids if one not in pinned and one not in self.waiting]
        if self.spec.admit == 1:
            for one in sorted(known + new):
                self._admit(one, pinned)
            return [one in self.rows for one in ids]
        kept = set(known)
        for one in known:
            count = min(self.waiting[one][0] + 1, self.spec.admit)
            self.waiting[one] = (count, self.now)
            if count < self.spec.admit:
                self.unadmitted += 1
            elif self._admit(one, pinned):
                del self.waiting[one]
        for one in new:
            self.unadmitted += 1
            self._let_wait(one, kept)
        return [one in self.rows for one in ids]

    def _admit(self, one: int, pinned: set[int]) -> bool:
        there = [other for other in self.rows if self.bucket(other) == self.bucket(one)]
        if len(there) == 16:
            free = [other for other in there if other not in pinned]
            if not free or self.spec.evict in ("none", "ttl"):
                self.unplaced += 1
                return False
            del self.rows[min(free, key=self.score)]
            self.evicted += 1
        weight = initial_rows(self.spec, torch.tensor([one]), self.scale)[0]
        self.rows[one] = Row(self.now, 256, weight, 0.0)
        pinned.add(one)
        self.admitted += 1
        return True

    def _let_wait(self, one: int, kept: set[int]) -> None:
        there = [other for other in self.waiting if self.bucket(other) == self.bucket(one)]
        if len(there) == 16:
            free = [other for other in there if other not in kept]
            if not free:
                return
            del self.waiting[min(free, key=lambda other: (*self.waiting[other], -other))]
        self.waiting[one] = (1, self.now)
        kept.add(one)

    def learn(self, ids: list[int], step: int) -> None:
        """Update the rows of a step, as a training might do it."""
        for one in ids:
            if one in self.rows:
                row = self.rows[one]
                row.weight, row.state = row.weight * 0.5 + step, row.state + step

    def live(self) -> LiveRows:
        """All that is there."""
        rows = sorted(self.rows.items())
        waiting = sorted(self.waiting.items())
        dim = self.spec.embedding_dim
        return LiveRows(
            torch.tensor([one for one, _ in rows], dtype=torch.int64),
            torch.stack([row.weight for _, row in rows]) if rows else torch.empty(0, dim),
            torch.tensor([row.state for _, row in rows]),
            torch.tensor([row.seen for _, row in rows], dtype=torch.int64),
            torch.tensor([row.count for _, row in rows], dtype=torch.int32),
            SeenIds(
                torch.tensor([one for one, _ in waiting], dtype=torch.int64),
                torch.tensor([count for _, (count, _) in waiting], dtype=torch.int32),
                torch.tensor([seen for _, (_, seen) in waiting], dtype=torch.int64),
            ),
        )


class Shares:
    """The shares of a table that so many ranks have, in one process."""

    def __init__(self, spec: DynamicSpec, world_size: int) -> None:
        self.placement = BucketPlacement(spec.distribution, spec.capacity // 16, world_size)
        places = BucketPlacement(spec.distribution, spec.max_capacity // 16, world_size).places_per_rank
        self.ranks = [
            DynamicTable(
                spec,
                rank,
                world_size,
                # What a place held before must not matter.
                TableRows(
                    torch.full((places + 1, spec.embedding_dim), float("nan")),
                    {"momentum1": torch.full((places + 1,), float("nan"))},
                ),
            )
            for rank in range(world_size)
        ]

    def counts(self) -> IdCounters:
        """Of all ranks together."""
        return IdCounters(
            *map(sum, zip(*(dataclasses.astuple(rank.counts()) for rank in self.ranks), strict=True))
        )

    def owners(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank of each id."""
        return self.placement.owner_of(ids)

    def begin_step(self, now: int, scale: float) -> None:
        """On all ranks."""
        for rank in self.ranks:
            rank.begin_step(now, now, scale)

    def find_or_insert(self, ids: torch.Tensor, step: int) -> list[bool]:
        """True for each id with a row; these rows are updated."""
        owners, found = self.owners(ids), torch.empty(len(ids), dtype=torch.bool)
        for number, rank in enumerate(self.ranks):
            rows = rank.find_or_insert(ids[owners == number])
            found[owners == number] = rows >= 0
            rows = rows[rows >= 0]
            assert len(rows.unique()) == len(rows)
            rank.weights[rows] = rank.weights[rows] * 0.5 + step
            rank.state[rows] += step
        return found.tolist()

    def find(self, ids: torch.Tensor) -> list[bool]:
        """True for each id with a row."""
        owners, found = self.owners(ids), torch.empty(len(ids), dtype=torch.bool)
        for number, rank in enumerate(self.ranks):
            found[owners == number] = rank.find(ids[owners == number]) >= 0
        return found.tolist()

    def live(self) -> LiveRows:
        """Of all ranks, ascending."""
        return joined([rank.live() for rank in self.ranks])

    def changes(self) -> list[RowSlots]:
        """Of each rank."""
        return [rank.export(changed=True) for rank in self.ranks]

    def clear_changes(self) -> None:
        """On all ranks."""
        for rank in self.ranks:
            rank.clear_changes()

    def put(self, live: LiveRows) -> int:
        """Each rank gets what is its own."""
        owners, waiting = self.owners(live.ids), self.owners(live.waiting.ids)
        return sum(
            rank.put(
                dataclasses.replace(rows_of(live, owners == number), waiting=live.waiting[waiting == number])
            )
            for number, rank in enumerate(self.ranks)
        )

    def apply(self, changes: list[RowSlots]) -> None:
        """Load a delta."""
        gone, waiting_gone = (torch.cat([one[slot] for one in changes]) for slot in ("gone", "waiting.gone"))
        for number, rank in enumerate(self.ranks):
            remove(rank, rank.places, gone[self.owners(gone) == number])
            remove(rank, rank.waiting, waiting_gone[self.owners(waiting_gone) == number])
        assert self.put(joined([LiveRows.of_slots(one, CPU) for one in changes])) == 0

    def resize(self, capacity: int) -> None:
        """To another capacity: what moves goes to the rank that has it then."""
        moving = [rank.resized(capacity) for rank in self.ranks]
        self.placement = self.ranks[0].placement
        for number, rank in enumerate(self.ranks):
            for one in moving:
                assert rank.settle(self._part(one, number)) == 0

    def _part(self, moving: ResizedShare, number: int) -> ResizedShare:
        owners, waiting = self.owners(moving.live.ids), self.owners(moving.live.waiting.ids)
        live = dataclasses.replace(
            rows_of(moving.live, owners == number), waiting=moving.live.waiting[waiting == number]
        )
        return ResizedShare(live, self._mine(moving.marks, number), self._mine(moving.waiting_marks, number))

    def _mine(self, marks: ChangeMarks, number: int) -> ChangeMarks:
        return ChangeMarks(
            *(ids[self.owners(ids) == number] for ids in (marks.touched, marks.fresh, marks.gone))
        )


def joined(parts: list[LiveRows]) -> LiveRows:
    """One after the other, and then by ids."""
    ids, weight, state, seen, count, *those = (
        torch.cat(several) for several in zip(*map(tensors, parts), strict=True)
    )
    waiting = SeenIds(*those)
    live = LiveRows(ids, weight, state, seen, count, waiting[waiting.ids.argsort()])
    return rows_of(live, ids.argsort())


def rows_of(live: LiveRows, which: torch.Tensor) -> LiveRows:
    """The rows selected by an index or a mask, and all waiting ids."""
    ids, weight, state, seen, count = (
        held[which] for held in (live.ids, live.weight, live.state, live.seen, live.count)
    )
    return LiveRows(ids, weight, state, seen, count, live.waiting)


def remove(rank: DynamicTable, of: BucketPlaces, ids: torch.Tensor) -> None:
    """Remove ids from the rows of a rank, or from its waiting ids; absent ids are skipped."""
    if of.taken:
        places = of.match(rank._home(ids), ids)
        of.empty(places[places >= 0])


def tensors(live: LiveRows) -> list[torch.Tensor]:
    """All that it holds, for comparisons."""
    waiting = live.waiting
    return [
        live.ids,
        live.weight,
        live.state,
        live.seen,
        live.count,
        waiting.ids,
        waiting.count,
        waiting.seen,
    ]


def same(one: LiveRows, other: LiveRows) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))
