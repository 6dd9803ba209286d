"""The doctor's page: right about this machine, and about a fault faked for each of its lines."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import example
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets import columns
from recsuite.datasets.movielens import formats as movielens
from recsuite.errors import UserError
from recsuite.runtime import process as runtime
from recsuite.runtime.process import Launch
from recsuite.tools import doctor
from recsuite.tools.doctor import Finding, Need
from recsuite.tools.probe import Probe, Report
from recsuite.workers import worker
from recsuite.workers.crash_log import WorkerError
from tests.support.launch import EXAMPLE, python, succeeded, torchrun

GIB = 2**30
NAMES = (
    "trio",
    "device",
    "cores",
    "threads",
    "memory",
    "/dev/shm",
    "descriptors",
    "worker",
    "start",
    "data",
    "cache",
)
HEALTHY = Report("spawn", False, False, "", dict.fromkeys(worker.THREAD_VARIABLES, "1"), 2.0, 2.5)


def one(check: Callable[[], Finding]) -> Finding:
    """The line of a check as the page shows it, whether it returns or raises."""
    (finding,) = doctor.examined("line", lambda: [check()])
    return finding


def lines_of(output: str) -> dict[str, str]:
    """The state of each line of a page by its name."""
    lines = [line.split() for line in output.splitlines()]
    return {line[1]: line[0] for line in lines if line and line[0] in ("ok", "warning", "fault")}


# --- the page ---


def test_this_machine_has_no_fault_and_its_page_comes_within_ten_seconds(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    before = sorted(synthetic_folder.iterdir())
    begin = time.monotonic()
    result = python(EXAMPLE, "--doctor", "--data_path", synthetic_folder, "--cache_dir", tmp_path / "cache")
    seconds = time.monotonic() - begin
    states = lines_of(succeeded(result))
    assert tuple(states) == NAMES
    assert states["trio"] == states["worker"] == states["data"] == states["cache"] == "ok"
    assert result.stderr == ""
    assert seconds < 10
    # It has written nothing.
    assert sorted(synthetic_folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_rank_0_alone_speaks_for_the_ranks_of_its_machine(synthetic_folder: Path) -> None:
    flags = ("--doctor", "--data_path", synthetic_folder, "--num_workers", "100")
    output = succeeded(torchrun(2, EXAMPLE, *flags))
    assert output.count("trio") == 1
    assert "2 ranks with --num_workers 100" in output
    assert lines_of(output)["cores"] == "warning"


def test_a_fault_is_status_1_and_the_other_lines_are_there_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], synthetic_folder: Path
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.0" if name == "torchrec" else real(name))
    assert example.main(["--doctor", "--data_path", str(synthetic_folder)]) == 1
    output = capsys.readouterr().out
    states = lines_of(output)
    assert tuple(states) == NAMES
    assert [name for name, state in states.items() if state == "fault"] == ["trio"]
    assert "\n" + " " * 22 + "-> mend it with: " in output
    assert "1 fault" in output.splitlines()[-1]


def test_a_page_is_aligned_and_counts_what_is_wrong() -> None:
    findings = [
        Finding("trio", "ok", "good"),
        Finding("descriptors", "fault", "word " * 30 + "\nsecond", "one line " * 20),
        Finding("data", "warning", "hm", "do"),
        Finding("cache", "warning", "hm", "do"),
    ]
    page = doctor.page(findings).splitlines()
    assert page[0] == "ok       trio         good"
    assert page[1].startswith("fault    descriptors  word word")
    assert {line[:22].strip() for line in page[2:5]} == {""}
    assert page[3].strip() == "second"
    assert page[4].strip() == "-> " + ("one line " * 20).strip()
    assert page[-1] == "1 fault and 2 warnings"
    assert max(map(len, page[:4])) <= doctor.PAGE_WIDTH
    assert doctor.page(findings[:1]).endswith("\nAll is well.")
    assert doctor.has_fault(findings)
    assert not doctor.has_fault([findings[0], findings[2]])


def test_doctor_and_train_exclude_each_other_and_the_doctor_is_no_mode() -> None:
    with pytest.raises(UserError, match="--doctor and --train exclude each other; give one of them"):
        parse_args(["--doctor", "--train"])
    assert parse_args(["--doctor"]).modes == ("train",)


def test_a_package_that_breaks_on_import_is_a_fault_of_its_line() -> None:
    def broken() -> Finding:
        raise OSError("libtorch.so: undefined symbol")

    finding = one(broken)
    assert (finding.state, finding.text) == ("fault", "OSError: libtorch.so: undefined symbol")
    assert "./run.sh setup" in finding.remedy


# --- installation and device ---


def test_a_trio_that_does_not_belong_together_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.12.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions[name] if name in versions else missing())
    finding = one(doctor.check_trio)
    assert finding.state == "fault"
    assert finding.text.endswith("which do not belong together: torch 2.12 needs torchrec and fbgemm 1.7")
    assert finding.remedy.startswith("mend it with: ")


def missing() -> str:
    raise metadata.PackageNotFoundError("it")


def test_a_missing_package_beside_the_trio_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: missing() if name == "pandas" else real(name))
    finding = one(doctor.check_trio)
    assert (finding.state, finding.remedy) == ("fault", "./run.sh setup")
    assert "pandas missing" in finding.text


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that seems to have two GPUs, the CUDA wheel and a driver."""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
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
    return one(lambda: doctor.check_device(Launch(local_world_size=num_ranks)))


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


# --- cores and memory ---


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
    finding = doctor.check_cores(num_workers, num_ranks, num_cores=8)
    assert finding.state == state
    assert finding.remedy.startswith(remedy)
    assert f"8 cores allowed; {num_ranks} ranks with --num_workers {num_workers}" in finding.text


@pytest.mark.parametrize(
    ("omp", "state"), [("", "ok"), ("1", "ok"), ("2,1", "ok"), ("4", "warning"), ("many", "warning")]
)
def test_more_omp_threads_than_cores_are_a_warning(omp: str, state: str) -> None:
    finding = doctor.check_threads(omp, num_ranks=2, num_cores=4)
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
    monkeypatch.setattr(doctor, "available_memory", lambda: (available, 16 * GIB))
    monkeypatch.setattr(doctor, "cgroup_memory", lambda: cgroup)
    finding = doctor.check_memory(Need(need, "much"))
    assert finding.state == state
    assert finding.text.endswith("batches take much")
    assert ("of its limit of 4.0 GiB" if cgroup else "no cgroup limits it") in finding.text
    assert ("--prefetch_factor" in finding.remedy) == (state != "ok")


def test_the_need_of_the_workers_is_that_of_their_ring(tmp_path: Path) -> None:
    config = Config.of(batch_size=1000, history=0, prefetch_factor=4, num_workers=3)
    config = config.replaced(data_path=str(tmp_path / "none"), dataset="ml-1m")
    need = doctor.ring_need(config, num_ranks=2, num_workers=3)
    assert need.num_bytes % (2 * 3 * 7) == 0
    assert "7 slots of 0.2 MiB for each of 2 x 3 workers" in need.words
    with_history = doctor.ring_need(config.replaced(history=100), num_ranks=2, num_workers=3)
    assert with_history.num_bytes - need.num_bytes == 2 * 3 * 7 * 1000 * 100 * 12
    assert doctor.ring_need(config, num_ranks=2, num_workers=0) == Need(0, "nothing without workers")


def test_the_need_assumed_before_the_columns_are_made_is_close_to_theirs(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    config = Config.of(data_path=str(synthetic_folder), cache_dir=str(tmp_path))
    assumed = doctor.ring_need(config, 1, 1).num_bytes
    columns.open_columns(config)
    real = doctor.ring_need(config, 1, 1).num_bytes
    assert real <= assumed < 2 * real


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
    monkeypatch.setattr(doctor, "shared_memory", lambda: (used, size))
    finding = doctor.check_shared_memory(Need(GIB, "1 GiB"))
    assert finding.state == state
    assert remedy in finding.remedy
    assert "batches need 0 of it" in finding.text
    assert finding.text.startswith("there is none") == (size == 0)


@pytest.mark.parametrize(
    ("limit", "num_workers", "state"),
    [(4096, 8, "ok"), (1023, 8, "warning"), (95, 8, "fault"), (2000, 500, "fault")],
)
def test_too_few_descriptors_are_a_fault_and_few_a_warning(limit: int, num_workers: int, state: str) -> None:
    finding = doctor.check_descriptors(limit, num_workers)
    assert finding.state == state
    assert f"ulimit -n is {limit}" in finding.text
    assert finding.remedy.startswith("ulimit -n " if state != "ok" else "")


# --- a worker ---


class ExitingProbe(Probe):
    """Its worker is gone before it answers."""

    def make(self, request: Any, empty: Any = None) -> Sequence[Any]:
        sys.exit(3)


class SleepingProbe(Probe):
    """Its worker never answers."""

    def make(self, request: Any, empty: Any = None) -> Sequence[Any]:
        time.sleep(3600)
        return []


class UnpicklableProbe(Probe):
    """Cannot come to life in a worker."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no life")


@pytest.mark.parametrize("mp_context", ["spawn", "forkserver"])
def test_a_worker_sees_the_start_method_asked_for_and_no_torch(mp_context: str) -> None:
    begin = time.time()
    report = doctor.probe_worker(Probe, Config.of(mp_context=mp_context))
    assert doctor.judge_worker(report, mp_context).state == "ok"
    assert begin < report.imported <= report.made < time.time()


def test_a_forked_worker_is_a_warning_as_it_inherits_torch() -> None:
    report = doctor.probe_worker(Probe, Config.of(mp_context="fork"))
    finding = doctor.judge_worker(report, "fork")
    assert finding.state == "warning"
    assert f"sharing strategy {torch.multiprocessing.get_sharing_strategy()}" in finding.text
    assert "forked" in doctor.judge_start(report, time.time(), 0.0).text


def test_a_fork_of_a_process_that_uses_cuda_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    (finding,) = doctor.examined("worker", lambda: doctor.check_worker(Config.of(mp_context="fork")))
    assert finding.state == "fault"
    assert "--mp_context fork cannot be used once CUDA is initialised" in finding.text


class Fault(NamedTuple):
    """What a report says otherwise, and the finding."""

    change: dict[str, Any]
    state: str
    text: str


@pytest.mark.parametrize(
    "fault",
    [
        Fault({"start_method": "fork"}, "fault", "start method fork"),
        Fault({"has_torch": True, "sharing_strategy": "file_system"}, "fault", "strategy file_system"),
        Fault({"has_torch": True, "cuda_touched": True}, "fault", "CUDA touched"),
        Fault({"threads": {"OMP_NUM_THREADS": "8"}}, "warning", "threads not 1 but {'OMP_NUM_THREADS': '8'}"),
        Fault({"threads": {"OMP_NUM_THREADS": None}}, "warning", "threads not 1"),
    ],
    ids=lambda fault: fault.text,
)
def test_a_worker_that_is_not_what_was_asked_for_is_named(fault: Fault) -> None:
    assert doctor.judge_worker(HEALTHY, "spawn").state == "ok"
    finding = doctor.judge_worker(dataclasses.replace(HEALTHY, **fault.change), "spawn")
    assert finding.state == fault.state
    assert fault.text in finding.text
    assert finding.remedy


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (ExitingProbe, "It exited with code 3 by itself."),
        (UnpicklableProbe, "It exited with code 1 by itself."),
        (SleepingProbe, "Nothing for 1 s from data worker 0 of rank 0"),
    ],
)
def test_a_worker_that_does_not_answer_is_a_fault_and_no_hang(
    monkeypatch: pytest.MonkeyPatch, probe: type[Probe], text: str
) -> None:
    real = doctor.probe_worker
    # Far off, so that who waits for it is found on a busy machine too.
    deadline = 1.0 if probe is SleepingProbe else 60.0
    monkeypatch.setattr(doctor, "probe_worker", lambda _, config: real(probe, config, deadline))
    begin = time.monotonic()
    (finding,) = doctor.examined("worker", lambda: doctor.check_worker(Config()))
    assert finding.state == "fault"
    assert text in finding.text
    assert finding.remedy
    assert "What to do" not in finding.text
    assert "--worker_timeout" not in finding.remedy
    assert time.monotonic() - begin < 30


def test_a_worker_error_without_advice_is_a_fault_with_its_text() -> None:
    def check() -> Finding:
        raise WorkerError("it is gone")

    assert one(check) == Finding("line", "fault", "it is gone")


def test_the_time_of_a_start_is_split_and_a_slow_one_is_a_warning() -> None:
    quick = doctor.judge_start(HEALTHY, begin=1.0, interpreter=0.25)
    assert quick.state == "ok"
    for part in (
        "1500.0 ms from the call",
        "interpreter 250.0 ms",
        "imports 750.0 ms",
        "unpickling 500.0 ms",
    ):
        assert part in quick.text
    slow = doctor.judge_start(HEALTHY, begin=-3.0, interpreter=0.25)
    assert slow.state == "warning"
    assert ".venv on a local disk" in slow.remedy


def test_the_interpreter_is_timed_up_to_its_first_line() -> None:
    assert 0 < doctor.time_interpreter() < 5


# --- the data ---


def test_data_and_columns_are_named_with_their_sizes(synthetic_folder: Path, tmp_path: Path) -> None:
    config = Config.of(data_path=str(synthetic_folder), cache_dir=str(tmp_path / "cache"))
    data, cache = doctor.check_data(config)
    assert (data.state, cache.state) == ("ok", "ok")
    assert data.text.startswith(f"{synthetic_folder}: 4 files, 0.")
    assert "no columns of these data yet, made at the first start" in cache.text
    assert not (tmp_path / "cache").exists()
    folder = columns.open_columns(config).folder
    _, cache = doctor.check_data(config)
    assert cache.state == "ok"
    assert cache.text.startswith(f"{folder}: ")


def test_data_that_are_not_there_yet_are_neither_drawn_nor_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(movielens, "DATA_ROOT", tmp_path)
    data, cache = doctor.check_data(Config())
    assert (data.state, cache.state) == ("ok", "ok")
    assert data.text.endswith("synthetic-1000000-seed0: not there yet, drawn at the first start")
    data, _ = doctor.check_data(Config.of(dataset="ml-1m"))
    assert data.state == "warning"
    assert data.text == f"{tmp_path / 'ml-1m'}: not there yet, downloaded at the first start"
    assert "network" in data.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_ratings_is_a_fault(tmp_path: Path) -> None:
    finding = doctor.examined("data", lambda: doctor.check_data(Config.of(data_path=str(tmp_path))))[0]
    assert finding.state == "fault"
    assert "holds no MovieLens ratings" in finding.text
    assert finding.remedy.startswith("give the folder of the unpacked files")


def test_files_of_another_set_are_a_fault(synthetic_folder: Path) -> None:
    config = Config.of(data_path=str(synthetic_folder), dataset="ml-32m")
    finding = doctor.examined("data", lambda: doctor.check_data(config))[0]
    assert finding.state == "fault"
    assert "does not hold ml-32m but ratings.dat" in finding.text
    assert finding.remedy.startswith("give another --data_path")


def test_a_file_that_cannot_be_read_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, synthetic_folder: Path
) -> None:
    real = Path.open

    # Root may read anything, so a mode would not do.
    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "ratings.dat":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    (finding,) = doctor.check_data(Config.of(data_path=str(synthetic_folder)))
    assert finding.state == "fault"
    assert finding.text == f"{synthetic_folder / 'ratings.dat'} cannot be read (Permission denied)"


def test_a_cache_without_room_is_a_warning_and_one_that_cannot_be_written_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "not" / "yet"

    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(99 * 2**20))
    # A rating takes 52 bytes.
    assert doctor.check_cache(cache, None, num_ratings=1_000_000).state == "ok"
    finding = doctor.check_cache(cache, None, num_ratings=10_000_000)
    assert finding.state == "warning"
    assert finding.text.endswith("99.0 MiB free for up to 505.9 MiB")
    assert "--cache_dir" in finding.remedy
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path)
    finding = doctor.check_cache(cache, None, num_ratings=0)
    assert (finding.state, finding.remedy) == (
        "fault",
        f"{tmp_path} cannot be written: give another --cache_dir",
    )
