"""Which columns of the events are the users, the items, the label, the weight and the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recsuite.datasets.schema import CLICKS, COUNT, RATING, YES_NO
from recsuite.datasets.tables.description.validator import LARGEST_END
from recsuite.datasets.tables.description.writer import toml_of
from recsuite.datasets.tables.guessing import words
from recsuite.datasets.tables.guessing.contents import (
    MOST_DAMAGED,
    Content,
    encoded,
    indices_of,
    is_text,
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
MOST_DISTINCT = 0.9
# A property of an id: as many rows must be expected to contradict it by chance, to say anything; so many may,
# as a share of those, and of all rows.
LEAST_BY_CHANCE, OF_CHANCE, MOST_CONTRADICTING = 5, 0.1, 0.01
# Of counts, the share that returns may make.
MOST_RETURNED = 0.5
# What is written where an answer is missing, when it is so many times the largest other value; of scales of
# so many values at least.
FILLERS, FAR, LEAST_SCALE = (99, 999, 9999), 3, 4
# Zeros of a scale are asked about where they are so many times as many as its next value.
MOST_OF_ZERO = 2
# As many columns are listed where no role is recognised.
MOST_LISTED = 12
# Of a value, in a message.
MOST_CHARACTERS = 40


@dataclass(frozen=True)
class Roles:
    """The columns of the events with a role, and what the label is. Empty: there is none.

    notes: sentences on what is unusual about the labels.
    """

    user: str
    item: str
    label: LabelColumn
    weight: str = ""
    timestamp: str = ""
    notes: tuple[str, ...] = ()
    of_labels: frozenset[str] = frozenset()

    @property
    def columns(self) -> set[str]:
        """All columns with a role."""
        return {self.user, self.item, self.label.column, self.weight, self.timestamp, *self.of_labels} - {""}


def roles_of(
    events: pa.Table,
    contents: Mapping[str, Content],
    own_tables: Mapping[str, Sequence[str]],
    given: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Roles:
    """The roles of the columns of the events: by names that say them.

    contents: what the columns hold. own_tables: the columns of the "users" and "items" tables, where there
    are such: an id is in both. given: the sections of a schema that were written by hand, which count.

    Raises:
        UserError: when no name says which column has the users or the items; names the columns, and says
            what to write.
    """
    user, item, label, weight, timestamp = (
        str(given.get(section, {}).get("column", ""))
        for section in ("user", "item", "label", "weight", "timestamp")
    )
    user = user or _id_column(contents, words.USERS, own_tables.get("users", ()), (item, label))
    item = item or _id_column(contents, words.ITEMS, own_tables.get("items", ()), (user, label))
    user = user or _only_id(contents, item)
    item = item or _only_id(contents, user) or _named_item(contents, user)
    if not (user and item):
        raise _unrecognised(contents, user, item)
    more: Any = given.get("more_labels", ())
    of_labels = frozenset(each.get(key, "") for each in more for key in ("column", "weight"))
    taken = {user, item, label, weight, *of_labels}
    rest = {name: content for name, content in contents.items() if name not in taken}
    if "timestamp" not in given:
        timestamp = _timestamp(events, rest, user, item)
    else:
        timestamp = timestamp or _named_time(rest)
        if timestamp in contents and "format" not in given["timestamp"]:
            _check_form(contents[timestamp])
    rest.pop(timestamp, None)
    found = _label(events, contents[label] if label else rest, (user, item), given.get("label", {}))
    rest.pop(found.column, None)
    weight = weight or _weight(events, rest, item)
    notes: tuple[str, ...] = ()
    if found.column:
        # A scale or a drop that was written by hand says itself what is an answer.
        is_given = bool({"drop", "lowest", "highest"} & given.get("label", {}).keys())
        found, notes = _set_apart(found, contents[found.column], is_given)
    return Roles(user, item, found, weight, timestamp, notes, of_labels)


def _id_column(
    contents: Mapping[str, Content], known: Sequence[str], own: Sequence[str], taken: Sequence[str]
) -> str:
    """The column whose name says whose ids it holds; empty where there is none."""
    found = {
        name: (name not in own, place)
        for name, content in contents.items()
        if name not in taken and _may_be_ids(content)
        if (place := words.rank(name, known, words.BESIDE_IDS)) is not None
    }
    return min(found, key=lambda name: found[name]) if found else ""


def _may_be_ids(content: Content) -> bool:
    return content.kind == "text" or (content.kind == "number" and content.is_whole)


def _only_id(contents: Mapping[str, Content], taken: str) -> str:
    """The only other column that is called an id, but not one of an event, and whose values come again."""
    found = [
        name
        for name, content in contents.items()
        if taken and name != taken and _may_be_ids(content)
        if words.is_id(name) and not words.has_word(name, words.EVENTS)
        if content.distinct <= MOST_DISTINCT * content.size
    ]
    return found[0] if len(found) == 1 else ""


def _named_item(contents: Mapping[str, Content], user: str) -> str:
    """The column with the titles of items, such as "game-title", where they have no other id."""
    found = [
        name
        for name, content in contents.items()
        if user and content.kind == "text" and not content.is_long
        if words.rank(name, words.ITEMS, words.TITLES) is not None
    ]
    return found[0] if len(found) == 1 else ""


def _named_time(contents: Mapping[str, Content]) -> str:
    """The column whose name says most that it holds times, whatever its values."""
    found = [name for name in contents if words.has_word(name, words.TIMES)]
    if not found:
        raise UserError(
            "The section [timestamp] has no column, and no column of the events is called as times are; "
            'write column = "NAME" there.'
        )
    return min(found, key=_place_of_time)


def _unrecognised(contents: Mapping[str, Content], user: str, item: str) -> UserError:
    names = [printable(name[:40]) for name in contents]
    listed = ", ".join(names[:MOST_LISTED]) + ", ..." * (len(names) > MOST_LISTED)
    lacking = [role for role, found in (("user", user), ("item", item)) if not found]
    written = ", then ".join(f'[{role}] and column = "NAME"' for role in lacking)
    return UserError(
        f"Nothing says where the ids of {' and '.join(f'{role}s' for role in lacking)} are among "
        f"{counted(len(names), 'column')}: {listed}; write a schema.toml beside the data with the lines "
        f"{written}; what it does not say is guessed."
    )


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
    advice = f"write into schema.toml, each on a line: [timestamp] column = {toml_of(content.name)} format = "
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
            f"{forms[first].other}; {advice}{toml_of(first)} or format = {toml_of(forms[first].other)}."
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


def _label(
    events: pa.Table,
    contents: Content | Mapping[str, Content],
    owners: Sequence[str],
    given: Mapping[str, Any],
) -> LabelColumn:
    """What is predicted: the column that is most like a label; a column alone is the label."""
    if given.get("kind") == CLICKS:
        return LabelColumn(CLICKS)
    if isinstance(contents, Content):
        is_number = contents.kind in ("number", "flag") and contents.numbers.size
        return _label_of(contents, given) if is_number else LabelColumn(YES_NO, contents.name, noun="event")
    places = {
        name: place
        for name, content in contents.items()
        if content.kind in ("number", "flag") and content.distinct > 1 and content.numbers.size
        if np.abs(content.numbers).max() <= LARGEST_END
        if (place := place_of_label(content)) is not None
        # The mean rating of an item, or how often it was seen, is a property of the item.
        if not is_constant(events, name, owners[1])
        # An answer without a name for one may be of the user.
        if place[0] != UNNAMED or not is_constant(events, name, owners[0])
    }
    # That something is yes or no alone is no reason to predict it, but a better one than a small amount.
    if all(place == UNNAMED for place, _ in places.values()):
        return LabelColumn(CLICKS)
    return _label_of(contents[min(places, key=lambda name: places[name])], given)


def place_of_label(content: Content) -> tuple[int, int] | None:
    """How much a column is like a label, most first: by its name, then by its values; None: not at all."""
    place = words.rank(content.name, words.LABELS, words.OF_LABELS)
    if place is None:
        return (UNNAMED, 0) if _is_answer(content.numbers) else None
    is_count = words.has_word(content.name, words.COUNTS) and not _is_answer(content.numbers)
    is_few = is_count and not (_is_heavy(content.numbers) or words.has_word(content.name, words.HOW_OFTEN))
    return (FEW if is_few else NAMED, place)


def _is_answer(numbers: np.ndarray) -> bool:
    return bool(np.all((numbers == 0) | (numbers == 1)))


def _label_of(content: Content, given: Mapping[str, Any]) -> LabelColumn:
    """The label that a column is; given: the keys of its section that were written by hand, which count."""
    numbers, name, kind = content.numbers, content.name, given.get("kind")
    sorted_out = numbers[~np.isin(numbers, apart_from(numbers))]
    if kind == YES_NO or (kind is None and _is_answer(numbers)):
        return LabelColumn(YES_NO, name, noun="event")
    is_count = content.is_whole and (
        _is_heavy(sorted_out) or words.has_word(name, (*words.COUNTS, *words.ANSWERS))
    )
    if kind == COUNT or (kind is None and is_count and np.mean(numbers < 0) < MOST_RETURNED):
        noun = "" if name in ("plays", "listens", "views", "clicks") else "event"
        return LabelColumn(COUNT, name, liked=1.0, noun=noun)
    lowest, highest = _scale_of(sorted_out)
    noun = "" if name in words.NOUNS else "rating"
    return LabelColumn(RATING, name, lowest, highest, lowest + LIKED_SHARE * (highest - lowest), noun)


def _is_heavy(numbers: np.ndarray) -> bool:
    """Whether whole numbers are counts because a few are many times the usual one."""
    return bool(numbers.min() >= 1 and numbers.max() > max(10, HEAVY * np.median(numbers)))


def apart_from(numbers: np.ndarray) -> list[float]:
    """The values that lie apart from a scale, as -1 and 99 do where an answer is missing."""
    values = np.unique(numbers)
    if len(values) < LEAST_SCALE:
        return []
    low, high = values[values < 0], values[-1]
    rest = values[np.abs(values) < FAR * np.abs(values[-2])] if high in FILLERS else values
    found = [float(high)] if high in FILLERS and len(rest) == len(values) - 1 else []
    # A scale may go below zero, but hardly with one value alone.
    return found + ([float(low[0])] if len(low) == 1 and low[0] in (-1, *(-each for each in FILLERS)) else [])


def _set_apart(label: LabelColumn, content: Content, is_given: bool) -> tuple[LabelColumn, tuple[str, ...]]:
    """A label without the values that say that there is none, and what to say of these."""
    numbers = content.numbers
    if is_given or not numbers.size:
        return label, ()
    place, total = f"the column {printable(label.column[:40])}", f"of {len(numbers):,} values"
    if label.kind == COUNT and (numbers < 0).any():
        number = int((numbers < 0).sum())
        note = (
            f'{place}: {number:,} {total} are below 0, as those of returns: drop = "<0", written under '
            "[label], leaves their events out"
        )
        return replace(label, drop="<0"), (note,)
    found = apart_from(numbers) if label.kind == RATING else []
    if found:
        shown = ", ".join(f"{each:g}" for each in sorted(found))
        number = int(np.isin(numbers, found).sum())
        note = (
            f"{place}: {number:,} {total} are {shown}, apart from the scale from {label.lowest:g} to "
            f'{label.highest:g}: drop = "{shown}", written under [label], leaves their events out; take '
            "it out, and widen lowest and highest, where they are answers"
        )
        return replace(label, drop=shown), (note,)
    least, counts = np.unique(numbers, return_counts=True)
    is_asked = label.kind == RATING and label.lowest == 0 and content.is_whole and least[0] == 0
    if is_asked and len(least) > 2 and counts[0] > MOST_OF_ZERO * counts[1]:
        note = (
            f"{place}: {counts[0]:,} {total} are 0, and {counts[1]:,} are {least[1]:g}; where 0 means that "
            'there is no answer, write drop = "0" and lowest = 1 under [label], which leaves their events out'
        )
        return label, (note,)
    return label, ()


def _scale_of(values: np.ndarray) -> tuple[float, float]:
    least, most = float(values.min()), float(values.max())
    for lowest, highest in SCALES:
        if lowest <= least and LEAST_REACH * highest <= most <= highest:
            return lowest, highest
    if least >= 0 and most <= 1:
        return 0.0, 1.0
    return float(np.floor(least)), float(np.ceil(most))


class Groups(NamedTuple):
    """The rows of a sample by an id: their order, int [n], and the codes of their ids in it."""

    order: np.ndarray
    ids: np.ndarray


def groups_of(column: pa.ChunkedArray) -> Groups:
    """The rows of a column of ids, those with the same one side by side."""
    codes = codes_of(column)
    order = codes.argsort(kind="stable")
    return Groups(order, codes[order])


def is_constant(table: pa.Table, column: str, within: str) -> bool:
    """Whether a column has one value for each value of another one, but for a few contradictions."""
    return contradictions(codes_of(table[column]), groups_of(table[within])) is not None


def contradictions(values: np.ndarray, groups: Groups) -> int | None:
    """How many rows have another value than most of their id; None where that is no property of the id.

    It is one where enough rows confirm it: at most a tenth as many contradict as would by chance.

    values: codes, int [n], -1 where there is none.
    """
    found = values[groups.order]
    known = (found >= 0) & (groups.ids >= 0)
    ids, found = groups.ids[known], found[known]
    is_again = ids[1:] == ids[:-1]
    shares = np.bincount(found) / max(1, len(found))
    by_chance = is_again.sum() * (1 - np.dot(shares, shares))
    if by_chance < LEAST_BY_CHANCE:
        return None
    most = min(MOST_CONTRADICTING * len(found), OF_CHANCE * by_chance)
    num_changes = int((is_again & (found[1:] != found[:-1])).sum())
    # Each contradiction makes two changes at most.
    if num_changes == 0 or num_changes > 2 * most:
        return None if num_changes else 0
    pairs, counts = np.unique(ids.astype(np.int64) * len(shares) + found, return_counts=True)
    owners = pairs // len(shares)
    most_frequent = np.maximum.reduceat(counts, np.flatnonzero(np.diff(owners, prepend=-1)))
    number = len(found) - int(most_frequent.sum())
    return number if number <= most else None


def codes_of(column: pa.ChunkedArray) -> np.ndarray:
    """A column of any type as integers, the same for the same value; -1 where there is none."""
    array = column.combine_chunks()
    if pa.types.is_nested(array.type):
        array = pa.array([None if value is None else repr(value) for value in array.to_pylist()], pa.string())
    found = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    return encoded(found)[0] if is_text(column.type) else indices_of(found)
