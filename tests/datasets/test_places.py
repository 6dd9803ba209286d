"""Lists of a column are taken run by run, and are what taking them value by value gives."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite.datasets import batching
from recsuite.datasets.batching import places_of, take_lists

SHAPES = {"histories": ((300, 2), np.int32), "items": ((300,), np.int32), "times": ((300,), np.int64)}


def column_of(kind: str) -> np.ndarray:
    """A column of 300 records that are all different, as little to be written as a mapped one."""
    shape, dtype = SHAPES[kind]
    column = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    column.flags.writeable = False
    return column


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("longest", [0, 1, 5, 64, 65, 150, 300])
def test_lists_are_those_taken_value_by_value(kind: str, longest: int) -> None:
    rng, column = np.random.default_rng(longest), column_of(kind)
    for number in (0, 1, 7, 2500):
        counts = rng.integers(0, longest + 1, number)
        # Empty ones and such as end with the column among them.
        counts[::3] = 0
        starts = np.where(np.arange(number) % 4, rng.integers(0, 301 - counts), 300 - counts)
        expected = column.take(places_of(starts, counts), axis=0)
        found = take_lists(column, starts, counts)
        assert found.dtype == column.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_list_longer_than_a_run_is_split_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "RUN", 4)
    monkeypatch.setattr(batching, "RUNS_AT_ONCE", 2)
    found = take_lists(np.arange(20), np.array([3, 0, 10]), np.array([9, 0, 10]))
    assert found.tolist() == [*range(3, 12), *range(10, 20)]


def test_places_of_narrow_columns_of_a_table_are_taken_too() -> None:
    table = np.array([[2, 3], [0, 1]], np.int32)
    assert take_lists(np.arange(10), table[:, 0], table[:, 1]).tolist() == [2, 3, 4, 0]
