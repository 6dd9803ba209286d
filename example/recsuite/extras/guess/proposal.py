"""Guess a missing or incomplete schema.toml from the first rows of the tables, and write it.

The files of events, users and items in a folder are guessed too.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from recsuite.datasets.tables.files import (
    SEVERAL,
    File,
    Tables,
    beside,
    find_tables,
    schema_path,
    stem_of,
    why_no_table,
)
from recsuite.datasets.tables.schema_file import IncompleteSchemaError, given_in, parse_schema
from recsuite.datasets.tables.sections import EVENTS, ITEMS, USERS, Files, TableSchema
from recsuite.datasets.tables.validation import check_column, place_of, validate
from recsuite.datasets.tables.values import COMMAS
from recsuite.errors import UserError, printable
from recsuite.extras.guess.guessing import (
    ITEM_WORDS,
    LABELS,
    USER_WORDS,
    ColumnRoles,
    Content,
    contents_of,
    guess,
    has_thing,
    is_same_name,
    own_column,
    plain_table,
    roles_of,
    title_of,
)
from recsuite.extras.guess.overview import describe
from recsuite.extras.guess.sampling import first_rows, headed
from recsuite.extras.guess.writer import SkippedColumn, completed, text_of
from recsuite.files import explained, replace_file
from recsuite.places import is_remote
from recsuite.runtime.console import say

# More tables than this are parts of one.
MOST_TABLES = 20
# Least number of common first characters of the files of a pattern.
LEAST_BEGINNING = 3
# Enough to distinguish ids from properties.
ROWS_OF_EACH_FILE = 2_000
# Words in the names of tables of events.
EVENT_WORDS = (*LABELS, "event", "interaction", "transaction", "review", "order", "log", "behavior")

# Keys of [files] with the names of columns.
COLUMNS = {EVENTS: "columns", USERS: "user_columns", ITEMS: "item_columns"}

# Files of one table.
TableFiles = tuple[File, ...]


def files_of(tables: Tables, is_named: bool = False, others: Sequence[File] = ()) -> tuple[Files, list[str]]:
    """Return the section that names the tables of a folder, and notes on other files that may be the events.

    It is the default section if all tables have the same columns.

    is_named: true if a schema names columns of users or items. others: tables beside the events it names.

    Raises:
        UserError: for a file that cannot be read, and where no table has users and items.
    """
    is_chosen = bool(others)
    others = others or (beside(tables) if len(tables.events) == 1 else ())
    if len(tables.events) + len(others) < 2 or any(file.partitions for file in (*tables.events, *others)):
        return Files(), []
    parts = _tables_of(tables.events)
    notes: list[str] = []
    samples = {part: plain_table(first_rows(part, ROWS_OF_EACH_FILE)) for part in parts}
    for part in _tables_of(others):
        try:
            samples[part] = plain_table(first_rows(part, ROWS_OF_EACH_FILE))
        except UserError as error:
            notes.append(f"a table beside the events is not used: {error}")
    all_roles = {part: part_roles for part in samples if (part_roles := _roles(samples[part]))}
    # Where the name of a table says that it has the events, the others have none.
    roles = {part: part_roles for part, part_roles in all_roles.items() if part in parts}
    is_one = len({frozenset(sample.column_names) for sample in samples.values()}) == 1
    if not 2 <= len(samples) <= MOST_TABLES or (not roles and (is_one or is_named or all_roles)):
        return Files(), notes
    if not roles:
        listed = [
            f"{_named(tables, part)} has {', '.join(samples[part].column_names[:5])}" for part in samples
        ]
        raise UserError(
            f"No table has columns that are called after users and items: {printable('; '.join(listed))}. "
            'Write events = "FILE" under [files] of schema.toml, and [user] and [item] with column = "NAME"; '
            "where users stand in another table than items, such as one of orders, join the two first."
        )
    called = {part: has_thing(Path(part[0].name).stem, EVENT_WORDS) for part in roles}
    # Files with the same columns and neutral names are all equal; none is preferred.
    if is_one and not any(called.values()):
        return Files(), notes
    # A table of users or items may have columns named after both, but its rows do not repeat them.
    again = [part for part, part_roles in all_roles.items() if _comes_again(samples[part], part_roles)]
    labelled = [part for part in again if all_roles[part].has_label]
    sizes = {part: sum(file.size for file in part) for part in roles}
    events = max(roles, key=lambda part: (called[part], part in labelled, sizes[part], part[0].name))
    candidates = [part for part in again if part is not events]
    notes += [_of_candidates(tables, events, candidates)] if candidates and not is_chosen else []
    rest = {part: sample for part, sample in samples.items() if part not in (events, *candidates)}
    contents = contents_of(samples[events])
    user, item = contents[roles[events].user], contents[roles[events].item]
    items = None if tables.items else _own_table(rest, item, user.name, ITEM_WORDS)
    # A table is of users or of items, not both.
    rest = {part: sample for part, sample in rest.items() if part is not items}
    users = None if tables.users else _own_table(rest, user, item.name, USER_WORDS)
    if others:
        # Files with the default names need no entry.
        return Files("", _named(tables, users), _named(tables, items)), notes
    # If the section names the events, it must name all tables: no others are searched for.
    users, items = users or tables.users or None, items or tables.items or None
    return Files(_named(tables, events, grows=True), _named(tables, users), _named(tables, items)), notes


def _tables_of(files: Sequence[File]) -> list[TableFiles]:
    """Group files by table: names that differ only in numbers, dates or words for parts are one table."""
    by_table: dict[tuple[str, str], list[File]] = {}
    for file in files:
        by_table.setdefault((os.path.dirname(file.path), stem_of(file.name)), []).append(file)
    return [tuple(part) for part in by_table.values()]


def _comes_again(sample: pa.Table, roles: ColumnRoles) -> bool:
    """True for a table in which both users and items repeat."""
    return all(len(sample[name].unique()) < len(sample) for name in (roles.user, roles.item))


def _of_candidates(tables: Tables, events: TableFiles, candidates: Sequence[TableFiles]) -> str:
    """Return a line on other tables that may be the events, with the entry for each."""
    others = [_named(tables, part) for part in candidates]
    lines = " or ".join(f'events = "{name}"' for name in others)
    return (
        f"{_named(tables, events)} is read as the events; {' and '.join(others)} "
        f"{'has' if len(candidates) == 1 else 'have'} users and items too: to read that instead, replace all "
        f"lines of schema.toml by [files] and, below it, {lines}: the rest is then guessed for it"
    )


def _named(tables: Tables, part: TableFiles | None, grows: bool = False) -> str:
    """Return the path of a file below the folder, or the pattern of several; empty for none."""
    names = [os.path.relpath(file.path, tables.root) for file in part or ()]
    # A single file gets a pattern if more may come: those have other numbers in their names.
    if len(names) < 2 and not grows:
        return "".join(names)
    # Common first characters, not path components: a pattern matches characters.
    begin = os.path.commonprefix(names)  # noqa: RUF071
    # Files that are added later may have other suffixes.
    ends = {"".join(Path(name).suffixes) for name in names}
    pattern = f"{glob.escape(begin)}*{glob.escape(ends.pop()) if len(ends) == 1 else ''}"
    if len(names) == 1:
        folder, name = os.path.split(names[0])
        # The suffixes hold no number of the file: 2 in .bz2, say.
        stem, end = re.fullmatch(r"(.*?)((?:\.[A-Za-z]\w*)*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        stars = re.sub(r"\d+(?:[-_.]\d+)*", "*", glob.escape(stem))
        begin, pattern = stars.partition("*")[0], os.path.join(glob.escape(folder), stars + glob.escape(end))
    others = {os.path.relpath(file.path, tables.root) for file in tables.files} - {*names}
    # A short beginning would match unrelated files that are added later.
    is_wide = len(begin) < LEAST_BEGINNING or any(fnmatch.fnmatch(other, pattern) for other in others)
    return SEVERAL.join(names) if is_wide or not fnmatch.fnmatch(names[0], pattern) else pattern


def _roles(sample: pa.Table) -> ColumnRoles | None:
    """Return the roles of a table's columns; None without users and items."""
    try:
        return roles_of(sample, contents_of(sample), {})
    except UserError:
        return None


def _own_table(
    rest: Mapping[TableFiles, pa.Table], ids: Content, other: str, things: Sequence[str]
) -> TableFiles | None:
    """Return the table with one row for each id: one with their column, or titles, else the widest."""
    # Ids of users and of items may both count from 1.
    are_numbers = all(text.lstrip("-").isdigit() for text in ids.texts)
    fits = {}
    for part, rows in rest.items():
        contents = contents_of(rows)
        column = own_column(contents, ids, other)
        says_so = has_thing(Path(part[0].name).stem, things) or has_thing(column, things)
        is_same = is_same_name(column, ids.name)
        if column and (is_same or says_so or not are_numbers):
            fits[part] = (is_same, bool(title_of(contents)), len(contents), part[0].name)
    return max(fits, key=lambda part: fits[part], default=None)


# Enough to find rare values, and fast to read.
SAMPLED_ROWS = 10_000


@dataclass(frozen=True)
class Proposal:
    """Guessed and written schema.

    It has the path, the unused columns, the table to show, sentences on unusual data, and the files that are
    not read.
    """

    path: Path
    schema: TableSchema
    left_out: list[SkippedColumn]
    overview: str
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    is_completed: bool = False

    def show(self) -> None:
        """Print the table, the sentences on unusual data, and the path of the file to correct."""
        say(self.overview, tagged=False)
        for note in self.notes:
            say(note)
        for name in self.unused:
            why = why_no_table(name) or "it is not taken as events, users or items"
            say(f"the file {printable(name)} is skipped: {why}")
        done, rest = ("completed", "; your lines stay") if self.is_completed else ("wrote", "")
        say(f"{done} {printable(self.path)} from the first rows{rest}; correct there what is wrong")


def propose(path: str | Path) -> Proposal:
    """Guess the schema of the tables of a folder, a file or a URL, and write it to `schema_path`.

    An existing incomplete schema is completed: its own lines stay, and have priority.

    Raises:
        UserError: when there is a whole schema already, there are no tables, one cannot be read, or no name
            says which columns have the users and the items.
    """
    written, text = schema_path(path), ""
    given: dict[str, Any] = {}
    if written.exists():
        text, given = given_in(written)
        with suppress(IncompleteSchemaError):
            parse_schema(text, written)
            raise UserError(
                f"{printable(written)} exists already, perhaps with corrections; remove it to have "
                "another one guessed."
            )
    tables = find_tables(path, Files(**given.get("files", {})))
    # Tables of users and items may be in the same folder as the named events.
    others = beside(tables) if given.get("files", {}).get("events") and Path(path).is_dir() else ()
    tables = replace(
        tables, events=headed(tables.events), users=headed(tables.users), items=headed(tables.items)
    )
    headers = {file.path: file.columns for file in tables.files}
    files, notes = _files(path, tables, bool({"user", "item"} & given.keys()), others)
    files = replace(files, **given.get("files", {}))
    columns: dict[str, Any] = {}
    for role, of_role in find_tables(path, files).roles.items():
        for file in of_role:
            if (names := headers.get(file.path, ())) and not file.columns:
                columns[COLUMNS[role]] = names
                notes.append(
                    f"{file} has no line with the names of columns: it gets those of the other files"
                )
    files = replace(files, **columns)
    chosen = find_tables(path, files)
    samples = {role: first_rows(files, SAMPLED_ROWS) for role, files in chosen.roles.items() if files}
    # A guess cannot work around a missing column that was written by hand.
    for name in ("user", "item", "label", "weight", "timestamp"):
        if column := given.get(name, {}).get("column", ""):
            here, columns = place_of(written).at(name), {EVENTS: samples[EVENTS].column_names}
            check_column(here, "column", column, (EVENTS,), columns)
    schema, left_out, of_columns = guess(samples, given)
    schema = replace(schema, files=replace(files, **{form: getattr(schema.files, form) for form in COMMAS}))
    is_begun = bool(text.strip())
    text = completed(text, given, schema, left_out) if is_begun else text_of(schema, left_out)
    # Check before writing: the text can be read, and fits the files.
    schema = parse_schema(text, written)
    validate(schema, {role: table.column_names for role, table in samples.items()}, written)
    with explained(f"Cannot write {printable(written)}"):
        written.parent.mkdir(parents=True, exist_ok=True)
        replace_file(written, text.encode())
    read = {file.name for file in chosen.files}
    unused = [name for name in (*tables.ignored, *(file.name for file in tables.files)) if name not in read]
    overview = describe(schema, samples, left_out)
    return Proposal(written, schema, left_out, overview, (*notes, *of_columns), tuple(unused), is_begun)


def _files(
    path: str | Path, tables: Tables, is_named: bool, others: Sequence[File]
) -> tuple[Files, list[str]]:
    """Return the section that finds the files of the path from the folder of the schema."""
    if is_remote(str(path)):
        return Files(events=str(path)), []
    # The files of a folder are found again, also those that are added later.
    return files_of(tables, is_named, others) if Path(path).is_dir() else (Files(events=Path(path).name), [])
