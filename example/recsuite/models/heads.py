"""The heads of the tasks: from looked-up rows to a predicted label, or to a score for ranking.

A head knows tensors; nothing of where the rows come from, so that what trains them over many ranks and what
serves them alone compute the same. Shapes: B events, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import nn

from recsuite.datasets.schema import EVENT, HISTORY, ITEM, USER, Feature
from recsuite.models.layers import NumberLayers, make_mlp, means, repeated, scaled

# Logarithms of probabilities spread wider than stars. Rows count so many times, which is the same as so many
# times the learning rate and the initial spread, so one --lr is right for both tasks.
SCALE = 5.0
# The logit of a share is taken of no lower one.
LEAST_SHARE = 1e-4
# Whose features make the vector of a user, and whose that of an item.
SIDES = {USER: (USER, EVENT), ITEM: (ITEM,)}


class LookedUp(Protocol):
    """The rows of one feature for B events, event after event; TorchRec's JaggedTensor is one."""

    def values(self) -> torch.Tensor:
        """The rows, float32 [their number, D]."""

    def lengths(self) -> torch.Tensor:
        """How many of them are each event's, [B]."""


class Head(nn.Module):
    """What computes with looked-up rows: one vector for the user of each event, and one for the item.

    The rows of a user's features add up to one vector, those of an item's to another; a list-valued feature
    counts with its mean, and dense numbers with what layers make of them. What is the event's own, such as
    the hour, is part of the user's vector: it is known before an item is chosen. Number 0 of a vector is the
    bias; the other D - 1 are the factors. With a history the user's vector gets the mean of its rows, which
    lie in a table of their own, each times a weight.

    What the tables hold, times `row_scale`, are the rows. A decay has to shrink every row in every step, also
    the millions that the step does not look up; multiplying this one number does it for all of them at once.
    """

    # Whether an index of vectors finds the items with the highest scores.
    scores_are_products: ClassVar[bool] = False

    def __init__(self, features: Sequence[Feature], embedding_dim: int) -> None:
        super().__init__()
        self.features = [feature for feature in features if feature.has_table]
        self.numbers = nn.ModuleDict()
        # In the order in which a batch has them.
        dense = [feature.entity for feature in features if not feature.has_table]
        for side, entities in SIDES.items():
            places = [place for place, entity in enumerate(dense) if entity in entities]
            # Without numbers no layers: a checkpoint of such a model has none.
            if places:
                self.numbers[side] = NumberLayers(places, embedding_dim)
        self.has_history = HISTORY in [feature.name for feature in features]
        # A buffer: checkpoints hold it and it moves with the model, but no gradient changes it.
        self.row_scale: torch.Tensor
        self.register_buffer("row_scale", torch.tensor(1.0))

    def user_vectors(
        self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """The users of B events, float32 [B, D]; history_labels: float32, one for each row of the history;
        numbers: the dense ones, float32 [B, numbers], NaN where there is none.
        """
        user = self._add_up(looked_up, USER)
        if self.has_history:
            history = looked_up[HISTORY]
            weights = self.history_weights(history, history_labels)
            user = user + means(history.values(), weights, history.lengths())
        # The sum instead of the rows: it is the same, and there are fewer of them.
        return self._with_numbers(scaled(user, self.row_scale), numbers, USER)

    def item_vectors(self, looked_up: Mapping[str, LookedUp], numbers: torch.Tensor) -> torch.Tensor:
        """The items of B events, float32 [B, D]."""
        item = scaled(self._add_up(looked_up, ITEM), self.row_scale)
        return self._with_numbers(item, numbers, ITEM)

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """How much each row of the histories counts in their mean, float32 [their number]."""
        raise NotImplementedError

    def _with_numbers(self, vectors: torch.Tensor, numbers: torch.Tensor, side: str) -> torch.Tensor:
        # After the scale, which is that of rows alone.
        return vectors + self.numbers[side](numbers) if side in self.numbers else vectors

    def _add_up(self, looked_up: Mapping[str, LookedUp], side: str) -> torch.Tensor:
        vectors = []
        for feature in self.features:
            if feature.entity in SIDES[side]:
                found = looked_up[feature.name]
                rows = found.values()
                # Of the other features each event has one row, so the rows are the vectors already.
                if feature.multi:
                    rows = means(rows, torch.ones_like(rows[:, 0]), found.lengths())
                vectors.append(rows)
        return sum(vectors[1:], start=vectors[0])

    def forward(
        self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """What the loss is computed of, float32 [B, ...]; takes what `user_vectors` takes."""
        return self.predict(looked_up, history_labels, numbers)

    def predict(
        self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """A number for each user and item, by which items are recommended, float32 [B]."""
        users = self.user_vectors(looked_up, history_labels, numbers)
        return self.score_pairs(users, self.item_vectors(looked_up, numbers))

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """What `predict` gives, float32 [B], of vectors, float32 [B, D] both."""
        raise NotImplementedError

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Each user with each item, float32 [U, N], of vectors [U, D] and [N, D]; `score_pairs` but for
        rounding.
        """
        raise NotImplementedError


class Interaction(Head):
    """Predicts mean + biases + <user factors, item factors> + MLP(user, item, user * item).

    The product of the factors is what makes the ranking of items differ from user to user. A history counts
    by how far its labels are above the mean (after Koren, "Factorization Meets the Neighborhood", 2008, who
    divides by the root of their number; the mean predicted better).
    """

    # What checkpoints call the layers, which tells what a head that is read was trained for.
    layers_name: ClassVar[str] = "mlp"

    def __init__(
        self, features: Sequence[Feature], embedding_dim: int, mlp_dims: Sequence[int], mean_label: float
    ) -> None:
        super().__init__(features, embedding_dim)
        # The factors of three vectors; the biases are added by themselves.
        setattr(self, self.layers_name, make_mlp([3 * (embedding_dim - 1), *mlp_dims, 1]))
        # The name that it has in checkpoints.
        self.mean_rating: torch.Tensor
        self.register_buffer("mean_rating", torch.tensor(mean_label, dtype=torch.float32))

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return labels - self.mean_rating

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
        self, features: Sequence[Feature], embedding_dim: int, mlp_dims: Sequence[int], mean_label: float
    ) -> None:
        super().__init__(features, embedding_dim, mlp_dims, mean_label)
        # Where all labels are alike their logit would be infinite.
        mean = torch.tensor(mean_label, dtype=torch.float32).clamp(LEAST_SHARE, 1 - LEAST_SHARE)
        self.mean_rating = mean.logit()

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return labels - self.mean_rating.sigmoid()

    def forward(
        self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Logits, float32 [B]: the logarithm in the loss is exact for them alone."""
        users = self.user_vectors(looked_up, history_labels, numbers)
        return super().score_pairs(users, self.item_vectors(looked_up, numbers))

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Probabilities, see `Head`."""
        return super().score_pairs(users, items).sigmoid()

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Probabilities, see `Head`."""
        return super().score_all(users, items).sigmoid()


class TwoTower(Head):
    """Scores items for a user: item bias + <user factors, item factors>.

    An MLP adds to the user's factors what it makes of them. A history counts whatever its labels, with its
    sum divided by the root of its length.
    """

    scores_are_products = True

    def __init__(self, features: Sequence[Feature], embedding_dim: int, mlp_dims: Sequence[int]) -> None:
        super().__init__(features, embedding_dim)
        self.tower = make_mlp([embedding_dim - 1, *mlp_dims, embedding_dim - 1])

    def forward(
        self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """The vectors of users and items, float32 [B, 2, D], whose product is the score.

        The labels of the histories count for nothing.
        """
        users = self.user_vectors(looked_up, history_labels, numbers)
        return torch.stack([users, self.item_vectors(looked_up, numbers)], dim=1)

    def user_vectors(
        self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """See `Head`."""
        factors = SCALE * super().user_vectors(looked_up, history_labels, numbers)[:, 1:]
        factors = factors + self.tower(factors)
        # The bias of an item counts once.
        return torch.cat([torch.ones_like(factors[:, :1]), factors], dim=1)

    def item_vectors(self, looked_up: Mapping[str, LookedUp], numbers: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return SCALE * super().item_vectors(looked_up, numbers)

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        lengths = history.lengths().to(torch.int64)
        # The mean, times the root of the length, is the sum over the root.
        return repeated(lengths.to(torch.float32).sqrt(), lengths, len(history.values()))

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Scores, see `Head`."""
        return (users * items).sum(dim=1)

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Scores, see `Head`: one product of matrices."""
        return users @ items.t()
