"""The stopwatch: its parts exclude each other and add up."""

from __future__ import annotations

import time

import pytest

from recsuite.training.observers import PARTS, Stopwatch


def test_parts_exclude_each_other_and_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stopwatch = Stopwatch()
    now += 1
    with stopwatch.part("steps"):
        now += 2
        with stopwatch.part("feed"):
            now += 4
        now += 8
    now += 16
    split = stopwatch.split()
    assert tuple(split) == PARTS
    assert {name: seconds for name, seconds in split.items() if seconds} == {
        "feed": 4,
        "steps": 10,
        "other": 17,
    }
    assert sum(split.values()) == now - 100


def test_a_part_that_fails_is_left_too() -> None:
    stopwatch = Stopwatch()
    with pytest.raises(OSError, match="gone"), stopwatch.part("data"):
        raise OSError("gone")
    before = stopwatch.split()
    time.sleep(0.01)
    after = stopwatch.split()
    assert after["data"] == before["data"]
    assert after["other"] >= before["other"] + 0.01


def test_a_part_that_is_not_known_is_a_fault_of_the_program() -> None:
    with pytest.raises(KeyError), Stopwatch().part("lunch"):
        pass
