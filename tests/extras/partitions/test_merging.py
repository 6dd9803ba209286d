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
