"""Checks of the raw values in a request, which must fit the model's training.

A request has ratings to predict, or users to recommend to.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from recsuite.datasets.schema import CLICKS, HISTORY, ITEM, Feature, Schema
from recsuite.errors import UserError, counted, printable, with_article
from recsuite.ids import UNKNOWN_ID, ids_of
from recsuite.models.inputs import Members
from recsuite.time_buckets import OLDEST, time_buckets_of

# Inputs of a model besides the features: the label of each item of a history, and its age in seconds before
# the coming event.
HISTORY_RATINGS, HISTORY_AGES = "history_ratings", "history_ages"
# Excludes the items of the user's own history.
SEEN = "seen"
# Excludes them if the training did, see `Schema.seen`.
AS_TRAINED = "as_trained"


def length_of(name: str, given: Any, schema: Schema) -> int:
    """Return the number of ratings that a feature has values for; the values may be an array."""
    try:
        # These types have a length too, but not an entry for each rating.
        if isinstance(given, (str, bytes, Mapping)):
            raise TypeError
        return len(given)
    except TypeError:
        shown = printable(repr(given))
        raise UserError(
            f"The feature {name} takes a list with an entry for each {schema.label}, and got {shown}."
        ) from None


def values_at(values: Sequence[Any], places: Iterable[int | None]) -> list[Any]:
    """Return the values of a feature at some places; None for no place, or an empty list among lists."""
    nothing: Any = [] if isinstance(next(iter(values), None), list) else None
    return [nothing if place is None else values[place] for place in places]


def check_list(name: str, value: Any, schema: Schema) -> None:
    """Refuse a value that is not a list, for a feature with a list for each rating."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise UserError(
            f"The feature {name} takes a list for each {schema.label}, and got {printable(repr(value))}."
        )


def check_types(feature: Feature, given: Sequence[Any], known: type[Any] | None, schema: Schema) -> None:
    """Call `check_values` for one feature, whose values may be lists."""
    if not feature.multi:
        check_values(feature.name, given, known)
        return
    for value in given:
        check_list(feature.name, value, schema)
        check_values(feature.name, value, known)


def type_of(rows: Iterable[Any]) -> type[Any] | None:
    """Return the type of the raw values of a vocabulary; None for an empty one."""
    return next(map(type, rows), None)


def check_values(name: str, values: Sequence[Any], known: type[Any] | None) -> None:
    """Refuse values of another type than in the training, which would always be unknown. None is allowed.

    known: the type in the training; None if the training has seen no value, and then nothing is checked.
    """
    if known is None:
        return
    # Real numbers of equal value, also numpy's, are the same key of a dictionary, so any number type will do.
    strange = values_of_other_type(str if known is str else numbers.Real, [*values], type(None))
    if strange:
        raise UserError(
            f"The feature {name} takes values of type {known.__name__}, not {printable(repr(strange[0]))}."
        )


def ids_of_values(name: str, values: Sequence[Any]) -> np.ndarray:
    """Return the ids of raw values of a dynamic feature, int64 [n]; UNKNOWN_ID for None and NaN.

    Raises:
        UserError: for a number that is no id.
    """
    texts = {index: value for index, value in enumerate(values) if isinstance(value, str)}
    others = {index: value for index, value in enumerate(values) if not isinstance(value, str | None)}
    strange = values_of_other_type(numbers.Real, [*others.values()])
    if not strange:
        others = {index: value for index, value in others.items() if not math.isnan(value)}
        # The range is checked first: a float may be infinite, and then has no remainder.
        strange = [value for value in others.values() if not (abs(value) < 2**63 and value % 1 == 0)]
    if strange:
        raise UserError(
            f"The feature {name} takes whole numbers between -2**63 and 2**63, and got "
            f"{printable(repr(strange[0]))}."
        )
    ids = np.full(len(values), UNKNOWN_ID)
    for given in (texts, others):
        ids[[*given]] = ids_of([*given.values()])
    return ids


def numbers_of(name: str, given: Sequence[Any], width: int = 1) -> np.ndarray:
    """Return numbers as float64 [n], with NaN for None; of vectors as float64 [n, width].

    Raises:
        UserError: for what is not a number, or infinite, and for a vector of another length.
    """
    if width > 1:
        return _vectors_of(name, given, width)
    strange = values_of_other_type(numbers.Real, given, type(None))
    try:
        # numpy converts None to NaN.
        array = np.array([] if strange else [*given], np.float64)
    except OverflowError:
        # Python's integers have no maximum.
        raise UserError(f"The feature {name} requires numbers of 64 bits, got a larger one.") from None
    if strange or np.isinf(array).any():
        odd = strange[0] if strange else array[np.isinf(array)][0]
        raise UserError(f"The feature {name} takes numbers, and got {printable(repr(odd))}.")
    return array


def _vectors_of(name: str, given: Sequence[Any], width: int) -> np.ndarray:
    vectors = np.full((len(given), width), np.nan)
    for index, vector in enumerate(given):
        if isinstance(vector, np.ndarray) and vector.shape == (width,):
            # Of the data, and checked by the reader.
            vectors[index] = vector
        elif vector is not None:
            if isinstance(vector, str) or not isinstance(vector, Sequence) or len(vector) != width:
                got = printable(repr(vector))[:80]
                raise UserError(f"The feature {name} takes lists of {width} numbers, and got {got}.")
            vectors[index] = numbers_of(name, vector)
    return vectors


def vectors_of(given: Any, width: int) -> torch.Tensor:
    """Return vectors of a request, float32 [n, width]. given: a list of lists of numbers, or a tensor.

    Raises:
        UserError: for anything else, for vectors of another width, and for numbers that are not finite.
    """
    try:
        vectors = torch.as_tensor(given, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"vectors takes a list of lists of {width} numbers each, got {printable(repr(given)[:80])}."
        ) from None
    if vectors.shape == (0,):
        vectors = vectors.view(0, width)
    if vectors.dim() != 2:
        raise UserError(f"vectors takes a list of lists of {width} numbers each, got other lists.")
    if vectors.shape[1] != width:
        raise UserError(
            f"vectors must have {width} numbers each, as those of the model, got {vectors.shape[1]:,}."
        )
    if not bool(vectors.isfinite().all()):
        raise UserError("vectors must have finite numbers of 32 bits, got another one.")
    return vectors


def values_of_other_type(
    kind: type[Any], values: Sequence[Any], or_else: type[Any] | None = None
) -> list[Any]:
    """Return the values that are of neither type."""
    # Checked by type, not by value: a history has a thousand values of one type, and a check of
    # `numbers.Real` is slow.
    strange = {each for each in {*map(type, values)} if each is not or_else and not issubclass(each, kind)}
    return [value for value in values if type(value) in strange] if strange else []


def flat_ratings(values: Mapping[str, Sequence[Any]], schema: Schema) -> torch.Tensor:
    """Return the ratings of all histories, float32, after a check against the histories."""
    items, ratings = values.get(HISTORY, ()), values.get(HISTORY_RATINGS, ())
    if len(items) != len(ratings):
        raise UserError(f"{HISTORY} and {HISTORY_RATINGS} must be given together.")
    for rated, given in zip(items, ratings, strict=True):
        check_list(HISTORY_RATINGS, given, schema)
        if len(rated) != len(given):
            raise UserError(
                f"A {HISTORY} has {len(rated)} items and its {HISTORY_RATINGS} {len(given)} values; give one "
                "for each item."
            )
    flat = [rating for given in ratings for rating in given]
    if schema.event_types:
        return torch.tensor(_positions_of_types(flat, schema.event_types), dtype=torch.float32)
    lowest, highest = schema.shown(schema.lowest_label), schema.shown(schema.highest_label)
    # NaN is in no range.
    strange = values_of_other_type(numbers.Real, flat) or [
        rating for rating in flat if not lowest <= rating <= highest
    ]
    if strange:
        raise UserError(
            f"{HISTORY_RATINGS} must be between {lowest:g} and {highest:g}, as in the training, got "
            f"{printable(repr(strange[0]))}."
        )
    return torch.tensor([schema.learned(float(rating)) for rating in flat], dtype=torch.float32)


def _positions_of_types(flat: Sequence[Any], types: Sequence[str]) -> list[float]:
    """Return the position of the type of each event, from 1 on, given by its name or position."""
    positions: dict[Any, float] = {}
    for position, name in enumerate(types, 1):
        positions[name] = positions[position] = float(position)
    for given in flat:
        # Other values may have no hash.
        if not isinstance(given, str | numbers.Real) or given not in positions:
            raise UserError(
                f"The events of a history have the type {printable(repr(given))}; give one of "
                f"{', '.join(types)}."
            )
    return [positions[given] for given in flat]


def members_of(values: Mapping[str, Sequence[Any]], schema: Schema) -> Members:
    """Return the labels and ages of the items of histories, after a check; without ages, each age is 0.

    Raises:
        UserError: when there are other numbers of ratings or ages than of items, or one cannot be.
    """
    lengths = [len(mine) for mine in values.get(HISTORY, ())]
    labels = flat_ratings(values, schema)
    seconds = np.zeros(sum(lengths))
    if HISTORY_AGES in values:
        given = values[HISTORY_AGES]
        for ages in given:
            check_list(HISTORY_AGES, ages, schema)
        if [*map(len, given)] != lengths:
            raise UserError(f"{HISTORY_AGES} must have one number for each item of a {HISTORY}.")
        seconds = numbers_of(HISTORY_AGES, [age for ages in given for age in ages])
        # NaN is in no range.
        strange = seconds[~(seconds >= 0)]
        if len(strange):
            raise UserError(f"{HISTORY_AGES} must be 0 seconds or more, got {strange[0]:g}.")
    # The number of items of a history after each item.
    later = [number for length in lengths for number in reversed(range(length))]
    whole = np.floor(seconds)
    gaps = torch.from_numpy(time_buckets_of(whole))
    ages = torch.from_numpy(whole.clip(0, OLDEST).astype(np.int32))
    # A served model drops no items of a history, and each user has one of its own.
    nothing = ages[:0]
    return Members(labels, torch.tensor(later, dtype=torch.int32), gaps, ages, nothing, nothing, nothing)


def is_own_of(values: Mapping[str, Sequence[Any]], schema: Schema) -> torch.Tensor:
    """Return 1 for each item of a history that is the item of its event, else 0, float32 [V]."""
    if HISTORY not in values or schema.item not in values:
        return torch.zeros(sum(map(len, values.get(HISTORY, ()))))
    lists, items = values[HISTORY], values[schema.item]
    flat = [item is not None and each == item for item, ids in zip(items, lists, strict=True) for each in ids]
    return torch.tensor(flat, dtype=torch.float32)


def values_of_users(users: Any, events: Any, schema: Schema) -> dict[str, Sequence[Any]]:
    """Return values for `Snapshot.look_up` from the arguments of `ServedModel.recommend`.

    Raises:
        UserError: when it is neither ids nor features, or the events are no pairs of an item and a label.
    """
    values = dict(users) if isinstance(users, Mapping) else {}
    if users is not None and not isinstance(users, Mapping):
        length_of(schema.user, users, schema)
        values[schema.user] = [*users]
    if events is None:
        if not values:
            raise UserError("recommend requires users or events.")
        return values
    if {HISTORY, HISTORY_RATINGS, HISTORY_AGES} & values.keys():
        raise UserError(f"events and the feature {HISTORY} exclude each other; give one of them.")
    length_of(HISTORY, events, schema)
    if schema.label_kind == CLICKS and not schema.event_types:
        # The mere fact of an event needs no label.
        only = schema.shown(schema.highest_label)
        events = [
            [(each, only) if isinstance(each, str | numbers.Real) else each for each in mine]
            if isinstance(mine, list)
            else mine
            for mine in events
        ]
    for mine in events:
        check_list(HISTORY, mine, schema)
        for event in mine:
            if isinstance(event, (str, bytes)) or not isinstance(event, Sequence) or len(event) != 2:
                label = "type" if schema.event_types else schema.label
                raise UserError(
                    f"An event must be a pair of {with_article(schema.item)} and its {label}, got "
                    f"{printable(repr(event))}."
                )
    values[HISTORY] = [[item for item, _ in mine] for mine in events]
    values[HISTORY_RATINGS] = [[label for _, label in mine] for mine in events]
    return values


def rule_of(exclude: Any, schema: Schema) -> Any:
    """Return the items to exclude, with AS_TRAINED replaced by the rule of the training."""
    if isinstance(exclude, str) and exclude == AS_TRAINED:
        return SEEN if schema.excludes_seen else None
    return exclude


def lists_of(
    exclude: Any, values: Mapping[str, Sequence[Any]], num_users: int, schema: Schema
) -> Sequence[Any]:
    """Return for each user the items to exclude, see `ServedModel.recommend`. values: those of the users.

    Raises:
        UserError: when there is not one list for each user.
    """
    exclude = rule_of(exclude, schema)
    if exclude is None or (isinstance(exclude, str) and exclude == SEEN):
        nothing: list[list[Any]] = [[]] * num_users
        if exclude is None or HISTORY not in values or not schema.event_types:
            return nothing if exclude is None else values.get(HISTORY, nothing)
        # Items of other events, such as views, were not had.
        pairs = zip(values[HISTORY], values.get(HISTORY_RATINGS, nothing), strict=True)
        own = (1, schema.event_types[0])
        return [[item for item, given in zip(*mine, strict=True) if given in own] for mine in pairs]
    return each_list("exclude", exclude, num_users, schema, f'"{SEEN}", None, or ')


def each_list(name: str, lists: Any, num_users: int, schema: Schema, others: str = "") -> Sequence[Any]:
    """Return lists of items, after a check that there is one for each user.

    others: other values that the argument takes, for the message.

    Raises:
        UserError: when there is not one for each user; `name` says whose.
    """
    if isinstance(lists, (str, bytes, Mapping)) or not isinstance(lists, Sequence):
        raise UserError(
            f"{name} takes {others}a list of {schema.items} for each {schema.user}, and got "
            f"{printable(repr(lists))}."
        )
    if len(lists) != num_users:
        raise UserError(
            f"{name} has {len(lists)} lists for {counted(num_users, schema.user)}; give one for each."
        )
    return lists


def check_items(values: Mapping[str, Sequence[Any]], features: Sequence[Feature], schema: Schema) -> None:
    """Refuse to score items without any feature of an item.

    Raises:
        UserError: when no feature of an item is given.
    """
    # All would get the score of an unknown item, which is of no use.
    if not any(feature.entity == ITEM and feature.name in values for feature in features):
        raise UserError(
            f"score requires the feature {schema.item}, the {schema.items} to score. Fix: give it, or call "
            f"recommend for "
            "the best ones."
        )


def check_ids(name: str, ids: Any, known: type[Any] | None, schema: Schema) -> list[Any]:
    """Return raw ids of items as a list. known: their type in the training, see `check_values`.

    Raises:
        UserError: when it is not a list, or has ids of another type than the training; `name` says whose.
    """
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Collection):
        raise UserError(f"{name} takes a list of {schema.items}, and got {printable(repr(ids))}.")
    listed = [*ids]
    check_values(schema.item, listed, known)
    return listed


def check_k(k: Any, name: str = "k") -> None:
    """Refuse a k, or another number of items, that is not a whole number from 1 on."""
    if isinstance(k, bool) or not isinstance(k, numbers.Integral) or k < 1:
        raise UserError(f"{name} must be a whole number of at least 1, got {printable(repr(k))}.")


def check_caps(at_most: Any) -> None:
    """Refuse what is no name of a feature with a whole number from 1 on for each.

    Raises:
        UserError: names what it got.
    """
    if not isinstance(at_most, Mapping) or not all(isinstance(name, str) for name in at_most):
        raise UserError(
            f'at_most takes features with numbers, such as {{"category": 3}}, and got '
            f"{printable(repr(at_most))}."
        )
    for name, limit in at_most.items():
        check_k(limit, f"at_most of {printable(name)}")


def check_distance(distance: Any) -> None:
    """Refuse a least distance that is not a number from 0 to 2.

    Raises:
        UserError: with the limits.
    """
    is_number = isinstance(distance, numbers.Real) and not isinstance(distance, bool)
    # NaN is in no range.
    if not (is_number and 0 <= float(distance) <= 2):
        raise UserError(
            f"least_distance must be between 0 and 2, got {printable(repr(distance))}. Fix: give 1 minus the "
            "largest cosine, such as 0.2."
        )
