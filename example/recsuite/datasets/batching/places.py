"""Where the values of lists lie in a column, and the values themselves."""

from __future__ import annotations

import math

import numpy as np

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
