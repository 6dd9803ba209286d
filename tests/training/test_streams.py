"""A stream has the same windows and the same progressive error on any ranks, and after it was ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.extras.drifting import DriftingWorld
from tests.support.launch import SUPPORT, read_json, succeeded, torchrun
from tests.support.stream_ranks import TABLES

# The three launches run within the first test.

NUM_RATINGS, GLOBAL_BATCH_SIZE = 2_000, 120

# Three launches train fourteen streams; `test_stream_commands.py` has the short form.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Results of launches of 1, 2 and 3 ranks, by number of ranks."""
    folder = tmp_path_factory.mktemp("streams")
    write_synthetic(folder / "ratings", NUM_RATINGS, seed=0, world=DriftingWorld())
    results = {}
    for num_ranks in (1, 2, 3):
        path = folder / f"{num_ranks}.json"
        script = SUPPORT / "stream_ranks.py"
        succeeded(torchrun(num_ranks, script, path, folder / "ratings", GLOBAL_BATCH_SIZE, timeout=170))
        results[num_ranks] = read_json(path)
        assert results[num_ranks]["world_size"] == num_ranks
    return results


def extents(windows: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [
        (window["number"], window["num_events"], window["first_time"], window["last_time"])
        for window in windows
    ]


def errors(windows: list[dict[str, Any]]) -> list[list[float]]:
    return [[window[of]["rmse"] for of in ("validation", "overall", "biases")] for window in windows]


@pytest.mark.parametrize("tables", TABLES)
def test_1_2_and_3_ranks_have_the_same_windows_and_progressive_errors(
    found: dict[int, Any], tables: str
) -> None:
    alone = found[1][tables]["windows"]
    assert len(alone) > 10
    assert sum(window["num_events"] for window in alone) == NUM_RATINGS == found[1][tables]["num_train"]
    for results in found.values():
        windows = results[tables]["windows"]
        assert extents(windows) == extents(alone)
        assert abs(windows[0]["losses"][0] - alone[0]["losses"][0]) < 1e-5
        np.testing.assert_allclose(errors(windows), errors(alone), rtol=1e-3)


@pytest.mark.parametrize("tables", TABLES)
def test_the_overall_error_is_that_of_all_predictions(found: dict[int, Any], tables: str) -> None:
    for results in found.values():
        windows = results[tables]["windows"]
        numbers = [window["num_events"] for window in windows]
        squares = [window["validation"]["rmse"] ** 2 for window in windows]
        expected = np.sqrt(np.average(squares, weights=numbers))
        assert results[tables]["test"]["rmse"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tables", TABLES)
def test_the_loss_of_a_window_is_the_mean_over_its_events(found: dict[int, Any], tables: str) -> None:
    for results in found.values():
        for window in results[tables]["windows"]:
            # The first step has the weights with which the window was predicted, but hides some users.
            if len(window["losses"]) == 1:
                assert window["losses"][0] == pytest.approx(window["validation"]["rmse"] ** 2, rel=0.25)


@pytest.mark.parametrize("tables", TABLES)
def test_workers_change_not_a_bit(found: dict[int, Any], tables: str) -> None:
    plain, workers = found[1][tables], found[1][f"{tables} workers"]
    assert workers["windows"] == plain["windows"]
    assert workers["tensors"] == plain["tensors"]


@pytest.mark.parametrize("tables", TABLES)
def test_a_stream_that_was_ended_resumes_bit_for_bit(found: dict[int, Any], tables: str) -> None:
    for results in found.values():
        whole, resumed = results[tables], results[f"{tables} resumed"]
        assert resumed["status"] == 143
        windows = [*resumed["before"], *resumed["windows"]]
        assert 0 < len(resumed["before"]) < len(windows)
        assert extents(windows) == extents(whole["windows"])
        assert errors(windows) == errors(whole["windows"])
        for window, other in zip(windows, whole["windows"], strict=True):
            # Of the window in which it was ended, the steps since then.
            assert window["losses"] == other["losses"][-len(window["losses"]) :]
        assert resumed["tensors"] == whole["tensors"]
        assert resumed["test"] == whole["test"]
