"""What a model learns to do: one object that everything asks which would otherwise ask for the task's name.

A task is a module of this folder with an instance named TASK, found by its name. To add one, write such a
module and add its name to the choices of --task, which stand in `config/sections/model.py`: data workers read
the configuration, and must not import torch, as a task does.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from recsuite.config.sections.model import ModelConfig
from recsuite.datasets.schema import Feature, Schema


class ModelData(NamedTuple):
    """What a model is made for: the features of a data set, those with lists behind the others.

    mean_label: of the training events, as it is learned; history: how many items one has at most.
    """

    schema: Schema
    features: Sequence[Feature]
    mean_label: float = 0.0
    history: int = 0

    def names(self, *entities: str) -> list[str]:
        """Return the names of the features with rows, of "user", "item", "event", "history" or "audience"."""
        return [each.name for each in self.features if each.has_table and each.entity in entities]


# Makes a model, an `nn.Module` that is called with `FeatureRows` and a batch, from the flags of the model.
ModelMaker = Callable[[ModelData, ModelConfig], nn.Module]


# A protocol, for what goes through the model is made above it: `ModelInput` is one.
class Labelled(Protocol):
    """What a loss takes of a batch: the features, of which one tells items apart; labels and weights, float32
    [B], where the weight of padding is 0; and which competitors users had, uint8 [B, bytes], a bit for each.
    """

    features: Any
    labels: torch.Tensor
    weights: torch.Tensor
    had: torch.Tensor


# A protocol too: models import nothing of the data sets but the schema. `Columns` is one.
class TrainingData(Protocol):
    """What a task may know of the data."""

    @property
    def schema(self) -> Schema:
        """What the data call users and items."""

    def item_ids(self) -> np.ndarray | None:
        """The ids of items that are known by such, int64; None where batches have their table rows."""

    def item_shares(self) -> np.ndarray:
        """Each item's share of the training events, float32 [rows of the items' table], or one for each of
        `item_ids`.
        """


class Task(ABC):
    """One thing to learn.

    metrics: name in files to label for people, in the order of the results table; main_metric: the one by
    which two models are compared; epoch_metrics: those that the line of an epoch shows; evaluation: whether
    its metrics, and the baselines that it has to beat, are of predictions held against the labels, of the
    ranks of the items chosen, or of probabilities held against answers of yes and no; curve_unit: what the
    label of the main metric's axis adds, with {labels} for the noun of the data; score_label: what a
    recommendation's number is called, with {answer} for what a yes is; reads_order: whether histories are
    read in their order, by the rows of the items themselves.
    """

    name: ClassVar[str]
    metrics: ClassVar[Mapping[str, str]]
    main_metric: ClassVar[str]
    lower_is_better: ClassVar[bool]
    epoch_metrics: ClassVar[tuple[str, ...]]
    # A word and not a method: to evaluate takes ranks and batches, of which a task knows nothing.
    evaluation: ClassVar[Literal["predictions", "ranks", "answers"]]
    curve_unit: ClassVar[str]
    score_label: ClassVar[str]
    reads_order: ClassVar[bool] = False

    @abstractmethod
    def make_model(self, data: ModelData, args: ModelConfig) -> nn.Module:
        """Return the library's model for the task, untrained."""

    def noise_of(self, value: float | None, unit: float) -> float | None:
        """The mean square of what cannot be predicted, where the best value of the main metric so far is this
        one, for the prior of rows; None where rows have no prior.
        """
        return None

    @abstractmethod
    def make_loss(self, data: TrainingData) -> nn.Module:
        """The loss: (output of the head, batch) -> weighted mean over the batch, float32 []."""

    def labels_of(self, output: torch.Tensor) -> torch.Tensor:
        """Predicted labels, float32 [B], of what the head gave for the loss."""
        return output

    def labels_for(self, found: Mapping[str, float]) -> dict[str, str]:
        """Return the labels of its metrics and, by their names, of those that a user added."""
        return {**self.metrics, **{name: name for name in found if name not in self.metrics}}

    @property
    def main_label(self) -> str:
        """How the main metric is called where people read it."""
        return self.metrics[self.main_metric]

    def is_better(self, value: float, best: float | None, leeway: float = 0.0) -> bool:
        """Whether a value of the main metric beats the best one so far, or is worse by less than the leeway;
        NaN beats nothing.
        """
        if best is None:
            return math.isfinite(value)
        return value < best + leeway if self.lower_is_better else value > best - leeway

    def no_metrics(self) -> dict[str, float]:
        """The metrics of a split without an event: none is defined."""
        return dict.fromkeys(self.metrics, float("nan"))


def task_named(name: str) -> Task:
    """The task that --task calls so."""
    # By name: a new task is a module and a choice of --task, and no list of tasks has to be kept beside.
    task: Task = importlib.import_module(f"recsuite.models.tasks.{name}").TASK
    return task


def predictions_of(model: nn.Module, task: Task, output: Any) -> torch.Tensor:
    """Return predicted labels, float32 [B], of what the forward of a model returned: those of its method
    `predictions(output)`, if it has one, else those of the task.
    """
    convert = getattr(model, "predictions", None)
    if convert is None and isinstance(output, torch.Tensor):
        convert = task.labels_of
    found: torch.Tensor = convert(output) if convert else output
    require_shape(found, 1, "A model must predict one number for each event", "define predictions(output)")
    return found.float()


def require_shape(value: Any, dims: int, rule: str, fix: str) -> None:
    """Refuse what a user's code returned, unless it is a tensor of so many dimensions."""
    if not isinstance(value, torch.Tensor) or value.dim() != dims:
        got = f"the shape {[*value.shape]}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{rule}, got {got}. Fix: {fix}.")


def library_model(data: ModelData, args: ModelConfig) -> nn.Module:
    """Return the library's model for --task, untrained."""
    return task_named(args.task).make_model(data, args)
