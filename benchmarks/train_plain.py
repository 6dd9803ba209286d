"""The same model in plain PyTorch, as a user would write it: a rank of a team of benchmarks/train.py.

train_plain.py FOLDER        dense Adam, or an optimizer for sparse gradients; DDP where there are two ranks
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_team import DIM, MEAN_RATING, MLP_DIMS, serve, take_answers

from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.models.heads import Interaction
from recsuite.models.recency import Members

USER, MOVIE = (feature for feature in SCHEMA.features if feature.name in ("user", "movie"))
LR, DENSE_LR = 0.04, 0.001


class LookedUp:
    """Rows as `Interaction` takes them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def values(self) -> torch.Tensor:
        """The rows."""
        return self.rows

    def lengths(self) -> torch.Tensor:
        """One row a rating."""
        return torch.ones(len(self.rows), dtype=torch.int32)


class PlainModel(nn.Module):
    """`Interaction` on two embeddings."""

    def __init__(self, num_users: int, num_movies: int, sparse: bool) -> None:
        super().__init__()
        self.head = Interaction([USER, MOVIE], DIM, MLP_DIMS, MEAN_RATING)
        self.users = nn.Embedding(num_users, DIM, sparse=sparse)
        self.movies = nn.Embedding(num_movies, DIM, sparse=sparse)

    def forward(self, users: torch.Tensor, movies: torch.Tensor) -> torch.Tensor:
        """Predicted ratings, float32 [B]."""
        rows = {"user": LookedUp(self.users(users)), "movie": LookedUp(self.movies(movies))}
        rating: torch.Tensor = self.head(rows, Members(*[torch.zeros(0)] * 3), torch.zeros(0, 0))
        return rating


class Plain:
    """A training loop of a few lines. name: of its optimizer."""

    def __init__(self, name: str, folder: Path, device: torch.device) -> None:
        # The row of a user or a movie is its number and 1.
        users, movies = (len(np.load(folder / f"{name}_features.npy")) for name in ("user", "movie"))
        model: Any = PlainModel(users + 1, movies + 1, name != "dense Adam").to(device)
        tables = [model.users.weight, model.movies.weight]
        for table in tables:
            nn.init.normal_(table, std=0.05)
        # Fused, which is the fastest that torch has: what we are compared with should be as good as it can
        # be.
        dense = torch.optim.Adam(model.head.parameters(), lr=DENSE_LR, fused=True)
        of_tables: dict[str, Any] = {
            "dense Adam": lambda: torch.optim.Adam(tables, lr=DENSE_LR, fused=True),
            "sparse Adagrad": lambda: torch.optim.Adagrad(tables, lr=LR),
            "SparseAdam": lambda: torch.optim.SparseAdam(tables, lr=DENSE_LR),
        }
        self.optimizers = [dense, of_tables[name]()]
        self.model = DistributedDataParallel(model) if dist.is_initialized() else model
        # In memory, and shuffled once: what is compared are training steps, so plain PyTorch pays for no
        # loader.
        rows = np.load(folder / "rows.npy")
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
        rows = rows.take(order.numpy())
        self.users, self.movies = (
            torch.from_numpy(rows[name].astype(np.int64)).add_(1).to(device) for name in ("user", "item")
        )
        self.ratings = torch.from_numpy(rows["label"].copy()).to(device)
        self.first = 0

    def step(self, batch_size: int) -> torch.Tensor:
        """Train on the next batch; its loss, []."""
        if self.first + batch_size > len(self.users):
            self.first = 0
        batch = slice(self.first, self.first + batch_size)
        self.first += batch_size
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        predictions = self.model(self.users[batch], self.movies[batch])
        loss = ((predictions - self.ratings[batch]) ** 2).mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps; the last loss."""
        for _ in range(number):
            loss = self.step(batch_size)
        return float(loss)

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Nothing: its parts are not those of ours."""
        return {}


def main() -> None:
    """Serve orders."""
    answers = take_answers()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def barrier() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    serve(answers, lambda name: Plain(name, Path(sys.argv[1]), device), barrier, torch.set_num_threads)


if __name__ == "__main__":
    main()
