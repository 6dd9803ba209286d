"""Dynamic tables with TorchRec's own step: its managed collisions turn ids into rows before the lookup.

TorchRec's `ShardedManagedCollisionEmbeddingCollection` is a module around sharded tables. The module here is
itself one of the sharded tables, so that tensors keep their names, and a checkpoint is the same with either
step:

    features -> collisions.input_dist -> ids at the ranks that own them     by bucket, TorchRec's all-to-all
    -> collisions.compute -> rows of this rank's shards                     `dynamic.py`
    -> TorchRec's lookup, its exchange of rows, and in the backward FBGEMM's fused optimizer

All tables are split by rows, the static ones too: TorchRec's managed collisions have no other sharding.

TorchRec's lookup finds rows on the rank that receives the id. So an id without a row uses that rank's copy of
the unknown row, and FBGEMM's optimizer updates the copy. The gradient is computed from that update, and the
update is repeated with the sum of all gradients: the same as on one rank, except for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsuite.sharding.dynamic import EMPTY, NO_ROW, DynamicSpec, DynamicTable
from recsuite.sharding.recommender import of_tables


class OwnedCollisions(ShardedManagedCollisionCollection):
    """TorchRec's collection of managed collisions, with the owners of ids as the tables define them."""

    def _create_input_dists(self, input_feature_names: list[str]) -> None:
        super()._create_input_dists(input_feature_names)
        # Only one: all tables are split by rows.
        (sharding,), (features,) = self._embedding_shardings, self._sharding_features
        tables = [self._managed_collision_modules[self._feature_to_table[feature]] for feature in features]
        self._input_dists[:] = [OwnersDist(sharding._pg, [table.owner_of for table in tables], self._device)]


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
        by_owner, places = bucketize_kjt_before_all2all(
            KeyedJaggedTensor(sparse_features.keys(), torch.cat(ranks), lengths=sparse_features.lengths()),
            num_buckets=self._world_size,
            block_sizes=self._feature_block_sizes_tensor,
            output_permute=True,
        )
        self.unbucketize_permute_tensor = places
        sorted_ids = torch.empty_like(ids).index_copy_(0, places.long(), ids)
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


class Remapping(ManagedCollisionModule):
    """Remapping of one table: the share of a dynamic table, or a static table, whose ids are its rows.

    first_rows: of the ranks, and then the number of all rows; share: None for a static table.
    """

    def __init__(
        self, first_rows: list[int], rank: int, share: DynamicTable | None, device: torch.device
    ) -> None:
        super().__init__(device, first_rows)
        self.first_rows, self.rank, self.dynamic = first_rows, rank, share
        # Made once: otherwise each step would copy it to the device and wait.
        self._ends = torch.tensor(first_rows[1:-1], dtype=torch.int64, device=device)

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rank of each id, int64 [n]."""
        if self.dynamic is None:
            return torch.bucketize(ids, self._ends, right=True)
        owners = self.dynamic.placement.owner_of(ids)
        # The unknown row is on rank 0.
        return owners.masked_fill_(ids == EMPTY, 0)

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Return ids as rows of the whole table. Training inserts new ids."""
        return {
            name: JaggedTensor(values=self._rows_of(jagged.values()), lengths=jagged.lengths())
            for name, jagged in features.items()
        }

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        if self.dynamic is None:
            return ids
        # All ids of a step from all ranks at once: insertion must not depend on the number of ranks.
        distinct, inverse = ids.unique(return_inverse=True)
        is_known = distinct != EMPTY
        rows = torch.full_like(distinct, NO_ROW)
        known = distinct[is_known]
        rows[is_known] = self.dynamic.take_in(known) if self.training else self.dynamic.find(known)
        # Ids without a row use the last row, which every rank keeps as a copy of the unknown row.
        rows = torch.where(rows == NO_ROW, len(self.dynamic.weights) - 1, rows)
        return rows[inverse] + self.first_rows[self.rank]

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """See `remap`."""
        return self.remap(features)

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """No-op: ids are sent as they are."""
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """No-op: the lookup of rows updates the counters."""
        return features

    def evict(self) -> None:
        """No-op: new ids get new rows at once, so TorchRec has no rows to reset."""

    def output_size(self) -> int:
        """Return the number of rows on all ranks."""
        return self.first_rows[-1]

    def input_size(self) -> int:
        """Return the number of ids, used for static tables only; owners of ids are not found by range."""
        return self.first_rows[-1]

    def buckets(self) -> int:
        """Return one bucket for each rank; TorchRec checks the split over ranks with it."""
        return len(self.first_rows) - 1

    def validate_state(self) -> None:
        """No-op: TorchRec saves none of its state."""

    def open_slots(self) -> torch.Tensor:
        """Return the number of empty places on this rank, int64 []."""
        if self.dynamic is None:
            return torch.tensor(0)
        return torch.tensor(self.dynamic.places.ids.numel() - self.dynamic.places.taken)

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> Remapping:
        """Return this module, which is that of a rank already."""
        return self


class ManagedTables(ShardedEmbeddingCollection):
    """Sharded tables of a model, some of which are dynamic.

    dynamic: the specs of these, by their names.
    """

    def __init__(self, dynamic: Mapping[str, DynamicSpec], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The collisions exchange the ids.
        self._has_uninitialized_input_dist = False
        self.shares: dict[str, DynamicTable] = {}
        remappings, kernels = {}, []
        for kernel, name, weights, state in self._local_tables():
            if name in dynamic:
                share = DynamicTable(dynamic[name], self._env.rank, self._env.world_size, weights, state)
                self.shares[name] = share
                kernels.append(kernel)
            shards = self.module_sharding_plan[name].sharding_spec.shards
            first_rows = [shard.shard_offsets[0] for shard in shards]
            first_rows.append(self._table_name_to_config[name].num_embeddings)
            remappings[name] = Remapping(first_rows, self._env.rank, self.shares.get(name), weights.device)
        self.unknown = UnknownRows([*self.shares.values()], kernels, self._env.process_group)
        configs = [*self._table_name_to_config.values()]
        collection = ManagedCollisionCollection(remappings, configs, need_preprocess=False)
        # Hidden from torch: a submodule would be part of the model's state, but checkpoints store its
        # contents by ids.
        self.__dict__["collisions"] = OwnedCollisions(
            collection,
            self.module_sharding_plan,
            self._env,
            self._device,
            [*self._sharding_type_to_sharding.values()],
        )
        # Number of times that shares have moved between the ranks.
        self.generation = 0

    def _local_tables(self) -> Iterator[tuple[Any, str, torch.Tensor, torch.Tensor]]:
        """Yield this rank's part of each table: the tensors themselves.

        Each is FBGEMM's kernel, name, rows, float32 [n, D], and optimizer state, float32 [n].
        """
        for lookup in self._lookups:
            for group in lookup._emb_modules:
                kernel = group.emb_module
                states = kernel.split_optimizer_states()
                names = [table.name for table in group.config.embedding_tables]
                for name, rows, (state,) in zip(names, kernel.split_embedding_weights(), states, strict=True):
                    yield kernel, name, rows.detach(), state.detach()

    def train(self, mode: bool = True) -> ManagedTables:
        """Insert new ids if `mode` is true."""
        self.collisions.train(mode)
        return super().train(mode)

    def dynamic_rows(self) -> dict[str, DynamicTable]:
        """Return this rank's share of each dynamic table, by its name."""
        return self.shares

    def on_growth(self) -> None:
        """Note that shares have moved between the ranks: pending requests are to be sent again."""
        self.generation += 1

    def end_step(self) -> None:
        """Combine the updates of the unknown rows from all ranks. Collective: every rank."""
        self.unknown.settle()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the ranks that own them. Collective: every rank."""
        ctx.generation = self.generation
        features = of_tables(features, self._table_name_to_config)
        sent: Awaitable[Awaitable[KJTList]] = self.collisions.input_dist(ctx, features)
        return sent

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Return the rows of ids; the backward updates the tables. Collective: every rank."""
        if ctx.generation != self.generation:
            # A pipeline sent these ids before a table grew, to the ranks that owned them then. This is so on
            # all ranks.
            features = ctx.sharding_contexts.pop().features_before_input_dist
            input = self.input_dist(ctx, features).wait().wait()
        self.unknown.share()
        with torch.no_grad():
            rows = self.collisions.compute(ctx, input)
        return super().compute_and_output_dist(ctx, rows)


class ManagedTablesSharder(EmbeddingCollectionSharder):
    """Sharder that makes `ManagedTables` from the tables of a model. dynamic: specs of the dynamic tables."""

    def __init__(self, fused_params: dict[str, Any], dynamic: Mapping[str, DynamicSpec]) -> None:
        super().__init__(fused_params=fused_params)
        self.dynamic = dynamic

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ManagedTables:
        """Return the sharded tables. Collective: every rank."""
        return ManagedTables(
            self.dynamic, module, params, env, self.fused_params, device, module_fqn=module_fqn
        )

    @property
    def sharded_module_type(self) -> type[ManagedTables]:
        """Type of the tables that `shard` returns."""
        return ManagedTables
