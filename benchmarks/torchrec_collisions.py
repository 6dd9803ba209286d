"""TorchRec's tables of ids beside ours: lookups, and ids that come in while others leave.

Its module of sorted ids takes ids in every so many steps (`eviction_interval`), when it sorts all of its ids
anew; those of the steps between are on average without a row for half of that time. Of its multi-probe module
(`HashZchManagedCollisionModule`) the lookup alone runs on a CPU, so its table is filled by hand.
"""

from __future__ import annotations

import time

import torch
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

STEPS_BETWEEN = 10
# So many times it takes ids in: at ten million each takes seconds.
TIMES = 2
# Slots that are looked at for an id, which is what the module's documentation shows; and batches of lookups.
PROBES, LOOKUPS = 128, 60
FREE = -1


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


def rates_of_multi_probe(rows: int, batch: int) -> tuple[list[float], float]:
    """Ids a second of a table with so many slots, batch by batch, of ids that it has; and the share of its
    slots that have one: of as many ids as slots, those that found one.
    """
    generator = torch.Generator().manual_seed(0)
    identities, _ = torch.ops.fbgemm.create_zch_buffer(
        rows, support_evict=False, device=torch.device("cpu"), long_type=True
    )
    ids = _fill(identities, _draw(rows, generator).unique())
    found = []
    for _ in range(LOOKUPS):
        some = ids[torch.randint(len(ids), (batch,), generator=generator)].unique()
        begin = time.perf_counter()
        slots = _probe(identities, some, PROBES)
        found.append(len(some) / (time.perf_counter() - begin))
        if not torch.equal(identities.view(-1)[slots], some):
            raise RuntimeError("TorchRec's table did not find what was put into it")
    return found, len(ids) / rows


def _probe(identities: torch.Tensor, ids: torch.Tensor, probes: int) -> torch.Tensor:
    """The slot of each id; of one that is not there the last one that was looked at."""
    slots: torch.Tensor = torch.ops.fbgemm.zero_collision_hash(
        input=ids, identities=identities, max_probe=probes, circular_probe=True, readonly=True
    )[0]
    return slots


def _fill(identities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Put ids where a lookup finds them; those that found a slot."""
    flat, home = identities.view(-1), _probe(identities, ids, 1)
    left = torch.arange(len(ids))
    for probe in range(PROBES):
        slots = (home[left] + probe) % len(flat)
        # Whoever wrote last has it.
        wants = (flat[slots] == FREE).nonzero().view(-1)
        flat[slots[wants]] = ids[left[wants]]
        left = left[flat[slots] != ids[left]]
    has_slot = torch.ones(len(ids), dtype=torch.bool)
    has_slot[left] = False
    return ids[has_slot]


def _draw(number: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2**62, (number,), generator=generator)


def _jagged(ids: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))
