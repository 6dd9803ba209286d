"""A schema guessed from the first rows of somebody's tables: by the names of columns, then by what they hold.

The same tables give the same schema. It is written beside the data for a person to correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsuite.datasets.schema import CLICKS, COUNT, ENTITIES, EVENT, ITEM, USER
from recsuite.datasets.tables.description.columns import EVENTS, ITEMS, USERS
from recsuite.datasets.tables.guessing.contents import Content, contents_of, hours_of, plain_table
from recsuite.datasets.tables.guessing.features import TELLS, LeftOut, feature_of, kind_of, owner_of, title_of
from recsuite.datasets.tables.guessing.folder import own_column
from recsuite.datasets.tables.guessing.roles import Roles, roles_of
from recsuite.datasets.tables.guessing.telling import telling_of
from recsuite.datasets.tables.guessing.words import table_name
from recsuite.datasets.tables.schema_file import (
    CATEGORY,
    LIST,
    NUMBER,
    FeatureColumn,
    ItemColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
    WeightColumn,
)
from recsuite.errors import UserError

# Labels by which all items are ranked, whatever else is known of an event.
RANKED = (CLICKS, COUNT)
# Names of tables that ids have.
TAKEN = (USER, ITEM, EVENT)
SAME_NAME = "the events have a column with a role under this name; give it another one in its file"


class Guess(NamedTuple):
    """A schema, the columns that it leaves out, and which others could be the label, likelier first."""

    schema: TableSchema
    left_out: list[LeftOut]
    other_labels: tuple[LabelColumn, ...]


def guess(samples: Mapping[str, pa.Table]) -> Guess:
    """The schema that tables probably have, and the columns that it leaves out, each with the reason.

    samples: the first rows of the "events", and of the "users" and "items" where these have tables of their
    own; all columns of text files are texts.

    Raises:
        UserError: when no column is recognised as that of the users or the items, or there are no rows.
    """
    samples = {role: plain_table(table) for role, table in samples.items()}
    events = samples[EVENTS]
    if not len(events):
        raise UserError("The events have no rows, so nothing can be told about their columns.")
    contents = {role: contents_of(table) for role, table in samples.items()}
    own = {role: tuple(found) for role, found in contents.items() if role != EVENTS}
    roles = roles_of(events, contents[EVENTS], own)
    named = {of: _table_column(contents, roles, of) for of in ENTITIES}
    owned = _owned(samples, contents, roles, named)
    tell = _telling(samples[EVENTS], owned, roles)
    title = title_of(owned[ITEM])
    owned[ITEM].pop(title, None)
    features, left_out = _features(owned, roles, tell, _numbers(samples, contents[EVENTS], roles))
    time = contents[EVENTS].get(roles.timestamp)
    schema = TableSchema(
        user=UserColumn(roles.user, table_column=named[USER]),
        item=ItemColumn(roles.item, title, table_column=named[ITEM]),
        label=roles.label,
        weight=WeightColumn(roles.weight) if roles.weight else None,
        timestamp=TimestampColumn(roles.timestamp, time.time_format) if time else None,
        features={**features, **(_of_times(time, features) if time else {})},
    )
    return Guess(schema, left_out, roles.other_labels)


def _ids(roles: Roles) -> tuple[tuple[str, str, str], ...]:
    return (USER, roles.user, USERS), (ITEM, roles.item, ITEMS)


def _table_column(contents: Mapping[str, Mapping[str, Content]], roles: Roles, of: str) -> str:
    """What the own table of users or items calls their ids; empty where it calls them as the events do."""
    column, other = (roles.user, roles.item) if of == USER else (roles.item, roles.user)
    own = contents.get({USER: USERS, ITEM: ITEMS}[of], {})
    # The first rows of both may be of different ones.
    return "" if column in own else own_column(own, contents[EVENTS][column], other, least=0)


def _owned(
    samples: Mapping[str, pa.Table],
    contents: Mapping[str, Mapping[str, Content]],
    roles: Roles,
    named: Mapping[str, str],
) -> dict[str, dict[str, Content]]:
    """The columns without a role, by whose they are; those of the tables of users and items first."""
    owned: dict[str, dict[str, Content]] = {
        of: {name: each for name, each in contents.get(role, {}).items() if name != (named[of] or column)}
        for of, column, role in _ids(roles)
    }
    owned[EVENT] = {}
    for name, content in contents[EVENTS].items():
        if name not in roles.columns:
            owned[owner_of(samples[EVENTS], name, roles)].setdefault(name, content)
    return owned


def _telling(events: pa.Table, owned: dict[str, dict[str, Content]], roles: Roles) -> set[str]:
    """The columns of the event that say which item it is of, where items are ranked.

    Those that hardly vary within an item are moved to the items.
    """
    tell: set[str] = set()
    for name, content in [*owned[EVENT].items()] if roles.label.kind in RANKED else ():
        if content.is_time or content.kind in (LIST, "other") or content.is_long:
            continue
        told = telling_of(events, name, roles.item, kind_of(content) == NUMBER)
        if told.is_of_item and name not in owned[ITEM]:
            owned[ITEM][name] = owned[EVENT].pop(name)
        elif told.is_too_much:
            tell.add(name)
    return tell


def _features(
    owned: Mapping[str, Mapping[str, Content]],
    roles: Roles,
    tell: set[str],
    numbers: Mapping[str, int],
) -> tuple[dict[str, FeatureColumn], list[LeftOut]]:
    features: dict[str, FeatureColumn] = {}
    left_out: list[LeftOut] = []
    is_ranked = roles.label.kind in RANKED
    for of, contents in owned.items():
        for column, content in contents.items():
            names = [*TAKEN, *features, *(each.name for each in left_out)]
            feature, why = feature_of(content, of, numbers[of], bool(roles.timestamp), is_ranked)
            why = why or TELLS * (of == EVENT and column in tell)
            name = table_name(column + "_age" * (feature.column != column), names)
            # A column of users or items that is called like the label would be taken for it.
            why = SAME_NAME if column in roles.columns else why
            if why:
                left_out.append(LeftOut(name, feature, why))
            else:
                features[name] = feature
    return features, left_out


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


def _of_times(time: Content, features: Mapping[str, FeatureColumn]) -> dict[str, FeatureColumn]:
    """The weekday and the hour, where the times of the events differ in them."""
    hours = hours_of(time)
    num_days, num_hours = (len(np.unique(each)) for each in (hours // 24, hours % 24))
    # The first rows of a busy log are of one day, or one hour, and say nothing of the others.
    is_busy = num_days == 1 and time.distinct > 1
    names = [*TAKEN, *features]
    found = {}
    if num_days > 1 or is_busy:
        found[table_name("weekday", names)] = FeatureColumn(EVENT, "weekday(timestamp)", CATEGORY)
    if num_hours > 1 or is_busy:
        found[table_name("hour", names)] = FeatureColumn(EVENT, "hour(timestamp)", CATEGORY)
    return found
