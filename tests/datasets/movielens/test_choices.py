"""Choices of the stationary world: clusters, tastes and order as planted, and the best possible ranking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.choices import FAVOURITES, ORDER, TASTE, Clusters, draw_clusters
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.metrics import measure_ranks
from tests.support.written_world import World, read

NUM_RATINGS = 30_000
LEFT_OUT = ("--split", "leave_one_out", "--validation_fraction", "0")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("choices") / "world"
    write_synthetic(folder, NUM_RATINGS, seed=0)
    return read(folder)


@pytest.fixture
def popularity() -> np.ndarray:
    return np.arange(1.0, 38.0)[np.random.default_rng(3).permutation(37)] / np.arange(1.0, 38.0).sum()


@pytest.fixture
def clusters(popularity: np.ndarray) -> Clusters:
    return draw_clusters(np.random.default_rng(0), popularity)


def columns_of(folder: Path, *flags: str) -> Columns:
    return open_columns(parse_args(["--data_path", str(folder), *(flags or LEFT_OUT)]))


def newest_of(world: World) -> np.ndarray:
    """Places of the last rating of each user."""
    return np.flatnonzero(np.diff(world.user_ids, append=0))


def chances_of(
    clusters: Clusters, popularity: np.ndarray, taste: np.ndarray, last: int | None, had: list[int]
) -> np.ndarray:
    """Chance of each movie, float64 [movies]: the definition, word by word.

    taste: of the favourite clusters, float64 [clusters], with the sum 1.
    """
    members = np.split(clusters.movies, clusters.begins[1:-1])
    chances = (1 - ORDER - TASTE) * popularity
    for cluster, movies in enumerate(members):
        within = popularity[movies] / popularity[movies].sum()
        chances[movies] += TASTE * taste[cluster] * within
        if last in members[cluster - 1].tolist():
            chances[movies] += ORDER * within
    assert chances.sum() == pytest.approx(1 if last is not None else 1 - ORDER)
    chances[had] = 0
    return np.asarray(chances / chances.sum())


def taste_of(clusters: Clusters, row: np.ndarray) -> np.ndarray:
    """Chances of the favourite clusters in a row of `Clusters.draw_tastes`."""
    return np.asarray((row - (1 - ORDER - TASTE) * clusters.popularity) / TASTE)


def test_each_movie_is_in_one_cluster_the_popular_ones_first(
    clusters: Clusters, popularity: np.ndarray
) -> None:
    assert sorted(clusters.movies) == [*range(37)]
    members = np.split(clusters.movies, clusters.begins[1:-1])
    assert [len(movies) for movies in members] == pytest.approx([6] * 6, abs=1)
    for movies in members:
        assert (np.diff(popularity[movies]) < 0).all()
    assert clusters.popularity == pytest.approx([popularity[movies].sum() for movies in members])
    assert clusters.popularity == pytest.approx(np.full(6, 1 / 6), abs=0.05)


def test_users_have_distinct_favourites(clusters: Clusters) -> None:
    tastes = clusters.draw_tastes(np.random.default_rng(1), 100)
    assert tastes.sum(axis=1) == pytest.approx(np.full(100, 1 - ORDER))
    for row in tastes:
        assert np.sort(taste_of(clusters, row))[::-1] == pytest.approx([*FAVOURITES, 0, 0], abs=1e-12)


def test_movies_are_taken_with_their_chances(clusters: Clusters, popularity: np.ndarray) -> None:
    rng = np.random.default_rng(2)
    row = clusters.draw_tastes(rng, 1)
    movies = clusters.choose(rng, np.repeat(row, 60_000, axis=0), np.full(60_000, 3))[0].reshape(-1, 3)
    taste = taste_of(clusters, row[0])
    first = chances_of(clusters, popularity, taste, None, [])
    assert np.bincount(movies[:, 0], minlength=37) / 60_000 == pytest.approx(first, abs=0.01)
    # After the most frequent beginning.
    pairs, numbers = np.unique(movies[:, :2], axis=0, return_counts=True)
    one, two = pairs[numbers.argmax()].tolist()
    after = movies[(movies[:, 0] == one) & (movies[:, 1] == two), 2]
    assert len(after) > 400
    third = chances_of(clusters, popularity, taste, two, [one, two])
    assert np.bincount(after, minlength=37) / len(after) == pytest.approx(third, abs=0.06)


def test_ranks_equal_brute_force(clusters: Clusters, popularity: np.ndarray) -> None:
    rng, counts = np.random.default_rng(4), np.array([10, 3, 36, 18] * 20)
    tastes = clusters.draw_tastes(rng, len(counts))
    movies, ranks = clusters.choose(rng, tastes, counts)
    ends, found = np.cumsum(counts), []
    for user, taken in enumerate(np.split(movies, ends[:-1])):
        taste, had = taste_of(clusters, tastes[user]), list[int]()
        for movie in taken.tolist():
            chances = chances_of(clusters, popularity, taste, had[-1] if had else None, had)
            assert chances[movie] > 0
            found.append(int((chances >= chances[movie] * (1 - 1e-12)).sum()))
            had.append(movie)
    assert ranks.tolist() == found
    assert max(found) > 20


def test_a_ranking_that_knows_less_is_worse(clusters: Clusters, popularity: np.ndarray) -> None:
    rng, number = np.random.default_rng(5), 4_000
    tastes = clusters.draw_tastes(rng, number)
    movies, ranks = (part.reshape(-1, 6) for part in clusters.choose(rng, tastes, np.full(number, 6)))
    unknown = clusters.popularity
    less: dict[str, list[int]] = {"order": [], "taste": [], "popularity": []}
    for row, (*had, taken) in zip(tastes, movies.tolist(), strict=True):
        taste = taste_of(clusters, row)
        for name, known, last in (
            ("order", unknown, had[-1]),
            ("taste", taste, None),
            ("popularity", unknown, None),
        ):
            chances = chances_of(clusters, popularity, known, last, had)
            less[name].append(int((chances >= chances[taken]).sum()))
    found = {name: measure_ranks(np.array(each))["ndcg_at_10"] for name, each in less.items()}
    best = measure_ranks(ranks[:, -1])["ndcg_at_10"]
    assert best > found["order"] + 0.01
    assert best > found["taste"] + 0.1
    assert min(found["order"], found["taste"]) > found["popularity"] + 0.01


def test_no_user_has_a_movie_twice_and_each_rating_is_later_than_the_last_one(world: World) -> None:
    assert len(set(zip(world.user_ids, world.movie_ids, strict=True))) == len(world.ratings) == NUM_RATINGS
    is_same = np.diff(world.user_ids) == 0
    assert (np.diff(world.user_ids) >= 0).all()
    assert (np.diff(world.times)[is_same] > 0).all()


def test_the_oracle_is_among_the_baselines_of_rankings_where_each_users_newest_is_the_test(
    world: World,
) -> None:
    columns = columns_of(world.folder)
    ranks = np.load(world.folder / "ranks.npy")
    found = columns.baselines["ranks"]
    assert list(found) == ["a random order", "popularity", "oracle"]
    assert found["oracle"] == pytest.approx(
        measure_ranks(ranks[newest_of(world)].astype(int)).values, abs=1e-12
    )
    assert found["oracle"]["ndcg_at_10"] > 4 * found["popularity"]["ndcg_at_10"]
    assert found["popularity"]["ndcg_at_10"] > 5 * found["a random order"]["ndcg_at_10"]
    # There it would know of events that the ranking does not.
    assert list(columns_of(world.folder, "--split", "time").baselines["ranks"]) == [
        "a random order",
        "popularity",
    ]


def test_the_oracle_matches_its_ratings_when_some_are_skipped(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    folder.mkdir()
    for path in filter(Path.is_file, world.folder.iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())
    # Another rating of what the first user had first, later than all of his.
    lines = (folder / "ratings.dat").read_text().splitlines()
    number = int((world.user_ids == 1).sum())
    user, movie, _, _ = lines[0].split("::")
    lines.insert(number, f"{user}::{movie}::3::{world.times[number - 1] + 1}")
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    for name in ("oracle", "ranks"):
        column = np.load(world.folder / f"{name}.npy")
        np.save(folder / f"{name}.npy", np.insert(column, number, np.float32(17)))
    oracle = columns_of(folder).baselines["ranks"]["oracle"]
    ranks = np.load(world.folder / "ranks.npy")[newest_of(world)]
    ranks[0] = 17
    assert oracle == pytest.approx(measure_ranks(ranks.astype(int)).values, abs=1e-12)
