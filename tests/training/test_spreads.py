"""How far from zero rows lie, as validation says: near the best there is, in worlds ten times apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsuite.config.both_sides import BOTH_SIDES
from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import World, write_synthetic
from recsuite.datasets.opening import open_data
from recsuite.models import prior
from recsuite.runtime.process import RuntimeContext
from recsuite.training.loops import epochs
from recsuite.training.trainer import train

# Variances of factors and of lists that are tried, as multiples of what is said: nobody who tunes tries more.
STRENGTHS = (1 / 16, 1 / 4, 1, 4, 16)
FLAGS = {**BOTH_SIDES, "split": "random", "test_fraction": 0.1, "embedding_dim": 16}
WORLDS = {
    "small": (30_000, World()),
    "ten times as large": (300_000, World()),
    "sparse": (1_000_000, World(mean_ratings_per_user=25)),
    "ten times as dense": (1_000_000, World(mean_ratings_per_user=250)),
    "quiet": (60_000, World(noise_std=0.4)),
    "of ten times the noise": (60_000, World(noise_std=1.26)),
}


def rmse_of(folder: Path, context: RuntimeContext, **flags: object) -> float:
    """The test RMSE of a training."""
    config = Config.of(**{**FLAGS, **flags}, data_path=str(folder))
    with open_data(config, context) as data:
        return train(data, config, context).test["rmse"]


def tuned(folder: Path, context: RuntimeContext, strengths: tuple[float, ...], **flags: object) -> float:
    """The lowest test RMSE of trainings whose variances stay as they are."""
    found = []
    for strength in strengths:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(epochs, "WARM_UP", 2)
            for name in ("FACTOR", "LIST_FACTOR", "LIST_BIAS"):
                patch.setattr(prior, name, getattr(prior, name) * strength)
            found.append(rmse_of(folder, context, **flags))
    return min(found)


def test_what_is_learned_is_within_a_hundredth_of_the_best_strength(
    context: RuntimeContext, tmp_path: Path
) -> None:
    number, world = WORLDS["quiet"]
    write_synthetic(tmp_path / "world", number // 2, seed=0, world=world)
    flags = {"epochs": 10, "batch_size": 1_024}
    best = tuned(tmp_path / "world", context, (1 / 4, 1, 4), **flags)
    assert rmse_of(tmp_path / "world", context, **flags) <= 1.01 * best


@pytest.mark.soak
@pytest.mark.parametrize("name", WORLDS)
def test_in_every_world_what_is_learned_is_within_a_hundredth_of_the_best_strength(
    name: str, context: RuntimeContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number, world = WORLDS[name]
    write_synthetic(tmp_path / "world", number, seed=0, world=world)
    best = tuned(tmp_path / "world", context, STRENGTHS)
    found = rmse_of(tmp_path / "world", context)
    with capsys.disabled():
        print(f"{name}: {found:.4f}, that is {found / best:.4f} of the best of {len(STRENGTHS)} strengths")
    assert found <= 1.01 * best
