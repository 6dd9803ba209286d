"""Where the values of lists lie in a column."""

from __future__ import annotations

import numpy as np


def places_of(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places start, start + 1, ... of every list, list after list, int64 [sum of counts]."""
    # They may be columns of a table of int32: numpy is slow where types differ and numbers lie apart.
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    ends = counts.cumsum()
    places = np.arange(ends[-1] if len(ends) else 0)
    # The n-th value of a list lies n places after its start.
    places += (starts - (ends - counts)).repeat(counts)
    return places
