"""The world in which people rate what they like: its choices, drifts and days are those that were planted."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from recsuite.datasets.movielens.synthetic import (
    MAX_SCORE,
    MIN_SCORE,
    SCORE_STEPS,
    Planted,
    World,
    expected_ratings,
    write_synthetic,
)
from tests.support import written_world
from tests.support.benchmarks import benchmark
from tests.support.written_world import contents, read, rmse

quality = benchmark("quality")
ChoosingWorld = quality.ChoosingWorld
NUM_RATINGS = 30_000
EVERYTHING = ChoosingWorld(drift=1.0, day_std=0.2)
NUM_MOVIES = 300
CHANCES = np.exp(np.linspace(0, 3, NUM_MOVIES))
CHANCES /= CHANCES.sum()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> written_world.World:
    folder = tmp_path_factory.mktemp("choosing") / "world"
    write_synthetic(folder, NUM_RATINGS, seed=0, world=EVERYTHING)
    return read(folder)


def planted(world: World, num_users: int) -> tuple[np.ndarray, np.ndarray]:
    """Users and movies without biases, whose factors have the world's spread."""
    rng = np.random.default_rng(1)
    users, movies = (rng.standard_normal((number, 1 + world.rank)) for number in (num_users, NUM_MOVIES))
    users[:, 1:] *= world.factor_stds
    users[:, 0] = movies[:, 0] = 0
    return users, movies


def draw(world: World, users: np.ndarray, movies: np.ndarray, count: int) -> list[np.ndarray]:
    """User rows, movie rows, ratings, times and predictions, of users with so many ratings each."""
    counts = np.full(len(users), count)
    blocks = world.draw(np.random.default_rng(0), Planted(users, movies, counts, np.cumsum(CHANCES)))
    return [np.concatenate(columns) for columns in zip(*blocks, strict=True)]


def scores_of(expected: np.ndarray, world: World) -> np.ndarray:
    """The scores whose expected ratings these are."""
    scores = np.arange(MIN_SCORE * SCORE_STEPS, MAX_SCORE * SCORE_STEPS + 1) / SCORE_STEPS
    return np.interp(expected, expected_ratings(world), scores)


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_chosen_movies_are_liked_more_in_proportion_to_the_weights(strength: float) -> None:
    world = ChoosingWorld(choice_strength=strength)
    users, movies = planted(world, 20_000)
    rows, movie_rows, *_ = draw(world, users, movies, 1)
    tastes = users[:, 1:] @ movies[:, 1:].T / math.hypot(*world.factor_stds)
    weights = CHANCES * np.exp(strength * tastes)
    weights /= weights.sum(axis=1, keepdims=True)
    planted_gain = ((weights - CHANCES) * tastes).sum() / len(users)
    gain = (tastes[rows, movie_rows] - (CHANCES * tastes).sum(axis=1)[rows]).mean()
    error = tastes.std() / np.sqrt(len(rows))
    assert gain == pytest.approx(planted_gain, abs=4 * error)
    assert (gain > 0.25) == (strength > 0)


def test_choices_reveal_factors_only_with_choice_strength(tmp_path: Path) -> None:
    for name, strength in (("none", 0.0), ("some", 0.5)):
        write_synthetic(tmp_path / name, NUM_RATINGS, 0, ChoosingWorld(choice_strength=strength))
    none, some = (read(tmp_path / name).summary for name in ("none", "some"))
    assert none["choices_rmse"] == pytest.approx(none["biases_rmse"], abs=0.003)
    for summary in (none, some):
        assert summary["rmse"] < summary["biases_rmse"] - 0.03
    assert some["rmse"] < some["choices_rmse"] < some["biases_rmse"] - 0.015


def test_summary_has_the_rmse_of_the_best_linear_fit_of_predictions(world: written_world.World) -> None:
    assert world.summary["rmse"] == pytest.approx(rmse(world.ratings - world.oracle), abs=1e-7)
    for name in ("choices", "biases"):
        predicted = np.load(world.folder / f"{name}.npy")
        line = np.polyval(np.polyfit(predicted, world.ratings, 1), predicted)
        assert world.summary[f"{name}_rmse"] == pytest.approx(rmse(world.ratings - line), abs=1e-6)


def test_oracle_uses_the_drift_and_the_days(world: written_world.World) -> None:
    """Nothing of the error is left to the time of a rating or to its user and day."""
    error = world.ratings - world.oracle
    _, days = np.unique(world.user_ids * 100_000 + world.times // 86_400, return_inverse=True)
    assert within(error, days) == pytest.approx(0, abs=0.01)


def within(values: np.ndarray, groups: np.ndarray) -> float:
    """The mean product of two different values of a group: the variance of what its values share."""
    sums, squares = (np.bincount(groups, weights) for weights in (values, np.square(values)))
    numbers = np.bincount(groups)
    return float((np.square(sums) - squares).sum() / (numbers * (numbers - 1)).sum())


def test_ratings_of_a_user_and_day_share_an_offset_of_the_planted_variance() -> None:
    world = ChoosingWorld(choice_strength=0, day_std=0.4)
    users, movies = np.zeros((3_000, 1 + world.rank)), np.zeros((NUM_MOVIES, 1 + world.rank))
    rows, _, ratings, times, oracle, *_ = draw(world, users, movies, 30)
    offsets = scores_of(oracle, world) - world.mean_score
    _, firsts, days = np.unique(rows * 100_000 + times // 86_400, return_index=True, return_inverse=True)
    assert (offsets == offsets[firsts][days]).all()
    assert len(firsts) > 3 * len(users)
    assert offsets[firsts].std() == pytest.approx(0.4, rel=0.03)
    assert offsets[firsts].mean() == pytest.approx(0, abs=0.015)
    # From the ratings alone: rounded and clipped, they show the variance of the expected rating.
    drawn = world.mean_score + 0.4 * np.random.default_rng(2).standard_normal(100_000)
    expected = np.interp(drawn, scores_of(expected_ratings(world), world), expected_ratings(world))
    error = ratings - expected.mean()
    assert within(error, days) == pytest.approx(expected.var(), rel=0.08)
    # Other days of the same user, and other users on the same day, have others.
    for groups in (rows, times // 86_400):
        assert within(offsets[firsts], groups[firsts]) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("drift", [0.0, 2.0])
def test_early_and_late_factors_are_as_alike_as_planted(drift: float) -> None:
    world = ChoosingWorld(factor_stds=(0.3,), drift=drift)
    users, movies = planted(world, 3_000)
    movies[:, 1] = np.where(np.arange(NUM_MOVIES) % 2, 1, -1)
    rows, movie_rows, _, times, oracle, *_ = draw(world, users, movies, 30)
    factors = (scores_of(oracle, world) - world.mean_score) * movies[movie_rows, 1]
    order = np.lexsort((times, rows)).reshape(len(users), 30)
    first, last = factors[order[:, 0]], factors[order[:, -1]]
    grid = 1.01 / SCORE_STEPS
    assert (first + last) / 2 == pytest.approx(users[:, 1], abs=grid)
    began, ended = times[order[:, :1]], times[order[:, -1:]]
    between = first[:, None] + (times[order] - began) / (ended - began) * (last - first)[:, None]
    assert factors[order] == pytest.approx(between, abs=2 * grid)
    assert (last - first).std() == pytest.approx(0.3 * drift, rel=0.05, abs=grid)
    alike = (1 - drift**2 / 4) / (1 + drift**2 / 4)
    assert np.corrcoef(first, last)[0, 1] == pytest.approx(alike, abs=0.05)


def test_choices_follow_the_tastes_of_their_time() -> None:
    world = ChoosingWorld(factor_stds=(0.3,), choice_strength=1.0, drift=4.0)
    users, movies = planted(world, 2_000)
    movies[:, 1] = np.where(np.arange(NUM_MOVIES) % 2, 1, -1)
    rows, movie_rows, _, times, oracle, *_ = draw(world, users, movies, 30)
    order = np.lexsort((times, rows)).reshape(len(users), 30)
    chosen = movies[movie_rows, 1]
    first, last = ((scores_of(oracle, world) - world.mean_score) * chosen)[order[:, [0, -1]]].T
    shares = (times[order] - times[order[:, :1]]) / np.ptp(times[order], axis=1, keepdims=True)
    # Where a part ends, what is liked is not yet what it is in the middle of the next one.
    likings = first[:, None] + (np.floor(4 * shares).clip(max=3) + 0.5) / 4 * (last - first)[:, None]
    popular = CHANCES[movies[:, 1] > 0].sum()
    odds = popular / (1 - popular) * np.exp(2 * likings / 0.3)
    # Little less: who has seen many movies of a kind has fewer left.
    gap = (2 * odds / (1 + odds) - 1) - chosen[order]
    assert np.abs([gap[likings > 0.3].mean(), gap[likings < -0.3].mean()]) == pytest.approx(0, abs=0.05)


def test_the_same_seed_gives_the_same_files_and_another_seed_different_ones(
    world: written_world.World, tmp_path: Path
) -> None:
    for name, seed in (("again", 0), ("other", 1)):
        write_synthetic(tmp_path / name, NUM_RATINGS, seed, EVERYTHING)
    again, other = (contents(tmp_path / name) for name in ("again", "other"))
    assert again == contents(world.folder)
    assert (
        again.keys()
        == other.keys()
        == {
            *("ratings.dat", "movies.dat", "users.dat", "oracle.json"),
            *("oracle.npy", "choices.npy", "biases.npy"),
        }
    )
    assert all(again[name] != other[name] for name in again)
    assert written_world.read(world.folder).summary["world"] == "choosing"


def test_no_user_rates_a_movie_twice_and_all_ids_are_described(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(quality, "CHOOSERS_PER_BLOCK", 100)
    write_synthetic(tmp_path / "blocks", NUM_RATINGS, 0, EVERYTHING)
    blocks = read(tmp_path / "blocks")
    assert len(blocks.users) > 300
    assert len(set(zip(blocks.user_ids, blocks.movie_ids, strict=True))) == NUM_RATINGS
    assert (np.diff(blocks.user_ids) >= 0).all()
    assert set(blocks.user_ids) == {int(user[0]) for user in blocks.users}
    assert set(blocks.movie_ids) <= {int(movie[0]) for movie in blocks.movies}
    assert np.bincount(blocks.user_ids)[1:].min() >= 20
