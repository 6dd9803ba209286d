"""Events of a batch: their order, features, lists of what users and items had, and negatives.

Training events come shuffled anew in each pass, by a permutation of which any process can compute any part.
Where a model reads the order of what a user had, whole pieces of it are shuffled: each user's events are cut
into pieces of at most as many as are read, elsewhere in each pass, so that an event is read with a short past
now and with a long one then. A batch then holds runs, each of one user, and needs no padding.

Lists are the other items of each event's user, and the other users of its item. Where time counts, each event
has a list of its own, with the last of those that came before it; or, where their order is read, the events
of a run of one user read one list, each what stands before it. Where time does not count, as under a random
split, events of one user share a list of all items that the user had, and an event's own item is subtracted
again from the sum over it: so a batch looks each list up once, however many of its events are of that user.

Negatives are the items of an event's group, and some that are drawn for a step. What a user had is none
where it is not recommended, see `Schema.seen`.

Read from memory-mapped columns; a worker imports this module: no torch, no pandas.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsuite.config.sections import NUM_GAPS, DataConfig, ModelConfig
from recsuite.datasets.columns import NOWHERE, Columns, MappedColumn
from recsuite.datasets.schema import AUDIENCE, ENTITIES, EVENT, HISTORY, ITEM, LISTS, UNKNOWN_ROW, USER, Table

if TYPE_CHECKING:
    import torch

# Seconds that a number of 32 bits holds.
OLDEST = 2**31 - 1


def gaps_of(seconds: np.ndarray) -> np.ndarray:
    """The bucket of each gap, int32 [n]: of 0 seconds 0, of 1 and 2 it is 1, of 3 to 6 it is 2, and so on.

    seconds: whole numbers of any type, [n]; below 0 they count as 0.
    """
    # The exponent of 1 + s in binary, which is exact, unlike a logarithm.
    exponents = np.frexp(1.0 + np.maximum(seconds, 0))[1] - 1
    return np.minimum(exponents, NUM_GAPS - 1).astype(np.int32)


# Records that are copied at once; longer lists are cut into such pieces. With more of them a short list
# beside a long one would cost the bytes of that.
RUN = 64
# As many as stay in the cache of a core between the one copy and the other.
RUNS_AT_ONCE = 1024


def places_of(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places start, start + 1, ... of every list, list after list, int64 [sum of counts]."""
    # They may be columns of a table of int32: numpy is slow where types differ and numbers lie apart.
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    ends = counts.cumsum()
    places = np.arange(ends[-1] if len(ends) else 0)
    # The n-th value of a list lies n places after its start.
    places += (starts - (ends - counts)).repeat(counts)
    return places


def take_lists(column: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`column.take(places_of(starts, counts), axis=0)`, several times as fast where lists are long.

    column: records one behind the other in memory, [number, ...].
    """
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    longest = int(counts.max(initial=0))
    width, total = min(longest, RUN), int(counts.sum())
    # Room for what the last runs have beyond their lists.
    taken = np.empty((total + width, *column.shape[1:]), column.dtype)
    if total == 0:
        return taken[:0]
    if longest > width:
        starts, counts = _pieces(starts, counts, width)
    begins = counts.cumsum() - counts
    # numpy copies element by element, so a whole run is made one element. What it has beyond its list lies
    # where the next one begins, and is overwritten by that: numpy assigns in the order of the places.
    sources, targets = _runs(column, width), _runs(taken, width)
    within = np.minimum(starts, len(sources) - 1)
    for first in range(0, len(starts), RUNS_AT_ONCE):
        part = slice(first, first + RUNS_AT_ONCE)
        targets[begins[part]] = sources[within[part]]
    # The column ends before a run from there would.
    late = np.flatnonzero(within < starts)
    taken[places_of(begins[late], counts[late])] = column[places_of(starts[late], counts[late])]
    return taken[:total]


def _pieces(starts: np.ndarray, counts: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists cut into pieces of at most `width`: their starts and counts."""
    numbers = -(-counts // width)
    before = width * places_of(np.zeros_like(numbers), numbers)
    return starts.repeat(numbers) + before, np.minimum(counts.repeat(numbers) - before, width)


def _runs(column: np.ndarray, width: int) -> np.ndarray:
    """The memory of a column as its runs of `width` records, one from each record on, which overlap."""
    size = column.itemsize * math.prod(column.shape[1:])
    # Checked against the memory of the column, unlike numpy's as_strided.
    return np.ndarray((len(column) - width + 1,), f"V{width * size}", buffer=column, strides=(size,))


# Three rounds with a random function in each cannot be told from a random permutation by who asks for places
# (Luby and Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988). With
# two, the order shows; docs/decisions.md has the figures.
ROUNDS = 3
# Positions are pairs of numbers below 2^16, so that all products fit 32 bits.
HALF = np.uint32(16)
MAX_NUMBER = 2**31
# How many shapes of the grid are tried for one with few places too many.
SHAPES_TRIED = 256
# Odd constants with well spread bits: 2^32 over the golden ratio, and one of xxHash's primes.
MULTIPLIERS = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))


def shuffled(positions: np.ndarray, number: int, *draws: int) -> np.ndarray:
    """Where a shuffle of range(number) puts the positions, int64 [n] in and out.

    draws: the numbers by which one shuffle differs from another, such as the seed and the epoch.

    A Feistel network over the rows and columns of a grid permutes its places, which are `number` or a few
    more; whoever lands on one too many goes through again, which permutes the rest ("cycle walking": Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). `number` is at most 2^31.
    """
    assert number <= MAX_NUMBER
    shape, keys = _grid(number), _keys(*draws)
    result = _permuted(positions, shape, keys)
    outside = np.flatnonzero(result >= number)
    while len(outside):
        result[outside] = _permuted(result[outside], shape, keys)
        outside = outside[result[outside] >= number]
    return result


@functools.lru_cache
def _grid(number: int) -> tuple[np.uint32, np.uint32]:
    """Rows and columns, nearly a square, of the smallest of many grids with `number` places or more."""
    least = math.isqrt(number - 1) + 1
    rows = min(range(least, least + SHAPES_TRIED), key=lambda rows: -number % rows)
    return np.uint32(rows), np.uint32(-(-number // rows))


@functools.lru_cache
def _keys(*draws: int) -> list[np.uint32]:
    return list(np.random.SeedSequence(draws).generate_state(ROUNDS, np.uint32))


def _permuted(positions: np.ndarray, shape: tuple[np.uint32, np.uint32], keys: list[np.uint32]) -> np.ndarray:
    """One pass through the network, in 32 bits and in place: numpy's loops then use the whole vector unit."""
    # The half that a round changes comes first, with the number of its values.
    other = positions.astype(np.uint32)
    changed = other // shape[1]
    other -= changed * shape[1]
    size, other_size = shape
    hashed, shifted = np.empty_like(other), np.empty_like(other)
    for key in keys:
        np.bitwise_xor(other, key, out=hashed)
        hashed *= MULTIPLIERS[0]
        np.right_shift(hashed, np.uint32(15), out=shifted)
        hashed ^= shifted
        hashed *= MULTIPLIERS[1]
        # The high half of the hash times the size, over 2^16: a number below the size.
        hashed >>= HALF
        hashed *= size
        hashed >>= HALF
        changed += hashed
        # Modulo size: what is below it wraps around to something larger.
        np.subtract(changed, size, out=shifted)
        np.minimum(changed, shifted, out=changed)
        changed, other, size, other_size = other, changed, other_size, size
    # The half that the last round changed, the first one of the two, has been renamed.
    other *= shape[1]
    other += changed
    return other.astype(np.int64)


# Whose lists they are, and whom they list.
OWNERS = {HISTORY: USER, AUDIENCE: ITEM}
MEMBERS = {HISTORY: ITEM, AUDIENCE: USER}


class Shared(NamedTuple):
    """Lists of one kind for n events.

    records: what the columns have of their members, list after list, [sum of counts, ...]; starts: where in
    the columns the list that lies at each event begins, or what its sample is taken from, int64 [n]; counts:
    how many are in it, 0 where an event takes the list of another one, int64 [n]; sources: the event whose
    list it takes, int64 [n]; own: 1 where it is in that list itself and has to be subtracted, else 0,
    float32 [n]; left: how many there are without it, int64 [n].
    """

    records: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    sources: np.ndarray
    own: np.ndarray
    left: np.ndarray


class Sample(NamedTuple):
    """Some of what owners have, evenly taken: from an offset on every stride-th, around the end to the begin;
    of each owner where it begins in the file, how much there is, and how many are taken, int64 [n].
    """

    begins: np.ndarray
    numbers: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray

    @property
    def strides(self) -> np.ndarray:
        """As large as they can be with all taken ones distinct, int64 [n]."""
        strides: np.ndarray = np.maximum(self.numbers // np.maximum(self.counts, 1), 1)
        return strides

    def places(self) -> np.ndarray:
        """The places in the files, owner after owner, int64 [sum of counts]."""
        if (self.counts == self.numbers).all():
            return places_of(self.begins, self.counts)
        steps = places_of(np.zeros_like(self.counts), self.counts) * self.strides.repeat(self.counts)
        steps += self.offsets.repeat(self.counts)
        steps %= self.numbers.repeat(self.counts)
        return steps + self.begins.repeat(self.counts)

    def holds(self, places: np.ndarray) -> np.ndarray:
        """Whether each owner's sample has a place of its part, bool [n]; of -1 none has."""
        after = (places - self.begins - self.offsets) % np.maximum(self.numbers, 1)
        turn, rest = np.divmod(after, self.strides)
        return (places >= 0) & (rest == 0) & (turn < self.counts)


class Turns(NamedTuple):
    """Where n events stand in histories, and where what they read begins, int64 [n] both; in_runs: whether
    those with one begin that follow each other are a run, as they are where they stand in histories
    themselves.
    """

    places: np.ndarray
    starts: np.ndarray
    in_runs: bool

    def part(self, part: slice) -> Turns:
        """Of some of the events."""
        return Turns(self.places[part], self.starts[part], self.in_runs)


class Read(NamedTuple):
    """What n events read of the orders of their users.

    history: the lists of runs, each with the first event of its run; numbers: how many values of its list
    stand before each event, int32 [n]; places: where in histories each value of the lists stands, int64;
    ages: how many seconds before the last event of its run each value of the lists was, int32 [sum of
    counts].
    """

    history: Shared
    numbers: np.ndarray
    places: np.ndarray
    ages: np.ndarray


ReadColumn = Callable[[str], np.ndarray]


def before(name: str, events: np.ndarray, most: int, prefix: str, read: ReadColumn) -> Shared:
    """What came before each event, the last `most` of it.

    events: records, [n]; prefix: of the columns that hold it; read: a column by its name.
    """
    begins = read(f"{prefix}{name}_offsets").take(events[OWNERS[name]])
    ends = events[f"{name}_end"].astype(np.int64)
    starts = np.maximum(begins, ends - most)
    counts = ends - starts
    records = take_lists(read(f"{prefix}{name}"), starts, counts)
    nobody = np.zeros(len(events), np.float32)
    return Shared(records, starts, counts, np.arange(len(events)), nobody, left=counts)


def others(
    name: str, events: np.ndarray, most: int, prefix: str, read: ReadColumn, draws: Sequence[int]
) -> Shared:
    """All that the owner of each event had but the event itself, or a sample of `most` of it.

    A sample begins where the draws say, numbers by which one differs from another. Otherwise as `before`.
    """
    owners, firsts, inverse = np.unique(events[OWNERS[name]], return_index=True, return_inverse=True)
    ends = read(f"{prefix}{name}_offsets")
    begins = ends.take(owners)
    numbers = ends.take(owners + 1) - begins
    counts = np.minimum(numbers, most)
    offsets = np.where(numbers > most, mixed(owners, draws) % np.maximum(numbers, 1), 0)
    sample = Sample(begins, numbers, counts, offsets)
    of_event = Sample(*(part.take(inverse) for part in sample))
    # Only training events have a place of their own among those that are known.
    places = events[f"{name}_place"].astype(np.int64)
    if prefix:
        places = np.full_like(places, NOWHERE)
    own = of_event.holds(places)
    left = of_event.counts - own
    # In the order of the events at which the lists lie.
    order = np.argsort(firsts)
    starts, counts = np.zeros((2, len(events)), np.int64)
    starts[firsts], counts[firsts] = begins, sample.counts
    in_order = Sample(*(part.take(order) for part in sample))
    records = read(f"{prefix}{name}").take(in_order.places(), axis=0)
    sources = firsts.take(inverse)
    return Shared(records, starts, counts, sources, own.astype(np.float32), left)


def in_order(turns: Turns, times: np.ndarray, prefix: str, read: ReadColumn) -> Read:
    """What events read of the orders of their users: all before them from where it begins. Of one time the
    order is that of the file. times: of the events, int64 [n]. Otherwise as `before`.
    """
    places, starts = turns.places, turns.starts
    number = len(places)
    is_first = np.ones(number, bool)
    if turns.in_runs:
        is_first[1:] = (np.diff(starts) != 0) | (np.diff(places) != 1)
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], number)[: len(firsts)] - 1
    counts = np.zeros(number, np.int64)
    counts[firsts] = places[lasts] - starts[firsts]
    records = take_lists(read(f"{prefix}{HISTORY}"), starts, counts)
    seconds = take_lists(read(f"{prefix}{HISTORY}_time"), starts, counts)
    ages = (times[lasts].repeat(counts[firsts]) - seconds).clip(0, OLDEST).astype(np.int32)
    sources = firsts[is_first.cumsum() - 1]
    history = Shared(records, starts, counts, sources, np.zeros(number, np.float32), counts)
    return Read(history, (places - starts).astype(np.int32), places_of(starts, counts), ages)


def mixed(owners: np.ndarray, draws: Sequence[int]) -> np.ndarray:
    """A number for each owner, int64 [n], another one for other draws."""
    # A hash of the owner: which rank has an event must not change what is drawn for it.
    seed = np.random.SeedSequence([*draws]).generate_state(1, np.uint64)
    mixed = (owners.astype(np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.int64)


def with_own(records: np.ndarray, counts: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Lists with one more value behind each, that of the event itself, [sum of counts + n].

    Its row is what is subtracted from a sum that has it, and what a prior is held against.
    """
    ends = (counts + 1).cumsum()
    found = np.empty(len(records) + len(own), records.dtype)
    is_own = np.zeros(len(found), bool)
    is_own[ends - 1] = True
    found[is_own], found[~is_own] = own, records
    return found


def reading_links(
    sources: np.ndarray, reads: np.ndarray, rows: range, empty: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Sources, scales, own and reads of a `Batch` whose rows read lists. sources, reads: of the events, whose
    rows are the first of these; all others have empty lists of their own.
    """
    number = len(sources)
    all_sources, all_reads = empty((1, rows.stop), np.int64), empty(rows.stop, np.int32)
    all_sources[0], all_reads[:] = np.arange(rows.stop), 0
    of_events = slice(rows.start, rows.start + number)
    all_sources[0, of_events] = sources + rows.start
    all_reads[of_events] = reads
    nothing = empty((0, rows.stop), np.float32)
    return all_sources, nothing, nothing, all_reads


def links_of(
    lists: Sequence[Shared], batch_size: int, empty: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources, scales and own of a `Batch`; padding takes a list of its own, times 0."""
    shape = len(lists), batch_size
    sources, scales, own = empty(shape, np.int64), empty(shape, np.float32), empty(shape, np.float32)
    for place, found in enumerate(lists):
        number = len(found.sources)
        sources[place, :number], sources[place, number:] = found.sources, range(number, batch_size)
        # A sample counts as the whole list would if it had no more members: scaled up to stand for a list
        # that is many times as long, its noise would be as many times that of a list, and training diverges.
        of_sums = np.where(found.left > 0, 1 / np.sqrt(np.maximum(found.left, 1)), 0)
        scales[place, :number], scales[place, number:] = of_sums, 0
        own[place, :number], own[place, number:] = found.own, 0
    return sources, scales, own


class Ages(NamedTuple):
    """Of each item of the histories of n events, list after list: how many of its history came after it, the
    bucket of the seconds from it to the event, the seconds from it to the last event that reads its list, and
    a number drawn for it, int32 [sum of counts] each, or empty where nobody asks.
    """

    places: np.ndarray
    gaps: np.ndarray
    ages: np.ndarray
    draws: np.ndarray


NO_AGES = Ages(*[np.zeros(0, np.int32)] * 4)


def ages_of(history: Shared, times: np.ndarray, event_times: np.ndarray) -> Ages:
    """times: of the items; event_times: for each of them that of its event; int64 [sum of counts] both."""
    counts = history.counts
    # Counted from the end of its list.
    places = counts.repeat(counts) - 1 - places_of(np.zeros_like(counts), counts)
    return NO_AGES._replace(places=places.astype(np.int32), gaps=gaps_of(event_times - times))


# Small batches are shuffled together: numpy's overhead for each would be more than the work.
POSITIONS_AT_ONCE = 32_768


class Stretch(NamedTuple):
    """A stretch of a pass over events: which pass, its epoch, the steps counted from an event, and the range
    of all positions of the pass.
    """

    split: str
    epoch: int
    first: int
    positions: range


class Pieces(NamedTuple):
    """The pieces of one pass in their order: where in histories each begins, and where in the pass it ends,
    int64 [P] both.
    """

    begins: np.ndarray
    ends: np.ndarray

    def turns(self, numbers: np.ndarray) -> Turns:
        """Where the events that have these numbers in the pass stand, int64 [n]."""
        pieces = np.searchsorted(self.ends, numbers, side="right")
        begins = self.begins.take(pieces)
        before = np.concatenate([[0], self.ends]).take(pieces)
        return Turns(begins + (numbers - before), begins, in_runs=True)


def pieces_of(offsets: np.ndarray, longest: int, seed: int, epoch: int) -> Pieces:
    """The pieces of a pass. offsets: where in histories the events of each user begin, int64 [users + 1]."""
    counts = np.diff(offsets)
    # Whoever has few is one piece. Of all others the first piece has some length, the others are full, and
    # the last one is what is left.
    first = mixed(np.arange(len(counts)), (seed, epoch)) % longest + 1
    first = np.where(counts <= longest, counts, first)
    numbers = np.where(counts > 0, 1 - (first - counts) // longest, 0)
    place = places_of(np.zeros_like(numbers), numbers)
    user = np.repeat(np.arange(len(counts)), numbers)
    begins = offsets[user] + np.where(place > 0, first[user] + (place - 1) * longest, 0)
    lengths = np.append(begins[1:], offsets[-1]) - begins
    order = shuffled(np.arange(len(begins)), len(begins), seed, epoch)
    return Pieces(begins[order], lengths[order].cumsum())


class EventOrder:
    """The positions of one rank's batches. Pickles to numbers: what it remembers stays.

    longest: how many of the events before it an event reads at most, where their order counts; else 0.
    """

    def __init__(self, batch_size: int, rank: int, world_size: int, seed: int, longest: int) -> None:
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.longest = longest
        # Of the last steps asked for: which ones, their positions, and where they stand in histories.
        self._block: tuple[Any, np.ndarray, Turns | None] | None = None
        self._pieces: tuple[int, Pieces] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # They would make what is sent to a worker large.
        return {**self.__dict__, "_block": None, "_pieces": None}

    def of_step(
        self, stretch: Stretch, step: int, read: Callable[[str], np.ndarray]
    ) -> tuple[np.ndarray, Turns | None]:
        """Positions in the columns of events, int64 [at most batch_size], this rank's slice of the step; and
        where they stand, of training events whose order counts. read: a column by its name.
        """
        num_steps = max(1, POSITIONS_AT_ONCE // self.batch_size)
        block, place = divmod(step, num_steps)
        wanted = (stretch, block)
        # Steps are asked for in their order, so this block has the positions of the next ones too.
        if self._block is None or self._block[0] != wanted:
            steps = range(num_steps * block, num_steps * (block + 1))
            self._block = wanted, *self._of_steps(stretch, steps, read)
        part = slice(place * self.batch_size, (place + 1) * self.batch_size)
        _, positions, turns = self._block
        return positions[part], turns.part(part) if turns else None

    def _of_steps(
        self, stretch: Stretch, steps: range, read: Callable[[str], np.ndarray]
    ) -> tuple[np.ndarray, Turns | None]:
        number = len(stretch.positions)
        # A step is one stretch of the pass, cut into a slice for each rank: what it holds depends on the size
        # of the global batch alone, not on the number of ranks.
        begins = (np.arange(steps.start, steps.stop) * self.world_size + self.rank) * self.batch_size
        numbers = (stretch.first + begins[:, None] + np.arange(self.batch_size)).reshape(-1)
        # They rise, so what lies beyond the end of the split is behind one place.
        numbers = numbers[: np.searchsorted(numbers, number)]
        if stretch.split == "train" and self.longest:
            turns = self._pieces_of(stretch.epoch, read).turns(numbers)
            return read(f"{HISTORY}_event").take(turns.places).astype(np.int64), turns
        if stretch.split == "train":
            # Training alone: predictions are held against labels in the order of the disk.
            numbers = shuffled(numbers, number, self.seed, stretch.epoch)
        return numbers + stretch.positions.start, None

    def _pieces_of(self, epoch: int, read: Callable[[str], np.ndarray]) -> Pieces:
        if self._pieces is None or self._pieces[0] != epoch:
            self._pieces = epoch, pieces_of(read(f"{HISTORY}_offsets"), self.longest, self.seed, epoch)
        return self._pieces[1]


def turns_of(
    events: np.ndarray, positions: np.ndarray, longest: int, prefix: str, read: Callable[[str], np.ndarray]
) -> Turns:
    """Where events that are not trained on stand, each by itself. events: records, [n]; positions: of them,
    int64 [n]; longest: how many of those before it an event reads at most; prefix: of the columns that hold
    histories.
    """
    places = read(f"{HISTORY}_before").take(positions).astype(np.int64)
    begins = read(f"{prefix}{HISTORY}_offsets").take(events[OWNERS[HISTORY]])
    return Turns(places, np.maximum(begins, places - longest), in_runs=False)


# Rows that are held against what their users had at once.
ROWS = 256


def bytes_of_group(batch_size: int, competitors: int) -> int:
    """How many bytes have a bit for each row of a group, see `Batch`."""
    return -(-min(batch_size, competitors) // 8)


def drawn(items: np.ndarray, number: int, *draws: int) -> np.ndarray:
    """So many of some items, each at most once, all of them in their order where there are no more.

    draws: numbers by which one sample differs from another.
    """
    if number >= len(items):
        return items
    # The first places of a permutation are a sample, of which no rank needs to know more.
    return items[shuffled(np.arange(number), len(items), *draws)]


def mark_had(
    found: np.ndarray,
    events: np.ndarray,
    ends: np.ndarray,
    negatives: np.ndarray,
    num_items: int,
    read: Callable[[str], np.ndarray],
) -> None:
    """Fill in what training events had before, see `Batch`. Takes time for all that each of their users had.

    found: uint8 [B, bytes of a group and of the negatives], of zeros; events: records, [n]; ends: the places
    in histories before which what came before each ends, [n]; negatives: positions of items, [N]; read: a
    column by its name.
    """
    group = found.shape[1] - bytes_of_group(len(negatives), len(negatives))
    # Without a group any number will do: so many are held against the negatives at once.
    size = 8 * group or ROWS
    for begin in range(0, len(events), size):
        rows, some = found[begin : begin + size], events[begin : begin + size]
        in_group = some[ITEM] if group else some[ITEM][:0]
        items = np.concatenate([in_group, negatives])
        had = _had(some, ends[begin : begin + size], items, num_items, read)
        for first, found_of in ((0, had[:, : len(in_group)]), (group, had[:, len(in_group) :])):
            packed = np.packbits(found_of, axis=1, bitorder="little")
            rows[: len(packed), first : first + packed.shape[1]] = packed


def _had(
    events: np.ndarray,
    ends: np.ndarray,
    items: np.ndarray,
    num_items: int,
    read: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Whether the user of each event had each item before, bool [events, items]."""
    distinct, inverse = np.unique(items, return_inverse=True)
    # Each item's place among those that are asked for, from 1 on; 0 for all others. All that users had is
    # held against it, which is the whole cost: nothing is sorted or searched for.
    place_of = np.zeros(num_items, np.int32)
    place_of[distinct] = np.arange(1, len(distinct) + 1)
    starts = read(f"{HISTORY}_offsets").take(events[OWNERS[HISTORY]])
    counts = ends - starts
    places = place_of.take(read("seen").take(places_of(starts, counts)))
    there = np.flatnonzero(places)
    rows = np.searchsorted(counts.cumsum(), there, side="right")
    found = np.zeros((len(events), len(distinct)), bool)
    found[rows, places[there] - 1] = True
    return found.take(inverse, axis=1)


# One of so many training events counts as that of an unknown user, so that row 0 learns what a new user is
# like, and few enough users lose an event to it.
FORGOTTEN_EVERY = 64


class Lists(NamedTuple):
    """A feature with lists for n events: the values, list after list, and how many are each event's, [n].

    padding: how many unknown rows stand for a row that pads the batch.
    """

    values: np.ndarray
    counts: np.ndarray
    padding: int


class Found(NamedTuple):
    """What was found of n events: table rows of features with one value, [features, n], and dense numbers,
    [n, numbers], of their users, of their items and of their own; and the features with lists.
    """

    single: list[np.ndarray]
    numbers: list[np.ndarray]
    lists: list[Lists]

    def behind(self, other: Found) -> Found:
        """Of others and, behind them, of these."""
        pairs = zip(other.lists, self.lists, strict=True)
        return Found(
            [np.concatenate(both, axis=1) for both in zip(other.single, self.single, strict=True)],
            [np.concatenate(both) for both in zip(other.numbers, self.numbers, strict=True)],
            [
                Lists(
                    np.concatenate([before.values, mine.values]),
                    np.concatenate([before.counts, mine.counts]),
                    mine.padding,
                )
                for before, mine in pairs
            ],
        )


class Asked(NamedTuple):
    """For which events lists are wanted: those of a split; draws: what tells one sample from another."""

    split: str
    draws: tuple[int, ...]


class EventFeatures:
    """The features of events by position. Pickles to paths and names; columns are mapped where they are first
    read.
    """

    def __init__(self, columns: Columns, config: DataConfig) -> None:
        self.folder = columns.folder
        self.num_train = columns.num_train
        self.schema = columns.schema
        self.tables = columns.tables
        # How long they are at most, where each event has one of its own.
        self.lists = {
            name: most
            for name, most in config.lists.items()
            if name in [table.name for table in columns.tables]
        }
        # And where events share them.
        self.most_others = config.others if config.shares_lists else 0
        self._with_lists = {
            entity: [
                table.name for table in self.tables if table.feature.multi and table.feature.entity == entity
            ]
            for entity in ENTITIES
        }
        self._of_events = [table.name for table in self.tables if table.feature.entity == EVENT]
        self._columns: dict[str, MappedColumn] = {}
        self._trained: np.ndarray | None = None
        # By the place of a table, the column with the ids of what is found for it.
        self._ids = {
            place: f"{self.schema.vocabulary_of(table.name)}_ids"
            for place, table in enumerate(self.tables)
            if table.feature.is_dynamic
        }

    def __getstate__(self) -> dict[str, Any]:
        # A mapping cannot be sent to a worker, which makes its own.
        return {**self.__dict__, "_columns": {}, "_trained": None}

    def check(self) -> None:
        """Refuse to continue with a file that was cut: touching a page beyond its end would end the process
        by a signal, and say nothing.

        Raises:
            UserError: see `MappedColumn.check`.
        """
        for column in self._columns.values():
            column.check()

    def events(self, positions: np.ndarray, split: str) -> np.ndarray:
        """The records of some events, see `record_type`, [n]."""
        rows = self.column("rows")
        if split != "catalogue":
            return rows.take(positions)
        # As if the first user had an event with each item, before any other, of which nothing else is known:
        # who asks looks at items alone.
        events = np.zeros(len(positions), rows.dtype)
        events[ITEM], events["features"], events["numbers"] = positions, UNKNOWN_ROW, np.nan
        for name in OWNERS:
            events[f"{name}_place"] = NOWHERE
        # Of an item all that had it.
        events[f"{AUDIENCE}_end"] = self.column(f"{AUDIENCE}_offsets").take(positions + 1)
        return events

    def find(self, events: np.ndarray) -> Found:
        """What the users, the items and the events of some records have."""
        entities = {
            entity: self.column(f"{self.schema.name_of(entity)}_features").take(events[entity])
            for entity in ENTITIES
        }
        records = [*entities.values(), events]
        lists = []
        for entity, record in entities.items():
            places = record["lists"].transpose(1, 2, 0)
            for name, (starts, counts) in zip(self._with_lists[entity], places, strict=True):
                known = self.column(f"{name}_values").take(places_of(starts, counts))
                lists.append(Lists(known, counts, padding=1))
        return Found(
            [record["features"].T for record in records], [record["numbers"] for record in records], lists
        )

    def find_items(self, items: np.ndarray) -> Found:
        """What items alone have, as if of an unknown user without a history. items: their positions, int64
        [n].
        """
        found = self.find(self.events(items, "catalogue"))
        found.single[ENTITIES.index(USER)][:] = UNKNOWN_ROW
        nothing = Lists(np.zeros(0, np.int64), np.zeros(len(items), np.int64), padding=0)
        found.lists.extend([nothing] * len(self.lists))
        return found

    def trained_items(self) -> np.ndarray:
        """The positions of the items that the training has, int32."""
        if self._trained is None:
            offsets = self.column(f"{AUDIENCE}_offsets")
            self._trained = np.flatnonzero(np.diff(offsets)).astype(np.int32)
        return self._trained

    def find_order(self, events: np.ndarray, positions: np.ndarray, turns: Turns | None, split: str) -> Read:
        """What events read of the orders of their users. turns: where they stand, where that is known
        already.
        """
        prefix = "test_" if split == "test" else ""
        if split == "catalogue":
            nowhere = np.zeros(len(events), np.int64)
            turns = Turns(nowhere, nowhere, in_runs=False)
        elif turns is None:
            turns = turns_of(events, positions, self.lists[HISTORY], prefix, self.column)
        # The positions of a catalogue are no events.
        return in_order(turns, self.column("time").take(positions, mode="clip"), prefix, self.column)

    def find_lists(self, events: np.ndarray, asked: Asked) -> dict[str, Shared]:
        """Who had what, by the names of the lists that the tables have."""
        prefix = "test_" if asked.split == "test" else ""
        if self.most_others:
            return {
                name: others(name, events, self.most_others, prefix, self.column, asked.draws)
                for name in self.lists
            }
        return {name: before(name, events, most, prefix, self.column) for name, most in self.lists.items()}

    def ages(self, positions: np.ndarray, history: Shared, split: str) -> Ages:
        """How old the items of the histories of events are."""
        column = self.column("test_history_time" if split == "test" else "history_time")
        times = take_lists(column, history.starts, history.counts)
        # The positions of a catalogue are no events, and its histories are empty.
        event_times = self.column("time").take(positions, mode="clip").repeat(history.counts)
        return ages_of(history, times, event_times)

    def rarities(self, events: np.ndarray, own: np.ndarray, share: float, found: np.ndarray) -> None:
        """Fill in, for each training event, `share` over the number of those of its user, of its item, of
        all, and of those with the same row of each of its own features, float32 [3 + features, n].

        own: the rows of these, int32 [features, n], unknown where the event is to have nothing of its own.
        """
        # Without the event's own weight: how much is known of a row is a matter of its events' number.
        found[:] = share
        for place, (name, owner) in enumerate(OWNERS.items()):
            offsets = self.column(f"{name}_offsets")
            found[place] /= offsets.take(events[owner] + 1) - offsets.take(events[owner])
        found[len(OWNERS)] /= self.num_train
        for name, rows, rarity in zip(self._of_events, own, found[len(OWNERS) + 1 :], strict=True):
            counts = self.column(f"{name}_counts").take(rows)
            # Nearly all that train the unknown row are those that forget what they have.
            counts += (rows == UNKNOWN_ROW) * np.int32(-(-self.num_train // FORGOTTEN_EVERY))
            rarity /= counts

    def join(
        self, batch_size: int, single: list[np.ndarray], lists: list[Lists], empty: Callable[..., np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The values and lengths of a `Batch`, of what was found for its real rows: ids of dynamic tables,
        rows of all others.
        """
        num_real, num_single = single[0].shape[1], sum(map(len, single))
        num_padding = batch_size - num_real
        lengths = empty((len(self.tables), batch_size), np.int32)
        last = num_single * batch_size
        values = empty(last + sum(len(part.values) + part.padding * num_padding for part in lists), np.int64)
        lengths[:num_single] = 1
        # All features with one value are joined by one call: a small batch costs calls more than bytes.
        columns = values[:last].reshape(num_single, batch_size)
        np.concatenate(single, out=columns[:, :num_real])
        columns[:, num_real:] = UNKNOWN_ROW
        for place, part in enumerate(lists, start=num_single):
            lengths[place, :num_real], lengths[place, num_real:] = part.counts, part.padding
            first, last = last, last + len(part.values)
            values[first:last] = part.values
            first, last = last, last + part.padding * num_padding
            values[first:last] = UNKNOWN_ROW
        self._turn_into_ids(values, [batch_size] * num_single + [_size(part, num_padding) for part in lists])
        return values, lengths.reshape(-1)

    def _turn_into_ids(self, values: np.ndarray, sizes: list[int]) -> None:
        """Put ids in the place of what the columns have of dynamic tables. sizes: values of each table."""
        ends = [0, *itertools.accumulate(sizes)]
        for place, name in self._ids.items():
            part = slice(ends[place], ends[place + 1])
            # What stands for an unknown value has an id too, the first.
            values[part] = self.column(name).take(values[part])

    def column(self, name: str) -> np.ndarray:
        """A column, mapped from disk."""
        if not self._columns:
            # All at once: a training continues when the files are removed, and comes to the test at its end.
            paths = sorted(Path(self.folder).glob("*.npy"))
            self._columns = {path.stem: MappedColumn(path) for path in paths}
        if name not in self._columns:
            self._columns[name] = MappedColumn(Path(self.folder) / f"{name}.npy")
        return self._columns[name].values


def _size(part: Lists, num_padding: int) -> int:
    return len(part.values) + part.padding * num_padding


class Batch(NamedTuple):
    """One rank's part of a global batch, B rows, as plain tensors.

    `values` (int64) and `lengths` (int32 [features * B]) are those of a KeyedJaggedTensor whose keys are the
    data set's features in order: ids of dynamic features, rows of the tables of all others. `labels` is
    float32 [B]. `weights` is float32 [B]: 0 for the rows that pad the last batch, and for real rows global
    batch size / real rows in the global batch, so that the mean over ranks of the weighted mean over B is the
    mean over real rows; in training times the event's own weight. `more_labels` and `more_weights` are those
    of the labels after the first, float32 [B, L - 1]: both are 0 where an event lacks one. `history_labels`
    is float32, one for each value of the feature "history". `numbers` is float32 [B, dense numbers], in the
    order of the data set's, NaN where there is none.

    Where weights of histories are learned, `places` and `gaps` say of each value of the feature "history" how
    many of its list came after it, and how long before the event it came, see `gaps_of`, int32 both;
    elsewhere they are empty.

    Where there is an audience, each row has one more value behind its lists, its own item and its own user,
    and of each of S lists `sources`, int64 [S, B], is the row whose list a row takes; `scales`, float32
    [S, B], by what the sum of its values is multiplied; `own`, float32 [S, B], 1 where the row's own value is
    to be subtracted from that sum. `rarities` is float32 [3 + features of events, B]: the weight over
    the number of training events of the row's user, of its item, of all, and of those that share what the
    event has of each feature; 0 outside of training, and in a stream, which does not know how many will come.
    Elsewhere all four are empty.

    Where events compete, `had` is uint8 [B, bytes]: bit k of byte j of a row says that its user had, before,
    the item of row 8 j + k of its group; 0 outside of training. A group is 8 * bytes rows, or what is left.

    Where N items are drawn to compete with them, training has N rows before the B: of these items alone, in
    everything but `labels`, `weights` and `had`, which has as many bits more, in bytes behind those of the
    group.

    Where the order of events is read, rows that are a run of one user share the list of its first row:
    `sources`, int64 [1, N + B], is the row whose list a row reads, and `reads`, int32 [N + B], how many of
    its values stand before the row's event. `ages` says of each value of the feature "history" how many
    seconds before the event of the last row of its run it came, and `draws` is a number drawn for it in this
    pass, int32 both. Elsewhere all are empty.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    history_labels: torch.Tensor
    places: torch.Tensor
    gaps: torch.Tensor
    ages: torch.Tensor
    draws: torch.Tensor
    numbers: torch.Tensor
    sources: torch.Tensor
    scales: torch.Tensor
    own: torch.Tensor
    reads: torch.Tensor
    rarities: torch.Tensor
    had: torch.Tensor
    more_labels: torch.Tensor
    more_weights: torch.Tensor


def largest_batch(
    tables: Sequence[Table],
    num_numbers: int,
    batch_size: int,
    model: ModelConfig,
    num_negatives: int,
    most_shared: int = 0,
    more_labels: int = 0,
) -> int:
    """The most bytes that a batch can take, for a slot of the workers' ring: it is allocated once.

    num_negatives: the rows before those of events; most_shared: the values of one list for all rows together,
    where they share them; else 0; more_labels: how many labels there are after the first.
    """
    lists = [table for table in tables if table.name in LISTS]
    # Where there is an audience, each row has its own value behind each list.
    own = batch_size if AUDIENCE in [table.name for table in lists] else 0
    in_lists = {
        table.name: min(batch_size * table.longest, most_shared or batch_size * table.longest) + own
        for table in lists
    }
    num_rows = num_negatives + batch_size
    values = num_rows * sum(table.longest for table in tables if table.name not in LISTS)
    values += sum(in_lists.values())
    row = 4 * len(tables) + (4 + 4) * (1 + more_labels) + 4 * num_numbers
    row += bytes_of_group(batch_size, model.competitors) + bytes_of_group(num_negatives, num_negatives)
    # A source, and how much is read.
    row += (8 + 4) * model.reads_order
    if own:
        row += (8 + 4 + 4) * len(lists) + 4 * num_rarities(tables)
    # A label, and where they are told a place and a gap, or an age and a draw.
    of_member = 4 + (4 + 4) * model.learns_history_weights + (4 + 4) * model.reads_order
    # Each array begins on a cache line.
    return 8 * values + of_member * in_lists.get(HISTORY, 0) + num_rows * row + 64 * len(Batch._fields)


def num_rarities(tables: Sequence[Table]) -> int:
    """How many a `Batch` has for each row."""
    return len(ENTITIES) + 1 + sum(table.feature.entity == EVENT for table in tables)


def to_tensors(arrays: Sequence[np.ndarray]) -> Batch:
    """The arrays of a batch as tensors that share their memory."""
    import torch

    return Batch(*map(torch.from_numpy, arrays))
