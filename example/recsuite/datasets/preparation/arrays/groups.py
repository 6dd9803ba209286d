"""Events by ranges of their users, or of their items: what concerns one of them alone is worked on range by
range, several at once, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from recsuite.datasets.preparation.arrays.mapped import chunks, counts_of, release, temporary

# Events of a range, about, and the most ranges there are: their numbers are bytes, which numpy sorts by a
# radix sort, in a third of the time that it takes for wider ones.
RANGE_EVENTS = 2**19
MOST_RANGES = 2**8 - 1
# Ranges worked on at once: numpy sorts, gathers and counts without Python's lock.
THREADS = 2


@dataclass(frozen=True)
class Groups:
    """Columns of events, range after range of users, in files without a name; in a range all events keep
    their order.

    bounds: where the events of each range begin, and their number, int64 [ranges + 1]. columns: the places
    that the events had, int32, which rise in each range; then those that were given.
    """

    ranges: list[range]
    bounds: np.ndarray
    columns: tuple[np.ndarray, ...]

    def each(self, work: Callable[..., object], done: Callable[[float], object] = lambda share: None) -> None:
        """Call work(users, places, *columns) for each range, several at once.

        done: called with the share of the ranges that is.
        """

        def of_range(number: int) -> None:
            part = slice(self.bounds[number], self.bounds[number + 1])
            work(self.ranges[number], *(column[part] for column in self.columns))
            release(*self.columns)

        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for number, _ in enumerate(pool.map(of_range, range(len(self.ranges))), 1):
                    done(number / len(self.ranges))
            except BaseException:
                # Whoever interrupts does not wait for all ranges that are left.
                pool.shutdown(cancel_futures=True)
                raise


def grouped(folder: Path | None, by: np.ndarray, number: int, *columns: np.ndarray) -> Groups:
    """Columns of events by ranges of range(number), of which `by` has one for each event, int [n].

    folder: where the files are made; without one all is in memory.

    Raises:
        OSError: when the disk has no room for them.
    """
    counts = counts_of(by, number)
    ranges = _ranges(counts)
    group_of = np.repeat(np.arange(len(ranges), dtype=np.uint8), [len(users) for users in ranges])
    bounds = np.concatenate([[0], np.cumsum(counts)[[users.stop - 1 for users in ranges]]])
    dtypes = [np.dtype(np.int32), *(column.dtype for column in columns)]
    copies = [_array(folder, len(by), dtype) for dtype in dtypes]
    fill = bounds[:-1].copy()

    def ordered(part: slice) -> tuple[slice, np.ndarray, np.ndarray]:
        group = group_of[by[part]]
        return part, np.argsort(group, kind="stable"), np.bincount(group, minlength=len(ranges))

    with ThreadPoolExecutor(THREADS) as pool:
        # A few at once: what is ordered but not yet copied takes memory.
        parts = chunks(len(by), by, *columns)
        while wave := list(islice(parts, THREADS)):
            places = []
            for part, order, sizes in pool.map(ordered, wave):
                places.append((part, order, sizes, fill.copy()))
                fill += sizes
            _copy(pool, places, columns, copies)
            release(*copies)
    return Groups(ranges, bounds, tuple(copies))


def _copy(
    pool: Executor,
    places: list[tuple[slice, np.ndarray, np.ndarray, np.ndarray]],
    columns: tuple[np.ndarray, ...],
    copies: list[np.ndarray],
) -> None:
    """Copy chunks, ordered by their ranges, to where their ranges are filled up to."""

    def copy(place: tuple[slice, np.ndarray, np.ndarray, np.ndarray]) -> None:
        part, order, sizes, fill = place
        ends = np.cumsum(sizes)
        for values, copied in zip(_chunk(part, order, columns), copies, strict=True):
            for first, last, begin in zip(ends - sizes, ends, fill, strict=True):
                copied[begin : begin + last - first] = values[first:last]

    list(pool.map(copy, places))


def _chunk(part: slice, order: np.ndarray, columns: tuple[np.ndarray, ...]) -> Iterator[np.ndarray]:
    yield (order + part.start).astype(np.int32)
    for column in columns:
        yield column[part][order]


def _array(folder: Path | None, number: int, dtype: np.dtype) -> np.ndarray:
    return np.empty(number, dtype) if folder is None else temporary(folder, number, dtype)


def _ranges(counts: np.ndarray) -> list[range]:
    """Ranges with about `RANGE_EVENTS` events each."""
    ends = np.cumsum(counts)
    size = max(RANGE_EVENTS, int(ends[-1]) // MOST_RANGES + 1) if len(ends) else RANGE_EVENTS
    firsts = np.unique((ends - counts) // size, return_index=True)[1].tolist()
    return [range(first, end) for first, end in pairwise([*firsts, len(counts)])]
