"""TorchRec's sharded tables with our own training step on the CPU: `--cpu_tables vectorised`.

TorchRec's plan, shards, names, states and pipelines stay. On a CPU, TorchRec's step spends much of its time
outside the arithmetic, and FBGEMM updates rows at a third of the speed of PyTorch's own kernels. The step
here:

    ids of all features -> keys -> distinct keys, in order          a row travels once for all its ids
    keys to the ranks that own the rows, rows back -> a row an id   one exchange for all tables
    gradients of ids -> sums for distinct keys -> to the owners     as many bytes as the rows
    -> sums over ranks -> the tables' optimizer, in place           see `table_rules`

A rank has several parts: its groups of static tables, and its share of each dynamic table. A message holds
the requests for one part after the other. Static tables are addressed by key. Dynamic tables are addressed by
id, and the rank that owns an id turns it into a row (`dynamic.py`).

Keys number the rows of all tables: rank after rank, and within a rank table group after table group. So
sorted keys are sorted by the rank that owns them, which is the order of an exchange.

An owner writes a mark in place of the row of an id that has none. The rank that sent the id then uses the
unknown row, which came in the same exchange. So the gradients of such ids go to the unknown row.

R: keys that come to a rank; D: numbers in a row.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable, NoWait, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable
from typing_extensions import override

from recsuite.ids import UNKNOWN_ID
from recsuite.models.inputs import DistinctRows
from recsuite.models.rows import SharedRows
from recsuite.runtime.process import profiler_range
from recsuite.sharding.dynamic import BUCKET_WIDTH, NO_ROW, BucketPlacement, DynamicSpec, DynamicTable
from recsuite.sharding.exchange import Exchange, open_exchange
from recsuite.sharding.recommender import of_tables, table_of
from recsuite.sharding.storage import DiskStorage, FilesForTables, RowsOnDisk, TableRows
from recsuite.sharding.table import TablesSharder
from recsuite.sharding.table_rules import TableRule


@dataclass(frozen=True)
class TableGroup:
    """Tables of this rank in one kernel: those with the same kind of sharding.

    kernel: FBGEMM's, with the learning rate; rows: its rows; first_key: the key of the first one; tables:
    their names, each with its first row; rule: the optimizer.
    """

    kernel: Any
    rows: TableRows
    first_key: int
    tables: tuple[tuple[str, int], ...]
    rule: TableRule

    @property
    def group(self) -> TableGroup:
        """The group that holds the rows: this one."""
        return self

    def expected_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows, int64 [n], that a later step requests: these."""
        return rows

    def learn(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Update distinct rows, int64 [n], by their gradients, float32 [n, D], which are overwritten."""
        rate, number = self.kernel.learning_rate_tensor, int(self.kernel.iter_cpu.add_(1))
        self.rows.update(self.rule, rows, gradients, rate, number)


def make_state(
    rule: TableRule, module: Any, zeros: Callable[[list[int]], torch.Tensor] = torch.zeros
) -> dict[str, torch.Tensor]:
    """Return the optimizer state of the tables of a TorchRec module with FBGEMM's kernel, all zero, by name.

    It is added to TorchRec's optimizer of the module, by table, so that it is in checkpoints. On a CPU the
    kernel itself has state only for Adagrad and row-wise Adagrad. Not collective.
    """
    optimizer, state = module.fused_optimizer, {}
    weights = {table_of(name): weight for name, weight in optimizer.params.items()}
    sizes = [weight.local_shards()[0].tensor.size(0) for weight in weights.values()]
    for name, is_of_row in rule.slots.items():
        whole = [sum(sizes), module.emb_module.max_D]
        state[name] = zeros(whole[:1] if is_of_row else whole)
        for (table, weight), held in zip(weights.items(), state[name].split(sizes), strict=True):
            optimizer.state[weight][f"{table}.{name}"] = _sharded_as(weight, held)
    return state


def _sharded_as(weight: ShardedTensor, held: torch.Tensor) -> ShardedTensor:
    """Return this rank's part of a tensor that is split by rows like the rows of a table."""

    def cut(part: Any) -> Any:
        offsets, sizes = part.shard_offsets[: held.dim()], part.shard_sizes[: held.dim()]
        return replace(part, shard_offsets=offsets, shard_sizes=sizes)

    whole, (mine,) = weight.metadata(), weight.local_shards()
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(held, cut(mine.metadata))],
        replace(whole, shards_metadata=[*map(cut, whole.shards_metadata)], size=whole.size[: held.dim()]),
        process_group=weight._process_group,
    )


@dataclass(frozen=True)
class DynamicPart:
    """This rank's share of a dynamic table.

    share: maps ids to rows; group: the table group with the rows.
    """

    share: DynamicTable
    group: TableGroup

    def expected_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids that have one now, int64."""
        rows = self.share.find(ids[ids != UNKNOWN_ID])
        return rows[rows >= 0] + self.share.first_row

    def rows_of(self, ids: torch.Tensor, is_training: bool) -> torch.Tensor:
        """Return the rows of ids in the group, int64 [n]; NO_ROW for ids without a row.

        ids: int64 [n], distinct, ascending; the unknown id first, on the rank that has the unknown row.
        Training inserts new ids.
        """
        has_unknown = self.share.unknown is not None
        known = ids[1:] if has_unknown else ids
        rows = self.share.find_or_insert(known) if is_training else self.share.find(known)
        if has_unknown:
            rows = torch.cat([rows.new_full((1,), len(self.share.weights) - 1), rows])
        first = self.share.first_row
        return torch.where(rows >= 0, rows + first, rows) if first else rows


Part = TableGroup | DynamicPart
Specs = Mapping[str, DynamicSpec]


@dataclass
class LookupRequest(Multistreamable):
    """The rows that ranks request from each other in one step.

    features: the batch's ids; inverse: for each id the index of its row among the returned rows, int64 [ids];
    sent: the number of returned rows from each rank; unknowns: the index of the unknown row of each part;
    received: the number of keys and ids from each rank; in_parts: the same for each part of this rank; rows:
    the requested rows, in that order, int64 [R], as rows of the groups, but as ids of dynamic tables as long
    as `is_resolved` is false; expected: see `RowsOnDisk.begin`; missing: the indices of ids among them
    without a row, int64, or None; capacities: those of the layout when they were sent; by_rows: the ids of
    the batch sorted by returned row, int32 [ids], and the start of each row's ids in that order, int32, or
    None before it is first used.
    """

    features: KeyedJaggedTensor
    inverse: torch.Tensor
    sent: list[list[int]]
    unknowns: list[int]
    received: list[int]
    in_parts: list[int]
    rows: torch.Tensor
    capacities: tuple[int, ...] = ()
    is_resolved: bool = False
    expected: int = 0
    missing: torch.Tensor | None = None
    by_rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing: a CPU has no streams."""

    @property
    def num_sent(self) -> list[int]:
        """Number of rows that come back from each rank."""
        return [sum(parts) for parts in self.sent]

    def in_order_of_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `by_rows`; compute it on first use."""
        if self.by_rows is None:
            counts = self.inverse.bincount(minlength=sum(self.num_sent))
            self.by_rows = distinct(self.inverse).order, (counts.cumsum(0) - counts).to(torch.int32)
        return self.by_rows

    def inverse_of_features(self) -> tuple[torch.Tensor, ...]:
        """Return the part of `inverse` of each feature."""
        return self.inverse.split(self.features.length_per_key())


class TableLayout:
    """Layout of the rows of all tables, and the keys of the rows of static tables.

    parts: those of this rank, the groups first; dynamic: its shares of dynamic tables, by name; group_ends:
    the key after the last one of each group, rank after rank, int64; key_dtype: the narrowest for all that is
    sent; num_keys: rows of the static tables of all ranks.
    """

    def __init__(self, plan: Mapping[str, ParameterSharding], num_rows: Mapping[str, int]) -> None:
        self.plan = plan
        self.num_rows = num_rows
        self.groups: list[TableGroup] = []
        # The rows of the group on a disk; None on a rank, or for a width, without any.
        self.on_disk: RowsOnDisk | None = None
        self.dynamic: dict[str, DynamicPart] = {}
        # The number to add to a row of a table to get its key, by the shard of the row.
        self.shifts = {
            name: torch.zeros(len(table.sharding_spec.shards), dtype=torch.int64)
            for name, table in plan.items()
        }
        # TorchRec splits a table by rows into shards of equal size, except for the last one.
        self.rows_in_shard = {
            name: table.sharding_spec.shards[0].shard_sizes[0] for name, table in plan.items()
        }
        self.num_keys = 0
        self._group_ends: list[int] = []
        # Sorted once: a search for those of each rank would take the square of the ranks.
        self._shards: dict[tuple[int, str], list[tuple[str, int, Any]]] = defaultdict(list)
        for name, table in plan.items():
            for index, shard in enumerate(table.sharding_spec.shards):
                self._shards[shard.placement.rank(), table.sharding_type].append((name, index, shard))

    @property
    def parts(self) -> list[Part]:
        """All parts of this rank, in the order of a message."""
        return [*self.groups, *self.dynamic.values()]

    @property
    def capacities(self) -> tuple[int, ...]:
        """Capacities of the dynamic tables; with other ones, ids belong to other ranks."""
        return tuple(part.share.spec.capacity for part in self.dynamic.values())

    def add_group(self, rank: int, kind: str) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Number a rank's rows of the tables with one kind of sharding, after all keys so far.

        Returns the first key, and the names of the tables, each with its first row in the group.
        """
        first_key, tables = self.num_keys, []
        for name, index, shard in self._shards[rank, kind]:
            tables.append((name, self.num_keys - first_key))
            self.shifts[name][index] = self.num_keys - shard.shard_offsets[0]
            self.num_keys += shard.shard_sizes[0]
        self._group_ends.append(self.num_keys)
        return first_key, tuple(tables)

    def close(self) -> None:
        """Complete the layout, after all groups of all ranks and all dynamic tables were added."""
        self.group_ends = torch.tensor(self._group_ends)
        is_narrow = self.num_keys < 2**31 and not self.dynamic
        self.key_dtype = torch.int32 if is_narrow else torch.int64

    def keys_of(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the key of every row of some static tables, int64. values: of each table int64 [its rows].

        Raises:
            IndexError: when a table has no such row, which is a bug of ours.
        """
        keys = []
        for name, rows in zip(names, values, strict=True):
            # A row out of range would get the key of another table's row without an error.
            if len(rows):
                least, most = rows.aminmax()
                if least < 0 or most >= self.num_rows[name]:
                    raise IndexError(
                        f"{name}: rows {least} to {most} requested, of {self.num_rows[name]} in the table"
                    )
            shifts = self.shifts[name]
            # A table with one shard needs no division.
            shift = shifts.index_select(0, rows // self.rows_in_shard[name]) if len(shifts) > 1 else shifts
            keys.append(rows + shift)
        return torch.cat(keys) if keys else torch.zeros(0, dtype=torch.int64)

    def pieces(self, request: LookupRequest) -> Iterator[tuple[Part, slice]]:
        """Yield each part with the slice of its requests in `rows`, rank after rank.

        Parts without requests are skipped.
        """
        parts, counts = self.parts, request.in_parts
        for number, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            if count:
                yield parts[number % len(parts)], slice(end - count, end)


def learn(layout: TableLayout, request: LookupRequest, gradients: torch.Tensor) -> None:
    """Update this rank's parts by the gradients from all ranks, float32 [R, D]. Not collective."""
    pieces = list(layout.pieces(request))
    for part in layout.parts:
        mine = [piece for owner, piece in pieces if owner is part]
        if not mine:
            continue
        # The requests of one rank are distinct already and need no sort; on a single rank this is always so.
        if len(mine) == 1:
            rows, sums = request.rows[mine[0]], gradients[mine[0]]
        else:
            rows, sums = _summed(request.rows, gradients, mine)
        if request.missing is not None:
            # Ids without a row have no gradient either: they used the unknown row.
            there = (rows >= 0).nonzero().view(-1)
            rows, sums = rows[there], sums[there]
        part.group.learn(rows, sums)


class Distinct(NamedTuple):
    """Distinct keys, ascending, int64.

    inverse: for each key its index among them, int64 [n], as in torch.unique; order: the keys in ascending
    order, equal keys in input order, int32 [n]; starts: the start of each distinct key in that order, int32.
    """

    keys: torch.Tensor
    inverse: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor


def distinct(keys: torch.Tensor) -> Distinct:
    """Return the distinct keys of an int64 tensor [n], n < 2^31."""
    # Not at the top: this module is imported on a GPU too.
    from recsuite.sharding.kernels import sort_keys

    number = len(keys)
    ascending, inverse = torch.empty_like(keys), torch.empty_like(keys)
    order, starts = (torch.empty(number, dtype=torch.int32) for _ in range(2))
    arrays = (value.numpy() for value in (keys.contiguous(), ascending, inverse, order, starts))
    count = sort_keys(*arrays) if number else 0
    return Distinct(ascending[:count], inverse, order, starts[:count])


def _summed(
    rows: torch.Tensor, gradients: torch.Tensor, pieces: Sequence[slice]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct rows of some pieces, int64 [n], and the sums of their gradients, float32 [n, D]."""
    requested = distinct(torch.cat([rows[piece] for piece in pieces]))
    indices = torch.cat([torch.arange(piece.start, piece.stop, dtype=torch.int32) for piece in pieces])
    order = indices.index_select(0, requested.order)
    # Computes only the sums, without an array of zeros that is read and written for each piece.
    sums = torch.nn.functional.embedding_bag(order, gradients, requested.starts, mode="sum")
    return requested.keys, sums


class CountsExchange(Awaitable[Awaitable[LookupRequest]]):
    """Exchange of keys and of their counts: the first wait gives the counts, the second one the keys."""

    def __init__(self, layout: TableLayout, exchange: Exchange, features: KeyedJaggedTensor) -> None:
        super().__init__()
        self.layout = layout
        self.features = features
        with profiler_range("input exchange"):
            self.wanted = _with_ids(layout, features) if layout.dynamic else _keys_alone(layout, features)
            keys = self.wanted.keys
            outgoing = exchange.outgoing("keys", keys.shape, layout.key_dtype)
            # Written directly to the memory that other ranks read, and narrowed on the way.
            outgoing.rows.copy_(keys)
            sent = self.wanted.sent
            totals = sent.sum(1)
            header = torch.cat([(totals.cumsum(0) - totals).unsqueeze(1), sent], dim=1)
            self.keys = exchange.send_keys(outgoing, header)

    def _wait_impl(self) -> Awaitable[LookupRequest]:
        with profiler_range("input exchange"):
            keys = KeysExchange(self, self.keys.counts()[:, 1:])
            if self.layout.on_disk is not None:
                keys.expect_rows(self.layout.on_disk)
            return keys


class KeysExchange(Awaitable[LookupRequest]):
    """Exchange of keys in progress."""

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
            self.layout.capacities,
            is_resolved=not self.layout.dynamic,
            by_rows=wanted.by_rows,
        )

    def _wait_impl(self) -> LookupRequest:
        if self.request.expected:
            return self.request
        with profiler_range("input exchange"):
            self.request.rows = self.keys.keys().long()
            for part, piece in self.layout.pieces(self.request):
                # Ids are kept: only the step itself decides which ids have a row.
                if part is part.group:
                    self.request.rows[piece] -= part.group.first_key
            return self.request

    def expect_rows(self, rows: RowsOnDisk) -> None:
        """Begin to load the rows. The keys were sent with their counts, so they are here too."""
        request, expected = self._wait_impl(), rows.next_call
        for part, piece in self.layout.pieces(request):
            if part.group.rows is rows:
                rows.expect(part.expected_rows(request.rows[piece]))
        request.expected = expected


class RowRequests(NamedTuple):
    """Requests of this rank.

    keys: keys and ids, int64 [n], rank after rank and within a rank part after part; inverse: for each id of
    the batch its index among them; sent: the number for each rank and part, int64 [ranks, parts]; unknowns:
    the index of the unknown id of each part, 0 for static ones; by_rows: as in `LookupRequest`.
    """

    keys: torch.Tensor
    inverse: torch.Tensor
    sent: torch.Tensor
    unknowns: list[int]
    by_rows: tuple[torch.Tensor, torch.Tensor] | None = None


def _keys_alone(layout: TableLayout, features: KeyedJaggedTensor) -> RowRequests:
    """Return the requests for static tables."""
    values = features.values().split(features.length_per_key())
    # Distinct: a row travels once for all its ids. Sorted: the keys of one rank and table group are
    # neighbours, and two boundaries delimit them.
    keys = layout.keys_of(features.keys(), values)
    requested = distinct(keys)
    sent, no_unknowns = _counts_of_groups(layout, requested.keys), [0] * len(layout.groups)
    by_rows = requested.order, requested.starts
    return RowRequests(requested.keys, requested.inverse, sent, no_unknowns, by_rows)


def _counts_of_groups(layout: TableLayout, keys: torch.Tensor) -> torch.Tensor:
    ends = torch.searchsorted(keys, layout.group_ends)
    # Every rank has the same number of groups: one for each kind of sharding, possibly empty.
    return ends.diff(prepend=ends.new_zeros(1)).view(-1, len(layout.groups))


def _with_ids(layout: TableLayout, features: KeyedJaggedTensor) -> RowRequests:
    """Return the requests for static and dynamic tables."""
    names = features.keys()
    values = dict(zip(names, features.values().split(features.length_per_key()), strict=True))
    static = [name for name in names if name not in layout.dynamic]
    keys, inverse, _, _ = distinct(layout.keys_of(static, [values[name] for name in static]))
    counts = _counts_of_groups(layout, keys)
    # For each part: the requests by rank, their number for each rank, and for each id of the batch its index.
    wanted, sent = [keys.split(counts.sum(1).tolist())], [counts]
    shares = {name: _by_rank(values[name], part.share.placement) for name, part in layout.dynamic.items()}
    for ids, counts_of_ranks, _ in shares.values():
        wanted.append(ids.split(counts_of_ranks.tolist()))
        sent.append(counts_of_ranks.unsqueeze(1))
    message = torch.cat([piece for of_rank in zip(*wanted, strict=True) for piece in of_rank])
    all_sent = torch.cat(sent, dim=1)
    # The start of each part of each rank in the message, minus the part's requests to earlier ranks.
    starts = (all_sent.view(-1).cumsum(0) - all_sent.view(-1)).view_as(all_sent)
    num_groups = len(layout.groups)
    of_static = _moved(inverse, starts[:, 0], counts.sum(1))
    inverses = dict(zip(static, of_static.split([len(values[name]) for name in static]), strict=True))
    unknowns = [0] * num_groups
    for number, (name, (_, counts_of_ranks, index)) in enumerate(shares.items(), start=num_groups):
        moved = _moved(index, starts[:, number], counts_of_ranks)
        # The unknown id was appended last.
        inverses[name] = moved[:-1]
        unknowns.append(int(starts[0, number]))
    return RowRequests(message, torch.cat([inverses[name] for name in names]), all_sent, unknowns)


def _by_rank(
    ids: torch.Tensor, placement: BucketPlacement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return distinct ids by rank, ascending, their number for each rank, and the index of each given id."""
    # The unknown id is the first of all, and its index the last one. It is requested in every step, because
    # only the owners know which ids have no row.
    with_unknown = torch.cat([ids, ids.new_full((1,), UNKNOWN_ID)])
    requested, inverse, _, _ = distinct(with_unknown)
    if placement.world_size == 1:
        return requested, torch.tensor([len(requested)]), inverse
    ranks = placement.owner_of(requested)
    # The unknown row is outside the buckets, on rank 0.
    ranks[0] = 0
    order = ranks.argsort(stable=True)
    positions = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    counts = ranks.bincount(minlength=placement.world_size)
    return requested[order], counts, positions[inverse]


def _moved(index: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Turn indices in a part's requests into indices in the message; starts: of each rank's piece."""
    shifts = starts - (counts.cumsum(0) - counts)
    if len(shifts) == 1:
        shift = int(shifts)
        return index + shift if shift else index
    positions = torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)
    return positions[index]


class RequestCounter:
    """Number of keys that a rank requests from each rank, by the plan of tables that need not exist.

    plan, num_rows: of the tables of one width, by name; specs: of all dynamic tables.
    """

    def __init__(
        self,
        plan: Mapping[str, ParameterSharding],
        num_rows: Mapping[str, int],
        specs: Specs,
        world_size: int,
    ) -> None:
        self.layout, self.placements = TableLayout(plan, num_rows), dict[str, BucketPlacement]()
        for rank in range(world_size):
            for kind in dict.fromkeys(table.sharding_type for table in plan.values()):
                self.layout.add_group(rank, kind)
        self.layout.close()
        for name in specs.keys() & plan.keys():
            num_buckets = specs[name].capacity // BUCKET_WIDTH
            self.placements[name] = BucketPlacement(specs[name].distribution, num_buckets, world_size)
        self.world_size = world_size

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the number of keys that a rank with a batch requests from each rank, int64 [ranks]."""
        mine = of_tables(features, self.layout.plan)
        values = dict(zip(mine.keys(), mine.values().split(mine.length_per_key()), strict=True))
        static = [name for name in values if name not in self.placements]
        keys = distinct(self.layout.keys_of(static, [values[name] for name in static])).keys
        ends = torch.searchsorted(keys, self.layout.group_ends)
        counts = ends.diff(prepend=ends.new_zeros(1)).view(self.world_size, -1).sum(1)
        return counts + sum(
            _by_rank(values[name], placement)[1] for name, placement in self.placements.items()
        )


# The bits of a float32 NaN that no arithmetic produces.
MARK = 0x7FC0DEAD


@torch.no_grad()
def resolve(layout: TableLayout, request: LookupRequest, is_training: bool) -> None:
    """Turn the received ids into rows of this rank's groups. Not collective."""
    pieces: dict[str, list[slice]] = {name: [] for name in layout.dynamic}
    names = {id(part): name for name, part in layout.dynamic.items()}
    for part, piece in layout.pieces(request):
        if isinstance(part, DynamicPart):
            pieces[names[id(part)]].append(piece)
    for name, part in layout.dynamic.items():
        _resolve_part(part, request, pieces[name], is_training)
    missing = (request.rows == NO_ROW).nonzero().view(-1)
    request.missing = missing if len(missing) else None
    request.is_resolved = True


def _resolve_part(part: DynamicPart, request: LookupRequest, pieces: list[slice], is_training: bool) -> None:
    if len(pieces) == 1:
        request.rows[pieces[0]] = part.rows_of(request.rows[pieces[0]], is_training)
    elif pieces:
        # All ids of a step from all ranks at once: insertion must not depend on the number of ranks.
        ids, inverse, _, _ = distinct(torch.cat([request.rows[piece] for piece in pieces]))
        rows = part.rows_of(ids, is_training)[inverse]
        lengths = [piece.stop - piece.start for piece in pieces]
        for piece, rows_of_piece in zip(pieces, rows.split(lengths), strict=True):
            request.rows[piece] = rows_of_piece


def fill_unknown_rows(request: LookupRequest, rows: torch.Tensor) -> None:
    """Use the unknown row for ids with a marked row. rows: the returned rows, float32 [n, D]."""
    is_missing = rows.view(torch.int32)[:, 0] == MARK
    missing = is_missing.nonzero().view(-1)
    if not len(missing):
        return
    sent = torch.tensor(request.sent)
    parts = torch.arange(sent.size(1)).repeat(len(sent)).repeat_interleave(sent.view(-1))
    instead = torch.arange(len(rows))
    instead[missing] = torch.tensor(request.unknowns)[parts[missing]]
    request.inverse = instead[request.inverse]


class CpuTables(ShardedEmbeddingCollection):
    """Sharded tables of a model on the CPU, split by rows or whole.

    sharder: gives their optimizer and the dynamic tables; shares: of dynamic tables, by name.
    """

    def __init__(
        self,
        sharder: CpuTablesSharder,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        *arguments: Any,
        **options: Any,
    ) -> None:
        with contextlib.ExitStack() as stack:
            if sharder.storage is not None:
                number = module.embedding_dim() * _num_split_rows(params, env.rank)
                stack.enter_context(FilesForTables(sharder.storage, [number]))
            super().__init__(module, params, env, *arguments, **options)
        self.exchange = open_exchange(self._env.process_group, sharder.timeout)
        # TorchRec's pipelines check if the input exchange still waits for a first batch; this one does not.
        self._has_uninitialized_input_dist = False
        # Autograd calls the backward only if an input requires a gradient. The rows do not, so this empty
        # tensor does, also on a rank that holds no rows.
        self.anchor = torch.zeros(0, requires_grad=True)
        self.layout = self._lay_out(sharder)
        # The same on every rank, also on one without rows on the disk.
        self.loads = sharder.storage is not None
        # Requests of later steps, by the identity of their features, which are kept so that it stays theirs.
        self.requested_ahead: dict[int, tuple[KeyedJaggedTensor, LookupRequest]] = {}
        self.shares = {name: part.share for name, part in self.layout.dynamic.items()}
        self.rows_of_tables = {name: group.rows for group in self.layout.groups for name, _ in group.tables}

    def _lay_out(self, sharder: CpuTablesSharder) -> TableLayout:
        """Assign keys to the rows of all ranks, and find the kernels of this rank."""
        plan = {table_of(key): self.module_sharding_plan[key] for key in self._table_names}
        num_rows = {
            table_of(key): config.num_embeddings for key, config in self._table_name_to_config.items()
        }
        layout = TableLayout(plan, num_rows)
        # For all ranks, from the plan that all ranks have: a rank finds the owner of a row without
        # communication.
        for rank in range(self._env.world_size):
            for kind, lookup in zip(self._sharding_types, self._lookups, strict=True):
                first_key, tables = layout.add_group(rank, kind)
                if rank == self._env.rank:
                    module = _module_of(lookup, tables)
                    is_on_disk = kind == ShardingType.ROW_WISE.value
                    rows = _rows_of(module, sharder, is_on_disk)
                    if isinstance(rows, RowsOnDisk):
                        layout.on_disk = rows
                    kernel = module and module.emb_module
                    layout.groups.append(TableGroup(kernel, rows, first_key, tables, sharder.rule))
        # Other tables of the model have another width.
        for name in [name for name in sharder.dynamic if name in plan]:
            layout.dynamic[name] = self._share_of(sharder.dynamic[name], layout)
        layout.close()
        return layout

    def _share_of(self, spec: DynamicSpec, layout: TableLayout) -> DynamicPart:
        """Return this rank's share of a dynamic table."""
        groups = {name: (group, first) for group in layout.groups for name, first in group.tables}
        group, first_row = groups[spec.name]
        rank, world_size = self._env.rank, self._env.world_size
        share = DynamicTable(spec, rank, world_size, group.rows, first_row)
        if share.unknown is not None:
            # The unknown row is trained like any other row, and starts at zero.
            share.unknown[0].zero_()
        return DynamicPart(share, group)

    def load_ahead(self, features: KeyedJaggedTensor) -> None:
        """Exchange the requests of a later step, and begin to load their rows. Collective: every rank."""
        with torch.no_grad():
            wanted = of_tables(features, self.layout.plan)
            if self.layout.on_disk is not None and self.requested_ahead:
                # The step before is over, and its rows may go.
                (_, oldest), *_ = self.requested_ahead.values()
                self.layout.on_disk.begin(oldest.expected)
            # At once: a message that waits would be overwritten by those of the steps before it.
            request = CountsExchange(self.layout, self.exchange, wanted).wait().wait()
        self.requested_ahead[id(features)] = features, request

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        """Request the rows of features from the ranks. Collective: every rank."""
        with torch.no_grad():
            if id(features) in self.requested_ahead:
                _, request = self.requested_ahead.pop(id(features))
                return NoWait(NoWait([request]))
            # TorchRec waits twice, for the counts and then for the keys; its pipeline does other work between
            # the two.
            features = of_tables(features, self.layout.plan)
            return KJTListSplitsAwaitable([CountsExchange(self.layout, self.exchange, features)], ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Return the rows of features; the backward updates the tables. Collective: every rank."""
        (request,) = input
        if request.capacities != self.layout.capacities:
            # A pipeline sent this request before a table grew, to the ranks that owned the ids then. This is
            # so on all ranks.
            request = CountsExchange(self.layout, self.exchange, request.features).wait().wait()
        if not request.is_resolved:
            with profiler_range("lookup"):
                resolve(self.layout, request, self.training)
        if self.post_lookup_tracker_fn is not None:
            # TorchRec calls its tracker in the lookup that this one replaces.
            self._track(request)
        names = request.features.keys()
        lengths = dict(zip(names, request.features.lengths().view(len(names), -1), strict=True))
        rows = RowLookup.apply(self.anchor, self, request)
        by_feature = {}
        for name, index in zip(names, request.inverse_of_features(), strict=True):
            is_single = len(index) == len(lengths[name]) and bool((lengths[name] == 1).all())
            by_feature[name] = DistinctRows(rows, index, lengths[name], is_single)
        # Not an awaitable, unlike the output of TorchRec's own tables: the exchange has ended above.
        return SharedRows(by_feature, rows, request.in_order_of_rows)

    def _track(self, request: LookupRequest) -> None:
        """Report the looked-up rows of this rank to TorchRec's tracker, from which deltas are made."""
        for group, piece in self.layout.pieces(request):
            # Dynamic tables record their changes themselves.
            if not isinstance(group, TableGroup):
                continue
            names = [name for name, _ in group.tables]
            firsts = torch.tensor([first for _, first in group.tables])
            rows = request.rows[piece]
            # The requests from a rank are sorted, and so is the list of tables: boundaries delimit the rows
            # of each table. The last table ends above every row number.
            ends = torch.searchsorted(rows, torch.cat([firsts[1:], rows.new_tensor([2**62])]))
            counts = ends.diff(prepend=ends.new_zeros(1))
            rows = rows - firsts.repeat_interleave(counts)
            looked_up = KeyedJaggedTensor(names, rows, lengths=counts.int(), stride=1)
            self.post_lookup_tracker_fn(looked_up, rows, self, None)


def _num_split_rows(params: Mapping[str, ParameterSharding], rank: int) -> int:
    """Return the rows of a rank of all tables that are split by rows."""
    split = (table for table in params.values() if table.sharding_type == ShardingType.ROW_WISE.value)
    shards = (shard for table in split for shard in table.sharding_spec.shards)
    return sum(shard.shard_sizes[0] for shard in shards if shard.placement.rank() == rank)


def _rows_of(module: Any, sharder: CpuTablesSharder, is_split: bool) -> TableRows:
    """Return the rows of a TorchRec module: on the disk if there are such tables, and these are split."""
    if module is None:
        return TableRows(torch.empty(0, 0), {})
    kernel, storage = module.emb_module, sharder.storage
    # FBGEMM keeps the tables of a group one after the other in one array; all of ours are equally wide.
    weights = kernel.weights_host.detach().view(-1, kernel.max_D)
    if storage is None or not is_split:
        return TableRows(weights, make_state(sharder.rule, module))
    return RowsOnDisk(storage, weights, make_state(sharder.rule, module, storage.zeros))


def _module_of(lookup: Any, tables: tuple[tuple[str, int], ...]) -> Any:
    """Return TorchRec's module of a table group; None where this rank holds no rows of it."""
    held = [[table_of(table.name) for table in config.embedding_tables] for config in lookup.grouped_configs]
    names = [name for name, _ in tables]
    if held != ([names] if names else []):
        # Another version of TorchRec may group the tables in another way, and then the keys would be wrong.
        raise RuntimeError(f"TorchRec grouped the tables {names} as {held}")
    return lookup._emb_modules[0] if names else None


class RowLookup(torch.autograd.Function):
    """Distinct rows of all features, float32 [distinct, D]; the backward updates the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tables: CpuTables, request: LookupRequest) -> torch.Tensor:
        """Collective: every rank."""
        ctx.tables, ctx.request = tables, request
        with profiler_range("lookup"):
            if tables.layout.on_disk is not None:
                tables.layout.on_disk.begin(request.expected)
            mine = tables.exchange.outgoing("rows", (len(request.rows), tables._embedding_dim))
            rows = request.rows if request.missing is None else request.rows.clamp(min=0)
            for part, piece in tables.layout.pieces(request):
                # Written to memory that other ranks read: rows are copied once on this side.
                part.group.rows.look_up(rows[piece], mine.rows[piece])
            # Mark the ids without a row in the rows that go back.
            if request.missing is not None:
                mine.rows.view(torch.int32)[request.missing, 0] = MARK
        with profiler_range("output exchange"):
            received = tables.exchange.exchange_rows(mine, request.received, request.num_sent)()
        with profiler_range("lookup"):
            if tables.layout.dynamic:
                fill_unknown_rows(request, received)
            return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        """Collective: every rank."""
        tables, request = ctx.tables, ctx.request
        sums = tables.exchange.outgoing("gradients", (sum(request.num_sent), tables._embedding_dim))
        # To the slot that other ranks read. The loss is the mean over ranks, but each rank's backward started
        # from its own loss; TorchRec's exchange divides in the same way.
        torch.div(gradient.detach(), tables._env.world_size, out=sums.rows)
        with profiler_range("output exchange"):
            mine = tables.exchange.exchange_rows(sums, request.num_sent, request.received)()
        with profiler_range("optimizer"):
            learn(tables.layout, request, mine)
        # The tables are updated already; no gradient is left for an optimizer.
        return None, None, None


class CpuTablesSharder(TablesSharder):
    """Sharder that makes `CpuTables` from the tables of a model.

    rule: their optimizer; timeout: seconds to wait for another rank; dynamic: specs of the dynamic tables;
    storage: of the tables that are split by rows, None for memory.
    """

    def __init__(
        self,
        fused_params: dict[str, Any],
        rule: TableRule,
        timeout: float,
        dynamic: Specs,
        storage: DiskStorage | None = None,
    ) -> None:
        # The kernel itself does not train and needs no state: this is the only optimizer without one.
        super().__init__(fused_params={**fused_params, "optimizer": EmbOptimType.EXACT_SGD})
        self.rule, self.timeout, self.dynamic, self.storage = rule, timeout, dynamic, storage

    @override
    def make(self, *arguments: Any, **options: Any) -> CpuTables:
        return CpuTables(self, *arguments, **options)
