"""Program of each rank of a launch in `test_storage.py`.

python storage_ranks.py RESULTS DATA FOLDER GLOBAL_BATCH_SIZE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime
from tests.support.trainings import train

# Memory of all ranks: little more than a step needs, and half of the tables, so that rows come and leave.
BUDGETS = {"static": 36_000, "dynamic": 22_000}
DISK = {"storage": "user,movie,history"}
# In most steps ids come and others leave, and the tables grow.
TIGHT = {"vocabulary": "dynamic", "capacity": "user=64,movie=64,history=64", "admission_threshold": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "static": {"weight_decay": 1.0},
    "dynamic": {**TIGHT, "distribution": "roundrobin", "max_growth": 4},
}


def main() -> None:
    """Train with tables in memory and on the disk; rank 0 writes what came of it."""
    results, data, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    context = init_runtime(Config())
    config = Config.of(
        data_path=data,
        batch_size=int(sys.argv[4]),
        epochs=1,
        embedding_dim=8,
        mlp_dims=(8,),
        history=4,
        initial_rows="random",
        inc_dump=True,
        dump_every=3,
        keep=100,
        timeout=60,
    )
    from recsuite.sharding import dynamic_ranks

    # So that tables grow in the few steps of these trainings.
    dynamic_ranks.STEPS_BETWEEN_GROWTH = 4
    found = {
        name: compared(name, config.replaced(**flags), folder, context) for name, flags in VARIANTS.items()
    }
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


def compared(name: str, config: Config, folder: Path, context: RuntimeContext) -> dict[str, Any]:
    """Results in memory, on the disk, and of a training that goes from one to the other."""
    from tests.support.several_widths import several_widths

    # A width of which no table is on the disk, beside others.
    maker = several_widths if name == "static" else None
    found: dict[str, Any] = {}
    disk: dict[str, Any] = {**DISK, "memory_budget": f"{BUDGETS[name] // context.world_size}B"}
    in_memory: dict[str, Any] = {}
    for storage, flags in (("memory", in_memory), ("disk", disk)):
        found[storage] = train(folder / f"{name} {storage}", config, context, maker=maker, **flags)
    moved = folder / f"{name} moved"
    train(moved, config, context, end_at=5, maker=maker)
    found["moved"] = train(moved, config.replaced(resume=True), context, maker=maker, **disk)
    return found


if __name__ == "__main__":
    main()
