"""A step where its tensors do not lie on the CPU: nothing is mixed, asked for or sent there.

On fake tensors, which know their device and have no numbers: what reads a number of one, or mixes it with one
of the CPU, fails as it would on a GPU or be waited for there. The device is called "meta", for there torch
computes without a driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import example
from recsuite.config.config import Config
from recsuite.config.sections import UVM_CACHING
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.models.inputs import Members
from recsuite.models.layers import NumberLayers
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.plan import unsharded
from recsuite.sharding.recommender import ModelInput, TrainableModel, make_head, make_model
from recsuite.sharding.storage import RowsInHostMemory, TableRows
from recsuite.sharding.table_rules import RowWiseAdagrad
from recsuite.sharding.torchrec_tables import (
    DistinctTablesSharder,
    OneRankTablesSharder,
    TorchRecTablesSharder,
)
from recsuite.training import device_batches, steps
from recsuite.training.device_batches import DeviceBatches, Records, StepInputs
from recsuite.training.device_negatives import DeviceNegatives
from recsuite.training.device_order import DeviceOrder
from recsuite.training.progress import Progress
from recsuite.training.state import Schedule
from recsuite.training.steps import BatchFeed, Pass

DEVICE = torch.device("meta")
Move = Callable[[torch.Tensor], torch.Tensor]
# What the example trains by itself, and what else a head may have.
MODELS: dict[str, dict[str, Any]] = {
    "days": {"split": "random", "day_feature": "user", "mlp_dims": ()},
    "rating": {},
    "ranking": {"task": "ranking", "history_weights": "learned", "mlp_dims": ()},
    "response": {"task": "response"},
    "sequence": {"task": "sequence", "negatives": 8, "history": 20},
    "sequence, hstu": {"task": "sequence", "block": "hstu", "mlp_dims": (), "history": 20},
}

# Those whose batches are made on the device.
ON_DEVICE: dict[str, dict[str, Any]] = {
    **{name: MODELS[name] for name in ("days", "rating", "response")},
    "ranking": {**MODELS["ranking"], "negatives": 10},
    "ranking, equal weights": {"task": "ranking"},
    "ranking, repeats": {**MODELS["ranking"], "negatives": 10, "seen": "allow"},
    "sequence": {**MODELS["sequence"], "dropout": 0.2},
    "sequence, hstu": MODELS["sequence, hstu"],
    "long lists": {},
}


class Crossings(TorchDispatchMode):
    """Notes each operation that takes tensors from one device and gives tensors of another.

    Numbers, which are tensors without a dimension, may lie on the CPU: they are sent with the operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [part for part in tree_leaves((args, kwargs, result)) if isinstance(part, torch.Tensor)]
        if len({part.device.type for part in tensors if part.dim()}) > 1:
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("name", MODELS)
def test_a_step_mixes_no_devices_and_does_not_synchronize(synthetic_folder: Path, name: str) -> None:
    model, batch = model_and_batch(Config.of(data_path=str(synthetic_folder), batch_size=64, **MODELS[name]))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        model, batch, looked_up = moved(model, batch, lambda tensor: mode.from_tensor(tensor).to(DEVICE))
        head = model.recommender.head
        with Crossings() as crossings:
            rows = model.recommender.rows_of([looked_up], {})
            output = head(rows, batch)
            assert model.loss is not None
            loss = model.loss(output, batch)
            loss.backward()
        assert {part.device for part in (*tree_leaves(output), loss)} == {DEVICE}
        assert all(rows.values().grad.device == DEVICE for rows in looked_up.values())
        assert all(part.grad is None or part.grad.device == DEVICE for part in head.parameters())
    assert crossings.found == []


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_step_with_a_batch_that_is_made_on_the_device_does_not_synchronize(
    synthetic_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(device_batches, "MOST_SLOTS", 1 if name == "long lists" else 100)
    config = Config.of(data_path=str(synthetic_folder), batch_size=600, **ON_DEVICE[name])
    model, _ = model_and_batch(config)
    assert model.loss is not None
    source = DeviceBatches(EventBatches(open_columns(config), config, 0, 1), torch.device("cpu"))
    inputs = next(source.batches("train", 0)).inputs
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def move(part: Any) -> Any:
            if isinstance(part, Records | DeviceNegatives | DeviceOrder | StepInputs):
                vars(part).update(tree_map(move, vars(part)))
            if isinstance(part, torch.device):
                return DEVICE
            return mode.from_tensor(part).to(DEVICE) if isinstance(part, torch.Tensor) else part

        inputs = move(inputs)
        vars(source).update(tree_map(move, vars(source)))
        for module in (model.recommender.head, model.loss):
            module._apply(move)
        with Crossings() as crossings:
            batch = ModelInput(**source.make(inputs))
            looked_up = rows_on_device(model, batch.features)
            rows = model.recommender.rows_of([looked_up], batch.counts, batch.joined)
            model.loss(model.recommender.head(rows, batch), batch).backward()
        assert all(rows.values().grad.device == DEVICE for rows in looked_up.values())
    assert crossings.found == []
    assert bool(source.budgets) == (name == "long lists")


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_copied_to_a_device_from_pinned_memory_without_waiting(
    synthetic_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pinned: list[torch.Tensor] = []
    moves: list[tuple[torch.Tensor, dict[str, Any]]] = []
    plain = torch.Tensor.to

    def is_pinned(tensor: torch.Tensor) -> bool:
        memory = tensor.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == memory for each in pinned)

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        moves.append((tensor, options))
        return plain(tensor, *arguments, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    _, batch = model_and_batch(Config.of(data_path=str(synthetic_folder), batch_size=64, **MODELS[name]))
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch.to(DEVICE, non_blocking=True)
    assert len(moves) > 10
    assert all(options.get("non_blocking") for _, options in moves)
    # A tensor without elements has no memory that could be pinned.
    assert [tensor.shape for tensor, _ in moves if tensor.numel() and not is_pinned(tensor)] == []


def test_on_a_gpu_no_kernel_waits_for_the_copy_of_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Copied:
        def __init__(self, name: str) -> None:
            self.name = name

        def to(self, device: torch.device, non_blocking: bool) -> Copied:
            done.append(f"copy {self.name} on {current[-1]}")
            assert (device.type, non_blocking) == ("cuda", True)
            return self

    @contextlib.contextmanager
    def using(stream: str) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    current = ["that of the kernels"]
    monkeypatch.setattr(steps, "_copy_stream", lambda device: "another")
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(steps, "_wait_for_batch", lambda batch, stream: done.append(f"wait {batch.name}"))
    source: Any = map(Copied, "123")
    for batch in steps.copied(source, torch.device("cuda")):
        done.append(f"compute {cast('Any', batch).name}")
    # A wait comes before the next copy, because it is for all copies so far.
    assert done == [
        *("copy 1 on another", "wait 1", "copy 2 on another", "compute 1"),
        *("wait 2", "copy 3 on another", "compute 2", "wait 3", "compute 3"),
    ]


@pytest.mark.parametrize("name", ["rating", "sequence"])
def test_memory_of_a_batch_is_kept_until_a_stream_has_used_all_its_tensors(
    synthetic_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, batch = model_and_batch(Config.of(data_path=str(synthetic_folder), batch_size=64, **MODELS[name]))
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(tensor))
    batch.record_stream(cast("Any", "a stream"))
    parts = {**vars(batch), "values": batch.features.values(), "lengths": batch.features.lengths()}
    del parts["features"]
    held = [part for part in tree_leaves(parts) if isinstance(part, torch.Tensor)]
    assert len(held) > 8
    assert [part.shape for part in held if not any(part is each for each in kept)] == []


# Of so many GPUs, with flags: whether ids are made distinct, and if a pipeline overlaps steps or loads rows.
ON_GPUS: dict[str, tuple[int, dict[str, Any], bool, bool, bool]] = {
    "one": (1, {}, False, False, False),
    "two": (2, {}, True, True, False),
    "two, plain": (2, {"pipeline": "plain"}, True, False, False),
    "one, overlapped": (1, {"pipeline": "sparse_dist"}, False, True, False),
    "dynamic": (2, {"vocabulary": "dynamic"}, True, True, False),
    "one, dynamic": (1, {"vocabulary": "dynamic"}, False, False, False),
    "host memory": (1, {"storage": "uvm"}, False, False, False),
    "a cache": (1, {"storage": "uvm_caching"}, False, True, True),
    "a cache, plain": (1, {"storage": "uvm_caching", "pipeline": "plain"}, False, False, False),
}


@pytest.mark.parametrize("name", ON_GPUS)
def test_on_gpus_the_number_and_the_flags_choose_kernels_and_pipeline(
    synthetic_folder: Path, name: str
) -> None:
    world_size, flags, is_distinct, overlaps, prefetches = ON_GPUS[name]
    config = Config.of(data_path=str(synthetic_folder), **flags)
    context = RuntimeContext(0, 0, world_size, world_size, torch.device("cuda"), 1)
    _, sharder, _, _ = unsharded(
        open_columns(config), config, context, RowWiseAdagrad(0.04), 2**30, example.make_model
    )
    static = OneRankTablesSharder if world_size == 1 else DistinctTablesSharder
    assert type(sharder) is (TorchRecTablesSharder if "vocabulary" in flags else static)
    assert vars(sharder)["_use_index_dedup"] is is_distinct
    # A cache has a kernel of its own.
    rows = RowsInHostMemory(None) if config.tables.storage == UVM_CACHING else TableRows(torch.empty(0), {})
    model: Any = SimpleNamespace(model=torch.nn.Module(), tables={"user": SimpleNamespace(rows=rows)})
    dataset = SimpleNamespace(step_sizes=lambda *arguments: [])
    inputs: Any = SimpleNamespace(loader=SimpleNamespace(dataset=dataset))
    part = Pass(model, inputs, Progress(0, 0), Schedule(1), config.training, context)
    assert (part.overlaps, part.prefetches) == (overlaps, prefetches)


def test_dense_numbers_are_selected_on_their_device() -> None:
    layers = NumberLayers([0, 2], embedding_dim=8)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        layers._apply(lambda tensor: mode.from_tensor(tensor).to(DEVICE))
        with Crossings() as crossings:
            layers(torch.empty(5, 3, device=DEVICE)).sum().backward()
    assert crossings.found == []


def model_and_batch(config: Config) -> tuple[TrainableModel, ModelInput]:
    """A model with all that training gives it but tables, and its first batch, on the CPU."""
    columns = open_columns(config)
    sampler = EpochSampler(EventBatches(columns, config, 0, 1))
    feed = BatchFeed(build_dataloader(sampler.dataset, sampler, config))
    num_rows = {table.name: table.rows for table in columns.tables}
    head = make_head(columns, config.model, config.data.history, example.make_model)
    model = make_model(columns, config, head, num_rows, example.make_loss(columns, config))
    return model, next(feed.batches("train", 0))


def moved(
    model: TrainableModel, batch: ModelInput, move: Move
) -> tuple[TrainableModel, ModelInput, dict[str, JaggedTensor]]:
    """The same on another device, and rows as TorchRec looks them up there."""
    features = batch.features
    there = KeyedJaggedTensor(
        features.keys(),
        move(features.values()),
        lengths=move(features.lengths()),
        stride=features.stride(),
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
    )
    assert model.loss is not None
    for module in (model.recommender.head, model.loss):
        module._apply(move)
    plain: dict[str, Any] = {
        name: move(getattr(batch, name)) for name in ("labels", "weights", "numbers", "seen_bits")
    }
    members = Members(*map(move, batch.members))
    batch = dataclasses.replace(batch, features=there, members=members, **plain)
    return model, batch, rows_on_device(model, there)


def rows_on_device(model: TrainableModel, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """Rows as TorchRec looks them up on the device."""
    (dim,), lengths = {*model.recommender.widths.values()}, features.lengths()
    return {
        name: JaggedTensor(
            values=torch.empty(number, dim, device=DEVICE, requires_grad=True), lengths=of_feature
        )
        for name, number, of_feature in zip(
            features.keys(), features.length_per_key(), lengths.view(len(features.keys()), -1), strict=True
        )
    }
