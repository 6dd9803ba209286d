"""A captured step is the eager one, bit for bit, and leaves no trace where it cannot be.

On the CPU a stand-in for the graph repeats the function of the step. What the graph itself does is tested on
a GPU.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from example import make_loss, make_model
from recsuite.checkpoint.stream_state import reopen_data
from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.opening import Data, open_data
from recsuite.datasets.preparation import stream_reader
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.training import captured, device_batches, loop, steps
from recsuite.training.captured import (
    FEWEST_STEPS,
    MOST_CAPTURES,
    WARM_UP_STEPS,
    Number,
    TrainingStep,
    markers_of,
    numbers_of,
)
from recsuite.training.device_batches import DeviceBatches, DeviceInput
from recsuite.training.loop import Training
from recsuite.training.steps import learn
from tests.support.launch import GPUS, SUPPORT, python, succeeded

CPU = torch.device("cpu")
RULES = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "RowWiseAdam")

# With and without drawn negatives, which differ from step to step.
RANKED: list[dict[str, Any]] = [
    {"task": "ranking", "history": 5, "batch_size": 250},
    {"task": "ranking", "history": 5, "history_weights": "learned", "negatives": 30, "batch_size": 300},
    {"task": "sequence", "history": 20, "negatives": 30, "dropout": 0.2, "batch_size": 250},
]


class Repeated:
    """Stand-in for a graph: it repeats the function. captured: functions so far, of all of them."""

    captured: list[Callable[[], Any]]

    def capture(self, run: Callable[[], Any], numbers: Sequence[Number]) -> None:
        for number, marker in zip(numbers, markers_of(numbers), strict=True):
            number.write(float(len(marker)))
        self.run = run
        Repeated.captured.append(run)

    def replay(self) -> Any:
        return self.run()

    def close(self) -> None:
        del self.run


class Refusing(Repeated):
    """A graph that cannot be captured."""

    def capture(self, run: Callable[[], Any], numbers: Sequence[Number]) -> None:
        super().capture(run, numbers)
        raise RuntimeError("a value is read on the host")


@pytest.fixture
def opened(small_folder: Path, context: RuntimeContext) -> Iterator[tuple[Config, Data]]:
    Repeated.captured = []
    flags = {"batch_size": 250, "epochs": 2, "weight_decay": 0.15, "l2": 0.06, "cpu_tables": "torchrec"}
    config = Config.of(data_path=str(small_folder), **flags)
    with open_data(config, context) as data:
        yield config, data


@contextlib.contextmanager
def on_device(opened: tuple[Config, Data], context: RuntimeContext) -> Iterator[tuple[Training, Any]]:
    """A training with batches of the device, and its model."""
    config, data = opened
    with Training(data, config, context) as training:
        model = training.shard(make_model, make_loss(training.columns, config))
        training.feed.on_device = DeviceBatches(data.loader.dataset, CPU)
        yield training, model


def trained(
    opened: tuple[Config, Data],
    context: RuntimeContext,
    graph: Any = None,
    between: Callable[[Any, Any], None] = lambda model, step: None,
) -> list[Any]:
    """Weights and losses of a training with batches of the device; graph: None for eager steps."""
    with on_device(opened, context) as (training, model):
        step: Any = model.train_on
        if graph is not None:
            step = TrainingStep(model.train_on, model, context, None, False, graph)
        for epoch in training.epochs():
            for batch in epoch:
                assert isinstance(batch, DeviceInput)
                step(batch)
                between(model, step)
            training.save(training.validate())
        rows = [value.clone() for table in model.tables.values() for value in table.export().values()]
        dense = [each.detach().clone() for each in model.dense_parameters()]
        return [*rows, *dense, *(torch.from_numpy(epoch.losses) for epoch in training.results)]


def check_equal(
    opened: tuple[Config, Data],
    context: RuntimeContext,
    between: Callable[[Any, Any], None],
    captures: int,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """A captured training has the bits of an eager one, and so many captures. begin: called before each."""
    begin()
    found = trained(opened, context, Repeated, between)
    assert len(Repeated.captured) == captures
    begin()
    assert all(map(torch.equal, trained(opened, context, None, between), found))


@pytest.mark.parametrize(("graph", "captures"), [(Repeated, 1), (Refusing, 1)])
def test_a_captured_training_has_the_bits_of_an_eager_one(
    opened: tuple[Config, Data], context: RuntimeContext, graph: Any, captures: int
) -> None:
    eager, found = trained(opened, context), trained(opened, context, graph)
    assert all(map(torch.equal, eager, found))
    assert len(Repeated.captured) == captures


@pytest.mark.parametrize("flags", RANKED)
def test_a_captured_ranking_has_the_bits_of_an_eager_one(
    small_folder: Path, context: RuntimeContext, flags: dict[str, Any]
) -> None:
    Repeated.captured = []
    config = Config.of(data_path=str(small_folder), epochs=2, cpu_tables="torchrec", **flags)
    with open_data(config, context) as data:
        eager, captured = (trained((config, data), context, graph) for graph in (None, Repeated))
    assert all(map(torch.equal, eager, captured))
    assert len(Repeated.captured) == 1


def test_a_step_whose_lists_are_above_their_budget_is_eager_and_counted(
    opened: tuple[Config, Data],
    context: RuntimeContext,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(device_batches, "MOST_SLOTS", 1)
    # So that about half of the batches are above it.
    monkeypatch.setattr(device_batches, "BUDGET_DEVIATIONS", -0.2)
    above, steps = list[bool](), list[TrainingStep]()

    def look(model: Any, step: Any) -> None:
        steps.append(step)

    def made(source: DeviceBatches, *arguments: Any) -> Iterator[DeviceInput]:
        for batch in batches(source, *arguments):
            above.append(batch.is_above_budget and arguments[0] == "train")
            yield batch

    batches = DeviceBatches.batches
    monkeypatch.setattr(DeviceBatches, "batches", made)
    check_equal(opened, context, look, captures=1)
    assert {*above} == {True, False}
    assert steps[0].above_budget == sum(above) // 2
    assert capsys.readouterr().out.count("above their budget") == 1


def test_other_settings_of_the_optimizer_are_captured_again(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    def change(model: Any, step: Any) -> None:
        made.append(1)
        if len(made) == WARM_UP_STEPS + 3:
            model.dense_optimizer.param_groups[0]["weight_decay"] = 0.5

    made: list[int] = []
    check_equal(opened, context, change, captures=2, begin=made.clear)


def test_a_setting_that_changes_in_each_step_ends_the_captures(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    def change(model: Any, step: Any) -> None:
        model.dense_optimizer.param_groups[0]["weight_decay"] *= 1.01

    check_equal(opened, context, change, captures=MOST_CAPTURES)


def test_a_weight_that_begins_to_learn_is_captured_again(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    def change(model: Any, step: Any) -> None:
        made.append(1)
        next(iter(model.dense_parameters())).requires_grad_(len(made) > WARM_UP_STEPS + 2)

    made: list[int] = []
    check_equal(opened, context, change, captures=2, begin=made.clear)


def test_a_step_of_a_batch_that_the_script_has_changed_is_eager(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    found = []
    for graph in (None, Repeated):
        with on_device(opened, context) as (training, model):
            step: Any = model.train_on
            if graph is not None:
                step = TrainingStep(model.train_on, model, context, None, False, graph)
            epoch = next(training.epochs())
            for number, batch in enumerate(epoch):
                if number % 2:
                    batch.weights = 2 * batch.weights
                step(batch)
            assert epoch.losses is not None
            found.append(epoch.losses)
    assert found[0].tolist() == found[1].tolist()
    assert len(Repeated.captured) == 1


def test_what_python_reads_may_change_from_pass_to_pass(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    with on_device(opened, context) as (training, model):
        step = TrainingStep(model.train_on, model, context, None, False, Repeated)
        training._steps.append(step)
        for epoch in training.epochs():
            learn(epoch, step)
    assert len(Repeated.captured) == opened[0].training.epochs


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU make batches and repeat steps where a GPU does."""
    Repeated.captured = []
    monkeypatch.setattr(steps, "why_on_host", lambda *arguments: None)
    monkeypatch.setattr(steps, "free_bytes", lambda device: 2**40)
    monkeypatch.setattr(loop, "why_eager", lambda *arguments: None)
    monkeypatch.setattr(captured, "CudaGraph", Repeated)


def streamed(folder: Path, context: RuntimeContext, **flags: Any) -> list[tuple[float, float]]:
    """Train loss and error of each window of a stream, with three growths of its columns."""
    config = Config.of(data_path=str(folder), stream=True, window="60d", batch_size=60, history=5, **flags)
    with reopen_data(config, context, trains=True) as data:
        run = Training(data, config, context).run(make_model, make_loss)
    assert len(run.epochs) > 10
    return [(epoch.train_loss, epoch.validation["rmse"]) for epoch in run.epochs]


def test_windows_of_a_stream_repeat_a_graph_until_their_columns_change(
    small_folder: Path, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    monkeypatch.setattr(stream_reader, "PRUNE_EVERY", 1_500)
    flags = {"cpu_tables": "torchrec"}
    by_loader = streamed(small_folder, context, **flags)
    request.getfixturevalue("as_on_a_gpu")
    eager = streamed(small_folder, context, capture="off", **flags)
    assert not Repeated.captured
    assert streamed(small_folder, context, capture="auto", **flags) == eager
    # The last columns have few steps left.
    assert len(Repeated.captured) == 3
    np.testing.assert_allclose(eager, by_loader, rtol=1e-4)


def test_columns_of_a_stream_are_freed_before_the_next_ones_are_copied(
    small_folder: Path, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    monkeypatch.setattr(stream_reader, "PRUNE_EVERY", 1_500)
    made: list[DeviceBatches] = []
    init = DeviceBatches.__init__

    def first_freed(self: DeviceBatches, *arguments: Any) -> None:
        assert not any(map(vars, made))
        made.append(self)
        init(self, *arguments)

    monkeypatch.setattr(DeviceBatches, "__init__", first_freed)
    flags: dict[str, Any] = {"window": "60d", "batch_size": 60, "history": 5, "cpu_tables": "torchrec"}
    config = Config.of(data_path=str(small_folder), stream=True, **flags)
    with reopen_data(config, context, trains=True) as data, Training(data, config, context) as training:
        step = training.step(training.shard(make_model, make_loss(training.columns, config)).train_on)
        for epoch in training.epochs():
            # The script holds the last batch of a window while the columns grow.
            for batch in epoch:
                step(batch)
            # Of full batches alone.
            assert all(bool(masks.weights.all()) for masks in made[-1]._masks.values())
    assert len(made) == 4


def test_a_pass_of_few_steps_is_captured_only_if_that_is_required(
    opened: tuple[Config, Data], context: RuntimeContext, as_on_a_gpu: None
) -> None:
    config, data = opened
    config = config.replaced(batch_size=-(-data.columns.num_train // (FEWEST_STEPS - 1)))
    for capture, captures in (("auto", 0), ("on", config.training.epochs)):
        with open_data(config.replaced(capture=capture), context) as few:
            Training(few, config.replaced(capture=capture), context).run(make_model, make_loss)
        assert len(Repeated.captured) == captures


def test_a_training_that_ends_before_a_capture_is_no_error(
    opened: tuple[Config, Data], context: RuntimeContext, as_on_a_gpu: None, capsys: Any
) -> None:
    config, data = opened
    config = config.replaced(capture="on", epochs=1, batch_size=-(-data.columns.num_train // WARM_UP_STEPS))
    with open_data(config, context) as few:
        Training(few, config, context).run(make_model, make_loss)
    assert not Repeated.captured
    assert "no step was captured" in capsys.readouterr().out


def test_a_loop_that_names_no_step_is_refused_if_it_is_to_be_captured(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    config, data = opened
    with Training(data, config.replaced(capture="on"), context) as training:
        training.shard(make_model, make_loss(training.columns, config))
        epoch = next(training.epochs())
        with pytest.raises(UserError, match="no step of the epoch was captured"):
            learn(epoch)


def test_a_step_before_the_model_is_a_clear_error(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    config, data = opened
    with (
        Training(data, config, context) as training,
        pytest.raises(RuntimeError, match=r"call training\.shard"),
    ):
        training.step(print)


def test_the_numbers_of_a_step_are_those_of_the_schedule(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    seen = []

    def look(model: Any, step: Any) -> None:
        dense, tables = numbers_of(model)
        assert dense.read() == model.dense_optimizer.param_groups[0]["lr"]
        seen.append(tables.read())

    trained(opened, context, Repeated, look)
    assert seen == sorted(seen, reverse=True)
    assert len({*seen}) == len(seen)


def test_markers_are_odd_and_differ() -> None:
    numbers = [Number("", kind, lambda: 0.0, print) for kind in ("<f", "<f", "<d", "<q")]
    markers = markers_of(numbers)
    assert len({*markers}) == len(markers)
    assert [len(marker) for marker in markers] == [4, 4, 8, 8]
    assert all(marker[0] % 2 for marker in markers)


@pytest.mark.parametrize(
    ("function", "graph", "message"),
    [
        ("half", Repeated, "model.step"),
        ("train_on", Refusing, "a value is read on the host"),
    ],
)
def test_a_step_that_cannot_be_captured_is_refused_if_that_is_required(
    opened: tuple[Config, Data], context: RuntimeContext, function: str, graph: Any, message: str
) -> None:
    with on_device(opened, context) as (training, model):

        def half(batch: Any) -> None:
            model(batch).backward()

        step = TrainingStep(half if function == "half" else model.train_on, model, context, None, True, graph)
        epoch = next(training.epochs())
        with pytest.raises(UserError, match=message):
            learn(epoch, step)


def test_an_optimizer_that_computes_with_the_rate_on_the_host_is_refused(
    opened: tuple[Config, Data], context: RuntimeContext
) -> None:
    config, data = opened
    with Training(data, config, context) as training:
        model = training.shard(make_model, dense=lambda weights: torch.optim.NAdam(weights, lr=0.001))
        with pytest.raises(UserError, match="NAdam, is not fused"):
            TrainingStep(model.train_on, model, context, None, True, Repeated)


def test_a_gpu_is_required_for_captured_steps(opened: tuple[Config, Data], context: RuntimeContext) -> None:
    config, data = opened
    with Training(data, config.replaced(capture="on"), context) as training:
        model = training.shard(make_model)
        with pytest.raises(UserError, match="there is no GPU"):
            training.step(model.train_on)


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trainings of 3 epochs by each table optimizer, with eager and with captured steps."""
    folder = tmp_path_factory.mktemp("ratings") / "ratings"
    write_synthetic(folder, 14_000, seed=0)
    output = succeeded(python(SUPPORT / "captured_steps.py", folder, timeout=300, env=GPUS, real=True))
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*RULES, "stream", "rows of 16 bits", "ranking", "repeats", "sequence"])
def test_captured_steps_of_a_gpu_have_the_bits_of_eager_ones(on_a_gpu: dict[str, Any], name: str) -> None:
    eager, found = on_a_gpu[f"{name} off"], on_a_gpu[f"{name} auto"]
    assert found.pop("captured")
    assert not eager.pop("captured")
    assert found == eager
    assert eager["steps"] >= (100 if name == "stream" else 300)


@pytest.mark.gpu
def test_a_gpu_rounds_rows_of_16_bits_at_random(on_a_gpu: dict[str, Any]) -> None:
    # The next smaller number than 1 is 0.9995.
    assert on_a_gpu["rounded"] == pytest.approx(1 - 1e-4, abs=1e-5)


@pytest.mark.gpu
def test_a_step_that_reads_a_value_on_the_host_stays_eager(on_a_gpu: dict[str, Any]) -> None:
    assert not on_a_gpu["waiting"]["captured"]
    assert on_a_gpu["waiting"]["reason"]
    # A failed capture does not disturb the next training.
    assert on_a_gpu["after it"]["captured"]
    assert on_a_gpu["after it"]["tables"] == on_a_gpu["RowWiseAdagrad off"]["tables"]
