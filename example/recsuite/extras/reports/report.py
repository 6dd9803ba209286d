"""Report of a training in --report_dir: metrics.json, and test.json of a checkpoint. Computes no metric.

Beside either lies groups.json, the test metric of each group of users, by which two models are compared.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.extras.reports.drift import drift_of
from recsuite.files import explained
from recsuite.metrics import Measured, finite
from recsuite.places import write_whole
from recsuite.runtime.host import installed_versions
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Epoch, Run, TrainedWindow
from recsuite.training.results import PAST_BIASES


def make_report_dir(folder: Path) -> None:
    """Make --report_dir before the work begins, so that a wrong one fails early. Call on rank 0.

    Raises:
        UserError: when the folder cannot be made or written.
    """
    with explained(f"Cannot write to --report_dir {folder}", "give another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        # A test write, because the file mode does not show that a disk is full or read-only.
        write_whole(folder / ".writable", b"")
        (folder / ".writable").unlink(missing_ok=True)


def write_report(
    folder: Path, run: Run, seconds: Mapping[str, float], config: Config, context: RuntimeContext
) -> None:
    """Write metrics.json into --report_dir, as a whole. Call on rank 0.

    Raises:
        UserError: when the folder cannot be written.
    """
    advice = "give another --report_dir; the training itself ended well"
    with explained(f"Cannot write the report to {folder}", advice):
        report = {**_report(run, config, context), "time": seconds}
        _write_groups(folder, run.test, report["main_metric"])
        write_whole(folder / "metrics.json", json.dumps(report, indent=1, allow_nan=False).encode())


def write_test(folder: Path, test: Measured, columns: Columns, config: Config) -> None:
    """Write the test of a checkpoint as test.json into --report_dir, as a whole. Call on rank 0.

    Raises:
        UserError: when the folder cannot be written.
    """
    report = _tested(test, columns, config)
    with explained(f"Cannot write the report to {folder}", "give another --report_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        _write_groups(folder, test, report["main_metric"])
        write_whole(folder / "test.json", json.dumps(report, indent=1, allow_nan=False).encode())


def _write_groups(folder: Path, test: Measured, metric: str) -> None:
    """Write `Measured.groups` of a metric of the test and of its segments; nothing without them."""
    if metric not in test.groups:
        return
    segments = {
        name: {value: segment.groups[metric].tolist() for value, segment in segments.items()}
        for name, segments in test.segments.items()
    }
    content = {"test": test.groups[metric].tolist(), "segments": segments}
    write_whole(folder / "groups.json", json.dumps(content, allow_nan=False).encode())


def _tested(test: Measured, columns: Columns, config: Config) -> dict[str, Any]:
    """Return the test metrics with those of its parts, the baselines, and what the test is of."""
    # Imported here: a task imports torch, which is slow, and the report's folder is checked before.
    from recsuite.models.tasks import TASKS

    task, schema = TASKS[config.model.task], columns.schema
    lists = {"coverage": test.lists.coverage, **dataclasses.asdict(test.lists)} if test.lists else {}
    if test.missed:
        lists["missed"] = test.missed
    return {
        "config": config.flags,
        "data": {
            "source": columns.source,
            "num_train": columns.num_train,
            "num_validation": columns.num_validation,
            "num_test": columns.num_test,
            "num_users": columns.num_users,
            f"num_{schema.items}": columns.num_items,
            "tables": {table.name: table.rows for table in columns.tables if table.rows},
            "notes": columns.notes,
        },
        "test_digest": columns.digest_of_test(),
        # Display names of the events and the metrics, for a table that imports no task.
        "events": schema.labels,
        "metrics": task.labels_for(test.values),
        "main_metric": task.main_metric,
        "baselines": {name: finite(metrics) for name, metrics in columns.baselines[task.evaluation].items()},
        "test": finite(test.values),
        "intervals": {"test": _intervals(test)},
        "test_parts": {
            part.strip("/"): {"cases": measured.cases, **finite(measured.values)}
            for part, measured in test.parts.items()
        },
        "lists": lists,
        "segments": {
            name: {
                value: {"cases": segment.cases, **finite(segment.values), "intervals": _intervals(segment)}
                for value, segment in segments.items()
            }
            for name, segments in test.segments.items()
        },
    }


def _report(run: Run, config: Config, context: RuntimeContext) -> dict[str, Any]:
    columns, passes = run.columns, [*map(epoch_report, run.epochs)]
    tested = _tested(run.test, columns, config)
    tested["intervals"]["validation"] = _intervals(run.validation)
    if run.biases:
        tested["baselines"][PAST_BIASES] = finite(run.biases)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": installed_versions(),
        "world_size": context.world_size,
        "device": context.device.type,
        "threads_per_rank": context.num_threads,
        **tested,
        "drift": drift_of(columns) if config.data.split == "time" and not run.is_stream else {},
        "plan": run.plan.splitlines(),
        "test_epoch": run.test_epoch,
        "stopped_early": run.stopped_early,
        "initial_rows_seconds": run.initial_rows_seconds,
        "initial": finite(run.initial.values) if run.initial else {},
        "epochs": [] if run.is_stream else passes,
        # With the number of empty windows, which were skipped.
        **({"windows": passes, "num_empty": run.num_empty} if run.is_stream else {}),
    }


def _intervals(measured: Measured | None) -> dict[str, tuple[float, float]]:
    """Return the 95 % intervals of the metrics that have one."""
    intervals = measured.intervals if measured else {}
    return {name: ends for name, ends in intervals.items() if np.isfinite(ends).all()}


def epoch_report(epoch: Epoch) -> dict[str, Any]:
    """Return the entry of one epoch in metrics.json."""
    # The error of a window is that of predictions made before training on it.
    metrics: dict[str, Any] = {"validation": finite(epoch.validation.values)}
    if isinstance(epoch, TrainedWindow):
        metrics = {"progressive": metrics["validation"], "of all windows": finite(epoch.overall)}
        metrics[PAST_BIASES] = finite(epoch.biases)
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
