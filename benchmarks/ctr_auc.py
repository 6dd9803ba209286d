"""Train the models of ctr.py on its synthetic log, and hold their AUC against the best possible one.

    PYTHONPATH=example python benchmarks/ctr_auc.py --write      docs/ctr.md: three minutes

Each model is trained once, on one process, with the flags that the script has by itself. Measures; asserts
nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environment import DOCS, EXAMPLE, describe, finish, in_words, make_parser
from figures import bar

PAGE, MARKS = DOCS / "ctr.md", ("<!-- ctr: made by benchmarks/ctr_auc.py -->", "<!-- end of ctr -->")
MODELS = ("dlrm", "dcn", "linear")
# How far from the best AUC a model with crosses may be, and one without is.
NEAR, FAR = 0.002, 0.01


def main() -> None:
    """Measure and show."""
    flags = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        result: dict[str, Any] = {"about": describe(), **measure(Path(name))}
    result["bars"] = judge(result)
    finish("ctr_auc", result, render(result), flags, page=PAGE, marks=MARKS)


def measure(folder: Path) -> dict[str, Any]:
    """Metrics of each model on the test, the seconds of its epochs, and what is known of the log."""
    log = folder / "log"
    subprocess.run([sys.executable, EXAMPLE.with_name("criteo_log.py"), log], check=True)
    models = {}
    for model in MODELS:
        command: list[str | Path] = [EXAMPLE.with_name("ctr.py"), "--model", model, "--data_path", log]
        subprocess.run([sys.executable, *command, "--report_dir", folder / model], check=True)
        report = json.loads((folder / model / "metrics.json").read_text())
        models[model] = {**report["test"], "seconds": sum(epoch["seconds"] for epoch in report["epochs"])}
    return {"oracle": json.loads((log / "_oracle.json").read_text()), "models": models}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked for beside what was measured."""
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
    """The table of the page."""
    best = result["oracle"]["auc"]
    lines = [
        "| `--model` | AUC | below the best | log loss | calibration | training |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| the probabilities that were drawn from | {best:.4f} | 0 | | | |",
        *(
            f"| `{name}` | {found['auc']:.4f} | {best - found['auc']:.4f} | {found['log_loss']:.4f} | "
            f"{found['calibration']:.3f} | {found['seconds']:.0f} s |"
            for name, found in result["models"].items()
        ),
    ]
    return "\n".join([*lines, "", f"One process, seed 0; {in_words(result['about'])}"])


if __name__ == "__main__":
    main()
