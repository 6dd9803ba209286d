"""The tables' step on the CPU: it equals TorchRec's and FBGEMM's, rows, optimizer's state and all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsuite.checkpoint.full import tensors_of
from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.cpu.cpu_tables import CpuTables
from recsuite.sharding.plan import make_sharder
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.state import build_train_state
from tests.support.steps import train_epoch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def config(synthetic_folder: Path) -> Config:
    return Config.of(data_path=str(synthetic_folder), batch_size=1024, epochs=1, history=3)


@pytest.fixture(scope="module")
def context(context: RuntimeContext) -> RuntimeContext:
    # A test of the CPU's step, also where there is a GPU.
    return dataclasses.replace(context, device=torch.device("cpu"))


def trained(config: Config, context: RuntimeContext) -> tuple[torch.Tensor, dict[str, torch.Tensor], bool]:
    """Losses of an epoch, all that was learned in it, and whether the tables were ours."""
    columns = open_columns(config)
    sampler = EpochSampler(EventBatches(columns, config, 0, 1))
    train_state = build_train_state(columns, config, context)
    input_pipeline = InputPipeline(build_dataloader(sampler.dataset, sampler, config))
    losses = train_epoch(train_state, input_pipeline, Progress(), config.training, context)
    state = {
        name: (value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value).detach().clone()
        for name, value in tensors_of(train_state).items()
    }
    is_ours = any(isinstance(module, CpuTables) for module in train_state.model.modules())
    return torch.from_numpy(losses), state, is_ours


# Of rows wider than 1,024 numbers FBGEMM returns zeros on a GPU.
@pytest.mark.parametrize("width", [32, 1028])
def test_an_epoch_equals_that_of_fbgemm(config: Config, context: RuntimeContext, width: int) -> None:
    config = config.replaced(embedding_dim=width)
    losses, state, is_ours = trained(config, context)
    their_losses, their_state, is_still_ours = trained(config.replaced(cpu_tables="torchrec"), context)
    assert (is_ours, is_still_ours) == (True, False)
    torch.testing.assert_close(losses, their_losses, rtol=1e-4, atol=0)
    assert state.keys() == their_state.keys()
    for name in state:
        torch.testing.assert_close(state[name], their_state[name], rtol=1e-3, atol=1e-4, msg=name)
    # All of it had something to learn.
    assert all(float(state[name].max()) > 0 for name in state if name.endswith("momentum1"))


def test_rows_that_fbgemm_returns_as_zeros_on_a_gpu_are_refused_there(context: RuntimeContext) -> None:
    on_gpu = dataclasses.replace(context, device=torch.device("cuda"))
    make_sharder({}, Config.of(embedding_dim=1024), {}, on_gpu)
    with pytest.raises(UserError, match=r"--embedding_dim 1028 is too large for a GPU, .* at most 1,024"):
        make_sharder({}, Config.of(embedding_dim=1028), {}, on_gpu)


def test_a_row_that_no_table_has_ends_the_run(config: Config, context: RuntimeContext) -> None:
    columns = open_columns(config)
    sampler = EpochSampler(EventBatches(columns, config, 0, 1))
    batch = next(InputPipeline(build_dataloader(sampler.dataset, sampler, config)).batches("train", 0))
    model = build_train_state(columns, config, context).model
    for row in (columns.tables[0].rows, -1):
        batch.features.values()[7] = row
        with pytest.raises(IndexError, match=f"user: rows .*{row}.* are asked for, and there are "):
            model(batch)
