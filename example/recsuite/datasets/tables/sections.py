"""Sections of a schema.toml: what the columns of tables mean."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from recsuite.datasets.schema import (
    BUCKETS,
    COUNT,
    DENSE,
    EVENT,
    ITEM,
    USER,
    VOCABULARY,
    YES_NO,
    Feature,
    Label,
    Schema,
)

# Roles of tables.
EVENTS, USERS, ITEMS = "events", "users", "items"
# Name of the file, beside the data.
FILENAME = "schema.toml"
CATEGORY, LIST, NUMBER, VECTOR = "category", "list", "number", "vector"
# Largest length of a vector, and smallest.
LONGEST_VECTOR, SHORTEST_VECTOR = 2**14, 2
# Formats of times: texts, and numbers since 1970, with the number of units in a second.
ISO, UNITS = "iso", {"unix": 1, "unix_ms": 10**3, "unix_us": 10**6, "unix_ns": 10**9}
# Entries of `LabelColumn.drop`, between its commas.
DROP = re.compile(r"\s*([<>]?)\s*([-+]?\d+(?:\.\d+)?)\s*")
# A count is stored as log(1 + count); no 64-bit count is above this.
HIGHEST_COUNT = 44.0
# Default share of a scale from which an item counts as liked: 4 on a scale of 1 to 5.
LIKED_SHARE = 0.75
# A single play or purchase counts as liked.
LIKED_COUNT = 1.0


@dataclass(frozen=True)
class Files:
    """Files of each role, relative to the folder of the schema; empty means the files found there.

    events, users, items: a file, a folder of parts or a glob pattern; several are separated by ", ".
    encoding, delimiter: of text files; an empty delimiter is guessed. columns, user_columns, item_columns:
    the names of the columns of the events, users and items, in order, if text files have no header. whole:
    columns of ids and categories that hold whole numbers; another value is a bad row. decimal_commas,
    grouping_commas: columns of numbers such as 1.234,5 and 1,234.5. constants: columns that no file of the
    events has, as NAME=VALUE. For events without a user, "user=all" adds one common user.
    """

    events: str = ""
    users: str = ""
    items: str = ""
    encoding: str = "utf-8"
    delimiter: str = ""
    columns: tuple[str, ...] = ()
    user_columns: tuple[str, ...] = ()
    item_columns: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    decimal_commas: tuple[str, ...] = ()
    grouping_commas: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze_lists(self)


def _freeze_lists(section: object) -> None:
    """Replace the lists of TOML in a section by tuples."""
    for name, value in vars(section).items():
        if isinstance(value, list):
            object.__setattr__(section, name, tuple(value))


@dataclass(frozen=True)
class UserColumn:
    """Column of the events with the ids of users, and the noun for a user.

    table_column: the id column of the users' own table; empty means the same name. ids: one of
    `datasets.schema.IDS`.
    """

    column: str
    noun: str = USER
    table_column: str = ""
    ids: str = VOCABULARY

    @property
    def own_column(self) -> str:
        """Id column of the users' own table."""
        return self.table_column or self.column


@dataclass(frozen=True)
class ItemColumn:
    """Column of the events with the ids of items, and the noun for an item.

    title: the column with the titles of items; empty if there is none. table_column, ids: see `UserColumn`.
    """

    column: str
    title: str = ""
    noun: str = ITEM
    table_column: str = ""
    ids: str = VOCABULARY

    @property
    def own_column(self) -> str:
        """Id column of the items' own table."""
        return self.table_column or self.column


@dataclass(frozen=True)
class LabelColumn:
    """Predicted label: a rating, yes_no, clicks (no column: each event is a 1), or a count.

    lowest, highest: the ends of the scale of a rating. liked: the least rating or count of a liked item, in
    the unit of the column. noun: the name of one event; empty means the name of the column. drop: values that
    are no labels; their events are skipped: numbers, "<0" or ">5", separated by commas. weight: of a label
    after the first, a column with weights of its values, in addition to those of the events.
    """

    kind: str
    column: str = ""
    lowest: float = 0.0
    highest: float = 1.0
    liked: float = 0.5
    noun: str = ""
    drop: str = ""
    weight: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """Least and greatest label that a model may predict, as transformed by reading."""
        return (0.0, HIGHEST_COUNT) if self.kind == COUNT else (float(self.lowest), float(self.highest))

    @property
    def liked_label(self) -> float:
        """Least label of a liked item, as transformed by reading."""
        return math.log1p(self.liked) if self.kind == COUNT else float(self.liked)

    @property
    def name(self) -> str:
        """Noun for one event."""
        # Messages form the plural with an s.
        return self.noun or self.key.removesuffix("s") or "click"

    @property
    def key(self) -> str:
        """Name of a label after the first, and of its metrics."""
        return self.noun or re.sub(r"\W+", "_", self.column).strip("_")


@dataclass(frozen=True)
class WeightColumn:
    """Column of the events with their weights in the loss."""

    column: str


@dataclass(frozen=True)
class TimestampColumn:
    """Column of the events with their times.

    format: iso, unix (seconds since 1970), unix_ms, unix_us, unix_ns or a pattern of strptime.
    """

    column: str
    format: str = "iso"


@dataclass(frozen=True)
class EventTypes:
    """Column of the events with their types, such as view, cart and purchase.

    target: the type that is predicted; context: the types that are only in user histories. Events of other
    types are skipped.
    """

    type: str
    target: str
    context: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze_lists(self)


@dataclass(frozen=True)
class FeatureColumn:
    """Property of a user, an item or an event.

    of: "user", "item" or "event". column: a column of the users', items' or events' table, or a derived one,
    such as hour(timestamp). kind: category, list, number or vector. input: of a number, buckets or dense.
    separator: between the entries of a list in a text; lists of typed files have none. ids: of a category or
    a list, see `UserColumn`. length: of a vector, its numbers.
    """

    of: str
    column: str
    kind: str
    input: str = BUCKETS
    separator: str = "|"
    ids: str = VOCABULARY
    length: int = 1

    def named(self, name: str) -> Feature:
        """Return the feature of the rest of the library, with this name."""
        number = {NUMBER: self.input, VECTOR: DENSE}.get(self.kind, "")
        return Feature(name, self.of, self.column, self.kind == LIST, number, self.ids, self.length)


@dataclass(frozen=True)
class TableSchema:
    """Content of a schema.toml.

    features: by name; their tables have the same names. more_labels: the labels after the first.
    """

    user: UserColumn
    item: ItemColumn
    label: LabelColumn
    files: Files = Files()
    weight: WeightColumn | None = None
    timestamp: TimestampColumn | None = None
    events: EventTypes | None = None
    features: dict[str, FeatureColumn] = field(default_factory=dict)
    more_labels: tuple[LabelColumn, ...] = ()

    @property
    def title_column(self) -> str:
        """Column of the titles in the parsed items.

        It is never a feature's column or the id column, because titles are texts and none is missing.
        """
        title = self.item.title or "title"
        taken = {feature.column for feature in self.features.values() if feature.of == ITEM}
        while title in {self.item.column, *taken}:
            title += "_"
        return title

    def schema(self) -> Schema:
        """Return the schema for the rest of the library: features with entities, nouns, the range of labels.

        Raises:
            UserError: where the features do not tell users or items apart.
        """
        lowest, highest = self.label.range
        return Schema(
            features=(
                Feature(self.user.noun, USER, self.user.column, ids=self.user.ids),
                *self._features_of(USER),
                Feature(self.item.noun, ITEM, self.item.column, ids=self.item.ids),
                *self._features_of(ITEM),
                *self._features_of(EVENT),
            ),
            user=self.user.noun,
            item=self.item.noun,
            title=self.title_column,
            label=self.label.name,
            lowest_label=lowest,
            highest_label=highest,
            liked_label=self.label.liked_label,
            label_kind=self.label.kind,
            **({"answer": self.label.column} if self.label.kind == YES_NO else {}),
            more_labels=tuple(Label(each.key, each.kind) for each in self.more_labels),
            # In any order of the file: a position is a weight of the model.
            event_types=(self.events.target, *sorted(self.events.context)) if self.events else (),
        )

    def _features_of(self, entity: str) -> list[Feature]:
        return [feature.named(name) for name, feature in self.features.items() if feature.of == entity]


SECTIONS = {
    "files": Files,
    "user": UserColumn,
    "item": ItemColumn,
    "label": LabelColumn,
    "weight": WeightColumn,
    "timestamp": TimestampColumn,
    "events": EventTypes,
}
FEATURES = "features"
