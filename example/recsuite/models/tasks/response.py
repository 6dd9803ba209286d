"""To predict whether a user answers yes: clicks an item that was shown, buys it, finishes it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from recsuite.config.sections.model import ModelConfig
from recsuite.models.heads import Response
from recsuite.models.tasks.task import Labelled, ModelData, Task, TrainingData


class LogLoss(nn.Module):
    """The weighted mean of minus the logarithm of the probability of what came true."""

    def forward(self, logits: torch.Tensor, batch: Labelled) -> torch.Tensor:
        """float32 [], of logits float32 [B]."""
        # Padding has the weight 0.
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights)


class ResponseTask(Task):
    """See `Task`."""

    name = "response"
    metrics: ClassVar = {"log_loss": "log loss", "auc": "AUC", "calibration": "calibration"}
    main_metric = "log_loss"
    lower_is_better = True
    epoch_metrics = ("log_loss", "auc")
    evaluation = "answers"
    curve_unit = ""
    score_label = "chance of {answer}"

    def make_model(self, data: ModelData, args: ModelConfig) -> Response:
        """See `Task`."""
        # From the share of yes on, so that rows and layers learn the differences from it alone.
        return Response(data.features, args.embedding_dim, args.mlp_dims, data.mean_label)

    def make_loss(self, data: TrainingData) -> LogLoss:
        """See `Task`."""
        return LogLoss()

    def labels_of(self, output: torch.Tensor) -> torch.Tensor:
        """See `Task`."""
        return output.sigmoid()


TASK = ResponseTask()
