"""Full checkpoints and deltas are read as they were written: from 1, 2 and 3 ranks to 1, 2 and 3 ranks.

The models, their data and when they are written are drawn from DUMP_SEED, which is 0 where it is not set.
Each number of ranks writes all models, and reads every other checkpoint of one of those that each number
wrote; under `soak`, all. "store": in an object store instead of a folder.
"""

from __future__ import annotations

import contextlib
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.dump_ranks import CASES, OTHER_BATCH_SIZE, RANKS, SEED, SIZES, is_resumed
from tests.support.launch import SUPPORT, read_json, succeeded, torchrun
from tests.support.store import BUCKET, running

# All launches run within the first test.

SCRIPT = SUPPORT / "dump_ranks.py"
PAIRS = list(product(RANKS, RANKS))


@pytest.fixture(autouse=True)
def _announced() -> None:
    """Shown with what fails."""
    print(f"DUMP_SEED={SEED} draws {CASES}")


@pytest.fixture(
    scope="module", params=["one", *(pytest.param(each, marks=pytest.mark.soak) for each in ("store", "all"))]
)
def variant(request: pytest.FixtureRequest) -> str:
    """Return the variant: the place and the amount of what is read."""
    return str(request.param)


@pytest.fixture(scope="module")
def all_of_them(variant: str) -> bool:
    """True if every number of ranks reads all models that each number wrote, else one of them."""
    return variant == "all"


@pytest.fixture(scope="module")
def launched(variant: str, all_of_them: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all launches left what they found."""
    print(f"DUMP_SEED={SEED} draws {CASES}")
    folder = tmp_path_factory.mktemp("dumps")
    with running() if variant == "store" else contextlib.nullcontext() as store:
        place = f"s3://{BUCKET}/run" if store else str(folder)
        return launch_all(folder, place, store.env if store else {}, all_of_them)


def launch_all(folder: Path, place: str, env: dict[str, str], all_of_them: bool) -> Path:
    for num_ratings in SIZES:
        write_synthetic(folder / str(num_ratings), num_ratings, seed=SEED)
    read = "read_all" if all_of_them else "read"
    # What 3 ranks do is one launch: it writes last and reads first.
    for num_ranks, *actions in ((1, "write"), (2, "write"), (3, "write", read), (2, read), (1, read)):
        succeeded(torchrun(num_ranks, SCRIPT, folder, place, *actions, env=env, timeout=240))
    return folder


@pytest.fixture(scope="module")
def written(launched: Path) -> dict[int, Any]:
    """Models as their writers saw them, by number of ranks."""
    return {num_ranks: read_json(launched / f"write-{num_ranks}.json") for num_ranks in RANKS}


@pytest.fixture(scope="module")
def read(launched: Path, all_of_them: bool) -> dict[int, Any]:
    """Models as their readers loaded them, by number of reading ranks, then of writing ranks."""
    action = "read_all" if all_of_them else "read"
    found = {num_ranks: read_json(launched / f"{action}-{num_ranks}.json") for num_ranks in RANKS}
    return {readers: {int(writers): cases for writers, cases in by.items()} for readers, by in found.items()}


def test_every_number_of_ranks_writes_and_reads_every_model(read: dict[int, Any]) -> None:
    for number in RANKS:
        assert {name for by in read.values() for name in by[number]["cases"]} == {*CASES}
        assert {name for by in read[number].values() for name in by["cases"]} == {*CASES}


def test_deltas_are_written_when_they_are_due_and_at_the_end_of_an_epoch(written: dict[int, Any]) -> None:
    for found in written.values():
        for name, case in CASES.items():
            wrote = found["cases"][name]
            due = {step for step in range(1, case.last_step + 1) if case.is_due(step)}
            assert wrote["increments"] == sorted(due | {*wrote["epoch_ends"]})
            assert len(wrote["increments"]) >= 3
        assert found["cases"]["periodic"]["epoch_ends"]


def test_only_large_tables_of_several_ranks_are_split_by_rows(written: dict[int, Any]) -> None:
    for num_ranks, found in written.items():
        small, large = (found["cases"][name]["sharding"]["user"] for name in ("async", "periodic"))
        assert large == ("row_wise" if num_ranks > 1 else "table_wise")
        assert small == "table_wise"


@pytest.mark.parametrize("kind", ["dump", "inc_dump"])
@pytest.mark.parametrize(("writers", "readers"), PAIRS)
def test_every_checkpoint_is_restored_bit_for_bit(
    kind: str,
    writers: int,
    readers: int,
    written: dict[int, Any],
    read: dict[int, Any],
    all_of_them: bool,
) -> None:
    """With deltas this means: a base and its deltas 1 to n equal the full checkpoint of the same step."""
    for name in read[readers][writers]["cases"]:
        before = written[writers]["cases"][name]["states"]
        assert all(len(state) > 30 for state in before.values())
        after = read[readers][writers]["cases"][name][kind]["states"]
        assert after == {step: before[step] for step in after}
        assert len(after) == len(before) if all_of_them else len(after) >= 2


@pytest.mark.parametrize("kind", ["dump", "inc_dump"])
@pytest.mark.parametrize(("writers", "readers"), PAIRS)
def test_a_load_gives_the_same_metrics(
    kind: str, writers: int, readers: int, written: dict[int, Any], read: dict[int, Any]
) -> None:
    for name in read[readers][writers]["cases"]:
        before = written[writers]["cases"][name]["metrics"]
        after = read[readers][writers]["cases"][name][kind]["metrics"]
        assert after == (before if readers == writers else pytest.approx(before, abs=1e-6))


@pytest.mark.parametrize("kind", ["dump", "inc_dump"])
@pytest.mark.parametrize(("writers", "readers"), PAIRS)
def test_the_steps_after_a_load_have_the_losses_of_those_after_the_checkpoint(
    kind: str, writers: int, readers: int, written: dict[int, Any], read: dict[int, Any]
) -> None:
    for name in read[readers][writers]["cases"]:
        before = written[writers]["cases"][name]["losses"]
        after = read[readers][writers]["cases"][name][kind]["losses"]
        assert len(before) == 3
        assert after == (before if readers == writers else pytest.approx(before, rel=1e-4))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_rows_looked_up_in_evaluation_are_not_in_a_delta(num_ranks: int, written: dict[int, Any]) -> None:
    for found in written[num_ranks]["cases"].values():
        before, after, evaluated = (found["marks"][when] for when in ("before", "after", "evaluated"))
        assert all(before.values())
        assert {*evaluated["user"]} - {*before["user"]}
        assert {*evaluated["movie"]} - {*before["movie"]}
        assert after == before


@pytest.mark.parametrize(
    ("name", "num_ranks"), [*product(["resume"], RANKS), *product(["resume sequence"], RANKS[1:])]
)
def test_a_resumed_training_has_the_losses_and_tensors_of_one_that_was_never_interrupted(
    name: str, num_ranks: int, written: dict[int, Any]
) -> None:
    found = written[num_ranks][name]
    whole = found["whole"]["losses"]
    assert found["before"]["status"] == 143
    # The ranks agree to end a step after the one in which one of them was told to.
    done = found["end_at"] + 1
    epoch = len(whole) // 2
    assert epoch < done < 2 * epoch
    assert found["after"]["losses"] == whole[done:]
    assert len(found["whole"]["tensors"]) > 30
    assert found["after"]["tensors"] == found["whole"]["tensors"]


@pytest.fixture
def resumed(written: dict[int, Any], read: dict[int, Any], all_of_them: bool) -> list[tuple[Any, Any, int]]:
    """State at the end on some ranks, state after a resume on others, and the number of the others."""
    return [
        (written[writers]["resume"], read[readers][writers]["resumed"], readers)
        for writers, readers in PAIRS
        if is_resumed(writers, readers, all_of_them)
    ]


def test_a_training_ended_on_some_ranks_resumes_on_any_other_number(
    resumed: list[tuple[Any, Any, int]], all_of_them: bool
) -> None:
    assert sorted({readers for *_, readers in resumed}) == [*RANKS]
    assert len(resumed) == (6 if all_of_them else 3)


def test_a_training_resumed_on_other_ranks_uses_each_remaining_rating_once(
    resumed: list[tuple[Any, Any, int]],
) -> None:
    for ended, again, _ in resumed:
        before, whole = ended["before"], ended["whole"]["taken"]
        num_train = len(whole) // 2
        assert whole == sorted([*range(num_train)] * 2)
        assert sorted(before["taken"] + again["taken"]) == whole
        assert len(again["taken"]) == num_train - before["end"]["samples"]


def test_a_training_resumed_on_other_ranks_ends_at_the_same_step_and_quality(
    resumed: list[tuple[Any, Any, int]],
) -> None:
    for ended, again, _ in resumed:
        before = ended["before"]["end"]
        steps = math.ceil(len(again["taken"]) / OTHER_BATCH_SIZE)
        assert len(again["losses"]) == steps
        assert all(map(math.isfinite, again["losses"]))
        assert before["epoch"] == 1
        end = {"step": before["step"] + steps, "epoch": 2, "samples": 0}
        assert again["end"].items() >= end.items()
        assert again["test"]["rmse"] == pytest.approx(ended["whole"]["test"]["rmse"], rel=5e-2)
