"""Order in bounded memory: stable sorting in numbers of 64 bits, and events by ranges of their users."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from recsuite.datasets.preparation.arrays.mapped import chunks

# Events of the users that are worked on at once, and the most ranges that users are cut into: each one costs
# a pass over the events of all.
RANGE_EVENTS = 2**21
MOST_RANGES = 32
# Ranges of users worked on at once; numpy sorts and gathers without Python's lock.
THREADS = 2


def sorted_places(*keys: np.ndarray) -> np.ndarray:
    """The places, int32 [n], in ascending order of the first key, among equal ones of the next, and so on;
    where all are equal they keep their order. Takes int [n] each.
    """
    order = _order_of(keys[-1])
    for key in reversed(keys[:-1]):
        order = order[_order_of(key[order])]
    return order


def _order_of(key: np.ndarray) -> np.ndarray:
    """The places in stable order of one key, int32 [n]."""
    number = len(key)
    bits = max(0, number - 1).bit_length()
    lowest, highest = _ends_of(key)
    if highest - lowest >= 2 ** (63 - bits):
        # Times thousands of years apart, among very many.
        return np.argsort(key, kind="stable").astype(np.int32)
    # Key and place in one number: no two are equal, and numpy sorts numbers in place, without a workspace, in
    # a tenth of the time of a stable argsort.
    packed = np.empty(number, np.int64)
    for part in chunks(number, key):
        places = np.arange(part.start, part.stop)
        packed[part] = (key[part].astype(np.int64) - lowest) << bits | places
    packed.sort()
    order = np.empty(number, np.int32)
    for part in chunks(number):
        order[part] = packed[part] & (2**bits - 1)
    return order


def _ends_of(key: np.ndarray) -> tuple[int, int]:
    found = [(int(key[part].min()), int(key[part].max())) for part in chunks(len(key), key)]
    return min((low for low, _ in found), default=0), max((high for _, high in found), default=0)


def among(needles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each needle is one of the values, bool. Both int [n], in ascending order."""
    # Sorted needles are found in a tenth of the time that hashing them takes.
    places = values.searchsorted(needles)
    found = np.zeros(len(needles), bool)
    inside = places < len(values)
    found[inside] = values[places[inside]] == needles[inside]
    return found


def for_ranges(counts: np.ndarray, work: Callable[[range], object], done: Callable[[float], object]) -> None:
    """Do some work for ranges of users that together are all of them, several at once.

    counts: how many events each user has, int64 [users]; done: called with the share of the ranges that is.
    """
    ranges = _ranges(counts)
    with ThreadPoolExecutor(THREADS) as pool:
        for number, _ in enumerate(pool.map(work, ranges), 1):
            done(number / len(ranges))


def _ranges(counts: np.ndarray) -> list[range]:
    """Ranges of users with about `RANGE_EVENTS` events each."""
    ends = np.cumsum(counts)
    size = max(RANGE_EVENTS, int(ends[-1]) // MOST_RANGES) if len(ends) else RANGE_EVENTS
    firsts = np.unique((ends - counts) // size, return_index=True)[1].tolist()
    return [range(first, end) for first, end in pairwise([*firsts, len(counts)])]


def events_of(users: range, user: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """The places, int32, of the events of a range of users, their users, and their entries of the columns."""
    found: list[list[np.ndarray]] = []
    for part in chunks(len(user), user, *columns):
        # One comparison: what lies below the range is very large without a sign.
        offsets = (user[part] - users.start).astype(np.uint32)
        inside = np.flatnonzero(offsets < len(users)).astype(np.int32)
        found.append([inside + part.start, *(column[part][inside] for column in (user, *columns))])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]
