"""One process of a launch: rank, device, process group, collectives, and the rank-aware print.

Importing this module has no side effects: `init_runtime` imports torch and does everything below.
`cleanup_runtime` leaves the process group and restores `print`; threads, seeds, device and filters stay as
they are until the process ends. Only this file reads the variables that a launcher sets.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from recsuite.config.config import Config
from recsuite.errors import LostPeerError, UserError, counted, escaped
from recsuite.runtime.console import filter_library_messages, install_tag, remove_tag, say
from recsuite.runtime.host import (
    allowed_cores,
    die_with_parent,
    has_cuda_kernels,
    has_lost_parent,
    keep_freed_memory,
    limit_spinning,
    limited_spinning,
    stat_fields,
)
from recsuite.runtime.peers import MARGIN_SECONDS, Heartbeat, Peers

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Variable in which the launcher passes the rendezvous folder of the ranks.
STORE_FOLDER = "LAUNCH_STORE_FOLDER"
# Variable that allows more ranks than GPUs, only to test their exchanges: what they exchange over, nccl or
# gloo.
SHARE_GPUS = "RECSUITE_SHARE_GPUS"


@dataclass(frozen=True)
class Launch:
    """Ranks and addresses from the launcher; without a launcher, one process of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False

    @property
    def spans_machines(self) -> bool:
        """True if there are ranks on other machines."""
        return self.local_world_size < self.world_size


def read_launch() -> Launch:
    """Return the launch environment.

    Raises:
        UserError: when it is there in part only, or is not a number.
    """
    if has_callers_group():
        return _launch_of_group()
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
        # If a launcher does not set it, all ranks are assumed to be on this machine.
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise UserError(f"Cannot read the launch environment: {error}. Fix: start with torchrun.") from None
    if local_rank != rank and "LOCAL_WORLD_SIZE" not in os.environ:
        raise UserError(
            f"LOCAL_RANK {local_rank} with RANK {rank} requires LOCAL_WORLD_SIZE, the number of ranks of "
            "this machine."
        )
    return Launch(rank, local_rank, world_size, local_world_size, launched=True)


def has_callers_group() -> bool:
    """Return True if this process has a process group that the calling program has made."""
    # Not imported here: most programs that read the launch need no torch.
    distributed = sys.modules.get("torch.distributed")
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return is_there and not OWN_GROUP


def _launch_of_group() -> Launch:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    # Without them all ranks are assumed to be on this machine. RANK and WORLD_SIZE may be those of machines.
    local_rank, local_size = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if local_rank.isdecimal() and local_size.isdecimal():
        return Launch(rank, int(local_rank), size, int(local_size), launched=True)
    return Launch(rank, rank, size, size, launched=size > 1)


def launch_name() -> str:
    """Return a unique name of this launch; it stays the same after each restart of the ranks."""
    # A launcher lives through the restarts. Without one, the process is the launch.
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    # A process id is reused, but not together with the start time of the process, the 20th field.
    began = "".join(stat_fields(pid)[19:20])
    return f"{socket.gethostname()}-{pid}-{began}"


def open_store(launch: Launch, timeout: int) -> dist.Store:
    """Return the store of the ranks of this attempt alone.

    Raises:
        LostPeerError: when it cannot be reached.
    """
    import torch.distributed as dist

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if folder := _store_folder():
        # One per attempt: the ranks of an earlier attempt left their own behind.
        return dist.FileStore(f"{folder}/ranks-{attempt}", launch.world_size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's store outlives its ranks: keys of restarted ranks must not mix with those of earlier
        # ranks. Each machine counts its own restarts, so with several machines the launcher has rank 0 make a
        # store for each attempt.
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        return dist.PrefixStore(f"restart-{attempt}", store)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(
            *where,
            is_master=launch.rank == 0,
            timeout=timedelta(seconds=timeout),
            # `Peers` waits for the ranks, and can report which of them never came.
            wait_for_workers=False,
            # As in torch's own rendezvous: a process that joins a second time uses the server that it already
            # has.
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        # On rank 0 its own port is in use, and torch reports it.
        if launch.rank == 0:
            raise
        raise LostPeerError(
            f"rank 0 at {where[0]}:{where[1]} did not answer: rank {launch.rank} on {socket.gethostname()} "
            f"waited {timeout} s"
        ) from error


def _store_folder() -> str:
    """Return the rendezvous folder of `run.sh` on one machine; "" under other launchers."""
    folder = os.environ.get(STORE_FOLDER, "")
    # A process that the launcher started may call torchrun, which passes the variable on.
    return folder if Path(folder).name == os.environ.get("TORCHELASTIC_RUN_ID", "") else ""


REFUSED = "are refused if they have written a checkpoint"
MACHINES = " on the machines that are left, with their number as NNODES and one of them in RDZV_ENDPOINT"


def recovery_advice(config: Config | None, where: str = "") -> str:
    """Return advice after a failure of a launch with these flags, a sentence without its full stop.

    config: None for a script with flags of its own; where: on which machines to start again.
    """
    again = f"start again{where}"
    if config is None or "train" not in config.modes:
        return again
    if not config.checkpoint.writes:
        return f"{again}, with --dump to have something that --resume can continue from"
    # The folder is not read: it may have been on the lost machine, and then does not answer.
    folder = escaped(config.checkpoint.save_dir)
    return f"{again}; --resume continues from the last checkpoint in {folder}, if there is one"


def after_lost_peer(config: Config) -> str:
    """Return the advice after ranks are lost: the last sentence of a report."""
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if done < most:
        section, where = config.checkpoint, ""
        if not section.resume:
            is_free = section.move_aside or not section.writes
            where = f"; without --resume they {'start from the beginning' if is_free else REFUSED}"
        return f"torchrun restarts the ranks (restart {done + 1} of {most}){where}."
    return f"What to do: {recovery_advice(config, MACHINES if read_launch().spans_machines else '')}."


# The heartbeat of this process, between `init_runtime` and `cleanup_runtime`.
RUNNING: list[Heartbeat] = []
# The context in which its threads spin only briefly, in the same time.
RUNNING_SPINS = contextlib.ExitStack()
# Contains True while the process group is that of `init_runtime`.
OWN_GROUP: list[bool] = []


@dataclass(frozen=True)
class RuntimeContext:
    """This process of the launch. The terms are torch's.

    Args:
        rank: Position among all processes.
        local_rank: Position among those of this machine.
        world_size: Number of processes.
        local_world_size: Number of processes of this machine.
        device: Device of this process.
        num_threads: Threads of torch in this process.

    Example:
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
        """Print from rank 0 a text that is the same on every rank. Not collective.

        Args:
            text: The text.
            tagged: Begin it with the tag of the rank; otherwise it may have several lines.
        """
        if self.rank == 0:
            say(text, tagged)


def init_runtime(config: Config) -> RuntimeContext:
    """Join the other processes: device, process group, seeds, threads, print. Collective: every rank.

    Without torchrun this process is the only one. If the calling program has a process group already, such as
    under Ray, it is used with its device and number of threads, and is not ended by this library; lost ranks
    are then detected by --timeout alone.

    Args:
        config: Flags; --seed and --timeout (seconds) are used.

    Returns:
        Ranks and device of this process.

    Raises:
        UserError: When the machine has fewer GPUs than processes.

    Example:
        runtime = rs.init_runtime(rs.parse_args())
        print(runtime.rank, runtime.device)
    """
    launch, joins = read_launch(), not has_callers_group()
    # Before torch is imported, which loads the library that reads it. Also for a single rank: if another
    # program uses its cores, its threads would spin while they wait for each other.
    limit_spinning()
    # Not at the top: a data worker may import this file, and must not import torch.
    import numpy as np
    import torch

    filter_library_messages()
    # Before any port opens: if all ranks are on this machine, they listen where no other one can reach them.
    if joins and not launch.spans_machines:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun gives each rank a session of its own, so a kill of the launcher does not reach the rank.
        die_with_parent()
        # Importing torch takes seconds, in which the launcher may have died.
        if has_lost_parent():
            say(f"rank {launch.rank} ends, because its launcher is gone")
            end_process(1)
    keep_freed_memory()
    # Pages of 2 MiB for large tensors, from a kernel set to "madvise". The rows of a step are scattered over
    # their tables, and with small pages each row costs a page table walk. torch reads the variable when it
    # makes its first large tensor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    device = choose_device(launch) if joins else _device_of_group(launch)
    # The ranks of a machine share its cores; by default torch would take all of them on each rank.
    num_threads = max(1, allowed_cores() // launch.local_world_size)
    if not joins:
        num_threads = min(num_threads, torch.get_num_threads())
    torch.set_num_threads(num_threads)
    # If a script had imported torch already for its model. A thread alone waits for none.
    if num_threads > 1:
        RUNNING_SPINS.enter_context(limited_spinning())
    random.seed(config.runtime.seed)
    # This library does not use numpy's global generator, but a user's code may.
    np.random.seed(config.runtime.seed)
    torch.manual_seed(config.runtime.seed)
    # After the choice of the device: nccl connects to the others through it.
    if joins:
        _join(launch, device, config)
    install_tag(f"RANK {launch.rank}")
    context = RuntimeContext(
        launch.rank, launch.local_rank, launch.world_size, launch.local_world_size, device, num_threads
    )
    num_devices, where = num_local_devices(context), device.type
    if num_devices < launch.local_world_size:
        where += f" ({counted(num_devices, 'GPU')} for all, over {_sharing_backend()}: only a test)"
    context.say(
        f"ranks: {launch.world_size} on {where}, {launch.local_world_size} of them on this machine; "
        f"threads: {num_threads} for each, from {counted(allowed_cores(), 'core')}"
    )
    return context


def cleanup_runtime() -> None:
    """Leave the process group of `init_runtime`, and restore `print`. Collective: every rank.

    Every rank waits for all others, so that no process stays behind. A second call, or one without a group,
    does nothing. While an exception is handled it waits for no rank, and the group ends with the process:
    with nccl, destroying it waits for peers that wait for this rank. A single process always leaves its
    group, because a notebook continues after a mistake.

    Example:
        runtime = rs.init_runtime(args)
        try:
            train(args, runtime)
        finally:
            rs.cleanup_runtime()
    """
    remove_tag()
    RUNNING_SPINS.close()
    # Removed first, so that a second call has nothing to do, even if this one fails.
    heartbeats, RUNNING[:] = list(RUNNING), []
    # A call in a `finally` sees the exception here.
    if sys.exc_info()[0] is None or _is_alone():
        with contextlib.ExitStack() as stack:
            for heartbeat in heartbeats:
                # A rank that still works must not find its peers gone.
                heartbeat.leave()
                stack.enter_context(heartbeat.within("leaving the other ranks"))
            _leave_group()
        for heartbeat in heartbeats:
            if heartbeat.peers is not None:
                heartbeat.peers.close()
    for heartbeat in heartbeats:
        heartbeat.stop()


def _is_alone() -> bool:
    return read_launch().world_size == 1


def lost_peers() -> str:
    """Return the ranks that do not answer, and their machines; "" without peers. Takes some seconds.

    Not collective.
    """
    return next((heartbeat.fault() for heartbeat in RUNNING), "")


def end_process(status: int) -> NoReturn:
    """Flush the output and end this process at once, without the destructors of C++ libraries.

    On a busy machine those of torch's process groups sometimes abort it, even after a successful run
    ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run a program, and end this process with its status, or with 1 after the traceback of an exception.

    Python's normal exit waits for open collectives, and so for ranks that are silent.
    """
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    end_process(status)


def _device_of_group(launch: Launch) -> torch.device:
    """Return the device of the calling program's process group, and make it the current one."""
    import torch
    import torch.distributed as dist

    # A group may have two backends, such as "cpu:gloo,cuda:nccl".
    if "nccl" not in dist.get_backend_config():
        return torch.device("cpu")
    _check_kernels()
    number = torch.cuda.current_device()
    # The program may have chosen it in another thread, and a launcher may show each process one device.
    if number == 0 and launch.local_rank < torch.cuda.device_count():
        number = launch.local_rank
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _check_kernels() -> None:
    if not has_cuda_kernels():
        raise UserError(
            "There is a GPU, but fbgemm-gpu-cpu is installed, which has no kernels for it; install "
            "requirements-cuda.txt, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU."
        )


def choose_device(launch: Launch) -> torch.device:
    """Choose the device of this process, and make it the current one. Not collective.

    Raises:
        UserError: when there is a GPU without kernels for it, or there are fewer GPUs than processes.
    """
    import torch

    # Refuses a wrong value also where no GPU is shared.
    backend = _sharing_backend()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    _check_kernels()
    num_devices = torch.cuda.device_count()
    if launch.local_world_size > num_devices:
        # TorchRec places tables by the rank, which is the local one on one machine alone.
        if launch.spans_machines or not backend:
            raise UserError(
                f"{launch.local_world_size} processes on a machine with {counted(num_devices, 'GPU')}; give "
                f"torchrun --nproc_per_node {num_devices}, or set CUDA_VISIBLE_DEVICES to nothing to train "
                "on the CPU."
            )
        _let_nccl_share(launch.rank)
    device = torch.device("cuda", launch.local_rank % num_devices)
    # Code that asks for "cuda" without a number gets this one.
    torch.cuda.set_device(device)
    return device


def _sharing_backend() -> str:
    """Return what ranks exchange over if they may share GPUs; "" if each needs a GPU of its own."""
    backend = os.environ.get(SHARE_GPUS, "")
    if backend not in ("", "nccl", "gloo"):
        raise UserError(f"{SHARE_GPUS} must be nccl or gloo, got {backend}. Fix: unset it; it is for tests.")
    return backend


def num_local_devices(context: RuntimeContext) -> int:
    """Return the number of devices of this machine that its ranks compute on. Not collective."""
    import torch

    ranks = context.local_world_size
    may_share = _sharing_backend() and context.device.type == "cuda"
    return min(ranks, torch.cuda.device_count()) if may_share else ranks


def _let_nccl_share(rank: int) -> None:
    """Have nccl accept several ranks on one GPU."""
    import torch

    if torch.cuda.nccl.version() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        # It refuses them on one host alone, and reaches other hosts through sockets.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_IB_DISABLE="1")


def _join(launch: Launch, device: torch.device, config: Config) -> None:
    """Join the other ranks, and show them from now on that this one is alive."""
    import torch.distributed as dist

    timeout = config.runtime.timeout
    if not launch.launched:
        # One process needs no port, so a port in use does not matter.
        _init_process_group(launch, device, dist.HashStore(), timeout)
        return
    deadline = time.monotonic() + timeout
    spans = launch.spans_machines
    heartbeat = Heartbeat(timeout, launch.local_rank, lambda: after_lost_peer(config))
    # Stored before it joins, so that `cleanup_runtime` ends its thread if that fails.
    RUNNING.append(heartbeat)
    master = os.environ["MASTER_ADDR"]
    with heartbeat.within(f"joining the other ranks at {master}:{os.environ['MASTER_PORT']}"):
        store = open_store(launch, timeout)
        if launch.world_size > 1:
            heartbeat.peers = Peers(store, launch.rank, launch.world_size, master, spans, deadline)
            # Only now, when all ranks have published their addresses, and before gloo looks up its own.
            if spans and (interface := heartbeat.peers.interface()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        _init_process_group(launch, device, store, timeout)
        if launch.world_size > 1:
            # Last: its rounds need the process group, and every rank in it.
            heartbeat.begin()


def _init_process_group(launch: Launch, device: torch.device, store: dist.Store, timeout: int) -> None:
    import torch.distributed as dist

    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:gloo" if _sharing_backend() == "gloo" else "nccl"
    uses_nccl = backend == "nccl"
    hook = sys.excepthook
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        # nccl aborts the process after it, and the heartbeat is to name the silent rank before.
        timeout=timedelta(seconds=timeout + 20 * MARGIN_SECONDS * uses_nccl),
        # With a device nccl connects here, so that an unreachable rank is reported here and not in some later
        # collective.
        device_id=device if uses_nccl else None,
    )
    # torch wraps it once more for each group that a process has, and never restores it.
    sys.excepthook = hook
    OWN_GROUP.append(True)


def _leave_group() -> None:
    """Destroy the process group if it is that of `init_runtime`."""
    if not OWN_GROUP:
        return
    import torch.distributed as dist

    OWN_GROUP.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def raise_on_all(action: Callable[[], Any], group: Any = None) -> Any:
    """Run an action, and return its result; a user's mistake on any rank is raised on all. Collective.

    group: the ranks that take part; all of them where it is None.

    Raises:
        UserError: that of the lowest rank with one.
    """
    # The result stays on this rank: only the error message is sent, so the result need not be picklable.
    results: list[Any] = []
    all_gather_object(lambda: results.append(action()), group)
    return results[0]


def all_gather_object(action: Callable[[], Any], group: Any = None) -> list[Any]:
    """Return the results of an action on all ranks, by rank; otherwise as `raise_on_all`. Collective."""
    import torch.distributed as dist

    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, _attempted(action), group=group)
    return _results_of(everyones)


def broadcast_from_rank0(action: Callable[[], Any]) -> Any:
    """Return the result of an action on rank 0, on all ranks. Collective.

    Raises:
        UserError: on every rank, the one that the action raised.
    """
    import torch.distributed as dist

    # Not gathered: in a gather each rank sends and receives as many bytes as the longest result has, once for
    # each other rank, and a result may be the vocabulary of a stream.
    attempts = [_attempted(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(attempts, src=0)
    return _results_of(attempts)[0]


def _attempted(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of an action, and the message of the UserError that it raised, if any."""
    # A UserError on one rank alone would leave the others waiting, so its message is sent to all. Any other
    # exception is a fault of the program: it ends this rank with its traceback, and torchrun the others.
    try:
        return action(), None
    except UserError as error:
        return None, str(error)


def _results_of(attempts: Sequence[Any]) -> list[Any]:
    # All ranks check them in the same order, so all raise the same error.
    for _, mistake in attempts:
        if mistake is not None:
            raise UserError(mistake)
    return [result for result, _ in attempts]


def once_per_node(
    context: RuntimeContext,
    action: Callable[[], Any],
    deadline: float,
    work: str = "prepare the data",
    fix: str = "prepare them on each machine with a single process first",
    group: Any = None,
) -> list[Any]:
    """Run an action on local rank 0 of every machine while the others wait. Collective: every rank.

    Returns for each rank the result of its machine.

    work, fix: of the error when it takes longer than the deadline, in seconds; group: of all ranks, with that
    deadline, for a call that is repeated; None makes one.

    Raises:
        UserError: on every rank, when the action raised one anywhere, or takes too long.
    """
    import torch.distributed as dist

    # A separate group, because data may take longer than a collective of the training.
    its_group = group or dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline))
    try:
        results = all_gather_object(
            lambda: (context.local_rank, None if context.local_rank else action()), its_group
        )
    except RuntimeError as error:
        # gloo has no exception type for a timeout.
        if "timed out" not in str(error).lower():
            raise
        raise UserError(
            f"Rank {context.rank} waited {deadline:.0f} s for the first rank of each machine to {work}; "
            f"{fix}."
        ) from None
    if group is None:
        dist.destroy_process_group(its_group)
    # Launchers number the ranks of a machine consecutively.
    return [results[rank - local_rank][1] for rank, (local_rank, _) in enumerate(results)]


# Profiler ranges: the next batch and its copy to the device; ids to the ranks that own their rows; lookup of
# the rows; from the rows to the loss; backward, and the update of the tables; rows to the requesting ranks
# and their gradients back; the update of the dense part.
PARTS = ("feed", "input exchange", "lookup", "dense", "backward", "output exchange", "optimizer")
# The whole step, around all of them.
STEP = "step"


def profiler_range(part: str) -> contextlib.AbstractContextManager[Any]:
    """Open a profiler range. It costs next to nothing while nothing records; a record_function costs 6 us."""
    import torch

    is_recorded = torch.autograd._profiler_enabled()
    return torch.profiler.record_function(part) if is_recorded else contextlib.nullcontext()
