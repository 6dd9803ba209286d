"""Measure the index of items: recall over microseconds, what making it takes, and what following a delta
takes.

    python benchmarks/nearest.py                   a million items with 64 and with 128 numbers
    python benchmarks/nearest.py --items 20000     fewer

Vectors are drawn as those of a trained model lie, see `drawn`. Searches are timed one user at a time on one
thread, and end with the exact scores of what was found, as in `ServedModel.recommend`. A delta changes one
item in 100, adds one in 1,000 and removes as many; the index that followed many of them is held against one
that is made anew. Bars: recall@100 of 0.99 below a millisecond.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from environment import DOCS, describe, finish, in_words, make_parser
from figures import bar

from recsuite.models.retrieval import InnerProduct, best_places, ranked
from recsuite.serving.index import NearestItems

K, USERS = 100, 500
RECALL, LIMIT = 0.99, 1_000
# Of a delta: shares of items that change, and that come and go. So many deltas in a row.
CHANGES, MOVES, DELTAS = 0.01, 0.001, 20
NOTHING = torch.empty(2, 0, dtype=torch.int64)
PAGE, MARKS = (
    DOCS / "retrieval.md",
    ("<!-- nearest: made by benchmarks/nearest.py -->", "<!-- end of nearest -->"),
)


def main() -> None:
    """Measure and show."""
    parser = make_parser(__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="numbers in a vector")
    flags = parser.parse_args()
    runs = []
    for dim in flags.dims:
        # In a process of its own: what one has freed would be memory that the next one seems not to need.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            runs.append(pool.submit(measure, flags.items, dim).result())
    result = {"about": describe(), "items": flags.items, "k": K, "runs": runs}
    result["bars"] = [each for run in runs for each in judge(run)]
    finish("nearest", result, text_of(result), flags, draw, PAGE, MARKS)


def drawn(number: int, users: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of items and of users, float32 [N, D] and [U, D], as two towers trained on ml-latest-small have
    them: means, lengths, and how the variance falls from one axis to the next are theirs.

    Items lie in 2,000 clusters of unequal sizes, around whose centres half of the variance is. Users have a
    direction in common, along which popular items lie, and differ most where items do.
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


def measure(number: int, dim: int) -> dict[str, Any]:
    """All figures of one width."""
    items, users = drawn(number, USERS, dim)
    keys = torch.arange(number)
    before = resident()
    seconds, nearest = timed(NearestItems, keys, items)
    memory = resident() - before
    # From the lists that a file holds: what a server does that opens an export.
    opening, _ = timed(NearestItems, keys, items, nearest.lists)
    threads = torch.get_num_threads()
    set_threads(1)
    best = best_places(InnerProduct(), users, items, K, NOTHING)
    exact = median(
        timed(best_places, InnerProduct(), user, items, K, NOTHING)[0] for user in users[:20].split(1)
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
    """Recall and the median microseconds of searches in so many lists."""
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
    """The places of the best of what is found, int64 [U, K], as `ServedModel.recommend` takes them."""
    return ranked(InnerProduct(), users, items, nearest.search(users, K, breadth))[0][:, :K]


def recall(found: torch.Tensor, best: torch.Tensor) -> float:
    """The share of the best places, int64 [U, K], that were found."""
    pairs = zip(found.tolist(), best.tolist(), strict=True)
    return sum(len({*mine} & {*wanted}) for mine, wanted in pairs) / best.numel()


def follow(
    nearest: NearestItems, keys: torch.Tensor, items: torch.Tensor, users: torch.Tensor
) -> dict[str, Any]:
    """Seconds of following deltas, and what the index finds then beside one that is made anew."""
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
    best = best_places(InnerProduct(), users, items, K, NOTHING)
    anew = NearestItems(keys, items)
    both = [recall(search(each, users, items), best) for each in (nearest, anew)]
    return {"seconds": seconds, "recall": both[0], "recall_of_one_made_anew": both[1]}


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """The seconds of some work, and what it returns."""
    begin = time.perf_counter()
    done = work(*arguments)
    return time.perf_counter() - begin, done


def set_threads(number: int) -> None:
    """How many threads torch and faiss use."""
    import faiss

    torch.set_num_threads(number)
    faiss.omp_set_num_threads(number)


def resident() -> int:
    """The bytes that this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def used(run: dict[str, Any]) -> dict[str, Any]:
    """The point of a curve that `recommend` takes."""
    found: dict[str, Any] = next(each for each in run["curve"] if each["breadth"] == run["breadth"])
    return found


def judge(run: dict[str, Any]) -> list[dict[str, Any]]:
    """What one search finds, and what it takes."""
    of, one = f"D {run['dim']}", used(run)
    spent, after = one["microseconds"], run["deltas"]
    return [
        bar(f"{of}, recall@{K}", one["recall"], RECALL, f"{one['recall']:.4f}", f"{RECALL}"),
        bar(f"{of}, microseconds a query", spent, LIMIT, f"{spent:,.0f}", f"{LIMIT:,}", at_most=True),
        bar(
            f"{of}, recall@{K} after {DELTAS} deltas, of that of an index made anew",
            after["recall"] / after["recall_of_one_made_anew"],
            0.995,
            f"{after['recall']:.4f} / {after['recall_of_one_made_anew']:.4f}",
            "0.995",
        ),
    ]


def text_of(result: dict[str, Any]) -> str:
    """The figures as a page has them."""
    widths = [f"D {run['dim']}" for run in result["runs"]]
    lines = [
        f"| {result['items']:,} items, one thread, one user at a time | {' | '.join(widths)} |",
        f"|---|{'---:|' * len(widths)}",
    ]
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "recall@100": lambda run: f"{used(run)['recall']:.4f}",
        "microseconds a query, median and p99": lambda run: (
            f"{used(run)['microseconds']:,.0f}, {used(run)['p99']:,.0f}"
        ),
        "exact search, microseconds": lambda run: f"{run['exact_microseconds']:,.0f}",
        "made, seconds": lambda run: f"{run['build_seconds']:.1f}",
        "opened from its file, seconds": lambda run: f"{run['open_seconds']:.2f}",
        "a delta of 1 % followed, seconds": lambda run: f"{median(run['deltas']['seconds']):.2f}",
        f"recall@100 after {DELTAS} deltas, and of an index made anew": lambda run: (
            f"{run['deltas']['recall']:.4f}, {run['deltas']['recall_of_one_made_anew']:.4f}"
        ),
        "memory, MiB": lambda run: f"{run['memory_bytes'] / 2**20:,.0f}",
        "its file, MiB": lambda run: f"{run['file_bytes'] / 2**20:,.0f}",
    }
    lines += [f"| {name} | {' | '.join(map(show, result['runs']))} |" for name, show in rows.items()]
    return "\n".join([*lines, "", in_words(result["about"])])


def draw(result: dict[str, Any], path: Path) -> None:
    """Recall over microseconds, a line for each width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in result["runs"]:
        places = [(each["microseconds"], each["recall"]) for each in run["curve"]]
        (line,) = axes.plot(*zip(*places, strict=True), ".-", label=f"D {run['dim']}")
        one = used(run)
        axes.plot(one["microseconds"], one["recall"], "*", color=line.get_color(), markersize=12)
    axes.axhline(RECALL, color="0.65", linestyle=":")
    axes.axvline(LIMIT, color="0.65", linestyle=":")
    axes.set(xscale="log", xlabel="microseconds a query, one thread", ylabel=f"recall@{K}")
    axes.set_title(f"{result['items']:,} items; the star is what recommend takes")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
