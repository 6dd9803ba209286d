"""Program of each rank of a launch in `test_streams.py`.

python stream_ranks.py RESULTS DATA GLOBAL_BATCH_SIZE

A stream of each kind of tables is trained to its end, and once more after it was ended by SIGTERM and
resumed; one rank alone also with workers. Rank 0 writes the windows of all of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, end_process, init_runtime
from tests.support.trainings import digests

# A size that admits, evicts and lets rows expire by the time of events.
DYNAMIC: dict[str, Any] = {"vocabulary": "dynamic", "capacity": "64", "ttl": "200d", "max_load_factor": 0.0}
TABLES: dict[str, dict[str, Any]] = {"static": {}, "dynamic": DYNAMIC}
# The last step of a window: ranks agree on the end one step later, within a window of two.
END_AT = 8


def main() -> None:
    """Train all streams; rank 0 writes what came of them."""
    results, data, global_batch_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    context = init_runtime(Config())
    config = Config.of(
        **{
            "data_path": data,
            "batch_size": global_batch_size,
            "stream": True,
            "duplicates": "keep",
            "window": "60d",
        },
        **{"history": 5, "embedding_dim": 8, "mlp_dims": (16,), "inc_dump": True, "keep": 100},
    )
    found: dict[str, Any] = {"world_size": context.world_size}
    for name, flags in TABLES.items():
        chosen = config.replaced(**flags)
        folder = results.parent / f"{context.world_size} {name}"
        found[name] = stream(folder, chosen, context)
        ended = stream(folder.with_name(f"{folder.name} ended"), chosen, context, END_AT)
        resumed = stream(folder.with_name(f"{folder.name} ended"), chosen.replaced(resume=True), context)
        found[f"{name} resumed"] = {**resumed, "status": ended["status"], "before": ended["windows"]}
        if context.world_size == 1:
            workers = chosen.replaced(num_workers=2)
            found[f"{name} workers"] = stream(folder.with_name("workers"), workers, context)
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


def stream(folder: Path, config: Config, context: RuntimeContext, end_at: int = -1) -> dict[str, Any]:
    """The windows of a stream, and what it learned in the end; end_at: after this step SIGTERM comes."""
    from example import make_loss, make_model
    from recsuite.checkpoint.checkpointer import checkpointing
    from recsuite.checkpoint.stream_state import reopen_data
    from recsuite.checkpoint.writer import named_tensors
    from recsuite.training.callbacks import Callback, Epoch, Step
    from recsuite.training.loop import Training

    windows: list[dict[str, Any]] = []

    class Noting(Callback):
        def on_step(self, step: Step) -> None:
            if step.progress.step == end_at and context.rank == context.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_epoch(self, epoch: Epoch) -> None:
            of_window = ("num_events", "first_time", "last_time", "validation", "overall", "biases")
            values = {name: getattr(epoch, name) for name in of_window}
            values["validation"] = epoch.validation.values
            windows.append({"number": epoch.number, "losses": epoch.losses.tolist(), **values})

    config = config.replaced(save_dir=str(folder))
    found: dict[str, Any] = {"status": 0, "windows": windows}
    try:
        with (
            reopen_data(config, context, trains=True) as data,
            checkpointing(data.columns, config, context) as checkpointer,
        ):
            run = Training(data, config, context, checkpointer, [Noting()]).run(make_model, make_loss)
            found["test"], found["num_train"] = run.test.values, run.columns.num_train
            found["tensors"] = digests(named_tensors(checkpointer.writer.tables, checkpointer.dense), context)
    except SystemExit as ended:
        found["status"] = int(str(ended.code))
    return found


if __name__ == "__main__":
    main()
    end_process(0)
