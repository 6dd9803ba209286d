"""One rank's share of a dynamic table: it finds the rows of ids, takes ids in, and lets the least wanted go.

In front of the rows lie buckets of places (`places.py`), each place with a row of its own. In a step the ids
that are there come first, and none of them can lose its place; then those that wait for admission, then new
ones, each in the order of their ids. So nothing depends on the number of ranks, which have each some of the
buckets. n: ids; P: places of a share at the largest capacity; D: numbers in a row.
"""

from __future__ import annotations

import dataclasses

import torch

from recsuite.sharding.dynamic.clock import NEVER, PINNED, SIGHTING, Clock, order_of_waiting
from recsuite.sharding.dynamic.contents import Changes, Counts, LiveRows, Moving, Waiting
from recsuite.sharding.dynamic.initial import initial_rows
from recsuite.sharding.dynamic.placement import Placement, bucket_of
from recsuite.sharding.dynamic.places import Places
from recsuite.sharding.dynamic.spec import BUCKET_WIDTH, EMPTY, NO_ROW, DynamicSpec

# Loaded at a time, so that what is computed about them needs little memory.
CHUNK = 2**18


class DynamicRows:
    """One rank's share of one dynamic table.

    weights: float32 [P + 1, D], and state, the optimizer's, float32 [P + 1]; row r of them is that of place
    r, and the last one, on rank 0, that of ids that have none.
    """

    def __init__(
        self,
        spec: DynamicSpec,
        rank: int,
        world_size: int,
        weights: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        self.spec, self.rank, self.world_size = spec, rank, world_size
        self.weights, self.state = weights, state
        self.device = weights.device
        self.clock, self.scale = Clock(spec), 1.0
        # Nobody is there who was last seen before this: to find out looks at all places.
        self._looked_for = NEVER
        # Before all growth.
        self.first_capacity = spec.capacity
        self._lay_out(spec.capacity)
        num_buckets = self.placement.buckets_on(rank)
        self.places = Places(num_buckets, BUCKET_WIDTH, self.clock.order(), self.device)
        num_waiting = num_buckets if spec.admit > 1 else 0
        self.waiting = Places(num_waiting, BUCKET_WIDTH, order_of_waiting(), self.device)
        self.admitted = self.evicted = self.expired = self.unplaced = self.unadmitted = 0

    @property
    def unknown(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The row of ids that have none, float32 [D], and its optimizer's number, float32 []; None where
        another rank has it.
        """
        return (self.weights[-1], self.state[-1]) if self.rank == 0 else None

    def _lay_out(self, capacity: int) -> None:
        self.spec = dataclasses.replace(self.spec, capacity=capacity)
        self.placement = Placement(self.spec.distribution, capacity // BUCKET_WIDTH, self.world_size)

    def begin_step(self, now: int, scale: float = 1.0) -> None:
        """Say the time, in the unit of the spec, and what rows mean of what the table holds."""
        if now < self.clock.now:
            self._looked_for = NEVER
        self.clock.now, self.scale = now, scale

    def _home(self, ids: torch.Tensor) -> torch.Tensor:
        return self.placement.local_bucket(bucket_of(ids, self.placement.num_buckets))

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids of this rank, int64 [n], NO_ROW for those without one. Changes nothing.

        ids: int64 [n], in any order, and never EMPTY.
        """
        rows = self.places.match(self._home(ids), ids)
        return self.places.without_late(rows, self.clock.horizon) if self.spec.ttl else rows

    def take_in(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of all ids of a step of training, int64 [n], after new ones have come in and others left.

        NO_ROW for those that were not seen often enough, or for whom there is no place.
        ids: int64 [n], distinct, ascending, never EMPTY.
        """
        home = self._home(ids)
        rows = self._found(self.places, home, ids)
        is_absent = rows < 0
        absent = is_absent.nonzero().view(-1)
        if not len(absent):
            self._touch(rows, self.clock.now)
            return rows
        found = rows.index_select(0, is_absent.logical_not_().nonzero().view(-1))
        self._touch(found, PINNED)
        admit = self._take_in_after_waiting if self.spec.admit > 1 else self._admit
        came = admit(ids.index_select(0, absent), home.index_select(0, absent))
        rows.index_copy_(0, absent, came)
        # Whoever was there or came in is pinned no longer.
        for placed in (found, came[came >= 0]):
            self.places.flat_seen.index_fill_(0, placed, self.clock.now)
        return rows

    def _found(self, of: Places, home: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The places of ids, without those that have expired, which lose them."""
        places = of.match(home, ids)
        if not self.spec.ttl:
            return places
        live = of.without_late(places, self.clock.horizon)
        self._expire(of, places[places != live])
        return live

    def _expire(self, of: Places, late: torch.Tensor) -> None:
        of.empty(late)
        if of is self.places:
            self.expired += len(late)

    def _touch(self, rows: torch.Tensor, seen: int) -> None:
        places = self.places
        count = places.count.index_select(0, rows)
        # Only what is halved with time asks for it.
        before = places.flat_seen.index_select(0, rows) if self.spec.half_life else count
        places.count.index_copy_(0, rows, self.clock.counted(count, before))
        places.flat_seen.index_fill_(0, rows, seen)
        places.touched.index_fill_(0, rows, True)

    def _admit(self, ids: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """Rows for ids that have none, int64 [n]; NO_ROW where there is no place."""
        rows, live, late = self.places.give(home, ids, SIGHTING, self.spec.keeps_all, self.clock.horizon)
        placed = rows
        if len(which := (rows >= 0).nonzero().view(-1)) < len(ids):
            self.unplaced += len(ids) - len(which)
            ids, placed = ids[which], rows[which]
        self.evicted += live
        self.expired += late
        self.admitted += len(ids)
        self.weights.index_copy_(0, placed, initial_rows(self.spec, ids, self.scale))
        self.state.index_fill_(0, placed, 0)
        return rows

    def _take_in_after_waiting(self, ids: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """Count sightings of ids without a row, and give rows to those that were seen often enough."""
        waiting = self.waiting
        places = self._found(waiting, home, ids)
        known = (places >= 0).nonzero().view(-1)
        held = places[known]
        count = waiting.count.index_select(0, held).add_(1).clamp_(max=self.spec.admit)
        waiting.count.index_copy_(0, held, count)
        waiting.flat_seen.index_fill_(0, held, PINNED)
        waiting.touched.index_fill_(0, held, True)
        ready = known[count >= self.spec.admit]
        rows = torch.full_like(home, NO_ROW)
        if len(ready):
            rows[ready] = self._admit(ids[ready], home[ready])
            # Who finds no place goes on waiting, and tries again when it is seen again.
            waiting.empty(places[ready[rows[ready] >= 0]])
        self.unadmitted += len(ids) - len(ready)
        new = places < 0
        came, _, _ = waiting.give(home[new], ids[new], 1, False, self.clock.horizon)
        pinned = torch.cat([held, came[came >= 0]])
        pinned = pinned[waiting.flat_seen.index_select(0, pinned) == PINNED]
        waiting.flat_seen.index_fill_(0, pinned, self.clock.now)
        return rows

    def live(self) -> LiveRows:
        """All rows of this rank that have not expired."""
        horizon = self.clock.horizon
        return self._rows_at(self.places.alive(horizon), self.waiting.alive(horizon))

    def _rows_at(self, which: torch.Tensor, waiting: torch.Tensor) -> LiveRows:
        rows = self.places.ascending(which)
        return LiveRows(
            self.places.flat_ids[rows],
            self.weights.index_select(0, rows),
            self.state.index_select(0, rows),
            self.places.flat_seen[rows],
            self.places.count[rows],
            self.waiting.waiting(waiting),
        )

    def changes(self) -> Changes:
        """What changed since `clear_changes`, apart from what was loaded. Rows that have expired leave."""
        self.let_expired_go()
        return Changes(
            self._rows_at(self.places.touched, self.waiting.touched),
            self._still_gone(self.places),
            self._still_gone(self.waiting),
        )

    def let_expired_go(self) -> None:
        """Take their rows from ids that have expired; without that they lose them when somebody asks."""
        if self._has_looked:
            return
        for of in (self.places, self.waiting):
            self._expire(of, of.late(self.clock.horizon))
        self._looked_for = self.clock.horizon

    @property
    def _has_looked(self) -> bool:
        """Whether it is known that nobody is there who has expired."""
        return self.clock.horizon <= self._looked_for

    def _still_gone(self, of: Places) -> torch.Tensor:
        gone = of.all_gone()
        return gone[of.match(self._home(gone), gone) < 0].sort().values if len(gone) else gone

    def largest(self, changed: bool) -> tuple[float, float]:
        """The largest magnitudes of a number in a row, and of what the optimizer keeps of one; NaN if one is
        NaN. With `changed` of rows that changed since `clear_changes`, and of the unknown's.
        """
        which = self.places.touched if changed else self.places.flat_ids != EMPTY
        rows = which.nonzero().view(-1)
        if self.unknown is not None:
            rows = torch.cat([rows, rows.new_tensor([len(self.weights) - 1])])
        held = [self.weights.index_select(0, rows), self.state.index_select(0, rows)]
        weight, state = (float(max(map(abs, part.aminmax()))) if part.numel() else 0.0 for part in held)
        return weight, state

    def clear_changes(self) -> None:
        """Forget what changed."""
        self.places.forget_marks()
        self.waiting.forget_marks()

    def put(self, live: LiveRows) -> int:
        """Load rows and waiting ids of this rank, in place of what the same ids had; how many found no place.

        Of what was there and what comes a bucket keeps what --evict would keep, so the order of calls does
        not matter. Does not mark what it loads as changed. Without waiting ids, where the table admits all at
        once.
        """
        self._looked_for = NEVER
        dropped = sum(
            self._put_rows(live, slice(first, first + CHUNK)) for first in range(0, len(live.ids), CHUNK)
        )
        if self.spec.admit > 1:
            self._put_waiting(live.waiting)
        return dropped

    def _put_rows(self, live: LiveRows, part: slice) -> int:
        ids, before = live.ids[part], self.places.taken
        placed, known = self.places.put(
            self._home(ids), ids, live.seen[part], live.count[part], self.clock.horizon
        )
        # Those that were there first: one of them may just have lost its place to one that came.
        for which in (known & (placed >= 0), ~known & (placed >= 0)):
            self.weights.index_copy_(0, placed[which], live.weight[part][which])
            self.state.index_copy_(0, placed[which], live.state[part][which])
        return before + int((~known).sum()) - self.places.taken

    def _put_waiting(self, waiting: Waiting) -> None:
        for first in range(0, len(waiting.ids), CHUNK):
            part = waiting[torch.arange(first, min(first + CHUNK, len(waiting.ids)), device=self.device)]
            # Where fewer sightings are asked for than before, the next one will do.
            count = part.count.clamp(max=self.spec.admit)
            self.waiting.put(self._home(part.ids), part.ids, part.seen, count, self.clock.horizon)

    def remove(self, ids: torch.Tensor, waiting: torch.Tensor | None = None) -> None:
        """Forget rows by their ids, and waiting ids; those that are not there already are left out."""
        for of, left in ((self.places, ids), (self.waiting, waiting)):
            if left is not None and len(left) and of.taken:
                places = of.match(self._home(left), left)
                of.empty(places[places >= 0])

    def clear(self) -> None:
        """Forget everything, with the marks."""
        for of in (self.places, self.waiting):
            of.reset(len(of.ids))

    def counts(self) -> Counts:
        """How many rows there are, and what became of ids since the beginning."""
        is_sure = self._has_looked or not self.spec.ttl
        held, horizon = (self.places, self.waiting), self.clock.horizon
        live, waiting = (of.taken if is_sure else int(of.alive(horizon).sum()) for of in held)
        return Counts(
            live, waiting, self.admitted, self.evicted, self.expired, self.unplaced, self.unadmitted
        )

    def resized(self, capacity: int) -> Moving:
        """All that this share holds; it is left empty, laid out for another capacity.

        What moves goes to the ranks that have its buckets by the new `placement`, and `settle` takes it in.
        """
        # They stay behind, and deltas have to say so.
        self.let_expired_go()
        moving = Moving(self.live(), self.places.marks(), self.waiting.marks())
        self._lay_out(capacity)
        num_buckets = self.placement.buckets_on(self.rank)
        self.places.reset(num_buckets)
        self.waiting.reset(num_buckets if self.spec.admit > 1 else 0)
        return moving

    def settle(self, moving: Moving) -> int:
        """Take in what `resized` gave, with the marks of what changed; how many rows found no place."""
        dropped = self.put(moving.live)
        self.places.mark(self._home, moving.marks)
        self.waiting.mark(self._home, moving.waiting_marks)
        return dropped
