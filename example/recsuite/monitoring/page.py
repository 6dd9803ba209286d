"""One HTML page from any number of runs: what `./run.sh report` does.

    python -m recsuite.monitoring.page runs/first runs/second --output report.html

Reads nothing but the metrics.json of each run and imports no torch, so it is instant. Draws whatever numbers
a run has, by their names, and compares runs by what validation says of them. The page holds all that it
shows; it loads nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from recsuite.errors import UserError, counted, harmless
from recsuite.files import explained, local, replace_file
from recsuite.monitoring.charts import (
    CHART_HEIGHT,
    CHART_WIDTH,
    EPOCHS,
    MARGINS,
    SECONDS,
    arrow,
    heading_of,
    index_charts,
    label_of,
    learning_charts,
    other_charts,
    percent,
    show,
)
from recsuite.monitoring.runs import RunReport, find_runs, lower_is_better
from recsuite.runtime.console import end_when_unread
from recsuite.runtime.host import check_descriptors

# The baseline that no model can beat.
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
    """Runs, the best by validation first, then baselines; and the best of the runs in each metric.

    The test decides nothing here: it could not judge a run that it had chosen.
    """
    report, main = runs[0].report, runs[0].main_metric
    sources = [*(run.validation for run in runs), *(run.test for run in runs), *report["baselines"].values()]
    names = list(dict.fromkeys(name for metrics in sources for name in metrics))
    return {
        "title": describe_test(runs[0]),
        "metrics": {name: f"{label_of(name, runs[0])} {arrow(name)}" for name in names},
        "main": main,
        "main_label": label_of(main, runs[0]),
        "runs": sorted(runs, key=lambda run: badness(main, run.validation.get(main))),
        "best": {name: best_value(name, [run.validation.get(name) for run in runs]) for name in names},
        "baselines": report["baselines"],
        "bound": BOUND,
    }


def describe_test(run: RunReport) -> str:
    """The test of a run, in words."""
    data, split = run.report["data"], run.report["config"].get("split", "")
    title = f"{Path(str(data.get('source', 'data'))).name}, --split {split}"
    return f"{title}, {data['num_test']:,} {run.events} in the test" if "num_test" in data else title


def badness(name: str, value: float | None) -> tuple[bool, float]:
    """Sorts values of a metric, the best first and unknown ones last."""
    if value is None:
        return True, 0.0
    return False, value if lower_is_better(name) else -value


def best_value(name: str, values: Sequence[float | None]) -> float | None:
    """The best of a metric's values; none where there are not two to compare."""
    known = [value for value in values if value is not None]
    return min(known, key=lambda value: badness(name, value)) if len(known) > 1 else None


def flags(runs: Sequence[RunReport]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The flags whose values differ between the runs, with the value of each run; and the other ones."""
    names = dict.fromkeys(name for run in runs for name in run.report["config"])
    values = {name: [show(run.report["config"].get(name, "")) for run in runs] for name in names}
    differ = {
        name: shown for name, shown in values.items() if len(set(shown)) > 1 and name not in NO_DIFFERENCES
    }
    # A folder of its own for each run is no difference, yet worth reading.
    rest = {name: ", ".join(dict.fromkeys(shown)) for name, shown in values.items() if name not in differ}
    return differ, rest


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
    environment.filters |= {"show": show, "percent": percent}
    differ, rest = flags(runs)
    return environment.get_template("page.html").render(
        runs=runs,
        tables=quality_tables(runs),
        learning=learning_charts(runs),
        others=other_charts(runs, EPOCHS),
        index=index_charts(runs),
        over_time=other_charts(runs, SECONDS),
        heading_of=heading_of,
        width=CHART_WIDTH,
        height=CHART_HEIGHT,
        margins=MARGINS,
        parts=list(dict.fromkeys(part for run in runs for part in run.seconds)),
        # One scale for all bars: the longest run is as wide as the page.
        longest=max(run.total_seconds for run in runs),
        differ=differ,
        rest=rest,
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
        "runs", nargs="+", type=local, metavar="RUN", help="a --report_dir, or a folder of such"
    )
    parser.add_argument("--output", type=local, default=Path("report.html"), help="the page (report.html)")
    given = parser.parse_args(arguments)
    runs = find_runs(given.runs)
    with explained(f"--output {given.output} cannot be written", "give another file"):
        replace_file(given.output, draw(runs).encode())
    print(f"{harmless(given.output)} shows {counted(len(runs), 'run')}")


if __name__ == "__main__":
    end_when_unread()
    try:
        check_descriptors()
        main()
    except UserError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(2)
