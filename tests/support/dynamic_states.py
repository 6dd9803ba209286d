"""Program of each rank of a launch in `dynamic_folder`: python dynamic_states.py RESULTS DATA SAVE_DIR.

As `states.py`, with dynamic tables that have too few places, so that ids come, leave and come back.
"""

from __future__ import annotations

import sys
from typing import Any

from recsuite.runtime.process import cleanup_runtime, end_process, init_runtime
from tests.support.states import FLAGS, predict_all

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

    results, data, save_dir = sys.argv[1:]
    config = FLAGS.replaced(data_path=data, save_dir=save_dir, **TIGHT)
    context = init_runtime(config)
    config = config.replaced(batch_size=2000 // context.world_size)
    train(config, context)
    found = predict_all(config, context)
    cleanup_runtime()
    if context.rank == 0:
        np.savez(results, **found)


if __name__ == "__main__":
    main()
    end_process(0)
