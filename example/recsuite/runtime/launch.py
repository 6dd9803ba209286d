"""What the launcher said of this process, and where the ranks of one attempt meet.

The only reader of the variables that say who this process is.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.errors import LostPeerError, UserError
from recsuite.runtime.host import stat_fields

if TYPE_CHECKING:
    import torch.distributed as dist

# Where the launcher says in which folder ranks meet.
STORE_FOLDER = "LAUNCH_STORE_FOLDER"


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


def read_launch() -> Launch:
    """The launch environment.

    Raises:
        UserError: when it is there in part only, or is not a number.
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
        # A launcher that does not set it is taken to have all ranks on this machine.
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise UserError(f"The launch environment is broken ({error}); start with torchrun.") from None
    return Launch(rank, local_rank, world_size, local_world_size, launched=True)


def launch_name() -> str:
    """What tells the launch of this process from any other; the same after each restart of its ranks."""
    # A launcher lives through the restarts. Where there is none, the process is the launch.
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    # The number of a process comes again, but not with the time at which it began, the 20th field.
    began = "".join(stat_fields(pid)[19:20])
    return f"{socket.gethostname()}-{pid}-{began}"


def open_store(launch: Launch, timeout: int) -> dist.Store:
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
        # those that are gone. Each machine counts its own restarts, so of several ones the launcher has rank
        # 0 make a store for each attempt.
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        return dist.PrefixStore(f"restart-{attempt}", store)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(
            *where,
            is_master=launch.rank == 0,
            timeout=timedelta(seconds=timeout),
            # `Peers` waits for the ranks, and can say which of them never came.
            wait_for_workers=False,
            # As torch's own rendezvous has it: a process that joins a second time uses the server that it
            # has.
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        # There it is its own port that cannot be had, and torch says so.
        if launch.rank == 0:
            raise
        raise LostPeerError(
            f"rank 0 at {where[0]}:{where[1]} never answered: rank {launch.rank} on {socket.gethostname()} "
            f"waited {timeout} s"
        ) from error


def _store_folder() -> str:
    """The folder in which recsuite.launcher has the ranks of one machine meet; "" under any other one."""
    folder = os.environ.get(STORE_FOLDER, "")
    # torchrun may be called by a process that the launcher started, and hands the variable on.
    return folder if Path(folder).name == os.environ.get("TORCHELASTIC_RUN_ID", "") else ""
