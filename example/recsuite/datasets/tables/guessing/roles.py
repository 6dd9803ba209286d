"""Which columns of the events are the users, the items, the label, the weight and the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsuite.datasets.schema import CLICKS, COUNT, RATING, YES_NO
from recsuite.datasets.tables.description.validator import LARGEST_END
from recsuite.datasets.tables.guessing import words
from recsuite.datasets.tables.guessing.contents import (
    MOST_DAMAGED,
    Content,
    is_text,
    present,
    some_of,
    tells_time_of_day,
)
from recsuite.datasets.tables.schema_file import LIKED_SHARE, LabelColumn
from recsuite.datasets.tables.times import forms_of
from recsuite.errors import UserError, counted, printable

# The ends of usual scales: the first that holds all values is taken.
SCALES = ((1.0, 5.0), (0.5, 5.0), (0.0, 5.0), (1.0, 10.0), (0.0, 10.0), (1.0, 100.0), (0.0, 100.0))
# A scale is not guessed where its values reach no more than this share of the way up.
LEAST_REACH = 0.6
# Counts have a few values that are many times the usual one, and scales have not.
HEAVY = 5
# How much a column is like a label: it is called like one; it is yes or no; it is called like a count, and
# has only small values, as a quantity of 1 to 4 that somebody bought.
NAMED, UNNAMED, FEW = range(3)
# The columns of ids come again and again; what tells rows of the events apart does not.
MOST_DISTINCT, FEWEST_ITEMS = 0.9, 10
# So many rows must be of an id that was seen before, to say that its property is always the same.
LEAST_REPEATS = 5
# As many columns are listed where no role is recognised.
MOST_LISTED = 12
# Of a value, in a message.
MOST_CHARACTERS = 40


@dataclass(frozen=True)
class Roles:
    """The columns of the events with a role, and what the label is. Empty: there is none.

    other_labels: what could be predicted too, the likelier ones first.
    """

    user: str
    item: str
    label: LabelColumn
    weight: str = ""
    timestamp: str = ""
    other_labels: tuple[LabelColumn, ...] = ()

    @property
    def columns(self) -> set[str]:
        """All columns with a role."""
        return {self.user, self.item, self.label.column, self.weight, self.timestamp} - {""}


def roles_of(
    events: pa.Table, contents: Mapping[str, Content], own_tables: Mapping[str, Sequence[str]]
) -> Roles:
    """The roles of the columns of the events.

    contents: what the columns hold. own_tables: the columns of the "users" and "items" tables, where there
    are such: an id is in both.

    Raises:
        UserError: when there is nothing like users or items; names the columns, and says what to write.
    """
    user = _id_column(contents, words.USERS, own_tables.get("users", ()), [])
    item = _id_column(contents, words.ITEMS, own_tables.get("items", ()), [user])
    user = user or _other_id(contents, own_tables.get("users", ()), item)
    item = item or _other_id(contents, own_tables.get("items", ()), user)
    item = item or (_named_things(contents, user) if user else "")
    if not (user and item):
        raise _unrecognised(events, contents, user, item)
    rest = {name: content for name, content in contents.items() if name not in (user, item)}
    timestamp = _timestamp(events, rest, user, item)
    rest.pop(timestamp, None)
    label, others = _labels(events, rest, user, item)
    rest.pop(label.column, None)
    weight = _weight(events, rest, item)
    others = [other for other in others if other.column != weight]
    return Roles(user, item, label, weight, timestamp, tuple(others))


def _id_column(
    contents: Mapping[str, Content], known: Sequence[str], own: Sequence[str], taken: Sequence[str]
) -> str:
    """The column whose name says whose ids it holds; empty where there is none."""
    found = {
        name: (name not in own, place)
        for name, content in contents.items()
        if name not in taken and _may_be_ids(content)
        if (place := words.rank(name, known, words.IDS)) is not None
    }
    return min(found, key=lambda name: found[name]) if found else ""


def _may_be_ids(content: Content) -> bool:
    return content.kind == "text" or (content.kind == "number" and content.is_whole)


def _other_id(contents: Mapping[str, Content], own: Sequence[str], taken: str) -> str:
    """The most likely column of ids without a known name: one of both tables, or one that is called an id.

    taken: the column of the other role. Empty where there is none.
    """
    candidates = [name for name, content in contents.items() if name != taken and _may_be_ids(content)]
    shared = [name for name in candidates if name in own and words.is_id(name)]
    called = [name for name in candidates if words.is_id(name) and _comes_again(contents[name])]
    # The one with the most values; the first of several.
    return max(shared or called if taken else shared, key=lambda name: contents[name].distinct, default="")


def _named_things(contents: Mapping[str, Content], taken: str) -> str:
    """For items alone: the column of short texts with the most values, such as titles; empty without one."""
    found = [
        name
        for name, content in contents.items()
        if name != taken and content.kind == "text" and not content.is_long
        if content.distinct >= FEWEST_ITEMS and _comes_again(content)
    ]
    return max(found, key=lambda name: contents[name].distinct, default="")


def _comes_again(content: Content) -> bool:
    return content.distinct <= MOST_DISTINCT * content.size


def _unrecognised(events: pa.Table, contents: Mapping[str, Content], user: str, item: str) -> UserError:
    names = [printable(name[:40]) for name in contents]
    listed = ", ".join(names[:MOST_LISTED]) + ", ..." * (len(names) > MOST_LISTED)
    lacking = " and ".join(role for role, found in (("users", user), ("items", item)) if not found)
    written = " ".join(
        f'[{role}] column = "{found or "NAME"}"' for role, found in (("user", user), ("item", item))
    )
    rest = {name: content for name, content in contents.items() if name not in (user, item)}
    label, _ = _labels(events, rest, user, item)
    return UserError(
        f"Nothing says where the ids of {lacking} are among {counted(len(names), 'column')}: {listed}; write "
        f"a schema.toml beside the data with these parts, each on a line: {written} {_written(label)}"
    )


def _written(label: LabelColumn) -> str:
    """A label as a schema.toml has it."""
    column = f' column = "{printable(label.column)}"' if label.column else ""
    ends = f" lowest = {label.lowest:g} highest = {label.highest:g}" if label.kind == RATING else ""
    return f'[label] kind = "{label.kind}"{column}{ends}'


def _timestamp(events: pa.Table, contents: Mapping[str, Content], user: str, item: str) -> str:
    """The column with the times of the events; empty where there is none.

    A name that says so comes first; of such a time of the day, before a day alone, as partitions have; then
    the best name.
    """

    def may_be(name: str) -> bool:
        # A date of release or of birth is the same in each event of an item or a user.
        return words.rank(name, words.TIMES) is not None or not any(
            is_constant(events, name, each) for each in (user, item)
        )

    found = {
        name: (
            not _is_called_time(name),
            not tells_time_of_day(content),
            _place_of_time(name),
            "%" in content.time_format,
        )
        for name, content in contents.items()
        if content.is_time or (content.time_format and _is_called_time(name))
        if may_be(name)
    }
    called = (name for name, each in contents.items() if each.texts and words.says_time(name))
    chosen = min(found, key=lambda name: found[name]) if found else next(filter(may_be, called), "")
    if chosen:
        _check_form(contents[chosen])
    return chosen


def _is_called_time(name: str) -> bool:
    return words.says_time(name) or words.has_word(name, words.TIMES)


def _check_form(content: Content) -> None:
    """Refuse a column of times whose values have no form, two forms, or one form that is not known.

    Raises:
        UserError: with a value of each form, and the lines to write.
    """
    tried, name = some_of(content.texts), printable(content.name)
    forms = {form.name: form for form in forms_of(tried)}
    values = {each: repr(printable(form.example[:MOST_CHARACTERS])) for each, form in forms.items()}
    first, *others = [each for each in forms if each] or [""]
    advice = f'write into schema.toml, each on a line: [timestamp] column = "{name}" format = '
    if others and forms[others[0]].number > max(1, MOST_DAMAGED * len(tried)):
        raise UserError(
            f"The column {name} has times of two forms: {values[first]} ({first}) and {values[others[0]]} "
            f"({others[0]}); write all of them in one."
        )
    if not content.time_format:
        raise UserError(
            f"The column {name} is called a time, but its value {values['']} is no time of a known form; "
            f'{advice}a pattern of strptime such as "%d.%m.%Y %H:%M", or "unix" for numbers that rise with '
            "time; where it holds no times of events, write [user], [item] and [label] and no [timestamp]."
        )
    if forms[first].other:
        raise UserError(
            f"The column {name} has times such as {values[first]}, and all fit the forms {first} and "
            f"{forms[first].other}; {advice}the right one."
        )


def _place_of_time(name: str) -> int:
    place = words.rank(name, words.TIMES)
    return len(words.TIMES) + (not _is_called_time(name)) if place is None else place


def _weight(events: pa.Table, contents: Mapping[str, Content], item: str) -> str:
    """The column with the weights of the events; what an item weighs is no such thing."""
    found = [
        name
        for name, content in contents.items()
        if words.rank(name, words.WEIGHTS) is not None and content.kind == "number" and content.numbers.size
        if content.numbers.min() >= 0 and not is_constant(events, name, item)
    ]
    return found[0] if found else ""


def _labels(
    events: pa.Table, contents: Mapping[str, Content], user: str, item: str
) -> tuple[LabelColumn, list[LabelColumn]]:
    """What is predicted: the column that is most like a label; and the others that could be it."""
    owners = [owner for owner in (user, item) if owner]
    places = {
        name: place
        for name, content in contents.items()
        if content.kind in ("number", "flag") and content.distinct > 1 and content.numbers.size
        if np.abs(content.numbers).max() <= LARGEST_END
        if (place := _place_of_label(content)) is not None
        # The mean rating of an item, or how often it was seen, is a property of the item.
        if not (item and is_constant(events, name, item))
        # An answer without a name for one may be of the user.
        if place[0] != UNNAMED or not any(is_constant(events, name, owner) for owner in owners)
    }
    found = [_label_of(contents[name]) for name in sorted(places, key=lambda name: places[name])]
    # That something is yes or no alone is no reason to predict it, but a better one than a small amount.
    if all(place == UNNAMED for place, _ in places.values()):
        return LabelColumn(CLICKS), found
    return found[0], found[1:]


def _place_of_label(content: Content) -> tuple[int, int] | None:
    """How much a column is like a label, most first: by its name, then by its values; None: not at all."""
    place = words.rank(content.name, words.LABELS, words.OF_LABELS)
    if place is None:
        return (UNNAMED, 0) if _is_answer(content) else None
    is_count = words.has_word(content.name, words.COUNTS) and not _is_answer(content)
    is_few = is_count and not (_is_heavy(content) or words.has_word(content.name, words.HOW_OFTEN))
    return (FEW if is_few else NAMED, place)


def _is_answer(content: Content) -> bool:
    return {*np.unique(content.numbers).tolist()} <= {0.0, 1.0}


def _label_of(content: Content) -> LabelColumn:
    values = content.numbers
    if _is_answer(content):
        return LabelColumn(YES_NO, content.name, noun="event")
    if content.is_whole and values.min() >= 0 and _is_count(content):
        noun = "" if content.name in ("plays", "listens", "views", "clicks") else "event"
        return LabelColumn(COUNT, content.name, liked=1.0, noun=noun)
    lowest, highest = _scale_of(values)
    noun = "" if content.name in words.NOUNS else "rating"
    return LabelColumn(RATING, content.name, lowest, highest, lowest + LIKED_SHARE * (highest - lowest), noun)


def _is_count(content: Content) -> bool:
    """Whether whole numbers are counts: by the name, or because a few are many times the usual one."""
    return _is_heavy(content) or words.has_word(content.name, (*words.COUNTS, *words.ANSWERS))


def _is_heavy(content: Content) -> bool:
    numbers = content.numbers
    return bool(numbers.min() >= 1 and numbers.max() > max(10, HEAVY * np.median(numbers)))


def _scale_of(values: np.ndarray) -> tuple[float, float]:
    least, most = float(values.min()), float(values.max())
    for lowest, highest in SCALES:
        if lowest <= least and LEAST_REACH * highest <= most <= highest:
            return lowest, highest
    if least >= 0 and most <= 1:
        return 0.0, 1.0
    return float(np.floor(least)), float(np.ceil(most))


def is_constant(table: pa.Table, column: str, within: str) -> bool:
    """Whether a column has one value for each value of another one, of which enough come again to say so."""
    return repeats(table, column, within) >= LEAST_REPEATS


def repeats(table: pa.Table, column: str, within: str) -> int:
    """How many rows confirm that a column is a property of another one's values; 0 where one contradicts."""
    pairs = pa.table({"id": codes_of(table[within]), "value": codes_of(table[column])}).drop_null()
    ids = pairs.group_by("id").aggregate([("value", "count_distinct")])
    if not len(ids) or pc.max(ids["value_count_distinct"]).as_py() > 1:
        return 0
    return len(pairs) - len(ids)


def codes_of(column: pa.ChunkedArray) -> pa.Array:
    """A column of any type as integers, the same for the same value; null where there is none."""
    array = column.combine_chunks()
    if pa.types.is_nested(array.type):
        array = pa.array([None if value is None else repr(value) for value in array.to_pylist()], pa.string())
    elif is_text(array.type):
        array = present(array)
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    return encoded.indices
