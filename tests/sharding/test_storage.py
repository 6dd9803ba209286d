"""Tables on a disk: rows, deltas and losses are the bits of tables in memory, and memory is bounded."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner

from example import make_model
from recsuite.checkpoint.chain import chain_at
from recsuite.checkpoint.folder import checkpoints_in
from recsuite.checkpoint.format import read_manifest
from recsuite.checkpoint.shards import RowReader
from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding import plan
from recsuite.sharding.storage import BYTES_BESIDE_A_SLOT, DiskStorage, RowsOnDisk, TableRows
from recsuite.sharding.table_rules import Adam, RowWiseAdagrad, TableRule
from tests.support.csv_ratings import write_ratings
from tests.support.launch import EXAMPLE, SUPPORT, read_json, succeeded, torchrun
from tests.support.memory_groups import run_within

NUM_ROWS, DIM = 300, 5


def on_disk(folder: Path, rule: TableRule, slots: int, seed: int = 0) -> tuple[RowsOnDisk, TableRows]:
    """Rows on a disk with so many of them in memory, and equal rows in memory."""
    shapes = {slot: [NUM_ROWS, DIM][: 2 - is_of_row] for slot, is_of_row in rule.slots.items()}
    bytes_of_row = 4 * (DIM + sum(1 if is_of_row else DIM for is_of_row in rule.slots.values()))
    budget = 4 * NUM_ROWS + slots * (bytes_of_row + BYTES_BESIDE_A_SLOT)
    storage = DiskStorage(str(folder), frozenset(), {DIM: 1.0}, budget)
    state = {slot: storage.zeros(shape) for slot, shape in shapes.items()}
    there = RowsOnDisk(storage, storage.zeros([NUM_ROWS, DIM]), state)
    there.weights.copy_(torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(seed)))
    assert len(there.row_of) == slots
    return there, TableRows(
        there.weights.clone(), {slot: torch.zeros(shape) for slot, shape in shapes.items()}
    )


def assert_equal(there: TableRows, here: TableRows) -> None:
    for slot, value in here.tensors.items():
        assert torch.equal(value, there.tensors[slot]), slot


@pytest.mark.parametrize("rule", [RowWiseAdagrad(0.1), Adam(0.1)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("slots", [40, 90, NUM_ROWS])
def test_rows_on_a_disk_are_those_in_memory_whatever_is_asked_and_expected(
    tmp_path: Path, rule: TableRule, slots: int
) -> None:
    there, here = on_disk(tmp_path, rule, slots)
    generator = torch.Generator().manual_seed(slots)

    def some(most: int) -> torch.Tensor:
        # Small numbers are popular.
        drawn = (torch.rand(most, generator=generator) ** 3 * NUM_ROWS).long()
        return drawn.unique()

    expected: list[tuple[torch.Tensor, int]] = []
    rate = torch.tensor(0.1)
    for number in range(1, 120):
        rows = some(40)
        call = there.next_call
        there.expect(rows)
        expected.append((rows, call))
        if len(expected) < 3:
            continue
        rows, call = expected.pop(0)
        there.begin(call)
        found, right = torch.empty(len(rows), DIM), torch.empty(len(rows), DIM)
        there.look_up(rows, found)
        here.look_up(rows, right)
        assert torch.equal(found, right)
        gradients = torch.randn(len(rows), DIM, generator=generator)
        there.update(rule, rows, gradients.clone(), rate, number)
        here.update(rule, rows, gradients.clone(), rate, number)
        if number % 7 == 0:
            new = some(20)
            weights = torch.randn(len(new), DIM, generator=generator)
            there.insert(new, weights)
            here.insert(new, weights)
        if number % 11 == 0:
            there.flush()
            assert_equal(there, here)
        if number % 29 == 0:
            # What a load does.
            there.forget()
            for rows_of in (there, here):
                rows_of.weights.mul_(0.5)
    there.flush()
    assert_equal(there, here)
    counts = there.counts
    assert counts.requested > counts.loaded > 0
    assert (counts.written > 0) == (slots < NUM_ROWS)


def test_popular_rows_stay_in_memory(tmp_path: Path) -> None:
    there, _ = on_disk(tmp_path, RowWiseAdagrad(0.1), 60)
    popular = torch.arange(20)
    for step in range(50):
        rare = torch.arange(20 + step * 5, 25 + step * 5)
        call = there.next_call
        there.expect(torch.cat([popular, rare]))
        there.begin(call)
        there.look_up(torch.cat([popular, rare]), torch.empty(25, DIM))
    # Each row came once: no popular row was evicted.
    assert there.counts.loaded == 20 + 50 * 5


def test_a_step_that_does_not_fit_the_budget_ends_with_one_sentence(tmp_path: Path) -> None:
    there, _ = on_disk(tmp_path, RowWiseAdagrad(0.1), 30)
    with pytest.raises(UserError, match=r"31 rows .*--memory_budget .* 30\."):
        there.look_up(torch.arange(31), torch.empty(31, DIM))


def test_rows_that_were_expected_give_way_to_those_of_a_step(tmp_path: Path) -> None:
    there, here = on_disk(tmp_path, RowWiseAdagrad(0.1), 30)
    call = there.next_call
    for first in (0, 20, 40):
        there.expect(torch.arange(first, first + 20))
    there.begin(call)
    for first in (0, 20, 40):
        rows, found = torch.arange(first, first + 20), torch.empty(20, DIM)
        there.look_up(rows, found)
        assert torch.equal(found, here.weights[rows])


def test_a_budget_below_the_index_of_the_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--memory_budget has 1\.1 KiB for 300 rows "):
        on_disk(tmp_path, RowWiseAdagrad(0.1), -1)


def test_a_full_disk_is_found_before_the_training_and_named(tmp_path: Path) -> None:
    with (
        mock.patch.object(
            os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ),
        pytest.raises(
            UserError, match=r"Cannot make a file of [\d.]+ KiB in --storage_dir .*No space left.*make room"
        ),
    ):
        on_disk(tmp_path, RowWiseAdagrad(0.1), 30)


def test_a_rank_without_rows_has_none_on_the_disk_either(tmp_path: Path) -> None:
    storage = DiskStorage(str(tmp_path), frozenset(), {DIM: 1.0}, 1000)
    there = RowsOnDisk(storage, storage.zeros([0, DIM]), {"momentum1": storage.zeros([0])})
    there.expect(torch.zeros(0, dtype=torch.int64))
    there.look_up(torch.zeros(0, dtype=torch.int64), torch.empty(0, DIM))
    there.flush()


def test_files_have_no_names_and_end_with_the_process(tmp_path: Path) -> None:
    there, _ = on_disk(tmp_path, RowWiseAdagrad(0.1), 30)
    there.flush()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"memory_budget": "1MB"}, "--memory_budget requires another --storage than memory"),
        ({"storage_dir": "/tmp"}, "--storage_dir requires --storage disk, got memory"),
        ({"storage": "disk", "memory_budget": "1"}, "--memory_budget must be a size"),
        ({"storage": "disk", "dump": True, "async_dump": True}, "--async_dump requires --storage memory"),
        ({"storage": "uvm", "storage_dir": "/tmp"}, "--storage_dir requires --storage disk, got uvm"),
        (
            {"storage": "disk", "capacity": "25%"},
            "--capacity 25% is a share of the memory, and --storage disk",
        ),
        ({"storage": "uvm", "cache_load_factor": 0.5}, "--cache_load_factor requires --storage uvm_caching"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Config.of(**flags).validate()


# --- plans ---


@pytest.fixture
def one_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of described ranks, which are not there to agree."""

    def plan(self: Any, module: Any, sharders: Any, group: Any) -> Any:
        return self.plan(module, sharders)

    monkeypatch.setattr(EmbeddingShardingPlanner, "collective_plan", plan)


def planned(folder: Path, memory: int, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> dict[str, Any]:
    """The plan of a training on two described GPUs, each with so much memory for tables."""
    context = RuntimeContext(0, 0, 2, 2, torch.device("cuda"), 1)
    config = Config.of(data_path=str(folder), embedding_dim=64, history=3, batch_size=64, **flags)
    monkeypatch.setattr(plan, "_room_per_rank", lambda config, context: memory)
    rule = RowWiseAdagrad(0.04)
    model, sharder, num_rows, specs = plan.unsharded(
        open_columns(config), config, context, rule, memory, make_model
    )
    found = plan.make_plan(model, sharder, num_rows, specs, config, context, rule)
    return {name: table for module in found.plan.values() for name, table in module.items()}


@pytest.mark.usefixtures("one_planner")
def test_a_table_without_room_on_a_gpu_is_in_the_memory_of_the_host(
    synthetic_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels(memory: int, storage: str) -> set[str]:
        found = planned(synthetic_folder, memory, monkeypatch, storage=storage)
        return {table.compute_kernel for table in found.values()}

    assert kernels(2**30, "uvm") == {"fused"}
    with pytest.raises(UserError, match="start more processes or give a smaller --embedding_dim"):
        kernels(300_000, "memory")
    assert kernels(300_000, "uvm") == {"fused", "fused_uvm"}
    assert "fused_uvm_caching" in kernels(300_000, "uvm_caching")


@pytest.mark.usefixtures("one_planner")
@pytest.mark.parametrize(("pipeline", "prefetches"), [("auto", True), ("plain", False)])
def test_the_cache_on_a_gpu_has_the_share_of_the_flag_and_is_filled_ahead_by_the_pipeline(
    synthetic_folder: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str, prefetches: bool
) -> None:
    flags = {"storage": "uvm_caching", "cache_load_factor": 0.3, "pipeline": pipeline}
    for table in planned(synthetic_folder, 1_500_000, monkeypatch, **flags).values():
        assert table.cache_params is not None
        assert table.cache_params.load_factor == 0.3
        assert table.cache_params.prefetch_pipeline is prefetches


@pytest.mark.parametrize(
    ("device", "flags", "sentence"),
    [
        ("cpu", {"storage": "uvm"}, "--storage uvm requires a GPU"),
        ("cuda", {"storage": "disk"}, "--storage disk requires a CPU and --cpu_tables vectorised"),
        ("cpu", {"storage": "disk", "cpu_tables": "torchrec"}, "--storage disk requires a CPU and --cpu"),
        ("cuda", {"storage": "uvm_caching", "vocabulary": "dynamic"}, "does not support dynamic tables"),
        ("cpu", {"storage": "shop"}, "--storage must be memory, disk, or some of the tables user, "),
        (
            "cpu",
            {"storage": "user", "memory_budget": "1kB"},
            "--memory_budget 1kB has no room for",
        ),
    ],
)
def test_storage_that_a_device_or_a_table_does_not_have_is_refused(
    synthetic_folder: Path, device: str, flags: dict[str, Any], sentence: str
) -> None:
    context = RuntimeContext(0, 0, 1, 1, torch.device(device), 1)
    config = Config.of(data_path=str(synthetic_folder), history=3, **flags)
    with pytest.raises(UserError, match=sentence):
        plan.unsharded(open_columns(config), config, context, RowWiseAdagrad(0.04), 2**30, make_model)


# --- trainings ---


def write_sparse_ratings(folder: Path, number: int, users: int, movies: int) -> None:
    """Write few ratings of many users and movies, of which small numbers are popular."""
    draw = np.random.default_rng(0)
    user, movie = ((draw.random(number) ** 1.5 * most).astype(int) + 1 for most in (users, movies))
    pairs = np.unique(np.stack([user, movie], axis=1), axis=0)
    stars, times = draw.integers(1, 6, len(pairs)), 10**9 + draw.permutation(len(pairs))
    write_ratings(folder, zip(*pairs.T, stars, times, strict=True))


def test_tables_of_four_budgets_train_and_are_dumped_with_less_memory(
    tmp_path: Path,
) -> None:
    write_sparse_ratings(tmp_path / "ratings", 3_000, 1_500, 1_500)
    wide = ("--embedding_dim", "4096", "--mlp_dims", "none", "--batch_size", "96", "--history", "4")
    flags = ("--data_path", str(tmp_path / "ratings"), "--epochs", "1", "--initial_rows", "random", *wide)
    command = [str(EXAMPLE), *flags, "--split", "random"]
    status, plentiful, most = run_within(2**33, command)
    assert status == 0, plentiful
    rows = re.findall(r"^(?:\[RANK 0\] )?(\w+) +([\d,]+) 4096", plentiful, re.MULTILINE)
    tables = 4 * 4096 * sum(int(number.replace(",", "")) for _, number in rows)
    # Below it are the rows in memory, pages of files, and what differs from run to run.
    limit = most - tables // 2
    # The dump and the test of the weights on the disk fit too.
    stored = ["--storage", "disk", "--memory_budget", f"{tables // 4}B", "--dump"]
    status, output, _ = run_within(limit, [*command, *stored, "--save_dir", str(tmp_path / "dumps")])
    assert status == 0, output
    assert "rows in memory" in output
    (right,) = re.findall(r"this model, .*", plentiful)
    assert right in output


@pytest.fixture(scope="module", params=[1, 2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and results of a launch of so many ranks."""
    folder = tmp_path_factory.mktemp("storage")
    write_sparse_ratings(folder / "ratings", 1_600, 400, 300)
    path = folder / "results.json"
    script = SUPPORT / "storage_ranks.py"
    succeeded(torchrun(request.param, script, path, folder / "ratings", folder, 96, timeout=100))
    return folder, read_json(path)


@pytest.mark.parametrize("variant", ["static", "dynamic"])
def test_a_training_on_a_disk_equals_that_in_memory_bit_for_bit(
    found: tuple[Path, Any], variant: str
) -> None:
    folder, results = found
    memory = results[variant]["memory"]
    assert len(memory["losses"]) > 10
    for storage in ("disk", "moved"):
        assert results[variant][storage]["test"] == memory["test"]
        assert memory["losses"][-5:] == results[variant][storage]["losses"][-5:]
        # Ids that wait for a row are merged when a chain is loaded, and the resumed one has a delta more.
        skipped = "waiting" if storage == "moved" else "nothing"
        assert_equal_checkpoints(folder / f"{variant} memory", folder / f"{variant} {storage}", skipped)


def assert_equal_checkpoints(one: Path, other: Path, skipped: str) -> None:
    names = [path.name for path in checkpoints_in(one)]
    assert len(names) > 4
    # A training that was resumed wrote one more.
    assert {*names} <= {path.name for path in checkpoints_in(other)}
    for name in names:
        here, there = contents_of(one / name), contents_of(other / name)
        assert here.keys() == there.keys()
        for key, value in here.items():
            if skipped in key:
                continue
            assert torch.equal(value, there[key]), (name, key)


def contents_of(folder: Path) -> dict[str, torch.Tensor]:
    """All rows of a checkpoint by table and slot, those of dynamic tables in the order of their ids."""
    chain = chain_at(folder)
    manifests = [read_manifest(each) for each in chain.folders]
    reader, shapes = RowReader(chain.folders, manifests), manifests[-1].tensors
    found: dict[str, torch.Tensor] = {}
    for name in manifests[-1].features:
        slots = {
            key.split(".")[2]: torch.empty(shape)
            for key, (shape, _) in shapes.items()
            if key.startswith(f"tables.{name}.")
        }
        if slots:
            reader.fill_rows(name, slots)
        else:
            parts = [*reader.rows_of_ids(name)]
            slots = {slot: torch.cat([part[slot] for part in parts]) for slot in parts[0]}
            order = slots["ids"].argsort()
            slots = {
                slot: value[order] if len(value) == len(order) else value for slot, value in slots.items()
            }
        found |= {f"{name}.{slot}": value for slot, value in slots.items()}
    return found
