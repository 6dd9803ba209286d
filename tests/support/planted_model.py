"""Values of a model of `killed_ranks.py` as a function of the step, so that a checkpoint can be checked.

Row r was changed last at the step before or at it for which step + r is a multiple of 3, so that a delta
holds a third of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsuite.checkpoint.checkpointer import Checkpointer
from recsuite.checkpoint.writer import Tensors
from recsuite.sharding.table import StaticTable


def tables_of(tensors: Tensors) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    """Number, table, first row and tensor of every shard of a table's slots that this rank holds."""
    for number, (name, value) in enumerate(sorted(tensors.items())):
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                yield number, name.split(".")[1], shard.metadata.shard_offsets[0], shard.tensor.detach()


def local_parts(value: torch.Tensor | ShardedTensor) -> list[torch.Tensor]:
    """This rank's parts of a tensor."""
    if not isinstance(value, ShardedTensor):
        return [value.detach()]
    return [shard.tensor.detach() for shard in value.local_shards()]


def rows_at(number: int, first: int, tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Expected values of a shard after a step."""
    rows = first + torch.arange(tensor.size(0))
    changed = step - (step + rows) % 3
    columns = torch.arange(tensor[0].numel())
    return _numbers(number, changed[:, None], rows[:, None] * 31 + columns * 7).reshape(tensor.shape)


def dense_at(tensor: torch.Tensor, number: int, step: int) -> torch.Tensor:
    """Expected values of a tensor of the dense part after a step."""
    return _numbers(number, torch.tensor(step), torch.arange(tensor.numel())).reshape(tensor.shape)


def _numbers(number: int, step: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    # With the largest row_scale no row is beyond what a trained model may have.
    return ((step * 1009 + place + number * 131) % 997).float()


def write_step(tensors: Tensors, step: int) -> None:
    """Make the model what it is after a step; rows that the step does not change are written as they are."""
    for number, _, first, tensor in tables_of(tensors):
        tensor.copy_(rows_at(number, first, tensor, step))
    for number, (_, value) in enumerate(sorted(tensors.items())):
        if not isinstance(value, ShardedTensor):
            value.detach().copy_(dense_at(value, number, step))


def mark_step(checkpointer: Checkpointer, tensors: Tensors, step: int) -> None:
    """Tell the tracker which rows a step changed."""
    for _, table, first, tensor in tables_of(tensors):
        changed = (step + first + torch.arange(tensor.size(0))) % 3 == 0
        share = checkpointer.writer.tables[table]
        assert isinstance(share, StaticTable)
        share.mark(changed.nonzero().view(-1))


def differing(tensors: Tensors, step: int) -> list[str]:
    """Names of tensors that differ from the expected values after a step, bit for bit."""
    shards = [
        f"{table} from row {first}"
        for number, table, first, tensor in tables_of(tensors)
        if not torch.equal(tensor, rows_at(number, first, tensor, step))
    ]
    dense = [
        name
        for number, (name, value) in enumerate(sorted(tensors.items()))
        if not isinstance(value, ShardedTensor) and not torch.equal(value, dense_at(value, number, step))
    ]
    return shards + dense
