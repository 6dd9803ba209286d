"""The most that FBGEMM's tables reach in a captured step: no library around them, data on the device.

All features are one call of FBGEMM, without pooling; the head is that of the example.
"""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from train_here import MEAN_RATING, Model
from train_plain import DENSE_LR, LR, SIDES, Replays, inputs_of

from example import RatingModel
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import HISTORY, ITEM, USER
from recsuite.models.tasks import ModelData


class Limit:
    """Training with FBGEMM's tables alone."""

    def __init__(self, columns: Columns, model: Model, device: torch.device) -> None:
        self.features = [table.feature for table in columns.tables]
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (table.rows, model.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
                for table in columns.tables
            ],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=1e-8,
            pooling_mode=PoolingMode.NONE,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=device,
        )
        for weights in self.kernel.split_embedding_weights():
            torch.nn.init.normal_(weights, std=0.05)
        data = ModelData(columns.schema, self.features, MEAN_RATING)
        self.head = RatingModel(data, model.dim, model.mlp_dims).to(device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=DENSE_LR, fused=True, capturable=True)
        events = columns.column("rows")
        events = events.take(torch.randperm(len(events), generator=torch.Generator().manual_seed(0)).numpy())
        rows, self.history_labels = inputs_of(columns, events, device)
        self.rows = {name: values.view(len(events), -1) for name, values in rows.items()}
        self.labels = torch.from_numpy(events["label"].copy()).to(device)
        self.slots = [values.size(1) for values in self.rows.values()]
        self.replays = Replays(self.step, len(events), device)
        self.offsets: dict[int, torch.Tensor] = {}

    def step(self, events: torch.Tensor) -> torch.Tensor:
        """Train on some of the events and return the loss, []."""
        size = len(events)
        if size not in self.offsets:
            lengths = torch.tensor(self.slots, device=events.device).repeat_interleave(size)
            self.offsets[size] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = torch.cat([values[events].view(-1) for values in self.rows.values()])
        found = self.kernel(ids.long(), self.offsets[size])
        parts = found.split([size * slots for slots in self.slots])
        vectors: dict[str, torch.Tensor] = {}
        for feature, part, slots in zip(self.features, parts, self.slots, strict=True):
            if feature.name == HISTORY:
                weights = (self.history_labels[events] - MEAN_RATING) / slots
                part = (part.view(size, slots, -1) * weights.unsqueeze(2)).sum(1)
            elif slots > 1:
                part = part.view(size, slots, -1).mean(1)
            side = SIDES[feature.entity]
            vectors[side] = vectors[side] + part if side in vectors else part
        predictions = self.head.score_pairs(vectors[USER], vectors[ITEM])
        loss = ((predictions - self.labels[events]) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        return self.replays.steps(number, batch_size)
