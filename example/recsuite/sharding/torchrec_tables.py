"""Dynamic tables with TorchRec's own step: ids become rows between its exchange of ids and its lookup.

    features -> ids at the ranks that own them              by bucket, TorchRec's all-to-all
    -> rows of this rank's shards                           `dynamic.py`
    -> TorchRec's lookup, its exchange of rows, and in the backward FBGEMM's fused optimizer

All tables are split by rows, the static ones too, so that there is one exchange. Tensors keep their names,
and a checkpoint is the same as with our own step (`cpu_tables.py`).

TorchRec's lookup finds rows on the rank that receives the id. So an id without a row uses that rank's copy of
the unknown row, and FBGEMM's optimizer updates the copy. The gradient is computed from that update, and the
update is repeated with the sum of all gradients: the same as on one rank, except for rounding.

On one rank, without dynamic tables and without a pipeline, TorchRec's exchanges are skipped, and FBGEMM's
kernels are called without its wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from typing_extensions import override

from recsuite.runtime.process import profiler_range
from recsuite.sharding.dynamic import EMPTY, NO_ROW, DynamicSpec, DynamicTable
from recsuite.sharding.recommender import of_tables, table_of
from recsuite.sharding.storage import TableRows
from recsuite.sharding.table import TablesSharder


class OwnersDist(RwSparseFeaturesDist):
    """Distribution of ids to their owners. owners: for each feature, ids int64 [n] -> ranks int64 [n]."""

    def __init__(
        self, group: Any, owners: Sequence[Callable[[torch.Tensor], torch.Tensor]], device: torch.device
    ) -> None:
        # The values to distribute are the owners themselves: as many ranges as ranks, of one number each.
        super().__init__(group, len(owners), [group.size()] * len(owners), device=device, is_sequence=True)
        self.owners = owners

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Send ids to their owners. Collective: every rank."""
        ids = sparse_features.values()
        parts = ids.split(sparse_features.length_per_key())
        ranks = [owner_of(part) for owner_of, part in zip(self.owners, parts, strict=True)]
        by_owner, positions = bucketize_kjt_before_all2all(
            KeyedJaggedTensor(sparse_features.keys(), torch.cat(ranks), lengths=sparse_features.lengths()),
            num_buckets=self._world_size,
            block_sizes=self._feature_block_sizes_tensor,
            output_permute=True,
        )
        self.unbucketize_permute_tensor = positions
        sorted_ids = torch.empty_like(ids).index_copy_(0, positions.long(), ids)
        return self._dist(
            KeyedJaggedTensor(
                by_owner.keys(), sorted_ids, lengths=by_owner.lengths(), stride=sparse_features.stride()
            )
        )


class UnknownRows:
    """Unknown rows of the dynamic tables on this rank.

    kernels: FBGEMM's of each table, which updates the rows.
    """

    def __init__(self, shares: Sequence[DynamicTable], kernels: Sequence[Any], group: Any) -> None:
        self.shares, self.kernels, self.group = shares, kernels, group
        self._before: torch.Tensor | None = None
        for share in shares:
            # The unknown row is trained like any other row, and starts at zero.
            share.weights[-1].zero_()

    @property
    def _is_alone(self) -> bool:
        return not self.shares or dist.get_world_size(self.group) == 1

    @torch.no_grad()
    def share(self) -> None:
        """Copy the rows of rank 0, which may have loaded them, to every rank. Collective: every rank."""
        if self._is_alone:
            return
        held = self._held()
        dist.broadcast(held, group_src=0, group=self.group)
        self._put(held)
        self._before = held

    @torch.no_grad()
    def settle(self) -> None:
        """Update the rows by the gradients of all ranks since `share`. Collective: every rank."""
        if self._is_alone or self._before is None:
            return
        before, after = self._before, self._held()
        rates = torch.stack([kernel.learning_rate_tensor for kernel in self.kernels]).view(-1, 1)
        eps = self.kernels[0].optimizer_args.eps
        gradients = (before - after)[:, :-1] * ((after[:, -1:].sqrt() + eps) / rates.to(after))
        # A rate of zero gives no gradient.
        gradients.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        dist.all_reduce(gradients, group=self.group)
        state = before[:, -1:] + gradients.square().mean(dim=1, keepdim=True)
        step = gradients * (rates.to(after) / (state.sqrt() + eps))
        self._put(torch.cat([before[:, :-1] - step, state], dim=1))
        self._before = None

    def _held(self) -> torch.Tensor:
        """Return the rows with the optimizer state of each, float32 [tables, D + 1]."""
        return torch.stack([torch.cat([share.weights[-1], share.state[-1:]]) for share in self.shares])

    def _put(self, held: torch.Tensor) -> None:
        for share, row in zip(self.shares, held, strict=True):
            share.weights[-1].copy_(row[:-1])
            share.state[-1].copy_(row[-1])


def distinct_ids(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Return features with each id of a feature once, and the place of each given id among these, int64 [n].

    Their lengths only say which ids belong to a feature: they are spread over its events, because FBGEMM's
    kernels work on the events of a batch in parallel, and on the ids of one event in turn.
    """
    ids, stride, num_features = features.values(), features.stride(), len(features.keys())
    ends = features.offsets()[stride::stride].contiguous()
    of_feature = torch.bucketize(
        torch.arange(len(ids), dtype=ends.dtype, device=ends.device), ends, right=True
    )
    # By feature, and by id within a feature: an id of 64 bits leaves no room for the feature in one key.
    order = ids.argsort(stable=True)
    order = order[of_feature[order].argsort(stable=True)]
    ids, of_feature = ids[order], of_feature[order]
    is_first = torch.ones_like(order)
    is_first[1:] = (ids[1:] != ids[:-1]) | (of_feature[1:] != of_feature[:-1])
    places = is_first.cumsum(0) - 1
    counts = is_first.new_zeros(num_features).index_add_(0, of_feature, is_first)
    # The only wait for the device. The exchange would wait for these numbers otherwise.
    length_per_key = counts.tolist()
    events = torch.arange(stride, device=counts.device)
    lengths = counts.unsqueeze(1) // stride + (events < counts.unsqueeze(1) % stride)
    distinct = KeyedJaggedTensor(
        features.keys(),
        ids.new_empty(sum(length_per_key)).index_copy_(0, places, ids),
        lengths=lengths.view(-1).to(features.lengths()),
        stride=stride,
        length_per_key=length_per_key,
    )
    return distinct, torch.empty_like(places).index_copy_(0, order, places)


class DistinctTables(ShardedEmbeddingCollection):
    """Sharded tables of a model, of which a rank requests a row once for all its ids of a batch.

    TorchRec's way is a kernel of FBGEMM that exists only for a GPU. Its ids must be rows of their table.
    Dynamic ids are not, and others are mixed up before the bounds are checked. Its lengths have 8 bytes.
    """

    def _dedup_indices(self, ctx: Any, splits: list[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
        exchanged = []
        for features in splits:
            distinct, places = distinct_ids(features)
            ctx.input_features.append(features)
            ctx.reverse_indices.append(places)
            exchanged.append(distinct)
        return exchanged


class DistinctTablesSharder(TablesSharder):
    """Sharder that makes `DistinctTables` from the tables of a model on several ranks."""

    def __init__(self, fused_params: dict[str, Any]) -> None:
        super().__init__(fused_params=fused_params, use_index_dedup=True)

    @override
    def make(self, *arguments: Any, **options: Any) -> DistinctTables:
        return DistinctTables(*arguments, **options)


class TorchRecTables(DistinctTables):
    """Sharded tables of a model, some of which are dynamic.

    dynamic: the specs of these, by their names; shares: this rank's shares of them.
    """

    def __init__(self, dynamic: Mapping[str, DynamicSpec], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shares: dict[str, DynamicTable] = {}
        # The first row of each rank but the first, of each static table. Made once: otherwise each step would
        # copy them to the device and wait.
        self._ends: dict[str, torch.Tensor] = {}
        self._first_row: dict[str, int] = {}
        kernels = []
        for kernel, key, weights, state in self._local_tables():
            name = table_of(key)
            if name in dynamic:
                rows = TableRows(weights, {"momentum1": state})
                self.shares[name] = DynamicTable(dynamic[name], self._env.rank, self._env.world_size, rows)
                kernels.append(kernel)
            else:
                shards = self.module_sharding_plan[key].sharding_spec.shards
                first_rows = [shard.shard_offsets[0] for shard in shards]
                self._ends[name] = torch.tensor(first_rows[1:], dtype=torch.int64, device=weights.device)
                self._first_row[name] = first_rows[self._env.rank]
        self.unknown = UnknownRows([*self.shares.values()], kernels, self._env.process_group)
        for share in self.shares.values():
            share.complete_step = self.unknown.settle

    def _local_tables(self) -> Iterator[tuple[Any, str, torch.Tensor, torch.Tensor]]:
        """Yield kernel, TorchRec's name, rows [n, D] and state [n] of this rank's part of each table."""
        for lookup in self._lookups:
            for group in lookup._emb_modules:
                kernel = group.emb_module
                states = kernel.split_optimizer_states()
                names = [table.name for table in group.config.embedding_tables]
                for name, rows, (state,) in zip(names, kernel.split_embedding_weights(), states, strict=True):
                    yield kernel, name, rows.detach(), state.detach()

    @property
    def capacities(self) -> list[int]:
        """Capacities of the dynamic tables; with other ones, ids belong to other ranks."""
        return [share.spec.capacity for share in self.shares.values()]

    def _create_input_dist(self, *arguments: Any, **options: Any) -> None:
        super()._create_input_dist(*arguments, **options)
        # Only one: all tables are split by rows.
        self._input_dists[:] = [self._make_input_dist()]

    def _make_input_dist(self) -> OwnersDist:
        # A table has one feature, of the same name.
        (sharding,) = self._sharding_type_to_sharding.values()
        owners = [partial(self._owner_of, name) for name in sharding.feature_names()]
        return OwnersDist(self._env.process_group, owners, self._device)

    def _owner_of(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rank of each id of a table, int64 [n]."""
        if table not in self.shares:
            return torch.bucketize(ids, self._ends[table], right=True)
        # The unknown row is on rank 0.
        return self.shares[table].placement.owner_of(ids).masked_fill_(ids == EMPTY, 0)

    def _rows_of(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return ids of a table as rows of this rank's shard, int64 [n]. Training inserts new ids."""
        if table not in self.shares:
            return ids - self._first_row[table]
        share = self.shares[table]
        # All ids of a step from all ranks at once: insertion must not depend on the number of ranks.
        distinct, inverse = ids.unique(return_inverse=True)
        is_known = distinct != EMPTY
        rows = torch.full_like(distinct, NO_ROW)
        known = distinct[is_known]
        rows[is_known] = share.find_or_insert(known) if self.training else share.find(known)
        # Ids without a row use the last row, which every rank keeps as a copy of the unknown row.
        return torch.where(rows == NO_ROW, len(share.weights) - 1, rows)[inverse]

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the ranks that own them. Collective: every rank."""
        ctx.capacities, ctx.features = self.capacities, features
        features = of_tables(features, self.shares.keys() | self._ends.keys())
        return super().input_dist(ctx, features)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Return the rows of ids; the backward updates the tables. Collective: every rank."""
        if ctx.capacities != self.capacities:
            # A pipeline sent these ids before a table grew, to the ranks that owned them then. This is so on
            # all ranks.
            for of_exchange in (ctx.sharding_contexts, ctx.input_features, ctx.reverse_indices):
                of_exchange.clear()
            # Through a new exchange: the pipeline has changed the other one so that it sends nothing alone.
            (of_pipeline,), self._input_dists[:] = self._input_dists, [self._make_input_dist()]
            input = self.input_dist(ctx, ctx.features).wait().wait()
            self._input_dists[:] = [of_pipeline]
        self.unknown.share()
        (ids,) = input
        with torch.no_grad():
            parts = zip(ids.keys(), ids.values().split(ids.length_per_key()), strict=True)
            rows = torch.cat([self._rows_of(name, part) for name, part in parts])
        of_rows = KeyedJaggedTensor(ids.keys(), rows, lengths=ids.lengths(), stride=ids.stride())
        return super().compute_and_output_dist(ctx, KJTList([of_rows]))


class TorchRecTablesSharder(TablesSharder):
    """Sharder that makes `TorchRecTables` from the tables of a model.

    dynamic: specs of dynamic tables; is_alone: True for one rank, which has no use for distinct ids.
    """

    def __init__(
        self, fused_params: dict[str, Any], dynamic: Mapping[str, DynamicSpec], is_alone: bool
    ) -> None:
        super().__init__(fused_params=fused_params, use_index_dedup=not is_alone)
        self.dynamic = dynamic

    @override
    def make(self, *arguments: Any, **options: Any) -> TorchRecTables:
        return TorchRecTables(self.dynamic, *arguments, **options)


class CheckedFeatures(KeyedJaggedTensor):
    """Features whose ids were compared with the sizes of their tables before; the lookup need not do so."""


class RowsOfFeature:
    """Rows of a feature, a `LookedUp`; TorchRec's class makes a dozen calls for each."""

    __slots__ = ("_counts", "_rows", "gradient_memory")

    def __init__(
        self, rows: torch.Tensor, counts: torch.Tensor, memory: Callable[[], torch.Tensor | None]
    ) -> None:
        self._rows, self._counts, self.gradient_memory = rows, counts, memory

    def values(self) -> torch.Tensor:
        """Return the rows, float32 [V, D]."""
        return self._rows

    def lengths(self) -> torch.Tensor:
        """Return the number of values of each event, [B]."""
        return self._counts


class JoinedGradient:
    """Gradient of the rows of all features, [V, D], of which a backward may write the part of a feature.

    Otherwise the gradient of a list is written once, and copied once. rows: those of all features, [V, D];
    sizes: number of rows of each feature.
    """

    def __init__(self, rows: torch.Tensor, sizes: Sequence[int]) -> None:
        self._rows, self._sizes = rows.detach(), sizes
        self._all: torch.Tensor | None = None
        # Memory by the index of the feature.
        self._given: dict[int, torch.Tensor] = {}

    def memory_of(self, index: int) -> torch.Tensor | None:
        """Return the memory for the gradient of a feature; None after the first time in a backward."""
        if index in self._given:
            return None
        if self._all is None:
            self._all = torch.empty_like(self._rows)
        self._given[index] = self._all.split(self._sizes)[index]
        return self._given[index]

    def joined(self, gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the gradients of all features in one tensor, and end the backward."""
        everything, given = self._all, self._given
        self._all, self._given = None, {}
        if everything is None:
            return torch.cat(gradients)
        # A feature that was used twice has another gradient than the part that was written.
        is_there = [
            index in given and given[index].data_ptr() == gradient.data_ptr()
            for index, gradient in enumerate(gradients)
        ]
        end = 0
        for is_written, run in groupby(zip(is_there, gradients, strict=True), itemgetter(0)):
            # Neighbours are copied by one kernel.
            copied = [gradient for _, gradient in run]
            begin, end = end, end + sum(map(len, copied))
            if not is_written:
                torch.cat(copied, out=everything[begin:end])
        return everything


class _Parts(torch.autograd.Function):
    """Rows of each feature, as views; the gradients are joined."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: Sequence[int], joined: JoinedGradient
    ) -> tuple[torch.Tensor, ...]:
        ctx.joined = joined
        return rows.split(sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.joined.joined(gradients), None, None


class OneRankTables(ShardedEmbeddingCollection):
    """Sharded tables of a model on one rank, whose lookup skips TorchRec's exchanges and wrappers.

    The exchanges have no effect there, and their Python code takes time. On a GPU they also wait for the
    device in each step: the order of the features is copied to it from pageable memory
    (`torchrec.distributed.dist_data._get_recat`). TorchRec's pipelines make the exchanges all the same.
    """

    # Positions of the tables' features among those of a batch, which all batches have in the same order.
    _positions: tuple[list[int], torch.Tensor] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        (sharding,), (lookup,) = self._sharding_type_to_sharding.values(), self._lookups
        # Features in the order of the lookup; a batch with another order costs some kernels.
        self.feature_names: list[str] = sharding.feature_names()
        # FBGEMM's kernels, one for each kind of memory, each with the number of its features.
        self._kernels = [
            (group.emb_module, group.config.num_features(), group.emb_module.bounds_check_mode_int)
            for group in lookup._emb_modules
        ]

    def forward(self, features: KeyedJaggedTensor) -> dict[str, RowsOfFeature]:
        """Return the rows of ids; the backward updates the tables."""
        names, wanted, is_checked = features.keys(), self.feature_names, isinstance(features, CheckedFeatures)
        if names != wanted:
            if self._positions is None:
                positions = [names.index(name) for name in wanted]
                # Stays on the device, because a copy in each step would wait for it.
                on_device = torch.tensor(positions, dtype=torch.int32, device=features.device())
                self._positions = positions, on_device
            features = features.permute(*self._positions)
        with profiler_range("lookup"):
            rows = self._rows_of(features, is_checked)
        if self.post_lookup_tracker_fn is not None:
            self.post_lookup_tracker_fn(features, rows, self, None)
        sizes = features.length_per_key()
        joined = JoinedGradient(rows, sizes)
        parts, counts = _Parts.apply(rows, sizes, joined), features.lengths().view(len(wanted), -1).unbind()
        return {
            name: RowsOfFeature(parts[index], counts[index], partial(joined.memory_of, index))
            for index, name in enumerate(wanted)
        }

    def _rows_of(self, features: KeyedJaggedTensor, is_checked: bool) -> torch.Tensor:
        """Return the row of each id, [V, D]. is_checked: see `CheckedFeatures`."""
        ids, offsets, parts = features.values().long(), features.offsets(), []
        first, ends, stride = 0, features.offset_per_key(), features.stride()
        for kernel, number, check in self._kernels:
            kernel.bounds_check_mode_int = BoundsCheckMode.NONE.value if is_checked else check
            if number == len(ends) - 1:
                return kernel(ids, offsets)
            end = first + number
            mine = offsets[first * stride : end * stride + 1] - ends[first]
            parts.append(kernel(ids[ends[first] : ends[end]], mine))
            first = end
        return torch.cat(parts)


class OneRankTablesSharder(TablesSharder):
    """Sharder that makes `OneRankTables` from the tables of a model."""

    @override
    def make(self, *arguments: Any, **options: Any) -> OneRankTables:
        return OneRankTables(*arguments, **options)
