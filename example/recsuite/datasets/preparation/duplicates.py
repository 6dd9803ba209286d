"""Several ratings of one movie by one user: which of them count.

Kept apart, such ratings tell a test what it asks for: under --split random one of them is trained on.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from recsuite.errors import counted

if TYPE_CHECKING:
    from recsuite.datasets.movielens.formats import Ratings, RawData

# What counts, by the value of --duplicates.
COUNTS = {
    "last": "the last in time counts",
    "first": "the first in time counts",
    "mean": "their mean counts, at the time of the last",
    "keep": "all of them count",
}


def settle(raw: RawData, how: str) -> RawData:
    """A data set in which a user rates a movie once, or with "keep" as it is; says what was repeated."""
    pairs = _pairs(raw.ratings)
    places = np.flatnonzero(_is_repeated(pairs))
    if len(places) == 0:
        return raw
    # Pair after pair, each in the order of time, and of one time in the order of the file.
    places = places[np.lexsort([raw.ratings.time[places], pairs[places]])]
    begins = np.flatnonzero(np.diff(pairs[places], prepend=-1))
    note = (
        f"{len(places):,} ratings are of a movie that the same user rated more than once "
        f"({counted(len(begins), 'such pair')}): {COUNTS[how]} (--duplicates {how})"
    )
    raw = dataclasses.replace(raw, skipped=[*raw.skipped, note])
    if how == "keep":
        return raw
    ends = np.append(begins[1:], len(places)) - 1
    counting = places[begins if how == "first" else ends]
    rating = raw.ratings.rating.copy()
    if how == "mean":
        sums = np.add.reduceat(rating[places], begins, dtype=np.float64)
        rating[counting] = sums / (ends - begins + 1)
    is_left = np.ones(len(pairs), bool)
    is_left[places] = False
    is_left[counting] = True
    return _only(dataclasses.replace(raw, ratings=dataclasses.replace(raw.ratings, rating=rating)), is_left)


def describe_leak(ratings: Ratings, test: np.ndarray) -> list[str]:
    """What to say where a split comes between ratings of one pair. test: places of its ratings."""
    pairs = _pairs(ratings)
    is_test = np.zeros(len(pairs), bool)
    is_test[test] = True
    number = int(np.isin(pairs[is_test], pairs[~is_test]).sum())
    if number == 0:
        return []
    return [
        f"{number:,} of {len(test):,} test ratings are of a user and a movie that training or validation has "
        "a rating of too: the metrics are better than the model"
    ]


def _pairs(ratings: Ratings) -> np.ndarray:
    """A number for each user and movie, int64, one a rating."""
    import pandas

    user, _ = pandas.factorize(ratings.user_id)
    movie, movies = pandas.factorize(ratings.movie_id)
    pairs: np.ndarray = user.astype(np.int64) * len(movies) + movie
    return pairs


def _is_repeated(pairs: np.ndarray) -> np.ndarray:
    """Whether each number is there more than once, bool."""
    # Sorting finds that none is in a tenth of the time that hashing takes, and seldom is one.
    ordered = np.sort(pairs)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.isin(pairs, repeated) if len(repeated) else np.zeros(len(pairs), bool)


def _only(raw: RawData, is_left: np.ndarray) -> RawData:
    columns = {name: values[is_left] for name, values in vars(raw.ratings).items()}
    return dataclasses.replace(
        raw,
        ratings=dataclasses.replace(raw.ratings, **columns),
        official_test=None if raw.official_test is None else raw.official_test[is_left],
        oracle=None if raw.oracle is None else raw.oracle[is_left],
        num_skipped=raw.num_skipped + int((~is_left).sum()),
    )
