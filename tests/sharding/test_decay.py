"""The decay of the tables: exact for every row, whether a step looks it up or not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsuite.checkpoint.delta import shards_of
from recsuite.checkpoint.full import tensors_of
from recsuite.checkpoint.session import checkpointing
from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.datasets.opening import open_data
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.models.heads import Interaction
from recsuite.runtime.process import cleanup_runtime, init_runtime
from recsuite.sharding.recommender import ModelInput
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.optimizer import RowWiseAdagrad
from recsuite.training.state import ShardedModel, build_train_state
from recsuite.training.weights import fold_scale, local_parts
from tests.support.feature_rows import feature_rows
from tests.support.steps import tell, train_epoch
from tests.support.trained import Trained

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Rows:
    """Looked-up rows as a reference sees them."""

    def __init__(self, table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._values, self._lengths = table[rows], lengths

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> torch.Tensor:
        return self._lengths


class Reference:
    """The same training as textbooks have it: whole tables, of which every step shrinks every row."""

    def __init__(self, interaction: Interaction, tables: dict[str, torch.Tensor], config: Config) -> None:
        self.interaction = interaction
        self.tables = {name: table.clone().requires_grad_() for name, table in tables.items()}
        self.sums = {name: torch.zeros(len(table)) for name, table in tables.items()}
        self.dense = torch.optim.AdamW(
            interaction.parameters(),
            config.optimizer.dense_lr,
            weight_decay=config.optimizer.dense_weight_decay,
        )
        self.config = config

    def step(self, batch: ModelInput, left: float, share: float) -> None:
        looked_up = {
            name: Rows(self.tables[name], jagged.values(), jagged.lengths())
            for name, jagged in batch.features.to_dict().items()
        }
        predictions = self.interaction.predict(feature_rows(looked_up), batch)
        loss = (batch.weights * (predictions - batch.labels) ** 2).mean()
        self.dense.zero_grad()
        loss.backward()
        self.dense.param_groups[0]["lr"] = self.config.optimizer.dense_lr * left
        self.dense.step()
        with torch.no_grad():
            for name, table in self.tables.items():
                assert table.grad is not None
                self.sums[name] += table.grad.square().mean(dim=1)
                step = table.grad / (self.sums[name].sqrt() + 1e-8).unsqueeze(1)
                rate = RowWiseAdagrad(self.config.optimizer.lr).rate(self.config.loader.batch_size)
                table -= rate * left * step
                table *= math.exp(-self.config.optimizer.weight_decay * left * share)
                table.grad = None


def rows_of(train_state: ShardedModel) -> dict[str, torch.Tensor]:
    """Table to its rows, as the model means them."""
    return {
        name.split(".")[1]: value.local_shards()[0].tensor.detach() * train_state.row_scale
        for name, value in tensors_of(train_state).items()
        if isinstance(value, ShardedTensor) and name.endswith(".weight")
    }


def test_every_row_decays_as_if_each_step_had_shrunk_the_whole_table(synthetic_folder: Path) -> None:
    config = Config.of(
        data_path=str(synthetic_folder), batch_size=512, history=3, weight_decay=2.0, epochs=2, mlp_dims=(8,)
    )
    threads = torch.get_num_threads()
    context = init_runtime(config)
    try:
        columns = open_columns(config)
        train_state = build_train_state(columns, config, context)
        features = [table.feature for table in columns.tables]
        interaction = Interaction(
            features, config.model.embedding_dim, config.model.mlp_dims, columns.mean_label
        )
        state = train_state.model.module.recommender.head.state_dict()
        interaction.load_state_dict({name: state[name] for name in interaction.state_dict()})
        # The only row that no training rating looks up; it begins with zeros otherwise.
        shards_of(tensors_of(train_state))["movie"]["weight"][0].tensor.detach()[UNKNOWN_ROW] = 1.0
        before = rows_of(train_state)
        reference = Reference(interaction, before, config)
        with open_data(config, context) as data:
            input_pipeline = InputPipeline(data.loader)
            position, num_train = Progress(), columns.num_train
            for batch, size in zip(
                input_pipeline.batches("train", 0), data.loader.dataset.step_sizes("train"), strict=True
            ):
                left = 1 - position.samples / num_train / config.training.epochs
                reference.step(batch, left, size / num_train)
                position = dataclasses.replace(position, samples=position.samples + size)
            train_epoch(train_state, input_pipeline, Progress(), config.training, context)
        after = rows_of(train_state)
    finally:
        cleanup_runtime()
        torch.set_num_threads(threads)
    # In the first of two epochs the rate falls from all to half.
    assert float(train_state.row_scale) == pytest.approx(math.exp(-2.0 * 0.75), rel=0.02)
    for name, rows in after.items():
        torch.testing.assert_close(rows, reference.tables[name].detach(), rtol=1e-3, atol=1e-5)
    assert reference.sums["movie"][UNKNOWN_ROW] == 0
    assert after["movie"][UNKNOWN_ROW].tolist() == [float(train_state.row_scale)] * config.model.embedding_dim


def test_a_scale_that_has_become_small_is_moved_into_the_tables_without_changing_a_bit(
    trained: Trained,
) -> None:
    tensors, scale = tensors_of(trained.train_state), trained.train_state.row_scale

    def rows() -> list[torch.Tensor]:
        return [
            part * scale
            for name, value in tensors.items()
            if name.startswith("tables.") and name.endswith(".weight")
            for part in local_parts(name, value)
        ]

    scale.fill_(0.7 * 2.0**-33)
    before = rows()
    assert fold_scale(trained.train_state)
    assert 0.5 <= float(scale) < 1
    assert all(map(torch.equal, rows(), before))
    # Now there is nothing to move.
    assert not fold_scale(trained.train_state)


def test_after_a_scale_was_moved_into_the_tables_the_next_checkpoint_is_full(trained: Trained) -> None:
    config = trained.config.replaced(resume=True, inc_dump=True)
    with checkpointing(trained.columns, config, trained.context) as checkpointer:
        checkpointer.begin(trained.train_state)
        checkpointer.on_fold()
        tell(checkpointer, Progress(5, 0, 5))
        tell(checkpointer, Progress(6, 0, 6))
    names = [path.name for path in trained.folder.iterdir()]
    assert "step-000000005" in names
    assert "delta-000000006" in names
