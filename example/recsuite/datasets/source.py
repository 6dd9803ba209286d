"""The family of data sets that the program reads: MovieLens. Only here, and in `movielens`, is that said.

Another family takes its place by offering the same names: its schema, the sizes of its known sets, the folder
for those that are downloaded, the deadlines for that, and the functions that find, obtain and read its files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from recsuite.config.sections.data import DataConfig
from recsuite.datasets.movielens.formats import (
    DATA_DEADLINE,
    DATA_ROOT,
    PREPARATION_DEADLINE,
    find_files,
    locate,
    source_files,
)
from recsuite.datasets.movielens.formats import NUM_RATINGS as NUM_EVENTS
from recsuite.datasets.movielens.formats import read as read_files
from recsuite.datasets.movielens.parsing.reader import Layout
from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.datasets.preparation.duplicates import settle
from recsuite.datasets.schema import ITEM, USER, RawData

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


def read(folder: Path, layout: Layout, config: DataConfig) -> RawData:
    """Read all files of a set, with what --duplicates leaves of several events of one user and one item;
    users and items in the order of their ids.

    Raises:
        UserError: when a file is missing, damaged, or has rows that --bad_rows does not accept.
    """
    # Both here, so that no family of data sets has to remember it.
    return _ordered(settle(read_files(folder, layout, config), config.duplicates, SCHEMA))


def _ordered(raw: RawData) -> RawData:
    """Users and items in the order of their ids: their places, and so every tie between them, must not come
    from the order of a file.
    """
    frames = {USER: raw.users, ITEM: raw.items}
    for entity, frame in frames.items():
        if not frame[SCHEMA.column_of(entity)].is_monotonic_increasing:
            frames[entity] = frame.sort_values(SCHEMA.column_of(entity), ignore_index=True)
    return dataclasses.replace(raw, users=frames[USER], items=frames[ITEM])
