"""Train each table optimizer with eager and with captured steps on a GPU; print what differs, as JSON.

python captured_steps.py DATA
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import traceback
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

import recsuite as rs
from example import RatingModel, make_loss, make_model
from recsuite.checkpoint.stream_state import reopen_data
from recsuite.config.config import Config
from recsuite.models.tasks import TASKS, ModelMaker
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.table import StaticTable, track_changes
from recsuite.training.loop import Training

RULES = {
    "SGD": rs.SGD(0.5),
    "Adagrad": rs.Adagrad(0.1),
    "RowWiseAdagrad": rs.RowWiseAdagrad(0.1),
    "Adam": rs.Adam(0.01),
    "RowWiseAdam": rs.RowWiseAdam(0.01),
}

LEARNED = {"task": "ranking", "history_weights": "learned", "l2": 0.0}
RANKINGS = {
    "ranking": {**LEARNED, "negatives": 64},
    "sequence": {"task": "sequence", "history": 20, "negatives": 64, "dropout": 0.2, "l2": 0.0},
    "repeats": {**LEARNED, "negatives": 64, "seen": "allow", "duplicates": "keep"},
}


class Random(RatingModel):
    """The model of example.py with dropout, which draws from the device's generator in each step."""

    def user_vectors(self, rows: Any, batch: Any) -> torch.Tensor:
        return nn.functional.dropout(super().user_vectors(rows, batch), 0.1, self.training)


class Waiting(RatingModel):
    """A model that reads a value on the host."""

    def scores(self, users: torch.Tensor, items: torch.Tensor) -> rs.WithSquares:
        found = super().scores(users, items)
        factor = 1.0 if float(found.predictions.detach().sum()) > -1e9 else 2.0
        return rs.WithSquares(factor * found.predictions, found.squares)


def maker(kind: type[RatingModel]) -> ModelMaker:
    return lambda data, args: kind(data, args.embedding_dim, args.mlp_dims)


def trained(config: Config, context: RuntimeContext, rule: Any, make: ModelMaker) -> dict[str, Any]:
    """Digests of a training of 3 epochs, or of a stream, its losses, and the lines that it prints."""
    said, metric = io.StringIO(), TASKS[config.model.task].main_metric
    with (
        reopen_data(config, context, trains=True) as data,
        contextlib.redirect_stdout(said),
        Training(data, config, context) as training,
    ):
        model = training.shard(make, make_loss(training.columns, config), rule)
        track_changes(model.model, model.tables)
        returned = []

        @training.step
        def step(batch: Any) -> torch.Tensor:
            loss = model(batch)
            loss.backward()
            model.step()
            return loss.detach()

        for epoch in training.epochs():
            for batch in epoch:
                returned.append(step(batch))
            training.save(training.validate())
        tensors = {name: value for table in model.tables.values() for name, value in table.export().items()}
        marks = [table.marks for table in model.tables.values() if isinstance(table, StaticTable)]
        dense = [each.detach() for each in model.dense_parameters()]
        states = [
            value
            for state in model.dense_optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        states += [value for table in model.tables.values() for value in table.export().values()]
        return {
            "tables": digest(tensors.values()),
            "marks": digest(marks),
            "dense": digest(dense),
            "states": digest(states),
            "losses": [epoch.train_loss for epoch in training.results],
            "returned": digest(returned),
            "generator": digest(
                [torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()]
            ),
            "metrics": [epoch.validation[metric] for epoch in training.results],
            "steps": training.progress.step,
            "captured": "steps are captured" in said.getvalue(),
            "reason": [line for line in said.getvalue().splitlines() if "not captured" in line],
        }


def mean_of_rounded() -> float:
    """Mean of many numbers of 16 bits that were 1, after a step that subtracts 0.0001."""
    rows, width = 20_000, 8
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=1e-4,
        weights_precision=SparseType.FP16,
        pooling_mode=PoolingMode.NONE,
    )
    (weights,) = tables.split_embedding_weights()
    weights.fill_(1)
    ids = torch.arange(rows + 1, device=weights.device)
    tables(ids[:-1], ids).sum().backward()
    return float(weights.double().mean())


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def main(folder: str) -> None:
    flags = {"data_path": folder, "batch_size": 100, "epochs": 3, "patience": 0, "weight_decay": 0.15}
    config = Config.of(**flags, l2=0.06)
    context = rs.init_runtime(config)
    found: dict[str, Any] = {}
    for name, rule in RULES.items():
        for capture in ("off", "auto"):
            found[f"{name} {capture}"] = trained(
                config.replaced(capture=capture), context, rule, maker(Random)
            )
    for capture in ("off", "auto"):
        stream = config.replaced(capture=capture, stream=True, window="60d", duplicates="keep")
        found[f"stream {capture}"] = trained(stream, context, RULES["RowWiseAdagrad"], maker(Random))
        for name, more in RANKINGS.items():
            ranking = config.replaced(capture=capture, **more)
            found[f"{name} {capture}"] = trained(ranking, context, RULES["RowWiseAdagrad"], make_model)
        half = config.replaced(capture=capture, row_precision="fp16")
        found[f"rows of 16 bits {capture}"] = trained(half, context, RULES["RowWiseAdagrad"], maker(Random))
    found["rounded"] = mean_of_rounded()
    # Last, since a failed capture may end in any way.
    for name, kind in (("waiting", Waiting), ("after it", Random)):
        try:
            found[name] = trained(config, context, RULES["RowWiseAdagrad"], maker(kind))
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    rs.cleanup_runtime()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
