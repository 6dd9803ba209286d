"""Results of a training on rank 0's output: a table beside the baselines, and lines on what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from recsuite.config.config import Config
from recsuite.config.sections import ModelConfig, TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import counted, format_metric, markdown_table
from recsuite.hooks import extra
from recsuite.metrics import Measured, Metrics
from recsuite.models.tasks import TASKS, WorkerTask
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Run

# Baseline of a stream.
PAST_BIASES = "biases of all earlier events"


def report_run(run: Run, seconds: dict[str, float], config: Config, context: RuntimeContext) -> None:
    """Have the extras report a training, and print the results. Not collective.

    seconds: of the parts of the run, from this rank's stopwatch.

    Raises:
        UserError: when the report cannot be written.
    """
    config = config.with_global_batch(run.columns.num_train, context.world_size)
    # Without an epoch the existing report of the training would be overwritten.
    if context.rank == 0 and run.epochs:
        for section in config.extras.values():
            section.report_training(run, seconds, config, context)
    if run.is_stream:
        print_stream_results(run, config.model, context)
        return
    if not run.epochs:
        context.say(describe_no_epochs_left(run, config.training))
    when = f"epoch {run.test_epoch}" if run.test_epoch else "initial rows"
    print_results(when, run.test, run.columns, config, context, run.validation)


def print_results(
    when: str,
    test: Measured,
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    validation: Measured | None = None,
) -> None:
    """Print a model beside the baselines, and what extras say of it. when: the epoch or step of the model."""
    task = TASKS[config.model.task]
    if columns.label_leakage:
        for sentence in extra("leakage").describe_leaks(columns):
            context.say(sentence)
    context.say(results_table(columns, task, f"this model, {when}", test, "test", validation), tagged=False)
    for sentence in describe_share_of_best(columns, task, test):
        context.say(sentence)
    for name, segments in test.segments.items():
        context.say(segments_table(columns, task, name, segments), tagged=False)
    for section in config.extras.values():
        for sentence in section.describe_test(test, validation, columns, config):
            context.say(sentence)


def print_stream_results(run: Run, config: ModelConfig, context: RuntimeContext) -> None:
    """Print the metrics of a stream's predictions, each made before training on its window."""
    task, unit, number = TASKS[config.task], run.columns.schema.labels, run.num_epochs
    empty = counted(run.num_empty, f"window without {unit} was", f"windows without {unit} were")
    skipped = f"; {empty} skipped" if run.num_empty else ""
    context.say(f"trained on {counted(number, 'window')} of the stream{skipped}")
    name = f"predicted before training, {counted(number, 'window')}"
    context.say(results_table(run.columns, task, name, run.test, "stream", biases=run.biases), tagged=False)


def describe_no_epochs_left(result: Run, config: TrainingConfig) -> str:
    """Return one line on a resumed training that had no epoch left."""
    epochs = config.epochs
    if result.num_epochs > epochs:
        done = counted(result.num_epochs, "epoch")
        return (
            f"nothing left to train: the checkpoint has {done}, and --epochs is {epochs}; "
            "give a larger --epochs"
        )
    stopped = ", stopped early by --patience" if result.stopped_early else ""
    return f"nothing left to train: {result.num_epochs} of {epochs} epochs are done{stopped}"


def results_table(
    columns: Columns,
    task: WorkerTask,
    name: str,
    test: Measured,
    of: str = "test",
    validation: Measured | None = None,
    biases: Metrics | None = None,
) -> str:
    """Return a table of a model and its baselines on the test ratings; "-" is an undefined metric.

    biases: the metrics of the baseline of a stream.
    """
    baselines = dict(columns.baselines[task.evaluation])
    if biases:
        baselines[PAST_BIASES] = biases
    oracle = baselines.pop("oracle", None)
    labels = task.labels_for(test.values)
    rows = {name: _shown(labels, metrics) for name, metrics in baselines.items()}
    rows[name] = _shown(labels, test.values)
    for before, measured in (("", test), ("validation: ", validation)):
        # A load without a validation, and a stream, have none.
        if measured and measured.intervals:
            if before:
                rows["its validation"] = _shown(labels, measured.values)
            which = f"{before}95 % interval, {counted(measured.cases, columns.schema.label)}"
            rows[which] = [_interval(measured, key) for key in labels]
    # The oracle comes last, because it is a bound, not a baseline.
    if oracle is not None:
        rows["oracle (knows the true parameters)"] = _shown(labels, oracle)
    heading = [f"{of} {columns.schema.labels}", *labels.values()]
    return markdown_table([heading, *([name, *row] for name, row in rows.items())])


def segments_table(columns: Columns, task: WorkerTask, name: str, segments: Mapping[str, Measured]) -> str:
    """Return a table of the test metrics of segments. name: of the segments."""
    metrics = {metric: value for segment in segments.values() for metric, value in segment.values.items()}
    labels, main = task.labels_for(metrics), task.main_metric
    heading = [f"test {columns.schema.labels} by {name}", "number", *labels.values()]
    heading.append(f"{task.main_label}, 95 % interval")
    rows = [
        [value, f"{segment.cases:,}", *_shown(labels, segment.values), _interval(segment, main)]
        for value, segment in segments.items()
    ]
    return markdown_table([heading, *rows])


def _shown(labels: Mapping[str, str], metrics: Metrics) -> list[str]:
    return [format_metric(metrics.get(key)) for key in labels]


def _interval(measured: Measured, key: str) -> str:
    low, high = map(format_metric, measured.intervals.get(key, (float("nan"), float("nan"))))
    return "-" if low == "-" else f"{low} to {high}"


def describe_share_of_best(columns: Columns, task: WorkerTask, test: Measured) -> Iterator[str]:
    """Yield a line on the test of a model between the best baseline and the oracle, if there is one."""
    name, baselines = task.main_metric, dict(columns.baselines[task.evaluation])
    best = baselines.pop("oracle", {}).get(name)
    known = {baseline: metrics[name] for baseline, metrics in baselines.items() if metrics[name] is not None}
    if best is None or not known:
        return
    baseline = (min if task.lower_is_better else max)(known, key=known.__getitem__)
    yield from share_of_best(task.main_label, test[name], baseline, known[baseline], best)


def share_of_best(label: str, value: float, name: str, baseline: float, best: float) -> Iterator[str]:
    """Yield a line on the place of a metric between that of a baseline and the best possible one.

    label: of the metric; name: of the baseline. Yields none where the baseline is as good as the best, and
    for a value that is not a number.
    """
    if best == baseline or not math.isfinite((value - baseline) / (best - baseline)):
        return
    yield (
        f"{label} {format_metric(value)} is {(value - baseline) / (best - baseline):.2f} of the way from "
        f"{name} ({format_metric(baseline)}) to the best possible ({format_metric(best)})"
    )
