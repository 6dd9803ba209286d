"""Where the rows of all tables lie, and which of them the ranks want of each other in one step.

A rank has several parts: its groups of static tables, and its share of each dynamic one. What is asked of it
lies together, part after part. Of static tables it is asked for by key, of dynamic ones by id.

A key numbers the rows of all tables: rank after rank, and within a rank table group after table group. So
sorted keys are sorted by the rank that owns them, which is how an exchange sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torchrec.distributed.types import ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from recsuite.sharding.cpu.groups import DynamicPart, Part, TableGroup


@dataclass
class LookupRequest(Multistreamable):
    """The rows that ranks want of each other in one step.

    features: what the ids came in; inverse: of each id the index of its row among those that come back, int64
    [ids]; sent: how many of those come from each rank; unknowns: the index of the unknown's row of each part;
    received: how many keys and ids came from each rank; in_parts: the same for each part of this one; rows:
    what came, in that order, int64 [R], as rows of the groups, but as ids of dynamic tables as long as
    `is_resolved` is false; missing: the indices of ids among them that have no row, int64, or None;
    generation: of the layout by which they were sent; by_rows: the ids of the batch in another order, those
    of the first row that comes back first, int32 [ids], and where in it those of each row begin, int32, or
    None where nobody has asked.
    """

    features: KeyedJaggedTensor
    inverse: torch.Tensor
    sent: list[list[int]]
    unknowns: list[int]
    received: list[int]
    in_parts: list[int]
    rows: torch.Tensor
    generation: int = 0
    is_resolved: bool = False
    missing: torch.Tensor | None = None
    by_rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing: a CPU has no streams."""

    @property
    def num_sent(self) -> list[int]:
        """How many rows come back from each rank."""
        return [sum(parts) for parts in self.sent]

    def in_order_of_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `by_rows`, found now if it was not."""
        if self.by_rows is None:
            order = self.inverse.to(torch.int32).argsort(stable=True)
            counts = self.inverse.bincount(minlength=sum(self.num_sent))
            self.by_rows = order.to(torch.int32), (counts.cumsum(0) - counts).to(torch.int32)
        return self.by_rows

    def inverse_of_features(self) -> tuple[torch.Tensor, ...]:
        """The part of `inverse` of each feature."""
        return self.inverse.split(self.features.length_per_key())


class TableLayout:
    """Where the rows of all tables lie, and the keys that number those of static ones.

    parts: those of this rank, the groups first; dynamic: its shares of dynamic tables, by name; group_ends:
    the key after the last one of each group, rank after rank, int64; key_dtype: the narrowest that holds all
    that is sent; num_keys: how many rows the static tables of all ranks have; generation: how often dynamic
    tables have moved between the ranks.
    """

    def __init__(self, plan: Mapping[str, ParameterSharding], num_rows: Mapping[str, int]) -> None:
        self.plan = plan
        self.num_rows = num_rows
        self.groups: list[TableGroup] = []
        self.dynamic: dict[str, DynamicPart] = {}
        self.generation = 0
        # What to add to a row of a table to get its key, by the shard in which it lies.
        self.shifts = {
            name: torch.zeros(len(table.sharding_spec.shards), dtype=torch.int64)
            for name, table in plan.items()
        }
        # TorchRec splits a table by rows into shards of equal size, but for the last.
        self.rows_in_shard = {
            name: table.sharding_spec.shards[0].shard_sizes[0] for name, table in plan.items()
        }
        self.num_keys = 0
        self._group_ends: list[int] = []

    @property
    def parts(self) -> list[Part]:
        """All that this rank is asked of, in the order of a message."""
        return [*self.groups, *self.dynamic.values()]

    def add_group(self, rank: int, kind: str) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Give keys to what a rank has of the tables with one kind of sharding, after all keys so far; the
        first key, and the names of the tables, each with its first row in the group.
        """
        first_key, tables = self.num_keys, []
        for name, index, shard in self._shards(rank, kind):
            tables.append((name, self.num_keys - first_key))
            self.shifts[name][index] = self.num_keys - shard.shard_offsets[0]
            self.num_keys += shard.shard_sizes[0]
        self._group_ends.append(self.num_keys)
        return first_key, tuple(tables)

    def close(self) -> None:
        """All groups of all ranks were added, and all dynamic tables."""
        self.group_ends = torch.tensor(self._group_ends)
        is_narrow = self.num_keys < 2**31 and not self.dynamic
        self.key_dtype = torch.int32 if is_narrow else torch.int64

    def _shards(self, rank: int, kind: str) -> Iterator[tuple[str, int, Any]]:
        """What a rank has of the tables with one kind of sharding: table, number of the shard, shard."""
        for name, table in self.plan.items():
            for index, shard in enumerate(table.sharding_spec.shards):
                if table.sharding_type == kind and shard.placement.rank() == rank:
                    yield name, index, shard

    def keys_of(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The key of every row of some static tables, int64. values: of each table int64 [its rows].

        Raises:
            IndexError: when a table has no such row, which is a bug of ours.
        """
        found = []
        for name, rows in zip(names, values, strict=True):
            # A row that is out of range would have the key of another table's row, and nothing would look
            # wrong.
            self._check_range(name, rows)
            shifts = self.shifts[name]
            # A table in one shard needs no division.
            shift = shifts.index_select(0, rows // self.rows_in_shard[name]) if len(shifts) > 1 else shifts
            found.append(rows + shift)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)

    def _check_range(self, name: str, rows: torch.Tensor) -> None:
        if len(rows):
            least, most = rows.aminmax()
            if least < 0 or most >= self.num_rows[name]:
                raise IndexError(
                    f"{name}: rows {least} to {most} are asked for, and there are {self.num_rows[name]}"
                )

    def pieces(self, request: LookupRequest) -> Iterator[tuple[Part, slice]]:
        """Each part with where what came for it lies in `rows`, rank after rank; those for which nothing came
        are left out.
        """
        parts, counts = self.parts, request.in_parts
        for number, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            if count:
                yield parts[number % len(parts)], slice(end - count, end)


def learn(layout: TableLayout, request: LookupRequest, gradients: torch.Tensor) -> None:
    """Have this rank's parts learn from what all ranks sent, float32 [R, D]. Not collective."""
    pieces = list(layout.pieces(request))
    for part in layout.parts:
        mine = [piece for owner, piece in pieces if owner is part]
        if not mine:
            continue
        # What one rank asked for is distinct already, so it is not sorted again: always so on a single rank.
        if len(mine) == 1:
            rows, sums = request.rows[mine[0]], gradients[mine[0]]
        else:
            rows, sums = _summed(request.rows, gradients, mine, layout.key_dtype)
        if request.missing is not None:
            # Ids without a row have no gradient either: the rows came back as the unknown's.
            there = (rows >= 0).nonzero().view(-1)
            rows, sums = rows[there], sums[there]
        part.group.learn(rows, sums)


def _summed(
    rows: torch.Tensor, gradients: torch.Tensor, pieces: Sequence[slice], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows of some pieces, int64 [n], and the sums of their gradients, float32 [n, D].

    Several ranks may want the same row, and an optimizer must see the sum of their gradients. dtype: the
    narrowest that holds the rows.
    """
    found = sorted_distinct(torch.cat([rows[piece] for piece in pieces]), dtype)
    places = torch.cat([torch.arange(piece.start, piece.stop, dtype=torch.int32) for piece in pieces])
    order = places.index_select(0, found.order)
    # Nothing but sums, and no array of zeros that is read and written for each piece.
    sums = torch.nn.functional.embedding_bag(order, gradients, found.starts, mode="sum")
    return found.keys, sums


class Distinct(NamedTuple):
    """Distinct keys, ascending, int64 [n]; inverse: of each key the index among them, int64, as torch.unique
    gives them; order: the keys in ascending order, equal ones as they came, int32; starts: where in it each
    distinct one begins, int32 [n].
    """

    keys: torch.Tensor
    inverse: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor


def sorted_distinct(keys: torch.Tensor, dtype: torch.dtype = torch.int64) -> Distinct:
    """The distinct ones of some keys, int64, by sorting them. dtype: the narrowest that holds them."""
    # Narrow numbers are sorted in half the time, and torch.unique would sort as well, but throw the order
    # away. Stable, so that sums in this order do not depend on the algorithm.
    ascending, order = keys.to(dtype).sort(stable=True)
    found, places, counts = torch.unique_consecutive(ascending, return_inverse=True, return_counts=True)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    return Distinct(found.to(torch.int64), inverse, order.to(torch.int32), starts)
