"""Results of a training or an evaluation, as lines and a table on rank 0's output; comparison of runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsuite.config.config import Config
from recsuite.config.renamed import renamed_flags
from recsuite.config.sections import ModelConfig, TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import KNOWN, NEW, Measured, Metrics
from recsuite.datasets.telling import MOST_OF_LABEL
from recsuite.errors import LINES, UserError, an, counted, four_places, harmless, markdown, printable
from recsuite.files import local, reason_of
from recsuite.runtime.console import end_when_unread
from recsuite.runtime.host import check_descriptors
from recsuite.runtime.process import RuntimeContext

if TYPE_CHECKING:
    from recsuite.models.tasks import Task
    from recsuite.training.callbacks import Run

# Difference between validation and test, by the value of --split.
DIFFERENCES = {
    "time": "the test is newer than all training {labels}, and the validation is drawn from among them",
    "leave_one_out": "the test has the newest {label} of each user, and the validation the one before it of "
    "a few",
}
# Minimum difference in the share of new users or items for a printed line.
MOST_DIFFERENCE = 0.1


def say_results(
    when: str,
    test: Metrics,
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    validation: Metrics | None = None,
) -> None:
    """Print a model beside the baselines, the better baselines, and the difference between validation and
    test. when: the epoch or step of the model.
    """
    # Imported here: a task imports torch, which is slow, and the report's folder is checked before.
    from recsuite.models.tasks import TASKS

    task = TASKS[config.model.task]
    for sentence in describe_leaks(columns):
        context.say(sentence)
    context.say(results_table(columns, task, f"this model, {when}", test, "test", validation), tagged=False)
    for sentence in (
        *describe_failures(columns, task, test),
        *describe_difference(columns, task, test, validation or {}, config.data.split),
    ):
        context.say(sentence)


def say_stream(run: Run, config: ModelConfig, context: RuntimeContext) -> None:
    """Print the metrics of a stream's predictions, each made before training on its window."""
    from recsuite.models.tasks import TASKS

    task, unit, number = TASKS[config.task], run.columns.schema.labels, run.num_epochs
    empty = counted(run.num_empty, f"window without {unit} was", f"windows without {unit} were")
    passed = f"; {empty} passed over" if run.num_empty else ""
    learned = counted(number, "window of the stream is", "windows of the stream are")
    context.say(f"{learned} learned{passed}")
    name = f"predicted before learned, {counted(number, 'window')}"
    context.say(results_table(run.columns, task, name, run.test, "stream"), tagged=False)


def describe_leaks(columns: Columns) -> list[str]:
    """Return sentences on features with leakage of the label, to print above metrics."""
    return [
        f"the feature {name} of the event says {share:.0%} of what there is to know of the "
        f"{columns.schema.label}: unless it is known before that, the metrics below are too good; take "
        f"[features.{name}] out of schema.toml"
        for name, share in columns.label_told.items()
        if share > MOST_OF_LABEL
    ]


def describe_nothing_left(result: Run, config: TrainingConfig) -> str:
    """Return one line on a resumed training that had no epoch left."""
    epochs = config.epochs
    if result.num_epochs > epochs:
        done = counted(result.num_epochs, "epoch")
        return (
            f"nothing is left to train: the checkpoint has done {done}, and --epochs {epochs} asks "
            "for fewer; give more"
        )
    stopped = ", and --patience stopped it there" if result.stopped_early else ""
    return f"nothing is left to train: {result.num_epochs} of {epochs} epochs are done{stopped}"


def results_table(
    columns: Columns,
    task: Task,
    name: str,
    test: Metrics,
    of: str = "test",
    validation: Metrics | None = None,
) -> str:
    """Return a table of a model and its baselines on the test ratings; "-" is an undefined metric."""
    baselines = dict(columns.baselines[task.evaluation])
    oracle = baselines.pop("oracle", None)
    labels = task.labels_for(test)
    rows = {name: _shown(labels, metrics) for name, metrics in baselines.items()}
    rows[name] = _shown(labels, test)
    for before, metrics in (("", test), ("validation: ", validation)):
        # A load without a validation, and a stream, have none.
        if isinstance(metrics, Measured) and metrics.intervals:
            if before:
                rows["its validation"] = _shown(labels, metrics)
            which = f"{before}95 % interval, {counted(metrics.cases, columns.schema.label)}"
            rows[which] = [_interval(metrics, key) for key in labels]
    # The oracle comes last, because it is a bound, not a baseline.
    if oracle is not None:
        rows["oracle (knows the planted world)"] = _shown(labels, oracle)
    heading = [f"{of} {columns.schema.labels}", *labels.values()]
    return markdown([heading, *([name, *row] for name, row in rows.items())])


def _shown(labels: Mapping[str, str], metrics: Metrics) -> list[str]:
    return [four_places(metrics.get(key)) for key in labels]


def _interval(metrics: Measured, key: str) -> str:
    low, high = map(four_places, metrics.intervals.get(key, (float("nan"), float("nan"))))
    return "-" if low == "-" else f"{low} to {high}"


def describe_failures(columns: Columns, task: Task, test: Metrics) -> list[str]:
    """Return lines on the baselines that predict the test better than a model; also for users with and
    without training events. Empty if the model is better than all of them.
    """
    labels, label = columns.schema.labels, task.main_label
    whole = _better(columns.baselines[task.evaluation], task, test, labels)
    value = four_places(test[task.main_metric])
    lines = [f"this model is worse than {whole}: its test {label} is {value}"] if whole else []
    parts: Mapping[str, Measured] = getattr(test, "parts", {})
    of_parts = {
        part: _better(columns.baselines.get(task.evaluation + part, {}), task, metrics, labels)
        for part, metrics in parts.items()
    }
    if not whole and not any(of_parts.values()):
        return []
    of_whom = {KNOWN: f"users with training {labels}", NEW: "other users"}
    for part, better in of_parts.items():
        value = four_places(parts[part][task.main_metric])
        cases = counted(parts[part].cases, columns.schema.label)
        worse = f"worse than {better}" if better else "better than all baselines"
        lines.append(f"{of_whom[part]} ({cases}): its test {label} is {value}, {worse}")
    return lines


def _better(baselines: Mapping[str, Metrics], task: Task, found: Metrics, labels: str) -> str:
    """Return the better baselines, with their values; "" if there are none."""
    name, sign = task.main_metric, 1 if task.lower_is_better else -1
    names = {"global mean": f"the mean of all {labels}", "share of yes": "the share of yes"}
    # A result that is not a number is worse than all.
    return " and ".join(
        f"{names.get(known, known)} ({four_places(metrics[name])})"
        for known, metrics in baselines.items()
        if known != "oracle"
        and math.isfinite(metrics[name])
        and not sign * (found[name] - metrics[name]) <= 0
    )


def describe_difference(
    columns: Columns, task: Task, test: Metrics, validation: Metrics, split: str
) -> Iterator[str]:
    """Yield lines if validation and test differ beyond chance, or in the share of new users and items."""
    if not (isinstance(test, Measured) and isinstance(validation, Measured)):
        return
    name, schema = task.main_metric, columns.schema
    ends = [each.intervals.get(name, (float("nan"), float("nan"))) for each in (test, validation)]
    differs = ends[0][0] > ends[1][1] or ends[1][0] > ends[0][1]
    shares = {
        schema.user: (test.new_users, validation.new_users),
        schema.item: (test.new_items, validation.new_items),
    }
    reasons = [
        f"{of_test:.0%} of the test {schema.labels} and {of_validation:.0%} of those for validation have "
        f"{an(noun)} without a training {schema.label}"
        for noun, (of_test, of_validation) in shares.items()
        if abs(of_test - of_validation) >= MOST_DIFFERENCE
    ]
    if not differs and not reasons:
        return
    if split in DIFFERENCES:
        reasons.insert(0, DIFFERENCES[split].format(labels=schema.labels, label=schema.label))
    values = " and ".join(
        f"{which} {task.main_label} {four_places(each[name])}"
        for which, each in (("validation", validation), ("test", test))
    )
    how = "differ by more than chance" if differs else "are of different kinds of events"
    yield f"{values} {how}" + (f": {'; '.join(reasons)}" if reasons else "")


# A metric is an error, the smaller the better, if its name contains one of these; the others are scores.
ERRORS = ("rmse", "mae", "loss")


@dataclass(frozen=True)
class RunReport:
    """One run with the metric that decides; None is an undefined value.

    test_of: a key that is equal for all runs on the same test; interval: the 95 % interval of the test.
    """

    name: str
    test_of: str
    title: str
    metric: str
    label: str
    validation: float | None
    test: float | None
    interval: Sequence[float]
    baselines: dict[str, float | None]
    seconds: float
    flags: dict[str, str]

    @property
    def badness(self) -> tuple[bool, float]:
        """Sort key of runs: the best by validation first, those without validation last."""
        value = self.validation or 0.0
        return self.validation is None, value if lower_is_better(self.metric) else -value


def lower_is_better(name: str) -> bool:
    """True if a metric of this name is an error."""
    return any(word in name for word in ERRORS)


def find_runs(folders: Sequence[Path]) -> list[RunReport]:
    """Return the runs in these folders or anywhere below them, each once.

    Raises:
        UserError: when a folder holds none, or a report cannot be read.
    """
    files: dict[Path, None] = {}
    for folder in folders:
        found = sorted(folder.rglob("metrics.json"))
        if not found:
            what = "holds no metrics.json" if folder.is_dir() else "is not a folder"
            raise UserError(f"{folder} {what}; give folders that were a run's --report_dir, or hold such.")
        files |= dict.fromkeys(path.resolve() for path in found)
    # The name of a run is the part of its path that differs from the others'.
    shared = os.path.commonpath([path.parent.parent for path in files])
    return [read_report(path, os.path.relpath(path.parent, shared)) for path in files]


def read_report(path: Path, name: str) -> RunReport:
    """Read one metrics.json.

    Raises:
        UserError: when it cannot be read, or is not what a training writes.
    """
    try:
        return _of_report(printable(name), json.loads(path.read_bytes()))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)}).") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {printable(error)}"
        raise UserError(f"{path} is not the report of a training ({fault}); leave its run out.") from error


def _of_report(name: str, report: dict[str, Any]) -> RunReport:
    metric, config, data = report["main_metric"], renamed_flags(report["config"]), report["data"]
    # A resumed run may have tested weights of an epoch that is not in its report.
    tested = [epoch for epoch in report["epochs"] if epoch["epoch"] == report["test_epoch"]]
    source, split = printable(Path(data["source"]).name), printable(config["split"])
    events = f"{data['num_test']:,} {report['events']} in the test"
    # Each event of a stream is predicted before the training on it.
    test = "--stream" if config.get("stream") else f"--split {split}, {events}"
    return RunReport(
        name,
        # Baselines depend only on the data and the split, so they reveal other events under the same name.
        json.dumps([data, report["baselines"], test, metric], sort_keys=True),
        f"{source}, {test}",
        metric,
        report["metrics"][metric],
        _number(tested[0]["validation"].get(metric)) if tested else None,
        _number(report["test"].get(metric)),
        [float(end) for end in report.get("intervals", {}).get("test", {}).get(metric, ())],
        {printable(name): _number(values.get(metric)) for name, values in report["baselines"].items()},
        sum(report["time"].values()),
        # The folder of a report does not count as a difference.
        {name: printable(value) for name, value in config.items() if name != "report_dir"},
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def compare(runs: Sequence[RunReport]) -> str:
    """Return a table of runs on the same test, with the flags that differ and the baselines."""
    runs, names = (
        sorted(runs, key=lambda run: run.badness),
        dict.fromkeys(n for run in runs for n in run.flags),
    )
    differ = [name for name in names if len({run.flags.get(name) for run in runs}) > 1]
    label = runs[0].label
    rows = [["run", f"validation {label}", f"test {label}", "95 % interval", "seconds"]]
    rows[0] += [f"--{name}" for name in differ]
    for run in runs:
        interval = " to ".join(map(four_places, run.interval)) or "-"
        row = [run.name, four_places(run.validation), four_places(run.test), interval, f"{run.seconds:.1f}"]
        rows.append(row + [run.flags.get(name, "-") for name in differ])
    for name, value in runs[0].baselines.items():
        rows.append([name, "-", four_places(value), "-", "-", *["-"] * len(differ)])
    return f"{runs[0].title}\n\n{markdown(rows)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the reports and print their table.

    Raises:
        UserError: for runs that are of no use.
    """
    parser = argparse.ArgumentParser(prog="report", description="Compare the reports of runs.")
    parser.add_argument(
        "runs", nargs="+", type=local, metavar="RUN", help="--report_dir, or a folder of such"
    )
    groups: dict[str, list[RunReport]] = {}
    for run in find_runs(parser.parse_args(arguments).runs):
        groups.setdefault(run.test_of, []).append(run)
    print(harmless("\n\n".join(map(compare, groups.values())), LINES))


if __name__ == "__main__":
    end_when_unread()
    try:
        check_descriptors()
        main()
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(2)
