"""From features to a rating and its loss: the interaction of user and movie on embeddings.

Knows tensors and tables; nothing of ranks, files or devices. Shapes: B ratings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from features import Table
from interaction import Interaction
from profiling import named


@dataclass
class RatingBatch(Pipelineable):
    """What the model takes: the features as a KeyedJaggedTensor, ratings and weights float32 [B], and a
    rating for each value of the feature "history", float32.

    Made in the main process from a worker's plain tensors; moves as one, so that TorchRec's pipelines can
    copy it ahead of time.
    """

    features: KeyedJaggedTensor
    ratings: torch.Tensor
    weights: torch.Tensor
    history_ratings: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> RatingBatch:
        """A copy on the device; without waiting when non_blocking and the tensors are pinned."""
        return RatingBatch(
            self.features.to(device, non_blocking=non_blocking),
            self.ratings.to(device, non_blocking=non_blocking),
            self.weights.to(device, non_blocking=non_blocking),
            self.history_ratings.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the stream has used it."""
        self.features.record_stream(stream)
        self.ratings.record_stream(stream)
        self.weights.record_stream(stream)
        self.history_ratings.record_stream(stream)


class Recommender(Interaction):
    """`Interaction` with its tables, which TorchRec shards over the ranks."""

    def __init__(
        self, tables: Sequence[Table], embedding_dim: int, mlp_dims: Sequence[int], mean_rating: float
    ) -> None:
        super().__init__([table.feature for table in tables], embedding_dim, mlp_dims, mean_rating)
        # On the meta device: only the shards are ever allocated, by `sharding.py`.
        self.embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=table.name,
                    embedding_dim=embedding_dim,
                    num_embeddings=table.rows,
                    feature_names=[table.name],
                )
                for table in tables
            ],
            device=torch.device("meta"),
        )

    def forward(self, features: KeyedJaggedTensor, history_ratings: torch.Tensor) -> torch.Tensor:
        """Predicted ratings, float32 [B]."""
        # What is left of it without lookup and output exchange, which TorchRec names.
        with named("input exchange"):
            looked_up = self.embeddings(features)
        return self.predict(looked_up, history_ratings)


class RatingTask(nn.Module):
    """The model with its loss, in the form that TorchRec's pipelines train: batch -> (loss, output)."""

    def __init__(self, recommender: Recommender) -> None:
        super().__init__()
        self.recommender = recommender

    def forward(self, batch: RatingBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The weighted mean squared error over this rank's B rows, [], and the output that stays.

        The output is the loss again and the predictions, float32 [B], both without gradient.
        """
        predictions = self.recommender(batch.features, batch.history_ratings)
        loss = (batch.weights * (predictions - batch.ratings) ** 2).mean()
        return loss, (loss.detach(), predictions.detach())
