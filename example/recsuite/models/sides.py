"""The vectors of users and of items, summed over their rows in one pass over the distinct rows of a batch.

Nothing is copied for each value: a row that many events have is read where it lies, and its gradient is
summed where it is sent from. Shapes: B events, V values of all features, R distinct rows of D numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding_bag

from recsuite.models.lists import DistinctRows


class SharedRows(dict[str, DistinctRows]):
    """What was looked up of all features for B events: name to rows and places, in the order of the batch.

    rows: float32 [R, D]; in_order: asked in a backward alone, returns the values of all features, one feature
    after the other, those of the first row first, int32 [V], and where in it those of each row begin,
    int32 [R].
    """

    def __init__(
        self,
        found: Mapping[str, DistinctRows],
        rows: torch.Tensor,
        in_order: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__(found)
        self.rows, self.in_order = rows, in_order
        # Made with those of users, and asked for by those of items: the backward is one pass for both.
        self.of_items: torch.Tensor | None = None


class Bag(NamedTuple):
    """A feature that counts on a side with its rows, float32 [V of the feature] each times a weight, 1 where
    it is None, and over the number of rows of the event.
    """

    name: str
    weights: torch.Tensor | None = None


def side_sums(found: SharedRows, sides: Sequence[Sequence[Bag]]) -> tuple[torch.Tensor, ...]:
    """For each side the sum of its features, float32 [B, D]. Each feature counts on one side at most."""
    sums: tuple[torch.Tensor, ...] = _SideSums.apply(found.rows, found, sides)
    return sums


class _SideSums(torch.autograd.Function):
    """See `side_sums`; the weights get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, found: SharedRows, sides: Sequence[Sequence[Bag]]
    ) -> tuple[torch.Tensor, ...]:
        # Not what was given, which will hold the result: a circle would stay until Python looks for such.
        ctx.found, ctx.in_order, ctx.sides = dict(found), found.in_order, sides
        return tuple(_sum_of(rows, found, bags) for bags in sides)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        found, sides = ctx.found, ctx.sides
        side_of = {bag.name: (side, bag.weights) for side, bags in enumerate(sides) for bag in bags}
        num_events = len(gradients[0])
        # Blocks of B gradients, from which each value takes that of its event: those of the sides, and for
        # each list divided by its length.
        blocks, bags, weights = list(gradients), [], []
        for name, of_feature in found.items():
            side, of_values = side_of.get(name, (0, None))
            number = len(of_feature.places)
            if name in side_of and not of_feature.is_single:
                bags.append(of_feature.events().add_(len(blocks) * num_events))
                blocks.append(gradients[side] * of_feature.shares().unsqueeze(1))
            else:
                bags.append(of_feature.events().add_(side * num_events))
            if of_values is None:
                of_values = gradients[0].new_full((number,), float(name in side_of))
            weights.append(of_values)
        order, starts = ctx.in_order()
        of_rows = embedding_bag(
            torch.cat(bags).index_select(0, order),
            torch.cat(blocks),
            starts,
            mode="sum",
            per_sample_weights=torch.cat(weights).index_select(0, order),
        )
        return of_rows, None, None


def _sum_of(rows: torch.Tensor, found: SharedRows, bags: Sequence[Bag]) -> torch.Tensor:
    """The sum of some features, float32 [B, D]."""
    single = [found[bag.name].places for bag in bags if found[bag.name].is_single and bag.weights is None]
    total = embedding_bag(torch.stack(single, dim=1), rows, mode="sum")
    for bag in bags:
        of_feature = found[bag.name]
        if of_feature.is_single and bag.weights is None:
            continue
        sums = embedding_bag(
            of_feature.places, rows, of_feature.offsets(), mode="sum", per_sample_weights=bag.weights
        )
        total.addcmul_(sums, of_feature.shares().unsqueeze(1))
    return total
