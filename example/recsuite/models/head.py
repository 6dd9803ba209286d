"""What every head does: from looked-up rows to one vector for the user of each event, and one for its item.

A head knows tensors; nothing of where the rows come from, so that what trains them over many ranks and what
serves them alone compute the same. Shapes: B events, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import nn

from recsuite.datasets.schema import AUDIENCE, EVENT, HISTORY, ITEM, LISTS, USER, Feature
from recsuite.models.layers import NumberLayers, means, repeated, scaled
from recsuite.models.lists import DistinctRows, Links, held_by_prior, shared_sums, sums_over_roots
from recsuite.models.prior import GROUPS, Prior, first_number
from recsuite.models.recency import Members
from recsuite.models.sides import Bag, SharedRows, side_sums

# What rows of lists count, where labels are predicted: in a step a sum over a list goes many times as far.
LIST_SCALE = 0.2
# And those of features that many users or items have in common: they move with each event of many.
SIDE_SCALE = 0.2
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
    of lists. Who trains the head sets them, and the `spreads` of the prior, see `prior.learned_spreads`.

    What the tables hold, times `row_scale`, are the rows. A decay has to shrink every row in every step, also
    the millions that the step does not look up; multiplying this one number does it for all of them at once.
    """

    # Whether an index of vectors finds the items with the highest scores.
    scores_are_products: ClassVar[bool] = False

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
            feature.name: SIDE_SCALE if self.is_two_sided and feature.name not in ids else 1.0
            for feature in features
        }
        self.prior: Prior | None = None
        if self.is_two_sided:
            self.spreads: torch.Tensor
            self.register_buffer("spreads", torch.zeros(len(GROUPS)))
        self.add_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
        # A buffer: checkpoints hold it and it moves with the model, but no gradient changes it.
        self.row_scale: torch.Tensor
        self.register_buffer("row_scale", torch.tensor(1.0))

    @property
    def takes_ages(self) -> bool:
        """Whether items of a history count by how long ago they were; such a head adds histories itself."""
        return False

    def user_vectors(
        self,
        looked_up: Mapping[str, LookedUp],
        members: Members,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """The users of B events, float32 [B, D]; members: of the histories; numbers: the dense ones,
        float32 [B, numbers], NaN where there is none; links: of the batch, without which each event has lists
        of its own, and is in none of them.
        """
        if isinstance(looked_up, SharedRows):
            return self._with_numbers(self._shared_users(looked_up, members), numbers, USER)
        return self._vectors(self._user_parts(looked_up, members, links), numbers, USER)

    def item_vectors(
        self, looked_up: Mapping[str, LookedUp], numbers: torch.Tensor, links: Links | None = None
    ) -> torch.Tensor:
        """The items of B events, float32 [B, D]; takes what `user_vectors` takes."""
        if isinstance(looked_up, SharedRows):
            return self._with_numbers(self._shared_items(looked_up), numbers, ITEM)
        return self._vectors(self._item_parts(looked_up, links), numbers, ITEM)

    def predict_with_directions(
        self,
        looked_up: Mapping[str, LookedUp],
        members: Members,
        numbers: torch.Tensor,
        links: Links | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `predict` gives, float32 [B], and how it changes with the logarithm by which the rows of each
        group of the prior are multiplied, float32 [G, B]. Only with a prior.
        """
        sides = self._user_parts(looked_up, members, links), self._item_parts(looked_up, links)
        user, item = (
            self._vectors(parts, numbers, side) for parts, side in zip(sides, (USER, ITEM), strict=True)
        )
        # Forward mode: one pass for the predictions, and their derivatives in the direction of a group.
        found = [
            torch.func.jvp(
                self.score_pairs, (user, item), tuple(self._vectors_of(parts, group) for parts in sides)
            )
            for group in range(len(GROUPS))
        ]
        return found[0][0], torch.stack([each[1] for each in found])

    def history_weights(self, history: LookedUp, labels: torch.Tensor) -> torch.Tensor:
        """How much each row of the histories counts in their mean, float32 [their number]."""
        raise NotImplementedError

    def liking(self, labels: torch.Tensor) -> torch.Tensor:
        """How much each row of the histories counts in their sum, where there is an audience too, float32."""
        return torch.ones_like(labels)

    def _shared_users(self, looked_up: SharedRows, members: Members) -> torch.Tensor:
        """The sums of users' rows, float32 [B, D]. Those of items are made with them, and kept."""
        users = self._bags(USER)
        if HISTORY in self.lists and not self.takes_ages:
            users.append(Bag(HISTORY, self.history_weights(looked_up[HISTORY], members.labels)))
        of_users, of_items = side_sums(looked_up, (users, self._bags(ITEM)))
        looked_up.of_items = scaled(of_items, self.row_scale)
        return scaled(of_users, self.row_scale)

    def _shared_items(self, looked_up: SharedRows) -> torch.Tensor:
        """The sums of items' rows, float32 [B, D]."""
        if looked_up.of_items is not None:
            return looked_up.of_items
        (of_items,) = side_sums(looked_up, (self._bags(ITEM),))
        return scaled(of_items, self.row_scale)

    def _bags(self, side: str) -> list[Bag]:
        return [Bag(feature.name) for feature in self.features if feature.entity in SIDES[side]]

    def _vectors(self, parts: Mapping[str, torch.Tensor], numbers: torch.Tensor, side: str) -> torch.Tensor:
        """The vectors of one side, float32 [B, D], from what each of its features adds."""
        first, *others = parts.values()
        # The sum instead of the rows: it is the same, and there are fewer of them.
        return self._with_numbers(scaled(sum(others, start=first), self.row_scale), numbers, side)

    def _with_numbers(self, vectors: torch.Tensor, numbers: torch.Tensor, side: str) -> torch.Tensor:
        # After the scale, which is that of rows alone.
        return vectors + self.numbers[side](numbers) if side in self.numbers else vectors

    def _vectors_of(self, parts: Mapping[str, torch.Tensor], group: int) -> torch.Tensor:
        """What the features of one group of the prior add, float32 [B, D]."""
        assert self.prior is not None
        total = torch.zeros_like(next(iter(parts.values())))
        for name, part in parts.items():
            if self.prior.groups.get(name) == group:
                total += self.row_scale * part
        total[:, : first_number(group)] = 0
        return total

    def _user_parts(
        self, looked_up: Mapping[str, LookedUp], members: Members, links: Links | None
    ) -> dict[str, torch.Tensor]:
        parts = self._parts(looked_up, USER, links)
        if self.is_two_sided and HISTORY in self.lists:
            liking = self.liking(members.labels)
            parts[HISTORY] = self._list_sums(HISTORY, looked_up[HISTORY], liking, links)
        elif HISTORY in self.lists and not self.takes_ages:
            history = looked_up[HISTORY]
            weights = self.history_weights(history, members.labels)
            parts[HISTORY] = means(history.values(), weights, history.lengths())
        return parts

    def _item_parts(self, looked_up: Mapping[str, LookedUp], links: Links | None) -> dict[str, torch.Tensor]:
        parts = self._parts(looked_up, ITEM, links)
        if AUDIENCE in self.lists:
            parts[AUDIENCE] = self._list_sums(AUDIENCE, looked_up[AUDIENCE], None, links)
        return parts

    def _parts(
        self, looked_up: Mapping[str, LookedUp], side: str, links: Links | None
    ) -> dict[str, torch.Tensor]:
        """What each feature of a side adds to its vectors but for lists, float32 [B, D] each."""
        parts = {}
        for feature in self.features:
            if feature.entity in SIDES[side]:
                found = looked_up[feature.name]
                rows = self._held(feature, found, links)
                # Of the other features each event has one row, so the rows are the vectors already.
                if feature.multi:
                    rows = means(rows, torch.ones_like(rows[:, 0]), found.lengths())
                scale = self.scales[feature.name]
                parts[feature.name] = rows if scale == 1 else scale * rows
        return parts

    def _held(self, feature: Feature, found: LookedUp, links: Links | None) -> torch.Tensor:
        """The rows of a feature, held by their prior where they learn."""
        rows = found.values()
        if links is None or self.prior is None or not rows.requires_grad:
            return rows
        scale = self.scales[feature.name]
        dim = rows.size(1)
        strengths = self.prior.strengths(feature.name, links.rarities, dim, self.spreads, scale)
        strengths = strengths * self.row_scale
        if feature.multi:
            strengths = repeated(strengths, found.lengths().to(torch.int64), len(rows))
        return held_by_prior(rows, strengths)

    def _list_sums(
        self, name: str, found: LookedUp, weights: torch.Tensor | None, links: Links | None
    ) -> torch.Tensor:
        """What the lists of a name add up to, float32 [B, D]; weights: of values, 1 where it is None."""
        if not isinstance(found, DistinctRows):
            rows = found.values()
            found = DistinctRows(rows, torch.arange(len(rows), device=rows.device), found.lengths())
        if weights is None:
            weights = found.rows.new_ones(len(found.places))
        if links is None:
            return LIST_SCALE * sums_over_roots(found, weights)
        place = self.lists.index(name)
        link = links.sources[place], links.scales[place] * LIST_SCALE, links.own[place]
        strengths = None
        if self.prior is not None and found.rows.requires_grad:
            dim = found.rows.size(1)
            strengths = self.prior.strengths(name, links.rarities, dim, self.spreads, LIST_SCALE)
            strengths = strengths * self.row_scale
        return shared_sums(found, weights, link, strengths, self.add_over_ranks)

    def forward(
        self,
        looked_up: Mapping[str, LookedUp],
        members: Members,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """What the loss is computed of, float32 [B, ...]; takes what `user_vectors` takes."""
        return self.predict(looked_up, members, numbers, links)

    def predict(
        self,
        looked_up: Mapping[str, LookedUp],
        members: Members,
        numbers: torch.Tensor,
        links: Links | None = None,
    ) -> torch.Tensor:
        """A number for each user and item, by which items are recommended, float32 [B]."""
        users = self.user_vectors(looked_up, members, numbers, links)
        return self.score_pairs(users, self.item_vectors(looked_up, numbers, links))

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """What `predict` gives, float32 [B], of vectors, float32 [B, D] both."""
        raise NotImplementedError

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Each user with each item, float32 [U, N], of vectors [U, D] and [N, D]; `score_pairs` but for
        rounding.
        """
        raise NotImplementedError
