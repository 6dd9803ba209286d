"""Spread of lists of recommended items over the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recsuite.errors import printable

# Share of the items that count as popular; number of items that are named.
POPULAR, MOST_LISTED = 0.01, 3


def spread_of(listed: np.ndarray, had: np.ndarray, is_ranked: np.ndarray) -> dict[str, float]:
    """Describe how the entries of lists are spread over the catalogue.

    listed: in how many lists each item is, int64 [items], not all 0; had: the number of its events;
    is_ranked: True if it can be in a list.

    "coverage" is the share of the ranked items that are in a list; "popular_share" the share of the entries
    that are of the POPULAR most popular of them; "novelty" the mean of -log2 of the share of an item in
    the events, with one event added to each item, in bits.
    """
    number = int(is_ranked.sum())
    popular = np.argsort(-had * is_ranked, kind="stable")[: max(1, round(POPULAR * number))]
    surprise = -np.log2((had + 1) / (had.sum() + len(had)))
    return {
        "coverage": np.count_nonzero(listed) / number,
        "popular_share": float(listed[popular].sum() / listed.sum()),
        "novelty": float(listed @ surprise / listed.sum()),
    }


def describe_spread(
    listed: np.ndarray, had: np.ndarray, is_ranked: np.ndarray, ids: Sequence[Any], items: str
) -> str:
    """Describe in one line `spread_of` and the items that are most often in a list.

    ids: of the items; items: what they are called.
    """
    if not listed.any():
        return f"the lists have no {items}"
    spread = spread_of(listed, had, is_ranked)
    most = np.argsort(-listed, kind="stable")[:MOST_LISTED].tolist()
    named = ", ".join(f"{ids[place]} ({listed[place]:,})" for place in most)
    return (
        f"{np.count_nonzero(listed):,} of {int(is_ranked.sum()):,} {items} are in a list "
        f"(coverage {spread['coverage']:.3f}); "
        f"{spread['popular_share']:.1%} of the entries are of the {POPULAR:.0%} most popular; "
        f"novelty {spread['novelty']:.2f} bits; most often: {printable(named)}"
    )
