"""Program of each rank of a launch in `test_early_stop.py`: python early_ranks.py RESULTS DATA [CHANGED].

Validation results are planted, so that trainings stop where they should. Rank 0 writes what was found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from recsuite.config.config import Config
from recsuite.metrics import Measured
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, end_process, init_runtime
from tests.support.trainings import gather, train

# The best is that of epoch 2; what a training without an end would see next is better still.
PLANTED = (1.0, 0.9, 0.95, 0.92, 0.5, 0.4)
STEPS_OF_AN_EPOCH = 4
# Of the trainings that any number of ranks makes.
GLOBAL_BATCH_SIZE = 600
FLAGS: dict[str, Any] = {"batch_size": 400, "epochs": len(PLANTED), "patience": 2}


class PlantedEvaluator:
    """Says what is planted on rank 0, and on other ranks that it only gets better; of the test, which epoch's
    weights it is read with: the place of what the model is then among what it was at every validation.
    """

    def __init__(self, context: RuntimeContext, planted: tuple[float, ...] = PLANTED) -> None:
        self.context = context
        self.planted = planted
        self.seen: dict[int, list[str]] = {}

    def validate(self, model: Any, epoch: int) -> Measured:
        self.seen[epoch + 1] = weights_of(model, self.context)
        return Measured({"rmse": self.planted[epoch] if self.context.rank == 0 else -epoch})

    def test(self, model: Any, epoch: int) -> Measured:
        now = weights_of(model, self.context)
        metrics: Any = {"rmse": float(epoch)}
        metrics["weights_of"] = [key for key, seen in self.seen.items() if seen == now]
        return Measured(metrics)


def weights_of(model: Any, context: RuntimeContext) -> list[str]:
    """The digest of every rank's weights. Collective."""
    from tests.support.planted_model import local_parts

    digest = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        for part in local_parts(value):
            digest.update(part.contiguous().numpy().tobytes())
    return gather(digest.hexdigest(), context)


def main() -> None:
    """Keep the best weights. Where there are data whose test ratings were changed, train on those too, and
    stop a training on the others early, interrupted or not.
    """
    results, data, *changed = (Path(argument) for argument in sys.argv[1:])
    context = init_runtime(Config())
    found: dict[str, Any] = {"kept": keep_best(results.parent, str(data), context)}
    if changed:
        found |= {
            "planted": stop_early(results.parent, str(data), context),
            "losses on changed": losses_on(changed[0], results.parent, context),
        }
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


def stop_early(folder: Path, data: str, context: RuntimeContext) -> dict[str, Any]:
    from recsuite.training import loop

    config = Config.of(data_path=data, **FLAGS)
    with mock.patch.object(loop, "make_evaluator", return_value=PlantedEvaluator(context)):
        whole = train(folder / "whole", config, context, dump=True)
        # In the middle of epoch 4, which is the second without a better result.
        end_at = 3 * STEPS_OF_AN_EPOCH + 2
        before = train(folder / "ended", config, context, end_at, dump=True)
        after = train(folder / "ended", config, context, resume=True)
        again = train(folder / "ended", config, context, resume=True)
        more = train(folder / "ended", config, context, resume=True, patience=0)
    return {"whole": whole, "end_at": end_at, "before": before, "after": after, "again": again, "more": more}


def keep_best(folder: Path, data: str, context: RuntimeContext) -> dict[str, Any]:
    """Epoch whose weights are tested, and its messages, for each way to keep the best weights."""
    from recsuite.training import loop, weights

    config = Config.of(data_path=data, batch_size=GLOBAL_BATCH_SIZE, epochs=3, patience=0)
    cases = (
        ("memory", PLANTED, 2**40),
        ("dump", PLANTED, 0),
        ("inc_dump", PLANTED, 0),
        ("no memory", PLANTED, 0),
        ("the last is the best", (3.0, 2.0, 1.0), 0),
        ("no validation", (float("nan"),) * 3, 0),
    )
    found = {}
    for name, planted, free in cases:
        modes = {"dump": {"dump": True}, "inc_dump": {"inc_dump": True}}.get(name)
        evaluator = PlantedEvaluator(context, planted)
        with (
            mock.patch.object(loop, "make_evaluator", return_value=evaluator),
            mock.patch.object(weights, "free_memory", return_value=free),
        ):
            found[name] = train_kept(folder / name, config, context, modes)
    return found


def train_kept(
    folder: Path, config: Config, context: RuntimeContext, modes: dict[str, Any] | None
) -> dict[str, Any]:
    """Messages and test metrics of a training with checkpoints, or without."""
    from example import make_loss, make_model
    from recsuite.datasets.opening import open_data
    from recsuite.training import loop as training

    said: list[str] = []
    context = dataclasses.replace(context)
    object.__setattr__(context, "say", lambda text, tagged=True: said.append(text))
    if modes:
        found = train(folder, config, context, **modes, keep=1)
    else:
        with open_data(config, context) as data:
            run = training.Training(data, config, context).run(make_model, make_loss)
            found = {"test": run.test.values, "test_epoch": run.test_epoch}
    links = {link.name: link.resolve().name for link in folder.glob("*") if link.is_symlink()}
    return {**found, "said": [line for line in said if "weights" in line], "links": links}


def losses_on(data: Path, folder: Path, context: RuntimeContext) -> list[float]:
    """Of a training whose validations and test are the real ones."""
    config = Config.of(data_path=str(data), **FLAGS)
    return list(train(folder / "changed", config, context)["losses"])


if __name__ == "__main__":
    main()
    end_process(0)
