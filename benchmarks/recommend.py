"""Measure the cost of `ServedModel.recommend` beside scoring every item through its other method.

    python benchmarks/recommend.py SAVE_DIR        a folder of checkpoints, or an export
    PYTHONPATH=example python benchmarks/recommend.py SAVE_DIR --limits --write     docs/serving.md: a minute

Both are timed in turns for one user, with the vectors of items kept from before, as in a server. Prints
milliseconds, their ratio, and the largest difference of a score. --limits also measures the largest answers
of `serve.py`, as JSON, one at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import (
    DOCS,
    bar,
    describe,
    finish,
    in_turns,
    make_parser,
    origin,
    peak_memory,
    ratio,
    shown_ratio,
    table,
    timed,
)

from example import make_model
from recsuite.serving.served import ServedModel

# Scores may differ by rounding.
TOLERANCE = 1e-6
K = 50
PAGE = DOCS / "serving.md"


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("save_dir", type=Path, help="folder of checkpoints, or an export")
    parser.add_argument("--rounds", type=int, default=9, help="of both, in turns")
    parser.add_argument("--limits", action="store_true", help="the largest answers of serve.py too")
    finish("recommend", parser.parse_args(), measure_all, judge, render, PAGE, mark="limits")


def measure_all(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    model = ServedModel.open(flags.save_dir, model=make_model)
    limits = {"limits": costs(model)} if flags.limits else {}
    return {"about": describe(), **measure(model, flags.rounds), **limits}


def measure(model: ServedModel, rounds: int) -> dict[str, Any]:
    """Seconds of both methods in each round, and the largest difference of the scores of the best items."""
    schema, vocabulary = model.snapshot.schema, model.snapshot.vocabulary
    items = list(vocabulary[schema.item])
    user = next(iter(vocabulary[schema.user]))
    # Once, for the vectors of the items and the first allocations of torch.
    best = model.recommend([user], K)[0]
    everything = {schema.user: [user] * len(items), schema.item: items}
    scores = dict(zip(items, model.score(everything).tolist(), strict=True))
    measures = {
        "recommend": lambda: timed(model.recommend, [user], K)[0],
        "score": lambda: timed(model.score, everything)[0],
    }
    difference = max(abs(scores[item] - score) for item, score in best)
    return {"items": len(items), **in_turns(measures, rounds), "difference": difference}


def costs(model: ServedModel) -> list[dict[str, Any]]:
    """Seconds and additional bytes of the largest answers of each kind."""
    from serve import MOST_ANSWERS, MOST_PAIRS

    schema, vocabulary = model.snapshot.schema, model.snapshot.vocabulary
    users, items = (list(vocabulary[name]) for name in (schema.user, schema.item))
    some, one = max(1, MOST_PAIRS // len(items)), min(len(items), MOST_ANSWERS)
    many, k = some_of(users, some), MOST_ANSWERS // some
    long = {
        schema.user: users[:1],
        "history": [some_of(items, 300_000)],
        "history_ratings": [[3.0] * 300_000],
    }
    pairs = {schema.user: some_of(users, MOST_ANSWERS), schema.item: some_of(items, MOST_ANSWERS)}
    asked: dict[str, Callable[[], object]] = {
        f"/score of {MOST_ANSWERS:,} pairs": lambda: model.score(pairs).tolist(),
        f"/recommend, {some:,} users x {len(items):,} items, k {k:,}": lambda: model.recommend(many, k),
        f"/recommend, 1 user, k {one:,}": lambda: model.recommend(users[:1], one),
        "/recommend, 1 user with a history of 300,000 items": lambda: model.recommend(long, 10),
    }
    # Before the first: the allocator keeps freed memory for the next answer.
    found, before = [], peak_memory()
    for name, ask in asked.items():
        # Resets the peak that the kernel counts.
        Path("/proc/self/clear_refs").write_text("5")
        seconds, _ = timed(lambda ask=ask: json.dumps(ask()))
        found.append({"what": name, "seconds": seconds, "bytes": peak_memory() - before})
    return found


def some_of(ids: list[Any], number: int) -> list[Any]:
    """Ids, repeated from the first where there are fewer."""
    return [*itertools.islice(itertools.cycle(ids), number)]


def render(result: dict[str, Any]) -> str:
    """Costs as a table if they were measured, else a line."""
    if "limits" not in result:
        ways = [f"{name} {median(result[name]) * 1e3:.1f} ms" for name in ("recommend", "score")]
        gain = shown_ratio(result["score"], result["recommend"])
        return f"one user, {result['items']:,} items: {', '.join(ways)}, ratio {gain}"
    lines = [
        (each["what"], f"{each['seconds']:.1f}", f"{each['bytes'] / 2**20:.0f}") for each in result["limits"]
    ]
    shown = table(("one answer", "seconds", "MiB"), lines)
    return f"{shown}\n\nMeasured on {origin(result['about'])}."


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Bars: the same scores, at a lower cost."""
    difference, gain = result["difference"], ratio(result["score"], result["recommend"])
    return [
        bar("largest difference", difference, TOLERANCE, f"{difference:.1e}", f"{TOLERANCE:g}", at_most=True),
        bar("scoring every item, times the cost of recommending", gain, 1, f"{gain:.1f}", "1"),
    ]


if __name__ == "__main__":
    main()
