"""Sections of a schema.toml as dataclasses: the meaning of the columns of a user's own tables.

A file with these sections, all of which but [user], [item] and [label] may be left out:

    [files]             which files hold the events, users and items
    [user]              the columns with the ids of users
    [item]              the columns with the ids of items, and that of their titles
    [label]             what is predicted, and the ends of its scale; of several labels [[label]] for each
    [weight]            the column with the weights of the events
    [timestamp]         the column with their times
    [features.NAME]     a property of users, items or events; one section for each
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from recsuite.datasets.schema import (
    BUCKETS,
    COUNT,
    EVENT,
    ITEM,
    USER,
    VOCABULARY,
    YES_NO,
    Feature,
    Label,
    Schema,
)
from recsuite.datasets.tables.remote import is_remote
from recsuite.errors import printable
from recsuite.files import explained, place_for

# What the file is called, beside the data.
FILENAME = "schema.toml"
CATEGORY, LIST, NUMBER = "category", "list", "number"
# Forms of times: texts, and numbers that count from 1970, with how many of each make a second.
ISO, UNITS = "iso", {"unix": 1, "unix_ms": 10**3, "unix_us": 10**6, "unix_ns": 10**9}
# What `LabelColumn.drop` may have between its commas.
DROP = re.compile(r"\s*([<>]?)\s*([-+]?\d+(?:\.\d+)?)\s*")
# A count is kept as log(1 + count); no count of 64 bits goes beyond this.
HIGHEST_COUNT = 44.0
# The share of a scale from which on an item counts as liked, where nothing else is said: 4 of 1 to 5.
LIKED_SHARE = 0.75
# A single play or purchase counts as liked.
LIKED_COUNT = 1.0


def schema_path(path: str | Path) -> Path:
    """Path of the schema of some tables: in their folder, or that of a file; of a URL in the working one.

    Where it is not there and cannot be written there, it is where the columns of such tables are.
    """
    if is_remote(str(path)):
        return Path.cwd() / FILENAME
    with explained(f"{printable(path)} cannot be looked at"):
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        beside = folder / FILENAME
        return beside if beside.exists() or not folder.is_dir() else place_for(folder, FILENAME)


@dataclass(frozen=True)
class Files:
    """Which files hold what, relative to the folder of the schema; empty means what is found there.

    events, users, items: a file, a folder of parts or a glob pattern; several have ", " between them.
    encoding, delimiter: of text files; no delimiter means that it is found. columns, user_columns,
    item_columns: the names of the columns of the events, users and items, in their order, where text files
    have no header. whole: columns of ids and categories that hold whole numbers; another value is a bad row.
    constants: columns that no file of the events has, as NAME=VALUE: of events without a user, "user=all"
    makes one user of all.
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
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # As TOML has them.
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))


@dataclass(frozen=True)
class UserColumn:
    """The column of the events with the ids of users, and their noun.

    table_column: that of the users' own table; empty means that it has the same name. ids: one of
    `datasets.schema.IDS`.
    """

    column: str
    noun: str = USER
    table_column: str = ""
    ids: str = VOCABULARY

    @property
    def own_column(self) -> str:
        """The column of the users' own table with their ids."""
        return self.table_column or self.column


@dataclass(frozen=True)
class ItemColumn:
    """The column of the events with the ids of items, and their noun.

    title: the column with what people call an item; empty where there is none. table_column, ids: as of
    users.
    """

    column: str
    title: str = ""
    noun: str = ITEM
    table_column: str = ""
    ids: str = VOCABULARY

    @property
    def own_column(self) -> str:
        """The column of the items' own table with their ids."""
        return self.table_column or self.column


@dataclass(frozen=True)
class LabelColumn:
    """What is predicted: a rating, yes_no, clicks (no column: each event is a 1), or a count.

    lowest, highest: the ends of the scale of a rating. liked: from here on an item counts as liked, of a
    rating or a count, in the unit of the column. noun: what one event is called; empty means by the column.
    drop: values that are no labels, whose events are left out: numbers, "<0" or ">5", with commas between.
    weight: of a further label, a column with the weights that its values have beside those of the events.
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
        """The least and the greatest label that a model may predict, after what reading does to it."""
        return (0.0, HIGHEST_COUNT) if self.kind == COUNT else (float(self.lowest), float(self.highest))

    @property
    def liked_label(self) -> float:
        """From which label on an item counts as liked, after what reading does to it."""
        return math.log1p(self.liked) if self.kind == COUNT else float(self.liked)

    @property
    def name(self) -> str:
        """What one event is called."""
        # Sentences make the plural with an s.
        return self.noun or self.key.removesuffix("s") or "click"

    @property
    def key(self) -> str:
        """The name of a label after the first, and of its metrics."""
        return self.noun or re.sub(r"\W+", "_", self.column).strip("_")


@dataclass(frozen=True)
class WeightColumn:
    """The column of the events that says how much each counts in the loss."""

    column: str


@dataclass(frozen=True)
class TimestampColumn:
    """The column of the events with their times.

    format: iso, unix (seconds since 1970), unix_ms, unix_us, unix_ns or a pattern of strptime.
    """

    column: str
    format: str = "iso"


@dataclass(frozen=True)
class FeatureColumn:
    """One property of a user, an item or an event.

    of: "user", "item" or "event". column: a column of the table of those or of the events, or a derived one,
    such as hour(timestamp). kind: category, list or number. input: of a number, buckets or dense. separator:
    what stands between the entries of a list in a text; lists of typed files have none. ids: as of users, of
    a category or a list.
    """

    of: str
    column: str
    kind: str
    input: str = BUCKETS
    separator: str = "|"
    ids: str = VOCABULARY


@dataclass(frozen=True)
class TableSchema:
    """All that a schema.toml says.

    features: by their names, which their tables have too; more_labels: those after the first.
    """

    user: UserColumn
    item: ItemColumn
    label: LabelColumn
    files: Files = Files()
    weight: WeightColumn | None = None
    timestamp: TimestampColumn | None = None
    features: dict[str, FeatureColumn] = field(default_factory=dict)
    more_labels: tuple[LabelColumn, ...] = ()

    @property
    def title_column(self) -> str:
        """Where the parsed items keep their titles: never a column of a feature, nor that of the ids, since
        titles are texts and none is missing.
        """
        title = self.item.title or "title"
        taken = {feature.column for feature in self.features.values() if feature.of == ITEM}
        while title in {self.item.column, *taken}:
            title += "_"
        return title

    def schema(self) -> Schema:
        """What the rest of the library works with: features with entities, nouns, the range of labels.

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
        )

    def _features_of(self, entity: str) -> list[Feature]:
        return [
            Feature(name, entity, feature.column, feature.kind == LIST, _input_of(feature), feature.ids)
            for name, feature in self.features.items()
            if feature.of == entity
        ]


def _input_of(feature: FeatureColumn) -> str:
    return feature.input if feature.kind == NUMBER else ""
