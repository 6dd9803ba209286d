"""Schema of any data set: features of users and items, and events that join the two.

Knows numbers and names only, so a data worker may import it. The features of one family of data sets, and
what it calls its users, items and labels, are its `Schema`; generic code says user, item, event and label.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recsuite.errors import UserError
from recsuite.files import OPTIONAL, plain, typed

# For types alone: a data worker imports this file, and starting it must not take an import of pandas.
if TYPE_CHECKING:
    import numpy as np
    import pandas

# Beside the columns, and in every full checkpoint and export made of them.
SCHEMA_FILE = "schema.json"
# Row 0 of every table stands for "unknown": a value that the training events never show.
UNKNOWN_ROW = 0
USER, ITEM, EVENT = "user", "item", "event"
# What an event joins, in the order of its columns.
ENTITIES = (USER, ITEM)
# How a number becomes an input: by the row of its bucket, or as it is, on a common scale.
BUCKETS, DENSE = "buckets", "dense"
# How the values of categories become rows of a table: by a list of those that the training shows, or by ids,
# of which the table takes in any.
VOCABULARY, DYNAMIC = IDS = ("vocabulary", "dynamic")
# What a label can be: a number on a scale, one of two answers, that an event happened at all, or how often.
RATING, YES_NO, CLICKS, COUNT = LABEL_KINDS = ("rating", "yes_no", "clicks", "count")
# Items that a user had: left out of negatives, rankings and recommendations, or like any other item.
EXCLUDE, ALLOW = "exclude", "allow"
# The features that say who had what, and their entities: of an event's user other items, of its item users.
HISTORY, AUDIENCE = LISTS = ("history", "audience")


@dataclass(frozen=True)
class Feature:
    """One property of a user, of an item, of an event or of a list, with an embedding table of its own unless
    it is a dense number.

    The name is the key in the KeyedJaggedTensor and the name of the table; the entity is USER, ITEM, EVENT,
    HISTORY or AUDIENCE; the column is where the parsed files keep the raw values, hashable and of one type
    (lists of them when multi, floats when it is a number). number: "" for categories; BUCKETS, where each
    quantile of the training has a table row; or DENSE, an input of the dense part. ids: one of IDS.
    """

    name: str
    entity: str
    column: str
    multi: bool = False
    number: str = ""
    ids: str = field(default=VOCABULARY, metadata=OPTIONAL)

    @property
    def is_dynamic(self) -> bool:
        """Whether batches have ids of its values, and not rows of its table."""
        return self.ids == DYNAMIC

    @property
    def has_table(self) -> bool:
        """Whether its values are rows of a table, and not numbers in the batch."""
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
    """What a data set tells of its users, items and events, and what it calls them.

    features: in any order. user, item: the name of the feature that tells users or items apart. It is the one
    that a history holds and that a ranking finds, and what files and sentences call a user or an item. title:
    the column with what people call an item; it need not be a feature's. label: the noun for what is
    predicted; lowest_label, highest_label: its range; liked_label: from here on an item counts as liked;
    label_kind: one of LABEL_KINDS; answer: what a yes of YES_NO is called; seen: EXCLUDE or ALLOW.
    more_labels: further labels of an event, where there are several; all else here is of the first.
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
    more_labels: tuple[Label, ...] = field(default=(), metadata=OPTIONAL)

    def __post_init__(self) -> None:
        """Refuse a table of features that does not tell users or items apart.

        Raises:
            UserError: names the entity and the features that it has.
        """
        # Histories, rankings and reports all go by this feature; without it they would fail much later.
        for entity in ENTITIES:
            name, names = self.name_of(entity), _single(entity, self.features)
            if name not in names:
                raise UserError(
                    f"The table of features has {', '.join(names) or 'nothing'} for a {name}, and not the "
                    f'feature "{name}" itself; put it back into the schema of the data set.'
                )

    @property
    def excludes_seen(self) -> bool:
        """True if items that a user had are no negatives, and neither ranked nor recommended."""
        return self.seen == EXCLUDE

    @property
    def items(self) -> str:
        """The noun for several items."""
        return f"{self.item}s"

    @property
    def labels(self) -> str:
        """The noun for several labels, and so for events."""
        return f"{self.label}s"

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of all L labels of an event, the first one first."""
        first = self.answer if self.label_kind == YES_NO else self.label
        return first, *(each.name for each in self.more_labels)

    @property
    def history(self) -> Feature:
        """The other items that the user had. Its values are rows like those of the items' own feature, in a
        table of their own.
        """
        # A shared row would have to say both what an item is and what it reveals about those who had it.
        return self._list(HISTORY, self.item)

    @property
    def audience(self) -> Feature:
        """The other users who had the item, likewise."""
        return self._list(AUDIENCE, self.user)

    def _list(self, name: str, members: str) -> Feature:
        of_members = next(feature for feature in self.features if feature.name == members)
        return Feature(name, name, of_members.column, multi=True, ids=of_members.ids)

    @property
    def ids(self) -> tuple[str, str]:
        """The names of the features that tell users, and items, apart."""
        return self.user, self.item

    @property
    def unit(self) -> float:
        """That by which differences of labels are measured: a quarter of their range, 1 of 1 to 5 stars."""
        width = self.learned(self.highest_label) - self.learned(self.lowest_label)
        return width / 4 if self.label_kind != YES_NO and width > 0 else 1.0

    def learned(self, label: float) -> float:
        """A label as it is learned: counts by their logarithm, all others as they are."""
        return math.log1p(label) if self.label_kind == COUNT else label

    def shown(self, label: float) -> float:
        """A label as people have it. The inverse of `learned`."""
        return math.expm1(label) if self.label_kind == COUNT else label

    def name_of(self, entity: str) -> str:
        """What files and sentences call an entity: the name of the feature that tells its members apart."""
        return {USER: self.user, ITEM: self.item}.get(entity, entity)

    def column_of(self, entity: str) -> str:
        """Where the parsed files keep the raw ids of users or items."""
        return next(feature.column for feature in self.features if feature.name == self.name_of(entity))

    def with_ids(self, ids: str) -> Schema:
        """The same with other ids for all features of categories. ids: one of IDS."""
        features = (
            feature if feature.number else dataclasses.replace(feature, ids=ids) for feature in self.features
        )
        return dataclasses.replace(self, features=tuple(features))

    def place_of(self, entity: str, features: Sequence[Feature]) -> int:
        """Where, among an entity's features with one value, the one is that tells its members apart."""
        return _single(entity, features).index(self.name_of(entity))

    def vocabulary_of(self, table: str) -> str:
        """The feature whose raw values the rows of a table stand for: lists have those of their members."""
        return {HISTORY: self.item, AUDIENCE: self.user}.get(table, table)

    def recorded(self, feature: Feature) -> Feature:
        """A feature as files have it: they call its entity what the data set calls it."""
        return dataclasses.replace(feature, entity=self.name_of(feature.entity))

    def restored(self, feature: Feature) -> Feature:
        """A feature of which a file tells. The inverse of `recorded`."""
        entities = {self.name_of(entity): entity for entity in ENTITIES}
        return dataclasses.replace(feature, entity=entities.get(feature.entity, feature.entity))


def record_of(schema: Schema, features: Sequence[Feature]) -> dict[str, Any]:
    """A schema as a file has it, with those of its features that a model has, in the order in which it adds
    them up.
    """
    # Sums of floats in another order are rounded otherwise, and a served model would score otherwise.
    recorded = [plain(schema.recorded(feature)) for feature in features]
    found = {**dataclasses.asdict(schema), "features": recorded}
    # Files of data with one label stay as they were before there could be several.
    return found if schema.more_labels else {name: found[name] for name in found if name != "more_labels"}


def schema_of(record: Any) -> Schema:
    """The inverse of `record_of`.

    Raises:
        TypeError, ValueError, UserError: when it describes none.
    """
    fields = typed(dict[str, Any], record)
    recorded: list[Feature] = typed(list[Feature], fields.get("features"), "features")
    entities = {fields.get(USER): USER, fields.get(ITEM): ITEM}
    features = [
        dataclasses.replace(feature, entity=entities.get(feature.entity, feature.entity))
        for feature in recorded
    ]
    schema: Schema = typed(Schema, {**fields, "features": features})
    return schema


def _single(entity: str, features: Sequence[Feature]) -> list[str]:
    """The names of an entity's features with one value, in their order."""
    return [
        feature.name
        for feature in features
        if feature.entity == entity and feature.has_table and not feature.multi
    ]


@dataclass(frozen=True)
class Table:
    """A feature as one data set shows it: how many rows its table has, row 0 included. Of a dynamic one that
    is how many values the data have, and one more. With no row it has no table of its own: its values are
    rows of what it lists.

    longest: the most values that one event has of it.
    """

    feature: Feature
    rows: int
    # Slots of shared memory are allocated once, for the largest batch that this allows.
    longest: int = 1

    @property
    def name(self) -> str:
        """The feature's name, which is also the table's."""
        return self.feature.name


@dataclass
class Codes:
    """A column of categories, one an event: codes int32, -1 where there is none; the sorted raw values that
    they count.
    """

    codes: np.ndarray
    values: list[Any]


@dataclass
class Events:
    """One event a position: user and item int32, positions in `RawData`'s tables; label float32; time int64
    (seconds since 1970).

    weight: float32, how much each counts in the loss; features: column to numbers, float32 with NaN where
    there is none, or to categories; more_labels: name of a further label to its values, float32, NaN where an
    event lacks it; more_weights: name of such a label to weights of its own, float32.
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
    """The events with another array for each of theirs."""

    def changed(column: Any) -> Any:
        if isinstance(column, dict):
            return {name: changed(values) for name, values in column.items()}
        if isinstance(column, Codes):
            return Codes(change(column.codes), column.values)
        return None if column is None else change(column)

    return Events(**{name: changed(column) for name, column in vars(events).items()})


@dataclass
class RawData:
    """A data set as its files show it: raw values, no table rows yet.

    `items` and `users` hold one row per id, in the order of the ids, whole numbers or texts, with the columns
    that the schema names and the files have, titles always, and dates, see `tables.derived.dates_name`.
    `official_test` and `official_validation` mark the events of a split that the files have, bool, one an
    event; `oracle` predicts labels
    and `oracle_ranks` ranks items among those that the user had not had before, float32. `skipped` says what
    was left out, `num_skipped` how many events. `events_per_file` has the files in the order of their events.
    """

    events: Events
    items: pandas.DataFrame
    users: pandas.DataFrame
    official_test: np.ndarray | None = None
    oracle: np.ndarray | None = None
    skipped: list[str] = field(default_factory=list)
    num_skipped: int = 0
    events_per_file: dict[str, int] = field(default_factory=dict)
    oracle_ranks: np.ndarray | None = None
    official_validation: np.ndarray | None = None
