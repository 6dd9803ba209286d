"""The planted world in which people rate what they like, tastes drift, and days differ.

Which movie a user rates next depends on its popularity and on his taste for it, the product of their planted
factors in units of its standard deviation over all users and movies:

    chance of a movie that he has not rated  ~  popularity * exp(choice_strength * taste)

His factors go from his first rating to his last one, here at the share x of the time between them, and all
ratings of one user and day have an offset in common:

    factors at x = factors + (x - 1/2) * way,   way = drift * the factors' spread * a standard normal
    score = mean + biases + offset of user and day + factors at x * factors of the movie

What the choices tell is stated by the RMSE of three, who all know the biases, the offsets and the movies:

    rmse           the oracle: knows the user's factors at the time of each rating; nothing can be better
    choices_rmse   knows no factors of users, but which movies each of them rates, test ratings included, and
                   estimates his factors by a linear function of the mean factors of these movies
    biases_rmse    knows no factors and no choices

biases_rmse - rmse is the most that anything about taste can gain, so also the most that choices can, and
biases_rmse - choices_rmse is what they gain by that estimate, before a single star is seen. The last two are
those of the best linear function of what is expected without the factors, or with the estimated ones: people
who choose what they like give more stars than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from recsuite.datasets.movielens.synthetic import (
    MEAN_SCORE,
    World,
    draw_stars,
    draw_times,
    expected_ratings,
    steps_of,
)

SECONDS_PER_DAY = 86_400
# A user whose tastes drift chooses by what he likes in the middle of each of so many equal parts of his time.
PARTS = 4
# Fewer than in the other worlds, since every movie is looked at for each of them; part of the format, too.
CHOOSERS_PER_BLOCK = 1024


@dataclass(frozen=True)
class ChoosingWorld(World):
    """A world in which choices tell of taste.

    choice_strength: of taste in the choice of movies, 0 for popularity alone, as in the default world; drift:
    how far tastes go from the first rating to the last, in units of their spread; day_std: of the offset of a
    user and day (UTC), in stars.
    """

    NAME: ClassVar = "choosing"
    ORACLES: ClassVar = ("oracle", "choices", "biases")

    choice_strength: float = 0.5
    drift: float = 0.0
    day_std: float = 0.0

    def draw(
        self,
        rng: np.random.Generator,
        users: np.ndarray,
        movies: np.ndarray,
        counts: np.ndarray,
        picks: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """See `World.draw`. Takes time for every pair of a user and a movie, rated or not."""
        expected = expected_ratings(self)
        log_chances = np.log(np.diff(picks, prepend=0))
        for begin in range(0, len(users), CHOOSERS_PER_BLOCK):
            block = users[begin : begin + CHOOSERS_PER_BLOCK]
            tastes = self._draw_tastes(rng, block[:, 1:])
            moments = draw_moments(rng, counts[begin : begin + len(block)])
            rows, movie_rows, times = self._draw_movies(rng, tastes, movies[:, 1:], log_chances, moments)
            factors = movies[movie_rows, 1:]
            scores = MEAN_SCORE + block[rows, 0] + movies[movie_rows, 0]
            scores += draw_offsets(rng, rows, times, self.day_std)
            now = tastes.at(shares_of_time(rows, times), rows)
            read = factors_by_choices(tastes.middle, rows, factors)[rows]
            steps, read_steps = (steps_of(scores + (known * factors).sum(axis=1)) for known in (now, read))
            stars = draw_stars(rng, steps, self)
            less = expected[read_steps], expected[steps_of(scores)]
            yield begin + rows, movie_rows, stars, times, expected[steps], *less

    def describe(self, ratings: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """See `World.describe`: the RMSE of the two who know less than the oracle."""
        less = zip(self.ORACLES[1:], predicted[1:], strict=True)
        # Rounded as that of the oracle.
        return {f"{name}_rmse": round(linear_rmse(ratings, column), 9) for name, column in less}

    def _draw_tastes(self, rng: np.random.Generator, factors: np.ndarray) -> Tastes:
        """factors: float64 [users, rank]."""
        return Tastes(factors, self.drift * np.array(self.factor_stds) * rng.standard_normal(factors.shape))

    def _draw_movies(
        self,
        rng: np.random.Generator,
        tastes: Tastes,
        movies: np.ndarray,
        log_chances: np.ndarray,
        moments: tuple[np.ndarray, np.ndarray],
    ) -> tuple[np.ndarray, ...]:
        """Draw what each user rates at his moments.

        Args:
            tastes: of the users.
            movies: factors, float64 [movies, rank].
            log_chances: of the movies by popularity, float64 [movies].
            moments: user row and time, see `draw_moments`.

        Returns:
            User row, movie row and time, each int64 [ratings], sorted by user, then movie.
        """
        rows, times = moments
        num_parts = PARTS if self.drift else 1
        parts = np.minimum((num_parts * shares_of_time(rows, times)).astype(np.int64), num_parts - 1)
        wanted = np.bincount(rows * num_parts + parts, minlength=len(tastes.middle) * num_parts)
        strength = self.choice_strength / math.hypot(*self.factor_stds)
        likings = (
            log_chances + strength * tastes.at(np.array((part + 0.5) / num_parts)) @ movies.T
            for part in range(num_parts)
        )
        part_of = draw_choices(rng, wanted.reshape(-1, num_parts), len(movies), likings)
        rows, movie_rows = np.nonzero(part_of >= 0)
        # Which of a user's movies meets which time of the same part is left to chance: the order of the drawn
        # times says nothing.
        paired = np.empty_like(times)
        paired[np.lexsort((part_of[rows, movie_rows], rows))] = times[np.lexsort((parts, rows))]
        return rows, movie_rows, paired


@dataclass(frozen=True)
class Tastes:
    """Users' factors in the middle of their time, and the way from first to last; float64 [users, rank]."""

    middle: np.ndarray
    way: np.ndarray

    def at(self, shares: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The factors of users at shares of their time, float64 [n, rank]; shares: float64 [n], or one."""
        return self.middle[rows] + (shares[..., None] - 0.5) * self.way[rows]


def draw_moments(rng: np.random.Generator, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw when users rate: user row and second of each rating, each int64 [ratings], sorted by user.

    counts: ratings of each user, int64 [users].
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, draw_times(rng, len(counts), rows)


def shares_of_time(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Where each rating lies between its user's first and last one, from 0 to 1, float64 [ratings].

    rows, times: user row and second of each rating, int64 [ratings], sorted by user.
    """
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    first, last = (extreme.reduceat(times, starts)[rows] for extreme in (np.minimum, np.maximum))
    return (times - first) / np.maximum(last - first, 1)


def draw_choices(
    rng: np.random.Generator, wanted: np.ndarray, num_movies: int, likings: Iterable[np.ndarray]
) -> np.ndarray:
    """Draw each user's movies without replacement, part after part of his time.

    Args:
        wanted: movies of each user and part, int64 [users, parts].
        likings: of each part, the logarithm of the weight of each movie, float64 [users, movies].

    Returns:
        The part in which a user rates a movie, -1 if he never does, int8 [users, movies].
    """
    part_of = np.full((len(wanted), num_movies), -1, np.int8)
    for part, (number, liking) in enumerate(zip(wanted.T, likings, strict=True)):
        # The movies with the k shortest of exponential waiting times are k draws by weight, none twice. In
        # float64, or another machine's last bits would choose other movies.
        waits = np.log(rng.standard_exponential(liking.shape)) - liking
        waits[part_of >= 0] = np.inf
        longest = np.take_along_axis(np.sort(waits, axis=1), np.maximum(number - 1, 0)[:, None], axis=1)
        part_of[(waits <= longest) & (number > 0)[:, None]] = part
    return part_of


def draw_offsets(rng: np.random.Generator, rows: np.ndarray, times: np.ndarray, std: float) -> np.ndarray:
    """Draw what the ratings of a user and day have in common, float64 [ratings].

    rows, times: user row and second of each rating, int64 [ratings].
    """
    num_days = times.max() // SECONDS_PER_DAY + 1
    days, day_of = np.unique(rows * num_days + times // SECONDS_PER_DAY, return_inverse=True)
    return std * rng.standard_normal(len(days))[day_of]


def factors_by_choices(factors: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The best linear estimate of users' factors from their movies' mean factors, float64 [users, rank].

    factors: those of the users, float64 [users, rank]; rows: user of each rating, int64 [ratings], sorted;
    chosen: factors of the movie of each rating, float64 [ratings, rank].
    """
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    means = np.add.reduceat(chosen, starts) / np.diff(starts, append=len(rows))[:, None]
    known = np.column_stack([np.ones(len(means)), means])
    return known @ np.linalg.lstsq(known, factors)[0]


def linear_rmse(ratings: np.ndarray, predicted: np.ndarray) -> float:
    """The RMSE of the best linear function of a prediction; both [ratings]."""
    return float(np.std(ratings) * math.sqrt(1 - np.corrcoef(ratings, predicted)[0, 1] ** 2))
