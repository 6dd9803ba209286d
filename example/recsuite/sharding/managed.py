"""Dynamic tables with TorchRec's own step: its managed collisions turn ids into rows before its lookup.

TorchRec's `ShardedManagedCollisionEmbeddingCollection` is a module around sharded tables. This is the same as
one of them, so that tensors keep their names, and a checkpoint is the same whichever step trained:

    features -> collisions.input_dist -> ids at the ranks that own them     by bucket, TorchRec's all-to-all
    -> collisions.compute -> rows of this rank's shards                     `dynamic.py`
    -> TorchRec's lookup, its exchange of rows, and in the backward FBGEMM's fused optimizer

All tables are split by rows, the static ones too: TorchRec's managed collisions know no other sharding.

TorchRec's lookup finds rows on the rank that is asked, so an id without a row looks at a copy of the row of
the unknown there, from which FBGEMM's optimizer takes a step of its own. What it took tells the gradient, and
with the sum of all gradients the step is taken again: the same as on one rank, but for rounding.
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

from recsuite.sharding.dynamic import EMPTY, NO_ROW, DynamicRows, DynamicSpec
from recsuite.sharding.recommender import of_tables


class OwnedCollisions(ShardedManagedCollisionCollection):
    """TorchRec's collection of managed collisions, with owners that the tables name."""

    def _create_input_dists(self, input_feature_names: list[str]) -> None:
        super()._create_input_dists(input_feature_names)
        # One: all tables are split by rows.
        (sharding,), (features,) = self._embedding_shardings, self._sharding_features
        tables = [self._managed_collision_modules[self._feature_to_table[feature]] for feature in features]
        self._input_dists[:] = [OwnersDist(sharding._pg, [table.owner_of for table in tables], self._device)]


class OwnersDist(RwSparseFeaturesDist):
    """Sends each id to its owner. owners: for each feature, ids int64 [n] -> ranks int64 [n]."""

    def __init__(
        self, group: Any, owners: Sequence[Callable[[torch.Tensor], torch.Tensor]], device: torch.device
    ) -> None:
        # The owners themselves are sorted into as many ranges as there are ranks, of one number each.
        super().__init__(group, len(owners), [group.size()] * len(owners), device=device, is_sequence=True)
        self.owners = owners

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Ids at their owners. Collective: every rank."""
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
    """The unknown's rows of dynamic tables on this rank. kernels: FBGEMM's of each, which learns."""

    def __init__(self, shares: Sequence[DynamicRows], kernels: Sequence[Any], group: Any) -> None:
        self.shares, self.kernels, self.group = shares, kernels, group
        self._before: torch.Tensor | None = None
        for share in shares:
            # Learned like any other, and zero to begin with.
            share.weights[-1].zero_()

    @property
    def _is_alone(self) -> bool:
        return not self.shares or dist.get_world_size(self.group) == 1

    @torch.no_grad()
    def share(self) -> None:
        """Give every rank the rows of rank 0, which may have loaded them. Collective: every rank."""
        if self._is_alone:
            return
        held = self._held()
        dist.broadcast(held, group_src=0, group=self.group)
        self._put(held)
        self._before = held

    @torch.no_grad()
    def settle(self) -> None:
        """Learn from what all ranks have learned since `share`. Collective: every rank."""
        if self._is_alone or self._before is None:
            return
        before, after = self._before, self._held()
        rates = torch.stack([kernel.learning_rate_tensor for kernel in self.kernels]).view(-1, 1)
        eps = self.kernels[0].optimizer_args.eps
        gradients = (before - after)[:, :-1] * ((after[:, -1:].sqrt() + eps) / rates.to(after))
        # Where nobody learns, because the rate is zero, there is nothing to learn from.
        gradients.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        dist.all_reduce(gradients, group=self.group)
        state = before[:, -1:] + gradients.square().mean(dim=1, keepdim=True)
        step = gradients * (rates.to(after) / (state.sqrt() + eps))
        self._put(torch.cat([before[:, :-1] - step, state], dim=1))
        self._before = None

    def _held(self) -> torch.Tensor:
        """Rows with the optimizer's number of each, float32 [tables, D + 1]."""
        return torch.stack([torch.cat([share.weights[-1], share.state[-1:]]) for share in self.shares])

    def _put(self, held: torch.Tensor) -> None:
        for share, row in zip(self.shares, held, strict=True):
            share.weights[-1].copy_(row[:-1])
            share.state[-1].copy_(row[-1])


class Remapping(ManagedCollisionModule):
    """One table: the share of a dynamic one, or a static one, whose ids are its rows.

    first_rows: of the ranks, and then the number of all rows; share: None of a static table.
    """

    def __init__(
        self, first_rows: list[int], rank: int, share: DynamicRows | None, device: torch.device
    ) -> None:
        super().__init__(device, first_rows)
        self.first_rows, self.rank, self.dynamic = first_rows, rank, share
        # Made once: each step would copy them to the device and wait.
        self._ends = torch.tensor(first_rows[1:-1], dtype=torch.int64, device=device)

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank of each id, int64 [n]."""
        if self.dynamic is None:
            return torch.bucketize(ids, self._ends, right=True)
        owners = self.dynamic.placement.owner_of(ids)
        # The unknown has its row on rank 0.
        return owners.masked_fill_(ids == EMPTY, 0)

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Ids as rows of the whole table. In training new ids are taken in."""
        return {
            name: JaggedTensor(values=self._rows_of(jagged.values()), lengths=jagged.lengths())
            for name, jagged in features.items()
        }

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        if self.dynamic is None:
            return ids
        # All that the ranks want in a step, at once: who comes in must not depend on the ranks.
        distinct, inverse = ids.unique(return_inverse=True)
        is_known = distinct != EMPTY
        rows = torch.full_like(distinct, NO_ROW)
        known = distinct[is_known]
        rows[is_known] = self.dynamic.take_in(known) if self.training else self.dynamic.find(known)
        # Those without a row look at the last one, which every rank keeps like that of the unknown.
        rows = torch.where(rows == NO_ROW, len(self.dynamic.weights) - 1, rows)
        return rows[inverse] + self.first_rows[self.rank]

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """The same as `remap`."""
        return self.remap(features)

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Nothing: ids travel as they are."""
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Nothing: who is seen is counted where rows are found."""
        return features

    def evict(self) -> None:
        """Nothing for TorchRec to reset: whoever comes in has a new row at once."""

    def output_size(self) -> int:
        """Rows on all ranks."""
        return self.first_rows[-1]

    def input_size(self) -> int:
        """Only of static tables; the owners of ids are not found by their range."""
        return self.first_rows[-1]

    def buckets(self) -> int:
        """One for each rank, by which TorchRec checks what is split over them."""
        return len(self.first_rows) - 1

    def validate_state(self) -> None:
        """Nothing: no state of it is saved by TorchRec."""

    def open_slots(self) -> torch.Tensor:
        """Places of this rank without an id, int64 []."""
        if self.dynamic is None:
            return torch.tensor(0)
        return torch.tensor(self.dynamic.places.ids.numel() - self.dynamic.places.taken)

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> Remapping:
        """Itself, which is that of a rank already."""
        return self


class ManagedTables(ShardedEmbeddingCollection):
    """The sharded tables of a model, of which some take ids in.

    dynamic: these, by their names.
    """

    def __init__(self, dynamic: Mapping[str, DynamicSpec], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The exchange of ids is that of the collisions.
        self._has_uninitialized_input_dist = False
        self.shares: dict[str, DynamicRows] = {}
        remappings, kernels = {}, []
        for kernel, name, weights, state in self._local_tables():
            if name in dynamic:
                share = DynamicRows(dynamic[name], self._env.rank, self._env.world_size, weights, state)
                self.shares[name] = share
                kernels.append(kernel)
            shards = self.module_sharding_plan[name].sharding_spec.shards
            first_rows = [shard.shard_offsets[0] for shard in shards]
            first_rows.append(self._table_name_to_config[name].num_embeddings)
            remappings[name] = Remapping(first_rows, self._env.rank, self.shares.get(name), weights.device)
        self.unknown = UnknownRows([*self.shares.values()], kernels, self._env.process_group)
        configs = [*self._table_name_to_config.values()]
        collection = ManagedCollisionCollection(remappings, configs, need_preprocess=False)
        # Behind the back of torch: as a submodule it would be part of the model's state, and what it holds is
        # in checkpoints by ids.
        self.__dict__["collisions"] = OwnedCollisions(
            collection,
            self.module_sharding_plan,
            self._env,
            self._device,
            [*self._sharding_type_to_sharding.values()],
        )
        # How often shares have moved between the ranks.
        self.generation = 0

    def _local_tables(self) -> Iterator[tuple[Any, str, torch.Tensor, torch.Tensor]]:
        """FBGEMM's kernel, name, rows, float32 [n, D], and optimizer's numbers, float32 [n], of what this
        rank has of each table; the tensors themselves.
        """
        for lookup in self._lookups:
            for group in lookup._emb_modules:
                kernel = group.emb_module
                states = kernel.split_optimizer_states()
                names = [table.name for table in group.config.embedding_tables]
                for name, rows, (state,) in zip(names, kernel.split_embedding_weights(), states, strict=True):
                    yield kernel, name, rows.detach(), state.detach()

    def train(self, mode: bool = True) -> ManagedTables:
        """Take new ids in, or not."""
        self.collisions.train(mode)
        return super().train(mode)

    def dynamic_rows(self) -> dict[str, DynamicRows]:
        """This rank's share of each dynamic table, by its name."""
        return self.shares

    def on_growth(self) -> None:
        """Shares have moved between the ranks: what was asked for before is to be asked for again."""
        self.generation += 1

    def end_step(self) -> None:
        """Bring together what the ranks learned of the unknown. Collective: every rank."""
        self.unknown.settle()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the ranks that own them. Collective: every rank."""
        ctx.generation = self.generation
        features = of_tables(features, self._table_name_to_config)
        sent: Awaitable[Awaitable[KJTList]] = self.collisions.input_dist(ctx, features)
        return sent

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """The rows of ids; in the backward the tables learn. Collective: every rank."""
        if ctx.generation != self.generation:
            # A pipeline sent them before a table grew, to the ranks that had them then. It is so on all.
            features = ctx.sharding_contexts.pop().features_before_input_dist
            input = self.input_dist(ctx, features).wait().wait()
        self.unknown.share()
        with torch.no_grad():
            rows = self.collisions.compute(ctx, input)
        return super().compute_and_output_dist(ctx, rows)


class ManagedTablesSharder(EmbeddingCollectionSharder):
    """Makes `ManagedTables` of the tables of a model. dynamic: those that take ids in."""

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
        """The sharded tables. Collective: every rank."""
        return ManagedTables(
            self.dynamic, module, params, env, self.fused_params, device, module_fqn=module_fqn
        )

    @property
    def sharded_module_type(self) -> type[ManagedTables]:
        """What `shard` makes."""
        return ManagedTables
