"""Models of two sides: a predicted label, the chance of a yes, or a score for ranking.

Shapes: B events, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from recsuite.datasets.schema import HISTORY, Feature
from recsuite.models.layers import make_mlp, repeated
from recsuite.models.recency import Recency
from recsuite.models.rows import FeatureRows, Inputs
from recsuite.models.two_sided import Head

# Logarithms of probabilities spread wider than stars. Rows count so many times, which is the same as so many
# times the learning rate and the initial spread, so one --lr is right for both tasks.
SCALE = 5.0
# The logit of a share is taken of no lower one.
LEAST_SHARE = 1e-4


class Interaction(Head):
    """Predicts mean + biases + <user factors, item factors> + MLP(user, item, user * item).

    The product of the factors is what makes the ranking of items differ from user to user. A history counts
    by how far its labels are above the mean (after Koren, "Factorization Meets the Neighborhood", 2008, who
    divides by the root of their number; the mean predicted better).
    """

    # What checkpoints call the layers, which tells what a head that is read was trained for.
    layers_name: ClassVar[str] = "mlp"

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        mlp_dims: Sequence[int],
        mean_label: float,
    ) -> None:
        super().__init__(features, embedding_dim)
        # The factors of three vectors; the biases are added by themselves.
        setattr(self, self.layers_name, make_mlp([3 * (embedding_dim - 1), *mlp_dims, 1]))
        # The name that it has in checkpoints.
        self.mean_rating: torch.Tensor
        self.register_buffer("mean_rating", torch.tensor(mean_label, dtype=torch.float32))

    def history_weights(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `Head`."""
        return batch.history_labels - self.mean_rating

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Predicted labels, see `Head`."""
        product = users * items
        biases = users[:, 0] + items[:, 0]
        # The dot product of the factors, without that of the biases.
        dot = product.sum(dim=1) - product[:, 0]
        deep = self._deep(users, items, product).squeeze(1)
        return self.mean_rating + biases + dot + deep

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Predicted labels, see `Head`. Takes memory for U * N * the widest layer."""
        first, weights, others = self._layers()
        # The weights times a user are a matrix for all items, so no product of two vectors is stored. What
        # the user alone and the item alone add is computed once, not for each pair.
        hidden = torch.matmul(items, users.unsqueeze(2) * weights[:, 2].t())
        hidden += torch.addmm(first.bias, users, weights[:, 0].t()).unsqueeze(1)
        hidden += items @ weights[:, 1].t()
        for layer in others:
            hidden = layer(hidden)
        biases = users[:, :1] + items[:, 0]
        return self.mean_rating + biases + users[:, 1:] @ items[:, 1:].t() + hidden.squeeze(2)

    def _deep(self, user: torch.Tensor, item: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """The MLP on the factors of three vectors, float32 [B, 1]."""
        first, weights, others = self._layers()
        hidden = torch.addmm(first.bias, user, weights[:, 0].t())
        hidden = torch.addmm(hidden, item, weights[:, 1].t())
        hidden = torch.addmm(hidden, product, weights[:, 2].t())
        for layer in others:
            hidden = layer(hidden)
        return hidden

    def _layers(self) -> tuple[nn.Linear, torch.Tensor, list[nn.Module]]:
        """The first layer of the MLP, its weights for user, item and product, [width, 3, D], and the others.

        Weights of zero for the biases cost less than copies of the vectors without them, side by side.
        """
        first, *others = getattr(self, self.layers_name)
        assert isinstance(first, nn.Linear)
        # A zero in front of each third, where a vector has its bias.
        return first, nn.functional.pad(first.weight.view(first.out_features, 3, -1), (1, 0)), others


class Response(Interaction):
    """Predicts the probability of a yes: the logistic function of what `Interaction` predicts."""

    layers_name = "response"

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        mlp_dims: Sequence[int],
        mean_label: float,
    ) -> None:
        super().__init__(features, embedding_dim, mlp_dims, mean_label)
        # Where all labels are alike their logit would be infinite.
        mean = torch.tensor(mean_label, dtype=torch.float32).clamp(LEAST_SHARE, 1 - LEAST_SHARE)
        self.mean_rating = mean.logit()

    def history_weights(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `Head`."""
        return batch.history_labels - self.mean_rating.sigmoid()

    def forward(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return logits, float32 [B]: the logarithm in the loss is exact for them alone."""
        return super().score_pairs(self.user_vectors(rows, batch), self.item_vectors(rows, batch))

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Probabilities, see `Head`."""
        return super().score_pairs(users, items).sigmoid()

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Probabilities, see `Head`."""
        return super().score_all(users, items).sigmoid()


class ProductHead(Head):
    """Scores items for a user: item bias + <user factors, item factors>."""

    scores_are_products = True

    def forward(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the vectors of users and items, float32 [B, 2, D], whose product is the score."""
        return torch.stack([self.user_vectors(rows, batch), self.item_vectors(rows, batch)], dim=1)

    def item_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `Head`."""
        return SCALE * super().item_vectors(rows, batch)

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Scores, see `Head`."""
        return (users * items).sum(dim=1)

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Scores, see `Head`: one product of matrices."""
        return users @ items.t()


class TwoTower(ProductHead):
    """Adds to the user's factors what an MLP makes of them. A history counts whatever its labels.

    num_places: so many items of a history have a weight of their own, see `Recency`; with 0 all count alike.
    With weights that are learned there is no MLP unless it has hidden layers.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        mlp_dims: Sequence[int],
        num_places: int = 0,
    ) -> None:
        super().__init__(features, embedding_dim)
        widths = [embedding_dim - 1, *mlp_dims, embedding_dim - 1]
        self.tower = nn.Sequential() if num_places and not mlp_dims else make_mlp(widths)
        self.recency = Recency(num_places) if num_places else None
        self.takes_ages = self.recency is not None

    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `Head`."""
        vectors = super().user_vectors(rows, batch)
        if self.recency is not None:
            # After the scale and not before: the weights are learned too, and their gradient has it.
            vectors = vectors + self.recency(*rows.jagged(HISTORY), batch.members)
        factors = SCALE * vectors[:, 1:]
        if len(self.tower):
            factors = factors + self.tower(factors)
        # The bias of an item counts once.
        return torch.cat([torch.ones_like(factors[:, :1]), factors], dim=1)

    def history_weights(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `Head`."""
        lengths = rows.found[HISTORY].lengths().to(torch.int64)
        # The mean, times the root of the length, is the sum over the root.
        return repeated(lengths.to(torch.float32).sqrt(), lengths, len(batch.history_labels))
