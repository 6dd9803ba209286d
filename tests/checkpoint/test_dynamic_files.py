"""Dynamic tables in shard files: a base and its deltas are the whole table, on any ranks and any policy."""

from __future__ import annotations

import dataclasses
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsuite.checkpoint.format import Manifest
from recsuite.checkpoint.restore import check_tables
from recsuite.checkpoint.shards import (
    RowReader,
    ShardFile,
    Texts,
    check_shard_files,
    shard_file_name,
    write_shard_file,
)
from recsuite.errors import UserError
from recsuite.sharding.table import IdCounters
from recsuite.training.progress import Progress
from tests.support.dynamic_checkpoints import SPEC, Table, advance, arrays_of, record_of

POLICIES = ("continuous", "roundrobin", "hash")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By number of ranks: folders, manifests and states of a base and deltas, and a full dump after each."""
    found = {}
    for world_size, policy in zip((1, 2, 3), POLICIES, strict=True):
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        table = Table(dataclasses.replace(SPEC, distribution=policy), world_size)
        chance, states, folders, manifests, fulls = random.Random(0), [], [], [], []
        for number in range(7):
            # Once nobody is seen for so long that most of those who were there have expired.
            first = 20 * number + (30 if number >= 5 else 0)
            advance(table, chance, first, first + 20)
            if number == 3:
                table.shares.resize(128)
            manifests.append(table.write(folder / f"{number}", is_delta=number > 0))
            folders.append(folder / f"{number}")
            fulls.append((folder / f"full{number}", table.write(folder / f"full{number}", is_delta=False)))
            states.append(table.state())
        found[world_size] = {"folders": folders, "manifests": manifests, "states": states, "fulls": fulls}
    return found


def test_the_random_training_inserts_evicts_reinserts_and_expires_ids(
    written: dict[int, dict[str, Any]],
) -> None:
    counts = written[1]["manifests"][-1].dynamic["user"].counts
    assert counts["evicted"] > 20
    assert counts["expired"] > 20
    assert counts["unadmitted"] > 100
    assert len(written[1]["states"][-1][5]) > 0


def test_any_number_of_ranks_writes_the_same(written: dict[int, dict[str, Any]]) -> None:
    assert written[1]["states"] == written[2]["states"] == written[3]["states"]


@pytest.mark.parametrize(("writers", "readers"), [*product((1, 2, 3), repeat=2)])
def test_a_base_and_its_deltas_are_the_full_dump_bit_for_bit(
    writers: int, readers: int, written: dict[int, dict[str, Any]]
) -> None:
    of, policy = written[writers], POLICIES[(writers + readers) % len(POLICIES)]
    table = Table(dataclasses.replace(SPEC, distribution=policy), readers)
    # Also backwards: a load depends on nothing that was there before, whatever its capacity was.
    for number in reversed(range(len(of["states"]))):
        folders, manifests = of["folders"][: number + 1], of["manifests"][: number + 1]
        assert table.load(folders, manifests) == 0
        assert table.state() == of["states"][number]
        folder, manifest = of["fulls"][number]
        assert table.load([folder], [manifest]) == 0
        assert table.state() == of["states"][number]


def test_applying_a_delta_twice_changes_nothing(written: dict[int, dict[str, Any]]) -> None:
    of, table = written[2], Table(SPEC, 1)
    for number in (1, 6):
        folders, manifests = of["folders"][: number + 1], of["manifests"][: number + 1]
        assert table.load([*folders, folders[-1]], [*manifests, manifests[-1]]) == 0
        assert table.state() == of["states"][number]


def test_a_loaded_training_continues_like_an_uninterrupted_one(
    written: dict[int, dict[str, Any]],
) -> None:
    of = written[2]
    ends = []
    for readers in (1, 3):
        table = Table(SPEC, readers)
        table.load(of["folders"], of["manifests"])
        advance(table, random.Random(9), 170, 210)
        ends.append(table.state())
    assert ends[0] == ends[1]
    assert ends[0] != of["states"][-1]


def test_a_delta_that_could_not_be_written_is_contained_in_the_next_one(tmp_path: Path) -> None:
    table, chance = Table(SPEC, 2), random.Random(1)
    advance(table, chance, 0, 20)
    base = table.write(tmp_path / "base", is_delta=False)
    advance(table, chance, 20, 60)
    # As a disk that is full leaves it: made, never written, and never cleared.
    for rank in table.ranks:
        rank.export(changed=True)
    advance(table, chance, 60, 100)
    delta = table.write(tmp_path / "delta", is_delta=True)
    other = Table(SPEC, 1)
    other.load([tmp_path / "base", tmp_path / "delta"], [base, delta])
    assert other.state() == table.state()


def test_a_checkpoint_is_a_copy_taken_at_its_step() -> None:
    table = Table(SPEC, 1)
    advance(table, random.Random(1), 0, 20)
    arrays = arrays_of(table.ranks[0], is_delta=False)
    before = {name: value.copy() for name, value in arrays.items()}
    advance(table, random.Random(2), 20, 40)
    for name, value in arrays.items():
        assert (value == before[name]).all(), name


@pytest.mark.parametrize("capacity", [256, 512])
def test_a_larger_table_takes_all_rows(capacity: int, written: dict[int, dict[str, Any]]) -> None:
    of = written[3]
    table = Table(dataclasses.replace(SPEC, capacity=capacity, max_capacity=capacity, grow=0.0), 2)
    assert table.load(of["folders"], of["manifests"]) == 0
    assert table.state()[:8] == of["states"][-1][:8]


def test_a_table_that_is_too_small_is_refused_with_the_number_that_fits(
    written: dict[int, dict[str, Any]],
) -> None:
    of = written[3]
    small = dataclasses.replace(SPEC, capacity=32, max_capacity=32, grow=0.0, evict="none")
    live = len(of["states"][-1][0])
    sentence = rf"has {live} rows of user.*the 32 places.*--capacity user=(\d+)"
    with pytest.raises(UserError, match=sentence) as found:
        Table(small, 1).load(of["folders"], of["manifests"])
    enough = int(str(found.value).split("user=")[1].split(",")[0])
    fits = dataclasses.replace(small, capacity=enough, max_capacity=enough)
    table = Table(fits, 2)
    assert table.load(of["folders"], of["manifests"]) == 0
    assert len(table.state()[0]) == live


def test_rows_beyond_the_capacity_are_evicted_by_policy_and_counted(
    written: dict[int, dict[str, Any]],
) -> None:
    of = written[3]
    small = dataclasses.replace(SPEC, capacity=32, max_capacity=32, grow=0.0)
    tables = [Table(small, ranks) for ranks in (1, 2)]
    dropped = [table.load(of["folders"], of["manifests"]) for table in tables]
    assert dropped[0] == dropped[1] == len(of["states"][-1][0]) - len(tables[0].state()[0]) > 0
    assert tables[0].state() == tables[1].state()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bucket_width": 8}, "buckets of 8 places for user.* 16"),
        ({"unit": "seconds"}, "in seconds.* must be in seconds, got steps"),
    ],
)
def test_a_table_of_another_kind_is_refused(
    change: dict[str, Any], sentence: str, written: dict[int, dict[str, Any]]
) -> None:
    manifest = written[1]["manifests"][0]
    record = dataclasses.replace(manifest.dynamic["user"], **change)
    reader = RowReader([Path("there")], [dataclasses.replace(manifest, dynamic={"user": record})])
    with pytest.raises(UserError, match=sentence):
        check_tables(Path("there"), reader, {"user": Table(SPEC, 1).ranks[0]})


def test_waiting_ids_are_read_only_where_they_are_wanted(
    written: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, tensor, found = written[2], ShardFile.tensor, []

    def read(file: ShardFile, name: str) -> torch.Tensor:
        found.append(name)
        return tensor(file, name)

    monkeypatch.setattr(ShardFile, "tensor", read)
    reader = RowReader(of["folders"], of["manifests"])
    # As serving reads a table.
    rows = sum(len(part["ids"]) for part in reader.rows_of_ids("user", slots=("ids", "seen")))
    assert rows == len(of["states"][-1][0])
    assert found
    assert not [name for name in found if "waiting" in name]
    waiting = sum(len(part["waiting.ids"]) for part in reader.rows_of_ids("user"))
    assert waiting == len(of["states"][-1][5]) > 0


def test_a_model_without_the_table_is_refused(written: dict[int, dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="has the dynamic tables user, and this model has none"):
        check_tables(Path("there"), RowReader([Path("there")], written[1]["manifests"][:1]), {})


def forged(tmp_path: Path, change: Any) -> None:
    """A checkpoint of two ranks whose first file was changed."""
    table = Table(SPEC, 2)
    advance(table, random.Random(4), 0, 20)
    arrays = [arrays_of(rank, is_delta=False) for rank in table.ranks]
    change(*arrays)
    folder = tmp_path / "forged"
    folder.mkdir()
    entries = [write_shard_file(folder / shard_file_name(number), each) for number, each in enumerate(arrays)]
    record = record_of(table.ranks[0], IdCounters(*[0] * 7))
    manifest = Manifest("run", Progress(), {}, tuple(entries), "", "", {}, dynamic={"user": record})
    check_shard_files(folder, manifest)


def without_unknown(first: dict[str, Any], second: dict[str, Any]) -> None:
    del first["dynamic.user.unknown.weight"], first["dynamic.user.unknown.momentum1"]


def foreign(first: dict[str, Any], second: dict[str, Any]) -> None:
    first["dynamic.movie.ids"] = first["dynamic.user.ids"]


def wide(first: dict[str, Any], second: dict[str, Any]) -> None:
    first["dynamic.user.weight"] = np.ones((len(first["dynamic.user.ids"]), 4), np.float32)


def without_counts(first: dict[str, Any], second: dict[str, Any]) -> None:
    del second["dynamic.user.count"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_unknown, "3 numbers of dynamic.user.unknown.weight are missing"),
        (without_counts, "it has no dynamic.user.count"),
        (foreign, "dynamic.movie.ids, which should be nothing"),
        (wide, r"which should be float32 \[n, 3\]"),
    ],
)
def test_files_that_do_not_fit_their_manifest_are_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        forged(tmp_path, change)


def test_an_empty_table_takes_less_than_a_kilobyte_a_rank(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, capacity=2**20, max_capacity=2**20)
    manifest = Table(spec, 1).write(tmp_path / "empty", is_delta=False)
    assert sum(entry.bytes for entry in manifest.files) < 1300


# --- texts ---


def test_texts_are_restored_from_their_arrays() -> None:
    texts = Texts.of(np.array([5, -3, 9]), ["ü".encode(), b"", b"long text"])
    again = Texts.of_arrays(*texts.arrays().values())
    assert again.ids.tolist() == [-3, 5, 9]
    assert again.texts.tolist() == [b"", "ü".encode(), b"long text"]
    assert texts.of_ids(np.array([9, 7])).texts.tolist() == [b"long text"]
    assert Texts.of_arrays(*Texts.none().arrays().values()).ids.tolist() == []


def test_two_texts_with_one_id_are_refused_by_name() -> None:
    one, other = Texts.of(np.array([5]), [b"one"]), Texts.of(np.array([5, 6]), [b"other", b"six"])
    assert one.with_others(one, "user").texts.tolist() == [b"one"]
    assert other.with_others(Texts.of(np.array([7, 4]), [b"7", b"4"]), "user").ids.tolist() == [4, 5, 6, 7]
    twice = Texts.of(np.array([5, 5]), [b"one", b"other"])
    for texts, others in ((one, other), (other, one), (Texts.none(), twice)):
        with pytest.raises(UserError, match=r"'(one|other)' and '(one|other)' of user have the same id, 5"):
            texts.with_others(others, "user")


@pytest.mark.parametrize("ends", [[2, 1], [1, 2], [1, 4]])
def test_texts_that_do_not_end_where_they_should_are_no_texts(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="end"):
        Texts.of_arrays(np.array([1, 2]), np.zeros(3, np.uint8), np.array(ends))
