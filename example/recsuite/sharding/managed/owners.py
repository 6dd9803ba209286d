"""Ids on their way to the ranks that own them: by bucket, where TorchRec goes by the range of the id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


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
