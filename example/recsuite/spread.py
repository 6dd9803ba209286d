"""Spread of lists of recommended items over the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from recsuite.errors import printable

# Share of the items that count as popular; number of items that are named.
POPULAR, MOST_LISTED = 0.01, 3


@dataclass(frozen=True)
class Spread:
    """Spread of the entries of lists over the items that can be in one.

    listed: number of items in a list, of `ranked`; popular_share: share of the entries that are of the
    POPULAR most popular items; novelty: mean of -log2 of the share of an item in their events, with one event
    added to each item, in bits; most: the items that are most often in a list, and how often.
    """

    listed: int
    ranked: int
    popular_share: float
    novelty: float
    most: tuple[tuple[str, int], ...]

    @property
    def coverage(self) -> float:
        """Share of the items that are in a list."""
        return self.listed / self.ranked

    def described(self, items: str) -> str:
        """Describe it in one line. items: what they are called."""
        most = ", ".join(f"{item} ({number:,})" for item, number in self.most)
        return (
            f"{self.listed:,} of {self.ranked:,} {items} are in a list (coverage {self.coverage:.3f}); "
            f"{self.popular_share:.1%} of the entries are of the {POPULAR:.0%} most popular; "
            f"novelty {self.novelty:.2f} bits; most often: {printable(most)}"
        )


def spread_of(
    listed: np.ndarray, had: np.ndarray, is_ranked: np.ndarray, name_of: Callable[[int], Any]
) -> Spread | None:
    """Return the spread of lists, or None if they are empty.

    listed: in how many lists each item is, int64 [items]; had: the number of its events; is_ranked: True if
    it can be in a list; name_of: the id of the item at a position.
    """
    if not listed.any():
        return None
    number = int(is_ranked.sum())
    had = had * is_ranked
    popular = np.argsort(-had, kind="stable")[: max(1, round(POPULAR * number))]
    surprise = -np.log2((had + 1) / (had.sum() + number))
    most = [int(place) for place in np.argsort(-listed, kind="stable")[:MOST_LISTED] if listed[place]]
    return Spread(
        int(np.count_nonzero(listed)),
        number,
        float(listed[popular].sum() / listed.sum()),
        float(listed @ surprise / listed.sum()),
        tuple((str(name_of(place)), int(listed[place])) for place in most),
    )
