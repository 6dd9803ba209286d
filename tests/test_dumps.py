"""What leaves comes back: full dumps and increments, from 1, 2 and 3 ranks to 1, 2 and 3 ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dump_ranks import CASES
from launch import ROOT, read_json, succeeded, torchrun

# The six launches run within the first test.
pytestmark = pytest.mark.timeout(600)

RANKS = (1, 2, 3)
SCRIPT = ROOT / "tests" / "dump_ranks.py"
PAIRS = list(product(RANKS, RANKS))
ONE_LESS = pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def written(synthetic_folder: Path, folder: Path) -> dict[int, Any]:
    """What the writing launches saw of their models, by number of ranks."""
    for num_ranks in RANKS:
        succeeded(torchrun(num_ranks, SCRIPT, "write", folder, synthetic_folder, timeout=170))
    return {num_ranks: read_json(folder / f"write-{num_ranks}.json") for num_ranks in RANKS}


@pytest.fixture(scope="module")
def read(written: dict[int, Any], synthetic_folder: Path, folder: Path) -> dict[int, Any]:
    """What the reading launches loaded, by number of ranks, and in it by the number that had written."""
    for num_ranks in RANKS:
        succeeded(torchrun(num_ranks, SCRIPT, "read", folder, synthetic_folder, timeout=170))
    found = {num_ranks: read_json(folder / f"read-{num_ranks}.json") for num_ranks in RANKS}
    return {
        num_ranks: {int(name.removeprefix("by-")): cases for name, cases in by.items()}
        for num_ranks, by in found.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.mark.parametrize("kind", ["dump", "inc_dump"])
@pytest.mark.parametrize(("writers", "readers"), PAIRS)
def test_every_state_comes_back_bit_for_bit(
    kind: str, writers: int, readers: int, written: dict[int, Any], read: dict[int, Any]
) -> None:
    """With increments this is the theorem: base + replay(1..n) equals the full dump of the same step."""
    for case in CASES:
        before = written[writers]["cases"][case]["states"]
        after = read[readers][writers][case][kind]["states"]
        assert len(before) == 4
        for step, state in before.items():
            assert len(state["digests"]) > 30
            assert after[step]["digests"] == state["digests"]


@pytest.mark.parametrize(("writers", "readers"), PAIRS)
def test_a_load_gives_the_same_metrics(
    writers: int, readers: int, written: dict[int, Any], read: dict[int, Any]
) -> None:
    for case in CASES:
        for step, state in written[writers]["cases"][case]["states"].items():
            metrics = read[readers][writers][case]["dump"]["states"][step]["metrics"]
            assert metrics == (
                state["metrics"] if readers == writers else pytest.approx(state["metrics"], abs=1e-6)
            )


@pytest.mark.parametrize("kind", ["dump", "inc_dump"])
@pytest.mark.parametrize(("writers", "readers"), PAIRS)
def test_the_steps_after_a_load_have_the_losses_of_those_after_the_dump(
    kind: str, writers: int, readers: int, written: dict[int, Any], read: dict[int, Any]
) -> None:
    for case in CASES:
        before = written[writers]["cases"][case]["losses"]
        after = read[readers][writers][case][kind]["losses"]
        assert len(before) == 3
        assert after == (before if readers == writers else pytest.approx(before, rel=1e-4))


def test_no_row_counts_as_changed_right_after_an_increment(written: dict[int, Any]) -> None:
    for found in written.values():
        for case in found["cases"].values():
            assert [state["rows"] for state in case["states"].values()] == [0] * 4


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_resumed_training_has_the_losses_of_one_that_was_never_interrupted(
    num_ranks: int, written: dict[int, Any]
) -> None:
    found = written[num_ranks]["resume"]
    assert found["before"] == 143
    # The ranks agree to end a step after the one in which one of them was told to.
    done = found["end_at"] + 1
    epoch = len(found["whole"]) // 2
    assert epoch < done < 2 * epoch
    assert found["after"] == found["whole"][done:]
