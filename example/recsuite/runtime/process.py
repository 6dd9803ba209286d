"""The process among others: rank, device, process group, threads, and the rank-aware print.

Importing it changes nothing: torch is imported, and everything below happens, inside `init_runtime`.
`cleanup_runtime` leaves the process group and gives `print` back; threads, seeds, device and filters stay as
they are until the process ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from recsuite.config.config import Config
from recsuite.errors import UserError, counted
from recsuite.runtime.console import install_tag, quieten_libraries, remove_tag, say
from recsuite.runtime.ending.recovery import Recovery
from recsuite.runtime.host import (
    allowed_cores,
    die_with_parent,
    keep_freed_memory,
    spin_briefly,
    spinning_briefly,
    use_large_pages,
)
from recsuite.runtime.launch import Launch, open_store, read_launch
from recsuite.runtime.peers.heartbeat import Heartbeat
from recsuite.runtime.peers.rollcall import Peers
from recsuite.runtime.versions import has_cuda_kernels

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# The heartbeat of this process, between `init_runtime` and `cleanup_runtime`.
RUNNING: list[Heartbeat] = []
# What has its threads wait briefly, likewise.
RUNNING_SPINS = contextlib.ExitStack()


@dataclass(frozen=True)
class RuntimeContext:
    """This process among the others. The words mean what torch means by them.

    rank: place among all processes; local_rank: place among those of this machine; world_size and
    local_world_size: how many there are of each; device: the one this process computes on; num_threads: of
    torch in this process.

        runtime = rs.init_runtime(args)
        runtime.say(f"{runtime.world_size} ranks")            # printed once, by rank 0
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    num_threads: int

    def say(self, text: str, tagged: bool = True) -> None:
        """Print from rank 0 what every rank would say alike. Not collective."""
        if self.rank == 0:
            say(text, tagged)


def init_runtime(config: Config) -> RuntimeContext:
    """Join the other processes: device, process group, seeds, threads, print. Collective: every rank.

    config: --seed and --timeout count. Without torchrun this process is the only one.

    Raises:
        UserError: when the machine has fewer GPUs than processes.

        runtime = rs.init_runtime(rs.parse_args())
        print(runtime.rank, runtime.device)
    """
    launch = read_launch()
    # Before torch is imported, which loads the library that reads it. Also for a rank alone: where another
    # program uses its cores, its threads would wait for each other awake.
    if "torch" in sys.modules:
        # A script may import it for its model.
        RUNNING_SPINS.enter_context(spinning_briefly())
    else:
        spin_briefly()
    # Not at the top: every data worker imports this file with the script, and must hold no torch.
    import numpy as np
    import torch

    quieten_libraries()
    # Before anything listens.
    _use_loopback(launch)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun gives each rank a session of its own, so what kills the launcher does not reach the rank.
        die_with_parent()
    keep_freed_memory()
    use_large_pages()
    device = choose_device(launch)
    # The ranks of a machine share its cores; by itself torch would take all of them on each rank.
    num_threads = max(1, allowed_cores() // launch.local_world_size)
    torch.set_num_threads(num_threads)
    random.seed(config.runtime.seed)
    # Nothing here draws from numpy's global generator, but a user's code may.
    np.random.seed(config.runtime.seed)
    torch.manual_seed(config.runtime.seed)
    # With the device chosen: nccl connects to the others by it.
    _join(launch, device, config)
    install_tag(f"RANK {launch.rank}")
    context = RuntimeContext(
        launch.rank, launch.local_rank, launch.world_size, launch.local_world_size, device, num_threads
    )
    context.say(
        f"ranks: {launch.world_size} on {device.type}, {launch.local_world_size} of them on this machine; "
        f"threads: {num_threads} for each, from {counted(allowed_cores(), 'core')}"
    )
    return context


def cleanup_runtime() -> None:
    """Leave the process group and restore `print`. A second call, and one without a group, does nothing.
    Collective: every rank waits for all others, so that no process stays behind.

    While an exception is handled it waits for no rank, and the group ends with the process: with nccl,
    destroying it waits for peers that wait for this rank. A process alone always leaves its group: a notebook
    goes on after a mistake.

        runtime = rs.init_runtime(args)
        try:
            train(args, runtime)
        finally:
            rs.cleanup_runtime()
    """
    remove_tag()
    RUNNING_SPINS.close()
    # Taken out first, so that a second call finds nothing, whatever becomes of this one.
    heartbeats, RUNNING[:] = list(RUNNING), []
    # Whoever calls this in a `finally` has the exception here.
    if (sys.exc_info()[0] is None or _is_alone()) and "torch.distributed" in sys.modules:
        with contextlib.ExitStack() as stack:
            for heartbeat in heartbeats:
                # A rank that still works must not find its peers gone.
                heartbeat.leave()
                stack.enter_context(heartbeat.within("leaving the other ranks"))
            _destroy_process_group()
        for heartbeat in heartbeats:
            if heartbeat.peers is not None:
                heartbeat.peers.close()
    for heartbeat in heartbeats:
        heartbeat.stop()


def _is_alone() -> bool:
    return read_launch().world_size == 1


def _destroy_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def lost_peers() -> str:
    """Which ranks do not answer this one, and on which machines; nothing where it has no peers. Takes some
    seconds. Not collective.
    """
    return next((heartbeat.fault() for heartbeat in RUNNING), "")


def advise(advice: Callable[[], str]) -> None:
    """Have this process end, when others are lost, with this advice instead of one that knows no checkpoint.
    Not collective.
    """
    for heartbeat in RUNNING:
        heartbeat.advice = advice


def end_process(status: int) -> NoReturn:
    """End this process at once, when all is written, without the destructors of C++ libraries.

    On a busy machine those of torch's process groups abort it now and then, also after a run that ended well
    ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run a program, and end this process with its status, or with 1 after the traceback of what it raised.

    Python's own end waits for the collectives that are under way, and so for ranks that are silent.
    """
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    end_process(status)


def choose_device(launch: Launch) -> torch.device:
    """The device of this process, made the current one. Not collective.

    Raises:
        UserError: when there is a GPU without kernels for it, or there are fewer GPUs than processes.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if not has_cuda_kernels():
        raise UserError(
            "There is a GPU, but fbgemm-gpu-cpu is installed, which has no kernels for it; install "
            "requirements-cuda.txt, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU."
        )
    num_devices = torch.cuda.device_count()
    if launch.local_world_size > num_devices:
        raise UserError(
            f"{launch.local_world_size} processes on a machine with {counted(num_devices, 'GPU')}; give "
            f"torchrun --nproc_per_node {num_devices}, or set CUDA_VISIBLE_DEVICES to nothing to train on "
            "the CPU."
        )
    device = torch.device("cuda", launch.local_rank)
    # What asks for "cuda" without a number gets this one.
    torch.cuda.set_device(device)
    return device


def _join(launch: Launch, device: torch.device, config: Config) -> None:
    """Join the other ranks, and show them from now on that this one lives."""
    import torch.distributed as dist

    timeout = config.runtime.timeout
    if not launch.launched:
        # One process needs no port, so a busy one cannot matter.
        _init_process_group(launch, device, dist.HashStore(), timeout)
        return
    deadline = time.monotonic() + timeout
    spans = launch.spans_machines
    heartbeat = Heartbeat(timeout, launch.local_rank, Recovery(config).after_lost_peer)
    # Known before it joins, so that `cleanup_runtime` ends its thread if that fails.
    RUNNING.append(heartbeat)
    master = os.environ["MASTER_ADDR"]
    with heartbeat.within(f"joining the other ranks at {master}:{os.environ['MASTER_PORT']}"):
        store = open_store(launch, timeout)
        if launch.world_size > 1:
            heartbeat.peers = Peers(store, launch.rank, launch.world_size, master, spans, deadline)
            # Only now, when all have told their addresses, and before gloo looks up its own.
            if spans and (interface := heartbeat.peers.interface()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        _init_process_group(launch, device, store, timeout)
        if launch.world_size > 1:
            # Last: its rounds need the process group, and every rank in it.
            heartbeat.begin()


def _init_process_group(launch: Launch, device: torch.device, store: dist.Store, timeout: int) -> None:
    import torch.distributed as dist

    # With a device nccl connects here, where a rank that cannot be reached is named, and not in some later
    # collective.
    backend = "nccl" if device.type == "cuda" else "gloo"
    hook = sys.excepthook
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    # torch wraps it once more for each group that a process has, and never gives it back.
    sys.excepthook = hook


def _use_loopback(launch: Launch) -> None:
    """Have ranks that are all on this machine listen where no other machine can reach them."""
    if sys.platform == "linux" and launch.world_size == launch.local_world_size:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
