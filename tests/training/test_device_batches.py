"""Batches made on a device equal those of the loader; here the device is the CPU."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recsuite as rs
from example import RatingModel, make_loss, make_model
from recsuite.checkpoint.stream_state import reopen_data
from recsuite.config.config import Config
from recsuite.datasets import batching
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.batching import Batch, HistoryArrays
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.opening import Data, open_data
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import HISTORY
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.recommender import ModelInput
from recsuite.sharding.torchrec_tables import CheckedFeatures
from recsuite.tools.script import report_test
from recsuite.training import device_batches, device_negatives, steps
from recsuite.training.device_batches import (
    DeviceBatches,
    DeviceInput,
    shuffled,
    why_not_on_device,
    why_not_padded,
)
from recsuite.training.evaluation import RankingEvaluator, make_evaluator
from recsuite.training.loop import Training
from recsuite.training.progress import Progress
from recsuite.training.state import build_train_state
from recsuite.training.steps import BatchFeed

CPU = torch.device("cpu")
# Fields of `Batch` for the items of histories.
OF_MEMBERS = HistoryArrays._fields
# Labels, weights, dense numbers, lists, and features of all three entities; some of each are missing.
SCHEMA = """
[user]
column = "user"
[item]
column = "item"
[[label]]
kind = "yes_no"
column = "bought"
[[label]]
kind = "rating"
column = "stars"
weight = "trust"
lowest = 1.0
highest = 5.0
[weight]
column = "weight"
[features.price]
of = "event"
kind = "number"
input = "dense"
column = "price"
[features.shop]
of = "event"
kind = "category"
column = "shop"
[features.tags]
of = "item"
kind = "list"
column = "tags"
separator = "|"
"""
TYPES = """
[user]
column = "user"
[item]
column = "item"
[label]
kind = "clicks"
[timestamp]
column = "time"
format = "unix"
[events]
type = "kind"
target = "buy"
context = ["view"]
[features.price]
of = "event"
kind = "number"
input = "dense"
column = "price"
[features.shop]
of = "event"
kind = "category"
column = "shop"
[features.clubs]
of = "user"
kind = "list"
column = "clubs"
separator = "|"
[features.height]
of = "user"
kind = "number"
input = "dense"
column = "height"
"""
ALL = {"task": "ranking", "history": 0}
LEARNED = {"task": "ranking", "history": 5, "history_weights": "learned"}
KINDS: dict[str, dict[str, Any]] = {
    "no history": {"history": 0},
    "history": {"history": 5},
    "days": {"split": "random", "day_feature": "user", "history": 30},
    "labels": {"task": "response", "split": "random", "batch_size": 16},
    "ranking": {"task": "ranking", "history": 5, "batch_size": 300},
    "learned": {**LEARNED, "negatives": 30},
    "repeats": {**LEARNED, "negatives": 9, "seen": "allow", "day_feature": "user"},
    "all items": {**ALL, "negatives": 1000},
    "sequence": {"task": "sequence", "history": 20, "negatives": 8},
    "short sequence": {"task": "sequence", "history": 3, "negatives": 200, "batch_size": 48},
    "long lists": {"task": "response", "split": "random", "batch_size": 48},
    "long lists, drawn": {**ALL, "split": "random", "negatives": 9, "batch_size": 48},
    "event types": {**LEARNED, "negatives": 5, "batch_size": 40},
}


# Fixtures of the others.
FOLDERS = {
    "labels": "own_folder",
    "event types": "types_folder",
    "long lists": "long_folder",
    "long lists, drawn": "long_folder",
}


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all kinds of columns."""
    return write_own(tmp_path_factory.mktemp("own"), [item % 4 for item in range(20)])


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with one list that is far longer than all others."""
    return write_own(tmp_path_factory.mktemp("long"), [60, 0, 2, *[1] * 17])


def write_own(folder: Path, num_tags: list[int]) -> Path:
    """Write a folder with all kinds of columns. num_tags: of each item."""
    draw, number = np.random.default_rng(0), 600
    items = np.arange(number) % 20
    frame = pandas.DataFrame(
        {
            "user": np.arange(number) // 20,
            "item": items,
            "bought": draw.integers(0, 2, number),
            "stars": np.where(draw.random(number) < 0.3, np.nan, draw.integers(1, 6, number)),
            "trust": draw.integers(1, 4, number).astype(float),
            "weight": draw.integers(1, 4, number).astype(float),
            "price": np.where(draw.random(number) < 0.2, np.nan, draw.random(number)),
            "shop": draw.integers(0, 4, number),
            "tags": ["|".join(f"t{each}" for each in range(num_tags[item])) for item in items],
        }
    )
    frame.to_csv(folder / "events.csv", index=False)
    (folder / "schema.toml").write_text(SCHEMA)
    return folder


@pytest.fixture(scope="module")
def types_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with purchases, views that are only in histories, and features of users and events."""
    folder, draw, number = tmp_path_factory.mktemp("types"), np.random.default_rng(1), 900
    users = draw.integers(0, 30, number)
    frame = pandas.DataFrame(
        {
            "user": users,
            "item": draw.integers(0, 20, number),
            "time": np.sort(draw.integers(0, 10**9, number)),
            "kind": draw.choice(["buy", "view"], number),
            "price": np.where(draw.random(number) < 0.2, np.nan, draw.random(number)),
            "shop": draw.integers(0, 4, number),
            "clubs": ["|".join(f"c{each}" for each in range(user % 4)) for user in users],
            "height": 1.5 + 0.01 * users,
        }
    )
    frame.to_csv(folder / "events.csv", index=False)
    (folder / "schema.toml").write_text(TYPES)
    return folder


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest) -> Config:
    folder = request.getfixturevalue(FOLDERS.get(request.param, "small_folder"))
    return Config.of(**{"data_path": str(folder), "batch_size": 250, **KINDS[request.param]})


def jagged(batch: ModelInput) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The values of each feature and row, without unused slots; the fields of items of histories."""
    number, names = len(batch.labels), batch.features.keys()
    drawn = len(batch.features.lengths()) // len(names) - number
    # Drawn items, which come first, have no history.
    lists, of_drawn = list[np.ndarray](), [np.zeros(0, np.int64)] * drawn
    members, ordered = [each.numpy() for each in batch.members], len(batch.members.reads) > 0
    history: list[np.ndarray] = []
    for name, found in batch.features.to_dict().items():
        values, counts = found.values().numpy(), batch.counts.get(name, found.lengths()).numpy()
        if name == HISTORY:
            history = [*of_drawn, *used(values, counts)]
            members = [np.concatenate(used(each, counts)) if len(each) else each for each in members]
        elif name in batch.joined:
            lists += np.split(values, counts.cumsum())[:-1]
        elif ordered and counts[-1] > 1 and name not in batch.counts:
            # The history comes after the own items of all rows.
            own, items = np.split(values, [drawn + number])
            ends = batch.counts[HISTORY].numpy().cumsum()
            lists += np.split(own, len(own))
            history = [*of_drawn, *np.split(items, ends)[:-1]]
            # The last two fields are of rows, the others of items.
            members = [*(each[: ends[-1]] for each in members[:-2]), *members[-2:]]
        else:
            lists += used(values, counts)
    return lists + history, members


def used(slots: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """The used slots of each list."""
    return [row[:count] for row, count in zip(slots.reshape(len(counts), -1), counts, strict=True)]


def check_equal(made: ModelInput, expected: Batch) -> None:
    """The same bits and types in every field."""
    lists, members = jagged(made)
    wanted = np.split(expected.values.numpy(), expected.lengths.numpy().cumsum())[:-1]
    assert all(map(np.array_equal, lists, wanted))
    assert len(lists) == len(wanted)
    for mine, other in zip(members, OF_MEMBERS, strict=True):
        assert np.array_equal(mine, getattr(expected, other).numpy())
    for name in ("labels", "weights", "numbers", "seen_bits", "more_labels", "more_weights"):
        mine, other = getattr(made, name), getattr(expected, name)
        assert mine.dtype == other.dtype
        assert np.array_equal(mine.numpy(), other.numpy(), equal_nan=mine.is_floating_point())
    assert made.features.values().dtype == torch.int64
    assert isinstance(made.features, CheckedFeatures)


@pytest.mark.parametrize(
    ("split", "epoch", "first"),
    [("train", 0, 0), ("train", 2, 150), ("validation", 0, 0), ("test", 0, 0), ("catalogue", 0, 0)],
)
def test_a_batch_is_that_of_the_loader(config: Config, split: str, epoch: int, first: int) -> None:
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    assert why_not_on_device(dataset, config, 2**40) is None
    sampler = EpochSampler(dataset)
    sampler.split, sampler.epoch, sampler.first = split, epoch, first
    expected, made = list(build_dataloader(dataset, sampler, config)), DeviceBatches(dataset, CPU)
    batches = list(made.batches(split, epoch, first))
    assert len(batches) == len(expected) > (split == "train")
    for mine, other in zip(batches, expected, strict=True):
        check_equal(mine, other)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("kind", ["history", "learned"])
def test_a_batch_of_a_window_is_that_of_the_loader(
    small_folder: Path, context: RuntimeContext, split: str, kind: str
) -> None:
    # Also behind other windows, whose users in a batch are hidden at other places.
    flags = {**KINDS[kind], "stream": True, "window": "60d", "batch_size": 100}
    config, window = Config.of(data_path=str(small_folder), **flags), (1_003, 1_341)
    with reopen_data(config, context, trains=True) as opened:
        dataset = opened.loader.dataset
        dataset.first_event = 77
        sampler = EpochSampler(dataset)
        sampler.split, sampler.epoch, sampler.window = split, 3, window
        expected = list(build_dataloader(dataset, sampler, config))
        assert why_not_on_device(dataset, config, 2**40) is None
        made = list(DeviceBatches(dataset, CPU).batches(split, 3, window=window))
    assert len(made) == len(expected) == 4
    for mine, other in zip(made, expected, strict=True):
        check_equal(mine, other)


def test_records_of_a_stream_that_has_learned_all_events_are_those_of_padding() -> None:
    parts = {"features": (np.zeros((0, 3), np.int32), 7), "label": (np.zeros(0, np.float32), 0.5)}
    found = device_batches.Records(parts, CPU).take(torch.zeros(2, dtype=torch.int32))
    assert found["features"].tolist() == [[7] * 3] * 2
    assert found["label"].tolist() == [[0.5]] * 2


def test_each_batch_of_a_pass_has_the_same_shapes(config: Config) -> None:
    made = DeviceBatches(EventBatches(open_columns(config), config, rank=0, world_size=1), CPU)
    # Other splits have as many items as they read in order.
    for split in ("train",) if config.model.reads_order else ("train", "test"):
        shapes = {
            (*(each.shape for each in batch.members), batch.features.values().shape, batch.seen_bits.shape)
            for batch in made.batches(split, 0)
        }
        assert len(shapes) == 1


def test_a_pass_longer_than_one_block_is_the_same(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    made = DeviceBatches(EventBatches(open_columns(config), config, rank=0, world_size=1), CPU)

    def made_again() -> list[torch.Tensor]:
        batches = list(made.batches("train", 1))
        return [part for each in batches for part in (each.inputs.positions, each.inputs.negatives)] + [
            each.seen_bits for each in batches
        ]

    whole = made_again()
    monkeypatch.setattr(device_batches, "EVENTS_AT_ONCE", 2 * made.dataset.batch_size + 1)
    monkeypatch.setattr(device_batches, "SHUFFLED_AT_ONCE", 77)
    monkeypatch.setattr(device_negatives, "DRAWN_AT_ONCE", 100)
    monkeypatch.setattr(device_negatives, "PAIRS_AT_ONCE", 1)
    assert all(map(torch.equal, whole, made_again()))


@pytest.mark.parametrize("name", ["long lists", "long lists, drawn"])
def test_a_batch_above_its_budget_has_slots_of_its_own(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # So that about half of the batches are above it.
    monkeypatch.setattr(device_batches, "BUDGET_DEVIATIONS", -0.7)
    config = Config.of(data_path=str(long_folder), **KINDS[name])
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    batches = list(DeviceBatches(dataset, CPU).batches("train", 0))
    expected = list(build_dataloader(dataset, EpochSampler(dataset), config))
    for mine, other in zip(batches, expected, strict=True):
        check_equal(mine, other)
    above = [batch.is_above_budget for batch in batches]
    assert True in above
    assert False in above
    sizes = [len(batch.features.values()) for batch in batches]
    assert len({size for size, is_above in zip(sizes, above, strict=True) if not is_above}) == 1
    assert all(size > min(sizes) for size, is_above in zip(sizes, above, strict=True) if is_above)


@pytest.mark.parametrize("number", [1, 2, 1000, 4097, 2**31])
def test_an_order_is_that_of_the_loader(number: int) -> None:
    positions = np.unique(np.linspace(0, number - 1, 5000).astype(np.int64))
    wanted = batching.shuffled(positions, number, 7, 3)
    assert np.array_equal(shuffled(torch.from_numpy(positions), number, 7, 3).numpy(), wanted)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"num_workers": 2}, "--num_workers is 2"),
        ({"vocabulary": "dynamic"}, "dynamic"),
        ({"pipeline": "sparse_dist"}, "sparse_dist"),
    ],
)
def test_other_batches_come_from_the_loader(
    synthetic_folder: Path, flags: dict[str, Any], reason: str
) -> None:
    config = Config.of(data_path=str(synthetic_folder), **flags)
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    assert reason in str(why_not_on_device(dataset, config, 2**40))


class PeakMemory(TorchDispatchMode):
    """Largest number of bytes of tensors that operations made and that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.held = 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {
                each.untyped_storage()._cdata: each.untyped_storage()
                for each in tree_leaves(part)
                if is_tensor(each)
            }
            for part in ((args, kwargs), result)
        )
        for key in made.keys() - given.keys() - self.held.keys():
            self.held[key] = made[key].nbytes()
            weakref.finalize(made[key], self.held.pop, key)
        self.peak = max(self.peak, sum(self.held.values()))
        return result


def test_columns_that_do_not_fit_with_the_order_of_passes_stay_on_the_host(config: Config) -> None:
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    needed = device_batches.bytes_needed(dataset)
    assert why_not_on_device(dataset, config, 2 * needed - 2) is not None
    assert why_not_on_device(dataset, config, 2 * needed) is None
    with PeakMemory() as sorting:
        negatives = device_negatives.DeviceNegatives(dataset, CPU)
    if negatives.marks_seen:
        assert sorting.peak < device_negatives.BYTES_OF_SORTING * len(dataset.features.column("seen"))
    batches = DeviceBatches(dataset, CPU)
    with PeakMemory() as passes:
        for epoch, split in itertools.product(range(2), ("train", "validation")):
            for last in batches.batches(split, epoch):
                assert not last.is_made
    assert 0 < passes.peak <= device_batches._bytes_of_order(dataset)
    assert needed >= batches.nbytes + passes.peak


@pytest.mark.gpu
def test_a_gpu_sorts_in_the_memory_that_was_counted() -> None:
    pairs = torch.arange(2**22, device="cuda").flip(0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pairs.sort(stable=True)
    # The pairs and the places are there before.
    most = device_negatives.BYTES_OF_SORTING - 16
    assert torch.cuda.max_memory_allocated() - before <= most * len(pairs)


def test_columns_are_the_same_when_they_are_read_in_small_parts(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, made = EventBatches(open_columns(config), config, rank=0, world_size=1), []
    # Genres with a budget.
    monkeypatch.setattr(device_batches, "MOST_SLOTS", 1)
    for number in (2**22, 7):
        monkeypatch.setattr(device_batches, "RECORDS_AT_ONCE", number)
        batches = DeviceBatches(dataset, CPU)
        records = [each.values for each in (batches.events, *batches.entities)]
        parts = (records, batches.lists, batches.histories, batches.times)
        means = [device_batches._mean_length(dataset, each) for each in dataset.tables if each.feature.multi]
        made.append((tree_leaves(parts), batches.budgets, means))
    assert made[0][1:] == made[1][1:]
    for mine, other in zip(made[0][0], made[1][0], strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


@pytest.mark.parametrize("name", ["user", "year", "genres", HISTORY])
def test_rows_that_a_table_does_not_have_are_refused_before_the_first_step(
    small_folder: Path, name: str
) -> None:
    config = Config.of(data_path=str(small_folder))
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    next(DeviceBatches(dataset, CPU).batches("train", 0))
    dataset.tables = tuple(
        replace(table, rows=table.rows - 1) if table.name == name else table for table in dataset.tables
    )
    with pytest.raises(UserError, match=rf"columns of {name} must have rows from 0 to .* --rebuild"):
        DeviceBatches(dataset, CPU)


@pytest.fixture
def data(small_folder: Path, context: RuntimeContext) -> Iterator[tuple[Config, Data]]:
    config = Config.of(data_path=str(small_folder), batch_size=250, epochs=2, cpu_tables="torchrec")
    with open_data(config, context) as opened:
        yield config, opened


def test_a_gpu_is_required_for_its_batches(data: tuple[Config, Data], context: RuntimeContext) -> None:
    config = data[0].replaced(data_device="cuda")
    with Training(data[1], config, context) as training, pytest.raises(UserError, match="there is no GPU"):
        training.shard(make_model)


TRAININGS: dict[str, dict[str, Any]] = {
    "rating": {},
    "ranking": {"task": "ranking", "history": 5, "negatives": 30},
    "learned": {**LEARNED, "batch_size": 300},
    "repeats": {**LEARNED, "negatives": 30, "seen": "allow"},
    "long lists": {},
    "sequence": {"task": "sequence", "history": 20, "negatives": 30, "dropout": 0.2},
    "sequence, hstu": {"task": "sequence", "block": "hstu", "mlp_dims": (), "history": 5, "negatives": 9},
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_with_them_learns_the_same(
    small_folder: Path, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Genres and histories with a budget; or no list.
    monkeypatch.setattr(device_batches, "MOST_SLOTS", 1 if name == "long lists" else 100)
    losses, flags = [], {"batch_size": 250, "epochs": 2, "cpu_tables": "torchrec", **TRAININGS[name]}
    config = Config.of(data_path=str(small_folder), **flags)
    with open_data(config, context) as data:
        for on_device in (False, True):
            with Training(data, config, context) as training:
                model = training.shard(make_model, make_loss(training.columns, config))
                if on_device:
                    training.feed.on_device = DeviceBatches(data.loader.dataset, CPU)
                for epoch in training.epochs():
                    for batch in epoch:
                        assert isinstance(batch, DeviceInput) == on_device
                        model.train_on(batch)
                    training.save(training.validate())
                run = training.finish()
            losses.append([*(epoch.train_loss for epoch in run.epochs), *run.test.values.values()])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("stream", [False, True])
def test_load_makes_its_batches_as_a_training_does(
    small_folder: Path, context: RuntimeContext, stream: bool
) -> None:
    config = Config.of(data_path=str(small_folder), stream=stream, data_device="cuda")
    with reopen_data(config, context, trains=True) as data:
        model = build_train_state(data.columns, config, context, make_model)
        with pytest.raises(UserError, match="there is no GPU"):
            report_test(model, Progress(), data, config, context)


def test_items_are_ranked_the_same_with_them(small_folder: Path, context: RuntimeContext) -> None:
    flags = {"task": "ranking", "history": 0, "batch_size": 50, "cpu_tables": "torchrec"}
    config = Config.of(data_path=str(small_folder), **flags)
    ranks = []
    with open_data(config, context) as data:
        for on_device in (False, True):
            feed = BatchFeed(data.loader)
            if on_device:
                feed.on_device = DeviceBatches(data.loader.dataset, CPU)
            model = build_train_state(data.columns, config, context, make_model).model
            evaluator = make_evaluator(feed, data.columns, config, context)
            assert isinstance(evaluator, RankingEvaluator)
            ranks.append([evaluator.ranks(model, split, 0) for split in ("validation", "test")])
    for plain, made in zip(*ranks, strict=True):
        assert np.array_equal(plain, made)
        assert len({*plain.tolist()}) > 10


def test_features_come_in_the_order_of_the_lookup(config: Config) -> None:
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    names = next(DeviceBatches(dataset, CPU).batches("train", 0)).features.keys()
    plain, turned = (
        next(DeviceBatches(dataset, CPU, order).batches("train", 0)).features for order in (None, names[::-1])
    )
    assert turned.keys() == names[::-1]
    for name in names:
        assert torch.equal(plain[name].values(), turned[name].values())
        assert torch.equal(plain[name].lengths(), turned[name].lengths())


class ReadsValues(RatingModel):
    """A model that reads the single rows of a list."""

    def item_vectors(self, rows: Any, batch: Any) -> torch.Tensor:
        values, _ = rows.jagged("genres")
        return super().item_vectors(rows, batch) + values.sum()


def test_a_model_that_reads_the_single_values_of_a_list_is_recognised(
    data: tuple[Config, Data], context: RuntimeContext
) -> None:
    def make(told: Any, args: Any) -> RatingModel:
        return ReadsValues(told, args.embedding_dim, args.mlp_dims)

    batches, found = DeviceBatches(data[1].loader.dataset, CPU), []
    for maker in (make_model, make):
        with Training(data[1], data[0], context) as training:
            found.append(why_not_padded(training.shard(maker), batches))
    assert found[0] is None
    assert "genres" in str(found[1])


class ReadsValuesInTraining(rs.TwoTower):
    """A model that reads the single rows of a list while it trains, and has state of its own."""

    reads = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.normed = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Dropout())

    def forward(self, rows: Any, batch: Any) -> torch.Tensor:
        self.normed(torch.rand(5, 8))
        if self.reads and self.training:
            rows.jagged("genres")
        return super().forward(rows, batch)


@pytest.mark.parametrize("reads", [False, True])
def test_a_model_is_also_tried_as_it_trains_and_stays_as_it_was(
    data: tuple[Config, Data], context: RuntimeContext, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(ReadsValuesInTraining, "reads", reads)
    batches = DeviceBatches(data[1].loader.dataset, CPU)
    with Training(data[1], data[0], context) as training:
        model = training.shard(
            lambda told, args: ReadsValuesInTraining(told.features, args.embedding_dim, ())
        )
        # Modes that a script chose.
        model.head.normed[1].eval()

        def state() -> Any:
            buffers = {name: (id(held), held.tolist()) for name, held in model.head.named_buffers()}
            return buffers, [part.training for part in model.model.modules()], torch.get_rng_state().tolist()

        before = state()
        reason = why_not_padded(model, batches)
        assert state() == before
    assert ("genres" in str(reason)) == reads
    assert (reason is None) != reads


@pytest.mark.parametrize("name", ["DeviceBatches", "why_not_padded"])
def test_batches_are_made_on_the_host_if_the_device_has_no_memory_for_columns(
    data: tuple[Config, Data], context: RuntimeContext, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(steps, "why_on_host", lambda *arguments: None)
    monkeypatch.setattr(steps, "free_bytes", lambda device: 2**40)
    monkeypatch.setattr(steps, name, fail)
    with Training(data[1], data[0], context) as training:
        training.shard(make_model)
        assert training.feed.on_device is None
        assert "no memory" in training.feed.why_on_host
    config = data[0].replaced(data_device="cuda")
    with Training(data[1], config, context) as training, pytest.raises(UserError, match="no memory"):
        training.shard(make_model)


def test_a_model_of_sequences_that_is_no_known_one_is_recognised(
    small_folder: Path, context: RuntimeContext
) -> None:
    config = Config.of(data_path=str(small_folder), task="sequence", cpu_tables="torchrec")
    found = []
    with open_data(config, context) as opened:
        batches = DeviceBatches(opened.loader.dataset, CPU)
        for maker in (make_model, lambda told, args: rs.TwoTower(told.features, args.embedding_dim, ())):
            with Training(opened, config, context) as training:
                found.append(why_not_padded(training.shard(maker), batches))
    assert found[0] is None
    assert "no SequenceHead" in str(found[1])


def test_products_in_bf16_learn_nearly_the_same(data: tuple[Config, Data], context: RuntimeContext) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        with Training(data[1], data[0].replaced(precision=precision), context) as training:
            losses.append([epoch.train_loss for epoch in training.run(make_model, make_loss).epochs])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)


def test_a_model_computes_in_the_precision_of_the_script(
    data: tuple[Config, Data], context: RuntimeContext
) -> None:
    found = []
    with Training(data[1], data[0], context) as training:
        model = training.shard(make_model)
        model.head.mlp.register_forward_hook(lambda module, given, output: found.append(output.dtype))
        batch = next(iter(next(training.epochs())))
        model.output(batch)
        with torch.autocast("cpu", torch.bfloat16):
            model.output(batch)
    assert found == [torch.float32, torch.bfloat16]


def test_tf32_requires_a_gpu(data: tuple[Config, Data], context: RuntimeContext) -> None:
    config = data[0].replaced(precision="tf32")
    with Training(data[1], config, context) as training, pytest.raises(UserError, match="requires a GPU"):
        training.shard(make_model)
