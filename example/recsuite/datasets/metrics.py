"""Metrics over whole splits, for both tasks, and the baselines that a model has to beat.

Plain numpy on arrays of one entry a rating, so that a known answer can be checked by hand. How the
arrays come together from all ranks is the business of `evaluation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# The name of a metric to its value, NaN where it is not defined.
Metrics = dict[str, float]

# A rating of 4 or more counts as a recommendation.
LIKED = 4.0
# How many items are recommended: the K of HR@K and NDCG@K.
TOP = 10
METRICS = {"rating": ("rmse", "mae", "auc", "log_loss"), "ranking": ("hr_at_10", "ndcg_at_10")}
# How a metric is called where people read it.
LABELS = {
    "rmse": "RMSE",
    "mae": "MAE",
    "auc": "AUC",
    "log_loss": "log loss",
    "hr_at_10": "HR@10",
    "ndcg_at_10": "NDCG@10",
}
# Newton's method doubles the digits in each round; the ridge keeps a link finite where predictions put all
# liked ratings above all others, and is too small to be seen elsewhere.
LINK_ROUNDS = 25
LINK_RIDGE = 1e-3
# Predictions that differ by less than this many stars are one.
LEAST_SPREAD = 1e-6
# Sums go by chunks, so that the metrics of many ratings take little more memory than the ratings.
CHUNK = 2**20


def main_metric(task: str) -> tuple[str, bool]:
    """The metric by which two models of a task are compared, and whether the lower one is the better."""
    return ("rmse", True) if task == "rating" else ("ndcg_at_10", False)


def is_better(task: str, value: float, best: float | None) -> bool:
    """Whether a value of the main metric beats the best one so far; NaN beats nothing."""
    if best is None:
        return bool(np.isfinite(value))
    lower = main_metric(task)[1]
    return value < best if lower else value > best


def no_metrics(task: str) -> Metrics:
    """The metrics of a split without a rating: none is defined."""
    return dict.fromkeys(METRICS[task], float("nan"))


@dataclass(frozen=True)
class Calibration:
    """From a predicted rating to the probability that the rating is `LIKED`: a logistic function."""

    slope: float
    intercept: float

    def log_losses(self, predictions: np.ndarray, liked: np.ndarray) -> np.ndarray:
        """Minus the logarithm of the probability of what came true, float64 [n]."""
        logits = self.slope * predictions.astype(np.float64) + self.intercept
        # log(1 + exp(z)) for the z of what did not come true, in a form that does not overflow.
        wrong = np.where(liked, -logits, logits)
        return np.maximum(wrong, 0) + np.log1p(np.exp(-np.abs(wrong)))


def fit_link(predictions: np.ndarray, liked: np.ndarray) -> Calibration:
    """The link of highest likelihood for predictions, float [n], and whether they came true, bool [n].

    By Newton's method on standardised predictions. A link of NaN where there are none to fit it on.
    """
    if len(predictions) == 0:
        return Calibration(float("nan"), float("nan"))
    mean, spread = (float(number(predictions, dtype=np.float64)) for number in (np.mean, np.std))
    spread = spread if spread > LEAST_SPREAD else 1.0
    weights = np.zeros(2)
    for _ in range(LINK_ROUNDS):
        gradient, curvature = LINK_RIDGE * weights, LINK_RIDGE * np.eye(2)
        for part in _chunks(len(predictions)):
            scaled = (predictions[part].astype(np.float64) - mean) / spread
            inputs = np.stack([scaled, np.ones_like(scaled)])
            # The logistic function in a form that does not overflow.
            probability = (1 + np.tanh(weights @ inputs / 2)) / 2
            gradient += inputs @ (probability - liked[part])
            curvature += (inputs * (probability * (1 - probability))) @ inputs.T
        weights -= np.linalg.solve(curvature, gradient)
    slope = float(weights[0]) / spread
    return Calibration(slope, float(weights[1]) - slope * mean)


def measure(predictions: np.ndarray, ratings: np.ndarray, link: Calibration) -> Metrics:
    """Exact metrics of predictions, float [n], against ratings, float [n], summed in float64.

    auc is NaN where all ratings lie on one side of `LIKED`, log_loss where the link is.
    """
    squared = absolute = log_losses = 0.0
    for part in _chunks(len(predictions)):
        errors = predictions[part].astype(np.float64) - ratings[part]
        squared += float(np.square(errors).sum())
        absolute += float(np.abs(errors).sum())
        log_losses += float(link.log_losses(predictions[part], ratings[part] >= LIKED).sum())
    number = len(predictions)
    return {
        "rmse": float(np.sqrt(squared / number)),
        "mae": absolute / number,
        "auc": auc(predictions, ratings >= LIKED),
        "log_loss": log_losses / number,
    }


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


def measure_ranks(ranks: np.ndarray) -> Metrics:
    """Hit rate and NDCG of the first `TOP` items, for the ranks of the test items, int [n], from 1 on.

    A case has one relevant item, so its ideal gain is 1.
    """
    if len(ranks) == 0:
        return no_metrics("ranking")
    hits = ranks <= TOP
    return {"hr_at_10": float(hits.mean()), "ndcg_at_10": float((hits / np.log2(1.0 + ranks)).mean())}


def _chunks(number: int) -> Iterator[slice]:
    for first in range(0, number, CHUNK):
        yield slice(first, first + CHUNK)
