"""Losses of the library's models: from predictions and a batch to a weighted mean over the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import Self

from recsuite.config.config import Config
from recsuite.datasets.schema import HISTORY, Schema
from recsuite.models.layers import repeated

# Events to score against all drawn items at once: this limits the memory of scores with many items, and keeps
# them in the cache with few.
EVENTS_AT_ONCE = 128
# Devices that compute the losses of one group after the other. A GPU takes all at once, by fewer kernels.
GROUP_AFTER_GROUP = ("cpu",)


# A protocol, because the input of models is defined in a higher layer: `ModelInput` is one.
class Labelled(Protocol):
    """The part of a batch that a loss uses.

    features: one of them identifies items; labels and weights: float32 [B], the weight of padding is 0;
    seen_bits: the negatives that users have seen before, uint8 [B, bytes], a bit for each; counts: of padded
    lists, by the name of the feature.
    """

    features: Any
    labels: torch.Tensor
    weights: torch.Tensor
    seen_bits: torch.Tensor
    counts: Mapping[str, torch.Tensor]

    @property
    def first(self) -> int:
        """Number of the first event here in the global batch."""
        ...

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all events of the global batch, [G, ...], of those here, [B, ...]."""
        ...


# A protocol too: models import only the schema of the data sets. `Columns` is one.
class TrainingData(Protocol):
    """Properties of the data that a loss is made from; `training.columns` has them.

    Example:
        def make_loss(data: rs.TrainingData, args: rs.Config) -> nn.Module:
            return rs.SampledSoftmax.of(data)
    """

    @property
    def schema(self) -> Schema:
        """Names of users, items and labels."""
        ...

    def item_ids(self) -> np.ndarray | None:
        """Return the ids of items, int64, if batches have ids; None if they have table rows.

        Returns:
            int64 [items], or None.
        """
        ...

    def item_shares(self) -> np.ndarray:
        """Return each item's share of the training events.

        Returns:
            float32 [rows of the items' table]; with `item_ids` a share for each of these.
        """
        ...


# Function that makes a loss from the columns and the flags.
LossMaker = Callable[[TrainingData, Config], nn.Module]


class WithSquares(NamedTuple):
    """Output of a model for a loss with a decay.

    A model that returns it has a method `predictions(output)`, which returns the first.

    Args:
        predictions: Of B events, float32 [B].
        squares: Sums of the squares of the numbers of both vectors of each event, float32 [B].

    Example:
        score, _, squares = rs.biased_products(users, items)
        return rs.WithSquares(score, squares)
    """

    predictions: torch.Tensor
    squares: torch.Tensor


class WithOwn(NamedTuple):
    """Output of a model for `SampledSoftmax` that also scores items of the history for themselves.

    vectors: of users and items, float32 [N + B, 2, D], whose product is the score; own: what each item of a
    history adds to the score of this item for the user of the history, float32 [V].
    """

    vectors: torch.Tensor
    own: torch.Tensor


def parts_of(output: torch.Tensor | WithOwn) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the vectors of the output of a ranking model, and what it adds to items' own scores, or None."""
    return output if isinstance(output, WithOwn) else (output, None)


class OwnScores:
    """Part of the scores that `WithOwn.own` adds. own: None for a model without it."""

    def __init__(self, own: torch.Tensor | None, batch: Labelled, num_drawn: int) -> None:
        self.own = own
        if own is not None:
            history = batch.features[HISTORY]
            # The drawn items, which come first, have no history.
            self.items, counts = history.values(), history.lengths()[num_drawn:].long()
            self.events = repeated(torch.arange(len(counts), device=counts.device), counts, len(self.items))
            self.ends: Sequence[int]
            if HISTORY in batch.counts:
                # All have as many slots, so the device is not asked.
                self.ends = range(0, len(self.items) + 1, len(self.items) // len(counts))
            else:
                self.ends = [0, *counts.cumsum(0).tolist()]

    @property
    def zero(self) -> torch.Tensor | float:
        """A zero that is a function of `own`."""
        return 0.0 if self.own is None else self.own[:0].sum()

    def of(self, part: slice, items: torch.Tensor) -> torch.Tensor | float:
        """Return what is added to the scores of M items for a part of the events, float32 [n, M]; or 0.

        items: as in the batch, int64 [M]; or of K groups of S events, [K, M], which gives [K, S, M].
        """
        if self.own is None:
            return 0.0
        members = slice(self.ends[part.start], self.ends[part.stop])
        # Not the distinct items: the device knows their number alone. Of equal ones the first has the sum.
        ordered, mine = items.sort().values, self.items[members].view(*items.shape[:-1], -1)
        column = torch.searchsorted(ordered, mine).clamp(max=items.size(-1) - 1)
        is_there = ordered.gather(-1, column) == mine
        event = self.events[members] - part.start
        added = self.own.new_zeros(part.stop - part.start, items.size(-1))
        added = added.index_put(
            (event, column.view(-1)),
            torch.where(is_there.view(-1), self.own[members], 0.0),
            accumulate=True,
        )
        first = torch.searchsorted(ordered, items)
        # By an index, because its gradient has a fixed order of additions on a GPU; on a CPU that of
        # `index_select` has one.
        if items.dim() > 1:
            groups = torch.arange(len(items), device=items.device).unsqueeze(1)
            return added.view(len(items), -1, items.size(-1))[groups, :, first].transpose(1, 2)
        return added[:, first] if added.is_cuda else added.index_select(1, first)

    def of_each(self, part: slice, own: torch.Tensor, drawn: torch.Tensor) -> tuple[Any, Any]:
        """Return what is added for the own item of each event, float32 [n], and for drawn items, [n, N]."""
        added = self.of(part, torch.cat([own, drawn]))
        if not isinstance(added, torch.Tensor):
            return None, None
        return added[:, : len(own)].diagonal(), added[:, len(own) :]


class SampledSoftmax(nn.Module):
    """Softmax loss of the chosen item against items of other events of a group and drawn negatives.

    A group is a part of the global batch, so the loss does not depend on the number of processes. Source:
    Yang et al., "Mixed negative sampling for learning two-tower neural networks in recommendations", 2020.

    Args:
        item: The feature with the ids of items.
        item_shares: Shares of the training events, float32 [rows of the item table], none of them 0.
        item_ids: For batches with ids instead of rows: the id of each share, int64, the unknown id first. Its
            share is also that of all other ids.

    Example:
        model = training.shard(make_model, loss=rs.SampledSoftmax.of(training.columns))
        loss = rs.SampledSoftmax("item", torch.as_tensor(training.columns.item_shares()))
        loss(vectors, batch)                  # float32 [], of users and items float32 [N + B, 2, D]
    """

    def __init__(self, item: str, item_shares: torch.Tensor, item_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        self.item = item
        self.log_shares: torch.Tensor
        self.item_ids: torch.Tensor | None
        if item_ids is not None:
            # The unknown id is the lowest number there is, and stays first.
            item_ids, order = item_ids.sort()
            item_shares = item_shares[order]
        self.register_buffer("item_ids", item_ids, persistent=False)
        # Not in checkpoints, because it follows from the data.
        self.register_buffer("log_shares", item_shares.log(), persistent=False)

    @classmethod
    def of(cls, data: TrainingData) -> Self:
        """Return the loss for the items of a training.

        Args:
            data: The columns of the training.

        Returns:
            The loss.
        """
        ids = data.item_ids()
        # A copy: the columns are memory-mapped, and read-only.
        item_ids = None if ids is None else torch.from_numpy(ids.copy())
        return cls(data.schema.item, torch.as_tensor(data.item_shares()), item_ids)

    def forward(self, output: torch.Tensor | WithOwn, batch: Labelled) -> torch.Tensor:
        """Return the weighted mean over B events. Collective if there are in-batch negatives: every rank.

        Args:
            output: Vectors of users and items, float32 [N + B, 2, D], those of the N drawn items first, or a
                `WithOwn`.
            batch: With weights, float32 [B], item ids of N + B events, and bits of the seen negatives.

        Returns:
            float32 [].
        """
        vectors, own = parts_of(output)
        num_drawn = len(vectors) - len(batch.weights)
        added = OwnScores(own, batch, num_drawn)
        ids = batch.features[self.item]
        # An event's own item may be followed by its user's history.
        rows = ids.values() if len(ids.values()) == len(vectors) else ids.values()[ids.offsets()[:-1]]
        negatives, drawn = vectors[:num_drawn, 1], rows[:num_drawn]
        user, item = vectors[num_drawn:].unbind(dim=1)
        # Bits of the group's items, followed by a bit for each drawn item.
        width = batch.seen_bits.size(1) - -(-num_drawn // 8)
        if width:
            losses = self._of_groups(user, item, rows[num_drawn:], negatives, drawn, batch, added)
        else:
            losses = self._of_drawn(user, item, rows[num_drawn:], negatives, drawn, batch.seen_bits, added)
        # Over all rows, padding too: the weights of the real ones compensate for it.
        return (batch.weights * torch.cat(losses)).mean()

    def _of_drawn(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        rows: torch.Tensor,
        negatives: torch.Tensor,
        drawn: torch.Tensor,
        seen_bits: torch.Tensor,
        added: OwnScores,
    ) -> list[torch.Tensor]:
        """Return the losses of the events against the drawn items, in pieces."""
        # Each drawn item represents so many items.
        log_number = math.log((len(self.log_shares) - 1) / max(len(drawn), 1))
        losses = []
        # At least once: without events the result stays a function of the weights.
        for begin in range(0, max(1, len(users)), EVENTS_AT_ONCE):
            part = slice(begin, min(begin + EVENTS_AT_ONCE, len(users)))
            own = rows[part]
            is_none = unpack_bits(seen_bits[part], len(drawn)) | (own.unsqueeze(1) == drawn)
            more = added.of_each(part, own, drawn)
            loss = drawn_softmax(users[part], items[part], negatives, is_none, log_number, *more)
            losses.append(loss + added.zero)
        return losses

    def _of_groups(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        rows: torch.Tensor,
        negatives: torch.Tensor,
        drawn: torch.Tensor,
        batch: Labelled,
        added: OwnScores,
    ) -> list[torch.Tensor]:
        """Return the losses of the events against their groups and the drawn items, in pieces."""
        width, first = batch.seen_bits.size(1) - -(-len(drawn) // 8), batch.first
        # All events of a batch against all would cost the square of the batch, and ranked no better.
        size = 8 * width
        everyones = batch.gathered(items)
        all_rows, all_real = batch.gathered(torch.stack([rows, (batch.weights > 0).long()], dim=1)).unbind(1)
        # Rows of the last ranks that are beyond the global batch are padding without a group.
        end = max(0, min(len(everyones) - first, len(users)))
        # Only histories of one length can be split by groups.
        takes_all = users.device.type not in GROUP_AFTER_GROUP
        takes_all = takes_all and first % size == 0 and (added.own is None or HISTORY in batch.counts)
        losses, begin = [], first // size * size
        while end and begin < first + end:
            number = max(1, (first + end - begin) // size) if takes_all else 1
            group = slice(begin, begin + number * size)
            own = slice(max(begin - first, 0), min(group.stop - first, end))
            seen_bits, members = batch.seen_bits[own], min(size, len(everyones) - begin)
            competing = _with_drawn(all_rows[group], drawn, number)
            log_shares = self._log_expected(competing, members, len(drawn)).unsqueeze(-2)
            is_real = _with_drawn(all_real[group] > 0, torch.ones_like(drawn, dtype=torch.bool), number)
            of_group = unpack_bits(seen_bits[:, :width], members)
            seen = torch.cat([of_group, unpack_bits(seen_bits[:, width:], len(drawn))], dim=1)
            item, place = _with_drawn(everyones[group], negatives, number), first + own.start - begin
            log_shares = log_shares - added.of(own, competing)
            user, seen = _split(users[own], number), _split(seen, number)
            loss = sampled_softmax(user, item, competing, log_shares, is_real, seen, place)
            losses.append(loss.flatten())
            begin = group.stop
        # Zeros, but functions of all that the model returned: every rank takes part in the backward, and each
        # parameter gets a gradient.
        return [*losses, (users[end:] * 0).sum(dim=1) + everyones[:0].sum() + added.zero]

    def _log_expected(self, items: torch.Tensor, num_events: int, num_drawn: int) -> torch.Tensor:
        """Return the log of the expected number of each item among the negatives, up to a constant."""
        log_shares = self._log_shares_of(items)
        if num_drawn == 0:
            return log_shares
        return (num_events * log_shares.exp() + num_drawn / len(self.log_shares)).log()

    def _log_shares_of(self, items: torch.Tensor) -> torch.Tensor:
        if self.item_ids is None:
            return self.log_shares[items]
        index = torch.searchsorted(self.item_ids, items).clamp(max=len(self.item_ids) - 1)
        return self.log_shares[torch.where(self.item_ids[index] == items, index, 0)]


def _split(each: torch.Tensor, number: int) -> torch.Tensor:
    """Return what some groups of events have by group, [groups, S, ...]; of one group [S, ...]."""
    return each if number == 1 else each.unflatten(0, (number, -1))


def _with_drawn(each: torch.Tensor, others: torch.Tensor, number: int) -> torch.Tensor:
    """Return `_split`, in each group followed by what the drawn items have, [groups, S + N, ...]."""
    if number == 1:
        return torch.cat([each, others])
    return torch.cat([_split(each, number), others.expand(number, *others.shape)], dim=1)


def unpack_bits(packed: torch.Tensor, number: int) -> torch.Tensor:
    """Return the bits of bytes, the lowest bit of each first: bool [n, number] of uint8 [n, bytes]."""
    # Made on the device: a list of numbers would be copied there, with a wait, in each step.
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(2) >> bits).bitwise_and(1).flatten(1)[:, :number].bool()


def sampled_softmax(
    user: torch.Tensor,
    item: torch.Tensor,
    rows: torch.Tensor,
    log_shares: torch.Tensor,
    real: torch.Tensor,
    seen_bits: torch.Tensor,
    first: int = 0,
) -> torch.Tensor:
    """Return minus the log probability of each user's item, float32 [n].

    The softmax is over M items, of which those from `first` on belong to the n users.
    Takes vectors [n, D] and [M, D] and, for each item, its table row, [M], the logarithm of its expected
    number, such as its share of the training events, [1, M] or [n, M], and True if it is not padding, [M];
    seen_bits: True if a user had an item before, bool [n, M]. For K groups at once all begin with K, such as
    [K, n, D], and so does the result. An item is a negative as often as it is
    popular; to correct this, each score is lowered by that logarithm (Yi et al., "Sampling-bias-corrected
    neural modeling for large corpus item recommendations", 2019). The user's own item is never a negative,
    nor is an item that the user had before: no ranking shows it again.
    """
    # The items of the other users of the group represent all items: no item has to be drawn or looked up for
    # them.
    scores = user @ item.transpose(-2, -1) - log_shares
    own = rows[..., first : first + user.size(-2)].unsqueeze(-1)
    is_none = (own == rows.unsqueeze(-2)) | ~real.unsqueeze(-2) | seen_bits
    # An item is no negative of its own user, but its score has to stay. Also that of padding: infinity times
    # the weight 0 is NaN.
    is_none.diagonal(first, -2, -1).fill_(False)
    scores = scores.masked_fill(is_none, -torch.inf)
    return scores.logsumexp(dim=-1) - scores.diagonal(first, -2, -1)


def drawn_softmax(
    user: torch.Tensor,
    item: torch.Tensor,
    drawn: torch.Tensor,
    is_none: torch.Tensor,
    log_number: float = 0.0,
    own_added: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return minus the log probability of each user's item, float32 [n].

    The softmax is over this item and N drawn items.
    Takes vectors [n, D] of users and of their items, and [N, D]; is_none: True if a drawn item is no negative
    of a user, bool [n, N]; log_number: the logarithm of the number of items that each drawn item represents;
    own_added, added: what is added to the scores of the users' items, float32 [n], and of the drawn ones,
    [n, N]; None for nothing.
    """
    if len(drawn) == 0:
        # There is no gradient, but the result stays a function of the weights.
        return (user * 0).sum(dim=1)
    return _DrawnSoftmax.apply(user, item, drawn, is_none, log_number, own_added, added)


class _DrawnSoftmax(torch.autograd.Function):
    """`drawn_softmax`, which keeps one array of scores for the backward, where autograd keeps many."""

    @staticmethod
    def forward(
        ctx: Any,
        user: torch.Tensor,
        item: torch.Tensor,
        drawn: torch.Tensor,
        is_none: torch.Tensor,
        log_number: float,
        own_added: torch.Tensor | None,
        added: torch.Tensor | None,
    ) -> torch.Tensor:
        own, scores = (user * item).sum(dim=1) - log_number, user @ drawn.T
        if own_added is not None and added is not None:
            own, scores = own + own_added, scores.add_(added)
        scores.masked_fill_(is_none, -torch.inf)
        # In place: the scores become the probabilities.
        highest = torch.maximum(scores.amax(dim=1), own)
        others = scores.sub_(highest.unsqueeze(1)).exp_()
        total = others.sum(dim=1) + (own - highest).exp()
        ctx.save_for_backward(user, item, drawn, others.div_(total.unsqueeze(1)))
        return highest + total.log() - own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        user, item, drawn, others = ctx.saved_tensors
        others = others * gradient.unsqueeze(1)
        # The gradients of all scores of a user sum to zero.
        own = -others.sum(dim=1, keepdim=True)
        of_vectors = torch.addcmul(others @ drawn, own, item), own * user, others.T @ user
        return (
            *of_vectors,
            None,
            None,
            *((own.squeeze(1), others) if ctx.needs_input_grad[6] else (None, None)),
        )
