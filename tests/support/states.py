"""Program of each rank of the launch in `states_folder`: python states.py DATA FOLDER.

It trains with deltas, then loads every checkpoint and predicts the test ratings with the
sharded model, of usual and of dynamic tables. FOLDER gets "dumps" and "predictions.npz" of each, with an
array for each step, float32 [test ratings].
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime

# 8 steps an epoch: a full checkpoint after steps 0, 8 and 16, a delta at every other even step.
FLAGS = Config.of(epochs=2, batch_size=2000, history=4, inc_dump=True, dump=True, dump_every=2, keep=9)
# Dynamic tables with too few places, so that ids come, leave and come back.
TIGHT: dict[str, Any] = {
    "vocabulary": "dynamic",
    "capacity": "user=160,movie=512,history=512",
    "max_load_factor": 0.0,
    "admission_threshold": 2,
    "ttl": "6",
}


def main() -> None:
    """Train, predict with every checkpoint; rank 0 writes the predictions."""
    import numpy as np

    from example import train

    data, folder = sys.argv[1], Path(sys.argv[2])
    context = init_runtime(FLAGS)
    for name, flags in (("vocabulary", {}), ("dynamic", TIGHT)):
        config = FLAGS.replaced(data_path=data, save_dir=str(folder / name / "dumps"), **flags)
        train(config, context)
        found = predict_all(config, context)
        if context.rank == 0:
            np.savez(folder / name / "predictions.npz", **found)
    cleanup_runtime()


def predict_all(config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Step to the predictions of the model after it."""
    import torch
    import torch.distributed as dist

    from example import make_model
    from recsuite.checkpoint.chain import chain_at
    from recsuite.checkpoint.folder import deltas_in, full_checkpoints_in, step_of
    from recsuite.checkpoint.restore import restore
    from recsuite.datasets.opening import open_data
    from recsuite.training.state import build_train_state
    from recsuite.training.steps import BatchFeed

    found = {}
    with open_data(config, context) as data, torch.no_grad():
        train_state, feed = (
            build_train_state(data.columns, config, context, make_model),
            BatchFeed(data.loader),
        )
        train_state.model.eval()
        for folder in (
            *full_checkpoints_in(Path(config.checkpoint.save_dir)),
            *deltas_in(Path(config.checkpoint.save_dir)),
        ):
            restore(chain_at(folder), train_state, data.columns, context)
            mine = torch.stack(
                [train_state.model(batch).output.predictions for batch in feed.batches("test", 0)]
            )
            everyones = [torch.empty_like(mine) for _ in range(context.world_size)]
            dist.all_gather(everyones, mine)
            in_order = torch.stack(everyones, dim=1).flatten()[: data.columns.num_test]
            found[str(step_of(folder))] = in_order.numpy()
    return found


if __name__ == "__main__":
    main()
