"""One HTML page from any number of runs: what `./run.sh report` does.

    python -m recsuite.monitoring.page runs/first runs/second --output report.html

Reads nothing but the metrics.json of each run and imports no torch, so it is instant. Draws whatever numbers
a run has, by their names; of a metric it knows only whether it is an error, by a word in its name. The page
holds all that it shows; it loads nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from recsuite.errors import UserError, counted
from recsuite.files import explained, replace_file
from recsuite.monitoring.charts import CHART_HEIGHT, CHART_WIDTH, MARGINS, charts, in_words, show
from recsuite.monitoring.runs import RunReport, find_runs
from recsuite.runtime.console import end_when_unread
from recsuite.runtime.host import check_descriptors

# A metric is an error, the smaller the better, if its name holds one of these; the others are scores.
ERRORS = ("rmse", "mae", "loss")
# The baseline that no model can beat, so it is never marked as the best.
BOUND = "oracle"
# Flags that say nothing about the training itself.
NO_DIFFERENCES = ("report_dir",)


def quality_tables(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """A table for all runs on the same test: those with the same data, split and baselines."""
    groups: dict[str, list[RunReport]] = {}
    for run in runs:
        report = run.report
        # Baselines follow from the data and the split alone, so other ratings under the same name show in
        # them.
        same = [report["data"], report["baselines"], report["config"].get("split"), list(run.test)]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    return [quality_table(members) for members in groups.values()]


def quality_table(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Baselines and runs, their metrics, and in which row the best value of each metric stands."""
    report = runs[0].report
    rows: list[tuple[str, RunReport | None, Mapping[str, float | None]]] = [
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


def differences(runs: Sequence[RunReport]) -> dict[str, list[str]]:
    """The flags whose values differ between the runs, with the value of each run."""
    names = dict.fromkeys(name for run in runs for name in run.report["config"] if name not in NO_DIFFERENCES)
    values = {name: [show(run.report["config"].get(name, "")) for run in runs] for name in names}
    return {name: shown for name, shown in values.items() if len(set(shown)) > 1}


def draw(runs: Sequence[RunReport]) -> str:
    """The page as HTML. Whatever the reports say is text there, never markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        # A name that the template misspells is an error; by default it would be an empty place on the page.
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
    with explained(f"--output {given.output} cannot be written", "give another file"):
        replace_file(given.output, draw(runs).encode())
    print(f"{given.output} shows {counted(len(runs), 'run')}")


if __name__ == "__main__":
    end_when_unread()
    try:
        check_descriptors()
        main()
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(2)
