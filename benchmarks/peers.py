"""Other systems that predict ratings: the baseline of biases, and myFM, a Bayesian factorization machine.

Each learns from known ratings and is asked for others; the seconds are those of its training, without
predictions. A factorization machine draws its parameters again and again; its prediction is the mean over
the draws.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, diags_array, hstack, identity

from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Calibration, measure
from recsuite.datasets.preparation.arrays import grouped
from recsuite.datasets.preparation.baselines import fit_biases

RANK = 10
ITERATIONS = 512
# What myFM leaves out by default: the first draws, which depend on where it began.
BURN_IN = 5
# How often a training is judged on its way.
NUM_POINTS = 64
UNDEFINED = Calibration(float("nan"), float("nan"))


@dataclass(frozen=True)
class Ratings:
    """Positions of users and items, int [n] both, and their labels, float32 [n].

    shape: how many users and items there are.
    """

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray
    shape: tuple[int, int]

    @cached_property
    def matrix(self) -> csr_matrix:
        """Who rated what, float64 [users, items], of ones."""
        return csr_matrix((np.ones(len(self.users)), (self.users, self.items)), shape=self.shape)


@dataclass
class Trace:
    """How a training went: seconds since its beginning, and the RMSE of what it then predicts."""

    seconds: list[float] = field(default_factory=list)
    rmse: list[float] = field(default_factory=list)


def ratings_of(columns: Columns, *splits: str) -> Ratings:
    """The ratings of some splits, one split after the other."""
    ranges = [columns.range_of(split) for split in splits]
    rows = np.concatenate([columns.column("rows")[each.start : each.stop] for each in ranges])
    labels = np.concatenate([columns.labels(split) for split in splits])
    return Ratings(rows["user"], rows["item"], labels, (columns.num_users, columns.num_items))


def rmse_of(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The RMSE of predictions, float [n], as training measures its own."""
    # What else is measured depends on who likes what, and no case is said to be liked.
    return measure(predictions, labels, np.zeros(len(labels), bool), UNDEFINED)["rmse"]


def biases(known: Ratings, asked: Ratings) -> Trace:
    """The baseline of training, fitted on the known ratings."""
    begin = time.perf_counter()
    num_users, num_items = known.shape
    by_user = grouped(None, known.users, num_users, known.users, known.items, known.labels)
    by_item = grouped(None, known.items, num_items, known.items, known.users, known.labels)
    (fitted,) = fit_biases(by_user, by_item, known.labels, [len(known.labels)])
    seconds = time.perf_counter() - begin
    return Trace([seconds], [rmse_of(fitted.predict(asked.users, asked.items), asked.labels)])


def factorization_machine(
    known: Ratings, asked: Ratings, seed: int, sets: bool, iterations: int, num_points: int = 1
) -> Trace:
    """MyFM on the known ratings, which need not be in an order.

    sets: whether a user has the movies that they rated as features besides their id, and a movie its users.
    num_points: how often it is judged, the last time at its end.
    """
    myfm = import_myfm()
    begin = time.perf_counter()
    of_users, of_items, groups = features(known, sets)

    def blocks(ratings: Ratings) -> list[Any]:
        places = (ratings.users.astype(np.int64), ratings.items.astype(np.int64))
        return [myfm.RelationBlock(*block) for block in zip(places, (of_users, of_items), strict=True)]

    draws = Draws(blocks(asked), asked.labels, iterations, num_points, begin)
    model = myfm.MyFMRegressor(rank=RANK, random_seed=seed)
    # It draws a progress bar, and has no flag against it.
    with contextlib.redirect_stderr(io.StringIO()):
        model.fit(
            None,
            known.labels,
            X_rel=blocks(known),
            n_iter=iterations,
            # The draws are averaged while they come; all of them would fill the memory.
            n_kept_samples=1,
            group_shapes=groups,
            callback=draws,
        )
    return draws.trace


def features(known: Ratings, sets: bool) -> tuple[csr_matrix, csr_matrix, list[int]]:
    """Features of all users and of all items, float64 [users, n] and [items, m], and the sizes of the groups
    that share a prior.
    """
    num_users, num_items = known.shape
    of_users, of_items = identity(num_users, format="csr"), identity(num_items, format="csr")
    if not sets:
        return of_users, of_items, [num_users, num_items]
    of_users = hstack([of_users, scaled(known.matrix)], format="csr")
    of_items = hstack([of_items, scaled(known.matrix.T.tocsr())], format="csr")
    return of_users, of_items, [num_users, num_items, num_items, num_users]


def scaled(rated: csr_matrix) -> csr_matrix:
    """Each row divided by the root of its number of ones: all of them together then weigh as much as one."""
    counts = np.maximum(rated.sum(axis=1), 1)
    return (diags_array(1 / np.sqrt(np.asarray(counts).ravel())) @ rated).tocsr()


class Draws:
    """What myFM calls after each draw: averages the predictions, with the clock of the training stopped."""

    def __init__(
        self, blocks: list[Any], labels: np.ndarray, iterations: int, num_points: int, begin: float
    ) -> None:
        self.blocks, self.labels = blocks, labels
        # As many as its own predictor leaves out.
        self.num_skipped = iterations - min(max(iterations - BURN_IN, BURN_IN), iterations)
        self.judged = {round(iterations * (point + 1) / num_points) for point in range(num_points)}
        self.nothing = csr_matrix((len(labels), 0))
        self.total = np.zeros(len(labels))
        self.trained, self.resumed = 0.0, begin
        self.trace = Trace()

    def __call__(self, place: int, machine: Any, *_: Any) -> tuple[bool, None]:
        """Take in the draw at a place, from 0 on; never ends the training."""
        self.trained += time.perf_counter() - self.resumed
        predictions = machine.predict_score(self.nothing, self.blocks)
        number = place + 1 - self.num_skipped
        # Until one is kept, each stands for itself.
        self.total = self.total + predictions if number > 1 else predictions
        if place + 1 in self.judged:
            self.trace.seconds.append(self.trained)
            self.trace.rmse.append(rmse_of(self.total / max(number, 1), self.labels))
        self.resumed = time.perf_counter()
        return False, None


def import_myfm() -> ModuleType:
    """MyFM 0.4.0, which imports two names from pkg_resources and reads neither; setuptools 82 has no
    pkg_resources any more, so that the import alone fails.
    """
    stand_in = ModuleType("pkg_resources")
    stand_in.__dict__.update(DistributionNotFound=Exception, get_distribution=None)
    sys.modules.setdefault("pkg_resources", stand_in)
    try:
        return importlib.import_module("myfm")
    finally:
        # Whoever else looks for the package must not find this one.
        if sys.modules.get("pkg_resources") is stand_in:
            del sys.modules["pkg_resources"]
