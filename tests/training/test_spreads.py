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
FLAGS = {**BOTH_SIDES, "others": 50, "split": "random", "test_fraction": 0.1, "embedding_dim": 16}
WORLDS = {
    "small": (30_000, World()),
    "ten times as large": (300_000, World()),
    "sparse": (60_000, World(mean_ratings_per_user=20)),
    "ten times as dense": (60_000, World(mean_ratings_per_user=200)),
    "quiet": (60_000, World(noise_std=0.4)),
    "of ten times the noise": (60_000, World(noise_std=1.26)),
}


def tested(folder: Path, context: RuntimeContext, **flags: object) -> float:
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
            found.append(tested(folder, context, **flags))
    return min(found)


def test_what_is_learned_is_close_to_the_best_strength(
    synthetic_folder: Path, context: RuntimeContext
) -> None:
    best = tuned(synthetic_folder, context, (1 / 4, 4), epochs=8)
    assert tested(synthetic_folder, context, epochs=8) <= 1.01 * best


@pytest.mark.soak
@pytest.mark.parametrize("name", WORLDS)
def test_in_every_world_what_is_learned_is_within_a_hundredth_of_the_best_strength(
    name: str, context: RuntimeContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number, world = WORLDS[name]
    write_synthetic(tmp_path / "world", number, seed=0, world=world)
    best = tuned(tmp_path / "world", context, STRENGTHS)
    found = tested(tmp_path / "world", context)
    with capsys.disabled():
        print(f"{name}: {found:.4f}, that is {found / best:.4f} of the best of {len(STRENGTHS)} strengths")
    assert found <= 1.01 * best
