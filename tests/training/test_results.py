"""Lines on the test of a model, beside its table."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from recsuite.datasets.movielens.source import SCHEMA
from recsuite.metrics import Measured
from recsuite.models.tasks import TASKS
from recsuite.training.results import describe_better_baselines, describe_difference, results_table


def ranked(value: float, cases: int = 100, spread: float = 0.01) -> Measured:
    """Metrics of a ranking, with an interval."""
    metrics = {"hr_at_10": value, "ndcg_at_10": value}
    return Measured(metrics, cases, dict.fromkeys(metrics, (value - spread, value + spread)))


def baselines_of_ranks(chance: float, popularity: float) -> dict[str, dict[str, float]]:
    values = {"a random order": chance, "popularity": popularity, "oracle": 0.9}
    return {name: {"hr_at_10": value, "ndcg_at_10": value} for name, value in values.items()}


def test_the_table_has_the_interval_and_the_number_of_cases_of_test_and_validation() -> None:
    columns: Any = SimpleNamespace(schema=SCHEMA, baselines={"ranks": baselines_of_ranks(0.04, 0.2)})
    shown = results_table(columns, TASKS["ranking"], "a", ranked(0.3), "test", ranked(0.25, 9, 0.1))
    rows = {row[1].strip(): row[3].strip() for row in (line.split("|") for line in shown.splitlines()[2:])}
    assert rows == {
        "a random order": "0.0400",
        "popularity": "0.2000",
        "a": "0.3000",
        "95 % interval, 100 ratings": "0.2900 to 0.3100",
        "its validation": "0.2500",
        "validation: 95 % interval, 9 ratings": "0.1500 to 0.3500",
        "oracle (knows the true parameters)": "0.9000",
    }


def test_a_model_worse_than_any_baseline_has_a_line() -> None:
    columns: Any = SimpleNamespace(schema=SCHEMA, baselines={"ranks": baselines_of_ranks(0.04, 0.2)})
    said = [
        describe_better_baselines(columns, TASKS["ranking"], ranked(value))
        for value in (0.2, 0.1, 0.01, float("nan"))
    ]
    both = "this model is worse than a random order (0.0400) and popularity (0.2000): its test NDCG@10 is "
    assert said == [
        [],
        ["this model is worse than popularity (0.2000): its test NDCG@10 is 0.1000"],
        [f"{both}0.0100"],
        [f"{both}-"],
    ]
    columns.baselines = {"predictions": {"global mean": {"rmse": 1.1}, "biases": {"rmse": 0.9}}}
    (worse,) = describe_better_baselines(columns, TASKS["rating"], Measured({"rmse": 1.0}, 5))
    assert worse == "this model is worse than biases (0.9000): its test RMSE is 1.0000"
    columns.baselines = {"predictions": {}}
    of_stream = TASKS["rating"], Measured({"rmse": 1.0}, 5)
    (worse,) = describe_better_baselines(columns, *of_stream, {"rmse": 0.9})
    assert worse == "this model is worse than biases of all earlier events (0.9000): its RMSE is 1.0000"
    assert describe_better_baselines(columns, *of_stream, {"rmse": 1.1}) == []


def test_known_and_new_users_are_compared_with_the_baselines_separately() -> None:
    baselines = {
        "ranks": baselines_of_ranks(0.1, 0.2),
        "ranks/known": baselines_of_ranks(0.1, 0.2),
        "ranks/new": baselines_of_ranks(0.1, 0.25),
    }
    columns: Any = SimpleNamespace(schema=SCHEMA, baselines=baselines)
    parts = {"/known": ranked(0.35, 80), "/new": ranked(0.15, 20)}
    test = dataclasses.replace(ranked(0.3), parts=parts)
    assert describe_better_baselines(columns, TASKS["ranking"], test) == [
        "users with training ratings (80 ratings): its test NDCG@10 is 0.3500, better than all baselines",
        "other users (20 ratings): its test NDCG@10 is 0.1500, worse than popularity (0.2500)",
    ]
    parts["/new"] = ranked(0.26, 20)
    assert describe_better_baselines(columns, TASKS["ranking"], test) == []


def test_a_difference_of_validation_and_test_beyond_chance_is_printed_with_the_reasons() -> None:
    columns: Any = SimpleNamespace(schema=SCHEMA)
    task, validation, test = TASKS["ranking"], ranked(0.14), ranked(0.232)
    differ = "validation NDCG@10 0.1400 and test NDCG@10 0.2320 differ by more than chance"
    time = "the test is newer than all training ratings, and the validation is drawn from among them"
    assert [*describe_difference(columns, task, test, validation, "random")] == [differ]
    assert [*describe_difference(columns, task, test, validation, "time")] == [f"{differ}: {time}"]
    assert [*describe_difference(columns, task, test, ranked(0.14, 4, 0.1), "time")] == []
    test = dataclasses.replace(test, new_users=0.4, new_items=0.05)
    (said,) = describe_difference(columns, task, test, ranked(0.14, 4, 0.1), "random")
    assert said == (
        "validation NDCG@10 0.1400 and test NDCG@10 0.2320 are of different kinds of events: 40% of the test "
        "ratings and 0% of those for validation have a user without a training rating"
    )
