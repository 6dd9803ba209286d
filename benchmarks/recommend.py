"""Measure what `ServedModel.recommend` costs beside scoring every item as a caller would do it by itself.

    python benchmarks/recommend.py SAVE_DIR        a folder of checkpoints, or an export
    PYTHONPATH=example python benchmarks/recommend.py SAVE_DIR --limits --write     docs/serving.md: a minute

Both are timed in turns for one user, with the items' vectors kept from before, as in a server. Prints
milliseconds, their ratio, and the largest difference of a score. With --limits it measures too what the
largest answers of `serve.py` cost, as JSON, one at a time. Measures; asserts nothing.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from environment import DOCS, describe, finish, make_parser
from figures import bar, origin, ratio, shown_ratio, table

from recsuite.serving.served import ServedModel

# Scores are the same but for rounding.
TOLERANCE = 1e-6
K = 50
MARKS = ("<!-- limits: made by benchmarks/recommend.py -->", "<!-- end of limits -->")


def main() -> None:
    """Measure and show."""
    parser = make_parser(__doc__)
    parser.add_argument("save_dir", type=Path, help="folder of checkpoints, or an export")
    parser.add_argument("--rounds", type=int, default=9, help="of both, in turns")
    parser.add_argument("--limits", action="store_true", help="the largest answers of serve.py too")
    flags = parser.parse_args()
    model = ServedModel.open(flags.save_dir)
    result = {"about": describe(), **measure(model, flags.rounds)}
    result["bars"] = judge(result)
    ways = [f"{name} {median(result[name]) * 1e3:.1f} ms" for name in ("recommend", "score")]
    gain = shown_ratio(result["score"], result["recommend"])
    text = f"one user, {result['items']:,} items: {', '.join(ways)}, ratio {gain}"
    if flags.limits:
        result["limits"] = costs(model)
        text = render(result)
    finish("recommend", result, text, flags, page=DOCS / "serving.md", marks=MARKS)


def measure(model: ServedModel, rounds: int) -> dict[str, Any]:
    """Seconds of both ways in each round, and the largest difference of the best items' scores."""
    schema, vocabulary = model.snapshot.schema, model.snapshot.vocabulary
    items = list(vocabulary[schema.item])
    user = next(iter(vocabulary[schema.user]))
    # Once, for the vectors of the items and what torch allocates at first.
    best = model.recommend([user], K)[0]
    everything = {schema.user: [user] * len(items), schema.item: items}
    scores = dict(zip(items, model.score(everything).tolist(), strict=True))
    recommended, scored = [], []
    for _ in range(rounds):
        recommended.append(_seconds(lambda: model.recommend([user], K)))
        scored.append(_seconds(lambda: model.score(everything)))
    difference = max(abs(scores[item] - score) for item, score in best)
    return {"items": len(items), "recommend": recommended, "score": scored, "difference": difference}


def costs(model: ServedModel) -> list[dict[str, Any]]:
    """Seconds, and bytes beyond those before the first one, of the largest answers of each kind."""
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
    # Before the first: the allocator keeps what one answer has freed for the next.
    found, before = [], most_memory()
    for name, ask in asked.items():
        # The kernel counts the most memory anew.
        Path("/proc/self/clear_refs").write_text("5")
        seconds = _seconds(lambda ask=ask: json.dumps(ask()))  # type: ignore[misc]
        found.append({"what": name, "seconds": seconds, "bytes": most_memory() - before})
    return found


def some_of(ids: list[Any], number: int) -> list[Any]:
    """So many ids, from the first again where there are fewer."""
    return [*itertools.islice(itertools.cycle(ids), number)]


def most_memory() -> int:
    """The most bytes in memory since the kernel began to count."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def render(result: dict[str, Any]) -> str:
    """The costs as a table, and where they come from."""
    lines = [("one answer", "seconds", "MiB"), ("---", "---:", "---:")]
    lines += [
        (each["what"], f"{each['seconds']:.1f}", f"{each['bytes'] / 2**20:.0f}") for each in result["limits"]
    ]
    return f"{table(lines)}\n\nMeasured on {origin(result['about'])}."


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Scores that are those of pairs, at a cost below theirs."""
    difference, gain = result["difference"], ratio(result["score"], result["recommend"])
    return [
        bar("largest difference", difference, TOLERANCE, f"{difference:.1e}", f"{TOLERANCE:g}", at_most=True),
        bar("scoring every item, times the cost of recommending", gain, 1, f"{gain:.1f}", "1"),
    ]


if __name__ == "__main__":
    main()
