"""Measure how fast this project trains, beside plain PyTorch with the same model, batch and machine.

    python benchmarks/train.py --write          everything: twenty minutes on two cores, 20 GB of memory
    python benchmarks/train.py --sizes 2000+1000 --batch 256 --large_batch 512 --without DDP,compiled \
        --rounds 1 --seconds 0.02

Prints each figure beside its bar; with --write it also writes docs/train.json, docs/train.png and the part of
docs/log/benchmarks.md between the train marks. With several GPUs both sides train on them; with one GPU
there is one process, and no comparison of two with one. All variants of a size are measured in turns, in
short blocks, with the limits of memory and cores of the machine between them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    DOCS,
    bar,
    comma_separated,
    describe,
    finish,
    in_turns,
    make_parser,
    new_figure,
    origin,
    ratio,
    shown_ratio,
    table,
)
from gpu_sections import BYTES_COPIED, copy_rate
from teams import Job, Team, teams
from train_here import COMPILED, MODELS, Model, columns_of, make_columns, rows_of
from train_plain import BYTES, MEMORY, OPERATIONS, PRODUCTS

from recsuite.datasets.batches import Batch, EventBatches, Request
from recsuite.runtime.host import allowed_cores

PAGE = DOCS / "log" / "benchmarks.md"
HERE_2, HERE_1 = "here, 2 processes", "here, 1 process"
DDP = "plain, DDP, 2 processes"
# Of each kind of plain PyTorch the picture has the fastest variant.
PLAIN = ("plain, dense Adam", "plain, sparse Adagrad", "plain, SparseAdam", "plain, DDP")
# Least ratio of two processes to one.
SCALING = 1.5
# Tables of up to SMALL rows are small, of up to LARGE rows large; others are the largest.
SMALL, LARGE = 100_000, 5_000_000
# Reads and writes of a row, or of as many bytes, in a step: the lookup reads it and writes it for the rank
# that asked, which reads it; that rank writes its gradient, which the owner reads; the update reads and
# writes it.
TIMES_A_ROW = 7
# Dense Adam reads and writes all rows four times a step: with more rows it takes seconds.
MOST_ROWS_DENSE = 2_000_000
# DDP keeps all tables and optimizer states on each rank.
MOST_ROWS_DDP = 2_000_000
STEPS_OF_PARTS = 15


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    add_sizes(parser, "6040+3952,1000000+100000,10000000+1000000")
    parser.add_argument(
        "--models", type=comma_separated(str), default=list(MODELS), help=f"of {','.join(MODELS)}"
    )
    parser.add_argument("--batch", type=int, help="of each of two ranks (default: that of the model)")
    parser.add_argument("--large_batch", type=int, help="the other batch of the scaling")
    parser.add_argument(
        "--without", type=comma_separated(str), default=[], help="skip variants with one of these words"
    )
    finish("train", parser.parse_args(), measure, judge, render, PAGE, draw)


def add_sizes(parser: argparse.ArgumentParser, sizes: str) -> None:
    """Add the flags of `measure_rates`, and --sizes with a default."""
    parser.add_argument(
        "--sizes", type=sizes_of, default=sizes_of(sizes), help=f"users+movies (default: {sizes})"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each figure, in turns")
    parser.add_argument("--seconds", type=float, default=0.4, help="approximate length of a measurement")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    device = _device()
    models = {}
    for name in flags.models:
        model = MODELS[name]
        batch, large = flags.batch or model.batch, flags.large_batch or model.large_batch
        model = dataclasses.replace(model, batch=batch, large_batch=large)
        models[name] = {
            **{"title": model.title, "dim": model.dim, "history": model.history, "bars": model.bars},
            **{"batch": batch, "large batch": large},
            "sizes": [measure_size(model, users, movies, device, flags) for users, movies in flags.sizes],
        }
    return {**describe(), "device": device, "models": models}


def sizes_of(text: str) -> list[tuple[int, int]]:
    """Users and movies of each size."""
    return [(int(users), int(movies)) for users, movies in (size.split("+") for size in text.split(","))]


def _device() -> dict[str, Any]:
    """Device that trains, and the memory bandwidth of a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {"kind": "cpu"}
    device = torch.device("cuda", 0)
    # Measured: no program reaches the bandwidth of the data sheet.
    found = {"kind": "cuda", "name": torch.cuda.get_device_name(device), "number": torch.cuda.device_count()}
    found["bytes a second"] = copy_rate(device, BYTES_COPIED)
    torch.cuda.empty_cache()
    return found


def num_processes(device: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of processes with which this project trains, the largest first: one on a single GPU.

    device: its "kind", and the "number" of GPUs.
    """
    return (1,) if device["kind"] == "cuda" and device["number"] < 2 else (2, 1)


def variants_of(
    model: Model, num_rows: int, without: list[str], device: dict[str, Any]
) -> dict[str, tuple[str, Job]]:
    """Name of each variant to its team, and to its job without steps."""
    is_cpu, numbers = device["kind"] == "cpu", num_processes(device)
    # As many ratings in a step of all ranks, on both sides.
    together, large = max(numbers) * model.batch, model.large_batch
    names = {2: HERE_2, 1: HERE_1}
    found = {names[number]: (f"here {number}", Job("here", model.batch)) for number in numbers}
    found |= {f"{names[number]}, large": (f"here {number}", Job("here", large)) for number in numbers}
    # Compiled code is made for one number of threads; on a GPU they change nothing.
    most = min(2, allowed_cores()) if is_cpu else 1
    for optimizer in ("dense Adam", "sparse Adagrad", "SparseAdam"):
        if optimizer == "dense Adam" and num_rows > MOST_ROWS_DENSE:
            continue
        for threads in range(1, most + 1):
            found[f"plain, {optimizer}, {_threads(threads)}"] = (
                "plain 1",
                Job(optimizer, together, threads),
            )
        if optimizer != "SparseAdam":
            order = Job(optimizer + COMPILED, together, most)
            found[f"plain, {optimizer}{COMPILED}, {_threads(most)}"] = ("plain 1", order)
    if num_rows <= MOST_ROWS_DDP and max(numbers) > 1:
        # With dense gradients DDP adds the whole table up in each step.
        optimizer = "dense Adam" if num_rows < 100_000 else "sparse Adagrad"
        found[DDP] = ("plain 2", Job(optimizer, model.batch))
    # On a GPU another memory counts.
    if is_cpu:
        found[MEMORY] = ("plain 2", Job(MEMORY, BYTES))
        found[PRODUCTS] = ("plain 2", Job(PRODUCTS, OPERATIONS))
    return {name: variant for name, variant in found.items() if not any(word in name for word in without)}


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def measure_size(
    model: Model, users: int, movies: int, device: dict[str, Any], flags: argparse.Namespace
) -> dict[str, Any]:
    """Rates of all variants for tables of one size; parts, work and memory of this project's training."""
    variants = variants_of(model, users + movies, flags.without, device)
    names = sorted({team for team, _ in variants.values()})
    with tempfile.TemporaryDirectory(prefix="train-") as folder, contextlib.ExitStack() as stack:
        make_columns(Path(folder), users, movies, model.num_ratings, model)
        # All at once, to take turns: a team without a job sleeps, and its start is in no figure.
        started = {name: Team(f"train_{name[:-2]}.py", int(name[-1]), folder, model.name) for name in names}
        stack.enter_context(teams(started))
        rates = measure_rates(variants, started, flags.rounds, flags.seconds)
        ours = most_processes(rates)
        parts = {}
        for name in (HERE_2, HERE_1):
            if name in rates:
                team, job = variants[name]
                parts[name] = started[team].ask("parts", dataclasses.replace(job, steps=STEPS_OF_PARTS))
        peak_bytes = started[variants[ours][0]].peak_bytes()
        work = work_of(Path(folder), model, model.batch)
    return {
        "users": users,
        "movies": movies,
        "optimizer of ddp": variants[DDP][1].variant if DDP in variants else None,
        "machine": {name: rates.pop(name) for name in (MEMORY, PRODUCTS) if name in rates},
        "rates": rates,
        "parts": parts,
        "work": work,
        "peak bytes": peak_bytes,
        "table bytes": rows_of(model, users, movies) * (model.dim + 1) * 4,
    }


def measure_rates(
    variants: dict[str, tuple[str, Job]], started: dict[str, Team], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Ratings a second of each variant, round by round. seconds: approximate length of a measurement."""

    def seconds_of(name: str, steps: int) -> float:
        team, job = variants[name]
        return float(started[team].ask("steps", dataclasses.replace(job, steps=steps))["seconds"])

    def steps_of(name: str) -> int:
        """Steps in one measurement, found by some that warm up."""
        first = seconds_of(name, 1)
        often = seconds_of(name, 5) / 5 if first < 5 * seconds else first
        return max(1, round(seconds / often))

    def rate_of(name: str, steps: int) -> float:
        team, job = variants[name]
        return job.batch_size * len(started[team].ranks) * steps / seconds_of(name, steps)

    return in_turns({name: partial(rate_of, name, steps_of(name)) for name in variants}, rounds)


def work_of(folder: Path, model: Model, batch_size: int) -> dict[str, float]:
    """Least work of one of two ranks in a step: ids, distinct rows, bytes and operations.

    All intermediate results stay in caches; only the batch and the rows are moved.
    """
    config = model.config.replaced(local_batch_size=batch_size)
    batches = EventBatches(columns_of(folder, model), config, 0, 2)
    arrays = batches.make(Request("train", 0, 0))
    batch = dict(zip(Batch._fields, arrays, strict=True))
    counts = batch["lengths"].reshape(len(batches.tables), -1).sum(1)
    parts = np.split(batch["values"], counts.cumsum()[:-1])
    rows = sum(len(np.unique(part)) for part in parts)
    row_bytes = 4 * model.dim
    moved = 2 * sum(array.nbytes for array in arrays) + rows * (TIMES_A_ROW * row_bytes + 2 * 4)
    widths = [3 * (model.dim - 1), *model.mlp_dims, 1]
    # The backward makes two products for each product of the forward.
    products = 3 * 2 * batch_size * sum(first * second for first, second in pairwise(widths))
    # A product and a sum for each number of a row and of its gradient.
    sums = 2 * 2 * len(batch["values"]) * model.dim
    return {"ids": len(batch["values"]), "rows": rows, "bytes": moved, "operations": products + sums}


def bounds_of(size: dict[str, Any], batch_size: int, rate: float) -> dict[str, float]:
    """Milliseconds of a step of two ranks, measured and at the limits of memory and cores.

    rate: measured ratings a second.
    """
    work, machine = size["work"], size["machine"]
    return {
        "measured": 2e3 * batch_size / rate,
        "bytes": 2e3 * work["bytes"] / median(machine[MEMORY]),
        "operations": 2e3 * work["operations"] / median(machine[PRODUCTS]),
    }


def bound_lines(sizes: list[dict[str, Any]], batch_size: int, name: str) -> list[list[str]]:
    """Rows of a table; name: of the measured variant."""
    found = [bounds_of(size, batch_size, median(size["rates"][name])) for size in sizes]
    machines = [size["machine"] for size in sizes]
    works = [size["work"] for size in sizes]

    return [
        ["ids of a rank, and distinct rows", *(f"{w['ids']:,} and {w['rows']:,}" for w in works)],
        ["MB to move", *(f"{w['bytes'] / 1e6:.1f}" for w in works)],
        ["million operations", *(f"{w['operations'] / 1e6:.0f}" for w in works)],
        ["GB/s of the memory, both ranks", *(f"{median(m[MEMORY]) / 1e9:.1f}" for m in machines)],
        ["GFLOP/s of the cores", *(f"{median(m[PRODUCTS]) / 1e9:.0f}" for m in machines)],
        ["ms for the bytes", *(f"{each['bytes']:.2f}" for each in found)],
        ["ms for the operations", *(f"{each['operations']:.2f}" for each in found)],
        ["ms of a step", *(f"{each['measured']:.2f}" for each in found)],
        [
            "share of the larger one in the step",
            *(f"{max(each['bytes'], each['operations']) / each['measured']:.2f}" for each in found),
        ],
    ]


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
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
    """Variant of this project with the most processes: one process on a single GPU."""
    return HERE_2 if HERE_2 in names else HERE_1


def best_plain(size: dict[str, Any]) -> str:
    """Fastest of the plain variants."""
    plain = {name: median(rates) for name, rates in size["rates"].items() if name.startswith("plain")}
    return max(plain, key=lambda name: plain[name])


def _rows(size: dict[str, Any]) -> str:
    return f"{size['users']:,} + {size['movies']:,} rows"


def render(result: dict[str, Any]) -> str:
    """Tables and explanation of each model, and the origin."""
    blocks = []
    for model in result["models"].values():
        sizes = model["sizes"]
        titles = [*map(_rows, sizes)]
        ours = most_processes(sizes[0]["rates"])
        blocks += [f"### {model['title']}", table(["ratings a second", *titles], _rate_lines(model))]
        if sizes[0]["parts"][ours]:
            columns = [(size, name) for size in sizes for name in (HERE_1, HERE_2)]
            of_parts = [f"{_rows(size)}, {name.removeprefix('here, ')}" for size, name in columns]
            blocks.append(table(["milliseconds of a step", *of_parts], _part_lines(sizes)))
        if {MEMORY, PRODUCTS} <= sizes[0]["machine"].keys():
            bounds = bound_lines(sizes, model["batch"], HERE_2)
            blocks.append(table(["least work of a step of two processes", *titles], bounds))
        blocks.append(_explanation(result, model))
    return "\n\n".join([*blocks, f"{_origin(result)}."])


def _rate_lines(model: dict[str, Any]) -> list[list[str]]:
    sizes = model["sizes"]
    lines = [[name, *(_rate_cell(size, name) for size in sizes)] for name in _names(sizes)]
    # Each size against its fastest plain variant.
    ours = most_processes(sizes[0]["rates"])
    best = [shown_ratio(size["rates"][ours], size["rates"][best_plain(size)]) for size in sizes]
    lines.append([f"{ours} / best plain variant", *best])
    both = ((model["batch"], ""), (model["large batch"], ", large"))
    for batch, kind in both if ours == HERE_2 else ():
        cells = [shown_ratio(size["rates"][HERE_2 + kind], size["rates"][HERE_1 + kind]) for size in sizes]
        lines.append([f"2 processes / 1 process, {batch:,} ratings a rank", *cells])
    memory = [f"{size['peak bytes'] / 1e6:,.0f} MB for {size['table bytes'] / 1e6:,.0f} MB" for size in sizes]
    number = ours.removeprefix("here, ")
    return [*lines, [f"peak memory of {number}, for tables and row optimizer state", *memory]]


def _names(sizes: list[dict[str, Any]]) -> list[str]:
    """Names of all variants at the smaller batch."""
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
        what = f"with all features and full histories of {model['history']}"
        ids = "movies as popular as in the synthetic ratings, and equally likely users"
        plain = "an `nn.Embedding` or `nn.EmbeddingBag` for each feature"
    else:
        what = "with the features user and movie"
        ids = "equally likely ids, of which few are looked up twice"
        plain = "two `nn.Embedding`s"
    number = 2 if most_processes(model["sizes"][0]["rates"]) == HERE_2 else 1
    sentence = (
        f"The model of the example at --embedding_dim {model['dim']} {what}; "
        f"{model['batch']:,} ratings a rank, {number * model['batch']:,} for plain PyTorch in one process; "
        f"{ids}. A process here has one thread. "
        f"Plain PyTorch is the same `RatingModel` on {plain}, with its ratings in memory; only the layers "
        "are compiled, because torch.compile refuses the sparse gradients of tables. "
        "Medians over rounds, of ratios within a round, and [least, most] of them."
    )
    if number == 1:
        sentence += " With one GPU there is one process."
    if result["device"]["kind"] == "cuda":
        shares = [_bandwidth_share(result, model, size) for size in model["sizes"]]
        shown = ", ".join(f"{100 * share:.1f} %" for share in shares)
        sentence += f" The bytes to move take {shown} of the memory bandwidth of the devices."
    return sentence


def _bandwidth_share(result: dict[str, Any], model: dict[str, Any], size: dict[str, Any]) -> float:
    """Share of the memory bandwidth of the devices that the bytes of all ranks take."""
    ours = most_processes(size["rates"])
    a_rank = size["work"]["bytes"] / model["batch"]
    moved = median(size["rates"][ours]) * a_rank
    return float(moved / ((2 if ours == HERE_2 else 1) * result["device"]["bytes a second"]))


def _origin(result: dict[str, Any]) -> str:
    device = result["device"].get("name")
    machine = f"{result['machine']}, {device}" if device else result["machine"]
    # pandas reads no rating here.
    return origin({**result, "machine": machine}, fbgemm=True, without=("pandas",))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw rates by size above the parts of a step, a column for each model, for a page 750 pixels wide."""
    models = list(result["models"].values())
    sizes = models[0]["sizes"]
    draws: list[tuple[Any, str | None]] = [(_draw_rates, "Of plain PyTorch the fastest variant of each kind")]
    if sizes[0]["parts"][most_processes(sizes[0]["rates"])]:
        draws.append((_draw_parts, None))
    figure = new_figure(7.5, 4 * len(draws))
    for part, (draw_one, note) in zip(figure.subfigures(len(draws), squeeze=False)[:, 0], draws, strict=True):
        (columns,) = part.subplots(1, len(models), squeeze=False, sharey=True)
        for axes, model in zip(columns, models, strict=True):
            draw_one(axes, model)
            axes.set_title(model["title"], fontsize="medium")
            axes.grid(axis="x", alpha=0.3)
        columns[0].invert_yaxis()
        shown = columns[0].get_legend_handles_labels()
        part.legend(*shown, title=note, loc="outside lower center", ncols=3)
    figure.savefig(path)


def _draw_rates(axes: Any, model: dict[str, Any]) -> None:
    sizes = model["sizes"]
    shown = {name: [_rates_of(size, name) for size in sizes] for name in (HERE_2, HERE_1, *PLAIN)}
    shown = {name: rates for name, rates in shown.items() if any(rates)}
    height = 0.8 / len(shown)
    colors = {HERE_2: "C0", HERE_1: "C9"}
    for place, (name, rates) in enumerate(shown.items()):
        places = [row + (place + 0.5 - len(shown) / 2) * height for row in range(len(sizes))]
        widths = [max(each, default=0) / 1000 for each in rates]
        axes.barh(places, widths, height, color=colors.get(name, f"{0.2 + 0.1 * place:.1f}"), label=name)
    axes.set_yticks(range(len(sizes)), [f"{size['users'] + size['movies']:,}\nrows" for size in sizes])
    axes.set_xlabel("thousand ratings a second")


def _rates_of(size: dict[str, Any], name: str) -> list[float]:
    """Return the rates of a variant, or of one of `PLAIN` with any number of threads, compiled or not."""
    names = {name, *(each for each in size["rates"] if each.startswith(f"{name},"))} & size["rates"].keys()
    return [median(size["rates"][each]) for each in names if not each.endswith("large")]


def _draw_parts(axes: Any, model: dict[str, Any]) -> None:
    columns = [(size, name) for size in model["sizes"] for name in (HERE_1, HERE_2)]
    left = [0.0] * len(columns)
    for place, part in enumerate(columns[0][0]["parts"][HERE_1]):
        times = [1e3 * size["parts"][name][part] for size, name in columns]
        axes.barh(range(len(columns)), times, left=left, color=f"C{place}", label=part)
        left = [begin + time for begin, time in zip(left, times, strict=True)]
    labels = [
        f"{size['users'] + size['movies']:,} rows\n{name.removeprefix('here, ')}" for size, name in columns
    ]
    axes.set_yticks(range(len(columns)), labels)
    axes.set_xlabel("milliseconds of a step")


if __name__ == "__main__":
    main()
