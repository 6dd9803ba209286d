"""How much a column of the events says about which item an event is of, beyond what chance would."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsuite.datasets.tables.guessing.contents import NUMBER, is_text, present
from recsuite.datasets.tables.guessing.roles import codes_of

# From this share on, what a column says of the item is too much; from the other one on it is the item's own.
# Neither was tuned.
MOST_TOLD, NEARLY_CONSTANT = 0.2, 0.9
# So many standard errors, of about one by the root of the repeated events, are put down to chance.
ERRORS = 2
# In nats: of less information that chance leaves over, no share is taken.
LEAST_INFORMATION = 0.05


def telling(events: pa.Table, column: str, item: str, is_number: bool) -> tuple[bool, bool]:
    """Whether a column says which item an event is of, and, if so, whether it is nearly the same for each.

    Looks at events of items that come again: the others say nothing about how much a value varies.
    """
    values = _numbers(events[column]) if is_number else codes_of(events[column])
    codes = codes_of(events[item])
    known = pc.and_(pc.is_valid(values), pc.is_valid(codes))
    items = codes.filter(known).to_numpy(zero_copy_only=False)
    found = values.filter(known).to_numpy(zero_copy_only=False)
    again = np.bincount(items)[items] > 1 if len(items) else np.empty(0, bool)
    items, found = np.unique(items[again], return_inverse=True)[1], found[again]
    num_repeats = len(items) - len(np.unique(items))
    if num_repeats == 0 or len(np.unique(found)) == 1:
        return False, False
    share = _share_between(found, items) if is_number else _share_of_information(found, items)
    constant = share if is_number else _share_of_most_frequent(found, items)
    return share > MOST_TOLD + ERRORS / np.sqrt(num_repeats), constant >= NEARLY_CONSTANT


def _numbers(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if is_text(array.type):
        array = pc.utf8_ltrim(present(array), "+")
        array = pc.if_else(pc.match_substring_regex(array, NUMBER), array, pa.scalar(None, pa.string()))
    numbers = array.cast(pa.float64(), safe=False)
    return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, pa.float64()))


def _share_between(numbers: np.ndarray, items: np.ndarray) -> float:
    """The share of the variance that lies between items (eta squared), 0 for a column unrelated to them.

    Of ranks: no transformation of the numbers, such as a logarithm, and no extreme one changes it.
    """
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ranks -= ranks.mean()
    sizes = np.bincount(items)
    between = float(np.sum(np.bincount(items, ranks) ** 2 / sizes)) / float(np.sum(ranks**2))
    by_chance = (len(sizes) - 1) / (len(items) - 1)
    return (between - by_chance) / (1 - by_chance)


def _share_of_information(values: np.ndarray, items: np.ndarray) -> float:
    """How much of what one of a category and an item can say of the other is said, 0 if they are unrelated.

    Either may have more values: a brand has many items, and an item many sizes with a code for each.
    """
    values = np.unique(values, return_inverse=True)[1]
    shuffled = np.random.default_rng(0).permutation(items)
    most = min(_entropy(values), _entropy(items))
    separate = _entropy(values) + _entropy(items)
    found, by_chance = (separate - _entropy(values * len(items) + each) for each in (items, shuffled))
    return (found - by_chance) / (most - by_chance) if most - by_chance > LEAST_INFORMATION else 0.0


def _entropy(codes: np.ndarray) -> float:
    shares = np.unique(codes, return_counts=True)[1] / len(codes)
    return float(-np.sum(shares * np.log(shares)))


def _share_of_most_frequent(values: np.ndarray, items: np.ndarray) -> float:
    """How many events have the value that is the most frequent of their item."""
    pairs, counts = np.unique(np.stack([items, values]), axis=1, return_counts=True)
    most = np.zeros(items.max() + 1)
    np.maximum.at(most, pairs[0], counts)
    return float(most.sum()) / len(items)
