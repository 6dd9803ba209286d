"""The planted world that synthetic ratings are drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

MIN_RATINGS_PER_USER = 20
# Spread of the log-normal activity: half of the users rate fewer than 100 movies, a few rate a thousand.
ACTIVITY_SIGMA = 1.2
# Tuned together at a million ratings: ml-1m's histogram, an RMSE of about 0.86 for the oracle and 0.91 for a
# model of biases alone. With some 130 ratings per user to learn from, every strong factor costs a trained
# model about 0.6 % of RMSE over the oracle, so only the first is strong.
MEAN_SCORE = 3.7
USER_BIAS_STD = 0.48
MOVIE_BIAS_STD = 0.54
# Shares of the variance that the side features explain: enough to be worth having, not enough alone.
USER_EXPLAINED = 0.5
MOVIE_EXPLAINED = 0.7
# Scores lie on this grid, so the oracle is a table, and another machine's last bits change no byte.
SCORE_STEPS = 256
MIN_SCORE, MAX_SCORE = -3, 9

# From 2000-04-25 to 2003-02-28, in seconds since 1970, UTC.
FIRST_TIME = 956_620_800
LAST_TIME = 1_046_390_400
SESSION_SECONDS = 3600
# A user's first session lies in this first part of the period and the others anywhere after it, so that the
# users of the newest ratings have older ones to learn from.
JOIN_PERIOD = 0.6
SESSIONS = 6
# Bounds the memory; part of the format, since it decides which random number goes where.
USERS_PER_BLOCK = 4096


@dataclass(frozen=True)
class World:
    """What a world may differ in from the default one, for seeing what does not hold in that one alone.

    noise_std: of a rating around its score, in stars; factor_stds: of the user's side of each planted factor;
    mean_ratings_per_user: at most; smaller sets have less.
    """

    NAME: ClassVar = "fixed"
    # What is predicted of each rating, by the names of its files: the first one is the best there can be.
    ORACLES: ClassVar[tuple[str, ...]] = ("oracle",)

    noise_std: float = 0.9
    factor_stds: tuple[float, ...] = (0.3, 0.1, 0.06, 0.04)
    mean_ratings_per_user: float = 165

    @property
    def rank(self) -> int:
        """The number of planted factors."""
        return len(self.factor_stds)

    def draw(
        self,
        rng: np.random.Generator,
        users: np.ndarray,
        movies: np.ndarray,
        counts: np.ndarray,
        picks: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield (user row, movie row, rating, time, and what each of ORACLES predicts), each [ratings of a
        block of users].

        users, movies: planted parameters, float64 [users or movies, 1 + rank], the bias first; counts:
        ratings of each user, int64 [users]; picks: cumulative chance of the movies, float64 [movies].
        """
        return draw_ratings(rng, users, movies, counts, picks, self)

    def describe(self, ratings: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """What oracle.json says of this world alone.

        ratings: int8 [ratings]; predicted: what each of ORACLES predicts, float32 [oracles, ratings].
        """
        return {}


# A full-size one, like ml-1m.
DEFAULT_WORLD = World()


def with_unknown(rng: np.random.Generator, known: np.ndarray, explained: float) -> np.ndarray:
    """Columns of variance 1, of which `known` explains the given share."""
    unknown = rng.standard_normal(known.shape)
    return math.sqrt(explained) * standardized(known) + math.sqrt(1 - explained) * unknown


def standardized(columns: np.ndarray) -> np.ndarray:
    """Columns of mean 0 and variance 1."""
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


def draw_counts(rng: np.random.Generator, num_ratings: int, num_users: int, num_movies: int) -> np.ndarray:
    """Ratings of each user, int64 [num_users], with the sum num_ratings."""
    spare = num_ratings - MIN_RATINGS_PER_USER * num_users
    shares = np.exp(ACTIVITY_SIGMA * rng.standard_normal(num_users))
    # Whoever has rated a third of the catalogue is running out of movies.
    limit = (num_movies / 3 - MIN_RATINGS_PER_USER) / spare
    shares = np.minimum(shares / shares.sum(), limit)
    ends = np.rint(np.cumsum(shares / shares.sum()) * spare).astype(np.int64)
    return MIN_RATINGS_PER_USER + np.diff(ends, prepend=0)


def draw_ratings(
    rng: np.random.Generator,
    users: np.ndarray,
    movies: np.ndarray,
    counts: np.ndarray,
    picks: np.ndarray,
    world: World,
) -> Iterator[tuple[np.ndarray, ...]]:
    """See `World.draw`."""
    expected_of_step = expected_ratings(world)
    for first in range(0, len(users), USERS_PER_BLOCK):
        block = counts[first : first + USERS_PER_BLOCK]
        user_rows, movie_rows = _draw_pairs(rng, block, picks)
        times = draw_times(rng, len(block), user_rows)
        user_rows += first
        scores = MEAN_SCORE + users[user_rows, 0] + movies[movie_rows, 0]
        for factor in range(1, 1 + world.rank):
            scores += users[user_rows, factor] * movies[movie_rows, factor]
        steps = steps_of(scores)
        yield user_rows, movie_rows, draw_stars(rng, steps, world), times, expected_of_step[steps]


def steps_of(scores: np.ndarray) -> np.ndarray:
    """The place of each score on the grid, int64 of any shape."""
    return np.rint((np.clip(scores, MIN_SCORE, MAX_SCORE) - MIN_SCORE) * SCORE_STEPS).astype(np.int64)


def draw_stars(rng: np.random.Generator, steps: np.ndarray, world: World) -> np.ndarray:
    """Ratings of scores at these places of the grid, int64 [n]."""
    noisy = MIN_SCORE + steps / SCORE_STEPS + world.noise_std * rng.standard_normal(len(steps))
    return np.rint(np.clip(noisy, 1, 5)).astype(np.int64)


def expected_ratings(world: World) -> np.ndarray:
    """The expected rating at each step of the score, float32 [steps].

    A rating is 1 plus the number of thresholds 1.5, 2.5, 3.5 and 4.5 below the noisy score, so its
    expectation is 1 plus the sum of their normal probabilities.
    """
    width = world.noise_std * math.sqrt(2)
    scores = np.arange(MIN_SCORE * SCORE_STEPS, MAX_SCORE * SCORE_STEPS + 1) / SCORE_STEPS
    above = [[math.erfc((half - score) / width) / 2 for half in (1.5, 2.5, 3.5, 4.5)] for score in scores]
    return (1 + np.sum(above, axis=1)).astype(np.float32)


def _draw_pairs(
    rng: np.random.Generator, counts: np.ndarray, picks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw each user's movies without replacement.

    Args:
        counts: movies per user, int64 [users].
        picks: cumulative chance of the movies, float64 [movies].

    Returns:
        User rows and movie rows, each int64 [sum of counts], sorted by user, then movie.
    """
    missing, complete, pairs = counts, [], np.empty(0, np.int64)
    # A movie drawn twice is drawn anew, for the users who still miss one: few after the first rounds.
    while missing.any():
        drawn = np.searchsorted(picks[:-1], rng.random(missing.sum()), side="right")
        pairs = np.concatenate([pairs, np.repeat(np.arange(len(counts)), missing) * len(picks) + drawn])
        pairs.sort()
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        user_rows = pairs // len(picks)
        missing = np.where(missing > 0, counts - np.bincount(user_rows, minlength=len(counts)), 0)
        complete.append(pairs[missing[user_rows] == 0])
        pairs = pairs[missing[user_rows] > 0]
    return np.divmod(np.sort(np.concatenate(complete)), len(picks))


def draw_times(rng: np.random.Generator, num_users: int, user_rows: np.ndarray) -> np.ndarray:
    """Draw the second of each rating, int64 [ratings], of users who come in the first part of the period and
    stay.
    """
    joined = JOIN_PERIOD * rng.random((num_users, 1))
    return draw_sessions(rng, joined, np.ones_like(joined), user_rows)


def draw_sessions(
    rng: np.random.Generator, joined: np.ndarray, left: np.ndarray, user_rows: np.ndarray
) -> np.ndarray:
    """Draw the second of each rating, int64 [ratings]: a few sessions per user, the first the longest.

    joined, left: when each user comes and goes, as shares of the period, float64 [users, 1].
    """
    later = joined + (left - joined) * rng.random((len(joined), SESSIONS - 1))
    sessions = np.concatenate([joined, later], axis=1) * (LAST_TIME - FIRST_TIME - SESSION_SECONDS)
    # Squared, so that the first session has four ratings in ten.
    session = (SESSIONS * np.square(rng.random(len(user_rows)))).astype(np.int64)
    within = rng.integers(SESSION_SECONDS, size=len(user_rows))
    return FIRST_TIME + sessions[user_rows, session].astype(np.int64) + within
