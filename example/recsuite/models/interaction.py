"""From vectors of users and items to a label. Shapes: B events, D numbers in a table row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from recsuite.datasets.schema import Feature
from recsuite.models.layers import Head, LookedUp, make_mlp


class Interaction(Head):
    """Predicts mean + biases + <user factors, item factors> + MLP(user, item, user * item).

    The product of the factors is what makes the ranking of items differ from user to user. A history counts
    by how far its labels are above the mean (after Koren, "Factorization Meets the Neighborhood", 2008, who
    divides by the root of their number; the mean predicted better).
    """

    def __init__(
        self, features: Sequence[Feature], embedding_dim: int, mlp_dims: Sequence[int], mean_label: float
    ) -> None:
        super().__init__(features)
        self.mlp = make_mlp([3 * (embedding_dim - 1), *mlp_dims, 1])
        # The name that it has in checkpoints.
        self.mean_rating: torch.Tensor
        self.register_buffer("mean_rating", torch.tensor(mean_label, dtype=torch.float32))

    def forward(self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor) -> torch.Tensor:
        """As `predict`."""
        return self.predict(looked_up, history_labels)

    def predict(self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor) -> torch.Tensor:
        """Predicted labels, float32 [B]; history_labels: float32, one for each row of the history."""
        user, item = self.join(looked_up, history_labels - self.mean_rating)
        product = user * item
        biases = user[:, 0] + item[:, 0]
        # The dot product of the factors, without that of the biases.
        dot = product.sum(dim=1) - product[:, 0]
        deep = self._deep(user, item, product).squeeze(1)
        return self.mean_rating + biases + dot + deep

    def _deep(self, user: torch.Tensor, item: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """The MLP on the factors of three vectors, float32 [B, 1].

        In its first layer weights of zero for the biases cost less than copies of the vectors without them,
        side by side.
        """
        first, *others = self.mlp
        assert isinstance(first, nn.Linear)
        weights = nn.functional.pad(first.weight.view(first.out_features, 3, -1), (1, 0))
        hidden = torch.addmm(first.bias, user, weights[:, 0].t())
        hidden = torch.addmm(hidden, item, weights[:, 1].t())
        hidden = torch.addmm(hidden, product, weights[:, 2].t())
        for layer in others:
            hidden = layer(hidden)
        return hidden
