"""What the heads are made of: sums of rows, the scale of all rows, and layers.

Knows tensors; nothing of where the rows come from, so that what trains them over many ranks and what serves
them alone compute the same. Shapes: B events, D numbers in a table row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from recsuite.datasets.schema import HISTORY, ITEM, USER, Feature


class LookedUp(Protocol):
    """The rows of one feature for B events, event after event; TorchRec's JaggedTensor is one."""

    def values(self) -> torch.Tensor:
        """The rows, float32 [their number, D]."""

    def lengths(self) -> torch.Tensor:
        """How many of them are each event's, [B]."""


class Labelled(Protocol):
    """What a loss takes of a batch: the features, of which one tells items apart, and labels and weights,
    float32 [B]. The weight of padding is 0.
    """

    features: Any
    labels: torch.Tensor
    weights: torch.Tensor


class Head(nn.Module):
    """What computes with looked-up rows: one vector for the user of each event, and one for the item.

    The rows of a user's features add up to one vector, those of an item's to another; a list-valued feature
    counts with its mean. Number 0 of a vector is the bias; the other D - 1 are the factors. With a history
    the user's vector gets the mean of its rows, which lie in a table of their own, each times a weight.

    What the tables hold, times `row_scale`, are the rows. A decay has to shrink every row in every step, also
    the millions that the step does not look up; multiplying this one number does it for all of them at once.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        super().__init__()
        self.features = list(features)
        self.has_history = HISTORY in [feature.name for feature in features]
        self.row_scale: torch.Tensor
        self.register_buffer("row_scale", torch.tensor(1.0))

    def join(
        self, looked_up: Mapping[str, LookedUp], history_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The vectors of users and items, float32 [B, D] both; history_weights: one for each of its rows."""
        user, item = self._add_up(looked_up, USER), self._add_up(looked_up, ITEM)
        if self.has_history:
            history = looked_up[HISTORY]
            user = user + means(history.values(), history_weights, history.lengths())
        return _Scale.apply(user, self.row_scale), _Scale.apply(item, self.row_scale)

    def _add_up(self, looked_up: Mapping[str, LookedUp], entity: str) -> torch.Tensor:
        vectors = []
        for feature in self.features:
            if feature.entity == entity:
                found = looked_up[feature.name]
                rows = found.values()
                if feature.multi:
                    rows = means(rows, torch.ones_like(rows[:, 0]), found.lengths())
                vectors.append(rows)
        return sum(vectors[1:], start=vectors[0])

    def forward(self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor) -> torch.Tensor:
        """What the loss is computed of, float32 [B, ...]; history_labels: one for each history row."""
        raise NotImplementedError

    def predict(self, looked_up: Mapping[str, LookedUp], history_labels: torch.Tensor) -> torch.Tensor:
        """A number for each user and item, by which items are recommended, float32 [B]."""
        raise NotImplementedError


def make_mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers from each width to the next, with ReLU between them."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def means(rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The mean of each list of rows times weights, float32 [B, D], zero where the list is empty."""
    lengths = lengths.to(torch.int64)
    shares = weights / repeated(lengths.clamp(min=1), lengths, len(weights))
    sums: torch.Tensor = _WeightedSums.apply(rows, shares, lengths)
    return sums


def repeated(values: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Each value as often as its list is long, [total, ...]; total is the sum of the lengths."""
    # Given the total, a device need not be asked for it.
    return values.repeat_interleave(lengths, dim=0, output_size=total)


class _WeightedSums(torch.autograd.Function):
    """The sum of each list of rows times weights; the weights get no gradient.

    On a CPU a twentieth of the time of torch.segment_reduce, and of embedding_bag's own backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights, lengths)
        places = torch.arange(len(rows), device=rows.device)
        offsets = lengths.cumsum(0) - lengths
        return torch.nn.functional.embedding_bag(
            places, rows, offsets, mode="sum", per_sample_weights=weights
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weights, lengths = ctx.saved_tensors
        return repeated(gradient, lengths, len(weights)) * weights.unsqueeze(1), None, None


class _Scale(torch.autograd.Function):
    """Rows from what the tables hold; the gradient stays that of the rows.

    The derivative would be the gradient times the scale. Passed on unscaled, row-wise Adagrad sums the same
    squares whatever the scale has become, as if it had shrunk the rows themselves; that its step is then one
    of the rows is up to the learning rate, which `training/optimizer.py` divides by the scale.
    """

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return held * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
