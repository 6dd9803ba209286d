"""Train a DeepFM with a loss, a metric and a callback of its own; none of them is in the library."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import nn

import recsuite as rs


class DeepFM(nn.Module):
    """Predict a rating: biases, dot products of all pairs of features, and an MLP of all of them."""

    def __init__(self, data: rs.ModelData, dim: int) -> None:
        super().__init__()
        self.names = data.names("user", "history", "item")
        self.deep = nn.Sequential(nn.Linear(len(self.names) * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("mean", torch.tensor(data.mean_label))

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        vectors = [rows[name] for name in self.names]
        first = sum(vector[:, 0] for vector in vectors)
        pairs = sum((a[:, 1:] * b[:, 1:]).sum(1) for a, b in combinations(vectors, 2))
        return self.mean + first + pairs + self.deep(torch.cat(vectors, 1)).squeeze(1)


class WeightedHuber(nn.Module):
    """A loss that grows linearly far from the label; high ratings count more."""

    def __init__(self, of_high: float) -> None:
        super().__init__()
        self.huber, self.of_high = nn.HuberLoss(reduction="none"), nn.Buffer(torch.tensor(of_high))

    def forward(self, predictions: torch.Tensor, batch: rs.ModelInput) -> torch.Tensor:
        weights = torch.where(batch.labels >= 4, self.of_high, 1.0) * batch.weights
        return (weights * self.huber(predictions, batch.labels)).mean()


def within_one(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((np.abs(predictions - labels) <= 1).mean())


class Lines(rs.Callback):
    """Writes a line of JSON after each epoch, and one at the end."""

    path = Path("lines.jsonl")

    def on_epoch(self, epoch: rs.Epoch) -> None:
        self.write(epoch=epoch.number, loss=epoch.train_loss, **epoch.validation.values)

    def on_end(self, run: rs.Run) -> None:
        self.write(test_epoch=run.test_epoch, **run.test.values)

    def write(self, **numbers: float) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(numbers) + "\n")


LOSS, METRICS = WeightedHuber(2.0), {"within one": within_one}


def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
    return DeepFM(data, args.embedding_dim)


def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    lines = [Lines()] * (runtime.rank == 0)
    with rs.session(args, runtime, rs.build_dataloader, callbacks=lines) as training:
        model = training.shard(make_model, loss=LOSS, metrics=METRICS)
        for epoch in training.epochs():
            for batch in epoch:
                model(batch).backward()
                model.step()
            training.save(training.validate())
        result = training.finish()
    training.report(result)


def load(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    with rs.open_data(args, runtime, rs.build_dataloader) as data:
        model, progress = rs.restore(data, args, runtime, make_model, loss=LOSS, metrics=METRICS)
        rs.report_test(model, progress, data, args, runtime)


def main() -> int:
    modes = {"train": train, "load": load}
    return rs.exit_status(lambda: rs.run_modes(None, modes, make_model))


if __name__ == "__main__":
    rs.run_script(main)
