"""Rows of dynamic tables of `killed_ranks.py` as a function of the step, as in `planted_model.py`.

Of the ids from -NUM_IDS to NUM_IDS - 1 each is away for three steps of sixteen, so that every delta has rows
that came, rows that changed and ids that left, and an id that left with a delta that could not be written is
still away with the next one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from recsuite.sharding.dynamic import DynamicTable
from tests.support.dynamic_oracle import remove

NUM_IDS = 40
Shares = Mapping[str, DynamicTable]


def is_there(ids: torch.Tensor, step: int) -> torch.Tensor:
    """True for each id with a row after a step, bool [n]."""
    return (ids + step) % 16 >= 3


def ids_at(share: DynamicTable, step: int) -> torch.Tensor:
    """The ids of this rank that are there after a step, ascending, int64 [n]."""
    ids = torch.arange(-NUM_IDS, NUM_IDS)
    there = ids[is_there(ids, step)]
    return there[share.placement.owner_of(there) == share.rank]


def learned_at(ids: torch.Tensor, step: int) -> torch.Tensor:
    """The step at which each learned last, int64 [n]: step + id is a multiple of 3."""
    return step - (step + ids) % 3


def rows_at(ids: torch.Tensor, step: int, width: int) -> torch.Tensor:
    """Their rows, float32 [n, width]."""
    rows = (learned_at(ids, step) * 1009 + ids * 31).unsqueeze(1) + 7 * torch.arange(width)
    return rows.remainder(997).float()


def write_rows(shares: Shares, step: int) -> None:
    """Make the tables what they are after a step; marks what differs from the step before."""
    for share in shares.values():
        share.begin_step(step)
        ids, live = ids_at(share, step), share.live().ids
        remove(share, share.places, live[~torch.isin(live, ids)])
        share.find_or_insert(ids[(learned_at(ids, step) == step) | ~torch.isin(ids, live)])
        places = share.find(ids)
        assert bool((places >= 0).all())
        share.weights[places] = rows_at(ids, step, share.weights.size(1))
        share.state[places] = learned_at(ids, step).float()


def differing_rows(shares: Shares, step: int) -> list[str]:
    """The tables that are not as they must be after a step, to the bit."""
    found = []
    for name, share in shares.items():
        live, ids = share.live(), ids_at(share, step)
        wanted = (ids, rows_at(ids, step, live.weight.size(1)), learned_at(ids, step).float())
        if not all(map(torch.equal, (live.ids, live.weight, live.state), wanted)):
            found.append(f"{name}, of {len(ids)} ids")
    return found
