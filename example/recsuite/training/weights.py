"""Weights of a model: checks that they are finite and within limits, and a copy of the best.

Tensors are given by name, as in `checkpoint.tensors_of` or a model's `state_dict`. A row is the contents of
the table times the model's `row_scale`.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsuite.config.sections import OptimizerConfig, TrainingConfig
from recsuite.errors import UserError
from recsuite.runtime.host import free_memory
from recsuite.runtime.process import RuntimeContext, all_gather_object
from recsuite.sharding.dynamic import DynamicTable, LiveRows
from recsuite.sharding.dynamic_ranks import dynamic_rows
from recsuite.training.callbacks import CheckpointerProtocol, Epoch, Step
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel, has_epochs_left

# Limit of the numbers of a row or of the dense part. Trained ones stay below 100; a diverged training exceeds
# this within a few steps, and long before any number is infinite.
LARGEST_WEIGHT = 1e6
# The largest share of free memory for a copy of all weights.
SHARE_OF_FREE = 0.5
# Exponent below which the row scale is moved into the tables: far from both limits of float32.
SMALLEST_EXPONENT = -32
# Optimizer state of the dense part; it must be finite, and may be large.
OPTIMIZER_SLOTS = ("exp_avg", "exp_avg_sq", "step")


def unsound(
    tensors: Mapping[str, torch.Tensor | ShardedTensor],
    shares: Mapping[str, DynamicTable],
    rows: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """Describe a value on this rank that no trained model has; "" if there is none. Not collective.

    shares: of dynamic tables; rows: table to the rows of this rank's shards to check, and then only the
    changed rows of dynamic tables; None for all rows of all tables.
    """
    scale = next(float(value) for name, value in tensors.items() if name.endswith("row_scale"))
    for name, value in tensors.items():
        slot = name.rpartition(".")[2]
        for part in local_parts(name, value, rows):
            if part.numel() == 0 or not part.is_floating_point():
                continue
            # One pass over the numbers for minimum and maximum; aminmax passes a NaN on.
            largest = max(map(abs, torch.stack(part.aminmax()).tolist()))
            if slot == "weight" and isinstance(value, ShardedTensor):
                largest *= scale
            # A rule of the tables may have any names for its state.
            is_state = slot != "weight" if isinstance(value, ShardedTensor) else slot in OPTIMIZER_SLOTS
            limit = float("inf") if is_state else LARGEST_WEIGHT
            # A comparison with NaN is false.
            if not largest < limit:
                return f"{_in_words(name, is_state, value)} has {largest:.3g}"
    for name, share in shares.items():
        largest, kept = share.largest(changed=rows is not None).values()
        if not scale * largest < LARGEST_WEIGHT:
            return f"the table {name} (tables.{name}.weight) has {scale * largest:.3g}"
        if not kept < float("inf"):
            return f"the optimizer of the table {name} (tables.{name}.momentum1) has {kept:.3g}"
    return ""


def _in_words(name: str, is_state: bool, value: torch.Tensor | ShardedTensor) -> str:
    """Describe a tensor in words, with its name."""
    is_table = isinstance(value, ShardedTensor)
    whole = f"the table {name.split('.')[-2]}" if is_table else "the dense part"
    return f"{'the optimizer of ' if is_state else ''}{whole} ({name})"


def local_parts(
    name: str, value: torch.Tensor | ShardedTensor, rows: Mapping[str, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Return this rank's parts of a tensor; only some rows of its table if they are given."""
    if not isinstance(value, ShardedTensor):
        return [value.detach()]
    shards = [shard.tensor.detach() for shard in value.local_shards()]
    return shards if rows is None else [shard[rows[name.split(".")[-2]]] for shard in shards]


def fold_scale(train_state: ShardedModel) -> bool:
    """Move a small row scale into the tables; return True if it was moved.

    By a power of two, so that no bit of a row changes. Without it the scale of a stream would become zero.
    Not collective; the scale is the same on every rank.
    """
    mantissa, exponent = math.frexp(float(train_state.row_scale))
    if exponent > SMALLEST_EXPONENT:
        return False
    for name, value in train_state.model.state_dict().items():
        if isinstance(value, ShardedTensor) and name.endswith(".weight"):
            for part in local_parts(name, value):
                part.mul_(2.0**exponent)
    train_state.row_scale.fill_(mantissa)
    return True


class BestInMemory(CheckpointerProtocol):
    """Copy of the weights of the best epoch, in memory if they fit, for a training without checkpoints.

    Collective: every rank.
    """

    # Its copies are needed for the test.
    phase = "evaluation"

    def __init__(self, config: TrainingConfig, context: RuntimeContext) -> None:
        self.run = uuid.uuid4().hex
        self._config = config
        self._context = context
        self._copies: list[torch.Tensor] | None = None
        self._best: Progress | None = None

    @property
    def start(self) -> Progress:
        """Return the beginning."""
        return Progress()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor | ShardedTensor]:
        """Return the weights, without optimizer state."""
        return self._tensors

    @property
    def changed(self) -> None:
        """See `CheckpointerProtocol`; None, because all rows may have changed."""

    def begin(self, train_state: ShardedModel) -> None:
        """See `CheckpointerProtocol`."""
        self._shares = dynamic_rows(train_state.model)
        state = train_state.model.state_dict()
        dynamic = {name for name in state if name.endswith(".weight") and name.split(".")[-2] in self._shares}
        # Dynamic tables are copied by id, because a place may get another id.
        self._tensors = {name: value for name, value in state.items() if name not in dynamic}
        # The tensors themselves.
        self._held = [part for name, value in self._tensors.items() for part in local_parts(name, value)]
        self._held += [rows.unknown[0] for rows in self._shares.values() if rows.unknown is not None]
        self._rows: dict[str, LiveRows] = {}

    def on_step(self, step: Step) -> None:
        """No-op: the best weights are those at the end of an epoch."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Copy the weights if they are the best so far, and are not going to be tested at once."""
        progress = epoch.progress
        # The weights of the last epoch are still there for the test, so they need no copy.
        if progress.is_best and progress.best is not None and has_epochs_left(progress, self._config):
            self._keep(progress)

    def _keep(self, progress: Progress) -> None:
        if self._copies is None:
            # In the memory of the host: another device has less to spare.
            self._copies = (
                [torch.empty_like(part, device="cpu") for part in self._held] if self._fit() else []
            )
        if self._copies:
            for copy, part in zip(self._copies, self._held, strict=True):
                copy.copy_(part)
            self._rows = {name: rows.live() for name, rows in self._shares.items()}
            self._best = progress

    def _fit(self) -> bool:
        size = sum(part.numel() * part.element_size() for part in self._held)
        size += sum(rows.weights.nbytes for rows in self._shares.values())
        mine = size, free_memory()
        # The same answer on all ranks: a copy of only some shards would be useless.
        sizes, rooms = zip(*all_gather_object(lambda: mine), strict=True)
        # The ranks of a machine share its memory, and each makes a copy.
        needed, free = max(sizes) * self._context.local_world_size, min(rooms)
        if needed > free * SHARE_OF_FREE:
            self._context.say(
                f"the weights of the best epoch are not kept, but those of the last one: a copy takes "
                f"{needed / 2**20:,.0f} MiB on a machine, and {free / 2**20:,.0f} MiB are free; --dump keeps "
                "the best on disk"
            )
        return needed <= free * SHARE_OF_FREE

    def restore_best(self, train_state: ShardedModel) -> Progress | None:
        """See `CheckpointerProtocol`."""
        if self._copies and self._best:
            for copy, part in zip(self._copies, self._held, strict=True):
                part.copy_(copy)
            for name, rows in self._shares.items():
                rows.clear()
                rows.put(self._rows[name])
        return self._best


def check_finite(losses: np.ndarray, step: int, config: OptimizerConfig) -> None:
    """Refuse to continue after a loss that is infinite or NaN; losses: those of the steps after `step`.

    Raises:
        UserError: when one is infinite or NaN.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise UserError(
            f"The loss is {losses[bad[0]]} at step {step + bad[0] + 1}: the training diverged with --lr "
            f"{config.lr} --dense_lr {config.dense_lr}; give smaller ones."
        )


def check_sound(faults: Sequence[str], step: int, config: OptimizerConfig) -> None:
    """Refuse a model in which any rank found a fault, see `unsound`; faults: those of all ranks.

    Raises:
        UserError: names the first fault.
    """
    fault = next(filter(None, faults), None)
    if fault:
        raise UserError(
            f"After step {step:,} {fault}, and a trained model has only finite numbers and no weight beyond "
            f"{LARGEST_WEIGHT:,.0f}: the training diverged with --lr {config.lr} --dense_lr "
            f"{config.dense_lr}; give smaller ones. Earlier checkpoints are as they were."
        )
