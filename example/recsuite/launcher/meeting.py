"""Where the processes of one machine meet: in files of a folder that no other user can enter, and on no port.

torchrun's own meeting is a store behind a port on all addresses of the machine, and it unpickles what it
finds there: whoever reaches the port has the launcher run what he likes.
"""

from __future__ import annotations

import argparse
import os
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
