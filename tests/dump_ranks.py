"""What each rank of a launch runs for `test_dumps.py`: python dump_ranks.py write|read FOLDER DATA.

"write" trains several small models, of each of which it dumps increments and, at the same steps, all of it;
then it trains one that is ended and resumed. "read" loads every state that any launch wrote. Rank 0 writes
what was found: digests of whole tensors, metrics and losses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example"))

from config import Config
from runtime import RuntimeContext, cleanup_runtime, end_process, init_runtime

GLOBAL_BATCH_SIZE = 1200
NUM_STEPS_AFTER = 3
# The last one is dumped while the training goes on.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"seed": 0, "embedding_dim": 32},
    "history": {"seed": 1, "embedding_dim": 8, "history": 5},
    "async": {"seed": 2, "embedding_dim": 12, "async_dump": True},
}


def main() -> None:
    """Write or read."""
    action, folder, data = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    context = init_runtime(Config())
    config = Config(data_path=data, batch_size=GLOBAL_BATCH_SIZE // context.world_size, epochs=2, keep=100)
    if action == "write":
        found = write_all(folder / f"by-{context.world_size}", config, context)
    else:
        found = {path.name: read_all(path, config, context) for path in sorted(folder.glob("by-*"))}
    cleanup_runtime()
    if context.rank == 0:
        (folder / f"{action}-{context.world_size}.json").write_text(json.dumps(found))


def write_all(folder: Path, config: Config, context: RuntimeContext) -> dict[str, Any]:
    found = {
        name: write_case(folder / name, dataclasses.replace(config, **settings), context)
        for name, settings in CASES.items()
    }
    return {"cases": found, "resume": resume(folder / "resume", config, context)}


def write_case(folder: Path, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Dump increments and full dumps at random steps; what the model was at each, and what came after."""
    from columns import open_columns
    from dumps import DumpKeeper
    from manifest import Position
    from save_dir import writing
    from train import build_learner

    schedule = sorted(random.Random(config.seed).sample(range(1, 11), 4))
    columns = open_columns(config)
    learner = build_learner(columns, config, context)
    states = {}
    keepers = []
    for kind in ("inc_dump", "dump"):
        settings: dict[str, Any] = {kind: True, "save_dir": str(folder / kind)}
        chosen = dataclasses.replace(config, **settings)
        if context.rank == 0:
            with writing(folder / kind):
                pass
        keepers.append(DumpKeeper(None, "run", columns, chosen, context))
        keepers[-1].begin(learner)
    increments, full = keepers
    increments._finish()
    position = Position()
    for step in schedule:
        _, position = advance(learner, columns, position, step - position.step, config, context)
        # Its lookups are no changes, and must not be in the next increment.
        metrics = evaluate(learner, columns, config, context)
        increments.dump_increment(position)
        full.dump(position)
        states[step] = {"digests": digests(learner, context), "metrics": metrics, "rows": touched(increments)}
    losses, _ = advance(learner, columns, position, NUM_STEPS_AFTER, config, context)
    full.close()
    return {"states": states, "losses": losses}


def touched(keeper: Any) -> int:
    """Rows marked as changed by the steps since the last increment: none, right after one."""
    return sum(int(marks.sum()) for marks in keeper.touched.marks.values())


def read_all(folder: Path, config: Config, context: RuntimeContext) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in CASES.items():
        chosen = dataclasses.replace(config, **settings)
        found[name] = {
            kind: read_case(folder / name / kind, chosen, context) for kind in ("inc_dump", "dump")
        }
    return found


def read_case(folder: Path, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Load every state of a save_dir, and go on from the newest."""
    from columns import open_columns
    from loading import load_state
    from save_dir import deltas_in, dumps_in, state_at, step_of
    from train import build_learner

    columns = open_columns(config)
    # Other initial weights, so that nothing right is there by chance.
    learner = build_learner(columns, dataclasses.replace(config, seed=7), context)
    states = {}
    # Also backwards and twice: a load depends on nothing that was there before.
    folders = [*dumps_in(folder)[-4:], *deltas_in(folder)]
    for path in (*folders[::-1], folders[-1], folders[-1]):
        position = load_state(state_at(path), learner, columns, context).position
        states[step_of(path)] = {
            "digests": digests(learner, context),
            "metrics": evaluate(learner, columns, config, context),
        }
    losses, _ = advance(learner, columns, position, NUM_STEPS_AFTER, config, context)
    return {"states": states, "losses": losses}


def resume(folder: Path, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """The losses of a training, and of the same one, ended by a SIGTERM to one rank and resumed."""
    whole = train(folder / "whole", config, context, dump=True)
    assert isinstance(whole, list)
    end_at = len(whole) // 2 + 3
    before = train(folder / "ended", config, context, end_at, inc_dump=True, dump_every=4)
    after = train(folder / "ended", config, context, resume=True, num_workers=1)
    return {"whole": whole, "end_at": end_at, "before": before, "after": after}


def train(
    folder: Path, config: Config, context: RuntimeContext, end_at: int = -1, **settings: Any
) -> list[float] | int:
    """Losses of all steps; the exit status where the training is ended at a step."""
    import train as training
    from data import open_data
    from dumps import DumpKeeper, keeping_dumps

    class EndingKeeper(DumpKeeper):
        def after_step(self, position: Any, loss: Any) -> None:
            if position.step == end_at and context.rank == context.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            super().after_step(position, loss)

    config = dataclasses.replace(config, save_dir=str(folder), **settings)
    try:
        with open_data(config, context) as data, keeping_dumps(data.columns, config, context) as keeper:
            keeper.__class__ = EndingKeeper
            run = training.train(data, config, context, keeper)
    except SystemExit as ended:
        return int(str(ended.code))
    return [float(loss) for epoch in run.epochs for loss in epoch.losses]


def feed_of(columns: Any, config: Config, context: RuntimeContext) -> Any:
    from dataloader import EpochSampler, RatingBatches, build_dataloader
    from train import Feed

    dataset = RatingBatches(columns, config, context.rank, context.world_size)
    return Feed(build_dataloader(dataset, EpochSampler(dataset), config))


def evaluate(learner: Any, columns: Any, config: Config, context: RuntimeContext) -> dict[str, float]:
    from train import evaluate

    feed = feed_of(columns, config, context)
    return dataclasses.asdict(evaluate(learner.model, feed, 0, columns.ratings("test"), context))


def advance(
    learner: Any, columns: Any, position: Any, num_steps: int, config: Config, context: RuntimeContext
) -> tuple[list[float], Any]:
    """The losses of some steps from a position on, and the position after them."""
    import torch.distributed as dist

    from manifest import Position
    from train import make_pipeline

    feed = feed_of(columns, config, context)
    pipeline = make_pipeline(learner.model, learner.optimizer, config, context)
    learner.model.train()
    batches = feed.batches("train", position.epoch, position.samples)
    losses = []
    for size in feed.loader.dataset.step_sizes("train", position.samples)[:num_steps]:
        loss = pipeline.progress(batches)[0].detach().clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / context.world_size)
        position = Position(position.step + 1, position.epoch, position.samples + size)
    pipeline.detach()
    return losses, position


def digests(learner: Any, context: RuntimeContext) -> dict[str, str]:
    """Of every whole tensor, whoever holds which part of it. Collective."""
    import numpy as np
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from checkpoint import tensors_of

    mine = {}
    for name, value in tensors_of(learner).items():
        if isinstance(value, ShardedTensor):
            shards = value.local_shards()
            mine[name] = [(shard.metadata.shard_offsets[0], shard.tensor.numpy().copy()) for shard in shards]
        elif context.rank == 0:
            mine[name] = [(0, value.detach().numpy().copy())]
    everyones: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyones, mine)
    found = {}
    for name in sorted({name for parts in everyones for name in parts}):
        parts = sorted(
            (part for parts in everyones for part in parts.get(name, [])), key=lambda part: part[0]
        )
        found[name] = hashlib.sha256(np.concatenate([values for _, values in parts]).tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    main()
    end_process(0)
