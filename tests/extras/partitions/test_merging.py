"""Values that ranks merge do not depend on the number of ranks, also where each sends a draw of them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pandas
import pytest

from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.schema import BUCKETS, DENSE, EVENT, USER, Events, Feature, RawData
from recsuite.extras.partitions import merging

NUM_USERS, NUM_EVENTS = 900, 20_000


class Exchange:
    """Exchange of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier, self.values = threading.Barrier(size), dict[int, Any]()

    def gathered(self, value: Any) -> list[Any]:
        self.barrier.wait(60)
        self.values[int(threading.current_thread().name)] = value
        self.barrier.wait(60)
        return [self.values[rank] for rank in range(self.size)]


def encodings_on(ranks: int) -> list[Any]:
    """The encodings of numbers of users and events on each rank, whose users are user % ranks."""
    draw = np.random.default_rng(0)
    age, user = draw.normal(40, 9, NUM_USERS).round(1), draw.integers(0, NUM_USERS, NUM_EVENTS)
    time, price = draw.integers(0, 10**6, NUM_EVENTS), draw.exponential(5, NUM_EVENTS).astype(np.float32)
    exchange, found = Exchange(ranks), dict[int, Any]()

    def run(rank: int) -> None:
        mine = np.arange(rank, NUM_USERS, ranks)
        events = user % ranks == rank
        users = pandas.DataFrame({SCHEMA.column_of(USER): mine, "age": age[mine]})
        columns = Events(
            (user[events] // ranks).astype(np.int32), user[events] * 0, price[events], time[events]
        )
        raw = RawData(columns, pandas.DataFrame(), users)
        is_train = np.ones(int(events.sum()), bool)
        counts = {USER: np.bincount(columns.user, minlength=len(mine))}
        others: Any = (raw, SCHEMA, is_train, counts, exchange)
        found[rank] = [
            merging._encoding(users["age"], Feature("age", USER, "age", number=BUCKETS), *others),
            merging._encoding(price[events], Feature("price", EVENT, "price", number=DENSE), *others),
        ]

    threads = [threading.Thread(target=run, args=[rank], name=str(rank)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("most", [2**20, 700])
def test_numbers_are_encoded_alike_on_1_2_and_3_ranks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MOST_FITTED", most)
    (alone,) = encodings_on(1)
    assert encodings_on(2) == [alone, alone]
    assert encodings_on(3) == [alone, alone, alone]
    # A draw is like all of them.
    edges, scale = alone
    assert np.median(edges["edges"]) == pytest.approx(40, abs=1)
    assert scale["is_log"]


class Owner(Exchange):
    """Exchange whose ids are added up by one thread, and that notes what all ranks get."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sent: list[Any] = []

    def gathered(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return super().gathered(value)

    def total(self, numbers: np.ndarray) -> Any:
        return np.sum(super().gathered(numbers), axis=0)

    def summed(self, ids: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sums: dict[int, int] = {}
        for others in super().gathered([*zip(ids.tolist(), numbers.tolist(), strict=True)]):
            for one, number in others:
                sums[one] = sums.get(one, 0) + number
        owned = [number for one, number in sums.items() if one % self.size == rank_of_thread()]
        return np.array([sums[one] for one in ids.tolist()]), np.array(owned, np.int64)


def rank_of_thread() -> int:
    return int(threading.current_thread().name)


def test_rare_values_are_counted_over_ranks_and_only_the_others_are_sent_to_all() -> None:
    exchange, found = Owner(2), dict[int, Any]()
    city = Feature("city", USER, "city")
    # Bern has 1 + 2 events, Genf 2, Ulm 1 and Wien 5.
    cities = [["Bern", "Genf", "Wien"], ["Bern", "Ulm"]]
    numbers = [[1, 2, 5], [2, 1]]

    def run(rank: int) -> None:
        known = np.array(cities[rank], object)
        found[rank] = merging._merged(known, np.array(numbers[rank]), city, 3, exchange)  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=[rank], name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for known, number, num_rare in found.values():
        assert (known.tolist(), number, num_rare) == (["Bern", "Wien"], 4, 2)
    values = [one for sent in exchange.sent if isinstance(sent, np.ndarray) for one in sent.tolist()]
    assert sorted(values) == ["Bern", "Bern", "Wien"]
