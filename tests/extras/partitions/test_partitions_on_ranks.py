"""Data sets of partitions beside the same in one piece, on one, two and three ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from example import make_model
from recsuite import ServedModel
from tests.support import partition_files
from tests.support.launch import SUPPORT, python, read_json, succeeded, torchrun
from tests.support.partition_ranks import CASES, END_AT, NUMBER, OF_COLUMNS

RANKS = (1, 2, 3)
# All partitions of the second of two ranks.
WITHOUT_USERS = ("part=00001", "part=00003")
Found = dict[int, dict[str, Any]]


def write_all(folder: Path) -> None:
    """Write the data sets of all cases."""
    events = partition_files.log(number=1_500)
    write = partition_files.write_partitions
    write(folder / "ratings", NUMBER, events)
    users = write(folder / "some users", NUMBER, events) / "users"
    for name in WITHOUT_USERS:
        shutil.rmtree(users / name)
    write(folder / "clicks", NUMBER, events, partition_files.CLICKS, own_users=False)
    write(folder / "labels", NUMBER, partition_files.with_more_labels(events), partition_files.LABELS)
    write(folder / "texts", NUMBER, partition_files.with_texts(events))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of all cases, by number of ranks."""
    folder = tmp_path_factory.mktemp("partitions")
    write_all(folder)
    found: Found = {0: {"folder": str(folder)}}
    for ranks in RANKS:
        output = succeeded(torchrun(ranks, SUPPORT / "partition_ranks.py", folder, timeout=120))
        found[ranks] = {**read_json(folder / f"{ranks}.json"), "output": output}
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_COLUMNS])
def test_one_rank_with_partitions_is_the_data_in_one_piece_bit_for_bit(found: Found, name: str) -> None:
    one = found[1][name]
    for what in sorted({*one["one piece"]} - {"digest"}):
        # Two NaN differ.
        assert repr(one["partitions"][what]) == repr(one["one piece"][what]), what


# Of a bootstrap over groups of users, which are others in one piece.
BY_GROUPS = ("intervals",)
OF_DATA = ("sizes", "users", "items", "mean", "seen", "longest", "counts", "vocabulary", "baselines")


def assert_close(found: Any, expected: Any, without: tuple[str, ...] = ()) -> None:
    """Compare results within rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected.keys() - {*without}:
            assert_close(found[name], expected[name], without)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, without)
    else:
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_know_the_data_as_one_piece_does(found: Found, name: str, ranks: int) -> None:
    one, several = (found[number][name]["partitions"] for number in (1, ranks))
    for what in OF_DATA:
        assert_close(several[what], one[what])
    assert several["digest"] == one["digest"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_COLUMNS])
def test_metrics_are_those_of_the_data_in_one_piece_on_any_number_of_ranks(found: Found, name: str) -> None:
    one = found[1][name]["one piece"]
    assert one["test"]["cases"] == one["sizes"][2]
    for split in ("validation", "test"):
        for ranks in (2, 3):
            assert_close(found[ranks][name]["partitions"][split], one[split], BY_GROUPS)
        assert_close(found[3][name]["partitions"][split], found[2][name]["partitions"][split])


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_COLUMNS])
def test_an_epoch_has_each_event_once_on_any_number_of_ranks(found: Found, name: str) -> None:
    for ranks in RANKS:
        of_case = found[ranks][name]["partitions"]
        assert sum(of_case["steps"]) == of_case["sizes"][0]
        assert len(of_case["losses"]) == len(of_case["steps"])
        # The first loss is that of the same weights on other events.
        assert of_case["losses"][0] == pytest.approx(found[1][name]["partitions"]["losses"][0], rel=0.3)


def test_notes_of_one_rank_alone_say_so(found: Found) -> None:
    assert not [note for note in found[1]["rating"]["partitions"]["notes"] if note.startswith("rank ")]
    notes = found[2]["ranking"]["partitions"]["notes"]
    assert any("have no row" in note for note in notes)


def test_partitions_without_users_are_named(found: Found) -> None:
    note = "no users are in the partition 1, 3, which has events"
    assert note in found[1]["some users"]["partitions"]["notes"]
    assert f"rank 1: {note}" in found[2]["some users"]["partitions"]["notes"]


def test_a_resume_in_the_middle_of_an_epoch_is_the_uninterrupted_training(found: Found) -> None:
    of_two = found[2]["resumed"]
    whole, before, after = of_two["whole"], of_two["before"], of_two["after"]
    assert before["status"] == 143
    assert 0 < before["end"]["samples"] < found[2]["rating"]["partitions"]["sizes"][0]
    # Of the last step a vote was on its way.
    assert before["end"]["step"] == END_AT + 1
    assert after["losses"] == whole["losses"][END_AT + 1 :]
    assert after["tensors"] == whole["tensors"]
    assert after["test"] == whole["test"]
    line = f"continues in the middle of epoch 1, after {before['end']['samples']:,} of 1,126 ratings"
    assert line in found[2]["output"]


def test_another_number_of_ranks_continues_with_the_next_epoch_and_says_so(found: Found) -> None:
    sizes, of_two = found[3]["rating"]["partitions"]["steps"], found[2]["resumed"]["before"]["end"]
    others = found[3]["resumed"]["others"]
    assert others["end"]["epoch"] == 2
    assert len(others["losses"]) == len(sizes)
    line = f"continues with epoch 2: {of_two['samples']:,} of 1,126 ratings of epoch 1 were used by another"
    assert line in found[3]["output"]


def test_a_checkpoint_of_partitions_is_served(found: Found) -> None:
    folder, vocabulary = found[0]["folder"], found[1]["rating"]["partitions"]["vocabulary"]
    model = ServedModel.open(Path(folder) / "whole", model=make_model)
    users, items = vocabulary["user"][:3], vocabulary["item"][:3]
    values = {"user": users, "item": items, "city": ["Bern"] * 3, "history": [items[:1]] * 3}
    assert np.isfinite(model.score({**values, "history_ratings": [[4.0]] * 3}).numpy()).all()


@pytest.mark.soak
def test_16_ranks_read_4_partitions_each_and_give_the_metrics_of_one_piece(tmp_path: Path) -> None:
    if not hasattr(ProcessLocalGroup, "all_to_all_single"):
        pytest.skip("the ranks as threads of torch 2.11 exchange no rows")
    num_ranks, number, results = 16, 64, tmp_path / "found.json"
    events = partition_files.log(num_users=1_500, num_items=300, number=20_000)
    folder = partition_files.write_partitions(tmp_path / "data", number, events)
    one, many = dict[str, Any](), dict[str, Any]()
    for found, ranks, partitions in ((one, 1, 0), (many, num_ranks, number)):
        script = SUPPORT / "partition_threads.py"
        succeeded(python(script, folder, results, ranks, partitions, timeout=400))
        found.update(read_json(results))
    for name in OF_DATA:
        assert_close(many[name], one[name])
    for split in ("validation", "test"):
        assert_close(many[split], one[split], BY_GROUPS)
    assert one["test"]["cases"] == (events["split"] == "test").sum()
    # Each rank has the training events of its own partitions once, in as many steps.
    train = events[events["split"] == "train"]
    owners = partition_files.partition_of(train["user"], number) % num_ranks
    for rank, (steps, num_losses, times) in enumerate(many["ranks"]):
        assert steps == many["steps"]
        assert num_losses == len(steps)
        assert sorted(times) == np.sort(train["time"][owners == rank]).tolist()
    assert sum(many["steps"]) == len(train)
    assert len(many["steps"]) == pytest.approx(len(one["steps"]), abs=1)
