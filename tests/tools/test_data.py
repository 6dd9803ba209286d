"""The doctor's lines about the data, and what their batches need."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens import source as movielens
from recsuite.datasets.preparation.cache import open_columns
from recsuite.tools.doctor import examined
from recsuite.tools.examination import data as data_checks
from recsuite.tools.examination.machine import Need


def test_data_and_columns_are_named_with_their_sizes(synthetic_folder: Path, tmp_path: Path) -> None:
    config = Config.of(data_path=str(synthetic_folder), cache_dir=str(tmp_path / "cache"))
    data, cache = data_checks.check_data(config)
    assert (data.state, cache.state) == ("ok", "ok")
    assert data.text.startswith(f"{synthetic_folder}: 4 files, 0.")
    assert "no columns of these data yet, made at the first start" in cache.text
    assert not (tmp_path / "cache").exists()
    folder = open_columns(config).folder
    _, cache = data_checks.check_data(config)
    assert cache.state == "ok"
    assert cache.text.startswith(f"{folder}: ")


def test_data_that_are_not_there_yet_are_neither_drawn_nor_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(movielens, "DATA_ROOT", tmp_path)
    data, cache = data_checks.check_data(Config())
    assert (data.state, cache.state) == ("ok", "ok")
    assert data.text.endswith("synthetic-1000000-seed0: not there yet, drawn at the first start")
    data, _ = data_checks.check_data(Config.of(dataset="ml-1m"))
    assert data.state == "warning"
    assert data.text == f"{tmp_path / 'ml-1m'}: not there yet, downloaded at the first start"
    assert "network" in data.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_ratings_is_a_fault(tmp_path: Path) -> None:
    finding = examined("data", lambda: data_checks.check_data(Config.of(data_path=str(tmp_path))))[0]
    assert finding.state == "fault"
    assert "holds no table of events" in finding.text
    assert finding.remedy.startswith("give a file or a folder with CSV")


def test_files_of_another_set_are_a_fault(synthetic_folder: Path) -> None:
    config = Config.of(data_path=str(synthetic_folder), dataset="ml-32m")
    finding = examined("data", lambda: data_checks.check_data(config))[0]
    assert finding.state == "fault"
    assert "does not hold ml-32m but ratings.dat" in finding.text
    assert finding.remedy.startswith("give another --data_path")


def test_a_file_that_cannot_be_read_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, synthetic_folder: Path
) -> None:
    real = Path.open

    # Root may read anything, so a mode would not do.
    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "ratings.dat":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    (finding,) = data_checks.check_data(Config.of(data_path=str(synthetic_folder)))
    assert finding.state == "fault"
    assert finding.text == f"{synthetic_folder / 'ratings.dat'} cannot be read (Permission denied)"


def test_a_cache_without_room_is_a_warning_and_one_that_cannot_be_written_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "not" / "yet"

    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(data_checks.shutil, "disk_usage", lambda path: Usage(200 * 2**20))
    # A rating takes 144 bytes.
    assert data_checks.check_cache(cache, None, num_ratings=1_000_000).state == "ok"
    finding = data_checks.check_cache(cache, None, num_ratings=10_000_000)
    assert finding.state == "warning"
    assert finding.text.endswith("200.0 MiB free for up to 1.6 GiB")
    assert "--cache_dir" in finding.remedy
    monkeypatch.setattr(data_checks.os, "access", lambda path, mode: path != tmp_path)
    finding = data_checks.check_cache(cache, None, num_ratings=0)
    assert (finding.state, finding.remedy) == (
        "fault",
        f"{tmp_path} cannot be written: give another --cache_dir",
    )


def test_the_need_of_the_workers_is_that_of_their_ring(tmp_path: Path) -> None:
    config = Config.of(batch_size=1000, history=0, prefetch_factor=4, num_workers=3)
    config = config.replaced(data_path=str(tmp_path / "none"), dataset="ml-1m")
    need = data_checks.ring_need(config, num_ranks=2, num_workers=3)
    assert need.num_bytes % (2 * 3 * 7) == 0
    assert "7 slots of 0.2 MiB for each of 2 x 3 workers" in need.words
    with_history = data_checks.ring_need(config.replaced(history=100), num_ranks=2, num_workers=3)
    assert with_history.num_bytes - need.num_bytes == 2 * 3 * 7 * 1000 * (100 * 12 + 4)
    assert data_checks.ring_need(config, num_ranks=2, num_workers=0) == Need(0, "nothing without workers")


def test_the_need_assumed_before_the_columns_are_made_is_close_to_theirs(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    config = Config.of(data_path=str(synthetic_folder), cache_dir=str(tmp_path))
    assumed = data_checks.ring_need(config, 1, 1).num_bytes
    open_columns(config)
    real = data_checks.ring_need(config, 1, 1).num_bytes
    assert real <= assumed < 2 * real
