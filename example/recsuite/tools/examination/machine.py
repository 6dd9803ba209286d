"""The doctor's lines about the machine: packages, device, cores, threads, memory and descriptors.

What may be broken is imported where it is looked at: the page must come out all the same.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from recsuite.errors import counted
from recsuite.runtime.host import available_memory, cgroup_memory, gib, shared_memory, spare_cores
from recsuite.runtime.launch import Launch
from recsuite.runtime.process import choose_device
from recsuite.runtime.versions import check_versions, installed_versions
from recsuite.tools.examination.findings import Finding, human_size, judge
from recsuite.workers.failure import NEARLY_FULL

DRIVER = Path("/proc/driver/nvidia/version")
# With less than this left over, another program that grows can end the run.
LITTLE_MEMORY = 2**30
# What Docker gives a container that asks for nothing.
SMALL_SHARED_MEMORY = 64 * 2**20
# A rank's own files, libraries and sockets.
DESCRIPTORS_OF_A_RANK = 64
# What most systems give: enough for some workers, too few for many.
FEW_DESCRIPTORS = 1024


@dataclass(frozen=True)
class Need:
    """The memory of the batches of all workers of this machine, when every buffer is full."""

    num_bytes: int
    words: str


def check_versions_fit() -> Finding:
    """The versions of the packages, and whether they belong together."""
    check_versions()
    versions = installed_versions()
    named = [text if text.startswith(name) else f"{name} {text}" for name, text in versions.items()]
    missing = "missing" in versions.values()
    text = f"{', '.join(named)}{'' if missing else '; they belong together'}"
    return judge("versions", text, (missing, "fault", "./run.sh setup"))


def check_device(launch: Launch) -> Finding:
    """The device that a run would choose, and that it answers."""
    import torch

    device, ranks = choose_device(launch), counted(launch.local_world_size, "rank")
    # From the kernel, because a torch for the CPU knows nothing of a driver.
    found = re.search(r"\s(\d+(\.\d+)+)\s", DRIVER.read_text()) if DRIVER.is_file() else None
    driver = found[1] if found else "unknown"
    if device.type == "cpu":
        # Where the variable is set, the GPU was hidden on purpose.
        unseen = found and os.environ.get("CUDA_VISIBLE_DEVICES") is None
        text = f"CPU for {ranks}, with gloo"
        text += f"; torch {torch.__version__} sees no GPU, but there is driver {driver}" if unseen else ""
        remedy = "VARIANT=cuda ./run.sh setup, or a newer driver; CUDA_VISIBLE_DEVICES= if the CPU is meant"
        return judge("device", text, (unseen, "warning", remedy))
    # The first question that the device answers itself: one that is broken is noticed here.
    free, total = torch.cuda.mem_get_info(device)
    text = (
        f"{torch.cuda.get_device_name(device)}, {gib(free)} of {gib(total)} free, the first of "
        f"{torch.cuda.device_count()} for {ranks}; driver {driver}, CUDA {torch.version.cuda}, nccl "
    )
    return Finding("device", "ok", text + ".".join(map(str, torch.cuda.nccl.version())))


def check_cores(num_workers: int | str, num_ranks: int, num_cores: int) -> Finding:
    """The cores allowed, against ranks and workers."""
    spare, auto = spare_cores(num_ranks, num_cores), num_workers == "auto"
    text = (
        f"{counted(num_cores, 'core')} allowed; {counted(num_ranks, 'rank')} with --num_workers {num_workers}"
    )
    text += f", at most {spare} for each" if auto else ""
    return judge(
        "cores",
        text,
        (num_ranks > num_cores, "warning", f"start at most {counted(num_cores, 'rank')}, as NPROC says"),
        (
            # A rank computes while its workers do, so it counts as one more.
            not auto and num_ranks * (1 + int(num_workers)) > num_cores,
            "warning",
            f"give --num_workers {spare}, or auto",
        ),
    )


def check_threads(omp: str, num_ranks: int, num_cores: int) -> Finding:
    """The threads of a rank and of a worker, and what OMP_NUM_THREADS says."""
    own = max(1, num_cores // num_ranks)
    text = f"a rank sets {own}, its share of the cores, and a worker 1; OMP_NUM_THREADS is {omp or 'not set'}"
    # "4,2" names the threads of nested levels.
    first = omp.split(",")[0]
    crowd = first.isdigit() and int(first) * num_ranks > num_cores
    text += f": {num_ranks} x {first} threads of libraries that follow it are too many" if crowd else ""
    return judge(
        "threads",
        text,
        (omp and not first.isdigit(), "warning", f"it is not a number: unset it, or set it to {own}"),
        (crowd, "warning", f"unset OMP_NUM_THREADS, or set it to {own}"),
    )


def check_memory(need: Need) -> Finding:
    """The memory of the machine and of the cgroup, against what the workers' batches need."""
    available, total = available_memory()
    limited = cgroup_memory()
    usage, limit = limited or (0, total)
    cgroup = (
        f"the cgroup uses {gib(usage)} of its limit of {gib(limit)}" if limited else "no cgroup limits it"
    )
    text = f"{gib(available)} of {gib(total)} available, {cgroup}; the workers' batches take {need.words}"
    less = "give a smaller --batch_size, --prefetch_factor or --num_workers"
    little = need.num_bytes + LITTLE_MEMORY > min(available, limit - usage)
    return judge(
        "memory",
        text,
        (need.num_bytes > min(available, limit), "fault", less),
        (little, "warning", f"{less}, or end other programs"),
    )


def check_shared_memory(need: Need) -> Finding:
    """The size of /dev/shm, beside the need: none, as batches lie in anonymous memory."""
    used, size = shared_memory()
    room = f"{human_size(used)} of {human_size(size)} in use" if size else "there is none"
    text = f"{room}; batches need 0 of it: they lie in anonymous memory, which takes {need.words}"
    larger = "docker run --shm-size=1g, or --ipc=host: nccl, or a torch DataLoader of your own, needs more"
    return judge(
        "/dev/shm",
        text,
        (size <= SMALL_SHARED_MEMORY, "warning", larger),
        (used > NEARLY_FULL * size, "warning", "remove from /dev/shm what dead programs left there"),
    )


def check_descriptors(limit: int, num_workers: int) -> Finding:
    """`ulimit -n`, against what a rank and its workers need."""
    from recsuite.workers.handle import DESCRIPTORS_PER_WORKER

    need = DESCRIPTORS_OF_A_RANK + DESCRIPTORS_PER_WORKER * num_workers
    text = f"ulimit -n is {limit}; a rank with {counted(num_workers, 'worker')} needs about {need}"
    more = f"ulimit -n {max(4096, 2 * need)}"
    return judge(
        "descriptors", text, (limit < need, "fault", more), (limit < FEW_DESCRIPTORS, "warning", more)
    )
