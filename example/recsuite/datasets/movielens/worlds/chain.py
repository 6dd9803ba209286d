"""The planted world in which what a user rates next follows from what he rated last.

Users walk along a Markov chain over the movies. Each movie has a few successors, all movies with the same
chances of their own, and a share of the steps are leaps, to any movie by its popularity:

    weight of a movie after another  =  (1 - LEAPS) * chance of the successor, if it is one
                                        + LEAPS * popularity

A user goes to no movie twice: the weights of what he had are 0, and those of the others are divided by their
sum. He begins at any movie by its popularity. Who knows the chain and the walk so far can rank the movies no
better than by these weights, whatever else he knows of the user: no older movie tells anything of the next
but that it is not the next.

For each rating the files hold, besides the expected stars,

    ranks.npy      the place of its movie in that ranking, among those that its user had not had, from 1 on
    surprise.npy   minus the logarithm of its chance, in bits; their mean, in oracle.json, is the entropy of
                   a step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from recsuite.datasets.batching.places import places_of
from recsuite.datasets.movielens.worlds.world import (
    LAST_TIME,
    MEAN_SCORE,
    World,
    draw_stars,
    draw_times,
    expected_ratings,
    steps_of,
)

# Of the successors of every movie, without leaps.
CHANCES = np.array([0.4, 0.25, 0.15, 0.12, 0.08])
LEAPS = 0.1
# What is popular in the other worlds takes most of the ratings; a walk would come round to it all the time,
# and find that its user had it.
FLATTENED = 0.5
# A mark for each of them and every movie; part of the format, as it decides which random number goes where.
WALKERS_PER_BLOCK = 1024


@dataclass(frozen=True)
class ChainWorld(World):
    """A world with an order."""

    NAME: ClassVar = "chain"
    ORACLES: ClassVar = ("oracle", "ranks", "surprise")

    def draw(
        self,
        rng: np.random.Generator,
        users: np.ndarray,
        movies: np.ndarray,
        counts: np.ndarray,
        picks: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """See `World.draw`; the ratings of a user lie in the order of his walk, each later than the last."""
        chain = draw_chain(rng, np.diff(picks, prepend=0) ** FLATTENED)
        expected = expected_ratings(self)
        for begin in range(0, len(users), WALKERS_PER_BLOCK):
            block = counts[begin : begin + WALKERS_PER_BLOCK]
            rows, place = np.repeat(np.arange(len(block)), block), places_of(np.zeros_like(block), block)
            movie_rows, ranks, surprise = (walked[rows, place] for walked in chain.walk(rng, block))
            times = in_order(rows, draw_times(rng, len(block), rows))
            of_user, of_movie = users[begin + rows], movies[movie_rows]
            scores = steps_of(MEAN_SCORE + of_user[:, 0] + of_movie[:, 0] + taste(of_user, of_movie))
            stars = draw_stars(rng, scores, self)
            yield begin + rows, movie_rows, stars, times, expected[scores], ranks, surprise

    def describe(self, ratings: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """See `World.describe`: the entropy of a step, in bits."""
        # Rounded as the error of the oracle.
        return {"entropy": round(float(predicted[2].mean(dtype=np.float64)), 9)}


@dataclass(frozen=True)
class Chain:
    """successors: of each movie, none of them itself and none twice, int64 [movies, K], in the order of
    CHANCES; popularity: of the movies, float64 [movies], with the sum 1.
    """

    successors: np.ndarray
    popularity: np.ndarray

    def walk(self, rng: np.random.Generator, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw walks of so many steps, int64 [users].

        Returns:
            Movies, their ranks and how surprising they are, int64, int64 and float64 [users, most steps].
        """
        shape = len(counts), int(counts.max())
        movies, ranks, surprise = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
        had, gone = np.zeros((len(counts), len(self.popularity)), bool), np.zeros(len(counts))
        for step in range(shape[1]):
            rows = np.flatnonzero(counts > step)
            last = movies[rows, step - 1] if step else np.full(len(rows), -1)
            found = self._next(rng, rows, last, had)
            movies[rows, step] = found
            ranks[rows, step], surprise[rows, step] = self.judged(last, found, had[rows], gone[rows])
            had[rows, found] = True
            gone[rows] += self.popularity[found]
        return movies, ranks, surprise

    def _next(
        self, rng: np.random.Generator, rows: np.ndarray, last: np.ndarray, had: np.ndarray
    ) -> np.ndarray:
        """Draw the movies after the last ones, int64 [n]; had: by row, bool [users, movies]."""
        found, missing = np.full(len(rows), -1), np.arange(len(rows))
        by_popularity, by_chance = np.cumsum(self.popularity), np.cumsum(CHANCES)
        # What was had is drawn anew, which is what dividing the other weights by their sum says.
        while len(missing):
            leaps = (rng.random(len(missing)) < LEAPS) | (last[missing] < 0)
            drawn = rng.random(len(missing))
            successor = self.successors[last[missing], np.searchsorted(by_chance[:-1], drawn, side="right")]
            leapt = np.searchsorted(by_popularity[:-1], drawn, side="right")
            movie = np.where(leaps, leapt, successor)
            is_new = ~had[rows[missing], movie]
            found[missing[is_new]] = movie[is_new]
            missing = missing[~is_new]
        return found

    def judged(
        self, last: np.ndarray, found: np.ndarray, had: np.ndarray, gone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ranks of movies after the last ones, int64 [n], and how surprising they are, float64 [n].

        last: -1 at the beginning of a walk; had: before, bool [n, movies]; gone: the popularity of all of
        those, float64 [n]. Ties count against a movie, as in every evaluation.
        """
        share, successors = np.where(last < 0, 1.0, LEAPS), self.successors[last]
        chances = np.where(last < 0, 0.0, 1 - LEAPS)[:, None] * CHANCES
        weights = chances + share[:, None] * self.popularity[successors]
        is_found = successors == found[:, None]
        own = share * self.popularity[found] + (chances * is_found).sum(axis=1)
        is_open = ~np.take_along_axis(had, successors, axis=1)
        above = (is_open & ~is_found & (weights >= own[:, None])).sum(axis=1)
        # Of all others only the popular ones can be above, and above most successors there are none.
        unsure = np.flatnonzero(share * self.popularity.max() >= own)
        popular = share[unsure, None] * self.popularity >= own[unsure, None]
        popular &= ~had[unsure]
        popular[np.arange(len(unsure))[:, None], successors[unsure]] = False
        popular[np.arange(len(unsure)), found[unsure]] = False
        above[unsure] += popular.sum(axis=1)
        left = share * (1 - gone) + (chances * is_open).sum(axis=1)
        return above + 1, -np.log2(own / left)


def draw_chain(rng: np.random.Generator, weights: np.ndarray) -> Chain:
    """Draw the successors of each movie by weights, float64 [movies]."""
    popularity = weights / weights.sum()
    num_movies, ends = len(weights), np.cumsum(popularity)[:-1]
    successors, missing = np.empty((num_movies, len(CHANCES)), np.int64), np.arange(num_movies)
    while len(missing):
        drawn = np.searchsorted(ends, rng.random((len(missing), len(CHANCES))), side="right")
        successors[missing] = drawn
        ordered = np.sort(np.column_stack([drawn, missing]), axis=1)
        missing = missing[(np.diff(ordered, axis=1) == 0).any(axis=1)]
    return Chain(successors, popularity)


def in_order(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Times in ascending order for each user, none twice, int64 [ratings]; rows: user of each, sorted."""
    # A second later than the one before, at least; users lie so far apart that none delays the next.
    apart = 2 * LAST_TIME * rows
    place = np.arange(len(times))
    return np.maximum.accumulate(np.sort(apart + times) - place) + place - apart


def taste(users: np.ndarray, movies: np.ndarray) -> np.ndarray:
    """The product of the factors of users and movies, float64 [n]; of parameters with the bias first."""
    return (users[:, 1:] * movies[:, 1:]).sum(axis=1)
