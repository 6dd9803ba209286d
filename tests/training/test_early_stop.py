"""Early stopping looks at validation alone, an interruption does not move it; the test teaches nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.models.tasks import TASKS
from recsuite.training.loop import with_validation
from recsuite.training.progress import Progress
from tests.support.early_ranks import GLOBAL_BATCH_SIZE, PLANTED, STEPS_OF_AN_EPOCH
from tests.support.launch import SUPPORT, read_json, succeeded, torchrun

SCRIPT = SUPPORT / "early_ranks.py"
NUM_RATINGS, NUM_TEST = 2000, 400
NUM_TRAIN = 1440
# The test of the weights of epoch 2.
BEST = {"rmse": 2, "weights_of": [2]}


def test_the_best_epoch_is_the_first_with_the_best_validation_metric() -> None:
    progress, found = Progress(), []
    for rmse in (0.90, 0.91, 0.89, 0.89, 0.905, float("nan")):
        progress = with_validation(progress, rmse, TASKS["rating"])
        found.append(progress.epochs_since_best)
    assert found == [0, 1, 0, 1, 2, 3]
    assert progress.best == 0.89


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two ranks."""
    folder = tmp_path_factory.mktemp("early")
    data, changed = folder / "data", folder / "changed"
    write_synthetic(data, NUM_RATINGS, seed=0)
    shutil.copytree(data, changed)
    change_test_ratings(changed)
    succeeded(torchrun(2, SCRIPT, folder / "found.json", data, changed, timeout=120))
    return read_json(folder / "found.json")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.soak), 2, 3])
def kept(request: pytest.FixtureRequest, found: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Epochs whose weights the trainings of a number of ranks test."""
    if request.param == 2:
        return found["kept"]
    folder = tmp_path_factory.mktemp("kept")
    write_synthetic(folder / "data", NUM_RATINGS, seed=0)
    succeeded(torchrun(request.param, SCRIPT, folder / "found.json", folder / "data", timeout=120))
    return read_json(folder / "found.json")["kept"]


def change_test_ratings(folder: Path) -> None:
    """Give each of the newest fifth other stars."""
    lines = (folder / "ratings.dat").read_text().splitlines()
    fields = [line.split("::") for line in lines]
    newest = np.argsort([int(time) for *_, time in fields], kind="stable")[-NUM_TEST:]
    for place in newest:
        user, movie, rating, time = fields[place]
        lines[place] = f"{user}::{movie}::{6 - int(rating)}::{time}"
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    before, after = (
        open_columns(Config.of(data_path=str(path))) for path in (folder.parent / "data", folder)
    )
    assert (before.labels("train") == after.labels("train")).all()
    assert (before.labels("test") == 6 - after.labels("test")).mean() == 1


def test_a_training_stops_after_patience_epochs_without_a_better_validation(found: Any) -> None:
    planted = found["planted"]["whole"]
    assert len(planted["losses"]) == 4 * STEPS_OF_AN_EPOCH
    assert planted["test"] == BEST
    assert planted["end"] == {
        "step": 4 * STEPS_OF_AN_EPOCH,
        "epoch": 4,
        "samples": 0,
        "best": PLANTED[1],
        "epochs_since_best": 2,
        "stream": None,
    }


def test_an_interrupted_training_stops_where_one_that_was_not_does(found: Any) -> None:
    whole, before, after = (found["planted"][name] for name in ("whole", "before", "after"))
    assert before["status"] == 143
    assert before["end"]["samples"] > 0
    assert after["losses"] == whole["losses"][before["end"]["step"] :]
    assert after["end"] == whole["end"]


def test_a_training_that_stopped_early_continues_only_on_request(found: Any) -> None:
    assert found["planted"]["again"]["losses"] == []
    assert found["planted"]["again"]["test"] == BEST
    assert len(found["planted"]["more"]["losses"]) == 2 * STEPS_OF_AN_EPOCH
    assert found["planted"]["more"]["end"]["best"] == min(PLANTED)


@pytest.mark.parametrize("where", ["memory", "dump", "inc_dump"])
def test_the_test_is_read_with_the_weights_of_the_best_epoch(kept: Any, where: str) -> None:
    found = kept[where]
    assert found["test"] == BEST
    assert found["said"] == ["the test uses the weights of epoch 2, the best on the validation ratings"]


def test_the_best_checkpoint_is_linked_beside_the_latest_and_kept_for_any_value_of_keep(
    kept: Any,
) -> None:
    steps = -(-NUM_TRAIN // GLOBAL_BATCH_SIZE)
    assert kept["dump"]["links"] == {
        "best": f"step-{2 * steps:09d}",
        "latest": f"step-{3 * steps:09d}",
    }
    increments = {"best": f"delta-{2 * steps:09d}", "latest": f"delta-{3 * steps:09d}"}
    assert kept["inc_dump"]["links"] == increments


def test_without_room_for_the_best_weights_or_without_validation_those_of_the_last_epoch_count(
    kept: Any,
) -> None:
    for name in ("no memory", "the last is the best", "no validation"):
        assert kept[name]["test"] == {"rmse": 3, "weights_of": [3]}
    refusal, last = kept["no memory"]["said"]
    assert refusal.startswith("best weights not kept: needs")
    assert last == "the test uses the last weights, of epoch 3: no better ones were kept"
    assert kept["no validation"]["said"] == []


@pytest.mark.parametrize(
    ("dumped", "rest"), [(2, ""), (1, " that is still there; epoch 2 was better, but its checkpoint is gone")]
)
def test_without_the_best_checkpoint_the_test_names_the_one_that_it_uses(dumped: int, rest: str) -> None:
    from recsuite.training.loop import Training

    said: list[str] = []
    position = Progress(step=40, epoch=4, best=0.8, epochs_since_best=2)
    kept: Any = SimpleNamespace(restore_best=lambda train_state: Progress(10 * dumped, dumped, best=0.9))
    context: Any = SimpleNamespace(say=said.append)
    trainer: Any = SimpleNamespace(
        progress=position, checkpointer=kept, train_state=None, context=context, unit="ratings"
    )
    assert Training.restore_best_weights(trainer).epoch == dumped
    (line,) = said
    begin = f"the test uses the weights of epoch {dumped}, the best on the validation ratings"
    assert line.startswith(begin + rest)
    assert (line == begin) == (rest == "")


def test_the_stars_of_test_ratings_change_no_loss(found: Any) -> None:
    on_changed, planted = found["losses on changed"], found["planted"]["whole"]["losses"]
    # Each stops when its validation says so.
    common = min(len(on_changed), len(planted))
    assert common >= 2 * STEPS_OF_AN_EPOCH
    assert on_changed[:common] == planted[:common]
