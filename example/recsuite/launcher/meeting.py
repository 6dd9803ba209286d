"""Rendezvous of the processes of one machine, in files of a folder that no other user can enter.

torchrun's own meeting is a store behind a port on all addresses of the machine, and it unpickles what it
finds there: whoever reaches the port has the launcher run what he likes.

With several machines torchrun asks the store again and again whether more of them have come, and ends its
ranks when there is no store. After a mistake that the ranks of all machines find, the launcher that has the
store may be a moment faster than the ranks here, which then could not say it: they get a moment.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from recsuite.runtime.host import ONE_MACHINE
from recsuite.runtime.process import STORE_FOLDER

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


# For a rank that has the sentence to write it, and to end.
SECONDS = 5.0


def outlive_store() -> None:
    """Have torchrun take a store that cannot be reached for one that knows of no more machines, so long."""
    ask, lost_since = DynamicRendezvousHandler.num_nodes_waiting, 0.0

    def num_nodes_waiting(handler: DynamicRendezvousHandler) -> int:
        nonlocal lost_since
        try:
            return ask(handler)
        except RendezvousConnectionError:
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > SECONDS:
                raise
            return 0

    DynamicRendezvousHandler.num_nodes_waiting = num_nodes_waiting  # type: ignore[assignment, method-assign]
