"""Predict how many seconds of a video a user watches, with a loop, an optimizer and a schedule of its own.

torchrun --standalone --nproc_per_node=2 seconds.py --data_path videos --dump --save_dir dumps
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

import recsuite as rs

# Batches whose gradients add up to one step; steps until the full learning rate.
EVERY, WARM_UP = 3, 20
METRICS = {"median error": lambda seconds, labels: float(np.median(np.abs(seconds - labels)))}


class Seconds(nn.Module):
    """Predict the logarithm of the seconds, from all features and the length of the video."""

    def __init__(self, data: rs.ModelData, dim: int) -> None:
        super().__init__()
        self.names = data.names("user", "item")
        self.embedding_dims = {"video": 16}
        width = sum(self.embedding_dims.get(name, dim) for name in self.names)
        width += sum(not feature.has_table for feature in data.features)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        inputs = [*(rows[name] for name in self.names), batch.numbers.nan_to_num()]
        return self.mlp(torch.cat(inputs, dim=1)).squeeze(1)

    def predictions(self, output: torch.Tensor) -> torch.Tensor:
        return output.expm1()


def loss_of(output: torch.Tensor, batch: rs.ModelInput) -> torch.Tensor:
    return (batch.weights * (output - batch.labels.log1p()).abs()).mean()


class Signs(rs.TableRule):
    name = "signs"

    def step(self, gradients: torch.Tensor, state: Any, rate: torch.Tensor, number: int) -> torch.Tensor:
        return gradients.sign_() * -rate


def momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
    return Seconds(data, args.embedding_dim)


GIVEN: dict[str, Any] = {"tables": Signs(0.01), "dense": momentum, "metrics": METRICS}


def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    with rs.session(args, runtime, rs.build_dataloader, trackers=[rs.FileTracker("track.jsonl")]) as training:
        model = training.shard(make_model, **GIVEN)
        for epoch in training.epochs():
            for batch in epoch:
                with torch.autocast(runtime.device.type, torch.bfloat16):
                    output = model.output(batch)
                loss = loss_of(output.float(), batch)
                (loss / EVERY).backward()
                model.loss = loss.detach()
                if epoch.step % EVERY == 0 or epoch.is_last:
                    nn.utils.clip_grad_norm_(model.dense_parameters(), 1.0)
                    for group in model.dense_optimizer.param_groups:
                        group["lr"] = 0.05 * min(1.0, epoch.step / WARM_UP)
                    model.step()
            training.save(training.validate())
        result = training.finish()
    training.report(result)


def load(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    with rs.open_data(args, runtime, rs.build_dataloader) as data:
        model, progress = rs.restore(data, args, runtime, make_model, **GIVEN)
        rs.report_test(model, progress, data, args, runtime)


def main() -> int:
    modes = {"train": train, "load": load}
    return rs.exit_status(lambda: rs.run_modes(None, modes, make_model))


if __name__ == "__main__":
    rs.run_script(main)
