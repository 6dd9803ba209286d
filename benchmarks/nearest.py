"""Measure the index of items: recall over microseconds, and the time to build it and to follow a delta.

    python benchmarks/nearest.py                   a million items with 64 and with 128 numbers
    python benchmarks/nearest.py --items 20000     fewer

Vectors are drawn with the distribution of a trained model, see `drawn`. Searches are timed one user at a
time on one thread, and end with the exact scores of the found items, as in `ServedModel.recommend`. A delta
changes one item in 100, adds one in 1,000 and removes as many; the index that followed many of them is
compared with a rebuilt one. Bars: recall@100 of 0.99 below a millisecond.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import DOCS, bar, describe, finish, make_parser, new_figure, origin, resident_memory, table, timed

from recsuite.extras.index import NearestItems
from recsuite.models.retrieval import InnerProduct, ranked, top_items

K, USERS = 100, 500
RECALL, LIMIT = 0.99, 1_000
# Shares of items that a delta changes, and that it adds and removes; number of deltas in a row.
CHANGES, MOVES, DELTAS = 0.01, 0.001, 20
NOTHING = torch.empty(2, 0, dtype=torch.int64)
PAGE = DOCS / "retrieval.md"


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="numbers in a vector")
    finish("nearest", parser.parse_args(), measure, judge, render, PAGE, draw)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    runs = []
    for dim in flags.dims:
        # In a new process: memory that a run has freed would not count for the next one.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            runs.append(pool.submit(measure_width, flags.items, dim).result())
    return {"about": describe(), "items": flags.items, "k": K, "runs": runs}


def drawn(number: int, users: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw vectors of items and of users, float32 [N, D] and [U, D].

    Means, lengths, and the decrease of the variance from one axis to the next are those of two towers trained
    on ml-latest-small. Items lie in 2,000 clusters of unequal sizes; half of the variance is within clusters.
    Users have a direction in common, along which popular items lie, and differ most where items do.
    """
    random, factors = np.random.default_rng(0), dim - 1
    falling = 1 / (1 + np.arange(factors) / 2)
    spread = np.sqrt(falling / falling.sum())
    sizes = 1 / np.arange(1, 2001) ** 0.7
    centres = random.standard_normal((2000, factors)) * spread
    of_items = random.choice(2000, size=number, p=sizes / sizes.sum())
    items = centres[of_items].astype(np.float32)
    items += random.standard_normal(items.shape, np.float32) * spread.astype(np.float32)
    items *= 0.6 * np.sqrt(0.5)
    mean = 0.52 * random.standard_normal(factors) * spread
    mean[0] = -0.26
    items = (items + mean.astype(np.float32)) * np.exp(0.1 * random.standard_normal((number, 1), np.float32))
    biases = 0.14 * random.standard_normal((number, 1), np.float32) - 0.2
    of_users = 3.4 * np.sqrt(falling**1.4 / (falling**1.4).sum()) * random.standard_normal((users, factors))
    of_users[:, 0] += 2.9
    both = np.hstack([biases, items]), np.hstack([np.ones((users, 1)), of_users]).astype(np.float32)
    return torch.from_numpy(both[0]), torch.from_numpy(both[1])


def measure_width(number: int, dim: int) -> dict[str, Any]:
    """Results of vectors of one width."""
    items, users = drawn(number, USERS, dim)
    keys = torch.arange(number)
    before = resident_memory()
    seconds, nearest = timed(NearestItems, keys, items)
    memory = resident_memory() - before
    # From the lists in a file, as a server that opens an export.
    opening, _ = timed(NearestItems, keys, items, nearest.lists)
    threads = torch.get_num_threads()
    set_threads(1)
    best = top_items(InnerProduct(), users, items, K, NOTHING)
    exact = median(
        timed(top_items, InnerProduct(), user, items, K, NOTHING)[0] for user in users[:20].split(1)
    )
    breadths = sorted({2**power for power in range(nearest.num_lists.bit_length())} | {nearest.breadth})
    curve = [
        point(nearest, users, items, best, breadth) for breadth in breadths if breadth >= nearest.breadth / 64
    ]
    set_threads(threads)
    return {
        "dim": dim,
        "lists": nearest.num_lists,
        "breadth": nearest.breadth,
        "build_seconds": seconds,
        "open_seconds": opening,
        "memory_bytes": memory,
        "file_bytes": sum(
            getattr(nearest.lists, name).nbytes for name in ("centres", "keys", "numbers", "prints")
        ),
        "exact_microseconds": exact * 1e6,
        "curve": curve,
        "deltas": follow(nearest, keys, items, users),
    }


def point(
    nearest: NearestItems, users: torch.Tensor, items: torch.Tensor, best: torch.Tensor, breadth: int
) -> dict[str, Any]:
    """Recall and microseconds of searches in a number of lists."""
    found, seconds = [], []
    for user in users.split(1):
        spent, places = timed(search, nearest, user, items, breadth)
        seconds.append(spent)
        found.append(places)
    return {
        "breadth": breadth,
        "recall": recall(torch.cat(found), best),
        "microseconds": median(seconds) * 1e6,
        "p99": float(np.percentile(seconds, 99)) * 1e6,
    }


def search(
    nearest: NearestItems, users: torch.Tensor, items: torch.Tensor, breadth: int | None = None
) -> torch.Tensor:
    """Places of the best found items, int64 [U, K], as `ServedModel.recommend` returns them."""
    return ranked(InnerProduct(), users, items, nearest.search(users, K, breadth))[0][:, :K]


def recall(found: torch.Tensor, best: torch.Tensor) -> float:
    """Share of the best places, int64 [U, K], that were found."""
    pairs = zip(found.tolist(), best.tolist(), strict=True)
    return sum(len({*mine} & {*wanted}) for mine, wanted in pairs) / best.numel()


def follow(
    nearest: NearestItems, keys: torch.Tensor, items: torch.Tensor, users: torch.Tensor
) -> dict[str, Any]:
    """Seconds to follow deltas, and recall afterwards beside that of a rebuilt index."""
    random, seconds = torch.Generator().manual_seed(1), []
    spread = items.std(dim=0)
    for _ in range(DELTAS):
        stays = torch.rand(len(keys), generator=random) >= MOVES
        keys, items = keys[stays], items[stays]
        changes = torch.rand(len(keys), generator=random) < CHANGES
        items[changes] += 0.3 * spread * torch.randn(int(changes.sum()), items.shape[1], generator=random)
        number = round(MOVES * len(keys))
        like = items[torch.randint(len(keys), (number,), generator=random)]
        comes = like + 0.3 * spread * torch.randn(number, items.shape[1], generator=random)
        keys = torch.cat([keys, int(keys.max()) + 1 + torch.arange(number)])
        items = torch.cat([items, comes])
        spent, nearest = timed(nearest.after, keys, items)
        seconds.append(spent)
    best = top_items(InnerProduct(), users, items, K, NOTHING)
    anew = NearestItems(keys, items)
    both = [recall(search(each, users, items), best) for each in (nearest, anew)]
    return {"seconds": seconds, "recall": both[0], "recall_of_one_made_anew": both[1]}


def set_threads(number: int) -> None:
    """Set the number of threads of torch and faiss."""
    import faiss

    torch.set_num_threads(number)
    faiss.omp_set_num_threads(number)


def used(run: dict[str, Any]) -> dict[str, Any]:
    """Point of a curve that `recommend` uses."""
    found: dict[str, Any] = next(each for each in run["curve"] if each["breadth"] == run["breadth"])
    return found


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    return [each for run in result["runs"] for each in _bars_of(run)]


def _bars_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    of, one = f"D {run['dim']}", used(run)
    spent, after = one["microseconds"], run["deltas"]
    return [
        bar(f"{of}, recall@{K}", one["recall"], RECALL, f"{one['recall']:.4f}", f"{RECALL}"),
        bar(f"{of}, microseconds a query", spent, LIMIT, f"{spent:,.0f}", f"{LIMIT:,}", at_most=True),
        bar(
            f"{of}, recall@{K} after {DELTAS} deltas, of that of an index made again",
            after["recall"] / after["recall_of_one_made_anew"],
            0.995,
            f"{after['recall']:.4f} / {after['recall_of_one_made_anew']:.4f}",
            "0.995",
        ),
    ]


def render(result: dict[str, Any]) -> str:
    """Table and origin."""
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "recall@100": lambda run: f"{used(run)['recall']:.4f}",
        "microseconds a query, median and p99": lambda run: (
            f"{used(run)['microseconds']:,.0f}, {used(run)['p99']:,.0f}"
        ),
        "exact search, microseconds": lambda run: f"{run['exact_microseconds']:,.0f}",
        "build, seconds": lambda run: f"{run['build_seconds']:.1f}",
        "open from a file, seconds": lambda run: f"{run['open_seconds']:.2f}",
        "update by a delta of 1 %, seconds": lambda run: f"{median(run['deltas']['seconds']):.2f}",
        f"recall@100 after {DELTAS} deltas, and of a rebuilt index": lambda run: (
            f"{run['deltas']['recall']:.4f}, {run['deltas']['recall_of_one_made_anew']:.4f}"
        ),
        "memory, MiB": lambda run: f"{run['memory_bytes'] / 2**20:,.0f}",
        "file, MiB": lambda run: f"{run['file_bytes'] / 2**20:,.0f}",
    }
    heads = [f"{result['items']:,} items, one thread, one user at a time"]
    heads += [f"D {run['dim']}" for run in result["runs"]]
    lines = [[name, *map(show, result["runs"])] for name, show in rows.items()]
    return f"{table(heads, lines)}\n\n{origin(result['about'], fbgemm=True)}."


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw recall over microseconds, a line for each width."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    for run in result["runs"]:
        places = [(each["microseconds"], each["recall"]) for each in run["curve"]]
        (line,) = axes.plot(*zip(*places, strict=True), ".-", label=f"D {run['dim']}")
        one = used(run)
        axes.plot(one["microseconds"], one["recall"], "*", color=line.get_color(), markersize=12)
    axes.axhline(RECALL, color="0.65", linestyle=":")
    axes.axvline(LIMIT, color="0.65", linestyle=":")
    axes.set(xscale="log", xlabel="microseconds a query, one thread", ylabel=f"recall@{K}")
    axes.set_title(f"{result['items']:,} items; star: used by recommend")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
