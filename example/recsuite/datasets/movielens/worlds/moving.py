"""The planted world whose users and movies come and go, and in which what is liked turns slowly.

A movie is rated between its arrival and its retirement, and a user rates while he is there. Biases and
factors turn, over the whole period, from those of the first day to others of the same spread:

    parameters at the moment m = cos(angle) * first + sin(angle) * last,   angle = m * quarter_turns * pi / 2

so there is as much to learn on the last day as on the first, and nothing of it can be known long before.
Moments are shares of the period, from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from recsuite.datasets.movielens.worlds.world import (
    FIRST_TIME,
    LAST_TIME,
    MEAN_SCORE,
    USERS_PER_BLOCK,
    World,
    draw_sessions,
    draw_stars,
    expected_ratings,
    steps_of,
)

# Half of the movies are there all the time: more than any user rates, so everybody finds enough of them.
STAYING_MOVIES, STAYING_USERS = 0.5, 0.2
# The others come between these moments, some before the first rating, and stay at least for LEAST_STAY.
FIRST_ARRIVAL, LAST_ARRIVAL = -0.3, 0.9
LEAST_STAY, MEAN_MORE = 0.3, 0.2


@dataclass(frozen=True)
class MovingWorld(World):
    """A world that moves. quarter_turns: how far what is liked turns in the period, 1 until nothing of the
    first day is left.
    """

    NAME: ClassVar = "moving"
    ORACLES: ClassVar = ("oracle", "first_day")

    quarter_turns: float = 1.0

    def draw(
        self,
        rng: np.random.Generator,
        users: np.ndarray,
        movies: np.ndarray,
        counts: np.ndarray,
        picks: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """See `World.draw`: "first_day" predicts by the parameters as they were at the moment 0."""
        movie_lives, user_lives = (
            draw_lives(rng, len(movies), STAYING_MOVIES),
            draw_lives(rng, len(users), STAYING_USERS),
        )
        last_users, last_movies = (
            np.std(first, axis=0) * rng.standard_normal(first.shape) for first in (users, movies)
        )
        # As those of the first day: what is popular does not shift the mean rating.
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
                    _scores(
                        _turned(users[user_rows], last_users[user_rows], angle),
                        _turned(movies[movie_rows], last_movies[movie_rows], angle),
                    )
                )
                for angle in (angles, np.zeros_like(angles))
            )
            yield user_rows, movie_rows, draw_stars(rng, now, self), times, expected[now], expected[at_first]


def draw_lives(rng: np.random.Generator, number: int, staying: float) -> np.ndarray:
    """The moments at which so many come and go, float64 [number, 2], of which a share stays all the time."""
    stays = rng.permutation(number) < staying * number
    arrival = rng.uniform(FIRST_ARRIVAL, LAST_ARRIVAL, number)
    retirement = arrival + LEAST_STAY + rng.exponential(MEAN_MORE, number)
    arrival[stays], retirement[stays] = 0, 1
    return np.clip(np.stack([arrival, retirement], axis=1), 0, 1)


def _first_sessions(rng: np.random.Generator, lives: np.ndarray) -> np.ndarray:
    """The moments of the users' first sessions, float64 [users, 1]: when they come, and for those who were
    there before, any in the first half of what is left of their time, or all would begin at once.
    """
    come, gone = lives[:, :1], lives[:, 1:]
    return np.where(come > 0, come, gone / 2 * rng.random(come.shape))


def _draw_movies(
    rng: np.random.Generator, user_rows: np.ndarray, moments: np.ndarray, lives: np.ndarray, picks: np.ndarray
) -> np.ndarray:
    """Draw the movie of each rating, int64 [ratings]: one that is there then, and none twice for a user.

    lives: see `draw_lives`; picks: cumulative chance of the movies, float64 [movies].
    """
    movies, part = np.full(len(user_rows), -1), np.arange(len(user_rows))
    # What does not fit is drawn anew, for the users who still miss a movie: few after the first rounds.
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
    """Parameters of ratings at their moments, float64 [ratings, 1 + rank]."""
    return np.cos(angles)[:, None] * first + np.sin(angles)[:, None] * last


def _scores(users: np.ndarray, movies: np.ndarray) -> np.ndarray:
    """Of parameters at one moment, float64 [ratings]."""
    return MEAN_SCORE + users[:, 0] + movies[:, 0] + (users[:, 1:] * movies[:, 1:]).sum(axis=1)
