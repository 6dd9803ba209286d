"""The comparison with other systems as tables, and as a picture of errors over seconds of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environment import DOCS
from figures import mean, origin, spread, table

PAGE = DOCS / "quality.md"
MARKS = ("<!-- peers: made by benchmarks/quality.py --peers -->", "<!-- end of peers -->")
PICTURE = "![RMSE on validation over seconds of training, a line for each system](peers.png)"
# Of each task: what the protocol is called, and the metrics with their names.
TASKS = {
    "rating": ("random 90/10", {"rmse": "RMSE"}),
    "ranking": ("leave one out", {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}),
}
# The first systems of a table: what others are held against. "This" is the last.
FIRST, LAST = ("biases", "popularity"), ("this",)
STYLES = {
    "biases": {"color": "0.6", "linestyle": "--"},
    "myFM, ids": {"color": "C2"},
    "myFM, who rated what": {"color": "C1"},
    "this": {"color": "C0", "marker": "."},
}


def render(result: dict[str, Any]) -> str:
    """A table for ratings, one for ranks, and where they come from."""
    runs = result["runs"]
    tables = [table_of(task, [run for run in runs if run["task"] == task]) for task in TASKS]
    seeds = len({run["seed"] for run in runs})
    about = f"{seeds} seed{'s' * (seeds > 1)}; {result['iterations']} draws of myFM. {origin(result)}."
    return "\n\n".join([*tables, about])


def table_of(task: str, runs: Sequence[dict[str, Any]]) -> str:
    """A line for each set and system: the metrics of the test, and the seconds of training."""
    protocol, metrics = TASKS[task]
    head = [protocol, "system", *metrics.values(), "training"]
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for (data, system), same in sorted_cases(runs).items():
        cells = [spread([run["metrics"][metric] for run in same]) for metric in metrics]
        if system in LAST:
            cells = [f"**{cell}**" for cell in cells]
        lines.append([data, system, *cells, shown_seconds(mean(run["seconds"] for run in same))])
    return table(lines)


def shown_seconds(seconds: float) -> str:
    """With a digit behind the point, if that is not 0."""
    return f"{seconds:.1f} s" if seconds >= 0.05 else "under 0.1 s"


def sorted_cases(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Runs that differ in nothing but the seed: set by set, and of each the baseline first and this last."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["data"], run["system"]), []).append(run)
    sets = list(dict.fromkeys(data for data, _ in found))

    def place(case: tuple[str, str]) -> tuple[int, bool, bool]:
        data, system = case
        return sets.index(data), system not in FIRST, system in LAST

    return {case: found[case] for case in sorted(found, key=place)}


def draw(result: dict[str, Any], path: Path) -> None:
    """The RMSE on validation over the seconds of training, a panel a set and a line a system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(curve["data"] for curve in result["curves"]))
    figure = Figure(figsize=(5.5 * len(sets), 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, data in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
        draw_curves(axes, data, [curve for curve in result["curves"] if curve["data"] == data])
    figure.suptitle(origin(result), fontsize="xx-small")
    figure.savefig(path)


def draw_curves(axes: Any, title: str, curves: Sequence[dict[str, Any]]) -> None:
    """One panel. What is fitted in one go is a level line."""
    for curve in curves:
        style = STYLES[curve["system"]]
        if len(curve["seconds"]) > 1:
            axes.plot(curve["seconds"], curve["rmse"], label=curve["system"], **style)
        else:
            axes.axhline(curve["rmse"][0], label=curve["system"], **style)
    ends = [curve["rmse"][-1] for curve in curves]
    # The first draws are far off; what matters lies between the best end and a little above the baseline.
    axes.set(xscale="log", xlabel="seconds of training", ylabel="RMSE on validation", title=title)
    axes.set_ylim(min(ends) - 0.01, max(ends) + 0.05)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
