"""Other systems: their arithmetic, and the events that they learn from."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.metrics import finite
from tests.support.benchmarks import benchmark
from tests.support.launch import python

for package in ("implicit", "recbole"):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}, of requirements-dev.txt for this Python", allow_module_level=True)

NO_MYFM = find_spec("myfm") is None
NUM_RATINGS = 3_000


@pytest.fixture(scope="module")
def peers() -> Any:
    return benchmark("peers")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    write_synthetic(folder, NUM_RATINGS, seed=0)
    return folder


@pytest.fixture(scope="module")
def columns(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Columns:
    flags = ["--split", "leave_one_out", "--validation_fraction", "0.05"]
    cache = tmp_path_factory.mktemp("columns")
    return open_columns(parse_args([*flags, "--data_path", str(data), "--cache_dir", str(cache)]))


def matrix(lines: list[list[int]]) -> Any:
    from scipy.sparse import csr_matrix

    return csr_matrix(np.array(lines, np.float32))


def test_ease_equals_the_formula_of_its_paper(peers: Any) -> None:
    events = (np.random.default_rng(0).random((12, 7)) < 0.4).astype(np.float32)
    inverse = np.linalg.inv(events.T @ events + 3.0 * np.eye(7))
    weights = inverse / -np.diag(inverse)
    np.fill_diagonal(weights, 0)
    assert peers.ease(matrix(events.tolist()), 3.0) == pytest.approx(events @ weights, abs=1e-6)


def test_the_penalty_is_chosen_on_validation_and_then_trained_with_it(
    monkeypatch: pytest.MonkeyPatch, peers: Any, columns: Columns
) -> None:
    learned = []

    def score(known: Any, penalty: float) -> np.ndarray:
        learned.append(int(known.sum()))
        scores = np.zeros(known.shape)
        for split in ("validation", "test") if penalty == 2.0 else ():
            scores[peers.events_of(columns, split)] = 1
        return scores

    monkeypatch.setattr(peers, "ease", score)
    monkeypatch.setattr(peers, "PENALTIES", (1.0, 2.0, 3.0))
    found = peers.best_ease(columns)
    assert found.settings == {"penalty": 2.0}
    assert found.metrics["hr_at_10"] == 1
    train, validation = columns.num_train, columns.num_validation
    assert learned == [train, train, train, train + validation]
    assert validation > 0


def test_least_squares_for_the_test_learns_the_validation_events_too(
    monkeypatch: pytest.MonkeyPatch, peers: Any, columns: Columns
) -> None:
    learned = []

    class Model:
        def __init__(self, *settings: Any, **more: Any) -> None:
            pass

        def fit(self, known: Any, **options: Any) -> None:
            learned.append(int(known.sum()))

    monkeypatch.setattr("implicit.als.AlternatingLeastSquares", Model)  # codespell:ignore als
    for split in ("validation", "test"):
        peers.LeastSquares(columns, peers.SquaresSettings(8, 0.1, 1.0), 0, split)
    assert learned == [columns.num_train, columns.num_train + columns.num_validation]


def test_errors_are_measured_as_in_training(peers: Any, columns: Columns) -> None:
    predictions, labels = np.array([1.0, 2.5, 4.0]), np.array([2.0, 2.5, 2.0], np.float32)
    assert peers.rmse_of(predictions, labels) == pytest.approx((5 / 3) ** 0.5)
    known = peers.ratings_of(columns, "train", "validation")
    fitted = peers.biases(known, peers.ratings_of(columns, "test"))
    assert fitted.rmse == pytest.approx(columns.baselines["predictions"]["biases"]["rmse"], abs=1e-12)


def test_co_occurrence_features_of_both_sides_have_unit_length(peers: Any) -> None:
    users, items = np.array([0, 0, 1]), np.array([0, 1, 1])
    known = peers.Ratings(users, items, np.ones(3, np.float32), (2, 3))
    of_users, of_items, groups = peers.features(known, sets=True)
    half = 0.5**0.5
    assert of_users.toarray() == pytest.approx(np.array([[1, 0, half, half, 0], [0, 1, 0, 1, 0]]))
    rated = np.array([[1, 0], [half, half], [0, 0]])
    assert of_items.toarray() == pytest.approx(np.hstack([np.eye(3), rated]))
    assert groups == [2, 3, 3, 2]
    ids_of_users, ids_of_items, groups = peers.features(known, sets=False)
    assert (ids_of_users.toarray().tolist(), groups) == (np.eye(2).tolist(), [2, 3])
    assert ids_of_items.toarray().tolist() == np.eye(3).tolist()


def test_a_prediction_is_the_mean_of_all_samples_except_the_first_and_takes_no_time_of_training(
    monkeypatch: pytest.MonkeyPatch, peers: Any
) -> None:
    clock = SimpleNamespace(now=100.0)

    class Machine:
        def __init__(self, value: float) -> None:
            self.value = value

        def predict_score(self, *_: Any) -> np.ndarray:
            clock.now += 50
            return np.array([self.value, 2 * self.value])

    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    draws = peers.Draws([], num_asked=2, iterations=12, begin=100.0)
    for place in range(12):
        clock.now += 3
        assert draws(place, Machine(place)) == (False, None)
    # The first five are skipped, and the others are 5 to 11.
    assert draws.mean == pytest.approx([8, 16])
    assert draws.seconds == pytest.approx(12 * 3)


@pytest.mark.skipif(NO_MYFM, reason="needs myfm, of requirements-dev.txt up to Python 3.12")
def test_the_factorization_machine_beats_biases_on_planted_factors(peers: Any) -> None:
    rng = np.random.default_rng(0)
    users, items = np.divmod(rng.permutation(40 * 30), 30)
    labels = np.where((users + items) % 2, 4.5, 2.0).astype(np.float32)
    known, asked = (
        peers.Ratings(users[part], items[part], labels[part], (40, 30))
        for part in (slice(1000), slice(1000, None))
    )
    few, many = (peers.factorization_machine(known, asked, 0, True, number).rmse for number in (10, 60))
    assert many < 0.2 * peers.biases(known, asked).rmse
    assert many < few


def test_the_ml_100k_of_the_package_is_the_published_one(peers: Any, tmp_path: Path) -> None:
    # Another test of this process may have imported it.
    imported = "recbole" in sys.modules
    peers.write_movielens_100k(tmp_path / "ml-100k")
    flags = ["--dataset", "ml-100k", "--data_path", str(tmp_path / "ml-100k"), "--split", "random"]
    columns = open_columns(parse_args(flags))
    assert columns.num_train + columns.num_validation + columns.num_test == 100_000
    assert (columns.num_users, columns.num_items, columns.num_skipped, columns.notes) == (943, 1_682, 0, ())
    lines = {path.name: path.read_text().splitlines() for path in (tmp_path / "ml-100k").glob("u.*")}
    assert lines["u.data"][0] == "196\t242\t3\t881250949"
    assert lines["u.user"][0] == "1|24|M|technician|85711"
    # Animation, children's, comedy.
    marks = "|".join("1" if place in (3, 4, 5) else "0" for place in range(19))
    assert lines["u.item"][0] == f"1|Toy Story (1995)||||{marks}"
    assert ("recbole" in sys.modules) == imported


@pytest.mark.skipif(NO_MYFM, reason="needs myfm, of requirements-dev.txt up to Python 3.12")
@pytest.mark.skipif(find_spec("pkg_resources") is not None, reason="an older setuptools, as with torch 2.11")
def test_myfm_cannot_be_imported_without_the_stand_in(peers: Any) -> None:
    # Where this fails, the stand-in of `peers.import_myfm` has become unnecessary.
    result = python("-c", "import myfm")
    assert result.returncode != 0
    assert "ModuleNotFoundError: No module named 'pkg_resources'" in result.stderr
    assert peers.import_myfm().MyFMRegressor
    assert "pkg_resources" not in sys.modules


def test_a_training_on_other_events_is_refused(
    monkeypatch: pytest.MonkeyPatch, peers: Any, data: Path, tmp_path: Path
) -> None:
    split = ("--split", "random")
    case, other = (peers.PeerCase(data, "rating", seed, tmp_path, split) for seed in (0, 1))
    columns = case.columns
    trained_on = iter((columns, other.columns))

    def written(columns: Columns) -> dict[str, Any]:
        return {name: finite(metrics) for name, metrics in columns.baselines["predictions"].items()}

    monkeypatch.setattr(peers, "train", lambda *_, **more: {"baselines": written(next(trained_on))})
    assert case.report(columns)["baselines"] == written(columns)
    with pytest.raises(RuntimeError, match="the baseline of the report is not that of the columns"):
        case.report(columns)
