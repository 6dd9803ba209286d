"""What benchmarks/feed.py found as bars, tables and a picture. Computes from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures import bar, origin, table

# MB, of a worker beyond what a process takes that imported torch, which is what a worker of DataLoader does.
MOST_OWN_MEMORY = 12.0
COLORS = {"0": "C0", "1": "C1", "2": "C2", "4": "C3"}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured; one that was not measured is left out."""
    heavy = {rates["batch size"]: rates for rates in result["heavy"]}
    start = {name: times["median"] for name, times in result["start"].items()}
    bars: list[dict[str, Any]] = []

    def add(name: str, measured: float, limit: float, unit: str = "", at_most: bool = False) -> None:
        bars.append(
            bar(name, measured, limit, f"{_short(measured)}{unit}", f"{_short(limit)}{unit}", at_most)
        )

    # Rows of one's own tables are held to what those of the ratings are held to.
    for kind, note in (("light", ""), ("own", ", own tables")):
        cheap = {rates["batch size"]: rates for rates in result.get(kind, [])}
        # Figures of before they were measured lack them.
        if not cheap:
            continue
        for size in (8192, 65_536):
            add(f"0 workers, batch {size:,}{note}, of the limit", cheap[size]["of the limit"], 0.6)
        alone, two = (cheap[8192]["rows/s"][name]["median"] / 1e6 for name in ("0", "spawn 2"))
        add(f"2 workers, batch 8,192{note}", two, min(12.0, alone / 2), " million rows/s")
        add(f"2 workers, batch 65,536{note}, of 0 workers", cheap[65_536]["of 0 workers"]["spawn 2"], 0.7)
    add("2 workers, batch 8,192, heavy row, of 0 workers", heavy[8192]["of 0 workers"]["spawn 2"], 1.6)
    started = start["spawn 1"] / start["import torch.utils.data"]
    add("first batch, spawn, 1 worker, of import torch.utils.data", started, 1.25, at_most=True)
    add("first batch, forkserver, second pool of 4", start["forkserver 4"], 0.2, " s", at_most=True)
    for number, waits in result["waits"].items():
        name = f"waiting for data in training, {number} workers, worst epoch"
        add(name, 100 * max(waits), 2.0, " %", at_most=True)
    for ratings, parts in result["memory"].items():
        more = parts["own"] - parts["only torch"]
        name = f"memory of a worker at {int(ratings):,} ratings beyond that of import torch"
        add(name, more, MOST_OWN_MEMORY, " MB", at_most=True)
    own = [parts["own"] for parts in result["memory"].values()]
    # Pages are shared with whoever else runs, so two measurements differ a little.
    add("difference of a worker's memory between these sizes", max(own) - min(own), 2.0, " MB", at_most=True)
    trained = result["small memory"]["trained"]
    if trained is not None:
        how = "it trains" if trained else "it does not train"
        name = f"{result['small memory']['ratings']:,} ratings in {_gib(result['small memory']['limit'])}"
        bars.append({"name": name, "bar": "it trains", "measured": how, "reached": trained})
    return bars


def render(result: dict[str, Any]) -> str:
    """All tables, and the line that says where they come from."""
    parts = [
        f"Million rows/s, {result['ratings']:,} ratings, all features; the main process only receives:",
        _rates_table(result["light"]),
        f"The same with --history {result['history']}:",
        _rates_table(result["heavy"]),
        *_own_table(result),
        "Seconds to the first batch, and of what they are compared with:",
        _start_table({"as it is": result["start"], "heavy": result.get("heavy start")}),
        "MB of memory (PSS) of one of 2 workers, batch 8,192:",
        _memory_table(result["memory"]),
        _sentences(result),
        f"{origin(result)}.",
    ]
    return "\n\n".join(parts)


def _own_table(result: dict[str, Any]) -> list[str]:
    # Figures of before it was measured have none.
    if "own" not in result:
        return []
    title = "As many events of tables of one's own, with numbers, features of the event and weights:"
    return [title, _rates_table(result["own"])]


def _rates_table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["rows/s"])
    shown_names = ["0 workers" if name == "0" else name for name in names]
    heads = ["batch", "bytes a row", *shown_names, "0 workers of the limit"]
    cells = []
    for row in rows:
        shown = [f"{row['rows/s'][name]['median'] / 1e6:.1f}" for name in names]
        cells.append(
            [f"{row['batch size']:,}", f"{row['bytes a row']:.0f}", *shown, f"{row['of the limit']:.2f}"]
        )
    return _table(heads, cells)


def _start_table(starts: dict[str, dict[str, dict[str, float]] | None]) -> str:
    heads = {
        "python": "python alone",
        "import torch.utils.data": "`import torch.utils.data`",
        "spawn 1": "spawn, 1 worker",
        "spawn 4": "spawn, 4 workers",
        "forkserver 4": "forkserver, a second pool of 4",
    }
    measured = {row: start for row, start in starts.items() if start}
    rows = [[row, *(f"{start[name]['median']:.2f}" for name in heads)] for row, start in measured.items()]
    return _table(["row", *heads.values()], rows)


def _memory_table(memory: dict[str, dict[str, float]]) -> str:
    names = ["own", "ring", "columns", "total", "only numpy", "only torch"]
    heads = ["ratings", "its own", "ring", "columns, page cache", "all", "a process with numpy", "with torch"]
    return _table(
        heads,
        [
            [f"{int(ratings):,}", *(f"{parts[name]:.0f}" for name in names)]
            for ratings, parts in memory.items()
        ],
    )


def _sentences(result: dict[str, Any]) -> str:
    waits = " and ".join(
        f"{100 * max(waits):.1f} % with {number} workers" for number, waits in result["waits"].items()
    )
    lines = [f"Training on {result['trained']:,} ratings in 2 processes waits for data at most {waits}."]
    small = result["small memory"]
    ratings = f"{small['ratings']:,} ratings"
    if small["trained"] is None:
        lines.append(f"{ratings} in little memory: not measured, as {small['why']}.")
    elif small["trained"]:
        lines.append(
            f"{ratings} ({small['columns'] / 1e9:.1f} GB of columns) train under a limit of "
            f"{_gib(small['limit'])}, page cache included, at {small['ratings_per_second']:,.0f} ratings/s "
            f"(batch {small['batch size']:,}, one process and one worker)."
        )
    else:
        lines.append(f"{ratings} do not train under a limit of {_gib(small['limit'])}.")
    for row in (*result["light"], *result.get("own", []), *result["heavy"]):
        if row["rows of the limit"] < row["rows of the data"]:
            lines.append(
                f"The limit of batch {row['batch size']:,} with {row['bytes a row']:.0f} bytes a row was "
                f"measured on {row['rows of the limit']:,} rows, for want of memory."
            )
    return " ".join(lines)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return table([heads, ["---:"] * len(heads), *rows])


def _gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB"


def _short(number: float) -> str:
    return f"{number:,.1f}" if abs(number) >= 10 else f"{number:.2f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Rows/s by batch size: light rows, those of one's own tables, and heavy ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = {
        "light": "all features",
        "own": "one's own tables",
        "heavy": f"all features and --history {result['history']}",
    }
    kinds = [kind for kind in titles if kind in result]
    figure = Figure(figsize=(4.5 * len(kinds), 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(1, len(kinds)), kinds, strict=True):
        rows = result[kind]
        sizes = [row["batch size"] for row in rows]
        for name in rows[0]["rows/s"]:
            rates = [row["rows/s"][name]["median"] / 1e6 for row in rows]
            method, _, number = name.rpartition(" ")
            if name == "limit":
                axes.plot(sizes, rates, "--", color="0.4", label="limit: one index_select")
            elif not method:
                axes.plot(sizes, rates, "o-", color=COLORS["0"], label="0 workers")
            else:
                style = "s-" if method == "spawn" else "^:"
                label = f"{number} worker{'s' if number != '1' else ''}, {method}"
                axes.plot(sizes, rates, style, color=COLORS[number], label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(
            xlabel="batch size",
            ylabel="million rows/s",
            title=f"{titles[kind]}: {rows[0]['bytes a row']:.0f} B a row",
        )
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(f"{result['ratings']:,} ratings; {origin(result)}", fontsize="x-small")
    figure.savefig(path)
