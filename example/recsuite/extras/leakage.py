"""Leakage: the share of an event's item or label that a column of the events reveals, beyond chance.

A ranking model gets the features of an event to find the item. A feature that follows from the item reveals
it, in the training and in every metric, but is not known at the time of a recommendation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recsuite.datasets.arrays import chunks, counts_of, release
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import EVENT, ITEM, Codes, Events, Feature, Schema
from recsuite.datasets.tables.derived import derived
from recsuite.errors import UserError

# Largest leakage of the item that a column may have.
# The choice is in docs/log/2026-11.md.
MOST_ITEM_LEAKAGE = 0.1
# Leakage of the label from which on a feature is reported.
MOST_LABEL_LEAKAGE = 0.5
# Number of standard errors that are attributed to chance; one is about 1 / sqrt(repeated events).
ERRORS = 2
# In nats: with less information left beyond chance, the share is 0.
LEAST_INFORMATION = 0.05
# Chance is measured with shuffled items: the mean of so many shuffles, plus so many standard deviations.
SHUFFLES, DEVIATIONS = 10, 4
# Ranges of a number. Numbers within one range count as equal.
NUM_RANGES = 32
# Most events in the sample, and most of one item: enough for the estimate, and computed in a second.
MOST_EVENTS, MOST_OF_ITEM = 2**18, 2**10


def leakage(values: np.ndarray, items: np.ndarray, is_number: bool) -> float:
    """Leakage of a column: its share of the possible information on the items, 0 if not beyond chance.

    values: numbers, float [n], or codes of categories, int [n]; items: int [n], from 0 on. Uses only items
    with several events: the others do not show how much a value varies.
    """
    again = np.bincount(items)[items] > 1 if len(items) else np.empty(0, bool)
    items, repeated = np.unique(items[again], return_inverse=True)[1], values[again]
    num_repeats = len(items) - len(np.unique(items))
    if num_repeats == 0 or len(np.unique(repeated)) == 1:
        return 0.0
    if is_number:
        # Two measures: items may differ in the spread of their numbers but not in the mean.
        share = max(_share_between(_ranks(repeated), items), _share_of_information(_ranges(repeated), items))
    else:
        share = _share_of_information(repeated, items)
    return max(0.0, share - ERRORS / np.sqrt(num_repeats))


def leakage_of_label(
    events: Events, order: np.ndarray, labels: np.ndarray, schema: Schema
) -> dict[str, float]:
    """Leakage of the label by each feature of the event, by its name: a share of the labels' entropy.

    order: the positions of training events among `events`; labels: of these, float32 [len(order)].
    """
    # An even sample of the training, without an array of all its events.
    sample = np.arange(0, len(labels), -(-len(labels) // MOST_EVENTS) or 1)
    shares = {}
    for feature in _features_of_events(events, schema):
        values, known, is_number = _values_of(events.features[feature.column], order[sample])
        ranges = _ranges(values[known]) if is_number else values[known]
        label = _ranges(labels[sample][known])
        shares[feature.name] = max(0.0, _share_of_information(ranges, label, is_of_both=False))
    return shares


def leakage_of_item(
    events: Events, order: np.ndarray, items: np.ndarray, num_items: int, schema: Schema
) -> dict[str, float]:
    """Leakage of the item by each feature of the event, at most 1, by its name.

    order: the positions of training events among `events`; items: of these, int32 [len(order)].
    """
    features = _features_of_events(events, schema)
    if not features:
        return {}
    sample = _sampled(items, num_items)
    sampled_items, rows = items[sample], order[sample]
    return {feature.name: _leakage(feature, events.features, rows, sampled_items) for feature in features}


def check_leaks(columns: Columns, task: str) -> None:
    """Refuse a ranking task if a feature of the events has too much leakage of the item.

    Raises:
        UserError: names the feature, how much it says, and how much it may.
    """
    # For every schema and every kind of label. The prediction of a label may use such features.
    if task not in ("ranking", "sequence"):
        return
    item, user = columns.schema.item, columns.schema.user
    for name, share in columns.item_leakage.items():
        if share > MOST_ITEM_LEAKAGE:
            raise UserError(
                f"--task {task} cannot use the feature {name} of the event: it reveals {share:.0%} of what "
                f"there is to know of the {item} of the event, and the limit is {MOST_ITEM_LEAKAGE:.0%}, "
                f"because the {item} is what is looked for. Fix: in schema.toml, remove [features.{name}], "
                f'or write of = "item", or of = "user" if it is the same in all events of a {user}.'
            )


def describe_leaks(columns: Columns) -> list[str]:
    """Return sentences on features with leakage of the label, to print above metrics."""
    return [
        f"the feature {name} of the event reveals {share:.0%} of the information on the "
        f"{columns.schema.label} (leakage): unless it is known before that, the metrics below are too good; "
        f"remove [features.{name}] from schema.toml"
        for name, share in columns.label_leakage.items()
        if share > MOST_LABEL_LEAKAGE
    ]


def _features_of_events(events: Events, schema: Schema) -> list[Feature]:
    # The time of an event is known at each request, so it is no leakage.
    return [
        feature
        for feature in schema.features
        if feature.entity == EVENT and not _is_of_time(feature) and feature.column in events.features
    ]


def _is_of_time(feature: Feature) -> bool:
    call = derived(feature.column)
    return call is not None and not call.of


def _leakage(
    feature: Feature, columns: Mapping[str, np.ndarray | Codes], rows: np.ndarray, items: np.ndarray
) -> float:
    call = derived(feature.column)
    # The time minus the age is the date of the item, which reveals it, though few ages are equal.
    if call is not None and call.of == ITEM:
        return 1.0
    values, known, is_number = _values_of(columns[feature.column], rows)
    return leakage(values[known], items[known], is_number)


def _values_of(column: np.ndarray | Codes, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return some rows of a column, a mark for each with a value, and True if they are numbers."""
    stored = column.codes if isinstance(column, Codes) else column
    values = stored[rows]
    # The rows lie anywhere, so nearly all pages were touched.
    release(stored)
    is_number = not isinstance(column, Codes)
    return values, np.isfinite(values) if is_number else values >= 0, is_number


def _sampled(items: np.ndarray, num_items: int) -> np.ndarray:
    """Return the positions of the events of randomly drawn items, about MOST_EVENTS of them."""
    if len(items) <= MOST_EVENTS:
        return np.arange(len(items))
    # Limit the events of each item, so that frequent items do not displace the others.
    counts = np.minimum(counts_of(items, num_items), MOST_OF_ITEM)
    drawn = np.random.default_rng(0).permutation(np.flatnonzero(counts))
    enough = int(np.searchsorted(np.cumsum(counts[drawn]), MOST_EVENTS)) + 1
    left = np.zeros(num_items, np.int64)
    left[drawn[:enough]] = MOST_OF_ITEM
    samples = []
    for part in chunks(len(items), items):
        events = np.flatnonzero(left[items[part]])
        # Sort by item, so that the events before each one can be counted.
        events = events[items[part][events].argsort(kind="stable")]
        own, first, sizes = np.unique(items[part][events], return_index=True, return_counts=True)
        before = np.arange(len(events)) - np.repeat(first, sizes)
        samples.append(events[before < np.repeat(left[own], sizes)] + part.start)
        left[own] = np.maximum(left[own] - sizes, 0)
    return np.concatenate(samples)


def _ranks(numbers: np.ndarray) -> np.ndarray:
    """Ranks of numbers, float64 [n], from 0 to below n; equal numbers have their mean rank."""
    _, codes, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[codes]


def _ranges(numbers: np.ndarray) -> np.ndarray:
    """Range of each number, int64 [n]. Up to NUM_RANGES distinct numbers have a range each."""
    values, codes = np.unique(numbers, return_inverse=True)
    if len(values) <= NUM_RANGES:
        return codes
    return (_ranks(numbers) * NUM_RANGES / len(numbers)).astype(np.int64)


def _share_between(ranks: np.ndarray, items: np.ndarray) -> float:
    """Share of the variance of ranks between items (eta squared), about 0 for a column unrelated to them."""
    ranks = ranks - ranks.mean()
    sizes = np.bincount(items)
    between = float(np.sum(np.bincount(items, ranks) ** 2 / sizes)) / float(np.sum(ranks**2))
    by_chance = (len(sizes) - 1) / (len(items) - 1)
    return (between - by_chance) / (1 - by_chance)


def _share_of_information(values: np.ndarray, items: np.ndarray, is_of_both: bool = True) -> float:
    """Mutual information of a category and an item beyond chance, as a share; 0 if they are unrelated."""
    values = np.unique(values, return_inverse=True)[1]
    random = np.random.default_rng(0)
    orders = [items, *(random.permutation(items) for _ in range(SHUFFLES))]
    alone = _entropy(values), _entropy(items)
    information, *by_chance = (sum(alone) - _entropy(values * len(items) + order) for order in orders)
    mean, deviation = np.mean(by_chance), np.std(by_chance, ddof=1)
    # Either may have more values: a brand has many items, and an item many sizes with a code for each.
    left = (min(alone) if is_of_both else alone[1]) - mean
    # If little information is left, the error of chance would be a large share of it.
    return float((information - mean - DEVIATIONS * deviation) / left) if left > LEAST_INFORMATION else 0.0


def _entropy(codes: np.ndarray) -> float:
    shares = np.unique(codes, return_counts=True)[1] / len(codes)
    return float(-np.sum(shares * np.log(shares)))
