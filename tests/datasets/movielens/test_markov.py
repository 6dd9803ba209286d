"""Markov synthetic data: walks along a planted chain, and the best ranking of the next movie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import measure_ranks
from recsuite.datasets.movielens.synthetic import (
    CHANCES,
    LEAPS,
    MarkovChain,
    MarkovWorld,
    draw_chain,
    write_synthetic,
)
from recsuite.datasets.preparation.cache import open_columns
from tests.support.written_world import World, contents, read, rmse

NUM_RATINGS = 30_000
LEFT_OUT = ("--split", "leave_one_out", "--validation_fraction", "0")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("chain") / "world"
    write_synthetic(folder, NUM_RATINGS, seed=0, world=MarkovWorld())
    return read(folder)


@pytest.fixture
def chain() -> MarkovChain:
    return draw_chain(np.random.default_rng(0), np.arange(1.0, 31.0))


def columns_of(folder: Path, *flags: str) -> Columns:
    return open_columns(parse_args(["--data_path", str(folder), *(flags or LEFT_OUT)]))


def weights_of(chain: MarkovChain) -> np.ndarray:
    """Of each movie after each, float64 [movies, movies]: the definition, word by word."""
    weights = np.tile(LEAPS * chain.popularity, (len(chain.popularity), 1))
    for movie, successors in enumerate(chain.successors):
        for successor, chance in zip(successors, CHANCES, strict=True):
            weights[movie, successor] += (1 - LEAPS) * chance
    return weights


def test_another_seed_gives_another_chain(world: World, tmp_path: Path) -> None:
    assert world.summary["world"] == "markov"
    write_synthetic(tmp_path / "other", NUM_RATINGS, seed=1, world=MarkovWorld())
    other, same = contents(tmp_path / "other"), contents(world.folder)
    assert all(other[name] != same[name] for name in same)


def test_no_user_has_a_movie_twice_and_each_rating_is_later_than_the_last_one(world: World) -> None:
    assert len(set(zip(world.user_ids, world.movie_ids, strict=True))) == len(world.ratings) == NUM_RATINGS
    is_same = np.diff(world.user_ids) == 0
    assert (np.diff(world.user_ids) >= 0).all()
    assert (np.diff(world.times)[is_same] > 0).all()


def test_stars_are_those_of_a_planted_taste(world: World) -> None:
    assert set(world.ratings) == {1, 2, 3, 4, 5}
    assert world.summary["rmse"] == pytest.approx(rmse(world.ratings - world.oracle), abs=1e-7)
    assert 0.83 < world.summary["rmse"] < 0.89 < 0.95 * world.ratings.std()


def test_popularity_is_less_skewed_than_in_the_other_data_sets(world: World) -> None:
    counts = np.sort(np.unique(world.movie_ids, return_counts=True)[1])
    top = counts[-len(world.movies) // 10 :].sum() / NUM_RATINGS
    assert 0.2 < top < 0.45


def test_markov_successors_are_distinct_and_exclude_the_movie_itself(chain: MarkovChain) -> None:
    for movie, successors in enumerate(chain.successors.tolist()):
        assert len({movie, *successors}) == 1 + len(CHANCES)


def test_markov_walks_follow_the_chain_with_its_probability(chain: MarkovChain) -> None:
    movies, _, _ = chain.walk(np.random.default_rng(1), np.full(30_000, 2))
    first, second = movies.T
    assert np.bincount(first) / len(first) == pytest.approx(chain.popularity, abs=0.005)
    found = np.zeros((30, 30))
    np.add.at(found, (first, second), 1)
    # Nobody comes to where he is.
    expected = weights_of(chain)
    np.fill_diagonal(expected, 0)
    expected /= expected.sum(axis=1, keepdims=True)
    frequent = np.argsort(chain.popularity)[-5:]
    shares = found / found.sum(axis=1, keepdims=True)
    assert shares[frequent] == pytest.approx(expected[frequent], abs=0.04)


def test_ranks_and_surprise_equal_brute_force(chain: MarkovChain) -> None:
    counts = np.array([10, 3, 25, 18] * 20)
    movies, ranks, surprise = chain.walk(np.random.default_rng(2), counts)
    weights = weights_of(chain)
    seen_ranks = set()
    for user, count in enumerate(counts.tolist()):
        had: list[int] = []
        for step, movie in enumerate(movies[user, :count].tolist()):
            now = (weights[had[-1]] if had else chain.popularity).copy()
            now[had] = 0
            better = sum(weight >= now[movie] for other, weight in enumerate(now) if other != movie)
            assert ranks[user, step] == 1 + better
            assert surprise[user, step] == pytest.approx(-np.log2(now[movie] / now.sum()))
            seen_ranks.add(int(ranks[user, step]))
            had.append(movie)
    # Not only the few of the successors.
    assert {1, 2, 3, 4, 5} < seen_ranks
    assert max(seen_ranks) > 15


def test_the_oracle_is_among_the_baselines_of_rankings_where_each_users_newest_is_the_test(
    world: World,
) -> None:
    columns = columns_of(world.folder)
    ranks = np.load(world.folder / "ranks.npy")
    newest = np.flatnonzero(np.diff(world.user_ids, append=0))
    found = columns.baselines["ranks"]
    assert list(found) == ["a random order", "popularity", "oracle"]
    assert found["oracle"] == pytest.approx(measure_ranks(ranks[newest].astype(int)), abs=1e-12)
    assert found["oracle"]["ndcg_at_10"] > 10 * found["popularity"]["ndcg_at_10"]
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
    ranks = np.load(world.folder / "ranks.npy")[np.flatnonzero(np.diff(world.user_ids, append=0))]
    ranks[0] = 17
    assert oracle == pytest.approx(measure_ranks(ranks.astype(int)), abs=1e-12)


def counted_ndcg(columns: Columns) -> float:
    """NDCG@10 of a chain that is counted: how often each movie came after the user's last one."""
    test = columns.column("rows")[columns.num_train :]
    events = columns.column("rows")[: columns.num_train][["user", "item"]].tolist()
    last: dict[int, int] = {}
    had = np.zeros((columns.num_users, columns.num_items), bool)
    scores = np.zeros((columns.num_items, columns.num_items))
    for user, item in events:
        if user in last:
            scores[last[user], item] += 1
        last[user] = item
        had[user, item] = True
    # Of those that never came, the popular ones first.
    scores += had.mean(axis=0)
    found = scores[[last[user] for user in test["user"].tolist()]]
    own = found[np.arange(len(test)), test["item"]]
    above = (found >= own[:, None]) & ~had[test["user"]]
    return measure_ranks(above.sum(axis=1))["ndcg_at_10"]


def test_a_counted_chain_approaches_the_oracle_as_data_grow(tmp_path: Path) -> None:
    ratios = []
    for number in (3_000, 100_000):
        write_synthetic(tmp_path / str(number), number, seed=0, world=MarkovWorld())
        columns = columns_of(tmp_path / str(number))
        ratios.append(counted_ndcg(columns) / columns.baselines["ranks"]["oracle"]["ndcg_at_10"])
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.95
    assert 0.97 < ratios[-1] < 1


def test_synthetic_data_work_with_a_thousand_ratings(tmp_path: Path) -> None:
    for seed in range(2):
        write_synthetic(tmp_path / f"{seed}", 1_000, seed, MarkovWorld())
        assert len((tmp_path / f"{seed}" / "ratings.dat").read_text().splitlines()) == 1_000
