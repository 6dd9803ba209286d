"""Which of a folder's tables are the events, the users and the items, where their names do not say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from recsuite.datasets.tables.files import Tables, beside
from recsuite.datasets.tables.formats import first_rows
from recsuite.datasets.tables.guessing import words
from recsuite.datasets.tables.guessing.contents import Content, contents_of, plain_table
from recsuite.datasets.tables.guessing.features import title_of
from recsuite.datasets.tables.guessing.roles import Roles, roles_of
from recsuite.datasets.tables.schema_file import Files
from recsuite.datasets.tables.sources.file import File
from recsuite.errors import UserError

# More files than this are parts of one table.
MOST_TABLES = 20
# Enough to tell ids from properties.
SAMPLED_ROWS = 2_000
# Of the ids in the first rows, so many are in those of the table that tells of them, where no name says so.
LEAST_SHARED = 0.5


def files_of(tables: Tables) -> Files:
    """The section that names the tables of a folder, where these have different columns; else the usual one.

    Raises:
        UserError: for a file that cannot be read.
    """
    others = beside(tables) if len(tables.events) == 1 else ()
    files = (*tables.events, *others)
    if not 2 <= len(files) <= MOST_TABLES or any(file.partitions for file in files):
        return Files()
    samples = {file: plain_table(first_rows([file], SAMPLED_ROWS)) for file in tables.events}
    samples.update(_readable(others))
    headers = {tuple(sample.column_names) for sample in samples.values()}
    roles = {file: found for file in tables.events if (found := _roles(samples[file]))}
    # Several files with the same columns are parts of one table.
    if len(headers) < len(samples) or not roles:
        return Files()
    events = max(roles, key=lambda file: (file.size, file.name))
    rest = {file: sample for file, sample in samples.items() if file is not events}
    contents = contents_of(samples[events])
    user, item = contents[roles[events].user], contents[roles[events].item]
    items = None if tables.items else _own_table(rest, item, user.name, words.ITEMS)
    # A table tells of one or the other.
    rest = {file: sample for file, sample in rest.items() if file is not items}
    users = None if tables.users else _own_table(rest, user, item.name, words.USERS)
    if others:
        # Of what is called so, the section need not say it.
        return Files("", _named(tables, users), _named(tables, items))
    # But where it names the events, nothing else is looked for.
    users, items = users or _single(tables.users), items or _single(tables.items)
    return Files(*(_named(tables, file) for file in (events, users, items)))


def _named(tables: Tables, file: File | None) -> str:
    return os.path.relpath(file.path, tables.root) if file else ""


def _single(files: Sequence[File]) -> File | None:
    return files[0] if len(files) == 1 else None


def _readable(files: Sequence[File]) -> dict[File, pa.Table]:
    """The first rows of tables that nobody has named, of those that can be read."""
    found = {}
    for file in files:
        with contextlib.suppress(UserError):
            found[file] = plain_table(first_rows([file], SAMPLED_ROWS))
    return found


def _roles(sample: pa.Table) -> Roles | None:
    """The roles of a table's columns, if it has users and items."""
    try:
        return roles_of(sample, contents_of(sample), {})
    except UserError:
        return None


def _own_table(rest: Mapping[File, pa.Table], ids: Content, other: str, things: Sequence[str]) -> File | None:
    """The table with one row for each of some ids: one with their column, or titles, else the widest.

    other: the column with the ids that are not wanted; things: words for what has those that are.
    """
    # Any two things are counted from 1 on.
    are_numbers = all(text.lstrip("-").isdigit() for text in ids.texts)
    found = {}
    for file, sample in rest.items():
        contents = contents_of(sample)
        column = own_column(contents, ids, other)
        says_so = words.has_thing(Path(file.name).stem, things) or words.has_thing(column, things)
        if column and (column == ids.name or says_so or not are_numbers):
            found[file] = (column == ids.name, bool(title_of(contents)), len(contents), file.name)
    return max(found, key=lambda file: found[file], default=None)


def own_column(contents: Mapping[str, Content], ids: Content, other: str, least: float = LEAST_SHARED) -> str:
    """The column of a table of users or items that holds these ids of the events, each once; empty without.

    One of the same name, else one that is called an id and has the most values in common with them, at least
    such a share of those in the first rows. other: the column that holds others' ids.
    """
    shared = {
        name: len({*content.texts} & {*ids.texts})
        for name, content in contents.items()
        if content.distinct == content.size > 0 and name != other
        if name == ids.name or words.is_id(name) or words.is_thing(name)
    }
    if ids.name in shared:
        return ids.name
    found = max(shared, key=lambda name: shared[name], default="")
    return found if found and shared[found] >= least * min(ids.distinct, contents[found].distinct) else ""
