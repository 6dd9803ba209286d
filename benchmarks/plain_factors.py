"""Factors of users and items in plain PyTorch, the peer of this project that anybody can write.

Two tables with a bias and some factors in each row, Adam, a rate that falls to zero, and a decay in
proportion to events. The settings and the epoch are those of the lowest error on validation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
from peers import Fitted, Ratings

# Factors and their decay.
SETTINGS = ((8, 0.02), (8, 0.05), (8, 0.1), (16, 0.05), (16, 0.1))
BIAS_DECAY, RATE, STD, EPOCHS, BATCH = 0.02, 0.02, 0.1, 30, 512

# Columns of some ratings: users, items, labels.
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plain_factors(train: Ratings, validation: Ratings, test: Ratings, seed: int) -> Fitted:
    """Train with each of the settings; return the test RMSE of the best one, and its seconds."""
    train_part, validation_part, test_part = map(tensors, (train, validation, test))
    best = (math.inf, math.nan, math.nan)
    for factors, decay in SETTINGS:
        begin = time.perf_counter()
        torch.manual_seed(seed)
        errors = [
            (rmse(predict, validation_part), rmse(predict, test_part))
            for predict in epochs(train_part, train.shape, factors, decay)
        ]
        best = min(best, (*min(errors), time.perf_counter() - begin))
    return Fitted(*best[1:])


def tensors(ratings: Ratings) -> Part:
    """Return the columns of ratings as tensors."""
    users, items = (torch.from_numpy(each.astype("int64")) for each in (ratings.users, ratings.items))
    return users, items, torch.from_numpy(ratings.labels.astype("float32"))


def epochs(
    train: Part, shape: tuple[int, int], factors: int, decay: float
) -> Iterator[Callable[[Part], torch.Tensor]]:
    """Train, and yield a function that predicts a part after each epoch."""
    rows = [torch.nn.Parameter(STD * torch.randn(number, 1 + factors)) for number in shape]
    optimizer, mean = torch.optim.Adam(rows, lr=RATE), train[2].mean()

    def vectors(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[0][part[0]], rows[1][part[1]]

    def product(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return mean + u[:, 0] + v[:, 0] + (u[:, 1:] * v[:, 1:]).sum(1)

    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - epoch / EPOCHS)
        for places in torch.randperm(len(train[2])).split(BATCH):
            batch = (train[0][places], train[1][places], train[2][places])
            u, v = vectors(batch)
            squares = u.square() + v.square()
            penalty = BIAS_DECAY * squares[:, 0] + decay * squares[:, 1:].sum(1)
            loss = ((product(u, v) - batch[2]).square() + penalty).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield lambda part: product(*vectors(part))


@torch.no_grad()
def rmse(predict: Callable[[Part], torch.Tensor], part: Part) -> float:
    """Return the RMSE of predictions of a part."""
    return float((predict(part) - part[2]).square().mean().sqrt())
