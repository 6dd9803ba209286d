"""The most that FBGEMM's tables reach in a captured step: no library around them, data on the device.

All features are one call of FBGEMM, without pooling; the head is that of the example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
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
from torch import nn
from train_here import MEAN_RATING, Model
from train_plain import DENSE_LR, LR, SIDES, Replays, inputs_of

from example import RatingModel
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import HISTORY, ITEM, USER, Table
from recsuite.models.tasks import ModelData


class Limit:
    """Training with FBGEMM's tables alone."""

    def __init__(self, columns: Columns, model: Model, device: torch.device) -> None:
        tables = self._tables(columns)
        self.features = [table.feature for table in tables]
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(table.rows, model.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for table in tables],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=1e-8,
            pooling_mode=PoolingMode.NONE,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=device,
        )
        for weights in self.kernel.split_embedding_weights():
            nn.init.normal_(weights, std=0.05)
        self.head: Any = self._make_head(columns, model).to(device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=DENSE_LR, fused=True, capturable=True)
        events = columns.column("rows")
        events = events.take(torch.randperm(len(events), generator=torch.Generator().manual_seed(0)).numpy())
        rows, self.others = self._inputs(columns, events, device)
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
        loss = self._loss(found, self.others[events], self.labels[events])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _tables(self, columns: Columns) -> Sequence[Table]:
        return columns.tables

    def _make_head(self, columns: Columns, model: Model) -> nn.Module:
        data = ModelData(columns.schema, self.features, MEAN_RATING)
        return RatingModel(data, model.dim, model.mlp_dims)

    def _inputs(
        self, columns: Columns, events: np.ndarray, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return inputs_of(columns, events, device)

    def _loss(self, found: torch.Tensor, others: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of events, []. found: rows, feature after feature; others: labels of histories."""
        size = len(labels)
        vectors: dict[str, torch.Tensor] = {}
        parts = found.split([size * slots for slots in self.slots])
        for feature, part, slots in zip(self.features, parts, self.slots, strict=True):
            if feature.name == HISTORY:
                weights = (others - MEAN_RATING) / slots
                part = (part.view(size, slots, -1) * weights.unsqueeze(2)).sum(1)
            elif slots > 1:
                part = part.view(size, slots, -1).mean(1)
            side = SIDES[feature.entity]
            vectors[side] = vectors[side] + part if side in vectors else part
        predictions = self.head.score_pairs(vectors[USER], vectors[ITEM])
        return ((predictions - labels) ** 2).mean()

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        return self.replays.steps(number, batch_size)
