"""To predict the label that a user gives, such as a number of stars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from recsuite.datasets.schema import AUDIENCE, Feature, Schema
from recsuite.models.co_occurrence import CoOccurrence
from recsuite.models.heads import Interaction
from recsuite.models.tasks.task import Labelled, Sizes, Task, TrainingData


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
    dense_parts = ("mlp",)

    def make_head(
        self, schema: Schema, features: Sequence[Feature], sizes: Sizes, mean_label: float = 0.0
    ) -> Interaction:
        """See `Task`."""
        # From the mean label on, so that rows and layers learn the differences from it alone.
        common = features, sizes.embedding_dim, sizes.mlp_dims, mean_label
        if AUDIENCE in [feature.name for feature in features]:
            return CoOccurrence(*common, schema.unit, schema.ids)
        return Interaction(*common)

    def noise_of(self, value: float | None, unit: float) -> float | None:
        """See `Task`."""
        # Before anything was validated, what the mean of all labels would leave.
        return unit**2 if value is None else value**2

    def make_loss(self, data: TrainingData) -> SquaredError:
        """See `Task`."""
        return SquaredError()

    def describe_loss(self, train_loss: float) -> str:
        """See `Task`."""
        return f"RMSE {train_loss**0.5:.4f}"

    def training_curve(self, losses: np.ndarray) -> np.ndarray:
        """See `Task`."""
        # The loss is a mean square, and the main metric its root.
        return np.sqrt(losses)


TASK = Rating()
