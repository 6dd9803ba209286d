"""Comparison of runs on the same test, by their reports, for `./run.sh report`.

A report is the metrics.json of a training, or the test.json of a checkpoint that was tested later.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recsuite.errors import LINES, UserError, escaped, format_metric, markdown_table, printable
from recsuite.files import reason_of
from recsuite.metrics import lower_is_better, paired_interval
from recsuite.places import folder_at
from recsuite.runtime.console import end_when_pipe_closes
from recsuite.runtime.host import check_limits

REPORTS = ("metrics.json", "test.json")
# Flags of outputs, which do not make models differ.
REPORTED = ("report_dir", "save_dir", "by", "cutoffs")


@dataclass(frozen=True)
class RunReport:
    """Run with its main metric; None is an undefined value.

    title: of the table of its test; test_of: a key that is equal for all runs on the same test; interval: the
    95 % interval of the test; groups: the test of each group of users, float64 [2, groups], None if it was
    not written; segments: name to value to (events, metric), see --by; order: by which runs are
    sorted, the best one first.
    """

    name: str
    title: str
    test_of: str
    metric: str
    label: str
    validation: float | None
    test: float | None
    interval: Sequence[float]
    groups: np.ndarray | None
    baselines: dict[str, float | None]
    seconds: float
    flags: dict[str, str]
    segments: dict[str, dict[str, tuple[int, float | None]]]
    order: tuple[bool, float]


def find_runs(folders: Sequence[Path]) -> list[RunReport]:
    """Return the runs in these folders or anywhere below them, each once.

    Raises:
        UserError: when a folder holds none, or a report cannot be read.
    """
    files: dict[Path, None] = {}
    for folder in folders:
        reports = sorted(path for name in REPORTS for path in folder.rglob(name))
        if not reports:
            what = f"holds no {' or '.join(REPORTS)}" if folder.is_dir() else "is not a folder"
            raise UserError(
                f"{folder} {what}; give --report_dir folders of runs, or folders that contain them."
            )
        files |= dict.fromkeys(path.resolve() for path in reports)
    # The name of a run is the part of its path that differs from the others'.
    shared = os.path.commonpath([str(path.parent.parent) for path in files])
    return [read_report(path, os.path.relpath(str(path.parent), shared)) for path in files]


def read_report(path: Path, name: str) -> RunReport:
    """Read one metrics.json or test.json, and the groups.json beside it.

    Raises:
        UserError: when it cannot be read, or is not what a training or a test writes.
    """
    groups = path.with_name("groups.json")
    try:
        of_groups = np.array(json.loads(groups.read_bytes())["test"]) if groups.exists() else None
        return _of_report(printable(name), json.loads(path.read_bytes()), of_groups, path.name == REPORTS[0])
    except OSError as error:
        raise UserError(f"Cannot read {path}: {reason_of(error)}. Fix: leave its run out.") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {printable(error)}"
        raise UserError(
            f"Cannot read {path} as the report of a training: {fault}. Fix: leave its run out."
        ) from error


def _of_report(name: str, report: dict[str, Any], groups: np.ndarray | None, has_trained: bool) -> RunReport:
    if not has_trained:
        report = {**report, "epochs": [], "test_epoch": 0, "time": {}}
    metric, config, data = report["main_metric"], report["config"], report["data"]

    def value_in(metrics: dict[str, Any]) -> float | None:
        return None if metrics.get(metric) is None else float(metrics[metric])

    # A resumed run may have tested weights of an epoch that is not in its report.
    tested = [epoch for epoch in report["epochs"] if epoch["epoch"] == report["test_epoch"]]
    validation = value_in(tested[0]["validation"] if tested else report.get("initial", {}))
    events = f"{data['num_test']:,} {report['events']} in the test"
    # Each event of a stream is predicted before the training on it.
    test = "--stream" if config.get("stream") else f"--split {printable(config['split'])}, {events}"
    # Runs with other features have the same test.
    about = {name: value for name, value in data.items() if name not in ("tables", "notes")}
    return RunReport(
        name,
        f"{printable(Path(data['source']).name)}, {test}",
        # Baselines depend only on the data and the split, so they reveal other events under the same name.
        json.dumps([about, report["baselines"], test, metric], sort_keys=True),
        metric,
        report["metrics"][metric],
        validation,
        value_in(report["test"]),
        [float(end) for end in report.get("intervals", {}).get("test", {}).get(metric, ())],
        groups,
        {printable(name): value_in(values) for name, values in report["baselines"].items()},
        sum(report["time"].values()),
        # Those of a test are not the ones that the model was trained with.
        {name: printable(value) for name, value in config.items() if has_trained and name not in REPORTED},
        {
            printable(segments): {
                printable(value): (result["cases"], value_in(result)) for value, result in of_values.items()
            }
            for segments, of_values in report.get("segments", {}).items()
        },
        (validation is None, (validation or 0.0) * (1 if lower_is_better(metric) else -1)),
    )


def compare(runs: Sequence[RunReport]) -> str:
    """Return a table of runs on the same test, with the flags that differ and the baselines.

    Runs are compared with the first one on the same users, see `paired_interval`.
    """
    runs = sorted(runs, key=lambda run: run.order)
    names = dict.fromkeys(name for run in runs for name in run.flags)
    trained = [run for run in runs if run.flags]
    differ = [name for name in names if len({run.flags.get(name) for run in trained}) > 1]
    label = runs[0].label
    gains = _gains(runs)
    rows = [["run", f"validation {label}", f"test {label}", "95 % interval", *gains, "seconds"]]
    rows[0] += [f"--{name}" for name in differ]
    for place, run in enumerate(runs):
        interval = " to ".join(map(format_metric, run.interval)) or "-"
        metrics = format_metric(run.validation), format_metric(run.test)
        seconds = f"{run.seconds:.1f}" if run.seconds else "-"
        row = [run.name, *metrics, interval, *(of_runs[place] for of_runs in gains.values()), seconds]
        rows.append(row + [run.flags.get(name, "-") for name in differ])
    for name, value in runs[0].baselines.items():
        rows.append([name, "-", format_metric(value), *["-"] * (len(rows[0]) - 3)])
    segments = dict.fromkeys(name for run in runs for name in run.segments)
    tables = map(markdown_table, [rows, *(_segments_table(runs, name) for name in segments)])
    return "\n\n".join([f"{result_of(runs[0])} ({runs[0].name})\n{runs[0].title}", *tables])


def _gains(runs: Sequence[RunReport]) -> dict[str, list[str]]:
    """Return the title of a column to how much better each run is than the first; none if no run is."""
    first, cells = runs[0], ["-"] * len(runs)
    for place, run in enumerate(runs[1:], 1):
        if first.groups is None or run.groups is None:
            continue
        if np.array_equal(first.groups[1], run.groups[1]):
            low, high = paired_interval(run.metric, run.groups, first.groups)
            cells[place] = f"{low:.4f} to {high:.4f}"
    return {f"better than {first.name} (95 %)": cells} if {*cells} > {"-"} else {}


def _segments_table(runs: Sequence[RunReport], name: str) -> list[list[str]]:
    """Return the rows of a table of the test by segment, with a column for each run that has these."""
    runs = [run for run in runs if name in run.segments]
    rows = [[f"test {runs[0].label} by {name}", "number", *(run.name for run in runs)]]
    for value in dict.fromkeys(value for run in runs for value in run.segments[name]):
        of_runs = [run.segments[name].get(value, (0, None)) for run in runs]
        # Ranges of numbers come from the training data, which may differ between runs.
        numbers = {number for number, _ in of_runs if number}
        shown = " or ".join(f"{number:,}" for number in sorted(numbers))
        rows.append([value, shown, *(format_metric(metric) for _, metric in of_runs)])
    return rows


def result_of(run: RunReport) -> str:
    """Return the test metric of a run beside the best baseline: "NDCG@10 0.1220, 4.9 times popularity"."""
    said = f"{run.label} {format_metric(run.test)}"
    known = [(value, name) for name, value in run.baselines.items() if value and name != "oracle"]
    if not known or run.test is None:
        return said
    if lower_is_better(run.label.lower()):
        value, name = min(known)
        share = run.test / value - 1
        return f"{said}, {abs(share):.1%} {'above' if share > 0 else 'below'} {name}"
    value, name = max(known)
    return f"{said}, {run.test / value:.1f} times {name}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the reports and print their table.

    Raises:
        UserError: when there is no run, or a report cannot be read.
    """
    parser = argparse.ArgumentParser(prog="report", description="Compare the reports of runs.")
    parser.add_argument(
        "runs", nargs="+", type=folder_at, metavar="RUN", help="--report_dir, or a folder of such"
    )
    groups: dict[str, list[RunReport]] = {}
    for run in find_runs(parser.parse_args(arguments).runs):
        groups.setdefault(run.test_of, []).append(run)
    print(escaped("\n\n".join(map(compare, groups.values())), LINES))


if __name__ == "__main__":
    end_when_pipe_closes()
    try:
        check_limits()
        main()
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(2)
