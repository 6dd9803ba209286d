"""From looked-up table rows to a score for ranking: a vector of the user, one of the item, their product.

Because the two meet in nothing but a product, the scores of all users and items are a product of matrices.
Like `interaction.py` it knows tensors, and nothing of where the rows come from. Shapes: B events, D numbers
in a table row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from recsuite.datasets.schema import HISTORY, Feature
from recsuite.models.layers import Head, LookedUp, make_mlp, repeated

# Logarithms of probabilities spread wider than stars. Rows count so many times, which is the same as so many
# times the learning rate and the initial spread, so one --lr is right for both tasks.
SCALE = 5.0


class TwoTower(Head):
    """Scores items for a user: item bias + <user factors, item factors>.

    An MLP adds to the user's factors what it makes of them. A history counts whatever its labels, with its
    sum divided by the root of its length.
    """

    def __init__(self, features: Sequence[Feature], embedding_dim: int, mlp_dims: Sequence[int]) -> None:
        super().__init__(features)
        self.tower = make_mlp([embedding_dim - 1, *mlp_dims, embedding_dim - 1])

    def forward(self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor) -> torch.Tensor:
        """The vectors of users and items, float32 [B, 2, D], whose product is the score.

        The labels of the histories count for nothing.
        """
        user, item = self.join(looked_up, self._history_weights(looked_up))
        factors = SCALE * user[:, 1:]
        factors = factors + self.tower(factors)
        # The bias of an item counts once.
        user = torch.cat([torch.ones_like(factors[:, :1]), factors], dim=1)
        return torch.stack([user, SCALE * item], dim=1)

    def _history_weights(self, looked_up: Mapping[str, LookedUp]) -> torch.Tensor:
        if not self.has_history:
            return self.row_scale.new_zeros(0)
        history = looked_up[HISTORY]
        lengths = history.lengths().to(torch.int64)
        return repeated(lengths.to(torch.float32).sqrt(), lengths, len(history.values()))

    def predict(self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor) -> torch.Tensor:
        """Scores, float32 [B]."""
        vectors = self(looked_up, history_labels)
        return vectors.prod(dim=1).sum(dim=1)
