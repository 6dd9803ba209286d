"""What a user sees: lines, a progress bar, a table, and the report on disk. Draws; computes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from columns import Columns
from config import Config
from errors import UserError
from metrics import Metrics
from page import replace_file
from runtime import RuntimeContext
from stack import stack_versions

if TYPE_CHECKING:
    from tqdm import tqdm

    from train import Epoch, Run


def describe_data(columns: Columns, config: Config) -> str:
    """What is trained on, and whatever was left out of it."""
    lines = [
        f"{columns.source}: {columns.num_train:,} ratings for training, {columns.num_test:,} for the test "
        f"(--split {config.split}), {columns.num_users:,} users, {columns.num_movies:,} movies"
    ]
    return "\n".join([*lines, *columns.notes])


def describe_epoch(epoch: Epoch, config: Config) -> str:
    """One line on one epoch."""
    return (
        f"epoch {epoch.number}/{config.epochs}: train RMSE {epoch.train_rmse:.4f}, test RMSE "
        f"{epoch.test.rmse:.4f}, {epoch.seconds:.1f} s, {epoch.ratings_per_second:,.0f} ratings/s, "
        f"data wait {epoch.data_wait:.1%}"
    )


@contextlib.contextmanager
def progress_bar(total: int, title: str, context: RuntimeContext) -> Iterator[tqdm]:
    """A bar in ratings with rate and time left, on rank 0 of a terminal; elsewhere it stays quiet."""
    from tqdm import tqdm

    quiet = context.rank != 0 or not sys.stderr.isatty()
    with tqdm(total=total, desc=title, unit="rating", unit_scale=True, leave=False, disable=quiet) as bar:
        yield bar


def results_table(columns: Columns, name: str, test: Metrics) -> str:
    """A model beside the baselines, on the test ratings."""
    rows = {**columns.baselines, name: test}
    # The oracle is a bound, not a rival: it comes last.
    if "oracle" in rows:
        rows["oracle (knows the planted world)"] = rows.pop("oracle")
    width = max(map(len, rows))
    lines = [
        f"| {'test ratings':<{width}} |   RMSE |    MAE |    AUC |",
        f"|{'-' * (width + 2)}|-------:|-------:|-------:|",
    ]
    lines += [f"| {name:<{width}} | {_cells(metrics)} |" for name, metrics in rows.items()]
    return "\n".join(lines)


def _cells(metrics: Metrics) -> str:
    return " | ".join(f"{value:6.4f}" for value in dataclasses.astuple(metrics))


def make_report_dir(config: Config) -> None:
    """Make --report_dir before the work begins, so that a wrong one costs no training. Call on rank 0.

    Raises:
        UserError: when the folder cannot be made or written.
    """
    folder = Path(config.report_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / ".writable", b"")
        (folder / ".writable").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"--report_dir {folder} cannot be written ({error.strerror or error}); give another folder."
        ) from error


def write_report(
    run: Run, seconds: dict[str, float], config: Config, context: RuntimeContext
) -> dict[str, Any]:
    """Write metrics.json and curves.png into --report_dir, each in one rename. Call on rank 0.

    Takes the seconds of the run's parts, as this rank's stopwatch counted them; returns what metrics.json
    holds.

    Raises:
        UserError: when the folder cannot be written.
    """
    folder = Path(config.report_dir)
    try:
        report = {**_report(run, config, context), "time": seconds}
        replace_file(folder / "metrics.json", json.dumps(report, indent=1).encode())
        replace_file(folder / "curves.png", _draw(run))
    except OSError as error:
        raise UserError(
            f"The report cannot be written to {folder} ({error.strerror or error}); the training itself "
            "ended well; give another --report_dir."
        ) from error
    return report


def _report(run: Run, config: Config, context: RuntimeContext) -> dict[str, Any]:
    columns = run.columns
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": dataclasses.asdict(config),
        "versions": stack_versions(),
        "world_size": context.world_size,
        "device": context.device.type,
        "threads_per_rank": context.num_threads,
        "data": {
            "source": columns.source,
            "num_train": columns.num_train,
            "num_test": columns.num_test,
            "num_users": columns.num_users,
            "num_movies": columns.num_movies,
            "tables": {table.name: table.rows for table in columns.tables},
            "notes": columns.notes,
        },
        "plan": run.plan.splitlines(),
        "baselines": {name: _finite(metrics) for name, metrics in columns.baselines.items()},
        "epochs": [epoch_report(epoch) for epoch in run.epochs],
    }


def epoch_report(epoch: Epoch) -> dict[str, Any]:
    """What metrics.json holds of one epoch."""
    return {
        "epoch": epoch.number,
        "train_rmse": epoch.train_rmse,
        "test": _finite(epoch.test),
        "seconds": epoch.seconds,
        "ratings_per_second": epoch.ratings_per_second,
        "data_wait": epoch.data_wait,
        "steps": len(epoch.losses),
    }


def _finite(metrics: Metrics) -> dict[str, float | None]:
    # JSON has no NaN.
    values = dataclasses.asdict(metrics).items()
    return {name: value if math.isfinite(value) else None for name, value in values}


def _draw(run: Run) -> bytes:
    """The curves as PNG: training RMSE step by step, test RMSE after each epoch, baselines as lines."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses = np.concatenate([epoch.losses for epoch in run.epochs])
    # Means over a fiftieth of an epoch, so that the noise of single batches does not hide the curve.
    window = max(1, len(run.epochs[0].losses) // 50)
    smooth = np.sqrt([part.mean() for part in np.array_split(losses, len(losses) // window)])
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        np.linspace(run.epochs[0].number - 1, run.epochs[-1].number, len(smooth)),
        smooth,
        color="0.65",
        label="training, while learning",
    )
    numbers = [epoch.number for epoch in run.epochs]
    axes.plot(
        numbers, [epoch.test.rmse for epoch in run.epochs], "o-", color="C0", label="test, after the epoch"
    )
    for (name, metrics), style in zip(run.columns.baselines.items(), (":", "--", "-."), strict=False):
        color = "C2" if name == "oracle" else "C3"
        axes.axhline(metrics.rmse, color=color, linestyle=style, label=f"{name}: {metrics.rmse:.4f}")
    axes.set(xlabel="epoch", ylabel="RMSE in stars", title=Path(run.columns.source).name)
    axes.set_ylim(top=max(metrics.rmse for metrics in run.columns.baselines.values()) * 1.02)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content)
    return content.getvalue()
