"""Program of each rank of a launch in `test_dynamic_tables.py`.

python dynamic_ranks.py RESULTS DATA GLOBAL_BATCH_SIZE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, end_process, init_runtime
from tests.support.trainings import feed_of

# Room for some of the ids alone, so that a training admits, evicts and refuses in most of its steps.
TIGHT: dict[str, Any] = {
    "capacity": "user=96,movie=256,history=256",
    "admission_threshold": 2,
    "max_load_factor": 0.0,
}
TRAININGS: dict[str, dict[str, Any]] = {
    "lru continuous": {"distribution": "continuous", **TIGHT},
    "lru roundrobin": {"distribution": "roundrobin", **TIGHT},
    "lru hash": {"distribution": "hash", **TIGHT},
    "lru ahead": {"pipeline": "sparse_dist", **TIGHT},
    "torchrec ahead": {
        "cpu_tables": "torchrec",
        "pipeline": "sparse_dist",
        "distribution": "roundrobin",
        **TIGHT,
    },
    "lfu": {"eviction": "lfu", "half_life": "5", "ttl": "40", **TIGHT},
    "none": {"eviction": "none", **TIGHT},
    "growing": {"capacity": "64", "max_load_factor": 0.5, "max_growth": 32},
    "growing ahead": {"capacity": "64", "max_load_factor": 0.5, "max_growth": 32, "pipeline": "sparse_dist"},
    "torchrec growing": {
        "cpu_tables": "torchrec",
        "capacity": "64",
        "max_load_factor": 0.5,
        "max_growth": 32,
    },
}


def main() -> None:
    """Train in several ways; rank 0 writes what came of it."""
    results, data, global_batch_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    context = init_runtime(Config())
    config = Config.of(
        data_path=data,
        vocabulary="dynamic",
        batch_size=global_batch_size,
        history=5,
        embedding_dim=16,
        mlp_dims=(16,),
        epochs=8,
    )
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.runtime.process import once_per_node

    once_per_node(context, lambda: open_columns(config), deadline=60)
    found = {name: trained(config.replaced(**flags), context) for name, flags in TRAININGS.items()}
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


def trained(config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Losses of some passes, metrics on the test, and all that the dynamic tables hold, of all ranks."""
    from example import make_loss, make_model
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.sharding.dynamic_ranks import STEPS_BETWEEN_GROWTH, counts_of, dynamic_rows
    from recsuite.training.evaluation import make_evaluator
    from recsuite.training.progress import Progress
    from recsuite.training.state import build_train_state
    from tests.support.steps import train_epoch

    columns = open_columns(config)
    feed = feed_of(columns, config, context)
    train_state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    losses, step = [], STEPS_BETWEEN_GROWTH - 3
    with feed.loader:
        for epoch in range(2):
            progress = Progress(step, epoch)
            found = train_epoch(train_state, feed, progress, config.training, context)
            step += len(found)
            losses += found.tolist()
        shares = dynamic_rows(train_state.model)
        before = counts_of(shares)
        evaluator = make_evaluator(feed, columns, config, context)
        metrics = evaluator.test(train_state.model, 2)
    after = counts_of(shares)
    return {
        "losses": losses,
        "rmse": metrics["rmse"],
        "counts": {name: vars(count) for name, count in after.items()},
        "is_as_before": before == after,
        "capacity": {name: rows.spec.capacity for name, rows in shares.items()},
        "tables": {name: content(rows) for name, rows in shares.items()},
    }


def content(rows: Any) -> dict[str, Any]:
    """Content of a table by id: step and number of lookups, ids that wait, and rows with optimizer states."""
    import torch

    from recsuite.runtime.process import all_gather_object

    live = rows.live()
    mine = {
        "rows": list(zip(live.ids.tolist(), live.seen.tolist(), live.count.tolist(), strict=True)),
        "waiting": list(
            zip(
                live.waiting.ids.tolist(),
                live.waiting.seen.tolist(),
                live.waiting.count.tolist(),
                strict=True,
            )
        ),
        "learned": torch.cat([live.weight, live.state.unsqueeze(1)], 1).tolist(),
    }
    parts = all_gather_object(lambda: mine)
    learned = {
        row[0]: numbers for part in parts for row, numbers in zip(part["rows"], part["learned"], strict=True)
    }
    return {
        "rows": sorted(row for part in parts for row in part["rows"]),
        "waiting": sorted(row for part in parts for row in part["waiting"]),
        "learned": [learned[id] for id in sorted(learned)],
    }


if __name__ == "__main__":
    main()
    end_process(0)
