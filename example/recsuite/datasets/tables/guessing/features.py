"""Features by default, of users and items alone, and the columns that are none, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from recsuite.datasets.schema import EVENT, ITEM
from recsuite.datasets.tables.guessing import words
from recsuite.datasets.tables.guessing.contents import Content
from recsuite.datasets.tables.schema_file import CATEGORY, ISO, LIST, NUMBER, FeatureColumn

# Fewer different whole numbers than this are rather names of classes.
FEW_NUMBERS = 10
# What pandas calls the index of a table that was written with it.
INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")
# A property that differs for nearly every user or item says no more than its id; of fewer, nothing is known.
NEARLY_ALL, LEAST_KNOWN = 0.9, 20
NO_ISO = "it holds dates of another form than 2026-11-20, which are not read"
AGE_TELLS = "its age at an event says which item that is of, which is not known before one is chosen"
OF_EVENT = "it differs from event to event; use it only if it is known before the label"
OUTCOME = "by its name it could be a label itself, or be counted from labels"


@dataclass(frozen=True)
class LeftOut:
    """A column that is no feature: the name and the section that it would have, and why it has not; values:
    some of its values, as text.
    """

    name: str
    feature: FeatureColumn
    why: str
    values: str = ""


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
    kind = kind_of(content)
    # A list of an event can be no feature, but may be used as it stands there.
    kind = CATEGORY if of == EVENT and kind == LIST else kind
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
    if words.has_word(content.name, words.OUTCOMES):
        return OUTCOME
    if of == EVENT:
        return OF_EVENT
    # Of those that have one at all.
    num_known = min(num_owners, content.size)
    is_id = kind_of(content) == CATEGORY and num_known >= LEAST_KNOWN
    if is_id and content.distinct > NEARLY_ALL * num_known:
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
