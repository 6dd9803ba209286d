"""Two-sided models: one vector for the user of an event, one for its item, and a score of both.

The score is a predicted label, a probability of yes, or a number to rank by.

Shapes: B events, U users, N items, D numbers in a vector or a row of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from recsuite.datasets.schema import EVENT, HISTORY, ITEM, USER, Feature
from recsuite.models.inputs import Inputs
from recsuite.models.layers import (
    NumberLayers,
    OwnItems,
    Recency,
    VectorProjection,
    make_mlp,
    repeated,
)
from recsuite.models.losses import WithOwn
from recsuite.models.rows import FeatureRows, Weight

# The entities whose features make the vector of a user and of an item. Features of the event, such as the
# hour, are part of the user's vector: they are known before an item is chosen.
SIDES = {USER: (USER, EVENT), ITEM: (ITEM,)}


class TwoSided(nn.Module):
    """Base of models that predict from one vector of the user and one of the item.

    Define `user_vectors`, `item_vectors` and `score_pairs`. Serving then computes the vectors of all items
    once; where scores are products of the vectors (`scores_are_products`), an index finds the best items.

    Example:
        class Product(rs.TwoSided):
            scores_are_products = True

            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))     # a model has a parameter of its own

            def user_vectors(self, rows, batch):
                return self.scale * rows["user"]              # float32 [B, D]

            def item_vectors(self, rows, batch):
                return rows[self.item]                        # set from `data.schema.item`

            def score_pairs(self, users, items):
                return (users * items).sum(dim=1)             # float32 [B]
    """

    scores_are_products: ClassVar[bool] = False
    # True for a model that takes `members.places` and `gaps`: the age of each item of a history.
    takes_ages: bool = False

    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the vectors of the users of B events.

        Args:
            rows: Rows of the features.
            batch: The other inputs of the events.

        Returns:
            float32 [B, D].
        """
        raise NotImplementedError

    def item_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the vectors of the items of B events.

        Args:
            rows: Rows of the features.
            batch: The other inputs of the events.

        Returns:
            float32 [B, D].
        """
        raise NotImplementedError

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the prediction for each pair of vectors.

        Args:
            users: Vectors, float32 [B, D].
            items: Vectors, float32 [B, D].

        Returns:
            float32 [B].
        """
        raise NotImplementedError

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the prediction for each user with each item; override it for speed.

        Args:
            users: Vectors, float32 [U, D].
            items: Vectors, float32 [N, D].

        Returns:
            float32 [U, N].
        """
        return torch.stack([self.score_pairs(user.expand_as(items), items) for user in users])

    def forward(self, rows: FeatureRows, batch: Inputs) -> Any:
        """Return the input of the loss: here the predictions.

        Args:
            rows: Rows of the features.
            batch: The other inputs of the events.

        Returns:
            float32 [B, ...].
        """
        return self.predict(rows, batch)

    def predict(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return a prediction for each event; recommendations are sorted by it.

        Args:
            rows: Rows of the features.
            batch: The other inputs of the events.

        Returns:
            float32 [B].
        """
        users, items = self.user_vectors(rows, batch), self.item_vectors(rows, batch)
        scores = self.score_pairs(users, items)
        # A model of L labels has [B, L]. Of the width of the vectors it is a product without its sum.
        is_matrix = isinstance(scores, torch.Tensor) and scores.dim() == 2
        if not is_matrix or scores.shape == users.shape:
            require_shape(scores, 1, "score_pairs must return one number for each pair", "add .sum(dim=1)")
        return scores


def require_shape(value: Any, dims: int, rule: str, fix: str) -> None:
    """Refuse an output of a user's code unless it is a tensor with so many dimensions."""
    if not isinstance(value, torch.Tensor) or value.dim() != dims:
        got = f"the shape {[*value.shape]}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"{rule}, got {got}. Fix: {fix}.")


class DenseNumbers(nn.ModuleDict):
    """Layers that add the dense numbers of each side to its vectors; no layers for a side without numbers.

    What features that are vectors themselves are added to must have the row of the id of the user or item,
    with the factor 1: `training.weights.project_rows` moves numbers between the two.

    Args:
        features: Features of the data.
        embedding_dim: D, the numbers in a vector.

    Example:
        self.numbers = rs.DenseNumbers(data.features, dim)
        users = self.numbers.added(rows.sum(["user", "age"]), batch, "user")      # float32 [B, D]
    """

    def __init__(self, features: Sequence[Feature], embedding_dim: int) -> None:
        super().__init__()
        # In the order of the batch.
        dense = [feature for feature in features if not feature.has_table for _ in range(feature.width)]
        for side, entities in SIDES.items():
            columns = [column for column, feature in enumerate(dense) if feature.entity in entities]
            single = [column for column in columns if dense[column].width == 1]
            # No layers without numbers: a checkpoint of such a model has none.
            if single:
                self[side] = NumberLayers(single, embedding_dim)
            for vector in dict.fromkeys(dense[column] for column in columns if dense[column].width > 1):
                of_vector = [column for column in columns if dense[column] == vector]
                # A name of its own: this is a dictionary of modules, and has methods.
                self[f"vector_{vector.name}"] = VectorProjection(of_vector, embedding_dim, vector.entity)

    def added(self, vectors: torch.Tensor, batch: Inputs, side: str) -> torch.Tensor:
        """Return the vectors of a side plus the output of its layers for dense numbers.

        Args:
            vectors: Vectors of the side, float32 [B, D].
            batch: The inputs of the events.
            side: "user" or "item".

        Returns:
            float32 [B, D].
        """
        for name, layers in self.items():
            if side in (name, getattr(layers, "entity", "")):
                vectors = vectors + layers(batch.numbers)
        return vectors


class Head(TwoSided):
    """Base with sums of the rows of each side's features, and of layers for its dense numbers.

    Number 0 of a vector is the bias, the other D - 1 are the factors. A history adds the weighted mean of its
    rows.
    """

    def __init__(self, features: Sequence[Feature], embedding_dim: int) -> None:
        super().__init__()
        with_rows = [feature for feature in features if feature.has_table]
        self.names = {
            side: [feature.name for feature in with_rows if feature.entity in entities]
            for side, entities in SIDES.items()
        }
        self.has_history = HISTORY in [feature.name for feature in with_rows]
        self.numbers = DenseNumbers(features, embedding_dim)

    # Factor of the rows of each feature.
    weights: Mapping[str, Weight] = {}

    @override
    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        names, weights = self.names[USER], self.weights
        if self.has_history and not self.takes_ages:
            names = [*names, HISTORY]
            weights = {**weights, HISTORY: self.history_weights(rows, batch)}
        return self.numbers.added(rows.sum(names, weights), batch, USER)

    @override
    def item_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        weights = self.item_weights(rows, batch)
        return self.numbers.added(rows.sum(self.names[ITEM], weights), batch, ITEM)

    def item_weights(self, rows: FeatureRows, batch: Inputs) -> Mapping[str, Weight]:
        """Return the factors of the rows of items, see `FeatureRows.sum`."""
        return self.weights

    def history_weights(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the weight of each row of the histories in their mean, float32 [V]."""
        raise NotImplementedError


# Factor of rows. Logits have a wider range than stars, and the factor is the same as a larger learning rate
# and initial spread, so one --lr is right for both tasks.
SCALE = 5.0


class ProductHead(Head):
    """Score items for a user: item bias + <user factors, item factors>."""

    scores_are_products = True

    @override
    def forward(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the vectors of users and items, float32 [B, 2, D], whose product is the score."""
        return torch.stack([self.user_vectors(rows, batch), self.item_vectors(rows, batch)], dim=1)

    @override
    def item_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        return SCALE * super().item_vectors(rows, batch)

    @override
    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (users * items).sum(dim=1)

    @override
    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return users @ items.t()


# In a training for new items, one of so many items has only its features. Beside rows, which learn a few
# events by heart, features learn too little for items without a row. docs/log/2026-11.md has the figures.
HIDDEN_EVERY = 4


class TwoTower(ProductHead):
    """Product model that adds an MLP of the user's factors to them. A history counts whatever its labels.

    Args:
        features: Features of the data.
        embedding_dim: D, the numbers in a row.
        mlp_dims: Widths of the hidden layers of the MLP.
        num_places: Number of items of a history that have a learned weight each, see `Recency`; 0 for equal
            weights. With learned weights there is an MLP only if it has hidden layers.
        num_types: Number of types of events, see `Recency`.
        repeats: True if an item of a history may be chosen again, see `OwnItems`.
        hidden: The feature with the ids of items, whose rows training hides for some items, so that new ones
            are known by their other features; "" hides none.

    Example:
        towers = lambda data, args: rs.TwoTower(data.features, args.embedding_dim, [64])
        model = training.shard(towers, loss=rs.SampledSoftmax.of(training.columns))
    """

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        mlp_dims: Sequence[int],
        num_places: int = 0,
        num_types: int = 1,
        repeats: bool = False,
        hidden: str = "",
    ) -> None:
        super().__init__(features, embedding_dim)
        self.hidden = hidden
        widths = [embedding_dim - 1, *mlp_dims, embedding_dim - 1]
        self.tower = nn.Sequential() if num_places and not mlp_dims else make_mlp(widths)
        self.recency = Recency(num_places, num_types) if num_places else None
        self.takes_ages = self.recency is not None
        self.own_items = OwnItems(num_types) if num_places and repeats else None

    def forward(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor | WithOwn:  # type: ignore[override]
        """Return the vectors of users and items, with what items of histories add to their own scores.

        Args:
            rows: Rows of the features.
            batch: The other inputs of the events.

        Returns:
            float32 [B, 2, D], alone if items of histories add nothing.
        """
        vectors = super().forward(rows, batch)
        if self.own_items is None:
            return vectors
        return WithOwn(vectors, self.own_items(batch.members, rows.used(HISTORY)))

    @override
    def predict(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        scores = super().predict(rows, batch)
        if self.own_items is None:
            return scores
        lengths = rows.found[HISTORY].lengths().to(torch.int64)
        added = self.own_items(batch.members) * batch.is_own
        events = repeated(torch.arange(scores.size(0), device=scores.device), lengths, added.size(0))
        return scores.index_add(0, events, added)

    @override
    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        vectors = super().user_vectors(rows, batch)
        if self.recency is not None:
            # After the scale: the weights are trained too, and their gradient includes it.
            vectors = vectors + self.recency(*rows.slots(HISTORY), batch.members, rows.used(HISTORY))
        factors = SCALE * vectors[:, 1:]
        if len(self.tower):
            factors = factors + self.tower(factors)
        # The bias of an item counts once.
        return torch.cat([torch.ones_like(factors[:, :1]), factors], dim=1)

    @override
    def item_weights(self, rows: FeatureRows, batch: Any) -> Mapping[str, Weight]:
        if not self.hidden or not self.training:
            return self.weights
        number = len(rows.found[self.hidden].lengths())
        # By the place in the global batch: the same items on any number of ranks. The order of events differs
        # in each pass, so other ones are hidden.
        num_drawn = number - len(batch.weights)
        places = torch.arange(number, device=batch.weights.device)
        places[num_drawn:] += batch.first - num_drawn
        is_kept = places % HIDDEN_EVERY != HIDDEN_EVERY // 2
        return {**self.weights, self.hidden: is_kept.float()}

    @override
    def history_weights(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        lengths = rows.found[HISTORY].lengths().to(torch.int64)
        # Of padded histories the slots; the drawn items before the events have none.
        counts = rows.counts.get(HISTORY, lengths)
        # The mean, times the root of the length, is the sum over the root.
        roots = counts.to(torch.float32).sqrt()
        return repeated(roots, lengths[-len(counts) :], len(batch.history_labels))
