"""The line charts of the page, in the coordinates of a picture, and numbers as texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from recsuite.monitoring.runs import DATA_WAIT, SPEED, VALIDATION, RunReport, lower_is_better

CHART_WIDTH, CHART_HEIGHT = 360, 240
# Room for the axes, their numbers of up to eight characters and their names: left, right, top, bottom.
MARGINS = (88, 14, 10, 46)
# What charts may be drawn over, and the name of that axis.
EPOCHS, SECONDS = "epochs", "seconds"
AXES = {EPOCHS: "epoch", SECONDS: "seconds of training"}
# And that of an index, which no training has.
SEARCH = "microseconds of a search"
RECALL = "recall@100 of the index"
TRAIN_LOSS = "train_loss"
# Names for people, where the words of the name itself are not.
WORDS = {TRAIN_LOSS: "training loss", SPEED: "speed", DATA_WAIT: "waiting for data"}
LOWER, HIGHER = "\N{DOWNWARDS ARROW}", "\N{UPWARDS ARROW}"
# A run's points of a chart: where and what.
Points = Sequence[tuple[float, float]]


def learning_charts(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """What validation says in the metric that runs are judged by: over the epochs, and over the time."""
    mains = dict.fromkeys(VALIDATION + run.main_metric for run in runs)
    return [chart for main in mains for over in AXES for chart in charts(runs, over, [main])]


def other_charts(runs: Sequence[RunReport], over: str) -> list[dict[str, Any]]:
    """A chart for every other number that epochs have. Speed is not drawn over the time that it makes."""
    left_out = {VALIDATION + run.main_metric for run in runs}
    if over == SECONDS:
        left_out |= {SPEED, DATA_WAIT}
    names = dict.fromkeys(name for run in runs for name in run.curves if name not in left_out)
    return charts(runs, over, list(names))


def index_charts(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """What indexes of items find over what a search takes, if any run has one."""
    lines = [(run, run.index_curve) for run in runs if run.index_curve]
    return [chart(RECALL, SEARCH, lines)] if lines else []


def charts(runs: Sequence[RunReport], over: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """A chart for each of these numbers that any run has, with a line for each run that has it."""
    found = []
    for name in names:
        drawn: dict[str, list[tuple[RunReport, Points]]] = {}
        for run in runs:
            if line := points(run, name, over):
                # Losses of different tasks have no unit in common, and so no axis.
                drawn.setdefault(run.main_metric if name == TRAIN_LOSS else "", []).append((run, line))
        found += [chart(name, over, lines) for lines in drawn.values()]
    return found


def points(run: RunReport, name: str, over: str) -> Points:
    """A run's values of a number, over epochs or seconds; empty if it has none, or did not time them."""
    curve = run.curves.get(name, [])
    if over == EPOCHS:
        return curve
    clock = run.clock
    return [(clock[epoch], value) for epoch, value in curve] if clock else []


def chart(name: str, over: str, lines: Sequence[tuple[RunReport, Points]]) -> dict[str, Any]:
    """Lines and ticks, in the coordinates of the picture."""
    found = [point for _, line in lines for point in line]
    times = [x for x, _ in found]
    # Time begins at 0, and the first epoch is late in it. There is no half of an epoch, so those are whole.
    columns = ticks(min(times), max(times), whole=True) if over == EPOCHS else ticks(0.0, max(times))
    rows = ticks(min(y for _, y in found), max(y for _, y in found))
    left, right, top, bottom = MARGINS

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - columns[0]) / (columns[-1] - columns[0]), (y - rows[0]) / (rows[-1] - rows[0])
        return (
            round(left + across * (CHART_WIDTH - left - right), 1),
            # From the bottom: in a picture y grows downwards.
            round(CHART_HEIGHT - bottom - up * (CHART_HEIGHT - top - bottom), 1),
        )

    marks = zip(columns, tick_texts(columns), strict=True)
    levels = zip(rows, percent_ticks(rows) if name == DATA_WAIT else tick_texts(rows), strict=True)
    return {
        "title": title_of(name, lines[0][0]),
        "over": AXES.get(over, over),
        "unit": unit_of(name, [run for run, _ in lines]),
        # Where time counts, runs that a profiler slowed are told from the others.
        "timed": over == SECONDS or name in (SPEED, DATA_WAIT),
        "columns": [(place(x, rows[0])[0], text) for x, text in marks],
        "rows": [(place(columns[0], y)[1], text) for y, text in levels],
        "lines": [
            (run, [(*place(x, y), say_x(x, over), show(y, name)) for x, y in line]) for run, line in lines
        ],
    }


def title_of(name: str, run: RunReport) -> str:
    """What a number of an epoch is called above its chart, with an arrow to where it is better."""
    place, _, metric = name.rpartition("/")
    words = f"{in_words(place)} {label_of(metric, run)}".strip()
    judged = name.startswith(VALIDATION) or lower_is_better(name)
    return f"{words} {arrow(metric)}" if judged else words


def heading_of(name: str, run: RunReport) -> str:
    """What a number of an epoch is called above its column, which has no axis to name a unit."""
    return unit_of(name, [run]) if name == SPEED else title_of(name, run)


def unit_of(name: str, runs: Sequence[RunReport]) -> str:
    """What stands at the axis of a number of some runs."""
    # Runs of other data may have other nouns.
    nouns = {run.events for run in runs}
    events = nouns.pop() if len(nouns) == 1 else "events"
    units = {SPEED: f"{events} per second", DATA_WAIT: "share of the epoch", TRAIN_LOSS: "loss"}
    return units.get(name, label_of(name.rpartition("/")[2], runs[0]))


def label_of(metric: str, run: RunReport) -> str:
    """What people call a metric, or another number of an epoch."""
    return run.labels.get(metric) or WORDS.get(metric) or in_words(metric)


def arrow(metric: str) -> str:
    """Where a metric is better: down or up."""
    return LOWER if lower_is_better(metric) else HIGHER


def say_x(x: float, over: str) -> str:
    """Where a point stands, in words."""
    return f"epoch {show(x)}" if over == EPOCHS else f"{x:.1f} s" if over == SECONDS else f"{x:,.0f} us"


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Three to seven round numbers, evenly spaced, from at most `low` to at least `high`."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 3))
    # A third of 0.3 is just below 0.1, and its logarithm is not.
    step *= max(factor for factor in (1, 2, 5) if step * factor <= span / 3 * (1 + 1e-9))
    if whole:
        step = max(1.0, round(step))
    # A quotient that should be a whole number may lie just below or above it.
    first = math.floor(low / step + 1e-9)
    # One value alone needs two ends as well.
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(place * step, 12) for place in range(first, last + 1)]


def in_words(name: str) -> str:
    """The name of a number as a reader would write it."""
    return name.replace("/", " ").replace("_", " ")


def tick_texts(places: Sequence[float]) -> list[str]:
    """Ticks as short texts with as many digits as tell them apart, the same for all."""
    unit, scale = next(
        (unit, scale)
        for unit, scale in (("M", 1e6), ("k", 1e3), ("", 1.0))
        if max(map(abs, places)) >= 10 * scale or not unit
    )
    step = (places[1] - places[0]) / scale
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{place / scale:.{digits}f}{unit}" if place or not unit else "0" for place in places]


def percent_ticks(places: Sequence[float]) -> list[str]:
    """Ticks of shares as percent."""
    return [f"{text} %" for text in tick_texts([100 * place for place in places])]


def percent(share: float) -> str:
    """A share of a whole as percent."""
    return f"{100 * share:.1f} %"


def show(value: Any, name: str = "") -> str:
    """A value as text: shares as percent, numbers with as many digits as are of use."""
    if name == DATA_WAIT:
        return percent(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
