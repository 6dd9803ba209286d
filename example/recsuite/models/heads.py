"""The heads of the tasks: from looked-up rows to a predicted label, or to a score for ranking.

A head knows tensors; nothing of where the rows come from, so that what trains them over many ranks and what
serves them alone compute the same. Shapes: B events, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import nn

from recsuite.datasets.schema import AUDIENCE, EVENT, HISTORY, ITEM, LISTS, USER, Feature
from recsuite.models.layers import NumberLayers, make_mlp, means, repeated, scaled
from recsuite.models.lists import Links, held_by_prior, shared_sums, sums_over_roots
from recsuite.models.prior import Prior

# Logarithms of probabilities spread wider than stars. Rows count so many times, which is the same as so many
# times the learning rate and the initial spread, so one --lr is right for both tasks.
SCALE = 5.0
# The logit of a share is taken of no lower one.
LEAST_SHARE = 1e-4
# What rows of lists count, where labels are predicted: in a step a sum over a list goes many times as far.
LIST_SCALE = 0.2
# And those of features that many users or items have in common: they move with each event of many.
SIDE_SCALE = 0.2
# By how much more an item of a history counts for a label that is one unit above the mean.
LIKING = 0.3
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
    lie in a table of their own, each times a weight. With an audience both vectors get what their lists add
    up to, over the root of their lengths, and features that are no ids count less.

    ids: the names of the features that tell users, and items, apart; without them all count alike.
    prior: of the rows, where they have one; add_over_ranks: adds a tensor up over all ranks, for the gradient
    of lists. Who trains the head sets them.

    What the tables hold, times `row_scale`, are the rows. A decay has to shrink every row in every step, also
    the millions that the step does not look up; multiplying this one number does it for all of them at once.
    """

    # Whether an index of vectors finds the items with the highest scores.
    scores_are_products: ClassVar[bool] = False
    list_scale: ClassVar[float] = LIST_SCALE
    side_scale: ClassVar[float] = SIDE_SCALE

    def __init__(self, features: Sequence[Feature], embedding_dim: int, ids: Sequence[str] = ()) -> None:
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
        # In the order of `Links`.
        self.lists = [name for name in LISTS if name in [feature.name for feature in features]]
        self.is_two_sided = AUDIENCE in self.lists
        # What the rows of a feature are multiplied by.
        self.scales = {
            feature.name: self.side_scale if self.is_two_sided and feature.name not in ids else 1.0
            for feature in features
        }
        self.prior: Prior | None = None
        self.add_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
        # A buffer: checkpoints hold it and it moves with the model, but no gradient changes it.
        self.row_scale: torch.Tensor
        self.register_buffer("row_scale", torch.tensor(1.0))

    def user_vectors(
        self,
        looked_up: Mapping[str, LookedUp],
        history_labels: torch.Tensor,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """The users of B events, float32 [B, D]; history_labels: float32, one for each row of the history;
        numbers: the dense ones, float32 [B, numbers], NaN where there is none; links: of the batch, without
        which each event has lists of its own, and is in none of them.
        """
        user = self._add_up(looked_up, USER, links)
        if self.is_two_sided and HISTORY in self.lists:
            user = user + self._list_sums(HISTORY, looked_up[HISTORY], self.liking(history_labels), links)
        elif HISTORY in self.lists:
            history = looked_up[HISTORY]
            weights = self.history_weights(history, history_labels)
            user = user + means(history.values(), weights, history.lengths())
        # The sum instead of the rows: it is the same, and there are fewer of them.
        return self._with_numbers(scaled(user, self.row_scale), numbers, USER)

    def item_vectors(
        self, looked_up: Mapping[str, LookedUp], numbers: torch.Tensor, links: Links | None = None
    ) -> torch.Tensor:
        """The items of B events, float32 [B, D]; takes what `user_vectors` takes."""
        item = self._add_up(looked_up, ITEM, links)
        if AUDIENCE in self.lists:
            audience = looked_up[AUDIENCE]
            item = item + self._list_sums(AUDIENCE, audience, torch.ones_like(audience.values()[:, 0]), links)
        return self._with_numbers(scaled(item, self.row_scale), numbers, ITEM)

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """How much each row of the histories counts in their mean, float32 [their number]."""
        raise NotImplementedError

    def liking(self, labels: torch.Tensor) -> torch.Tensor:
        """How much each row of the histories counts in their sum, where there is an audience too, float32."""
        return torch.ones_like(labels)

    def _with_numbers(self, vectors: torch.Tensor, numbers: torch.Tensor, side: str) -> torch.Tensor:
        # After the scale, which is that of rows alone.
        return vectors + self.numbers[side](numbers) if side in self.numbers else vectors

    def _add_up(self, looked_up: Mapping[str, LookedUp], side: str, links: Links | None) -> torch.Tensor:
        vectors = []
        for feature in self.features:
            if feature.entity in SIDES[side]:
                found = looked_up[feature.name]
                rows = self._held(feature, found, links)
                # Of the other features each event has one row, so the rows are the vectors already.
                if feature.multi:
                    rows = means(rows, torch.ones_like(rows[:, 0]), found.lengths())
                scale = self.scales[feature.name]
                vectors.append(rows if scale == 1 else scale * rows)
        return sum(vectors[1:], start=vectors[0])

    def _held(self, feature: Feature, found: LookedUp, links: Links | None) -> torch.Tensor:
        """The rows of a feature, held by their prior where they learn."""
        rows = found.values()
        if links is None or self.prior is None or not rows.requires_grad:
            return rows
        scale = self.scales[feature.name]
        strengths = self.prior.strengths(feature.name, links.rarities, rows.size(1), scale) * self.row_scale
        if feature.multi:
            strengths = repeated(strengths, found.lengths().to(torch.int64), len(rows))
        return held_by_prior(rows, strengths)

    def _list_sums(
        self, name: str, found: LookedUp, weights: torch.Tensor, links: Links | None
    ) -> torch.Tensor:
        """What the lists of a name add up to, float32 [B, D]."""
        rows, lengths = found.values(), found.lengths()
        if links is None:
            return self.list_scale * sums_over_roots(rows, weights, lengths)
        place = self.lists.index(name)
        link = links.sources[place], links.scales[place] * self.list_scale, links.own[place]
        strengths = None
        if self.prior is not None and rows.requires_grad:
            strengths = self.prior.strengths(name, links.rarities, rows.size(1), self.list_scale)
            strengths = strengths * self.row_scale
        return shared_sums(rows, weights, lengths, link, strengths, self.add_over_ranks)

    def forward(
        self,
        looked_up: Mapping[str, LookedUp],
        history_labels: torch.Tensor,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """What the loss is computed of, float32 [B, ...]; takes what `user_vectors` takes."""
        return self.predict(looked_up, history_labels, numbers, links)

    def predict(
        self,
        looked_up: Mapping[str, LookedUp],
        history_labels: torch.Tensor,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """A number for each user and item, by which items are recommended, float32 [B]."""
        users = self.user_vectors(looked_up, history_labels, numbers, links)
        return self.score_pairs(users, self.item_vectors(looked_up, numbers, links))

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
    divides by the root of their number; the mean predicted better). With an audience too it counts as Koren
    has it, whatever its labels, and somewhat more the higher they are: who had what says much about both
    (Rendle, Zhang and Koren, "On the Difficulty of Evaluating Baselines", 2019, call the other side flipped).

    unit: that by which differences of labels are measured, see `Schema.unit`.
    """

    # What checkpoints call the layers, which tells what a head that is read was trained for.
    layers_name: ClassVar[str] = "mlp"

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        mlp_dims: Sequence[int],
        mean_label: float,
        unit: float = 1.0,
        ids: Sequence[str] = (),
    ) -> None:
        super().__init__(features, embedding_dim, ids)
        # The factors of three vectors; the biases are added by themselves.
        setattr(self, self.layers_name, make_mlp([3 * (embedding_dim - 1), *mlp_dims, 1]))
        # The name that it has in checkpoints.
        self.mean_rating: torch.Tensor
        self.register_buffer("mean_rating", torch.tensor(mean_label, dtype=torch.float32))
        if self.is_two_sided:
            # Where nothing is measured by it checkpoints have none.
            self.label_unit: torch.Tensor
            self.register_buffer("label_unit", torch.tensor(unit, dtype=torch.float32))

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return labels - self.mean_rating

    def liking(self, labels: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return 1 + LIKING / self.label_unit * (labels - self.mean_rating)

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
        ids: Sequence[str] = (),
    ) -> None:
        super().__init__(features, embedding_dim, mlp_dims, mean_label, ids=ids)
        # Where all labels are alike their logit would be infinite.
        mean = torch.tensor(mean_label, dtype=torch.float32).clamp(LEAST_SHARE, 1 - LEAST_SHARE)
        self.mean_rating = mean.logit()

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return labels - self.mean_rating.sigmoid()

    def liking(self, labels: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return 1 + LIKING * (labels - self.mean_rating.sigmoid())

    def forward(
        self,
        looked_up: Mapping[str, LookedUp],
        history_labels: torch.Tensor,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """Logits, float32 [B]: the logarithm in the loss is exact for them alone."""
        users = self.user_vectors(looked_up, history_labels, numbers, links)
        return super().score_pairs(users, self.item_vectors(looked_up, numbers, links))

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Probabilities, see `Head`."""
        return super().score_pairs(users, items).sigmoid()

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Probabilities, see `Head`."""
        return super().score_all(users, items).sigmoid()


class TwoTower(Head):
    """Scores items for a user: item bias + <user factors, item factors>.

    An MLP adds to the user's factors what it makes of them. A history counts whatever its labels.
    """

    scores_are_products = True
    list_scale = 1.0
    side_scale = 1.0

    def __init__(self, features: Sequence[Feature], embedding_dim: int, mlp_dims: Sequence[int]) -> None:
        super().__init__(features, embedding_dim)
        self.tower = make_mlp([embedding_dim - 1, *mlp_dims, embedding_dim - 1])

    def forward(
        self,
        looked_up: Mapping[str, LookedUp],
        history_labels: torch.Tensor,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """The vectors of users and items, float32 [B, 2, D], whose product is the score.

        The labels of the histories count for nothing.
        """
        users = self.user_vectors(looked_up, history_labels, numbers, links)
        return torch.stack([users, self.item_vectors(looked_up, numbers, links)], dim=1)

    def user_vectors(
        self,
        looked_up: Mapping[str, LookedUp],
        history_labels: torch.Tensor,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """See `Head`."""
        factors = SCALE * super().user_vectors(looked_up, history_labels, numbers, links)[:, 1:]
        factors = factors + self.tower(factors)
        # The bias of an item counts once.
        return torch.cat([torch.ones_like(factors[:, :1]), factors], dim=1)

    def item_vectors(
        self, looked_up: Mapping[str, LookedUp], numbers: torch.Tensor, links: Links | None = None
    ) -> torch.Tensor:
        """See `Head`."""
        return SCALE * super().item_vectors(looked_up, numbers, links)

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
