"""The training model: tables, the model that computes with their rows, and the loss of its output.

This is the part of the model that TorchRec knows. The computation itself is in `models/`, which serving
shares. Shapes: B events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsuite.config.config import Config
from recsuite.config.sections import ModelConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError, require
from recsuite.models.heads import TwoSided, require_shape
from recsuite.models.inputs import LookedUp, Members
from recsuite.models.rows import FeatureRows, JoinedRows, with_row_scale
from recsuite.models.tasks import TASKS, ModelData, ModelMaker, widths_of
from recsuite.runtime.process import profiler_range

# A user's metric: a function of predictions and labels, both numpy float32 [n].
Metric = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Share:
    """Share of a rank of the global batch: the events from `first` on, of the `batch_size` of all ranks."""

    first: int
    batch_size: int
    world_size: int


class _Gather(torch.autograd.Function):
    """Rows of all ranks, rank after rank, [W * B, ...] of [B, ...]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, world_size: int) -> torch.Tensor:
        """Collective: every rank, with rows of the same shape."""
        everyones = rows.new_empty(world_size * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(everyones, rows.contiguous())
        return everyones

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Collective: every rank."""
        # The losses of all ranks depend on the rows. The sum is over ranks and not their mean, as for rows of
        # a table: the mean is taken where gradients of weights are added up.
        total = gradient.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()], None


@dataclass
class ModelInput(Pipelineable):
    """Batch of a training: B events, as tensors.

    The main process makes it from the plain arrays of a worker. `to` moves all of it, so that TorchRec's
    pipelines can copy it ahead of time.

    Args:
        features: The rows to look up.
        labels: float32 [B].
        weights: float32 [B], 0 for padding.
        numbers: Dense features, float32 [B, numbers].
        seen_bits: Bits of the negatives that the user had, uint8 [B, bytes], see `datasets.batching.Batch`.
        members: Items of its histories, V in all.
        more_labels: Of the labels after the first, float32 [B, L - 1]; 0 where an event lacks one.
        more_weights: Their weights, float32 [B, L - 1]; 0 where an event lacks the label.
        share: Share of the global batch; None for all of it.
        counts: Of lists that are padded to one length, the number of values of each event, int32 [B] by the
            name of the feature.
        joined: Names of those whose values come one list after the other, with all unused slots at the end.

    Example:
        class MyLoss(nn.Module):
            def forward(self, predictions: torch.Tensor, batch: rs.ModelInput) -> torch.Tensor:
                return (batch.weights * (predictions - batch.labels) ** 2).mean()
    """

    features: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    numbers: torch.Tensor
    seen_bits: torch.Tensor
    members: Members
    more_labels: torch.Tensor
    more_weights: torch.Tensor
    share: Share | None = None
    counts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()

    def to(self, device: torch.device, non_blocking: bool = False) -> ModelInput:
        """Return a copy on a device.

        Args:
            device: The device.
            non_blocking: Do not wait for the copy; only for pinned tensors.

        Returns:
            The copy.
        """

        def there(part: Any) -> Any:
            if isinstance(part, tuple):
                return type(part)(*map(there, part))
            return part.to(device, non_blocking=non_blocking) if hasattr(part, "to") else part

        return ModelInput(*map(there, vars(self).values()))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until a stream has used it.

        Args:
            stream: The stream.
        """
        # A pipeline copies on a stream of its own. Without this the allocator would reuse the memory as soon
        # as Python drops this tensor, while kernels may still have to read it.
        for part in vars(self).values():
            for tensor in part if isinstance(part, tuple) else (part,):
                if hasattr(tensor, "record_stream"):
                    tensor.record_stream(stream)

    @property
    def first(self) -> int:
        """Number of the first event in the global batch."""
        return self.share.first if self.share else 0

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all events of the global batch, in order. Collective: every rank.

        For losses over events of several ranks: gradients return to the ranks of the rows.

        Args:
            rows: Of the events here, float32 [B, ...], or integers.

        Returns:
            float32 [G, ...] for the G events of the global batch, or integers.
        """
        if self.share is None:
            return rows
        everyones: torch.Tensor = _Gather.apply(rows, self.share.world_size)
        return everyones[: self.share.batch_size]

    @property
    def history_labels(self) -> torch.Tensor:
        """Labels of the items of all histories, float32 [V]; of padded ones 0 in slots of empty histories."""
        return self.members.labels

    @property
    def all_labels(self) -> torch.Tensor:
        """Values of all L labels, float32 [B, L]."""
        return torch.cat([self.labels.unsqueeze(1), self.more_labels], dim=1)

    @property
    def all_weights(self) -> torch.Tensor:
        """Weights of all L labels, float32 [B, L]."""
        return torch.cat([self.weights.unsqueeze(1), self.more_weights], dim=1)


class LossAndOutput(NamedTuple):
    """The loss with its graph, and the output of the model; the pair that TorchRec's pipelines expect."""

    loss: torch.Tensor | None
    output: Any


class Recommender(nn.Module):
    """Tables, which TorchRec shards over the ranks, and the model that computes with their rows.

    The model and the loss are modules of their own: TorchRec's pipeline traces the code around the tables
    with torch.fx, which does not trace into them. embedding_dim: of the tables for which the model names no
    other; lists: the features with lists; weight_bytes: of a number in a row.
    """

    def __init__(
        self,
        num_rows: Mapping[str, int],
        embedding_dim: int,
        head: nn.Module,
        lists: Collection[str] = (),
        weight_bytes: int = 4,
    ) -> None:
        super().__init__()
        self.widths, self.weight_bytes = widths_of(head, num_rows, embedding_dim), weight_bytes
        self.embeddings = make_embeddings(num_rows, self.widths, weight_bytes)
        # Any: a user may have written it, with other methods.
        self.head: Any = with_row_scale(head)
        self.lists = frozenset(lists)
        # The model computes in bf16, see --precision.
        self.is_bf16 = False
        self.compute = _Compute(self)

    def forward(self, batch: ModelInput) -> Any:
        """Return the output of the model. Collective: every rank."""
        # Without lookup and output exchange, which have names of their own.
        with profiler_range("input exchange"):
            looked_up = [tables(batch.features) for tables in self.embeddings]
        return self.compute(looked_up, batch)

    def rows_of(
        self,
        looked_up: Sequence[Mapping[str, LookedUp]],
        counts: Mapping[str, torch.Tensor],
        joined: frozenset[str] = frozenset(),
    ) -> FeatureRows:
        """Return looked-up rows in the form that the model takes.

        looked_up: of the tables of each width; counts, joined: see `ModelInput`.
        """
        found = looked_up[0] if len(looked_up) == 1 else JoinedRows(looked_up)
        return FeatureRows(found, self.head.row_scale, self.lists, counts, joined)


class _Compute(nn.Module):
    """Call of the model, in a module of its own: torch.fx cannot trace an object as an argument."""

    def __init__(self, recommender: Recommender) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a submodule.
        self._recommender = (recommender,)

    def forward(self, looked_up: Sequence[Mapping[str, LookedUp]], batch: ModelInput) -> Any:
        """Return the output of the model."""
        (recommender,) = self._recommender
        device = batch.labels.device.type
        # Not a region that is switched off: it would end one of the script.
        with (
            torch.autocast(device, torch.bfloat16, cache_enabled=False)
            if recommender.is_bf16
            else contextlib.nullcontext()
        ):
            output = recommender.head(recommender.rows_of(looked_up, batch.counts, batch.joined), batch)
        if recommender.is_bf16:
            # The loss and its gradient are fp32.
            output = tree_map(lambda part: part.float() if isinstance(part, torch.Tensor) else part, output)
        # With labels, [B], a loss may broadcast it to [B, B], and train something else without an error.
        if isinstance(output, torch.Tensor) and output.shape[1:] == (1,):
            require_shape(output, 1, "forward must return one number for each event", "add .squeeze(1)")
        return output


class TrainableModel(nn.Module):
    """The model with its loss, in the form that TorchRec's pipelines train: batch -> (loss, output).

    loss: called with the output of the model and the batch, returns the weighted mean over its B rows,
    float32 []; None where the loop has its own, or nothing is trained; metrics: a user's own.
    """

    def __init__(self, recommender: Recommender, loss: nn.Module | None) -> None:
        super().__init__()
        self.recommender = recommender
        # Inside the model, because TorchRec's pipelines call the model with a batch, sum the first value that
        # it returns and run the backward from there.
        self.loss = loss
        self.metrics: Mapping[str, Metric] = {}

    def forward(self, batch: ModelInput) -> LossAndOutput:
        """Return the loss over this rank's B rows, only in training, and the output."""
        output = self.recommender(batch)
        if not self.training:
            return LossAndOutput(None, output)
        if self.loss is None:
            raise ValueError(
                "A batch is trained on without a loss. Fix: give training.shard a loss, or compute your own "
                "from model.output(batch)."
            )
        return LossAndOutput(self.loss(output, batch), output)


def make_embeddings(
    num_rows: Mapping[str, int], widths: Mapping[str, int], weight_bytes: int = 4
) -> nn.ModuleList:
    """Return the tables on the meta device: only their shards are allocated, when they are sharded.

    There is a collection for each width, because the tables of a TorchRec collection have the same width.
    num_rows, widths: of each table, by its name; weight_bytes: of a number in a row.
    """
    tables = [
        EmbeddingConfig(
            name=torchrec_name(name),
            embedding_dim=widths[name],
            num_embeddings=rows,
            data_type=DataType.FP16 if weight_bytes == 2 else DataType.FP32,
            # Drawn later, from the seed. TorchRec's own draw would touch all memory of tables that fill
            # slowly.
            init_fn=_as_it_is,
            # One feature for each table. With two, checkpoints and the tracking of rows would need another
            # mapping from features to tables.
            feature_names=[name],
        )
        for name, rows in num_rows.items()
    ]
    return nn.ModuleList(
        EmbeddingCollection(
            tables=[table for table in tables if table.embedding_dim == width], device=torch.device("meta")
        )
        for width in sorted({*widths.values()})
    )


def torchrec_name(table: str) -> str:
    """Return the name of a table in TorchRec, whose modules cannot have those of attributes of PyTorch."""
    # No feature has a colon in its name. A checkpoint has the names of features.
    return f"{table}:" if hasattr(nn.ModuleDict(), table) else table


def table_of(key: str) -> str:
    """Return the table with a name in TorchRec, or of the weights of one. The inverse of `torchrec_name`."""
    return key.removesuffix(".weight").rpartition(".")[2].removesuffix(":")


def of_tables(features: KeyedJaggedTensor, tables: Collection[str]) -> KeyedJaggedTensor:
    """Return the features of a batch that belong to some tables, in the order of the batch."""
    names = features.keys()
    if len(names) == len(tables):
        return features
    return features.permute([index for index, name in enumerate(names) if name in tables])


def _as_it_is(table: torch.Tensor) -> None:
    """Leave a table unchanged."""


def make_head(columns: Columns, config: ModelConfig, history: int, maker: ModelMaker) -> nn.Module:
    """Return the model that computes with the rows of a data set.

    history: the largest number of items in a history; maker: makes the model.
    """
    task = TASKS[config.task]
    features = [*(table.feature for table in columns.tables), *columns.numbers]
    data = ModelData(columns.schema, features, columns.mean_label, history)
    head = maker(data, config)
    wanted = TwoSided if task.evaluation == "ranks" else nn.Module
    if not isinstance(head, wanted):
        raise UserError(
            f"--task {config.task} requires a {wanted.__name__}, got {head!r}. Fix: return one from the "
            "function that makes the model, or give another --task."
        )
    # Training and metrics of a ranking use the vectors of both sides.
    require(
        task.evaluation != "ranks" or type(head).forward is not TwoSided.forward,
        f"--task {config.task} requires a forward that returns the vectors of both sides, [B, 2, D]; write "
        "return torch.stack([self.user_vectors(rows, batch), self.item_vectors(rows, batch)], 1)",
    )
    return head


def make_model(
    columns: Columns,
    config: Config,
    head: nn.Module,
    num_rows: Mapping[str, int],
    loss: nn.Module | None = None,
) -> TrainableModel:
    """Return the model of a data set with its loss; its tables are not allocated yet.

    num_rows: of each table, by its name; loss: see `TrainableModel`.
    """
    lists = [table.name for table in columns.tables if table.feature.multi]
    dim, weight_bytes = config.model.embedding_dim, config.tables.weight_bytes
    recommender = Recommender(num_rows, dim, head, lists, weight_bytes)
    recommender.is_bf16 = config.training.precision == "bf16"
    return TrainableModel(recommender, loss)
