"""What each rank of a launch runs for `test_ranks.py`: python ranks.py RESULTS DATA GLOBAL_BATCH_SIZE."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example"))

from config import Config
from runtime import RuntimeContext, cleanup_runtime, end_process, init_runtime

EPOCHS = 3


def main() -> None:
    """Evaluate and train in several ways; rank 0 writes what came of it."""
    results, data, global_batch_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    context = init_runtime(Config())
    config = Config(data_path=data, batch_size=global_batch_size // context.world_size, epochs=EPOCHS)
    found = collect(config, context)
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


def collect(config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Metrics of fixed weights for 0 and 2 workers, losses of both loops, and what the pool gave."""
    import sharding
    from columns import open_columns
    from runtime import once_per_node

    once_per_node(context, lambda: open_columns(config), deadline=60)
    columns = open_columns(config)
    found: dict[str, Any] = {"world_size": context.world_size, "metrics": {}, "losses": {}, "tests": {}}
    # Far from the mean, so that the metrics would show a row in the wrong place.
    sharding.INIT_STD, small = 0.4, sharding.INIT_STD
    for num_workers in (0, 2):
        metrics = evaluate_fresh(columns, dataclasses.replace(config, num_workers=num_workers), context)
        found["metrics"][str(num_workers)] = dataclasses.asdict(metrics)
    sharding.INIT_STD = small
    for pipeline in ("plain", "sparse_dist"):
        for num_workers in (0, 1):
            chosen = dataclasses.replace(config, pipeline=pipeline, num_workers=num_workers)
            losses, metrics = train_all(columns, chosen, context)
            found["losses"][f"{pipeline} {num_workers}"] = losses
            found["tests"][f"{pipeline} {num_workers}"] = dataclasses.asdict(metrics)
    found["pipelined_modules"] = count_pipelined_modules(columns, config, context)
    return found


def build(columns: Any, config: Config, context: RuntimeContext) -> tuple[Any, Any]:
    """Learner and feed, as `train` makes them."""
    from dataloader import EpochSampler, RatingBatches, build_dataloader
    from train import Feed, build_learner

    sampler = EpochSampler(RatingBatches(columns, config, context.rank, context.world_size))
    feed = Feed(build_dataloader(sampler.dataset, sampler, config))
    return build_learner(columns, config, context), feed


def evaluate_fresh(columns: Any, config: Config, context: RuntimeContext) -> Any:
    """Metrics of the initial weights."""
    from train import evaluate

    learner, feed = build(columns, config, context)
    with feed.loader:
        return evaluate(learner.model, feed, 0, columns.ratings("test"), context)


def train_all(columns: Any, config: Config, context: RuntimeContext) -> tuple[list[list[float]], Any]:
    """The loss of every step of every epoch, and the metrics of the trained model."""
    from train import Position, evaluate, train_epoch

    learner, feed = build(columns, config, context)
    losses = []
    with feed.loader:
        for epoch in range(config.epochs):
            position = Position(0, epoch)
            found = train_epoch(learner, feed, position, config, context, lambda position, loss: None)
            losses.append(found.tolist())
            metrics = evaluate(learner.model, feed, epoch, columns.ratings("test"), context)
    return losses, metrics


def count_pipelined_modules(columns: Any, config: Config, context: RuntimeContext) -> int:
    """How many modules TorchRec's pipeline takes over."""
    from train import PlainSteps, make_pipeline

    config = dataclasses.replace(config, pipeline="sparse_dist")
    learner, feed = build(columns, config, context)
    pipeline = make_pipeline(learner.model, learner.optimizer, config, context)
    assert not isinstance(pipeline, PlainSteps)
    # To the end, for it exchanges the ids of batches ahead.
    batches = feed.batches("test", epoch=0)
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(batches)
    return len(pipeline._pipelined_modules)


if __name__ == "__main__":
    main()
    end_process(0)
