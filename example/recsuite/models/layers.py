"""What the heads are made of: hidden layers, means of lists of rows, and the scale of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn


def make_mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers from each width to the next, with ReLU between them; the last one stays linear.

    widths: of the input, the hidden layers and the output.

        mlp = rs.make_mlp([96, 64, 1])
        mlp(vectors)                                          # float32 [B, 1], of float32 [B, 96]
    """
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    # The last layer stays linear: what comes out may be negative.
    return nn.Sequential(*layers[:-1])


class PairMLP(nn.Sequential):
    """MLP of the factors of a user, an item and their product; number 0 of a vector is its bias, and unused
    here.

    embedding_dim: D numbers in a vector; hidden: widths of the hidden layers.

        mlp = rs.PairMLP(32, (64, 32))
        mlp(users, items)                                     # float32 [B], of float32 [B, 32] both
        mlp.for_all(users, items)                             # float32 [U, N]
    """

    def __init__(self, embedding_dim: int, hidden: Sequence[int]) -> None:
        super().__init__(*make_mlp([3 * (embedding_dim - 1), *hidden, 1]))

    # Of pairs, and not of one input.
    def forward(  # type: ignore[override]
        self, users: torch.Tensor, items: torch.Tensor, product: torch.Tensor
    ) -> torch.Tensor:
        """Return a number for each pair of a user and an item, float32 [B]; product: of their vectors."""
        first, weights, others = self._parts()
        hidden = torch.addmm(first.bias, users, weights[:, 0].t())
        hidden = torch.addmm(hidden, items, weights[:, 1].t())
        hidden = torch.addmm(hidden, product, weights[:, 2].t())
        for layer in others:
            hidden = layer(hidden)
        return hidden.squeeze(1)

    def for_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return a number for each user with each item, float32 [U, N]. Takes memory for U * N * the widest
        layer.
        """
        first, weights, others = self._parts()
        # The weights times a user are a matrix for all items, so no product of two vectors is stored. What
        # the user alone and the item alone add is computed once, not for each pair.
        hidden = torch.matmul(items, users.unsqueeze(2) * weights[:, 2].t())
        hidden += torch.addmm(first.bias, users, weights[:, 0].t()).unsqueeze(1)
        hidden += items @ weights[:, 1].t()
        for layer in others:
            hidden = layer(hidden)
        return hidden.squeeze(2)

    def _parts(self) -> tuple[nn.Linear, torch.Tensor, list[nn.Module]]:
        """Return the first layer, its weights for user, item and product, [width, 3, D], and the others.

        Weights of zero for the biases cost less than copies of the vectors without them, side by side.
        """
        first, *others = self
        assert isinstance(first, nn.Linear)
        # A zero in front of each third, where a vector has its bias.
        return first, nn.functional.pad(first.weight.view(first.out_features, 3, -1), (1, 0)), others


class NumberLayers(nn.Module):
    """From the dense numbers of B users or items to a vector, which counts like a row of theirs.

    After the bottom MLP of Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", 2019; a number that is missing has an input of its own that says so.
    """

    def __init__(self, places: Sequence[int], embedding_dim: int) -> None:
        super().__init__()
        self.places = list(places)
        self.layers = make_mlp([2 * len(self.places), embedding_dim, embedding_dim])
        # Nothing at first: what is learned of the rows is not disturbed by numbers of which nothing is known.
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """float32 [B, D], of all dense numbers, float32 [B, numbers], NaN where there is none."""
        # Column by column: a list of places would be copied to the device, and waited for, in each step.
        mine = torch.stack([numbers[:, place] for place in self.places], dim=1)
        is_missing = mine.isnan()
        inputs = torch.cat([mine.masked_fill(is_missing, 0.0), is_missing.to(mine.dtype)], dim=1)
        vectors: torch.Tensor = self.layers(inputs)
        return vectors


def means(rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The mean of each list of rows times weights, float32 [B, D], zero where the list is empty."""
    lengths = lengths.to(torch.int64)
    # The weights are divided and not the rows: they have one number each, rows have D.
    shares = weights / repeated(lengths.clamp(min=1), lengths, len(weights))
    sums: torch.Tensor = _WeightedSums.apply(rows, shares, lengths)
    return sums


def summed(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """The sum of each list of rows times weights, float32 [lists, D]; places: of rows, list after list."""
    offsets = lengths.cumsum(0) - lengths
    return torch.nn.functional.embedding_bag(places, rows, offsets, mode="sum", per_sample_weights=weights)


def repeated(values: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Each value as often as its list is long, [total, ...]; total is the sum of the lengths."""
    # Given the total, a device need not be asked for it.
    return values.repeat_interleave(lengths, dim=0, output_size=total)


def scaled(held: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows from what the tables hold; the gradient stays that of the rows.

    The derivative would be the gradient times the scale. Passed on unscaled, row-wise Adagrad sums the same
    squares whatever the scale has become, as if it had shrunk the rows themselves; that its step is then one
    of the rows is up to the learning rate, which `training/optimizer.py` divides by the scale.
    """
    rows: torch.Tensor = _Scale.apply(held, scale)
    return rows


class _WeightedSums(torch.autograd.Function):
    """The sum of each list of rows times weights; the weights get no gradient.

    On a CPU a twentieth of the time of torch.segment_reduce, and of embedding_bag's own backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights, lengths)
        # The rows are looked up already: embedding_bag is used as a fast sum over lists of row 0, 1, 2, ...
        return summed(rows, torch.arange(len(rows), device=rows.device), weights, lengths)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weights, lengths = ctx.saved_tensors
        return repeated(gradient, lengths, len(weights)) * weights.unsqueeze(1), None, None


class _Scale(torch.autograd.Function):
    """See `scaled`."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return held * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
