"""To predict the label that a user gives, such as a number of stars."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from recsuite.config.sections.model import ModelConfig
from recsuite.datasets.schema import AUDIENCE
from recsuite.models.co_occurrence import CoOccurrence
from recsuite.models.heads import Interaction
from recsuite.models.tasks.task import Labelled, ModelData, Task, TrainingData


class SquaredError(nn.Module):
    """The weighted mean squared error of predicted labels."""

    def forward(self, predictions: torch.Tensor, batch: Labelled) -> torch.Tensor:
        """float32 [], of predictions float32 [B]."""
        # Padding has the weight 0.
        return (batch.weights * (predictions - batch.labels) ** 2).mean()


class Rating(Task):
    """See `Task`."""

    name = "rating"
    metrics: ClassVar = {"rmse": "RMSE", "mae": "MAE", "auc": "AUC", "log_loss": "log loss"}
    main_metric = "rmse"
    lower_is_better = True
    # Of labels the RMSE says enough.
    epoch_metrics = ("rmse",)
    evaluation = "predictions"
    curve_unit = " of {labels}"
    score_label = "predicted"

    def make_model(self, data: ModelData, args: ModelConfig) -> Interaction:
        """See `Task`."""
        # From the mean label on, so that rows and layers learn the differences from it alone.
        common = data.features, args.embedding_dim, args.mlp_dims, data.mean_label
        if data.names(AUDIENCE):
            return CoOccurrence(*common, data.schema.unit, data.schema.ids)
        return Interaction(*common)

    def noise_of(self, value: float | None, unit: float) -> float | None:
        """See `Task`."""
        # Before anything was validated, what the mean of all labels would leave.
        return unit**2 if value is None else value**2

    def make_loss(self, data: TrainingData) -> SquaredError:
        """See `Task`."""
        return SquaredError()


TASK = Rating()
