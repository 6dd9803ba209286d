"""Which of a folder's tables are the events, the users and the items, where their names do not say."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from recsuite.datasets.tables.files import SEVERAL, Tables, beside, stem_of
from recsuite.datasets.tables.formats import first_rows
from recsuite.datasets.tables.guessing import words
from recsuite.datasets.tables.guessing.contents import Content, contents_of, plain_table
from recsuite.datasets.tables.guessing.features import title_of
from recsuite.datasets.tables.guessing.roles import Roles, roles_of
from recsuite.datasets.tables.schema_file import Files
from recsuite.datasets.tables.sources.file import File
from recsuite.errors import UserError, printable

# More tables than this are parts of one.
MOST_TABLES = 20
# Characters with which all files of a pattern begin.
LEAST_BEGINNING = 3
# Enough to tell ids from properties.
SAMPLED_ROWS = 2_000
# Of the ids in the first rows, so many are in those of the table that tells of them, where no name says so.
LEAST_SHARED = 0.5
# Names of tables of events.
EVENT_WORDS = (*words.LABELS, "event", "interaction", "transaction", "review", "order", "log", "behavior")

Part = tuple[File, ...]


def files_of(tables: Tables, is_named: bool = False, others: Sequence[File] = ()) -> tuple[Files, list[str]]:
    """The section that names the tables of a folder, where these have different columns, else the usual one;
    and what to say of files that could be the events as well.

    is_named: whether a schema names columns of users or items. others: tables beside events that it names.

    Raises:
        UserError: for a file that cannot be read, and where no table has users and items.
    """
    others = others or (beside(tables) if len(tables.events) == 1 else ())
    if len(tables.events) + len(others) < 2 or any(file.partitions for file in (*tables.events, *others)):
        return Files(), []
    parts = _parts_of(tables.events)
    samples = {part: plain_table(first_rows(part, SAMPLED_ROWS)) for part in parts}
    samples.update(_readable(_parts_of(others)))
    roles = {part: found for part in parts if (found := _roles(samples[part]))}
    is_one = len({frozenset(sample.column_names) for sample in samples.values()}) == 1
    if not 2 <= len(samples) <= MOST_TABLES or (not roles and (is_one or is_named)):
        return Files(), []
    if not roles:
        listed = [
            f"{_named(tables, part)} has {', '.join(samples[part].column_names[:5])}" for part in samples
        ]
        raise UserError(
            f"No table has columns that are called after users and items: {printable('; '.join(listed))}. "
            'Write events = "FILE" under [files] of schema.toml, and [user] and [item] with column = "NAME"; '
            "where users stand in another table than items, such as one of orders, join the two first."
        )
    called = {part: words.has_thing(Path(part[0].name).stem, EVENT_WORDS) for part in roles}
    # Of files with the same columns whose names say nothing, none can be taken before the others.
    if is_one and not any(called.values()):
        return Files(), []
    events = max(roles, key=lambda part: (called[part], sum(file.size for file in part), part[0].name))
    # A table of users or items may have columns that are called after both, each of its rows once.
    candidates = [part for part in roles if part is not events and _comes_again(samples[part], roles[part])]
    notes = [_of_candidates(tables, events, candidates)] if candidates else []
    rest = {part: sample for part, sample in samples.items() if part not in (events, *candidates)}
    contents = contents_of(samples[events])
    user, item = contents[roles[events].user], contents[roles[events].item]
    items = None if tables.items else _own_table(rest, item, user.name, words.ITEMS)
    # A table tells of one or the other.
    rest = {part: sample for part, sample in rest.items() if part is not items}
    users = None if tables.users else _own_table(rest, user, item.name, words.USERS)
    if others:
        # Of what is called so, the section need not say it.
        return Files("", _named(tables, users), _named(tables, items)), notes
    # But where it names the events, nothing else is looked for.
    users, items = users or tables.users or None, items or tables.items or None
    return Files(_named(tables, events), _named(tables, users), _named(tables, items)), notes


def _parts_of(files: Sequence[File]) -> list[Part]:
    """Files by table: those whose names differ by numbers, dates or words for parts are of one."""
    found: dict[tuple[str, str], list[File]] = {}
    for file in files:
        found.setdefault((os.path.dirname(file.path), stem_of(file.name)), []).append(file)
    return [tuple(part) for part in found.values()]


def _comes_again(sample: pa.Table, roles: Roles) -> bool:
    """Return true for a table in which several rows have one user, and several one item."""
    return all(len(sample[name].unique()) < len(sample) for name in (roles.user, roles.item))


def _of_candidates(tables: Tables, events: Part, candidates: Sequence[Part]) -> str:
    """A line on other tables that could be the events, and how each is named."""
    others = [_named(tables, part) for part in candidates]
    lines = " or ".join(f'events = "{name}"' for name in others)
    return (
        f"{_named(tables, events)} is read as the events; {' and '.join(others)} "
        f"{'has' if len(candidates) == 1 else 'have'} users and items too: write {lines} under [files] of "
        "schema.toml to read that instead"
    )


def _named(tables: Tables, part: Part | None) -> str:
    """The path of a file below the folder, or the pattern of several; empty for none."""
    names = [os.path.relpath(file.path, tables.root) for file in part or ()]
    if len(names) < 2:
        return "".join(names)
    # Of characters, as a pattern is.
    begin = os.path.commonprefix(names)  # noqa: RUF071
    # More than the ends of the names that are there may be in those to come.
    ends = {"".join(Path(name).suffixes) for name in names}
    pattern = f"{glob.escape(begin)}*{glob.escape(ends.pop()) if len(ends) == 1 else ''}"
    others = {os.path.relpath(file.path, tables.root) for file in tables.files} - {*names}
    # A short beginning would match whatever comes to lie there.
    is_wide = len(begin) < LEAST_BEGINNING or any(fnmatch.fnmatch(other, pattern) for other in others)
    return SEVERAL.join(names) if is_wide else pattern


def _readable(parts: Sequence[Part]) -> dict[Part, pa.Table]:
    """First rows of tables that have no name by which they are known, of those that can be read."""
    found = {}
    for part in parts:
        with contextlib.suppress(UserError):
            found[part] = plain_table(first_rows(part, SAMPLED_ROWS))
    return found


def _roles(sample: pa.Table) -> Roles | None:
    """The roles of a table's columns, if it has users and items."""
    try:
        return roles_of(sample, contents_of(sample), {})
    except UserError:
        return None


def _own_table(rest: Mapping[Part, pa.Table], ids: Content, other: str, things: Sequence[str]) -> Part | None:
    """The table with one row for each of some ids: one with their column, or titles, else the widest.

    other: the column with the ids that are not wanted; things: words for what has those that are.
    """
    # Any two things are counted from 1 on.
    are_numbers = all(text.lstrip("-").isdigit() for text in ids.texts)
    found = {}
    for part, sample in rest.items():
        contents = contents_of(sample)
        column = own_column(contents, ids, other)
        says_so = words.has_thing(Path(part[0].name).stem, things) or words.has_thing(column, things)
        is_same = _is_same_name(column, ids.name)
        if column and (is_same or says_so or not are_numbers):
            found[part] = (is_same, bool(title_of(contents)), len(contents), part[0].name)
    return max(found, key=lambda part: found[part], default=None)


def own_column(contents: Mapping[str, Content], ids: Content, other: str, least: float = LEAST_SHARED) -> str:
    """The column of a table of users or items that holds these ids of the events, each once; empty without.

    One of the same name, else one that is called an id and has the most values in common with them, at least
    such a share of those in the first rows. other: the column that holds others' ids.
    """
    shared = {
        name: len({*content.texts} & {*ids.texts})
        for name, content in contents.items()
        if content.distinct == content.size > 0 and name != other
        if _is_same_name(name, ids.name) or words.is_id(name) or words.is_thing(name)
    }
    same = [name for name in shared if _is_same_name(name, ids.name)]
    if same:
        return min(same, key=lambda name: name != ids.name)
    found = max(shared, key=lambda name: shared[name], default="")
    return found if found and shared[found] >= least * min(ids.distinct, contents[found].distinct) else ""


def _is_same_name(name: str, other: str) -> bool:
    """Return true for names of the same words, such as toy_ids and Toy_ID."""
    first, second = ([word.removesuffix("s") for word in words.words_of(each)] for each in (name, other))
    return first == second
