"""Events of a batch: their order, features, user histories, and negatives.

Training events are shuffled in each pass, by a permutation of which any process can compute any part. If a
model reads the order of a user history, pieces of it are shuffled: each user's events are cut into pieces of
at most as many events as the model reads. The cuts lie elsewhere in each pass, so an event is read with a
short past in one pass and with a long one in another. A batch then holds runs, each of one user, and needs no
padding.

The user history of an event has the last items of its user before it. If the order is read, the events of a
run share one history, and each reads the part before itself. So a batch looks up each history once, for any
number of events of that user.

Negatives are the items of an event's group, and items that are drawn for a step. Items that the user had are
not negatives if they are not recommended, see `Schema.seen`.

Reads memory-mapped columns. A worker imports this module, so it imports neither torch nor pandas.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsuite.config.sections import DataConfig, ModelConfig
from recsuite.datasets.columns import Columns, MappedColumn, trained_items
from recsuite.datasets.schema import ENTITIES, HISTORY, ITEM, UNKNOWN_ROW, USER, Table
from recsuite.time_buckets import OLDEST, time_buckets_of

if TYPE_CHECKING:
    import torch

# Records that are copied at once; longer lists are cut into such pieces. With a larger number, each short
# list would cost as many bytes as a long one.
RUN = 64
# As many runs as stay in the cache of a core between the first copy and the second.
RUNS_AT_ONCE = 1024


def places_of(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Places start, start + 1, ... of every list, list after list, int64 [sum of counts]."""
    # The inputs may be strided columns of an int32 table: numpy is slow with mixed types and strides.
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    ends = counts.cumsum()
    places = np.arange(ends[-1] if len(ends) else 0)
    # The n-th value of a list lies n places after its start.
    places += (starts - (ends - counts)).repeat(counts)
    return places


def take_lists(column: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Same as `column.take(places_of(starts, counts), axis=0)`, but several times as fast for long lists.

    column: contiguous records, [number, ...].
    """
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    longest = int(counts.max(initial=0))
    width, total = min(longest, RUN), int(counts.sum())
    # With room for the records that the last runs copy beyond their lists.
    taken = np.empty((total + width, *column.shape[1:]), column.dtype)
    if total == 0:
        return taken[:0]
    if longest > width:
        starts, counts = _pieces(starts, counts, width)
    begins = counts.cumsum() - counts
    # numpy copies element by element, so a whole run is made one element. The records beyond its list are
    # overwritten by the next run: numpy assigns in the order of the places.
    sources, targets = _runs(column, width), _runs(taken, width)
    within = np.minimum(starts, len(sources) - 1)
    for first in range(0, len(starts), RUNS_AT_ONCE):
        part = slice(first, first + RUNS_AT_ONCE)
        targets[begins[part]] = sources[within[part]]
    # Lists near the end, where a whole run would exceed the column.
    late = np.flatnonzero(within < starts)
    taken[places_of(begins[late], counts[late])] = column[places_of(starts[late], counts[late])]
    return taken[:total]


def _pieces(starts: np.ndarray, counts: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut lists into pieces of at most `width`; return the starts and counts of the pieces."""
    numbers = -(-counts // width)
    before = width * places_of(np.zeros_like(numbers), numbers)
    return starts.repeat(numbers) + before, np.minimum(counts.repeat(numbers) - before, width)


def _runs(column: np.ndarray, width: int) -> np.ndarray:
    """View of a column as overlapping runs of `width` records, one beginning at each record."""
    size = column.itemsize * math.prod(column.shape[1:])
    # Checked against the memory of the column, unlike numpy's as_strided.
    return np.ndarray((len(column) - width + 1,), f"V{width * size}", buffer=column, strides=(size,))


# Three rounds with a random function in each cannot be distinguished from a random permutation (Luby and
# Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988). With two rounds
# the original order is visible; docs/log/2026-11.md has the figures.
ROUNDS = 3
# Positions are pairs of numbers below 2^16, so that all products fit 32 bits.
HALF = np.uint32(16)
MAX_NUMBER = 2**31
# Number of grid shapes that are tried, to find one with few unused places.
SHAPES_TRIED = 256
# Odd constants with well spread bits: 2^32 over the golden ratio, and one of xxHash's primes.
MULTIPLIERS = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))


def shuffled(positions: np.ndarray, number: int, *draws: int) -> np.ndarray:
    """Return the places of positions in a shuffle of range(number), int64 [n] in and out.

    draws: numbers that select the shuffle, such as the seed and the epoch.

    A Feistel network over the rows and columns of a grid permutes its places, which are `number` or a few
    more. A result of `number` or more goes through the network again, which permutes the rest ("cycle
    walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). `number` is at most 2^31.
    """
    assert number <= MAX_NUMBER
    shape, keys = grid_of(number), keys_of(*draws)
    result = _permuted(positions, shape, keys)
    outside = np.flatnonzero(result >= number)
    while len(outside):
        result[outside] = _permuted(result[outside], shape, keys)
        outside = outside[result[outside] >= number]
    return result


@functools.lru_cache
def grid_of(number: int) -> tuple[np.uint32, np.uint32]:
    """Rows and columns of the smallest nearly square grid, of those tried, with at least `number` places."""
    least = math.isqrt(number - 1) + 1
    rows = min(range(least, least + SHAPES_TRIED), key=lambda rows: -number % rows)
    return np.uint32(rows), np.uint32(-(-number // rows))


@functools.lru_cache
def keys_of(*draws: int) -> list[np.uint32]:
    """Return the keys of the rounds of a shuffle, see `shuffled`."""
    return list(np.random.SeedSequence(draws).generate_state(ROUNDS, np.uint32))


def _permuted(positions: np.ndarray, shape: tuple[np.uint32, np.uint32], keys: list[np.uint32]) -> np.ndarray:
    """Do one pass through the network, in 32 bits and in place, so that numpy uses the whole vector unit."""
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
        # Modulo size: if `changed` is below it, the difference wraps around to a larger number.
        np.subtract(changed, size, out=shifted)
        np.minimum(changed, shifted, out=changed)
        changed, other, size, other_size = other, changed, other_size, size
    # The last round swapped the names: `other` is the row, `changed` the column.
    other *= shape[1]
    other += changed
    return other.astype(np.int64)


class Histories(NamedTuple):
    """User histories of n events.

    records: of their items, history after history, int32 [sum of counts, 2], the row of the item and the bits
    of its label; starts: begin of each in the column, int64 [n]; counts: its length, int64 [n].
    """

    records: np.ndarray
    starts: np.ndarray
    counts: np.ndarray


class ReadPositions(NamedTuple):
    """Positions of n events in user histories.

    places: the place of each event, int64 [n]; starts: begin of the part that it reads, int64 [n]; in_runs:
    True if consecutive events with the same start are a run, as they are for training events.
    """

    places: np.ndarray
    starts: np.ndarray
    in_runs: bool

    def part(self, part: slice) -> ReadPositions:
        """Turns of a slice of the events."""
        return ReadPositions(self.places[part], self.starts[part], self.in_runs)


class OrderedReads(NamedTuple):
    """Parts of the user histories that n events read in order.

    history: of runs, each stored for the first event of its run, with the length 0 for the others; sources:
    the event whose history each event reads, int64 [n]; numbers: number of items in it before each event,
    int32 [n]; places: place of each item in the user histories, int64 [sum of counts]; ages: seconds from
    each item to the last event of its run, int32 [sum of counts].
    """

    history: Histories
    sources: np.ndarray
    numbers: np.ndarray
    places: np.ndarray
    ages: np.ndarray


# Returns a column by name.
ReadColumn = Callable[[str], np.ndarray]


def in_order(read_positions: ReadPositions, times: np.ndarray, prefix: str, read: ReadColumn) -> OrderedReads:
    """Parts of the user histories that events read in order: all values from their start to the event.

    Events of one time are in the order of the file. times: of the events, int64 [n]; prefix: of the names of
    the columns with the histories.
    """
    places, starts = read_positions.places, read_positions.starts
    number = len(places)
    is_first = np.ones(number, bool)
    if read_positions.in_runs:
        is_first[1:] = (np.diff(starts) != 0) | (np.diff(places) != 1)
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], number)[: len(firsts)] - 1
    counts = np.zeros(number, np.int64)
    counts[firsts] = places[lasts] - starts[firsts]
    records = take_lists(read(f"{prefix}{HISTORY}"), starts, counts)
    seconds = take_lists(read(f"{prefix}{HISTORY}_time"), starts, counts)
    ages = (times[lasts].repeat(counts[firsts]) - seconds).clip(0, OLDEST).astype(np.int32)
    sources = firsts[is_first.cumsum() - 1]
    history = Histories(records, starts, counts)
    return OrderedReads(history, sources, (places - starts).astype(np.int32), places_of(starts, counts), ages)


def mix_bits(owners: np.ndarray, draws: Sequence[int]) -> np.ndarray:
    """Pseudorandom number for each owner, int64 [n], selected by the draws."""
    # A hash of the owner: the number for an event must not depend on its rank.
    seed = np.random.SeedSequence([*draws]).generate_state(1, np.uint64)
    mixed = (owners.astype(np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.int64)


def reads_of(read: OrderedReads, rows: range, empty: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    """Return `sources` and `reads` of a `Batch`.

    The events have the first of these rows. All other rows have empty histories.
    """
    sources, reads = empty(rows.stop, np.int64), empty(rows.stop, np.int32)
    sources[:], reads[:] = np.arange(rows.stop), 0
    of_events = slice(rows.start, rows.start + len(read.sources))
    sources[of_events] = read.sources + rows.start
    reads[of_events] = read.numbers
    return {"sources": sources, "reads": reads}


class HistoryArrays(NamedTuple):
    """Fields of a `Batch` for user histories; unused ones are empty."""

    history_labels: np.ndarray
    places: np.ndarray
    time_buckets: np.ndarray
    ages: np.ndarray
    draws: np.ndarray
    sources: np.ndarray
    reads: np.ndarray


NOTHING = np.zeros(0, np.int32)
NO_HISTORIES = HistoryArrays(
    NOTHING.astype(np.float32), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING.astype(np.int64), NOTHING
)


# Small batches are shuffled together: for one of them, numpy's overhead would exceed the work.
POSITIONS_AT_ONCE = 32_768


class PassPart(NamedTuple):
    """Part of a pass over events.

    split, epoch: of the pass; first: place in the pass at which step 0 begins; positions: range of all
    positions of the pass.
    """

    split: str
    epoch: int
    first: int
    positions: range


class Pieces(NamedTuple):
    """Pieces of one pass in order: begin of each in the user histories, and end in the pass, int64 [P]."""

    begins: np.ndarray
    ends: np.ndarray

    def read_positions(self, numbers: np.ndarray) -> ReadPositions:
        """Turns of the events with these numbers in the pass. numbers: int64 [n]."""
        pieces = np.searchsorted(self.ends, numbers, side="right")
        begins = self.begins.take(pieces)
        before = np.concatenate([[0], self.ends]).take(pieces)
        return ReadPositions(begins + (numbers - before), begins, in_runs=True)


def pieces_of(offsets: np.ndarray, longest: int, seed: int, epoch: int) -> Pieces:
    """Pieces of a pass. offsets: begin of each user's events in the user histories, int64 [users + 1]."""
    counts = np.diff(offsets)
    # A user with few events has one piece. Otherwise the first piece has a random length, the next ones are
    # full, and the last one is the rest.
    first = mix_bits(np.arange(len(counts)), (seed, epoch)) % longest + 1
    first = np.where(counts <= longest, counts, first)
    numbers = np.where(counts > 0, 1 - (first - counts) // longest, 0)
    place = places_of(np.zeros_like(numbers), numbers)
    user = np.repeat(np.arange(len(counts)), numbers)
    begins = offsets[user] + np.where(place > 0, first[user] + (place - 1) * longest, 0)
    lengths = np.append(begins[1:], offsets[-1]) - begins
    order = shuffled(np.arange(len(begins)), len(begins), seed, epoch)
    return Pieces(begins[order], lengths[order].cumsum())


class EventOrder:
    """Positions of a part of the events of each step. Pickles to numbers, without its caches.

    batch_size: events of a step; part: the numbers of those wanted, counted from the first of the step;
    longest: largest number of earlier events that an event reads in order; 0 if the order does not count.
    """

    def __init__(self, batch_size: int, part: range, seed: int, longest: int) -> None:
        self.batch_size = batch_size
        self.part = part
        self.seed = seed
        self.longest = longest
        # The last block of steps: its key, positions, and turns.
        self._block: tuple[Any, np.ndarray, ReadPositions | None] | None = None
        self._pieces: tuple[int, Pieces] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The caches would make the message to a worker large.
        return {**self.__dict__, "_block": None, "_pieces": None}

    def of_step(
        self, stretch: PassPart, step: int, read: ReadColumn
    ) -> tuple[np.ndarray, ReadPositions | None]:
        """Return the part of a step: positions in the columns of events, int64 [at most the part].

        Also return the turns of training events whose order counts, else None.
        """
        size = len(self.part)
        num_steps = max(1, POSITIONS_AT_ONCE // max(1, size))
        block, place = divmod(step, num_steps)
        wanted = (stretch, block)
        # Steps are requested in order, so this block has the positions of the next steps too.
        if self._block is None or self._block[0] != wanted:
            steps = range(num_steps * block, num_steps * (block + 1))
            self._block = wanted, *self._of_steps(stretch, steps, read)
        part = slice(place * size, (place + 1) * size)
        _, positions, read_positions = self._block
        return positions[part], read_positions.part(part) if read_positions else None

    def _of_steps(
        self, stretch: PassPart, steps: range, read: ReadColumn
    ) -> tuple[np.ndarray, ReadPositions | None]:
        number = len(stretch.positions)
        # A step is one range of the pass: its events depend only on the size of the global batch, not on the
        # number of ranks.
        begins = np.arange(steps.start, steps.stop) * self.batch_size
        numbers = (stretch.first + begins[:, None] + np.array(self.part, np.int64)).reshape(-1)
        # They are in ascending order, so one search finds those beyond the end of the split.
        numbers = numbers[: np.searchsorted(numbers, number)]
        if stretch.split == "train" and self.longest:
            read_positions = self._pieces_of(stretch.epoch, read).read_positions(numbers)
            return read(f"{HISTORY}_event").take(read_positions.places).astype(np.int64), read_positions
        if stretch.split == "train":
            # Only training is shuffled: predictions are compared with labels in the order of the disk.
            numbers = shuffled(numbers, number, self.seed, stretch.epoch)
        return numbers + stretch.positions.start, None

    def _pieces_of(self, epoch: int, read: ReadColumn) -> Pieces:
        if self._pieces is None or self._pieces[0] != epoch:
            self._pieces = epoch, pieces_of(read(f"{HISTORY}_offsets"), self.longest, self.seed, epoch)
        return self._pieces[1]


# Rows whose user histories are compared with the negatives at once.
ROWS = 256


def bytes_of_bits(batch_size: int, in_batch_negatives: int) -> int:
    """Number of bytes with a bit for each event of a group, see `Batch`. batch_size: the global one."""
    return -(-min(batch_size, in_batch_negatives) // 8)


def whole_groups(part: range, batch_size: int, in_batch_negatives: int) -> range:
    """Return the events of a step whose groups have an event of a part; the part itself without groups."""
    size = 8 * bytes_of_bits(batch_size, in_batch_negatives)
    if size == 0 or not part:
        return part
    return range(part.start // size * size, min(-(-part.stop // size) * size, batch_size))


def sample_items(items: np.ndarray, number: int, *draws: int) -> np.ndarray:
    """Return a sample of `number` items without repetition, or all items in order if there are no more.

    draws: numbers that select the sample.
    """
    if number >= len(items):
        return items
    # The first places of a permutation are a sample. The rest of it is not computed.
    return items[shuffled(np.arange(number), len(items), *draws)]


def mark_seen_items(
    seen_bits: np.ndarray,
    events: np.ndarray,
    ends: np.ndarray,
    of_groups: np.ndarray,
    first: int,
    negatives: np.ndarray,
    num_items: int,
    read: ReadColumn,
) -> None:
    """Fill in `seen_bits` of a `Batch` for training events, in time proportional to their user histories.

    seen_bits: uint8 [B, bytes of a group and of the negatives], of zeros; events: records, [n]; ends: end,
    in the user histories, of the items before each event, [n]; of_groups: items of all events of their
    groups, of which the events are those from `first` on; negatives: positions of items, [N].
    """
    group = seen_bits.shape[1] - bytes_of_bits(len(negatives), len(negatives))
    # Without a group the size is free: so many rows are compared with the negatives at once.
    size = 8 * group or ROWS
    for begin in range(0, first + len(events), size):
        part = slice(max(begin - first, 0), begin + size - first)
        rows, in_group = seen_bits[part], of_groups[begin : begin + size] if group else of_groups[:0]
        items = np.concatenate([in_group, negatives])
        is_seen = _had(events[part], ends[part], items, num_items, read)
        for place, columns in ((0, is_seen[:, : len(in_group)]), (group, is_seen[:, len(in_group) :])):
            packed = np.packbits(columns, axis=1, bitorder="little")
            rows[: len(packed), place : place + packed.shape[1]] = packed


def _had(
    events: np.ndarray, ends: np.ndarray, items: np.ndarray, num_items: int, read: ReadColumn
) -> np.ndarray:
    """True if the user of an event had an item before, bool [events, items]."""
    distinct, inverse = np.unique(items, return_inverse=True)
    # Place of each item among the given ones, from 1 on; 0 for all others. The whole cost is one look-up for
    # each item of the user histories: nothing is sorted or searched.
    place_of = np.zeros(num_items + 1, np.int32)
    place_of[distinct] = np.arange(1, len(distinct) + 1)
    starts = read(f"{HISTORY}_offsets").take(events[USER])
    counts = ends - starts
    seen = read("seen").take(places_of(starts, counts))
    # Below 0 for events of the context: all of them get the last entry, which is 0.
    columns = place_of.take(np.maximum(seen, -1, out=seen))
    there = np.flatnonzero(columns)
    rows = np.searchsorted(counts.cumsum(), there, side="right")
    had = np.zeros((len(events), len(distinct)), bool)
    had[rows, columns[there] - 1] = True
    return had.take(inverse, axis=1)


# One of so many training events is given the unknown user, so that row 0 learns the average of new users.
# Few users lose an event to it.
MASKED_EVERY = 64
# The same in a ranking, where such an event has no history either: what new users choose is learned from
# these events alone. Of 64, 16, 8 and 4 this had the best validation on ml-100k and ml-latest-small.
NEW_USER_EVERY = 8


class InvertedLists(NamedTuple):
    """Feature with lists for n events: the values, list after list, and the length of each list, [n].

    padding: number of unknown rows in each row that pads the batch.
    """

    values: np.ndarray
    counts: np.ndarray
    padding: int


class RowKeys(NamedTuple):
    """Features of n events.

    single: table rows of features with one value, [features, n], of users, items and events; numbers: dense
    numbers, [n, numbers], likewise; lists: the features with lists.
    """

    single: list[np.ndarray]
    numbers: list[np.ndarray]
    lists: list[InvertedLists]

    def behind(self, other: RowKeys) -> RowKeys:
        """Features of `other` followed by these."""
        pairs = zip(other.lists, self.lists, strict=True)
        return RowKeys(
            [np.concatenate(both, axis=1) for both in zip(other.single, self.single, strict=True)],
            [np.concatenate(both) for both in zip(other.numbers, self.numbers, strict=True)],
            [
                InvertedLists(
                    np.concatenate([before.values, mine.values]),
                    np.concatenate([before.counts, mine.counts]),
                    mine.padding,
                )
                for before, mine in pairs
            ],
        )


class EventFeatures:
    """Features of events by position. Pickles to paths and names. A process maps the columns on first use."""

    def __init__(self, columns: Columns, config: DataConfig) -> None:
        self.folder = columns.folder
        self.schema = columns.schema
        self.tables = columns.tables
        # Maximum length of a user history; 0 for none.
        self.longest = config.history if HISTORY in [table.name for table in columns.tables] else 0
        self._with_lists = {
            entity: [
                table.name for table in self.tables if table.feature.multi and table.feature.entity == entity
            ]
            for entity in ENTITIES
        }
        self._columns: dict[str, MappedColumn] = {}
        self._trained: np.ndarray | None = None
        # Place of a dynamic table to the column with its ids.
        self._ids = {
            place: f"{self.schema.vocabulary_of(table.name)}_ids"
            for place, table in enumerate(self.tables)
            if table.feature.is_dynamic
        }

    def __getstate__(self) -> dict[str, Any]:
        # A mapping cannot be pickled. A worker makes its own.
        return {**self.__dict__, "_columns": {}, "_trained": None}

    def check(self) -> None:
        """Refuse a truncated file: access beyond its end would kill the process by a signal.

        Raises:
            UserError: see `MappedColumn.check`.
        """
        for column in self._columns.values():
            column.check()

    def events(self, positions: np.ndarray, split: str) -> np.ndarray:
        """Records of events, see `record_type`, [n]."""
        rows = self.column("rows")
        if split != "catalogue":
            return rows.take(positions)
        # As if the first user had an event with each item, without features. Only the items are used.
        events = np.zeros(len(positions), rows.dtype)
        events[ITEM], events["features"], events["numbers"] = positions, UNKNOWN_ROW, np.nan
        return events

    def find(self, events: np.ndarray) -> RowKeys:
        """Features of the users, items and events of records."""
        entities = {
            entity: self.column(f"{self.schema.name_of(entity)}_features").take(events[entity])
            for entity in ENTITIES
        }
        records = [*entities.values(), events]
        lists = []
        for entity, record in entities.items():
            spans = record["lists"].transpose(1, 2, 0)
            for name, (starts, counts) in zip(self._with_lists[entity], spans, strict=True):
                known = self.column(f"{name}_values").take(places_of(starts, counts))
                lists.append(InvertedLists(known, counts, padding=1))
        return RowKeys(
            [record["features"].T for record in records], [record["numbers"] for record in records], lists
        )

    def find_items(self, items: np.ndarray) -> RowKeys:
        """Features of items alone, with an unknown user without a history. items: positions, int64 [n]."""
        keys = self.find(self.events(items, "catalogue"))
        keys.single[ENTITIES.index(USER)][:] = UNKNOWN_ROW
        if self.longest:
            nothing = np.zeros(0, np.int64), np.zeros(len(items), np.int64)
            keys.lists.append(InvertedLists(*nothing, padding=0))
        return keys

    def trained_items(self) -> np.ndarray:
        """Positions of the items with a row of their own, int32, see `columns.trained_items`."""
        if self._trained is None:
            features = [table.feature for table in self.tables]
            trained = trained_items(self.column, self.schema, features)
            self._trained = np.flatnonzero(trained).astype(np.int32)
        return self._trained

    def find_order(
        self, events: np.ndarray, positions: np.ndarray, read_positions: ReadPositions | None, split: str
    ) -> OrderedReads:
        """Parts of the user histories that events read in order. read_positions: theirs, if known."""
        prefix = history_prefix(split)
        if split == "catalogue":
            nowhere = np.zeros(len(events), np.int64)
            read_positions = ReadPositions(nowhere, nowhere, in_runs=False)
        elif read_positions is None:
            places = self.column(f"{HISTORY}_before").take(positions).astype(np.int64)
            read_positions = ReadPositions(places, self._starts_of(events, places, prefix), in_runs=False)
        # The positions of a catalogue are items, not events.
        return in_order(read_positions, self.column("time").take(positions, mode="clip"), prefix, self.column)

    def find_histories(self, events: np.ndarray, split: str) -> Histories:
        """Return the last items of the user before each event of a split."""
        prefix, ends = history_prefix(split), events[f"{HISTORY}_end"].astype(np.int64)
        starts = self._starts_of(events, ends, prefix)
        counts = ends - starts
        return Histories(take_lists(self.column(f"{prefix}{HISTORY}"), starts, counts), starts, counts)

    def _starts_of(self, events: np.ndarray, ends: np.ndarray, prefix: str) -> np.ndarray:
        """Begin of the part of the user history, up to its end, that each event reads, int64 [n]."""
        begins = self.column(f"{prefix}{HISTORY}_offsets").take(events[USER])
        return np.maximum(begins, ends - self.longest)

    def ages(self, positions: np.ndarray, history: Histories, split: str) -> dict[str, np.ndarray]:
        """Return `places` and `time_buckets` of a `Batch` for the user histories of events."""
        counts = history.counts
        times = take_lists(self.column(f"{history_prefix(split)}{HISTORY}_time"), history.starts, counts)
        # The positions of a catalogue are items, not events, and its user histories are empty.
        event_times = self.column("time").take(positions, mode="clip").repeat(counts)
        # Counted from the end of each list.
        places = counts.repeat(counts) - 1 - places_of(np.zeros_like(counts), counts)
        return {"places": places.astype(np.int32), "time_buckets": time_buckets_of(event_times - times)}

    def join(
        self,
        num_rows: int,
        single: list[np.ndarray],
        lists: list[InvertedLists],
        empty: Callable[..., np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the values and lengths of a `Batch`: ids of dynamic tables, rows of all others.

        single, lists: the features of its real rows.
        """
        num_real, num_single = single[0].shape[1], sum(map(len, single))
        num_padding = num_rows - num_real
        lengths = empty((len(self.tables), num_rows), np.int32)
        sizes = [num_rows] * num_single
        sizes += [len(part.values) + part.padding * num_padding for part in lists]
        values = empty(sum(sizes), np.int64)
        lengths[:num_single] = 1
        # All features with one value are joined by one call: for a small batch calls cost more than bytes.
        last = num_single * num_rows
        columns = values[:last].reshape(num_single, num_rows)
        np.concatenate(single, out=columns[:, :num_real])
        columns[:, num_real:] = UNKNOWN_ROW
        for place, part in enumerate(lists, start=num_single):
            lengths[place, :num_real], lengths[place, num_real:] = part.counts, part.padding
            first, last = last, last + len(part.values)
            values[first:last] = part.values
            first, last = last, last + part.padding * num_padding
            values[first:last] = UNKNOWN_ROW
        self._turn_into_ids(values, sizes)
        return values, lengths.reshape(-1)

    def _turn_into_ids(self, values: np.ndarray, sizes: list[int]) -> None:
        """Replace the numbers of values of dynamic tables by their ids. sizes: values of each table."""
        ends = [0, *itertools.accumulate(sizes)]
        for place, name in self._ids.items():
            part = slice(ends[place], ends[place + 1])
            # The unknown value has an id too, the first one.
            values[part] = self.column(name).take(values[part])

    def column(self, name: str) -> np.ndarray:
        """Column, mapped from disk."""
        if not self._columns:
            # Map all columns at once: then the training and the test at its end survive removal of the files.
            paths = sorted(Path(self.folder).glob("*.npy"))
            self._columns = {path.stem: MappedColumn(path) for path in paths}
        if name not in self._columns:
            self._columns[name] = MappedColumn(Path(self.folder) / f"{name}.npy")
        return self._columns[name].values


def history_prefix(split: str) -> str:
    """Return the prefix of the names of the columns with the user histories of a split."""
    return "test_" if split == "test" else ""


class Batch(NamedTuple):
    """One rank's part of a global batch, B rows, as plain tensors.

    `values` (int64) and `lengths` (int32 [features * B]) are those of a KeyedJaggedTensor whose keys are the
    data set's features in order: ids of dynamic features, table rows of all others. `labels` is float32 [B].
    `weights` is float32 [B]: 0 for padding, and for real rows all rows / real rows, both of all ranks. So the
    mean over ranks of the weighted mean over B is the mean over real rows. In a window of a stream the last
    batch has the weights of a full one: an event has the same gradient in a window of few events as in one of
    many. In training it is multiplied by the event's own weight. `more_labels` and `more_weights` are those
    of the labels after the first, float32 [B, L - 1]: both are 0 for a label that an event lacks.
    `history_labels` is float32, one for each value of the feature "history". `numbers` is float32 [B, dense
    numbers], in the order of the data set, NaN for a missing value.

    If weights of user histories are learned, `places` and `gaps` describe each value of the feature
    "history", int32 both: the number of values of its list after it, and the time bucket from it to the
    event, see `time_buckets_of`. Otherwise they are empty.

    With in-batch negatives, `seen_bits` is uint8 [B, bytes]: bit k of byte j of a row is 1 if its user had,
    before, the item of event 8 j + k of its group; 0 outside of training. A group is 8 * bytes events of the
    global batch in order, on whichever ranks they are, or the rest.

    With N drawn negatives, training has N rows of these items alone before the B rows. `labels` and `weights`
    have B rows only. So has `seen_bits`, with N more bits in bytes after those of the group.

    If the order of events is read, the rows of a run of one user share the list of its first row: `sources`,
    int64 [N + B], is the row whose list a row reads, and `reads`, int32 [N + B], is the number of its
    values before the row's event. For each value of the feature "history", `ages` is the seconds from it to
    the event of the last row of its run, and `draws` is a pseudorandom number for this pass, int32 both.
    Otherwise all are empty.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    # These seven are the fields of `models.inputs.Members`, in its order.
    history_labels: torch.Tensor
    places: torch.Tensor
    time_buckets: torch.Tensor
    ages: torch.Tensor
    draws: torch.Tensor
    sources: torch.Tensor
    reads: torch.Tensor
    numbers: torch.Tensor
    seen_bits: torch.Tensor
    more_labels: torch.Tensor
    more_weights: torch.Tensor


def largest_batch(
    tables: Sequence[Table],
    num_numbers: int,
    num_events: int,
    model: ModelConfig,
    num_negatives: int,
    bytes_of_group: int,
    more_labels: int = 0,
) -> int:
    """Most bytes that a batch can take, for a slot of the workers' ring, which is allocated once.

    num_events: rows of events; num_negatives: rows before them; bytes_of_group: see `bytes_of_bits`;
    more_labels: number of labels after the first.
    """
    num_rows = num_negatives + num_events
    # Negatives have no histories.
    num_members = num_events * sum(table.longest for table in tables if table.name == HISTORY)
    values = num_rows * sum(table.longest for table in tables if table.name != HISTORY) + num_members
    row = 4 * len(tables) + (4 + 4) * (1 + more_labels) + 4 * num_numbers
    row += bytes_of_group + bytes_of_bits(num_negatives, num_negatives)
    # `sources` and `reads`.
    row += (8 + 4) * model.reads_order
    # A label, and if the model uses them a place and a gap, or an age and a draw.
    of_member = 4 + (4 + 4) * model.learns_history_weights + (4 + 4) * model.reads_order
    # Each array begins on a cache line.
    return 8 * values + of_member * num_members + num_rows * row + 64 * len(Batch._fields)


def to_tensors(arrays: Sequence[np.ndarray]) -> Batch:
    """Return the arrays of a batch as tensors that share their memory."""
    import torch

    return Batch(*map(torch.from_numpy, arrays))
