"""Each task says what is learned, under the names that the metrics have."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite import metrics
from recsuite.config.sections import ModelConfig
from recsuite.datasets.schema import EVALUATIONS
from recsuite.models.tasks import TASKS

RATING, RANKING = TASKS["rating"], TASKS["ranking"]


def test_a_lower_rmse_and_a_higher_ndcg_are_better_and_nan_never_is() -> None:
    assert RATING.is_better(0.8, 0.9)
    assert RANKING.is_better(0.9, 0.8)
    assert not RATING.is_better(0.9, 0.9)
    assert not RANKING.is_better(float("nan"), 0.1)
    assert RANKING.is_better(0.0, None)
    assert not RATING.is_better(float("nan"), None)


@pytest.mark.parametrize("task", ModelConfig.flag("task").choices)
def test_each_choice_of_task_stands_in_the_table_and_shows_metrics_that_it_has(task: str) -> None:
    assert {TASKS[task].main_metric, *TASKS[task].epoch_metrics} <= set(TASKS[task].metrics)
    assert TASKS[task].evaluation in EVALUATIONS


def test_the_metrics_of_a_task_are_those_that_are_measured() -> None:
    nothing = metrics.fit_calibration(np.zeros(0), np.zeros(0, bool))
    measured = metrics.measure(np.array([3.0]), np.array([4.0]), np.array([True]), nothing)
    assert list(RATING.metrics) == list(measured.values)
    assert list(RANKING.metrics) == list(metrics.measure_ranks(np.array([1])).values)
