"""Schema of any data set: features of users and items, and events that join the two.

Holds numbers and names only, so a data worker may import it. A `Schema` has the features of one family of
data sets, and its words for users, items and labels. Generic code says user, item, event and label.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recsuite.errors import UserError
from recsuite.files import OPTIONAL, plain, typed

# For types only: a data worker imports this file, and must not import pandas at its start.
if TYPE_CHECKING:
    import numpy as np
    import pandas

# Kinds of evaluation: predictions against labels, ranks of the chosen items, or probabilities against
# binary labels.
EVALUATIONS = ("predictions", "ranks", "answers")
# In the folder of columns, and in every full checkpoint and export made from them.
SCHEMA_FILE = "schema.json"
# Row 0 of every table is the unknown row: for values that are in no training event.
UNKNOWN_ROW = 0
USER, ITEM, EVENT = "user", "item", "event"
# The entities that an event joins, in the order of its columns.
ENTITIES = (USER, ITEM)
# A number becomes an input as the row of its bucket, or as a dense number on a common scale.
BUCKETS, DENSE = "buckets", "dense"
# The values of categories become rows of a table by a list of the training values (fixed vocabulary), or by
# ids, any of which a dynamic table can insert.
VOCABULARY, DYNAMIC = IDS = ("vocabulary", "dynamic")
# Kinds of labels: a number on a scale, one of two answers, the mere fact of an event, or its count.
RATING, YES_NO, CLICKS, COUNT = LABEL_KINDS = ("rating", "yes_no", "clicks", "count")
# Items that a user had: excluded from negatives, rankings and recommendations, or treated like any other.
EXCLUDE, ALLOW = "exclude", "allow"
# Items without a row, which the training has not seen: in no list, or listed by their features.
INCLUDE = "include"
# Smaller shares of yes are clamped to this before their logit is taken.
LEAST_SHARE = 1e-4
# The feature of earlier items of an event's user, and its entity.
HISTORY = "history"


@dataclass(frozen=True)
class Feature:
    """One property of a user, an item or an event. It has an embedding table unless it is dense.

    name: the key in the KeyedJaggedTensor and the name of the table; entity: USER, ITEM, EVENT or HISTORY;
    column: of the parsed files, with raw values that are hashable and of one type (lists of them if multi,
    floats if it is a number); number: "" for categories; BUCKETS, with a table row for each quantile of the
    training; or DENSE, an input of the dense part; ids: one of IDS; width: numbers of a dense input, 1 unless
    it is a vector.
    """

    name: str
    entity: str
    column: str
    multi: bool = False
    number: str = ""
    ids: str = field(default=VOCABULARY, metadata=OPTIONAL)
    width: int = field(default=1, metadata=OPTIONAL)

    @property
    def is_dynamic(self) -> bool:
        """True if batches have ids of its values instead of rows of its table."""
        return self.ids == DYNAMIC

    @property
    def has_table(self) -> bool:
        """True if its values are rows of a table and not dense numbers in the batch."""
        return self.number != DENSE


@dataclass(frozen=True)
class Label:
    """One of several labels of an event, beside the first.

    name: of its metrics; kind: one of LABEL_KINDS but CLICKS.
    """

    name: str
    kind: str


@dataclass(frozen=True)
class Schema:
    """Features of the users, items and events of a data set, and its words for them.

    features: in any order. user, item: name of the feature that identifies users or items. Histories and
    rankings use this feature, and files and messages use its name as the noun for a user or an item. title:
    the column with the title of an item; it need not belong to a feature. label: the noun for the predicted
    label; lowest_label, highest_label: its range; liked_label: from here on an item counts as liked;
    label_kind: one of LABEL_KINDS; answer: the name of a yes of YES_NO; seen: EXCLUDE or ALLOW. new_items:
    EXCLUDE or INCLUDE. more_labels: further labels of an event; all other fields describe the first label.
    event_types: the types of events, if there are several: the predicted one, and those that are only in
    histories. In a history the label of an event is the position of its type, from 1 on.
    """

    features: tuple[Feature, ...]
    user: str
    item: str
    title: str
    label: str
    lowest_label: float
    highest_label: float
    liked_label: float
    label_kind: str = RATING
    answer: str = "yes"
    seen: str = field(default=EXCLUDE, metadata=OPTIONAL)
    new_items: str = field(default=EXCLUDE, metadata=OPTIONAL)
    more_labels: tuple[Label, ...] = field(default=(), metadata=OPTIONAL)
    event_types: tuple[str, ...] = field(default=(), metadata=OPTIONAL)

    def __post_init__(self) -> None:
        """Refuse features without the one that identifies users, or items.

        Raises:
            UserError: names the entity and the features that it has.
        """
        # Histories, rankings and reports use this feature; without it they would fail much later.
        for entity in ENTITIES:
            name, names = self.name_of(entity), _single(entity, self.features)
            if name not in names:
                raise UserError(
                    f"The table of features has {', '.join(names) or 'nothing'} for a {name}, and not the "
                    f'feature "{name}" itself; put it back into the schema of the data set.'
                )

    @property
    def excludes_seen(self) -> bool:
        """True if items that a user had are neither negatives nor ranked nor recommended."""
        return self.seen == EXCLUDE

    @property
    def lists_new_items(self) -> bool:
        """True if lists have items without a row too."""
        return self.new_items == INCLUDE

    @property
    def items(self) -> str:
        """Plural of the noun for an item."""
        return f"{self.item}s"

    @property
    def labels(self) -> str:
        """Plural of the noun for a label, used for events too."""
        return f"{self.label}s"

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all L labels of an event, the first one first."""
        first = self.answer if self.label_kind == YES_NO else self.label
        return first, *(each.name for each in self.more_labels)

    @property
    def history(self) -> Feature:
        """Feature of the other items of the user. It has the rows of the item feature, in its own table."""
        # A shared row would have to represent both the item and what it says about its users.
        item = next(feature for feature in self.features if feature.name == self.item)
        return Feature(HISTORY, HISTORY, item.column, multi=True, ids=item.ids)

    @property
    def ids(self) -> tuple[str, str]:
        """Names of the features that identify users, and items."""
        return self.user, self.item

    def learned(self, label: float) -> float:
        """Convert a label to its learned form: log(1 + x) of a count, all others unchanged."""
        return math.log1p(label) if self.label_kind == COUNT else label

    def shown(self, label: float) -> float:
        """Convert a learned label to its original form. The inverse of `learned`."""
        return math.expm1(label) if self.label_kind == COUNT else label

    def name_of(self, entity: str) -> str:
        """Name of an entity in files and messages, which is the name of its id feature."""
        return {USER: self.user, ITEM: self.item}.get(entity, entity)

    def column_of(self, entity: str) -> str:
        """Column of the parsed files with the raw ids of users or items."""
        return next(feature.column for feature in self.features if feature.name == self.name_of(entity))

    def with_ids(self, ids: str) -> Schema:
        """Return the schema with these ids for all features of categories. ids: one of IDS."""
        features = (
            feature if feature.number else dataclasses.replace(feature, ids=ids) for feature in self.features
        )
        return dataclasses.replace(self, features=tuple(features))

    def describes_items(self, features: Sequence[Feature]) -> bool:
        """Return True if some features tell more of an item than its id."""
        return any(feature.entity == ITEM and feature.name != self.item for feature in features)

    def place_of(self, entity: str, features: Sequence[Feature]) -> int:
        """Place of the id feature of an entity among its features with one value."""
        return _single(entity, features).index(self.name_of(entity))

    def vocabulary_of(self, table: str) -> str:
        """Feature whose raw values the rows of a table represent: for a history that of the items."""
        return self.item if table == HISTORY else table

    def recorded(self, feature: Feature) -> Feature:
        """Return a feature in the form of files, in which entities have the names of the data set."""
        return dataclasses.replace(feature, entity=self.name_of(feature.entity))

    def restored(self, feature: Feature) -> Feature:
        """Return a feature from the form of files. The inverse of `recorded`."""
        return _with_entity(feature, self.user, self.item)


def _with_entity(feature: Feature, user: Any, item: Any) -> Feature:
    """Return a feature with the name of its entity replaced by the entity. user, item: their names."""
    return dataclasses.replace(feature, entity={user: USER, item: ITEM}.get(feature.entity, feature.entity))


def record_of(schema: Schema, features: Sequence[Feature]) -> dict[str, Any]:
    """Return a schema in the form of files, with the features of a model in the order of its sums."""
    # Sums of floats in another order are rounded differently, and so would be the scores of a served model.
    recorded = [plain(schema.recorded(feature)) for feature in features]
    record = {**dataclasses.asdict(schema), "features": recorded}
    # Files of data with one label and one type of event stay as they were in earlier versions, and those
    # without new items.
    defaults = {"more_labels": (), "event_types": (), "new_items": EXCLUDE}
    for name in [name for name, value in defaults.items() if record[name] == value]:
        del record[name]
    return record


def schema_of(record: Any) -> Schema:
    """Return the schema of a record. The inverse of `record_of`.

    Raises:
        TypeError, ValueError, UserError: when it describes none.
    """
    fields = typed(dict[str, Any], record)
    recorded: list[Feature] = typed(list[Feature], fields.get("features"), "features")
    features = [_with_entity(feature, fields.get(USER), fields.get(ITEM)) for feature in recorded]
    return typed(Schema, {**fields, "features": features})


def _single(entity: str, features: Sequence[Feature]) -> list[str]:
    """Names of an entity's features with one value, in order."""
    return [
        feature.name
        for feature in features
        if feature.entity == entity and feature.has_table and not feature.multi
    ]


@dataclass(frozen=True)
class Table:
    """A feature with the size of its table in one data set.

    rows: number of rows, including row 0; for a dynamic feature the number of values in the data plus one; 0
    for a history without a table of its own, whose values are rows of the items' table. longest: most values
    of one event.
    """

    feature: Feature
    rows: int
    # Slots of shared memory are allocated once, for the largest batch that this allows.
    longest: int = 1

    @property
    def name(self) -> str:
        """Name of the feature and of its table."""
        return self.feature.name


@dataclass
class Codes:
    """A column of categories of events: codes, int32, -1 for a missing value; the sorted raw values."""

    codes: np.ndarray
    values: list[Any]


@dataclass
class Events:
    """Columns of events.

    user, item: int32, positions in `RawData`'s tables; label: float32; time: int64, seconds since 1970;
    weight: float32, weight of each event in the loss; features: column to numbers, float32 with NaN for a
    missing one, or to categories; more_labels: name of a further label to its values, float32, NaN for an
    event without it; more_weights: name of such a label to weights of its own, float32.
    """

    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    time: np.ndarray
    weight: np.ndarray | None = None
    features: dict[str, np.ndarray | Codes] = field(default_factory=dict)
    more_labels: dict[str, np.ndarray] = field(default_factory=dict)
    more_weights: dict[str, np.ndarray] = field(default_factory=dict)


def with_columns(events: Events, change: Callable[[np.ndarray], np.ndarray]) -> Events:
    """Return the events with `change` applied to each of their arrays."""

    def changed(column: Any) -> Any:
        if isinstance(column, dict):
            return {name: changed(values) for name, values in column.items()}
        if isinstance(column, Codes):
            return Codes(change(column.codes), column.values)
        return None if column is None else change(column)

    return Events(**{name: changed(column) for name, column in vars(events).items()})


@dataclass
class RawData:
    """A data set as read from its files: raw values, no table rows yet.

    `items` and `users` hold one row per id, in the order of the ids, whole numbers or texts, with the columns
    that the schema names and the files have, always titles, and dates, see `tables.derived.dates_name`.
    `official_test` and `official_validation` mark the events of a split given by the files, bool [events].
    `oracle` holds predicted labels, and `oracle_ranks` ranks of the items among those that the user had not
    had before, float32 [events]. `skipped` describes what was skipped, `num_skipped` is the number of skipped
    events. `events_per_file` has the files in the order of their events. `context` are the events that are
    only in histories, see `Schema.event_types`.
    """

    events: Events
    items: pandas.DataFrame
    users: pandas.DataFrame
    official_test: np.ndarray | None = None
    oracle: np.ndarray | None = None
    skipped: list[str] = field(default_factory=list)
    num_skipped: int = 0
    events_per_file: dict[str, int] = field(default_factory=dict)
    context: Events | None = None
    oracle_ranks: np.ndarray | None = None
    official_validation: np.ndarray | None = None
