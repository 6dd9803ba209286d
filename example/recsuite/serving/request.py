"""The raw values that a caller gives of ratings to predict, held against what the model was trained on."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recsuite.datasets.schema import HISTORY, Feature
from recsuite.datasets.source import SCHEMA
from recsuite.errors import UserError, printable

# What a model takes beside the features: the label of each item of a history.
HISTORY_RATINGS = "history_ratings"


def length_of(name: str, given: Any) -> int:
    """The number of ratings that a feature has values for, which may be an array too."""
    try:
        # These have a length too, but not an entry for each rating.
        if isinstance(given, (str, bytes, Mapping)):
            raise TypeError
        return len(given)
    except TypeError:
        shown = printable(repr(given))
        raise UserError(
            f"The feature {name} takes a list with an entry for each {SCHEMA.label}, and got {shown}."
        ) from None


def check_list(name: str, value: Any) -> None:
    """Refuse what is not a list where each rating has one."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise UserError(
            f"The feature {name} takes a list for each {SCHEMA.label}, and got {printable(repr(value))}."
        )


def check_types(feature: Feature, given: Sequence[Any], rows: Mapping[Any, int]) -> None:
    """`check_values` of one feature, whose values may be lists."""
    if not feature.multi:
        check_values(feature.name, given, rows)
        return
    for value in given:
        check_list(feature.name, value)
        check_values(feature.name, value, rows)


def check_values(name: str, values: Sequence[Any], rows: Mapping[Any, int]) -> None:
    """Refuse values of another type than the training's, which would never be known; None is unknown."""
    known = type(next(iter(rows), 0))
    # Any real number stands for another one of the same value, also numpy's: they are one key of a
    # dictionary.
    strange = not_of(str if known is str else numbers.Real, [*values], type(None))
    if strange:
        raise UserError(
            f"The feature {name} takes values of type {known.__name__}, not {printable(repr(strange[0]))}."
        )


def not_of(kind: type[Any], values: Sequence[Any], or_else: type[Any] | None = None) -> list[Any]:
    """Those of the values that are of neither type."""
    # A history has a thousand values of one type, and to ask for a `numbers.Real` takes long.
    strange = {each for each in {*map(type, values)} if each is not or_else and not issubclass(each, kind)}
    return [value for value in values if type(value) in strange] if strange else []


def flat_ratings(values: Mapping[str, Sequence[Any]]) -> torch.Tensor:
    """The ratings of all histories, float32, after each was held against its history."""
    items, ratings = values.get(HISTORY, ()), values.get(HISTORY_RATINGS, ())
    if len(items) != len(ratings):
        raise UserError(f"A {HISTORY} and {HISTORY_RATINGS} belong together; give both or neither.")
    for rated, given in zip(items, ratings, strict=True):
        check_list(HISTORY_RATINGS, given)
        if len(rated) != len(given):
            raise UserError(
                f"A {HISTORY} has {len(rated)} and its {HISTORY_RATINGS} {len(given)} values; give each "
                "as many."
            )
    flat = [rating for given in ratings for rating in given]
    # NaN is in no range.
    strange = not_of(numbers.Real, flat) or [
        rating for rating in flat if not SCHEMA.lowest_label <= rating <= SCHEMA.highest_label
    ]
    if strange:
        raise UserError(
            f"{HISTORY_RATINGS} has {printable(repr(strange[0]))}; give numbers from "
            f"{SCHEMA.lowest_label:g} to {SCHEMA.highest_label:g}, as the training saw them."
        )
    return torch.tensor(list(map(float, flat)), dtype=torch.float32)
