"""TorchRec's table of sorted ids beside ours: lookups, and ids that come in while others leave.

Its module takes ids in every so many steps (`eviction_interval`), when it sorts all of its ids anew; those of
the steps between are on average without a row for half of that time. The multi-probe module
(`HashZchManagedCollisionModule`) takes nothing in on a CPU, so there is nothing to measure.
"""

from __future__ import annotations

import time

import torch
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

STEPS_BETWEEN = 10
# So many times it takes ids in: at ten million each takes seconds.
TIMES = 2


def rates_of_sorted(rows: int, batch: int) -> tuple[list[float], list[float]]:
    """Ids a second of a table that is full: found, batch by batch; and taken in, by the interval."""
    generator = torch.Generator().manual_seed(0)
    module = MCHManagedCollisionModule(
        rows, torch.device("cpu"), LRU_EvictionPolicy(), eviction_interval=STEPS_BETWEEN
    )
    ids = _draw(2 * rows, generator).unique()[: rows - 1]
    # Its last place is that of all ids without one.
    module._mch_sorted_raw_ids[:-1] = ids
    found, taken = [], []
    for _ in range(TIMES):
        module.eval()
        for _ in range(STEPS_BETWEEN):
            some = ids[torch.randint(len(ids), (batch,), generator=generator)].unique()
            begin = time.perf_counter()
            module.remap({"user": _jagged(some)})
            found.append(len(some) / (time.perf_counter() - begin))
        module.train()
        new = [_draw(batch, generator).unique() for _ in range(STEPS_BETWEEN)]
        begin = time.perf_counter()
        for some in new:
            module.profile({"user": _jagged(some)})
        taken.append(sum(map(len, new)) / (time.perf_counter() - begin))
        if module.evict() is None:
            raise RuntimeError("TorchRec's table took nothing in")
        ids = module._mch_sorted_raw_ids[:-1].clone()
    return found, taken


def _draw(number: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2**62, (number,), generator=generator)


def _jagged(ids: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))
