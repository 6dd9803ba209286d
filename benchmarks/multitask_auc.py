"""Train multitask.py on both labels of its synthetic shop, and on each alone.

    PYTHONPATH=example python benchmarks/multitask_auc.py --write      docs/multitask.md: five minutes

The shops are those of seeds 1 and 2: the flags of the script were chosen on that of seed 0. Each training is
one process, with the defaults of the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import DOCS, EXAMPLE, bar, describe, finish, make_parser, mean, origin, table, train

PAGE = DOCS / "multitask.md"
WAYS = {"both": ("purchase", "click"), "purchase": ("purchase",), "click": ("click",)}
METRICS = ("auc", "log_loss", "click_auc", "click_log_loss")
SEEDS = (1, 2)
# Least gain of both labels over one, as a share of the gain in AUC of purchases that taste allows.
SHARE = 0.5


def main() -> None:
    """Measure and show, and write if that is asked for."""
    finish("multitask_auc", make_parser(__doc__).parse_args(), measure, judge, render, PAGE, mark="multitask")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory() as folder:
        shops = [measure_shop(Path(folder, str(seed)), seed) for seed in SEEDS]
    return {"about": describe(), "shops": shops}


def measure_shop(folder: Path, seed: int) -> dict[str, Any]:
    """Test metrics of each training, and the oracle of the shop."""
    found: dict[str, Any] = {"seed": seed}
    for way, labels in WAYS.items():
        shop = folder / way
        write: list[str | Path] = [
            EXAMPLE.with_name("shop_log.py"),
            shop,
            "--labels",
            *labels,
            "--seed",
            str(seed),
        ]
        subprocess.run([sys.executable, *write], check=True)
        report = train("--data_path", shop, script=EXAMPLE.with_name("multitask.py"))
        found[way] = {**report["test"], "seconds": sum(epoch["seconds"] for epoch in report["epochs"])}
    return {**found, "oracle": json.loads((folder / "both" / "_oracle.json").read_text())}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    bars = []
    for shop in result["shops"]:
        taste = shop["oracle"]["auc"] - shop["oracle"]["without_taste"]
        share = (shop["both"]["auc"] - shop["purchase"]["auc"]) / taste
        name = f"shop {shop['seed']}: AUC of purchases, both labels above one, / what taste adds"
        bars.append(bar(name, share, SHARE, f"{share:.2f}", f"{SHARE}"))
    return bars


def render(result: dict[str, Any]) -> str:
    """Table and origin."""
    shops = result["shops"]

    def cells(way: str, *metrics: str) -> list[str]:
        shown = {name: f"{mean(shop[way][name] for shop in shops):.4f}" for name in metrics}
        return [shown.get(name, "") for name in METRICS]

    lines = [
        ["true probabilities", *cells("oracle", "auc")],
        [
            "true probabilities without taste",
            f"{mean(s['oracle']['without_taste'] for s in shops):.4f}",
            "",
            "",
            "",
        ],
        ["both", *cells("both", *METRICS)],
        ["purchases alone", *cells("purchase", "auc", "log_loss")],
        ["clicks alone", "", "", *(f"{mean(s['click'][n] for s in shops):.4f}" for n in ("auc", "log_loss"))],
    ]
    heads = ["trained on", "AUC of purchases", "log loss", "AUC of clicks", "log loss"]
    seconds = mean(shop["both"]["seconds"] for shop in shops)
    about = (
        f"Means of shops {SEEDS[0]} and {SEEDS[1]}, {seconds:.0f} s with both; one process; "
        f"{origin(result['about'], fbgemm=True)}."
    )
    return f"{table(heads, lines)}\n\n{about}"


if __name__ == "__main__":
    main()
