"""From features to a loss, for both tasks: to rate, or to rank.

Knows tensors and tables; nothing of ranks, files or devices. Shapes: B ratings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import Table
from recsuite.models.interaction import Interaction
from recsuite.models.two_tower import TwoTower
from recsuite.runtime.ranges import named

# Rows that compete in the softmax of a ranking: its cost is this times the batch, in time and in memory.
COMPETITORS = 256


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


def make_task(columns: Columns, config: Config) -> RatingTask | RankingTask:
    """The model of a data set with the loss of the configured task; its tables are not allocated yet."""
    features, shape = (
        [table.feature for table in columns.tables],
        (config.model.embedding_dim, config.model.mlp_dims),
    )
    if config.model.task == "rating":
        head = Interaction(features, *shape, columns.mean_rating)
        return RatingTask(Recommender(columns.tables, config.model.embedding_dim, head))
    recommender = Recommender(columns.tables, config.model.embedding_dim, TwoTower(features, *shape))
    loss = SampledSoftmax(torch.from_numpy(columns.item_shares()))
    return RankingTask(recommender, loss, columns.schema.item)


def make_embeddings(tables: Sequence[Table], embedding_dim: int) -> EmbeddingCollection:
    """The tables on the meta device: only the shards are ever allocated, by `sharding.py`."""
    return EmbeddingCollection(
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


class Recommender(nn.Module):
    """Tables, which TorchRec shards over the ranks, and what is computed of their rows.

    The head and the loss are modules of their own: TorchRec's pipeline traces what is around the tables with
    torch.fx, which takes those as they are.
    """

    def __init__(self, tables: Sequence[Table], embedding_dim: int, head: Interaction | TwoTower) -> None:
        super().__init__()
        self.embeddings = make_embeddings(tables, embedding_dim)
        self.head = head

    def forward(self, features: KeyedJaggedTensor, history_ratings: torch.Tensor) -> Any:
        """What the head makes of them."""
        # What is left of it without lookup and output exchange, which have names of their own.
        with named("input exchange"):
            looked_up = self.embeddings(features)
        return self.head(looked_up, history_ratings)


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


class RankingTask(nn.Module):
    """The ranking model with its loss: which of the items of the batch did each user choose?

    item: the feature that tells items apart.
    """

    def __init__(self, recommender: Recommender, loss: SampledSoftmax, item: str) -> None:
        super().__init__()
        self.recommender = recommender
        self.loss = loss
        self.item = item

    def forward(self, batch: RatingBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The weighted mean of `sampled_softmax` over this rank's B rows, [], and the output that stays.

        The output is the loss again and the vectors of users and items, float32 [B, 2, D], without gradient.
        """
        vectors = self.recommender(batch.features, batch.history_ratings)
        loss = self.loss(vectors, batch.features[self.item].values(), batch.weights)
        return loss, (loss.detach(), vectors.detach())


class SampledSoftmax(nn.Module):
    """The loss of a ranking.

    item_shares: of the training ratings, float32 [rows of the items' table], none of them 0.
    """

    def __init__(self, item_shares: torch.Tensor) -> None:
        super().__init__()
        self.log_shares: torch.Tensor
        # Not dumped: the data say it.
        self.register_buffer("log_shares", item_shares.log(), persistent=False)

    def forward(self, vectors: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted mean over B ratings, []. vectors: of users and items, [B, 2, D]; rows: of the items,
        int64 [B].
        """
        parts = (tensor.split(COMPETITORS) for tensor in (vectors, rows, weights))
        losses = [
            sampled_softmax(part[:, 0], part[:, 1], items, self.log_shares[items], real > 0)
            for part, items, real in zip(*parts, strict=True)
        ]
        return (weights * torch.cat(losses)).mean()


def sampled_softmax(
    user: torch.Tensor, item: torch.Tensor, rows: torch.Tensor, log_shares: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """For n users, how surprised a softmax over the items of all n is by their own, float32 [n].

    Takes vectors [n, D] and, for each item, table row, logarithm of its share of the training ratings, and
    whether it is no padding, [n]. An item is here as often as it is popular; to take that out again, each
    score is lowered by the logarithm of the item's share (Yi et al., "Sampling-bias-corrected neural
    modeling for large corpus item recommendations", 2019). The same item elsewhere is no competitor.
    """
    scores = user @ item.T - log_shares
    is_none = (rows.unsqueeze(1) == rows) | ~real
    is_none.fill_diagonal_(False)
    scores = scores.masked_fill(is_none, -torch.inf)
    return scores.logsumexp(dim=1) - scores.diagonal()
