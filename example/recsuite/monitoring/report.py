"""Report of a training on disk: metrics.json and curves.png. Computes no metric."""

from __future__ import annotations

import io
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.config.config import Config
from recsuite.config.sections import ModelConfig
from recsuite.datasets.metrics import Metrics, finite
from recsuite.files import explained, replace_file
from recsuite.monitoring.results import describe_nothing_left, say_results, say_stream
from recsuite.runtime.host import installed_versions
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Epoch, Run, TrainedWindow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from recsuite.models.tasks import Task


def make_report_dir(folder: Path) -> None:
    """Make --report_dir before the work begins, so that a wrong one fails early. Call on rank 0.

    Raises:
        UserError: when the folder cannot be made or written.
    """
    with explained(f"--report_dir {folder} cannot be written", "give another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        # A test write, because the file mode does not show that a disk is full or read-only.
        replace_file(folder / ".writable", b"")
        (folder / ".writable").unlink(missing_ok=True)


def report_run(run: Run, seconds: dict[str, float], config: Config, context: RuntimeContext) -> None:
    """Write the report of a training if --report_dir is given, and print the results. Not collective.

    seconds: of the parts of the run, from this rank's stopwatch.

    Raises:
        UserError: when the report cannot be written.
    """
    # Without an epoch there is nothing to draw, and the existing report of the training would be overwritten.
    if run.is_stream:
        if context.rank == 0 and config.monitoring.report_dir and run.epochs:
            write_report(run, seconds, config, context)
        say_stream(run, config.model, context)
        return
    if not run.epochs:
        context.say(describe_nothing_left(run, config.training))
    elif context.rank == 0 and config.monitoring.report_dir:
        write_report(run, seconds, config, context)
    say_results(f"epoch {run.test_epoch}", run.test, run.columns, config, context, run.validation)


def write_report(run: Run, seconds: dict[str, float], config: Config, context: RuntimeContext) -> None:
    """Write metrics.json and curves.png into --report_dir, each in one rename. Call on rank 0.

    Raises:
        UserError: when the folder cannot be written.
    """
    folder = Path(config.monitoring.report_dir)
    advice = "the training itself ended well; give another --report_dir"
    with explained(f"The report cannot be written to {folder}", advice):
        report = {**_report(run, config, context), "time": seconds}
        replace_file(folder / "metrics.json", json.dumps(report, indent=1, allow_nan=False).encode())
        replace_file(folder / "curves.png", _draw(run, config.model))


def _report(run: Run, config: Config, context: RuntimeContext) -> dict[str, Any]:
    # Imported here, as in `results.py`, because a task imports torch.
    from recsuite.models.tasks import TASKS

    columns, task = run.columns, TASKS[config.model.task]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": config.flags,
        "versions": installed_versions(),
        "world_size": context.world_size,
        "device": context.device.type,
        "threads_per_rank": context.num_threads,
        "data": {
            "source": columns.source,
            "num_train": columns.num_train,
            "num_validation": columns.num_validation,
            "num_test": columns.num_test,
            "num_users": columns.num_users,
            f"num_{columns.schema.items}": columns.num_items,
            "tables": {table.name: table.rows for table in columns.tables if table.rows},
            "notes": columns.notes,
        },
        "plan": run.plan.splitlines(),
        # Display names of the events and the metrics, for a table that imports no task.
        "events": columns.schema.labels,
        "metrics": task.labels_for(run.test),
        "main_metric": task.main_metric,
        "baselines": {name: finite(metrics) for name, metrics in columns.baselines[task.evaluation].items()},
        "test": finite(run.test),
        "intervals": {"test": _intervals(run.test), "validation": _intervals(run.validation)},
        "test_parts": {
            part.strip("/"): {"cases": metrics.cases, **finite(metrics)}
            for part, metrics in getattr(run.test, "parts", {}).items()
        },
        "test_epoch": run.test_epoch,
        "stopped_early": run.stopped_early,
        "epochs": [] if run.is_stream else [epoch_report(epoch) for epoch in run.epochs],
        **(_windows(run) if run.is_stream else {}),
    }


def _intervals(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Return the 95 % intervals of the metrics that have one."""
    found: dict[str, tuple[float, float]] = getattr(metrics, "intervals", {})
    return {name: ends for name, ends in found.items() if np.isfinite(ends).all()}


def _windows(run: Run) -> dict[str, Any]:
    """Return the fields of a stream: its windows, and the number of empty windows that were skipped."""
    return {"windows": [epoch_report(window) for window in run.epochs], "num_empty": run.num_empty}


def epoch_report(epoch: Epoch) -> dict[str, Any]:
    """Return the entry of one epoch in metrics.json."""
    # The error of a window is that of predictions made before training on it.
    metrics: dict[str, Any] = {"validation": finite(epoch.validation)}
    if isinstance(epoch, TrainedWindow):
        metrics = {"progressive": metrics["validation"], "of all windows": finite(epoch.overall)}
        metrics |= {"events": epoch.num_events, "time": epoch.last_time}
    return {
        "epoch": epoch.number,
        "train_loss": epoch.train_loss,
        **metrics,
        "seconds": epoch.seconds,
        "ratings_per_second": epoch.events_per_second,
        "data_wait": epoch.data_wait,
        "steps": len(epoch.losses),
    }


def _draw(run: Run, config: ModelConfig) -> bytes:
    """Return the curves as PNG: the validation after each epoch, the test at the end, baselines as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from recsuite.models.tasks import TASKS

    # Without pyplot, which looks for a display and keeps every figure until it is closed.
    figure, content = Figure(figsize=(8, 4.5), dpi=120, layout="constrained"), io.BytesIO()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (_draw_windows if run.is_stream else _draw_epochs)(axes, run, TASKS[config.task])
    axes.set_title(Path(run.columns.source).name)
    axes.legend()
    figure.savefig(content)
    return content.getvalue()


def _draw_epochs(axes: Axes, run: Run, task: Task) -> None:
    name = task.main_metric
    numbers = [epoch.number for epoch in run.epochs]
    values = [epoch.validation[name] for epoch in run.epochs]
    axes.plot(numbers, values, "o-", color="C0", label="validation, after the epoch")
    label = f"test, after epoch {run.test_epoch}: {run.test[name]:.4f}"
    axes.plot([run.test_epoch], [run.test[name]], "*", color="C1", markersize=12, label=label)
    baselines = run.columns.baselines[task.evaluation]
    # Not strict: no task has more than three baselines, and most data sets have no oracle.
    for (baseline, metrics), style in zip(baselines.items(), (":", "--", "-."), strict=False):
        color = "C2" if baseline == "oracle" else "C3"
        label = f"{baseline}, test: {metrics[name]:.4f}"
        axes.axhline(metrics[name], color=color, linestyle=style, label=label)
    unit = task.curve_unit.format(labels=run.columns.schema.labels)
    axes.set(xlabel="epoch", ylabel=f"{task.main_label}{unit}")
    # Values above all baselines would leave little room for the others.
    if task.lower_is_better:
        axes.set_ylim(top=max(metrics[name] for metrics in baselines.values()) * 1.02)


def _draw_windows(axes: Axes, run: Run, task: Task) -> None:
    """Draw the progressive error of a stream: of each window, and of all windows up to it."""
    name, numbers = task.main_metric, [window.number for window in run.epochs]
    axes.plot(numbers, [window.validation[name] for window in run.epochs], ".", color="0.65", label="window")
    overall = [window.overall[name] for window in run.epochs if isinstance(window, TrainedWindow)]
    axes.plot(numbers, overall, color="C0", label="all windows up to it")
    axes.set(xlabel="window", ylabel=f"{task.main_label}, predicted before learned")
