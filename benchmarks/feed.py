"""Measure rows a second of the loader, the time to its first batch, and the memory of workers.

    python benchmarks/feed.py --write             everything: twenty minutes on two cores, 11 GB
    python benchmarks/feed.py --quick             a part of it, once

Prints each figure beside its bar; with --write it also writes docs/feed.json, docs/feed.png and the part of
docs/log/benchmarks.md between the feed marks. The ratings are drawn into --folder and kept there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    DOCS,
    FIRST_TIME,
    ROOT,
    STAR_SCHEMA,
    YEAR,
    bar,
    blocks_of,
    comma_separated,
    describe,
    finish,
    make_parser,
    new_figure,
    origin,
    ratio,
    skewed_ids,
    table,
    train,
    write_parquet,
)

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.batching import shuffled
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader, EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.host import available_memory, keep_freed_memory

# Workers import this file again: nothing heavy at its top level.

PAGE = DOCS / "log" / "benchmarks.md"
BATCH_SIZES = (1024, 8192, 65_536)
# Batch sizes of light rows, which are measured beside those of own tables, and of heavy rows.
BATCHES = {"light": BATCH_SIZES, "heavy": BATCH_SIZES}
POOLS = tuple((method, number) for method in ("spawn", "forkserver") for number in (1, 2, 4))
# Values of --quick, which measures every bar once.
QUICK = {
    "ratings": 100_000,
    "memory": [100_000],
    "trained": 5_000,
    "epochs": 1,
    "seconds": 0.05,
    "rounds": 1,
    "starts": 1,
    "batches": {"light": (8192, 65_536), "heavy": (8192,)},
    "pools": (("spawn", 2),),
}
MEMORY_LIMIT = 2 * 2**30


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "benchmark", help="keeps the ratings")
    parser.add_argument("--ratings", type=int, default=20_000_000, help="for rows/s and the first batch")
    parser.add_argument("--heavy", type=int, default=50, help="--history of the heavy row")
    parser.add_argument("--seconds", type=float, default=0.7, help="of one measurement of a rate")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each rate, in turns")
    parser.add_argument("--starts", type=int, default=5, help="measurements of the first batch")
    parser.add_argument("--quick", action="store_true", help="every bar once, on few ratings")
    parser.set_defaults(batches=BATCHES, pools=POOLS)
    parser.add_argument(
        "--trained", type=int, default=1_000_000, help="ratings of the training that may wait"
    )
    parser.add_argument("--epochs", type=int, default=4, help="of that training")
    parser.add_argument(
        "--memory",
        type=comma_separated(int),
        default=[1_000_000, 10_000_000, 100_000_000],
        help="ratings for which the memory of workers is shown; the last number is trained on in 2 GiB",
    )
    flags = parser.parse_args()
    vars(flags).update(QUICK if flags.quick else {})
    finish("feed", flags, measure, judge, render, PAGE, draw)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    import torch

    torch.set_num_threads(1)
    # As `init_runtime` does on a rank, for the batches that this process makes without workers.
    keep_freed_memory()
    base = _config(flags, flags.ratings)
    heavy = base.replaced(history=flags.heavy)
    own = _own_config(flags)
    columns, heavy_columns = open_columns(base), open_columns(heavy)
    kinds = {"light": (columns, base), "own": (open_columns(own), own)}
    return {
        **describe(),
        "ratings": flags.ratings,
        "history": flags.heavy,
        "trained": flags.trained,
        "start": first_batches(columns, base, flags.starts),
        **({} if flags.quick else {"heavy start": first_batches(heavy_columns, heavy, flags.starts)}),
        **_by_size(kinds, flags.batches["light"], flags),
        **_by_size({"heavy": (heavy_columns, heavy)}, flags.batches["heavy"], flags),
        "waits": {str(number): data_waits(number, flags) for number in (0, 2)},
        "memory": {str(number): _memory("workers", flags.folder, number, number) for number in flags.memory},
        "small memory": {
            "ratings": flags.memory[-1],
            **_memory("train", flags.folder, flags.memory[-1], MEMORY_LIMIT),
        },
    }


def _config(flags: argparse.Namespace, ratings: int) -> Config:
    folder = str(flags.folder / str(ratings))
    return Config.of(dataset="synthetic", synthetic_ratings=ratings, data_path=folder, history=0)


def _own_config(flags: argparse.Namespace) -> Config:
    folder = flags.folder / f"own-{flags.ratings}"
    write_own_tables(folder, flags.ratings)
    # As many as the light rows, although some repeat a user and an item.
    return Config.of(data_path=str(folder), duplicates="keep", history=0)


def _by_size(
    kinds: dict[str, tuple[Columns, Config]], sizes: tuple[int, ...], flags: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    found = [rates(kinds, size, flags) for size in sizes]
    return {kind: [each[kind] for each in found] for kind in kinds}


def first_batches(columns: Columns, base: Config, starts: int) -> dict[str, dict[str, float]]:
    """Seconds from `build_dataloader` to the first batch, and of imports in new processes."""

    def first(number: int, method: str) -> float:
        config = base.replaced(num_workers=number, mp_context=method)
        dataset = EventBatches(columns, config, rank=0, world_size=1)
        start = time.perf_counter()
        with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
            # The start of the workers, their imports, and one batch.
            next(iter(loader))
            return time.perf_counter() - start

    def python(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    figures: dict[str, Callable[[], float]] = {
        "python": lambda: python("pass"),
        "import torch.utils.data": lambda: python("import torch.utils.data"),
        "spawn 1": lambda: first(1, "spawn"),
        "spawn 4": lambda: first(4, "spawn"),
        "forkserver 4": lambda: first(4, "forkserver"),
    }
    # Only the first pool waits for the fork server. A single measurement needs no other warm-up.
    for name in figures if starts > 1 else ["forkserver 4"]:
        figures[name]()
    found = [{name: figure() for name, figure in figures.items()} for _ in range(starts)]
    return {name: summary([times[name] for times in found]) for name in figures}


def data_waits(num_workers: int, flags: argparse.Namespace) -> list[float]:
    """Share of each epoch in which a training in two processes waits for batches."""
    open_columns(_config(flags, flags.trained))
    path = flags.folder / str(flags.trained)
    given = ("--epochs", flags.epochs, "--num_workers", num_workers, "--data_path", path)
    report = train(*given, ranks=2, CUDA_VISIBLE_DEVICES="")
    return [epoch["data_wait"] for epoch in report["epochs"]]


def _memory(what: str, folder: Path, ratings: int, number: int) -> dict[str, Any]:
    """Result of benchmarks/memory.py, in a process of its own."""
    data_path = str(folder / str(ratings))
    # Made before: that process is to read the ratings, and not to draw them.
    open_columns(Config.of(dataset="synthetic", synthetic_ratings=ratings, data_path=data_path))
    command = [sys.executable, str(Path(__file__).with_name("memory.py")), what, data_path, str(number)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


# --- own tables: numbers, features of the event, and weights ---

SCHEMA = f"""\
{STAR_SCHEMA}[weight]
column = "trust"
[features.age]
of = "user"
column = "age"
kind = "number"
input = "buckets"
[features.price]
of = "item"
column = "price"
kind = "number"
input = "dense"
[features.discount]
of = "event"
column = "discount"
kind = "number"
input = "dense"
[features.device]
of = "event"
column = "device"
kind = "category"
[features.channel]
of = "event"
column = "channel"
kind = "category"
[features.hour]
of = "event"
column = "hour(timestamp)"
kind = "category"
"""
DEVICES = ("phone", "desktop", "tablet")
CHANNELS = ("search", "mail", "shop", "advertisement", "friend")
# As many users and items as the synthetic ratings have, at 20 million.
EVENTS_PER_USER, EVENTS_PER_ITEM = 165, 1_150


def write_own_tables(folder: Path, number: int) -> None:
    """Write events with their users, items and a schema.toml, drawn from a seed, unless they exist."""
    # Written last, so that an interrupted write is repeated.
    schema = folder / "schema.toml"
    if schema.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    num_users, num_items = max(1, number // EVENTS_PER_USER), max(1, number // EVENTS_PER_ITEM)
    write_parquet(folder / "users.parquet", [_users(draw, num_users)])
    write_parquet(folder / "items.parquet", [_items(draw, num_items)])
    times = FIRST_TIME + YEAR * np.linspace(0, 1, number)
    write_parquet(
        folder / "events.parquet",
        (_events(draw, times[part.start : part.stop], num_users, num_items) for part in blocks_of(number)),
    )
    schema.write_text(SCHEMA)


def _users(draw: np.random.Generator, number: int) -> dict[str, Any]:
    return {"user_id": np.arange(number), "age": draw.integers(18, 80, number)}


def _items(draw: np.random.Generator, number: int) -> dict[str, Any]:
    return {"item_id": np.arange(number), "price": np.exp(draw.normal(3, 1, number))}


def _events(draw: np.random.Generator, times: np.ndarray, num_users: int, num_items: int) -> dict[str, Any]:
    number = len(times)
    discount = draw.random(number)
    # Some events have none.
    discount[::9] = np.nan
    user, item = skewed_ids(draw, num_users, num_items, number)
    return {
        "user_id": user,
        "item_id": item,
        "stars": draw.integers(1, 6, number).astype(np.float32),
        "trust": draw.integers(1, 4, number).astype(np.float32),
        "time": times.astype(np.int64),
        "discount": discount,
        "device": np.take(DEVICES, draw.integers(0, len(DEVICES), number)),
        "channel": np.take(CHANNELS, draw.integers(0, len(CHANNELS), number)),
    }


# --- rows a second, and the limit ---

WARM_UP_STEPS = 20


class NextSteps(EpochSampler):
    """The next `number` full steps of training, after those of the previous pass, epoch after epoch."""

    def __init__(self, dataset: EventBatches) -> None:
        super().__init__(dataset)
        self.number = WARM_UP_STEPS
        self.full_steps = max(1, len(dataset.ranges["train"]) // dataset.batch_size)
        self._done = 0

    def __iter__(self) -> Iterator[Request]:
        # After the last pass: rows that were read a moment ago would still be in the cache.
        first, self._done = self._done, self._done + self.number
        for place in range(first, self._done):
            epoch, step = divmod(place, self.full_steps)
            yield Request("train", epoch, step)

    def __len__(self) -> int:
        return self.number


class LoaderRate:
    """Rows a second of a loader whose consumer only receives."""

    def __init__(self, loader: BatchLoader, seconds: float) -> None:
        assert isinstance(loader.sampler, NextSteps)
        self.loader, self.sampler, self.seconds = loader, loader.sampler, seconds
        self.rows = min(loader.dataset.batch_size, len(loader.dataset.ranges["train"]))

    def __call__(self) -> float:
        """Return the rate over a pass, whose length the previous pass decides."""
        start = time.perf_counter()
        for batch in self.loader:
            # A reference would keep a slot of the ring.
            del batch
        rate = self.sampler.number * self.rows / (time.perf_counter() - start)
        # Slow and fast loaders are measured for the same time.
        self.sampler.number = max(WARM_UP_STEPS, round(self.seconds * rate / self.rows))
        return rate


class Limit:
    """Rows a second of `index_select` at shuffled places, with rows as wide as those of a batch."""

    def __init__(self, dataset: EventBatches, row_bytes: float, seconds: float) -> None:
        import torch

        self.number = len(dataset.ranges["train"])
        self.batch_size = min(dataset.batch_size, self.number)
        self.width = round(row_bytes / 8)
        self.table_rows = min(self.number, int(available_memory()[0] / 2 / (8 * self.width)))
        # Written, so that every page exists.
        self.table = torch.ones(self.table_rows, self.width, dtype=torch.int64)
        self.out = torch.empty(self.batch_size, self.width, dtype=torch.int64)
        self.seconds = seconds
        self.steps = WARM_UP_STEPS

    def __call__(self) -> float:
        """Return the rate over some steps, whose number the previous call decides."""
        import torch

        places = np.arange(self.steps * self.batch_size) % self.number
        # In the order of training: neighbouring rows would have another limit.
        places = shuffled(places, self.number, 0, 0) % self.table_rows
        steps = torch.from_numpy(places).split(self.batch_size)
        start = time.perf_counter()
        for step in steps:
            torch.index_select(self.table, 0, step, out=self.out)
        rate = len(places) / (time.perf_counter() - start)
        self.steps = max(WARM_UP_STEPS, round(self.seconds * rate / self.batch_size))
        return rate


def rates(
    rows: dict[str, tuple[Columns, Config]], batch_size: int, flags: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Rows a second of the limit, without workers and with workers, for each kind of row, in turns."""
    with contextlib.ExitStack() as stack:
        kinds = {name: _RowKind(*row, batch_size, flags, stack) for name, row in rows.items()}
        every = [(kind, name) for kind in kinds.values() for name in kind.figures]
        # Twice: the first pass warms up and finds the number of steps, the second touches their pages.
        for kind, name in every * 2:
            kind.figures[name]()
        for _ in range(flags.rounds):
            for kind, name in every:
                kind.found[name].append(kind.figures[name]())
    return {name: kind.result() for name, kind in kinds.items()}


class _RowKind:
    """Measurements of one kind of row, and their results round by round."""

    def __init__(
        self,
        columns: Columns,
        base: Config,
        batch_size: int,
        flags: argparse.Namespace,
        stack: contextlib.ExitStack,
    ) -> None:
        self.columns, self.config = columns, base.replaced(batch_size=batch_size)
        dataset = EventBatches(columns, self.config, rank=0, world_size=1)
        batch = dataset[Request("train", 0, 0)]
        self.row_bytes = sum(part.numel() * part.element_size() for part in batch) / batch_size
        self.limit = Limit(dataset, self.row_bytes, flags.seconds)
        pools = {f"{method} {number}": (method, number) for method, number in flags.pools}
        self.figures: dict[str, Callable[[], float]] = {
            "limit": self.limit,
            "0": self._loader(flags.seconds, stack, num_workers=0),
            **{
                name: self._loader(flags.seconds, stack, num_workers=number, mp_context=method)
                for name, (method, number) in pools.items()
            },
        }
        self.found: dict[str, list[float]] = {name: [] for name in self.figures}

    def _loader(self, seconds: float, stack: contextlib.ExitStack, **choices: Any) -> LoaderRate:
        config = self.config.replaced(**choices)
        dataset = EventBatches(self.columns, config, rank=0, world_size=1)
        return LoaderRate(stack.enter_context(build_dataloader(dataset, NextSteps(dataset), config)), seconds)

    def result(self) -> dict[str, Any]:
        found = self.found
        return {
            "batch size": self.config.loader.batch_size,
            "bytes a row": self.row_bytes,
            "rows of the limit": self.limit.table_rows,
            "rows of the data": self.limit.number,
            "rows/s": {name: summary(values) for name, values in found.items()},
            "of the limit": ratio(found["0"], found["limit"]),
            "of 0 workers": {
                name: ratio(values, found["0"])
                for name, values in found.items()
                if name not in ("0", "limit")
            },
        }


def summary(values: list[float]) -> dict[str, float]:
    """Median, least and most of some measurements."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


# --- bars, tables and figure; computed from the JSON alone ---

# MB of a worker beyond those of a process that imported torch, as a worker of DataLoader does.
MOST_OWN_MEMORY = 12.0
COLORS = {"0": "C0", "1": "C1", "2": "C2", "4": "C3"}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure, if that was measured."""
    heavy = {rates["batch size"]: rates for rates in result["heavy"]}
    start = {name: times["median"] for name, times in result["start"].items()}
    bars: list[dict[str, Any]] = []

    def add(name: str, measured: float, limit: float, unit: str = "", at_most: bool = False) -> None:
        bars.append(
            bar(name, measured, limit, f"{_short(measured)}{unit}", f"{_short(limit)}{unit}", at_most)
        )

    for kind, note in (("light", ""), ("own", ", own tables")):
        cheap = {rates["batch size"]: rates for rates in result.get(kind, [])}
        # --quick and older results lack some.
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
    # Pages are shared with other processes, so two measurements differ a little.
    add("difference of a worker's memory between these sizes", max(own) - min(own), 2.0, " MB", at_most=True)
    trained = result["small memory"]["trained"]
    if trained is not None:
        how = "it trains" if trained else "it does not train"
        name = f"{result['small memory']['ratings']:,} ratings in {_gib(result['small memory']['limit'])}"
        bars.append({"name": name, "bar": "it trains", "measured": how, "reached": trained})
    return bars


def render(result: dict[str, Any]) -> str:
    """All tables and their origin."""
    parts = [
        f"Million rows/s, {result['ratings']:,} ratings, all features; the main process only receives:",
        _rates_table(result["light"]),
        f"The same with --history {result['history']}:",
        _rates_table(result["heavy"]),
        *_own_table(result),
        "Seconds to the first batch, and of other starts:",
        _start_table({"light": result["start"], "heavy": result.get("heavy start")}),
        "MB of memory (PSS) of one of 2 workers, batch 8,192:",
        _memory_table(result["memory"]),
        _sentences(result),
        f"{origin(result)}.",
    ]
    return "\n\n".join(parts)


def _own_table(result: dict[str, Any]) -> list[str]:
    # Older results lack it.
    if "own" not in result:
        return []
    title = "As many events of own tables, with numbers, event features and weights:"
    return [title, _rates_table(result["own"])]


def _rates_table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["rows/s"])
    shown_names = ["0 workers" if name == "0" else name for name in names]
    heads = ["batch", "bytes a row", *shown_names, "0 workers / limit"]
    cells = []
    for row in rows:
        shown = [f"{row['rows/s'][name]['median'] / 1e6:.1f}" for name in names]
        cells.append(
            [f"{row['batch size']:,}", f"{row['bytes a row']:.0f}", *shown, f"{row['of the limit']:.2f}"]
        )
    return table(heads, cells, left=())


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
    return table(["row", *heads.values()], rows, left=())


def _memory_table(memory: dict[str, dict[str, float]]) -> str:
    names = ["own", "ring", "columns", "total", "only numpy", "only torch"]
    heads = ["ratings", "own", "ring", "columns, page cache", "all", "process with numpy", "with torch"]
    return table(
        heads,
        [
            [f"{int(ratings):,}", *(f"{parts[name]:.0f}" for name in names)]
            for ratings, parts in memory.items()
        ],
        left=(),
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
                f"measured on {row['rows of the limit']:,} rows, because memory was short."
            )
    return " ".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB"


def _short(number: float) -> str:
    return f"{number:,.1f}" if abs(number) >= 10 else f"{number:.2f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw rows a second by batch size: light rows, rows of own tables, and heavy rows."""
    titles = {
        "light": "all features",
        "own": "own tables",
        "heavy": f"all features and --history {result['history']}",
    }
    kinds = [kind for kind in titles if kind in result]
    figure = new_figure(4.5 * len(kinds), 5)
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


if __name__ == "__main__":
    main()
