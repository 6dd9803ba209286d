"""What turns the rows of histories into what their users may want next, item by item: two kinds of blocks.

Shapes: V items of all histories, D numbers of each, H heads; see `window`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from recsuite.models.layers import make_mlp
from recsuite.models.sequences.dropout import Dropout
from recsuite.models.sequences.window import NO_SCORE, PairBias, Window


class Attention(nn.Module):
    """What each item sees of those before it, by their content, and by how far and how long they are away."""

    def __init__(self, dim: int, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.bias = PairBias(torch.linspace(0, 1, num_heads), width)

    def heads(self, blocks: torch.Tensor) -> torch.Tensor:
        """Of blocks [n, W, D] those of each head, [n, H, W, D / H]."""
        return blocks.view(*blocks.shape[:2], self.num_heads, -1).transpose(1, 2)

    def scores(self, query: torch.Tensor, key: torch.Tensor, window: Window) -> torch.Tensor:
        """float32 [n, H, W, 2 W], of items [V, D] both."""
        query, key = self.heads(window.queries(query)), self.heads(window.keys(key))
        return query @ key.transpose(2, 3) * query.size(3) ** -0.5 + self.bias(window)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: Window
    ) -> torch.Tensor:
        """float32 [V, D]: a mean of the values, each by its share of the exponentials of all scores."""
        scores = self.scores(query, key, window)
        weights = scores.masked_fill(~window.is_seen.unsqueeze(1), NO_SCORE).softmax(dim=3)
        return window.items(weights @ self.heads(window.keys(value)))


class PointwiseAttention(Attention):
    """As `Attention`, but each score counts by itself, whatever the others are."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: Window
    ) -> torch.Tensor:
        """float32 [V, D]: a sum of the values, over the root of their number."""
        weights = nn.functional.silu(self.scores(query, key, window)) * window.is_seen.unsqueeze(1)
        number = window.is_seen.sum(dim=2).clamp(min=1).view(len(weights), 1, -1, 1)
        return window.items(weights / number.sqrt() @ self.heads(window.keys(value)))


class SasBlock(nn.Module):
    """A block of a transformer with the norms in front (Kang and McAuley, "Self-attentive sequential
    recommendation", 2018), and one linear layer into query, key and value.

    widths: of the hidden layers behind the attention; number: which of the blocks it is.
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

    def forward(self, items: torch.Tensor, window: Window, draws: torch.Tensor) -> torch.Tensor:
        """float32 [V, D]; draws: see `Dropout`."""
        query, key, value = self.into(self.norms[0](items)).chunk(3, dim=1)
        items = items + self.dropouts[0](self.out(self.attention(query, key, value, window)), draws)
        layers: torch.Tensor = self.dropouts[1](self.layers(self.norms[1](items)), draws)
        return items + layers


class HstuBlock(nn.Module):
    """A block of Zhai et al., "Actions speak louder than words: trillion-parameter sequential transducers for
    generative recommendations", 2024: what is seen counts pointwise, and times a gate, in the place of
    layers.
    """

    def __init__(self, dim: int, num_heads: int, width: int, dropout: float, number: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.into = nn.Linear(dim, 4 * dim)
        self.attention = PointwiseAttention(dim, num_heads, width)
        self.out = nn.Linear(dim, dim)
        self.dropout = Dropout(dropout, number + 1)

    def forward(self, items: torch.Tensor, window: Window, draws: torch.Tensor) -> torch.Tensor:
        """float32 [V, D]; draws: see `Dropout`."""
        query, key, value, gate = nn.functional.silu(self.into(self.norms[0](items))).chunk(4, dim=1)
        seen = self.norms[1](self.attention(query, key, value, window))
        return items + self.dropout(self.out(seen * gate), draws)
