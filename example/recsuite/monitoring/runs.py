"""The metrics.json of runs, read and checked: what the page of `./run.sh report` draws from.

Any number that a run has is taken by its name. What people call it, and which metric a run is judged by, its
report says; older reports do not, and are read with the names below.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsuite.errors import UserError, counted
from recsuite.files import reason_of

# What a report must hold, and as what.
NEEDED: dict[str, type] = {
    "date": str,
    "config": dict,
    "versions": dict,
    "world_size": int,
    "device": str,
    "data": dict,
    "plan": list,
    "baselines": dict,
    "test": dict,
    "epochs": list,
}
# What it may hold besides: older reports do not.
OPTIONAL: dict[str, type] = {
    "threads_per_rank": int,
    "time": dict,
    "events": str,
    "metrics": dict,
    "main_metric": str,
    "test_epoch": int,
    "windows": list,
    "index": list,
    "intervals": dict,
}
# How people call the metrics of older reports. A run is judged by the first of these that it has.
OLDER_METRICS = {
    "rmse": "RMSE",
    "ndcg_at_10": "NDCG@10",
    "hr_at_10": "HR@10",
    "mae": "MAE",
    "log_loss": "log loss",
    "auc": "AUC",
}
# A metric is an error, the smaller the better, if its name holds one of these; the others are scores.
ERRORS = ("rmse", "mae", "loss")
VALIDATION = "validation/"
# Numbers of an epoch that say how fast it was, and nothing of what was learned; the second is a share.
SPEED, DATA_WAIT = "ratings_per_second", "data_wait"
# Numbers of an epoch that are not drawn over the epochs.
NO_CURVES = ("epoch", "steps", "seconds", "events", "time")
# The page has so many colours; further runs use them again, with broken lines.
NUM_COLORS = 8


@dataclass(frozen=True)
class RunReport:
    """One metrics.json: the name of its folder, its place among the runs, and what it holds."""

    name: str
    place: int
    report: Mapping[str, Any]

    @property
    def style(self) -> str:
        """The CSS classes that tell it from other runs on the page."""
        return f"c{self.place % NUM_COLORS}{' again' if self.place >= NUM_COLORS else ''}"

    @property
    def test(self) -> dict[str, float | None]:
        """The metrics on the test."""
        found: dict[str, float | None] = self.report["test"]
        return found

    @property
    def validation(self) -> dict[str, float]:
        """The metrics on the validation of the weights that were tested; empty where unknown."""
        rows = self.epoch_rows
        # Reports that do not name the epoch are of trainings that tested the last one.
        tested = self.report.get("test_epoch", rows[-1]["epoch"] if rows else None)
        return {
            name.removeprefix(VALIDATION): value
            for epoch in rows
            if epoch["epoch"] == tested
            for name, value in epoch.items()
            if name.startswith(VALIDATION)
        }

    def interval(self, split: str, name: str) -> list[float]:
        """The ends of the 95 % interval of a metric on "test" or "validation"; empty where unknown."""
        found: list[float] = self.report.get("intervals", {}).get(split, {}).get(name, [])
        return found

    @property
    def labels(self) -> dict[str, str]:
        """How people call the metrics."""
        return {**OLDER_METRICS, **self.report.get("metrics", {})}

    @property
    def main_metric(self) -> str:
        """The metric by which the run is judged; empty if it has none."""
        known = [*OLDER_METRICS, *self.test]
        first = next((name for name in known if name in self.test), "")
        return str(self.report.get("main_metric", first))

    @property
    def events(self) -> str:
        """The noun for what it was trained on."""
        return str(self.report.get("events", "events"))

    @property
    def is_profiled(self) -> bool:
        """Whether a profiler recorded some of its steps, which slowed them."""
        return bool(self.report["config"].get("profile"))

    @property
    def is_resumed(self) -> bool:
        """Whether earlier epochs were trained by a process of which this report says nothing."""
        return bool(self.epoch_rows) and self.epoch_rows[0]["epoch"] > 1

    @property
    def clock(self) -> dict[float, float]:
        """By epoch, the seconds of training up to its end; empty if some epoch was not timed."""
        rows = self.epoch_rows
        if not all("seconds" in epoch for epoch in rows):
            return {}
        ends = itertools.accumulate(epoch["seconds"] for epoch in rows)
        return {epoch["epoch"]: end for epoch, end in zip(rows, ends, strict=True)}

    @property
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """By name, the points (epoch, value) of every number that epochs have."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for epoch in self.epoch_rows:
            for name, value in epoch.items():
                if name not in NO_CURVES:
                    curves.setdefault(name, []).append((epoch["epoch"], value))
        return curves

    @property
    def index_curve(self) -> list[tuple[float, float]]:
        """What an index of the items finds of the best, over the microseconds of a search; empty without."""
        return [(point["microseconds"], point["recall"]) for point in self.report.get("index", ())]

    @property
    def epoch_rows(self) -> list[dict[str, float]]:
        """The numbers of each epoch, by name."""
        # A stream has windows instead.
        rows = [*self.report["epochs"], *self.report.get("windows", ())]
        return [dict(numbers(row)) for row in rows]

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of the run went; empty in older reports, which did not measure it."""
        parts = self.report.get("time", {})
        return {name: seconds for name, seconds in parts.items() if seconds is not None}

    @property
    def total_seconds(self) -> float:
        """How long the run took; 0 where its report does not say."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float | None:
        """Events per second in the median epoch; None if it was not measured."""
        rates = [value for _, value in self.curves.get(SPEED, ())]
        return statistics.median(rates) if rates else None

    @property
    def data_wait(self) -> float | None:
        """The share of the median epoch that waited for batches; None if it was not measured."""
        shares = [value for _, value in self.curves.get(DATA_WAIT, ())]
        return statistics.median(shares) if shares else None

    @property
    def machine(self) -> str:
        """Ranks, device and threads, in words."""
        report = self.report
        ranks = f"{counted(report['world_size'], 'rank')} on {report['device']}"
        threads = report.get("threads_per_rank")
        return f"{ranks}, {counted(threads, 'thread')} each" if threads else ranks


def lower_is_better(name: str) -> bool:
    """Whether a metric of this name is an error."""
    return any(word in name for word in ERRORS)


def numbers(mapping: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings by names like a path, "test/rmse"; null is left out."""
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{before}{name}/")
        # To Python, a truth value is an int.
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{name}", value


def find_runs(folders: Sequence[Path]) -> list[RunReport]:
    """The runs in these folders or anywhere below them, each once, in the order given.

    Raises:
        UserError: when a folder holds none, or a report cannot be read.
    """
    files: dict[Path, None] = {}
    for folder in folders:
        found = sorted(folder.rglob("metrics.json"))
        if not found:
            what = "holds no metrics.json" if folder.is_dir() else "is not a folder"
            raise UserError(f"{folder} {what}; give folders that were a run's --report_dir, or hold such.")
        # By its real place: a folder that is named twice, or also through a link, is one run.
        files |= dict.fromkeys(path.resolve().parent for path in found)
    # A run is named by the part of its path that differs from the others'.
    shared = Path(os.path.commonpath([folder.parent for folder in files]))
    return [
        RunReport(str(folder.relative_to(shared)), place, read_report(folder / "metrics.json"))
        for place, folder in enumerate(files)
    ]


def read_report(path: Path) -> dict[str, Any]:
    """What a metrics.json holds, with all that the page needs.

    Raises:
        UserError: when it cannot be read, or is not what a training writes.
    """
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)}).") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is not JSON ({error}); leave its run out.") from error
    fault = find_fault(report)
    if fault:
        raise UserError(f"{path} is not the report of a training: {fault}; leave its run out.")
    return report


def find_fault(report: Any) -> str:
    """What is wrong with a report, in words; empty if nothing is."""
    if not isinstance(report, dict):
        return "it is not a mapping"
    for name, kind in {**NEEDED, **OPTIONAL}.items():
        if name in NEEDED and name not in report:
            return f"it has no {name!r}"
        if name in report and not isinstance(report[name], kind):
            return f"its {name!r} is {report[name]!r:.40}"
    for name, metrics in {
        **report["baselines"],
        **{name: report.get(name, {}) for name in ("test", "time")},
    }.items():
        if not is_metrics(metrics):
            return f"its {name!r} is {metrics!r:.40}"
    if not isinstance(report["data"].get("num_test", 0), int):
        return f"its number of test events is {report['data']['num_test']!r:.40}"
    for name, label in report.get("metrics", {}).items():
        if not isinstance(label, str):
            return f"its name for {name!r} is {label!r:.40}"
    for split, intervals in report.get("intervals", {}).items():
        if not (isinstance(intervals, dict) and all(map(is_interval, intervals.values()))):
            return f"its intervals of {split!r} are {intervals!r:.40}"
    for point in report.get("index", ()):
        if not (isinstance(point, dict) and is_metrics(point) and {"microseconds", "recall"} <= point.keys()):
            return f"a point of its index is {point!r:.40}"
    for epoch in [*report["epochs"], *report.get("windows", ())]:
        if not (isinstance(epoch, dict) and isinstance(epoch.get("epoch"), int)):
            return f"an epoch of it is {epoch!r:.40}"
        # Python's JSON has infinities and NaN, and a chart has no place for them.
        if not all(math.isfinite(value) for _, value in numbers(epoch)):
            return f"its epoch {epoch['epoch']} has a number that is not finite"
    return ""


def is_interval(ends: Any) -> bool:
    """True for a pair of numbers."""
    return isinstance(ends, list) and len(ends) == 2 and is_metrics(dict(enumerate(ends)))


def is_metrics(metrics: Any) -> bool:
    """Whether these are numbers by name; null is a metric that is not defined there."""
    return isinstance(metrics, dict) and all(
        value is None or (isinstance(value, int | float) and math.isfinite(value))
        for value in metrics.values()
    )
