"""One rank's share of a dynamic table: it finds the rows of ids, inserts ids, and evicts the least wanted.

The bucket of an id depends on the id and the capacity alone, so which ids compete for a place, and with that
all of training, is the same on any number of ranks. In front of the rows lie buckets of places, each place
with a row of its own. In a step the ids that are there come first, and none of them can lose its place; then
those that wait for admission, then new ones, each in the order of their ids. So nothing depends on the number
of ranks, which have each some of the buckets. The row that an id begins with is a function of seed, table and
id.

Plain operations on flat tensors. A place is a number: its bucket times the width, plus a slot. What is said
about slots never depends on their order, so it does not matter in which one an id came to lie. Ids are int64.

b: buckets; w: places in one; n: ids; P: places of a share at the largest capacity; D: numbers in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

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


@dataclass(frozen=True)
class Waiting:
    """Ids that were seen, but not often enough for a row.

    ids: int64 [n]; count: sightings, int32 [n]; seen: when last, int64 [n].
    """

    ids: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor

    def __getitem__(self, which: torch.Tensor) -> Waiting:
        """Those that an index or a mask says."""
        return Waiting(self.ids[which], self.count[which], self.seen[which])

    @staticmethod
    def none(device: torch.device | None = None) -> Waiting:
        """Nobody waits."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return Waiting(empty, empty.int(), empty)


@dataclass(frozen=True)
class LiveRows:
    """Ids with their rows, and those that wait for one.

    ids: int64 [n]; weight: float32 [n, D]; state: of the optimizer, float32 [n]; seen: when last, int64 [n];
    count: 256 times the sightings, halved as they age, int32 [n].
    """

    ids: torch.Tensor
    weight: torch.Tensor
    state: torch.Tensor
    seen: torch.Tensor
    count: torch.Tensor
    waiting: Waiting

    def of_rows(self, which: torch.Tensor) -> LiveRows:
        """The rows that an index or a mask says; all that wait."""
        return LiveRows(
            self.ids[which],
            self.weight[which],
            self.state[which],
            self.seen[which],
            self.count[which],
            self.waiting,
        )


@dataclass(frozen=True)
class Changes:
    """What is new since `clear_changes`: rows and waiting ids that changed, and ids that have left."""

    rows: LiveRows
    gone: torch.Tensor
    waiting_gone: torch.Tensor

    @property
    def waiting(self) -> Waiting:
        """Waiting ids that changed."""
        return self.rows.waiting


@dataclass(frozen=True)
class Marks:
    """From which `changes` are made, by id: touched; new since the last ones; left since the last ones."""

    touched: torch.Tensor
    fresh: torch.Tensor
    gone: torch.Tensor


@dataclass(frozen=True)
class Moving:
    """All that a share held, on its way to where it lies in a table of another capacity."""

    live: LiveRows
    marks: Marks
    waiting_marks: Marks


@dataclass(frozen=True)
class Counts:
    """What became of ids: rows there are, ids that wait, and since the beginning: rows given, rows taken from
    the least wanted and from the expired, and, step by step, ids without a place and ids not seen often
    enough.
    """

    live: int
    waiting: int
    admitted: int
    evicted: int
    expired: int
    unplaced: int
    unadmitted: int


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


def lowest(keys: list[torch.Tensor]) -> torch.Tensor:
    """The column of the lowest in each row of keys, int64 [n, w], that together are distinct; int64 [n]."""
    left = torch.ones_like(keys[0], dtype=torch.bool)
    for key in keys:
        key = torch.where(left, key, MOST)
        left &= key == key.gather(1, key.argmin(1, keepdim=True))
    return left.long().argmax(1)


def slots_in_order(keys: list[torch.Tensor]) -> torch.Tensor:
    """The columns of each row of keys, int64 [n, w], from the lowest to the highest; int64 [n, w]."""
    columns = torch.arange(keys[0].size(1), device=keys[0].device).expand_as(keys[0])
    # All with all: torch takes longer to sort many short rows.
    pairs = [(key.unsqueeze(1), key.unsqueeze(2)) for key in [*keys, columns]]
    before = is_lower([key for key, _ in pairs], [other for _, other in pairs])
    return torch.empty_like(keys[0]).scatter_(1, before.sum(2), columns)


def is_lower(keys: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    """Whether keys come before other ones."""
    lower = keys[-1] < others[-1]
    for key, other in zip(reversed(keys[:-1]), reversed(others[:-1]), strict=True):
        lower = (key < other) | ((key == other) & lower)
    return lower


def turns(home: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a list where each bucket's are neighbours: the buckets; of each its bucket's index, and its turn
    there.
    """
    buckets, inverse, counts = home.unique_consecutive(return_inverse=True, return_counts=True)
    firsts = counts.cumsum(0) - counts
    return buckets, inverse, torch.arange(len(home), device=home.device) - firsts[inverse]


# So many buckets that several ids want are quicker shared out by ordering all their places.
FEW_BUCKETS = 48


class Places:
    """Places in buckets.

    ids, seen: int64 [b, w]; count: int32 [b * w]; touched and fresh: bool [b * w], changed and taken in since
    the last `forget_marks`; gone: ids that left since then and were there before, each once; taken: places
    with an id.
    """

    def __init__(self, num_buckets: int, width: int, order: Order, device: torch.device) -> None:
        self.width, self.order, self.device = width, order, device
        self._numbers = torch.arange(1, width + 1, dtype=torch.uint8, device=device)
        self.reset(num_buckets)

    def reset(self, num_buckets: int) -> None:
        """Leave so many buckets, all empty and without marks."""
        shape = (num_buckets, self.width)
        self.ids = torch.full(shape, EMPTY, dtype=torch.int64, device=self.device)
        self.seen = torch.full_like(self.ids, NEVER)
        self.count = torch.zeros(num_buckets * self.width, dtype=torch.int32, device=self.device)
        self.touched = torch.zeros(num_buckets * self.width, dtype=torch.bool, device=self.device)
        self.fresh = torch.zeros_like(self.touched)
        # In `_is_first`, of each bucket; never read before it is written.
        self._first = torch.empty(num_buckets, dtype=torch.int32, device=self.device)
        self.gone: list[torch.Tensor] = []
        self.taken = 0

    @property
    def flat_ids(self) -> torch.Tensor:
        """The id at each place, int64 [b * w]."""
        return self.ids.view(-1)

    @property
    def flat_seen(self) -> torch.Tensor:
        """When it was last seen, int64 [b * w]."""
        return self.seen.view(-1)

    def alive(self, horizon: int) -> torch.Tensor:
        """The places of ids that have not expired, bool [b * w]."""
        return self.flat_seen >= horizon

    @property
    def nbytes(self) -> int:
        """What the places take, without the rows."""
        return sum(
            part.nbytes for part in (self.ids, self.seen, self.count, self.touched, self.fresh, self._first)
        )

    def match(self, home: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The place of each id in its bucket, int64 [n]; NO_ROW where it is not there."""
        same = self.ids.index_select(0, home) == ids.unsqueeze(1)
        # One more than its slot, and 0 where it is not there: it lies in one place at most.
        number = (same.view(torch.uint8) * self._numbers).sum(1)
        return torch.where(number > 0, number + (home * self.width).sub_(1), NO_ROW)

    def without_late(self, places: torch.Tensor, horizon: int) -> torch.Tensor:
        """Places, NO_ROW for those whose ids were last seen before the horizon."""
        if not self.seen.numel():
            return places
        late = self.flat_seen.index_select(0, places.clamp(min=0)) < horizon
        return places.masked_fill(late, NO_ROW)

    def late(self, horizon: int) -> torch.Tensor:
        """The places of all ids that were last seen before the horizon, int64."""
        return ((self.flat_seen < horizon) & (self.flat_ids != EMPTY)).nonzero().view(-1)

    def give(
        self, home: torch.Tensor, ids: torch.Tensor, count: int, free_only: bool, horizon: int
    ) -> tuple[torch.Tensor, int, int]:
        """Places for new ids in their order, int64 [n], NO_ROW for those without; they are pinned.

        free_only: take no place from an id that was seen since the horizon. Also how many live ids had to
        leave, and how many expired ones.
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
        """Indices of ids that are served together, each after those before it in its bucket; whether their
        buckets are distinct.
        """
        left = torch.arange(len(home), device=home.device)
        # Afterwards all places of a bucket that somebody still wants are pinned.
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
        """Whether an id is the first of its bucket, bool [n]."""
        index = torch.arange(len(home), dtype=torch.int32, device=home.device)
        self._first.scatter_reduce_(0, home, index, "amin", include_self=False)
        return self._first.index_select(0, home) == index

    def _choose(self, home: torch.Tensor, distinct: bool, horizon: int) -> torch.Tensor:
        """The place that goes first in the bucket of each id; of several ids, one after the other."""
        if not distinct:
            return self._shared_out(home, horizon)
        seen = self.seen.index_select(0, home)
        key = seen
        if self.order.count is not None:
            key = self.order.first_key(seen, self.count.view(-1, self.width).index_select(0, home), horizon)
        slot = key.argmin(1)
        least = key.gather(1, slot.unsqueeze(1))
        # Which of the empty places it is does not matter.
        ties = (((key == least).sum(1) > 1) & (least.view(-1) != NEVER)).nonzero().view(-1)
        if len(ties):
            slot[ties] = lowest(self._keys(home[ties], horizon))
        return slot.add_(home * self.width)

    def _keys(self, home: torch.Tensor, horizon: int) -> list[torch.Tensor]:
        """What orders the places of some buckets, each [n, w]."""
        count = self.count.view(-1, self.width).index_select(0, home)
        seen, ids = self.seen.index_select(0, home), self.ids.index_select(0, home)
        return self.order.keys(ids, seen, count, horizon)

    def _shared_out(self, home: torch.Tensor, horizon: int) -> torch.Tensor:
        """What each gets of few buckets, NO_ROW for those who come too late."""
        ordered, indices = home.sort(stable=True)
        buckets, inverse, turn = turns(ordered)
        slots = slots_in_order(self._keys(buckets, horizon))
        slot = slots[inverse, turn.clamp(max=self.width - 1)]
        places = torch.where(turn < self.width, ordered * self.width + slot, NO_ROW)
        return torch.empty_like(places).index_copy_(0, indices, places)

    def _take(self, places: torch.Tensor, ids: torch.Tensor, seen: int, count: int) -> int:
        """Give distinct places to new ids, whoever had them; how many were empty."""
        before = self.flat_ids.index_select(0, places)
        empty = before == EMPTY
        self._note_gone(before, places)
        self.flat_ids.index_copy_(0, places, ids)
        self.flat_seen.index_fill_(0, places, seen)
        self.count.index_fill_(0, places, count)
        self.touched.index_fill_(0, places, True)
        self.fresh.index_fill_(0, places, True)
        number = int(empty.sum())
        self.taken += number
        return number

    def _note_gone(self, ids: torch.Tensor, places: torch.Tensor) -> None:
        # One that came after the last marks were made is known to nobody who has to forget it.
        left = ids[(ids != EMPTY) & ~self.fresh.index_select(0, places)]
        if len(left):
            self.gone.append(left)

    def empty(self, places: torch.Tensor) -> None:
        """Take distinct places from their ids."""
        self._note_gone(self.flat_ids[places], places)
        self.taken -= len(places)
        self.flat_ids.index_fill_(0, places, EMPTY)
        self.flat_seen.index_fill_(0, places, NEVER)
        self.touched.index_fill_(0, places, False)
        self.fresh.index_fill_(0, places, False)

    def marks(self) -> Marks:
        """What changed, by id."""
        return Marks(self.flat_ids[self.touched], self.flat_ids[self.fresh], self.all_gone())

    def all_gone(self) -> torch.Tensor:
        """The ids that left, some of which may be back."""
        return torch.cat(self.gone) if self.gone else self.flat_ids[:0]

    def forget_marks(self) -> None:
        """Nothing has changed, from now on."""
        self.touched.zero_()
        self.fresh.zero_()
        self.gone.clear()

    def mark(self, home: Callable[[torch.Tensor], torch.Tensor], marks: Marks) -> None:
        """Add marks of another share; home: the bucket of each id."""
        for ids, flags in ((marks.touched, self.touched), (marks.fresh, self.fresh)):
            if len(ids):
                places = self.match(home(ids), ids)
                flags[places[places >= 0]] = True
        if len(marks.gone):
            self.gone.append(marks.gone)

    def ascending(self, which: torch.Tensor) -> torch.Tensor:
        """The places that a mask says, bool [b * w], by their ids, int64."""
        places = which.nonzero().view(-1)
        return places[self.flat_ids[places].argsort()]

    def waiting(self, which: torch.Tensor) -> Waiting:
        """What is at the places that a mask says, of ids that wait."""
        places = self.ascending(which)
        return Waiting(self.flat_ids[places], self.count[places], self.flat_seen[places])

    def put(
        self, home: torch.Tensor, ids: torch.Tensor, seen: torch.Tensor, count: torch.Tensor, horizon: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Load ids: their places, int64 [n], NO_ROW for those without, and whether they had them before.

        Of what was there and what comes, each bucket keeps those that go last. Marks nothing.
        """
        places = self.match(home, ids)
        known = places >= 0
        self._write(places[known], ids[known], seen[known], count[known])
        new = (~known).nonzero().view(-1)
        new = new[home[new].argsort(stable=True)]
        chosen = self._settle(home[new], ids[new], seen[new], count[new], horizon)
        came = new[chosen >= 0]
        places[new] = chosen
        chosen = chosen[chosen >= 0]
        self.taken += int((self.flat_ids[chosen] == EMPTY).sum())
        self.touched.index_fill_(0, chosen, False)
        self.fresh.index_fill_(0, chosen, False)
        self._write(chosen, ids[came], seen[came], count[came])
        return places, known

    def _write(
        self, places: torch.Tensor, ids: torch.Tensor, seen: torch.Tensor, count: torch.Tensor
    ) -> None:
        self.flat_ids.index_copy_(0, places, ids)
        self.flat_seen.index_copy_(0, places, seen)
        self.count.index_copy_(0, places, count)

    def _settle(
        self, home: torch.Tensor, ids: torch.Tensor, seen: torch.Tensor, count: torch.Tensor, horizon: int
    ) -> torch.Tensor:
        """Places for ids that have none, int64 [n], bucket by bucket."""
        if not len(home):
            return home
        buckets, inverse, turn = turns(home)
        free = self.ids.index_select(0, buckets) == EMPTY
        num_free = free.sum(1)
        fits = (torch.bincount(inverse) <= num_free)[inverse]
        slots = free.nonzero()[:, 1]
        places = torch.full_like(home, NO_ROW)
        at = (num_free.cumsum(0) - num_free)[inverse] + turn
        places[fits] = slots[at[fits]] + home[fits] * self.width
        if not bool(fits.all()):
            which = (~fits).nonzero().view(-1)
            places[which] = self._compete(home[which], ids[which], seen[which], count[which], horizon)
        return places

    def _compete(
        self, home: torch.Tensor, ids: torch.Tensor, seen: torch.Tensor, count: torch.Tensor, horizon: int
    ) -> torch.Tensor:
        """Places for ids where there are not enough; NO_ROW for those that go first."""
        keys = self.order.keys(ids, seen, count, horizon)
        best = torch.arange(len(home), device=home.device)
        # Those that go last come first, and one bucket after the other.
        for key in reversed(keys):
            best = best[key[best].argsort(stable=True, descending=True)]
        best = best[home[best].argsort(stable=True)]
        buckets, inverse, turn = turns(home[best])
        there = self._keys(buckets, horizon)
        slot = slots_in_order(there)[inverse, turn.clamp(max=self.width - 1)]
        higher = is_lower([key[inverse, slot] for key in there], [key[best] for key in keys])
        places = torch.where((turn < self.width) & higher, home[best] * self.width + slot, NO_ROW)
        return torch.empty_like(places).index_copy_(0, best, places)


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
