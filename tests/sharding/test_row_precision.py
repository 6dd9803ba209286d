"""Rows of 16 bits: what they learn, what checkpoints have of them, and where they are refused."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType

from example import make_loss, make_model
from recsuite.checkpoint.chain import chain_at
from recsuite.checkpoint.checkpointer import checkpointing
from recsuite.checkpoint.folder import newest_in
from recsuite.checkpoint.format import read_manifest
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.stream_state import reopen_data
from recsuite.config.config import Config
from recsuite.datasets.opening import open_data
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.plan import describe_plan
from recsuite.sharding.recommender import ModelInput
from recsuite.training import loop, steps
from recsuite.training import state as training_state
from recsuite.training.loop import Training
from recsuite.training.progress import Progress
from recsuite.training.state import Schedule, ShardedModel, build_train_state, place_draws
from recsuite.training.steps import BatchFeed, Pass
from recsuite.training.weights import apply_row_scale

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TORCHREC = {"cpu_tables": "torchrec"}
HALF = {**TORCHREC, "row_precision": "fp16"}
Rows = dict[str, dict[str, torch.Tensor]]


class Learned(NamedTuple):
    """RMSE of a training, and all rows with their optimizer state after it."""

    rmse: float
    rows: Rows


def config_of(data: Path, folder: Path, **flags: Any) -> Config:
    return Config.of(
        data_path=str(data),
        save_dir=str(folder),
        batch_size=250,
        epochs=3,
        weight_decay=0.15,
        patience=0,
        inc_dump=True,
        dump_every=7,
        **flags,
    )


def rows_of(model: ShardedModel) -> Rows:
    return {name: dict(table.export()) for name, table in model.tables.items()}


def learned(config: Config, context: RuntimeContext) -> Learned:
    with (
        open_data(config, context) as data,
        checkpointing(data.columns, config, context) as checkpointer,
        Training(data, config, context, checkpointer) as training,
    ):
        test = training.run(make_model, make_loss).test
        rows = {name: dict(table.export()) for name, table in checkpointer.writer.tables.items()}
        return Learned(test.values["rmse"], rows)


def built(config: Config, context: RuntimeContext) -> ShardedModel:
    columns = open_columns(config)
    return build_train_state(columns, config, context, make_model, make_loss(columns, config))


@pytest.fixture(scope="module")
def half(
    small_folder: Path, context: RuntimeContext, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Learned]:
    """A training of rows of 16 bits, with a full checkpoint and deltas."""
    config = config_of(small_folder, tmp_path_factory.mktemp("half"), **HALF)
    return config, learned(config, context)


def test_rows_of_16_bits_learn_nearly_the_same(
    half: tuple[Config, Learned], small_folder: Path, tmp_path: Path, context: RuntimeContext
) -> None:
    _, found = half
    whole = learned(config_of(small_folder, tmp_path, **TORCHREC), context)
    assert found.rmse == pytest.approx(whole.rmse, abs=0.002)
    assert {slots["weight"].dtype for slots in found.rows.values()} == {torch.float16}
    assert {slots["momentum1"].dtype for slots in found.rows.values()} == {torch.float32}
    # They have learned: not the drawn rows are compared.
    drawn = rows_of(built(config_of(small_folder, tmp_path, **HALF), context))["user"]["weight"].float()
    moved, apart = (
        float((rows["user"]["weight"].float() - drawn).abs().mean()) for rows in (found.rows, whole.rows)
    )
    assert moved == pytest.approx(apart, rel=0.05)


@pytest.mark.parametrize(
    "flags", [HALF, {"cpu_tables": "vectorised", "row_precision": "fp32"}], ids=["fp16", "fp32"]
)
def test_a_checkpoint_with_deltas_has_each_bit_of_them(
    half: tuple[Config, Learned], context: RuntimeContext, flags: dict[str, str]
) -> None:
    config, found = half
    config = config.replaced(**flags)
    newest = newest_in(Path(config.checkpoint.save_dir))
    assert newest is not None
    chain = chain_at(newest)
    assert chain.deltas
    assert read_manifest(newest).tensors["tables.user.weight"][1] == "float32"
    model = built(config, context)
    restore(chain, model, open_columns(config), context)
    for name, slots in rows_of(model).items():
        for slot, value in slots.items():
            assert torch.equal(value.float(), found.rows[name][slot].float()), (name, slot)


def test_a_plan_shows_half_the_bytes(small_folder: Path, tmp_path: Path, context: RuntimeContext) -> None:
    shown = []
    for flags in (TORCHREC, HALF):
        config = config_of(small_folder, tmp_path, embedding_dim=512, **flags)
        plan = describe_plan(built(config, context).model, open_columns(config)).splitlines()
        shown.append(next(float(line.split()[-1]) for line in plan if line.startswith("user")))
    assert shown[1] == pytest.approx(shown[0] / 2, abs=0.01)


def test_the_scale_of_rows_of_16_bits_is_moved_before_they_become_too_large(
    half: tuple[Config, Learned], context: RuntimeContext
) -> None:
    model = built(half[0], context)
    before = rows_of(model)["user"]["weight"].clone()
    model.row_scale.fill_(0.5 * 2.0**-3)
    assert not apply_row_scale(model)
    model.row_scale.fill_(0.75 * 2.0**-4)
    assert apply_row_scale(model)
    assert float(model.row_scale) == 0.75
    # The smallest number is 2 to the power of -24.
    after = rows_of(model)["user"]["weight"].float()
    assert torch.allclose(after, before.float() / 16, atol=2.0**-25, rtol=0)


def test_rows_beyond_16_bits_are_refused(half: tuple[Config, Learned], context: RuntimeContext) -> None:
    def fill_rows(table: str, slots: dict[str, torch.Tensor], first: int) -> None:
        slots["weight"].copy_(torch.full(slots["weight"].shape, 1e5))

    source: Any = types.SimpleNamespace(fill_rows=fill_rows)
    with pytest.raises(UserError, match="table user are beyond the range of --row_precision fp16"):
        built(half[0], context).tables["user"].load(source, 1.0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"row_precision": "fp16"}, "requires a GPU or --cpu_tables torchrec"),
        ({**HALF, "vocabulary": "dynamic"}, "does not support dynamic tables"),
    ],
)
def test_rows_of_16_bits_are_refused_where_there_is_no_kernel(
    small_folder: Path, context: RuntimeContext, flags: dict[str, str], reason: str
) -> None:
    with pytest.raises(UserError, match=f"--row_precision fp16 {reason}"):
        built(Config.of(data_path=str(small_folder), **flags), context)


def test_a_decay_beyond_16_bits_is_refused() -> None:
    with pytest.raises(UserError, match="--weight_decay of at most 5, got 6"):
        Config.of(**HALF, weight_decay=6.0).validate()
    Config.of(**HALF, weight_decay=5.0).validate()


def test_a_window_of_a_stream_with_a_decay_beyond_16_bits_is_refused(
    small_folder: Path, context: RuntimeContext
) -> None:
    config = Config.of(data_path=str(small_folder), stream=True, window="400", weight_decay=1.0, **HALF)
    with (
        mock.patch.object(loop, "EVENTS_OF_DECAY", 50),
        reopen_data(config, context, trains=True) as data,
        pytest.raises(UserError, match=r"decay of at most 5 in a window, and 400 events .* have 8\.0"),
    ):
        Training(data, config, context).run(make_model, make_loss)


def test_a_step_on_a_gpu_draws_its_rounding_from_the_same_place_in_a_resumed_training() -> None:
    places: list[int] = []
    generator = types.SimpleNamespace(set_offset=places.append)
    kernels = {
        name: types.SimpleNamespace(weights_precision=precision, use_cpu=use_cpu)
        for name, precision, use_cpu in (
            ("gpu", SparseType.FP16, False),
            ("cpu", SparseType.FP16, True),
            ("fp32", SparseType.FP32, False),
        )
    }
    optimizer: Any = None

    def place(step: int, *names: str) -> None:
        with (
            mock.patch.object(training_state, "kernels_of", return_value=[kernels[name] for name in names]),
            mock.patch.object(torch.cuda, "current_device", return_value=0),
            mock.patch.object(torch.cuda, "default_generators", (generator,)),
        ):
            place_draws(optimizer, step)

    place(3, "cpu", "fp32")
    assert places == []
    for step in (3, 4):
        place(step, *kernels)
    assert places[0] > 0
    # Far more than dropout in many layers takes; and a stream may have many steps.
    assert places[1] - places[0] > 10**7
    place(2**38, "gpu")
    assert places.pop() < 2**63
    # The generator takes no others.
    assert [place % 4 for place in places] == [0, 0]


def test_the_place_of_draws_is_set_after_a_pipeline_has_filled_a_cache_which_draws_too(
    half: tuple[Config, Learned], context: RuntimeContext
) -> None:
    config, calls = half[0], list[str]()
    with open_data(config, context) as data:
        model, feed = built(config, context), BatchFeed(data.loader)
        schedule = Schedule(data.columns.num_train, 1)
        part = Pass(model, feed, Progress(0, 0), schedule, config.training, context)
        batches = iter(feed.batches("train", 0))

        def pipeline(*arguments: Any) -> Iterator[ModelInput]:
            for batch in batches:
                calls.append("filled")
                yield batch

        with (
            mock.patch.object(steps, "copied", pipeline),
            mock.patch.object(steps, "place_draws", side_effect=lambda *arguments: calls.append("placed")),
        ):
            next(iter(part))
    assert calls == ["filled", "placed"]
