"""The doctor's lines about the machine, each with a fault faked for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from recsuite.runtime import process as runtime
from recsuite.runtime.launch import Launch
from recsuite.tools.doctor import examined
from recsuite.tools.examination import machine
from recsuite.tools.examination.findings import Finding
from recsuite.tools.examination.machine import Need

GIB = 2**30


def one(check: Callable[[], Finding]) -> Finding:
    """The line of a check as the page shows it, whether it returns or raises."""
    (finding,) = examined("line", lambda: [check()])
    return finding


def test_versions_that_do_not_belong_together_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.12.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions[name] if name in versions else missing())
    finding = one(machine.check_versions_fit)
    assert finding.state == "fault"
    assert finding.text.endswith("which do not belong together: torch 2.12 needs torchrec and fbgemm 1.7")
    assert finding.remedy.startswith("mend it with: ")


def missing() -> str:
    raise metadata.PackageNotFoundError("it")


def test_a_missing_package_beside_those_three_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: missing() if name == "pandas" else real(name))
    finding = one(machine.check_versions_fit)
    assert (finding.state, finding.remedy) == ("fault", "./run.sh setup")
    assert "pandas missing" in finding.text


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that seems to have two GPUs, the CUDA wheel and a driver."""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(runtime, "has_cuda_kernels", lambda: True)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 2,
        "set_device": None,
        "get_device_name": "NVIDIA Model",
        "mem_get_info": (3 * GIB, 4 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))


def check_device(num_ranks: int) -> Finding:
    return one(lambda: machine.check_device(Launch(local_world_size=num_ranks)))


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_named_with_its_driver_and_nccl() -> None:
    finding = check_device(2)
    assert finding.state == "ok"
    for part in (
        "NVIDIA Model, 3.0 GiB of 4.0 GiB free, the first of 2 for 2 ranks",
        "driver 570.86.15",
        "nccl 2.29.7",
    ):
        assert part in finding.text


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_with_the_cpu_wheel_of_fbgemm_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_cuda_kernels", lambda: False)
    finding = check_device(1)
    assert finding.state == "fault"
    assert "fbgemm-gpu-cpu is installed" in finding.text
    assert finding.remedy.startswith("install requirements-cuda.txt")


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_a_fault() -> None:
    finding = check_device(3)
    assert (finding.state, finding.text) == ("fault", "3 processes on a machine with 2 GPUs")
    assert "--nproc_per_node 2" in finding.remedy


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_does_not_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "mem_get_info", dead)
    finding = check_device(1)
    assert (finding.state, finding.text) == ("fault", "RuntimeError: CUDA error: unknown error")


@pytest.mark.usefixtures("two_gpus")
def test_a_driver_whose_gpu_torch_does_not_see_is_a_warning_unless_it_was_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_device(1) == Finding("device", "ok", "CPU for 1 rank, with gloo")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    finding = check_device(1)
    assert finding.state == "warning"
    assert finding.text.endswith("sees no GPU, but there is driver 570.86.15")


@pytest.mark.parametrize(
    ("num_workers", "num_ranks", "state", "remedy"),
    [
        (3, 2, "ok", ""),
        (4, 2, "warning", "give --num_workers 3, or auto"),
        ("auto", 2, "ok", ""),
        ("auto", 9, "warning", "start at most 8 ranks"),
        (0, 8, "ok", ""),
    ],
)
def test_more_ranks_and_workers_than_cores_are_a_warning(
    num_workers: int | str, num_ranks: int, state: str, remedy: str
) -> None:
    finding = machine.check_cores(num_workers, num_ranks, num_cores=8)
    assert finding.state == state
    assert finding.remedy.startswith(remedy)
    assert f"8 cores allowed; {num_ranks} ranks with --num_workers {num_workers}" in finding.text


@pytest.mark.parametrize(
    ("omp", "state"), [("", "ok"), ("1", "ok"), ("2,1", "ok"), ("4", "warning"), ("many", "warning")]
)
def test_more_omp_threads_than_cores_are_a_warning(omp: str, state: str) -> None:
    finding = machine.check_threads(omp, num_ranks=2, num_cores=4)
    assert finding.state == state
    assert finding.text.startswith("a rank sets 2, its share of the cores, and a worker 1")
    assert ("set it to 2" in finding.remedy) == (state == "warning")


@pytest.mark.parametrize(
    ("available", "cgroup", "need", "state"),
    [
        (8 * GIB, None, GIB, "ok"),
        (8 * GIB, None, 9 * GIB, "fault"),
        (8 * GIB, (GIB, 4 * GIB), GIB, "ok"),
        (8 * GIB, (GIB, 4 * GIB), 5 * GIB, "fault"),
        # What it uses may be file cache, which goes when it is needed.
        (8 * GIB, (4 * GIB, 4 * GIB), GIB, "warning"),
        (GIB // 2, None, 0, "warning"),
    ],
)
def test_batches_above_the_memory_are_a_fault_and_little_left_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, available: int, cgroup: tuple[int, int] | None, need: int, state: str
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: (available, 16 * GIB))
    monkeypatch.setattr(machine, "cgroup_memory", lambda: cgroup)
    finding = machine.check_memory(Need(need, "much"))
    assert finding.state == state
    assert finding.text.endswith("batches take much")
    assert ("of its limit of 4.0 GiB" if cgroup else "no cgroup limits it") in finding.text
    assert ("--prefetch_factor" in finding.remedy) == (state != "ok")


@pytest.mark.parametrize(
    ("used", "size", "state", "remedy"),
    [
        (GIB // 8, GIB, "ok", ""),
        (0, 64 * 2**20, "warning", "--shm-size=1g, or --ipc=host"),
        (0, 0, "warning", "--shm-size=1g, or --ipc=host"),
        (GIB - 1, GIB, "warning", "remove from /dev/shm"),
    ],
)
def test_a_missing_small_or_full_dev_shm_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, used: int, size: int, state: str, remedy: str
) -> None:
    monkeypatch.setattr(machine, "shared_memory", lambda: (used, size))
    finding = machine.check_shared_memory(Need(GIB, "1 GiB"))
    assert finding.state == state
    assert remedy in finding.remedy
    assert "batches need 0 of it" in finding.text
    assert finding.text.startswith("there is none") == (size == 0)


@pytest.mark.parametrize(
    ("limit", "num_workers", "state"),
    [(4096, 8, "ok"), (1023, 8, "warning"), (95, 8, "fault"), (2000, 500, "fault")],
)
def test_too_few_descriptors_are_a_fault_and_few_a_warning(limit: int, num_workers: int, state: str) -> None:
    finding = machine.check_descriptors(limit, num_workers)
    assert finding.state == state
    assert f"ulimit -n is {limit}" in finding.text
    assert finding.remedy.startswith("ulimit -n " if state != "ok" else "")
