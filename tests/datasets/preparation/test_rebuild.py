"""Columns made again by --rebuild: once for each launch, without disturbing readers of the old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets.columns import MappedColumn
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import RawData
from recsuite.errors import UserError
from tests.support.launch import SUPPORT, succeeded, torchrun

AGAIN = "are made again, as --rebuild asks"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of small data without columns."""
    write_synthetic(tmp_path / "data", 1_000, seed=0)
    return Config.of(data_path=str(tmp_path / "data"))


def test_rebuild_makes_existing_columns_again_with_a_message(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = open_columns(config.replaced(rebuild=True))
    # There were none.
    assert AGAIN not in capsys.readouterr().out
    before = {path.name: path.stat().st_ino for path in Path(whole.folder).iterdir()}
    mapped = MappedColumn(Path(whole.folder) / "rows.npy")
    values = mapped.values.copy()
    assert open_columns(config.replaced(rebuild=True)) == whole
    said = capsys.readouterr().out
    assert f"the columns in {whole.folder} {AGAIN}" in said
    assert "the new columns are the same as before, to the last bit" in said
    after = {path.name: path.stat().st_ino for path in Path(whole.folder).iterdir()}
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)
    # Who had them before has them still.
    mapped.check()
    np.testing.assert_array_equal(mapped.values, values)
    assert open_columns(config) == whole
    assert capsys.readouterr().out == ""


def test_rebuilt_columns_with_other_content_get_another_folder(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = open_columns(config)
    before = {path.name: path.read_bytes() for path in Path(old.folder).iterdir()}

    def other_read(*arguments: Any) -> RawData:
        raw = read(*arguments)
        raw.events.label[:] = 3.0
        return raw

    monkeypatch.setattr("recsuite.datasets.preparation.cache.read", other_read)
    new = open_columns(config.replaced(rebuild=True))
    assert new.folder == f"{old.folder}.2"
    assert f"the new columns differ and lie in {new.folder}; the earlier ones stay" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in Path(old.folder).iterdir()} == before
    # From now on these are the columns.
    assert open_columns(config) == new
    monkeypatch.undo()
    third = open_columns(config.replaced(rebuild=True))
    assert third.folder == f"{old.folder}.3"
    assert third.files == old.files
    assert open_columns(config) == third


def test_damaged_columns_are_made_again_in_their_place(config: Config) -> None:
    whole = open_columns(config)
    (Path(whole.folder) / "time.npy").write_bytes(b"")
    assert open_columns(config.replaced(rebuild=True)) == whole


def test_a_launch_rebuilds_columns_once_for_all_ranks_modes_and_restarts(config: Config) -> None:
    open_columns(config)
    script = SUPPORT / "rebuild_ranks.py"
    result = torchrun(2, "--max_restarts=1", script, config.data.data_path, timeout=100)
    said = succeeded(result)
    # Two attempts of two ranks, which opened them twice each.
    assert said.count(" opened ") == 8
    assert said.count(AGAIN) == 1
    # Another launch is another matter.
    assert succeeded(torchrun(1, "--max_restarts=1", script, config.data.data_path)).count(AGAIN) == 1


@pytest.mark.parametrize("mode", ["--doctor", "--recommend --user 5", "--export served"])
def test_a_mode_that_makes_no_columns_refuses_it(mode: str) -> None:
    with pytest.raises(UserError, match=rf"^--rebuild cannot be used with {mode.split()[0]}\.$"):
        parse_args(["--rebuild", *mode.split()])


def test_rebuild_is_a_flag_of_the_command_line_alone() -> None:
    assert parse_args(["--rebuild"]).data.rebuild
    assert not Config().data.rebuild
