"""A report on this machine, each line ok, warning or fault, for a run with the same flags and ranks.

Downloads no data and writes none. Packages that may be broken are imported inside their check, so that the
other lines are printed in any case.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recsuite.config.config import Config
from recsuite.errors import LINES, UserError, counted, harmless, printable
from recsuite.files import reason_of
from recsuite.runtime.host import (
    allowed_cores,
    check_versions,
    free_memory,
    gib,
    installed_versions,
    memory_in_words,
    mib,
    spare_cores,
)
from recsuite.runtime.process import Launch, choose_device, cleanup_runtime, init_runtime, read_launch

DRIVER = Path("/proc/driver/nvidia/version")
# With less available memory, another program that grows can end the run.
LITTLE_MEMORY = 2**30
# Seconds for two processes that import torch on a busy machine.
MEET_SECONDS = 120


@dataclass(frozen=True)
class Finding:
    """One line of the report, and its remedy."""

    name: str
    text: str
    remedy: str = ""
    state: Literal["ok", "warning", "fault"] = "ok"

    def __str__(self) -> str:
        remedy = f"\n{'':19}-> {self.remedy}" if self.remedy else ""
        return f"{self.state:<7}  {self.name:<8}  {self.text}{remedy}"


def diagnose(config: Config) -> int:
    """Print the report for the ranks of this launch on this machine. Return the exit status, 1 if any line is
    a fault. Not collective.
    """
    launch = read_launch()
    checks: dict[str, Callable[[], Finding]] = {
        "versions": check_packages,
        "device": lambda: check_device(launch),
        "cores": lambda: check_cores(config.loader.num_workers, launch.local_world_size, allowed_cores()),
        "memory": check_memory,
        "gloo": check_gloo,
        "data": lambda: check_data(config),
    }
    states = []
    for name, check in checks.items():
        finding = examined(name, check)
        print(harmless(finding, LINES), flush=True)
        states.append(finding.state)
    counts = [counted(states.count(state), state) for state in ("fault", "warning") if state in states]
    print(" and ".join(counts) or "All is well.")
    return 1 if "fault" in states else 0


def examined(name: str, check: Callable[[], Finding]) -> Finding:
    """Return the finding of a check. An exception is a fault, because a run would fail there too."""
    try:
        return check()
    except UserError as error:
        return Finding(name, str(error), state="fault")
    # Any exception: a broken package may raise any type when it is imported.
    except Exception as error:
        remedy = "if a package is broken or missing, delete .venv and run ./run.sh setup"
        return Finding(name, f"{type(error).__name__}: {error}", remedy, "fault")


def check_packages() -> Finding:
    """Check the versions of the packages, and that they match."""
    check_versions()
    versions = installed_versions()
    text = ", ".join(each if each.startswith(name) else f"{name} {each}" for name, each in versions.items())
    if "missing" in versions.values():
        return Finding("versions", text, "./run.sh setup", "fault")
    return Finding("versions", f"{text}; they belong together")


def check_device(launch: Launch) -> Finding:
    """Check the device that a run would choose, and that it responds."""
    import torch

    device, ranks = choose_device(launch), counted(launch.local_world_size, "rank")
    # From the kernel, because a torch for the CPU does not know the driver.
    found = re.search(r"\s(\d+(\.\d+)+)\s", DRIVER.read_text()) if DRIVER.is_file() else None
    driver = found[1] if found else "unknown"
    if device.type == "cuda":
        # The first operation on the device itself: a broken one fails here.
        free, total = torch.cuda.mem_get_info(device)
        return Finding(
            "device",
            f"{torch.cuda.get_device_name(device)}, {gib(free)} of {gib(total)} free, the first of "
            f"{torch.cuda.device_count()} for {ranks}; driver {driver}, CUDA {torch.version.cuda}, nccl "
            f"{'.'.join(map(str, torch.cuda.nccl.version()))}",
        )
    # If the variable is set, the GPU was hidden on purpose.
    if found and os.environ.get("CUDA_VISIBLE_DEVICES") is None:
        text = f"CPU for {ranks}; torch {torch.__version__} sees no GPU, but there is driver {driver}"
        remedy = "VARIANT=cuda ./run.sh setup, or a newer driver; CUDA_VISIBLE_DEVICES= if the CPU is meant"
        return Finding("device", text, remedy, "warning")
    return Finding("device", f"CPU for {ranks}")


def check_cores(num_workers: int | str, num_ranks: int, num_cores: int) -> Finding:
    """Check the allowed cores against ranks and workers."""
    spare = spare_cores(num_ranks, num_cores)
    text = f"{counted(num_cores, 'core')} for {counted(num_ranks, 'rank')}, --num_workers {num_workers}"
    if num_ranks > num_cores:
        return Finding("cores", text, f"start at most {counted(num_cores, 'rank')}, as NPROC says", "warning")
    # A rank computes while its workers do, so it counts as one more.
    if num_workers != "auto" and num_ranks * (1 + int(num_workers)) > num_cores:
        return Finding("cores", text, f"give --num_workers {spare}, or auto", "warning")
    return Finding("cores", text)


def check_memory() -> Finding:
    """Check the available memory of the machine and of the cgroup."""
    if free_memory() < LITTLE_MEMORY:
        return Finding("memory", memory_in_words(), "end other programs, or raise the limit", "warning")
    return Finding("memory", memory_in_words())


def check_gloo() -> Finding:
    """Check that two processes of a launch on this machine meet and sum a number."""
    command = [sys.executable, "-m", "recsuite.launcher", "--nproc_per_node=2", "-m", "recsuite.tools.doctor"]
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launched}
    # Ranks communicate by gloo on a CPU, and by gloo and nccl on GPUs.
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    remedy = "see that lo is up, and that GLOO_SOCKET_IFNAME is not set or names an interface"
    try:
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=MEET_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding("gloo", f"two processes did not meet within {MEET_SECONDS} s", remedy, "fault")
    if result.returncode:
        last = printable(f"{result.stderr}{result.stdout}".strip().rpartition("\n")[2])
        return Finding("gloo", f"two processes did not meet: {last}", remedy, "fault")
    return Finding("gloo", "two processes met")


def check_data(config: Config) -> Finding:
    """Check the folder of the data, and that they can be read; unlike a run it downloads none."""
    from recsuite.datasets.source import locate, look

    try:
        folder, source = look(config.data, config.runtime.seed)
        if source is None:
            if config.data.is_synthetic:
                return Finding("data", f"{folder}: not there yet, drawn at the first start")
            remedy = "the first start needs the network; or unpack the files there, or give --data_path"
            return Finding(
                "data", f"{folder}: not there yet, downloaded at the first start", remedy, "warning"
            )
        # Refuses files of another data set.
        locate(config.data, config.runtime.seed)
        for file in source.files:
            file.open().close()
    except OSError as error:
        text = f"{error.filename or config.data.data_path} cannot be read ({reason_of(error)})"
        return Finding("data", text, "give a --data_path that can be read, or change its mode", "fault")
    size = mib(sum(file.size for file in source.files))
    return Finding("data", f"{folder}: {counted(len(source.files), 'file')}, {size}")


def meet() -> None:
    """Join the other process of this launch, and sum a number. Collective: every rank."""
    import torch
    import torch.distributed as dist

    init_runtime(Config())
    number = torch.ones(())
    dist.all_reduce(number)
    if number != dist.get_world_size():
        raise RuntimeError(f"{dist.get_world_size()} processes added up to {number}")
    cleanup_runtime()


if __name__ == "__main__":
    try:
        meet()
    except Exception as error:
        # With the status of a user's mistake, so that the launcher adds no report of its own.
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(2)
