"""From features to a rating: embeddings, the interaction of user and movie, an MLP.

Knows tensors and tables; nothing of ranks, files or devices. Shapes: B ratings, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from features import HISTORY, Table


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


class Recommender(nn.Module):
    """Predicts mean + biases + <user factors, movie factors> + MLP(user, movie, user * movie).

    The rows of a user's features add up to one vector, those of a movie's to another (a list-valued feature
    counts with its mean). Number 0 of a vector is the bias; the other D - 1 are the factors. The product of
    the factors is what makes the ranking of movies differ from user to user.

    With a history, the user's vector is also told what the user liked so far: it gets the sum, over the
    movies of the history, of their rows in a table of their own times how far their rating was above the
    mean, divided by the root of their number (after Koren, "Factorization Meets the Neighborhood", 2008).
    """

    def __init__(
        self, tables: Sequence[Table], embedding_dim: int, mlp_dims: Sequence[int], mean_rating: float
    ) -> None:
        super().__init__()
        self.features = [table.feature for table in tables]
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
        widths = [3 * (embedding_dim - 1), *mlp_dims]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.mean_rating: torch.Tensor
        self.register_buffer("mean_rating", torch.tensor(mean_rating, dtype=torch.float32))

    def forward(self, features: KeyedJaggedTensor, history_ratings: torch.Tensor) -> torch.Tensor:
        """Predicted ratings, float32 [B]."""
        embedded = self.embeddings(features)
        user = self._add_up(embedded, "user")
        if HISTORY in self.features:
            user = user + self._liked_so_far(embedded[HISTORY.name], history_ratings)
        movie = self._add_up(embedded, "movie")
        biases = user[:, 0] + movie[:, 0]
        user, movie = user[:, 1:], movie[:, 1:]
        product = user * movie
        deep = self.mlp(torch.cat([user, movie, product], dim=1)).squeeze(1)
        return self.mean_rating + biases + product.sum(dim=1) + deep

    def _add_up(self, embedded: dict[str, JaggedTensor], entity: str) -> torch.Tensor:
        """The vectors of all users or all movies of the batch, float32 [B, D]."""
        vectors = []
        for feature in self.features:
            if feature.entity == entity:
                jagged = embedded[feature.name]
                rows = jagged.values()
                if feature.multi:
                    # The lengths are ours; checking them would wait for the device in each step.
                    lengths = jagged.lengths().to(torch.int64)
                    rows = torch.segment_reduce(rows, "mean", lengths=lengths, unsafe=True)
                vectors.append(rows)
        return torch.stack(vectors).sum(dim=0)

    def _liked_so_far(self, history: JaggedTensor, ratings: torch.Tensor) -> torch.Tensor:
        """What the histories add to the vectors of their users, float32 [B, D]; zero where there is none."""
        lengths = history.lengths().to(torch.int64)
        weighted = history.values() * (ratings - self.mean_rating).unsqueeze(1)
        total = torch.segment_reduce(weighted, "sum", lengths=lengths, unsafe=True, initial=0)
        return total / lengths.clamp(min=1).sqrt().unsqueeze(1)


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
