"""Each task says what is learned, under the names that the metrics have."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite.config.sections.model import EVALUATIONS, ModelConfig
from recsuite.datasets import metrics
from recsuite.models.tasks.task import Task, task_named

RATING, RANKING = task_named("rating"), task_named("ranking")


def test_a_lower_rmse_and_a_higher_ndcg_are_better_and_nan_never_is() -> None:
    assert RATING.is_better(0.8, 0.9)
    assert RANKING.is_better(0.9, 0.8)
    assert not RATING.is_better(0.9, 0.9)
    assert not RANKING.is_better(float("nan"), 0.1)
    assert RANKING.is_better(0.0, None)
    assert not RATING.is_better(float("nan"), None)


@pytest.mark.parametrize(
    "task", [task_named(name) for name in ModelConfig.CHOICES["task"]], ids=lambda task: task.name
)
def test_a_task_has_the_name_under_which_it_is_found_and_shows_metrics_that_it_has(task: Task) -> None:
    assert task_named(task.name) is task
    assert {task.main_metric, *task.epoch_metrics} <= set(task.metrics)
    assert task.evaluation in EVALUATIONS


def test_the_metrics_of_a_task_are_those_that_are_measured() -> None:
    nothing = metrics.fit_calibration(np.zeros(0), np.zeros(0, bool))
    measured = metrics.measure(np.array([3.0]), np.array([4.0]), np.array([True]), nothing)
    assert list(RATING.metrics) == list(measured)
    assert list(RANKING.metrics) == list(metrics.measure_ranks(np.array([1])))
