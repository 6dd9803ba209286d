"""DLRM's shape for benchmarks/gpu.py: 26 categories and 13 numbers of an event, with the model of `ctr.py`.

Here, in plain PyTorch, and with FBGEMM's tables alone in a captured step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from train_here import Model
from train_limit import Limit
from train_plain import FEWEST_ROWS_SPARSE
from typing_extensions import override

from criteo_log import CATEGORIES, NUMBERS
from ctr import DLRM
from recsuite.datasets.arrays import FeatureArrays, write_records
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import DENSE, ENTITIES, EVENT, ITEM, USER, YES_NO, Feature, Schema, Table
from recsuite.models.tasks import ModelData

# Values of the categories in the open log of Criteo (Naumov et al., 2019).
SIZES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
SHARE_OF_CLICKS = 0.25
OWN = (Feature("user", USER, "user"), Feature("item", ITEM, "item"))
OF_EVENTS = tuple(Feature(name, EVENT, name) for name in CATEGORIES)
DENSE_FEATURES = tuple(Feature(name, EVENT, name, number=DENSE) for name in NUMBERS)
SCHEMA = Schema(
    (*OWN, *OF_EVENTS, *DENSE_FEATURES), "user", "item", "item", "impression", 0.0, 1.0, 1.0, YES_NO
)


def make_columns(folder: Path, sizes: Sequence[int], number: int) -> Columns:
    """Return events with equally likely values, written into a folder."""
    generator = np.random.default_rng(0)
    fields = {
        "user": np.zeros(number, np.int32),
        "item": np.zeros(number, np.int32),
        "label": (generator.random(number) < SHARE_OF_CLICKS).astype(np.float32),
    }
    own = FeatureArrays(
        features=[generator.integers(1, size + 1, number).astype(np.int32) for size in sizes],
        numbers=[generator.normal(size=number).astype(np.float32) for _ in NUMBERS],
    )
    write_records(folder / "rows.npy", fields, own)
    # All events have the same user and item, as in the log.
    for entity in ENTITIES:
        one = FeatureArrays(features=[np.ones(1, np.int32)])
        write_records(folder / f"{SCHEMA.name_of(entity)}_features.npy", {}, one)
    tables = [Table(feature, 2) for feature in OWN]
    tables += [Table(feature, size + 1) for feature, size in zip(OF_EVENTS, sizes, strict=True)]
    return Columns(
        folder=str(folder),
        source="",
        schema=SCHEMA,
        num_train=number,
        num_users=1,
        num_items=1,
        mean_label=SHARE_OF_CLICKS,
        tables=tuple(tables),
        num_validation=0,
        num_test=0,
        num_skipped=0,
        longest_history=0,
        baselines={},
        numbers=DENSE_FEATURES,
        notes=(),
    )


class Numbers(NamedTuple):
    """Part of a batch that the model reads: dense features, float32 [B, numbers]."""

    numbers: torch.Tensor


class Stacked(NamedTuple):
    """Rows of a batch as the model reads them, float32 [B, categories, D]."""

    rows: torch.Tensor

    def stack(self, names: Sequence[str]) -> torch.Tensor:
        """Return the rows of all categories."""
        return self.rows


def make_head(columns: Columns, model: Model) -> DLRM:
    """Return the model of `ctr.py`."""
    features = [*(table.feature for table in columns.tables), *columns.numbers]
    return DLRM(ModelData(columns.schema, features, SHARE_OF_CLICKS), model.config.model)


def click_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over the events, []."""
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def inputs_of(
    columns: Columns, events: np.ndarray, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return table rows of each category, int64 [events], and numbers, float32 [events, numbers]."""
    rows = torch.from_numpy(events["features"].T.astype(np.int64)).to(device)
    return dict(zip(CATEGORIES, rows, strict=True)), torch.from_numpy(events["numbers"].copy()).to(device)


class PlainClicks(nn.Module):
    """Model of `ctr.py` on an embedding for each category; see `train_plain.PlainModel`."""

    def __init__(self, columns: Columns, model: Model, sparse: bool) -> None:
        super().__init__()
        self.head: Any = make_head(columns, model)
        self.tables = nn.ModuleDict(
            {
                table.name: nn.Embedding(
                    table.rows, model.dim, sparse=sparse and table.rows >= FEWEST_ROWS_SPARSE
                )
                for table in columns.tables
                if table.name in CATEGORIES
            }
        )

    def forward(self, rows: dict[str, torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [B]."""
        found = torch.stack([self.tables[name](each) for name, each in rows.items()], dim=1)
        return self.head(Stacked(found), Numbers(numbers))

    loss = staticmethod(click_loss)
    inputs = staticmethod(inputs_of)


class ClickLimit(Limit):
    """Limit of the model of `ctr.py`."""

    @override
    def _tables(self, columns: Columns) -> list[Table]:
        return [table for table in columns.tables if table.name in CATEGORIES]

    @override
    def _make_head(self, columns: Columns, model: Model) -> nn.Module:
        return make_head(columns, model)

    @override
    def _inputs(
        self, columns: Columns, events: np.ndarray, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return inputs_of(columns, events, device)

    @override
    def _loss(self, found: torch.Tensor, others: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = found.view(len(self.slots), len(labels), -1).transpose(0, 1)
        return click_loss(self.head(Stacked(rows), Numbers(others)), labels)
