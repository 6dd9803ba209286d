"""The decay of the tables: exact for every row, whether a step looks it up or not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from example import make_loss, make_model
from recsuite.checkpoint.checkpointer import checkpointing
from recsuite.checkpoint.writer import tensors_of
from recsuite.config.config import Config
from recsuite.datasets.opening import open_data
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.models.tasks import ModelData, ModelMaker
from recsuite.runtime.process import cleanup_runtime, init_runtime
from recsuite.sharding.plan import embedding_tables
from recsuite.sharding.recommender import ModelInput
from recsuite.sharding.table_rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam, TableRule
from recsuite.training.loop import Training
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel, build_train_state
from recsuite.training.steps import BatchFeed, learn
from recsuite.training.weights import apply_row_scale
from tests.support.feature_rows import feature_rows
from tests.support.planted_model import local_parts
from tests.support.several_widths import WIDTHS, several_widths
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

    def __init__(
        self, model: Any, tables: dict[str, torch.Tensor], config: Config, rule: TableRule, rate: float
    ) -> None:
        self.model = model
        self.tables = {name: table.clone().requires_grad_() for name, table in tables.items()}
        self.rate = rate
        self.optimizers = {name: oracle_of(rule, table) for name, table in self.tables.items()}
        self.seen = {name: torch.zeros(len(table), dtype=torch.bool) for name, table in tables.items()}
        self.dense = torch.optim.AdamW(
            model.parameters(),
            config.optimizer.dense_lr,
            weight_decay=config.optimizer.dense_weight_decay,
        )
        self.config = config

    def step(self, batch: ModelInput, left: float, share: float) -> None:
        features = batch.features.to_dict()
        looked_up = {
            name: Rows(self.tables[name], jagged.values(), jagged.lengths())
            for name, jagged in features.items()
        }
        predictions = self.model.predict(feature_rows(looked_up), batch)
        loss = (batch.weights * (predictions - batch.labels) ** 2).mean()
        self.dense.zero_grad()
        loss.backward()
        self.dense.param_groups[0]["lr"] = self.config.optimizer.dense_lr * left
        self.dense.step()
        with torch.no_grad():
            for name, table in self.tables.items():
                assert table.grad is not None
                rows = features[name].values().unique()
                self.seen[name] |= (table.grad != 0).any(dim=1)
                # As a sparse gradient: what no event of the batch has is not looked at.
                table.grad = torch.sparse_coo_tensor(rows[None], table.grad[rows], table.size())
                optimizer = self.optimizers[name]
                optimizer.param_groups[0]["lr"] = left * self.rate
                optimizer.step()
                table *= math.exp(-self.config.optimizer.weight_decay * left * share)
                table.grad = None


class RowWise(torch.optim.Optimizer):
    """Row-wise Adagrad and Adam of a sparse gradient, as the papers of both have them."""

    def __init__(self, table: torch.Tensor, rule: TableRule) -> None:
        super().__init__([table], {"lr": 0.0})
        self.rule, self.table, self.count = rule, table, 0
        self.mean, self.square = torch.zeros_like(table), torch.zeros(len(table), 1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.table.grad is not None
        self.count += 1
        sparse = self.table.grad.coalesce()
        rows, gradients = sparse.indices()[0], sparse.values()
        squares = (gradients**2).mean(dim=1, keepdim=True)
        if isinstance(self.rule, RowWiseAdagrad):
            self.square[rows] += squares
            step = gradients / (self.square[rows].sqrt() + 1e-8)
        else:
            self.mean[rows] = 0.9 * self.mean[rows] + 0.1 * gradients
            self.square[rows] = 0.999 * self.square[rows] + 0.001 * squares
            root = (self.square[rows] / (1 - 0.999**self.count)).sqrt()
            step = self.mean[rows] / (1 - 0.9**self.count) / (root + 1e-8)
        self.table[rows] -= self.param_groups[0]["lr"] * step


def oracle_of(rule: TableRule, table: torch.Tensor) -> torch.optim.Optimizer:
    """PyTorch's own optimizer of a table, or what the papers say."""
    if isinstance(rule, (RowWiseAdagrad, RowWiseAdam)):
        return RowWise(table, rule)
    if isinstance(rule, Adagrad):
        return torch.optim.Adagrad([table], 0.0, eps=1e-8)
    # It adds eps to a root that is not corrected, so they agree where eps is next to nothing.
    return torch.optim.SparseAdam([table], eps=1e-12) if isinstance(rule, Adam) else torch.optim.SGD([table])


def rows_of(train_state: ShardedModel) -> dict[str, torch.Tensor]:
    """Table to its rows, as the model means them."""
    return {
        name.split(".")[1]: value.local_shards()[0].tensor.detach() * train_state.row_scale
        for name, value in tensors_of(train_state).items()
        if isinstance(value, ShardedTensor) and name.endswith(".weight")
    }


RULES = RowWiseAdagrad(0.04), Adagrad(0.04), Adam(0.01, eps=1e-12), RowWiseAdam(0.01), SGD(16.0)
CASES = [
    *((rule, make_model, "vectorised") for rule in RULES[:1]),
    *((rule, several_widths, "vectorised") for rule in RULES),
    (RULES[1], several_widths, "torchrec"),
]


@pytest.mark.parametrize(
    ("rule", "maker", "cpu_tables"),
    CASES,
    ids=[f"{type(rule).__name__} {maker.__name__} {tables}" for rule, maker, tables in CASES],
)
def test_every_row_learns_and_decays_as_if_each_step_had_shrunk_the_whole_table(
    small_folder: Path, rule: TableRule, maker: ModelMaker, cpu_tables: str
) -> None:
    config = Config.of(
        data_path=str(small_folder), batch_size=128, history=3, weight_decay=2.0, epochs=2, mlp_dims=(8,)
    ).replaced(cpu_tables=cpu_tables)
    threads = torch.get_num_threads()
    context = init_runtime(config)
    try:
        columns = open_columns(config)
        train_state = build_train_state(columns, config, context, maker, make_loss(columns, config), rule)
        features = [table.feature for table in columns.tables]
        model = maker(ModelData(columns.schema, features, columns.mean_label), config.model)
        state = train_state.head.state_dict()
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        # The only row that no training rating looks up; it begins with zeros otherwise.
        embedding_tables(train_state.model)["movie"].export()["weight"][UNKNOWN_ROW] = 1.0
        before = rows_of(train_state)
        reference = Reference(model, before, config, rule, rule.rate(config.rated_batch(columns.num_train)))
        with open_data(config, context) as data:
            feed = BatchFeed(data.loader)
            position, num_train = Progress(), columns.num_train
            for batch, size in zip(
                feed.batches("train", 0), data.loader.dataset.step_sizes("train"), strict=True
            ):
                left = 1 - position.samples / num_train / config.training.epochs
                reference.step(batch, left, size / num_train)
                position = dataclasses.replace(position, samples=position.samples + size)
            train_epoch(train_state, feed, Progress(), config.training, context)
        after = rows_of(train_state)
    finally:
        cleanup_runtime()
        torch.set_num_threads(threads)
    # In the first of two epochs the rate falls from all to half.
    assert float(train_state.row_scale) == pytest.approx(math.exp(-2.0 * 0.75), rel=0.02)
    for name, rows in after.items():
        torch.testing.assert_close(rows, reference.tables[name].detach(), rtol=1e-3, atol=5e-5)
        # All of it had something to learn.
        assert (rows - before[name] * train_state.row_scale).abs().max() > 0.001
    assert not reference.seen["movie"][UNKNOWN_ROW]
    unknown = after["movie"][UNKNOWN_ROW].tolist()
    assert unknown == [float(train_state.row_scale)] * (32 if maker is make_model else WIDTHS["movie"])


def test_the_decay_of_the_second_pass_is_divided_by_two_to_the_power(small_folder: Path) -> None:
    config = Config.of(
        data_path=str(small_folder),
        batch_size=128,
        weight_decay=2.0,
        decay_power=1.0,
        epochs=2,
        patience=0,
    )
    context = init_runtime(config)
    try:
        with open_data(config, context) as data, Training(data, config, context) as training:
            model = training.shard(make_model, make_loss(training.columns, config))
            for epoch in training.epochs():
                learn(epoch)
                training.save(training.validate())
            scale = float(model.row_scale)
    finally:
        cleanup_runtime()
    # The rate falls from all to half, and then to nothing.
    assert scale == pytest.approx(math.exp(-2.0 * (0.75 + 0.25 / 2)), rel=0.03)


def test_a_small_scale_is_moved_into_the_tables_without_changing_a_bit(
    trained: Trained,
) -> None:
    tensors, scale = tensors_of(trained.train_state), trained.train_state.row_scale

    def rows() -> list[torch.Tensor]:
        return [
            part * scale
            for name, value in tensors.items()
            if name.startswith("tables.") and name.endswith(".weight")
            for part in local_parts(value)
        ]

    scale.fill_(0.7 * 2.0**-33)
    before = rows()
    assert apply_row_scale(trained.train_state)
    assert 0.5 <= float(scale) < 1
    assert all(map(torch.equal, rows(), before))
    # Now there is nothing to move.
    assert not apply_row_scale(trained.train_state)


def test_after_a_scale_was_moved_into_the_tables_the_next_checkpoint_is_full(trained: Trained) -> None:
    config = trained.config.replaced(resume=True, inc_dump=True)
    with checkpointing(trained.columns, config, trained.context) as checkpointer:
        checkpointer.begin(trained.train_state, checkpointer.start)
        checkpointer.on_rescale()
        tell(checkpointer, Progress(5, 0, 5))
        tell(checkpointer, Progress(6, 0, 6))
    names = [path.name for path in trained.folder.iterdir()]
    assert "step-000000005" in names
    assert "delta-000000006" in names
