"""One rank's share of a dynamic table: it finds the rows of ids, inserts ids, and evicts others.

The bucket of an id depends only on the id and the capacity. So the ids that compete for a place, and with
them all of training, are the same on any number of ranks. In front of the rows are buckets of places, and
each place has its own row. A step handles ids with a row first, and none of them can lose its place; then ids
that wait for admission; then new ids; each in the order of ids. So nothing depends on the number of ranks,
which have some of the buckets each. The initial row of an id is a function of seed, table and id.

Plain operations on flat tensors. A place is a number: its bucket times the width, plus a slot. Results never
depend on the order of the slots in a bucket. Ids are int64.

b: buckets; w: places in one; n: ids; P: places of a share at the largest capacity; D: numbers in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from recsuite.errors import UserError
from recsuite.ids import UNKNOWN_ID
from recsuite.sharding.storage import DiskStorage, TableRows
from recsuite.sharding.table import (
    SINCE_BEGINNING,
    EmbeddingTable,
    IdCounters,
    RowSlots,
    RowSource,
    largest_of,
)

# Ids with the same bucket, by their hash, compete for its places and for no others.
BUCKET_WIDTH = 16
# Raw id that marks an empty place. `recsuite.ids` refuses it as an id of the data.
EMPTY = UNKNOWN_ID
# Marks an id without a row.
NO_ROW = -1


@dataclass(frozen=True)
class DynamicSpec:
    """One dynamic table.

    capacity, max_capacity: places on all ranks, now and after all growth, multiples of BUCKET_WIDTH; admit:
    sightings before an id gets a row; evict: "lru", "lfu", "ttl" or "none"; ttl: time until an unseen row
    expires; half_life: time after which a count is halved; both in `unit` ("steps" or "seconds"), 0 for
    never; distribution: "continuous", "roundrobin" or "hash"; grow: the share of the places that may be taken
    before the capacity doubles, 0 for never.
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
        """True if no live id is evicted to make room."""
        return self.evict in ("none", "ttl")


LEAST, MOST = -(2**63), 2**63 - 1
# Special values of last seen. NEVER: the place is empty and is chosen first. PINNED: the place is used by the
# current step and cannot be chosen.
NEVER, PINNED = LEAST, MOST
# One sighting: counts are integers, scaled so that halving keeps precision.
SIGHTING = 2**8
MOST_COUNTED = 2**31 - 1 - SIGHTING


class TableClock:
    """Time of a table, in the unit of its spec; set `now` to move it."""

    def __init__(self, spec: DynamicSpec) -> None:
        self.now = 0
        self.ttl, self.half_life, self.counts = spec.ttl, spec.half_life, spec.evict == "lfu"

    @property
    def horizon(self) -> int:
        """Ids last seen before this time are absent: they have expired, or the place is empty."""
        return self.now - self.ttl if self.ttl else NEVER + 1

    def counted(self, count: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return counts with one more sighting, int32."""
        return self.aged(count, seen).clamp(max=MOST_COUNTED).add_(SIGHTING)

    def aged(self, count: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return counts, int32, halved once for each multiple of the half-life since they were last seen."""
        if not self.half_life:
            return count
        passed = self.now // self.half_life - torch.div(seen, self.half_life, rounding_mode="floor")
        return count >> passed.clamp_(0, 31).int()

    def order(self) -> EvictionOrder:
        """Order of eviction."""
        return EvictionOrder(self.aged if self.counts else None)


@dataclass(frozen=True)
class EvictionOrder:
    """Order of eviction: by count if there is one, then by last seen, and then by id.

    count: function of (count, seen), int32; larger_first: evict the larger of two ids first.
    """

    count: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    larger_first: bool = False

    def first_key(self, seen: torch.Tensor, count: torch.Tensor, horizon: int) -> torch.Tensor:
        """Return the first sort key, int64: lowest for empty or expired places, highest for pinned ones."""
        if self.count is None:
            return seen
        key = self.count(count, seen).long()
        # Empty places come before expired ids, because the two are counted separately.
        key.masked_fill_(seen < horizon, NEVER + 1).masked_fill_(seen == NEVER, NEVER)
        return key.masked_fill_(seen == PINNED, PINNED)

    def keys(self, given: SeenIds, horizon: int) -> list[torch.Tensor]:
        """Return all sort keys, the most significant one first."""
        others = [~given.ids if self.larger_first else given.ids]
        if self.count is not None:
            others.insert(0, given.seen)
        return [self.first_key(given.seen, given.count, horizon), *others]


def eviction_order_of_waiting() -> EvictionOrder:
    """Return the order in which waiting ids are evicted."""
    # Of equal ids the larger one is evicted: a step adds waiting ids in ascending order, so the first ones
    # stay.
    return EvictionOrder(lambda count, seen: count, larger_first=True)


@dataclass(frozen=True)
class SeenIds:
    """Ids with their counters.

    ids: int64 [n]; count: sightings, int32 [n], for ids with a row 256 times the sightings; seen: when last,
    int64 [n].
    """

    ids: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor

    def __getitem__(self, which: torch.Tensor | slice) -> SeenIds:
        """Return the ids selected by an index, a mask or a slice."""
        return SeenIds(self.ids[which], self.count[which], self.seen[which])


@dataclass(frozen=True)
class LiveRows:
    """Ids with their rows, and ids that were not seen often enough for one yet.

    ids: int64 [n]; weight: float32 [n, D]; state: of the optimizer, float32 [n]; seen: when last, int64 [n];
    count: 256 times the sightings, halved as they age, int32 [n].
    """

    ids: torch.Tensor
    weight: torch.Tensor
    state: torch.Tensor
    seen: torch.Tensor
    count: torch.Tensor
    waiting: SeenIds

    def slots(self) -> RowSlots:
        """Return the rows and waiting ids as slots of a file."""
        return {
            "ids": self.ids,
            "weight": self.weight,
            "momentum1": self.state,
            "seen": self.seen,
            "count": self.count,
            "waiting.ids": self.waiting.ids,
            "waiting.count": self.waiting.count,
            "waiting.seen": self.waiting.seen,
        }

    @staticmethod
    def of_slots(slots: RowSlots, device: torch.device) -> LiveRows:
        """Return rows and waiting ids from slots of a file."""
        held = {slot: value.to(device) for slot, value in slots.items()}
        waiting = SeenIds(held["waiting.ids"], held["waiting.count"], held["waiting.seen"])
        return LiveRows(held["ids"], held["weight"], held["momentum1"], held["seen"], held["count"], waiting)


@dataclass(frozen=True)
class ChangeMarks:
    """Marks for deltas, by id: touched, inserted, and removed since the last ones."""

    touched: torch.Tensor
    fresh: torch.Tensor
    gone: torch.Tensor


@dataclass(frozen=True)
class ResizedShare:
    """Contents of a share on its way to a table of another capacity."""

    live: LiveRows
    marks: ChangeMarks
    waiting_marks: ChangeMarks


# The finaliser of splitmix64, by Sebastiano Vigna; as signed numbers, because torch shifts no others.
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64
# Any odd number: it makes the second mix, of buckets, independent of the first one, of ids.
SECOND_MIX = 0x632BE59BD9B4E019
CPU = torch.device("cpu")


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Return the hash of each value, int64: every bit depends on every bit of the value; a bijection."""
    mixed = _without_high_bits(values, 30).mul_(FIRST_FACTOR)
    mixed = _without_high_bits(mixed, 27).mul_(SECOND_FACTOR)
    return _without_high_bits(mixed, 31)


def _without_high_bits(values: torch.Tensor, shift: int) -> torch.Tensor:
    # torch copies the sign bit in a shift; the mask clears it.
    return (values >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(values)


def bucket_of(ids: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return the bucket of each id, int64, for fewer than 2^31 buckets."""
    # The high half of the hash as a fraction of all buckets, which is faster than a division. Doubling the
    # buckets splits bucket b into 2 b and 2 b + 1, so in growth a continuous range stays about in its place.
    return (mix64(ids) >> 32).bitwise_and_(0xFFFFFFFF).mul_(num_buckets).bitwise_right_shift_(32)


@dataclass(frozen=True)
class BucketPlacement:
    """Assignment of buckets to ranks."""

    distribution: str
    num_buckets: int
    world_size: int

    def rank_of(self, buckets: torch.Tensor) -> torch.Tensor:
        """Return the rank of each bucket, int64."""
        if self.world_size == 1:
            return torch.zeros_like(buckets)
        if self.distribution == "continuous":
            return buckets // self._per_rank
        if self.distribution == "roundrobin":
            return buckets % self.world_size
        # Depends only on the bucket's number, so existing buckets stay on their ranks when there are more.
        return mix64(buckets ^ SECOND_MIX).remainder_(self.world_size)

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rank that owns each id, int64."""
        return self.rank_of(bucket_of(ids, self.num_buckets))

    def local_bucket(self, buckets: torch.Tensor) -> torch.Tensor:
        """Return the number of each bucket among those of its rank, int64."""
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
        """Return the number of buckets of a rank."""
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
        """Number of each bucket among those of its rank, int64, by device."""
        numbers = torch.empty(self.num_buckets, dtype=torch.int64)
        for rank in range(self.world_size):
            mine = self._owners == rank
            numbers[mine] = torch.arange(int(mine.sum()))
        return {CPU: numbers}


def rows_per_rank(spec: DynamicSpec, world_size: int) -> int:
    """Return the rows of a table on each rank: a place each at the largest capacity, and the unknown row."""
    num_buckets = spec.max_capacity // BUCKET_WIDTH
    return BucketPlacement(spec.distribution, num_buckets, world_size).places_per_rank + 1


# That of splitmix64: the golden ratio, as a signed number.
STEP = 0x9E3779B97F4A7C15 - 2**64
NUMBERS_PER_WORD = 4


def initial_rows(spec: DynamicSpec, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the initial row of each id, float32 [n, D], uniform around zero with the deviation of the spec.

    scale: a row is what the table holds times this; the result is what the table has to hold.
    """
    words = -(-spec.embedding_dim // NUMBERS_PER_WORD)
    keys = mix64(ids ^ _table_key(spec.seed, spec.name)).unsqueeze(1) + _steps(words, ids.device)
    # Sixteen bits a number. Integers up to the only multiplication, so every device has the same bits.
    drawn = mix64(keys).view(torch.int16)[:, : spec.embedding_dim]
    step = spec.init_std * math.sqrt(12) / 2**16 / scale
    return drawn.float().add_(0.5).mul_(step)


# Used in nearly every step of a training.
@functools.lru_cache
def _steps(words: int, device: torch.device) -> torch.Tensor:
    """Return the offsets that make the words of a row different, int64 [words]."""
    # Wrapped by hand: torch does not accept numbers beyond 64 bits with the sign.
    steps = [((number + 1) * STEP + 2**63) % 2**64 - 2**63 for number in range(words)]
    return torch.tensor(steps, device=device)


@functools.lru_cache
def _table_key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/dynamic".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def lowest(keys: list[torch.Tensor]) -> torch.Tensor:
    """Return the column of the lowest entry in each row of keys, int64 [n].

    keys: int64 [n, w], distinct together.
    """
    left = torch.ones_like(keys[0], dtype=torch.bool)
    for key in keys:
        key = torch.where(left, key, MOST)
        left &= key == key.gather(1, key.argmin(1, keepdim=True))
    return left.long().argmax(1)


def slots_in_order(keys: list[torch.Tensor]) -> torch.Tensor:
    """Return the columns of each row of keys, int64 [n, w], from the lowest to the highest, int64 [n, w]."""
    columns = torch.arange(keys[0].size(1), device=keys[0].device).expand_as(keys[0])
    # Compares all pairs: torch takes longer to sort many short rows.
    pairs = [(key.unsqueeze(1), key.unsqueeze(2)) for key in [*keys, columns]]
    before = is_lower([key for key, _ in pairs], [other for _, other in pairs])
    return torch.empty_like(keys[0]).scatter_(1, before.sum(2), columns)


def is_lower(keys: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    """Return True where keys come before other keys."""
    lower = keys[-1] < others[-1]
    for key, other in zip(reversed(keys[:-1]), reversed(others[:-1]), strict=True):
        lower = (key < other) | ((key == other) & lower)
    return lower


def positions_in_buckets(home: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number the ids of each bucket, in a list where those of a bucket are neighbours.

    Returns the buckets, the index of each id's bucket among them, and each id's number within its bucket.
    """
    buckets, inverse, counts = home.unique_consecutive(return_inverse=True, return_counts=True)
    firsts = counts.cumsum(0) - counts
    return buckets, inverse, torch.arange(len(home), device=home.device) - firsts[inverse]


# With up to so many contested buckets it is faster to order all their places.
FEW_BUCKETS = 48


class BucketPlaces:
    """Places in buckets.

    ids, seen: int64 [b, w]; count: int32 [b * w]; touched and fresh: bool [b * w], changed and inserted since
    the last `forget_marks`; gone: ids that were there at the last `forget_marks` and were removed since, each
    once; taken: number of places with an id.
    """

    def __init__(
        self,
        num_buckets: int,
        width: int,
        order: EvictionOrder,
        device: torch.device,
        storage: DiskStorage | None = None,
    ) -> None:
        self.width, self.order, self.device, self.storage = width, order, device, storage
        self._numbers = torch.arange(1, width + 1, dtype=torch.uint8, device=device)
        self.reset(num_buckets)

    def reset(self, num_buckets: int) -> None:
        """Replace all contents by empty buckets, without marks."""
        shape, number = (num_buckets, self.width), num_buckets * self.width
        self.ids = self._full(shape, EMPTY, torch.int64)
        self.seen = self._full(shape, NEVER, torch.int64)
        self.count = self._full((number,), 0, torch.int32)
        self.touched = self._full((number,), 0, torch.bool)
        self.fresh = self._full((number,), 0, torch.bool)
        # Buffer of `_is_first`, one entry for each bucket; always written before it is read.
        self._first = self._full((num_buckets,), 0, torch.int32)
        self.gone: list[torch.Tensor] = []
        self.taken = 0

    def _full(self, shape: Sequence[int], value: int, dtype: torch.dtype) -> torch.Tensor:
        if self.storage is not None:
            return self.storage.full(shape, value, dtype)
        return torch.full(shape, value, dtype=dtype, device=self.device)

    @property
    def flat_ids(self) -> torch.Tensor:
        """The id at each place, int64 [b * w]."""
        return self.ids.view(-1)

    @property
    def flat_seen(self) -> torch.Tensor:
        """Time at which the id at each place was last seen, int64 [b * w]."""
        return self.seen.view(-1)

    def alive(self, horizon: int) -> torch.Tensor:
        """Return the places of ids that have not expired, bool [b * w]."""
        return self.flat_seen >= horizon

    @property
    def nbytes(self) -> int:
        """Bytes of the places, without the rows."""
        return sum(
            part.nbytes for part in (self.ids, self.seen, self.count, self.touched, self.fresh, self._first)
        )

    def match(self, home: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the place of each id in its bucket, int64 [n]; NO_ROW where it is absent."""
        same = self.ids.index_select(0, home) == ids.unsqueeze(1)
        # Slot plus one, or 0 where the id is absent: an id has at most one place.
        number = (same.view(torch.uint8) * self._numbers).sum(1)
        return torch.where(number > 0, number + (home * self.width).sub_(1), NO_ROW)

    def without_late(self, places: torch.Tensor, horizon: int) -> torch.Tensor:
        """Return the places, with NO_ROW for ids last seen before the horizon."""
        if not self.seen.numel():
            return places
        late = self.flat_seen.index_select(0, places.clamp(min=0)) < horizon
        return places.masked_fill(late, NO_ROW)

    def late(self, horizon: int) -> torch.Tensor:
        """Return the places of all ids last seen before the horizon, int64."""
        return ((self.flat_seen < horizon) & (self.flat_ids != EMPTY)).nonzero().view(-1)

    def give(
        self, home: torch.Tensor, ids: torch.Tensor, count: int, free_only: bool, horizon: int
    ) -> tuple[torch.Tensor, int, int]:
        """Return places for new ids in their order, int64 [n], NO_ROW for ids without one, and pin them.

        free_only: evict no id that was seen since the horizon. Also returns the numbers of live and of
        expired ids that were evicted.
        """
        places, live, late = torch.full_like(home, NO_ROW), 0, 0
        for which, distinct in self._rounds(home):
            chosen = self._choose(home[which], distinct, horizon)
            seen = self.flat_seen.index_select(0, chosen.clamp(min=0))
            usable = (chosen >= 0) & (seen < (horizon if free_only else PINNED))
            if not bool(usable.all()):
                which, chosen, seen = which[usable], chosen[usable], seen[usable]
            empty = self._take(chosen, ids[which], PINNED, count)
            expired = int((seen < horizon).sum())
            live, late = live + len(chosen) - expired, late + expired - empty
            places.index_copy_(0, which, chosen)
        return places, live, late

    def _rounds(self, home: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield indices of ids to serve together, and True if their buckets are distinct."""
        # An id comes after the earlier ids of its bucket.
        left = torch.arange(len(home), device=home.device)
        # After so many rounds all places of a bucket that still has unserved ids are pinned.
        for _ in range(self.width):
            first = self._is_first(home[left])
            number = int(first.sum())
            if number == len(left) or number <= FEW_BUCKETS:
                if len(left):
                    yield left, number == len(left)
                return
            yield left[first], True
            left = left[~first]

    def _is_first(self, home: torch.Tensor) -> torch.Tensor:
        """Return True for ids that are the first of their bucket, bool [n]."""
        index = torch.arange(len(home), dtype=torch.int32, device=home.device)
        self._first.scatter_reduce_(0, home, index, "amin", include_self=False)
        return self._first.index_select(0, home) == index

    def _choose(self, home: torch.Tensor, distinct: bool, horizon: int) -> torch.Tensor:
        """Return the place to evict first for each id; several ids of a bucket get different places."""
        if not distinct:
            return self._shared_out(home, horizon)
        seen = self.seen.index_select(0, home)
        key = seen
        if self.order.count is not None:
            key = self.order.first_key(seen, self.count.view(-1, self.width).index_select(0, home), horizon)
        slot = key.argmin(1)
        least = key.gather(1, slot.unsqueeze(1))
        # Ties between empty places do not matter.
        ties = (((key == least).sum(1) > 1) & (least.view(-1) != NEVER)).nonzero().view(-1)
        if len(ties):
            slot[ties] = lowest(self._keys(home[ties], horizon))
        return slot.add_(home * self.width)

    def _keys(self, home: torch.Tensor, horizon: int) -> list[torch.Tensor]:
        """Return the sort keys of the places of some buckets, each [n, w]."""
        count = self.count.view(-1, self.width).index_select(0, home)
        there = SeenIds(self.ids.index_select(0, home), count, self.seen.index_select(0, home))
        return self.order.keys(there, horizon)

    def _shared_out(self, home: torch.Tensor, horizon: int) -> torch.Tensor:
        """Return the place of each id in a few buckets, NO_ROW for ids beyond the width of a bucket."""
        ordered, indices = home.sort(stable=True)
        buckets, inverse, turn = positions_in_buckets(ordered)
        slots = slots_in_order(self._keys(buckets, horizon))
        slot = slots[inverse, turn.clamp(max=self.width - 1)]
        places = torch.where(turn < self.width, ordered * self.width + slot, NO_ROW)
        return torch.empty_like(places).index_copy_(0, indices, places)

    def _take(self, places: torch.Tensor, ids: torch.Tensor, seen: int, count: int) -> int:
        """Assign distinct places to new ids, in place of any earlier ids; return the number of empty ones."""
        before = self.flat_ids.index_select(0, places)
        empty = before == EMPTY
        self._note_removed(before, places)
        self.flat_ids.index_copy_(0, places, ids)
        self.flat_seen.index_fill_(0, places, seen)
        self.count.index_fill_(0, places, count)
        self.touched.index_fill_(0, places, True)
        self.fresh.index_fill_(0, places, True)
        number = int(empty.sum())
        self.taken += number
        return number

    def _note_removed(self, ids: torch.Tensor, places: torch.Tensor) -> None:
        # An id inserted after the last marks is in no delta yet, so no delta has to remove it.
        left = ids[(ids != EMPTY) & ~self.fresh.index_select(0, places)]
        if len(left):
            self.gone.append(left)

    def empty(self, places: torch.Tensor) -> None:
        """Remove the ids from distinct places."""
        self._note_removed(self.flat_ids[places], places)
        self.taken -= len(places)
        self.flat_ids.index_fill_(0, places, EMPTY)
        self.flat_seen.index_fill_(0, places, NEVER)
        self.touched.index_fill_(0, places, False)
        self.fresh.index_fill_(0, places, False)

    def marks(self) -> ChangeMarks:
        """Return the changes, by id."""
        return ChangeMarks(self.flat_ids[self.touched], self.flat_ids[self.fresh], self.removed_ids())

    def removed_ids(self) -> torch.Tensor:
        """Return the removed ids, some of which may be back."""
        return torch.cat(self.gone) if self.gone else self.flat_ids[:0]

    def forget_marks(self) -> None:
        """Forget all changes."""
        self.touched.zero_()
        self.fresh.zero_()
        self.gone.clear()

    def mark(self, home: Callable[[torch.Tensor], torch.Tensor], marks: ChangeMarks) -> None:
        """Add marks of another share; home: the bucket of each id."""
        for ids, flags in ((marks.touched, self.touched), (marks.fresh, self.fresh)):
            if len(ids):
                places = self.match(home(ids), ids)
                flags[places[places >= 0]] = True
        if len(marks.gone):
            self.gone.append(marks.gone)

    def ascending(self, which: torch.Tensor) -> torch.Tensor:
        """Return the places of a mask, bool [b * w], in the order of their ids, int64."""
        places = which.nonzero().view(-1)
        return places[self.flat_ids[places].argsort()]

    def waiting(self, which: torch.Tensor) -> SeenIds:
        """Return the waiting ids at the places of a mask."""
        places = self.ascending(which)
        return SeenIds(self.flat_ids[places], self.count[places], self.flat_seen[places])

    def put(self, home: torch.Tensor, given: SeenIds, horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Load ids; return their places, int64 [n], NO_ROW for ids without one.

        home: the bucket of each, int64 [n]. Also returns True for ids that had their place before.

        Of the ids there and the loaded ones each bucket keeps those that are last in the order of eviction.
        Sets no marks.
        """
        places = self.match(home, given.ids)
        known = places >= 0
        self._write(places[known], given[known])
        new = (~known).nonzero().view(-1)
        new = new[home[new].argsort(stable=True)]
        chosen = self._settle(home[new], given[new], horizon)
        came = new[chosen >= 0]
        places[new] = chosen
        chosen = chosen[chosen >= 0]
        self.taken += int((self.flat_ids[chosen] == EMPTY).sum())
        self.touched.index_fill_(0, chosen, False)
        self.fresh.index_fill_(0, chosen, False)
        self._write(chosen, given[came])
        return places, known

    def _write(self, places: torch.Tensor, given: SeenIds) -> None:
        self.flat_ids.index_copy_(0, places, given.ids)
        self.flat_seen.index_copy_(0, places, given.seen)
        self.count.index_copy_(0, places, given.count)

    def _settle(self, home: torch.Tensor, given: SeenIds, horizon: int) -> torch.Tensor:
        """Find places for ids without one, int64 [n], bucket by bucket."""
        if not len(home):
            return home
        buckets, inverse, turn = positions_in_buckets(home)
        free = self.ids.index_select(0, buckets) == EMPTY
        num_free = free.sum(1)
        fits = (torch.bincount(inverse) <= num_free)[inverse]
        slots = free.nonzero()[:, 1]
        places = torch.full_like(home, NO_ROW)
        at = (num_free.cumsum(0) - num_free)[inverse] + turn
        places[fits] = slots[at[fits]] + home[fits] * self.width
        if not bool(fits.all()):
            which = (~fits).nonzero().view(-1)
            places[which] = self._compete(home[which], given[which], horizon)
        return places

    def _compete(self, home: torch.Tensor, given: SeenIds, horizon: int) -> torch.Tensor:
        """Find places for ids in buckets that are too full; NO_ROW for those that are evicted first."""
        keys = self.order.keys(given, horizon)
        best = torch.arange(len(home), device=home.device)
        # The last ones in the order of eviction come first, and one bucket after the other.
        for key in reversed(keys):
            best = best[key[best].argsort(stable=True, descending=True)]
        best = best[home[best].argsort(stable=True)]
        buckets, inverse, turn = positions_in_buckets(home[best])
        there = self._keys(buckets, horizon)
        slot = slots_in_order(there)[inverse, turn.clamp(max=self.width - 1)]
        higher = is_lower([key[inverse, slot] for key in there], [key[best] for key in keys])
        places = torch.where((turn < self.width) & higher, home[best] * self.width + slot, NO_ROW)
        return torch.empty_like(places).index_copy_(0, best, places)


def fit(ids: torch.Tensor, capacity: int) -> bool:
    """Return True if every id has a place in its bucket."""
    counts = bucket_of(ids, capacity // BUCKET_WIDTH).bincount()
    return not len(ids) or int(counts.max()) <= BUCKET_WIDTH


# Ids to load at once, so that temporaries need little memory.
CHUNK = 2**18


class DynamicTable(EmbeddingTable):
    """One rank's share of one dynamic table, with rows by id.

    rows: those of this rank's group of tables, with "momentum1" as the state of the optimizer; first: the
    number of the first one of this table, whose P + 1 rows are those of its places, and the last one, on rank
    0, is the unknown row.
    """

    prefix = "dynamic"
    exports_copies = True

    def __init__(
        self, spec: DynamicSpec, rank: int, world_size: int, rows: TableRows, first: int = 0
    ) -> None:
        self.spec, self.rank, self.world_size = spec, rank, world_size
        self.name = spec.name
        self.rows, self.first_row = rows, first
        here = slice(first, first + rows_per_rank(spec, world_size))
        self.weights, self.state = rows.weights[here], rows.state["momentum1"][here]
        self.device = self.weights.device
        self.clock, self.scale = TableClock(spec), 1.0
        # All ids last seen before this time were removed already: finding them reads all places.
        self._looked_for = NEVER
        # Capacity before all growth.
        self.first_capacity = spec.capacity
        self._lay_out(spec.capacity)
        num_buckets = self.placement.buckets_on(rank)
        where = self.device, rows.storage
        self.places = BucketPlaces(num_buckets, BUCKET_WIDTH, self.clock.order(), *where)
        num_waiting = num_buckets if spec.admit > 1 else 0
        self.waiting = BucketPlaces(num_waiting, BUCKET_WIDTH, eviction_order_of_waiting(), *where)
        self.admitted = self.evicted = self.expired = self.unplaced = self.unadmitted = 0
        # Work of the backend after a backward, the same for all tables of a module; safe to call twice.
        self.complete_step: Callable[[], None] = lambda: None

    @property
    def unknown(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The unknown row, float32 [D], and its optimizer state, float32 []; None on other ranks.

        As other tensors of the table, they may be out of date, see `TableRows.flush`.
        """
        return (self.weights[-1], self.state[-1]) if self.rank == 0 else None

    def _lay_out(self, capacity: int) -> None:
        self.spec = dataclasses.replace(self.spec, capacity=capacity)
        self.placement = BucketPlacement(self.spec.distribution, capacity // BUCKET_WIDTH, self.world_size)

    @override
    def begin_step(self, step: int, seconds: int = 0, scale: float = 1.0) -> None:
        self._set_time(seconds if self.spec.unit == "seconds" else step, scale)

    @override
    def end_step(self) -> None:
        self.complete_step()

    def _set_time(self, now: int, scale: float) -> None:
        if now < self.clock.now:
            self._looked_for = NEVER
        self.clock.now, self.scale = now, scale

    def _home(self, ids: torch.Tensor) -> torch.Tensor:
        return self.placement.local_bucket(bucket_of(ids, self.placement.num_buckets))

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids of this rank, int64 [n], NO_ROW for ids without one. Changes nothing.

        ids: int64 [n], in any order, and never EMPTY.
        """
        rows = self.places.match(self._home(ids), ids)
        return self.places.without_late(rows, self.clock.horizon) if self.spec.ttl else rows

    def find_or_insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Insert new ids and evict others; return the rows of all ids of a training step, int64 [n].

        NO_ROW for ids that were not seen often enough, or have no place.
        ids: int64 [n], distinct, ascending, never EMPTY.
        """
        home = self._home(ids)
        rows = self._live_places(self.places, home, ids)
        is_absent = rows < 0
        absent = is_absent.nonzero().view(-1)
        if not len(absent):
            self._touch(rows, self.clock.now)
            return rows
        known = rows.index_select(0, is_absent.logical_not_().nonzero().view(-1))
        self._touch(known, PINNED)
        admit = self._insert_after_waiting if self.spec.admit > 1 else self._admit
        came = admit(ids.index_select(0, absent), home.index_select(0, absent))
        rows.index_copy_(0, absent, came)
        # Unpin all ids of the step.
        for placed in (known, came[came >= 0]):
            self.places.flat_seen.index_fill_(0, placed, self.clock.now)
        return rows

    def _live_places(self, of: BucketPlaces, home: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the places of ids; expired ids are removed."""
        places = of.match(home, ids)
        if not self.spec.ttl:
            return places
        live = of.without_late(places, self.clock.horizon)
        self._expire(of, places[places != live])
        return live

    def _expire(self, of: BucketPlaces, late: torch.Tensor) -> None:
        of.empty(late)
        if of is self.places:
            self.expired += len(late)

    def _touch(self, rows: torch.Tensor, seen: int) -> None:
        places = self.places
        count = places.count.index_select(0, rows)
        # Only a half-life needs it.
        before = places.flat_seen.index_select(0, rows) if self.spec.half_life else count
        places.count.index_copy_(0, rows, self.clock.counted(count, before))
        places.flat_seen.index_fill_(0, rows, seen)
        places.touched.index_fill_(0, rows, True)

    def _admit(self, ids: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """Return rows for ids without one, int64 [n]; NO_ROW where there is no place."""
        rows, live, late = self.places.give(home, ids, SIGHTING, self.spec.keeps_all, self.clock.horizon)
        placed = rows
        if len(which := (rows >= 0).nonzero().view(-1)) < len(ids):
            self.unplaced += len(ids) - len(which)
            ids, placed = ids[which], rows[which]
        self.evicted += live
        self.expired += late
        self.admitted += len(ids)
        self.rows.insert(placed + self.first_row, initial_rows(self.spec, ids, self.scale))
        return rows

    def _insert_after_waiting(self, ids: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
        """Count sightings of ids without a row, and insert those that were seen often enough."""
        waiting = self.waiting
        places = self._live_places(waiting, home, ids)
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
            # An id without a place continues waiting, and tries again when it is seen again.
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
        self.rows.flush()
        return LiveRows(
            self.places.flat_ids[rows],
            self.rows.taken(self.weights, rows),
            self.rows.taken(self.state, rows),
            self.places.flat_seen[rows],
            self.places.count[rows],
            self.waiting.waiting(waiting),
        )

    def remove_expired(self) -> None:
        """Remove expired ids; otherwise they are removed when they are looked up."""
        if self._has_expired_ids_removed:
            return
        for of in (self.places, self.waiting):
            self._expire(of, of.late(self.clock.horizon))
        self._looked_for = self.clock.horizon

    @property
    def _has_expired_ids_removed(self) -> bool:
        """True if no expired id can be left."""
        return self.clock.horizon <= self._looked_for

    def _still_removed(self, of: BucketPlaces) -> torch.Tensor:
        gone = of.removed_ids()
        return gone[of.match(self._home(gone), gone) < 0].sort().values if len(gone) else gone

    def export(self, changed: bool = False) -> RowSlots:
        """Return copies of the slots of `LiveRows`, and on rank 0 the unknown row.

        With `changed` also the removed ids; loaded rows are no changes, and expired rows are removed first.
        """
        if changed:
            self.remove_expired()
            slots = self._rows_at(self.places.touched, self.waiting.touched).slots()
            gone = {"gone": self.places, "waiting.gone": self.waiting}
            slots |= {slot: self._still_removed(of) for slot, of in gone.items()}
        else:
            slots = self.live().slots()
        if self.unknown is not None:
            weight, state = (held.detach().clone() for held in self.unknown)
            slots |= {"unknown.weight": weight[None], "unknown.momentum1": state.view(1)}
        return slots

    @override
    def ids(self) -> torch.Tensor:
        return self.places.flat_ids[self.places.alive(self.clock.horizon)]

    @override
    def load(self, source: RowSource, scale: float) -> int:
        record = source.record(self.name)
        self.clear()
        # The table is empty, so no row has to move.
        self.resized(self.capacity_for(record.capacity))
        self._set_time(record.now, scale)
        if self.unknown is not None:
            for held, value in zip(self.unknown, source.unknown_row(self.name), strict=True):
                held.copy_(value)

        def is_mine(ids: torch.Tensor) -> torch.Tensor:
            return self.placement.owner_of(ids) == self.rank

        parts = source.rows_of_ids(self.name, is_mine)
        dropped = sum(self.put(LiveRows.of_slots(slots, self.device)) for slots in parts)
        # Remove rows that had expired when the last delta was written: otherwise it would depend on the
        # number of ranks whether such a row is still there.
        self.remove_expired()
        self.clear_changes()
        for counter in SINCE_BEGINNING:
            setattr(self, counter, record.counts.get(counter, 0) if self.rank == 0 else 0)
        return dropped

    @property
    @override
    def nbytes(self) -> int:
        return 0 if self.rows.on_disk else self.weights.nbytes

    @override
    def copy(self) -> RowSlots:
        # By id, because a place may get another id.
        return {slot: value.cpu() for slot, value in self.export().items()}

    @override
    def restore(self, copy: RowSlots) -> None:
        self.clear()
        self.put(LiveRows.of_slots(copy, self.device))
        if self.unknown is not None:
            self.unknown[0].copy_(copy["unknown.weight"][0])

    def capacity_for(self, written: int) -> int:
        """Return the capacity for a checkpoint whose table had the capacity `written`."""
        # A table keeps a capacity that it may have grown to, so a resume continues exactly.
        grown, spec = self.first_capacity, self.spec
        while grown < min(written, spec.max_capacity):
            grown *= 2
        return written if spec.grow and grown == written <= spec.max_capacity else self.first_capacity

    @override
    def check(self, source: RowSource, folder: Path) -> None:
        record, spec, name = source.record(self.name), self.spec, self.name
        if record.bucket_width != BUCKET_WIDTH:
            raise UserError(
                f"{folder} has buckets of {record.bucket_width} places for {name}; this version requires "
                f"{BUCKET_WIDTH}. Fix: load it with the version that wrote it."
            )
        if record.unit != spec.unit and (spec.ttl or spec.half_life):
            raise UserError(
                f"{folder} has ages of rows of {name} in {record.unit}, so --ttl and --half_life must be in "
                f"{record.unit}, got {spec.unit}."
            )
        places = self.capacity_for(record.capacity)
        # With the same capacity, or a multiple of it, every row has a place.
        if not spec.keeps_all or places % record.capacity == 0:
            return
        ids = torch.cat([part["ids"] for part in source.rows_of_ids(name, slots=("ids",))])
        if fit(ids, places):
            return
        step = max(BUCKET_WIDTH, places // 64 * BUCKET_WIDTH)
        larger = range(places, record.capacity, step)
        enough = next((number for number in larger if fit(ids, number)), record.capacity)
        raise UserError(
            f"{folder} has {len(ids):,} rows of {name}, too many for the {places:,} places of this training "
            f"with --eviction {spec.evict}. Fix: give --capacity {name}={enough}, or --eviction lru."
        )

    def record(self) -> dict[str, Any]:
        """Return the fields of a `DynamicRecord`, without texts and counts."""
        # Expired rows are not written, and a training that continues from here could not count them.
        self.remove_expired()
        names = ("embedding_dim", "capacity", "distribution", "admit", "evict", "ttl", "half_life", "unit")
        spec = {name: getattr(self.spec, name) for name in names}
        return {**spec, "bucket_width": BUCKET_WIDTH, "now": self.clock.now}

    @override
    def largest(self, changed: bool = False) -> dict[str, float]:
        which = self.places.touched if changed else self.places.flat_ids != EMPTY
        rows = which.nonzero().view(-1)
        # The unknown row is always included.
        if self.unknown is not None:
            rows = torch.cat([rows, rows.new_tensor([len(self.weights) - 1])])
        self.rows.flush()
        held = {"weight": self.weights, "momentum1": self.state}
        # In parts, which need little memory. A tensor of their results, because it passes a NaN on.
        parts = rows.split(CHUNK)
        return {
            slot: largest_of(torch.tensor([largest_of(value.index_select(0, part)) for part in parts]))
            for slot, value in held.items()
        }

    @override
    def multiply(self, factor: float) -> None:
        self.rows.forget()
        self.weights.mul_(factor)

    def clear_changes(self) -> None:
        """Forget what changed."""
        self.places.forget_marks()
        self.waiting.forget_marks()

    def put(self, live: LiveRows) -> int:
        """Load rows and waiting ids of this rank; return the number of rows without a place.

        They replace rows of the same ids.

        Of the ids there and the loaded ones a bucket keeps what --eviction would keep, so the order of calls
        does not matter. Loaded rows are not marked as changed. Waiting ids are ignored if the table admits
        all ids at once.
        """
        self._looked_for = NEVER
        self.rows.forget()
        dropped = sum(
            self._put_rows(live, slice(first, first + CHUNK)) for first in range(0, len(live.ids), CHUNK)
        )
        if self.spec.admit > 1:
            self._put_waiting(live.waiting)
        return dropped

    def _put_rows(self, live: LiveRows, part: slice) -> int:
        given, before = SeenIds(live.ids, live.count, live.seen)[part], self.places.taken
        placed, known = self.places.put(self._home(given.ids), given, self.clock.horizon)
        # Known ids first: one of them may have lost its place to a loaded id.
        for which in (known & (placed >= 0), ~known & (placed >= 0)):
            self.weights.index_copy_(0, placed[which], live.weight[part][which])
            self.state.index_copy_(0, placed[which], live.state[part][which])
        return before + int((~known).sum()) - self.places.taken

    def _put_waiting(self, waiting: SeenIds) -> None:
        for first in range(0, len(waiting.ids), CHUNK):
            part = waiting[first : first + CHUNK]
            # If --admission_threshold is smaller than before, the next sighting is enough.
            given = dataclasses.replace(part, count=part.count.clamp(max=self.spec.admit))
            self.waiting.put(self._home(part.ids), given, self.clock.horizon)

    def clear(self) -> None:
        """Remove all ids, with the marks."""
        self.rows.forget()
        for of in (self.places, self.waiting):
            of.reset(len(of.ids))

    @override
    def counts(self) -> IdCounters:
        is_sure = self._has_expired_ids_removed or not self.spec.ttl
        held, horizon = (self.places, self.waiting), self.clock.horizon
        live, waiting = (of.taken if is_sure else int(of.alive(horizon).sum()) for of in held)
        return IdCounters(
            live, waiting, self.admitted, self.evicted, self.expired, self.unplaced, self.unadmitted
        )

    def resized(self, capacity: int) -> ResizedShare:
        """Return the contents of this share, and leave it empty, laid out for another capacity.

        The contents go to the ranks that own the buckets by the new `placement`, and `settle` inserts them.
        """
        # Expired ids do not move, and deltas have to remove them.
        self.remove_expired()
        moving = ResizedShare(self.live(), self.places.marks(), self.waiting.marks())
        self._lay_out(capacity)
        num_buckets = self.placement.buckets_on(self.rank)
        self.places.reset(num_buckets)
        self.waiting.reset(num_buckets if self.spec.admit > 1 else 0)
        return moving

    def settle(self, moving: ResizedShare) -> int:
        """Insert what `resized` returned, with its marks; return the number of rows without a place."""
        dropped = self.put(moving.live)
        self.places.mark(self._home, moving.marks)
        self.waiting.mark(self._home, moving.waiting_marks)
        return dropped
