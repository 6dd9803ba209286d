"""Who had what, for the events of a batch: the other items of each event's user, and the other users of its
item.

Where time counts, each event has a list of its own, with the last of those that came before it; or, where
their order is read, the events of a run of one user read one list, each what stands before it. Where time
does not count, as under a random split, events of one user share a list of all items that the user had, and
an event's own item is subtracted again from the sum over it: so a batch looks each list up once, however many
of its events are of that user. Read from memory-mapped columns; a worker imports this module: no torch, no
pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from recsuite.datasets.batching.places import places_of, take_lists
from recsuite.datasets.columns import NOWHERE
from recsuite.datasets.schema import AUDIENCE, HISTORY, ITEM, USER
from recsuite.gaps import OLDEST

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
