"""Ratings by who rated what on both sides: the best known where what came later than a rating is no secret.

The vector of a user gets the sum over the items that the user rated, that of an item the sum over its users,
each over the root of their number (Koren, "Factorization Meets the Neighborhood", 2008; Rendle, Zhang and
Koren, "On the Difficulty of Evaluating Baselines", 2019, call the lists of users flipped). A prior draws rows
to zero. Shapes: B events, V values of a list, D numbers in a row, G groups of the prior.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from recsuite.datasets.schema import AUDIENCE, HISTORY, ITEM, LISTS, USER, Feature
from recsuite.models.heads import Interaction
from recsuite.models.layers import means, repeated, scaled
from recsuite.models.lists import DistinctRows, held_by_prior, shared_sums, sums_over_roots
from recsuite.models.prior import GROUPS, Prior, first_number
from recsuite.models.rows import FeatureRows, Inputs

# What rows of lists count: in a step a sum over a list goes many times as far.
LIST_SCALE = 0.2
# And those of features that many users or items have in common: they move with each event of many.
SIDE_SCALE = 0.2
# By how much more an item of a history counts for a label that is one unit above the mean.
LIKING = 0.3


class CoOccurrence(Interaction):
    """Rating model of --preset co_occurrence: who rated what on both sides, with rows that a prior holds.

    features: of the data, those with lists last; embedding_dim: D numbers in a row, the first is its bias;
    mlp_dims: widths of hidden layers; mean_label: of the training events; unit: the scale of differences of
    labels, see `Schema.unit`; ids: the names of the features with the ids of users and of items. The rows of
    lists lie in tables of their own. A training sets three attributes: prior, of the rows; add_over_ranks,
    which adds a tensor over all ranks for the gradient of lists; spreads, see `prior.learned_spreads`.

        def make_model(data, args):
            common = data.features, args.embedding_dim, args.mlp_dims, data.mean_label
            return rs.CoOccurrence(*common, data.schema.unit, data.schema.ids)
    """

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        mlp_dims: Sequence[int],
        mean_label: float,
        unit: float,
        ids: Sequence[str],
    ) -> None:
        super().__init__(features, embedding_dim, mlp_dims, mean_label)
        # In the order of `Links`.
        self.lists = [name for name in LISTS if name in [feature.name for feature in features]]
        self.scales = {feature.name: 1.0 if feature.name in ids else SIDE_SCALE for feature in features}
        self.spreads: torch.Tensor
        self.register_buffer("spreads", torch.zeros(len(GROUPS)))
        self.label_unit: torch.Tensor
        self.register_buffer("label_unit", torch.tensor(unit, dtype=torch.float32))
        self.prior: Prior | None = None
        self.add_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `TwoSided`."""
        return self._vectors(self._user_parts(rows, batch), rows, batch, USER)

    def item_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `TwoSided`."""
        return self._vectors(self._item_parts(rows, batch), rows, batch, ITEM)

    def predict_with_directions(self, rows: FeatureRows, batch: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predictions, float32 [B], and how they change with the logarithm by which the rows of
        each group of the prior are multiplied, float32 [G, B]. Only with a prior.
        """
        sides = self._user_parts(rows, batch), self._item_parts(rows, batch)
        user, item = (
            self._vectors(parts, rows, batch, side) for parts, side in zip(sides, (USER, ITEM), strict=True)
        )
        # Forward mode: one pass for the predictions, and their derivatives in the direction of a group.
        found = [
            torch.func.jvp(
                self.score_pairs,
                (user, item),
                tuple(self._vectors_of(parts, group, rows.scale) for parts in sides),
            )
            for group in range(len(GROUPS))
        ]
        return found[0][0], torch.stack([each[1] for each in found])

    def _vectors(
        self, parts: Mapping[str, torch.Tensor], rows: FeatureRows, batch: Inputs, side: str
    ) -> torch.Tensor:
        first, *others = parts.values()
        return self.numbers.added(scaled(sum(others, start=first), rows.scale), batch, side)

    def _vectors_of(self, parts: Mapping[str, torch.Tensor], group: int, scale: torch.Tensor) -> torch.Tensor:
        """Return what the features of one group of the prior add, float32 [B, D]."""
        assert self.prior is not None
        total = torch.zeros_like(next(iter(parts.values())))
        for name, part in parts.items():
            if self.prior.groups.get(name) == group:
                total += scale * part
        total[:, : first_number(group)] = 0
        return total

    def _user_parts(self, rows: FeatureRows, batch: Inputs) -> dict[str, torch.Tensor]:
        parts = self._parts(rows, batch, USER)
        if HISTORY in self.lists:
            liking = 1 + LIKING / self.label_unit * (batch.history_labels - self.mean_rating)
            parts[HISTORY] = self._list_sums(HISTORY, rows, liking, batch)
        return parts

    def _item_parts(self, rows: FeatureRows, batch: Inputs) -> dict[str, torch.Tensor]:
        parts = self._parts(rows, batch, ITEM)
        if AUDIENCE in self.lists:
            parts[AUDIENCE] = self._list_sums(AUDIENCE, rows, None, batch)
        return parts

    def _parts(self, rows: FeatureRows, batch: Inputs, side: str) -> dict[str, torch.Tensor]:
        """Return what each feature of a side adds to its vectors but for lists, float32 [B, D] each."""
        parts = {}
        for name in self.names[side]:
            found = rows.found[name]
            part = self._held(name, found.values(), found.lengths(), rows, batch)
            if name in rows.lists:
                part = means(part, torch.ones_like(part[:, 0]), found.lengths())
            scale = self.scales[name]
            parts[name] = part if scale == 1 else scale * part
        return parts

    def _held(
        self, name: str, found: torch.Tensor, lengths: torch.Tensor, rows: FeatureRows, batch: Inputs
    ) -> torch.Tensor:
        """Return the rows of a feature, held by their prior where they learn."""
        strengths = self._strengths(name, found, self.scales[name], rows, batch)
        if strengths is None:
            return found
        if name in rows.lists:
            strengths = repeated(strengths, lengths.to(torch.int64), len(found))
        return held_by_prior(found, strengths)

    def _strengths(
        self, name: str, found: torch.Tensor, scale: float, rows: FeatureRows, batch: Inputs
    ) -> torch.Tensor | None:
        """Return how strongly the prior holds rows, float32 [B, D]; None where they do not learn."""
        if batch.links is None or self.prior is None or not found.requires_grad:
            return None
        dim = found.size(1)
        return self.prior.strengths(name, batch.links.rarities, dim, self.spreads, scale) * rows.scale

    def _list_sums(
        self, name: str, rows: FeatureRows, weights: torch.Tensor | None, batch: Inputs
    ) -> torch.Tensor:
        """Return the sums of a list, float32 [B, D]; weights: of values, 1 where it is None."""
        found = rows.found[name]
        if not isinstance(found, DistinctRows):
            values = found.values()
            found = DistinctRows(values, torch.arange(len(values), device=values.device), found.lengths())
        if weights is None:
            weights = found.rows.new_ones(len(found.places))
        if batch.links is None:
            return LIST_SCALE * sums_over_roots(found, weights)
        place, links = self.lists.index(name), batch.links
        link = links.sources[place], links.scales[place] * LIST_SCALE, links.own[place]
        strengths = self._strengths(name, found.rows, LIST_SCALE, rows, batch)
        return shared_sums(found, weights, link, strengths, self.add_over_ranks)
