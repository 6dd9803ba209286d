"""Choices of the stationary world: the movie that a user takes next, and its place in the best ranking.

Each movie belongs to a cluster, and the clusters form a ring. A user takes

    with the chance ORDER    a movie of the cluster after that of the last movie
                    TASTE    a movie of one of the user's favourite clusters, by the chances in FAVOURITES
                    the rest any movie

and among these movies one by its popularity. A user takes no movie twice: the weights of earlier movies are
0, and those of the others are divided by their sum. The first movie of a user follows none, so its chances
are those of taste and of the rest. So the chance of every movie is known, given the favourites of the user,
the last movie and the earlier ones, and the best possible ranking is by these chances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from recsuite.compiled import compiled

ORDER, TASTE = 0.4, 0.3
FAVOURITES = np.array([0.4, 0.3, 0.2, 0.1])


@dataclass(frozen=True)
class Clusters:
    """Movies by cluster, and in each cluster the popular ones first.

    movies: int64 [movies]; begins: of each cluster in `movies`, and the end, int64 [clusters + 1]; shares:
    popularity of a movie in its cluster, float64 [movies], with the sum 1 in each cluster; popularity: of the
    clusters, float64 [clusters], with the sum 1.
    """

    movies: np.ndarray
    begins: np.ndarray
    shares: np.ndarray
    popularity: np.ndarray

    def draw_tastes(self, rng: np.random.Generator, num_users: int) -> np.ndarray:
        """Draw the chances of the clusters for users, up to those of ORDER, float64 [users, clusters]."""
        order = np.argsort(rng.random((num_users, len(self.popularity))), axis=1, kind="stable")
        tastes = np.tile((1 - ORDER - TASTE) * self.popularity, (num_users, 1))
        tastes[np.arange(num_users)[:, None], order[:, : len(FAVOURITES)]] += TASTE * FAVOURITES
        return tastes

    def choose(
        self, rng: np.random.Generator, tastes: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the movies of users, in the order in which they are taken.

        tastes: see `draw_tastes`; counts: number of movies of each user, int64 [users], fewer than there are.

        Returns:
            Movies, and the place of each in the best possible ranking of the movies that its user had not
            had, from 1 on; int64 [sum of counts] both, user after user.
        """
        draws = rng.random(counts.sum())
        positions, ranks = np.empty(len(draws), np.int64), np.empty(len(draws), np.int64)
        _choose(self.begins, self.shares, tastes, ORDER, counts, draws, positions, ranks)
        return self.movies[positions], ranks


def draw_clusters(rng: np.random.Generator, popularity: np.ndarray) -> Clusters:
    """Draw the clusters of movies with this popularity, float64 [movies] with the sum 1.

    The most popular movies are in different clusters, then the next ones, and so on. So clusters are about
    equally popular, and neither ORDER nor TASTE makes one more popular than another.
    """
    num_movies = len(popularity)
    num_clusters = round(math.sqrt(num_movies))
    rounds = math.ceil(num_movies / num_clusters)
    dealt = np.argsort(rng.random((rounds, num_clusters)), axis=1, kind="stable").ravel()[:num_movies]
    order = np.argsort(dealt, kind="stable")
    movies = np.argsort(-popularity, kind="stable")[order]
    begins = np.searchsorted(dealt[order], np.arange(num_clusters + 1))
    of_clusters = np.add.reduceat(popularity[movies], begins[:-1])
    return Clusters(movies, begins, popularity[movies] / of_clusters[dealt[order]], of_clusters)


@compiled
def _choose(
    begins: np.ndarray,
    shares: np.ndarray,
    tastes: np.ndarray,
    order: float,
    counts: np.ndarray,
    draws: np.ndarray,
    positions: np.ndarray,
    ranks: np.ndarray,
) -> None:
    """Write the positions of the taken movies in a `Clusters`, and their ranks, int64 [sum of counts]."""
    # order: chance of the cluster after that of the last movie; draws: float64 [sum of counts], from 0 to
    # below 1.
    num_clusters, number = len(begins) - 1, 0
    had, left = np.empty(len(shares), np.bool_), np.empty(num_clusters)
    for user in range(len(counts)):
        had[:] = False
        # Share of the movies of each cluster that the user has not had.
        left[:] = 1
        chances = tastes[user].copy()
        following = -1
        for _ in range(counts[user]):
            if following >= 0:
                chances[following] += order
            rest = 0.0
            for cluster in range(num_clusters):
                rest += chances[cluster] * left[cluster]
            rest *= draws[number]
            # Where rounding moves a draw beyond the end, the last cluster, and the last movie, is taken.
            own = -1
            for cluster in range(num_clusters):
                if left[cluster] > 0:
                    own = cluster
                    if rest < chances[cluster] * left[cluster]:
                        break
                    rest -= chances[cluster] * left[cluster]
            taken, rest = -1, rest / chances[own]
            for place in range(begins[own], begins[own + 1]):
                if not had[place]:
                    taken = place
                    if rest < shares[place]:
                        break
                    rest -= shares[place]
            chance, rank = chances[own] * shares[taken], 1
            for cluster in range(num_clusters):
                for place in range(begins[cluster], begins[cluster + 1]):
                    if chances[cluster] * shares[place] < chance:
                        break
                    # Ties count against a movie, as in every evaluation.
                    rank += not had[place] and place != taken
            positions[number], ranks[number] = taken, rank
            had[taken] = True
            # Added up again, because a difference would not be 0 after the last movie.
            left[own] = 0.0
            for place in range(begins[own], begins[own + 1]):
                if not had[place]:
                    left[own] += shares[place]
            if following >= 0:
                chances[following] = tastes[user, following]
            following = (own + 1) % num_clusters
            number += 1
