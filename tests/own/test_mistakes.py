"""A user's own model, loss, optimizer and loop: what is possible, and the sentence for a mistake."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

import recsuite as rs
from example import make_model
from recsuite.config.config import Config
from recsuite.config.sections import OptimizerConfig
from recsuite.datasets.opening import open_data
from recsuite.datasets.schema import ITEM, USER, Feature, Schema
from recsuite.models.tasks import TASKS, predictions_of
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Step
from recsuite.training.loop import Training
from recsuite.training.state import make_optimizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
Shape = Callable[[torch.Tensor], Any]


class Small(nn.Module):
    """Predicts by two features; `shape` makes its output of the predictions."""

    def __init__(self, names: tuple[str, str], shape: Shape, widths: Any) -> None:
        super().__init__()
        self.names, self.shape, self.bias = names, shape, nn.Parameter(torch.zeros(1))
        self.embedding_dims = widths or {}

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> Any:
        return self.shape((rows[self.names[0]] * rows[self.names[1]]).sum(1) + self.bias)


class Mean(nn.Module):
    """The squared error, in a shape of its own."""

    def __init__(self, shape: Shape = torch.mean) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, output: torch.Tensor, batch: rs.ModelInput) -> torch.Tensor:
        return self.shape((output - batch.labels) ** 2)


def small(
    names: tuple[str, str] = ("user", "movie"), shape: Shape = lambda output: output, widths: Any = None
) -> Any:
    return lambda data, args: Small(names, shape, widths)


class Sums(Small):
    """Adds up rows."""

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> Any:
        return rows.sum(self.names).sum(1)


def two_towers(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
    model = rs.TwoTower(data.features, args.embedding_dim, args.mlp_dims)
    model.embedding_dims = {"genres": 8}
    return model


class Vectors(rs.TwoSided):
    """A vector of the user and one of the movie, whose tables have a width of their own."""

    embedding_dims: ClassVar = {"user": 8, "movie": 8}

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def user_vectors(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        return self.factor * rows["user"]

    def item_vectors(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        return rows["movie"]


class Unsummed(Vectors):
    """Scores are products without their sum."""

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return users * items


@pytest.fixture
def training(synthetic_folder: Path, context: RuntimeContext) -> Iterator[Training]:
    flags = {"batch_size": 2_048, "history": 0, "embedding_dim": 4, "epochs": 1}
    config = Config.of(data_path=str(synthetic_folder), **flags)
    with open_data(config, context) as data, Training(data, config, context) as found:
        yield found


def trained(training: Training, **given: Any) -> rs.Run:
    model = training.shard(**given)
    for epoch in training.epochs():
        for batch in epoch:
            model(batch).backward()
            model.step()
        training.save(training.validate())
    return training.finish()


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"maker": small(("user", "film"))}, KeyError, r"There is no feature 'film' .* give one of .*movie"),
        # Against labels [B] this would be a loss over [B, B].
        (
            {"maker": small(shape=lambda output: output.unsqueeze(1))},
            ValueError,
            r"one number for each event, got the shape \[2048, 1\]\. Fix: add \.squeeze\(1\)",
        ),
        (
            {"maker": lambda data, args: Unsummed()},
            ValueError,
            r"one number for each pair, got the shape \[2048, 8\]\. Fix: add \.sum\(dim=1\)",
        ),
        (
            {"maker": small(), "loss": Mean(lambda losses: losses)},
            ValueError,
            r"one number, got the shape \[2048\]",
        ),
        ({"maker": small(), "loss": Mean(lambda losses: None)}, ValueError, "one number, got NoneType"),
        (
            {"maker": small(shape=lambda output: (output, output)), "loss": Mean(lambda losses: losses)},
            TypeError,
            "tuple",
        ),
        ({"maker": small()}, ValueError, r"without a loss\. Fix: give training\.shard a loss"),
        ({"maker": lambda data, args: None}, rs.UserError, "requires a Module, got None"),
        ({"maker": lambda data, args: data.names("events")}, ValueError, r"names takes .*, got 'events'"),
        *(
            ({"maker": small(widths=widths)}, rs.UserError, sentence)
            for widths, sentence in (
                ({"film": 8}, r"the tables are user, .*movie.*, got \{'film': 8\}"),
                ({"movie": 6}, r"an int, a multiple of 4 up to 16,384, .* got \{'movie': 6\}"),
                ({"movie": 0}, r"a multiple of 4"),
                ({"movie": 2**15}, r"a multiple of 4 up to 16,384"),
                ({"movie": 8.0}, r"got \{'movie': 8\.0\}"),
                ({"movie": True}, r"got \{'movie': True\}"),
                ({7: 8}, r"got \{7: 8\}"),
                ([8, 8], r"got \[8, 8\]"),
            )
        ),
        (
            {"maker": lambda data, args: Sums(("user", "movie"), torch.mean, {"movie": 8})},
            rs.UserError,
            r"added up .* one width, got user 4, movie 8\. Fix: give these features the same width",
        ),
        (
            {"maker": two_towers},
            rs.UserError,
            r"of the library adds up rows, .* --embedding_dim, 4, got \{'genres': 8\}",
        ),
    ],
)
def test_a_wrong_feature_output_or_loss_is_named(
    training: Training, given: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        trained(training, **given)


def test_a_loop_that_leaves_early_is_refused(training: Training) -> None:
    model = training.shard(small(), loss=Mean())
    epoch = next(training.epochs())
    for batch in epoch:
        model(batch).backward()
        model.step()
        break
    for later in (training.validate, lambda: training.save({})):
        with pytest.raises(RuntimeError, match=r"ended early\. Fix: take every batch"):
            later()


@pytest.mark.parametrize("every", [0, 4])
def test_gradients_without_a_step_are_refused(training: Training, every: int) -> None:
    model = training.shard(small(), loss=Mean())
    epoch = next(training.epochs())
    for batch in epoch:
        model(batch).backward()
        if every and epoch.step % every == 0 and not epoch.is_last:
            model.step()
    with pytest.raises(RuntimeError, match=re.escape("call model.step() after loss.backward()")):
        training.validate()
    model.step()
    training.validate()


def test_a_batch_without_a_loss_is_refused(training: Training) -> None:
    model = training.shard(small(), loss=Mean())
    batches = iter(next(training.epochs()))
    model.output(next(batches)).mean().backward()
    with pytest.raises(RuntimeError, match=re.escape("set model.loss = loss.detach()")):
        next(batches)


def test_a_metric_that_returns_no_number_is_named(training: Training) -> None:
    no_number: Any = np.subtract
    with pytest.raises(ValueError, match=r"The metric spread must return one number, got the shape \[\d+\]"):
        trained(training, maker=small(), loss=Mean(), metrics={"spread": no_number})


@pytest.mark.parametrize(
    ("output", "predictions"),
    [
        (torch.zeros(4, 2), None),
        ({"click": torch.zeros(4)}, None),
        ({"click": torch.zeros(4, 1)}, lambda output: output["click"]),
    ],
)
def test_several_outputs_need_predictions(output: Any, predictions: Any) -> None:
    model = nn.Identity()
    feature = Feature("user", USER, "user"), Feature("item", ITEM, "item")
    schema = Schema(feature, "user", "item", "title", "rating", 1.0, 5.0, 4.0)
    if predictions is not None:
        model.predictions = predictions
    with pytest.raises(ValueError, match=re.escape("Fix: define predictions(output)")):
        predictions_of(model, TASKS["rating"], output, schema)


def test_a_model_without_vectors_is_refused_for_a_ranking(
    synthetic_folder: Path, context: RuntimeContext
) -> None:
    config = Config.of(data_path=str(synthetic_folder), task="ranking", history=0)
    with open_data(config, context) as data, Training(data, config, context) as training:
        with pytest.raises(rs.UserError, match=r"--task ranking requires a TwoSided, got Small"):
            training.shard(small())
        with pytest.raises(rs.UserError, match=r"--task ranking .* ranks"):
            training.shard(make_model, metrics={"spread": lambda predictions, labels: 0.0})


# --- what is possible ---------------------------------------------------------------------------------


class Two(Small):
    """Two outputs by names."""

    def predictions(self, output: dict[str, torch.Tensor]) -> torch.Tensor:
        return output["label"]


class BothVectors(Vectors):
    """The loss has the vectors of both sides."""

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        return torch.stack([self.user_vectors(rows, batch), self.item_vectors(rows, batch)], dim=1)


def test_items_are_ranked_by_vectors_of_any_width(synthetic_folder: Path, context: RuntimeContext) -> None:
    flags = {"data_path": str(synthetic_folder), "task": "ranking", "history": 0, "epochs": 1}
    config = Config.of(**flags, embedding_dim=4, batch_size=2_048)
    with open_data(config, context) as data, Training(data, config, context) as training:
        with pytest.raises(rs.UserError, match=r"requires a forward that returns the vectors of both sides"):
            training.shard(lambda data, args: rs.TwoSided())
        loss = rs.SampledSoftmax.of(training.columns)
        run = trained(training, maker=lambda data, args: BothVectors(), loss=loss)
    assert 0 < run.test["ndcg_at_10"] < 1


class OfTwo(nn.Module):
    """The loss of both outputs, with a weight that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros([]))

    def forward(self, output: dict[str, torch.Tensor], batch: rs.ModelInput) -> torch.Tensor:
        losses = [(each - batch.labels).square().mean() for each in output.values()]
        return losses[0] + self.share.sigmoid() * losses[1]


def test_several_outputs_a_loss_with_numbers_of_its_own_and_the_main_metric_can_be_given(
    training: Training,
) -> None:
    def maker(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
        return Two(("user", "movie"), lambda output: {"label": output, "other": 2 * output}, {})

    seen: list[int] = []

    def worse_each_time(predictions: np.ndarray, labels: np.ndarray) -> float:
        seen.append(len(predictions))
        assert predictions.shape == labels.shape
        return float(len(seen))

    training.config = training.config.replaced(epochs=2)
    run = trained(training, maker=maker, loss=OfTwo(), metrics={"rmse": worse_each_time})
    assert [epoch.validation["rmse"] for epoch in run.epochs] == [1.0, 2.0]
    # The best epoch is the one that the metric says.
    assert (training.progress.best, training.progress.epochs_since_best) == (1.0, 1)
    assert training.train_state.model.module.loss.share.item() != 0


def test_a_callback_gets_the_rate_of_the_loop_and_a_second_forward_trains(
    training: Training,
) -> None:
    rates: list[float] = []

    class Rates(rs.Callback):
        def on_step(self, step: Step) -> None:
            rates.append(step.rates["dense"])

    training.callbacks.callbacks.append(Rates())
    model = training.shard(small(), loss=Mean())
    epoch = next(training.epochs())
    for batch in epoch:
        model.dense_optimizer.param_groups[0]["lr"] = 0.1 / epoch.step
        loss = model(batch) + (model.output(batch) - 3.0).square().mean()
        loss.backward()
        model.step()
    training.validate()
    assert rates == [0.1 / number for number in range(1, len(rates) + 1)]
    assert len(rates) == len(epoch.step_sizes)


@pytest.mark.parametrize(
    ("rule", "dense", "rates"),
    [
        (None, None, r"0\.04 \(tables\) and 0\.001 \(dense part\)"),
        (
            rs.Adam(0.5),
            torch.optim.SGD,
            r"0\.5 \(tables\) and 0\.002 \(dense part\)",
        ),
    ],
)
def test_a_training_that_diverges_names_the_rates_that_it_has(
    training: Training, rule: rs.TableRule | None, dense: Any, rates: str
) -> None:
    class Infinite(Mean):
        def forward(self, *inputs: Any) -> torch.Tensor:
            return super().forward(*inputs) * math.inf

    own = dense and (lambda weights: dense(weights, lr=0.002))
    with pytest.raises(rs.UserError, match=rf"diverged with learning rates of {rates}; lower"):
        trained(training, maker=small(), loss=Infinite(), tables=rule, dense=own)


class Tables(nn.Module):
    """Predicts by the rows of two tables, and has no parameters of its own."""

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        return (rows["user"] * rows["movie"]).sum(1)


def test_a_model_of_tables_alone_is_trained(training: Training) -> None:
    model = training.shard(lambda *_: Tables(), loss=Mean())
    assert [*model.dense_parameters()] == []
    losses = [float(model.train_on(batch).detach()) for batch in next(training.epochs())]
    assert min(losses) < losses[0]


class Dense(nn.Module):
    """A model without tables, as far as an optimizer sees it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.fused_optimizer = nn.Linear(4, 4), KeyedOptimizer({}, {}, [])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            (name, {})
            for name in ("SGD", "Adagrad", "AdamW", "NAdam", "RAdam", "Adamax", "Rprop", "Adafactor")
        ),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
    ],
)
def test_any_dense_optimizer_learns_as_it_does_without_the_library(
    name: str, settings: dict[str, Any]
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, **settings)

    ours, plain = Dense(), Dense()
    _, wrapped = make_optimizer(ours, OptimizerConfig(), make).optimizers[1]
    for module, optimizer in ((ours, wrapped), (plain, make(plain.parameters()))):
        for step in range(3):
            optimizer.zero_grad()
            module.layers(torch.ones(2, 4) + step).square().sum().backward()
            optimizer.step()
    for found, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)
