"""The process among others: what it reads, what it changes, and that it gives everything back."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recsuite.config.config import Config
from recsuite.errors import UserError
from recsuite.runtime import host, peers
from recsuite.runtime import host as machine
from recsuite.runtime import process as runtime
from recsuite.runtime.host import allowed_cores, allowed_memory, shown_bytes
from recsuite.runtime.process import cleanup_runtime, init_runtime, once_per_node, read_launch
from recsuite.sharding.plan import make_topology
from recsuite.sharding.table_rules import SGD
from tests.support.launch import ROOT, python, succeeded, torchrun

MODULES = sorted(
    ".".join(path.relative_to(ROOT / "example").with_suffix("").parts)
    for path in (ROOT / "example").rglob("*.py")
    if path.name != "__init__.py"
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore the number of threads, which a runtime sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0.0 bytes"),
        (1023, "1,023.0 bytes"),
        (40_000, "39.1 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**40, "3,072.0 GiB"),
    ],
)
def test_bytes_are_shown_in_a_unit_with_digits(number: int, text: str) -> None:
    assert shown_bytes(number) == text


def test_importing_a_module_changes_nothing(tmp_path: Path) -> None:
    check = (
        "import builtins, importlib, logging, sys\n"
        "before = builtins.print\n"
        f"for module in {MODULES}:\n"
        "    importlib.import_module(module)\n"
        "    assert builtins.print is before, module\n"
        "    assert not logging.getLogger('recsuite').handlers, module\n"
        "    torch = sys.modules.get('torch')\n"
        "    assert torch is None or not torch.cuda.is_initialized(), module\n"
        "    assert torch is None or not torch.distributed.is_initialized(), module\n"
    )
    script = tmp_path / "check.py"
    script.write_text(check)
    result = python(script)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def begin_rank(ranks: int, env: dict[str, str]) -> str:
    """The errors of a rank that comes as far as torch: the other ranks are not there."""
    check = (
        "from recsuite.runtime import process as runtime\n"
        "runtime.choose_device = lambda launch: exit()\n"
        "runtime.init_runtime(runtime.Config())\n"
    )
    launch = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    result = python("-c", check, env={**{name: str(value) for name, value in launch.items()}, **env})
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.soak
def test_threads_of_a_rank_leave_the_core_while_they_wait() -> None:
    # What OpenMP has read when it was loaded.
    assert "GOMP_SPINCOUNT = '1000'" in begin_rank(2, {"OMP_DISPLAY_ENV": "VERBOSE"})


def test_a_script_that_has_imported_torch_gets_a_second_team_of_threads() -> None:
    check = (
        "import os, torch\n"
        "from recsuite.runtime.host import limited_spinning\n"
        # It starts a thread for other things.
        "torch.set_num_threads(torch.get_num_threads())\n"
        # Of a rank of several, which has fewer threads than there are cores.
        "os.sched_getaffinity = lambda process: range(40)\n"
        "number = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = number(), torch.get_num_threads()\n"
        "with limited_spinning():\n"
        "    print(number() - before[0], torch.get_num_threads() - before[1])\n"
    )
    # As torchrun sets it.
    assert succeeded(python("-c", check, env={"OMP_NUM_THREADS": "1"})) == "40 0\n"


@pytest.mark.parametrize(
    ("ranks", "given", "spins"),
    [
        (1, {}, "1000"),
        (2, {"GOMP_SPINCOUNT": "77"}, "77"),
        (2, {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_waiting_threads_sleep_early_unless_the_environment_sets_another_time(
    ranks: int, given: dict[str, str], spins: str | None, tmp_path: Path
) -> None:
    # What there is for OpenMP to read when torch loads it.
    (tmp_path / "torch.py").write_text(
        "import os, sys; sys.exit(print(os.environ.get('GOMP_SPINCOUNT'), file=sys.stderr))"
    )
    assert begin_rank(ranks, {"PYTHONPATH": str(tmp_path), **given}) == f"{spins}\n"


def test_the_entry_point_imports_nothing_heavy_and_offers_the_four_names() -> None:
    check = (
        "import sys\n"
        "from example import parse_args, init_runtime, cleanup_runtime, build_dataloader\n"
        "assert not {'torchrec', 'fbgemm_gpu', 'pandas', 'pyarrow'} & set(sys.modules)\n"
    )
    succeeded(python("-c", check))


def test_one_process_needs_no_launcher_and_cleans_up_after_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    original = builtins.print
    try:
        context = init_runtime(Config())
        assert (context.rank, context.local_rank, context.world_size) == (0, 0, 1)
        assert torch.distributed.is_initialized()
        raise KeyError
    except KeyError:
        pass
    finally:
        cleanup_runtime()
    assert builtins.print is original
    assert not torch.distributed.is_initialized()


def test_the_same_seed_draws_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for seed in (5, 5, 6):
        init_runtime(Config.of(seed=seed))
        cleanup_runtime()
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_incomplete_launch_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start with torchrun"):
        read_launch()


def test_cores_are_those_of_affinity_and_of_every_cgroup_above(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert allowed_cores() == 16
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert allowed_cores() == 16
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert allowed_cores() == 3
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert allowed_cores() == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert allowed_cores() == 2


def test_memory_is_that_of_the_machine_and_of_every_cgroup_above(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    assert allowed_memory() == whole
    (tmp_path / "memory.max").write_text("1000000\n")
    assert allowed_memory() == 1_000_000
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("900000\n")
    assert allowed_memory() == 900_000


def test_available_memory_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:       4096 kB\nMemFree: 9 kB\nMemAvailable:   1024 kB\n")
    assert machine.available_memory() == (2**20, 4 * 2**20)
    assert machine.cgroup_memory() is None
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    assert machine.cgroup_memory() == (1_500_000, 2_000_000)
    # File cache that nobody uses goes by itself; version 1 counts the groups below only in the total.
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert machine.cgroup_memory() == (1_100_000, 2_000_000)
    (tmp_path / "memory.stat").write_text("inactive_file 4\ntotal_inactive_file 500000\n")
    assert machine.cgroup_memory() == (1_000_000, 2_000_000)
    # A limit above the memory of the machine limits nothing.
    (tmp_path / "memory.max").write_text("9223372036854771712\n")
    assert machine.cgroup_memory() is None


def test_a_gpu_without_kernels_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "has_cuda_kernels", lambda: False)
    with pytest.raises(UserError, match=r"fbgemm-gpu-cpu is installed.*set CUDA_VISIBLE_DEVICES to nothing"):
        runtime.choose_device(runtime.Launch())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs as far as devices are chosen; the chosen ones."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(runtime, "has_cuda_kernels", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def launch_of(rank: int, num_ranks: int, world_size: int = 0) -> runtime.Launch:
    return runtime.Launch(rank, rank, world_size or num_ranks, num_ranks, launched=True)


@pytest.mark.usefixtures("gpus")
def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(
        UserError, match="4 processes on a machine with 2 GPUs; give torchrun --nproc_per_node 2"
    ):
        runtime.choose_device(launch_of(3, 4))


HOSTS = {"NCCL_HOSTID": "rank-2", "NCCL_IB_DISABLE": "1"}


@pytest.mark.parametrize(
    ("version", "variables"),
    [((2, 28, 9), HOSTS), ((2, 30, 7), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})],
)
def test_ranks_share_gpus_where_a_test_says_so(
    gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...],
    variables: dict[str, str],
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setenv(runtime.SHARE_GPUS, "nccl")
    before = dict(os.environ)
    # With a GPU for each rank nccl has to find its own way between them.
    runtime.choose_device(launch_of(1, 2))
    assert dict(os.environ) == before
    runtime.choose_device(launch_of(2, 3))
    assert dict(os.environ) == before | variables
    assert gpus == [torch.device("cuda", 1), torch.device("cuda", 0)]
    # Their tables lie on the same devices.
    context = runtime.RuntimeContext(2, 2, 3, 3, gpus[-1], 1)
    assert make_topology(context, SGD(0.1), 10**9, 10**9).local_world_size == 2
    monkeypatch.delenv(runtime.SHARE_GPUS)
    assert make_topology(context, SGD(0.1), 10**9, 10**9).local_world_size == 3


def test_gpus_are_not_shared_by_machines_or_over_an_unknown_backend(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(runtime.SHARE_GPUS, "gloo")
    with pytest.raises(UserError, match="3 processes on a machine with 2 GPUs"):
        runtime.choose_device(launch_of(0, 3, world_size=6))
    monkeypatch.setenv(runtime.SHARE_GPUS, "1")
    with pytest.raises(UserError, match=f"{runtime.SHARE_GPUS} must be nccl or gloo, got 1"):
        runtime.choose_device(launch_of(0, 3))
    assert gpus == []
    # Also where there is no GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"{runtime.SHARE_GPUS} must be nccl or gloo, got 1"):
        runtime.choose_device(launch_of(0, 3))


@pytest.mark.parametrize(
    ("device", "shared", "backend"),
    [
        ("cpu", "nccl", "gloo"),
        ("cuda:1", "", "nccl"),
        ("cuda:1", "nccl", "nccl"),
        ("cuda:1", "gloo", "cpu:gloo,cuda:gloo"),
    ],
)
def test_ranks_exchange_over_nccl_on_gpus_after_the_heartbeats_deadline_and_else_over_gloo(
    monkeypatch: pytest.MonkeyPatch, device: str, shared: str, backend: str
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: given.update(rest, name=backend))
    monkeypatch.setattr(runtime, "OWN_GROUP", [])
    monkeypatch.setenv(runtime.SHARE_GPUS, shared)
    runtime._init_process_group(launch_of(1, 2), torch.device(device), dist.HashStore(), 60)
    is_nccl = backend == "nccl"
    assert (given["name"], given["device_id"]) == (backend, torch.device(device) if is_nccl else None)
    assert (given["timeout"].total_seconds() > 60 + peers.MARGIN_SECONDS) is is_nccl


def test_an_error_in_work_done_once_per_node_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise UserError("no such file")

    context = init_runtime(Config())
    try:
        with pytest.raises(UserError, match="no such file"):
            once_per_node(context, fail, deadline=10)
    finally:
        cleanup_runtime()


def test_a_rank_that_prepares_data_for_too_long_is_a_users_mistake(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    result = torchrun(2, script, timeout=60)
    assert result.returncode != 0
    assert "slow.py: Rank 1 waited 1 s for the first rank of each machine" in result.stderr


SLOW = """
import sys, time
import example
from recsuite.runtime.process import once_per_node
from recsuite.runtime.process import cleanup_runtime, init_runtime
from recsuite.tools import script

def run(config, given, *others):
    context = init_runtime(config)
    try:
        once_per_node(context, lambda: time.sleep(60), deadline=1)
    finally:
        cleanup_runtime()

script.run = run
if __name__ == "__main__":
    sys.exit(example.main([]))
"""


CRASH = """
import sys, time
import example
from recsuite.config.config import Config
from recsuite.errors import UserError
from recsuite.runtime.process import init_runtime, cleanup_runtime
from recsuite.tools import script
import torch.distributed as dist

def train(config, given, *others):
    context = init_runtime(config)
    try:
        if context.rank == 1:
            raise {error}
        dist.barrier()
        time.sleep(100)
    finally:
        cleanup_runtime()

script.run = train
if __name__ == "__main__":
    sys.exit(example.main([]))
"""


def test_an_exception_on_one_rank_ends_all_and_its_traceback_is_printed_last(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    error = 'ArithmeticError("the fault of rank one")'
    script.write_text(CRASH.format(error=error))
    start = time.monotonic()
    result = torchrun(3, script, timeout=60)
    assert time.monotonic() - start < 150
    assert result.returncode != 0
    last = result.stderr[result.stderr.rindex("Root Cause") :]
    assert "rank      : 1 " in last
    assert "ArithmeticError: the fault of rank one" in last
    assert "Connection closed by peer" not in last


def test_a_users_mistake_on_one_rank_is_printed_and_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "mistake.py"
    error = 'UserError("the disk of machine two is full")'
    script.write_text(CRASH.format(error=error))
    result = torchrun(2, script, timeout=60)
    assert result.returncode != 0
    assert result.stderr.count("mistake.py: the disk of machine two is full") == 1
    assert "the disk of machine two is full" in result.stderr[result.stderr.rindex("Root Cause") :]


def test_a_nested_launch_and_a_busy_port_do_not_matter(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "from recsuite.config.config import Config\n"
        "from recsuite.runtime.process import *\n"
        "context = init_runtime(Config()); print(context.world_size); cleanup_runtime()\n"
    )
    import socket

    with socket.create_server(("127.0.0.1", 29500)) if _is_free(29500) else socket.socket():
        outer = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        output = succeeded(torchrun(2, script, env=outer))
    assert "[RANK 0] 2" in output
    assert "[RANK 1] 2" in output


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_too_little_virtual_memory_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda kind: (1_500_000 * 1024, -1))
    with pytest.raises(UserError, match=r"ulimit -v\).* 4\.0 GiB, got 1\.4 GiB"):
        host.check_limits()
