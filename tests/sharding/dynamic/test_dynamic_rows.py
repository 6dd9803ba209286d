"""A rank's share of a dynamic table against a Python dictionary, and what has to hold whatever is drawn."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from recsuite.sharding import dynamic_ranks
from recsuite.sharding.dynamic import DynamicSpec, initial_rows
from recsuite.sharding.table import IdCounters
from recsuite.training.weights import describe_invalid_weights
from tests.support.dynamic_oracle import Oracle, Shares, rows_of, same

ENDS = [2**63 - 1, 2**63 - 2, -(2**63) + 1, -(2**63) + 2, -1, 0, 1]
POLICIES = ["lru", "lfu", "ttl", "none"]
SINCE_THE_BEGINNING = ("admitted", "evicted", "expired", "unplaced", "unadmitted")
DISTRIBUTIONS = ["continuous", "roundrobin", "hash"]


def spec_of(**changed: object) -> DynamicSpec:
    spec = DynamicSpec("user", embedding_dim=6, capacity=64, max_capacity=512, seed=3)
    return dataclasses.replace(spec, **changed)  # type: ignore[arg-type]


def drawn_spec(draw: random.Random) -> DynamicSpec:
    evict = draw.choice(POLICIES)
    return spec_of(
        capacity=16 * draw.choice([1, 2, 5, 8]),
        max_capacity=16 * 8 * 4,
        evict=evict,
        admit=draw.choice([1, 1, 2, 3]),
        ttl=draw.choice([1, 5, 20] if evict == "ttl" else [0, 0, 5, 20]),
        half_life=draw.choice([0, 1, 4]) if evict == "lfu" else 0,
        distribution=draw.choice(DISTRIBUTIONS),
    )


class Drawn:
    """A table and its oracle, and a copy that is kept by deltas alone."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.oracle = Oracle(drawn_spec(self.draw))
        self.shares = self.elsewhere()
        self.copy = self.elsewhere()
        places = self.oracle.spec.capacity
        self.pool = [*ENDS, *(self.draw.randrange(-(2**63) + 1, 2**63) for _ in range(3 * places))]
        self.now = self.step = 0
        # What became of ids in tables that were restored since.
        self.counted = IdCounters(0, 0, 0, 0, 0, 0, 0)

    def elsewhere(self) -> Shares:
        """An empty table of another number of ranks."""
        spec = dataclasses.replace(self.oracle.spec, distribution=self.draw.choice(DISTRIBUTIONS))
        return Shares(spec, self.draw.choice([1, 2, 3]))

    def ids(self) -> list[int]:
        # Some more often than others.
        most = self.draw.choice([len(self.pool), len(self.pool) // 4])
        return sorted(self.draw.sample(self.pool[:most], self.draw.randrange(min(most, 60))))

    def train(self) -> None:
        self.step += 1
        self.now += self.draw.choice([0, 1, 1, 2])
        scale = self.draw.choice([1.0, 0.75])
        ids = self.ids()
        for table in (self.oracle, self.shares):
            table.begin_step(self.now, scale)
        expected = self.oracle.find_or_insert(ids)
        self.oracle.learn(ids, self.step)
        assert self.shares.find_or_insert(torch.tensor(ids, dtype=torch.int64), self.step) == expected

    def find(self) -> None:
        ids = self.ids()
        self.draw.shuffle(ids)
        assert self.shares.find(torch.tensor(ids, dtype=torch.int64)) == [
            one in self.oracle.rows for one in ids
        ]

    def save_changes(self) -> None:
        self.copy.begin_step(self.now, 1.0)
        changes = self.shares.changes()
        self.shares.clear_changes()
        for _ in range(self.draw.choice([1, 2])):
            self.copy.apply(changes)
        assert same(self.copy.live(), self.oracle.live())
        # Now that all who have expired were looked for, which the table otherwise does when they matter.
        assert self.counts() == self.oracle.counts()

    def counts(self) -> IdCounters:
        """Return the number of rows, and the counts of inserted and removed ids since the start."""
        now, before = self.shares.counts(), self.counted
        since = {name: getattr(before, name) + getattr(now, name) for name in SINCE_THE_BEGINNING}
        return dataclasses.replace(now, **since)

    def restore(self) -> None:
        self.save_changes()
        saved, self.counted = self.shares.live(), self.counts()
        self.shares = self.elsewhere()
        self.shares.begin_step(self.now, 1.0)
        for _ in range(self.draw.choice([1, 2])):
            assert self.shares.put(saved) == 0

    def grow(self) -> None:
        spec, live = self.oracle.spec, self.shares.counts().live
        assert live == len(self.oracle.rows)
        if live > spec.capacity / 4 and spec.capacity * 2 <= spec.max_capacity:
            self.oracle.spec = dataclasses.replace(spec, capacity=spec.capacity * 2)
            for table in (self.shares, self.copy):
                table.resize(spec.capacity * 2)

    def go(self) -> None:
        kinds = [self.train, self.find, self.save_changes, self.restore, self.grow]
        self.draw.choices(kinds, [20, 4, 3, 1, 0.5])[0]()
        assert same(self.shares.live(), self.oracle.live())
        now = self.shares.counts()
        assert (now.live, now.waiting) == (len(self.oracle.rows), len(self.oracle.waiting))


@pytest.mark.parametrize("seed", range(10))
def test_a_table_agrees_with_a_dictionary_after_each_of_many_drawn_operations(seed: int) -> None:
    drawn = Drawn(seed)
    for _ in range(50):
        drawn.go()


def test_an_id_inserted_again_has_a_fresh_row_and_no_state() -> None:
    shares = Shares(spec_of(capacity=16, max_capacity=16), 1)
    (rank,) = shares.ranks
    ids = torch.arange(17)
    rank.begin_step(1, scale=0.5)
    rows = rank.find_or_insert(ids[:16])
    rank.weights[rows], rank.state[rows] = 7.0, 7.0
    rank.clear_changes()
    rank.begin_step(2, scale=0.5)
    # 0 is the lowest of those that were seen longest ago.
    assert rank.find_or_insert(ids[16:]).item() == rows[0]
    assert rank.export(changed=True)["gone"].tolist() == [0]
    rank.begin_step(3, scale=0.5)
    back = rank.find_or_insert(ids[:1])
    assert torch.equal(rank.weights[back], initial_rows(rank.spec, ids[:1]) / 0.5)
    assert rank.state[back].item() == 0
    # It is there again, so nobody has to forget it; 1 made room for it.
    assert rank.export(changed=True)["gone"].tolist() == [1]


@pytest.mark.parametrize("evict", POLICIES)
def test_no_id_of_a_step_loses_its_place_to_another_of_the_same_step(evict: str) -> None:
    (rank,) = Shares(spec_of(capacity=16, max_capacity=16, evict=evict), 1).ranks
    rank.begin_step(1)
    rows = rank.find_or_insert(torch.arange(40))
    # The first come first, and the others are counted.
    assert (rows >= 0).tolist() == [True] * 16 + [False] * 24
    rank.begin_step(2)
    assert torch.equal(rank.find_or_insert(torch.arange(20))[:16], rows[:16])
    assert (rank.counts().unplaced, rank.counts().evicted) == (28, 0)


@pytest.mark.parametrize("place", [0, -1], ids=["row of an id", "row of the unknown"])
@pytest.mark.parametrize(
    ("slot", "value", "which"),
    [
        ("weight", 5e29, "the table user (dynamic.user.weight) has 5e+29"),
        ("weight", float("nan"), "the table user (dynamic.user.weight) has nan"),
        ("momentum1", float("inf"), "the optimizer of the table user (dynamic.user.momentum1) has inf"),
    ],
)
def test_invalid_values_are_found_in_changed_rows_too(
    place: int, slot: str, value: float, which: str
) -> None:
    (rank,) = Shares(spec_of(), 1).ranks
    for held in (rank.weights, rank.state):
        held[-1] = 0
    rank.begin_step(1)
    rows = rank.find_or_insert(torch.tensor([5, 7]))
    held, row = (rank.weights if slot == "weight" else rank.state), [*rows.tolist(), -1][place]
    dense, shares = {"dense.row_scale": torch.ones(1)}, {"user": rank}
    for changed in (False, True):
        assert describe_invalid_weights(dense, shares, changed) == ""
        before = held[row].clone()
        held[row] = value
        assert describe_invalid_weights(dense, shares, changed) == which
        held[row] = before


def test_a_loaded_id_with_an_old_time_still_expires() -> None:
    shares = Shares(spec_of(ttl=5), 1)
    shares.begin_step(2, 1.0)
    shares.find_or_insert(torch.tensor([7]), 1)
    old = shares.live()
    # Loaded, and seen after the time of the events went back.
    for come in (lambda: shares.put(old), lambda: shares.find_or_insert(torch.tensor([8]), 1)):
        shares.begin_step(20, 1.0)
        shares.changes()
        assert shares.ranks[0].counts().live == 0
        shares.begin_step(2, 1.0)
        come()
        shares.begin_step(20, 1.0)
        shares.changes()
        assert shares.ranks[0].counts().live == 0
    shares.put(old)
    shares.changes()
    assert shares.ranks[0].counts().expired == 4


def test_initial_rows_depend_on_seed_table_and_id_alone_and_have_the_configured_deviation() -> None:
    ids = torch.tensor(ENDS)
    spec = spec_of(embedding_dim=10)
    rows = initial_rows(spec, ids)
    assert torch.equal(initial_rows(spec, ids.flip(0)).flip(0), rows)
    for other in (spec_of(embedding_dim=10, seed=4), dataclasses.replace(spec, name="item")):
        assert not torch.equal(initial_rows(other, ids), rows)
    many = initial_rows(spec, torch.arange(20_000))
    assert many.mean().abs() < 1e-3
    assert many.std().item() == pytest.approx(0.025, rel=0.01)


def test_a_smaller_table_keeps_the_ids_evicted_last_for_any_load_order() -> None:
    large = Shares(spec_of(capacity=64, max_capacity=64), 2)
    for now, ids in enumerate(torch.arange(60).split(20)):
        large.begin_step(now, 1.0)
        large.find_or_insert(ids, now)
    live = large.live()
    found = []
    for order in (torch.arange(len(live.ids)), torch.arange(len(live.ids)).flip(0)):
        small = Shares(spec_of(capacity=32, max_capacity=32), 1)
        dropped = sum(small.put(rows_of(live, part)) for part in order.split(7))
        assert dropped == len(live.ids) - len(small.live().ids) >= len(live.ids) - 32
        found.append(small.live())
    assert same(*found)


@pytest.mark.parametrize("is_dumped", [False, True])
def test_a_table_does_not_grow_for_ids_that_have_expired_whenever_checkpoints_are_written(
    is_dumped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One rank has all there is.
    monkeypatch.setattr(dynamic_ranks, "_summed", lambda numbers, group=None: numbers)
    shares = Shares(spec_of(ttl=5, grow=0.5, max_capacity=256), 1)
    (rank,) = shares.ranks
    for now, first in ((1, 0), (20, 30)):
        shares.begin_step(now, 1.0)
        if is_dumped:
            shares.changes()
        shares.find_or_insert(torch.arange(first, first + 30), now)
        assert dynamic_ranks.grow({"user": rank}, dynamic_ranks.STEPS_BETWEEN_GROWTH) == []
    shares.find_or_insert(torch.arange(60, 70), 20)
    assert dynamic_ranks.grow({"user": rank}, dynamic_ranks.STEPS_BETWEEN_GROWTH) != []
    assert rank.spec.capacity == 128
    assert (rank.counts().live, rank.counts().expired) == (40, 30)
