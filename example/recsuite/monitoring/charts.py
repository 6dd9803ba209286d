"""The line charts of the page, in the coordinates of a picture, and numbers as texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from recsuite.monitoring.runs import RunReport

CHART_WIDTH, CHART_HEIGHT = 440, 250
# Room for the numbers at the axes: left, right, top, bottom.
MARGINS = (52, 12, 10, 34)


def charts(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """A chart for every number that epochs have, with a line for each run that has it."""
    curves = [run.curves for run in runs]
    names = dict.fromkeys(name for mine in curves for name in mine)
    return [
        chart(name, [(run, mine[name]) for run, mine in zip(runs, curves, strict=True) if name in mine])
        for name in names
    ]


def chart(name: str, lines: Sequence[tuple[RunReport, Sequence[tuple[float, float]]]]) -> dict[str, Any]:
    """Lines and ticks, in the coordinates of the picture."""
    points = [point for _, line in lines for point in line]
    # Whole, because there is no half of an epoch.
    columns = ticks(min(x for x, _ in points), max(x for x, _ in points), whole=True)
    rows = ticks(min(y for _, y in points), max(y for _, y in points))
    left, right, top, bottom = MARGINS

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - columns[0]) / (columns[-1] - columns[0]), (y - rows[0]) / (rows[-1] - rows[0])
        return (
            round(left + across * (CHART_WIDTH - left - right), 1),
            # From the bottom: in a picture y grows downwards.
            round(CHART_HEIGHT - bottom - up * (CHART_HEIGHT - top - bottom), 1),
        )

    return {
        "name": in_words(name),
        "columns": [
            (place(x, rows[0])[0], label) for x, label in zip(columns, tick_texts(columns), strict=True)
        ],
        "rows": [(place(columns[0], y)[1], label) for y, label in zip(rows, tick_texts(rows), strict=True)],
        "lines": [(run, [(*place(x, y), show(x), show(y)) for x, y in line]) for run, line in lines],
    }


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
    return [f"{place / scale:.{digits}f}{unit}" for place in places]


def show(value: Any) -> str:
    """A value as text: numbers with as many digits as are of use."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
