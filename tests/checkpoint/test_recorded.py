"""A checkpoint is loaded, and gone on from, with the flags of its training, where none are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from example import make_model
from recsuite.checkpoint import recorded
from recsuite.checkpoint.format import CONFIG, read_manifest, write_manifest
from recsuite.checkpoint.recorded import (
    DATA_FLAGS,
    LEARNING_FLAGS,
    MODEL_FLAGS,
    NAME_FLAGS,
    TABLE_FLAGS,
    read_recorded,
    with_recorded,
)
from recsuite.config.config import Config, extra_data_flags, flag_names, machine_flags
from recsuite.config.parser import parse_given
from recsuite.datasets import opening
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.tools import script
from tests.support.launch import EXAMPLE, python, succeeded
from tests.support.tiny_dumps import add_dump, add_file

TRAINED = Config.of(split="random", seed=3, embedding_dim=8, mlp_dims=(4, 2), epochs=99, lr=0.5, batch_size=7)

# Flags that are as the command line says, and the same on all machines: what to do, and what of it is kept.
OF_THE_COMMAND_LINE = (
    *("train", "dump", "inc_dump", "resume", "load", "compact", "export", "recommend", "doctor"),
    "schema",
    *(
        "checkpoint",
        "until",
        "save_dir",
        "dump_every",
        "keep",
        "async_dump",
        "user",
        "top",
        "follow",
        "follow_data",
        "partition_delay",
        "move_aside",
        "warm_start",
        "format",
        "row_type",
        "other_data",
        "accept_changed_model",
        "by",
        "cutoffs",
    ),
    *(
        "local_batch_size",
        "pipeline",
        "capture",
        "timeout",
        "rebuild",
        "distribution",
        "storage",
        "memory_budget",
    ),
    *("storage_dir", "cache_load_factor"),
)

# Of flags of each type, values of another type or beyond what they may be.
EDITS: dict[str, list[Any]] = {
    "seed": [-1, 2**31, 10**400, 1.5, "1", True, None, [1]],
    "split": ["", "newest", 3, ["time"], "ran\ndom"],
    "dataset": ["ml-2m", 1, None, "ml-1m\x1b[2J"],
    "data_path": [1, None],
    "test_fraction": [0, 1, -0.5, "0.2", True],
    "bad_rows": ["keep", False],
    "mlp_dims": [[0], [2**40], [64] * 1000, 64, "64,32", [64.0], [[64]], {"64": 32}],
    "capacity": ["0", "many", 100, "user=", None],
    "ttl": ["-1", "5 days", 5],
    "lr": [0, -1, 10**400, "0.04", None, []],
    "async_dump": [0, 1, "yes"],
}


@pytest.fixture
def trained(tmp_path: Path) -> Config:
    """The flags of a training, of which a checkpoint lies in its save_dir."""
    config = TRAINED.replaced(save_dir=str(tmp_path / "dumps"))
    add_dump(tmp_path / "dumps", 10)
    record(config)
    return config


def record(config: Config, **changes: Any) -> Path:
    """Have the checkpoint hold these flags, with changes, as if it had been written with them; returns it."""
    dump = Path(config.checkpoint.save_dir) / "step-000000010"
    add_file(dump, CONFIG, json.dumps({**config.recorded, **changes}).encode())
    return dump


def merged(trained: Config, line: str) -> Config:
    """Return the configuration of a command line with that checkpoint."""
    return with_recorded(*parsed(trained, line))


def parsed(trained: Config, line: str) -> tuple[Config, frozenset[str]]:
    """Return the configuration of a command line, and the names of the flags that it gives."""
    return parse_given([*line.split(), "--save_dir", trained.checkpoint.save_dir])


def test_a_load_uses_and_reports_the_data_and_model_of_the_checkpoint(
    trained: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Config().replaced(embedding_dim=8, mlp_dims=(4, 2), split="random", seed=3)
    expected = model.replaced(load="newest", save_dir=trained.checkpoint.save_dir)
    assert merged(trained, "--load") == expected
    shown = "--embedding_dim 8 --mlp_dims 4,2 --split random --seed 3"
    assert capsys.readouterr().out == f"as in the training: {shown}\n"


def test_folders_may_have_any_name(trained: Config) -> None:
    record(trained.replaced(cache_dir="\x1b[2J", report_dir="a\nb\u202e", embedding_dim=8))
    assert merged(trained, "--load").model.embedding_dim == 8


@pytest.mark.parametrize("line", ["--load", "--resume"])
def test_the_places_of_dynamic_tables_are_those_of_the_training(trained: Config, line: str) -> None:
    # A stream's cannot be counted anew, so a load without them would be refused.
    record(
        trained.replaced(
            vocabulary="dynamic", stream=True, split="time", capacity="user=48,movie=64", ttl="9d"
        )
    )
    assert merged(trained, line).tables.capacity == "user=48,movie=64"
    assert merged(trained, line).tables.ttl == "9d"
    assert merged(trained, f"{line} --capacity 100").tables.capacity == "100"


def test_the_flags_of_a_checkpoint_older_than_sections_are_read(trained: Config) -> None:
    expected = merged(trained, "--resume")
    folder = Path(trained.checkpoint.save_dir) / "step-000000010"
    add_file(folder, CONFIG, json.dumps(trained.flags).encode())
    assert merged(trained, "--resume") == expected
    add_file(folder, CONFIG, json.dumps({**trained.flags, "checkpoint": 5}).encode())
    with pytest.raises(UserError, match="has 5 for --checkpoint, which takes str"):
        merged(trained, "--resume")


def test_a_resume_uses_the_recorded_model_and_learning_flags(trained: Config) -> None:
    assert merged(trained, "--resume --num_workers 2") == trained.replaced(resume=True, num_workers=2)
    # What is compacted may be resumed later.
    assert merged(trained, "--compact") == trained.replaced(compact=True)


def test_a_load_does_not_repeat_a_rebuild_of_columns(trained: Config) -> None:
    record(trained.replaced(rebuild=True))
    for line in ("--resume", "--load"):
        assert not merged(trained, line).data.rebuild
        assert merged(trained, f"{line} --rebuild").data.rebuild


def test_a_resume_keeps_the_step_of_the_tables_which_an_older_checkpoint_does_not_name(
    trained: Config,
) -> None:
    record(trained.replaced(cpu_tables="torchrec"))
    assert merged(trained, "--resume").training.cpu_tables == "torchrec"
    assert merged(trained, "--resume --cpu_tables vectorised").training.cpu_tables == "vectorised"
    older = trained.flags
    del older["cpu_tables"]
    folder = Path(trained.checkpoint.save_dir) / "step-000000010"
    add_file(folder, CONFIG, json.dumps(older).encode())
    assert merged(trained, "--resume").training.cpu_tables == "vectorised"


def test_rows_are_rounded_to_16_bits_for_a_load_and_not_between_deltas(
    trained: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merged(trained, "--load --row_precision fp16").tables.row_precision == "fp16"
    assert "--row_precision fp16 rounds the rows of" in capsys.readouterr().out
    for line in ("--resume", "--compact"):
        with pytest.raises(UserError, match=r"--row_precision fp16 does not fit .*step-000000010"):
            merged(trained, f"{line} --row_precision fp16")
    record(trained, row_precision="fp16")
    assert merged(trained, "--resume").tables.row_precision == "fp16"
    # They are numbers of 32 bits too.
    for line in ("--resume --row_precision fp32", "--load"):
        assert merged(trained, line).tables.row_precision == "fp32"
    assert "rounds" not in capsys.readouterr().out


def test_every_flag_is_of_exactly_one_class() -> None:
    classes = (
        NAME_FLAGS,
        DATA_FLAGS,
        extra_data_flags(),
        MODEL_FLAGS,
        TABLE_FLAGS,
        LEARNING_FLAGS,
        machine_flags(),
        OF_THE_COMMAND_LINE,
    )
    assert sorted(name for names in classes for name in names) == sorted(flag_names())


def test_a_flag_that_is_given_with_its_default_value_counts_as_given(trained: Config) -> None:
    found = merged(trained, f"--resume --epochs {Config().training.epochs} --lr {Config().optimizer.lr}")
    assert (found.training.epochs, found.optimizer.lr, found.loader.batch_size) == (
        Config().training.epochs,
        Config().optimizer.lr,
        trained.loader.batch_size,
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--resume --history 5", ("--history 5 does not fit", "was trained with --history 30")),
        # The defaults, and the checkpoint has others.
        ("--resume --embedding_dim 32", ("--embedding_dim 32", "--embedding_dim 8")),
        ("--resume --mlp_dims 64,32", ("--mlp_dims 64,32", "--mlp_dims 4,2")),
        ("--resume --split time", ("--split time", "--split random")),
        ("--resume --seed 0", ("--seed 0", "--seed 3")),
        ("--resume --task ranking", ("--task ranking", "--task rating")),
        ("--load --history 0", ("--history 0", "--history 30")),
        ("--compact --task ranking", ("--task ranking", "--task rating")),
    ],
)
def test_another_model_or_other_data_than_the_checkpoints_are_refused(
    trained: Config, line: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refusal:
        merged(trained, line)
    assert [word for word in (*words, "step-000000010") if word not in str(refusal.value)] == []


def test_max_bad_rows_may_differ_from_the_training_and_bad_rows_may_not(trained: Config) -> None:
    record(trained, bad_rows="skip", max_bad_rows=0.02)
    for line in ("--load", "--resume"):
        assert merged(trained, line).data.max_bad_rows == 0.02
        other = merged(trained, f"{line} --bad_rows skip --max_bad_rows 0.5")
        assert (other.data.bad_rows, other.data.max_bad_rows) == ("skip", 0.5)
    for line in ("--resume --bad_rows error", "--resume --duplicates first"):
        with pytest.raises(UserError, match="does not fit"):
            merged(trained, line)


def test_ratings_that_lie_elsewhere_are_split_as_in_the_training(trained: Config, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    found = merged(trained, f"--resume --data_path {tmp_path / 'moved'}")
    assert (found.data.data_path, found.data.split, found.runtime.seed) == (
        str(tmp_path / "moved"),
        "random",
        3,
    )


@pytest.mark.parametrize("line", ["--load", "--compact"])
def test_a_load_without_a_checkpoint_is_refused_before_any_file_is_made(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} holds no checkpoint; train with --dump"):
        with_recorded(*parse_given([line, "--save_dir", str(tmp_path)]))


def test_a_new_training_uses_no_recorded_flags(trained: Config, tmp_path: Path) -> None:
    for line in ("--dump --load", "--dump"):
        assert merged(trained, line).model.embedding_dim == Config().model.embedding_dim
    config, given = parse_given(["--resume", "--save_dir", str(tmp_path / "empty")])
    assert with_recorded(config, given) == config


def test_a_resumed_training_keeps_its_flags_and_names_those_that_change(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", 2_000, seed=0)
    save_dir, data = ("--save_dir", tmp_path / "dumps"), ("--data_path", tmp_path / "data")
    first = ("--dump", "--epochs", 1, "--lr", 0.03, "--preset", "none")
    succeeded(python(EXAMPLE, *first, *data, *save_dir))
    anew = python(EXAMPLE, *first, *data, *save_dir, "--cache_dir", tmp_path / "columns")
    assert anew.returncode == 2
    assert f"--save_dir {save_dir[1]} has the checkpoints of an earlier training: run " in anew.stderr
    assert " of example.RatingModel, step " in anew.stderr
    # Before the data are read.
    assert not (tmp_path / "columns").exists()
    again = succeeded(python(EXAMPLE, "--resume", "--epochs", 2, *data, *save_dir))
    assert "as in the training: --preset none --batch_size 64 --lr 0.03\n" in again
    assert "continues with other flags than before: --epochs 2 (was 1)\n" in again
    shared = succeeded(python(EXAMPLE, "--resume", "--epochs", 3, "--local_batch_size", 99, *data, *save_dir))
    assert "continues with other flags than before: --epochs 3 (was 2), --batch_size 99 (was 64)\n" in shared


def test_a_batch_of_one_process_is_read_as_that_of_all_processes(trained: Config) -> None:
    older = dict(trained.flags)
    del older["local_batch_size"]
    folder = Path(trained.checkpoint.save_dir) / "step-000000010"
    write_manifest(folder, dataclasses.replace(read_manifest(folder), world_size=3))
    add_file(folder, CONFIG, json.dumps(older).encode())
    assert merged(trained, "--resume").loader.batch_size == 3 * 7
    assert read_recorded(folder)["batch_size"] == 3 * 7


# --- a checkpoint that comes from anywhere ---


def test_no_path_is_taken_from_a_checkpoint(trained: Config, tmp_path: Path) -> None:
    paths = {"cache_dir": str(tmp_path), "report_dir": str(tmp_path), "save_dir": str(tmp_path / "other")}
    record(trained, **paths)
    for line in ("--load", "--resume", "--compact"):
        found = merged(trained, line)
        assert (found.data.cache_dir, found.flags["report_dir"], found.checkpoint.save_dir) == (
            "",
            "",
            trained.checkpoint.save_dir,
        )


def test_data_that_were_found_by_their_path_have_to_be_named(trained: Config, tmp_path: Path) -> None:
    for changes in ({"data_path": str(tmp_path)}, {"data_path": "/gone", "dataset": "ml-1m"}):
        record(trained, **changes)
        with pytest.raises(UserError, match=rf"on the files in {changes['data_path']}, .* give --data_path"):
            merged(trained, "--load")
        found = merged(trained, f"--load --data_path {tmp_path}")
        assert (found.data.data_path, found.data.dataset, found.data.split, found.runtime.seed) == (
            str(tmp_path),
            "",
            "random",
            3,
        )


@pytest.mark.parametrize("line", ["--load", "--resume", "--compact"])
def test_an_edited_configuration_is_refused(trained: Config, line: str) -> None:
    path = Path(trained.checkpoint.save_dir) / "step-000000010" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "seed": 4}))
    with pytest.raises(UserError, match=f"{path} is damaged: it has "):
        merged(trained, line)


@pytest.mark.parametrize("flag", EDITS)
def test_recorded_values_of_a_wrong_type_or_beyond_their_limits_are_refused(
    trained: Config, flag: str
) -> None:
    asked = parsed(trained, "--resume")
    for value in EDITS[flag]:
        dump = record(trained, **{flag: value})
        with pytest.raises(UserError, match=str(dump / CONFIG)) as refusal:
            with_recorded(*asked)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"seed": 1, "seed": 2}'])
def test_an_invalid_configuration_file_is_refused_with_one_message(trained: Config, content: bytes) -> None:
    dump = record(trained)
    add_file(dump, CONFIG, content)
    with pytest.raises(UserError, match=f"Cannot read {dump / CONFIG}: ") as refusal:
        merged(trained, "--load")
    assert "\n" not in str(refusal.value)


def test_a_checkpoint_without_a_configuration_is_refused_with_one_message(trained: Config) -> None:
    dump = Path(trained.checkpoint.save_dir) / "step-000000010"
    whole = read_manifest(dump)
    write_manifest(dump, dataclasses.replace(whole, files=whole.files[:1]))
    with pytest.raises(UserError, match=f"{dump} does not say how it was trained"):
        merged(trained, "--load")
    write_manifest(dump, whole)
    (dump / CONFIG).unlink()
    with pytest.raises(UserError, match=f"Cannot read {dump}: No such file.* Fix: "):
        merged(trained, "--load")


def test_flags_of_other_versions_are_skipped_and_reported(
    trained: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = record(trained, warp_speed=9)
    assert merged(trained, "--load").model.embedding_dim == 8
    assert (
        f"skipped in {dump / CONFIG}, because this program has no such flag: warp_speed\n"
        in capsys.readouterr().out
    )
    add_file(dump, CONFIG, b'{"embedding_dim": 8}')
    found = merged(trained, "--load")
    assert (found.model.embedding_dim, found.data.history, found.runtime.seed) == (
        8,
        Config().data.history,
        0,
    )
    assert (
        f"{dump / CONFIG} does not have --task, --mlp_dims, --history_weights, --negatives, --block, "
        "--num_blocks, --num_heads, --dropout, --initial_rows, --preset, --history, --day_feature, "
        "--vocabulary" in capsys.readouterr().out
    )


def test_labels_for_another_task_than_that_of_a_checkpoint_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: RuntimeContext
) -> None:
    (tmp_path / "a.csv").write_text("user,item\n" + "".join(f"u{n % 5},i{n % 7}\n" for n in range(40)))
    monkeypatch.setattr(recorded, "with_recorded", lambda config, given: config.replaced(task="rating"))
    monkeypatch.setattr(script, "broadcast_from_rank0", lambda decided: decided())
    monkeypatch.setattr(opening, "check_same_flags", lambda config: None)
    config = Config.of(data_path=str(tmp_path), load="somewhere")
    with pytest.raises(UserError, match=r"--task rating, and the labels of .* require --task ranking;"):
        script._agree_on_flags(config, context, frozenset(), frozenset())


def test_a_default_of_a_script_does_not_go_before_the_flags_of_a_checkpoint(
    trained: Config, monkeypatch: pytest.MonkeyPatch, context: RuntimeContext
) -> None:
    monkeypatch.setattr(script, "broadcast_from_rank0", lambda decided: decided())
    monkeypatch.setattr(opening, "check_same_flags", lambda config: None)
    begun: list[Any] = []
    monkeypatch.setattr(script, "run", lambda *given: begun.extend(given))
    monkeypatch.setattr(script, "check_machine", lambda: None)
    defaults = ("--task", "ranking", "--preset", "ranking", "--negatives", "512")
    flags = ["--resume", "--negatives", "5", "--save_dir", trained.checkpoint.save_dir]
    script.run_modes(flags, {}, make_model, defaults=defaults)
    config, given, *_, added = begun
    assert added == {"task", "preset"}
    # What was given is still held against the checkpoint.
    with pytest.raises(UserError, match="--negatives 5 does not fit"):
        script._agree_on_flags(config, context, given, added)
    found = script._agree_on_flags(config, context, given - {"negatives"}, added)
    assert (found.model.task, found.model.preset, found.model.negatives) == ("rating", "auto", 0)
