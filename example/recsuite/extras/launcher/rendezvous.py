"""Rendezvous of the processes of one machine, in files of a folder that no other user can enter.

torchrun's own rendezvous is a store behind a port on all addresses of the machine. It unpickles the values of
the store, so any client of the port can run code in the launcher.

With several machines torchrun polls the store for new machines, and ends its ranks when the store is gone.
After a mistake that the ranks of all machines find, the launcher with the store may end before the ranks here
have printed it. So this module gives them some seconds.
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
from typing_extensions import override

from recsuite.runtime.host import ONE_MACHINE
from recsuite.runtime.process import STORE_FOLDER

BACKEND = "folder"


def is_on_one_machine(arguments: argparse.Namespace) -> bool:
    """True if torchrun's arguments name no rendezvous with other machines."""
    named = arguments.rdzv_endpoint or arguments.master_port is not None or arguments.rdzv_backend != "static"
    return bool(arguments.standalone) or (arguments.nnodes in ONE_MACHINE and not named)


def use_folder_rendezvous(folder: Path, arguments: argparse.Namespace) -> None:
    """Make a folder the rendezvous of torchrun with these arguments, and of its ranks."""
    # torchrun has no parameter for a custom rendezvous, but finds one by its name here.
    rendezvous_handler_registry.register(BACKEND, FolderRendezvous)
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = BACKEND, str(folder), folder.name
    os.environ[STORE_FOLDER] = str(folder)


class FolderRendezvous(RendezvousHandler):
    """Rendezvous of a single launcher; its ranks meet in the folder."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    @override
    def get_backend(self) -> str:
        return BACKEND

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store for each attempt, private to this process, for torchrun's own keys."""
        # Some programs read an address and a port, but nothing listens there.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    @override
    def is_closed(self) -> bool:
        """Return False: it is never closed."""
        return False

    @override
    def set_closed(self) -> None:
        """No-op: there are no other launchers."""

    @override
    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine joins."""
        return 0

    @override
    def get_run_id(self) -> str:
        """Return the name of the folder."""
        return self._run_id

    @override
    def shutdown(self) -> bool:
        """Return True: there is nothing to close."""
        return True


# Seconds for a rank to print its message, and to end.
SECONDS = 5.0


def tolerate_lost_store() -> None:
    """Let torchrun treat an unreachable store as one without new machines for some seconds."""
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
