"""Ranks of the example on the machines of a cluster, without launchers.

    ranks = launch(cluster.machines, [1, 1], ["--epochs", 1])
    assert [rank.wait(30) for rank in ranks] == [0, 0]

A rank runs what `python example.py` runs, in the environment that torchrun would make.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.machines import Command, Machine
from tests.support.launch import EXAMPLE, cores

# Below those that the kernel gives to connections.
FIRST_PORT, NUM_PORTS = 20_000, 10_000


def launch(
    machines: Sequence[Machine],
    nprocs: Sequence[int],
    argv: Sequence[object],
    late: float = 0,
    clock: tuple[Path, int] | None = None,
) -> list[Command]:
    """Ranks, so many on each machine; rank 0 of the first one has the store.

    late: by how many seconds all machines but the first come later; clock: a library that makes theirs
    wrong, and by how many seconds.
    Every rank has as many threads as on one machine, on which results depend to the last bit.
    """
    port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
    common = {"MASTER_ADDR": machines[0].name, "MASTER_PORT": port, "WORLD_SIZE": sum(nprocs)}
    ranks: list[Command] = []
    for machine, nproc in zip(machines, nprocs, strict=True):
        time.sleep(late if ranks else 0)
        library, offset = clock if clock and ranks else (None, 0)
        mine = {**common, "LOCAL_WORLD_SIZE": nproc, "CLOCK_OFFSET": offset}
        with cores(nproc):
            for local_rank in range(nproc):
                env = {**mine, "RANK": len(ranks), "LOCAL_RANK": local_rank}
                ranks.append(machine.start([sys.executable, "-u", EXAMPLE, *argv], env, library=library))
    return ranks
