"""Metrics over whole splits: of predictions against labels, and of ranks.

Plain numpy on arrays of one entry an event, so that a known answer can be checked by hand. How the arrays
come together from all ranks is the business of `training/evaluation.py`; which metrics a task has, and how it
calls them, that of `models/tasks/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recsuite.config.sections.model import TOP

# The name of a metric to its value, NaN where it is not defined.
Metrics = dict[str, float]

# Newton's method doubles the digits in each round; the ridge keeps a calibration finite where predictions
# put all liked items above all others, and is too small to be seen elsewhere.
CALIBRATION_ROUNDS = 25
CALIBRATION_RIDGE = 1e-3
# Predictions that differ by less than this many stars are one.
LEAST_SPREAD = 1e-6
# A float32 next to 1 is so far from it; what came true against all odds costs no more.
LEAST_PROBABILITY = 2.0**-24
# Sums go by chunks, so that the metrics of many events take little more memory than their labels.
CHUNK = 2**20


@dataclass(frozen=True)
class Calibration:
    """From a predicted label to the probability that the item is liked: a logistic function."""

    slope: float
    intercept: float

    def log_losses(self, predictions: np.ndarray, liked: np.ndarray) -> np.ndarray:
        """Minus the logarithm of the probability of what came true, float64 [n]."""
        logits = self.slope * predictions.astype(np.float64) + self.intercept
        # log(1 + exp(z)) for the z of what did not come true, in a form that does not overflow.
        wrong = np.where(liked, -logits, logits)
        return np.maximum(wrong, 0) + np.log1p(np.exp(-np.abs(wrong)))


def fit_calibration(predictions: np.ndarray, liked: np.ndarray) -> Calibration:
    """The calibration of highest likelihood for predictions, float [n], and whether they came true, bool [n].

    By Newton's method on standardised predictions. Without predictions both its numbers are NaN.
    """
    if len(predictions) == 0:
        return Calibration(float("nan"), float("nan"))
    mean, spread = (float(number(predictions, dtype=np.float64)) for number in (np.mean, np.std))
    spread = spread if spread > LEAST_SPREAD else 1.0
    weights = np.zeros(2)
    for _ in range(CALIBRATION_ROUNDS):
        gradient, curvature = CALIBRATION_RIDGE * weights, CALIBRATION_RIDGE * np.eye(2)
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


def measure(
    predictions: np.ndarray, labels: np.ndarray, liked: np.ndarray, calibration: Calibration
) -> Metrics:
    """Exact metrics of predictions, float [n], against labels, float [n], summed in float64.

    liked: bool [n]; where all or none are, auc is NaN, and log_loss where the calibration is.
    """
    squared = absolute = log_losses = 0.0
    for part in _chunks(len(predictions)):
        errors = predictions[part].astype(np.float64) - labels[part]
        squared += float(np.square(errors).sum())
        absolute += float(np.abs(errors).sum())
        log_losses += float(calibration.log_losses(predictions[part], liked[part]).sum())
    number = len(predictions)
    return {
        "rmse": float(np.sqrt(squared / number)),
        "mae": absolute / number,
        "auc": auc(predictions, liked),
        "log_loss": log_losses / number,
    }


def measure_probabilities(predictions: np.ndarray, is_yes: np.ndarray) -> Metrics:
    """Exact metrics of probabilities, float [n], and whether the answer was yes, bool [n]."""
    log_losses = 0.0
    for part in _chunks(len(predictions)):
        right = np.where(is_yes[part], predictions[part], 1 - predictions[part].astype(np.float64))
        log_losses -= float(np.log(np.maximum(right, LEAST_PROBABILITY)).sum())
    return {"log_loss": log_losses / len(predictions), "auc": auc(predictions, is_yes)}


def log_loss_of(probability: float, is_yes: np.ndarray) -> float:
    """That of one probability for all answers, bool [n]."""
    yes, no = np.log(np.clip([probability, 1 - probability], LEAST_PROBABILITY, 1))
    # A sum of negatives, so that all answers alike cost 0, not -0.
    return float(is_yes.mean() * -yes + (1 - is_yes.mean()) * -no) + 0.0


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
        return dict.fromkeys(("hr_at_10", "ndcg_at_10"), float("nan"))
    hits = ranks <= TOP
    return {"hr_at_10": float(hits.mean()), "ndcg_at_10": float((hits / np.log2(1.0 + ranks)).mean())}


def _chunks(number: int) -> Iterator[slice]:
    for first in range(0, number, CHUNK):
        yield slice(first, first + CHUNK)
