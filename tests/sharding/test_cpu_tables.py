"""The tables' step on the CPU: it equals TorchRec's and FBGEMM's, rows, optimizer's state and all."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import dist_data
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from example import make_loss, make_model
from recsuite.checkpoint.writer import tensors_of
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.models.layers import padded_means
from recsuite.models.tasks import ModelMaker
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding import plan
from recsuite.sharding.cpu_tables import CpuTables, TableLayout
from recsuite.sharding.plan import make_sharder
from recsuite.sharding.table import track_changes
from recsuite.sharding.table_rules import (
    SGD,
    Adagrad,
    Adam,
    RowWiseAdagrad,
    RowWiseAdam,
    TableRule,
    check_rule,
)
from recsuite.sharding.torchrec_tables import CheckedFeatures, JoinedGradient, OneRankTables, _Parts
from recsuite.training.progress import Progress
from recsuite.training.state import build_train_state
from recsuite.training.steps import BatchFeed
from tests.support.several_widths import several_widths
from tests.support.steps import train_epoch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def config(small_folder: Path) -> Config:
    return Config.of(data_path=str(small_folder), batch_size=256, epochs=1, history=3)


@pytest.fixture(scope="module")
def context(context: RuntimeContext) -> RuntimeContext:
    # A test of the CPU's step, also where there is a GPU.
    return dataclasses.replace(context, device=torch.device("cpu"))


Trained = tuple[torch.Tensor, dict[str, torch.Tensor], bool]


class Signs(TableRule):
    """A rule of one's own: steps by signs, with a number and a vector of each row."""

    name = "signs"
    slots: ClassVar = {"steps": True, "last": False}

    def step(self, gradients: torch.Tensor, state: Any, rate: torch.Tensor, number: int) -> torch.Tensor:
        state["steps"] += 1
        state["last"].copy_(gradients)
        return -rate * gradients.sign()


class NoStep(TableRule):
    name = "no step"


def trained(
    config: Config, context: RuntimeContext, rule: TableRule | None = None, maker: ModelMaker = make_model
) -> Trained:
    """Losses of an epoch, all that was learned and which rows changed in it, and if the tables were ours."""
    columns = open_columns(config)
    sampler = EpochSampler(EventBatches(columns, config, 0, 1))
    train_state = build_train_state(columns, config, context, maker, make_loss(columns, config), rule)
    track_changes(train_state.model, train_state.tables)
    feed = BatchFeed(build_dataloader(sampler.dataset, sampler, config))
    losses = train_epoch(train_state, feed, Progress(), config.training, context)
    state = {
        name: (value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value).detach().clone()
        for name, value in tensors_of(train_state).items()
    }
    state |= {f"changed {name}": cast("Any", table).marks for name, table in train_state.tables.items()}
    is_ours = any(isinstance(module, CpuTables) for module in train_state.model.modules())
    return torch.from_numpy(losses), state, is_ours


# Of rows wider than 1,024 numbers FBGEMM returns zeros on a GPU.
@pytest.mark.parametrize(("rule", "width"), [(None, 32), (None, 1028), (SGD(1.0), 32), (Adagrad(0.04), 32)])
def test_an_epoch_equals_that_of_fbgemm(
    config: Config, context: RuntimeContext, rule: TableRule | None, width: int
) -> None:
    config = config.replaced(embedding_dim=width)
    losses, state, is_ours = trained(config, context, rule)
    their_losses, their_state, is_still_ours = trained(config.replaced(cpu_tables="torchrec"), context, rule)
    assert (is_ours, is_still_ours) == (True, False)
    torch.testing.assert_close(losses, their_losses, rtol=1e-4, atol=0)
    assert state.keys() == their_state.keys()
    for name in state:
        torch.testing.assert_close(state[name], their_state[name], rtol=1e-3, atol=1e-4, msg=name)
    # All of it had something to learn.
    assert all(float(state[name].max()) > 0 for name in state if name.endswith("momentum1"))


@pytest.mark.parametrize("maker", [make_model, several_widths])
def test_one_rank_learns_without_the_exchanges_of_torchrec_what_it_learns_with_them(
    monkeypatch: pytest.MonkeyPatch, config: Config, context: RuntimeContext, maker: ModelMaker
) -> None:
    config = config.replaced(cpu_tables="torchrec")
    with mock.patch.object(dist_data, "_get_recat", wraps=dist_data._get_recat) as orders:
        losses, state, _ = trained(config, context, maker=maker)
        assert not orders.called
        monkeypatch.setattr(plan, "OneRankTablesSharder", EmbeddingCollectionSharder)
        their_losses, their_state, _ = trained(config, context, maker=maker)
        # Where this fails, TorchRec no longer makes this copy on one rank, and `OneRankTables` may go.
        assert orders.call_count >= len(losses)
    assert torch.equal(losses, their_losses)
    assert state.keys() == their_state.keys()
    assert [name for name in state if not torch.equal(state[name], their_state[name])] == []
    assert state["changed user"].any()


class Doubling:
    """Stand-in for a kernel of FBGEMM, whose rows are the ids, twice. modes: of its checks of ids."""

    def __init__(self) -> None:
        self.bounds_check_mode_int = FATAL
        self.modes: list[int] = []

    def __call__(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.bounds_check_mode_int)
        assert (offsets[0], offsets[-1]) == (0, len(ids))
        return ids.float().unsqueeze(1).expand(-1, 2)


FATAL, NONE = BoundsCheckMode.FATAL.value, BoundsCheckMode.NONE.value


@pytest.mark.parametrize("groups", [[2], [1, 1]])
@pytest.mark.parametrize(("kind", "mode"), [(KeyedJaggedTensor, FATAL), (CheckedFeatures, NONE)])
def test_one_rank_finds_features_in_the_order_of_its_lookup_and_sends_that_order_to_the_device_once(
    groups: list[int], kind: type[KeyedJaggedTensor], mode: int
) -> None:
    kernels = [(Doubling(), number, FATAL) for number in groups]
    tables: Any = SimpleNamespace(
        feature_names=["c", "a"], _kernels=kernels, _positions=None, post_lookup_tracker_fn=None
    )
    tables._rows_of = functools.partial(OneRankTables._rows_of, tables)
    with mock.patch.object(torch, "tensor", wraps=torch.tensor) as made:
        for first in (10, 40):
            lengths, values = torch.tensor([1, 1, 0, 1, 2, 0]), torch.arange(first, first + 5)
            made.reset_mock()
            found = OneRankTables.forward(tables, kind(["a", "b", "c"], values, lengths=lengths))
            assert list(found) == ["c", "a"]
            assert found["a"].values().tolist() == [[first] * 2, [first + 1] * 2]
            assert found["c"].values().tolist() == [[first + 3] * 2, [first + 4] * 2]
            assert found["c"].lengths().tolist() == [2, 0]
            assert made.call_count == (1 if first == 10 else 0)
    # Each call says anew whether ids are to be checked.
    assert [kernel.modes for kernel, *_ in kernels] == [[mode, mode]] * len(groups)


@pytest.mark.parametrize("uses", [1, 2])
def test_the_gradient_of_a_padded_list_is_written_where_those_of_all_features_are(uses: int) -> None:
    sizes, counts = [4, 4, 12, 4, 8], torch.tensor([0, 1, 2, 2])
    held, target = torch.randn(sum(sizes), 3), torch.randn(4, 3)

    def gradient(parts: Sequence[torch.Tensor], memory: Callable[[int], Any], rows: torch.Tensor) -> Any:
        total = parts[0] * parts[1] + parts[3]
        for factor in range(1, uses + 1):
            weights = torch.arange(12.0) * factor
            total = total + padded_means(parts[2], counts, weights, len(counts), memory(2))
        total = total + padded_means(parts[4], counts, None, len(counts), memory(4))
        return torch.autograd.grad((total * target).sum(), rows)[0]

    plain, rows = held.clone().requires_grad_(), held.clone().requires_grad_()
    joined = JoinedGradient(rows, sizes)
    parts = _Parts.apply(rows, sizes, joined)
    with mock.patch.object(torch, "cat", wraps=torch.cat) as copies:
        found = gradient(parts, lambda index: functools.partial(joined.memory_of, index), rows)
    assert torch.equal(found, gradient(plain.split(sizes), lambda index: None, plain))
    # The gradient of a list that is used twice is a sum.
    copied = [[len(part) for part in call.args[0]] for call in copies.call_args_list]
    assert copied == ([[4, 4], [4]] if uses == 1 else [[4, 4, 12, 4]])


def test_rows_that_fbgemm_returns_as_zeros_on_a_gpu_are_refused_there(context: RuntimeContext) -> None:
    on_gpu = dataclasses.replace(context, device=torch.device("cuda"))
    make_sharder(RowWiseAdagrad(0.04), Config(), {}, on_gpu, 1024, 0.04)
    with pytest.raises(UserError, match=r"embedding_dim of 1028 is too large for a GPU, .* at most 1,024"):
        make_sharder(RowWiseAdagrad(0.04), Config(), {}, on_gpu, 1028, 0.04)


FBGEMMS = "rs.SGD, rs.Adagrad, rs.RowWiseAdagrad"
ALL = f"{FBGEMMS}, rs.Adam, rs.RowWiseAdam"
OURS, TORCHREC, GPU = ("vectorised", False), ("torchrec", False), ("gpu", False)
REFUSED: dict[str, tuple[Any, tuple[str, bool], str]] = {
    "no kernel of FBGEMM": (Adam(0.1), TORCHREC, f"with --cpu_tables torchrec .* {FBGEMMS}, got A"),
    "row-wise Adam too": (RowWiseAdam(0.1), TORCHREC, f"of tables with .* {FBGEMMS}, got RowWiseAdam"),
    "an own rule on a GPU": (Signs(0.1), GPU, f"tables on a GPU must be one of {ALL}, got Signs"),
    "an own rule without a step": (NoStep(0.1), OURS, f"must be one of {ALL}, got NoStep"),
    "dynamic tables": (Adagrad(0.1), ("vectorised", True), "of dynamic .* of rs.RowWiseAdagrad, got Adagr"),
    "an optimizer of torch": (torch.optim.Adam, OURS, f"must be one of {ALL}, got <class"),
    "a class": (RowWiseAdagrad, GPU, f"must be one of {ALL}, got <class"),
    "a rate below zero": (SGD(-1.0), OURS, "lr must be at least 0 and finite, .* got SGD.*-1.0"),
    "a rate that is none": (SGD(math.nan), GPU, "lr must be at least 0 and finite"),
    "a beta of one": (Adam(0.1, (0.9, 1.0)), OURS, "betas at least 0 and below 1, got Adam"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_optimizer_that_a_place_lacks_is_refused_with_the_names_of_those_it_has(name: str) -> None:
    rule, tables, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        check_rule(rule, *tables)


def test_a_rule_of_ones_own_has_state_in_checkpoints_and_a_step(
    config: Config, context: RuntimeContext
) -> None:
    losses, state, _ = trained(config, context, Signs(0.004))
    assert losses[len(losses) // 2 :].mean() < losses[: len(losses) // 2].mean()
    assert state["tables.user.steps"].shape == state["tables.user.weight"].shape[:1]
    assert state["tables.user.last"].shape == state["tables.user.weight"].shape
    # The movies of the data are rated in more than one step.
    assert float(state["tables.movie.steps"].max()) > 1


def test_an_optimizer_with_more_state_needs_more_memory_in_the_plan(
    config: Config, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.replaced(embedding_dim=1024, batch_size=8)
    columns = open_columns(config)
    rows = sum(table.rows for table in columns.tables)
    # For twice the rows, beside what the plan leaves to the dense part.
    room = int(2 * rows * config.model.embedding_dim * 4 / (1 - plan.RESERVED_FOR_DENSE))
    monkeypatch.setattr(plan, "_room_per_rank", lambda config, context: room)
    build_train_state(columns, config, context, make_model)
    with pytest.raises(UserError, match=r"--embedding_dim\.$"):
        build_train_state(columns, config, context, make_model, tables=Adam(0.01))


def test_a_row_that_no_table_has_ends_the_run(config: Config, context: RuntimeContext) -> None:
    columns = open_columns(config)
    sampler = EpochSampler(EventBatches(columns, config, 0, 1))
    batch = next(BatchFeed(build_dataloader(sampler.dataset, sampler, config)).batches("train", 0))
    model = build_train_state(columns, config, context, make_model).model
    for row in (columns.tables[0].rows, -1):
        batch.features.values()[7] = row
        with pytest.raises(IndexError, match=f"user: rows .*{row}"):
            model(batch)


def test_the_layout_of_the_rows_of_all_ranks_looks_at_each_shard_once() -> None:
    # A search for the shards of each rank would look at each of them once for each rank.
    ranks, names = 64, ("user", "movie")
    shards = [mock.Mock(shard_offsets=[10 * rank, 0], shard_sizes=[10, 4]) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        shard.placement.rank.return_value = rank
    table = mock.Mock(sharding_type="row_wise", **{"sharding_spec.shards": shards})
    layout = TableLayout(dict.fromkeys(names, table), dict.fromkeys(names, 10 * ranks))
    for rank in range(ranks):
        assert layout.add_group(rank, "row_wise") == (20 * rank, (("user", 0), ("movie", 10)))
    layout.close()
    # The last row of each table is on the last rank.
    last = torch.tensor([10 * ranks - 1])
    assert layout.keys_of(names, [last, last]).tolist() == [20 * ranks - 11, 20 * ranks - 1]
    assert {shard.placement.rank.call_count for shard in shards} == {len(names)}
