"""The comparison with least squares: both sides have the same events, and ranks are those of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.baselines import popularity_ranks
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.loops import grouped
from tests.support.benchmarks import benchmark, measured
from tests.support.csv_ratings import write_ratings

pytest.importorskip("implicit", reason="needs the package implicit, of requirements-dev.txt")

NUM_USERS, NUM_MOVIES = 80, 40


@pytest.fixture(scope="module")
def clicks() -> Any:
    return benchmark("clicks")


@pytest.fixture(scope="module")
def peers() -> Any:
    return benchmark("peers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users give either even movies or odd ones 4 to 5 stars, and the others 3."""
    folder = tmp_path_factory.mktemp("clicks") / "movies"
    rng = np.random.default_rng(0)
    ratings = []
    for user in range(NUM_USERS):
        for time, movie in enumerate(rng.permutation(NUM_MOVIES)[:30].tolist()):
            rating = float(rng.choice([4.0, 4.5, 5.0])) if (user + movie) % 2 else 3.0
            ratings.append((user + 1, movie + 1, rating, 1_000_000 + 100 * user + time))
    write_ratings(folder, ratings)
    return folder


@pytest.fixture(scope="module")
def columns(clicks: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Columns:
    written = tmp_path_factory.mktemp("written") / "clicks"
    clicks.write_clicks(folder, written)
    # Enough for validation that a test differs from it.
    return open_columns(
        parse_args([*clicks.SPLIT, "--data_path", str(written), "--validation_fraction", "0.05"])
    )


def test_the_clicks_are_the_ratings_of_4_and_more_as_they_were_written(
    clicks: Any, folder: Path, tmp_path: Path
) -> None:
    clicks.write_clicks(folder, tmp_path / "clicks")
    lines = (folder / "ratings.csv").read_text().splitlines()
    liked = [line for line in lines[1:] if float(line.split(",")[2]) >= 4]
    assert (tmp_path / "clicks" / "ratings.csv").read_text().splitlines() == [lines[0], *liked]


@pytest.mark.parametrize(
    ("name", "lines", "others"),
    [
        ("u.data", ["1\t7\t3\t900", "1\t8\t4\t901"], ["u.item", "u.user", "u.genre"]),
        ("ratings.dat", ["1::7::3.5::900", "1::8::4.5::901"], ["movies.dat", "users.dat"]),
    ],
)
def test_clicks_are_written_in_the_format_of_the_set(
    name: str, lines: list[str], others: list[str], clicks: Any, tmp_path: Path
) -> None:
    source = tmp_path / "set"
    source.mkdir()
    for other in others:
        (source / other).write_bytes(b"\xe9\n")
    (source / name).write_text("".join(f"{line}\n" for line in lines))
    clicks.write_clicks(source, tmp_path / "clicks")
    assert (tmp_path / "clicks" / name).read_text() == f"{lines[1]}\n"
    assert sorted(path.name for path in (tmp_path / "clicks").iterdir()) == sorted([name, *others])
    assert all((tmp_path / "clicks" / other).read_bytes() == b"\xe9\n" for other in others)
    (source / name).unlink()
    with pytest.raises(ValueError, match=r"requires ratings in one of the files ratings\.csv, u\.data"):
        clicks.write_clicks(source, tmp_path / "other")


def test_the_events_for_both_systems_equal_the_columns(peers: Any, columns: Columns) -> None:
    train, both = (peers.clicks_before(columns, split) for split in ("validation", "test"))
    assert (train.sum(), both.sum()) == (columns.num_train, columns.num_train + columns.num_validation)
    users, items = peers.events_of(columns, "test")
    # The newest click of each user is the test, so nobody is known to have clicked it.
    assert sorted(users) == list(range(NUM_USERS))
    assert np.asarray(both[users, items]).sum() == 0


@pytest.mark.parametrize("split", ["validation", "test"])
def test_ranks_are_those_that_the_baseline_of_training_counts(
    split: str, peers: Any, columns: Columns
) -> None:
    known = peers.clicks_before(columns, split)
    users, items = peers.events_of(columns, split)
    popularity = np.asarray(known.sum(axis=0)).ravel()
    found = peers.ranks_of(np.tile(popularity, (len(users), 1)), items, known[users])
    rows = columns.column("rows")
    positions = columns.range_of(split)
    user, item = rows["user"][: positions.stop], rows["item"][: positions.stop]
    of_users = grouped(user[: positions.start], columns.num_users)
    seen = item[of_users.events]
    tested, are_listed = (user[positions.start :], item[positions.start :]), np.ones(len(popularity), bool)
    expected, _ = popularity_ranks(of_users.offsets, seen, *tested, popularity, are_listed)
    assert found.tolist() == expected.tolist()


def test_ties_count_against_an_item_and_clicked_items_are_excluded(peers: Any) -> None:
    from scipy.sparse import csr_matrix

    scores = np.array([[3, 2, 2, 1], [3, 2, 2, 1], [1, 1, 1, 1]], np.float32)
    known = csr_matrix(np.array([[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], np.float32))
    assert peers.ranks_of(scores, np.array([1, 1, 3]), known).tolist() == [3, 1, 4]


@pytest.mark.soak
def test_both_are_trained_and_shown_beside_popularity(folder: Path, tmp_path: Path) -> None:
    flags = ["--ranks", 1, "--train", "--epochs", 4, "--batch_size", 64]
    found, printed = measured("clicks", tmp_path, folder, *flags, timeout=200)
    assert [*found["test"]] == ["popularity", "least squares", "this"]
    assert all(set(metrics) == {"hr_at_10", "ndcg_at_10"} for metrics in found["test"].values())
    assert found["tried"] == 64
    assert sum(found["clicks"]) == sum(
        float(line.split(",")[2]) >= 4 for line in (folder / "ratings.csv").read_text().splitlines()[1:]
    )
    assert found["test"]["least squares"]["ndcg_at_10"] > found["test"]["popularity"]["ndcg_at_10"]
    assert "| least squares |" in printed
    assert json.dumps(found["bars"][0]["measured"]).strip('"') in printed
