"""Train the models of ctr.py on its synthetic log, and compare their AUC with the best possible one.

    PYTHONPATH=example python benchmarks/ctr_auc.py --write      docs/ctr.md: three minutes

Each model is trained once, on one process, with the defaults of the script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import DOCS, EXAMPLE, bar, describe, finish, make_parser, origin, table, train

PAGE = DOCS / "ctr.md"
MODELS = ("dlrm", "dcn", "linear")
# Largest distance from the best AUC of a model with crosses, and least of one without.
NEAR, FAR = 0.002, 0.01


def main() -> None:
    """Measure and show, and write if that is asked for."""
    finish("ctr_auc", make_parser(__doc__).parse_args(), measure, judge, render, PAGE, mark="ctr")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Test metrics of each model, the seconds of its epochs, and the oracle of the log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        subprocess.run([sys.executable, EXAMPLE.with_name("criteo_log.py"), log], check=True)
        models = {}
        for model in MODELS:
            report = train("--model", model, "--data_path", log, script=EXAMPLE.with_name("ctr.py"))
            models[model] = {**report["test"], "seconds": sum(each["seconds"] for each in report["epochs"])}
        oracle = json.loads((log / "_oracle.json").read_text())
    return {"about": describe(), "oracle": oracle, "models": models}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    best = result["oracle"]["auc"]
    below = {name: best - found["auc"] for name, found in result["models"].items()}
    return [
        bar(
            f"{name}, AUC below the best",
            below[name],
            FAR if name == "linear" else NEAR,
            f"{below[name]:.4f}",
            f"{FAR if name == 'linear' else NEAR}",
            at_most=name != "linear",
        )
        for name in MODELS
    ]


def render(result: dict[str, Any]) -> str:
    """Table and origin."""
    best = result["oracle"]["auc"]
    heads = ["`--model`", "AUC", "below the best", "log loss", "calibration", "training"]
    lines = [["true probabilities", f"{best:.4f}", "0", "", "", ""]]
    for name, found in result["models"].items():
        metrics = [found["auc"], best - found["auc"], found["log_loss"]]
        cells = [*(f"{value:.4f}" for value in metrics), f"{found['calibration']:.3f}"]
        lines.append([f"`{name}`", *cells, f"{found['seconds']:.0f} s"])
    about = origin(result["about"], fbgemm=True)
    return f"{table(heads, lines)}\n\nOne process, seed 0; {about}."


if __name__ == "__main__":
    main()
