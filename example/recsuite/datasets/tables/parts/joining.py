"""The distinct values of several parts brought together: sorted, each once, and of one type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.tables.parts.coding import same_type, together
from recsuite.datasets.tables.parts.part import Part
from recsuite.datasets.tables.parts.wanted import ID, Wanted

if TYPE_CHECKING:
    import pyarrow

# Whole numbers as they are written, and as floats that are whole: 007 is a text, and -0 too.
WHOLE = r"^(0|-?[1-9]\d{0,18})(\.0+)?$"
TRUTHS = ("true", "false")


@dataclass(frozen=True)
class Joined:
    """Sorted values, each once: whole numbers (int64) or texts.

    places: of each part, which value a code is, int32; the last is -1, for code -1. is_mixed: whether some
    parts have whole numbers and others texts, so that all are texts.
    """

    values: pyarrow.Array
    places: list[np.ndarray]
    is_mixed: bool = False

    def to_list(self) -> list[Any]:
        """As Python's own."""
        found: list[Any] = self.values.to_pylist()
        return found


def joined(columns: Sequence[tuple[Part, Wanted]]) -> Joined:
    """The values of one column of several parts, or of several columns of ids."""
    import pyarrow

    found = [part.values(wanted) for part, wanted in columns]
    raw = [batch.column("value") for batch in found]
    untyped = [part.is_untyped(wanted) for part, wanted in columns]
    # True and true are one answer, but may be two ids.
    if all(wanted.kind != ID for _, wanted in columns):
        raw = _truths(raw, untyped)
    wholes = [_as_whole(values) if may else values for values, may in zip(raw, untyped, strict=True)]
    filled = [values.type for values in wholes if len(values)]
    is_mixed = len(set(filled)) > 1
    dictionaries = same_type(raw if pyarrow.string() in filled else wholes)
    if not dictionaries:
        return Joined(pyarrow.array([], pyarrow.string()), [])
    values, ranks = _sorted(dictionaries)
    codes = [batch.column("code").to_numpy() for batch in found]
    return Joined(values, [_table(*each) for each in zip(codes, ranks, strict=True)], is_mixed)


def _sorted(dictionaries: list[pyarrow.Array]) -> tuple[pyarrow.Array, list[np.ndarray]]:
    """All values, sorted and each once, and where each one lies among them."""
    import pyarrow
    import pyarrow.compute as pc

    if pyarrow.types.is_integer(dictionaries[0].type):
        # Sorting takes a fifth of the memory of looking them up.
        numbers = [each.to_numpy() for each in dictionaries]
        # Each part has them in order, mostly, which is quickly sorted.
        ordered = np.sort(np.concatenate(numbers), kind="stable")
        known = ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]
        return pyarrow.array(known), [np.searchsorted(known, each) for each in numbers]
    values, places = together(dictionaries)
    order = pc.array_sort_indices(values).to_numpy()
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    return values.take(pyarrow.array(order)), [ranks[place] for place in places]


def _table(codes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The rank of each code, int32, with -1 at the end, which is the place of code -1."""
    table = np.full(int(codes.max(initial=-1)) + 2, -1, np.int32)
    table[codes] = ranks
    return table


def _as_whole(values: pyarrow.Array) -> pyarrow.Array:
    """Texts as int64 where all are whole numbers of 64 bits; else as they are."""
    import pyarrow
    import pyarrow.compute as pc

    if not pyarrow.types.is_string(values.type) or not len(values):
        return values
    if not pc.all(pc.match_substring_regex(values, WHOLE)).as_py():
        return values
    try:
        return pc.replace_substring_regex(values, r"\.0+$", "").cast(pyarrow.int64())
    except pyarrow.ArrowInvalid:
        return values


def _truths(raw: list[pyarrow.Array], untyped: list[bool]) -> list[pyarrow.Array]:
    """Texts of text formats in lower case, where all values are true or false, as typed formats have them."""
    import pyarrow
    import pyarrow.compute as pc

    known = pyarrow.array(TRUTHS)
    lowered = [
        pc.utf8_lower(values) if may and pyarrow.types.is_string(values.type) else values
        for values, may in zip(raw, untyped, strict=True)
    ]
    are_truths = all(
        pyarrow.types.is_string(values.type) and pc.all(pc.is_in(values, known), min_count=0).as_py()
        for values in lowered
    )
    return lowered if are_truths else raw
