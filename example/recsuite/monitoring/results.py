"""What came of a training or an evaluation, as lines and a table on rank 0's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsuite.config.sections.model import ModelConfig
from recsuite.config.sections.training import TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Metrics
from recsuite.datasets.telling import MOST_OF_LABEL
from recsuite.errors import counted, four_places
from recsuite.runtime.process import RuntimeContext

if TYPE_CHECKING:
    from recsuite.models.tasks.task import Task
    from recsuite.training.callbacks import Run


def say_results(
    when: str, test: Metrics, columns: Columns, config: ModelConfig, context: RuntimeContext
) -> None:
    """Show a model beside the baselines, and whether it is worse than the weakest; when: after which epoch or
    step.
    """
    # Not above: a task imports torch, and the report's folder is checked before that takes its time.
    from recsuite.models.tasks.task import task_named

    task = task_named(config.task)
    for sentence in describe_leaks(columns):
        context.say(sentence)
    context.say(results_table(columns, task, f"this model, {when}", test), tagged=False)
    if failure := describe_failure(columns, task, test):
        context.say(failure)


def say_stream(run: Run, config: ModelConfig, context: RuntimeContext) -> None:
    """Show what the predictions of a stream's windows were worth, each made before its window was learned."""
    from recsuite.models.tasks.task import task_named

    task, unit, number = task_named(config.task), run.columns.schema.labels, run.num_epochs
    empty = counted(run.num_empty, f"window without {unit} was", f"windows without {unit} were")
    passed = f"; {empty} passed over" if run.num_empty else ""
    learned = counted(number, "window of the stream is", "windows of the stream are")
    context.say(f"{learned} learned{passed}")
    name = f"predicted before learned, {counted(number, 'window')}"
    context.say(results_table(run.columns, task, name, run.test, "stream"), tagged=False)


def describe_leaks(columns: Columns) -> list[str]:
    """Sentences on features of the event that nearly say the label, to stand above metrics."""
    return [
        f"the feature {name} of the event says {share:.0%} of what there is to know of the "
        f"{columns.schema.label}: unless it is known before that, the metrics below are too good; take "
        f"[features.{name}] out of schema.toml"
        for name, share in columns.label_told.items()
        if share > MOST_OF_LABEL
    ]


def describe_nothing_left(result: Run, config: TrainingConfig) -> str:
    """One line on a training that was resumed, and had no epoch to make."""
    epochs = config.epochs
    if result.num_epochs > epochs:
        done = counted(result.num_epochs, "epoch")
        return (
            f"nothing is left to train: the checkpoint has done {done}, and --epochs {epochs} asks "
            "for fewer; give more"
        )
    stopped = ", and --patience stopped it there" if result.stopped_early else ""
    return f"nothing is left to train: {result.num_epochs} of {epochs} epochs are done{stopped}"


def results_table(columns: Columns, task: Task, name: str, test: Metrics, of: str = "test") -> str:
    """A model beside the baselines of its task, on the test ratings; "-" is a metric that is not defined."""
    rows = {**columns.baselines[task.evaluation], name: test}
    # The oracle is a bound, not a rival: it comes last.
    if "oracle" in rows:
        rows["oracle (knows the planted world)"] = rows.pop("oracle")
    labels = list(task.metrics.values())
    # Wide enough for a number with four places.
    widths = [max(6, len(label)) for label in labels]
    cells = [labels, *([four_places(metrics[key]) for key in task.metrics] for metrics in rows.values())]
    width = max(map(len, rows))
    lines = [
        f"| {name:<{width}} | {' | '.join(map(str.rjust, row, widths))} |"
        for name, row in zip([f"{of} {columns.schema.labels}", *rows], cells, strict=True)
    ]
    rule = f"|{'-' * (width + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths)}|"
    return "\n".join([lines[0], rule, *lines[1:]])


def describe_failure(columns: Columns, task: Task, test: Metrics) -> str:
    """One line on a model that is worse than what knows no user; empty where it is better."""
    name = task.main_metric
    weakest = task.weakest(columns)
    sign = 1 if task.lower_is_better else -1
    # A result that is not a number is worse than all.
    better = [
        f"{known} ({four_places(value)})"
        for known, value in weakest.items()
        if not sign * (test[name] - value) <= 0
    ]
    if not better:
        return ""
    label, value = task.main_label, four_places(test[name])
    return f"this model is worse than {' and '.join(better)}: its test {label} is {value}"
