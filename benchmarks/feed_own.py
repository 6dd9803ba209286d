"""Tables as people have their own, for benchmarks/feed.py: numbers, features of the event, and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from drawn_events import FIRST_TIME, YEAR, blocks_of, skewed_ids, write_parquet

SCHEMA = """\
[user]
column = "user_id"
[item]
column = "item_id"
[label]
kind = "rating"
column = "stars"
lowest = 1.0
highest = 5.0
[weight]
column = "trust"
[timestamp]
column = "time"
format = "unix"
[features.age]
of = "user"
column = "age"
kind = "number"
input = "buckets"
[features.price]
of = "item"
column = "price"
kind = "number"
input = "dense"
[features.discount]
of = "event"
column = "discount"
kind = "number"
input = "dense"
[features.device]
of = "event"
column = "device"
kind = "category"
[features.channel]
of = "event"
column = "channel"
kind = "category"
[features.hour]
of = "event"
column = "hour(timestamp)"
kind = "category"
"""
DEVICES = ("phone", "desktop", "tablet")
CHANNELS = ("search", "mail", "shop", "advertisement", "friend")
# As many users and items as the synthetic ratings have, at 20 million.
EVENTS_PER_USER, EVENTS_PER_ITEM = 165, 1_150


def write_own_tables(folder: Path, number: int) -> None:
    """Write so many events with their users, items and a schema.toml, drawn from a seed, unless they are
    there.
    """
    # It is written last, so that what was interrupted is written again.
    schema = folder / "schema.toml"
    if schema.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    num_users, num_items = max(1, number // EVENTS_PER_USER), max(1, number // EVENTS_PER_ITEM)
    write_parquet(folder / "users.parquet", [_users(draw, num_users)])
    write_parquet(folder / "items.parquet", [_items(draw, num_items)])
    times = FIRST_TIME + YEAR * np.linspace(0, 1, number)
    write_parquet(
        folder / "events.parquet",
        (_events(draw, times[part.start : part.stop], num_users, num_items) for part in blocks_of(number)),
    )
    schema.write_text(SCHEMA)


def _users(draw: np.random.Generator, number: int) -> dict[str, Any]:
    return {"user_id": np.arange(number), "age": draw.integers(18, 80, number)}


def _items(draw: np.random.Generator, number: int) -> dict[str, Any]:
    return {"item_id": np.arange(number), "price": np.exp(draw.normal(3, 1, number))}


def _events(draw: np.random.Generator, times: np.ndarray, num_users: int, num_items: int) -> dict[str, Any]:
    number = len(times)
    discount = draw.random(number)
    # Some events have none.
    discount[::9] = np.nan
    user, item = skewed_ids(draw, num_users, num_items, number)
    return {
        "user_id": user,
        "item_id": item,
        "stars": draw.integers(1, 6, number).astype(np.float32),
        "trust": draw.integers(1, 4, number).astype(np.float32),
        "time": times.astype(np.int64),
        "discount": discount,
        "device": np.take(DEVICES, draw.integers(0, len(DEVICES), number)),
        "channel": np.take(CHANNELS, draw.integers(0, len(CHANNELS), number)),
    }
