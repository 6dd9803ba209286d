"""Tasks: the metrics and labels for a name of --task."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from recsuite.config.sections import MAX_EMBEDDING_DIM, ModelConfig
from recsuite.datasets.schema import ENTITIES, EVENT, HISTORY, Feature, Schema
from recsuite.errors import require
from recsuite.models.heads import Head, require_shape


class ModelData(NamedTuple):
    """Description of the data set that a model is made for.

    Args:
        schema: Names of users, items and labels.
        features: Those with a table or a number; those with lists come last.
        mean_label: Mean label of the training events.
        history: Maximum number of items in a history.

    Raises:
        ValueError: From `names`, for an unknown entity.

    Example:
        users = data.names("user", "event", "history")        # ["user", "age", ..., "history"]
        head = rs.make_mlp([len(users) * dim, 64, 1])
    """

    schema: Schema
    features: Sequence[Feature]
    mean_label: float = 0.0
    history: int = 0

    def names(self, *entities: str) -> list[str]:
        """Return the names of the features with rows of some entities.

        Args:
            entities: Any of "user", "item", "event" and "history".

        Raises:
            ValueError: For another entity.
        """
        known = (*ENTITIES, EVENT, HISTORY)
        if strange := {*entities} - {*known}:
            raise ValueError(f"names takes {', '.join(known)}, got {min(strange)!r}.")
        with_rows = [feature for feature in self.features if feature.has_table]
        return [feature.name for feature in with_rows if feature.entity in entities]


# Function that makes a model, an `nn.Module` called with `FeatureRows` and a batch, from the model's flags.
ModelMaker = Callable[[ModelData, ModelConfig], nn.Module]


class WorkerTask:
    """Choice of --task: its metrics and labels. The script has its loss.

    metrics: name in files to label for people, in the order of the results table; main_metric: the one by
    which two models are compared; epoch_metrics: those in the line of an epoch; evaluation: "predictions"
    compared with labels, "ranks" of the chosen items, or probabilities compared with yes/no "answers", for
    the metrics and the baselines; score_label: name of a recommendation's number, with {answer} for the
    meaning of a yes; few_listed: advice if the lists of all users hold few items; reads_order: True if
    histories are read in their order, by the rows of the items themselves.
    """

    metrics: ClassVar[Mapping[str, str]]
    main_metric: ClassVar[str]
    lower_is_better: ClassVar[bool] = True
    epoch_metrics: ClassVar[tuple[str, ...]]
    # A word and not a method: an evaluation needs ranks and batches, which a task does not know.
    evaluation: ClassVar[Literal["predictions", "ranks", "answers"]]
    score_label: ClassVar[str]
    few_listed: ClassVar[str]
    reads_order: ClassVar[bool] = False

    def labels_of(self, output: torch.Tensor) -> torch.Tensor:
        """Return predicted labels, float32 [B], of the output of the head for the loss."""
        return output

    def labels_for(self, values: Mapping[str, float]) -> dict[str, str]:
        """Return the labels of the task's metrics and of a user's metrics, which are their names."""
        return {**self.metrics, **{name: name for name in values if name not in self.metrics}}

    @property
    def main_label(self) -> str:
        """Label of the main metric for people."""
        return self.metrics[self.main_metric]

    def is_better(self, value: float, best: float | None) -> bool:
        """Return True if a value of the main metric is better than the best one so far; False for NaN."""
        if best is None:
            return math.isfinite(value)
        return value < best if self.lower_is_better else value > best

    def no_metrics(self) -> dict[str, float]:
        """Return the metrics of a split without events: all NaN."""
        return dict.fromkeys(self.metrics, float("nan"))


class Rating(WorkerTask):
    """Prediction of a label that is a number, such as stars."""

    metrics: ClassVar = {"rmse": "RMSE", "mae": "MAE", "auc": "AUC", "log_loss": "log loss"}
    main_metric = "rmse"
    # For labels the RMSE is enough.
    epoch_metrics = ("rmse",)
    evaluation = "predictions"
    score_label = "predicted"
    few_listed = (
        "these are few: a model of ratings learns how an item is rated, not which one a user chooses; a "
        "ranking learns that: retrieval.py, or --task ranking with a model of your own (docs/own_training.md)"
    )


class ResponseTask(WorkerTask):
    """Prediction of the probability of a yes, such as a click."""

    metrics: ClassVar = {"log_loss": "log loss", "auc": "AUC", "calibration": "calibration"}
    main_metric = "log_loss"
    epoch_metrics = ("log_loss", "auc")
    evaluation = "answers"
    score_label = "chance of {answer}"
    few_listed = (
        "these are few: the same have the highest chance for most users; a ranking learns which one a user "
        'chooses: train it on the events with a yes alone, with kind = "clicks" under [label]'
    )

    @override
    def labels_of(self, output: torch.Tensor) -> torch.Tensor:
        return output.sigmoid()


class Ranking(WorkerTask):
    """Ranking of all items for a user: those that the user chooses next come first."""

    metrics: ClassVar = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10", "mrr_at_10": "MRR@10"}
    main_metric = "ndcg_at_10"
    lower_is_better = False
    epoch_metrics = ("hr_at_10", "ndcg_at_10")
    evaluation = "ranks"
    score_label = "score"
    few_listed = (
        "these are few, as by popularity: if the test NDCG is near that of popularity too, the model has "
        "learned little about single users; give more --epochs, or more events"
    )

    @override
    def labels_for(self, values: Mapping[str, float]) -> dict[str, str]:
        return {name: name.replace("_at_", "@").upper() for name in {**values, **self.metrics}}


class NextItem(Ranking):
    """Ranking by the order of the histories: next-item prediction."""

    reads_order = True


# By the names of --task, whose choices are in `ModelConfig`: data workers read them without torch.
TASKS: Mapping[str, WorkerTask] = {
    "rating": Rating(),
    "ranking": Ranking(),
    "response": ResponseTask(),
    "sequence": NextItem(),
}


def widths_of(model: nn.Module, tables: Collection[str], embedding_dim: int) -> dict[str, int]:
    """Return the width of the rows of each table: from `embedding_dims` of the model, or else embedding_dim.

    Raises:
        UserError: when the model names another table, or a width that no table can have.
    """
    own, most = getattr(model, "embedding_dims", {}), MAX_EMBEDDING_DIM
    is_sound = isinstance(own, Mapping) and all(
        type(width) is int and width % 4 == 0 and 4 <= width <= most for width in own.values()
    )
    require(
        is_sound and own.keys() <= {*tables},
        f"embedding_dims of a model must give tables an int, a multiple of 4 up to {most:,}, and the tables "
        f"are {', '.join(tables)}, got {own!r}",
    )
    widths = {name: own.get(name, embedding_dim) for name in tables}
    require(
        not isinstance(model, Head) or {*widths.values()} <= {embedding_dim},
        f"A model of the library adds up rows, so all of them must have the width of --embedding_dim, "
        f"{embedding_dim}, got {own!r}",
    )
    return widths


def predictions_of(model: nn.Module, task: WorkerTask, output: Any, schema: Schema) -> torch.Tensor:
    """Return predicted labels of a model's output, float32 [B], or [B, L] for a model of all L labels.

    Uses the model's method `predictions(output)` if it has one, else that of the task.
    """
    labels, kinds = schema.label_names, {schema.label_kind, *(each.kind for each in schema.more_labels)}
    rule, convert = "A model must predict one number for each event", getattr(model, "predictions", None)
    if len(labels) > 1:
        rule += f", or {len(labels)}, of the labels {', '.join(labels)}"
    if convert is None and isinstance(output, torch.Tensor):
        convert = task.labels_of
        # The task knows only the first label.
        if output.dim() == 2 and len(kinds) > 1:
            rule = (
                f"A model of labels of several kinds ({', '.join(sorted(kinds))}) must say what it predicts"
            )
            require_shape(output, 1, rule, "define predictions(output)")
    predicted: Any = convert(output) if convert else output
    is_matrix = isinstance(predicted, torch.Tensor) and predicted.dim() == 2
    if not (is_matrix and predicted.shape[1] == len(labels) > 1):
        require_shape(predicted, 1, rule, "define predictions(output)")
    return predicted.float()


def first_label(predictions: Any) -> Any:
    """Return the predictions of the first label, [n]; predictions: [n] or [n, L]."""
    return predictions if predictions.ndim == 1 else predictions[:, 0]
