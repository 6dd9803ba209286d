"""Other systems that rank: alternating least squares and Bayesian personalized ranking (BPR), both of the
package `implicit`, and EASE (Steck, "Embarrassingly shallow autoencoders for sparse data", 2019).

The settings of each are those of the highest NDCG@10 on validation, learned from the training events. With
them it learns again, from training and validation events, and the test is read once. The seconds are those of
that second training alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from clicks import LeastSquares, choose, clicks_before, events_of, judged_cases
from implicit.bpr import BayesianPersonalizedRanking
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Metrics

PENALTIES = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
# Of BPR: what is tried; the defaults of `implicit`, but for 100 factors, lie inside.
FACTORS, RATES, REGULARIZATIONS = (32, 64, 128), (0.003, 0.01, 0.03), (0.001, 0.01, 0.1)


@dataclass(frozen=True)
class Ranked:
    """What a system reached on the test, the seconds of its training, and the settings that were chosen."""

    metrics: Metrics
    seconds: float
    settings: dict[str, float]


# From who had what, float32 [users, items], settings and a seed to scores, float [users, items].
Scorer = Callable[[csr_matrix, Any, int], np.ndarray]


def ease(known: csr_matrix, penalty: float, seed: int = 0) -> np.ndarray:
    """Scores, float64 [users, items]: the known events X times the weights B which minimise
    |X - X B|^2 + penalty |B|^2 without any on the diagonal.

    With P the inverse of X'X + penalty, B is 1 - P divided, column by column, by that of P. X P is K X,
    where K is the inverse of X X' + penalty, which has a row for a user and not for an item: these sets have
    fewer users. Nothing is drawn, so the seed is not read.
    """
    events = known.toarray().astype(np.float64)
    through = np.linalg.solve(events @ events.T + penalty * np.eye(len(events)), events)
    diagonal = (1 - (events * through).sum(axis=0)) / penalty
    return events - through / diagonal


@dataclass(frozen=True)
class PairwiseSettings:
    """Of BPR: factors of a vector, rate of learning, and regularization."""

    factors: int
    learning_rate: float
    regularization: float


def pairwise(known: csr_matrix, settings: PairwiseSettings, seed: int) -> np.ndarray:
    """BPR's scores, float32 [users, items]."""
    # On more threads updates race, and the same seed gives other vectors each time.
    model = BayesianPersonalizedRanking(**vars(settings), random_state=seed, num_threads=1, use_gpu=False)
    model.fit(known, show_progress=False)
    return np.asarray(model.user_factors) @ np.asarray(model.item_factors).T


def every_pairwise() -> list[PairwiseSettings]:
    """The grid of BPR."""
    return [PairwiseSettings(*values) for values in itertools.product(FACTORS, RATES, REGULARIZATIONS)]


def rank_all(columns: Columns, seed: int) -> dict[str, Ranked]:
    """Every system, popularity included, chosen and tested on the same events."""
    # Their own threads share the cores, so those of the products would only be in their way.
    with threadpool_limits(1, "blas"):
        squares = least_squares(columns, seed)
        pairs = chosen(columns, pairwise, every_pairwise(), seed)
    return {
        "popularity": popularity(columns),
        "least squares": squares,
        "BPR": pairs,
        "EASE": chosen(columns, ease, PENALTIES, seed),
    }


def popularity(columns: Columns) -> Ranked:
    """The baseline, as the columns have it; the seconds are those of counting."""
    begin = time.perf_counter()
    clicks_before(columns, "test").sum(axis=0)
    return Ranked(columns.baselines["ranks"]["popularity"], time.perf_counter() - begin, {})


def least_squares(columns: Columns, seed: int) -> Ranked:
    """Alternating least squares, with settings from the grid of `clicks`."""
    settings, _ = choose(columns, seed)
    begin = time.perf_counter()
    model = LeastSquares(columns, settings, seed, fitted_for="test")
    seconds = time.perf_counter() - begin
    return Ranked(model.measure("test"), seconds, dict(vars(settings)))


def chosen(columns: Columns, score: Scorer, grid: Sequence[Any], seed: int) -> Ranked:
    """The test of a system with the settings that are best on validation."""
    known = clicks_before(columns, "validation")
    tried = [judged(columns, "validation", score(known, settings, seed))["ndcg_at_10"] for settings in grid]
    best = grid[int(np.argmax(tried))]
    known = clicks_before(columns, "test")
    begin = time.perf_counter()
    scores = score(known, best, seed)
    seconds = time.perf_counter() - begin
    settings = {"penalty": best} if isinstance(best, float) else dict(vars(best))
    return Ranked(judged(columns, "test", scores), seconds, settings)


def judged(columns: Columns, split: str, scores: np.ndarray) -> Metrics:
    """HR@10 and NDCG@10 of a split, by scores, float [users, items]."""
    users, _ = events_of(columns, split)
    return judged_cases(columns, split, lambda part: scores[users[part]])
