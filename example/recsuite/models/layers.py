"""Layers: hidden layers, sums over lists of rows, the row scale, and weights of a history.

The last items of a user say more about the next one than earlier items, and those of the same sitting more
than those of a year ago. How much more is learned. One half of a vector starts with most weight on near
items, the other half with equal weights:

    half h of the vector = sum_j w_hj (half h of row j) / sqrt(sum_j w_hj)
    w_hj                 = exp(places_h[how many came after j] + gaps_h[bucket of the seconds since j])

With events of several types, such as views and purchases, each type has its own weights of gaps.

Shapes: B events, V values of all lists, R distinct rows of D numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from recsuite.models.inputs import Members
from recsuite.time_buckets import NUM_TIME_BUCKETS


def make_mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers from each width to the next, with ReLU between them; the last one stays linear.

    Args:
        widths: Of the input, the hidden layers and the output.

    Returns:
        A module from float32 [B, first width] to float32 [B, last width].

    Example:
        mlp = rs.make_mlp([96, 64, 1])
        mlp(vectors)                                          # float32 [B, 1], of float32 [B, 96]
    """
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    # The last layer stays linear: its output may be negative.
    return nn.Sequential(*layers[:-1])


def zero_last(layers: nn.Sequential) -> None:
    """Make the output zero at first: untrained layers do not disturb the training of rows."""
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)


class PairMLP(nn.Sequential):
    """MLP of the factors of a user, an item and their product. Number 0 of a vector, its bias, is unused.

    Its output is zero at first.

    Args:
        embedding_dim: D, the numbers in a vector.
        hidden: Widths of the hidden layers.

    Example:
        mlp = rs.PairMLP(32, (64, 32))
        mlp(users, items, users * items)                      # float32 [B], of float32 [B, 32] each
        mlp.for_all(users, items)                             # float32 [U, N]
    """

    def __init__(self, embedding_dim: int, hidden: Sequence[int]) -> None:
        super().__init__(*make_mlp([3 * (embedding_dim - 1), *hidden, 1]))
        zero_last(self)

    # Takes pairs, and not one input.
    def forward(  # type: ignore[override]
        self, users: torch.Tensor, items: torch.Tensor, product: torch.Tensor
    ) -> torch.Tensor:
        """Return a number for each pair of a user and an item.

        Args:
            users: Vectors, float32 [B, D].
            items: Vectors, float32 [B, D].
            product: users * items, float32 [B, D].

        Returns:
            float32 [B].
        """
        bias, (of_user, of_item, of_product), others = self._parts()
        hidden = torch.addmm(bias, users, of_user.t())
        for inputs, weights in ((items, of_item), (product, of_product)):
            # In place: otherwise it is copied first. Autocast converts no operand of such an operation.
            hidden = hidden.addmm_(inputs.to(hidden.dtype), weights.t().to(hidden.dtype))
        for layer in others:
            hidden = layer(hidden)
        return hidden.squeeze(1)

    def for_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return a number for each user with each item.

        Needs memory for U * N * the widest layer.

        Args:
            users: Vectors, float32 [U, D].
            items: Vectors, float32 [N, D].

        Returns:
            float32 [U, N].
        """
        bias, (of_user, of_item, of_product), others = self._parts()
        # The weights times a user are a matrix for all items, so no product of two vectors is stored. The
        # parts of the user alone and of the item alone are computed once, not for each pair.
        hidden = torch.matmul(items, users.unsqueeze(2) * of_product.t())
        hidden += torch.addmm(bias, users, of_user.t()).unsqueeze(1)
        hidden += items @ of_item.t()
        for layer in others:
            hidden = layer(hidden)
        return hidden.squeeze(2)

    def _parts(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], list[nn.Module]]:
        """Return the first layer's bias, its weights [width, D] for each input, and the other layers."""
        first, *others = self
        assert isinstance(first, nn.Linear)
        # A zero weight for the bias of each vector costs less than copies of the vectors without it.
        weights = nn.functional.pad(first.weight.view(first.out_features, 3, -1), (1, 0))
        # By unbind, and not by indices: each index has a gradient of the size of all.
        return first.bias, weights.unbind(1), others


def biased_products(
    users: torch.Tensor, items: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scores of pairs by biases and factors, as in matrix factorization, and parts of them.

    Args:
        users: Vectors, float32 [B, D]: number 0 is the bias, the others are the factors.
        items: Vectors of the same form, float32 [B, D].

    Returns:
        Both biases plus the product of the factors, float32 [B]; the products of all numbers, float32 [B, D];
        the sum of the squares of both vectors, float32 [B], for a decay, see `WithSquares`.

    Example:
        score, products, squares = rs.biased_products(users, items)
    """
    return _BiasedProducts.apply(users, items)


class _BiasedProducts(torch.autograd.Function):
    """`biased_products`, without the array of all numbers that autograd writes for each column's gradient."""

    @staticmethod
    def forward(ctx: Any, users: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(users, items)
        if _has_loop(ctx, users, items):
            # Not at the top: numba takes 60 MiB, and a GPU needs none of it.
            from recsuite.models.loops import multiply_biased

            scores, squares = users.new_empty(len(users)), users.new_empty(len(users))
            products = torch.empty_like(users)
            multiply_biased(*(each.numpy() for each in (users, items, scores, products, squares)))
            return scores, products, squares
        products = users * items
        scores = products.sum(dim=1) + (users[:, 0] + items[:, 0] - products[:, 0])
        return scores, products, _sums_of_squares(users) + _sums_of_squares(items)

    @staticmethod
    def backward(
        ctx: Any, of_scores: torch.Tensor, of_products: torch.Tensor, of_squares: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        users, items = ctx.saved_tensors
        if _has_loop(ctx, users, items):
            from recsuite.models.loops import multiply_biased_backward

            given = (of_scores.contiguous(), of_products.contiguous(), of_squares.contiguous())
            of_users, of_items = torch.empty_like(users), torch.empty_like(items)
            multiply_biased_backward(*(each.numpy() for each in (users, items, *given, of_users, of_items)))
            return of_users, of_items
        of_both, of_both_squares = of_products + of_scores.unsqueeze(1), 2 * of_squares.unsqueeze(1)
        of_both[:, 0] = of_products[:, 0]
        of_users = torch.addcmul(of_both * items, of_both_squares, users)
        of_items = torch.addcmul(of_both * users, of_both_squares, items)
        of_users[:, 0] += of_scores
        of_items[:, 0] += of_scores
        return of_users, of_items


def _sums_of_squares(vectors: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of each vector, [B]."""
    if vectors.device.type == "cpu":
        return vectors.square().sum(dim=1)
    # Without an array of all squares, which takes as long again to write and to read.
    return torch.linalg.vector_norm(vectors, dim=1).square()


def _has_loop(ctx: Any, users: torch.Tensor, items: torch.Tensor) -> bool:
    """Return True for a step on a CPU, whose loops are compiled. They check neither shapes nor types."""
    is_plain = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in (users, items))
    # Others are an export or a graph, or want a gradient of the gradient.
    is_step = any(ctx.needs_input_grad) and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    return is_plain and is_step and users.shape == items.shape


class NumberLayers(nn.Module):
    """Layers from dense numbers of B users or items to a vector, which is added to their rows.

    After the bottom MLP of Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", 2019; each number has another input that tells if it is missing.

    columns: of the numbers among all dense numbers.
    """

    def __init__(self, columns: Sequence[int], embedding_dim: int) -> None:
        super().__init__()
        self.columns = list(columns)
        self.layers = make_mlp([2 * len(self.columns), embedding_dim, embedding_dim])
        zero_last(self.layers)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return float32 [B, D], of all dense numbers, float32 [B, numbers], NaN for a missing one."""
        # Column by column: a list of indices would be copied to the device, with a wait, in each step.
        mine = torch.stack([numbers[:, column] for column in self.columns], dim=1)
        is_missing = mine.isnan()
        inputs = torch.cat([mine.masked_fill(is_missing, 0.0), is_missing.to(mine.dtype)], dim=1)
        return self.layers(inputs)


class VectorProjection(nn.Module):
    """Linear projection of the vectors of B users or items, such as embeddings of images, to D numbers.

    columns: of the numbers of the vectors among all dense numbers; entity: USER or ITEM. It is zero at first;
    see `training.weights.project_rows` for how it learns.
    """

    def __init__(self, columns: Sequence[int], embedding_dim: int, entity: str) -> None:
        super().__init__()
        self.columns, self.entity = list(columns), entity
        self.linear = nn.Linear(len(columns), embedding_dim, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return float32 [B, D], of all dense numbers, float32 [B, numbers]; zero for a missing vector."""
        return self.linear(numbers[:, self.columns[0] : self.columns[-1] + 1].nan_to_num())


def means(rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the mean of each list of rows times weights, float32 [B, D], zero for an empty list."""
    lengths = lengths.to(torch.int64)
    # Divides the sums and not the weights, which would first need the length of its list for each value.
    return _WeightedSums.apply(rows, weights.unsqueeze(0), lengths) / lengths.clamp(min=1).unsqueeze(1)


def padded_means(
    rows: torch.Tensor,
    counts: torch.Tensor,
    weights: torch.Tensor | None,
    num_lists: int,
    memory: Callable[[], torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Return the mean of each list of rows, float32 [lists, D], zero for an empty list.

    rows: of the last B lists, of L slots each, float32 [B * L, D], of which the first `counts`, int32 [B],
    are used; weights: factors of the rows, float32 [B * L], without a gradient; None for 1; num_lists: B, and
    lists before them that have no slots; memory: returns that of the gradient of the rows, None where the
    gradient shall have its own.
    """
    factors = rows.new_ones(1) if weights is None else weights.detach().view(len(counts), -1)
    factors = torch.where(used_slots(counts, len(rows)), factors, 0.0)
    sums: torch.Tensor = _PaddedSums.apply(rows, factors, memory)
    means = sums / counts.unsqueeze(1).clamp(min=1)
    without = num_lists - len(counts)
    return nn.functional.pad(means, (0, 0, without, 0)) if without else means


def used_slots(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Return a mask of the used slots of lists that are padded to one length, bool [B, slots].

    counts: values of each list, int32 [B]; total: slots of all lists.
    """
    return torch.arange(total // len(counts), device=counts.device) < counts.unsqueeze(1)


def repeated(values: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Repeat each value as often as its list is long, [total, ...]; total: the sum of the lengths."""
    # With the total, the device need not be asked for it.
    return values.repeat_interleave(lengths, dim=0, output_size=total)


def scaled(held: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return rows from the contents of the tables; the gradient stays that of the rows.

    The gradient is passed on unscaled. So row-wise Adagrad sums the same squares for any scale, as if the
    rows themselves had decayed. `training/state.py` divides the learning rate by the scale instead.
    """
    return _Scale.apply(held, scale)


# Share of its gradient by which a bias learns, see `with_slow_bias`. Chosen with --l2 on validation parts.
BIAS_RATE = 1 / 16


def with_slow_bias(vectors: torch.Tensor, rate: float = BIAS_RATE) -> torch.Tensor:
    """Return vectors whose number 0, the bias, learns more slowly than the factors.

    Row-wise Adagrad divides all numbers of a row by one root. The gradient of a bias is the error itself,
    many times that of a factor, so without this a bias takes large steps, and the factors take small ones.

    Args:
        vectors: float32 [B, D].
        rate: Share of its gradient that the bias gets.

    Returns:
        The same values, float32 [B, D].

    Example:
        users = rs.with_slow_bias(rows.sum(["user", "age"]))
    """
    return _SlowBias.apply(vectors, rate)


class _WeightedSums(torch.autograd.Function):
    """Sum of each list of rows times weights, float32 [B, D]; weights: of H parts of each row, [H, V]."""

    # On a CPU this takes a twentieth of the time of torch.segment_reduce, and of embedding_bag's backward.

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # Rows are needed only for a gradient of the weights.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights, lengths)
        # Each row as H rows of a part of the width: neither they nor their products are copied. The rows are
        # looked up already: embedding_bag is only a fast sum over lists of row 0, 1, 2, ...
        num_parts, width = len(weights), rows.size(1) // len(weights)
        index = torch.arange(rows.size(0), device=rows.device)
        if num_parts > 1:
            index = torch.cat([num_parts * index + part for part in range(num_parts)])
        parts = rows.reshape(num_parts * rows.size(0), width)
        all_lengths = lengths.expand(num_parts, -1).reshape(-1)
        offsets = all_lengths.cumsum(0) - all_lengths
        sums = nn.functional.embedding_bag(
            index, parts, offsets, mode="sum", per_sample_weights=weights.reshape(-1)
        )
        return sums.view(num_parts, lengths.size(0), width).transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        rows, weights, lengths = ctx.saved_tensors
        (num_parts, num_rows), dim = weights.shape, gradient.size(1)
        # Numbers and not -1: a batch may have no lists.
        shape = num_rows, num_parts, dim // num_parts
        gradients = repeated(gradient, lengths, num_rows).view(shape)
        of_weights = None if rows is None else (gradients * rows.view(shape)).sum(dim=2).t()
        return gradients.mul_(weights.t().unsqueeze(2)).view(num_rows, dim), of_weights, None


class _PaddedSums(torch.autograd.Function):
    """Sum of each list of rows times factors, [B, D], of rows [B * L, D] and factors [B, L]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factors: torch.Tensor, memory: Any) -> torch.Tensor:
        ctx.save_for_backward(factors)
        ctx.memory = memory
        # Not a matrix product, whose order of additions depends on the library and the size.
        return (rows.view(*factors.shape, -1) * factors.unsqueeze(2)).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (factors,), memory = ctx.saved_tensors, ctx.memory and ctx.memory()
        gradient, factors = gradient.unsqueeze(1), factors.unsqueeze(2)
        if memory is None:
            return (gradient * factors).flatten(0, 1), None, None
        torch.mul(gradient, factors, out=memory.view(*factors.shape[:2], -1))
        return memory, None, None


class _SlowBias(torch.autograd.Function):
    """Identity whose gradient of number 0 is multiplied by a rate."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, rate: float) -> torch.Tensor:
        ctx.rate = rate
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        gradient[:, 0] *= ctx.rate
        return gradient, None


class _Scale(torch.autograd.Function):
    """Product with a scale that the gradient does not contain."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return held * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


NUM_HALVES = 2
# With types of events, factor of the logarithm of a weight, so that types come to differ within the few
# hundred steps of a training. Chosen among 1, 6, 20 and 60 on the validation of three drawn shops.
TYPE_RATE = 20.0
# Limit of the logarithm of a weight, and the smallest sum, so that an empty history does not divide by zero.
MOST_LOG_WEIGHT, LEAST_SUM = 10.0, 1e-3


# Factor of the weights of `OwnItems`, because AdamW moves each by about its rate in a step, and they go to
# several. Chosen among 20, 60 and 200, by the tests of two drawn shops.
OWN_RATE = 60.0


class OwnItems(nn.Module):
    """Number that each item of a history adds to the score of this item itself, by its type and its age.

    Without it, each pair of an item in a history and the same item as a candidate has to learn alone that an
    item in the cart is often bought. num_types: see `Recency`.
    """

    def __init__(self, num_types: int = 1) -> None:
        super().__init__()
        # Zero at first: an untrained model repeats nothing. An age without training events uses the number
        # of its type.
        self.types = nn.Parameter(torch.zeros(num_types))
        self.gaps = nn.Parameter(torch.zeros(num_types * NUM_TIME_BUCKETS))

    def forward(self, members: Members, used: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [V], zero in an unused slot. used: see `Recency`."""
        gaps = typed_gaps(members, len(self.types))
        of_types = picked(self.types, gaps // NUM_TIME_BUCKETS, used)
        added = OWN_RATE * (of_types + picked(self.gaps, gaps, used))
        return added if used is None else torch.where(used, added, 0.0)


def picked(weights: torch.Tensor, index: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    """Return some of P learned weights, float32 [V]. index: int32 [V]; used: see `Recency`."""
    return weights.index_select(0, index) if used is None else _Picked.apply(weights, index)


class _Picked(torch.autograd.Function):
    """`index_select`, whose gradient on a GPU has the same bits each time.

    There an addition by an index is in no fixed order; many values of a few weights would also wait for each
    other.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.number = len(weights)
        return weights.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        numbers = torch.arange(ctx.number, dtype=index.dtype, device=index.device)
        return gradient @ (index.unsqueeze(1) == numbers).to(gradient.dtype), None


def typed_gaps(members: Members, num_types: int) -> torch.Tensor:
    """Return the time bucket of each item of a history among those of all types, int32 [V]."""
    if num_types == 1:
        return members.gaps
    # The label is the position of the type, from 1 on, and 0 in an unused slot.
    return members.gaps + NUM_TIME_BUCKETS * (members.labels.int() - 1).clamp(min=0)


class Recency(nn.Module):
    """Vector of a history, with learned weights.

    num_places: items further back use the weight of the last place; num_types: of events, see
    `Schema.event_types`.
    """

    def __init__(self, num_places: int, num_types: int = 1) -> None:
        super().__init__()
        # Initial weights: in the near half one over the place of an item, in the far half equal.
        near = -torch.arange(1, num_places + 1, dtype=torch.float32).log()
        self.places = nn.Parameter(torch.stack([near, torch.zeros_like(near)]))
        self.num_types, self.rate = num_types, TYPE_RATE if num_types > 1 else 1.0
        self.gaps = nn.Parameter(torch.zeros(NUM_HALVES, num_types * NUM_TIME_BUCKETS))

    def forward(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        members: Members,
        used: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return float32 [B, D].

        rows: of all histories, float32 [V, D]; lengths: of the histories, [B]; used: False in unused slots of
        padded histories, bool [V]; None if there are none.
        """
        lengths = lengths.to(torch.int64)
        distances = members.places.clamp(max=self.places.size(1) - 1)
        gaps = typed_gaps(members, self.num_types)
        event = repeated(torch.arange(lengths.size(0), device=rows.device), lengths, rows.size(0))
        weights, sums = [], []
        # Half by half: on a CPU a sum by an index takes many times as long for two-dimensional tensors.
        for of_place, of_gap in zip(self.places, self.gaps, strict=True):
            weight = picked(of_place, distances, used) + self.rate * picked(of_gap, gaps, used)
            weights.append(weight.clamp(max=MOST_LOG_WEIGHT).exp())
            if used is None:
                sums.append(rows.new_zeros(lengths.size(0)).index_add(0, event, weights[-1]))
        stacked = torch.stack(weights)
        if used is None:
            totals = torch.stack(sums, dim=1)
        else:
            stacked = torch.where(used, stacked, 0.0)
            # In a fixed order on a GPU too, see `_Picked`.
            totals = _WeightedSums.apply(rows.new_ones(rows.size(0), NUM_HALVES), stacked, lengths)
        halves: torch.Tensor = _WeightedSums.apply(rows, stacked, lengths)
        scales = (totals + LEAST_SUM).rsqrt().unsqueeze(2)
        width = rows.size(1) // NUM_HALVES
        return (halves.view(lengths.size(0), NUM_HALVES, width) * scales).flatten(1)
