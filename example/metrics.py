"""Metrics over whole splits: RMSE, MAE and AUC, and the baselines that a model has to beat.

Plain numpy on arrays of one entry a rating, so that a known answer can be checked by hand. How the
arrays come together from all ranks is the business of `train.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# A rating of 4 or more counts as a recommendation.
LIKED = 4.0
# Damping of the bias baseline: a user or movie with this many ratings is believed half-way. The usual
# value; weaker and stronger ones gave a weaker baseline on ml-latest-small.
DAMPING = 5.0
BASELINE_ROUNDS = 10
# Sums go by chunks, so that the metrics of many ratings take little more memory than the ratings.
CHUNK = 2**20


@dataclass(frozen=True)
class Metrics:
    """How far predictions are from ratings; auc is NaN where all ratings lie on one side of `LIKED`."""

    rmse: float
    mae: float
    auc: float


def measure(predictions: np.ndarray, ratings: np.ndarray) -> Metrics:
    """Exact metrics of predictions, float [n], against ratings, float [n], summed in float64."""
    squared = absolute = 0.0
    for part in _chunks(len(predictions)):
        errors = predictions[part].astype(np.float64) - ratings[part]
        squared += float(np.square(errors).sum())
        absolute += float(np.abs(errors).sum())
    number = len(predictions)
    return Metrics(
        rmse=float(np.sqrt(squared / number)),
        mae=absolute / number,
        auc=auc(predictions, ratings >= LIKED),
    )


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of (positive, negative) pairs that the scores, float [n], put in order; ties count half."""
    above, below = np.sort(scores[positive]), np.sort(scores[~positive])
    if len(above) == 0 or len(below) == 0:
        return float("nan")
    # Twice the pairs in order, and ties once: an exact integer.
    twice = 0
    for part in _chunks(len(above)):
        twice += int(below.searchsorted(above[part], "left").sum())
        twice += int(below.searchsorted(above[part], "right").sum())
    return twice / 2 / (len(above) * len(below))


def _chunks(number: int) -> Iterator[slice]:
    for first in range(0, number, CHUNK):
        yield slice(first, first + CHUNK)


@dataclass(frozen=True)
class Biases:
    """The bias baseline: mean rating, and how far each user and movie lies from it, float64."""

    mean: float
    user: np.ndarray
    movie: np.ndarray

    def predict(self, user: np.ndarray, movie: np.ndarray) -> np.ndarray:
        """Predicted ratings, float64 [n], for positions of users and movies, int [n]."""
        return self.mean + self.user[user] + self.movie[movie]


def fit_biases(
    user: np.ndarray, movie: np.ndarray, rating: np.ndarray, num_users: int, num_movies: int
) -> Biases:
    """Damped least squares for rating = mean + user bias + movie bias, by alternation.

    Takes int [n], int [n] and float [n]; a user or movie without a rating gets bias 0.
    """
    mean = float(rating.mean(dtype=np.float64))
    residual = rating.astype(np.float64) - mean
    user_bias, movie_bias = np.zeros(num_users), np.zeros(num_movies)
    user_weight = DAMPING + np.bincount(user, minlength=num_users)
    movie_weight = DAMPING + np.bincount(movie, minlength=num_movies)
    for _ in range(BASELINE_ROUNDS):
        movie_bias = np.bincount(movie, residual - user_bias[user], num_movies) / movie_weight
        user_bias = np.bincount(user, residual - movie_bias[movie], num_users) / user_weight
    return Biases(mean, user_bias, movie_bias)
