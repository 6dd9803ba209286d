"""Ratings of a shop, week by week, and the retrain of a Monday."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas

from tests.support.launch import python

USERS, ITEMS, RATINGS = 120, 60, 6_000
SMALL = ("--epochs", "2", "--batch_size", "512")


def shop() -> pandas.DataFrame:
    """Ratings of three weeks; a third of the items is new in each week."""
    draw = np.random.default_rng(0)
    week = np.arange(RATINGS) * 3 // RATINGS
    item = (draw.random(RATINGS) * (week + 1) * ITEMS / 3).astype(int)
    user = draw.integers(0, USERS, RATINGS)
    u, v = draw.normal(size=(USERS, 2)), draw.normal(size=(ITEMS, 2))
    stars = 3 + (u[user] * v[item]).sum(axis=1) + 0.3 * draw.normal(size=RATINGS)
    seconds = 1_767_225_600 + week * 604_800 + draw.integers(0, 604_800, RATINGS)
    frame = pandas.DataFrame(
        {
            "customer": [f"c{each:03d}" for each in user],
            "product": [f"p{each:02d}" for each in item],
            "stars": stars.clip(1, 5).round(1),
            "when": pandas.to_datetime(seconds, unit="s"),
            "price": 5.0 + item,
        }
    )
    return frame.sort_values("when", ignore_index=True)


SCHEMA = """
[user]
column = "customer"
[item]
column = "product"
[label]
kind = "rating"
column = "stars"
lowest = 1.0
highest = 5.0
liked = 4.0
[timestamp]
column = "when"
[features.price]
of = "item"
column = "price"
kind = "number"
input = "buckets"
"""


def write_weeks(folder: Path, number: int, frame: pandas.DataFrame | None = None) -> Path:
    """Write the events of the first weeks, as a shop has them on a Monday."""
    frame = shop() if frame is None else frame
    folder.mkdir(exist_ok=True)
    frame.head(len(frame) * number // 3).to_parquet(folder / "events.parquet")
    (folder / "schema.toml").write_text(SCHEMA)
    return folder


def retrain(data: Path, models: object, *flags: object, **options: Any) -> Any:
    """Call it as a user does, with a folder or a URL of models."""
    words = ("--nproc_per_node", 1, "--save_dir", models, "--data_path", data, *SMALL, *flags)
    return python("-m", "recsuite.extras.retrain", *words, timeout=200, **options)
