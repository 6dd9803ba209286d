"""What benchmarks/checkpoint.py found as bars, a table and a picture. Computes from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from figures import bar, origin, ratio, ratios, shown_ratio, table

# The share of the rows that a delta of the bars touches.
SHARE = "0.01"
CACHES = ("cached", "from disk")


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
    bars: list[dict[str, Any]] = []

    def add(name: str, measured: float, limit: float, unit: str = "", at_most: bool = False) -> None:
        bars.append(bar(name, measured, limit, f"{measured:.2f}{unit}", f"{limit:g}{unit}", at_most))

    for size in result["sizes"]:
        rows = f"{size['rows']:,} rows"
        add(
            f"full checkpoint, {result['ranks']} ranks, {rows}, of the plain write",
            ratio(size["plain"], size["dump"]),
            0.7,
        )
        for load in size["loads"]:
            for cache in CACHES:
                name = f"load, {load['ranks']} rank{'s' if load['ranks'] > 1 else ''}, {cache}, {rows}"
                add(f"{name}, of the plain read", ratio(load[cache]["plain"], load[cache]["load"]), 0.5)
        delta = summary(size["deltas"][SHARE])
        name = f"delta of 1 % of {rows}"
        share = 100 * delta["bytes"] / size["dump bytes"]
        add(f"{name}, bytes of a full checkpoint", share, 2, " %", at_most=True)
        share = 100 * delta["seconds"] / median(size["dump"])
        add(f"{name}, time of a full checkpoint", share, 5, " %", at_most=True)
        for how, peak in size["memory"].items():
            name = f"peak extra memory of a full checkpoint {how}, {rows}, of the rank's shard"
            add(name, peak["of the shard"], 1.1, at_most=True)
    tracking = result["tracking"]
    cost = 100 * (ratio(tracking["with"], tracking["without"]) - 1)
    add("tracking, of the step without", cost, 3, " %", at_most=True)
    return bars


def summary(deltas: list[dict[str, float]]) -> dict[str, float]:
    """The medians over rounds."""
    return {name: median(delta[name] for delta in deltas) for name in deltas[0]}


def render(result: dict[str, Any]) -> str:
    """The table, and the lines that say what was measured and where."""
    sizes = result["sizes"]
    lines = [
        ["what", "bar", *(f"{size['rows']:,} rows" for size in sizes)],
        ["---", "---", *("---:" for _ in sizes)],
        [f"full checkpoint, {result['ranks']} ranks, of a plain write", ">= 0.7", *map(_full_cell, sizes)],
    ]
    for place, load in enumerate(sizes[0]["loads"]):
        for cache in CACHES:
            cells = [_load_cell(size["loads"][place], cache) for size in sizes]
            name = f"load, {load['ranks']} rank{'s' if load['ranks'] > 1 else ''}, {cache}, of a plain read"
            lines.append([name, ">= 0.5", *cells])
    lines += [
        ["delta of 1 % of the rows, bytes of a full checkpoint", "<= 2 %", *map(_delta_bytes_cell, sizes)],
        ["delta of 1 % of the rows, time of a full checkpoint", "<= 5 %", *map(_delta_time_cell, sizes)],
        *(
            [
                f"peak extra memory of a full checkpoint {how}, of the shard",
                "<= 1.1",
                *(_peak_cell(size, how) for size in sizes),
            ]
            for how in sizes[0]["memory"]
        ),
        ["step during an --async_dump, of before", "", *map(_beside_cell, sizes)],
        ["tracking, of a step", "<= 3 %", *[_tracking_cell(result["tracking"])] * len(sizes)],
    ]
    return f"{table(lines)}\n\n{_explanation(result)}\n\n{origin(result)}."


def _full_cell(size: dict[str, Any]) -> str:
    bytes_written = sum(size["shard bytes"])
    rates = [f"{_rate(bytes_written, size[name]):.2f}" for name in ("dump", "plain")]
    return f"{shown_ratio(size['plain'], size['dump'])} ({rates[0]} of {rates[1]} GB/s)"


def _load_cell(load: dict[str, Any], cache: str) -> str:
    seconds = load[cache]
    rates = [f"{_rate(load['bytes'], seconds[name]):.2f}" for name in ("load", "plain")]
    return f"{shown_ratio(seconds['plain'], seconds['load'])} ({rates[0]} of {rates[1]} GB/s)"


def _rate(num_bytes: float, seconds: list[float]) -> float:
    return num_bytes / median(seconds) / 1e9


def _delta_bytes_cell(size: dict[str, Any]) -> str:
    delta = summary(size["deltas"][SHARE])
    return f"{100 * delta['bytes'] / size['dump bytes']:.2f} % ({delta['bytes'] / 1e6:.1f} MB)"


def _delta_time_cell(size: dict[str, Any]) -> str:
    seconds = summary(size["deltas"][SHARE])["seconds"]
    return f"{100 * seconds / median(size['dump']):.1f} % ({1e3 * seconds:.0f} ms)"


def _peak_cell(size: dict[str, Any], how: str) -> str:
    peak = size["memory"][how]
    return f"{peak['of the shard']:.2f} ({peak['bytes'] / 1e6:.0f} MB)"


def _beside_cell(size: dict[str, Any]) -> str:
    beside = size["beside"]
    before, during = beside["step before"], beside["step during"]
    return f"{during / before:.2f} ({1e3 * during:.0f} of {1e3 * before:.0f} ms)"


def _tracking_cell(tracking: dict[str, Any]) -> str:
    shares = [100 * (part - 1) for part in ratios(tracking["with"], tracking["without"])]
    without = 1e3 * median(tracking["without"])
    return f"{median(shares):.1f} [{min(shares):.1f}, {max(shares):.1f}] % of {without:.1f} ms"


def _explanation(result: dict[str, Any]) -> str:
    """What the figures are of, as sentences."""
    sentences = [
        f"One table of so many rows x {result['dim']} beside the small ones of {result['ratings']:,} "
        "ratings. Medians over rounds, of ratios within a round, and [least, most] of them. A plain write or "
        "read is that of as many bytes by as many processes, each in one thread (a single rank loads with as "
        "many as there are cores); a write ends when the disk has them. Cached: from the page cache; from "
        "disk: after the files were dropped from it."
    ]
    for size in result["sizes"]:
        few, many = (summary(size["deltas"][share]) for share in ("0.001", "0.1"))
        # From a difference: what a delta holds beside its rows is in both.
        a_row = (many["bytes"] - few["bytes"]) / (many["rows"] - few["rows"])
        sentences.append(
            f"At {size['rows']:,} rows a delta takes {a_row:.0f} bytes a touched row, and "
            f"{1e3 * few['seconds']:.0f} ms for {few['rows']:,.0f} rows, {1e3 * many['seconds']:.0f} ms for "
            f"{many['rows']:,.0f}; "
            f"removing an old checkpoint takes {1e3 * median(size['removing']):.0f} ms, and the copy of an "
            f"--async_dump, for which the steps wait, {1e3 * size['beside']['copying']:.0f} ms; the "
            f"longest of the {size['beside']['steps during']} steps after it took "
            f"{1e3 * size['beside']['longest during']:.0f} ms."
        )
    return " ".join(sentences)


def draw(result: dict[str, Any], path: Path) -> None:
    """Rates beside the plain ones on the left; bytes and seconds of deltas by rows touched on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rates, sizes, times = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    _draw_rates(rates, result)
    for size in result["sizes"]:
        found = [summary(deltas) for deltas in size["deltas"].values()]
        touched = [delta["rows"] for delta in found]
        label = f"table of {size['rows']:,} rows"
        sizes.plot(touched, [delta["bytes"] / 1e6 for delta in found], "o-", label=label)
        times.plot(touched, [delta["seconds"] for delta in found], "o-", label=label)
    for axes, unit in ((sizes, "MB"), (times, "s")):
        axes.set(xscale="log", yscale="log", xlabel="rows touched", ylabel=unit, title=f"delta, {unit}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(origin(result), fontsize="x-small")
    figure.savefig(path)


def _draw_rates(axes: Any, result: dict[str, Any]) -> None:
    labels: list[str] = []
    plain: list[float] = []
    ours: list[float] = []
    for size in result["sizes"]:
        rows = f"{size['rows']:,} rows"
        labels.append(f"full checkpoint\n{rows}")
        plain.append(_rate(sum(size["shard bytes"]), size["plain"]))
        ours.append(_rate(sum(size["shard bytes"]), size["dump"]))
        for cache in CACHES:
            load = size["loads"][0]
            labels.append(f"load, {cache}\n{rows}")
            plain.append(_rate(load["bytes"], load[cache]["plain"]))
            ours.append(_rate(load["bytes"], load[cache]["load"]))
    places = range(len(labels))
    axes.barh([place - 0.2 for place in places], plain, 0.4, color="0.7", label="plain write or read")
    axes.barh([place + 0.2 for place in places], ours, 0.4, color="C0", label="checkpoint or load")
    axes.set_yticks(list(places), labels, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="GB/s", title=f"{result['ranks']} ranks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
