"""The folder of checkpoints: accepted, refused, kept and removed ones, with checkpoints of a few bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from example import make_model
from recsuite.checkpoint import chain
from recsuite.checkpoint import folder as folders
from recsuite.checkpoint.chain import CheckpointChain, chain_at, check_chain, chosen_chain, with_suggestion
from recsuite.checkpoint.earlier import begin, check_free
from recsuite.checkpoint.folder import (
    BEST,
    LATEST,
    LOCK,
    archive_checkpoints,
    deltas_in,
    full_checkpoints_in,
    making_name,
    new_attempt,
    newest_in,
    publish,
    remove_checkpoint,
    step_of,
    writing,
)
from recsuite.checkpoint.format import FORMAT, MANIFEST, check_files, read_manifest, write_manifest
from recsuite.config.sections import CheckpointConfig
from recsuite.errors import UserError
from recsuite.files import sealed
from recsuite.serving import reader
from recsuite.training.progress import Progress
from tests.support.launch import ROOT, run_command, succeeded
from tests.support.tiny_dumps import (
    BETTER,
    GOOD,
    PART,
    WORSE,
    WRITER,
    add_chain,
    add_delta,
    add_dump,
    check_whole,
    fill,
    link_to,
    links_in,
    names_in,
    publish_at,
)


def refused(action: Callable[[], Any], *words: str) -> None:
    """One sentence that holds all of the words."""
    with pytest.raises(UserError) as caught:
        action()
    sentence = str(caught.value)
    assert [word for word in words if word not in sentence] == [], sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


# --- names, and what they stand for ---


def test_only_whole_names_of_checkpoints_count(tmp_path: Path) -> None:
    for name in ("step-1", "step-00000001x", ".making-step-000000003", "xstep-000000004", "delta-", "run-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000005").touch()
    assert full_checkpoints_in(tmp_path) == deltas_in(tmp_path) == []
    assert newest_in(tmp_path) is None
    assert newest_in(tmp_path / "nowhere") is None


def test_checkpoints_are_in_the_order_of_their_steps_beyond_nine_digits(tmp_path: Path) -> None:
    for step in (10**9, 5, 999_999_999):
        add_dump(tmp_path, step)
    assert [step_of(path) for path in full_checkpoints_in(tmp_path)] == [5, 999_999_999, 10**9]


def test_the_newest_checkpoint_is_the_one_of_the_highest_step_and_a_full_one_before_a_delta(
    tmp_path: Path,
) -> None:
    add_chain(tmp_path, 10, 20, 30)
    assert newest_in(tmp_path) == tmp_path / "delta-000000030"
    add_dump(tmp_path, 30)
    assert newest_in(tmp_path) == tmp_path / "step-000000030"
    assert newest_in(tmp_path, until=29) == tmp_path / "delta-000000020"
    assert newest_in(tmp_path, until=9) is None


def test_a_folder_that_cannot_be_looked_at_is_refused_with_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*: File name too long\. Fix: "):
        newest_in(tmp_path / ("a" * 1000))


def test_a_clock_that_ran_backwards_changes_no_order(tmp_path: Path) -> None:
    chain = add_chain(tmp_path, 10, 20, 30)
    for number, path in enumerate(chain):
        os.utime(path, (2_000_000_000 - number * 10**8,) * 2)
    rewrite(chain[-1], time="2001-01-01T00:00:00+00:00")
    assert check_whole(tmp_path) == CheckpointChain(chain[0], tuple(chain[1:]))


def test_every_folder_of_a_save_dir_stands_for_its_checkpoint(tmp_path: Path) -> None:
    base, one, two = add_chain(tmp_path, 10, 20, 30)
    (tmp_path / LATEST).symlink_to(one.name)
    assert chain_at(base) == CheckpointChain(base)
    assert chain_at(one) == chain_at(tmp_path / LATEST) == CheckpointChain(base, (one,))
    assert chain_at(two) == chain_at(tmp_path) == CheckpointChain(base, (one, two))
    assert chain_at(tmp_path).folder == two


@pytest.mark.parametrize(
    ("until", "steps"), [(10, []), (19, []), (20, [20]), (29, [20]), (30, [20, 30]), (99, [20, 30])]
)
def test_until_stops_at_the_last_delta_that_ends_by_it(tmp_path: Path, until: int, steps: list[int]) -> None:
    base, _, two = add_chain(tmp_path, 10, 20, 30)
    for folder in (tmp_path, base, two):
        state = chain_at(folder, until)
        assert (state.base, [step_of(path) for path in state.deltas]) == (base, steps)


def test_until_before_everything_is_refused(tmp_path: Path) -> None:
    base, one = add_chain(tmp_path, 10, 20)
    refused(lambda: chain_at(tmp_path, 9), str(tmp_path), "holds no checkpoint by step 9")
    refused(lambda: chain_at(one, 9), "--until 9 is before", str(base), one.name)


def test_an_invalid_request_suggests_no_other_checkpoint(tmp_path: Path) -> None:
    add_dump(tmp_path, 5)
    _, one = add_chain(tmp_path, 10, 20)
    for ask in (
        lambda: chosen_chain(tmp_path, "newest"),
        lambda: chosen_chain(tmp_path, until=4),
        lambda: chain_at(one, 9),
    ):
        with pytest.raises(UserError) as caught:
            with_suggestion(tmp_path, ask)
        assert "there is" not in str(caught.value)
        refused(ask, str(caught.value))


def test_a_checkpoint_that_is_not_complete_is_refused_with_one_that_is_and_no_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = add_dump(tmp_path, 5)
    base, one, last = add_chain(tmp_path, 10, 20, 30)
    (one / PART).unlink()
    os.truncate(base / PART, 1)
    (last / MANIFEST).unlink()
    monkeypatch.setattr(chain, "check_whole", Mock(side_effect=AssertionError("read")))
    words = f"holds no {MANIFEST}; the newest complete one there is {complete}; give that folder"
    refused(lambda: with_suggestion(tmp_path, lambda: chain_at(tmp_path)), words)


def test_a_checkpoint_moved_during_a_read_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_dump(tmp_path, 5)
    moved, read = add_dump(tmp_path, 10), []

    def read_snapshot(state: CheckpointChain, *given: Any) -> Any:
        read.append(state.folder.name)
        if state.folder == moved:
            remove_checkpoint(moved)
            raise UserError(f"{moved} is missing.")
        return state

    monkeypatch.setattr(reader, "read_snapshot", read_snapshot)
    for module in (chain, reader):
        monkeypatch.setattr(module, "check_whole", Mock(side_effect=AssertionError("read")), raising=False)
    monkeypatch.setattr(chain, "suggestion", Mock(side_effect=AssertionError("suggested")))
    reader.read_settled(tmp_path, LATEST, make_model)
    assert read == ["step-000000010", "step-000000005"]


def test_deltas_of_another_base_are_not_replayed(tmp_path: Path) -> None:
    add_chain(tmp_path, 10, 20, 30)
    newer = add_dump(tmp_path, 25)
    last = add_delta(newer, 1, 25, 40)
    assert check_whole(tmp_path) == CheckpointChain(newer, (last,))


def test_a_full_checkpoint_under_any_name_is_loaded_and_a_renamed_delta_is_refused(tmp_path: Path) -> None:
    base, one = add_chain(tmp_path / "dumps", 10, 20)
    mine = tmp_path / "my best model"
    shutil.copytree(base, mine)
    assert check_whole(tmp_path / "dumps")
    check_chain(chain_at(mine))
    assert chain_at(mine, 10) == CheckpointChain(mine)
    refused(lambda: chain_at(mine, 9), "--until 9 is before", "my best model")
    shutil.copytree(one, base.parent / "mine")
    refused(lambda: chain_at(base.parent / "mine"), "mine is a delta", base.name)


@pytest.mark.parametrize("where", ["nowhere", "empty", "a file"])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").touch()
    words = {"empty": "holds no checkpoint", "a file": "is a file, not a folder"}.get(where, "is not there")
    refused(lambda: chain_at(tmp_path / where), where, words, "train with --dump")


# --- chains ---


def relink(folder: Path, **changes: Any) -> None:
    """Write a manifest again, whose link differs."""
    manifest = read_manifest(folder)
    assert manifest.link is not None
    link = dataclasses.replace(manifest.link, **changes)
    write_manifest(folder, dataclasses.replace(manifest, link=link))


def rewrite(folder: Path, **changes: Any) -> None:
    """Write a manifest again, with other values."""
    write_manifest(folder, dataclasses.replace(read_manifest(folder), **changes))


def chain_refused(save_dir: Path, *words: str) -> None:
    before = {path: path.read_bytes() for path in save_dir.rglob("*") if path.is_file()}
    refused(lambda: check_chain(chain_at(save_dir)), *words)
    assert {path: path.read_bytes() for path in save_dir.rglob("*") if path.is_file()} == before


def test_a_chain_without_its_base_is_refused(tmp_path: Path) -> None:
    base, *_ = add_chain(tmp_path, 10, 20)
    shutil.rmtree(base)
    chain_refused(tmp_path, str(base), "is missing", "on which delta-000000020 builds")


@pytest.mark.parametrize(("missing", "number"), [(20, 1), (30, 2)])
def test_a_chain_with_a_gap_names_the_missing_delta(tmp_path: Path, missing: int, number: int) -> None:
    base, *_ = add_chain(tmp_path, 10, 20, 30, 40)
    shutil.rmtree(tmp_path / f"delta-{missing:09d}")
    chain_refused(tmp_path, f"Delta {number} after {base} is missing", f"is number {number + 1}")


def test_the_same_delta_twice_is_refused(tmp_path: Path) -> None:
    base, *_ = add_chain(tmp_path, 10, 20, 30)
    add_delta(base, 2, 20, 40)
    chain_refused(tmp_path, "delta-000000040 is out of order", "number 2 from", "number 3 from")


def test_a_copy_of_a_delta_under_another_name_is_refused(tmp_path: Path) -> None:
    _, one = add_chain(tmp_path, 10, 20)
    shutil.copytree(one, tmp_path / "delta-000000030")
    chain_refused(tmp_path, "delta-000000030 has the manifest of delta-000000020")


def test_a_delta_that_begins_at_another_step_is_refused(tmp_path: Path) -> None:
    *_, two = add_chain(tmp_path, 10, 20, 30)
    relink(two, from_step=19)
    chain_refused(tmp_path, f"{two} is out of order", "from step 19", "from step 20")


def test_a_delta_of_another_run_is_refused(tmp_path: Path) -> None:
    base = add_dump(tmp_path, 10)
    add_delta(base, 1, 10, 20, run="two")
    chain_refused(tmp_path, "delta-000000020 is of run two", "of run one")


def test_a_delta_on_another_base_of_the_same_name_is_refused(tmp_path: Path) -> None:
    base, one = add_chain(tmp_path, 10, 20)
    digest = link_to(base, 1, 10).base_digest
    rewrite(base, vocabulary="others")
    chain_refused(tmp_path, str(one), base.name, digest, link_to(base, 1, 10).base_digest)


def test_a_delta_of_another_model_is_refused(tmp_path: Path) -> None:
    _, one = add_chain(tmp_path, 10, 20)
    rewrite(one, tensors={"tables.user.weight": ([9, 4], "float32")})
    chain_refused(tmp_path, f"{one} holds another model than")


@pytest.mark.parametrize("base", ["../elsewhere", "/etc", "", "delta-000000010", ".", "latest"])
def test_a_delta_with_an_invalid_base_name_is_refused(tmp_path: Path, base: str) -> None:
    _, one = add_chain(tmp_path, 10, 20)
    relink(one, base=base)
    chain_refused(tmp_path, f"{one} is a delta on {base!r}")


def test_a_foreign_folder_with_the_name_of_a_delta_is_refused_by_name(tmp_path: Path) -> None:
    add_dump(tmp_path, 10)
    (tmp_path / "delta-000000020").mkdir()
    chain_refused(tmp_path, "delta-000000020 is not a checkpoint: it holds no manifest.json")


# --- files ---


def files_refused(folder: Path, *words: str) -> None:
    refused(lambda: check_files(folder, read_manifest(folder)), *words)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    dump = add_dump(tmp_path, 1)
    (dump / PART).unlink()
    files_refused(dump, f"{dump / PART} is missing")


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    dump = add_dump(tmp_path, 1)
    os.truncate(dump / PART, 100)
    files_refused(dump, f"{dump / PART} has 100 bytes and had 850")


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    dump = add_dump(tmp_path, 1)
    whole = (dump / PART).read_bytes()
    for place in range(0, len(whole), 53):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (dump / PART).write_bytes(damaged)
        files_refused(dump, f"{dump / PART} is damaged: its digest is ")
    (dump / PART).write_bytes(whole)
    check_whole(dump)


@pytest.mark.parametrize("name", ["part-00002.safetensors", ".safetensors", "other.json"])
def test_a_part_that_the_manifest_does_not_name_is_refused(tmp_path: Path, name: str) -> None:
    dump = add_dump(tmp_path, 1)
    shutil.copy(dump / PART, dump / name)
    files_refused(dump, f"{dump / name} is not a part of the checkpoint")


def test_a_note_beside_the_parts_harms_nothing(tmp_path: Path) -> None:
    dump = add_dump(tmp_path, 1)
    (dump / "README.txt").write_text("the good one")
    check_whole(dump)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../b", "", ".", "..", "sub/part"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    dump = add_dump(tmp_path / "dumps", 1)
    (tmp_path / "dumps" / "secret").write_bytes((dump / PART).read_bytes())
    (dump / "sub").mkdir()
    shutil.copy(dump / PART, dump / "sub" / "part")
    (entry,) = read_manifest(dump).files
    rewrite(dump, files=(entry, dataclasses.replace(entry, name=name)))
    files_refused(dump, "is missing")


def test_the_ranks_share_all_files(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    fill(dump, 1)
    (entry,) = read_manifest(dump).files
    for number in range(2, 6):
        shutil.copy(dump / PART, dump / f"part-{number:05d}.safetensors")
    named = [dataclasses.replace(entry, name=f"part-{number:05d}.safetensors") for number in range(1, 6)]
    rewrite(dump, files=tuple(named))
    os.truncate(dump / "part-00004.safetensors", 7)
    found = []
    for rank in range(3):
        try:
            check_files(dump, read_manifest(dump), rank, 3)
        except UserError:
            found.append(rank)
    assert found == [0]


# --- manifests ---


def sound() -> dict[str, Any]:
    link = {"base": "step-000000010", "base_digest": "x", "sequence": 1, "from_step": 10}
    return {
        "format": FORMAT,
        "run": "one",
        "position": {"step": 1, "epoch": 0, "samples": 0},
        "tensors": {"a": [[1], "float32"]},
        "files": [{"name": "a", "bytes": 1, "xxh3_128": "0"}],
        "vocabulary": "",
        "optimizer": "",
        "about": {},
        "link": link,
        "features": {},
        "ratings": "",
        "world_size": 1,
        "time": "2026-11-21T12:00:00+00:00",
    }


def changed(**changes: Any) -> bytes:
    return json.dumps(sealed({**sound(), **changes})).encode()


def without(name: str) -> bytes:
    return json.dumps(sealed({key: value for key, value in sound().items() if key != name})).encode()


LINK, (FILE,) = sound()["link"], sound()["files"]
BAD_MANIFESTS = {
    "empty": b"",
    "binary": bytes(range(256)),
    "half": changed()[:-20],
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"7",
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "a long number": b'{"format": ' + b"9" * 10_000 + b"}",
    "a name twice": b'{"run": "a", "run": "b"}',
    "no number": b'{"run": NaN}',
    "large": b'{"format": 0, "run": "' + b"x" * 2**24 + b'"}',
    "another format": changed(format=FORMAT + 1),
    "a format in words": changed(format="1"),
    "an infinite step": changed(position={"step": float("inf")}),
    "a fractional step": changed(position={"step": 1.5}),
    "a step in words": changed(position={"step": "one"}),
    "an unknown field": changed(position={"steps": 1}),
    "files as a number": changed(files=3),
    "a file as a number": changed(files=[3]),
    "a name as a list": changed(files=[{**FILE, "name": ["a"]}]),
    "a size in words": changed(files=[{**FILE, "bytes": "1"}]),
    "a digest as a number": changed(files=[{**FILE, "xxh3_128": 1}]),
    "tensors as a list": changed(tensors=["a"]),
    "a tensor as a number": changed(tensors={"a": 1}),
    "about as a number": changed(about=1),
    "a link as a word": changed(link="step-000000010"),
    "a base as a number": changed(link={**LINK, "base": 10}),
    "a sequence in words": changed(link={**LINK, "sequence": "1"}),
    "an infinite world size": changed(world_size=float("inf")),
    "too many ranks": changed(world_size=2**60),
    "an endless shape": changed(tensors={"a": [[2**200], "float32"]}),
    "a large shape": changed(tensors={"a": [[2**40] * 2, "float32"]}),
    "no such type": changed(tensors={"a": [[1], "pickle"]}),
    "a time without a zone": changed(time="2026-11-21T12:00:00"),
    "a step below zero": changed(position={"step": -1, "epoch": 0, "samples": 0}),
    "a file twice": changed(files=[FILE, FILE]),
    "a run that is a path": changed(run="../../elsewhere"),
    "a text with a line": changed(optimizer="row-wise\nAdagrad"),
    **{f"without {name}": without(name) for name in sound()},
}


@pytest.mark.parametrize("content", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_a_bad_manifest_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    refused(lambda: read_manifest(tmp_path), str(tmp_path / MANIFEST))


def test_the_manifest_that_the_bad_ones_are_made_from_is_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(changed())
    assert read_manifest(tmp_path).progress.step == 1


def test_another_format_names_both_sides(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(changed(format=FORMAT + 1))
    refused(lambda: read_manifest(tmp_path), f"has format {FORMAT + 1}", f"reads format {FORMAT}")


def test_a_folder_in_the_place_of_a_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    refused(lambda: read_manifest(tmp_path), f"Cannot read {tmp_path / MANIFEST}: ", "Fix: ")


# --- publishing and keeping ---


def publish_dump(save_dir: Path, step: int, keep: int) -> Path:
    final = save_dir / folders.full_name(step)
    publish(fill(save_dir / f".making-{final.name}", step), final, keep)
    return final


def test_publishing_names_the_checkpoint_and_latest_and_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        final = publish_dump(tmp_path, step, keep=2)
        assert os.readlink(tmp_path / LATEST) == final.name
        assert check_whole(tmp_path / LATEST).folder == final
    assert names_in(tmp_path) == [LATEST, "step-000000040", "step-000000050"]


def test_a_full_checkpoint_that_a_delta_builds_on_is_kept(tmp_path: Path) -> None:
    base, one = add_chain(tmp_path, 10, 20)
    for step in (30, 40, 50):
        publish_dump(tmp_path, step, keep=1)
    assert names_in(tmp_path) == [one.name, LATEST, base.name, "step-000000050"]
    check_whole(one)


def test_nothing_is_removed_beside_a_delta_that_cannot_be_read(tmp_path: Path) -> None:
    base, one = add_chain(tmp_path, 10, 20)
    (one / MANIFEST).write_bytes(b"")
    before = names_in(tmp_path)
    publish_dump(tmp_path, 30, keep=1)
    assert names_in(tmp_path) == sorted([*before, LATEST, "step-000000030"])
    check_whole(base)


def test_a_checkpoint_that_is_published_counts_even_if_latest_cannot_be_pointed_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", fail)
        first = publish_dump(tmp_path, 10, keep=1)
    assert "No space left on device" in capfd.readouterr().out
    assert check_whole(tmp_path).folder == first
    publish_dump(tmp_path, 20, keep=1)
    assert names_in(tmp_path) == [LATEST, "step-000000020"]


def test_a_checkpoint_that_is_published_counts_even_if_its_folder_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    making = fill(tmp_path / ".making-step-000000010", 10)
    monkeypatch.setattr(folders, "flush", fail)
    publish(making, tmp_path / "step-000000010", keep=1)
    assert "Input/output error" in capfd.readouterr().out
    check_whole(tmp_path / "step-000000010")


def test_a_folder_with_only_the_name_of_a_checkpoint_is_ignored_and_kept(tmp_path: Path) -> None:
    thesis = tmp_path / "step-000000001" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.touch()
    for step in (10, 20, 30):
        publish_dump(tmp_path, step, keep=2)
    assert thesis.is_file()
    assert names_in(tmp_path) == [LATEST, thesis.parent.name, "step-000000020", "step-000000030"]


def test_a_manifest_with_any_byte_changed_is_refused(tmp_path: Path) -> None:
    dump = add_dump(tmp_path, 10)
    path, whole = dump / MANIFEST, read_manifest(dump)
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            # Some of the space between the fields may change without changing what they say.
            assert read_manifest(dump) == whole
            assert content[place : place + 1].isspace()
        except UserError:
            refused += 1
    assert refused > len(content) / 2


# --- the best ---


def test_the_best_checkpoint_has_a_link_and_is_kept_until_a_better_one_exists(tmp_path: Path) -> None:
    best = publish_at(tmp_path, 10, GOOD)
    for step in (20, 30):
        publish_at(tmp_path, step, WORSE)
    assert links_in(tmp_path) == {BEST: best.name, LATEST: "step-000000030"}
    assert names_in(tmp_path) == [BEST, LATEST, best.name, "step-000000030"]
    assert chosen_chain(tmp_path).folder == best
    assert chosen_chain(tmp_path, LATEST).folder == chain_at(tmp_path).folder == tmp_path / "step-000000030"
    publish_at(tmp_path, 40, BETTER)
    assert links_in(tmp_path) == {BEST: "step-000000040", LATEST: "step-000000040"}
    assert names_in(tmp_path) == [BEST, LATEST, "step-000000040"]


def test_a_checkpoint_within_an_epoch_is_the_best_only_without_validation(tmp_path: Path) -> None:
    publish_at(tmp_path / "validated", 10, GOOD, keep=9)
    within = dataclasses.replace(GOOD, samples=5)
    publish_at(tmp_path / "validated", 15, within, keep=9)
    assert links_in(tmp_path / "validated")[BEST] == "step-000000010"
    for step, progress in (
        (5, Progress(samples=5)),
        (10, Progress(epoch=1)),
        (15, Progress(epoch=1, samples=5)),
    ):
        publish_at(tmp_path / "not", step, progress, keep=9)
    assert links_in(tmp_path / "not") == {BEST: "step-000000015", LATEST: "step-000000015"}


def test_before_an_epoch_has_ended_the_newest_is_taken_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_at(tmp_path, 5, Progress(samples=5))
    assert links_in(tmp_path) == {LATEST: "step-000000005"}
    assert chosen_chain(tmp_path).folder == tmp_path / "step-000000005"
    assert "has no validated checkpoint yet, so the newest is used" in capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", [BEST, LATEST])
def test_an_untrained_checkpoint_is_used_only_by_its_name(tmp_path: Path, checkpoint: str) -> None:
    base = publish_at(tmp_path, 0, Progress())
    assert links_in(tmp_path) == {}
    refused(lambda: chosen_chain(tmp_path, checkpoint), "holds only step-000000000, which is untrained")
    assert (
        chosen_chain(base) == chosen_chain(tmp_path, until=0) == chain_at(tmp_path) == CheckpointChain(base)
    )


def test_validated_initial_rows_are_the_best_until_an_epoch_is_better(tmp_path: Path) -> None:
    first = publish_at(tmp_path, 0, Progress(best=0.9))
    assert links_in(tmp_path) == {BEST: first.name}
    assert chosen_chain(tmp_path).folder == first
    refused(lambda: chosen_chain(tmp_path, LATEST), "holds only step-000000000, which is untrained")
    publish_at(tmp_path, 10, Progress(10, 1, best=0.9, epochs_since_best=1))
    assert links_in(tmp_path) == {BEST: first.name, LATEST: "step-000000010"}
    publish_at(tmp_path, 20, Progress(20, 2, best=0.8))
    assert links_in(tmp_path) == {BEST: "step-000000020", LATEST: "step-000000020"}


def test_publishing_over_an_existing_checkpoint_fails_and_keeps_it(tmp_path: Path) -> None:
    final = publish_dump(tmp_path, 10, keep=2)
    with pytest.raises(OSError, match="not empty"):
        publish_dump(tmp_path, 10, keep=2)
    check_whole(final)


def test_removing_a_checkpoint_renames_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = add_dump(tmp_path, 10)
    seen = []
    monkeypatch.setattr(folders, "_remove", lambda path: seen.append((path.name, names_in(tmp_path))))
    remove_checkpoint(dump)
    assert seen == [(".removing-step-000000010", [".removing-step-000000010"])]


def test_checkpoints_of_an_earlier_training_are_archived(tmp_path: Path) -> None:
    base, one = add_chain(tmp_path, 10, 20)
    (tmp_path / LATEST).symlink_to(one.name)
    (tmp_path / "notes.txt").touch()
    aside = archive_checkpoints(tmp_path)
    assert names_in(tmp_path) == ["notes.txt", "run-one"]
    assert check_whole(aside) == CheckpointChain(aside / base.name, (aside / one.name,))
    assert newest_in(tmp_path) is None


def test_setting_aside_on_top_of_the_same_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    add_dump(tmp_path, 10)
    archive_checkpoints(tmp_path)
    add_dump(tmp_path, 10)
    refused(lambda: archive_checkpoints(tmp_path), "run-one holds a step-000000010 already")
    check_whole(tmp_path)
    check_whole(tmp_path / "run-one")


def test_unreadable_checkpoints_are_archived_too(tmp_path: Path) -> None:
    (add_dump(tmp_path, 10) / MANIFEST).unlink()
    assert archive_checkpoints(tmp_path) == tmp_path / "run-unreadable"


def test_a_new_training_in_a_folder_with_checkpoints_is_refused_unless_they_may_be_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = CheckpointConfig(dump=True, save_dir=str(tmp_path))
    begin(section)
    newest = add_chain(tmp_path, 10, 20)[-1]
    there = f"--save_dir {tmp_path} has the checkpoints of an earlier training: run one, step 20, "
    for check in (check_free, begin):
        refused(partial(check, section), f"{there}{read_manifest(newest).time}. Fix: ", "--move_aside")
    # It continues with them.
    begin(dataclasses.replace(section, resume=True))
    assert newest_in(tmp_path) == newest
    begin(dataclasses.replace(section, move_aside=True))
    assert names_in(tmp_path) == ["run-one"]
    assert f"to {tmp_path / 'run-one'}\n" in capsys.readouterr().out
    begin(section)
    (add_dump(tmp_path, 30) / MANIFEST).unlink()
    refused(lambda: begin(section), "up to step-000000030, which cannot be read. Fix: ")


# --- the only writer ---


FOREIGN = (
    "notes.txt",
    "step-1",
    ".hidden",
    ".making-step-by-step",
    ".making-tea",
    ".removing-step-",
    ".latest-news",
    "run-one/step-000000001/x",
    ".making-delta-000000001.txt",
)


def test_a_new_writer_removes_only_incomplete_folders_of_earlier_writers(tmp_path: Path) -> None:
    chain = add_chain(tmp_path, 10, 20)
    for name in FOREIGN:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / LOCK).touch()
    before = names_in(tmp_path)
    named = making_name(tmp_path / "step-000000030", new_attempt())
    for name in (named, ".making-step-000000030", ".making-delta-000000030", ".removing-step-1000000000"):
        (tmp_path / name).mkdir()
        # What safetensors calls a part that it is writing.
        for file in (PART, ".tmpgqJ7Pw", MANIFEST):
            (tmp_path / name / file).touch()
    (tmp_path / ".removing-delta-000000005").mkdir()
    (tmp_path / ".latest-123").symlink_to(chain[0].name)
    with writing(tmp_path):
        assert names_in(tmp_path) == before
    check_whole(tmp_path)
    assert all((tmp_path / name).is_file() for name in FOREIGN)


def test_nothing_is_removed_where_no_trainer_has_written_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = fill(tmp_path / ".making-step-000000500", 500)
    with writing(tmp_path):
        assert (foreign / PART).is_file()
    assert (
        f"{foreign} was not removed: no trainer has written to {tmp_path} before" in capsys.readouterr().out
    )


def test_a_second_writer_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    second_writer = [sys.executable, "-c", WRITER, str(tmp_path)]
    under_way = tmp_path / ".making-step-000000001"
    with writing(tmp_path):
        under_way.mkdir()
        second = succeeded(run_command(second_writer))
        assert second.startswith(f"Another training writes its checkpoints to {tmp_path}; wait for it")
        assert under_way.is_dir()
    assert succeeded(run_command(second_writer)) == "in\n"
    assert names_in(tmp_path) == []


def test_a_folder_that_is_invalid_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def write() -> None:
        with writing(tmp_path / "file" / "dumps"):
            pass

    refused(write, f"Cannot write to --save_dir {tmp_path / 'file' / 'dumps'}: Not a directory. Fix: ")


def test_nothing_in_the_program_reads_pickle() -> None:
    reads = (
        r"pickle\.(loads?|Unpickler)|from pickle|torch\.load\b|weights_only|allow_pickle|read_pickle|shelve"
    )
    knows = set()
    for path in (ROOT / "example").rglob("*.py"):
        source = path.read_text()
        assert not re.search(reads, source), path
        if re.search(r"import (.*\W)?(pickle|marshal|dill|cloudpickle|joblib)\b", source):
            knows.add(path.name)
    # It measures what is sent to its workers.
    assert knows == {"pool.py"}


def test_the_next_trainer_removes_unpublished_checkpoints(
    trained_folder: Path, dynamic_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / LOCK).touch()
    for dumps in (trained_folder / "dumps", dynamic_folder / "dumps"):
        for path in (full_checkpoints_in(dumps)[-1], deltas_in(dumps)[-1]):
            shutil.copytree(path, tmp_path / making_name(tmp_path / path.name, new_attempt()))
    assert len([*tmp_path.glob(".making-*")]) == 4
    with writing(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
