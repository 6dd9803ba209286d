"""Co-occurrence lists of a split that hides no later events: all other events of both sides, never itself."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from tests.support.batches import lists_of
from tests.support.csv_ratings import write_ratings

MOST = 1_000
SIDES = {"history": ("user", "item"), "audience": ("item", "user")}


class TrainingFeatures(NamedTuple):
    """Lists of one event in a batch: positions of members, and the scale of their sum."""

    members: list[int]
    scale: float


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Planted ratings: 30 users with 4 to 33 of 50 movies."""
    rng = np.random.default_rng(0)
    ratings = [
        (user, movie, 0.5 + movie % 10 / 2, int(1000 + rng.integers(0, 90)))
        for user in range(30)
        for movie in rng.permutation(50)[: 4 + user].tolist()
    ]
    write_ratings(tmp_path, ratings)
    return Config.of(
        data_path=str(tmp_path), split="random", validation_fraction=0.1, batch_size=48, co_occurrence=MOST
    )


def rows_of(columns: Columns, entity: str) -> np.ndarray:
    name = columns.schema.name_of(entity)
    rows: np.ndarray = columns.column(f"{name}_features")["features"][:, columns.place_of(entity)]
    return rows


def told(
    columns: Columns, config: Config, split: str, world_size: int = 1
) -> dict[str, list[TrainingFeatures]]:
    """For each list what is told of the events of a pass, in the order of the global batches: rows of members
    as they are added up, without the event's own.
    """
    ranks = [EventBatches(columns, config, rank, world_size) for rank in range(world_size)]
    found: dict[str, list[TrainingFeatures]] = {name: [] for name in SIDES}
    for step in range(ranks[0].num_steps(split)):
        for dataset in ranks:
            batch = dataset[Request(split, 0, step)]
            of_features = lists_of(columns.tables, batch)
            for place, name in enumerate(SIDES):
                lists = of_features[name]
                for event in np.flatnonzero(batch.weights.numpy()):
                    members = lists[int(batch.sources[place, event])][:-1].tolist()
                    if batch.own[place, event]:
                        members.remove(lists[event][-1])
                    found[name].append(TrainingFeatures(members, float(batch.scales[place, event])))
    return found


def expected(columns: Columns, split: str, name: str) -> list[list[int]]:
    """By brute force, for the events of a split in the order of the disk."""
    owner, member = SIDES[name]
    rows = columns.column("rows")
    num_known = columns.num_train + (columns.num_validation if split == "test" else 0)
    known, members = rows[:num_known], rows_of(columns, member)
    return [
        sorted(
            int(members[other[member]])
            for place, other in enumerate(known)
            if other[owner] == rows[position][owner] and place != position
        )
        for position in columns.range_of(split)
    ]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_evaluated_event_gets_all_training_events_of_its_user_and_item(config: Config, split: str) -> None:
    columns = open_columns(config)
    for name, found in told(columns, config, split).items():
        wanted = expected(columns, split, name)
        assert [sorted(one.members) for one in found] == wanted
        scales = [len(members) ** -0.5 if members else 0 for members in wanted]
        assert [one.scale for one in found] == pytest.approx(scales)


def test_a_training_event_gets_all_other_events_of_its_user_and_item(config: Config) -> None:
    columns = open_columns(config)
    for name, found in told(columns, config, "train").items():
        # The order of training is shuffled, so the lists are held against each other without it.
        key = sorted(tuple(sorted(one.members)) for one in found)
        assert key == sorted(tuple(members) for members in expected(columns, "train", name))
        assert all(one.scale == pytest.approx(len(one.members) ** -0.5) for one in found if len(one.members))


@pytest.mark.parametrize("split", ["train", "test"])
def test_co_occurrence_lists_are_the_same_for_1_2_and_3_ranks(config: Config, split: str) -> None:
    config = config.replaced(co_occurrence=5)
    columns = open_columns(config)
    for world_size in (2, 3):
        few = config.replaced(batch_size=48 // world_size)
        for name, found in told(columns, few, split, world_size).items():
            assert found == told(columns, config, split)[name]


def test_a_sampled_list_has_distinct_members_and_scaled_weights(config: Config) -> None:
    config = config.replaced(co_occurrence=5)
    columns = open_columns(config)
    for name, found in told(columns, config, "test").items():
        for one, every_id in zip(found, expected(columns, "test", name), strict=True):
            assert len(set(one.members)) == len(one.members) == min(5, len(every_id))
            assert set(one.members) <= {*every_id}
            assert one.scale == pytest.approx(len(one.members) ** -0.5 if every_id else 0)


def test_another_epoch_has_other_samples_and_a_measurement_the_same(config: Config) -> None:
    config = config.replaced(co_occurrence=5, batch_size=2048)
    dataset = EventBatches(open_columns(config), config, 0, 1)
    first, second = (dataset[Request("train", 0, 0)].sources, dataset[Request("train", 1, 0)].sources)
    assert first.shape == second.shape == (2, 2048)
    measured = [dataset[Request("test", epoch, 0)].values.tolist() for epoch in (0, 1)]
    assert measured[0] == measured[1]
    trained = [sorted(dataset[Request("train", epoch, 0)].values.tolist()) for epoch in (0, 1)]
    assert trained[0] != trained[1]


def test_rarities_are_one_over_the_events_of_user_item_and_all(config: Config) -> None:
    config = config.replaced(batch_size=2048)
    columns = open_columns(config)
    batch = EventBatches(columns, config, 0, 1)[Request("train", 0, 0)]
    real = batch.weights.numpy() > 0
    weight = batch.weights.numpy()[real]
    for place in range(2):
        # Each user, and each item, adds up to one event.
        owners = len(np.unique(columns.column("rows")[("user", "item")[place]][: columns.num_train]))
        assert (batch.rarities[place].numpy()[real] / weight).sum() == pytest.approx(owners, rel=1e-5)
    assert (batch.rarities[2].numpy()[real] / weight).sum() == pytest.approx(1, rel=1e-5)
    assert (batch.rarities.numpy()[:, ~real] == 0).all()
    measured = EventBatches(columns, config, 0, 1)[Request("test", 0, 0)]
    assert (measured.rarities == 0).all()


def test_without_an_item_history_a_batch_is_unchanged(config: Config) -> None:
    config = config.replaced(co_occurrence=0)
    batch = EventBatches(open_columns(config), config, 0, 1)[Request("train", 0, 0)]
    assert [part.shape[0] for part in (batch.sources, batch.scales, batch.own, batch.rarities)] == [0] * 4


def test_an_item_history_holds_earlier_users_of_the_item(config: Config) -> None:
    config = config.replaced(co_occurrence=0, item_history=3, split="time", batch_size=2048)
    columns = open_columns(config)
    rows, times = columns.column("rows"), columns.column("time")
    users = rows_of(columns, "user")
    known = rows[: columns.num_train + columns.num_validation]
    for position, one in zip(
        columns.range_of("test"), told(columns, config, "test")["audience"], strict=True
    ):
        older = [
            place
            for place, other in enumerate(known)
            if other["item"] == rows[position]["item"] and times[place] < times[position]
        ]
        # Of one second any order is as good; who came last is told all the same.
        candidates = {int(users[known[place]["user"]]) for place in older}
        assert len(one.members) == min(3, len(older))
        assert {*one.members} <= candidates


def test_a_pass_that_is_resumed_has_the_samples_of_one_that_was_not(config: Config) -> None:
    config = config.replaced(co_occurrence=5)
    dataset = EventBatches(open_columns(config), config, 0, 1)
    for step in (0, 1):
        whole = dataset[Request("train", 1, step + 2)]
        resumed = dataset[Request("train", 1, step, first=2 * 48)]
        for one, other in zip(whole, resumed, strict=True):
            np.testing.assert_array_equal(one, other)
