"""Faults around a checkpoint: one sentence, the training continues or is refused,
and what is there stays what it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import HuggingFaceStorageReader

from example import make_loss, make_model
from recsuite.checkpoint import chain, writer
from recsuite.checkpoint import checkpointer as checkpointers
from recsuite.checkpoint import folder as folders
from recsuite.checkpoint import shards as parts
from recsuite.checkpoint.chain import chain_at, check_whole, chosen_chain
from recsuite.checkpoint.checkpointer import Checkpointer, _retire_compacted, checkpointing, compact
from recsuite.checkpoint.folder import BEST, LATEST, full_checkpoints_in, newest_in, step_of
from recsuite.checkpoint.format import MANIFEST, VOCABULARY, DynamicRecord, read_manifest, write_manifest
from recsuite.checkpoint.shards import RowReader
from recsuite.checkpoint.writer import named_tensors, tensors_of
from recsuite.datasets.opening import open_data
from recsuite.errors import UserError
from recsuite.files import FileEntry, digest_of
from recsuite.sharding.table import EmbeddingTable
from recsuite.training import loop
from recsuite.training import loop as training
from recsuite.training.callbacks import Callback, Step
from recsuite.training.evaluation import PredictionEvaluator
from recsuite.training.progress import Progress
from recsuite.training.weights import describe_invalid_weights
from tests.support.fault_ranks import SLOW_SECONDS
from tests.support.launch import (
    EXAMPLE,
    SUPPORT,
    read_json,
    run_command,
    started,
    succeeded,
    torchrun,
    wait_for,
)
from tests.support.planted_model import differing, local_parts, mark_step, write_step
from tests.support.planted_rows import NUM_IDS, is_there
from tests.support.preloaded import preloaded
from tests.support.published import flip
from tests.support.steps import tell
from tests.support.tiny_dumps import BETTER, GOOD, WORSE, WRITER, link_to, links_in, names_in, publish_at
from tests.support.trained import Trained, resume

UNSHARE = ["unshare", "--mount", "--map-root-user", "--user"]
needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode
    != 0,
    reason="needs unprivileged mount namespaces (unshare --mount --user)",
)


# --- faults of one of two ranks ---


# The prefix of the last step's name, where a fault is over by then.
LAST = {
    mode: f"{'delta' if 'delta' in mode else 'step'}-000000005"
    for mode in ("dump", "async dump", "delta", "dynamic dump", "dynamic delta")
}


MODES = ("async dump", "delta", "dynamic delta")


@pytest.fixture(
    scope="module",
    params=[*MODES, *(pytest.param(mode, marks=pytest.mark.soak) for mode in ("dump", "dynamic dump"))],
)
def mode(request: pytest.FixtureRequest) -> str:
    """Kind of checkpoint that is written."""
    return str(request.param)


@pytest.fixture(scope="module")
def launched(
    synthetic_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, ...]], dict[str, Any]]:
    """Return a function that launches two ranks for some modes, once, and returns what they found."""

    @cache
    def launch(modes: tuple[str, ...]) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("faults")
        results, dumps = folder / "results.json", folder / "dumps"
        succeeded(torchrun(2, SUPPORT / "fault_ranks.py", results, synthetic_folder, dumps, *modes))
        return {name: {**found, "dumps": dumps / name} for name, found in read_json(results).items()}

    return launch


@pytest.fixture(scope="module")
def faults(mode: str, launched: Callable[[tuple[str, ...]], dict[str, Any]]) -> dict[str, Any]:
    """Findings in a mode, of which all but those of `soak` share a launch."""
    found: dict[str, Any] = launched(MODES if mode in MODES else (mode,))[mode]
    return found


WITHOUT_ROOM = ": File too large. Fix: make room, or give a --save_dir that can be written, and --resume; the"


def test_a_full_disk_on_one_rank_gives_one_message_and_a_later_checkpoint_succeeds(
    faults: dict[str, Any], mode: str
) -> None:
    found = faults["full and slow"]
    failed = [line for line in found["said"] if "Cannot write " in line]
    assert len(failed) == 2
    assert all(WITHOUT_ROOM in line for line in failed)
    assert found["end"] is None
    assert (found["newest"], found["differing"]) == (LAST[mode], [[], []])
    assert found["leftovers"] == []


@pytest.mark.parametrize("mode", ["dynamic delta"], indirect=True, scope="module")
@pytest.mark.parametrize("table", ["user", "movie", "history"])
def test_a_delta_after_failed_ones_contains_all_evicted_ids_since_the_last(
    faults: dict[str, Any], table: str
) -> None:
    chain = chain_at(faults["dumps"] / "full and slow" / "delta-000000004")
    assert [step_of(folder) for folder in chain.folders] == [0, 1, 4]
    gone = RowReader(chain.folders, [read_manifest(folder) for folder in chain.folders]).gone_ids(table)
    ids = torch.arange(-NUM_IDS, NUM_IDS)
    assert torch.equal(gone.sort().values, ids[is_there(ids, 1) & ~is_there(ids, 4)])
    # Some left at each of the two steps whose delta found no room.
    for step in (2, 3):
        assert len(gone[is_there(gone, step - 1) & ~is_there(gone, step)])


def test_a_full_disk_at_the_last_checkpoint_ends_the_training_with_a_message(
    faults: dict[str, Any], mode: str
) -> None:
    found = faults["full at the end"]
    assert WITHOUT_ROOM in found["end"]
    assert (found["newest"], found["differing"]) == (LAST[mode].replace("5", "1"), [[], []])
    assert found["leftovers"] == []


def test_invalid_weights_on_one_rank_end_the_training_before_a_checkpoint(
    faults: dict[str, Any], mode: str
) -> None:
    found = faults["diverged"]
    # Of tables without a vocabulary in the modes that have some.
    which = r"(user|movie|history)" if "dynamic" in mode else r"\w+"
    assert re.match(rf"After step 2 the table {which} \((tables|dynamic)\.\w+\.weight\) has ", found["end"])
    assert "diverged with learning rates of 0.04 (tables) and 0.001 (dense part); lower" in found["end"]
    assert (found["newest"], found["differing"]) == (LAST[mode].replace("5", "1"), [[], []])
    assert found["leftovers"] == []


def test_ranks_wait_for_a_slow_writer(faults: dict[str, Any], mode: str) -> None:
    found = faults["full and slow"]
    # Those of the two before it, which had no room.
    assert len([line for line in found["said"] if "Cannot write " in line]) == 2
    assert (found["newest"], found["differing"]) == (LAST[mode], [[], []])
    # One that is written beside the training holds nobody up.
    assert (found["seconds"][4] > SLOW_SECONDS / 2) == (mode != "async dump")


@pytest.mark.parametrize(
    ("number", "words"),
    [(28, "No space left on device"), (122, "Disk quota exceeded"), (5, "Input/output error")],
)
def test_os_errors_of_the_shard_writer_keep_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: something (os error {number})")

    monkeypatch.setattr(parts, "save_file", refuse)
    with pytest.raises(OSError, match=words):
        parts.write_shard_file(tmp_path / "part", {})


# --- folders that cannot be written, and trainers that meet ---


@needs_mounts
@pytest.mark.parametrize("with_lock", [False, True])
def test_a_folder_on_a_read_only_disk_is_refused_with_one_message(tmp_path: Path, with_lock: bool) -> None:
    (tmp_path / "dumps").mkdir()
    if with_lock:
        (tmp_path / "dumps" / ".lock").touch()
    mount = "mount --bind dumps dumps && mount -o remount,bind,ro dumps"
    command = [*UNSHARE, "bash", "-c", f'{mount} && exec "$@"', "-", sys.executable, "-c", WRITER, "dumps"]
    output = succeeded(run_command(command, cwd=tmp_path))
    assert output == "Cannot write to --save_dir dumps: Read-only file system. Fix: give another folder.\n"


@needs_mounts
def test_a_full_disk_leaves_the_checkpoints_before_and_ends_with_status_2(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    # Room for two checkpoints, of three.
    mount = "mount -t tmpfs -o size=700k tmpfs dumps && echo mounted && exec sleep infinity"
    flags = ("--dump", "--epochs", 3, "--data_path", synthetic_folder, "--save_dir", "dumps")
    command = [sys.executable, EXAMPLE, *flags]
    (tmp_path / "dumps").mkdir()
    with started([*UNSHARE, "bash", "-c", mount], cwd=tmp_path) as disk:
        wait_for(disk, "mounted")
        with preloaded(within=disk.pid):
            result = subprocess.run(
                [str(word) for word in command], cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
        shutil.copytree(f"/proc/{disk.pid}/root{tmp_path}/dumps", tmp_path / "copy", symlinks=True)
    assert result.returncode == 2, result.stderr
    assert "example.py: Cannot write " in result.stderr
    assert ": No space left on device. Fix: make room, or give a --save_dir " in result.stderr
    assert "Traceback" not in result.stderr
    # All epochs were trained, and evaluated.
    assert "epoch 3/3" in result.stdout
    assert len(full_checkpoints_in(tmp_path / "copy")) in (1, 2)
    check_whole(chain_at(tmp_path / "copy"))


# --- states that cannot be loaded ---


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_shard_files_of_a_full_checkpoint(trained: Trained) -> None:
    tensors = tensors_of(trained.train_state)
    write_step(tensors, 99)
    storage_reader = HuggingFaceStorageReader(str(trained.folder / "step-000000001"))
    torch.distributed.checkpoint.load(tensors, storage_reader=storage_reader, no_dist=True)
    assert differing(tensors, 1) == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_model_whose_loss_is_not_a_number_is_not_written(trained: Trained, loss: float) -> None:
    before = sorted(trained.folder.iterdir())
    config = trained.config.replaced(dump=True, resume=True, keep=1)
    with checkpointing(trained.columns, config, trained.context) as checkpointer:
        checkpointer.begin(trained.train_state, checkpointer.start)
        with pytest.raises(UserError, match=rf"The loss is {loss} at step 5: the training diverged"):
            tell(checkpointer, Progress(5, 0, 5), loss)
    assert sorted(trained.folder.iterdir()) == before


@pytest.mark.parametrize("kind", ["step", "delta"])
def test_late_writes_of_an_old_attempt_do_not_reach_the_next_one(
    trained: Trained, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on another machine outlives its attempt, and writes when the next one writes the same step."""
    config = trained.config.replaced(resume=True, inc_dump=kind == "delta")
    making: list[Path] = []

    def publish(folder: Path, final: Path, keep: int) -> None:
        making.append(folder)
        if len(making) == 1:
            raise OSError(5, "killed")
        # What a rank does: it makes the folder of its attempt where that is gone, and writes its part.
        making[0].mkdir(exist_ok=True)
        (making[0] / "part-00002.safetensors").write_bytes(b"late")
        folders.publish(folder, final, keep)

    monkeypatch.setattr(writer, "publish", publish)
    for _ in range(2):
        with (
            contextlib.suppress(UserError),
            checkpointing(trained.columns, config, trained.context) as checkpointer,
        ):
            checkpointer.begin(trained.train_state, checkpointer.start)
            tell(checkpointer, Progress(5, 0, 5))
    final = trained.folder / f"{kind}-000000005"
    assert newest_in(trained.folder) == final
    check_whole(chain_at(final))
    assert not (final / "part-00002.safetensors").exists()
    # What is left of it the next trainer removes.
    assert making[0] != making[1]
    assert making[0].is_dir()
    resume(trained)
    assert not making[0].exists()


def diverged(step: int, name: str) -> str:
    """The pattern of the sentence that ends a training in which this tensor diverged."""
    whole = "the table user" if name.startswith("tables.user.") else "the dense part"
    optimizer = "" if name.endswith(".weight") else "the optimizer of "
    limits = "and a trained model has only finite numbers and no weight beyond 1,000,000"
    return (
        rf"^After step {step} {optimizer}{whole} \({re.escape(name)}\) has [^,]*, {limits}: "
        "the training diverged with learning rates of 0"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tables.user.weight", -5e29), ("tables.user.weight", float("nan"))),
        *(("dense.mlp.0.weight", 5e29), ("dense.mlp.0.weight", float("inf"))),
    ],
)
@pytest.mark.parametrize("increments", [False, True])
def test_a_model_with_invalid_weights_is_not_written(
    trained: Trained, increments: bool, name: str, value: float
) -> None:
    before = sorted(trained.folder.iterdir())
    config = trained.config.replaced(dump=True, inc_dump=increments, resume=True, keep=1)
    with checkpointing(trained.columns, config, trained.context) as checkpointer:
        checkpointer.begin(trained.train_state, checkpointer.start)
        tensors = tensors_of(trained.train_state)
        (tensor,) = local_parts(tensors[name])
        kept = tensor[1].clone()
        tensor[1, 2] = value
        if increments:
            mark_step(checkpointer, tensors, 5)
        with pytest.raises(UserError, match=diverged(5, name)):
            tell(checkpointer, Progress(5, 0, 5))
        tensor[1] = kept
    assert sorted(trained.folder.iterdir()) == before


def train_epoch_of_8_steps(
    trained: Trained,
    folder: Path,
    increments: bool,
    at_end: Callable[[Checkpointer], None] = lambda checkpointer: None,
) -> None:
    """Train, and do something to what is learned when the last step is done."""
    what: dict[str, Any] = {"dump": not increments, "inc_dump": increments, "dump_every": 0, "resume": False}
    config = trained.config.replaced(save_dir=str(folder), epochs=1, batch_size=2048, **what)
    with (
        open_data(config, trained.context) as data,
        checkpointing(data.columns, config, trained.context) as checkpointer,
    ):

        class AtEnd(Callback):
            def on_step(self, step: Step) -> None:
                if step.progress.step == 8:
                    at_end(checkpointer)

        training.Training(data, config, trained.context, checkpointer, [AtEnd()]).run(make_model, make_loss)


@pytest.mark.parametrize("increments", [False, True])
def test_weights_are_checked_once_per_epoch(
    trained: Trained, increments: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[set[str]] = []

    def noting(dense: dict[str, torch.Tensor], tables: dict[str, EmbeddingTable], changed: bool) -> str:
        rows = {f"tables.{name}.{slot}" for name, table in tables.items() for slot in table.tensors}
        looked_at.append({*dense, *rows})
        return describe_invalid_weights(dense, tables, changed)

    for module in (checkpointers, loop):
        monkeypatch.setattr(module, "describe_invalid_weights", noting)
    train_epoch_of_8_steps(trained, tmp_path / "epoch", increments)
    assert looked_at == [set(tensors_of(trained.train_state))]
    newest = newest_in(tmp_path / "epoch")
    assert newest is not None
    assert newest.name == f"{'delta' if increments else 'step'}-000000008"


@pytest.mark.parametrize(
    ("increments", "name", "value"),
    [
        *((False, "tables.user.weight", 5e29), (True, "dense.mlp.0.weight", float("nan"))),
        *((True, "tables.user.momentum1", float("inf")), (False, "dense.mlp.0.weight.exp_avg", float("nan"))),
    ],
)
def test_divergence_in_the_last_step_of_an_epoch_prevents_validation_and_checkpoint(
    trained: Trained,
    increments: bool,
    name: str,
    value: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(checkpointer: Checkpointer) -> None:
        local_parts(named_tensors(checkpointer.writer.tables, checkpointer.dense)[name])[0].view(-1)[-1] = (
            value
        )

    monkeypatch.setattr(PredictionEvaluator, "validate", Mock(side_effect=AssertionError("validated")))
    with pytest.raises(UserError, match=diverged(8, name)):
        train_epoch_of_8_steps(trained, tmp_path / "epoch", increments, spoil)
    newest = newest_in(tmp_path / "epoch")
    assert (newest.name if newest else None) == ("step-000000000" if increments else None)


def test_other_ratings_are_refused_at_a_resume(trained: Trained) -> None:
    columns = dataclasses.replace(trained.columns, digest="0123-70-4")
    config = trained.config.replaced(resume=True)
    with (
        pytest.raises(UserError, match=r"differ .*\(\d+ for training then, 70 now\); give the --data_path"),
        checkpointing(columns, config, trained.context),
    ):
        pass


def test_the_best_delta_is_kept_with_all_that_it_builds_on_when_deltas_are_merged(
    tmp_path: Path,
) -> None:
    base = publish_at(tmp_path, 0, Progress())
    publish_at(tmp_path, 10, Progress(samples=5), link=link_to(base, 1, 0))
    best = publish_at(tmp_path, 20, GOOD, link=link_to(base, 2, 10))
    publish_at(tmp_path, 30, WORSE, link=link_to(base, 3, 20))
    publish_at(tmp_path, 30, WORSE, keep=1)
    assert _retire_compacted(tmp_path, keep=1) == 1
    assert links_in(tmp_path) == {BEST: best.name, LATEST: "step-000000030"}
    assert chosen_chain(tmp_path) == chain_at(tmp_path / BEST)
    assert [step_of(path) for path in chosen_chain(tmp_path).folders] == [0, 10, 20]
    assert chain_at(tmp_path).folders == (tmp_path / "step-000000030",)
    check_whole(chosen_chain(tmp_path))
    # A better one sets them free.
    publish_at(tmp_path, 40, BETTER)
    assert _retire_compacted(tmp_path, keep=1) == 2
    assert names_in(tmp_path) == [BEST, LATEST, "step-000000040"]


def edit(folder: Path, **changes: Any) -> None:
    write_manifest(folder, dataclasses.replace(read_manifest(folder), **changes))


BASE, FIRST, SECOND = "step-000000002", "delta-000000003", "delta-000000004"
PART = "part-00001.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "a missing part": (lambda at: (at / SECOND / PART).unlink(), [f"{SECOND}/{PART} is missing"], FIRST),
    "a part cut short": (lambda at: os.truncate(at / FIRST / PART, 9), [f"{FIRST}/{PART} has 9 bytes"], BASE),
    "a flipped byte of the values": (
        lambda at: flip(at / BASE / VOCABULARY),
        [f"{BASE}/{VOCABULARY} is damaged"],
        "step-000000001",
    ),
    "a missing increment": (lambda at: shutil.rmtree(at / FIRST), ["Delta 1 after", "is missing"], BASE),
    "no manifest": (lambda at: (at / FIRST / MANIFEST).unlink(), [FIRST, "holds no manifest"], BASE),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_the_newest_good_one_and_changes_nothing(
    trained: Trained, damage: str
) -> None:
    act, words, good = DAMAGES[damage]
    act(trained.folder)
    trained.refused(*words, f"; the newest complete one there is {trained.folder / good};")
    # Nor does a training go on from it.
    with pytest.raises(UserError, match=f"the newest complete one there is .*{good}"):
        resume(trained)


def test_no_rank_reads_other_checkpoints_alone_to_name_a_good_one(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(trained.folder / BASE / PART)
    # What `loading` reads is shared by all ranks.
    monkeypatch.setattr(chain, "check_whole", Mock(side_effect=AssertionError("read by one rank")))
    trained.refused(f"{BASE}/{PART} is damaged", f"one there is {trained.folder / 'step-000000001'};")


USER = "tables.user.weight"
MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another optimizer": (
        {"optimizer": "SGD"},
        ["was trained with SGD, and this program has row-wise Adagrad"],
    ),
    "other data": (
        {"vocabulary": "0" * 32},
        ["was trained on other data than", ": the ids differ; give the --data_path that its config.json"],
    ),
    "other data with more users": (
        {"vocabulary": "0" * 32, "tensors": {USER: ([7, 4], "float32")}},
        ["its table user has 7 rows, and here there are ", "for new ids train again on all files, or from "],
    ),
    "other columns": (
        {"features": {"a_price": {}}},
        [
            "was trained with other features than ",
            " has: a_price only there, ",
            " only here",
            "give the --data_path",
        ],
    ),
    "another shape": (
        {"tensors": {USER: ([7, 4], "float32")}},
        [f"has float32 [7, 4] for {USER}", ", 4]; give"],
    ),
    "another width": (
        {"tensors": {USER: ([7, 8], "float32"), "dense.mlp.0.weight": ([9, 9], "float32")}},
        ["has 8 numbers in a row of user, and this model has 4; give the --embedding_dim", "embedding_dims"],
    ),
    "another width of a dynamic table": (
        {"dynamic": {"user": DynamicRecord(12, 16, 16, "continuous", 1, "lru", 0, 0, "steps", False, 0, 0)}},
        ["has 12 numbers in a row of user, and this model has 4; give"],
    ),
    "another type": (
        {"tensors": {USER: ([0, 4], "float16")}},
        [f"has float16 [0, 4] for {USER}", "float32 ["],
    ),
    "another table": (
        {"tensors": {"tables.a.weight": ([1], "float32")}},
        ["for tables.a.weight", "has nothing"],
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_checkpoint_of_another_model_is_refused_with_both_sides_and_changes_nothing(
    trained: Trained, misfit: str
) -> None:
    changes, words = MISFITS[misfit]
    dump = trained.folder / "step-000000001"
    tensors = {**read_manifest(dump).tensors, **changes.get("tensors", {})}
    edit(dump, **{**changes, "tensors": tensors})
    trained.refused(str(dump), *words, path=dump)


def test_a_checkpoint_without_a_table_is_refused(trained: Trained) -> None:
    dump = trained.folder / "step-000000001"
    tensors = {name: value for name, value in read_manifest(dump).tensors.items() if name != USER}
    edit(dump, tensors=tensors)
    trained.refused(f"{dump} has nothing for {USER}, and this model has float32 [", path=dump)


def test_the_error_states_if_no_good_checkpoint_exists(trained: Trained) -> None:
    for path in trained.folder.glob("*/part-*"):
        os.truncate(path, 1)
    trained.refused("has 1 bytes", "; no other one there is complete.")


def test_compaction_removes_no_deltas_for_the_sake_of_a_damaged_checkpoint(trained: Trained) -> None:
    shutil.copytree(trained.folder / BASE, trained.folder / "step-000000004")
    edit(trained.folder / "step-000000004", progress=Progress(4, 0, 4))
    flip(trained.folder / "step-000000004" / PART)
    alone = trained.config.replaced(resume=False, inc_dump=False, compact=True)
    before = sorted(path.name for path in trained.folder.iterdir())
    with pytest.raises(UserError, match="is damaged"):
        compact(trained.train_state, trained.columns, alone, trained.context)
    assert sorted(path.name for path in trained.folder.iterdir()) == before


# --- hostile files ---


class Hostile:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def hostile_files(trace: Path) -> dict[str, bytes]:
    """A pickle as it is, and in the archive that torch makes."""
    archive = io.BytesIO()
    torch.save(Hostile(trace), archive)
    return {"pickle": pickle.dumps(Hostile(trace)), "archive": archive.getvalue()}


PLANTED = (
    ".metadata",
    "__0_0.distcp",
    "model.pt",
    "model.pkl",
    "x.pth",
    ".safetensors",
    "x.safetensors",
    "x.json",
)


@pytest.mark.parametrize("digest_forged", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_hostile_pickle_is_never_executed(trained: Trained, tmp_path: Path, digest_forged: bool) -> None:
    trace = tmp_path / "trace"
    hostile = list(hostile_files(trace).values())
    pickle.loads(pickle.dumps(Hostile(trace)))
    assert trace.exists()
    trace.unlink()
    kept = trained.folder.with_name("kept")
    trained.folder.rename(kept)
    whole = sorted((path.relative_to(kept) for path in kept.glob("*-*/*")), key=lambda path: path.name)
    planted = [Path(folder) / name for folder in (".", BASE, FIRST, SECOND) for name in PLANTED]
    # Each file that there is, one by one, in the two forms by turns: every name is in several folders.
    singles = [([name], hostile[number % 2]) for number, name in enumerate(whole)]
    # What is planted beside them at once, and in the end everything.
    together = [(names, content) for names in (planted, whole + planted) for content in hostile]
    for names, content in (*singles, *together):
        shutil.copytree(kept, trained.folder, symlinks=True)
        for name in names:
            (trained.folder / name).write_bytes(content)
        for name in names if digest_forged else []:
            if name.name != MANIFEST and name.parent.name and MANIFEST not in {other.name for other in names}:
                forge(trained.folder / name)
        for action in (
            trained.load,
            partial(trained.load, trained.folder / names[0].parent),
            partial(resume, trained),
        ):
            # Whether it is refused or not makes no difference here.
            with contextlib.suppress(UserError, SafetensorError):
                action()
            assert not trace.exists(), names
        shutil.rmtree(trained.folder)


def forge(path: Path) -> None:
    """Have the manifest beside a file say that the file is as it must be."""
    entries = {entry.name: entry for entry in read_manifest(path.parent).files}
    entries[path.name] = FileEntry(path.name, path.stat().st_size, digest_of(path))
    edit(path.parent, files=tuple(entries.values()))
