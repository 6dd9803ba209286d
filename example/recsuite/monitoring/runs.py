"""The metrics.json of runs, read and checked: what the page of `./run.sh report` draws from.

Knows no metric: any number that a run has is taken by its name.
"""

from __future__ import annotations

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
OPTIONAL: dict[str, type] = {"threads_per_rank": int, "time": dict}
# Numbers of an epoch that are not drawn over the epochs.
NO_CURVES = ("epoch", "steps", "seconds")
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
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """By name, the points (epoch, value) of every number that epochs have."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for epoch in self.epoch_rows:
            for name, value in epoch.items():
                if name not in NO_CURVES:
                    curves.setdefault(name, []).append((epoch["epoch"], value))
        return curves

    @property
    def epoch_rows(self) -> list[dict[str, float]]:
        """The numbers of each epoch, by name."""
        return [dict(numbers(epoch)) for epoch in self.report["epochs"]]

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of the run went; empty in older reports, which did not measure it."""
        return self.report.get("time", {})

    @property
    def speed(self) -> str:
        """The median epoch's rate, and its wait for batches, in words."""
        curves = self.curves
        words = {"ratings_per_second": "{:,.0f} ratings/s", "data_wait": "data wait {:.1%}"}
        shown = {name: text for name, text in words.items() if name in curves}
        return ", ".join(
            text.format(statistics.median(value for _, value in curves[name])) for name, text in shown.items()
        )

    @property
    def machine(self) -> str:
        """Ranks, device and threads, in words."""
        report = self.report
        ranks = f"{counted(report['world_size'], 'rank')} on {report['device']}"
        threads = report.get("threads_per_rank")
        return f"{ranks}, {counted(threads, 'thread')} each" if threads else ranks


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
        return f"its number of test ratings is {report['data']['num_test']!r:.40}"
    for epoch in report["epochs"]:
        if not (isinstance(epoch, dict) and isinstance(epoch.get("epoch"), int)):
            return f"an epoch of it is {epoch!r:.40}"
        # Python's JSON has infinities and NaN, and a chart has no place for them.
        if not all(math.isfinite(value) for _, value in numbers(epoch)):
            return f"its epoch {epoch['epoch']} has a number that is not finite"
    return ""


def is_metrics(metrics: Any) -> bool:
    """Whether these are numbers by name; null is a metric that is not defined there."""
    return isinstance(metrics, dict) and all(
        value is None or (isinstance(value, int | float) and math.isfinite(value))
        for value in metrics.values()
    )
