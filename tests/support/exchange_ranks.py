"""Program of each rank of a launch in `test_exchange.py`: python exchange_ranks.py FOLDER.

It swaps rows and keys in each way that there is, and stores what came in FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from recsuite.sharding import exchange
from recsuite.sharding.exchange import BUFFER_BYTES, SLOTS, Exchange, map_file, open_exchange, starts_of

NUM_RANKS = 3
STEPS = 2 * SLOTS


def main(folder: str) -> None:
    """Swap rows through all kinds, and store what came."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, chosen in (
        ("gloo", Exchange(dist.group.WORLD)),
        ("shared", open_exchange(dist.group.WORLD, 60)),
        ("mixed", with_rank_1_on_another_machine(rank)),
        ("narrow", without_room_for_rank_2()),
    ):
        # In turns, as a step adds dense gradients up between two exchanges of rows.
        steps = [
            (swapped(chosen, rank, step), added_up(chosen, rank, numbers_of(rank, step)))
            for step in range(STEPS)
        ]
        found[name], found[f"{name} sums"] = map(list, zip(*steps, strict=True))
        found[f"{name} few"] = added_up(chosen, rank, torch.tensor([rank + 0.5]))
        found[f"{name} keys"] = sent_keys(chosen, rank)
        found[f"{name} kind"] = type(chosen).__name__
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()


def with_rank_1_on_another_machine(rank: int) -> Exchange:
    """The exchange of ranks of which the one in the middle shares no memory with the others."""
    others = iter(range(NUM_RANKS))

    def map_here(path: str, name: str) -> torch.Tensor | None:
        return map_file(path, name) if (next(others) == 1) == (rank == 1) else None

    with mock.patch.object(exchange, "map_file", map_here):
        return open_exchange(dist.group.WORLD, 60)


def without_room_for_rank_2() -> Exchange:
    """The exchange of ranks that may map the buffers of the first two alone, as under `ulimit -v`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + int(2.5 * BUFFER_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        return open_exchange(dist.group.WORLD, 60)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def swapped(chosen: Exchange, rank: int, step: int) -> torch.Tensor:
    """Rank r gives rank s as many rows as r + s + step, or none where r is s; each says from where it is."""
    num_out, num_in = (
        [(rank != other) * (rank + other + step) for other in range(NUM_RANKS)] for _ in range(2)
    )
    # Now this rank is the slow one, now that.
    time.sleep(0.01 * ((rank + step) % NUM_RANKS))
    outgoing = chosen.outgoing("rows", (sum(num_out), 4))
    outgoing.rows.copy_(torch.arange(4 * sum(num_out)).view(-1, 4) + 1000 * rank + 100_000 * step)
    return chosen.exchange_rows(outgoing, num_out, num_in)()


def numbers_of(rank: int, step: int) -> torch.Tensor:
    """Return the numbers of a rank in a step, float32 [1,003]; their sum over ranks rounds by the order."""
    return torch.randn(1_003, generator=torch.Generator().manual_seed(NUM_RANKS * step + rank))


def added_up(chosen: Exchange, rank: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks of their numbers."""
    wait = chosen.add_up(numbers)
    time.sleep(0.01 * rank)
    return wait()


def sent_keys(chosen: Exchange, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The headers and keys that a rank gets in steps with none, few, many and fewer keys, two at once."""
    found, on_the_way = [], []
    for step, many in enumerate((0, 3, 1000, 4, 1200, 5)):
        counts = torch.tensor([[(rank != 1) * many + other, other] for other in range(NUM_RANKS)])
        keys = chosen.outgoing("keys", (int(counts.sum()),), torch.int32)
        keys.rows.copy_(torch.arange(len(keys.rows)) + 10_000 * rank + 100_000 * step)
        firsts = torch.tensor(starts_of(counts.sum(1).tolist())).unsqueeze(1)
        time.sleep(0.01 * ((rank + step) % NUM_RANKS))
        on_the_way.append(chosen.send_keys(keys, torch.cat([firsts, counts], dim=1)))
        if step:
            first = on_the_way.pop(0)
            found.append((first.counts().clone(), first.keys().clone()))
            # As a lookup does: the rows are exchanged once their keys were read, and only this keeps a fast
            # rank from writing keys into a slot that a slow one still reads.
            swapped(chosen, rank, step)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
