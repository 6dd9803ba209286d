"""Places in buckets: which id has which, since when, and who gets the place of whom.

Plain operations on flat tensors. A place is a number: its bucket times the width, plus a slot. What is said
about slots never depends on their order, so it does not matter in which one an id came to lie. b: buckets; w:
places in one; n: ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from recsuite.sharding.dynamic.clock import NEVER, PINNED, Order
from recsuite.sharding.dynamic.contents import Marks, Waiting
from recsuite.sharding.dynamic.ranking import is_lower, lowest, slots_in_order, turns
from recsuite.sharding.dynamic.spec import EMPTY, NO_ROW

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
