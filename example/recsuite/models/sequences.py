"""Transformer over a user's history: it scores items as the next one.

    user = rows of the user and the event + weighted sum of the history with learned weights + state of a
    transformer

A history uses the rows of the items themselves: an item has the same row as an input and as a prediction.

The V items of all histories are cut into blocks of W. An item attends to items of its own block and of the
previous one that are of the same history, not after it, and fewer than W items away. So the shapes depend
only on V, and no history is padded. Dropout is a function of the data and not of a generator. So a training
that is resumed, or that runs on another number of ranks, drops the same numbers.

Shapes: B events, V items of all histories, D numbers in a row, n blocks, W queries and 2 W keys of a block, H
heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from typing_extensions import override

from recsuite.datasets.schema import HISTORY, Feature
from recsuite.models.heads import SCALE, ProductHead
from recsuite.models.inputs import DistinctRows, Inputs, LookedUp, PlainRows
from recsuite.models.layers import LEAST_SUM, MOST_LOG_WEIGHT, make_mlp, repeated
from recsuite.models.rows import FeatureRows
from recsuite.time_buckets import NUM_TIME_BUCKETS

# Odd constants with mixed bits, as int32: 2^32 over the golden ratio, and one of xxHash's primes.
MULTIPLIERS = (-1640531535, -2048144789)


class Dropout(nn.Module):
    """Dropout: sets a share of numbers to zero, and scales the others up.

    layer: its number, so that layers drop different numbers.
    """

    def __init__(self, share: float, layer: int) -> None:
        super().__init__()
        self.share, self.layer = share, layer

    def forward(self, items: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Return float32 [V, D]; draws: a random number for each item, int32 [V]."""
        if not self.training or self.share == 0:
            return items
        return items * (dropout_mask(draws, items.size(1), self.layer, self.share) / (1 - self.share))


def dropout_mask(draws: torch.Tensor, width: int, layer: int, share: float) -> torch.Tensor:
    """Return True for the numbers that stay, bool [V, width]; draws: int32 [V]; layer: its number."""
    column = torch.arange(layer * width, (layer + 1) * width, dtype=torch.int32, device=draws.device)
    hashed = draws.unsqueeze(1) + column * MULTIPLIERS[0]
    # The products are meant to wrap around.
    hashed ^= hashed >> 15
    hashed *= MULTIPLIERS[1]
    hashed ^= hashed >> 13
    hashed *= MULTIPLIERS[0]
    hashed ^= hashed >> 16
    # A right shift of a negative number fills in ones; the mask makes all numbers non-negative.
    return hashed >= int(share * 2**31)


# There are few biases, and each is for many pairs: their rate is so many times that of other weights.
BIAS_RATE = 10.0
# Score of a masked pair: its softmax is 0, and it is finite in case all pairs are masked.
NO_SCORE = -1e9


class AttentionWindow:
    """Positions and times of pairs of items.

    is_seen: True if a query attends to a key, bool [n, W, 2 W]; distances: from the key in items, int64
    [W, 2 W]; gaps: the time bucket from the key to the event that follows the query, see
    `recsuite.datasets.batching`, int64 [n, W, 2 W].
    """

    def __init__(self, lengths: torch.Tensor, ages: torch.Tensor, width: int) -> None:
        """Compute the pairs.

        lengths: of the histories, [B]; ages: of their items, before the last event that reads each, int32
        [V]; width: W.
        """
        self.width, self.number = width, len(ages)
        # Unused slots of a batch, behind all items, are in a history of their own.
        all_lengths = torch.cat([lengths, (len(ages) - lengths.sum()).view(1)])
        history = repeated(torch.arange(len(all_lengths), device=ages.device), all_lengths, len(ages))
        # The event that follows an item is the next item of its history, or the event that reads all of it.
        following = nn.functional.pad(ages[1:], (0, 1))
        is_last = nn.functional.pad(history[1:], (0, 1), value=-1) != history
        following = following.masked_fill(is_last, 0)
        query = torch.arange(width, device=ages.device).unsqueeze(1)
        self.distances = query + width - torch.arange(2 * width, device=ages.device)
        of_query = self.queries(history, -1).unsqueeze(2)
        is_near = (self.distances >= 0) & (self.distances < width)
        self.is_seen = (of_query == self.keys(history, -2).unsqueeze(1)) & is_near
        self.distances = self.distances.clamp(0, width - 1)
        seconds = self.keys(ages, 0).unsqueeze(1) - self.queries(following, 0).unsqueeze(2)
        # The binary exponent of 1 + s, as in `time_buckets_of`: with float32 some would be rounded up to the
        # next power of two.
        exponents = torch.frexp(1.0 + seconds.clamp(min=0).double()).exponent - 1
        self.gaps = exponents.clamp(max=NUM_TIME_BUCKETS - 1).long()

    def queries(self, items: torch.Tensor, filler: float = 0.0) -> torch.Tensor:
        """Cut items [V, ...] into blocks, [n, W, ...]; the filler comes after the last item."""
        # At least one block, so that all parameters are used even if all histories are empty.
        padding = -len(items) % self.width if len(items) else self.width
        padded = nn.functional.pad(items, (*[0] * 2 * (items.dim() - 1), 0, padding), value=filler)
        return padded.view(-1, self.width, *items.shape[1:])

    def keys(self, items: torch.Tensor, filler: float = 0.0) -> torch.Tensor:
        """Return each block of items [V, ...] after the previous block, [n, 2 W, ...]."""
        blocks = self.queries(items, filler)
        before = torch.cat([torch.full_like(blocks[:1], filler), blocks[:-1]])
        return torch.cat([before, blocks], dim=1)

    def items(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the items, [V, H * ...], of blocks [n, H, W, ...]."""
        return blocks.transpose(1, 2).reshape(-1, blocks.size(1) * blocks.size(3))[: self.number]


class PairBias(nn.Module):
    """Learned bias of a pair by its distance in items and in time: float32 [n, H, W, 2 W].

    slopes: of each head, the factor of the logarithm of the distance that is subtracted initially.
    """

    def __init__(self, slopes: torch.Tensor, width: int) -> None:
        super().__init__()
        near = torch.arange(1, width + 1, dtype=torch.float32).log()
        self.places = nn.Parameter(-slopes.unsqueeze(1) * near / BIAS_RATE)
        self.gaps = nn.Parameter(torch.zeros(len(slopes), NUM_TIME_BUCKETS))

    def forward(self, window: AttentionWindow) -> torch.Tensor:
        """Return the bias of each pair, see the class."""
        return BIAS_RATE * (gather_bias(self.places, window.distances) + gather_bias(self.gaps, window.gaps))


def gather_bias(tables: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the entries at an index, [..., W, 2 W], of each of H tables, [H, m]: [..., H, W, 2 W]."""
    # Table by table: on a CPU a sum by an index takes many times as long for two-dimensional tensors.
    parts = [_picked(table, index) for table in tables]
    return torch.stack(parts, dim=index.dim() - 2)


def _picked(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the entries of a table, [m], at an index of any shape."""
    # The gradient of `index_select` has no fixed order of additions on a GPU, and that of the other none on
    # several threads of a CPU.
    if table.device.type == "cpu":
        return table.index_select(0, index.flatten()).view(index.shape)
    return table[index]


class Attention(nn.Module):
    """Attention of each item to those before it, by content, and by distance in items and time."""

    def __init__(self, dim: int, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.bias = PairBias(torch.linspace(0, 1, num_heads), width)

    def heads(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the blocks of each head, [n, H, W, D / H], of blocks [n, W, D]."""
        return blocks.view(*blocks.shape[:2], self.num_heads, -1).transpose(1, 2)

    def scores(self, query: torch.Tensor, key: torch.Tensor, window: AttentionWindow) -> torch.Tensor:
        """Return float32 [n, H, W, 2 W]; query, key: items [V, D]."""
        query, key = self.heads(window.queries(query)), self.heads(window.keys(key))
        return query @ key.transpose(2, 3) * query.size(3) ** -0.5 + self.bias(window)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: AttentionWindow
    ) -> torch.Tensor:
        """Return float32 [V, D]: the mean of the values, weighted by the softmax of the scores."""
        scores = self.scores(query, key, window)
        weights = scores.masked_fill(~window.is_seen.unsqueeze(1), NO_SCORE).softmax(dim=3)
        return window.items(weights @ self.heads(window.keys(value)))


class PointwiseAttention(Attention):
    """Attention in which each score counts by itself, independently of the others."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: AttentionWindow
    ) -> torch.Tensor:
        """Return float32 [V, D]: the sum of the values, divided by the root of their number."""
        weights = nn.functional.silu(self.scores(query, key, window)) * window.is_seen.unsqueeze(1)
        number = window.is_seen.sum(dim=2).clamp(min=1).view(len(weights), 1, -1, 1)
        return window.items(weights / number.sqrt() @ self.heads(window.keys(value)))


class SasBlock(nn.Module):
    """Transformer block with the norms in front, and one linear layer for query, key and value.

    Source: Kang and McAuley, "Self-attentive sequential recommendation", 2018.

    dim: D numbers of an item; num_heads: of the attention; width: see `SequenceHead`; widths: of the hidden
    layers after the attention; dropout: share of numbers that are dropped; number: index of the block.

        block = rs.SasBlock(64, num_heads=2, width=50, widths=[64], dropout=0.2, number=0)
    """

    def __init__(
        self, dim: int, num_heads: int, width: int, widths: Sequence[int], dropout: float, number: int
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.into = nn.Linear(dim, 3 * dim)
        self.attention = Attention(dim, num_heads, width)
        self.out = nn.Linear(dim, dim)
        self.layers = make_mlp([dim, *widths, dim])
        self.dropouts = nn.ModuleList([Dropout(dropout, 2 * number + 1), Dropout(dropout, 2 * number + 2)])

    def forward(self, items: torch.Tensor, window: AttentionWindow, draws: torch.Tensor) -> torch.Tensor:
        """Return float32 [V, D]; draws: see `Dropout`."""
        query, key, value = self.into(self.norms[0](items)).chunk(3, dim=1)
        items = items + self.dropouts[0](self.out(self.attention(query, key, value, window)), draws)
        layers: torch.Tensor = self.dropouts[1](self.layers(self.norms[1](items)), draws)
        return items + layers


class HstuBlock(nn.Module):
    """Block with pointwise attention times a gate, instead of layers.

    Source: Zhai et al., "Actions speak louder than words: trillion-parameter sequential transducers for
    generative recommendations", 2024.

    dim, num_heads, width, dropout, number: see `SasBlock`.

        block = rs.HstuBlock(64, num_heads=2, width=50, dropout=0.2, number=0)
    """

    def __init__(self, dim: int, num_heads: int, width: int, dropout: float, number: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.into = nn.Linear(dim, 4 * dim)
        self.attention = PointwiseAttention(dim, num_heads, width)
        self.out = nn.Linear(dim, dim)
        self.dropout = Dropout(dropout, number + 1)

    def forward(self, items: torch.Tensor, window: AttentionWindow, draws: torch.Tensor) -> torch.Tensor:
        """Return float32 [V, D]; draws: see `Dropout`."""
        query, key, value, gate = nn.functional.silu(self.into(self.norms[0](items))).chunk(4, dim=1)
        seen = self.norms[1](self.attention(query, key, value, window))
        return items + self.dropout(self.out(seen * gate), draws)


# Of the sum of a history: one half of a vector starts with most weight on near items, the other with equal
# weights.
SLOPES = (1.0, 0.0)
# Factor of rows of features that many items or users share: each event of these moves them.
SIDE_SCALE = 0.2
# Items of histories to process at once without gradients: an evaluation has many times as many as a step.
ITEMS_AT_ONCE = 2**14


class SequenceHead(ProductHead):
    """Transformer over a user's history: it scores items as the next one.

    features: of the data; embedding_dim: D numbers in a row; ids: the features that identify users and items;
    blocks: of the transformer, such as `SasBlock`; width: the largest number of items of a history that are
    used; dropout: share of numbers of the inputs that are dropped.

        blocks = [rs.SasBlock(64, 2, data.history, [64], 0.2, number) for number in range(2)]
        head = rs.SequenceHead(data.features, 64, data.schema.ids, blocks, data.history, 0.2)
    """

    takes_ages = True

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        ids: tuple[str, str],
        blocks: Sequence[nn.Module],
        width: int,
        dropout: float,
    ) -> None:
        super().__init__(features, embedding_dim)
        self.weights = {each.name: SIDE_SCALE for each in features if each.name not in ids}
        _, self.item = ids
        self.width = width
        self.nearness = PairBias(torch.tensor(SLOPES), width)
        # Embedding of the time from an item to the event that follows.
        self.following = nn.Parameter(torch.zeros(len(self.nearness.gaps[0]), embedding_dim))
        self.dropout = Dropout(dropout, 0)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(embedding_dim)
        self.out = nn.Linear(embedding_dim, embedding_dim)
        # Zero at first: untrained blocks do not disturb the sum of the rows.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        # State of a user without history.
        self.start = nn.Parameter(torch.zeros(embedding_dim))

    @override
    def forward(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        # Of histories that a device made, the unused slots are behind all items.
        others = {name: counts for name, counts in rows.counts.items() if name != HISTORY}
        found = separate_histories(rows.found, self.item, rows.counts.get(HISTORY))
        apart_rows = FeatureRows(found, rows.scale, rows.lists, others, rows.joined)
        return super().forward(apart_rows, batch)

    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return the vectors, float32 [B, D]; batch.members: with ages, and in training with draws."""
        vectors = SCALE * super().user_vectors(rows, batch)
        vectors = vectors + self._states_of(rows, batch)
        # The bias of an item counts once.
        return torch.cat([torch.ones_like(vectors[:, :1]), vectors[:, 1:]], dim=1)

    def _states_of(self, looked_up: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return for each event the state after the last item that it reads, float32 [B, D]."""
        # After the scale: weights trained on rows include it.
        rows, lengths = looked_up.jagged(HISTORY)
        ages, sources, reads = batch.members.ages, batch.members.sources, batch.members.reads
        if has_own := not len(reads):
            # A serving request may have longer histories.
            is_read = after_last(lengths, len(rows)) < self.width
            lengths, rows, ages = lengths.clamp(max=self.width), rows[is_read], ages[is_read]
        if torch.is_grad_enabled():
            states = self._states(rows, lengths, ages, batch.members.draws)
        else:
            states = self._states_in_parts(rows, lengths, ages)
        first = lengths.cumsum(0) - lengths
        # An event with a history of its own reads all of it.
        reads, first = (lengths, first) if has_own else (reads, first[sources])
        last = first + reads
        if states.device.type != "cpu":
            # Each state is read once, and the sum for the start state is in a fixed order.
            if not len(states):
                # All histories are empty, as those of a rank without events; all parameters are used.
                states = nn.functional.pad(states, (0, 0, 0, 1))
            found = states.index_select(0, (last - 1).clamp(min=0))
            return torch.where((reads > 0).unsqueeze(1), found, self.start)
        # The start state comes before all others. Not by brackets: threads sum their gradient in any order.
        all_states = torch.cat([self.start.unsqueeze(0), states])
        return all_states.index_select(0, torch.where(reads > 0, last, 0))

    def _states_in_parts(self, rows: torch.Tensor, lengths: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
        # Histories are independent of each other, so some can be processed at a time.
        number = max(1, ITEMS_AT_ONCE // self.width)
        parts = lengths.split(number)
        sizes = [int(part.sum()) for part in parts]
        # Unused slots are behind the last end.
        spans = itertools.starmap(slice, itertools.pairwise([0, *itertools.accumulate(sizes)]))
        cut = ((rows[span], part, ages[span]) for span, part in zip(spans, parts, strict=True))
        # No dropout here, so the draws are unused.
        return torch.cat([self._states(*each, draws=ages) for each in cut])

    def _states(
        self, rows: torch.Tensor, lengths: torch.Tensor, ages: torch.Tensor, draws: torch.Tensor
    ) -> torch.Tensor:
        """Return the state after each item of histories, float32 [V, D]."""
        window = AttentionWindow(lengths, ages, self.width)
        rows = SCALE * rows
        following = window.items(window.gaps.diagonal(self.width, 1, 2).view(-1, 1, self.width, 1)).view(-1)
        items = self.dropout(rows + self._following(following), draws)
        for block in self.blocks:
            items = block(items, window, draws)
        return self._sums(rows, window) + self.out(self.norm(items))

    def _following(self, gaps: torch.Tensor) -> torch.Tensor:
        """Return the embedding of time buckets, float32 [V, D]."""
        if gaps.device.type == "cpu":
            return self.following.index_select(0, gaps)
        # The gradient is a product too, in a fixed order of additions.
        buckets = torch.arange(len(self.following), device=gaps.device)
        return (gaps.unsqueeze(1) == buckets).to(self.following.dtype) @ self.following

    def _sums(self, rows: torch.Tensor, window: AttentionWindow) -> torch.Tensor:
        """Return weighted sums of each item and those before it, over the root of the weights, [V, D]."""
        weights = self.nearness(window).clamp(max=MOST_LOG_WEIGHT).exp() * window.is_seen.unsqueeze(1)
        weights = weights * (weights.sum(dim=3, keepdim=True) + LEAST_SUM).rsqrt()
        keys = window.keys(rows)
        halves = keys.view(*keys.shape[:2], len(SLOPES), -1).transpose(1, 2)
        return window.items(weights @ halves)


def after_last(lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Return the number of items of its history after each item, int64 [total]; lengths: int64 [B]."""
    ends = repeated(lengths.cumsum(0), lengths, total)
    return ends - 1 - torch.arange(total, device=lengths.device)


def separate_histories(
    looked_up: Mapping[str, LookedUp], item: str, lengths: torch.Tensor | None = None
) -> Mapping[str, LookedUp]:
    """Separate the rows of items and of histories, where a history comes after each event's own item.

    lengths: of the histories, [B], if they come after the own items of all events, as a device makes them.
    """
    # TorchRec's rows, which arrive when they are first used, know no `in`.
    names = looked_up.keys()
    if HISTORY in names:
        return looked_up
    of_items = looked_up[item]
    if lengths is not None:
        rows, number = of_items.values(), len(of_items.lengths())
        own, others = rows.split([number, len(rows) - number])
        # Drawn items, which come first, have no history.
        lengths = nn.functional.pad(lengths, (number - len(lengths), 0))
        ones = torch.ones_like(lengths)
        return {**looked_up, item: PlainRows(own, ones), HISTORY: PlainRows(others, lengths)}
    counts = of_items.lengths().to(torch.int64)
    if isinstance(of_items, DistinctRows):
        rows, index = of_items.rows, of_items.places
    else:
        rows = of_items.values()
        index = torch.arange(len(rows), device=rows.device)
    first, others = counts.cumsum(0) - counts, counts - 1
    number = len(index) - len(counts)
    event = repeated(torch.arange(len(counts), device=rows.device), others, number)
    members = torch.arange(number, device=rows.device) + event + 1
    own = DistinctRows(rows, index[first], torch.ones_like(counts), is_single=True)
    return {**looked_up, item: own, HISTORY: DistinctRows(rows, index[members], others)}
