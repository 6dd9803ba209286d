"""What benchmarks/train.py found as bars, a table and a picture. Computes from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from figures import bar, ratio, shown_ratio, table
from train_bounds import MEMORY, PRODUCTS, bound_lines

HERE_2, HERE_1 = "here, 2 processes", "here, 1 process"
DDP = "plain, DDP, 2 processes"


# Two processes, of one.
SCALING = 1.6
# Tables up to so many rows are small, and up to so many large; others are the largest.
SMALL, LARGE = 100_000, 5_000_000


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
    return [each for model in result["models"].values() for each in _bars_of(model)]


def _bars_of(model: dict[str, Any]) -> list[dict[str, Any]]:
    bars, title = [], model["title"]
    for size in model["sizes"]:
        best, ours = best_plain(size), most_processes(size["rates"])
        found = ratio(size["rates"][ours], size["rates"][best])
        num_rows = size["users"] + size["movies"]
        limit = model["bars"][(num_rows > SMALL) + (num_rows > LARGE)]
        bars.append(bar(f"{title}, {_rows(size)}, {ours} / {best}", found, limit, f"{found:.2f}", f"{limit}"))
    for size in model["sizes"]:
        if most_processes(size["rates"]) == HERE_1:
            continue
        for batch, kind in ((model["batch"], ""), (model["large batch"], ", large")):
            found = ratio(size["rates"][HERE_2 + kind], size["rates"][HERE_1 + kind])
            name = f"{title}, {_rows(size)}, 2 processes / 1 process, {batch:,} ratings a rank"
            bars.append(bar(name, found, SCALING, f"{found:.2f}", f"{SCALING}"))
    largest = model["sizes"][-1]
    found = largest["peak bytes"] / largest["table bytes"]
    name = f"{title}, {_rows(largest)}, peak memory over all ranks / tables and row optimizer state"
    bars.append(bar(name, found, 1.3, f"{found:.2f}", "1.3", at_most=True))
    return bars


def most_processes(names: Iterable[str]) -> str:
    """Of the variants of this project the one with the most processes: one where there is a single GPU."""
    return HERE_2 if HERE_2 in names else HERE_1


def best_plain(size: dict[str, Any]) -> str:
    """The fastest of the plain variants."""
    plain = {name: median(rates) for name, rates in size["rates"].items() if name.startswith("plain")}
    return max(plain, key=lambda name: plain[name])


def _rows(size: dict[str, Any]) -> str:
    return f"{size['users']:,} + {size['movies']:,} rows"


def render(result: dict[str, Any]) -> str:
    """The tables of each model, and the lines that say what was measured and where."""
    blocks = []
    for model in result["models"].values():
        sizes = model["sizes"]
        titles = [*map(_rows, sizes)]
        ours = most_processes(sizes[0]["rates"])
        blocks += [f"### {model['title']}", _table("ratings a second", titles, _rate_lines(model))]
        if sizes[0]["parts"][ours]:
            columns = [(size, name) for size in sizes for name in (HERE_1, HERE_2)]
            of_parts = [f"{_rows(size)}, {name.removeprefix('here, ')}" for size, name in columns]
            blocks.append(_table("milliseconds of a step", of_parts, _part_lines(sizes)))
        if {MEMORY, PRODUCTS} <= sizes[0]["machine"].keys():
            bounds = bound_lines(sizes, model["batch"], HERE_2)
            blocks.append(_table("what a step of two processes has to do", titles, bounds))
        blocks.append(_explanation(result, model))
    return "\n\n".join([*blocks, f"{_origin(result)}."])


def _table(title: str, columns: list[str], lines: list[list[str]]) -> str:
    return table([[title, *columns], ["---", *("---:" for _ in columns)], *lines])


def _rate_lines(model: dict[str, Any]) -> list[list[str]]:
    sizes = model["sizes"]
    lines = [[name, *(_rate_cell(size, name) for size in sizes)] for name in _names(sizes)]
    # Each size against the plain variant that is fastest there: none of them is for all sizes.
    ours = most_processes(sizes[0]["rates"])
    best = [shown_ratio(size["rates"][ours], size["rates"][best_plain(size)]) for size in sizes]
    lines.append([f"{ours}, of the best plain one", *best])
    both = ((model["batch"], ""), (model["large batch"], ", large"))
    for batch, kind in both if ours == HERE_2 else ():
        cells = [shown_ratio(size["rates"][HERE_2 + kind], size["rates"][HERE_1 + kind]) for size in sizes]
        lines.append([f"2 processes, of 1 process, {batch:,} ratings a rank", *cells])
    memory = [f"{size['peak bytes'] / 1e6:,.0f} MB for {size['table bytes'] / 1e6:,.0f} MB" for size in sizes]
    number = ours.removeprefix("here, ")
    return [*lines, [f"peak memory of {number}, for tables and row optimizer state", *memory]]


def _names(sizes: list[dict[str, Any]]) -> list[str]:
    """Of all variants at the smaller batch, in their order."""
    names = (name for size in sizes for name in size["rates"] if not name.endswith("large"))
    return list(dict.fromkeys(names))


def _rate_cell(size: dict[str, Any], name: str) -> str:
    if name not in size["rates"]:
        return "-"
    rate = median(size["rates"][name])
    shown = f"{round(rate, -3):,.0f}"
    return f"**{shown}**" if name == most_processes(size["rates"]) else shown


def _part_lines(sizes: list[dict[str, Any]]) -> list[list[str]]:
    columns = [(size, name) for size in sizes for name in (HERE_1, HERE_2)]
    return [
        [part, *(f"{1e3 * size['parts'][name][part]:.2f}" for size, name in columns)]
        for part in sizes[0]["parts"][HERE_1]
    ]


def _explanation(result: dict[str, Any], model: dict[str, Any]) -> str:
    if model["history"]:
        what = f"with all features and a history of {model['history']}, which is full"
        ids = "movies as popular as in the synthetic ratings, and users that are all as likely"
        plain = "an `nn.Embedding` or `nn.EmbeddingBag` for each feature"
    else:
        what = "with the features user and movie"
        ids = "ids that are all as likely, so that few are asked for twice"
        plain = "two `nn.Embedding`s"
    number = 2 if most_processes(model["sizes"][0]["rates"]) == HERE_2 else 1
    sentence = (
        f"The model of the example at --embedding_dim {model['dim']} {what}; "
        f"{model['batch']:,} ratings a rank, {number * model['batch']:,} for plain PyTorch in one process; "
        f"{ids}. A process here has one thread. "
        f"Plain PyTorch is the same `Interaction` on {plain}, with its ratings in memory; compiled is what "
        "lies beside the tables, whose sparse gradients torch.compile refuses. "
        "Medians over rounds, of ratios within a round, and [least, most] of them."
    )
    if number == 1:
        sentence += " With one GPU there is one process: a second one would have none."
    if result["device"]["kind"] == "cuda":
        shares = [_bandwidth_share(result, model, size) for size in model["sizes"]]
        shown = ", ".join(f"{100 * share:.1f} %" for share in shares)
        sentence += f" What a step has to move takes {shown} of the memory bandwidth of the devices."
    return sentence


def _bandwidth_share(result: dict[str, Any], model: dict[str, Any], size: dict[str, Any]) -> float:
    """Bytes that all ranks have to move in a second, of what the memory of their devices could."""
    ours = most_processes(size["rates"])
    a_rank = size["work"]["bytes"] / model["batch"]
    moved = median(size["rates"][ours]) * a_rank
    return float(moved / ((2 if ours == HERE_2 else 1) * result["device"]["bytes a second"]))


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

    models = list(result["models"].values())
    figure = Figure(figsize=(11, 5 * len(models)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for model, (rates, parts) in zip(models, figure.subplots(len(models), 2, squeeze=False), strict=True):
        _draw_rates(rates, model)
        if model["sizes"][0]["parts"][most_processes(model["sizes"][0]["rates"])]:
            _draw_parts(parts, model["sizes"])
        else:
            parts.set_visible(False)
    figure.suptitle(_origin(result), fontsize="x-small")
    figure.savefig(path)


def _draw_rates(axes: Any, model: dict[str, Any]) -> None:
    sizes = model["sizes"]
    names = _names(sizes)
    height = 0.8 / len(names)
    for place, name in enumerate(names):
        shown = [
            (row, median(size["rates"][name])) for row, size in enumerate(sizes) if name in size["rates"]
        ]
        ours = name.startswith("here")
        color = {HERE_2: "C0", HERE_1: "C9"}[name] if ours else f"{0.3 + 0.05 * place:.2f}"
        places = [row + (place - len(names) / 2) * height for row, _ in shown]
        axes.barh(places, [rate / 1000 for _, rate in shown], height, color=color, label=name)
    axes.set_yticks(
        range(len(sizes)), [_rows(size).replace(" + ", "\n+ ") for size in sizes], fontsize="small"
    )
    axes.invert_yaxis()
    axes.set(xlabel="thousand ratings a second", title=model["title"])
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
