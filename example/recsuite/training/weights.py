"""Weights of a model: initial rows, projections of vectors, checks of their size, and a copy of the best.

Dense tensors are given by name, tables as `EmbeddingTable`. A row is the contents of its table times the
model's `row_scale`.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from typing_extensions import override

from recsuite.config.config import Config
from recsuite.config.sections import ModelConfig, TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.baselines import fit_biases
from recsuite.datasets.schema import ITEM, UNKNOWN_ROW, USER
from recsuite.datasets.source import PREPARATION_DEADLINE
from recsuite.errors import UserError, require
from recsuite.models.layers import VectorProjection
from recsuite.runtime.host import free_memory, shown_bytes
from recsuite.runtime.process import RuntimeContext, all_gather_object, once_per_node
from recsuite.sharding.table import EmbeddingTable, RowSlots, largest_of
from recsuite.training.callbacks import CheckpointerProtocol, Epoch, Step
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel, has_epochs_left

# Limit of the numbers of a row or of the dense part. Trained ones stay below 100; a diverged training exceeds
# this within a few steps, and long before any number is infinite.
LARGEST_WEIGHT = 1e6
# The largest share of free memory for a copy of all weights.
SHARE_OF_FREE = 0.5
# Exponent below which the row scale is moved into the tables, by the bytes of a number: far from both limits
# of float32, and from the largest float16.
SMALLEST_EXPONENT = {4: -32, 2: -4}
# Key of the copies of the dense part, which no table has as its name.
DENSE = ""
# Optimizer state of the dense part; it must be finite, and may be large.
OPTIMIZER_SLOTS = ("exp_avg", "exp_avg_sq", "step")

# Ratings of the training up to which rows begin with biases, see `bias_rows`.
MOST_FOR_BIASES = 50_000

# Function that makes initial rows of tables, see `Training.shard`.
InitialRows = Callable[[Columns, ModelConfig, int], Mapping[str, np.ndarray]]


def fill_initial_rows(
    make: InitialRows, train_state: ShardedModel, columns: Columns, config: Config, context: RuntimeContext
) -> None:
    """Replace initial rows by those of a function, which is called on rank 0. Collective: every rank.

    Raises:
        UserError: from the function, when its rows fit no table, and when a table is dynamic.
    """
    widths = train_state.model.module.recommender.widths
    sizes = {table.name: table.rows for table in columns.tables if table.rows}
    # No row is wider than its table.
    flags = dataclasses.replace(config.model, embedding_dim=min(widths.values()))
    initial: dict[str, torch.Tensor] = {}

    def shapes() -> dict[str, tuple[int, ...]]:
        for name, rows in make(columns, flags, config.runtime.seed).items():
            initial[name] = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
            shape = [*initial[name].shape]
            require(
                len(shape) == 2 and shape[0] == sizes.get(name) and shape[1] <= widths[name],
                f"initial_rows must return all rows of a table, got {shape} for {name}; the tables are "
                f"{', '.join(f'{table} [{size}, {widths[table]}]' for table, size in sizes.items())}",
            )
            require(
                bool(initial[name].isfinite().all()),
                f"initial_rows must return finite numbers, got others for {name}",
            )
        return {name: (*rows.shape,) for name, rows in initial.items()}

    # Only the shapes: each rank would get as many copies of gathered rows as there are ranks.
    everyones = once_per_node(
        context,
        lambda: shapes() if context.rank == 0 else {},
        PREPARATION_DEADLINE,
        "make the initial rows of the tables",
        "give --preset none" if config.model.initial_rows == "random" else "give --initial_rows random",
    )
    for name, shape in everyones[0].items():
        rows = initial.get(name, torch.empty(shape)).to(context.device)
        dist.broadcast(rows, src=0)
        train_state.tables[name].set_rows(rows)


def begins_with_biases(train_state: ShardedModel, columns: Columns, config: Config) -> bool:
    """Return True if the initial rows of a training have the biases of few ratings, see `bias_rows`."""
    return (
        config.model.preset == "rating"
        and config.model.initial_rows == "random"
        and not config.stream.stream
        and not config.checkpoint.warm_start
        and not columns.is_part
        # The model says so: number 0 of its rows of users and items is a bias.
        and getattr(train_state.head, "has_biases", False)
        and 0 < columns.num_train <= MOST_FOR_BIASES
        and not any(table.feature.is_dynamic for table in columns.tables)
    )


def bias_rows(columns: Columns, model: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Return number 0 of the rows of users and items: the biases of the training ratings, float32 [rows, 1].

    With few ratings an epoch from drawn rows may never become as good. See `InitialRows`.
    """
    own = columns.events("train")
    sizes = columns.num_users, columns.num_items
    (fitted,) = fit_biases(own[USER], own[ITEM], own["label"], sizes, [len(own)])
    by_table = {}
    for entity, biases in ((USER, fitted.user), (ITEM, fitted.item)):
        name = columns.schema.name_of(entity)
        rows = next(table.rows for table in columns.tables if table.name == name)
        by_table[name] = np.zeros((rows, 1), np.float32)
        own_rows = columns.column(f"{name}_features")["features"][:, columns.place_of(entity)]
        by_table[name][own_rows, 0] = biases
        # Several items have the unknown row.
        by_table[name][UNKNOWN_ROW] = 0
    return by_table


# Events that weigh as much as the rows of other items in `project_rows`, and weight of a zero projection.
PRIOR_EVENTS, RIDGE = 10.0, 1.0


@torch.no_grad()
def project_rows(train_state: ShardedModel, columns: Columns) -> None:
    """Move what vectors tell from the rows of users and items to the projections of vectors. Collective.

    A row learns all that is known of an item, so a projection beside it learns nothing, and an item without a
    row has nothing. So the rows are regressed on the vectors. The result is added to the projection and
    subtracted from the rows: predictions for known items stay as they are, to rounding, and new ones get
    those of their vectors (after Agarwal and Chen, "Regression-based Latent Factor Models", 2009). Rows of
    dynamic tables stay.
    """
    for projection in train_state.head.modules():
        if not isinstance(projection, VectorProjection):
            continue
        table = train_state.tables[columns.schema.name_of(projection.entity)]
        if not table.tensors:
            continue
        weight = projection.linear.weight
        vectors, counts = (part.to(weight.device) for part in _vectors_of_rows(columns, projection))
        rows = table.export().get("weight", weight.new_zeros(0, len(weight)))
        mine = vectors[table.first : table.first + len(rows)]
        shares = (counts / (counts + PRIOR_EVENTS)).unsqueeze(1)
        weighed = (shares * vectors).t()
        scaled = rows.double() * train_state.row_scale
        products = weighed[:, table.first : table.first + len(rows)] @ scaled
        dist.all_reduce(products)
        ridge = RIDGE * torch.eye(len(products), dtype=torch.float64, device=weight.device)
        change = torch.linalg.solve(weighed @ vectors + ridge, products)
        table.subtract((mine @ change / train_state.row_scale).float())
        weight.add_(change.t().float())


def _vectors_of_rows(columns: Columns, projection: VectorProjection) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the vector of each row of a table, float64 [rows, numbers], and its training events, [rows]."""
    name = columns.schema.name_of(projection.entity)
    records, rows = columns.column(f"{name}_features"), next(t.rows for t in columns.tables if t.name == name)
    # Among the dense numbers of all entities those of users come first.
    before = sum(feature.width for feature in columns.numbers if feature.entity == USER)
    first = projection.columns[0] - (before if projection.entity == ITEM else 0)
    own = records["features"][:, columns.place_of(projection.entity)]
    # In 64 bits: vectors may be nearly collinear, and ranks add up in another order.
    vectors, counts = np.zeros((rows, len(projection.columns))), np.zeros(rows)
    vectors[own] = np.nan_to_num(records["numbers"][:, first : first + len(projection.columns)])
    counts[own] = columns.column("item_counts") if projection.entity == ITEM else columns.user_counts()
    # Several items have the unknown row.
    vectors[UNKNOWN_ROW], counts[UNKNOWN_ROW] = 0, 0
    return torch.from_numpy(vectors), torch.from_numpy(counts)


def describe_invalid_weights(
    dense: Mapping[str, torch.Tensor], tables: Mapping[str, EmbeddingTable], changed: bool = False
) -> str:
    """Describe a value on this rank that no trained model has; "" if there is none. Not collective.

    changed: check only the rows of tables that changed, see `EmbeddingTable.clear_changes`.
    """
    scale = next(float(value) for name, value in dense.items() if name.endswith("row_scale"))
    for name, table in tables.items():
        for slot, largest in table.largest(changed).items():
            # A rule of the tables may have any names for its state, which must be finite, and may be large.
            is_state = slot != "weight"
            largest, limit = (largest, math.inf) if is_state else (scale * largest, LARGEST_WEIGHT)
            # A comparison with NaN is false.
            if not largest < limit:
                optimizer = "the optimizer of " if is_state else ""
                return f"{optimizer}the table {name} ({table.prefix}.{name}.{slot}) has {largest:.3g}"
    for name, value in dense.items():
        largest = largest_of(value.detach()) if value.is_floating_point() else 0.0
        is_state = name.rpartition(".")[2] in OPTIMIZER_SLOTS
        if not largest < (math.inf if is_state else LARGEST_WEIGHT):
            return f"{'the optimizer of ' if is_state else ''}the dense part ({name}) has {largest:.3g}"
    return ""


def apply_row_scale(train_state: ShardedModel) -> bool:
    """Move a small row scale into the tables; return True if it was moved.

    By a power of two, so that no bit of a row changes, except for a float16 near zero. Without it the scale
    of a stream would become zero. Not collective; the scale is the same on every rank.
    """
    mantissa, exponent = math.frexp(float(train_state.row_scale))
    if exponent > SMALLEST_EXPONENT[train_state.model.module.recommender.weight_bytes]:
        return False
    for table in train_state.tables.values():
        table.multiply(2.0**exponent)
    train_state.row_scale.fill_(mantissa)
    return True


class InMemoryBest(CheckpointerProtocol):
    """Copy of the weights of the best epoch, in memory if they fit, for a training without checkpoints.

    Collective: every rank.
    """

    # Its copies are needed for the test.
    phase = "evaluation"
    start = Progress()
    saves_changes = False

    def __init__(self, config: TrainingConfig, context: RuntimeContext) -> None:
        self.run = uuid.uuid4().hex
        self._config = config
        self._context = context
        # Copies of the dense part and of each table; None before the first, and {} if they do not fit.
        self._copies: dict[str, RowSlots] | None = None
        self._best: Progress | None = None

    @property
    def dense(self) -> Mapping[str, torch.Tensor]:
        """Return the dense weights, without optimizer state."""
        return self._dense

    @override
    def begin(self, train_state: ShardedModel, progress: Progress) -> None:
        state = train_state.model.state_dict()
        # The tensors themselves.
        self._dense = {name: value for name, value in state.items() if not isinstance(value, ShardedTensor)}
        self._tables = train_state.tables
        if progress.is_best:
            self._keep(progress)

    def request_stop(self) -> None:
        """Refuse to end with a checkpoint."""
        raise UserError("A stop on request requires checkpoints; give --dump, --inc_dump or --resume.")

    def on_step(self, step: Step) -> None:
        """No-op: the best weights are those at the end of an epoch."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Copy the weights if they are the best so far, and are not going to be tested at once."""
        progress = epoch.progress
        # The weights of the last epoch are still there for the test, so they need no copy.
        if progress.is_best and progress.best is not None and has_epochs_left(progress, self._config):
            self._keep(progress)

    def _keep(self, progress: Progress) -> None:
        if self._copies is None and not self._fit():
            self._copies = {}
        if self._copies != {}:
            # Freed first, so that there is never a second copy.
            self._copies = None
            self._copies = {name: table.copy() for name, table in self._tables.items()}
            self._copies[DENSE] = {name: value.to("cpu", copy=True) for name, value in self._dense.items()}
            self._best = progress

    def _fit(self) -> bool:
        size = sum(value.nbytes for value in self._dense.values())
        size += sum(table.nbytes for table in self._tables.values())
        mine = size, free_memory()
        # The same answer on all ranks: a copy of only some shards would be useless.
        sizes, rooms = zip(*all_gather_object(lambda: mine), strict=True)
        # The ranks of a machine share its memory, and each makes a copy.
        needed, free = max(sizes) * self._context.local_world_size, min(rooms)
        if needed > free * SHARE_OF_FREE:
            self._context.say(
                f"best weights not kept: needs {shown_bytes(needed)} per machine, {shown_bytes(free)} free; "
                "the test uses the last weights; --dump keeps the best on disk"
            )
        return needed <= free * SHARE_OF_FREE

    @override
    def restore_best(self, train_state: ShardedModel) -> Progress | None:
        if self._copies and self._best:
            for name, value in self._dense.items():
                value.copy_(self._copies[DENSE][name])
            for name, table in self._tables.items():
                table.restore(self._copies[name])
        return self._best


# A script may have optimizers of its own, which read no flag.
SMALLER_RATES = "lower them, with --lr and --dense_lr where the script reads these"


def check_finite(losses: np.ndarray, step: int, rates: str) -> None:
    """Refuse to continue after a loss that is infinite or NaN.

    losses: those of the steps after `step`; rates: the learning rates in words.

    Raises:
        UserError: when one is infinite or NaN.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise UserError(
            f"The loss is {losses[bad[0]]} at step {step + bad[0] + 1}: the training diverged with {rates}; "
            f"{SMALLER_RATES}."
        )


def check_no_invalid_weights(faults: Sequence[str], step: int, rates: str) -> None:
    """Refuse a model in which any rank found a fault, see `describe_invalid_weights`.

    faults: those of all ranks; rates: the learning rates in words.

    Raises:
        UserError: names the first fault.
    """
    fault = next(filter(None, faults), None)
    if fault:
        raise UserError(
            f"After step {step:,} {fault}, and a trained model has only finite numbers and no weight beyond "
            f"{LARGEST_WEIGHT:,.0f}: the training diverged with {rates}; {SMALLER_RATES}. "
            "Earlier checkpoints are unchanged."
        )
