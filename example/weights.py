"""What a model has learned, as numbers: whether they can be those of a trained one.

Tensors are given by name, as `checkpoint.tensors_of` or a model's `state_dict` has them. A row of a table is
what the table holds times the model's `row_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from config import Config
from errors import UserError

# Of the numbers of a row or of the dense part. Trained ones stay below 100; a diverged training passes this
# within steps, and long before anything is infinite.
LARGEST_WEIGHT = 1e6
# What optimizers keep is to be finite, and may be large.
OPTIMIZER_SLOTS = ("momentum1", "exp_avg", "exp_avg_sq", "step")


def unsound(
    tensors: Mapping[str, torch.Tensor | ShardedTensor], rows: Mapping[str, torch.Tensor] | None = None
) -> str:
    """What this rank holds that no trained model does, in words; nothing where all is well. Not collective.

    rows: table to the rows of this rank's shards that are looked at; all of all tables where it is None.
    """
    scale = next(float(value) for name, value in tensors.items() if name.endswith("row_scale"))
    for name, value in tensors.items():
        slot = name.rpartition(".")[2]
        for part in local_parts(name, value, rows):
            if part.numel() == 0 or not part.is_floating_point():
                continue
            largest = max(map(abs, torch.stack(part.aminmax()).tolist()))
            if slot == "weight" and isinstance(value, ShardedTensor):
                largest *= scale
            limit = float("inf") if slot in OPTIMIZER_SLOTS else LARGEST_WEIGHT
            # A comparison with NaN is false.
            if not largest < limit:
                return f"{name} has {largest:.3g}"
    return ""


def local_parts(
    name: str, value: torch.Tensor | ShardedTensor, rows: Mapping[str, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """What this rank holds of a tensor, of some rows of its table where they are given."""
    if not isinstance(value, ShardedTensor):
        return [value.detach()]
    shards = [shard.tensor.detach() for shard in value.local_shards()]
    return shards if rows is None else [shard[rows[name.split(".")[-2]]] for shard in shards]


def check_sound(faults: Sequence[str], step: int, config: Config) -> None:
    """Refuse a model of which any rank found a fault, see `unsound`; `faults` are those of all ranks.

    Raises:
        UserError: names the first fault.
    """
    fault = next(filter(None, faults), None)
    if fault:
        raise UserError(
            f"After step {step:,} {fault}, and no weight of a trained model is beyond {LARGEST_WEIGHT:,.0f}: "
            f"the training diverged with --lr {config.lr} --dense_lr {config.dense_lr}; give smaller ones. "
            "What was dumped before is as it was."
        )
