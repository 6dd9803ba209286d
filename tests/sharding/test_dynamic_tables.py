"""Dynamic tables in a sharded model: the same on any number of ranks, whatever they admit, evict and grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.dynamic_ranks import TRAININGS
from tests.support.launch import SUPPORT, read_json, succeeded, torchrun

# The three launches run within the first test.

POLICIES = ("lru continuous", "lru roundrobin", "lru hash")
# A training, and the same with a pipeline that asks ahead.
AHEAD = (("lru continuous", "lru ahead"), ("growing", "growing ahead"))
# With TorchRec's modules, and with the vectorised tables.
IMPLEMENTATIONS = (("torchrec ahead", "lru roundrobin"), ("torchrec growing", "growing"))
Found = dict[str, dict[int, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Findings of launches of 1, 2 and 3 ranks, by training and number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    write_synthetic(folder / "ratings", 5_000, seed=0)
    results: Found = {training: {} for training in TRAININGS}
    for num_ranks in (1, 2, 3):
        path = folder / f"{num_ranks}.json"
        script = SUPPORT / "dynamic_ranks.py"
        succeeded(torchrun(num_ranks, script, path, folder / "ratings", 900, timeout=170))
        for training, result in read_json(path).items():
            results[training][num_ranks] = result
    return results


def test_1_2_and_3_ranks_hold_the_same_ids_times_and_counts(found: Found) -> None:
    for training, results in found.items():
        alone = results[1]
        assert alone["tables"]["movie"]["rows"]
        for result in results.values():
            for name, table in result["tables"].items():
                assert table["rows"] == alone["tables"][name]["rows"], (training, name)
                assert table["waiting"] == alone["tables"][name]["waiting"], (training, name)
            assert result["counts"] == alone["counts"], training
            assert result["capacity"] == alone["capacity"], training


def test_1_2_and_3_ranks_learn_the_same(found: Found) -> None:
    for training, results in found.items():
        alone = results[1]
        for result in results.values():
            assert abs(result["losses"][0] - alone["losses"][0]) < 1e-5, training
            np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-3, err_msg=training)
            assert result["rmse"] == pytest.approx(alone["rmse"], rel=1e-3), training
            for name, table in result["tables"].items():
                check_learned(table, alone["tables"][name], training)


def check_learned(table: dict[str, Any], other: dict[str, Any], message: str) -> None:
    """Every number of every row, and the optimizer's, are the same but for the order of sums."""
    np.testing.assert_allclose(table["learned"], other["learned"], rtol=1e-3, atol=1e-4, err_msg=message)


def test_which_rank_has_which_bucket_changes_not_a_bit_on_one_rank(found: Found) -> None:
    first, *others = (found[policy][1] for policy in POLICIES)
    for other in others:
        assert other["losses"] == first["losses"]
        assert other["tables"] == first["tables"]


def test_the_policies_of_distribution_agree_on_three_ranks(found: Found) -> None:
    first, *others = (found[policy][3] for policy in POLICIES)
    for other in others:
        np.testing.assert_allclose(other["losses"], first["losses"], rtol=1e-6)
        for name, table in other["tables"].items():
            assert table["rows"] == first["tables"][name]["rows"]


def test_a_prefetching_pipeline_inserts_the_same_ids(found: Found) -> None:
    for plain, ahead in AHEAD:
        for num_ranks, result in found[plain].items():
            assert found[ahead][num_ranks]["losses"] == result["losses"]
            assert found[ahead][num_ranks]["tables"] == result["tables"]


def test_the_step_of_torchrec_inserts_the_same_ids_and_learns_the_same(found: Found) -> None:
    for theirs, ours in IMPLEMENTATIONS:
        for num_ranks, result in found[theirs].items():
            expected = found[ours][num_ranks]
            assert result["counts"] == expected["counts"]
            assert result["capacity"] == expected["capacity"]
            np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-3)
            for name, table in result["tables"].items():
                other = expected["tables"][name]
                assert table["rows"] == other["rows"]
                assert table["waiting"] == other["waiting"]
                check_learned(table, other, name)


def test_evaluation_inserts_no_ids(found: Found) -> None:
    assert all(result["is_as_before"] for results in found.values() for result in results.values())


def test_full_tables_evict_or_count_ids_without_a_row(found: Found) -> None:
    assert found["lru continuous"][1]["counts"]["movie"]["evicted"] > 0
    none = found["none"][1]["counts"]["movie"]
    assert none["evicted"] == 0
    assert none["unplaced"] > 0
    assert none["unadmitted"] > 0


def test_a_table_that_is_too_full_grows(found: Found) -> None:
    for result in found["growing ahead"].values():
        capacity = result["capacity"]
        assert capacity["user"] > 64
        assert capacity["movie"] > 64
        # Of three genders, say, a table needs no more than it has.
        assert min(capacity.values()) == 64
