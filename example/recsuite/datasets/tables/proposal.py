"""Guess a missing or incomplete schema.toml from the first rows of the tables, and write it.

The files of events, users and items in a folder are guessed too.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import CLICKS, COUNT, ENTITIES, EVENT, ITEM, USER
from recsuite.datasets.tables import guessing
from recsuite.datasets.tables.files import (
    SEVERAL,
    File,
    Tables,
    beside,
    find_tables,
    is_remote,
    sample,
    schema_path,
    stem_of,
)
from recsuite.datasets.tables.formats import first_rows
from recsuite.datasets.tables.guessing import (
    Content,
    Roles,
    codes_of,
    contents_of,
    contradictions,
    feature_of,
    groups_of,
    hours_of,
    plain_table,
    roles_of,
    table_name,
    title_of,
)
from recsuite.datasets.tables.schema_file import (
    CATEGORY,
    EVENTS,
    ITEMS,
    MOST_FEATURES,
    USERS,
    FeatureColumn,
    Files,
    IncompleteSchemaError,
    ItemColumn,
    SkippedColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
    WeightColumn,
    can_be_named,
    check_column,
    completed,
    describe,
    given_in,
    parse_schema,
    place_of,
    text_of,
    validate,
    values_of,
)
from recsuite.errors import UserError, counted, printable
from recsuite.files import explained, replace_file
from recsuite.runtime.console import say

# More tables than this are parts of one.
MOST_TABLES = 20
# Least number of common first characters of the files of a pattern.
LEAST_BEGINNING = 3
# Enough to distinguish ids from properties.
ROWS_OF_EACH_FILE = 2_000
# Without a matching name, least share of the ids in the events' first rows that a table's first rows contain.
LEAST_SHARED = 0.5
# Words in the names of tables of events.
EVENT_WORDS = (*guessing.LABELS, "event", "interaction", "transaction", "review", "order", "log", "behavior")

Part = tuple[File, ...]


def files_of(tables: Tables, is_named: bool = False, others: Sequence[File] = ()) -> tuple[Files, list[str]]:
    """Return the section that names the tables of a folder, and notes on other files that may be the events.

    It is the default section if all tables have the same columns.

    is_named: true if a schema names columns of users or items. others: tables beside the events it names.

    Raises:
        UserError: for a file that cannot be read, and where no table has users and items.
    """
    others = others or (beside(tables) if len(tables.events) == 1 else ())
    if len(tables.events) + len(others) < 2 or any(file.partitions for file in (*tables.events, *others)):
        return Files(), []
    parts = _parts_of(tables.events)
    samples = {part: plain_table(first_rows(part, ROWS_OF_EACH_FILE)) for part in parts}
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
    called = {part: guessing.has_thing(Path(part[0].name).stem, EVENT_WORDS) for part in roles}
    # Files with the same columns and neutral names are all equal; none is preferred.
    if is_one and not any(called.values()):
        return Files(), []
    events = max(roles, key=lambda part: (called[part], sum(file.size for file in part), part[0].name))
    # A table of users or items may have columns named after both, but its rows do not repeat them.
    candidates = [part for part in roles if part is not events and _comes_again(samples[part], roles[part])]
    notes = [_of_candidates(tables, events, candidates)] if candidates else []
    rest = {part: sample for part, sample in samples.items() if part not in (events, *candidates)}
    contents = contents_of(samples[events])
    user, item = contents[roles[events].user], contents[roles[events].item]
    items = None if tables.items else _own_table(rest, item, user.name, guessing.ITEMS)
    # A table is of users or of items, not both.
    rest = {part: sample for part, sample in rest.items() if part is not items}
    users = None if tables.users else _own_table(rest, user, item.name, guessing.USERS)
    if others:
        # Files with the default names need no entry.
        return Files("", _named(tables, users), _named(tables, items)), notes
    # If the section names the events, it must name all tables: no others are searched for.
    users, items = users or tables.users or None, items or tables.items or None
    return Files(_named(tables, events), _named(tables, users), _named(tables, items)), notes


def _parts_of(files: Sequence[File]) -> list[Part]:
    """Group files by table: names that differ only in numbers, dates or words for parts are one table."""
    found: dict[tuple[str, str], list[File]] = {}
    for file in files:
        found.setdefault((os.path.dirname(file.path), stem_of(file.name)), []).append(file)
    return [tuple(part) for part in found.values()]


def _comes_again(sample: pa.Table, roles: Roles) -> bool:
    """True for a table in which both users and items repeat."""
    return all(len(sample[name].unique()) < len(sample) for name in (roles.user, roles.item))


def _of_candidates(tables: Tables, events: Part, candidates: Sequence[Part]) -> str:
    """Return a line on other tables that may be the events, with the entry for each."""
    others = [_named(tables, part) for part in candidates]
    lines = " or ".join(f'events = "{name}"' for name in others)
    return (
        f"{_named(tables, events)} is read as the events; {' and '.join(others)} "
        f"{'has' if len(candidates) == 1 else 'have'} users and items too: write {lines} under [files] of "
        "schema.toml to read that instead"
    )


def _named(tables: Tables, part: Part | None) -> str:
    """Return the path of a file below the folder, or the pattern of several; empty for none."""
    names = [os.path.relpath(file.path, tables.root) for file in part or ()]
    if len(names) < 2:
        return "".join(names)
    # Common first characters, not path components: a pattern matches characters.
    begin = os.path.commonprefix(names)  # noqa: RUF071
    # Files that are added later may have other suffixes.
    ends = {"".join(Path(name).suffixes) for name in names}
    pattern = f"{glob.escape(begin)}*{glob.escape(ends.pop()) if len(ends) == 1 else ''}"
    others = {os.path.relpath(file.path, tables.root) for file in tables.files} - {*names}
    # A short beginning would match unrelated files that are added later.
    is_wide = len(begin) < LEAST_BEGINNING or any(fnmatch.fnmatch(other, pattern) for other in others)
    return SEVERAL.join(names) if is_wide else pattern


def _readable(parts: Sequence[Part]) -> dict[Part, pa.Table]:
    """Return the first rows of tables without a known name; tables that cannot be read are skipped."""
    found = {}
    for part in parts:
        with contextlib.suppress(UserError):
            found[part] = plain_table(first_rows(part, ROWS_OF_EACH_FILE))
    return found


def _roles(sample: pa.Table) -> Roles | None:
    """Return the roles of a table's columns; None without users and items."""
    try:
        return roles_of(sample, contents_of(sample), {})
    except UserError:
        return None


def _own_table(rest: Mapping[Part, pa.Table], ids: Content, other: str, things: Sequence[str]) -> Part | None:
    """Return the table with one row for each id: one with their column, or titles, else the widest.

    other: the id column of the other entity. things: words for the wanted entity.
    """
    # Ids of users and of items may both count from 1.
    are_numbers = all(text.lstrip("-").isdigit() for text in ids.texts)
    found = {}
    for part, rows in rest.items():
        contents = contents_of(rows)
        column = own_column(contents, ids, other)
        says_so = guessing.has_thing(Path(part[0].name).stem, things) or guessing.has_thing(column, things)
        is_same = _is_same_name(column, ids.name)
        if column and (is_same or says_so or not are_numbers):
            found[part] = (is_same, bool(title_of(contents)), len(contents), part[0].name)
    return max(found, key=lambda part: found[part], default=None)


def own_column(contents: Mapping[str, Content], ids: Content, other: str, least: float = LEAST_SHARED) -> str:
    """Return the column of a users' or items' table with these ids of the events, each once; empty if none.

    It has the same name; else it has an id's name and the most values in common with them. least: the least
    share of the ids in the first rows that it has. other: the id column of the other entity.
    """
    shared = {
        name: len({*content.texts} & {*ids.texts})
        for name, content in contents.items()
        if content.distinct == content.size > 0 and name != other
        if _is_same_name(name, ids.name) or guessing.is_id(name) or guessing.is_thing(name)
    }
    same = [name for name in shared if _is_same_name(name, ids.name)]
    if same:
        return min(same, key=lambda name: name != ids.name)
    found = max(shared, key=lambda name: shared[name], default="")
    return found if found and shared[found] >= least * min(ids.distinct, contents[found].distinct) else ""


def _is_same_name(name: str, other: str) -> bool:
    """True for names of the same words, such as toy_ids and Toy_ID."""
    first, second = ([word.removesuffix("s") for word in guessing.words_of(each)] for each in (name, other))
    return first == second


# Kinds of labels by which all items are ranked.
RANKED = (CLICKS, COUNT)
# Most values of a table that are examined; least rows, for any number of columns.
MOST_VALUES, LEAST_ROWS = 2_000_000, 200
# Names of the embedding tables of ids.
TAKEN = (USER, ITEM, EVENT)
TABLES = {USER: USERS, ITEM: ITEMS, EVENT: EVENTS}
SAME_NAME = "the events have a column with a role under this name; give it another one in its file"
TOO_MANY = f"a schema has {MOST_FEATURES:,} features at most"


class Guess(NamedTuple):
    """Schema, the columns that it does not use, and sentences on unusual events."""

    schema: TableSchema
    left_out: list[SkippedColumn]
    notes: list[str]


def guess(
    samples: Mapping[str, pa.Table], given: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Guess:
    """Guess the schema of tables; also return the unused columns, each with the reason.

    samples: the first rows of the "events", and of the "users" and "items" if they have tables of their own;
    all columns of text files are texts. given: sections of a schema that were written by hand. The guess
    takes them into account; the caller has to write them over it.

    Raises:
        UserError: when no column is recognised as that of the users or the items, or there are no rows.
    """
    # With very many columns, fewer rows are examined, to limit the time.
    samples = {
        role: plain_table(table.slice(0, max(LEAST_ROWS, MOST_VALUES // max(1, table.num_columns))))
        for role, table in samples.items()
    }
    events = samples[EVENTS]
    if not len(events):
        raise UserError("The events have no rows, so nothing can be told about their columns.")
    contents = {role: contents_of(table) for role, table in samples.items()}
    own = {role: tuple(found) for role, found in contents.items() if role != EVENTS}
    roles = roles_of(events, contents[EVENTS], own, given)
    named = {of: _table_column(contents, roles, of) for of in ENTITIES}
    owned, notes = _owned(samples, contents, roles, named)
    title = title_of(owned[ITEM])
    owned[ITEM].pop(title, None)
    features, left_out = _features(owned, roles, samples, contents[EVENTS], given)
    time = contents[EVENTS].get(roles.timestamp)
    if time:
        by_hand = given.get("features", {})
        written = {each.get("column") for each in by_hand.values()}
        of_times = _of_times(time, {**features, **by_hand})
        features |= {name: each for name, each in of_times.items() if each.column not in written}
    schema = TableSchema(
        user=UserColumn(roles.user, table_column=named[USER]),
        item=ItemColumn(roles.item, title, table_column=named[ITEM]),
        label=roles.label,
        weight=WeightColumn(roles.weight) if roles.weight else None,
        timestamp=TimestampColumn(roles.timestamp, time.time_format or "iso") if time else None,
        features=features,
    )
    missing = [_of_missing(contents[EVENTS][column], len(events)) for column in (roles.user, roles.item)]
    unnamed = sum(not can_be_named(name) for table in samples.values() for name in table.column_names)
    odd = [f"skipped {counted(unnamed, 'column')} without a name that a schema can hold"] if unnamed else []
    return Guess(schema, left_out, [*filter(None, missing), *roles.notes, *notes, *odd])


def _of_missing(ids: Content, num_rows: int) -> str:
    """Return a note on events without a user or an item."""
    number = num_rows - ids.size
    if not number:
        return ""
    share, allowed = number / num_rows, DataConfig.max_bad_rows
    most = "" if share <= allowed / 2 else f" --max_bad_rows {min(1, math.ceil(20 * share + 1) / 20):g}"
    return (
        f"the column {printable(ids.name[:40])} has no id in {number:,} of {num_rows:,} events (empty, NA, "
        f"null and the like): training stops at such a row, and with --bad_rows skip{most} skips them"
    )


def _table_column(contents: Mapping[str, Mapping[str, Content]], roles: Roles, of: str) -> str:
    """Return the id column of the users' or items' table; empty if it has the same name as in the events."""
    column, other = (roles.user, roles.item) if of == USER else (roles.item, roles.user)
    own = contents.get(TABLES[of], {})
    # The first rows of both tables may have different ids.
    return "" if column in own else own_column(own, contents[EVENTS][column], other, least=0)


def _owned(
    samples: Mapping[str, pa.Table],
    contents: Mapping[str, Mapping[str, Content]],
    roles: Roles,
    named: Mapping[str, str],
) -> tuple[dict[str, dict[str, Content]], list[str]]:
    """Return the columns without a role by their owner (user, item, event), and notes on contradictions.

    Columns of the tables of users and items come first.
    """
    ids = {USER: roles.user, ITEM: roles.item}
    owned: dict[str, dict[str, Content]] = {
        of: {
            name: each for name, each in contents.get(TABLES[of], {}).items() if name != (named[of] or column)
        }
        for of, column in ids.items()
    }
    owned[EVENT] = {}
    events, notes = samples[EVENTS], []
    groups = {of: groups_of(events[column]) for of, column in ids.items()}
    for name, content in contents[EVENTS].items():
        if name in roles.columns:
            continue
        values = codes_of(events[name]) if content.codes is None else content.codes
        found = {of: number for of in groups if (number := contradictions(values, groups[of])) is not None}
        owner = min(found, key=lambda of: found[of], default=EVENT)
        if found.get(owner) and name not in owned[owner]:
            notes.append(
                f"the column {printable(name[:40])} of the {owner}s: in {counted(found[owner], 'event')} of "
                f"{len(events):,} it differs from most of the same {owner}, whose value counts"
            )
        owned[owner].setdefault(name, content)
    return owned, notes


def _features(
    owned: Mapping[str, Mapping[str, Content]],
    roles: Roles,
    samples: Mapping[str, pa.Table],
    contents: Mapping[str, Content],
    given: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, FeatureColumn], list[SkippedColumn]]:
    features: dict[str, FeatureColumn] = {}
    left_out: list[SkippedColumn] = []
    is_ranked = roles.label.kind in RANKED
    numbers = _numbers(samples, contents, roles)
    by_hand = given.get("features", {})
    written = {(each.get("of"), each.get("column")) for each in by_hand.values()}
    names = {*TAKEN, *by_hand, *(given.get(of, {}).get("noun", of) for of in ENTITIES)}
    for of, columns in owned.items():
        for column, content in columns.items():
            feature, why = feature_of(content, of, numbers[of], bool(roles.timestamp), is_ranked)
            if (feature.of, feature.column) in written:
                continue
            # A column of users or items with the label's name would be confused with it.
            why = SAME_NAME if column in roles.columns else why
            # Two places are reserved for the hour and the weekday.
            why = why or TOO_MANY * (len(features) + len(by_hand) >= MOST_FEATURES - 2)
            name = table_name(column + "_age" * (feature.column != column), names)
            names.add(name)
            if why:
                left_out.append(SkippedColumn(name, feature, why, _values(samples, of, column)))
            else:
                features[name] = feature
    return features, left_out


def _values(samples: Mapping[str, pa.Table], of: str, column: str) -> str:
    own = samples.get(TABLES[of], samples[EVENTS])
    # get_field_index is fast; a search in a list of names takes time proportional to its length.
    return values_of((own if own.schema.get_field_index(column) >= 0 else samples[EVENTS])[column])


def _numbers(
    samples: Mapping[str, pa.Table], contents: Mapping[str, Content], roles: Roles
) -> dict[str, int]:
    """Count the users, items and events in the samples."""
    users, items = (len(samples.get(role, ())) for role in (USERS, ITEMS))
    return {
        USER: max(contents[roles.user].distinct, users),
        ITEM: max(contents[roles.item].distinct, items),
        EVENT: len(samples[EVENTS]),
    }


def _of_times(time: Content, features: Mapping[str, object]) -> dict[str, FeatureColumn]:
    """Return the features weekday and hour, if the times of the events differ in them."""
    hours = hours_of(time)
    num_days, num_hours = (len(np.unique(each)) for each in (hours // 24, hours % 24))
    # The first rows of a busy log may be of one day or hour, so they cannot show the differences.
    is_busy = num_days == 1 and time.distinct > 1
    names = {*TAKEN, *features}
    found = {}
    if num_days > 1 or is_busy:
        found[table_name("weekday", names)] = FeatureColumn(EVENT, "weekday(timestamp)", CATEGORY)
    if num_hours > 1 or is_busy:
        found[table_name("hour", names)] = FeatureColumn(EVENT, "hour(timestamp)", CATEGORY)
    return found


# Enough to find rare values, and fast to read.
SAMPLED_ROWS = 10_000


@dataclass(frozen=True)
class Proposal:
    """Guessed and written schema.

    It has the path, the unused columns, the table to show, sentences on unusual data, and the files that are
    neither events, users nor items.
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
            say(f"the file {printable(name)} is skipped: it holds neither events, users nor items")
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
    others: list[File] = []
    if given.get("files", {}).get("events") and Path(path).is_dir():
        # Tables of users and items may be in the same folder.
        named = {file.path for file in tables.files}
        with suppress(UserError):
            others = [file for file in find_tables(path).files if file.path not in named]
    files, notes = _files(path, tables, bool({"user", "item"} & given.keys()), others)
    files = replace(files, **given.get("files", {}))
    chosen = find_tables(path, files)
    samples = sample(chosen, SAMPLED_ROWS)
    # A guess cannot work around a missing column that was written by hand.
    for name in ("user", "item", "label", "weight", "timestamp"):
        if column := given.get(name, {}).get("column", ""):
            here, columns = place_of(written).at(name), {EVENTS: samples[EVENTS].column_names}
            check_column(here, "column", column, (EVENTS,), columns)
    schema, left_out, of_columns = guess(samples, given)
    schema = replace(schema, files=files)
    is_begun = bool(text.strip())
    text = completed(text, given, schema, left_out) if is_begun else text_of(schema, left_out)
    # Check before writing: the text can be read, and fits the files.
    schema = parse_schema(text, written)
    validate(schema, {role: table.column_names for role, table in samples.items()}, written)
    with explained(f"{printable(written)} cannot be written"):
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
