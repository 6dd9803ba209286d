"""What an index finds of what is best, and what a search of it costs, for as many lists as it looks in."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from recsuite.models.retrieval import best_places, ranked
from recsuite.serving.catalogue import Items

# What users have had is left out by whoever asks; here nothing is.
NOTHING = torch.empty(2, 0, dtype=torch.int64)
K = 100


@dataclass(frozen=True)
class Point:
    """Searches that look in so many lists: the share of the k best items that they find, and the median of
    the microseconds that one user's takes, alone. In all lists (`breadth`, then also of `is_default`)
    everything is found.
    """

    breadth: int
    recall: float
    microseconds: float
    is_default: bool


@torch.inference_mode()
def recall_curve(users: torch.Tensor, items: Items, k: int = K) -> list[Point]:
    """Recall over microseconds, from one list to all of them by powers of 2, and what `recommend` takes.

    users: float32 [U, D], see `ServedModel.vectors_of`.

    Raises:
        UserError: see `Items.nearest`.
    """
    best = best_places(items.head, users, items.vectors, k, NOTHING)
    nearest = items.nearest
    powers = [2**power for power in range(nearest.num_lists.bit_length())]
    breadths = sorted({*powers, nearest.breadth, nearest.num_lists})
    return [_point(users, items, best, breadth) for breadth in breadths]


def _point(users: torch.Tensor, items: Items, best: torch.Tensor, breadth: int) -> Point:
    k, seconds, found = best.shape[1], [], 0
    for user, wanted in zip(users.split(1), best.tolist(), strict=True):
        begin = time.perf_counter()
        places = items.near(user, k, NOTHING, breadth)
        places = ranked(items.head, user, items.vectors, places)[0][:, :k]
        seconds.append(time.perf_counter() - begin)
        found += len({*wanted} & {*places[0].tolist()})
    recall = found / best.numel() if best.numel() else 1.0
    return Point(breadth, recall, 1e6 * statistics.median(seconds), breadth == items.nearest.breadth)


def curve_lines(points: Sequence[Point], k: int = K) -> Iterator[str]:
    """The curve as a table, of which one line is what `recommend` takes."""
    label = f"recall@{k}"
    yield f"| lists searched | {label} | us a query |"
    yield f"|---------------:|{'-' * (len(label) + 1)}:|-----------:|"
    for point in points:
        breadth = f"{point.breadth:,}{' *' if point.is_default else ''}"
        yield f"| {breadth:>14} | {point.recall:{len(label)}.4f} | {point.microseconds:10,.0f} |"
