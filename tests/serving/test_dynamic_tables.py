"""Dynamic tables in the memory of a server: what deltas leave is what a full checkpoint of their step has."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recsuite.checkpoint.format import DynamicRecord, Manifest, ParentLink
from recsuite.checkpoint.shards import (
    ROWS,
    WAITING,
    RowReader,
    Texts,
    name_of,
    shard_file_name,
    write_shard_file,
)
from recsuite.errors import UserError
from recsuite.serving.reader import check_same_tables
from recsuite.serving.request import ids_of_values
from recsuite.serving.schemas import first_id
from recsuite.serving.snapshot import IdTable, TableChange
from recsuite.training.progress import Progress
from tests.support.dynamic_checkpoints import SPEC, Table, advance

RECORD = DynamicRecord(2, 64, 16, "continuous", 1, "lru", 0, 0, "steps", False, 0, 0)
LINK = ParentLink("step-000000000", "digest", 1, 0)


def read_table(folder: Path, manifest: Manifest, keeps_texts: bool = False) -> IdTable:
    return IdTable.read(RowReader([folder], [manifest]), "user", keeps_texts)


def change_of(table: IdTable, folder: Path, manifest: Manifest) -> TableChange:
    return table.after(RowReader([folder], [manifest]), "user", keeps_texts=True)


def after(table: IdTable, folder: Path, manifest: Manifest) -> IdTable:
    """The table after a delta, written as a server does it."""
    found = change_of(table, folder, manifest).put()
    assert isinstance(found, IdTable)
    return found


def content(table: IdTable) -> tuple[list[int], list[list[float]], list[float]]:
    """Ids, their rows, and the row of somebody whom nobody knows."""
    unknown = table.rows_of(torch.tensor([2**62]))
    return (
        table.ids.tolist(),
        table.matrix[table.rows_of(table.ids)].tolist(),
        table.matrix[unknown][0].tolist(),
    )


@pytest.mark.parametrize(("world_size", "ttl"), [(1, 40), (2, 0), (3, 40)])
def test_a_base_and_its_deltas_are_served_as_the_full_dump_bit_for_bit(
    world_size: int, ttl: int, tmp_path: Path
) -> None:
    table, chance = Table(dataclasses.replace(SPEC, ttl=ttl), world_size), random.Random(0)
    ever: set[int] = set()
    for number in range(6):
        # Once nobody is seen for so long that most of those who were there have expired.
        first = 20 * number + (30 if number >= 4 else 0)
        advance(table, chance, first, first + 20)
        manifest = table.write(tmp_path / f"{number}", is_delta=number > 0)
        full = table.write(tmp_path / f"full{number}", is_delta=False)
        if number == 0:
            served = read_table(tmp_path / "0", manifest)
        else:
            served = after(served, tmp_path / f"{number}", manifest)
        anew = read_table(tmp_path / f"full{number}", full)
        assert content(served) == content(anew)
        live = {*served.ids.tolist()}
        known = served.rows_of(torch.tensor(sorted(ever | live))) != 0
        assert known.tolist() == [each in live for each in sorted(ever | live)]
        ever |= live
    # Some have left.
    assert len(ever) > len(live) > 20


def write(
    folder: Path,
    ids: dict[int, float],
    gone: list[int] | None = None,
    seen: int = 0,
    texts: dict[int, str] | None = None,
    **changes: Any,
) -> Manifest:
    """A full checkpoint, or with ids that left a delta, of one rank. ids: to the first number of each row."""
    folder.mkdir()
    record = dataclasses.replace(RECORD, has_texts=texts is not None, **changes)
    known = np.array(sorted(ids), np.int64)
    slots: dict[str, Any] = {
        slot: np.zeros(0 if slot in WAITING else len(ids), kind) for slot, kind in (ROWS | WAITING).items()
    }
    slots["weight"] = np.array([[ids[each], each] for each in sorted(ids)], np.float32).reshape(-1, 2)
    slots |= {"ids": known, "seen": np.full(len(ids), seen)}
    slots |= {"unknown.weight": np.full((1, 2), -1, np.float32), "unknown.momentum1": np.zeros(1, np.float32)}
    if gone is not None:
        slots |= {"gone": np.array(sorted(gone), np.int64), "waiting.gone": np.zeros(0, np.int64)}
    if texts is not None:
        slots |= Texts.of(np.array([*texts], np.int64), [text.encode() for text in texts.values()]).arrays()
    arrays = {name_of("user", slot): value for slot, value in slots.items()}
    entry = write_shard_file(folder / shard_file_name(0), arrays)
    link = None if gone is None else LINK
    return Manifest("run", Progress(), {}, (entry,), "", "", {}, link, dynamic={"user": record})


def test_a_removed_id_has_the_row_of_unknown_ids_until_it_is_inserted_again(tmp_path: Path) -> None:
    served = read_table(tmp_path / "0", write(tmp_path / "0", {1: 0.5, -7: 0.25}), keeps_texts=True)
    ids = torch.tensor([-7, 1, 2, -(2**63)])

    def rows() -> list[float]:
        return served.matrix[served.rows_of(ids)][:, 0].tolist()

    assert rows() == [0.25, 0.5, -1, -1]
    served = after(served, tmp_path / "1", write(tmp_path / "1", {2: 0.75}, gone=[-7]))
    assert rows() == [-1, 0.5, 0.75, -1]
    # Its place was given away.
    assert len(served.matrix) == 3
    served = after(served, tmp_path / "2", write(tmp_path / "2", {-7: 2.0, 1: 3.0}, gone=[2, 99]))
    assert rows() == [2, 3, -1, -1]
    assert len(served.matrix) == 3
    served = after(served, tmp_path / "3", write(tmp_path / "3", {}, gone=[-7, 1]))
    assert rows() == [-1, -1, -1, -1]


def test_ids_expired_at_the_checkpoint_are_absent(tmp_path: Path) -> None:
    base = write(tmp_path / "0", {1: 0.5, 2: 0.25}, seen=10, ttl=5, now=15)
    served = read_table(tmp_path / "0", base, keeps_texts=True)
    assert served.ids.tolist() == [1, 2]
    assert len(read_table(tmp_path / "0", forged(base, now=16), keeps_texts=True).ids) == 0
    # A training that continues with a shorter time to live lets rows go where it loads them, unsaid.
    delta = write(tmp_path / "1", {2: 0.75}, gone=[], seen=16, ttl=5, now=16)
    assert after(served, tmp_path / "1", delta).ids.tolist() == [2]


def forged(manifest: Manifest, **changes: Any) -> Manifest:
    return dataclasses.replace(
        manifest, dynamic={"user": dataclasses.replace(manifest.dynamic["user"], **changes)}
    )


def test_nothing_of_a_table_changes_before_a_delta_is_put_into_it(tmp_path: Path) -> None:
    served = read_table(tmp_path / "0", write(tmp_path / "0", {1: 0.5, 2: 0.25}), keeps_texts=True)
    before = content(served)
    delta = write(tmp_path / "1", {1: 9.0, 3: 9.0, 4: 9.0}, gone=[2])
    changed = change_of(served, tmp_path / "1", delta)
    assert content(served) == before
    put = changed.put()
    assert isinstance(put, IdTable)
    assert content(put)[0] == [1, 3, 4]


def test_a_delta_adds_and_removes_texts_with_their_ids(tmp_path: Path) -> None:
    base = write(tmp_path / "0", {5: 0.5, 1: 0.25}, texts={5: "five", 1: "one"})
    served = read_table(tmp_path / "0", base, keeps_texts=True)
    assert served.raw_values() == ["one", "five"]
    delta = write(tmp_path / "1", {3: 0.5}, gone=[1], texts={3: "drei\u00df"})
    served = after(served, tmp_path / "1", delta)
    assert served.raw_values() == ["drei\u00df", "five"]
    assert served.texts is not None
    assert len(served.texts.ids) == 2
    assert first_id(SimpleNamespace(tables={"user": served}), "user") == ["drei\u00df"]  # type: ignore[arg-type]
    other = write(tmp_path / "2", {5: 0.5}, gone=[], texts={5: "fuenf"})
    with pytest.raises(UserError, match="'five' and 'fuenf' of user have the same id, 5"):
        after(served, tmp_path / "2", other)
    # Of tables whose ids nobody is shown no texts are kept.
    assert read_table(tmp_path / "0", base).texts is None


def test_an_export_is_read_as_it_was_written(tmp_path: Path) -> None:
    base = write(tmp_path / "0", {5: 0.5, 1: 0.25, -3: 1.0}, texts={5: "five", 1: "one", -3: "x"}, seen=4)
    served = after(
        read_table(tmp_path / "0", base, keeps_texts=True),
        tmp_path / "1",
        write(tmp_path / "1", {7: 3.0}, gone=[1], texts={7: "seven"}),
    )
    (tmp_path / "2").mkdir()
    entry = write_shard_file(tmp_path / "2" / shard_file_name(0), served.arrays("user"))
    again = read_table(tmp_path / "2", dataclasses.replace(base, files=(entry,)), keeps_texts=True)
    assert content(again) == content(served)
    assert again.raw_values() == served.raw_values() == ["x", "five", "seven"]
    assert torch.equal(again.seen, served.seen)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda manifest: dataclasses.replace(manifest, dynamic={}),
            "dynamic tables none, and the model user",
        ),
        (lambda manifest: forged(manifest, embedding_dim=3), "3 numbers in a row of user, and the model 2"),
        (lambda manifest: forged(manifest, has_texts=True), "texts for ids of user, and the model numbers"),
    ],
)
def test_a_delta_with_other_tables_is_refused(
    change: Callable[[Manifest], Manifest], sentence: str, tmp_path: Path
) -> None:
    served = read_table(tmp_path / "0", write(tmp_path / "0", {1: 0.5}), keeps_texts=True)
    delta = change(write(tmp_path / "1", {1: 9.0}, gone=[]))

    def take() -> None:
        check_same_tables(tmp_path / "1", delta, {"user": served})
        change_of(served, tmp_path / "1", delta)

    with pytest.raises(UserError, match=sentence):
        take()


@pytest.mark.parametrize("value", [-(2**63), 2**63, 1.5, float("inf")])
def test_a_number_that_can_be_no_id_is_refused_with_one_message(value: float) -> None:
    with pytest.raises(
        UserError, match=r"The feature user takes whole numbers between .*, and got "
    ) as found:
        ids_of_values("user", [1, value])
    assert "\n" not in str(found.value)


def test_ids_equal_those_of_the_training_and_missing_values_are_unknown() -> None:
    values = [3, None, 3.0, float("nan"), np.int64(-4), 2**63 - 1]
    assert ids_of_values("user", values).tolist() == [3, -(2**63), 3, -(2**63), -4, 2**63 - 1]
    assert ids_of_values("user", []).tolist() == []
    one, other, nobody = ids_of_values("user", ["a", "\udc80", None]).tolist()
    assert len({one, other, nobody}) == 3


def test_a_delta_of_a_large_table_copies_no_rows_and_takes_less_time_than_the_table(tmp_path: Path) -> None:
    number, few = 300_000, 3_000
    write_large(tmp_path / "0", np.arange(number) * 3, None)
    begin = time.perf_counter()
    served = read_table(tmp_path / "0", large(tmp_path / "0"))
    whole = time.perf_counter() - begin
    took, matrices = [], {served.matrix.data_ptr()}
    for delta in range(1, 9):
        # As many come as go, and so there is always room.
        gone = np.arange(few) * 3 + 3 * few * (delta - 1)
        write_large(tmp_path / f"{delta}", np.arange(few) * 3 + 1 + 3 * few * delta, gone)
        begin = time.perf_counter()
        served = after(served, tmp_path / f"{delta}", large(tmp_path / f"{delta}", LINK))
        took.append(time.perf_counter() - begin)
        matrices.add(served.matrix.data_ptr())
    assert served.num_values == number
    assert len(matrices) == 1
    assert len(served.matrix) == number + 1
    print(f"delta {min(took):.4f} s, table {whole:.4f} s")
    assert min(took) < whole
    # One after the other they come alone: the memory grows by a share, and not with each of them.
    for delta in range(9, 15):
        write_large(tmp_path / f"{delta}", np.arange(few) * 3 + 2 + 3 * few * delta, np.arange(0))
        served = after(served, tmp_path / f"{delta}", large(tmp_path / f"{delta}", LINK))
        matrices.add(served.matrix.data_ptr())
    assert served.num_values == number + 6 * few
    assert len(matrices) == 2


def write_large(folder: Path, ids: np.ndarray, gone: np.ndarray | None) -> None:
    folder.mkdir()
    slots = {
        slot: np.zeros(0 if slot in WAITING else len(ids), kind) for slot, kind in (ROWS | WAITING).items()
    }
    slots |= {"ids": ids.astype(np.int64), "weight": np.ones((len(ids), 16), np.float32)}
    slots |= {"unknown.weight": np.zeros((1, 16), np.float32), "unknown.momentum1": np.zeros(1, np.float32)}
    if gone is not None:
        slots |= {"gone": gone.astype(np.int64), "waiting.gone": np.zeros(0, np.int64)}
    write_shard_file(
        folder / shard_file_name(0), {name_of("user", slot): value for slot, value in slots.items()}
    )


def large(folder: Path, link: ParentLink | None = None) -> Manifest:
    from recsuite.files import FileEntry

    entry = FileEntry(shard_file_name(0), 0, "")
    record = dataclasses.replace(RECORD, embedding_dim=16)
    return Manifest("run", Progress(), {}, (entry,), "", "", {}, link, dynamic={"user": record})
