"""Columns of fixed data change only with VERSION."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.columns import VERSION
from recsuite.datasets.preparation.cache import open_columns
from tests.support.stream_reader import read, reader_of

# Where columns of these data change, raise VERSION of recsuite/datasets/columns.py and write the new digests
# here: else trainings go on with what the earlier code made.
OF_VERSION = 7
DIGESTS = {
    "movielens, time": "fffb507096c8140f",
    "movielens, random": "27cc18735052cd29",
    "movielens, leave_one_out": "c2198aea30205867",
    "own, time": "77e648b81f71940d",
    "own, random": "54dca33b7379755b",
    "own, leave_one_out": "88d3e07c9a2215d5",
    "own, stream": "378f23b1ae505939",
}

# As many events as there are places without a hole; the times have ties.
PAIRS = [(user, item) for user in range(1, 16) for item in range(1, 26) if (2 * user + item) % 3]
TIMES = [1_000_000_000 + 43_200 * ((7 * user + 3 * item) % 61) for user, item in PAIRS]
LABELS = [1 + (user * item) % 5 for user, item in PAIRS]
KINDS = ["Drama", "Comedy|War", "Drama|War", "Crime"]
SCHEMA = """
[user]
column = "user"
[item]
column = "item"
[label]
kind = "rating"
column = "stars"
[timestamp]
column = "when"
format = "unix"
[features.country]
of = "user"
column = "country"
kind = "category"
[features.price]
of = "item"
column = "price"
kind = "number"
[features.weight]
of = "item"
column = "weight"
kind = "number"
input = "dense"
[features.tags]
of = "item"
column = "tags"
kind = "list"
separator = "|"
[features.device]
of = "event"
column = "device"
kind = "category"
[features.item_age]
of = "event"
column = "age_days(item.released)"
kind = "number"
[features.hour]
of = "event"
column = "hour(timestamp)"
kind = "category"
"""


def digest_of(value: Any) -> Any:
    """Return the bytes to digest: floats only to some digits, because libraries may add in another order."""
    if isinstance(value, np.ndarray):
        names = value.dtype.names
        if names:
            return [[name, digest_of(np.ascontiguousarray(value[name]))] for name in names]
        value = np.round(value.astype(np.float64), 4) + 0.0 if value.dtype.kind == "f" else value
        return [value.dtype.str, value.shape, value.tobytes().hex()]
    if isinstance(value, dict):
        return {name: digest_of(each) for name, each in value.items()}
    if isinstance(value, list):
        return [digest_of(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def digest_of_columns(folder: Path) -> str:
    """Of all that the files of columns, and of the parts that they are made from, hold."""
    held: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        held[path.name] = digest_of(np.load(path) if path.suffix == ".npy" else json.loads(path.read_text()))
    # Digests of bytes, of which some are floats.
    for name in ("digest", "files", "seal"):
        held["manifest.json"].pop(name, None)
    # What was read of tables is kept beside the columns.
    held["parts"] = sorted(path.read_bytes().hex() for path in folder.parent.glob("parts/*/*/*.bin"))
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]


def write_movielens(folder: Path) -> None:
    lines = zip(PAIRS, LABELS, TIMES, strict=True)
    ratings = [f"{user}::{item}::{label}::{time}" for (user, item), label, time in lines]
    users = [f"{user}::{'MF'[user % 2]}::{(1, 18, 25)[user % 3]}::{user % 4}::00000" for user in range(1, 16)]
    movies = [f"{item}::Movie {item} ({1990 + item})::{KINDS[item % 4]}" for item in range(1, 26)]
    for name, rows in (("ratings", ratings), ("users", users), ("movies", movies)):
        (folder / f"{name}.dat").write_text("".join(f"{row}\n" for row in rows), encoding="latin-1")


def write_own(folder: Path) -> None:
    lines = zip(PAIRS, LABELS, TIMES, strict=True)
    events = ["user,item,stars,when,device,country"]
    events += [
        f"u{user},{item},{label},{time},{'phone' if item % 2 else 'desk'},{('DE', 'FR', '')[user % 3]}"
        for (user, item), label, time in lines
    ]
    items = ["item,price,weight,tags,released"]
    items += [
        f"{item},{item * 1.25},{item % 7 or ''},{KINDS[item % 4]},2001-0{item % 9 + 1}-07"
        for item in range(1, 26)
    ]
    for name, rows in (("events.csv", events), ("items.csv", items), ("schema.toml", [SCHEMA])):
        (folder / name).write_text("".join(f"{row}\n" for row in rows))


@pytest.mark.parametrize("kind", DIGESTS)
def test_columns_of_fixed_data_change_only_with_a_new_version(kind: str, tmp_path: Path) -> None:
    whose, split = kind.split(", ")
    (write_movielens if whose == "movielens" else write_own)(tmp_path)
    how: dict[str, Any] = (
        {"stream": True}
        if split == "stream"
        else {"split": split, "day_feature": "user" if split == "random" else "none"}
    )
    config = Config.of(data_path=str(tmp_path), validation_fraction=0.01, **how)
    columns = read(reader_of(config), config) if split == "stream" else open_columns(config)
    found = digest_of_columns(Path(columns.folder))
    assert (VERSION, found) == (OF_VERSION, DIGESTS[kind]), (
        "columns have changed: raise VERSION of recsuite/datasets/columns.py, and write both above"
    )
