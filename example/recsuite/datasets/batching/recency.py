"""Which place each item of a history has in it, and how long ago it was.

A worker imports this module: no torch, no pandas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recsuite.datasets.batching.lists import Shared
from recsuite.datasets.batching.places import places_of
from recsuite.gaps import gaps_of


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
