"""Checkpoints in an object store: moto's server of S3 on this machine, with the faults of `support/store.py`.

`test_dumps.py` writes and reads there with 1, 2 and 3 ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from example import make_model
from recsuite.checkpoint.chain import chain_at, check_whole
from recsuite.checkpoint.checkpointer import Checkpointer, checkpointing
from recsuite.checkpoint.folder import best_in, checkpoints_in, full_checkpoints_in, newest_in, step_of
from recsuite.checkpoint.shards import ShardFile
from recsuite.checkpoint.writer import tensors_of
from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.extras.stores.objects import FsspecPath
from recsuite.extras.stores.tensors import HEAD_BYTES, ObjectTensors
from recsuite.extras.stores.urls import filesystem
from recsuite.places import ObjectError, folder_at
from recsuite.runtime.process import RuntimeContext
from recsuite.serving.served import Follower, ServedModel
from recsuite.training.progress import Progress
from tests.support.dump_ranks import OTHER_BATCH_SIZE, SIZES, act
from tests.support.launch import EXAMPLE, SUPPORT, python, read_json, succeeded, torchrun
from tests.support.planted_model import mark_step, write_step
from tests.support.steps import tell
from tests.support.store import BUCKET, KILLS, SECRET, Fault, Store, ended_after
from tests.support.trained import Trained


@pytest.fixture
def place(store: Store, request: pytest.FixtureRequest) -> FsspecPath:
    """A place of the test alone."""
    found = folder_at(f"s3://{BUCKET}/{re.sub('[^a-z0-9]', '-', request.node.name.lower())}")
    assert isinstance(found, FsspecPath)
    return found


@contextlib.contextmanager
def training(trained: Trained, place: Any, **settings: Any) -> Iterator[Checkpointer]:
    """A checkpointer that has begun."""
    config = trained.config.replaced(save_dir=str(place), **{"resume": True, "inc_dump": False, **settings})
    with checkpointing(trained.columns, config, trained.context) as checkpointer:
        checkpointer.begin(trained.train_state, checkpointer.start)
        yield checkpointer


def take_steps(trained: Trained, checkpointer: Checkpointer, *steps: int) -> None:
    tensors = tensors_of(trained.train_state)
    for step in steps:
        write_step(tensors, step)
        if checkpointer.config.checkpoint.inc_dump:
            mark_step(checkpointer, tensors, step)
        tell(checkpointer, Progress(step, 0, step))


def names_in(place: Any) -> list[str]:
    return [path.name for path in checkpoints_in(place)]


def objects_of(place: Any) -> dict[str, bytes]:
    fs, path = filesystem(place.url)
    return {key.removeprefix(f"{path}/"): fs.cat_file(key) for key in fs.find(path)}


# --- what is written, and read ---


def test_checkpoints_and_deltas_in_a_store_are_those_of_a_folder_bit_for_bit(
    trained: Trained, place: Any
) -> None:
    with training(trained, place) as checkpointer:
        take_steps(trained, checkpointer, 1, 2)
    with training(trained, place, inc_dump=True) as checkpointer:
        take_steps(trained, checkpointer, 3, 4)
    assert names_in(place) == [path.name for path in checkpoints_in(trained.folder)]
    assert (place / "latest").resolve().name == "delta-000000004"
    for theirs, ours in zip(checkpoints_in(trained.folder), checkpoints_in(place), strict=True):
        trained.load(theirs)
        wanted = local_clones(trained)
        trained.load(ours)
        found = local_tensors(trained)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def local_tensors(trained: Trained) -> dict[str, torch.Tensor]:
    found = tensors_of(trained.train_state).items()
    return {
        name: value
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards")
        else value.local_shards()[0].tensor
        for name, value in found
    }


def local_clones(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in local_tensors(trained).items()}


@pytest.fixture(scope="module")
def launched(running_store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of 2 ranks whose training was ended and resumed, and of 3 ranks that resumed it."""
    folder = tmp_path_factory.mktemp("store")
    write_synthetic(folder / str(SIZES[0]), 6_000, seed=0)
    program, where = SUPPORT / "dump_ranks.py", f"s3://{BUCKET}/ranks"
    for num_ranks, action in ((2, "end"), (3, "go_on")):
        succeeded(torchrun(num_ranks, program, folder, where, action, env=running_store.env, timeout=240))
    return {"folder": folder, **{path.stem: read_json(path) for path in folder.glob("*.json")}}


def test_a_training_resumed_from_a_store_equals_an_undisturbed_one_bit_for_bit(
    launched: dict[str, Any],
) -> None:
    found = launched["end-2"]
    assert found["before"]["status"] == 143
    assert len(found["whole"]["tensors"]) > 30
    assert found["after"]["tensors"] == found["whole"]["tensors"]


@pytest.mark.parametrize("readers", [1, 3])
def test_another_number_of_ranks_resumes_from_a_store(
    launched: dict[str, Any], readers: int, store: Store, context: RuntimeContext
) -> None:
    ended, where = launched["end-2"], folder_at(f"s3://{BUCKET}/ranks")
    again = launched["go_on-3"] if readers == 3 else act("go_on", launched["folder"], where, context)
    whole = ended["whole"]["taken"]
    assert sorted(ended["before"]["taken"] + again["taken"]) == whole
    steps = -(-len(again["taken"]) // OTHER_BATCH_SIZE)
    assert again["end"]["step"] == ended["before"]["end"]["step"] + steps
    assert again["test"]["rmse"] == pytest.approx(ended["whole"]["test"]["rmse"], rel=5e-2)


def test_a_server_follows_the_deltas_of_a_store(trained: Trained, place: Any) -> None:
    with training(trained, place, inc_dump=True) as checkpointer:
        take_steps(trained, checkpointer, 1)
        follower = Follower(str(place), model=make_model, checkpoint="latest")
        before = follower.model.progress.step
        take_steps(trained, checkpointer, 2)
        assert follower.refresh()
    assert (before, follower.model.progress.step) == (1, 2)
    fs, path = filesystem(place.url)
    copy = trained.folder.parent / "copy"
    for name in names_in(place):
        fs.get(f"{path}/{name}/", str(copy / name), recursive=True)
    for name in follower.model.snapshot.names_of(("user", "item")):
        mine = follower.model.snapshot.table_of(name).arrays(name)
        theirs = ServedModel.open(copy, "latest", model=make_model).snapshot.table_of(name).arrays(name)
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[each], theirs[each]) for each in mine)


@pytest.mark.parametrize("rows", [1, 100_000])
def test_rows_are_read_by_ranges_and_equal_those_of_the_file(
    store: Store, place: Any, tmp_path: Path, rows: int
) -> None:
    drawn = torch.randn(rows, 8)
    tensors = {
        "float32": drawn,
        "float16": drawn.half(),
        "bfloat16": drawn.bfloat16(),
        "int8": drawn.char(),
        "bool": drawn > 0,
        "none": torch.empty(0, 3),
        "one": torch.tensor(7),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"key": "value"})
    file = place / "a.safetensors"
    file.upload(tmp_path / "a.safetensors")
    store.requests.clear()
    found = ObjectTensors(file)
    assert found.metadata() == {"key": "value"}
    for name, wanted in tensors.items():
        assert torch.equal(found.get_tensor(name), wanted)
        assert found.get_slice(name).get_shape() == list(wanted.shape)
    shard = ShardFile(file)
    before = len(store.requests)
    assert torch.equal(shard.rows("float32", rows // 2, rows // 2 + 9), drawn[rows // 2 : rows // 2 + 9])
    read = sum(size for *_, size in store.requests[before:])
    # A small file was read as a whole with its header.
    assert read == (0 if rows == 1 else 9 * 32)
    assert HEAD_BYTES < 100_000 * 32


# --- kills ---


@pytest.mark.parametrize(("kind", "every"), KILLS)
def test_after_any_request_the_checkpoints_are_whole_and_the_next_training_goes_on(
    trained: Trained, place: Any, store: Store, kind: str, every: int
) -> None:
    """For a store, a kill at any instant is the end of requests after any one of them."""
    place = folder_at(place.url.replace("s3", kind, 1))
    begun = place / "begun"
    with training(trained, begun, keep=1) as checkpointer:
        take_steps(trained, checkpointer, 1, 2)
    fs, path = filesystem(place.url)
    number, finished, left = 0, False, 0
    while not finished:
        here = place / f"at-{number}"
        fs.copy(f"{path}/begun/", f"{path}/at-{number}/", recursive=True)
        with (
            ended_after(number, place, store) as fault,
            contextlib.suppress(UserError),
            training(trained, here, keep=1, inc_dump=number % 2 == 0) as again,
        ):
            take_steps(trained, again, 3, 4)
        # None failed.
        finished = fault.number == 10**9
        newest = newest_in(here)
        assert newest is not None
        assert step_of(newest) >= 2
        for checkpoint in checkpoints_in(here):
            check_whole(chain_at(checkpoint))
        unfinished = {path.name for path in here.iterdir()} - {*names_in(here), ".lock", "latest", "best"}
        left += len(unfinished)
        if number % (3 * every) == 0 or finished:
            with training(trained, here, keep=1) as again:
                assert again.start.step == step_of(newest)
                take_steps(trained, again, 9)
            assert names_in(here)[-1] == "step-000000009"
            check_whole(chain_at(here))
            with training(trained, here, keep=1):
                assert {path.name for path in here.iterdir()} - {*names_in(here), ".lock", "latest"} == set()
        number += every
    assert number > 70
    assert left >= 1


# --- faults ---


FAULTS = [
    *(
        Fault(code, number, method="PUT")
        for code, number in (("SlowDown", 2), ("InternalError", 2), ("cut", 1))
    ),
    Fault("unheard", 1, method="PUT", key="manifest"),
    *(Fault("SlowDown", 2, method="GET"), Fault("cut", 1, method="GET")),
    Fault("half", 1, method="GET", key="part-"),
]


def test_a_store_that_is_slow_or_fails_for_a_moment_loses_nothing(
    trained: Trained, place: Any, store: Store
) -> None:
    with training(trained, place) as checkpointer:
        for step, fault in enumerate(FAULTS[:4], 1):
            store.fault = dataclasses.replace(fault)
            take_steps(trained, checkpointer, step)
            assert store.fault.number == 0
            assert checkpointer.writer.failure == ""
        store.seconds = 0.05
        take_steps(trained, checkpointer, 5)
    wanted, store.seconds = local_clones(trained), 0
    check_whole(chain_at(place))
    for fault in FAULTS[4:]:
        store.fault = dataclasses.replace(fault)
        write_step(tensors_of(trained.train_state), 99)
        trained.load(place)
        assert store.fault.number == 0
        assert all(torch.equal(value, wanted[name]) for name, value in local_tensors(trained).items())
    assert names_in(place)[-1] == "step-000000005"


def test_a_store_that_fails_gives_one_sentence_and_the_next_checkpoint_holds_the_changes(
    trained: Trained, place: Any, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    login = "this login is not allowed to do it, or has expired"
    reasons = {"SlowDown": "the server answers with status 503", "ExpiredToken": login, "AccessDenied": login}
    with training(trained, place, inc_dump=True) as checkpointer:
        for step, (code, words) in zip((1, 4, 7), reasons.items(), strict=True):
            take_steps(trained, checkpointer, step)
            store.fault = Fault(code, method="PUT", key="delta")
            take_steps(trained, checkpointer, step + 1)
            failure, store.fault = checkpointer.writer.failure, None
            take_steps(trained, checkpointer, step + 2)
            assert f"Cannot write {place}/delta-00000000{step + 1}: {words}. Fix: " in failure
            assert SECRET not in failure + capsys.readouterr().out
            # A delta may be there although its answer was lost, so none builds on the one before it.
            assert names_in(place)[-2:] == [f"delta-00000000{step}", f"step-00000000{step + 2}"]
        wanted = local_clones(trained)
        # All tries are carried out, and no answer of them comes.
        store.fault = Fault("unheard", method="PUT", key="delta-000000010/manifest")
        take_steps(trained, checkpointer, 10)
        assert "Cannot write" in checkpointer.writer.failure
        store.fault = None
        take_steps(trained, checkpointer, 11, 12)
    assert names_in(place)[-3:] == ["delta-000000010", "step-000000011", "delta-000000012"]
    check_whole(chain_at(place))
    write_step(tensors_of(trained.train_state), 99)
    trained.load(place / "step-000000009")
    assert all(torch.equal(value, wanted[name]) for name, value in local_tensors(trained).items())


def test_a_load_from_a_store_that_fails_or_has_a_damaged_object_is_one_sentence(
    trained: Trained, place: Any, store: Store
) -> None:
    with training(trained, place) as checkpointer:
        take_steps(trained, checkpointer, 1)
    for code in ("cut", "half", "ExpiredToken", "InternalError"):
        store.fault = Fault(code, method="GET", key="part-")
        trained.refused(f"Cannot read {place}/step-000000001/part-", "Fix: check the address", path=place)
    store.fault = None
    trained.load(place)
    (part,) = (name for name in objects_of(place / "step-000000001") if name.startswith("part-"))
    content = bytearray((place / "step-000000001" / part).read_bytes())
    content[-1] ^= 1
    (place / "step-000000001" / part).put(bytes(content))
    trained.refused(part, "is damaged", path=place / "step-000000001")


def test_an_old_listing_does_not_hide_the_newest_checkpoint(
    trained: Trained, place: Any, store: Store
) -> None:
    with training(trained, place) as checkpointer:
        take_steps(trained, checkpointer, 1, 2)
    store.hidden = "step-000000002"
    assert newest_in(place) == place / "step-000000002"
    with training(trained, place) as checkpointer:
        assert checkpointer.start.step == 2
        take_steps(trained, checkpointer, 3)
    store.hidden = ""
    assert names_in(place)[-2:] == ["step-000000002", "step-000000003"]


def test_a_checkpoint_that_a_listing_lacks_is_not_removed(trained: Trained, place: Any, store: Store) -> None:
    with training(trained, place) as checkpointer:
        take_steps(trained, checkpointer, 1, 2)
    # As after a kill before the link of the second one.
    (place / "latest").link_to("step-000000001")
    store.hidden = "step-000000002/manifest"
    with training(trained, place) as checkpointer:
        assert checkpointer.start.step == 1
    store.hidden = ""
    check_whole(chain_at(place / "step-000000002"))


@pytest.mark.parametrize(("kind", "every"), KILLS)
def test_a_new_training_moves_those_of_an_earlier_one_aside_after_any_interruption(
    trained: Trained, place: Any, store: Store, kind: str, every: int
) -> None:
    place = folder_at(place.url.replace("s3", kind, 1))
    fs, path = filesystem(place.url)
    with training(trained, place / "begun") as checkpointer:
        take_steps(trained, checkpointer, 1, 2)
    number, finished = 0, False
    while not finished:
        here = place / f"at-{number}"
        fs.copy(f"{path}/begun/", f"{path}/at-{number}/", recursive=True)
        with (
            ended_after(number, place, store) as fault,
            contextlib.suppress(UserError),
            training(trained, here, resume=False, move_aside=True),
        ):
            pass
        finished = fault.number == 10**9
        with training(trained, here, resume=False, move_aside=True) as checkpointer:
            take_steps(trained, checkpointer, 1)
        (aside,) = (path for path in here.iterdir() if path.name.startswith("run-"))
        assert names_in(aside) == ["step-000000001", "step-000000002"]
        for checkpoint in checkpoints_in(aside):
            check_whole(chain_at(checkpoint))
        assert names_in(here) == ["step-000000001"]
        number += every
    assert number > 25


def test_of_two_trainings_the_later_one_owns_the_place_and_the_earlier_one_is_refused(
    trained: Trained, place: Any
) -> None:
    name = mock.patch("recsuite.checkpoint.folder.launch_name", return_value="a-launch")
    with contextlib.suppress(UserError), training(trained, place) as earlier:
        take_steps(trained, earlier, 1)
        with name, training(trained, place) as later:
            take_steps(trained, later, 2)
        take_steps(trained, earlier, 3)
    assert f"another training, a-launch, writes to {place} now" in earlier.writer.failure
    assert names_in(place) == ["step-000000001", "step-000000002"]


def test_a_published_checkpoint_is_never_written_again(trained: Trained, place: Any) -> None:
    with training(trained, place) as checkpointer:
        take_steps(trained, checkpointer, 1)
        before = objects_of(place / "step-000000001")["manifest.json"]
        write_step(tensors_of(trained.train_state), 7)
        checkpointer.writer.write_full(Progress(1, 0, 1))
        assert "another training has written it" in checkpointer.writer.failure
        take_steps(trained, checkpointer, 2)
    assert objects_of(place / "step-000000001")["manifest.json"] == before
    check_whole(chain_at(place / "step-000000001"))


def test_a_new_training_moves_those_of_an_earlier_one_aside_and_few_full_ones_are_kept(
    trained: Trained, place: Any
) -> None:
    with training(trained, place, keep=2) as checkpointer:
        take_steps(trained, checkpointer, 1, 2, 3)
    assert names_in(place) == ["step-000000002", "step-000000003"]
    with training(trained, place, resume=False, move_aside=True) as checkpointer:
        take_steps(trained, checkpointer, 1)
    (aside,) = (path for path in place.iterdir() if path.name.startswith("run-"))
    assert names_in(aside) == ["step-000000002", "step-000000003"]
    check_whole(chain_at(aside))
    assert best_in(place) is None
    assert [path.name for path in full_checkpoints_in(place)] == ["step-000000001"]


# --- commands ---


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "few"
    write_synthetic(folder, 3_000, seed=0)
    return folder


def test_commands_train_load_and_recommend_from_a_store_and_no_object_or_line_has_a_secret(
    store: Store, place: Any, data: Path
) -> None:
    flags = ("--data_path", data, "--save_dir", place)
    output = ""
    report = ("--report_dir", place / "report")
    for command in (
        ("--inc_dump", "--epochs", 1, *report),
        ("--load", *report),
        ("--recommend", "--user", 1),
        ("--compact",),
    ):
        result = python(EXAMPLE, *flags, *command, env=store.env, timeout=120)
        output += succeeded(result) + result.stderr
    assert f"dumped {place}/step-000000000" in output
    shown = succeeded(python("-m", "recsuite.extras.reports.compare", place, env=store.env))
    assert re.search(r"^\| report ", shown, re.MULTILINE)
    held = objects_of(place)
    assert {"report/metrics.json", "report/test.json"} <= held.keys()
    assert SECRET not in output + shown
    assert not [name for name, content in held.items() if SECRET.encode() in content]
    assert len(held) > 10


def test_a_bucket_that_is_not_there_is_one_sentence_on_every_rank(store: Store, data: Path) -> None:
    flags = ("--data_path", data, "--save_dir", "s3://no-such-bucket/run", "--dump")
    sentence = "Cannot read s3://no-such-bucket/run: The specified bucket does not exist. Fix: "
    alone = python(EXAMPLE, *flags, env=store.env, timeout=120)
    assert alone.returncode == 2
    assert sentence in alone.stderr
    assert "Traceback" not in alone.stderr
    ranks = torchrun(2, EXAMPLE, *flags, env=store.env, timeout=120)
    assert ranks.returncode != 0
    assert sentence in ranks.stderr


def test_no_files_stay_on_this_machine(
    trained: Trained, place: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = {*tmp_path.iterdir()}
    with contextlib.suppress(UserError), training(trained, place) as checkpointer:
        take_steps(trained, checkpointer, 1)
        store.fault = Fault("AccessDenied", method="PUT", key="step-000000002")
        take_steps(trained, checkpointer, 2)
    assert {*tmp_path.iterdir()} == before


def test_checkpoints_in_the_memory_of_a_process_are_those_of_a_store(trained: Trained) -> None:
    place: Any = folder_at("memory://bucket/run")
    for resume in (False, True, False):
        modes = {"resume": resume, "move_aside": not resume, "inc_dump": True}
        with training(trained, place, **modes) as checkpointer:
            first = checkpointer.start.step
            take_steps(trained, checkpointer, first + 1, first + 2)
    assert names_in(place) == ["step-000000000", "delta-000000001", "delta-000000002"]
    trained.load(place)


def test_columns_that_one_machine_made_are_used_by_another_and_damaged_ones_are_made_again(
    place: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    for number, part in enumerate((None, None, "time.npy")):
        copy = tmp_path / str(number)
        shutil.copytree(data, copy, ignore=shutil.ignore_patterns(".columns"))
        if part:
            (stored,) = place.iterdir()
            content = bytearray((stored / part).read_bytes())
            content[-1] ^= 1
            (stored / part).put(bytes(content))
        made.append(open_columns(Config.of(data_path=str(copy), cache_dir=str(place))))
        said = capsys.readouterr()
        assert ("reading" in said.out + said.err) == (number != 1)
        assert ("are those of" in said.out + said.err) == (number == 1)
    for columns in made[1:]:
        assert columns.digest == made[0].digest
        assert np.array_equal(columns.column("rows"), made[0].column("rows"))


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "memory://"])
def test_an_address_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="names no bucket; give"):
        folder_at(url)


def test_an_error_of_a_store_is_the_same_in_another_process() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ObjectError("s3://bucket/run", "a reason")))
    assert str(error) == str(ObjectError("s3://bucket/run", "a reason"))
    assert error.strerror == "a reason"


def test_an_object_path_is_equal_to_itself_after_a_message_to_another_process(place: Any) -> None:
    import pickle

    assert pickle.loads(pickle.dumps(place)) == place
    assert np.array([str(place / "a")])[0] == f"{place}/a"
