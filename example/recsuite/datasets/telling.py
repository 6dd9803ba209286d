"""Leakage: the share of an event's item or label that a column of the events reveals, beyond chance.

A ranking is shown the features of an event while it looks for the item: one that follows from the item gives
it away, in the training and in every metric, and is not there when something is to be recommended.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recsuite.datasets.preparation.arrays import chunks, counts_of, release
from recsuite.datasets.schema import EVENT, ITEM, Codes, Events, Feature, Schema
from recsuite.datasets.tables.derived import derived

# From this share on, what a column says of the item is too much.
# The choice is in docs/decisions.md.
MOST_TOLD = 0.1
# From here on a feature is named that says so much of what there is to know of the label.
MOST_OF_LABEL = 0.5
# So many standard errors, of about one by the root of the repeated events, are put down to chance.
ERRORS = 2
# In nats: of less information that chance leaves over, no share is taken.
LEAST_INFORMATION = 0.05
# Chance is what events say whose items were shuffled: the mean of so many draws, and standard deviations.
SHUFFLES, DEVIATIONS = 10, 4
# Ranges of a number: what lies within one is the same number.
NUM_RANGES = 32
# Events that are looked at, and those of one item: enough, and counted in a second.
MOST_EVENTS, MOST_OF_ITEM = 2**18, 2**10


def telling(values: np.ndarray, items: np.ndarray, is_number: bool) -> float:
    """The share of what a column could say of the items, 0 where it is not surely more than chance would.

    values: numbers, float [n], or codes of categories, int [n]; items: int [n], from 0 on. Looks at events of
    items that come again: the others say nothing about how much a value varies.
    """
    again = np.bincount(items)[items] > 1 if len(items) else np.empty(0, bool)
    items, found = np.unique(items[again], return_inverse=True)[1], values[again]
    num_repeats = len(items) - len(np.unique(items))
    if num_repeats == 0 or len(np.unique(found)) == 1:
        return 0.0
    if is_number:
        # Items may differ in how far from the middle their numbers lie, and not in where the middle is.
        share = max(_share_between(_ranks(found), items), _share_of_information(_ranges(found), items))
    else:
        share = _share_of_information(found, items)
    return max(0.0, share - ERRORS / np.sqrt(num_repeats))


def label_told_by_features(
    events: Events, order: np.ndarray, labels: np.ndarray, schema: Schema
) -> dict[str, float]:
    """The share of what there is to know of the labels that each feature of the event says, by its name.

    order: the places of training events among `events`; labels: theirs, float32 [len(order)].
    """
    # Evenly through the training, and without an array of all its events.
    places = np.arange(0, len(labels), -(-len(labels) // MOST_EVENTS) or 1)
    told = {}
    for feature in _features_of_events(events, schema):
        values, known, is_number = _values_of(events.features[feature.column], order[places])
        found = _ranges(values[known]) if is_number else values[known]
        label = _ranges(labels[places][known])
        told[feature.name] = max(0.0, _share_of_information(found, label, is_of_both=False))
    return told


def told_by_features(
    events: Events, order: np.ndarray, items: np.ndarray, num_items: int, schema: Schema
) -> dict[str, float]:
    """What each feature of the event says of the items, at most 1, by its name.

    order: the places of training events among `events`; items: theirs, int32 [len(order)].
    """
    features = _features_of_events(events, schema)
    if not features:
        return {}
    places = _sampled(items, num_items)
    found, rows = items[places], order[places]
    return {feature.name: _told(feature, events.features, rows, found) for feature in features}


def _features_of_events(events: Events, schema: Schema) -> list[Feature]:
    # The time of an event is known whenever somebody asks, whatever it says.
    return [
        feature
        for feature in schema.features
        if feature.entity == EVENT and not _is_of_time(feature) and feature.column in events.features
    ]


def _is_of_time(feature: Feature) -> bool:
    call = derived(feature.column)
    return call is not None and not call.of


def _told(
    feature: Feature, columns: Mapping[str, np.ndarray | Codes], rows: np.ndarray, items: np.ndarray
) -> float:
    call = derived(feature.column)
    # With its date of release an age at any time tells the item, though few ages are the same.
    if call is not None and call.of == ITEM:
        return 1.0
    values, known, is_number = _values_of(columns[feature.column], rows)
    return telling(values[known], items[known], is_number)


def _values_of(column: np.ndarray | Codes, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Some rows of a column, which of them have a value, and whether they are numbers."""
    stored = column.codes if isinstance(column, Codes) else column
    values = stored[rows]
    # These lie anywhere, so their pages are nearly all there are.
    release(stored)
    is_number = not isinstance(column, Codes)
    return values, np.isfinite(values) if is_number else values >= 0, is_number


def _sampled(items: np.ndarray, num_items: int) -> np.ndarray:
    """The places of the events of some items, drawn so that these are about MOST_EVENTS."""
    if len(items) <= MOST_EVENTS:
        return np.arange(len(items))
    # No item takes the places of the others, however many events it has.
    counts = np.minimum(counts_of(items, num_items), MOST_OF_ITEM)
    drawn = np.random.default_rng(0).permutation(np.flatnonzero(counts))
    enough = int(np.searchsorted(np.cumsum(counts[drawn]), MOST_EVENTS)) + 1
    left = np.zeros(num_items, np.int64)
    left[drawn[:enough]] = MOST_OF_ITEM
    places = []
    for part in chunks(len(items), items):
        found = np.flatnonzero(left[items[part]])
        # The events of an item side by side, so that each knows how many were before it.
        found = found[items[part][found].argsort(kind="stable")]
        own, first, sizes = np.unique(items[part][found], return_index=True, return_counts=True)
        before = np.arange(len(found)) - np.repeat(first, sizes)
        places.append(found[before < np.repeat(left[own], sizes)] + part.start)
        left[own] = np.maximum(left[own] - sizes, 0)
    return np.concatenate(places)


def _ranks(numbers: np.ndarray) -> np.ndarray:
    """Places of numbers among each other, float64 [n], from 0 to below n; the mean one of equal numbers."""
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts + 1) / 2)[places]
    return ranks


def _ranges(numbers: np.ndarray) -> np.ndarray:
    """Numbers as the ranges that they lie in, int64 [n]: few different ones stay apart."""
    values, places = np.unique(numbers, return_inverse=True)
    if len(values) <= NUM_RANGES:
        return places
    return (_ranks(numbers) * NUM_RANGES / len(numbers)).astype(np.int64)


def _share_between(ranks: np.ndarray, items: np.ndarray) -> float:
    """The share of the variance that lies between items (eta squared), 0 for a column unrelated to them.

    Of ranks: no transformation of the numbers, such as a logarithm, and no extreme one changes it.
    """
    ranks = ranks - ranks.mean()
    sizes = np.bincount(items)
    between = float(np.sum(np.bincount(items, ranks) ** 2 / sizes)) / float(np.sum(ranks**2))
    by_chance = (len(sizes) - 1) / (len(items) - 1)
    return (between - by_chance) / (1 - by_chance)


def _share_of_information(values: np.ndarray, items: np.ndarray, is_of_both: bool = True) -> float:
    """The share of what one of a category and an item can say of the other, or of all there is to know of the
    item; 0 if they are unrelated.

    Either may have more values: a brand has many items, and an item many sizes with a code for each.
    """
    values = np.unique(values, return_inverse=True)[1]
    draw = np.random.default_rng(0)
    orders = [items, *(draw.permutation(items) for _ in range(SHUFFLES))]
    alone = _entropy(values), _entropy(items)
    found, *by_chance = (sum(alone) - _entropy(values * len(items) + order) for order in orders)
    mean, deviation = np.mean(by_chance), np.std(by_chance, ddof=1)
    left = (min(alone) if is_of_both else alone[1]) - mean
    # Of little that is left, the error of chance would be a large share.
    return float((found - mean - DEVIATIONS * deviation) / left) if left > LEAST_INFORMATION else 0.0


def _entropy(codes: np.ndarray) -> float:
    shares = np.unique(codes, return_counts=True)[1] / len(codes)
    return float(-np.sum(shares * np.log(shares)))
