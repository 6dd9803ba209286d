"""Rating model with co-occurrence features: the best one known if events later than a rating may be used.

The vector of a user gets the sum over the items that the user rated, and that of an item the sum over its
users, each divided by the root of their number (Koren, "Factorization Meets the Neighborhood", 2008; Rendle,
Zhang and Koren, "On the Difficulty of Evaluating Baselines", 2019, call the lists of users flipped).

A prior shrinks rows:

    noise / variance / n        how strongly each of its n events shrinks a row

A row is then the most probable one under a normal prior with that variance, for any number of events and of
passes: rows with few events shrink more than those with many (Salakhutdinov and Mnih, "Probabilistic Matrix
Factorization", 2007). The noise is the mean square of what the model cannot predict. It is measured on
validation events, because on training events it would decrease while the model overfits.

Shapes: B events, V values of a list, D numbers in a row, G groups of the prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from recsuite.datasets.schema import HISTORY, ITEM, ITEM_HISTORY, LISTS, USER, Feature
from recsuite.models.heads import Interaction
from recsuite.models.layers import (
    DistinctRows,
    means,
    repeated,
    scaled,
    shared_sums,
    sums_over_root_lengths,
    with_prior_gradient,
)
from recsuite.models.rows import FeatureRows, Inputs

# Groups of rows with about equal spreads: the factors of ids, and the rows of lists. Features that many users
# share have so many events that the prior does not matter, and biases are alike wherever labels are.
GROUPS = ("factors", "lists")
# The standard deviation of the normal prior of a spread: small, so that few validation events change little.
SPREAD_STD = 0.15
# The largest change of a spread in one step: a step of Gauss and Newton is accurate only near the optimum.
LARGEST_CHANGE = 0.35
# Variances of a bias and of a factor of a row, and of a row in a list, for labels that are about 1 apart.
BIAS, FACTOR = 0.25, 0.0375
LIST_BIAS, LIST_FACTOR = 0.25, 0.075
# The same for rows of event features, such as the day of a user, which add less.
EVENT_BIAS, EVENT_FACTOR = 0.1, 0.015


class FeaturePrior(NamedTuple):
    """Prior of the rows of one feature.

    rarity: index of the rarity of its rows in a batch; times: factor of the rarity; bias, factor: the
    variances of a bias and of a factor, for labels that are about 1 apart.
    """

    rarity: int
    times: float = 1.0
    bias: float = BIAS
    factor: float = FACTOR


@dataclass
class Prior:
    """Prior of the rows of a model.

    held: the prior of each feature; noise: see the module, in squares of labels; unit: typical difference of
    labels; groups: feature to its index in `GROUPS`, if it is in one.
    """

    held: Mapping[str, FeaturePrior]
    noise: float
    unit: float
    groups: Mapping[str, int]

    def strengths(
        self, name: str, rarities: torch.Tensor, dim: int, spreads: torch.Tensor, scale: float = 1.0
    ) -> torch.Tensor:
        """Return how strongly the prior shrinks the rows of a feature, float32 [B, D].

        rarities: float32 [3 + features of events, B], see `layers.Links`; spreads: float32 [G], see
        `learned_spreads`; scale: factor of the rows in the model.
        """
        held = self.held[name]
        # A bias has the unit of labels, and so has a product of two factors.
        precisions = rarities.new_full((dim,), 1 / (held.factor * self.unit))
        precisions[0] = 1 / (held.bias * self.unit**2)
        if name in self.groups:
            precisions[first_number(self.groups[name]) :] *= (-2 * spreads[self.groups[name]]).exp()
        # The loss is a mean over B of squares, whose derivative has the factor 2.
        each = rarities[held.rarity] * (2 * self.noise * held.times * scale**2 / rarities.size(1))
        return torch.outer(each, precisions)


def standard_error(rmse: float, number: int) -> float:
    """Return the standard error of a root mean square of `number` errors, if they are normal."""
    return rmse / math.sqrt(2 * number)


def first_number(group: int) -> int:
    """Return the first number of a row that is in a group: the bias of an id, number 0, is in none."""
    return 1 if GROUPS[group] == "factors" else 0


def learned_spreads(
    spreads: torch.Tensor, products: torch.Tensor, errors: torch.Tensor, noise: float
) -> torch.Tensor:
    """Return the spread of each group relative to its prior, as logarithms, float64 [G].

    One step of Gauss and Newton from the spreads so far, float64 [G], to the most probable ones, which have a
    normal prior around 0. products: of the directions of groups with each other, summed over the validation
    events, float64 [G, G]; errors: of the directions with the errors of predictions, float64 [G]. A direction
    is the derivative of a prediction by the logarithm of the factor of a group's rows.

    Rendle, "Learning recommender systems with adaptive regularization", 2012, learns strengths from
    validation events too, by their gradients.
    """
    precision = torch.eye(len(spreads), dtype=torch.float64) / SPREAD_STD**2
    change = torch.linalg.solve(products / noise + precision, errors / noise - precision @ spreads)
    return spreads + change.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)


# Factor of rows of lists: in a step a sum over a list changes many times as much as a row.
LIST_SCALE = 0.2
# Factor of rows of features that many items or users share: each event of these moves them.
SIDE_SCALE = 0.2
# Additional weight of an item of a history for each unit that its label is above the mean.
LIKING = 0.3


class CoOccurrence(Interaction):
    """Rating model of --preset co_occurrence: co-occurrence features, and a prior of the rows.

    features: of the data, those with lists last; embedding_dim: D numbers in a row, the first is its bias;
    mlp_dims: widths of hidden layers; mean_label: of the training events; unit: the scale of differences of
    labels, see `Schema.unit`; ids: the names of the features with the ids of users and of items. The rows of
    lists are in tables of their own. A training sets three attributes: prior, of the rows; add_over_ranks,
    which sums a tensor over all ranks for the gradient of lists; spreads, see `learned_spreads`.

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
        """Return the predictions, float32 [B], and their derivatives, float32 [G, B]. Only with a prior.

        The derivatives are by the logarithm of the factor of the rows of each group of the prior.
        """
        sides = self._user_parts(rows, batch), self._item_parts(rows, batch)
        user, item = (
            self._vectors(parts, rows, batch, side) for parts, side in zip(sides, (USER, ITEM), strict=True)
        )
        # Forward mode: one pass for the predictions and their derivatives in the direction of a group.
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
        """Return the sum of the features of one group of the prior, float32 [B, D]."""
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
        if ITEM_HISTORY in self.lists:
            parts[ITEM_HISTORY] = self._list_sums(ITEM_HISTORY, rows, None, batch)
        return parts

    def _parts(self, rows: FeatureRows, batch: Inputs, side: str) -> dict[str, torch.Tensor]:
        """Return what each feature of a side adds to its vectors, without lists, float32 [B, D] each."""
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
        """Return the rows of a feature, with their prior if they are trained."""
        strengths = self._strengths(name, found, self.scales[name], rows, batch)
        if strengths is None:
            return found
        if name in rows.lists:
            strengths = repeated(strengths, lengths.to(torch.int64), len(found))
        return with_prior_gradient(found, strengths)

    def _strengths(
        self, name: str, found: torch.Tensor, scale: float, rows: FeatureRows, batch: Inputs
    ) -> torch.Tensor | None:
        """Return the strength of the prior of rows, float32 [B, D]; None if they are not trained."""
        if batch.links is None or self.prior is None or not found.requires_grad:
            return None
        dim = found.size(1)
        return self.prior.strengths(name, batch.links.rarities, dim, self.spreads, scale) * rows.scale

    def _list_sums(
        self, name: str, rows: FeatureRows, weights: torch.Tensor | None, batch: Inputs
    ) -> torch.Tensor:
        """Return the sums of a list, float32 [B, D]; weights: of values, None for 1."""
        found = rows.found[name]
        if not isinstance(found, DistinctRows):
            values = found.values()
            found = DistinctRows(values, torch.arange(len(values), device=values.device), found.lengths())
        if weights is None:
            weights = found.rows.new_ones(len(found.places))
        if batch.links is None:
            return LIST_SCALE * sums_over_root_lengths(found, weights)
        place, links = self.lists.index(name), batch.links
        link = links.sources[place], links.scales[place] * LIST_SCALE, links.own[place]
        strengths = self._strengths(name, found.rows, LIST_SCALE, rows, batch)
        return shared_sums(found, weights, link, strengths, self.add_over_ranks)
