"""A step's way from ids to the ranks that own their rows: first the numbers of keys and ids, then these."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.ids import UNKNOWN_ID
from recsuite.runtime.process import named
from recsuite.sharding.cpu.exchange import Exchange
from recsuite.sharding.cpu.lookup import LookupRequest, TableLayout, sorted_distinct
from recsuite.sharding.dynamic.placement import Placement


class CountsExchange(Awaitable[Awaitable[LookupRequest]]):
    """Keys and their numbers are being sent; waiting gives the numbers, and waiting again the keys."""

    def __init__(self, layout: TableLayout, exchange: Exchange, features: KeyedJaggedTensor) -> None:
        super().__init__()
        self.layout = layout
        self.features = features
        with named("input exchange"):
            self.wanted = _with_ids(layout, features) if layout.dynamic else _keys_alone(layout, features)
            keys = self.wanted.keys
            outgoing = exchange.outgoing("keys", keys.shape, layout.key_dtype)
            # Straight to where other ranks read it, and narrowed on the way.
            outgoing.rows.copy_(keys)
            sent = self.wanted.sent
            totals = sent.sum(1)
            header = torch.cat([(totals.cumsum(0) - totals).unsqueeze(1), sent], dim=1)
            self.keys = exchange.send_keys(outgoing, header)

    def _wait_impl(self) -> Awaitable[LookupRequest]:
        with named("input exchange"):
            return KeysExchange(self, self.keys.counts()[:, 1:])


class KeysExchange(Awaitable[LookupRequest]):
    """The keys are being sent."""

    def __init__(self, counts: CountsExchange, received: torch.Tensor) -> None:
        super().__init__()
        self.layout, self.keys = counts.layout, counts.keys
        wanted = counts.wanted
        self.request = LookupRequest(
            counts.features,
            wanted.inverse,
            wanted.sent.tolist(),
            wanted.unknowns,
            received.sum(1).tolist(),
            received.flatten().tolist(),
            torch.empty(0),
            self.layout.generation,
            is_resolved=not self.layout.dynamic,
            by_rows=wanted.by_rows,
        )

    def _wait_impl(self) -> LookupRequest:
        with named("input exchange"):
            self.request.rows = self.keys.keys().long()
            for part, piece in self.layout.pieces(self.request):
                # Ids stay: only in the step itself is it known who has a row.
                if part is part.group:
                    self.request.rows[piece] -= part.group.first_key
            return self.request


class Wanted(NamedTuple):
    """What this rank wants: keys and ids, int64 [n], rank after rank and there part after part; inverse: the
    index among them of each id of the batch; sent: how many are of each rank and part, int64 [ranks, parts];
    unknowns: the index of the unknown id of each part, 0 for static ones; by_rows: as in `LookupRequest`.
    """

    keys: torch.Tensor
    inverse: torch.Tensor
    sent: torch.Tensor
    unknowns: list[int]
    by_rows: tuple[torch.Tensor, torch.Tensor] | None = None


def _keys_alone(layout: TableLayout, features: KeyedJaggedTensor) -> Wanted:
    """What is wanted of static tables."""
    values = features.values().split(features.length_per_key())
    # Distinct: a row travels once for all its ids. Sorted as well, so the keys of one rank, and in it
    # of one table group, are neighbours, and two boundaries say which they are.
    keys = layout.keys_of(features.keys(), values)
    nothing = [0] * len(layout.groups)
    if layout.num_keys <= len(keys):
        found, inverse = marked_distinct(keys, layout.num_keys)
        return Wanted(found, inverse, _counts_of_groups(layout, found), nothing)
    by_key = sorted_distinct(keys, layout.key_dtype)
    sent = _counts_of_groups(layout, by_key.keys)
    return Wanted(by_key.keys, by_key.inverse, sent, nothing, (by_key.order, by_key.starts))


def marked_distinct(keys: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct ones of some keys, and the inverse, as torch.unique gives them.

    num_keys: above all of them. Of few keys that come often, as in lists, marks are counted in a fifth of the
    time that sorting takes.
    """
    is_there = torch.zeros(num_keys, dtype=torch.int64).index_fill_(0, keys, 1)
    return is_there.nonzero().view(-1), (is_there.cumsum(0) - 1).index_select(0, keys)


def _counts_of_groups(layout: TableLayout, keys: torch.Tensor) -> torch.Tensor:
    ends = torch.searchsorted(keys, layout.group_ends)
    # The same number on every rank: a group for each kind of sharding, which may be empty.
    return ends.diff(prepend=ends.new_zeros(1)).view(-1, len(layout.groups))


def _with_ids(layout: TableLayout, features: KeyedJaggedTensor) -> Wanted:
    """What is wanted of static tables and of dynamic ones."""
    names = features.keys()
    values = dict(zip(names, features.values().split(features.length_per_key()), strict=True))
    static = [name for name in names if name not in layout.dynamic]
    keys, inverse = torch.unique(
        layout.keys_of(static, [values[name] for name in static]), return_inverse=True
    )
    counts = _counts_of_groups(layout, keys)
    # Of each part: what is wanted, by rank; how many of each rank; for each id of the batch its index there.
    wanted, sent = [keys.split(counts.sum(1).tolist())], [counts]
    shares = {name: _by_rank(values[name], part.share.placement) for name, part in layout.dynamic.items()}
    for ids, counts_of_ranks, _ in shares.values():
        wanted.append(ids.split(counts_of_ranks.tolist()))
        sent.append(counts_of_ranks.unsqueeze(1))
    message = torch.cat([piece for of_rank in zip(*wanted, strict=True) for piece in of_rank])
    all_sent = torch.cat(sent, dim=1)
    # Where in the message each part of each rank begins, less how many of the part went to ranks before.
    starts = (all_sent.view(-1).cumsum(0) - all_sent.view(-1)).view_as(all_sent)
    num_groups = len(layout.groups)
    of_static = starts[:, 0], counts.sum(1)
    found = dict(
        zip(
            static,
            _moved(inverse, *of_static).split([len(values[name]) for name in static]),
            strict=True,
        )
    )
    unknowns = [0] * num_groups
    for number, (name, (_, counts_of_ranks, index)) in enumerate(shares.items(), start=num_groups):
        moved = _moved(index, starts[:, number], counts_of_ranks)
        # Its id was put behind all others.
        found[name] = moved[:-1]
        unknowns.append(int(starts[0, number]))
    return Wanted(message, torch.cat([found[name] for name in names]), all_sent, unknowns)


def _by_rank(ids: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct ids, int64, those of rank 0 first, and for one rank ascending; how many are of each rank;
    the index of each id among them, and at last that of the unknown id, which is the first of all.
    """
    # Asked for in every step: which ids have no row of their own turns out too late to ask again.
    with_unknown = torch.cat([ids, ids.new_full((1,), UNKNOWN_ID)])
    distinct, inverse = torch.unique(with_unknown, return_inverse=True)
    if placement.world_size == 1:
        return distinct, torch.tensor([len(distinct)]), inverse
    ranks = placement.owner_of(distinct)
    # Its row is one that no bucket has, on rank 0.
    ranks[0] = 0
    order = ranks.argsort(stable=True)
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    counts = ranks.bincount(minlength=placement.world_size)
    return distinct[order], counts, places[inverse]


def _moved(index: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Indices in what is wanted of a part as indices in the message, where each rank's piece of the part
    begins at its start.
    """
    shifts = starts - (counts.cumsum(0) - counts)
    if len(shifts) == 1:
        shift = int(shifts)
        return index + shift if shift else index
    places = torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)
    return places[index]
