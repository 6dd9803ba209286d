"""Learned spreads of rows are near the best possible ones, on data sets ten times apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recsuite.config.config import Config
from recsuite.config.presets import PRESETS
from recsuite.datasets.movielens.synthetic import World, write_synthetic
from recsuite.datasets.opening import open_data
from recsuite.models import co_occurrence
from recsuite.runtime.process import RuntimeContext
from recsuite.training import loop
from recsuite.training.loop import begin_training

# Variances of factors and of lists that are tried, as multiples of what is said: nobody who tunes tries more.
STRENGTHS = (1 / 16, 1 / 4, 1, 4, 16)
FLAGS = {**PRESETS["co_occurrence"][1], "test_fraction": 0.1, "embedding_dim": 16}
WORLDS = {
    "small": (30_000, World()),
    "ten times as large": (300_000, World()),
    "sparse": (1_000_000, World(mean_ratings_per_user=25)),
    "ten times as dense": (1_000_000, World(mean_ratings_per_user=250)),
    "quiet": (60_000, World(noise_std=0.4)),
    "of ten times the noise": (60_000, World(noise_std=1.26)),
}


def rmse_of(
    folder: Path, context: RuntimeContext, times: float = 1, learns: bool = True, **flags: Any
) -> float:
    """The test RMSE of a training with variances so many times as large as is said."""
    config = Config.of(**{**FLAGS, **flags}, data_path=str(folder))
    with pytest.MonkeyPatch.context() as patch, open_data(config, context) as data:
        for name in ("FACTOR", "LIST_FACTOR", "LIST_BIAS"):
            patch.setattr(co_occurrence, name, getattr(co_occurrence, name) * times)
        if not learns:
            patch.setattr(loop, "WARM_UP", 2)
        return begin_training(data, config, context).run().test["rmse"]


def test_learned_spreads_are_better_than_the_prior_and_near_the_best(
    context: RuntimeContext, tmp_path: Path
) -> None:
    number, world = WORLDS["quiet"]
    folder = tmp_path / "world"
    write_synthetic(folder, number // 2, seed=0, world=world)
    # Enough validation events to say something, and as many passes for all.
    flags = dict[str, Any](epochs=10, batch_size=1_024, validation_fraction=0.1, patience=0)
    fixed = {times: rmse_of(folder, context, times, learns=False, **flags) for times in (1 / 4, 1, 16)}
    found = rmse_of(folder, context, **flags)
    assert found <= 1.01 * min(fixed.values())
    assert found < fixed[1] - 0.001


@pytest.mark.soak
@pytest.mark.parametrize("name", WORLDS)
def test_learned_spreads_are_within_one_percent_of_the_best_strength_on_every_data_set(
    name: str, context: RuntimeContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number, world = WORLDS[name]
    write_synthetic(tmp_path / "world", number, seed=0, world=world)
    best = min(rmse_of(tmp_path / "world", context, times, learns=False) for times in STRENGTHS)
    found = rmse_of(tmp_path / "world", context)
    with capsys.disabled():
        print(f"{name}: {found:.4f}, that is {found / best:.4f} of the best of {len(STRENGTHS)} strengths")
    assert found <= 1.01 * best
