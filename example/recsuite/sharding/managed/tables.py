"""Dynamic tables with TorchRec's own step: its managed collisions turn ids into rows before its lookup.

TorchRec's `ShardedManagedCollisionEmbeddingCollection` is a module around sharded tables. This is the same as
one of them, so that tensors keep their names, and a checkpoint is the same whoever trained:

    features -> collisions.input_dist -> ids at the ranks that own them     `owners.py`, TorchRec's all-to-all
    -> collisions.compute -> rows of this rank's shards                     `remapping.py`, sharding/dynamic
    -> TorchRec's lookup, its exchange of rows, and in the backward FBGEMM's fused optimizer

All tables are split by rows, the static ones too: TorchRec's managed collisions know no other sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsuite.sharding.dynamic.rows import DynamicRows
from recsuite.sharding.dynamic.spec import DynamicSpec
from recsuite.sharding.managed.owners import OwnedCollisions
from recsuite.sharding.managed.remapping import Remapping
from recsuite.sharding.managed.unknown import UnknownRows
from recsuite.sharding.recommender import of_tables


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
