"""What is known of rows before the training: that they lie around zero, and how far from it.

    noise / variance / n        how strongly each of its n events draws a row to zero

A row is then the most probable one of a normal prior with that variance, whatever the number of its events
and of passes: whoever has few is drawn to zero more than whoever has many (Salakhutdinov and Mnih,
"Probabilistic Matrix Factorization", 2007). The noise is the mean square of what the model cannot predict; on
validation events, for on training events it would shrink while the model overfits.

Shapes: B events, D numbers in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from recsuite.datasets.schema import LISTS

# Variances of a bias and of a factor of a row, and of a row in a list, where labels lie about 1 apart.
BIAS, FACTOR = 0.25, 0.0375
LIST_BIAS, LIST_FACTOR = 0.25, 0.075


@dataclass
class Prior:
    """The prior of the rows of a model.

    places: of each feature, which of the rarities of a batch is that of its rows, and what it is to be
    multiplied by; noise: see above, in squares of labels; unit: about how far labels lie apart.
    """

    places: Mapping[str, tuple[int, float]]
    noise: float
    unit: float

    def strengths(self, name: str, rarities: torch.Tensor, dim: int, scale: float = 1.0) -> torch.Tensor:
        """How strongly the rows of a feature are drawn to zero, float32 [B, D].

        rarities: float32 [3, B], see `lists.Links`; scale: what the model multiplies the rows by.
        """
        place, times = self.places[name]
        bias, factor = (LIST_BIAS, LIST_FACTOR) if name in LISTS else (BIAS, FACTOR)
        # A bias is added to a label, of factors two are multiplied.
        precisions = rarities.new_full((dim,), 1 / (factor * self.unit))
        precisions[0] = 1 / (bias * self.unit**2)
        # The loss is a mean over B of squares, whose derivative has the factor 2.
        each = rarities[place] * (2 * self.noise * times * scale**2 / rarities.size(1))
        return torch.outer(each, precisions)
