"""Forged manifests with matching digests: refused, or loaded as they were written.

FORGERIES says how many manifests are forged, and under `soak` ten times as many; FORGERY_SEED says which.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from example import make_model
from recsuite.checkpoint.checkpointer import compact
from recsuite.checkpoint.folder import remove_checkpoint
from recsuite.checkpoint.format import MANIFEST, read_manifest, write_manifest
from recsuite.checkpoint.restore import restore_chosen
from recsuite.checkpoint.shards import OFFSETS_KEY, RowReader
from recsuite.checkpoint.writer import tensors_of
from recsuite.config.sections import CheckpointConfig
from recsuite.errors import UserError
from recsuite.files import sealed
from recsuite.serving.export import export
from recsuite.serving.served import Follower, ServedModel
from tests.support.planted_model import differing, write_step
from tests.support.published import reseal
from tests.support.trained import Trained, resume

FORGERIES = int(os.environ.get("FORGERIES", "20"))
SEED = int(os.environ.get("FORGERY_SEED", "0"))
DUMP, DELTA = "step-000000001", "delta-000000003"
PART = "part-00001.safetensors"


def ends_well(action: Callable[[], Any]) -> bool:
    """Return true if an action succeeds; a failure must raise one message of one sentence."""
    sentence = ""
    try:
        action()
    except UserError as error:
        sentence = str(error)
    assert "\n" not in sentence
    return not sentence


# --- manifests ---

HOSTILE: tuple[Any, ...] = (
    float("inf"),
    float("nan"),
    -1,
    0,
    1.5,
    2**200,
    10**400,
    True,
    None,
    "",
    "a\nb",
    "\x1b[2J",
    "\ud800",
    "x" * 100_000,
    "../../elsewhere",
    "2026-11-21T12:00:00",
    "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00+23:59",
    "complex64",
    [],
    {},
    [[[]]],
    [2**40, 2**40],
    {"a": {"b": "c"}},
)


def places_in(found: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a tree, with each of its keys."""
    for key in (
        list(found) if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
    ):
        yield found, key
        yield from places_in(found[key])


def forge(found: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A manifest with one or two places changed."""
    forged = copy.deepcopy(found)
    for _ in range(chance.choice((1, 1, 2))):
        places = list(places_in(forged))
        # Of a place at the top there are few, of tensors and files many.
        holder, key = chance.choice(
            chance.choice((places, [place for place in places if place[0] is forged]))
        )
        change = chance.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif change == 1:
            holder[f"{key}2"] = holder[key]
        elif change == 2 and isinstance(holder[key], int):
            holder[key] += chance.choice((-1, 1, 10**6, -(10**6), 2**53))
        else:
            holder[key] = chance.choice(HOSTILE)
    return forged


@pytest.mark.parametrize("name", [DUMP, DELTA])
@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("count", [FORGERIES, pytest.param(10 * FORGERIES, marks=pytest.mark.soak)])
def test_every_forged_manifest_gives_one_message_or_a_correct_load(
    trained: Trained, name: str, is_sealed: bool, count: int
) -> None:
    path, chance = trained.folder / name / MANIFEST, random.Random(SEED)
    content = path.read_bytes()
    found, loads, step = json.loads(content), 0, int(name[-1])

    def load() -> None:
        write_step(tensors_of(trained.train_state), 99)
        trained.load(path.parent)
        assert differing(tensors_of(trained.train_state), step) == []

    whole = ServedModel.open(path.parent, model=make_model).snapshot.tables["user"].matrix.clone()
    for number in range(count if is_sealed else count // 3):
        forged = forge(found, chance)
        path.write_text(json.dumps(sealed(forged) if is_sealed else forged))
        shown = path.read_text()[:3000]
        loads += ends_well(load)
        served = []
        if ends_well(lambda: served.append(ServedModel.open(path.parent, model=make_model))):  # noqa: B023
            assert torch.equal(served[0].snapshot.tables["user"].matrix, whole), shown
            assert served[0].age is not None
        if number % 10 == 0:
            ends_well(lambda: Follower(trained.folder, model=make_model, checkpoint="latest").refresh())
            ends_well(lambda: resume(trained))
            ends_well(lambda: export_and_remove(trained.folder))
    path.write_bytes(content)
    load()
    # That all are refused would show nothing.
    assert is_sealed == (0 < loads < count)


def export_and_remove(save_dir: Path) -> None:
    target = save_dir.parent / "exported"
    export(CheckpointConfig(save_dir=str(save_dir)), target, make_model)
    shutil.rmtree(target)


def test_an_invalid_manifest_is_refused_by_load_resume_compact_export_and_serving(trained: Trained) -> None:
    for state in (trained.folder / "step-000000002", trained.folder / "delta-000000004"):
        path = state / MANIFEST
        content = path.read_bytes()
        path.write_text(json.dumps(sealed({**json.loads(content), "world_size": float("inf")})))
        alone = trained.config.replaced(resume=False, inc_dump=False, compact=True)
        for action in (
            trained.load,
            lambda: resume(trained),
            lambda: compact(trained.train_state, trained.columns, alone, trained.context),  # noqa: B023
            lambda: export_and_remove(trained.folder),
            lambda: Follower(trained.folder, model=make_model, checkpoint="latest"),
        ):
            with pytest.raises(UserError, match=re.escape(str(path))):
                action()
        path.write_bytes(content)


def test_a_feature_in_two_lines_is_refused_in_one(trained: Trained) -> None:
    folder = trained.folder / DUMP
    manifest = read_manifest(folder)
    write_manifest(folder, dataclasses.replace(manifest, features={**manifest.features, "user": "a\nb"}))
    with pytest.raises(
        UserError, match=r"has the feature user as a b, and this program has it as"
    ) as refusal:
        trained.load(folder)
    assert "\n" not in str(refusal.value)


def test_a_position_beyond_its_epoch_is_refused_at_a_resume(trained: Trained) -> None:
    for state in (trained.folder / "step-000000002", trained.folder / DUMP):
        for delta in trained.folder.glob("delta-*"):
            shutil.rmtree(delta)
        progress = dataclasses.replace(read_manifest(state).progress, samples=trained.columns.num_train)
        write_manifest(state, dataclasses.replace(read_manifest(state), progress=progress))
    with pytest.raises(UserError, match=r"ratings of its epoch are used, and an epoch has"):
        resume(trained)


# --- parts ---

Header = dict[str, Any]


def rewrite(path: Path, change: Callable[[Header, bytearray], Any]) -> None:
    """Change the header or the bytes of a part, and have its manifest agree."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8:begin]), bytearray(content[begin:])
    change(header, body)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(body))
    reseal(path.parent)


def set_offsets(value: Any, name: str = "tables.user.weight") -> Callable[[Header, bytearray], None]:
    def change(header: Header, body: bytearray) -> None:
        offsets = json.loads(header["__metadata__"][OFFSETS_KEY])
        offsets[name] = value
        header["__metadata__"][OFFSETS_KEY] = json.dumps(offsets)

    return change


def set_metadata(text: str) -> Callable[[Header, bytearray], None]:
    return lambda header, body: header["__metadata__"].update({OFFSETS_KEY: text})


def rename(name: str, other: str) -> Callable[[Header, bytearray], None]:
    return lambda header, body: header.update({other: header.pop(name)})


def reshape(name: str, change: Callable[[list[int]], list[int]]) -> Callable[[Header, bytearray], None]:
    return lambda header, body: header[name].update(shape=change(header[name]["shape"]))


def retype(name: str, dtype: str) -> Callable[[Header, bytearray], None]:
    return lambda header, body: header[name].update(dtype=dtype)


def write_rows(change: Callable[[torch.Tensor], Any]) -> Callable[[Header, bytearray], None]:
    def write(header: Header, body: bytearray) -> None:
        first, last = header["tables.movie.rows"]["data_offsets"]
        rows = torch.frombuffer(body[first:last], dtype=torch.int64).clone()
        change(rows)
        body[first:last] = rows.numpy().tobytes()

    return write


def put_last(rows: torch.Tensor, value: int) -> None:
    rows[-1] = value


USER = "tables.user.weight"
OF_DUMPS = {
    "a tensor of another name": rename(USER, "tables.user.wait"),
    "a tensor that nobody named": rename("dense.mlp.0.bias", "dense.mlp.0.bias2"),
    "whole numbers for weights": retype(USER, "I32"),
    "rows and columns swapped": reshape(USER, lambda shape: shape[::-1]),
    "one dimension": reshape(USER, lambda shape: [shape[0] * shape[1]]),
    "one dimension more": reshape(USER, lambda shape: [*shape, 1]),
    "a dense part of another shape": reshape("dense.mlp.0.weight", lambda shape: shape[::-1]),
    "a dense part of another type": retype("dense.mlp.0.bias", "I32"),
    "a state of another type": retype("tables.user.momentum1", "I32"),
    "metadata that are no JSON": set_metadata("{"),
    "metadata in a list": set_metadata("[]"),
    "metadata of nothing": set_metadata("{}"),
    "metadata too deep": set_metadata("[" * 100_000),
    "offsets in words": set_offsets({"saved_offsets": "00"}),
    "offsets below zero": set_offsets({"saved_offsets": [-1, 0]}),
    "offsets without end": set_offsets({"saved_offsets": [2**200, 0]}),
    "offsets shifted": set_offsets({"saved_offsets": [1, 0]}),
    "too few offsets": set_offsets({"saved_offsets": [0]}),
    "too many offsets": set_offsets({"saved_offsets": [0, 0, 0]}),
    "offsets as truth": set_offsets({"saved_offsets": [False, False]}),
    "no offsets": set_offsets({}),
    "offsets as a list": set_offsets([0, 0]),
    "no metadata of one": lambda header, body: set_metadata(
        json.dumps({"dense.mlp.0.bias": {"saved_offsets": [0]}})
    )(header, body),
}
OF_DELTAS = {
    "no rows": rename("tables.movie.rows", "tables.movie.lines"),
    "rows that are floats": retype("tables.movie.rows", "F64"),
    "rows in two dimensions": reshape("tables.movie.rows", lambda shape: [*shape, 1]),
    "a row beyond the table": write_rows(lambda rows: put_last(rows, 2**40)),
    "a row below zero": write_rows(lambda rows: rows[:1].fill_(-1)),
}


def refused_by_restore_and_reader(trained: Trained, folder: Path) -> None:
    write_step(tensors_of(trained.train_state), 99)
    for action in (lambda: trained.load(folder), lambda: ServedModel.open(folder, model=make_model)):
        with pytest.raises(UserError, match=re.escape(str(folder))) as refusal:
            action()
        assert "\n" not in str(refusal.value)
    assert differing(tensors_of(trained.train_state), 99) == []


@pytest.mark.parametrize("change", OF_DUMPS)
def test_a_full_checkpoint_with_files_unlike_its_manifest_changes_nothing(
    trained: Trained, change: str
) -> None:
    rewrite(trained.folder / DUMP / PART, OF_DUMPS[change])
    refused_by_restore_and_reader(trained, trained.folder / DUMP)


@pytest.mark.parametrize("change", OF_DELTAS)
def test_a_delta_with_files_unlike_its_manifest_changes_nothing(trained: Trained, change: str) -> None:
    rewrite(trained.folder / DELTA / PART, OF_DELTAS[change])
    refused_by_restore_and_reader(trained, trained.folder / DELTA)
    model = ServedModel.open(trained.folder / "step-000000002", model=make_model)
    before = model.snapshot.tables["movie"].matrix.clone()
    with pytest.raises(UserError, match=DELTA):
        model.apply(trained.folder / DELTA)
    assert torch.equal(model.snapshot.tables["movie"].matrix, before)


def split_part(folder: Path, num_lost: int) -> None:
    """Make two parts of one, as of two ranks. num_lost: rows of the users that neither of them has."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / PART)
    half = len(tensors[USER]) // 2
    offsets = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    second = {USER: tensors[USER][half + num_lost :].clone()}
    tensors[USER] = tensors[USER][:half].clone()
    save_file(tensors, folder / PART, {OFFSETS_KEY: json.dumps(offsets)})
    place = {USER: {"saved_offsets": [half + num_lost, 0]}}
    save_file(second, folder / "part-00002.safetensors", {OFFSETS_KEY: json.dumps(place)})
    reseal(folder)


def test_shard_files_are_joined_only_without_gaps(trained: Trained) -> None:
    split_part(trained.folder / DUMP, 0)
    assert trained.load(trained.folder / DUMP).step == 1
    assert differing(tensors_of(trained.train_state), 1) == []
    ServedModel.open(trained.folder / DUMP, model=make_model)
    dump = trained.folder / "step-000000002"
    split_part(dump, 1)
    refused_by_restore_and_reader(trained, dump)


# --- what is removed while it is read ---


def test_a_load_of_the_newest_takes_a_newer_one_where_the_trainer_removes_it(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = trained.folder.with_name("newer")
    for delta in trained.folder.glob("delta-*"):
        shutil.rmtree(delta)
    (trained.folder / "step-000000002").rename(newer)
    read = RowReader.fill
    removed: list[Path] = []

    def read_late(reader: RowReader, tensors: Any) -> None:
        folder = reader.folders[0]
        if newer.exists():
            newer.rename(trained.folder / "step-000000002")
        if len(removed) != 1:
            removed.append(folder)
            remove_checkpoint(folder)
        read(reader, tensors)

    monkeypatch.setattr(RowReader, "fill", read_late)
    config = trained.config.replaced(load="newest")
    found = restore_chosen(
        config.checkpoint, config.model, trained.train_state, trained.columns, trained.context
    )
    assert ([folder.name for folder in removed], found.progress.step) == ([DUMP], 2)
    assert differing(tensors_of(trained.train_state), 2) == []
    # One that was named is not replaced by another.
    removed.clear()
    named = config.replaced(load=str(trained.folder / "step-000000002"))
    with pytest.raises(UserError, match=r"step-000000002 is not a checkpoint: there is no such folder"):
        restore_chosen(named.checkpoint, named.model, trained.train_state, trained.columns, trained.context)


# --- whose fault it is ---


def test_a_fault_of_the_program_keeps_its_traceback(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in (TypeError, AttributeError, KeyError, ValueError, RuntimeError):

        def fail(*_: Any, fault: type[Exception] = fault) -> None:
            raise fault("ours")

        monkeypatch.setattr(RowReader, "fill", fail)
        for read in (
            lambda: ServedModel.open(trained.folder, model=make_model),
            lambda: Follower(trained.folder, model=make_model, checkpoint="latest"),
        ):
            with pytest.raises(fault, match="ours"):
                read()


def test_a_load_reports_ratings_that_differ_from_those_of_the_training(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained.config.replaced(load=str(trained.folder))
    for digest, is_said in ((trained.columns.digest, False), ("other", True)):
        columns = dataclasses.replace(trained.columns, digest=digest)
        restore_chosen(config.checkpoint, config.model, trained.train_state, columns, trained.context)
        assert ("may have learned from the test set" in capsys.readouterr().out) == is_said
