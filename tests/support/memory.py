"""Memory of processes, and data of any size for them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from recsuite.datasets.arrays import FeatureArrays, write_records
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.schema import Table

NUM_USERS, NUM_MOVIES = 6000, 4000


def planted_columns(folder: Path, number: int) -> Columns:
    """Columns of random ratings, without the files that they would come from."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    fields = {
        "user": rng.integers(0, NUM_USERS, number, np.int32),
        "item": rng.integers(0, NUM_MOVIES, number, np.int32),
        "label": np.ones(number, np.float32),
        "history_end": np.zeros(number, np.int32),
    }
    write_records(folder / "rows.npy", fields, FeatureArrays())
    write_records(
        folder / "user_features.npy", {}, FeatureArrays([*rng.integers(0, 9, (4, NUM_USERS), np.int32)])
    )
    # Each movie has one genre.
    genres = np.stack([rng.integers(0, 9, NUM_MOVIES, np.int32), np.ones(NUM_MOVIES, np.int32)], axis=1)
    of_movies = FeatureArrays([*rng.integers(0, 9, (2, NUM_MOVIES), np.int32)], [genres])
    write_records(folder / "movie_features.npy", {}, of_movies)
    np.save(folder / "genres_values.npy", np.arange(9, dtype=np.int32))
    tables = tuple(Table(feature, 9) for feature in SCHEMA.features)
    num_train = number - 1000
    return Columns(
        str(folder), "", SCHEMA, num_train, 0, 1000, 0, NUM_USERS, NUM_MOVIES, 3.5, 0, tables, (), {}, ()
    )


def memory(pid: int | str) -> dict[str, float]:
    """MiB of a process by what they are: its own, the ring, the columns (page cache, shared by all).

    Its own are PSS, so that they change with the processes that share its libraries; what it has allocated
    is "anonymous".
    """
    found = {"own": 0.0, "ring": 0.0, "columns": 0.0, "anonymous": 0.0}
    kind = "own"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            kind = "columns" if line.endswith(".npy") else "ring" if "memfd:batches" in line else "own"
        elif line.startswith("Pss:"):
            found[kind] += int(line.split()[1]) / 1024
        elif line.startswith("Anonymous:") and kind == "own":
            found["anonymous"] += int(line.split()[1]) / 1024
    return found
