"""A checkpoint is loaded, and gone on from, with the flags of its training, where none are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from config import Config, parse_given
from errors import UserError
from launch import EXAMPLE, python, succeeded
from manifest import CONFIG
from recorded import with_recorded
from tiny_dumps import add_dump

TRAINED = Config(split="random", seed=3, embedding_dim=8, mlp_dims=(4, 2), epochs=99, lr=0.5, batch_size=7)


@pytest.fixture
def trained(tmp_path: Path) -> Config:
    """The flags of a training, of which a dump lies in its save_dir."""
    config = dataclasses.replace(TRAINED, data_path=str(tmp_path), save_dir=str(tmp_path / "dumps"))
    dump = add_dump(tmp_path / "dumps", 10)
    (dump / CONFIG).write_text(json.dumps(dataclasses.asdict(config)))
    return config


def merged(trained: Config, line: str) -> Config:
    """What a command line means beside that dump."""
    config, given = parse_given([*line.split(), "--save_dir", trained.save_dir])
    return with_recorded(config, given)


def test_a_load_takes_data_and_model_from_the_dump_and_says_so(
    trained: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    default = Config()
    learning: dict[str, Any] = {"epochs": default.epochs, "lr": default.lr, "batch_size": default.batch_size}
    assert merged(trained, "--load") == dataclasses.replace(trained, load="newest", **learning)
    shown = f"--embedding_dim 8 --mlp_dims 4,2 --data_path {trained.data_path} --split random --seed 3"
    assert capsys.readouterr().out == f"as in the training: {shown}\n"


def test_a_resume_takes_what_is_learned_and_how_from_the_checkpoint(trained: Config) -> None:
    assert merged(trained, "--resume --num_workers 2") == dataclasses.replace(
        trained, resume=True, num_workers=2
    )


def test_a_flag_that_is_given_with_its_default_value_counts_as_given(trained: Config) -> None:
    found = merged(trained, f"--resume --epochs {Config.epochs} --lr {Config.lr}")
    assert (found.epochs, found.lr, found.batch_size) == (Config.epochs, Config.lr, trained.batch_size)


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


def test_ratings_that_lie_elsewhere_are_split_as_in_the_training(trained: Config, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    found = merged(trained, f"--resume --data_path {tmp_path / 'moved'}")
    assert (found.data_path, found.split, found.seed) == (str(tmp_path / "moved"), "random", 3)


def test_a_training_that_begins_takes_nothing(trained: Config, tmp_path: Path) -> None:
    for line in ("--dump --load", "--dump"):
        assert merged(trained, line).embedding_dim == Config.embedding_dim
    config, given = parse_given(["--resume", "--save_dir", str(tmp_path / "empty")])
    assert with_recorded(config, given) == config


def test_a_resumed_training_keeps_its_flags_and_names_those_that_change(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    save_dir = ("--save_dir", tmp_path / "dumps")
    first = ("--dump", "--data_path", synthetic_folder, "--epochs", 1, "--lr", 0.03, "--embedding_dim", 8)
    succeeded(python(EXAMPLE, *first, *save_dir))
    again = succeeded(python(EXAMPLE, "--resume", "--epochs", 2, "--batch_size", 2048, *save_dir))
    assert "as in the training: --embedding_dim 8 --lr 0.03 --data_path" in again
    assert "goes on with other flags than before: --epochs 2 (was 1)\n" in again
    refused = python(EXAMPLE, "--resume", "--history", 5, *save_dir)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--history 5 does not fit" in refused.stderr
