"""Lines on the test of a model: its lists, better baselines, and the difference from the validation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.errors import counted, format_metric, with_article
from recsuite.metrics import KNOWN, NEW, TOP, Measured, Metrics
from recsuite.models.tasks import TASKS, WorkerTask

# Difference between validation and test, by the value of --split.
DIFFERENCES = {
    "time": "the test is newer than all training {labels}, and the validation is drawn from among them",
    "leave_one_out": "the test has the newest {label} of each user, and the validation the one before it of "
    "a few",
}
# Minimum difference in the share of new users or items for a printed line.
MOST_DIFFERENCE = 0.1


def describe_test(
    test: Measured, validation: Measured | None, columns: Columns, config: Config
) -> Iterator[str]:
    """Yield all lines on a test. validation: None for no validation."""
    task = TASKS[config.model.task]
    yield from describe_lists(columns, test)
    yield from describe_better_baselines(columns, task, test)
    yield from describe_difference(columns, task, test, validation, config.data.split)


def describe_lists(columns: Columns, test: Measured) -> Iterator[str]:
    """Yield lines on the lists of a ranking, and on the items that it never recommends."""
    spread, schema = test.lists, columns.schema
    if spread is None:
        return
    yield f"lists of {TOP} for each of the test {schema.labels}: {spread.described(schema.items)}"
    if spread.ranked < columns.num_items:
        number = f"{columns.num_items - spread.ranked:,} of {columns.num_items:,} {schema.items}"
        missed = f"{test.missed:,} of {columns.num_test:,} test {schema.labels}"
        yield (
            f"{number} have no training event, so the model has no row of them and never recommends them; "
            f"{missed} are of these items and count as misses"
        )


def describe_better_baselines(columns: Columns, task: WorkerTask, test: Measured) -> list[str]:
    """Return lines on the baselines that predict the test better than a model; also for users with and
    without training events. Empty if the model is better than all of them.
    """
    labels, label = columns.schema.labels, task.main_label
    whole = _better(columns.baselines[task.evaluation], task, test, labels)
    value = format_metric(test[task.main_metric])
    lines = [f"this model is worse than {whole}: its test {label} is {value}"] if whole else []
    of_parts = {
        part: _better(columns.baselines.get(task.evaluation + part, {}), task, measured, labels)
        for part, measured in test.parts.items()
    }
    if not whole and not any(of_parts.values()):
        return []
    of_whom = {KNOWN: f"users with training {labels}", NEW: "other users"}
    for part, better in of_parts.items():
        value = format_metric(test.parts[part][task.main_metric])
        cases = counted(test.parts[part].cases, columns.schema.label)
        worse = f"worse than {better}" if better else "better than all baselines"
        lines.append(f"{of_whom[part]} ({cases}): its test {label} is {value}, {worse}")
    return lines


def _better(baselines: Mapping[str, Metrics], task: WorkerTask, measured: Measured, labels: str) -> str:
    """Return the better baselines, with their values; "" if there are none."""
    name, sign = task.main_metric, 1 if task.lower_is_better else -1
    names = {"global mean": f"the mean of all {labels}", "share of yes": "the share of yes"}
    # A result that is not a number is worse than all.
    return " and ".join(
        f"{names.get(known, known)} ({format_metric(metrics[name])})"
        for known, metrics in baselines.items()
        if known != "oracle"
        and math.isfinite(metrics[name])
        and not sign * (measured[name] - metrics[name]) <= 0
    )


def describe_difference(
    columns: Columns, task: WorkerTask, test: Measured, validation: Measured | None, split: str
) -> Iterator[str]:
    """Yield lines if validation and test differ beyond chance, or in the share of new users and items."""
    if validation is None or not validation.cases:
        return
    name, schema = task.main_metric, columns.schema
    nothing = float("nan"), float("nan")
    ends = [measured.intervals.get(name, nothing) for measured in (test, validation)]
    differs = ends[0][0] > ends[1][1] or ends[1][0] > ends[0][1]
    shares = {
        schema.user: (test.new_users, validation.new_users),
        schema.item: (test.new_items, validation.new_items),
    }
    reasons = [
        f"{of_test:.0%} of the test {schema.labels} and {of_validation:.0%} of those for validation have "
        f"{with_article(noun)} without a training {schema.label}"
        for noun, (of_test, of_validation) in shares.items()
        if abs(of_test - of_validation) >= MOST_DIFFERENCE
    ]
    if not differs and not reasons:
        return
    if split in DIFFERENCES:
        reasons.insert(0, DIFFERENCES[split].format(labels=schema.labels, label=schema.label))
    values = " and ".join(
        f"{which} {task.main_label} {format_metric(measured[name])}"
        for which, measured in (("validation", validation), ("test", test))
    )
    how = "differ by more than chance" if differs else "are of different kinds of events"
    yield f"{values} {how}" + (f": {'; '.join(reasons)}" if reasons else "")
