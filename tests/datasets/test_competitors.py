"""What a user had before is no competitor: marked exactly, for each event and the items of its group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recsuite.config.config import Config
from recsuite.config.sections import model
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.models.tasks.ranking import bits_of, sampled_softmax

GROUP = 24


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Planted ratings of few movies by few users, several in one second, so that many had many."""
    monkeypatch.setattr(model, "COMPETITORS", GROUP)
    rng = np.random.default_rng(0)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(30):
        movies = rng.permutation(40)[: 5 + user]
        times = 1000 + rng.integers(0, 12, len(movies))
        lines += [f"{user},{movie},4.0,{time}" for movie, time in zip(movies, times, strict=True)]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies_csv = [f"{movie},Title (1990),Drama" for movie in range(40)]
    (tmp_path / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies_csv]) + "\n")
    return Config.of(data_path=str(tmp_path), task="ranking", batch_size=60, history=2)


def had_by(columns: Columns, position: int, item: int) -> bool:
    """By brute force: whether the user of a training event had an item strictly before it."""
    rows, time = columns.column("rows")[: columns.num_train], columns.column("time")[: columns.num_train]
    mine = (rows["user"] == rows["user"][position]) & (rows["item"] == item) & (time < time[position])
    return bool(mine.any())


# A batch that is no multiple of the group, one of a group, and one below it that fills no bytes.
@pytest.mark.parametrize("batch_size", [60, 24, 13])
def test_the_competitors_that_a_user_had_before_are_marked_and_no_others(
    config: Config, batch_size: int
) -> None:
    config = config.replaced(batch_size=batch_size)
    columns = open_columns(config)
    batches = EventBatches(columns, config, 0, 1)
    items = columns.column("rows")["item"]
    number = 0
    for step in range(batches.num_steps("train")):
        request = Request("train", 1, step)
        had, positions = batches[request].had, batches._positions(request)
        assert len(had) == batch_size
        for begin in range(0, batch_size, GROUP):
            found = bits_of(had[begin : begin + GROUP], len(had[begin : begin + GROUP]))
            group = positions[begin : begin + GROUP].tolist()
            expected = [[had_by(columns, one, items[other]) for other in group] for one in group]
            wanted = torch.zeros_like(found)
            if group:
                wanted[: len(group), : len(group)] = torch.tensor(expected)
            assert torch.equal(found, wanted)
            number += int(found.sum())
    # The planted data have many such pairs.
    assert number > 500


@pytest.mark.parametrize(("task", "split"), [("rating", "train"), ("ranking", "validation")])
def test_nothing_is_marked_where_nothing_competes(config: Config, task: str, split: str) -> None:
    config = config.replaced(task=task, validation_fraction=0.1)
    batch = EventBatches(open_columns(config), config, 0, 1)[Request(split, 0, 0)]
    assert batch.had.shape == (60, 0 if task == "rating" else GROUP // 8)
    assert not batch.had.any()


def test_the_loss_is_the_same_as_without_the_items_that_a_user_had() -> None:
    generator = torch.Generator().manual_seed(0)
    users, items = torch.randn(2, 6, 4, generator=generator)
    log_shares, real = torch.randn(6, generator=generator), torch.ones(6, dtype=torch.bool)
    had = torch.zeros(6, 6, dtype=torch.bool)
    had[2, [0, 5]] = True
    losses = sampled_softmax(users, items, torch.arange(6), log_shares, real, had)
    scores = (users @ items.T - log_shares)[2, [1, 2, 3, 4]]
    assert float(losses[2]) == pytest.approx(float(scores.logsumexp(0) - scores[1]))
    untouched = sampled_softmax(users, items, torch.arange(6), log_shares, real, torch.zeros_like(had))
    assert losses[[0, 1, 3, 4, 5]].tolist() == untouched[[0, 1, 3, 4, 5]].tolist()
    # What is its own stays, whatever is said of it.
    assert sampled_softmax(users, items, torch.arange(6), log_shares, real, ~had).isfinite().all()


def test_batches_with_marks_fit_their_slots(config: Config) -> None:
    config = config.replaced(history=10)
    batches = EventBatches(open_columns(config), config, 0, 1)
    sizes = [sum(array.nbytes for array in batches.make(Request("train", 0, step))) for step in range(4)]
    assert max(sizes) <= batches.batch_bytes
