"""Capacity of tables: by the ids of the files, except in a stream, which must not know them."""

from __future__ import annotations

import pytest

from recsuite.config.sections import TablesConfig
from recsuite.datasets.schema import DYNAMIC, ITEM, USER, Feature, Table
from recsuite.errors import UserError
from recsuite.sharding.dynamic_ranks import specs_of

MEMORY = 2**24


def places(capacity: str, users: int, items: int, is_stream: bool, width: int = 4) -> dict[str, int]:
    """Places of each table, of files with so many ids."""
    features = Feature("user", USER, "u", ids=DYNAMIC), Feature("item", ITEM, "i", ids=DYNAMIC)
    tables = [Table(feature, rows) for feature, rows in zip(features, (users, items), strict=True)]
    widths = {"user": 4, "item": width}
    specs = specs_of(tables, TablesConfig(capacity=capacity), widths, 0.025, 0, MEMORY, is_stream)
    return {name: spec.capacity for name, spec in specs.items()}


@pytest.mark.parametrize("capacity", ["1600", "50%", "user=160,item=25%"])
def test_the_capacity_of_a_stream_does_not_depend_on_its_files(capacity: str) -> None:
    found = places(capacity, 1_000, 20, is_stream=True)
    assert found == places(capacity, 20, 1_000, is_stream=True)
    assert capacity != "50%" or found["user"] == found["item"]


def test_a_training_on_all_files_has_places_by_the_ids_in_them() -> None:
    assert places("auto", 800, 16, is_stream=False) == {"user": 1600, "item": 32}
    shared = places("50%", 3_000, 1_000, is_stream=False)
    assert shared["user"] == pytest.approx(3 * shared["item"], rel=0.01)
    # A row of 32 numbers takes the memory of several of 4.
    wider = places("50%", 3_000, 1_000, is_stream=False, width=32)
    assert wider["user"] == shared["user"]
    assert wider["item"] < shared["item"] / 2


@pytest.mark.parametrize(
    ("capacity", "table"), [("auto", "user"), ("user=160", "item"), ("item=auto,16", "item")]
)
def test_a_stream_does_not_count_the_ids_of_its_files(capacity: str, table: str) -> None:
    with pytest.raises(UserError, match=rf"^--capacity auto .*table {table}\).* to 8 times"):
        places(capacity, 800, 16, is_stream=True)
