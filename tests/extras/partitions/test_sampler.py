"""Batches of ranks with partitions of different sizes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.extras.partitions.sampler import Batches, PartColumns, seed_of
from recsuite.training.progress import Progress

Sizes = tuple[tuple[int, int, int], ...]
UNEQUAL: Sizes = ((700, 40, 90), (101, 0, 3), (1, 7, 0))
BATCH = 64


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("data") / "ratings"
    write_synthetic(folder, 1_000, seed=0)
    return open_columns(Config.of(data_path=str(folder)))


def described(columns: Any, sizes: Sizes, rank: int) -> PartColumns:
    """Columns of a rank of a data set of these sizes, without its files."""
    totals = dict(
        zip(("num_train", "num_validation", "num_test"), map(sum, zip(*sizes, strict=True)), strict=True)
    )
    return PartColumns(**{**vars(columns), **totals}, sizes=sizes, rank=rank)


def batches_of(columns: Any, sizes: Sizes, **flags: Any) -> list[Batches]:
    config = Config.of(batch_size=BATCH, **flags)
    return [Batches(described(columns, sizes, rank), config, rank, len(sizes)) for rank in range(len(sizes))]


def events_of(dataset: Batches, split: str, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """Positions of the events of each batch of a rank."""
    requests = [Request(split, epoch, step, first) for step in range(dataset.num_steps(split, first))]
    return [dataset._positions_of_step(request)[0].tolist() for request in requests]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_each_event_of_each_partition_comes_once_in_as_many_steps_on_each_rank(
    columns: Any, split: str
) -> None:
    ranks = batches_of(columns, UNEQUAL)
    steps = [events_of(dataset, split) for dataset in ranks]
    assert len({len(of_rank) for of_rank in steps}) == 1
    for dataset, of_rank, sizes in zip(ranks, steps, UNEQUAL, strict=True):
        events = [event for batch in of_rank for event in batch]
        assert sorted(events) == [*dataset.ranges[split]]
        assert max(map(len, of_rank)) <= dataset.local_batch_size
        assert dataset.local_sizes(split).tolist() == [len(batch) for batch in of_rank]
        if split != "train":
            assert events == (dataset.ranges[split].start + dataset.numbers_of(split)).tolist()
        assert len(events) == sizes[("train", "validation", "test").index(split)]
    sizes_of_steps = [sum(map(len, of_step)) for of_step in zip(*steps, strict=True)]
    for dataset in ranks:
        assert dataset.step_sizes(split) == sizes_of_steps
        assert dataset.num_events(split) == sum(sizes_of_steps)


def test_a_step_has_about_the_batch_size_and_ranks_end_together(columns: Any) -> None:
    ranks = batches_of(columns, UNEQUAL)
    *full, last = ranks[0].step_sizes("train")
    assert all(BATCH <= size < BATCH + len(UNEQUAL) for size in full[:1])
    assert ranks[0].num_steps("train") == -(-sum(size for size, _, _ in UNEQUAL) // BATCH)
    assert last > 0


def test_events_of_a_step_have_equal_weights_whose_mean_over_all_rows_is_1(columns: Any) -> None:
    ranks = batches_of(columns, UNEQUAL)
    for step, size in enumerate(ranks[0].step_sizes("train")):
        weights = {dataset._weight_of(Request("train", 0, step)) for dataset in ranks}
        rows = len(ranks) * ranks[0].local_batch_size
        assert len(weights) == 1
        assert weights.pop() * size == pytest.approx(rows)


def test_epochs_and_ranks_with_as_many_events_have_other_orders(columns: Any) -> None:
    one, two = batches_of(columns, ((300, 9, 9), (300, 9, 9)))
    orders = [events_of(dataset, "train", epoch) for dataset in (one, two) for epoch in (0, 1)]
    assert all(a != b for place, a in enumerate(orders) for b in orders[:place])
    assert len({seed_of(seed, rank) for seed in range(3) for rank in range(50)}) == 3 + 3 * 49


def test_one_rank_has_the_batches_of_the_data_in_one_piece(columns: Any) -> None:
    config = Config.of(batch_size=BATCH, history=5)
    sizes = ((columns.num_train, columns.num_validation, columns.num_test),)
    part, whole = Batches(described(columns, sizes, 0), config, 0, 1), EventBatches(columns, config, 0, 1)
    for split in ("train", "validation", "test", "catalogue"):
        assert part.step_sizes(split) == whole.step_sizes(split)
        for step in range(whole.num_steps(split)):
            made = (each.make(Request(split, 2, step)) for each in (part, whole))
            for one, other in zip(*made, strict=True):
                np.testing.assert_array_equal(one, other)


def test_the_rest_of_a_pass_is_that_of_the_whole_pass(columns: Any) -> None:
    for dataset in batches_of(columns, UNEQUAL):
        whole, sizes = events_of(dataset, "train", 3), dataset.step_sizes("train")
        for step in (1, 5, len(sizes) - 1):
            first = sum(sizes[:step])
            assert events_of(dataset, "train", 3, first) == whole[step:]
            assert dataset.step_sizes("train", first) == sizes[step:]
            assert dataset._weight_of(Request("train", 3, 0, first)) == dataset._weight_of(
                Request("train", 3, step)
            )


def test_a_training_continues_in_the_middle_only_with_the_same_steps(columns: Any, capsys: Any) -> None:
    part, progress = described(columns, UNEQUAL, 0), Progress(step=9, epoch=2, samples=300)
    assert part.continued(progress, has_same_steps=True, epochs=9) == progress
    assert "continues in the middle of epoch 3, after 300 of 802 ratings" in capsys.readouterr().out
    ended = dataclasses.replace(progress, samples=0)
    assert part.continued(ended, has_same_steps=False, epochs=9) == ended
    assert part.continued(progress, has_same_steps=False, epochs=9) == dataclasses.replace(ended, epoch=3)
    assert "continues with epoch 4: 300 of 802 ratings of epoch 3 were used" in capsys.readouterr().out
    # After the last epoch no model would be validated.
    assert part.continued(progress, has_same_steps=False, epochs=3) == ended
    assert "repeats epoch 3: 300 of 802 ratings" in capsys.readouterr().out


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_do_not_depend_on_the_number_of_workers(columns: Any, num_workers: int) -> None:
    sizes = ((columns.num_train, columns.num_validation, columns.num_test), (50, 0, 1))
    made = []
    for number in (0, num_workers):
        config = Config.of(batch_size=BATCH, num_workers=number)
        dataset = Batches(described(columns, sizes, 0), config, 0, 2)
        with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
            made.append([[tensor.clone().numpy() for tensor in batch] for batch in loader])
    for one, other in zip(*made, strict=True):
        for before, after in zip(one, other, strict=True):
            np.testing.assert_array_equal(before, after)


def test_more_events_than_a_permutation_has_are_sampled_over_ranks(columns: Any) -> None:
    sizes: Sizes = ((2**31, 2**30, 2**30), (2**31 - 1, 5, 2**31), (2**30, 0, 0))
    number, batch = sum(each for each, _, _ in sizes), 2**18
    config = Config.of(batch_size=batch)
    ranks = [Batches(described(columns, sizes, rank), config, rank, 3) for rank in range(3)]
    assert number > 2**32
    assert ranks[0].num_events("train") == number
    assert {sum(dataset.step_sizes("train")) for dataset in ranks} == {number}
    assert {dataset.num_steps("train") for dataset in ranks} == {-(-number // batch)}
    for dataset, (count, _, _) in zip(ranks, sizes, strict=True):
        last = dataset.num_steps("train") - 1
        first = sum(dataset.step_sizes("train")[:-1])
        for request in (Request("train", 1, last), Request("train", 1, 0, first)):
            positions, _ = dataset._positions_of_step(request)
            assert len(positions) == dataset.local_sizes("train")[last]
            assert len(np.unique(positions)) == len(positions)
            assert positions.min() >= 0
            assert positions.max() < count
            weight = dataset._weight_of(request)
            assert weight * (number - first) == pytest.approx(3 * dataset.local_batch_size)
        assert dataset._place_of(Request("train", 0, last)) > 2**30
    assert events_of_last_test(ranks[1]) == sum(sizes[1]) - 1


def events_of_last_test(dataset: Batches) -> int:
    """The last position of the test of a rank."""
    step = int(np.flatnonzero(dataset.local_sizes("test"))[-1])
    return int(dataset._positions_of_step(Request("test", 0, step))[0][-1])


def test_the_data_set_of_many_ranks_pickles_small(columns: Any) -> None:
    sizes = tuple((10**9 + rank, 10**6, 10**6) for rank in range(256))
    dataset = Batches(described(columns, sizes, 7), Config.of(batch_size=2**16), 7, 256)
    assert len(pickle.dumps(dataset)) < 2**16
