"""Small data sets of partitions: events of users with a planted rank, as DuckDB and Spark write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet

SCHEMA = """
[user]
column = "user"

[item]
column = "item"

{label}
[timestamp]
column = "time"
format = "unix"

[features.city]
of = "user"
kind = "category"
column = "city"

[features.kind]
of = "item"
kind = "list"
column = "kind"
separator = "|"

[features.price]
of = "item"
kind = "number"
column = "price"

[features.age]
of = "user"
kind = "number"
column = "age"

[features.device]
of = "event"
kind = "category"
column = "device"

[features.hours]
of = "event"
kind = "number"
column = "hours"
"""
RATING = """[label]
column = "rating"
kind = "rating"
lowest = 1.0
highest = 5.0
"""
CLICKS = """[label]
kind = "clicks"
"""
LABELS = """[[label]]
column = "liked"
kind = "yes_no"

[[label]]
column = "bought"
kind = "yes_no"

[weight]
column = "weight"

"""
SPLITS = ("train", "validation", "test")


def log(num_users: int = 90, num_items: int = 40, number: int = 6_000, seed: int = 0) -> pandas.DataFrame:
    """Events with properties of users and items, in the order of time; a pair has one event."""
    rng = np.random.default_rng(seed)
    # Some users and items have far more events than others.
    user = (num_users * rng.random(3 * number) ** 1.5).astype(int)
    item = (num_items * rng.random(3 * number) ** 1.5).astype(int)
    pairs = pandas.DataFrame({"user": user, "item": item}).drop_duplicates()[:number]
    user, item = pairs["user"].to_numpy(), pairs["item"].to_numpy()
    factors = rng.normal(size=(num_users, 2)), rng.normal(size=(num_items, 2))
    score = 3 + rng.normal(0, 0.7, num_users)[user] + rng.normal(0, 0.7, num_items)[item]
    score += (factors[0][user] * factors[1][item]).sum(axis=1) / 2
    count = len(pairs)
    return pandas.DataFrame(
        {
            "user": user + 1_000,
            "item": item + 1,
            "rating": np.clip(np.rint(score), 1, 5),
            "time": 1_600_000_000 + np.sort(rng.integers(0, 10**7, count)),
            "device": np.array(["phone", "desk", None], object)[rng.integers(0, 3, count)],
            "hours": np.float32(rng.exponential(2, count)),
            "split": np.repeat(SPLITS, [count - 2 * (count // 8), count // 8, count // 8]),
        }
    )


def users_of(events: pandas.DataFrame) -> pandas.DataFrame:
    """The table of users."""
    ids = np.sort(events["user"].unique())
    cities = np.array(["Bern", "Genf", "Ulm", "Wien"])
    ages = np.random.default_rng(1).integers(16, 80, len(ids)).astype(float)
    return pandas.DataFrame({"user": ids, "city": cities[np.arange(len(ids)) % 4], "age": ages})


def items_of(events: pandas.DataFrame) -> pandas.DataFrame:
    """The table of items, which lacks the last ones."""
    ids = np.sort(events["item"].unique())[:-3]
    kinds = np.array(["new", "old|used", "new|rare"])
    prices = np.random.default_rng(2).exponential(10, len(ids))
    return pandas.DataFrame({"item": ids, "kind": kinds[np.arange(len(ids)) % 3], "price": prices})


def partition_of(users: pandas.Series, number: int) -> np.ndarray:
    """Partition of each user; the first one has most of them."""
    numbers = users.astype(str).str.lstrip("u").astype(int).to_numpy()
    hashed = numbers * 2654435761 % 2**32 / 2**32
    return np.floor(number * hashed**1.5).astype(int)


def write_parquet(path: Path, frame: pandas.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pandas(frame, preserve_index=False), path)


def write_partitions(
    folder: Path,
    number: int,
    events: pandas.DataFrame | None = None,
    label: str = RATING,
    own_users: bool = True,
) -> Path:
    """Write a data set of partitions, and return its folder. own_users: the table of users has partitions."""
    events = log() if events is None else events
    part = partition_of(events["user"], number)
    columns = [name for name in events if name != "split" and (name != "rating" or "rating" in label)]
    for partition in range(number):
        (folder / "events" / f"part={partition:05d}").mkdir(parents=True)
        for split in SPLITS:
            some = events[(part == partition) & (events["split"] == split)]
            if len(some):
                path = folder / "events" / f"part={partition:05d}" / f"split={split}" / "data_0.parquet"
                write_parquet(path, some[columns])
    users = users_of(events)
    if own_users:
        part = partition_of(users["user"], number)
        for partition in np.unique(part):
            write_parquet(
                folder / "users" / f"part={partition:05d}" / "data_0.parquet", users[part == partition]
            )
    else:
        write_parquet(folder / "users.parquet", users)
    write_parquet(folder / "items.parquet", items_of(events))
    (folder / "schema.toml").write_text(SCHEMA.format(label=label))
    return folder


def with_more_labels(events: pandas.DataFrame) -> pandas.DataFrame:
    """Events with two labels, the second of which some lack, and a weight."""
    number, ratings = np.arange(len(events)), events["rating"]
    bought = np.where(number % 3 == 0, np.nan, (ratings > 4).astype(float))
    return events.assign(liked=(ratings > 3).astype(int), bought=bought, weight=1.0 + number % 4)


def with_texts(events: pandas.DataFrame) -> pandas.DataFrame:
    """Events whose ids are texts."""
    return events.assign(user="u" + events["user"].astype(str), item="i" + events["item"].astype(str))
