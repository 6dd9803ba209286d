"""What is known of rows before the training: that they lie around zero, and how far from it.

    noise / variance / n        how strongly each of its n events draws a row to zero

A row is then the most probable one of a normal prior with that variance, whatever the number of its events
and of passes: whoever has few is drawn to zero more than whoever has many (Salakhutdinov and Mnih,
"Probabilistic Matrix Factorization", 2007). The noise is the mean square of what the model cannot predict; on
validation events, for on training events it would shrink while the model overfits.

Shapes: B events, D numbers in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Rows that lie about equally far from zero: the factors of ids, and the rows of lists. What many users share
# has so many events that no prior matters to it, and biases are alike wherever labels are.
GROUPS = ("factors", "lists")
# The standard deviation of the normal prior of a spread: few validation events are to change little.
SPREAD_STD = 0.15
# The most by which a spread changes at once: a step of Gauss and Newton is right only near its end.
LARGEST_CHANGE = 0.35
# Variances of a bias and of a factor of a row, and of a row in a list, where labels lie about 1 apart.
BIAS, FACTOR = 0.25, 0.0375
LIST_BIAS, LIST_FACTOR = 0.25, 0.075
# What an event has of its own, such as the day of its user, adds less.
EVENT_BIAS, EVENT_FACTOR = 0.1, 0.015


class Held(NamedTuple):
    """How the rows of one feature are held.

    rarity: which of the rarities of a batch is that of its rows; times: what it is to be multiplied by; bias,
    factor: the variances of a bias and of a factor, where labels lie about 1 apart.
    """

    rarity: int
    times: float = 1.0
    bias: float = BIAS
    factor: float = FACTOR


@dataclass
class Prior:
    """The prior of the rows of a model.

    held: of each feature, how its rows are held; noise: see above, in squares of labels; unit: about how far
    labels lie apart; groups: of features that are in one of `GROUPS`, which.
    """

    held: Mapping[str, Held]
    noise: float
    unit: float
    groups: Mapping[str, int]

    def strengths(
        self, name: str, rarities: torch.Tensor, dim: int, spreads: torch.Tensor, scale: float = 1.0
    ) -> torch.Tensor:
        """How strongly the rows of a feature are drawn to zero, float32 [B, D].

        rarities: float32 [3 + features of events, B], see `lists.Links`; spreads: float32 [G], see
        `learned_spreads`; scale: what the model multiplies the rows by.
        """
        held = self.held[name]
        # A bias is added to a label, of factors two are multiplied.
        precisions = rarities.new_full((dim,), 1 / (held.factor * self.unit))
        precisions[0] = 1 / (held.bias * self.unit**2)
        if name in self.groups:
            precisions[first_number(self.groups[name]) :] *= (-2 * spreads[self.groups[name]]).exp()
        # The loss is a mean over B of squares, whose derivative has the factor 2.
        each = rarities[held.rarity] * (2 * self.noise * held.times * scale**2 / rarities.size(1))
        return torch.outer(each, precisions)


def standard_error(rmse: float, number: int) -> float:
    """That of a root mean square of so many errors, were they normal."""
    return rmse / math.sqrt(2 * number)


def first_number(group: int) -> int:
    """Which number of a row is the first that a group has: the bias of an id, number 0, is in none."""
    return 1 if GROUPS[group] == "factors" else 0


def learned_spreads(
    spreads: torch.Tensor, products: torch.Tensor, errors: torch.Tensor, noise: float
) -> torch.Tensor:
    """How many times farther from zero the rows of each group lie than was said, as logarithms, float64 [G].

    One step of Gauss and Newton from the spreads so far, float64 [G], to the most probable ones, which have a
    normal prior around 0. products: of the directions of groups with each other, summed over the validation
    events, float64 [G, G]; errors: of the directions with what predictions miss, float64 [G]; a direction is
    how much a prediction changes with the logarithm by which the rows of a group are multiplied.

    Rendle, "Learning recommender systems with adaptive regularization", 2012, learns strengths from
    validation events too, by their gradients.
    """
    precision = torch.eye(len(spreads), dtype=torch.float64) / SPREAD_STD**2
    change = torch.linalg.solve(products / noise + precision, errors / noise - precision @ spreads)
    return spreads + change.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
