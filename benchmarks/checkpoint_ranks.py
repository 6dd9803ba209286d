"""What each rank of a launch of benchmarks/checkpoint.py or benchmarks/dynamic_delta.py runs:

    checkpoint_ranks.py PART SETTINGS RESULTS

PART is one of `PARTS`; SETTINGS is a JSON file, see `Settings`; rank 0 writes what was found to RESULTS. What
is measured is what users run: the checkpointer, its tracker, and the loading of a state.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from checkpoint_reading import measure_loads
from checkpoint_setup import BLOCK_STEPS, DIM, Settings, training_steps
from checkpoint_writing import measure_dumps

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime


def main() -> None:
    """Measure what the command line names; rank 0 writes it."""
    part, settings_file, results = sys.argv[1:]
    settings = Settings(**json.loads(Path(settings_file).read_text()))
    config = Config.of(
        data_path=settings.ratings_folder,
        save_dir=str(Path(settings.folder) / "dumps"),
        batch_size=4096,
        history=0,
        embedding_dim=DIM,
        inc_dump=True,
        dump_every=1,
        # The benchmark removes the checkpoint before the newest itself, so that it can time that apart.
        keep=2,
    )
    context = init_runtime(config)
    found = PARTS[part](settings, config, context)
    cleanup_runtime()
    if context.rank == 0:
        Path(results).write_text(json.dumps(found))


def measure_tracking(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Seconds of a training step with a tracker and without, in blocks that take turns in one process."""
    from recsuite.sharding.plan import embedding_tables
    from recsuite.sharding.table import track_changes
    from recsuite.training.state import build_train_state

    columns = open_columns(config)
    state = build_train_state(columns, config, context)
    # With and without in one process: two processes may differ by more than the tracking costs.
    track_changes(state.model, embedding_tables(state.model))
    tracked = [module for module in state.model.modules() if getattr(module, "post_lookup_tracker_fn", None)]
    trackers = [module.post_lookup_tracker_fn for module in tracked]
    found: dict[str, list[float]] = {"with": [], "without": []}
    with training_steps(state, columns, config, context) as step:
        for number in range(-1, settings.blocks):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                for module, tracker in zip(tracked, trackers, strict=True):
                    module.post_lookup_tracker_fn = tracker if name == "with" else None
                seconds = statistics.median(step() for _ in range(BLOCK_STEPS))
                if number >= 0:
                    found[name].append(seconds)
    return {**found, "batch size": config.loader.batch_size}


def measure_dynamic(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Deltas of dynamic tables beside those of a static one, for benchmarks/dynamic_delta.py."""
    from dynamic_delta_rounds import measure_deltas

    return measure_deltas(settings, config, context)


PARTS = {
    "dumps": measure_dumps,
    "loads": measure_loads,
    "tracking": measure_tracking,
    "dynamic deltas": measure_dynamic,
}


if __name__ == "__main__":
    main()
