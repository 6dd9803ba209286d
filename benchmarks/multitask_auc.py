"""Train multitask.py on both labels of its synthetic shop, and on each alone.

    PYTHONPATH=example python benchmarks/multitask_auc.py --write      docs/multitask.md: five minutes

The shops are those of seeds 1 and 2: the flags of the script were chosen on that of seed 0. Each training is
one process, with the flags that the script has by itself. Measures; asserts nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from environment import DOCS, EXAMPLE, describe, finish, in_words, make_parser
from figures import bar

PAGE, MARKS = DOCS / "multitask.md", ("<!-- made by benchmarks/multitask_auc.py -->", "<!-- end -->")
WAYS = {"both": ("purchase", "click"), "purchase": ("purchase",), "click": ("click",)}
SEEDS = (1, 2)
# Of what taste adds to the AUC of purchases, the share by which both labels have to beat one.
SHARE = 0.5


def main() -> None:
    """Measure and show."""
    flags = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        shops = [measure(Path(name, str(seed)), seed) for seed in SEEDS]
    result: dict[str, Any] = {"about": describe(), "shops": shops}
    result["bars"] = judge(result)
    finish("multitask_auc", result, render(result), flags, page=PAGE, marks=MARKS)


def measure(folder: Path, seed: int) -> dict[str, Any]:
    """Metrics of each training on the test of a shop, and what is known of the shop."""
    found: dict[str, Any] = {"seed": seed}
    for way, labels in WAYS.items():
        shop, report = folder / way, folder / f"report-{way}"
        write: list[str | Path] = [EXAMPLE.with_name("shop_log.py"), shop, "--labels", *labels]
        train: list[str | Path] = [EXAMPLE.with_name("multitask.py"), "--data_path", shop]
        for command in ([*write, "--seed", str(seed)], [*train, "--report_dir", report]):
            subprocess.run([sys.executable, *command], check=True)
        metrics = json.loads((report / "metrics.json").read_text())
        seconds = sum(epoch["seconds"] for epoch in metrics["epochs"])
        found[way] = {**metrics["test"], "seconds": seconds}
    return {**found, "oracle": json.loads((folder / "both" / "_oracle.json").read_text())}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked for beside what was measured."""
    bars = []
    for shop in result["shops"]:
        taste = shop["oracle"]["auc"] - shop["oracle"]["without_taste"]
        share = (shop["both"]["auc"] - shop["purchase"]["auc"]) / taste
        name = f"shop {shop['seed']}: AUC of purchases, both labels above one, / what taste adds"
        bars.append(bar(name, share, SHARE, f"{share:.2f}", f"{SHARE}"))
    return bars


def render(result: dict[str, Any]) -> str:
    """The table of the page."""
    shops = result["shops"]

    def row(name: str, *values: float) -> str:
        cells = [f"{value:.4f}" for value in values]
        return f"| {name} | {' | '.join([*cells, *[''] * (4 - len(cells))])} |"

    def mean(way: str, metric: str) -> float:
        return fmean(shop[way][metric] for shop in shops)

    lines = [
        "| trained on | AUC of purchases | log loss | AUC of clicks | log loss |",
        "| --- | ---: | ---: | ---: | ---: |",
        row("the probabilities that were drawn from", mean("oracle", "auc")),
        row("the same without taste", mean("oracle", "without_taste")),
        row("both", *(mean("both", name) for name in ("auc", "log_loss", "click_auc", "click_log_loss"))),
        row("purchases alone", mean("purchase", "auc"), mean("purchase", "log_loss")),
        f"| clicks alone | | | {mean('click', 'auc'):.4f} | {mean('click', 'log_loss'):.4f} |",
    ]
    seconds = fmean(shop["both"]["seconds"] for shop in shops)
    about = in_words(result["about"])
    return "\n".join(
        [
            *lines,
            "",
            f"Means of shops {SEEDS[0]} and {SEEDS[1]}, {seconds:.0f} s with both; one process; {about}",
        ]
    )


if __name__ == "__main__":
    main()
