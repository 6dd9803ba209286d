"""What each rank of a launch runs for `test_early_stop.py`: python early_ranks.py RESULTS DATA CHANGED_DATA.

Validation results are planted, so that trainings stop where they should. Rank 0 writes what was found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example"))

from config import Config
from dump_ranks import train
from runtime import RuntimeContext, cleanup_runtime, end_process, init_runtime

# The best is that of epoch 2; what a training without an end would see next is better still.
PLANTED = (1.0, 0.9, 0.95, 0.92, 0.5, 0.4)
STEPS_OF_AN_EPOCH = 8
FLAGS: dict[str, Any] = {"batch_size": 200, "epochs": len(PLANTED), "patience": 2}


class PlantedEvaluator:
    """Says what is planted on rank 0, and on other ranks that it only gets better."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def validate(self, model: Any, epoch: int) -> dict[str, float]:
        return {"rmse": PLANTED[epoch] if self.rank == 0 else -epoch}

    def test(self, model: Any, epoch: int) -> dict[str, float]:
        return {"rmse": float(epoch)}


def main() -> None:
    """Stop a training early, interrupted or not; and train on data whose test ratings were changed."""
    results, data, changed = (Path(argument) for argument in sys.argv[1:])
    context = init_runtime(Config())
    found = {
        "planted": stop_early(results.parent, str(data), context),
        "losses": [losses_on(folder, results.parent, context) for folder in (data, changed)],
    }
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


def stop_early(folder: Path, data: str, context: RuntimeContext) -> dict[str, Any]:
    config = Config(data_path=data, **FLAGS)
    with mock.patch("train.make_evaluator", return_value=PlantedEvaluator(context.rank)):
        whole = train(folder / "whole", config, context, dump=True)
        # In the middle of epoch 4, which is the second without a better result.
        end_at = 3 * STEPS_OF_AN_EPOCH + 2
        before = train(folder / "ended", config, context, end_at, dump=True)
        after = train(folder / "ended", config, context, resume=True)
        again = train(folder / "ended", config, context, resume=True)
        more = train(folder / "ended", config, context, resume=True, patience=0)
    return {"whole": whole, "end_at": end_at, "before": before, "after": after, "again": again, "more": more}


def losses_on(data: Path, folder: Path, context: RuntimeContext) -> list[float]:
    config = Config(data_path=str(data), batch_size=200, epochs=2)
    return list(train(folder / f"on-{data.name}", config, context, dump=True)["losses"])


if __name__ == "__main__":
    main()
    end_process(0)
