"""This machine: its resources for this process, and the match of the installed torch, torchrec and fbgemm.

Reads /proc, /sys and the metadata of packages. Imports nothing heavy, so a data worker may import it. If the
versions do not match, the import itself fails, with pages of messages from the dynamic loader.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from recsuite.errors import UserError
from recsuite.files import checkout

# Values of torchrun's --nnodes for a launch on this machine alone; the second is its default.
ONE_MACHINE = ("1", "1:1")
CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
# A single rank opens some 40: libraries, sockets, columns.
LEAST_DESCRIPTORS = 64
# Of addresses: libraries and threads reserve far more than they use.
LEAST_ADDRESSES = 4 * 2**30
PR_SET_PDEATHSIG = 1
# Environment variable with the process id of the launcher; torchrun itself sets none.
LAUNCHER = "LAUNCHER_PROCESS"
# Options of glibc's mallopt; the first is at most 32 MiB.
M_MMAP_THRESHOLD = -3
M_TRIM_THRESHOLD = -1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even while it is blocked."""
    # For the kernel the "parent" is the thread that started this process, so that thread must live as long as
    # its process.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def has_lost_parent() -> bool:
    """Return True for a rank whose launcher died before the rank could ask to die with it.

    It was given another parent then, such as init, which runs no Python.
    """
    # torchrun starts each rank in a session of its own; in another one, the parent is a program between them.
    if os.getsid(0) != os.getpid():
        return False
    # Removed: a launcher that a rank starts is the parent of other ranks.
    if launcher := os.environ.pop(LAUNCHER, ""):
        # 0 is a parent outside of this container.
        return str(os.getppid()) not in ("0", launcher)
    try:
        program = os.readlink(f"/proc/{os.getppid()}/exe")
    except PermissionError:
        # Of another user, as init is.
        return os.getppid() == 1
    except OSError:
        # No such folder, or a parent outside of this container.
        return False
    return "python" not in Path(program).name and program != os.path.realpath(sys.executable)


def is_of_launcher() -> bool:
    """Return True for a process that the launcher of this library started, before `has_lost_parent`."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for the next batch, instead of returning pages to the kernel.

    Without it every large temporary costs a page fault for each of its pages: a worker that imports only
    numpy makes batches at a third of the speed. No-op if the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 256 * 2**20)


def limit_spinning() -> None:
    """Have torch's threads sleep after microseconds, instead of milliseconds, while they wait for each other.

    A spinning thread keeps a core from the thread that receives data from another rank, and from other
    programs of a busy machine, for which a step of two threads then waits again and again. GNU's OpenMP, part
    of torch on Linux, reads the variable when it is loaded, so this runs before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "torch" not in sys.modules:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@contextlib.contextmanager
def limited_spinning() -> Iterator[None]:
    """Have threads wait as with `limit_spinning`, if torch was imported before that could be read.

    GNU's OpenMP spins briefly while a process has more threads than cores. This adds one thread, with a team
    of its own of as many as there are cores, which sleeps until the block ends: a rank may have few threads.
    """
    import torch

    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*os.environ}:
        yield
        return
    # GNU's OpenMP counts these, and not those of a quota.
    num_cores = len(os.sched_getaffinity(0))
    has_team, end = threading.Event(), threading.Event()

    def run() -> None:
        before = torch.get_num_threads()
        # The first call makes other threads of torch, as many as it is given.
        for number in (before, num_cores):
            torch.set_num_threads(number)
        try:
            # torch gives each thread 2^15 numbers at least.
            torch.zeros(num_cores * 2**15).add_(1)
        finally:
            # torch begins other threads with the last number that was set.
            torch.set_num_threads(before)
            has_team.set()
        end.wait()

    thread = threading.Thread(target=run, name="spin", daemon=True)
    thread.start()
    try:
        has_team.wait()
        yield
    finally:
        end.set()
        thread.join()


def allowed_memory() -> int:
    """Bytes that this process may use: the machine's memory, and the limits of its cgroup and those above."""
    # In a container this is the memory of the machine, but the kernel kills at the limit of the container.
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in map(_memory_limit, _cgroup_folders("memory")) if limit is not None]
    return min([machine, *limits])


def available_memory() -> tuple[int, int]:
    """Available bytes of the machine, and its total."""
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    available, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return available, total


def free_memory() -> int:
    """Available bytes for this process: of the machine, and of its cgroup."""
    free = available_memory()[0] if MEMINFO.exists() else allowed_memory()
    # The minimum: a machine may run out before a cgroup reaches its limit.
    usage, limit = cgroup_memory() or (0, free)
    return min(free, limit - usage)


def cgroup_memory() -> tuple[int, int] | None:
    """Used bytes, without idle file cache, and limit of the cgroup with the lowest one; None without any."""
    limits = [
        (limit, _memory_usage(folder))
        for folder in _cgroup_folders("memory")
        if (limit := _memory_limit(folder)) is not None and limit < available_memory()[1]
    ]
    if not limits:
        return None
    limit, usage = min(limits)
    return usage, limit


def descriptor_limit() -> int:
    """Maximum number of open file descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_limits() -> None:
    """Refuse limits that are too low for every program of this suite.

    Raises:
        UserError: when there are too few descriptors or addresses.
    """
    limit = descriptor_limit()
    if limit < LEAST_DESCRIPTORS:
        raise UserError(
            f"The limit of open files (ulimit -n) must be at least {LEAST_DESCRIPTORS}, got {limit}; call "
            "`ulimit -n 1024` first, or raise the hard limit if that is refused."
        )
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY and addresses < LEAST_ADDRESSES:
        raise UserError(
            f"The limit of virtual memory (ulimit -v) must be at least {shown_bytes(LEAST_ADDRESSES)}, got "
            f"{shown_bytes(addresses)}, because most of it is reserved and never used; call "
            "`ulimit -v unlimited`, and limit the memory with a cgroup."
        )


def allowed_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroup and those above."""
    quotas = [quota for quota in map(_cpu_quota, _cgroup_folders("cpu")) if quota is not None]
    # Rounded down: with more threads, the kernel stops all of them for the rest of each period.
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def spare_cores(num_ranks: int, num_cores: int) -> int:
    """Cores that each rank of a machine has beside its own."""
    return max(0, num_cores // num_ranks - 1)


def describe_memory() -> str:
    """Current memory of the machine and of the cgroup, as text."""
    available, total = available_memory()
    text = f"Memory now: {shown_bytes(available)} of the machine's {shown_bytes(total)} are available"
    cgroup = cgroup_memory()
    if cgroup is None:
        return f"{text}; no cgroup limits it."
    usage, limit = cgroup
    return f"{text}; the cgroup uses {shown_bytes(usage)} of its limit of {shown_bytes(limit)}."


def shown_bytes(num_bytes: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    unit = min(3, (max(1, int(num_bytes)).bit_length() - 1) // 10)
    return f"{num_bytes / 2 ** (10 * unit):,.1f} {('bytes', 'KiB', 'MiB', 'GiB')[unit]}"


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders of this process's cgroup and those above it, for versions 1 and 2; some may not exist."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    roots = [CGROUP_ROOT, CGROUP_ROOT / controller]
    folders = list(roots)
    for line in lines:
        # "0::/a/b" in version 2, "4:cpu,cpuacct:/a/b" in version 1.
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            below = Path(path.strip("/"))
            # Also those above, because any limit on the path applies. In a container the path may be the one
            # outside it, and has no folder here. Then the roots, which are always read, are the container's
            # own cgroup.
            folders += [root / part for root in roots for part in (below, *below.parents)]
    return folders


def _cpu_quota(folder: Path) -> float | None:
    """Number of cores that one cgroup may use; None if it sets no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        # No such file, or the word "max".
        return None


def _memory_limit(folder: Path) -> int | None:
    """Bytes that one cgroup may use; None if it sets no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            # No such file, or the word "max".
            continue
    return None


def _memory_usage(folder: Path) -> int:
    """Bytes that one cgroup uses, without the file cache that the kernel can reclaim."""
    usage = 0
    for name in ("memory.current", "memory.usage_in_bytes"):
        if (folder / name).is_file():
            usage = int((folder / name).read_text())
    try:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return usage
    # Version 1 counts the groups below only under "total_".
    names = [prefix + "inactive_file" for prefix in ("total_", "")]
    cache = next((int(statistics[name]) for name in names if name in statistics), 0)
    return max(0, usage - cache)


def stat_fields(pid: int) -> list[str]:
    """Fields of a process in /proc/PID/stat after its name in brackets, see proc(5); empty if unavailable."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


# Versions of torch, torchrec and fbgemm with which the tests pass. requirements.txt and requirements-cuda.txt
# pin those of PINNED; `STACK=2.14 ./run.sh setup` installs others.
STACKS = {
    "2.11": ("2.11.0", "1.6.1", "1.6.0"),
    "2.13": ("2.13.0", "1.8.0", "1.8.0"),
    "2.14": ("2.14.1", "1.9.2", "1.9.0"),
}
PINNED = "2.13"

# Two names for one module: installed together, they overwrite each other's files.
FBGEMM_WHEELS = ("fbgemm-gpu", "fbgemm-gpu-cpu")


def check_versions() -> None:
    """Refuse an installation that cannot start.

    Raises:
        UserError: when one of the three is missing, both fbgemm wheels are there, versions do not match, or
            the build for CUDA has no driver.
    """
    # Each is read once, because that takes milliseconds of every start.
    versions = {name: _version(name) for name in ("torch", "torchrec", *FBGEMM_WHEELS)}
    torch, torchrec = versions["torch"], versions["torchrec"]
    wheels = [name for name in FBGEMM_WHEELS if versions[name]]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if torch is None or torchrec is None or not wheels:
        needed = "The example needs torch, torchrec and one of fbgemm-gpu and fbgemm-gpu-cpu"
        fix = _mend(wheels, everything=True)
        where = "" if checkout() else " in the folder of the repository"
        raise UserError(f"{needed}, but found {installed or 'none of them'}; fix it{where} with: {fix}")
    if len(wheels) == 2:
        fault = f"Found {installed}, but the last two overwrite each other's files: only one can be installed"
        raise UserError(f"{fault}; fix it with: {_mend(wheels)}")
    # torch 2.N goes with torchrec and fbgemm 1.(N - 5). Between the stacks that are tested there is 2.12.
    goes_with = {f"2.{number}": f"1.{number - 5}" for number in range(11, 15)}
    if not _minor(torchrec) == _minor(versions[wheels[0]]) == goes_with.get(_minor(torch)):
        pairs = ", ".join(f"{first} with {second}" for first, second in goes_with.items())
        raise UserError(
            f"Found {installed}, which do not belong together: supported are torch {pairs} of torchrec and "
            f"fbgemm; fix it with: {_mend(wheels)}"
        )
    if versions[FBGEMM_WHEELS[0]] and not _has_driver():
        raise UserError(
            f"Found {installed}, the build for CUDA, which requires NVIDIA's driver, and there is no "
            f"libnvidia-ml.so.1; install the driver, or the build for CPUs with: {_mend([FBGEMM_WHEELS[1]])}"
        )


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def has_cuda_kernels() -> bool:
    """True if the installed fbgemm wheel is the one for CUDA."""
    return _version("fbgemm-gpu") is not None


def installed_versions() -> dict[str, str]:
    """Versions for a report, "missing" for a package that is not installed."""
    fbgemm = [f"{name} {_version(name)}" for name in FBGEMM_WHEELS if _version(name)]
    versions = {name: _version(name) or "missing" for name in ("torch", "torchrec", "pandas", "numpy")}
    return {"python": platform.python_version(), **versions, "fbgemm": " and ".join(fbgemm) or "missing"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str | None) -> str:
    return ".".join((version or "").split(".")[:2])


def _mend(wheels: list[str], everything: bool = False) -> str:
    """Commands that install the three packages, of the torch that is there if it has a stack, or all."""
    # A single fbgemm wheel shows which kind is wanted. With both or none, torch shows it: its CUDA build
    # requires NVIDIA's libraries.
    wheel = wheels[0] if len(wheels) == 1 else FBGEMM_WHEELS[0 if _torch_wants_cuda() else 1]
    cuda = wheel == "fbgemm-gpu"
    # A bare "pip" may belong to another Python.
    pip = f"{shlex.quote(sys.executable)} -m pip"
    # On a CPU without dependencies: torchrec requires the fbgemm of CUDA, and pip would overwrite the files
    # of the CPU wheel. So requirements.txt is a complete list.
    install = f"{pip} install {'' if cuda else '--no-deps '}"
    # Both, even if one is right: they share their files, so removing one damages the other.
    steps = [f"{pip} uninstall -y {' '.join(FBGEMM_WHEELS)}"]
    stack = _minor(_version("torch"))
    if everything:
        # Outside of a repository the list must be fetched from one, so only its name is known.
        requirements = (checkout() or Path()) / f"requirements{'-cuda' if cuda else ''}.txt"
        steps.append(f"{install}-r {shlex.quote(str(requirements))}")
    if not everything or stack in STACKS.keys() - {PINNED}:
        torch, torchrec, fbgemm = STACKS.get(stack, STACKS[PINNED])
        # As in the list: pip would prefer the CPU build of an index that has both.
        other = f" 'torch!={torch}+cpu'" if cuda else ""
        steps.append(f"{install}torch=={torch}{other} torchrec=={torchrec} {wheel}=={fbgemm}")
    return " && ".join(steps)


def _torch_wants_cuda() -> bool:
    needed = (metadata.requires("torch") or []) if _version("torch") else []
    return any(line.startswith("nvidia-") for line in needed)
