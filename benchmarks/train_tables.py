"""What benchmarks/train.py found as bars, a table and a picture. Computes from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from figures import bar, ratio, shown_ratio, table

HERE_2, HERE_1 = "here, 2 processes", "here, 1 process"
DDP = "plain, DDP, 2 processes"


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
    bars = []
    for size in result["sizes"]:
        best = best_plain(size)
        found = ratio(size["rates"][HERE_2], size["rates"][best])
        bars.append(bar(f"{_rows(size)}, {HERE_2} / {best}", found, 1, f"{found:.2f}", "1"))
    for size in result["sizes"]:
        for batch, kind in ((result["batch"], ""), (result["large batch"], ", large")):
            found = ratio(size["rates"][HERE_2 + kind], size["rates"][HERE_1 + kind])
            name = f"{_rows(size)}, 2 processes / 1 process, {batch:,} ratings a rank"
            bars.append(bar(name, found, 1.5, f"{found:.2f}", "1.5"))
    largest = result["sizes"][-1]
    found = largest["peak bytes"] / largest["table bytes"]
    name = f"{_rows(largest)}, peak memory over all ranks / tables and row optimizer state"
    bars.append(bar(name, found, 1.3, f"{found:.2f}", "1.3", at_most=True))
    return bars


def best_plain(size: dict[str, Any]) -> str:
    """The fastest of the plain variants."""
    plain = {name: median(rates) for name, rates in size["rates"].items() if name.startswith("plain")}
    return max(plain, key=lambda name: plain[name])


def _rows(size: dict[str, Any]) -> str:
    return f"{size['users']:,} + {size['movies']:,} rows"


def render(result: dict[str, Any]) -> str:
    """The tables, and the lines that say what was measured and where."""
    sizes = result["sizes"]
    names = _names(sizes)
    lines = [["ratings a second", *map(_rows, sizes)], ["---", *("---:" for _ in sizes)]]
    lines += [[name, *(_rate_cell(size, name) for size in sizes)] for name in names]
    # Each size against the plain variant that is fastest there: none of them is for all sizes.
    best = [shown_ratio(size["rates"][HERE_2], size["rates"][best_plain(size)]) for size in sizes]
    lines.append([f"{HERE_2}, of the best plain one", *best])
    for batch, kind in ((result["batch"], ""), (result["large batch"], ", large")):
        cells = [shown_ratio(size["rates"][HERE_2 + kind], size["rates"][HERE_1 + kind]) for size in sizes]
        lines.append([f"2 processes, of 1 process, {batch:,} ratings a rank", *cells])
    memory = [f"{size['peak bytes'] / 1e6:,.0f} MB for {size['table bytes'] / 1e6:,.0f} MB" for size in sizes]
    lines.append(["peak memory of 2 processes, for tables and row optimizer state", *memory])
    blocks = [table(lines)]
    if sizes[0]["parts"][HERE_2]:
        blocks.append(table(_part_lines(sizes)))
    return "\n\n".join([*blocks, _explanation(result), f"{_origin(result)}."])


def _names(sizes: list[dict[str, Any]]) -> list[str]:
    """Of all variants at the smaller batch, in their order."""
    names = (name for size in sizes for name in size["rates"] if not name.endswith("large"))
    return list(dict.fromkeys(names))


def _rate_cell(size: dict[str, Any], name: str) -> str:
    if name not in size["rates"]:
        return "-"
    rate = median(size["rates"][name])
    shown = f"{round(rate, -3):,.0f}"
    return f"**{shown}**" if name == HERE_2 else shown


def _part_lines(sizes: list[dict[str, Any]]) -> list[list[str]]:
    columns = [(size, name) for size in sizes for name in (HERE_1, HERE_2)]
    titles = [f"{_rows(size)}, {name.removeprefix('here, ')}" for size, name in columns]
    lines = [["milliseconds of a step", *titles], ["---", *("---:" for _ in titles)]]
    for part in sizes[0]["parts"][HERE_1]:
        lines.append([part, *(f"{1e3 * size['parts'][name][part]:.2f}" for size, name in columns)])
    return lines


def _explanation(result: dict[str, Any]) -> str:
    sentence = (
        f"The model of the example at --embedding_dim {result['dim']} with the features user and movie; "
        f"{result['batch']:,} ratings a rank, {2 * result['batch']:,} for plain PyTorch in one process; "
        "ids that are all as likely, so that few are asked for twice. A process here has one thread. "
        "Plain PyTorch is the same `Interaction` on two `nn.Embedding`s, with its ratings in memory. "
        "Medians over rounds, of ratios within a round, and [least, most] of them."
    )
    if result["device"]["kind"] == "cuda":
        shares = [_bandwidth_share(result, size) for size in result["sizes"]]
        shown = ", ".join(f"{100 * share:.1f} %" for share in shares)
        sentence += f" Rows that a step reads and writes take {shown} of the memory bandwidth of the devices."
    return sentence


def _bandwidth_share(result: dict[str, Any], size: dict[str, Any]) -> float:
    """Bytes of rows that two ranks move in a second, of what the memory of their devices could."""
    # A rating's two rows are read in the forward, come back as gradients, and are read and written in the
    # update, with their optimizer state.
    bytes_a_rating = 2 * (4 * result["dim"] * 5 + 8)
    moved = median(size["rates"][HERE_2]) * bytes_a_rating
    return float(moved / (2 * result["device"]["bytes a second"]))


def _origin(result: dict[str, Any]) -> str:
    # "fbgemm" names itself, and pandas reads no rating here.
    named = {
        name: version for name, version in result["versions"].items() if name not in ("pandas", "fbgemm")
    }
    versions = [*(f"{name} {version}" for name, version in named.items()), result["versions"]["fbgemm"]]
    device = result["device"].get("name")
    machine = f"{result['machine']}, {device}" if device else result["machine"]
    return f"{machine}; {', '.join(versions)}; {result['date'][:10]}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Rates by size on the left, the parts of a step on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rates, parts = figure.subplots(1, 2)
    _draw_rates(rates, result["sizes"])
    if result["sizes"][0]["parts"][HERE_2]:
        _draw_parts(parts, result["sizes"])
    else:
        parts.set_visible(False)
    figure.suptitle(_origin(result), fontsize="x-small")
    figure.savefig(path)


def _draw_rates(axes: Any, sizes: list[dict[str, Any]]) -> None:
    names = _names(sizes)
    height = 0.8 / len(names)
    for place, name in enumerate(names):
        shown = [
            (row, median(size["rates"][name])) for row, size in enumerate(sizes) if name in size["rates"]
        ]
        ours = name.startswith("here")
        color = {HERE_2: "C0", HERE_1: "C9"}[name] if ours else f"{0.35 + 0.06 * place:.2f}"
        places = [row + (place - len(names) / 2) * height for row, _ in shown]
        axes.barh(places, [rate / 1000 for _, rate in shown], height, color=color, label=name)
    axes.set_yticks(
        range(len(sizes)), [_rows(size).replace(" + ", "\n+ ") for size in sizes], fontsize="small"
    )
    axes.invert_yaxis()
    axes.set(xlabel="thousand ratings a second", title="training")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def _draw_parts(axes: Any, sizes: list[dict[str, Any]]) -> None:
    columns = [(size, name) for size in sizes for name in (HERE_1, HERE_2)]
    left = [0.0] * len(columns)
    for place, part in enumerate(sizes[0]["parts"][HERE_1]):
        times = [1e3 * size["parts"][name][part] for size, name in columns]
        axes.barh(range(len(columns)), times, left=left, color=f"C{place}", label=part)
        left = [begin + time for begin, time in zip(left, times, strict=True)]
    labels = [f"{_rows(size).replace(' + ', chr(10) + '+ ')}\n{name}" for size, name in columns]
    axes.set_yticks(range(len(columns)), labels, fontsize="xx-small")
    axes.invert_yaxis()
    axes.set(xlabel="ms", title="where a step here spends its time")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
