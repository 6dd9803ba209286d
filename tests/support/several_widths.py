"""A user's own model of ratings over tables of three widths."""

from __future__ import annotations

import torch
from torch import nn

import recsuite as rs

# Beside --embedding_dim, which all others have.
WIDTHS = {"movie": 12, "history": 12, "year": 24}


class SeveralWidths(nn.Module):
    """Predicts ratings by all rows beside each other, and by the product of a movie and of the history."""

    def __init__(self, data: rs.ModelData, args: rs.ModelConfig) -> None:
        super().__init__()
        self.names = data.names("user", "item", "history")
        self.embedding_dims = {name: width for name, width in WIDTHS.items() if name in self.names}
        width = sum(self.embedding_dims.get(name, args.embedding_dim) for name in self.names)
        self.mlp = rs.make_mlp([width, 8, 1])
        self.pair = [name for name in ("movie", "history") if name in self.names]

    def predict(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        """Return ratings, float32 [B]."""
        beside = torch.cat([rows[name] for name in self.names], dim=1)
        # Of one width, so they can be added up and stacked.
        product = rows.sum(self.pair) * rows.stack(self.pair)[:, -1]
        return 3.5 + self.mlp(beside).squeeze(1) + product.sum(dim=1)

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> rs.WithSquares:
        """Return ratings, and no squares for a decay, float32 [B] both."""
        ratings = self.predict(rows, batch)
        return rs.WithSquares(ratings, torch.zeros_like(ratings))

    def predictions(self, output: rs.WithSquares) -> torch.Tensor:
        """Return the ratings of the output for the loss."""
        return output.predictions


def several_widths(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
    """Return the model above."""
    return SeveralWidths(data, args)
