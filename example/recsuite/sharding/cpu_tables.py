"""TorchRec's sharded tables with a step of their own on the CPU.

TorchRec's plan, shards, names, states and pipelines stay. Its step on a CPU spends much of its time beside
the arithmetic, and FBGEMM updates rows at a third of the speed of PyTorch's own kernels. Here

    ids of all features -> keys -> distinct keys, in order          a row travels once for all its ids
    keys to the ranks that own the rows, rows back -> a row an id   one exchange for all tables
    gradients of ids -> sums for distinct keys -> to the owners     as many bytes as the rows
    -> sums over ranks -> row-wise Adagrad on the rows, in place    FBGEMM's EXACT_ROWWISE_ADAGRAD

A key numbers the rows of all tables: rank after rank, and within a rank part after part. A part is what
FBGEMM keeps in one piece: the tables with the same kind of sharding. So sorted keys lie as an exchange wants
them.
R: keys that come to a rank; D: numbers in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from recsuite.runtime.ranges import named
from recsuite.sharding.exchange import open_exchange


@dataclass
class LookupRequest(Multistreamable):
    """The rows that ranks want of each other in one step.

    features: what the ids came in; places: of each id among the distinct keys of this rank, int64 [ids];
    sent: how many of those go to each rank; received: how many came from each rank; in_parts: the same for
    each part of this one; rows: those that came, in that order, int64 [R], as rows of the parts.
    """

    features: KeyedJaggedTensor
    places: torch.Tensor
    sent: list[int]
    received: list[int]
    in_parts: list[int]
    rows: torch.Tensor

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing: a CPU has no streams."""

    def places_of_features(self) -> tuple[torch.Tensor, ...]:
        """The places, feature after feature."""
        return self.places.split(self.features.length_per_key())


class CountsExchange(Awaitable[Awaitable[LookupRequest]]):
    """Keys and how many there are are on their way; waiting has the numbers, and waiting again the keys."""

    def __init__(self, tables: CpuTables, features: KeyedJaggedTensor) -> None:
        super().__init__()
        self.tables = tables
        self.features = features
        with named("input exchange"):
            keys, self.places = torch.unique(tables.keys_of(features), return_inverse=True)
            ends = torch.searchsorted(keys, tables.part_ends)
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])
            self.sent = (ends - starts).view(-1, len(tables.parts))
            outgoing = tables.exchange.outgoing("keys", keys.shape, tables.key_dtype)
            outgoing.rows.copy_(keys)
            told = torch.cat([starts[:: len(tables.parts), None], self.sent], dim=1)
            self.keys = tables.exchange.send_keys(outgoing, told)

    def _wait_impl(self) -> Awaitable[LookupRequest]:
        with named("input exchange"):
            return KeysExchange(self, self.keys.counts()[:, 1:])


class KeysExchange(Awaitable[LookupRequest]):
    """The keys are on their way."""

    def __init__(self, counts: CountsExchange, received: torch.Tensor) -> None:
        super().__init__()
        self.tables, self.keys = counts.tables, counts.keys
        go, come = counts.sent.sum(1).tolist(), received.sum(1).tolist()
        self.sought = LookupRequest(
            counts.features, counts.places, go, come, received.flatten().tolist(), torch.empty(0)
        )

    def _wait_impl(self) -> LookupRequest:
        with named("input exchange"):
            self.sought.rows = self.keys.keys().long()
            for part, piece in self.tables.pieces(self.sought):
                self.sought.rows[piece] -= part.first_key
            return self.sought


@dataclass(frozen=True)
class TableGroup:
    """Tables of this rank that lie in one piece.

    kernel: FBGEMM's, which holds their rows and the optimizer's state of them; first_key: the key of its
    first row; tables: their names, each with its first row.
    """

    kernel: Any
    first_key: int
    tables: tuple[tuple[str, int], ...]

    @property
    def weights(self) -> torch.Tensor:
        """All rows, float32 [rows, D]."""
        return self.kernel.weights_host.detach().view(-1, self.kernel.max_D)

    def learn(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Row-wise Adagrad of distinct rows, int64 [n], with gradients, float32 [n, D], which it uses up."""
        state = self.kernel.momentum1_host
        squares = torch.linalg.vector_norm(gradients, dim=1).square_().div_(gradients.size(1))
        sums = squares.add_(state.index_select(0, rows))
        state.index_copy_(0, rows, sums)
        rates = -self.kernel.learning_rate_tensor / sums.sqrt_().add_(self.kernel.optimizer_args.eps)
        # With another alpha than 1 it would add row by row, in ten times the time.
        self.weights.index_add_(0, rows, gradients.mul_(rates.unsqueeze(1)))


class CpuTables(ShardedEmbeddingCollection):
    """The sharded tables of a model on the CPU, split by rows or whole."""

    def __init__(self, timeout: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exchange = open_exchange(self._env.process_group, timeout)
        # The pipelines look whether a first batch has shown what TorchRec's own exchange needs.
        self._has_uninitialized_input_dist = False
        # What makes autograd come back to a rank that holds no rows, too.
        self.anchor = torch.zeros(0, requires_grad=True)
        self._number_rows()

    def _number_rows(self) -> None:
        """Find where the rows lie, and give them their keys."""
        # What to add to a row of a table, by the shard in which it lies; and how many rows the shards have.
        self.shifts: dict[str, torch.Tensor] = {}
        self.rows_in_shard: dict[str, int] = {}
        for name, plan in self.module_sharding_plan.items():
            self.shifts[name] = torch.zeros(len(plan.sharding_spec.shards), dtype=torch.int64)
            self.rows_in_shard[name] = max(1, plan.sharding_spec.shards[0].shard_sizes[0])
        self.parts: list[TableGroup] = []
        key, part_ends = 0, []
        for rank in range(self._env.world_size):
            for kind, lookup in zip(self._sharding_types, self._lookups, strict=True):
                first_key, tables = key, []
                for name, place, shard in self._shards(rank, kind):
                    tables.append((name, key - first_key))
                    self.shifts[name][place] = key - shard.shard_offsets[0]
                    key += shard.shard_sizes[0]
                part_ends.append(key)
                if rank == self._env.rank:
                    self.parts.append(TableGroup(_kernel_of(lookup, tables), first_key, tuple(tables)))
        self.part_ends = torch.tensor(part_ends)
        # As narrow as they can be sent.
        self.key_dtype = torch.int32 if key < 2**31 else torch.int64

    def _shards(self, rank: int, kind: str) -> Iterator[tuple[str, int, Any]]:
        """What a rank has of the tables with one kind of sharding: table, number of the shard, shard."""
        for name in self._table_names:
            plan = self.module_sharding_plan[name]
            for place, shard in enumerate(plan.sharding_spec.shards):
                if plan.sharding_type == kind and shard.placement.rank() == rank:
                    yield name, place, shard

    def keys_of(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The key of every id, int64 [ids]. A feature has the name of its table.

        Raises:
            IndexError: when a table has no such row, which is a bug of ours.
        """
        found = []
        counts = features.length_per_key()
        for name, ids in zip(features.keys(), features.values().split(counts), strict=True):
            self._check_range(name, ids)
            shifts = self.shifts[name]
            # Not one by one where there is no choice.
            shift = shifts.index_select(0, ids // self.rows_in_shard[name]) if len(shifts) > 1 else shifts
            found.append(ids + shift)
        return torch.cat(found)

    def _check_range(self, name: str, ids: torch.Tensor) -> None:
        if len(ids):
            least, most = ids.aminmax()
            num_rows = self._table_name_to_config[name].num_embeddings
            if least < 0 or most >= num_rows:
                raise IndexError(f"{name}: rows {least} to {most} are asked for, and there are {num_rows}")

    def pieces(self, sought: LookupRequest) -> Iterator[tuple[TableGroup, slice]]:
        """Each part with where rows of it lie in those that came, rank after rank."""
        counts = sought.in_parts
        for place, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            if count:
                yield self.parts[place % len(self.parts)], slice(end - count, end)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> KJTListSplitsAwaitable:
        """Ask the ranks for the rows of features. Collective: every rank."""
        with torch.no_grad():
            return KJTListSplitsAwaitable([CountsExchange(self, features)], ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """The rows of features; in the backward the tables learn. Collective: every rank."""
        (sought,) = input
        if self.post_lookup_tracker_fn is not None:
            self._track(sought)
        names = sought.features.keys()
        lengths = sought.features.lengths().view(len(names), -1)
        found = zip(names, Rows.apply(self.anchor, self, sought), lengths, strict=True)
        return LazyNoWait({name: JaggedTensor(values=rows, lengths=counts) for name, rows, counts in found})

    def _track(self, sought: LookupRequest) -> None:
        """Tell TorchRec's tracker which rows of this rank's shards are looked up."""
        for part, piece in self.pieces(sought):
            names = [name for name, _ in part.tables]
            firsts = torch.tensor([first for _, first in part.tables])
            rows = sought.rows[piece]
            ends = torch.searchsorted(rows, torch.cat([firsts[1:], rows.new_tensor([2**62])]))
            counts = ends.diff(prepend=ends.new_zeros(1))
            rows = rows - firsts.repeat_interleave(counts)
            looked_up = KeyedJaggedTensor(names, rows, lengths=counts.int(), stride=1)
            self.post_lookup_tracker_fn(looked_up, rows, self, None)


def _kernel_of(lookup: Any, tables: list[tuple[str, int]]) -> Any:
    """FBGEMM's kernel of a part; None where this rank holds nothing of it."""
    held = [[table.name for table in config.embedding_tables] for config in lookup.grouped_configs]
    names = [name for name, _ in tables]
    if held != ([names] if names else []):
        # Rows would be others than their keys say.
        raise RuntimeError(f"TorchRec has grouped the tables {names} as {held}")
    return lookup._emb_modules[0].emb_module if names else None


class Rows(torch.autograd.Function):
    """The rows of features, each float32 [its ids, D]; the backward is the step of the tables."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tables: CpuTables, sought: LookupRequest
    ) -> tuple[torch.Tensor, ...]:
        """Collective: every rank."""
        ctx.tables, ctx.sought = tables, sought
        with named("lookup"):
            mine = tables.exchange.outgoing("rows", (len(sought.rows), tables._embedding_dim))
            for part, piece in tables.pieces(sought):
                torch.index_select(part.weights, 0, sought.rows[piece], out=mine.rows[piece])
        with named("output exchange"):
            found = tables.exchange.swap(mine, sought.received, sought.sent)()
        with named("lookup"):
            return tuple(found.index_select(0, places) for places in sought.places_of_features())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """Collective: every rank."""
        tables, sought = ctx.tables, ctx.sought
        sums = tables.exchange.outgoing("gradients", (sum(sought.sent), tables._embedding_dim))
        sums.rows.zero_()
        for places, gradient in zip(sought.places_of_features(), gradients, strict=True):
            sums.rows.index_add_(0, places, gradient)
        with named("output exchange"):
            mine = tables.exchange.swap(sums, sought.sent, sought.received)()
        with named("optimizer"):
            if tables._env.world_size > 1:
                # The loss is the mean over ranks.
                mine.div_(tables._env.world_size)
            learn(tables, sought, mine)
        return None, None, None


def learn(tables: CpuTables, sought: LookupRequest, gradients: torch.Tensor) -> None:
    """Have this rank's parts learn from what all ranks sent, float32 [R, D]. Not collective."""
    pieces = list(tables.pieces(sought))
    for part in tables.parts:
        mine = [piece for owner, piece in pieces if owner is part]
        if len(mine) == 1:
            part.learn(sought.rows[mine[0]], gradients[mine[0]])
        elif mine:
            # Several ranks may want the same row, and Adagrad must see the sum of their gradients.
            rows, places = torch.cat([sought.rows[piece] for piece in mine]).unique(return_inverse=True)
            sums = torch.zeros(len(rows), gradients.size(1))
            for piece, where in zip(
                mine, places.split([piece.stop - piece.start for piece in mine]), strict=True
            ):
                sums.index_add_(0, where, gradients[piece])
            part.learn(rows, sums)


class CpuTablesSharder(EmbeddingCollectionSharder):
    """Makes `CpuTables` of the tables of a model; timeout: seconds that a rank waits for another one."""

    def __init__(self, fused_params: dict[str, Any], timeout: float) -> None:
        super().__init__(fused_params=fused_params)
        self.timeout = timeout

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> CpuTables:
        """The sharded tables. Collective: every rank."""
        return CpuTables(self.timeout, module, params, env, self.fused_params, device, module_fqn=module_fqn)

    @property
    def sharded_module_type(self) -> type[CpuTables]:
        """What `shard` makes."""
        return CpuTables
