"""Which other columns are features, of whom, and of what kind; and which are none, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.guessing import words
from recsuite.datasets.tables.guessing.contents import Content
from recsuite.datasets.tables.guessing.roles import LEAST_REPEATS, Roles, repeats
from recsuite.datasets.tables.schema_file import CATEGORY, LIST, NUMBER, FeatureColumn
from recsuite.datasets.tables.times import ISO

# Fewer different whole numbers than this are rather names of classes.
FEW_NUMBERS = 10
# What pandas calls the index of a table that was written with it.
INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")
# A property that differs for nearly every user or item says no more than its id; of fewer, nothing is known.
NEARLY_ALL, LEAST_KNOWN = 0.9, 20
# Why what depends on the item is no feature of an event by which all items are ranked.
TELLS = "it differs between items and says which one an event is of, which is not known before one is chosen"
NO_ISO = "it holds dates of another form than 2026-11-20, which are not read"
AGE_TELLS = "its age at an event says which item that is of, which is not known before one is chosen"


@dataclass(frozen=True)
class LeftOut:
    """A column that is no feature: the name and the section that it would have, and why it has not."""

    name: str
    feature: FeatureColumn
    why: str

    def __str__(self) -> str:
        return f"the column {self.feature.column} of the {self.feature.of}s is left out: {self.why}"


def owner_of(events: pa.Table, column: str, roles: Roles) -> str:
    """Of whom a column of the events tells: an item or a user, where it is the same in each of theirs."""
    confirmed = {ITEM: repeats(events, column, roles.item), USER: repeats(events, column, roles.user)}
    owner = max(confirmed, key=lambda each: confirmed[each])
    return owner if confirmed[owner] >= LEAST_REPEATS else EVENT


def feature_of(
    content: Content, of: str, num_owners: int, has_times: bool, is_ranked: bool
) -> tuple[FeatureColumn, str]:
    """The section of a column, and why it is to be left out; the reason is empty where it is not.

    num_owners: how many users, items or events there are in the sample. has_times: whether events have times.
    is_ranked: whether the label is one that items are ranked by.
    """
    why = _reason(content, of, num_owners, has_times)
    if content.is_time and of == ITEM and is_ranked:
        why = why or AGE_TELLS
    if content.is_time and not why:
        return FeatureColumn(EVENT, f"age_days({of}.{content.name})", NUMBER), ""
    # A list of an event can be no feature, but may be used as it stands there.
    kind = CATEGORY if why and of == EVENT else kind_of(content)
    return FeatureColumn(of, content.name, kind, separator=content.separator or "|"), why


def kind_of(content: Content) -> str:
    """Whether the values of a column are categories, lists or numbers."""
    if content.kind == "list":
        return LIST
    if content.kind != "number" or words.has_word(content.name, words.CODES):
        return CATEGORY
    return CATEGORY if content.is_whole and content.distinct <= FEW_NUMBERS else NUMBER


def _reason(content: Content, of: str, num_owners: int, has_times: bool) -> str:
    """Why a column is no feature; empty where it is one."""
    if content.size == 0:
        return "it is empty"
    if INDEX.fullmatch(content.name):
        return "it is the index that pandas wrote, and numbers the rows"
    if content.kind == "comma":
        return "it holds numbers with decimal commas, which are not read; write them with points"
    if content.kind == "other":
        return "values of its type are not read"
    # The day of a partition too: the first rows may be of one, which then seems to be the same for each user.
    if content.distinct == 1 and content.kind != "list":
        return "it has one value"
    if content.is_time:
        return _reason_of_dates(of, has_times) or NO_ISO * (content.time_format != ISO)
    if content.is_long:
        return "it holds long texts, and nothing reads texts yet"
    if content.kind == "list":
        return "it holds lists, which only users and items can have" if of == EVENT else ""
    # Of those that have one at all.
    num_known = min(num_owners, content.size)
    # Whole numbers of an event count orders or lines where nearly all differ.
    tells_apart = kind_of(content) == CATEGORY or (of == EVENT and content.is_whole)
    if tells_apart and num_known >= LEAST_KNOWN and content.distinct > NEARLY_ALL * num_known:
        return "nearly all of its values differ, as those of an id do"
    return ""


def _reason_of_dates(of: str, has_times: bool) -> str:
    if of == EVENT:
        return "it holds times, and the events have others"
    return "" if has_times else "it holds dates, and without times of the events these tell no age"


def is_title(name: str) -> bool:
    """Whether a column of items holds what people call them: "title", "name" or "product_name", say."""
    return words.rank(name, words.TITLES, words.ITEMS) is not None


def title_of(contents: Mapping[str, Content]) -> str:
    """The column with the titles of items; empty where there is none."""
    found = [
        name for name, content in contents.items() if content.kind in ("text", "list") and is_title(name)
    ]
    return min(found, key=lambda name: not words.has_word(name, words.TITLES[:1])) if found else ""
