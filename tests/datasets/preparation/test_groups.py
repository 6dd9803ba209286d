"""Events by ranges of users: all of them, in their order, and sums that do not depend on the ranges."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import numpy as np
import pytest

from recsuite.datasets.preparation import arrays
from recsuite.datasets.preparation.arrays import grouped
from recsuite.datasets.preparation.baselines import DAMPING, LEAST_CHANGE, MOST_ROUNDS, fit_biases

NUM_EVENTS, NUM_USERS, NUM_ITEMS = 5_000, 300, 70


@pytest.fixture(params=[(2**20, 2**19), (64, 100), (1_000, 1)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and ranges that hold all, or few events."""
    chunk, events = request.param
    monkeypatch.setattr(arrays, "CHUNK", chunk)
    monkeypatch.setattr(arrays, "RANGE_EVENTS", events)


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, of whom few have many events and some none, items and labels."""
    draw = np.random.default_rng(0)
    user = (NUM_USERS * draw.random(NUM_EVENTS) ** 3).astype(np.int32)
    return user, draw.integers(0, NUM_ITEMS, NUM_EVENTS).astype(np.int32), draw.random(NUM_EVENTS, np.float32)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("in_files", [False, True])
def test_each_event_is_in_the_range_of_its_user_and_in_its_order(tmp_path: Path, in_files: bool) -> None:
    user, item, label = drawn()
    found = grouped(tmp_path if in_files else None, user, NUM_USERS, user, item, label)
    assert [*tmp_path.iterdir()] == []
    assert [each for users in found.ranges for each in users] == [*range(NUM_USERS)]
    assert len(found.ranges) <= arrays.MOST_RANGES
    seen: list[np.ndarray] = []

    def look(users: range, places: np.ndarray, *columns: np.ndarray) -> None:
        np.testing.assert_array_equal(places, np.flatnonzero((user >= users.start) & (user < users.stop)))
        for column, values in zip((user, item, label), columns, strict=True):
            np.testing.assert_array_equal(column[places], values)
        seen.append(places.copy())

    shares: list[float] = []
    found.each(look, shares.append)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(NUM_EVENTS))
    assert shares[-1] == 1


@pytest.mark.usefixtures("sizes")
def test_biases_are_those_of_sums_in_the_order_of_events_to_the_last_bit() -> None:
    user, item, label = drawn()
    by_user = grouped(None, user, NUM_USERS, user, item, label)
    by_item = grouped(None, item, NUM_ITEMS, item, user, label)
    numbers = 4_000, NUM_EVENTS
    errors: dict[int, list[float]] = {}
    expected: dict[int, list[np.ndarray]] = {}
    for number in numbers:
        mean = float(label[:number].mean(dtype=np.float64))
        rest = label[:number].astype(np.float64) - mean
        sides = ((item[:number], user[:number], NUM_ITEMS), (user[:number], item[:number], NUM_USERS))
        biases, errors[number], expected[number] = np.zeros(NUM_USERS), [np.inf], []
        for _ in range(MOST_ROUNDS):
            for own, other, size in sides:
                sums, before = np.zeros(size), biases
                np.add.at(sums, own, rest - before[other])
                biases = sums / (DAMPING + np.bincount(own, minlength=size))
            errors[number].append(
                float(np.sqrt(np.mean((rest - before[item[:number]] - biases[user[:number]]) ** 2)))
            )
            expected[number].append(biases)
    changes = -np.diff([errors[number] for number in numbers])
    rounds = int(np.argmax((changes < LEAST_CHANGE).all(0)))
    assert 0 < rounds < MOST_ROUNDS - 1
    found = fit_biases(by_user, by_item, label, numbers)
    assert [each.user.tobytes() for each in found] == [expected[each][rounds].tobytes() for each in numbers]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_error_in_one_range_ends_the_work_and_is_raised(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "RANGE_EVENTS", 1)
    user, *_ = drawn()
    found = grouped(None, user, NUM_USERS, user)
    begun: list[int] = []

    def work(users: range, places: np.ndarray, user: np.ndarray) -> None:
        begun.append(users.start)
        time.sleep(0.01)
        if users == found.ranges[1]:
            raise fault

    with pytest.raises(type(fault)):
        found.each(work)
    assert len(begun) < len(found.ranges) / 2


def test_an_interrupt_between_two_ranges_cancels_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrays, "RANGE_EVENTS", 1)
    user, *_ = drawn()
    found = grouped(None, user, NUM_USERS, user)
    begun: list[int] = []

    def work(users: range, places: np.ndarray, user: np.ndarray) -> None:
        begun.append(users.start)
        time.sleep(0.01)

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found.each(work, interrupt)
    assert len(begun) < len(found.ranges) / 2
