"""Sums over lists of rows: what a user had, and who had an item.

Shapes: B events, V values of all lists with each event's own behind its list, D numbers in a row, S lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from recsuite.models.layers import repeated


class Links(NamedTuple):
    """Which list each event takes, and what is to be made of its sum, see `datasets.batches.Batch`.

    sources: int64 [S, B]; scales, own: float32 [S, B]; rarities: float32 [3, B], of the event's user, of its
    item and of the event among all: its weight over the number of events that train their rows.
    """

    sources: torch.Tensor
    scales: torch.Tensor
    own: torch.Tensor
    rarities: torch.Tensor


def sums_over_roots(rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum of each list of rows times weights, over the root of its length, float32 [B, D].

    rows: float32 [values, D], without the events' own; weights: float32 [values]; lengths: int [B].
    """
    lengths = lengths.to(torch.int64)
    sums = _summed(rows, weights, lengths)
    return sums * lengths.clamp(min=1).to(sums.dtype).rsqrt().unsqueeze(1)


def shared_sums(
    rows: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    links: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    strengths: torch.Tensor | None,
    add_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """The sum that each event takes, without its own row where that is in it, times its scale,
    float32 [B, D]. Collective in the backward where `add_over_ranks` is.

    rows: float32 [V, D]; weights: float32 [V]; lengths: int [B], with each event's own; links: sources,
    scales and own of one list, [B] each; strengths: of the prior of the events' own rows, float32 [B, D].
    add_over_ranks: adds a tensor up over all ranks; with it the gradient is
    centred. All rows of a list change a sum in the same direction, so the step that they have in common is as
    many times too long as the list has rows, and training diverges. What is common to all lists says nothing
    of anybody, so it is taken out of the gradient.
    """
    lengths = lengths.to(torch.int64)
    sums: torch.Tensor = _SharedSums.apply(rows, weights, lengths, *links, strengths, add_over_ranks)
    return sums


def held_by_prior(rows: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    """The same rows; the gradient gets strengths times rows in addition, which draws them to zero.

    In the gradient and not in the loss: the loss says how wrong predictions are. strengths: float32, of the
    shape of rows or one that broadcasts to it.
    """
    held: torch.Tensor = _HeldByPrior.apply(rows, strengths)
    return held


def _summed(rows: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    # The rows are looked up already: embedding_bag is used as a fast sum over lists of row 0, 1, 2, ...
    places = torch.arange(len(rows), device=rows.device)
    offsets = lengths.cumsum(0) - lengths
    return torch.nn.functional.embedding_bag(places, rows, offsets, mode="sum", per_sample_weights=weights)


class _SharedSums(torch.autograd.Function):
    """See `shared_sums`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        lengths: torch.Tensor,
        sources: torch.Tensor,
        scales: torch.Tensor,
        own: torch.Tensor,
        strengths: torch.Tensor | None,
        add_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        ends = lengths.cumsum(0) - 1
        own_weights = own * weights.index_select(0, ends)
        # Of the lists themselves: an event's own row lies behind its list, and is no part of it.
        in_lists = weights.index_fill(0, ends, 0.0)
        own_rows = rows.index_select(0, ends)
        of_prior = None if strengths is None else own_rows * strengths
        ctx.save_for_backward(in_lists, lengths, ends, sources, scales, own_weights, of_prior)
        ctx.add_over_ranks = add_over_ranks
        sums = _summed(rows, in_lists, lengths).index_select(0, sources)
        sums.addcmul_(own_rows, own_weights.unsqueeze(1), value=-1)
        return sums.mul_(scales.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        in_lists, lengths, ends, sources, scales, own_weights, of_prior = ctx.saved_tensors
        gradient = gradient * scales.unsqueeze(1)
        of_lists = torch.zeros_like(gradient).index_add_(0, sources, gradient)
        of_rows = repeated(of_lists, lengths, len(in_lists)).mul_(in_lists.unsqueeze(1))
        of_own = gradient * -own_weights.unsqueeze(1)
        if ctx.add_over_ranks is not None:
            # Each event takes its share out of its list, as much from each row: in a pass that is from each
            # row as much as it has events.
            shares = torch.zeros_like(scales).index_add_(0, sources, (scales > 0).to(scales.dtype))
            sizes = (lengths - 1).clamp(min=1)
            of_values = repeated(shares / sizes, lengths, len(in_lists)).index_fill(0, ends, 0.0)
            # The rows behind the lists have the weight 0 among `of_rows`.
            number = (scales > 0).sum().to(scales.dtype).view(1)
            total = ctx.add_over_ranks(torch.cat([of_rows.sum(0) + of_own.sum(0), number]))
            of_rows.addr_(of_values, total[:-1] / total[-1].clamp(min=1), alpha=-1)
        if of_prior is not None:
            of_own += of_prior
        of_rows.index_copy_(0, ends, of_own)
        return of_rows, *[None] * 7


class _HeldByPrior(torch.autograd.Function):
    """See `held_by_prior`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, strengths)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows, strengths = ctx.saved_tensors
        return gradient.addcmul(rows, strengths), None
