"""Synthetic MovieLens that drifts.

Users and movies come and go, and preferences change slowly. A movie is rated between its arrival and its
retirement, and a user rates between joining and leaving; movies are chosen by popularity. Over the whole
period, biases and factors turn from those of the first day to others of the same spread:

    parameters at the moment m = cos(angle) * first + sin(angle) * last,   angle = m * quarter_turns * pi / 2

so there is as much to learn on the last day as on the first, and it cannot be predicted long before. Moments
are shares of the period, from 0 to 1. There is no ranks.npy; first_day.npy, in the format of the oracle, has
the expectations by the parameters of the first day.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from recsuite.datasets.movielens.synthetic import (
    FIRST_TIME,
    LAST_TIME,
    USERS_PER_BLOCK,
    Planted,
    World,
    draw_sessions,
    draw_stars,
    expected_ratings,
    steps_of,
)

# Shares of movies and users that stay all the time. Half of the movies are more than any user rates, so each
# user finds enough of them.
STAYING_MOVIES, STAYING_USERS = 0.5, 0.2
# The others arrive between these moments, some before the first rating, and stay at least LEAST_STAY.
FIRST_ARRIVAL, LAST_ARRIVAL = -0.3, 0.9
LEAST_STAY, MEAN_MORE = 0.3, 0.2


@dataclass(frozen=True)
class DriftingWorld(World):
    """The drifting world.

    quarter_turns: turn of the preferences in the whole period; with 1, none of those of the first day remain.
    """

    NAME: ClassVar = "drifting"
    ORACLES: ClassVar = ("oracle", "first_day")

    # Weaker than those of the stationary world: here all of them turn, and each costs a model more.
    factor_stds: tuple[float, ...] = (0.3, 0.1, 0.06, 0.04)
    quarter_turns: float = 1.0

    @override
    def draw(self, rng: np.random.Generator, planted: Planted) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield blocks as `World.draw` does. "first_day" predicts by the parameters at moment 0."""
        users, movies, counts, picks = planted
        movie_lives = draw_lives(rng, len(movies), STAYING_MOVIES)
        user_lives = draw_lives(rng, len(users), STAYING_USERS)
        last_users = np.std(users, axis=0) * rng.standard_normal(users.shape)
        last_movies = np.std(movies, axis=0) * rng.standard_normal(movies.shape)
        # Centered like those of the first day: popularity does not shift the mean rating.
        last_movies[:, 0] -= np.diff(picks, prepend=0) @ last_movies[:, 0]
        expected = expected_ratings(self)
        for begin in range(0, len(users), USERS_PER_BLOCK):
            block = counts[begin : begin + USERS_PER_BLOCK]
            rows, lives = np.repeat(np.arange(len(block)), block), user_lives[begin : begin + len(block)]
            times = draw_sessions(rng, _first_sessions(rng, lives), lives[:, 1:], rows)
            moments = (times - FIRST_TIME) / (LAST_TIME - FIRST_TIME)
            movie_rows = _draw_movies(rng, rows, moments, movie_lives, picks)
            user_rows = begin + rows
            angles = moments * self.quarter_turns * math.pi / 2
            now, at_first = (
                steps_of(
                    self.scores(
                        _turned(users[user_rows], last_users[user_rows], angle),
                        _turned(movies[movie_rows], last_movies[movie_rows], angle),
                    )
                )
                for angle in (angles, np.zeros_like(angles))
            )
            yield user_rows, movie_rows, draw_stars(rng, now, self), times, expected[now], expected[at_first]


def draw_lives(rng: np.random.Generator, number: int, staying: float) -> np.ndarray:
    """Draw the moments of arrival and retirement, float64 [number, 2]. staying: share that always stays."""
    stays = rng.permutation(number) < staying * number
    arrival = rng.uniform(FIRST_ARRIVAL, LAST_ARRIVAL, number)
    retirement = arrival + LEAST_STAY + rng.exponential(MEAN_MORE, number)
    arrival[stays], retirement[stays] = 0, 1
    return np.clip(np.stack([arrival, retirement], axis=1), 0, 1)


def _first_sessions(rng: np.random.Generator, lives: np.ndarray) -> np.ndarray:
    """Draw the moments of the users' first sessions, float64 [users, 1].

    A user's first session is at the arrival. For a user from before the period it is in the first half of the
    remaining time, because otherwise all of them would begin at once.
    """
    come, gone = lives[:, :1], lives[:, 1:]
    return np.where(come > 0, come, gone / 2 * rng.random(come.shape))


def _draw_movies(
    rng: np.random.Generator, user_rows: np.ndarray, moments: np.ndarray, lives: np.ndarray, picks: np.ndarray
) -> np.ndarray:
    """Draw the movie of each rating, int64 [ratings]: one available at its time, and none twice for a user.

    lives: see `draw_lives`; picks: cumulative chance of the movies, float64 [movies].
    """
    movies, part = np.full(len(user_rows), -1), np.arange(len(user_rows))
    # Unsuitable movies are drawn again, for the users with a missing movie: few after the first rounds.
    while len(missing := part[movies[part] < 0]):
        drawn = np.searchsorted(picks[:-1], rng.random(len(missing)), side="right")
        come, gone = lives[drawn].T
        is_there = (come <= moments[missing]) & (moments[missing] <= gone)
        movies[missing[is_there]] = drawn[is_there]
        known = part[movies[part] >= 0]
        _, firsts = np.unique(user_rows[known] * len(picks) + movies[known], return_index=True)
        movies[np.delete(known, firsts)] = -1
        part = part[np.isin(user_rows[part], user_rows[part[movies[part] < 0]], kind="table")]
    return movies


def _turned(first: np.ndarray, last: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Parameters of ratings at their moments, given by angles, float64 [ratings, 1 + rank]."""
    return np.cos(angles)[:, None] * first + np.sin(angles)[:, None] * last
