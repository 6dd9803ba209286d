"""How much each item of a history counts: by how many came after it, and by how long ago it was.

What a user had last says more of what comes next than what was had before, and what was had in the same
sitting more than what was had a year ago; how much more is learned. One half of a vector looks near, the
other one far:

    half h of the vector = sum_j w_hj (half h of row j) / sqrt(sum_j w_hj)
    w_hj                 = exp(places_h[how many came after j] + gaps_h[bucket of the seconds since j])

Shapes: B events, V items of all histories, D numbers in a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from recsuite.config.sections import NUM_GAPS
from recsuite.models.layers import repeated, summed

NUM_HALVES = 2
# Of the logarithm of a weight, and what keeps an empty history from being divided by zero.
MOST_LOG_WEIGHT, LEAST_SUM = 10.0, 1e-3


class Members(NamedTuple):
    """What is known of the items of histories beside their rows.

    labels: float32 [V]; places: how many items of its history came after each, int32 [V]; gaps: the bucket of
    the seconds from each to the event, see `recsuite.gaps`, int32 [V]; ages: those seconds themselves, int32
    [V], from each to the last event that reads its list. draws: a number drawn for each, by which dropout is,
    int32 [V]. Each is empty for a model that does not take it.
    """

    labels: torch.Tensor
    places: torch.Tensor
    gaps: torch.Tensor
    ages: torch.Tensor
    draws: torch.Tensor


class Recency(nn.Module):
    """The vector of a history, by weights that are learned.

    num_places: items beyond them count as the last one.
    """

    def __init__(self, num_places: int) -> None:
        super().__init__()
        # To begin with, the near half counts an item by one over its place, the far half counts all alike.
        near = -torch.arange(1, num_places + 1, dtype=torch.float32).log()
        self.places = nn.Parameter(torch.stack([near, torch.zeros_like(near)]))
        self.gaps = nn.Parameter(torch.zeros(NUM_HALVES, NUM_GAPS))

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor, members: Members) -> torch.Tensor:
        """float32 [B, D], of the rows of all histories, float32 [V, D]; lengths: how many are each event's,
        [B].
        """
        lengths = lengths.to(torch.int64)
        places = members.places.clamp(max=self.places.size(1) - 1)
        event = repeated(torch.arange(len(lengths), device=rows.device), lengths, len(rows))
        weights, sums = [], []
        # Half by half: on a CPU a sum by an index takes many times as long where tensors have two dimensions.
        for of_place, of_gap in zip(self.places, self.gaps, strict=True):
            weight = of_place.index_select(0, places) + of_gap.index_select(0, members.gaps)
            weights.append(weight.clamp(max=MOST_LOG_WEIGHT).exp())
            sums.append(rows.new_zeros(len(lengths)).index_add(0, event, weights[-1]))
        halves: torch.Tensor = _WeightedHalves.apply(rows, torch.stack(weights), lengths)
        scales = (torch.stack(sums, dim=1) + LEAST_SUM).rsqrt().unsqueeze(2)
        width = rows.size(1) // NUM_HALVES
        return (halves.view(len(lengths), NUM_HALVES, width) * scales).flatten(1)


class _WeightedHalves(torch.autograd.Function):
    """The sum of each list of rows, each half of a row times a weight of its own: float32 [B, D]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, lengths)
        # Each row as two of half the width: neither they nor their products are copied.
        first = NUM_HALVES * torch.arange(len(rows), device=rows.device)
        places = torch.cat([first + half for half in range(NUM_HALVES)])
        # In numbers and not -1: a batch may have no histories.
        width = rows.size(1) // NUM_HALVES
        halves = rows.reshape(NUM_HALVES * len(rows), width)
        sums = summed(halves, places, weights.reshape(-1), lengths.repeat(NUM_HALVES))
        return sums.view(NUM_HALVES, len(lengths), width).transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights, lengths = ctx.saved_tensors
        shape = len(rows), NUM_HALVES, rows.size(1) // NUM_HALVES
        each = repeated(gradient, lengths, len(rows)).view(shape)
        of_weights = (each * rows.view(shape)).sum(dim=2).t()
        return each.mul_(weights.t().unsqueeze(2)).view(rows.shape), of_weights, None
