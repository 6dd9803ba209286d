"""Drifting synthetic data: users and movies come and go, and old parameters predict worse."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.movielens.source import locate
from recsuite.datasets.movielens.synthetic import FIRST_TIME, LAST_TIME, write_synthetic
from recsuite.errors import UserError
from recsuite.extras import drifting
from recsuite.extras.drifting import DriftingWorld
from tests.support.written_world import World, contents, read, rmse

NUM_RATINGS = 30_000


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, list[np.ndarray]]:
    """A written world, and the lives of its movies and users."""
    folder, lives = tmp_path_factory.mktemp("moving") / "world", []

    def noted(*arguments: Any) -> np.ndarray:
        lives.append(moving_lives(*arguments))
        return lives[-1]

    moving_lives = drifting.draw_lives
    with mock.patch.object(drifting, "draw_lives", noted):
        write_synthetic(folder, NUM_RATINGS, seed=0, world=DriftingWorld())
    return read(folder), lives


@pytest.fixture(scope="module")
def world(drawn: tuple[World, list[np.ndarray]]) -> World:
    return drawn[0]


def moments(world: World) -> np.ndarray:
    return (world.times - FIRST_TIME) / (LAST_TIME - FIRST_TIME)


def test_bytes_are_those_of_earlier_versions(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "world", 5_000, seed=0, world=DriftingWorld())
    written = b"".join(
        name.encode() + content for name, content in sorted(contents(tmp_path / "world").items())
    )
    digest = "aae7d7b25b01e6a952a7f71db6084f0dc9c81ee23cfcc82db6758f9e596e523c"
    assert hashlib.sha256(written).hexdigest() == digest


def test_no_rating_precedes_the_arrival_or_follows_the_departure_of_its_user_or_movie(
    drawn: tuple[World, list[np.ndarray]],
) -> None:
    world, (movie_lives, user_lives) = drawn
    of_movie = {int(movie[0]): life for movie, life in zip(world.movies, movie_lives, strict=True)}
    movies = np.array([of_movie[movie] for movie in world.movie_ids.tolist()])
    users = user_lives[world.user_ids - 1]
    # A session lasts for an hour, and its user may go meanwhile.
    hour = 3600 / (LAST_TIME - FIRST_TIME)
    for lives, slack in ((movies, 0.0), (users, hour)):
        assert (lives[:, 0] - slack <= moments(world)).all()
        assert (moments(world) <= lives[:, 1] + slack).all()
        # And not only because nobody ever goes.
        assert (lives[:, 1] < 1).mean() > 0.1


def test_many_of_the_last_ratings_are_of_late_users_and_movies(world: World) -> None:
    is_early, is_late = moments(world) < 0.5, moments(world) >= 0.75
    for ids, least in ((world.user_ids, 0.5), (world.movie_ids, 0.15)):
        unknown = ~np.isin(ids[is_late], ids[is_early])
        assert least < unknown.mean() < 0.9


def test_no_user_rates_a_movie_twice_and_all_ids_are_described(world: World) -> None:
    assert world.summary["world"] == "drifting"
    assert len(set(zip(world.user_ids, world.movie_ids, strict=True))) == len(world.ratings) == NUM_RATINGS
    assert set(world.movie_ids) <= {int(movie[0]) for movie in world.movies}


def test_true_parameters_predict_up_to_the_noise_and_old_ones_get_worse(world: World) -> None:
    first_day = np.load(world.folder / "first_day.npy")
    noise, stale = [], []
    for part in np.array_split(np.argsort(world.times, kind="stable"), 4):
        noise.append(rmse(world.ratings[part] - world.oracle[part]))
        stale.append(rmse(world.ratings[part] - first_day[part]))
    assert world.summary["rmse"] == pytest.approx(rmse(world.ratings - world.oracle), abs=1e-7)
    # As in the world that stays, there is as much to learn at every time.
    assert noise == pytest.approx([0.855] * 4, abs=0.02)
    assert stale[0] < 1.04 * noise[0]
    assert stale == sorted(stale)
    assert stale[3] > 1.3 * noise[3]


@pytest.mark.parametrize("seed", range(2))
def test_synthetic_data_work_with_a_thousand_ratings(tmp_path: Path, seed: int) -> None:
    write_synthetic(tmp_path / "small", 1_000, seed, DriftingWorld())
    assert len((tmp_path / "small" / "ratings.dat").read_text().splitlines()) == 1_000


def test_drifting_data_have_their_own_folder_name(tmp_path: Path) -> None:
    line = f"--dataset synthetic --synthetic_ratings 1000 --data_path {tmp_path / 'data'}"
    moves = parse_args([*line.split(), "--synthetic_kind", "drifting"]).data
    assert {file.name for file in locate(moves, 0).files} == {
        "ratings.dat",
        "movies.dat",
        "users.dat",
        "oracle.npy",
    }
    with pytest.raises(UserError, match=r"holds other ratings than .* --synthetic_kind stationary"):
        locate(parse_args(line.split()).data, 0)
    with pytest.raises(UserError, match="--synthetic_kind drifting requires --dataset synthetic"):
        parse_args(["--data_path", str(tmp_path), "--synthetic_kind", "drifting"])
