"""Columns of many events are made in a few bytes of memory an event, and leave nothing temporary behind."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from recsuite.datasets.arrays import sorted_places
from tests.support.launch import SUPPORT, python, started, succeeded, wait_for

MAKING = SUPPORT / "making_columns.py"
NUM_EVENTS = 1_500_000
# What does not grow; then, for each event: numbers to sort, 8, and the order that comes of it, 4. An argsort
# of the times alone would take 24.
ANYWAY, SORTED = 18_000_000, 12


@pytest.mark.parametrize(
    ("split", "duplicates", "kind"),
    [
        ("time", "last", "ratings"),
        pytest.param("time", "keep", "own", marks=pytest.mark.soak),
        pytest.param("random", "mean", "ratings", marks=pytest.mark.soak),
        pytest.param("leave_one_out", "first", "ratings", marks=pytest.mark.soak),
        pytest.param("random", "keep", "ratings", marks=pytest.mark.soak),
        pytest.param("time", "last", "clicks", marks=pytest.mark.soak),
    ],
)
def test_columns_take_few_bytes_of_memory_per_event(
    tmp_path: Path, split: str, duplicates: str, kind: str
) -> None:
    # Freed arrays go back to the kernel, as those of a hundred million events do; malloc would keep some.
    env = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    # A process that imports for itself: one that was forked has the memory of whatever others need.
    call = MAKING, tmp_path, NUM_EVENTS, split, duplicates, kind
    said = succeeded(python(*call, real=True, env=env, timeout=150))
    assert int(said.split()[-1]) < ANYWAY + SORTED * NUM_EVENTS
    assert [path.name for path in tmp_path.iterdir()] == ["columns"]


def test_the_next_start_removes_temporary_files_of_an_interrupted_one(tmp_path: Path) -> None:
    call = [MAKING, tmp_path, 10_000, "time", "last"]
    with started([sys.executable, *map(str, call), "stop"]) as process:
        wait_for(process, "stopped")
    left = next(tmp_path.iterdir())
    assert left.name == f".making-{process.pid}"
    assert {path.name for path in left.iterdir()} > {"rating.npy", "time.npy"}
    # Of a system that gives temporary files a name.
    (left / "tmpa1b2_c3d").touch()
    succeeded(python(*call))
    assert [path.name for path in tmp_path.iterdir()] == ["columns"]


def test_places_are_sorted_by_several_keys_and_ties_keep_their_order() -> None:
    draw = np.random.default_rng(0)
    for number, dtype in itertools.product((0, 1, 2, 5_000), (np.int32, np.int64)):
        first, second = draw.integers(-3, 4, number).astype(dtype), draw.integers(-50, 50, number)
        found = sorted_places(first, second)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, np.lexsort([second, first]))


def test_times_that_fit_no_packed_number_are_sorted_too() -> None:
    draw = np.random.default_rng(0)
    times = draw.choice(np.array([-(2**63), -1, 0, 2**62, 2**63 - 1]), 1_000)
    np.testing.assert_array_equal(sorted_places(times), np.argsort(times, kind="stable"))
