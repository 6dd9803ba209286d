"""The process among others: rank, device, process group, threads, and the rank-aware print.

The only reader of the variables that say who this process is. Importing it changes nothing: torch is
imported, and everything below happens, inside `init_runtime`. `cleanup_runtime` leaves the process group and
gives `print` back; threads, seeds, device and filters stay as they are until the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from recsuite.config.config import Config
from recsuite.errors import LostPeerError, UserError, counted
from recsuite.runtime.console import install_print, restore_print
from recsuite.runtime.host import (
    allowed_cores,
    die_with_parent,
    keep_freed_memory,
    spin_briefly,
    use_large_pages,
)
from recsuite.runtime.peers.heartbeat import Heartbeat
from recsuite.runtime.peers.rollcall import Peers
from recsuite.runtime.peers.visitors import Visitors
from recsuite.runtime.recovery import after_lost_peer
from recsuite.runtime.versions import has_cuda_kernels

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Where launcher.py says in which folder ranks meet.
STORE_FOLDER = "LAUNCH_STORE_FOLDER"
# What torchrec 1.6 and 1.8 make torch say of torchrec's own code.
NOISE = (
    "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead.",
    "Please use DTensor instead and we are deprecating ShardedTensor.",
    "is_fx_tracing will return true for both fx.symbolic_trace and torch.export.",
)
NOISY_LOGGERS = ("torch.fx._symbolic_trace",)
# That of this process, between `init_runtime` and `cleanup_runtime`.
RUNNING: list[Heartbeat] = []
# Those to the ports of this process.
VISITORS = Visitors()


@dataclass(frozen=True)
class Launch:
    """What the launcher said of this process; one process of one where there was no launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False

    @property
    def spans_machines(self) -> bool:
        """Whether there are ranks on other machines."""
        return self.local_world_size < self.world_size


@dataclass(frozen=True)
class RuntimeContext:
    """This process among the others. The words mean what torch means by them.

    rank: place among all processes; local_rank: place among those of this machine; world_size and
    local_world_size: how many there are of each; device: the one this process computes on.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    num_threads: int

    def say(self, text: str, tagged: bool = True) -> None:
        """Print from rank 0 what every rank would say alike. Not collective."""
        if self.rank != 0:
            return
        if tagged:
            print(text)
        else:
            sys.stdout.write(f"{text}\n")


def read_launch() -> Launch:
    """The launch environment.

    Raises:
        UserError: when it is there in part only, or is no number.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return Launch()
    if missing:
        raise UserError(
            f"The environment has RANK or WORLD_SIZE but not {', '.join(missing)}; start with torchrun, or "
            "unset them for a single process."
        )
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in names[:3])
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise UserError(f"The launch environment is broken ({error}); start with torchrun.") from None
    return Launch(rank, local_rank, world_size, local_world_size, launched=True)


def init_runtime(config: Config) -> RuntimeContext:
    """Join the other processes: device, process group, seeds, threads, print. Collective: every rank.

    Raises:
        UserError: when the machine has fewer GPUs than processes.
    """
    launch = read_launch()
    if launch.world_size > 1:
        spin_briefly()
    import numpy as np
    import torch

    _quieten_libraries()
    _use_loopback(launch)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun gives each rank a session of its own, so what kills the launcher does not reach the rank.
        die_with_parent()
    keep_freed_memory()
    use_large_pages()
    device = choose_device(launch)
    num_threads = max(1, allowed_cores() // launch.local_world_size)
    torch.set_num_threads(num_threads)
    random.seed(config.runtime.seed)
    # Nothing here draws from numpy's global generator, but a user's code may.
    np.random.seed(config.runtime.seed)
    torch.manual_seed(config.runtime.seed)
    _join(launch, device, config)
    install_print(f"RANK {launch.rank}")
    context = RuntimeContext(
        launch.rank, launch.local_rank, launch.world_size, launch.local_world_size, device, num_threads
    )
    context.say(
        f"ranks: {launch.world_size} on {device.type}, {launch.local_world_size} of them on this machine; "
        f"threads: {num_threads} for each, from {counted(allowed_cores(), 'core')}"
    )
    return context


def cleanup_runtime() -> None:
    """Leave the process group and give `print` back. Harmless when nothing was set up, or twice. Collective:
    every rank waits for all others, so that none is left behind that nobody looks at.

    While an exception is on its way nobody is waited for, and the group is left to the end of the process:
    with nccl, destroying it waits for peers that wait for this rank.
    """
    restore_print()
    heartbeats, RUNNING[:] = list(RUNNING), []
    if sys.exc_info()[0] is None and "torch.distributed" in sys.modules:
        with contextlib.ExitStack() as stack:
            for heartbeat in heartbeats:
                heartbeat.leave()
                stack.enter_context(heartbeat.within("leaving the other ranks"))
            _destroy_process_group()
        for heartbeat in heartbeats:
            if heartbeat.peers is not None:
                heartbeat.peers.close()
    for heartbeat in heartbeats:
        heartbeat.stop()


def _destroy_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def lost_peers() -> str:
    """Which ranks do not answer this one, and on which machines; nothing where it has no peers. Takes some
    seconds. Not collective.
    """
    return next((heartbeat.fault() for heartbeat in RUNNING), "")


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


def raise_on_all(action: Callable[[], Any], group: Any = None) -> Any:
    """What an action gives on this rank; a user's mistake that any rank finds is all ranks'. Collective.

    group: the ranks that take part; all of them where it is None.

    Raises:
        UserError: the one of the lowest rank that found one.
    """
    found: list[Any] = []
    all_gather_object(lambda: found.append(action()), group)
    return found[0]


def all_gather_object(action: Callable[[], Any], group: Any = None) -> list[Any]:
    """What an action gives on each rank, rank after rank; otherwise as `raise_on_all`. Collective."""
    import torch.distributed as dist

    result, sentence = None, None
    try:
        result = action()
    except UserError as error:
        sentence = str(error)
    everyones: list[Any] = [None] * dist.get_world_size(group)
    _check_visitors()
    dist.all_gather_object(everyones, (result, sentence), group=group)
    for _, found in everyones:
        if found is not None:
            raise UserError(found)
    return [found for found, _ in everyones]


def broadcast_from_rank0(action: Callable[[], Any]) -> Any:
    """What an action gives on rank 0, for all ranks, where each might find something else. Collective.

    Raises:
        UserError: on every rank, the one that the action raised.
    """
    import torch.distributed as dist

    return all_gather_object(lambda: action() if dist.get_rank() == 0 else None)[0]


def once_per_node(context: RuntimeContext, action: Callable[[], Any], deadline: float) -> list[Any]:
    """Run an action on local rank 0 of every machine while the others wait; returns, for each rank, what it
    gave on the rank's machine. Collective: every rank.

    Raises:
        UserError: on every rank, when the action raised one anywhere; and when it takes longer than the
            deadline, in seconds.
    """
    import torch.distributed as dist

    # A group of its own, because data may take longer than any collective of the training may.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
    try:
        found = all_gather_object(
            lambda: (context.local_rank, None if context.local_rank else action()), group
        )
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise UserError(
            f"Rank {context.rank} waited {deadline:.0f} s for the first rank of each machine to prepare the "
            "data; prepare them on each machine with a single process first."
        ) from None
    dist.destroy_process_group(group)
    # Launchers number the ranks of a machine one after the other.
    return [found[rank - local_rank][1] for rank, (local_rank, _) in enumerate(found)]


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
    heartbeat = Heartbeat(timeout, launch.local_rank, lambda: after_lost_peer(config, spans))
    RUNNING.append(heartbeat)
    master = os.environ["MASTER_ADDR"]
    with heartbeat.within(f"joining the other ranks at {master}:{os.environ['MASTER_PORT']}"):
        store = _open_store(launch, timeout)
        if launch.world_size > 1:
            heartbeat.peers = Peers(store, launch.rank, launch.world_size, master, spans, deadline)
            if spans and (interface := heartbeat.peers.interface()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        _init_process_group(launch, device, store, timeout)
        if launch.world_size > 1:
            heartbeat.begin()


def _open_store(launch: Launch, timeout: int) -> dist.Store:
    """What the ranks of this attempt, and no others, meet in.

    Raises:
        LostPeerError: when it cannot be reached.
    """
    import torch.distributed as dist

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if folder := _store_folder():
        # Of an attempt of its own: ranks that are gone left theirs behind.
        return dist.FileStore(f"{folder}/ranks-{attempt}", launch.world_size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store outlives its ranks: what restarted ones write must not mix with what is there of
        # those that are gone. Each machine counts its own restarts, so launcher.py of several ones has rank 0
        # make a store for each attempt.
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        return dist.PrefixStore(f"restart-{attempt}", store)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(
            *where,
            is_master=launch.rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if launch.rank == 0:
            raise
        raise LostPeerError(
            f"rank 0 at {where[0]}:{where[1]} never answered: rank {launch.rank} on {socket.gethostname()} "
            f"waited {timeout} s"
        ) from error


def _init_process_group(launch: Launch, device: torch.device, store: dist.Store, timeout: int) -> None:
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    _check_visitors()


def _store_folder() -> str:
    """The folder in which launcher.py has the ranks of one machine meet; "" under any other launcher."""
    folder = os.environ.get(STORE_FOLDER, "")
    # torchrun may be called by a process that launcher.py started, and hands the variable on.
    return folder if Path(folder).name == os.environ.get("TORCHELASTIC_RUN_ID", "") else ""


def _use_loopback(launch: Launch) -> None:
    """Have ranks that are all on this machine listen where no other machine can reach them."""
    if sys.platform == "linux" and launch.world_size == launch.local_world_size:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def _check_visitors() -> None:
    """Look who the others are, if all are on this machine: what they send is unpickled. Not collective."""
    launch = read_launch()
    if launch.world_size == launch.local_world_size > 1:
        VISITORS.check()


def _quieten_libraries() -> None:
    """Filter, by the words they begin with, messages that come on every run and that no user can mend."""
    # PyTorch's profiler says on standard error that it begins and ends, at a level of its own above errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    for message in NOISE:
        warnings.filterwarnings("ignore", message=re.escape(message))
    for logger in NOISY_LOGGERS:
        logging.getLogger(logger).addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NOISE)
