"""Early stopping looks at validation alone, an interruption does not move it; the test teaches nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from columns import open_columns
from config import Config
from early_ranks import PLANTED, STEPS_OF_AN_EPOCH
from launch import ROOT, read_json, succeeded, torchrun
from synthetic import write_synthetic

SCRIPT = ROOT / "tests" / "early_ranks.py"
NUM_RATINGS, NUM_TEST = 4000, 800


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two ranks found."""
    folder = tmp_path_factory.mktemp("early")
    data, changed = folder / "data", folder / "changed"
    write_synthetic(data, NUM_RATINGS, seed=0)
    shutil.copytree(data, changed)
    change_test_ratings(changed)
    succeeded(torchrun(2, SCRIPT, folder / "found.json", data, changed, timeout=120))
    return read_json(folder / "found.json")


def change_test_ratings(folder: Path) -> None:
    """Give each of the newest fifth other stars."""
    lines = (folder / "ratings.dat").read_text().splitlines()
    fields = [line.split("::") for line in lines]
    newest = np.argsort([int(time) for *_, time in fields], kind="stable")[-NUM_TEST:]
    for place in newest:
        user, movie, rating, time = fields[place]
        lines[place] = f"{user}::{movie}::{6 - int(rating)}::{time}"
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    before, after = (open_columns(Config(data_path=str(path))) for path in (folder.parent / "data", folder))
    assert (before.ratings("train") == after.ratings("train")).all()
    assert (before.ratings("test") == 6 - after.ratings("test")).mean() == 1


def test_a_training_stops_after_patience_epochs_without_a_better_validation(found: Any) -> None:
    planted = found["planted"]["whole"]
    assert len(planted["losses"]) == 4 * STEPS_OF_AN_EPOCH
    # Of the model as it is then, whatever an epoch before it would have given.
    assert planted["test"] == {"rmse": 4}
    assert planted["end"] == {
        "step": 4 * STEPS_OF_AN_EPOCH,
        "epoch": 4,
        "samples": 0,
        "best": PLANTED[1],
        "epochs_since_best": 2,
    }


def test_an_interrupted_training_stops_where_one_that_was_not_does(found: Any) -> None:
    whole, before, after = (found["planted"][name] for name in ("whole", "before", "after"))
    assert before["status"] == 143
    assert before["end"]["samples"] > 0
    assert after["losses"] == whole["losses"][before["end"]["step"] :]
    assert after["end"] == whole["end"]


def test_a_training_that_stopped_early_does_not_go_on_unless_asked_to(found: Any) -> None:
    assert found["planted"]["again"]["losses"] == []
    assert found["planted"]["again"]["test"] == {"rmse": 4}
    assert len(found["planted"]["more"]["losses"]) == 2 * STEPS_OF_AN_EPOCH
    assert found["planted"]["more"]["end"]["best"] == min(PLANTED)


def test_the_stars_of_test_ratings_change_no_loss(found: Any) -> None:
    first, second = found["losses"]
    assert len(first) == 2 * STEPS_OF_AN_EPOCH
    assert first == second
