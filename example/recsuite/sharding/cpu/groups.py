"""The tables of this rank as they lie in FBGEMM's kernels, and how their rows learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from recsuite.sharding.dynamic.rows import DynamicRows
from recsuite.sharding.table_rules import TableRule


@dataclass(frozen=True)
class TableGroup:
    """Tables of this rank that lie in one kernel: those with the same kind of sharding.

    kernel: FBGEMM's, which holds their rows and the learning rate; state: what their optimizer keeps of all
    rows, by name, float32 [rows] or [rows, D]; first_key: the key of its first row; tables: their names,
    each with its first row; rule: the optimizer.
    """

    kernel: Any
    state: Mapping[str, torch.Tensor]
    first_key: int
    tables: tuple[tuple[str, int], ...]
    rule: TableRule

    @property
    def group(self) -> TableGroup:
        """Itself: where its rows lie."""
        return self

    @property
    def weights(self) -> torch.Tensor:
        """All rows, float32 [rows, D]."""
        # FBGEMM keeps the tables of a group one after the other in one array; all of ours are equally wide.
        return self.kernel.weights_host.detach().view(-1, self.kernel.max_D)

    def learn(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Have distinct rows, int64 [n], learn from gradients, float32 [n, D], which it uses up."""
        kept = {name: held.index_select(0, rows) for name, held in self.state.items()}
        rate, number = self.kernel.learning_rate_tensor, int(self.kernel.iter_cpu.add_(1))
        shown = {name: part if part.dim() > 1 else part.unsqueeze(1) for name, part in kept.items()}
        steps = self.rule.step(gradients, shown, rate, number)
        for name, part in kept.items():
            self.state[name].index_copy_(0, rows, part)
        # With another alpha than 1, index_add_ adds row by row, in ten times the time.
        self.weights.index_add_(0, rows, steps)


def make_state(rule: TableRule, module: Any) -> dict[str, torch.Tensor]:
    """Return the state of the tables of a TorchRec module of FBGEMM's kernel, all zero, by name.

    TorchRec's optimizer of the module gets it by table, so checkpoints see it: the kernel would make that of
    row-wise Adagrad and of Adagrad alone on a CPU. Not collective.
    """
    optimizer, state = module.fused_optimizer, {}
    weights = {name.split(".")[-2]: weight for name, weight in optimizer.params.items()}
    sizes = [weight.local_shards()[0].tensor.size(0) for weight in weights.values()]
    for name, is_of_row in rule.slots.items():
        whole = [sum(sizes), module.emb_module.max_D]
        state[name] = torch.zeros(whole[:1] if is_of_row else whole)
        for (table, weight), held in zip(weights.items(), state[name].split(sizes), strict=True):
            optimizer.state[weight][f"{table}.{name}"] = _sharded_as(weight, held)
    return state


def _sharded_as(weight: ShardedTensor, held: torch.Tensor) -> ShardedTensor:
    """What this rank holds of a tensor that is split by rows as the rows of a table are."""

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

    share: which id has which row; group: that in which the rows lie; first_row: of the share in it.
    """

    share: DynamicRows
    group: TableGroup
    first_row: int

    def rows_of(self, ids: torch.Tensor, is_training: bool) -> torch.Tensor:
        """The rows of ids in the group, int64 [n]; NO_ROW for those without one.

        ids: int64 [n], distinct, ascending; the unknown's first, on the rank that has its row. In training
        new ones are taken in.
        """
        has_unknown = self.share.unknown is not None
        known = ids[1:] if has_unknown else ids
        rows = self.share.take_in(known) if is_training else self.share.find(known)
        if has_unknown:
            rows = torch.cat([rows.new_full((1,), len(self.share.weights) - 1), rows])
        return torch.where(rows >= 0, rows + self.first_row, rows) if self.first_row else rows


Part = TableGroup | DynamicPart
