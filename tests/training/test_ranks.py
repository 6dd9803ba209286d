"""The same model, batches and metrics for 1, 2 and 3 ranks, 0 and more workers, and both input pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.metrics import NEVER_FOUND, TOP
from tests.support.launch import GPUS, SUPPORT, read_json, succeeded, torchrun
from tests.support.ranks import losses_of

# The three launches run within the first test.

GLOBAL_BATCH_SIZE = 900
NUM_RATINGS, NUM_TRAIN = 5_000, 3_600
NUM_STEPS = -(-NUM_TRAIN // GLOBAL_BATCH_SIZE)
RANKS = SUPPORT / "ranks.py"


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic data set."""
    folder = tmp_path_factory.mktemp("data") / "ratings"
    write_synthetic(folder, NUM_RATINGS, seed=0)
    return folder


@pytest.fixture(scope="module")
def found(ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Results of launches of 1, 2 and 3 ranks, by number of ranks. On CPU, where three always fit."""
    folder = tmp_path_factory.mktemp("ranks")
    results = {}
    for num_ranks in (1, 2, 3):
        path = folder / f"{num_ranks}.json"
        succeeded(torchrun(num_ranks, RANKS, path, ratings, GLOBAL_BATCH_SIZE, timeout=170))
        results[num_ranks] = read_json(path)
        assert results[num_ranks]["world_size"] == num_ranks
    return results


def test_metrics_of_the_same_weights_agree_for_any_ranks_and_workers(found: dict[int, Any]) -> None:
    expected = found[1]["metrics"]["0"]
    # Not the metrics of a model that predicts the mean.
    assert 1.2 < expected["rmse"] < 5
    for results in found.values():
        for metrics in results["metrics"].values():
            assert metrics == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_the_first_loss_agrees_for_1_2_and_3_ranks(found: dict[int, Any]) -> None:
    firsts = [losses[0][0] for results in found.values() for losses in results["losses"].values()]
    assert max(firsts) - min(firsts) < 1e-5


def test_all_losses_agree_for_1_2_and_3_ranks(found: dict[int, Any]) -> None:
    for results in found.values():
        np.testing.assert_allclose(results["losses"]["plain 0"], found[1]["losses"]["plain 0"], rtol=1e-3)


def test_adagrads_state_agrees_for_1_2_and_3_ranks(found: dict[int, Any]) -> None:
    # Losses would not show a gradient that is too large by a factor: Adagrad divides it away.
    for results in found.values():
        assert results["sums"] == pytest.approx(found[1]["sums"], rel=1e-3)
    assert min(found[1]["sums"].values()) > 0


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "row-wise Adam"])
def test_every_optimizer_of_the_tables_learns_alike_on_1_2_and_3_ranks(
    found: dict[int, Any], name: str
) -> None:
    (expected,), sums = found[1]["rules"][name]
    # The tables learned enough to tell a sum over the ranks that is wrong.
    assert 0.02 < max(expected) - min(expected) < 1, expected
    for results in found.values():
        (losses,), others = results["rules"][name]
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        assert others == pytest.approx(sums, rel=1e-3, abs=1e-6)


def test_the_smoke_test_finds_the_losses_of_all_trainings(found: dict[int, Any]) -> None:
    # Its own launches are not in CI.
    for losses in losses_of(found[1]).values():
        assert np.asarray(losses, float).ndim in (1, 2)


@pytest.mark.parametrize("ids", ["fixed", "dynamic"])
def test_tables_of_several_widths_learn_alike_by_either_step_on_1_2_and_3_ranks(
    found: dict[int, Any], ids: str
) -> None:
    expected = found[1]["widths"][ids]["vectorised"]
    assert expected["losses"][-1] < expected["losses"][0]
    assert expected["sums"]["changed user"] > 0
    for results in found.values():
        for learned in results["widths"][ids].values():
            np.testing.assert_allclose(learned["losses"], expected["losses"], rtol=1e-4)
            assert learned["sums"] == pytest.approx(expected["sums"], rel=1e-3, abs=1e-6)


def test_learned_history_weights_learn_alike_with_both_pipelines_on_1_2_and_3_ranks(
    found: dict[int, Any],
) -> None:
    expected = found[1]["learned weights"]["plain"]
    assert "history" in expected["sums"]
    for results in found.values():
        plain, pipelined = (results["learned weights"][name] for name in ("plain", "sparse_dist"))
        np.testing.assert_allclose(plain["losses"], expected["losses"], rtol=1e-3)
        np.testing.assert_allclose(pipelined["losses"], plain["losses"], rtol=1e-6)
        assert np.mean(plain["losses"][0][-3:]) < np.mean(plain["losses"][0][:3])
        assert plain["sums"] == pytest.approx(expected["sums"], rel=2e-3)


@pytest.mark.parametrize("ids", ["fixed", "dynamic"])
def test_sequence_models_learn_alike_with_both_pipelines_and_tables_on_1_2_and_3_ranks(
    found: dict[int, Any], ids: str
) -> None:
    expected = found[1]["sequences"][ids]["plain"]
    for results in found.values():
        plain, other = (results["sequences"][ids][name] for name in ("plain", "torchrec"))
        assert plain["losses"][0][0] == pytest.approx(expected["losses"][0][0], abs=1e-5)
        np.testing.assert_allclose(plain["losses"], expected["losses"], rtol=1e-3)
        np.testing.assert_allclose(other["losses"], plain["losses"], rtol=1e-4)
        # A score that is rounded otherwise may be that of another place.
        assert plain["metrics"] == pytest.approx(expected["metrics"], abs=5e-3)
        assert other["metrics"] == pytest.approx(expected["metrics"], abs=5e-3)


def test_both_pipelines_and_any_number_of_workers_give_the_same_losses(found: dict[int, Any]) -> None:
    for results in found.values():
        for losses in results["losses"].values():
            np.testing.assert_allclose(losses, results["losses"]["plain 0"], rtol=1e-6)
        for metrics in results["tests"].values():
            assert metrics == pytest.approx(results["tests"]["plain 0"], abs=1e-6, nan_ok=True)


def test_three_epochs_with_a_persistent_pool_train_on_every_batch(found: dict[int, Any]) -> None:
    for results in found.values():
        for losses in results["losses"].values():
            assert [len(epoch) for epoch in losses] == [NUM_STEPS] * 3
            # A step that got no batch would have left its loss at zero.
            assert min(map(min, losses)) > 0


def test_training_lowers_the_loss(found: dict[int, Any]) -> None:
    for results in found.values():
        first, _, last = (np.mean(epoch) for epoch in results["losses"]["plain 0"])
        assert last < first - 0.1


def test_the_pipelined_loop_is_pipelined(found: dict[int, Any]) -> None:
    for results in found.values():
        # One for each width of the tables.
        assert results["pipelined_modules"] == 3


def movies_of_users(columns: Columns, num_known: int) -> dict[int, set[int]]:
    """User to the movies of the user's first ratings in the columns."""
    known = columns.column("rows")[:num_known]
    user, movie = known["user"], known["item"]
    return {int(one): set(movie[user == one].tolist()) for one in np.unique(user)}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_ranks_and_lists_equal_those_of_the_whole_matrix_of_scores_for_1_2_and_3_ranks(
    found: dict[int, Any], ratings: Path, split: str
) -> None:
    columns = open_columns(Config.of(data_path=str(ratings)))
    # From one rank: the others have the same weights.
    vectors = {name: np.array(numbers) for name, numbers in found[1]["ranking"]["vectors"].items()}
    scores = (vectors[split][:, ::2].T @ vectors["catalogue"][:, 1::2]).astype(np.float32)
    positions = columns.range_of(split)
    assert scores.shape == (len(positions), columns.num_items)
    seen = movies_of_users(columns, columns.num_train if split == "validation" else positions.start)
    cases = columns.column("rows")[["user", "item"]][positions.start : positions.stop].tolist()
    # An item without a training event has no row, so no list holds it.
    trained = sorted({*columns.column("rows")["item"][: columns.num_train].tolist()})
    assert len(trained) < columns.num_items
    expected, if_tied = [], []
    listed, listed_if_tied = np.zeros((2, columns.num_items), np.int64)
    for (user, movie), row in zip(cases, scores, strict=True):
        unseen = [other for other in trained if other not in seen.get(user, ())]
        others = [other for other in unseen if other != movie]
        is_missed = movie not in trained
        expected.append(NEVER_FOUND if is_missed else 1 + int((row[others] >= row[movie]).sum()))
        if_tied.append(NEVER_FOUND if is_missed else 1 + len(others))
        # Of equal scores the first item comes first.
        order = np.argsort(-row[unseen], kind="stable")[:TOP]
        listed[np.array(unseen)[order]] += 1
        listed_if_tied[unseen[:TOP]] += 1
    assert len(set(expected)) > 20
    for results in found.values():
        assert results["ranking"]["ranks"][split] == expected
        # Of equal scores none is better than the other, and that counts against the movie.
        assert results["tied"]["ranks"][split] == if_tied
        assert results["ranking"]["listed"][split] == listed.tolist()
        assert results["tied"]["listed"][split] == listed_if_tied.tolist()


@pytest.mark.gpu
def test_one_gpu_gives_the_metrics_and_losses_of_the_cpu(
    found: dict[int, Any], ratings: Path, tmp_path: Path
) -> None:
    path, on_cpu = tmp_path / "gpu.json", found[1]
    succeeded(torchrun(1, RANKS, path, ratings, GLOBAL_BATCH_SIZE, env=GPUS, real=True, timeout=170))
    on_gpu = read_json(path)
    for metrics in on_gpu["metrics"].values():
        assert metrics == pytest.approx(on_cpu["metrics"]["0"], abs=1e-4, nan_ok=True)
    for losses in on_gpu["losses"].values():
        np.testing.assert_allclose(losses, on_cpu["losses"]["plain 0"], rtol=2e-2)
    assert on_gpu["tied"]["listed"] == on_cpu["tied"]["listed"]
