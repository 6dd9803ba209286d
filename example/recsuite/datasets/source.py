"""The family of data sets that the program reads: MovieLens. Only here, and in `movielens`, is that said.

Another family takes its place by offering the same names: its schema, the sizes of its known sets, the folder
for those that are downloaded, the deadlines for that, and the functions that find, obtain and read its files.
"""

from __future__ import annotations

from recsuite.datasets.movielens.formats import (
    DATA_DEADLINE,
    DATA_ROOT,
    PREPARATION_DEADLINE,
    find_files,
    locate,
    read,
    source_files,
)
from recsuite.datasets.movielens.formats import NUM_RATINGS as NUM_EVENTS
from recsuite.datasets.movielens.schema import SCHEMA

__all__ = [
    "DATA_DEADLINE",
    "DATA_ROOT",
    "NUM_EVENTS",
    "PREPARATION_DEADLINE",
    "SCHEMA",
    "find_files",
    "locate",
    "read",
    "source_files",
]
