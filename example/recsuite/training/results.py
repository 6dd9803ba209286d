"""Results of a training on rank 0's output: a table beside the baselines, and lines on what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from recsuite.config.config import Config
from recsuite.config.sections import ModelConfig, TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import counted, format_metric, markdown_table, with_article
from recsuite.hooks import extra
from recsuite.metrics import KNOWN, NEW, TOP, Measured, Metrics
from recsuite.models.tasks import TASKS, WorkerTask
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Run

# Difference between validation and test, by the value of --split.
DIFFERENCES = {
    "time": "the test is newer than all training {labels}, and the validation is drawn from among them",
    "leave_one_out": "the test has the newest {label} of each user, and the validation the one before it of "
    "a few",
}
# Baseline of a stream.
PAST_BIASES = "biases of all earlier events"
# Minimum difference in the share of new users or items for a printed line.
MOST_DIFFERENCE = 0.1


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
    if not run.columns.num_test:
        context.say(describe_no_test(run.columns))
        return
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
    """Print a model beside the baselines, the better baselines, and the difference between validation and
    test. when: the epoch or step of the model.
    """
    task = TASKS[config.model.task]
    if columns.label_leakage:
        for sentence in extra("leakage").describe_leaks(columns):
            context.say(sentence)
    context.say(results_table(columns, task, f"this model, {when}", test, "test", validation), tagged=False)
    for sentence in describe_share_of_best(columns, task, test):
        context.say(sentence)
    for name, segments in test.segments.items():
        context.say(segments_table(columns, task, name, segments), tagged=False)
    if spread := test.lists:
        schema = columns.schema
        described = spread.described(schema.items, task.few_listed)
        context.say(f"lists of {TOP} for each of the test {schema.labels}: {described}")
    if spread and spread.ranked < columns.num_items:
        number = f"{columns.num_items - spread.ranked:,} of {columns.num_items:,} {columns.schema.items}"
        missed = f"{test.missed:,} of {columns.num_test:,} test {columns.schema.labels}"
        context.say(
            f"{number} have no training event, so the model has no row of them and never recommends them "
            f"(--new_items exclude); {missed} are of these items and count as misses"
        )
    for sentence in (
        *describe_better_baselines(columns, task, test),
        *describe_difference(columns, task, test, validation, config.data.split),
    ):
        context.say(sentence)


def print_stream_results(run: Run, config: ModelConfig, context: RuntimeContext) -> None:
    """Print the metrics of a stream's predictions, each made before training on its window."""
    task, unit, number = TASKS[config.task], run.columns.schema.labels, run.num_epochs
    empty = counted(run.num_empty, f"window without {unit} was", f"windows without {unit} were")
    skipped = f"; {empty} skipped" if run.num_empty else ""
    context.say(f"trained on {counted(number, 'window')} of the stream{skipped}")
    name = f"predicted before training, {counted(number, 'window')}"
    context.say(results_table(run.columns, task, name, run.test, "stream", biases=run.biases), tagged=False)
    for sentence in describe_better_baselines(run.columns, task, run.test, run.biases):
        context.say(sentence)


def describe_no_test(columns: Columns) -> str:
    """Return one line on a model of all events."""
    return f"no test: with --split none all {columns.num_train:,} {columns.schema.labels} are for training"


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


def describe_better_baselines(
    columns: Columns, task: WorkerTask, test: Measured, biases: Metrics | None = None
) -> list[str]:
    """Return lines on the baselines that predict the test better than a model; also for users with and
    without training events. Empty if the model is better than all of them.

    biases: the metrics of the baseline of a stream, which has no test.
    """
    labels, label = columns.schema.labels, task.main_label
    baselines = {**columns.baselines[task.evaluation], **({PAST_BIASES: biases} if biases else {})}
    whole, of = _better(baselines, task, test, labels), "" if biases else "test "
    value = format_metric(test[task.main_metric])
    lines = [f"this model is worse than {whole}: its {of}{label} is {value}"] if whole else []
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
