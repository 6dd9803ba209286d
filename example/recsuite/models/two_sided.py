"""Models of two sides: one vector for the user of an event, one for its item, and a score of both.

Shapes: B events, U users, N items, D numbers in a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from recsuite.datasets.schema import EVENT, HISTORY, ITEM, USER, Feature
from recsuite.models.layers import NumberLayers
from recsuite.models.rows import FeatureRows, Inputs, Weight

# Whose features make the vector of a user, and whose that of an item. What is the event's own, such as the
# hour, is part of the user's vector: it is known before an item is chosen.
SIDES = {USER: (USER, EVENT), ITEM: (ITEM,)}


class TwoSided(nn.Module):
    """Base of models that predict from one vector of the user and one of the item.

    Define `user_vectors`, `item_vectors` and `score_pairs`. Serving then computes the vectors of all items
    once; where scores are products of the vectors (`scores_are_products`), an index finds the best items.

        class Product(rs.TwoSided):
            scores_are_products = True

            def user_vectors(self, rows, batch):
                return rows["user"]                           # float32 [B, D]

            def item_vectors(self, rows, batch):
                return rows["item"]

            def score_pairs(self, users, items):
                return (users * items).sum(dim=1)             # float32 [B]
    """

    scores_are_products: ClassVar[bool] = False
    # True for a model that takes `members.places` and `gaps`: how long ago each item of a history was.
    takes_ages: bool = False

    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the vectors of the users of B events, float32 [B, D]."""
        raise NotImplementedError

    def item_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the vectors of the items of B events, float32 [B, D]."""
        raise NotImplementedError

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the prediction for each pair of vectors, float32 [B], of float32 [B, D] both."""
        raise NotImplementedError

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the prediction for each user with each item, float32 [U, N]; define a faster one."""
        return torch.stack([self.score_pairs(user.expand_as(items), items) for user in users])

    def forward(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the input of the loss, float32 [B, ...]: here the predictions."""
        return self.predict(rows, batch)

    def predict(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return a prediction for each event, float32 [B], by which items are recommended."""
        return self.score_pairs(self.user_vectors(rows, batch), self.item_vectors(rows, batch))


class DenseNumbers(nn.ModuleDict):
    """Layers that add the dense numbers of each side to its vectors; none for a side without numbers.

    features: of the data; embedding_dim: D numbers in a vector.

        self.numbers = rs.DenseNumbers(data.features, dim)
        users = self.numbers.added(rows.sum(["user", "age"]), batch, "user")      # float32 [B, D]
    """

    def __init__(self, features: Sequence[Feature], embedding_dim: int) -> None:
        super().__init__()
        # In the order in which a batch has them.
        dense = [feature.entity for feature in features if not feature.has_table]
        for side, entities in SIDES.items():
            places = [place for place, entity in enumerate(dense) if entity in entities]
            # Without numbers no layers: a checkpoint of such a model has none.
            if places:
                self[side] = NumberLayers(places, embedding_dim)

    def added(self, vectors: torch.Tensor, batch: Inputs, side: str) -> torch.Tensor:
        """Return vectors of a side, "user" or "item", with what its dense numbers add, float32 [B, D]."""
        return vectors + self[side](batch.numbers) if side in self else vectors


class Head(TwoSided):
    """Sums of the rows of each side's features, and of what layers make of its dense numbers.

    Number 0 of a vector is the bias, the other D - 1 are the factors. A history counts with the mean of its
    rows, each times a weight.
    """

    def __init__(self, features: Sequence[Feature], embedding_dim: int) -> None:
        super().__init__()
        self.features = [feature for feature in features if feature.has_table]
        names = [feature.name for feature in self.features]
        self.names = {
            side: [each.name for each in self.features if each.entity in entities]
            for side, entities in SIDES.items()
        }
        self.has_history = HISTORY in names
        self.numbers = DenseNumbers(features, embedding_dim)

    # What the rows of a feature are multiplied by.
    weights: Mapping[str, Weight] = {}

    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `TwoSided`."""
        names, weights = self.names[USER], self.weights
        if self.has_history and not self.takes_ages:
            names = [*names, HISTORY]
            weights = {**weights, HISTORY: self.history_weights(rows, batch)}
        return self.numbers.added(rows.sum(names, weights), batch, USER)

    def item_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `TwoSided`."""
        return self.numbers.added(rows.sum(self.names[ITEM], self.weights), batch, ITEM)

    def history_weights(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return how much each row of the histories counts in their mean, float32 [V]."""
        raise NotImplementedError
