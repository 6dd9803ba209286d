"""A training on each device: what it learns, writes, and is told, and what passes from one to the other.

On the CPU the tests run with all others, on CUDA where there is a device; see `DEVICES`.
"""

from __future__ import annotations

import functools
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner

import recsuite as rs
from example import make_model, parse_args
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding import plan
from tests.support.launch import EXAMPLE, GPUS, SUPPORT, python, started, succeeded, wait_for
from tests.support.published import copied, differing_tensors

CUDA = functools.partial(pytest.param, marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA("cuda")]
# What these flags train where nothing else is said of a model, but for the epochs.
KINDS = {
    "random split": ("--split", "random", "--epochs", "2"),
    "ranking": ("--task", "ranking", "--epochs", "1"),
    "dynamic": ("--vocabulary", "dynamic", "--epochs", "1"),
    "sequence": ("--task", "sequence", "--epochs", "1"),
}
# From one device to another, and on each alone. On the CPU other tests have each kind.
WAYS = [
    ("random split", "cpu", "cpu"),
    *(
        CUDA(kind, *devices)
        for kind in KINDS
        for devices in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda"))
    ),
]
Train = Callable[[str, str], Path]


def options_of(device: str) -> dict[str, Any]:
    """Options to start a command on a device."""
    # What forks has no device.
    return {"env": GPUS, "real": True} if device == "cuda" else {}


def example(device: str, *flags: object) -> str:
    """Output of the example on a device."""
    output = succeeded(python(EXAMPLE, *flags, timeout=200, **options_of(device)))
    assert f"ranks: 1 on {device}" in output
    return output


def metrics_of(output: str) -> list[float]:
    """The row of the model in the table of results."""
    (row,) = re.findall(r"^\| this model.*?\|(.*)\|$", output, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.\d+", row)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 ratings."""
    folder = tmp_path_factory.mktemp("data") / "ratings"
    write_synthetic(folder, 3_000, seed=0)
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """By device and kind, the folder of a training's checkpoints; made once."""

    @functools.cache
    def train(device: str, kind: str) -> Path:
        folder = tmp_path_factory.mktemp("dumps")
        output = example(device, "--data_path", data, "--dump", "--save_dir", folder, *KINDS[kind])
        (folder / "output.txt").write_text(output)
        return folder

    return train


@pytest.mark.parametrize(("kind", "source", "target"), WAYS)
def test_a_checkpoint_of_one_device_has_its_metrics_on_the_other(
    trained: Train, data: Path, kind: str, source: str, target: str
) -> None:
    folder = trained(source, kind)
    found = metrics_of(example(target, "--data_path", data, "--load", "--save_dir", folder))
    assert found == pytest.approx(metrics_of((folder / "output.txt").read_text()), abs=1e-3)
    assert len(found) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_learns_the_same_as_the_cpu(trained: Train, kind: str) -> None:
    outputs = [(trained(device, kind) / "output.txt").read_text() for device in ("cpu", "cuda")]
    on_cpu, on_cuda = map(metrics_of, outputs)
    assert on_cuda == pytest.approx(on_cpu, abs=2e-2)


def in_host_memory(data: Path, storage: str, pipeline: str) -> list[str]:
    """Flags of a training with tables in the host's memory."""
    # Less than all tables take on the GPU, and enough for a batch and a cache.
    flags = ["--storage", storage, "--memory_budget", "120KB", "--pipeline", pipeline]
    return [*flags, "--data_path", str(data), *KINDS["random split"]]


in_each_way = pytest.mark.parametrize(
    ("storage", "pipeline"), [*itertools.product(("uvm", "uvm_caching"), ("auto", "plain"))]
)


@in_each_way
def test_the_budget_of_the_next_test_puts_tables_into_the_hosts_memory(
    data: Path, monkeypatch: pytest.MonkeyPatch, storage: str, pipeline: str
) -> None:
    gpu = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    # A described rank has no others to agree with.
    monkeypatch.setattr(
        EmbeddingShardingPlanner, "collective_plan", lambda self, *given: self.plan(*given[:2])
    )
    config = parse_args(in_host_memory(data, storage, pipeline))
    columns, context = open_columns(config), RuntimeContext(0, 0, 1, 1, torch.device("cuda"), 1)
    config = config.with_global_batch(columns.num_train, 1)
    rule = rs.RowWiseAdagrad(0.04)
    unsharded = plan.unsharded(columns, config, context, rule, 0, make_model)
    (tables,) = plan.make_plan(*unsharded, config, context, rule).plan.values()
    assert f"fused_{storage}" in {table.compute_kernel for table in tables.values()}


@pytest.mark.gpu
@in_each_way
def test_tables_in_the_hosts_memory_learn_the_same_as_on_the_gpu(
    trained: Train, data: Path, tmp_path: Path, storage: str, pipeline: str
) -> None:
    flags = [*in_host_memory(data, storage, pipeline), "--save_dir", str(tmp_path)]
    output = example("cuda", *flags, "--dump", "--inc_dump")
    assert f"fused_{storage}, in host memory" in output
    on_gpu = metrics_of((trained("cuda", "random split") / "output.txt").read_text())
    assert metrics_of(output) == pytest.approx(on_gpu, abs=1e-3)
    # What the cache held is in the checkpoint.
    loaded = example("cpu", "--data_path", data, "--load", "--save_dir", tmp_path)
    assert metrics_of(loaded) == pytest.approx(on_gpu, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "device"), [("random split", "cpu"), *(CUDA(kind, "cuda") for kind in KINDS)]
)
def test_a_loaded_checkpoint_is_dumped_again_bit_for_bit(
    trained: Train, tmp_path: Path, kind: str, device: str
) -> None:
    folder = trained("cpu", kind)
    command = SUPPORT / "dump_again.py", folder, tmp_path
    assert f"ranks: 1 on {device}" in succeeded(python(*command, timeout=200, **options_of(device)))
    (newest,) = tmp_path.glob("step-*")
    assert differing_tensors(folder / newest.name, newest) == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_with_deltas_that_a_signal_ended_resumes(data: Path, tmp_path: Path, device: str) -> None:
    flags = ["--data_path", data, "--save_dir", tmp_path, "--async_dump", "--dump", "--inc_dump"]
    flags += ["--split", "random", "--batch_size", "256", "--dump_every", "3", "--patience", "0"]
    endless = [sys.executable, "-u", str(EXAMPLE), *map(str, flags), "--epochs", "1000"]
    with started(endless, stderr=subprocess.STDOUT, **options_of(device)) as process:
        wait_for(process, "epoch 1/1000")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM, output
    (step,) = re.findall(r"stopped by a signal at step ([\d,]+); --resume continues from there", output)
    assert list(tmp_path.glob("delta-*"))
    epochs = int(step.replace(",", "")) // 9 + 2
    resumed = example(device, *flags, "--epochs", epochs, "--resume")
    assert f"step {step}, written by 1 rank" in resumed
    assert f"epoch {epochs}/{epochs}" in resumed


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_16_bits_resume_bit_for_bit(data: Path, tmp_path: Path, device: str) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    flags = ["--data_path", data, "--split", "random", "--batch_size", "256", "--epochs", "2", "--dump"]
    flags += ["--dump_every", "5", "--keep", "9", "--row_precision", "fp16", "--cpu_tables", "torchrec"]
    example(device, *flags, "--save_dir", whole)
    example(device, *flags, "--save_dir", copied(whole, again, 5), "--resume")
    steps = [max(folder.glob("step-*")) for folder in (whole, again)]
    assert steps[0].name == steps[1].name > "step-000000010"
    assert differing_tensors(*steps) == []


@pytest.mark.gpu
def test_rows_of_16_bits_learn_the_same_on_a_gpu(trained: Train, data: Path, tmp_path: Path) -> None:
    flags = ["--data_path", data, "--save_dir", tmp_path, *KINDS["random split"], "--row_precision", "fp16"]
    of_whole = metrics_of((trained("cuda", "random split") / "output.txt").read_text())
    assert metrics_of(example("cuda", *flags, "--dump")) == pytest.approx(of_whole, abs=5e-3)
    loaded = example("cpu", "--data_path", data, "--load", "--save_dir", tmp_path)
    assert metrics_of(loaded) == pytest.approx(of_whole, abs=5e-3)


@pytest.mark.gpu
def test_the_doctor_finds_no_fault(data: Path) -> None:
    output = succeeded(python(EXAMPLE, "--doctor", "--data_path", data, timeout=200, **options_of("cuda")))
    assert "nccl" in output
