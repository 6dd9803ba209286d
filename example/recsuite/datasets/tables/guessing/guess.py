"""A schema guessed from the first rows of tables: roles by the names of columns, features by whose they are.

The same tables give the same schema. It is written for a person to correct; docs/your_data.md has the rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import CLICKS, COUNT, ENTITIES, EVENT, ITEM, USER
from recsuite.datasets.tables.description.columns import EVENTS, ITEMS, USERS
from recsuite.datasets.tables.description.overview import values_of
from recsuite.datasets.tables.description.validator import MOST_FEATURES, can_be_named
from recsuite.datasets.tables.guessing.contents import Content, contents_of, hours_of, plain_table
from recsuite.datasets.tables.guessing.features import LeftOut, feature_of, title_of
from recsuite.datasets.tables.guessing.folder import own_column
from recsuite.datasets.tables.guessing.roles import Roles, codes_of, contradictions, groups_of, roles_of
from recsuite.datasets.tables.guessing.words import table_name
from recsuite.datasets.tables.schema_file import (
    CATEGORY,
    FeatureColumn,
    ItemColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
    WeightColumn,
)
from recsuite.errors import UserError, counted, printable

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
