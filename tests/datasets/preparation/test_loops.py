"""Compiled loops over events equal the same in plain NumPy and Python, for any size of chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from recsuite.datasets import arrays
from recsuite.datasets.preparation import loops
from recsuite.datasets.preparation.baselines import DAMPING, LEAST_CHANGE, MOST_ROUNDS, fit_biases
from recsuite.datasets.preparation.histories import StoredEvents, write_histories
from recsuite.datasets.preparation.loops import count_common, grouped, repeated_events
from tests.support.launch import python, succeeded

NUM_EVENTS, NUM_USERS, NUM_ITEMS = 5_000, 300, 70


@pytest.fixture(params=[(2**20, 2**20), (64, 100), (1_000, 1)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and ranges of users that hold all, or few events."""
    chunk, events = request.param
    monkeypatch.setattr(arrays, "CHUNK", chunk)
    monkeypatch.setattr(loops, "RANGE_EVENTS", events)


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, of whom few have many events and some none, items and labels."""
    draw = np.random.default_rng(0)
    user = (NUM_USERS * draw.random(NUM_EVENTS) ** 3).astype(np.int32)
    return user, draw.integers(0, NUM_ITEMS, NUM_EVENTS).astype(np.int32), draw.random(NUM_EVENTS, np.float32)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("in_file", [False, True])
def test_events_are_grouped_by_user_in_ascending_order(tmp_path: Path, in_file: bool) -> None:
    user, *_ = drawn()
    found = grouped(user, NUM_USERS, tmp_path if in_file else None)
    assert [*tmp_path.iterdir()] == []
    np.testing.assert_array_equal(found.events, np.argsort(user, kind="stable"))
    np.testing.assert_array_equal(np.diff(found.offsets), np.bincount(user, minlength=NUM_USERS))


@pytest.mark.usefixtures("sizes")
def test_repeated_events_are_all_events_of_pairs_with_several() -> None:
    user, item, _ = drawn()
    _, pair, counts = np.unique(user * NUM_ITEMS + item, return_inverse=True, return_counts=True)
    found = [*repeated_events(user, item)]
    assert all((np.diff(events) > 0).all() for events in found)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.flatnonzero(counts[pair] > 1))
    # All events of a user are in one array.
    users = [{*user[events].tolist()} for events in found]
    assert sum(map(len, users)) == len(set().union(*users))


def test_no_event_is_repeated_where_all_pairs_differ() -> None:
    user, item = np.divmod(np.arange(1_000, dtype=np.int32), 10)
    assert [*repeated_events(user, item)] == []


def test_test_events_of_known_pairs_are_counted() -> None:
    user, item, label = drawn()
    is_test = label < 0.2
    known = {*zip(user[~is_test].tolist(), item[~is_test].tolist(), strict=True)}
    pairs = [*zip(user[is_test].tolist(), item[is_test].tolist(), strict=True)]
    of_users = grouped(user, NUM_USERS)
    found = count_common(of_users.offsets, of_users.events, item, NUM_ITEMS, is_test)
    assert found == sum(pair in known for pair in pairs) > 0


@pytest.mark.usefixtures("sizes")
def test_lists_hold_the_known_events_of_an_owner_in_the_order_of_time(tmp_path: Path) -> None:
    user, item, label = drawn()
    splits = 3_000, 800, NUM_EVENTS - 3_800
    draw = np.random.default_rng(1)
    # Each part in the order of time, with many equal times.
    time = np.concatenate([np.sort(draw.integers(0, 200, number)) for number in splits])
    item_rows = draw.permutation(NUM_ITEMS).astype(np.int32)
    stored = StoredEvents(user, item, label, time)
    end, longest = write_histories(tmp_path, stored, item_rows, splits, lambda share: None)
    of = {path.stem: np.load(path) for path in tmp_path.iterdir()}
    order = np.lexsort([np.arange(NUM_EVENTS), time])
    for prefix, known in (("", 3_000), ("test_", 3_800)):
        offsets = of[f"{prefix}history_offsets"]
        listed = [order[(user[order] == owner) & (order < known)] for owner in range(len(offsets) - 1)]
        events = np.concatenate(listed)
        np.testing.assert_array_equal(np.diff(offsets), [*map(len, listed)])
        np.testing.assert_array_equal(of[f"{prefix}history_event"], events)
        np.testing.assert_array_equal(of[f"{prefix}history_time"], time[events])
        np.testing.assert_array_equal(of[f"{prefix}seen"], item[events])
        rows, labels = of[f"{prefix}history"].T
        np.testing.assert_array_equal(rows, item_rows[item[events]])
        np.testing.assert_array_equal(labels.view(np.float32), label[events])
        # Test events see the lists for the test, all others those of the training.
        seen_by = range(3_800, NUM_EVENTS) if prefix else range(3_800)
        older = [int((time[listed[user[event]]] < time[event]).sum()) for event in seen_by]
        np.testing.assert_array_equal(end[seen_by.start : seen_by.stop] - offsets[user[seen_by]], older)
        assert longest >= max(older)
        before = of["history_before"][seen_by.start : seen_by.stop] - offsets[user[seen_by]]
        rank = np.argsort(order)
        expected = [int((rank[listed[user[event]]] < rank[event]).sum()) for event in seen_by]
        np.testing.assert_array_equal(before, expected)


@pytest.mark.usefixtures("sizes")
def test_biases_are_those_of_sums_in_the_order_of_events_to_the_last_bit() -> None:
    user, item, label = drawn()
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
    found = fit_biases(user, item, label, (NUM_USERS, NUM_ITEMS), numbers)
    assert [each.user.tobytes() for each in found] == [expected[each][rounds].tobytes() for each in numbers]


# Numba is imported once, and each step is a fork that imports the loops: a line of result and hits for each.
STEPS = """
import os, sys
from pathlib import Path
import numba.core.caching as caching
import numpy as np

for step in sys.argv[1:]:
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        continue
    exec(step)
    from recsuite.datasets.preparation.loops import group_events, grouped
    events = grouped(np.array([1, 0, 1], np.int32), 2).events.tolist()
    print(events, sum(group_events.stats.cache_hits.values()), flush=True)
    os._exit(0)
"""
DAMAGE = "for path in Path(os.environ['NUMBA_CACHE_DIR']).rglob('*.{end}'): path.write_bytes(b'')"
# A checkout and a home folder that cannot be written, as in many containers, and a full disk.
NO_PLACE = "caching.CacheImpl._locator_classes = []"
NO_ROOM = """
def full(*_): raise OSError(28, 'No space left on device')
caching.IndexDataCacheFile._open_for_write = full
"""


def test_machine_code_is_kept_and_made_again_where_it_is_damaged_and_needs_no_room(tmp_path: Path) -> None:
    damages = (DAMAGE.format(end="nbi"), "", DAMAGE.format(end="nbc"), "")
    steps = (NO_PLACE, NO_ROOM, "", "", *damages)
    said = succeeded(
        python("-c", STEPS, *steps, real=True, env={"NUMBA_CACHE_DIR": str(tmp_path)}, timeout=120)
    )
    assert said.splitlines() == [f"[1, 0, 2] {hits}" for hits in (0, 0, 0, 1, 0, 1, 0, 1)]


def test_numba_itself_still_fails_at_a_damaged_index(tmp_path: Path) -> None:
    # Else `MachineCode` may be no longer needed.
    (tmp_path / "loop.nbi").touch()
    with pytest.raises(EOFError):
        IndexDataCacheFile(str(tmp_path), "loop", (0.0, 0)).load("any")
