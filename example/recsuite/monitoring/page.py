"""One HTML page from any number of runs: what `./run.sh report` does.

    python -m recsuite.monitoring.page runs/first runs/second --output report.html

Reads nothing but the metrics.json of each run and imports no torch, so it is instant. Draws whatever numbers
a run has, by their names: it knows no metric. The page holds all that it shows; it loads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from recsuite.errors import UserError, counted
from recsuite.runtime.host import check_descriptors
from recsuite.runtime.output import end_when_unread

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
# What it may hold besides: those of before did not.
OPTIONAL: dict[str, type] = {"threads_per_rank": int, "time": dict}
# Numbers of an epoch that are no curve.
NO_CURVES = ("epoch", "steps", "seconds")
# A metric is an error, the smaller the better, if its name holds one of these; the others are scores.
ERRORS = ("rmse", "mae", "loss")
# The baseline that nobody can beat: it is no rival.
BOUND = "oracle"
# Flags that are no property of a training.
NO_DIFFERENCES = ("report_dir",)
# As many as the page has colours; more runs use them again, with broken lines.
NUM_COLORS = 8
CHART_WIDTH, CHART_HEIGHT = 440, 250
# Room for the numbers at the axes: left, right, top, bottom.
MARGINS = (52, 12, 10, 34)


@dataclass(frozen=True)
class Run:
    """One metrics.json: the name of its folder, its place among the runs, and what it holds."""

    name: str
    place: int
    report: Mapping[str, Any]

    @property
    def style(self) -> str:
        """What tells it from others on the page, as classes."""
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
        """Where the time of the run went; empty for reports of before it was measured."""
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
        ranks = f"{report['world_size']} rank{'s' if report['world_size'] > 1 else ''} on {report['device']}"
        threads = report.get("threads_per_rank")
        return f"{ranks}, {threads} thread{'s' if threads > 1 else ''} each" if threads else ranks


def numbers(mapping: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings by names like a path, "test/rmse"; null is left out."""
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{name}", value


# --- reading -----------------------------------------------------------------------------------------------


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders or anywhere below them, each once, in the order given.

    Raises:
        UserError: when a folder holds none, or a report cannot be read.
    """
    files: dict[Path, None] = {}
    for folder in folders:
        found = sorted(folder.rglob("metrics.json"))
        if not found:
            what = "holds no metrics.json" if folder.is_dir() else "is no folder"
            raise UserError(f"{folder} {what}; give folders that were a run's --report_dir, or hold such.")
        files |= dict.fromkeys(path.resolve().parent for path in found)
    # Runs are called by where they differ.
    shared = Path(os.path.commonpath([folder.parent for folder in files]))
    return [
        Run(str(folder.relative_to(shared)), place, read_report(folder / "metrics.json"))
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
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is no JSON ({error}); leave its run out.") from error
    fault = find_fault(report)
    if fault:
        raise UserError(f"{path} is not the report of a training: {fault}; leave its run out.")
    return report


def find_fault(report: Any) -> str:
    """What is wrong with a report, in words; empty if nothing is."""
    if not isinstance(report, dict):
        return "it is no mapping"
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
        if not all(math.isfinite(value) for _, value in numbers(epoch)):
            return f"its epoch {epoch['epoch']} has a number that is none"
    return ""


def is_metrics(metrics: Any) -> bool:
    """Whether these are numbers by name; null is a metric that is not defined there."""
    return isinstance(metrics, dict) and all(
        value is None or (isinstance(value, int | float) and math.isfinite(value))
        for value in metrics.values()
    )


# --- what the page shows -----------------------------------------------------------------------------------


def quality_tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A table for all runs on the same test: those with the same data, split and baselines."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        report = run.report
        same = [report["data"], report["baselines"], report["config"].get("split"), list(run.test)]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    return [quality_table(members) for members in groups.values()]


def quality_table(runs: Sequence[Run]) -> dict[str, Any]:
    """Baselines and runs, their metrics, and in which row the best value of each metric stands."""
    report = runs[0].report
    rows: list[tuple[str, Run | None, Mapping[str, float | None]]] = [
        *((name, None, metrics) for name, metrics in report["baselines"].items()),
        *((run.name, run, run.test) for run in runs),
    ]
    names = list(dict.fromkeys(name for _, _, metrics in rows for name in metrics))
    rivals = [metrics for name, run, metrics in rows if run or name != BOUND]
    best = {name: best_value(name, [metrics.get(name) for metrics in rivals]) for name in names}
    data, split = report["data"], report["config"].get("split", "")
    title = f"{Path(str(data.get('source', 'data'))).name}, --split {split}"
    if "num_test" in data:
        title += f", {data['num_test']:,} ratings in the test"
    return {"title": title, "names": names, "rows": rows, "best": best, "bound": BOUND}


def best_value(name: str, values: Sequence[float | None]) -> float | None:
    """The best of a metric's values; none where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return min(known) if any(word in name for word in ERRORS) else max(known)


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The flags whose values differ between the runs, with the value of each run."""
    names = dict.fromkeys(name for run in runs for name in run.report["config"] if name not in NO_DIFFERENCES)
    values = {name: [show(run.report["config"].get(name, "")) for run in runs] for name in names}
    return {name: shown for name, shown in values.items() if len(set(shown)) > 1}


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A chart for every number that epochs have, with a line for each run that has it."""
    curves = [run.curves for run in runs]
    names = dict.fromkeys(name for mine in curves for name in mine)
    return [
        chart(name, [(run, mine[name]) for run, mine in zip(runs, curves, strict=True) if name in mine])
        for name in names
    ]


def chart(name: str, lines: Sequence[tuple[Run, Sequence[tuple[float, float]]]]) -> dict[str, Any]:
    """Lines and ticks, in the coordinates of the picture."""
    points = [point for _, line in lines for point in line]
    columns = ticks(min(x for x, _ in points), max(x for x, _ in points), whole=True)
    rows = ticks(min(y for _, y in points), max(y for _, y in points))
    left, right, top, bottom = MARGINS

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - columns[0]) / (columns[-1] - columns[0]), (y - rows[0]) / (rows[-1] - rows[0])
        return (
            round(left + across * (CHART_WIDTH - left - right), 1),
            round(CHART_HEIGHT - bottom - up * (CHART_HEIGHT - top - bottom), 1),
        )

    return {
        "name": in_words(name),
        "columns": [(place(x, rows[0])[0], label) for x, label in zip(columns, labels(columns), strict=True)],
        "rows": [(place(columns[0], y)[1], label) for y, label in zip(rows, labels(rows), strict=True)],
        "lines": [(run, [(*place(x, y), show(x), show(y)) for x, y in line]) for run, line in lines],
    }


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Three to seven round numbers, evenly spaced, from at most `low` to at least `high`."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 3))
    step *= max(factor for factor in (1, 2, 5) if step * factor <= span / 3)
    if whole:
        step = max(1.0, round(step))
    first = math.floor(low / step + 1e-9)
    # One value alone needs two ends as well.
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(place * step, 12) for place in range(first, last + 1)]


def in_words(name: str) -> str:
    """The name of a number as a reader would write it."""
    return name.replace("/", " ").replace("_", " ")


def labels(places: Sequence[float]) -> list[str]:
    """Ticks as short texts with as many digits as tell them apart, the same for all."""
    unit, scale = next(
        (unit, scale)
        for unit, scale in (("M", 1e6), ("k", 1e3), ("", 1.0))
        if max(map(abs, places)) >= 10 * scale or not unit
    )
    step = (places[1] - places[0]) / scale
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{place / scale:.{digits}f}{unit}" for place in places]


def show(value: Any) -> str:
    """A value as text: numbers with as many digits as are of use."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def draw(runs: Sequence[Run]) -> str:
    """The page as HTML. Whatever the reports say is text there, never markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"show": show, "in_words": in_words}
    parts = dict.fromkeys(part for run in runs for part in run.seconds)
    return environment.get_template("page.html").render(
        runs=runs,
        tables=quality_tables(runs),
        charts=charts(runs),
        width=CHART_WIDTH,
        height=CHART_HEIGHT,
        margins=MARGINS,
        parts=list(parts),
        differences=differences(runs),
    )


# --- the command -------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are the sentences of all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, draw, write, say where.

    Raises:
        UserError: for arguments, runs or an output that are of no use.
    """
    parser = _Parser(prog="report", description="Draw one page from the reports of runs.", allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a --report_dir, or a folder of such"
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (report.html)")
    given = parser.parse_args(arguments)
    runs = find_runs(given.runs)
    try:
        replace_file(given.output, draw(runs).encode())
    except OSError as error:
        raise UserError(
            f"--output {given.output} cannot be written ({error.strerror or error}); give another file."
        ) from error
    print(f"{given.output} shows {counted(len(runs), 'run')}")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that appears, or changes, in one rename."""
    beside = path.parent / f".{path.name}.{os.getpid()}"
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    end_when_unread()
    try:
        check_descriptors()
        main()
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(2)
