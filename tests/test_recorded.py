"""A dump is loaded with the flags of its training, where none are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from config import Config
from manifest import CONFIG
from recorded import with_recorded
from tiny_dumps import add_dump

TRAINED = Config(data_path="ratings", split="random", seed=3, embedding_dim=8, mlp_dims=(4, 2), epochs=99)


@pytest.fixture
def save_dir(tmp_path: Path) -> str:
    """A folder with a dump of that training."""
    dump = add_dump(tmp_path, 10)
    (dump / CONFIG).write_text(json.dumps(dataclasses.asdict(TRAINED)))
    return str(tmp_path)


def test_a_load_takes_data_and_model_from_the_dump_and_says_so(
    save_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(load="newest", save_dir=save_dir)
    expected = dataclasses.replace(TRAINED, load="newest", save_dir=save_dir, epochs=config.epochs)
    assert with_recorded(config) == expected
    assert "--embedding_dim 8 --mlp_dims 4,2 --data_path ratings --split random" in capsys.readouterr().out


def test_flags_that_are_given_count(save_dir: str) -> None:
    given = Config(load="newest", save_dir=save_dir, data_path="others", embedding_dim=16)
    found = with_recorded(given)
    assert (found.data_path, found.split, found.seed) == ("others", "time", 0)
    assert (found.embedding_dim, found.mlp_dims) == (16, (4, 2))


def test_a_training_that_begins_takes_nothing(tmp_path: Path) -> None:
    config = Config(resume=True, save_dir=str(tmp_path))
    assert with_recorded(config) == config
