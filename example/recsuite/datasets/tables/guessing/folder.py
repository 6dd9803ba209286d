"""Which of a folder's tables are the events, the users and the items, where their names do not say."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pyarrow as pa

from recsuite.datasets.tables.files import Tables
from recsuite.datasets.tables.formats import first_rows
from recsuite.datasets.tables.guessing.contents import contents_of, plain_table
from recsuite.datasets.tables.guessing.features import title_of
from recsuite.datasets.tables.guessing.roles import Roles, roles_of
from recsuite.datasets.tables.schema_file import Files
from recsuite.datasets.tables.sources.file import File
from recsuite.errors import UserError

# More files than this are parts of one table.
MOST_TABLES = 20
# Enough to tell ids from properties.
SAMPLED_ROWS = 2_000


def files_of(tables: Tables) -> Files:
    """The section that names the tables of a folder, where these have different columns; else the usual one.

    Raises:
        UserError: for a file that cannot be read.
    """
    if not 2 <= len(tables.events) <= MOST_TABLES or any(file.partitions for file in tables.events):
        return Files()
    samples = {file: plain_table(first_rows([file], SAMPLED_ROWS)) for file in tables.events}
    headers = {tuple(sample.column_names) for sample in samples.values()}
    roles = {file: found for file, sample in samples.items() if (found := _roles(sample))}
    # Several files with the same columns are parts of one table.
    if len(headers) < len(samples) or not roles:
        return Files()
    events = max(roles, key=lambda file: (file.size, file.name))
    rest = {file: sample for file, sample in samples.items() if file is not events}
    users = None if tables.users else _own_table(rest, roles[events].user)
    items = None if tables.items else _own_table(rest, roles[events].item)
    return Files(
        *(os.path.relpath(file.path, tables.root) if file else "" for file in (events, users, items))
    )


def _roles(sample: pa.Table) -> Roles | None:
    """The roles of a table's columns, if it has users and items."""
    try:
        return roles_of(sample, contents_of(sample), {})
    except UserError:
        return None


def _own_table(rest: Mapping[File, pa.Table], column: str) -> File | None:
    """The table with one row for each id of a column: one with titles, else the widest."""
    found = {}
    for file, sample in rest.items():
        contents = contents_of(sample)
        if column in contents and contents[column].distinct == contents[column].size > 0:
            found[file] = (bool(title_of(contents)), len(contents), file.name)
    return max(found, key=lambda file: found[file], default=None)
