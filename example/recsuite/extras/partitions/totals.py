"""Statistics of the events of all ranks, in place of those of one. Collective: every rank."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from recsuite.config.sections import DataConfig
from recsuite.datasets.arrays import chunks, counts_of, highest, release
from recsuite.datasets.preparation.baselines import (
    SHARE_OF_BIASES,
    Biases,
    Oracle,
    measured,
    num_liked,
    popularity_ranks,
    rests,
    settled,
    solved,
)
from recsuite.datasets.preparation.histories import StoredEvents
from recsuite.datasets.preparation.making import NOT_CHECKED, Shared
from recsuite.datasets.preparation.splits import repeats_in, rule_for_seen
from recsuite.datasets.schema import EVENT, HISTORY, ITEM, USER, RawData, Schema
from recsuite.extras.partitions.exchange import PartitionExchange
from recsuite.extras.partitions.merging import counts_in, marks_of_training, vocabulary_of
from recsuite.extras.partitions.sampler import USER_NUMBERS
from recsuite.ids import ids_of
from recsuite.metrics import CLUSTERS, Metrics

NOT_CHECKED_IN_PARTS = f"{NOT_CHECKED.partition(':')[0]}: that requires all events in one piece"


def with_shared(
    raw: RawData, schema: Schema, data: DataConfig, min_count: int, exchange: PartitionExchange
) -> tuple[RawData, DataConfig, Shared]:
    """Return the events here with more notes, settings, and the values of the events of all ranks."""
    is_train = marks_of_training(raw)
    counts = {
        USER: counts_in(raw.events.user, is_train, len(raw.users)),
        ITEM: exchange.total(counts_in(raw.events.item, is_train, len(raw.items))),
    }
    vocabulary, notes = vocabulary_of(raw, schema, min_count, is_train, counts, exchange)
    if any(feature.entity == EVENT for feature in schema.features):
        notes.append(NOT_CHECKED_IN_PARTS)

    def repeats() -> tuple[int, int]:
        here = repeats_in(raw.events.user[is_train], raw.events.item[is_train])
        num_repeats, number = exchange.total(np.array(here)).tolist()
        return num_repeats, number

    seen, said = rule_for_seen(data, schema, False, repeats)
    digests = ids_of(raw.users[schema.column_of(USER)].to_numpy()).view(np.uint64)
    shared = Shared(
        vocabulary,
        1.0 if raw.events.weight is None else _mean(raw.events.weight, is_train, exchange),
        # Intervals tell so many users apart.
        {"item_counts": counts[ITEM], USER_NUMBERS: (digests % np.uint64(CLUSTERS)).astype(np.int32)},
        {"mean_rating": float(_mean(raw.events.label, is_train, exchange)), "num_users": exchange.num_users},
        functools.partial(_baselines_of, exchange),
    )
    raw = dataclasses.replace(raw, skipped=[*raw.skipped, *notes, *said])
    return raw, dataclasses.replace(data, seen=seen), shared


def _mean(values: np.ndarray, is_train: np.ndarray, exchange: PartitionExchange) -> np.float64:
    """Return the mean of the training events of all ranks."""
    sums = np.zeros(2)
    for part in chunks(len(values), values):
        trained = values[part][is_train[part]]
        sums += trained.sum(dtype=np.float64), len(trained)
    total, number = exchange.total(sums)
    return np.float64(total / number)


def _baselines_of(
    exchange: PartitionExchange,
    folder: Path,
    stored: StoredEvents,
    is_listed: np.ndarray,
    sizes: tuple[int, int, int],
    oracle: Oracle,
    schema: Schema,
    done: Callable[[float], object],
) -> dict[str, dict[str, Metrics]]:
    """Return the same as `baselines_of` of the events of all ranks."""
    num_known, num_items = sizes[0] + sizes[1], len(is_listed)
    user, item, label = stored.user, stored.item, stored.label
    known_offsets = np.load(folder / f"test_{HISTORY}_offsets.npy")
    shape = len(known_offsets) - 1, num_items
    fits = [_rounds(stored, number, shape, exchange) for number in (sizes[0], num_known)]
    fitted = settled(fits, lambda share: done(SHARE_OF_BIASES * share))
    ranked = popularity_ranks(
        known_offsets,
        np.load(folder / "test_seen.npy", mmap_mode="r"),
        user[num_known:],
        item[num_known:],
        exchange.total(counts_of(item[:num_known], num_items)),
        is_listed,
        schema.excludes_seen,
    )
    done(1)
    has_trained = counts_of(user[: sizes[0]], highest(user) + 1) > 0
    splits = slice(sizes[0], num_known), slice(num_known, None)
    labels = [exchange.joined(label[split]) for split in splits]
    fits_of_splits = [*zip(fitted, splits, strict=True)]
    predictions = {
        "global mean": [np.broadcast_to(each.mean, len(of)) for each, of in zip(fitted, labels, strict=True)],
        "biases": [exchange.joined(each.predict(user[split], item[split])) for each, split in fits_of_splits],
    }
    liked, known = exchange.total(
        np.array([num_liked(label[:num_known], schema.liked_label), num_known])
    ).tolist()
    ranks, candidates = map(exchange.joined, ranked)
    is_known = exchange.joined(has_trained[user[num_known:]])
    release(user, item, label)
    return measured(labels, predictions, (ranks, candidates), is_known, liked / known, schema.liked_label)


def _rounds(
    stored: StoredEvents, number: int, shape: tuple[int, int], exchange: PartitionExchange
) -> Iterator[tuple[Biases, float]]:
    """Yield the same as `baselines._rounds` of the first events of all ranks.

    A position is of one item on all ranks, and of a user here alone.
    """
    user, item, label = stored.user[:number], stored.item[:number], stored.label[:number]
    total, count = exchange.total(np.array([label.sum(dtype=np.float64), number])).tolist()
    mean = total / count
    release(label)
    of_user, of_item = counts_of(user, shape[0]), exchange.total(counts_of(item, shape[1]))
    of_users = np.zeros(shape[0])
    while True:
        sums, _ = rests(item, user, label, mean, of_users, shape[1])
        of_items, _ = solved(of_item, exchange.total(sums), 0.0)
        of_users, squares = solved(of_user, *rests(user, item, label, mean, of_items, shape[0]))
        squares = float(exchange.total(np.array([squares]))[0])
        yield Biases(mean, of_users, of_items), math.sqrt(max(squares, 0.0) / count)
