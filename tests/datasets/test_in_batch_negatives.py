"""Earlier items of a user are not negatives: marked exactly, for each event and the items of its group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recsuite.config import sections
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.batching import NEW_USER_EVERY
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.models.losses import unpack_bits
from tests.support.batches import lists_of
from tests.support.csv_ratings import write_ratings

GROUP = 24


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Planted ratings of few movies by few users, several in one second, so that many had many."""
    monkeypatch.setattr(sections, "IN_BATCH_NEGATIVES", GROUP)
    rng = np.random.default_rng(0)
    ratings = []
    for user in range(30):
        movies = rng.permutation(40)[: 5 + user].tolist()
        times = 1000 + rng.integers(0, 12, len(movies))
        ratings += [(user, movie, 4.0, time) for movie, time in zip(movies, times.tolist(), strict=True)]
    write_ratings(tmp_path, ratings)
    return Config.of(data_path=str(tmp_path), task="ranking", batch_size=60, history=2)


def had_by(
    columns: Columns, positions: list[int], items: list[int], reads_order: bool = False
) -> torch.Tensor:
    """By brute force: whether the user of each training event had each item strictly before it, bool; where
    the order is read also what came before it in the same second.
    """
    rows, times = columns.column("rows")[: columns.num_train], columns.column("time")
    if reads_order:
        # They lie in the order of time, and those of one second in that of the file.
        times = np.arange(len(times))
    # Nobody has an item twice here.
    had_at = {
        (int(row["user"]), int(row["item"])): int(time)
        for row, time in zip(rows, times[: len(rows)], strict=True)
    }
    users = rows["user"][positions].tolist()
    found = [
        [had_at.get((user, item), 2**40) < times[position] for item in items]
        for user, position in zip(users, positions, strict=True)
    ]
    return torch.tensor(found)


def is_hidden(place: int) -> bool:
    """True if the user of the training event at a place of a pass is hidden: it had nothing before."""
    return place % NEW_USER_EVERY == 0


# A batch that is no multiple of the group, one of a group, and one below it that fills no bytes.
@pytest.mark.parametrize("batch_size", [60, 24, 13])
def test_in_batch_negatives_that_a_user_has_seen_are_marked(config: Config, batch_size: int) -> None:
    config = config.replaced(batch_size=batch_size)
    columns = open_columns(config)
    batches = EventBatches(columns, config, 0, 1)
    items = columns.column("rows")["item"]
    number = 0
    for step in range(batches.num_steps("train")):
        request = Request("train", 1, step)
        seen_bits, positions = batches[request].seen_bits, batches._positions_of_step(request)[0]
        assert len(seen_bits) == batch_size
        for begin in range(0, batch_size, GROUP):
            found = unpack_bits(seen_bits[begin : begin + GROUP], len(seen_bits[begin : begin + GROUP]))
            group = positions[begin : begin + GROUP].tolist()
            wanted = torch.zeros_like(found)
            if group:
                wanted[: len(group), : len(group)] = had_by(columns, group, items[group].tolist())
            wanted[[row for row in range(len(wanted)) if is_hidden(step * batch_size + begin + row)]] = False
            assert torch.equal(found, wanted)
            number += int(found.sum())
    # The planted data have many such pairs.
    assert number > 500


@pytest.mark.parametrize("world_size", [2, 3, 7, 70])
def test_a_group_has_the_same_items_and_marks_on_any_number_of_ranks(config: Config, world_size: int) -> None:
    # Groups of 24 of 60 events, of which ranks have 30, 20, 9 or at most one.
    config = config.replaced(negatives=13)
    columns = open_columns(config)
    whole, *parts = (
        EventBatches(columns, config, rank, number) for number in (1, world_size) for rank in range(number)
    )
    for step in (0, 1, whole.num_steps("train") - 1):
        request = Request("train", 1, step)
        joined = torch.cat([part[request].seen_bits for part in parts])
        assert torch.equal(joined[:60], whole[request].seen_bits)
        assert not joined[60:].any()


@pytest.mark.parametrize(("task", "split"), [("rating", "train"), ("ranking", "validation")])
def test_no_negative_is_marked_without_in_batch_negatives(config: Config, task: str, split: str) -> None:
    config = config.replaced(task=task, validation_fraction=0.1)
    batch = EventBatches(open_columns(config), config, 0, 1)[Request(split, 0, 0)]
    assert batch.seen_bits.shape == (60, 0 if task == "rating" else GROUP // 8)
    assert not batch.seen_bits.any()


# --- items that are drawn ---


def with_new_items(config: Config) -> Config:
    """The same with five movies that the test alone has: those of the newest events."""
    folder = Path(config.data.data_path)
    with (folder / "ratings.csv").open("a") as ratings, (folder / "movies.csv").open("a") as movies:
        for movie in range(40, 45):
            ratings.write(f"0,{movie},4.0,99999\n")
            movies.write(f"{movie},Title (1990),Drama\n")
    return config.replaced(split="time", validation_fraction=0.0)


def trained_items(columns: Columns) -> set[int]:
    """The items of the training, by brute force."""
    return set(columns.column("rows")["item"][: columns.num_train].tolist())


@pytest.mark.parametrize("task", ["ranking", "sequence"])
def test_drawn_items_are_distinct_training_items_and_equal_on_every_rank(config: Config, task: str) -> None:
    config = with_new_items(config).replaced(task=task, negatives=12)
    columns = open_columns(config)
    known = trained_items(columns)
    assert 12 < len(known) <= 40 < columns.num_items
    # More than one rank have parts of the batch of one.
    parts = [
        EventBatches(columns, config, rank, world_size)
        for world_size in (1, 2, 3)
        for rank in range(world_size)
    ]
    samples = set()
    for epoch in (0, 1):
        for step in range(parts[0].num_steps("train")):
            request = Request("train", epoch, step)
            (drawn,) = {tuple(part._negatives(request).tolist()) for part in parts}
            assert len(set(drawn)) == 12
            assert set(drawn) <= known
            samples.add(drawn)
    # Others in each step of each pass.
    assert len(samples) == 2 * parts[0].num_steps("train")
    assert set().union(*samples) == known


@pytest.mark.parametrize("task", ["ranking", "sequence"])
def test_the_items_drawn_are_the_first_rows_of_training_and_of_nothing_else(
    config: Config, task: str
) -> None:
    config = with_new_items(config).replaced(task=task, negatives=12)
    columns = open_columns(config)
    batches = EventBatches(columns, config, 0, 1)
    for split, number in (("train", 12), ("test", 0), ("catalogue", 0)):
        request = Request(split, 0, 0)
        batch = batches[request]
        assert len(batch.labels) == len(batch.weights) == len(batch.seen_bits) == 60
        lists = lists_of(columns.tables, batch)
        assert len(lists["user"]) == number + 60
        rows = columns.column("movie_features")["features"][batches._negatives(request), 0]
        assert np.concatenate(lists["movie"])[:number].tolist() == rows.tolist()
        # Of nobody, who had nothing.
        assert np.concatenate(lists["user"])[:number].tolist() == [0] * number
        assert not any(map(len, lists["history"][:number]))


def test_all_items_are_drawn_in_order_if_there_are_few(config: Config) -> None:
    config = with_new_items(config).replaced(task="sequence")
    columns = open_columns(config)
    known = sorted(trained_items(columns))
    for number in (len(known), 1000):
        batches = EventBatches(columns, config.replaced(negatives=number), 0, 1)
        for step in range(3):
            assert batches._negatives(Request("train", 0, step)).tolist() == known


def test_a_resumed_pass_draws_the_same_items_as_an_uninterrupted_one(config: Config) -> None:
    config = config.replaced(negatives=12)
    columns = open_columns(config)
    one, three = (EventBatches(columns, config, 0, world_size) for world_size in (1, 3))
    for step in range(1, 4):
        resumed = three._negatives(Request("train", 1, step - 1, first=60))
        assert resumed.tolist() == one._negatives(Request("train", 1, step)).tolist()


# Numbers that fill bytes, and that do not.
@pytest.mark.parametrize("negatives", [16, 13, 1000])
@pytest.mark.parametrize("task", ["ranking", "sequence"])
def test_drawn_negatives_that_a_user_has_seen_are_marked(config: Config, task: str, negatives: int) -> None:
    config = config.replaced(task=task, negatives=negatives)
    columns = open_columns(config)
    batches = EventBatches(columns, config, 0, 1)
    group = GROUP // 8 if task == "ranking" else 0
    number = 0
    for step in range(batches.num_steps("train")):
        request = Request("train", 0, step)
        seen_bits, drawn = batches[request].seen_bits, batches._negatives(request).tolist()
        assert seen_bits.shape == (60, group + -(-len(drawn) // 8))
        found = unpack_bits(seen_bits[:, group:], len(drawn))
        wanted = torch.zeros_like(found)
        positions = batches._positions_of_step(request)[0].tolist()
        wanted[: len(positions)] = had_by(columns, positions, drawn, task == "sequence")
        if task == "ranking":
            wanted[[row for row in range(len(wanted)) if is_hidden(step * 60 + row)]] = False
        assert torch.equal(found, wanted)
        number += int(found.sum())
    assert number > 500
    if task == "ranking":
        # The group's are what they are without any that is drawn; a sequence without a number draws all.
        without = EventBatches(columns, config.replaced(negatives=0), 0, 1)[request]
        assert torch.equal(without.seen_bits, seen_bits[:, :group])
