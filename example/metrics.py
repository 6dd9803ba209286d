"""Metrics over whole splits: RMSE, MAE and AUC, and the baselines that a model has to beat.

Plain numpy on arrays of one entry a rating, so that a known answer can be checked by hand. How the
arrays come together from all ranks is the business of `train.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A rating of 4 or more counts as a recommendation.
LIKED = 4.0
# Damping of the bias baseline: a user or movie with this many ratings is believed half-way. The usual
# value; weaker and stronger ones gave a weaker baseline on ml-latest-small.
DAMPING = 5.0
BASELINE_ROUNDS = 10


@dataclass(frozen=True)
class Metrics:
    """How far predictions are from ratings; auc is NaN where all ratings lie on one side of `LIKED`."""

    rmse: float
    mae: float
    auc: float


def measure(predictions: np.ndarray, ratings: np.ndarray) -> Metrics:
    """Exact metrics of predictions, float [n], against ratings, float [n], summed in float64."""
    errors = predictions.astype(np.float64) - ratings.astype(np.float64)
    return Metrics(
        rmse=float(np.sqrt(np.mean(errors**2))),
        mae=float(np.mean(np.abs(errors))),
        auc=auc(predictions, ratings >= LIKED),
    )


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of (positive, negative) pairs that the scores, float [n], put in order; ties count half."""
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    # The middle rank of each group of equal scores, counted from 1.
    middle = np.cumsum(sizes) - (sizes - 1) / 2
    rank_sum = float(middle[group[positive]].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


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
