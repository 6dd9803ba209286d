"""The model and its shards: what it can express, where its rows lie, and that it does not depend on ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from example import RatingModel, make_loss, make_model
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.errors import UserError
from recsuite.models.tasks import ModelData
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding import plan as sharding
from recsuite.sharding.dynamic_ranks import dynamic_rows
from recsuite.sharding.plan import describe_plan
from recsuite.sharding.recommender import (
    ModelInput,
    Recommender,
    make_embeddings,
    table_of,
    torchrec_name,
)
from recsuite.training.state import build_train_state
from recsuite.training.steps import BatchFeed

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def config(synthetic_folder: Path) -> Config:
    return Config.of(data_path=str(synthetic_folder), batch_size=512, history=0)


@pytest.fixture(scope="module")
def columns(config: Config) -> Columns:
    return open_columns(config)


def tables_of(columns: Columns, config: Config, context: RuntimeContext) -> dict[str, torch.Tensor]:
    state = build_train_state(columns, config, context, make_model).model.state_dict()
    return {
        name.split(".")[-2]: value.local_shards()[0].tensor.detach()
        for name, value in state.items()
        if isinstance(value, ShardedTensor)
    }


def first_batch(columns: Columns, config: Config, context: RuntimeContext) -> ModelInput:
    sampler = EpochSampler(EventBatches(columns, config, 0, 1))
    feed = BatchFeed(build_dataloader(sampler.dataset, sampler, config))
    return next(feed.batches("train", 0)).to(context.device)


def test_initial_rows_depend_on_the_seed_and_the_row_alone(
    columns: Columns, config: Config, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = (tables_of(columns, config, context) for _ in range(2))
    other = tables_of(columns, config.replaced(seed=1), context)
    for name, rows in first.items():
        assert torch.equal(rows, again[name])
        assert not torch.equal(rows, other[name])
        assert (rows[UNKNOWN_ROW] == 0).all()
        assert float(rows.std()) == pytest.approx(sharding.INIT_STD, rel=0.5)
    # A table that is longer than a block has no row twice.
    monkeypatch.setattr(sharding, "INIT_BLOCK_ROWS", 16)
    movie = tables_of(columns, config, context)["movie"]
    assert len(movie.unique(dim=0)) == len(movie)


def test_a_table_may_have_the_name_of_any_attribute_of_a_module() -> None:
    # All that a dictionary of modules has, and names that only look like what these become.
    names = {*dir(torch.nn.ModuleDict()), *dir(torch.nn.Module()), "type_", "type__", "user"}
    tables: Any = make_embeddings(dict.fromkeys(names, 3), dict.fromkeys(names, 4))[0]
    assert {table_of(config.name) for config in tables.embedding_configs()} == names
    assert {table_of(key) for key in tables.state_dict()} == names
    assert [config.feature_names for config in tables.embedding_configs()] == [[name] for name in names]
    assert torchrec_name("user") == "user"


def test_different_users_get_different_rankings(
    columns: Columns, config: Config, context: RuntimeContext
) -> None:
    model = build_train_state(columns, config, context, make_model).model.module
    for shard in (value.local_shards()[0].tensor for value in model.state_dict().values() if _sharded(value)):
        shard.detach().mul_(10)
    batch = first_batch(columns, config, context)
    num_rows = len(batch.labels)
    features = batch.features
    num_users, num_movies = 8, num_rows // 8
    # The same movies for each of a few users: the user's columns repeat, the movies' are tiled.
    lengths, values = features.lengths().view(len(columns.tables), -1), []
    parts = torch.split(features.values(), lengths.sum(1).tolist())
    movie_slice = slice(0, num_movies)
    # The first table is that of the users: one rating of each of the first few of them.
    rows = parts[0].tolist()
    users = [rows.index(row) for row in dict.fromkeys(rows)][:num_users]
    new_lengths = []
    for table, part, counts in zip(columns.tables, parts, lengths, strict=True):
        pieces = torch.split(part, counts.tolist())
        if table.feature.entity == "user":
            chosen = [pieces[user] for user in users for _ in range(num_movies)]
        else:
            chosen = list(pieces[movie_slice]) * num_users
        values += chosen
        new_lengths += [len(piece) for piece in chosen]
    crossed = type(features)(
        keys=features.keys(), values=torch.cat(values), lengths=torch.tensor(new_lengths, dtype=torch.int32)
    )
    with torch.no_grad():
        output = model.recommender(dataclasses.replace(batch, features=crossed))
    scores = output.predictions.view(num_users, num_movies)
    rankings = {tuple(row.argsort().tolist()) for row in scores}
    assert len(rankings) == num_users


def _sharded(value: object) -> bool:
    return isinstance(value, ShardedTensor)


def test_the_loss_is_the_mean_over_real_rows_with_the_decay_of_their_vectors(
    columns: Columns, config: Config, context: RuntimeContext
) -> None:
    config = config.replaced(l2=0.3)
    loss = make_loss(columns, config)
    model = build_train_state(columns, config, context, make_model, loss).model.module
    batch = first_batch(columns, config, context)
    half = torch.zeros_like(batch.weights)
    half[: len(half) // 2] = 2
    with torch.no_grad():
        mean, (predictions, squares) = model(dataclasses.replace(batch, weights=half))
    errors = (predictions - batch.labels) ** 2 + config.optimizer.l2 * squares
    assert float(mean) == pytest.approx(float(errors[: len(half) // 2].mean()), rel=1e-5)


def test_the_model_follows_the_table_of_features(columns: Columns) -> None:
    head = RatingModel(ModelData(columns.schema, [table.feature for table in columns.tables], 3.5), 8, (4,))
    recommender = Recommender({table.name: table.rows for table in columns.tables}, 8, head)
    names = [key.split(".")[1] for key in recommender.embeddings[0].state_dict()]
    assert names == [table.name for table in columns.tables]
    assert {name for name, _ in head.named_parameters()} == {
        "mlp.0.weight",
        "mlp.0.bias",
        "mlp.2.weight",
        "mlp.2.bias",
    }


def test_the_plan_is_a_line_for_each_table(columns: Columns, config: Config, context: RuntimeContext) -> None:
    model = build_train_state(columns, config, context, make_model).model
    lines = describe_plan(model, columns).splitlines()
    assert lines[0].split() == ["table", "rows", "dim", "sharding", "ranks", "MiB"]
    assert [line.split()[0] for line in lines[1:]] == [table.name for table in columns.tables]
    movie = next(line.split() for line in lines if line.startswith("movie"))
    assert movie[2:5] == ["32", "table_wise", "0"]


def test_tables_that_do_not_fit_are_refused(
    columns: Columns, config: Config, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = dataclasses.replace(
        columns, tables=tuple(dataclasses.replace(table, rows=10**10) for table in columns.tables)
    )
    monkeypatch.setattr(sharding, "_room_per_rank", lambda config, context: 2**30)
    with pytest.raises(UserError, match=r"need [\d,]+\.\d GiB.* 1 rank .*1\.0 GiB.*--embedding_dim"):
        build_train_state(huge, config, context, make_model)


@pytest.mark.parametrize(("capacity", "grow"), [("100%", 0.0), ("user=80%,movie=5%,history=5%", 0.75)])
def test_a_share_of_the_memory_fits_it_also_when_tables_have_grown(
    config: Config,
    context: RuntimeContext,
    monkeypatch: pytest.MonkeyPatch,
    capacity: str,
    grow: float,
) -> None:
    memory = 2**24
    monkeypatch.setattr(sharding, "_room_per_rank", lambda config, context: memory)
    tried = config.replaced(vocabulary="dynamic", history=5, capacity=capacity, max_load_factor=grow)
    model = build_train_state(open_columns(tried), tried, context, make_model).model
    taken = sum(rows.weights.nbytes for rows in dynamic_rows(model).values())
    assert 0.5 * memory < taken < memory


def test_a_capacity_beyond_the_memory_is_refused_before_anything_is_made_of_it(
    config: Config, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_room_per_rank", lambda config, context: 2**30)
    tried = config.replaced(vocabulary="dynamic", history=5, capacity=str(2**38))
    with pytest.raises(UserError, match=r"^--capacity 274877906944 .*8 times .* GiB.* 870\.4 MiB"):
        build_train_state(open_columns(tried), tried, context, make_model)
