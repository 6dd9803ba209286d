"""Where the processes of one machine meet: in files of a folder that no other user can enter, and on no port.

torchrun's own meeting is a store behind a port on all addresses of the machine, and it unpickles what it
finds there: whoever reaches the port has the launcher run what he likes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from recsuite.runtime.host import ONE_MACHINE
from recsuite.runtime.launch import STORE_FOLDER

BACKEND = "folder"
PREFIX = "launch-"
# Nothing else has a file of this name: a folder of another kind may have the prefix, and a ".lock" too.
LOCK = ".launch.lock"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of this launch, removed at its end; with it go those of launches that were killed."""
    _sweep(Path(tempfile.gettempdir()))
    # It makes folders that only their owner can enter.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (folder / "new").open("w") as lock:
        # The kernel gives it back when this process ends, in whatever way. So whoever can lock it later knows
        # that nobody is in the folder any more.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Only now, or another launch could lock it first, and take this one for dead.
        Path(lock.name).rename(folder / LOCK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(temporary: Path) -> None:
    for folder in temporary.glob(f"{PREFIX}*"):
        # What cannot be opened is another user's, has just gone, or is none of ours.
        with contextlib.suppress(OSError), (folder / LOCK).open("r+") as lock:
            if os.fstat(lock.fileno()).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


def is_on_one_machine(arguments: argparse.Namespace) -> bool:
    """Whether torchrun's arguments name no place to meet other machines at."""
    named = arguments.rdzv_endpoint or arguments.master_port is not None or arguments.rdzv_backend != "static"
    return bool(arguments.standalone) or (arguments.nnodes in ONE_MACHINE and not named)


def meet_in(folder: Path, arguments: argparse.Namespace) -> None:
    """Have torchrun with these arguments, and the ranks that it starts, meet in a folder."""
    # torchrun has no parameter for a meeting of one's own, but finds one by its name here.
    rendezvous_handler_registry.register(BACKEND, FolderRendezvous)
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = BACKEND, str(folder), folder.name
    os.environ[STORE_FOLDER] = str(folder)


class FolderRendezvous(RendezvousHandler):
    """The meeting of a single launcher with itself; its ranks meet in the folder."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """See `RendezvousHandler`, as for all others."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """A store that no other process knows, for what torchrun keeps for itself, anew for each attempt."""
        # Some programs look for an address and a port; nothing is there.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nobody else would know."""

    def num_nodes_waiting(self) -> int:
        """No other machine ever comes."""
        return 0

    def get_run_id(self) -> str:
        """The name of the folder."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is to be closed."""
        return True
