"""Measure what `ServedModel.recommend` costs beside scoring every item as a caller would do it by itself.

    python benchmarks/recommend.py SAVE_DIR        a folder of checkpoints, or an export

Both are timed in turns for one user, with the items' vectors kept from before, as in a server. Prints
milliseconds, their ratio, and the largest difference of a score. Measures; asserts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from environment import describe, finish, make_parser
from figures import bar, ratio, shown_ratio

from recsuite.serving.served import ServedModel

# Scores are the same but for rounding.
TOLERANCE = 1e-6
K = 50


def main() -> None:
    """Measure and show."""
    parser = make_parser(__doc__)
    parser.add_argument("save_dir", type=Path, help="folder of checkpoints, or an export")
    parser.add_argument("--rounds", type=int, default=9, help="of both, in turns")
    flags = parser.parse_args()
    model = ServedModel.open(flags.save_dir)
    result = {"about": describe(), **measure(model, flags.rounds)}
    result["bars"] = judge(result)
    ways = [f"{name} {median(result[name]) * 1e3:.1f} ms" for name in ("recommend", "score")]
    gain = shown_ratio(result["score"], result["recommend"])
    text = f"one user, {result['items']:,} items: {', '.join(ways)}, ratio {gain}"
    finish("recommend", result, text, flags)


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
