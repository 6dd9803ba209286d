"""The schema.toml of tables that have none, or an incomplete one: guessed from their first rows, and written.

Which files of a folder hold events, users and items is guessed too.
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
from recsuite.datasets.tables.description import (
    MOST_FEATURES,
    IncompleteSchemaError,
    can_be_named,
    completed,
    describe,
    given_in,
    nearest,
    parse_schema,
    place_of,
    text_of,
    validate,
    values_of,
)
from recsuite.datasets.tables.files import SEVERAL, beside, find_tables, sample, stem_of
from recsuite.datasets.tables.formats import first_rows
from recsuite.datasets.tables.guessing import (
    Content,
    LeftOut,
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
from recsuite.datasets.tables.remote import EVENTS, ITEMS, USERS, File, Tables, is_remote
from recsuite.datasets.tables.schema_file import (
    CATEGORY,
    FeatureColumn,
    Files,
    ItemColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
    WeightColumn,
    schema_path,
)
from recsuite.errors import UserError, counted, printable
from recsuite.files import explained, replace_file
from recsuite.runtime.console import say

# More tables than this are parts of one.
MOST_TABLES = 20
# Characters with which all files of a pattern begin.
LEAST_BEGINNING = 3
# Enough to tell ids from properties.
ROWS_OF_EACH_FILE = 2_000
# Of the ids in the first rows, so many are in those of the table that tells of them, where no name says so.
LEAST_SHARED = 0.5
# Names of tables of events.
EVENT_WORDS = (*guessing.LABELS, "event", "interaction", "transaction", "review", "order", "log", "behavior")

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
    items = None if tables.items else _own_table(rest, item, user.name, guessing.ITEMS)
    # A table tells of one or the other.
    rest = {part: sample for part, sample in rest.items() if part is not items}
    users = None if tables.users else _own_table(rest, user, item.name, guessing.USERS)
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
            found[part] = plain_table(first_rows(part, ROWS_OF_EACH_FILE))
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
    for part, rows in rest.items():
        contents = contents_of(rows)
        column = own_column(contents, ids, other)
        says_so = guessing.has_thing(Path(part[0].name).stem, things) or guessing.has_thing(column, things)
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
        if _is_same_name(name, ids.name) or guessing.is_id(name) or guessing.is_thing(name)
    }
    same = [name for name in shared if _is_same_name(name, ids.name)]
    if same:
        return min(same, key=lambda name: name != ids.name)
    found = max(shared, key=lambda name: shared[name], default="")
    return found if found and shared[found] >= least * min(ids.distinct, contents[found].distinct) else ""


def _is_same_name(name: str, other: str) -> bool:
    """Return true for names of the same words, such as toy_ids and Toy_ID."""
    first, second = ([word.removesuffix("s") for word in guessing.words_of(each)] for each in (name, other))
    return first == second


# Labels by which all items are ranked, whatever else is known of an event.
RANKED = (CLICKS, COUNT)
# Values of a table that are looked at, and rows, however many columns it has.
MOST_VALUES, LEAST_ROWS = 2_000_000, 200
# Names of tables that ids have.
TAKEN = (USER, ITEM, EVENT)
TABLES = {USER: USERS, ITEM: ITEMS, EVENT: EVENTS}
SAME_NAME = "the events have a column with a role under this name; give it another one in its file"
TOO_MANY = f"a schema has {MOST_FEATURES:,} features at most"


class Guess(NamedTuple):
    """A schema, the columns that it leaves out, and sentences on what is unusual about the events."""

    schema: TableSchema
    left_out: list[LeftOut]
    notes: list[str]


def guess(
    samples: Mapping[str, pa.Table], given: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Guess:
    """The schema that tables probably have, and the columns that it leaves out, each with the reason.

    samples: the first rows of the "events", and of the "users" and "items" where these have tables of their
    own; all columns of text files are texts. given: sections of a schema that were written by hand: what they
    say has to be written over the guess, which is guessed around it.

    Raises:
        UserError: when no column is recognised as that of the users or the items, or there are no rows.
    """
    # Of very many columns fewer rows are looked at: each value takes its time.
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
    """What to say of events without a user or an item."""
    number = num_rows - ids.size
    if not number:
        return ""
    share, allowed = number / num_rows, DataConfig.max_bad_rows
    most = "" if share <= allowed / 2 else f" --max_bad_rows {min(1, math.ceil(20 * share + 1) / 20):g}"
    return (
        f"the column {printable(ids.name[:40])} has no id in {number:,} of {num_rows:,} events (empty, NA, "
        f"null and the like): training stops at such a row, and with --bad_rows skip{most} leaves them out"
    )


def _table_column(contents: Mapping[str, Mapping[str, Content]], roles: Roles, of: str) -> str:
    """What the own table of users or items calls their ids; empty where it calls them as the events do."""
    column, other = (roles.user, roles.item) if of == USER else (roles.item, roles.user)
    own = contents.get(TABLES[of], {})
    # The first rows of both may be of different ones.
    return "" if column in own else own_column(own, contents[EVENTS][column], other, least=0)


def _owned(
    samples: Mapping[str, pa.Table],
    contents: Mapping[str, Mapping[str, Content]],
    roles: Roles,
    named: Mapping[str, str],
) -> tuple[dict[str, dict[str, Content]], list[str]]:
    """The columns without a role, by whose they are; those of the tables of users and items first. And what
    to say of contradictions.
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
) -> tuple[dict[str, FeatureColumn], list[LeftOut]]:
    features: dict[str, FeatureColumn] = {}
    left_out: list[LeftOut] = []
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
            # A column of users or items that is called like the label would be taken for it.
            why = SAME_NAME if column in roles.columns else why
            # The hour and the weekday come later.
            why = why or TOO_MANY * (len(features) + len(by_hand) >= MOST_FEATURES - 2)
            name = table_name(column + "_age" * (feature.column != column), names)
            names.add(name)
            if why:
                left_out.append(LeftOut(name, feature, why, _values(samples, of, column)))
            else:
                features[name] = feature
    return features, left_out


def _values(samples: Mapping[str, pa.Table], of: str, column: str) -> str:
    own = samples.get(TABLES[of], samples[EVENTS])
    # To look for a name in a list takes time in proportion to all of them.
    return values_of((own if own.schema.get_field_index(column) >= 0 else samples[EVENTS])[column])


def _numbers(
    samples: Mapping[str, pa.Table], contents: Mapping[str, Content], roles: Roles
) -> dict[str, int]:
    """How many users, items and events there are in the samples."""
    users, items = (len(samples.get(role, ())) for role in (USERS, ITEMS))
    return {
        USER: max(contents[roles.user].distinct, users),
        ITEM: max(contents[roles.item].distinct, items),
        EVENT: len(samples[EVENTS]),
    }


def _of_times(time: Content, features: Mapping[str, object]) -> dict[str, FeatureColumn]:
    """The weekday and the hour, where the times of the events differ in them."""
    hours = hours_of(time)
    num_days, num_hours = (len(np.unique(each)) for each in (hours // 24, hours % 24))
    # The first rows of a busy log are of one day, or one hour, and say nothing of the others.
    is_busy = num_days == 1 and time.distinct > 1
    names = {*TAKEN, *features}
    found = {}
    if num_days > 1 or is_busy:
        found[table_name("weekday", names)] = FeatureColumn(EVENT, "weekday(timestamp)", CATEGORY)
    if num_hours > 1 or is_busy:
        found[table_name("hour", names)] = FeatureColumn(EVENT, "hour(timestamp)", CATEGORY)
    return found


# Enough for what is rare in a column, and read in a moment.
SAMPLED_ROWS = 10_000


@dataclass(frozen=True)
class Proposal:
    """A schema that was guessed and written: where, the columns that are left out, the table to show,
    sentences on what is unusual, and the files that are neither events, users nor items.
    """

    path: Path
    schema: TableSchema
    left_out: list[LeftOut]
    overview: str
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    is_completed: bool = False

    def show(self) -> None:
        """Print the table, what is unusual, and where all of it can be corrected."""
        say(self.overview, tagged=False)
        for note in self.notes:
            say(note)
        for name in self.unused:
            say(f"the file {printable(name)} is left out: it holds neither events, users nor items")
        done, rest = ("completed", "; your lines stay") if self.is_completed else ("wrote", "")
        say(f"{done} {printable(self.path)} from the first rows{rest}; correct there what is wrong")


def propose(path: str | Path) -> Proposal:
    """Guess the schema of the tables of a folder, a file or a URL, and write it where `schema_path` says. One
    that is there and lacks sections is completed: its own lines stay, and count.

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
                f"{printable(written)} is there already, perhaps with corrections; remove it to have "
                "another one guessed."
            )
    tables = find_tables(path, Files(**given.get("files", {})))
    others: list[File] = []
    if given.get("files", {}).get("events") and Path(path).is_dir():
        # Users and items may lie beside them.
        named = {file.path for file in tables.files}
        with suppress(UserError):
            others = [file for file in find_tables(path).files if file.path not in named]
    files, notes = _files(path, tables, bool({"user", "item"} & given.keys()), others)
    files = replace(files, **given.get("files", {}))
    chosen = find_tables(path, files)
    samples = sample(chosen, SAMPLED_ROWS)
    _check_given(given, samples[EVENTS].column_names, written)
    schema, left_out, of_columns = guess(samples, given)
    schema = replace(schema, files=files)
    is_begun = bool(text.strip())
    text = completed(text, given, schema, left_out) if is_begun else text_of(schema, left_out)
    # What is written is what its reader makes of it, and fits the files.
    schema = parse_schema(text, written)
    validate(schema, {role: table.column_names for role, table in samples.items()}, written)
    with explained(f"{printable(written)} cannot be written"):
        written.parent.mkdir(parents=True, exist_ok=True)
        replace_file(written, text.encode())
    read = {file.name for file in chosen.files}
    unused = [name for name in (*tables.ignored, *(file.name for file in tables.files)) if name not in read]
    overview = describe(schema, samples, left_out)
    return Proposal(written, schema, left_out, overview, (*notes, *of_columns), tuple(unused), is_begun)


def _check_given(given: Mapping[str, Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Refuse a column that was written by hand and is not there: nothing can be guessed around it."""
    for name in ("user", "item", "label", "weight", "timestamp"):
        column = given.get(name, {}).get("column", "")
        if column and column not in columns:
            where = f"is not a column of the events; {nearest(column, columns)}"
            raise place_of(path).at(name).wrong("column", column, where)


def _files(
    path: str | Path, tables: Tables, is_named: bool, others: Sequence[File]
) -> tuple[Files, list[str]]:
    """The section that finds what the path stands for, from the folder of the schema."""
    if is_remote(str(path)):
        return Files(events=str(path)), []
    # What is in a folder is found again, and so is what comes into it later.
    return files_of(tables, is_named, others) if Path(path).is_dir() else (Files(events=Path(path).name), [])
