"""Program of each rank of a launch in `test_partitions_on_ranks.py`: partition_ranks.py FOLDER.

FOLDER has the data sets, and gets the results of this number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, end_process, init_runtime
from tests.support.trainings import train

NUMBER = 5
# Step in the first epoch after which a training is ended.
END_AT = 4
COMMON = {"split": "files", "batch_size": 128, "timeout": 60}
# Cases without a model.
OF_COLUMNS = ("rare", "some users")
# Flags of each case, and the data set that it reads.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rating": ("ratings", {"by": "city,history_length,item_events,price"}),
    "rare": ("ratings", {}),
    "some users": ("some users", {}),
    "labels": ("labels", {"task": "response", "history": 0}),
    "dynamic": ("texts", {"vocabulary": "dynamic", "capacity": "2000"}),
    "ranking": ("clicks", {"task": "ranking", "history_weights": "learned", "history": 20, "mlp_dims": ()}),
    "sequence": ("clicks", {"task": "sequence", "history": 20, "negatives": 16, "mlp_dims": (16,)}),
}


def main() -> None:
    """Evaluate fixed weights and train, of each case; rank 0 writes the results."""
    folder = Path(sys.argv[1])
    context = init_runtime(Config())
    found = {name: collect(folder, name, context) for name in CASES}
    found["resumed"] = resumed(folder, context)
    cleanup_runtime()
    if context.rank == 0:
        (folder / f"{context.world_size}.json").write_text(json.dumps(found))


def collect(folder: Path, name: str, context: RuntimeContext) -> dict[str, Any]:
    """Return the results of a case; of one rank also without partitions."""
    data, flags = CASES[name]
    config = Config.of(**{**COMMON, **flags, "data_path": str(folder / data), "partitions": NUMBER})
    if name in OF_COLUMNS:
        return {"partitions": columns_of(config.replaced(min_count=40 if name == "rare" else 1), context)}
    found = {"partitions": evaluated(config, context)}
    if context.world_size == 1:
        found["one piece"] = evaluated(config.replaced(partitions=0), context)
    return found


def columns_of(config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Return the data of all ranks."""
    from recsuite.datasets.opening import open_same_columns

    return described(open_same_columns(config, context))


def described(columns: Any) -> dict[str, Any]:
    vocabulary = json.loads((Path(columns.folder) / "vocabulary.json").read_bytes())
    return {
        "sizes": [columns.num_train, columns.num_validation, columns.num_test],
        "users": columns.num_users,
        "items": columns.num_items,
        "mean": columns.mean_label,
        "seen": columns.schema.seen,
        "longest": columns.longest_history,
        "counts": columns.column("item_counts").tolist(),
        "vocabulary": vocabulary,
        "baselines": columns.baselines,
        "notes": columns.notes,
        "digest": columns.digest,
    }


def evaluated(config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Metrics of initial weights, what is known of the data, and the losses of an epoch."""
    from example import make_loss, make_model
    from multitask import LogLosses, MMoE
    from recsuite.datasets.opening import open_data
    from recsuite.sharding import plan as sharding
    from recsuite.training.evaluation import make_evaluator
    from recsuite.training.progress import Progress
    from recsuite.training.state import build_train_state
    from recsuite.training.steps import BatchFeed
    from tests.support.steps import train_epoch

    with open_data(config, context) as data:
        columns = data.columns
        # Far from the mean, so that the metrics would show a row in the wrong place.
        sharding.INIT_STD, small = 0.4, sharding.INIT_STD
        made = (MMoE, LogLosses()) if columns.schema.more_labels else (make_model, make_loss(columns, config))
        state = build_train_state(columns, config, context, *made)
        sharding.INIT_STD = small
        feed = BatchFeed(data.loader)
        evaluator = make_evaluator(feed, columns, config, context)
        measured = {
            "validation": plain(dataclasses.asdict(evaluator.validate(state.model, 0))),
            "test": plain(dataclasses.asdict(evaluator.test(state.model, 0))),
        }
        losses = train_epoch(state, feed, Progress(), config.training, context).tolist()
        sizes = data.loader.dataset.step_sizes("train")
        return {**described(columns), **measured, "losses": losses, "steps": sizes}


def resumed(folder: Path, context: RuntimeContext) -> dict[str, Any]:
    """Trainings of two ranks: uninterrupted, ended and resumed; and one that three ranks continue."""
    data = {"data_path": str(folder / "ratings"), "partitions": NUMBER}
    config = Config.of(**COMMON, **data, epochs=2, embedding_dim=8, mlp_dims=(), num_workers=0)
    left = folder / "left"
    if context.world_size == 3:
        return {"others": train(left, config, context, resume=True, dump=True)}
    if context.world_size != 2:
        return {}
    train(left, config, context, END_AT, dump=True)
    whole = train(folder / "whole", config, context, inc_dump=True)
    before = train(folder / "ended", config, context, END_AT, inc_dump=True)
    after = train(folder / "ended", config, context, inc_dump=True, resume=True)
    return {"whole": whole, "before": before, "after": after}


def plain(metrics: Any) -> Any:
    """Metrics for JSON, without the sums of groups of users, which are others on several ranks."""
    if not isinstance(metrics, dict):
        return metrics
    return {name: plain(value) for name, value in metrics.items() if name != "groups"}


if __name__ == "__main__":
    main()
    end_process(0)
