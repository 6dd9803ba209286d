"""Lookup and update of tables alone, beside a copy on the same device: a section of benchmarks/gpu.py.

Of FBGEMM's kernels with the optimizer of the example, and of the example's sharded tables, which also
exchange ids and look a row up once however many ask for it.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_device import (
    BYTES_COPIED,
    Emit,
    HeadStart,
    Moments,
    Settings,
    copy_rate,
    release,
    rows_drawn_on_device,
    run_section,
)
from gpu_training import two_tables
from train_models import columns_of, make_columns
from train_team import MLP_DIMS

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, init_runtime

if TYPE_CHECKING:
    import torch

DIMS = (64, 128)
# Ids of a lookup: none twice, so that it is known what has to move. Several sets, or caches would have them.
IDS, SETS, ROUNDS = 2**22, 4, 10
ROWS = 10_000_000
WARM_UP_ROUNDS = 3


def measure(settings: Settings, emit: Emit) -> None:
    """Bytes a second that lookups and updates have to move, and of a copy, for each dimension."""
    context = init_runtime(Config())
    for dim in settings.small_or(DIMS[:1], DIMS):
        copied = copy_rate(context.device, settings.small_or(2**24, BYTES_COPIED))
        release(context.device)
        about = {"dim": dim, "copy bytes a second": copied}
        emit({**about, **measure_kernels(dim, context, settings)})
        release(context.device)
        emit({**about, **measure_sharded(dim, context, settings)})
        release(context.device)


def measure_kernels(dim: int, context: RuntimeContext, settings: Settings) -> dict[str, Any]:
    """FBGEMM's own, with the settings that TorchRec gives them for the example."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    device = context.device
    rows, number = settings.small_or((20_000, 2**10), (ROWS, IDS))
    is_cuda = device.type == "cuda"
    place = EmbeddingLocation.DEVICE if is_cuda else EmbeddingLocation.HOST
    table = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(rows, dim, place, ComputeDevice.CUDA if is_cuda else ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        pooling_mode=PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.FATAL,
        device=device,
    )
    for weights in table.split_embedding_weights():
        weights.normal_(std=0.025)
    ids = [torch.randperm(rows, device=device)[:number].contiguous() for _ in range(SETS)]
    offsets = torch.arange(number + 1, device=device)
    gradient = torch.randn(number, dim, device=device)
    lookups, updates = [], []
    head_start = HeadStart(device)
    for round_number in range(-WARM_UP_ROUNDS, ROUNDS):
        moments = Moments(device)
        head_start()
        moments.mark()
        found = table(ids[round_number % SETS], offsets)
        moments.mark()
        found.backward(gradient)
        moments.mark()
        # Asked for in each round: nothing of the next one is to be in this one's figures.
        lookup, update = moments.seconds()
        if round_number >= 0:
            lookups.append(lookup)
            updates.append(update)
    row = 4 * dim
    return {
        "of": "kernels",
        "rows": rows,
        "ids": number,
        "lookup": {
            # Each row read and written for who asked, and its id.
            "bytes": number * (2 * row + 8),
            "seconds": statistics.median(lookups),
        },
        "update": {
            # The gradient and the row read, the row written, and its optimizer's number read and written.
            "bytes": number * (3 * row + 2 * 4 + 8),
            "seconds": statistics.median(updates),
        },
    }


def measure_sharded(dim: int, context: RuntimeContext, settings: Settings) -> dict[str, Any]:
    """The example's, as its model calls them."""
    from recsuite.sharding.plan import build_model
    from recsuite.sharding.table_rules import RowWiseAdagrad

    rows, number = settings.small_or((20_000, 2**10), (ROWS, IDS // 4))
    model = two_tables(dim, MLP_DIMS, number, SETS * number)
    config = model.config.replaced(batch_size=number)
    folder = Path(settings.folder) / f"columns-{dim}"
    folder.mkdir()
    make_columns(folder, rows, rows // 10, model.num_ratings, model)
    columns = columns_of(folder, model)
    with rows_drawn_on_device():
        built = build_model(columns, config, context, RowWiseAdagrad(config.optimizer.lr))
    # DistributedModelParallel wraps the model.
    (tables,) = built.module.recommender.embeddings
    batches = _features(columns, config, context)
    distinct = statistics.fmean(
        sum(part.unique().numel() for part in batch.values().split(number)) for batch in batches
    )
    whole = []
    head_start = HeadStart(context.device)
    for round_number in range(-WARM_UP_ROUNDS, ROUNDS):
        moments = Moments(context.device)
        head_start()
        moments.mark()
        _look_up_and_update(tables, batches[round_number % SETS])
        moments.mark()
        if round_number >= 0:
            whole += moments.seconds()
        else:
            moments.seconds()
    row = 4 * dim
    return {
        "of": "the example's tables",
        "rows": sum(table.rows for table in columns.tables),
        "ids": 2 * number,
        "distinct": distinct,
        # A row read once and written for each that asked; a gradient read for each, the row read and written.
        "whole": {
            "bytes": 2 * number * (2 * row + 8) + distinct * (3 * row + 2 * 4),
            "seconds": statistics.median(whole),
        },
    }


def _features(columns: Any, config: Config, context: RuntimeContext) -> list[Any]:
    """Batches of ids on the device."""
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.training.steps import InputPipeline

    dataset = EventBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        found = [batch.features.to(context.device) for batch in InputPipeline(loader).batches("train", 0)]
    assert len(found) == SETS
    return found


def _look_up_and_update(tables: torch.nn.Module, features: Any) -> None:
    import torch

    found = [each.values() for each in tables(features).values()]
    # Of the rows themselves: a gradient as large, without arithmetic of its own.
    torch.autograd.backward(found, [each.detach() for each in found])


if __name__ == "__main__":
    run_section({"lookup": measure})
