"""A moment for ranks to end by themselves, where the launcher with the store has ended before this one.

torchrun asks the store again and again whether more machines have come, and ends its ranks when there is no
store. After a mistake that the ranks of all machines find, the launcher that has the store may be a moment
faster than the ranks here, which then could not say it.
"""

from __future__ import annotations

import time

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

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
