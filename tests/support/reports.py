"""Reports of runs as a training writes them, made by hand, so that what the page shows has a known answer."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from recsuite.monitoring.page import draw
from recsuite.monitoring.runs import find_runs

# Without what newer reports say besides: the page has to read this as well.
REPORT: dict[str, Any] = {
    "date": "2026-11-21T10:00:00+00:00",
    "config": {
        "task": "ranking",
        "lr": 0.04,
        "epochs": 2,
        "mlp_dims": [64, 32],
        "split": "time",
        "report_dir": "here",
    },
    "versions": {"torch": "2.13.0"},
    "world_size": 2,
    "device": "cpu",
    "threads_per_rank": 1,
    "data": {"source": "/somewhere/ml-1m", "num_test": 20_000},
    "plan": ["table  rows", "movie  1,234"],
    "baselines": {"biases": {"rmse": 0.9, "hr@10": None}, "oracle": {"rmse": 0.5, "hr@10": 0.9}},
    "epochs": [
        {"epoch": 1, "train_loss": 0.95, "validation": {"rmse": 0.9111, "hr@10": 0.1}, "data_wait": 0.011},
        {"epoch": 2, "train_loss": 0.85, "validation": {"rmse": 0.8222, "hr@10": None}, "data_wait": 0.02},
    ],
    "test": {"rmse": 0.8123, "hr@10": 0.2345},
    "time": {"imports": 2.25, "steps": 6.75, "other": 0.0},
}


def write_run(folder: Path, **changes: Any) -> Path:
    """A run of which some things are different; None leaves them out."""
    report = {**copy.deepcopy(REPORT), **changes}
    folder.mkdir(parents=True)
    found = {name: value for name, value in report.items() if value is not None}
    (folder / "metrics.json").write_text(json.dumps(found))
    return folder


def page(*folders: Path) -> str:
    return draw(find_runs(folders))


def text_of(html: str) -> str:
    """What a reader sees, without what is inside the head."""
    return " ".join(re.sub(r"<[^>]*>", " ", html[html.index("<body>") :]).split())
