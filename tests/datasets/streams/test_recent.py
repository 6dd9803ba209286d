"""A stream keeps the last items of users and sums of labels, whatever the parts in which events came."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load, save

from recsuite.datasets.preparation.recent import LEAST_MOVED, RecentEvents

LONGEST = 3


def events(number: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Events in the order of time, several of a second."""
    draw = np.random.default_rng(seed)
    return {
        "user": draw.integers(0, 7, number),
        "item": draw.integers(0, 20, number),
        "label": draw.integers(1, 6, number).astype(np.float32),
        "time": np.sort(draw.integers(0, number // 3, number)),
    }


def learned(kept: RecentEvents, of: dict[str, np.ndarray], begin: int, end: int, texts: bool = False) -> None:
    users, items = np.arange(7) * 10, np.arange(20) * 100
    ids = (users.astype(str).astype(object), items.astype(str).astype(object)) if texts else (users, items)
    kept.learn(ids, *(of[name][begin:end] for name in ("user", "item", "label", "time")))


def lists(kept: RecentEvents) -> dict[object, list[tuple[object, float, int]]]:
    """The kept items of each user, with labels and times."""
    found: dict[object, list[tuple[object, float, int]]] = {}
    for user, slot in kept.users.slot_of.items():
        _, item, label, time = kept.lists.of(np.array([slot]))
        ids = [kept.items.ids[place] for place in item]
        found[user] = list(zip(ids, label.tolist(), time.tolist(), strict=True))
    return found


@pytest.mark.parametrize("step", [1, 5, 100])
def test_a_later_event_finds_its_history_whatever_the_parts_of_the_events(step: int) -> None:
    of = events(100)
    kept = RecentEvents(LONGEST)
    for begin in range(0, 100, step):
        learned(kept, of, begin, begin + step)
    found = lists(kept)
    for user in range(7):
        mine = of["user"] == user
        rows = list(zip((of["item"] * 100)[mine], of["label"][mine], of["time"][mine], strict=True))
        newest = rows[-1][2]
        # Before an event of the newest second, and before one after it.
        for time in (newest, newest + 1):
            before = [row for row in found[user * 10] if row[2] < time][-LONGEST:]
            assert before == [row for row in rows if row[2] < time][-LONGEST:]
        assert len(found[user * 10]) <= 2 * LONGEST


def test_sums_are_those_of_all_events() -> None:
    of, kept = events(100), RecentEvents(0)
    for begin in (0, 30):
        learned(kept, of, begin, begin + 30)
    sums = kept.sums_of((np.array([10, 999]), np.array([300])))
    mine, items = of["user"][:60] == 1, of["item"][:60] == 3
    assert sums["past_user"].tolist() == [[of["label"][:60][mine].sum(), mine.sum()], [0, 0]]
    assert sums["past_item"].tolist() == [[of["label"][:60][items].sum(), items.sum()]]
    assert sums["past_all"].tolist() == [[of["label"][:60].sum(), 60]]


@pytest.mark.parametrize("texts", [False, True])
def test_a_full_file_and_its_deltas_restore_what_is_kept_also_after_removals(texts: bool) -> None:
    of, kept, restored = events(120), RecentEvents(LONGEST, keeps_changes=True), RecentEvents(LONGEST)
    for number, end in enumerate((40, 80, 120)):
        learned(kept, of, end - 40, end, texts)
        if number == 1:
            kept.remove_users(kept.users.find([kept.users.ids[0], kept.users.ids[3]]))
            kept.items.remove(np.setdiff1d(kept.items.taken(), kept.lists.items()))
        content = save({name: np.ascontiguousarray(array) for name, array in kept.arrays(number > 0).items()})
        kept.clear_changes()
        restored.add_arrays(load(content))
        assert lists(restored) == lists(kept)
        for of_kept, of_restored in ((kept.users, restored.users), (kept.items, restored.items)):
            ids = [*of_kept.slot_of]
            assert {*ids} == {*of_restored.slot_of}
            slots, others = of_kept.find(ids), of_restored.find(ids)
            assert of_kept.sums[slots].tolist() == of_restored.sums[others].tolist()
            assert of_kept.counts[slots].tolist() == of_restored.counts[others].tolist()
        assert (restored.total, restored.number) == (kept.total, kept.number)


def test_its_size_does_not_grow_with_the_number_of_events() -> None:
    kept, sizes = RecentEvents(LONGEST), []
    for seed in range(60):
        learned(kept, events(6_000, seed) | {"time": np.full(6_000, seed)}, 0, 6_000)
        sizes.append(len(kept.lists._columns[0]))
    assert max(sizes) <= 2 * (LEAST_MOVED + 7 * 2 * LONGEST)
    assert len(kept.users.ids) == 7
