"""Sums over lists of rows: what a user had, and who had an item.

Shapes: B events, V values of all lists with each event's own behind its list, R distinct rows of D numbers, S
lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from recsuite.models.layers import repeated, summed


class Links(NamedTuple):
    """Which list each event takes, and what is to be made of its sum, see `datasets.batching.batch.Batch`.

    sources: int64 [S, B]; scales, own: float32 [S, B]; reads: how many values of its list stand before each
    event, int32 [B], empty where an event takes all of them; rarities: float32 [3 + features of events, B],
    of the event's user, of its item, of the event among all, and of what it has of its own: its weight over
    the number of events that train their rows.
    """

    sources: torch.Tensor
    scales: torch.Tensor
    own: torch.Tensor
    reads: torch.Tensor
    rarities: torch.Tensor


def sums_over_roots(found: DistinctRows, weights: torch.Tensor) -> torch.Tensor:
    """The sum of each list of rows times weights, over the root of its length, float32 [B, D].

    found: without the events' own; weights: float32, of each value.
    """
    lengths = found.counts.to(torch.int64)
    sums = summed(found.rows, found.places, weights, lengths)
    return sums * lengths.clamp(min=1).to(sums.dtype).rsqrt().unsqueeze(1)


@dataclass(frozen=True)
class DistinctRows:
    """The rows of one feature for B events, each only once, in the place of `rows.LookedUp`.

    rows: float32 [R, D], also those of other features; places: of each value its row, int64 [V]; counts:
    values of each event, int32 [B]; is_single: whether each event has one.
    """

    rows: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    is_single: bool = False

    def values(self) -> torch.Tensor:
        """A row for each value, float32 [V, D]."""
        return self.rows.index_select(0, self.places)

    def lengths(self) -> torch.Tensor:
        """How many of them are each event's, [B]."""
        return self.counts

    def events(self) -> torch.Tensor:
        """The event of each value, int32 [V], a new tensor."""
        if self.is_single:
            return torch.arange(len(self.places), dtype=torch.int32, device=self.places.device)
        return torch.repeat_interleave(self.counts.to(torch.int32), output_size=len(self.places))

    def offsets(self) -> torch.Tensor:
        """Where the values of each event begin, [B], of the type of `places`."""
        lengths = self.counts.to(self.places.dtype)
        return lengths.cumsum(0, dtype=lengths.dtype) - lengths

    def shares(self) -> torch.Tensor:
        """One over the number of values of each event, float32 [B]."""
        return self.counts.clamp(min=1).to(torch.float32).reciprocal()


def shared_sums(
    found: DistinctRows,
    weights: torch.Tensor,
    links: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    strengths: torch.Tensor | None,
    add_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """The sum that each event takes, without its own row where that is in it, times its scale,
    float32 [B, D]. Collective in the backward where `add_over_ranks` is.

    found: the rows of lists, with each event's own behind its; weights: float32 [V]; links: sources, scales
    and own of one list, [B] each; strengths: of the prior of the events' own rows, float32 [B, D].
    add_over_ranks: adds a tensor up over all ranks; with it the gradient is centred. All rows of a list
    change a sum in the same direction, so the step that they have in common is as many times too long as the
    list has rows, and training diverges. What is common to all lists says nothing of anybody, so it is taken
    out of the gradient.
    """
    lengths = found.counts.to(torch.int64)
    sums: torch.Tensor = _SharedSums.apply(
        found.rows, found.places, weights, lengths, *links, strengths, add_over_ranks
    )
    return sums


def held_by_prior(rows: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    """The same rows; the gradient gets strengths times rows in addition, which draws them to zero.

    In the gradient and not in the loss: the loss says how wrong predictions are. strengths: float32, of the
    shape of rows or one that broadcasts to it.
    """
    held: torch.Tensor = _HeldByPrior.apply(rows, strengths)
    return held


class _SharedSums(torch.autograd.Function):
    """See `shared_sums`. Nothing is copied for each value: neither rows, nor gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        places: torch.Tensor,
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
        own_places = places.index_select(0, ends)
        own_rows = rows.index_select(0, own_places)
        of_prior = None if strengths is None else own_rows * strengths
        ctx.save_for_backward(
            places, in_lists, lengths, ends, own_places, sources, scales, own_weights, of_prior
        )
        ctx.add_over_ranks, ctx.num_rows = add_over_ranks, len(rows)
        sums = summed(rows, places, in_lists, lengths).index_select(0, sources)
        sums.addcmul_(own_rows, own_weights.unsqueeze(1), value=-1)
        return sums.mul_(scales.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        places, in_lists, lengths, ends, own_places, sources, scales, own_weights, of_prior = (
            ctx.saved_tensors
        )
        gradient = gradient * scales.unsqueeze(1)
        of_lists = torch.zeros_like(gradient).index_add_(0, sources, gradient)
        # Row after row the lists that have it: a sum over each gives its gradient, as one gave that of lists.
        # Narrow numbers are sorted in a third of the time.
        order = places.to(torch.int32).argsort()
        lists = repeated(torch.arange(len(lengths), device=places.device), lengths, len(places))
        # Not bincount, which asks a device for the largest number and waits for it.
        counts = places.new_zeros(ctx.num_rows).index_add_(0, places, torch.ones_like(places))
        of_rows = summed(of_lists, lists.index_select(0, order), in_lists.index_select(0, order), counts)
        of_rows.index_add_(0, own_places, gradient * -own_weights.unsqueeze(1))
        if ctx.add_over_ranks is not None:
            # Each event takes its share out of its list, as much from each row: in a pass that is from each
            # row as much as it has events.
            is_there = (scales > 0).to(scales.dtype)
            shares = torch.zeros_like(scales).index_add_(0, sources, is_there) / (lengths - 1).clamp(min=1)
            of_values = repeated(shares, lengths, len(places)).index_fill(0, ends, 0.0)
            taken = torch.zeros_like(of_rows[:, 0]).index_add_(0, places, of_values)
            total = ctx.add_over_ranks(torch.cat([of_rows.sum(0), is_there.sum().view(1)]))
            of_rows.addr_(taken, total[:-1] / total[-1].clamp(min=1), alpha=-1)
        if of_prior is not None:
            of_rows.index_add_(0, own_places, of_prior)
        return of_rows, *[None] * 8


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
