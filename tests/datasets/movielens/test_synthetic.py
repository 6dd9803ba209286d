"""The synthetic data set: its format, its resemblance to ml-1m, and an oracle that nothing beats."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import numpy as np
import pytest

from recsuite.datasets.movielens import synthetic as planted
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.errors import UserError
from tests.support.written_world import World, contents, read, rmse

NUM_RATINGS = 50_000
NAMES = ["movies.dat", "oracle.json", "oracle.npy", "ranks.npy", "ratings.dat", "users.dat"]
HISTOGRAM_OF_ML_1M = (0.056, 0.108, 0.261, 0.349, 0.226)
MEAN_OF_ML_1M, SPREAD_OF_ML_1M = 3.582, 1.117
GENRES_OF_ML_1M = {
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("synthetic") / "parent" / "world"
    write_synthetic(folder, NUM_RATINGS, seed=0)
    return read(folder)


@pytest.mark.parametrize(
    ("drawn", "digest"),
    [
        (planted.DEFAULT_WORLD, "f2680f79800843983e6c30779956bee796de47960a31269d92d81f3f9c62d481"),
        (planted.World(), "db8c6efd34f102c4e6f0954f1f8ee247665fc0341af7cd73f4e3f94865555fee"),
    ],
)
def test_bytes_are_those_of_earlier_versions(drawn: planted.World, digest: str, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "world", 5_000, seed=0, world=drawn)
    files = sorted(contents(tmp_path / "world").items())
    written = b"".join(name.encode() + content for name, content in files)
    assert hashlib.sha256(written).hexdigest() == digest


def test_another_seed_changes_every_file(world: World, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "other", NUM_RATINGS, seed=1)
    other, same = contents(tmp_path / "other"), contents(world.folder)
    assert all(other[name] != same[name] for name in NAMES)


def test_folder_holds_exactly_these_files(world: World) -> None:
    assert sorted(path.name for path in world.folder.iterdir()) == NAMES
    assert [path.name for path in world.folder.parent.iterdir()] == ["world"]


def test_every_line_is_a_rating_in_range_sorted_by_user(world: World) -> None:
    assert len(world.ratings) == NUM_RATINGS
    assert set(world.ratings) == {1, 2, 3, 4, 5}
    assert (np.diff(world.user_ids) >= 0).all()
    assert world.times.min() >= np.datetime64("2000-04-25", "s").astype(int)
    assert world.times.max() <= np.datetime64("2003-02-28", "s").astype(int)


def test_every_id_is_described(world: World) -> None:
    assert set(world.movie_ids) <= {int(movie[0]) for movie in world.movies}
    assert set(world.user_ids) == {int(user[0]) for user in world.users}


def test_movies_have_ml_1m_genres_gaps_and_awkward_titles(world: World) -> None:
    ids, titles, genres = zip(*world.movies, strict=True)
    assert {genre for names in genres for genre in names.split("|")} == GENRES_OF_ML_1M
    assert len(ids) < int(ids[-1])
    assert any(not title.isascii() for title in titles)
    assert any(":" in title for title in titles)
    assert any("," in title for title in titles)
    assert all(1900 < int(title[-5:-1]) <= 2000 for title in titles)
    assert len(set(titles)) == len(titles)


def test_users_have_ml_1m_codes(world: World) -> None:
    _, genders, ages, occupations, zips = zip(*world.users, strict=True)
    assert set(genders) == {"F", "M"}
    assert set(ages) == {"1", "18", "25", "35", "45", "50", "56"}
    assert set(occupations) == {str(code) for code in range(21)}
    assert all(len(code) == 5 and code.isdigit() for code in zips)


def test_histogram_is_near_ml_1m(world: World) -> None:
    shares = np.bincount(world.ratings, minlength=6)[1:] / NUM_RATINGS
    assert shares == pytest.approx(HISTOGRAM_OF_ML_1M, abs=0.05)


def test_mean_and_spread_are_near_ml_1m(world: World) -> None:
    assert world.ratings.mean() == pytest.approx(MEAN_OF_ML_1M, abs=0.1)
    assert world.ratings.std() == pytest.approx(SPREAD_OF_ML_1M, abs=0.04)


def test_popularity_is_as_skewed_as_movielens(world: World) -> None:
    counts = np.sort(np.bincount(world.movie_ids))[::-1]
    num_movies, num_users = len(world.movies), len(world.users)
    assert 0.5 < counts[: num_movies // 10].sum() / NUM_RATINGS < 0.67
    assert counts[0] / num_users < 0.52
    assert (counts >= 3).sum() > num_movies / 2


def test_activity_is_long_tailed_from_twenty(world: World) -> None:
    counts = np.bincount(world.user_ids)[1:]
    assert counts.min() >= 20
    assert np.median(counts) < 0.8 * counts.mean()
    assert counts.max() > 4 * counts.mean()
    assert counts.max() < len(world.movies) / 2


def test_oracle_has_the_rmse_that_its_summary_states(world: World) -> None:
    assert world.oracle.dtype == np.float32
    assert world.oracle.shape == (NUM_RATINGS,)
    assert world.summary == {
        "rmse": pytest.approx(rmse(world.ratings - world.oracle), abs=1e-7),
        "num_ratings": NUM_RATINGS,
        "num_users": len(world.users),
        "num_movies": len(world.movies),
        "seed": 0,
        "format": 3,
        "world": "stationary",
    }


def test_no_mean_beats_the_oracle(world: World) -> None:
    oracle = rmse(world.ratings - world.oracle)
    assert oracle < 0.9
    for ids in (np.zeros(NUM_RATINGS, int), world.user_ids, world.movie_ids):
        means = np.bincount(ids, world.ratings) / np.maximum(np.bincount(ids), 1)
        # These means have seen the very ratings that they predict, which flatters them.
        assert rmse(world.ratings - means[ids]) > 1.05 * oracle


def test_oracle_is_calibrated_at_every_level(world: World) -> None:
    error = world.ratings - world.oracle
    for bin_ in np.array_split(np.argsort(world.oracle, kind="stable"), 20):
        assert abs(error[bin_].mean()) < 4 * error[bin_].std() / np.sqrt(len(bin_))


def test_most_test_users_have_older_ratings_to_learn_from(world: World) -> None:
    seen = np.bincount(world.user_ids[~world.is_test], minlength=len(world.users) + 1)
    test_users = np.unique(world.user_ids[world.is_test])
    assert len(test_users) > 0.7 * len(world.users)
    assert (seen[test_users] >= 10).mean() > 0.9


def test_later_user_blocks_are_as_good_as_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planted, "USERS_PER_BLOCK", 300)
    write_synthetic(tmp_path / "blocks", 20_000, seed=0)
    blocks = read(tmp_path / "blocks")
    assert len(blocks.users) > 300
    assert len(set(zip(blocks.user_ids, blocks.movie_ids, strict=True))) == 20_000
    assert (np.diff(blocks.user_ids) >= 0).all()
    is_later = blocks.user_ids > 300
    assert abs((blocks.ratings - blocks.oracle)[is_later].mean()) < 0.05
    assert np.corrcoef(blocks.ratings[is_later], blocks.oracle[is_later])[0, 1] > 0.5


def test_synthetic_data_work_with_a_thousand_ratings(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "small", 1_000, seed=5)
    small = read(tmp_path / "small")
    assert len(set(zip(small.user_ids, small.movie_ids, strict=True))) == 1_000
    assert np.bincount(small.user_ids)[1:].min() >= 20
    assert small.summary["rmse"] < rmse(small.ratings - small.ratings.mean())


def test_a_large_set_has_many_ratings_for_each_user_and_movie(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "large", 400_000, seed=1)
    large = read(tmp_path / "large")
    assert len(large.movies) == 1_750
    assert len(large.users) == 2_530
    counts = np.sort(np.bincount(large.movie_ids))[::-1]
    # Those of ml-100k are 0.43 and 0.62.
    assert 0.38 < counts[:200].sum() / 400_000 < 0.55
    assert counts[0] / len(large.users) < 0.65


def test_too_few_ratings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_ratings is 999, but must be at least 1000"):
        write_synthetic(tmp_path / "tiny", 999, seed=0)


@pytest.mark.parametrize("step", ["synthetic._write_movies", "synthetic.draw_times"])
def test_a_full_disk_leaves_no_files_and_gives_one_message(
    step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"recsuite.datasets.movielens.{step}", fail)
    with pytest.raises(UserError) as caught:
        write_synthetic(tmp_path / "world", 1_000, seed=0)
    assert str(caught.value) == (
        f"Cannot write the synthetic data set to {tmp_path / 'world'}: No space left on device. Fix: "
        "make room there, or name another folder with --data_path."
    )
    assert list(tmp_path.iterdir()) == []


def test_interruption_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_synthetic(tmp_path / "world", 1_000, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_leftover_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".world.partial").mkdir()
    (tmp_path / ".world.partial" / "ratings.dat").write_text("1::1::")
    write_synthetic(tmp_path / "world", 1_000, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["world"]


def test_folder_below_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"Cannot write .* to .*file/world"):
        write_synthetic(tmp_path / "file" / "world", 1_000, seed=0)
    assert (tmp_path / "file").read_text() == "mine"


def test_existing_files_are_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "world"
    folder.mkdir()
    (folder / "ratings.dat").write_text("mine")
    with pytest.raises(UserError, match="Cannot write"):
        write_synthetic(folder, 1_000, seed=0)
    assert contents(folder) == {"ratings.dat": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["world"]
