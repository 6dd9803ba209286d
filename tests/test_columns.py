"""Columns on disk: complete or absent, remade when their source changes, the same from any process."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest

import columns as columns_module
from columns import Columns, open_columns
from config import Config
from errors import UserError
from features import UNKNOWN_ROW
from synthetic import write_synthetic


@pytest.fixture
def folder(synthetic_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(synthetic_folder, tmp_path / "data", ignore=shutil.ignore_patterns(".columns"))
    return tmp_path / "data"


def column(found: Columns, name: str) -> np.ndarray:
    return np.load(Path(found.folder) / f"{name}.npy")


def test_the_time_split_tests_on_the_newest_fifth(folder: Path) -> None:
    found = open_columns(Config(data_path=str(folder)))
    time = column(found, "time")
    assert (found.num_train, found.num_validation, found.num_test) == (15_840, 160, 4_000)
    first = found.num_train + found.num_validation
    assert time[:first].max() <= time[first:].min()
    for part in ("train", "validation", "test"):
        positions = found.range_of(part)
        assert (np.diff(time[positions.start : positions.stop]) >= 0).all()


def test_the_random_split_is_drawn_by_the_seed(folder: Path) -> None:
    config = Config(data_path=str(folder), split="random", test_fraction=0.1)
    first, same, other = (open_columns(dataclasses.replace(config, seed=seed)) for seed in (1, 1, 2))
    assert first.num_test == 2_000
    assert first.folder == same.folder != other.folder
    assert (column(first, "time") != column(other, "time")).any()
    # Drawn, and not cut off at either end of time.
    test_time = column(first, "time")[first.num_train + first.num_validation :]
    assert test_time.min() < np.quantile(column(first, "time"), 0.05)


def test_values_that_training_does_not_show_have_the_unknown_row(folder: Path) -> None:
    found = open_columns(Config(data_path=str(folder), test_fraction=0.5))
    user, rows = column(found, "rows")[:, 0], column(found, "user_features")[:, 0]
    trained = np.unique(user[: found.num_train])
    only_tested = np.setdiff1d(user[found.num_train :], trained)
    assert len(only_tested) > 0
    assert (rows[only_tested] == UNKNOWN_ROW).all()
    np.testing.assert_array_equal(np.sort(rows[trained]), np.arange(1, len(trained) + 1))
    assert found.tables[0].rows == len(trained) + 1


def test_columns_are_made_once_and_remade_when_a_source_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = columns_module._make

    def counting_make(*arguments: object) -> None:
        made.append(arguments)
        make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(columns_module, "_make", counting_make)
    config = Config(data_path=str(folder))
    first = open_columns(config)
    assert open_columns(config) == first
    assert len(made) == 1
    with (folder / "ratings.dat").open("a") as file:
        file.write(f"1::{(folder / 'movies.dat').read_bytes().split(b'::')[0].decode()}::5::1046390399\n")
    assert len(column(open_columns(config), "rating")) == 20_001
    assert len(made) == 2
    monkeypatch.setattr(columns_module, "FEATURES", columns_module.FEATURES[:-1])
    assert "genres" not in [table.name for table in open_columns(config).tables]
    monkeypatch.setattr(columns_module, "FORMAT", columns_module.FORMAT + 1)
    open_columns(config)
    assert len(made) == 4


def test_a_failure_while_writing_leaves_nothing_and_the_next_call_succeeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = np.save

    def full_disk(path: Path, array: np.ndarray) -> None:
        if path.name == "rating.npy":
            raise OSError(28, "No space left on device")
        save(path, array)

    config = Config(data_path=str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full_disk)
        with pytest.raises(UserError, match=r"cannot be stored in .*No space left on device.*--cache_dir"):
            open_columns(config)
    assert [path.name for path in (folder / ".columns").iterdir() if path.is_dir()] == []
    # What a killed process left is swept away by the next.
    (folder / ".columns" / ".making-1").mkdir()
    open_columns(config)
    assert len([path for path in (folder / ".columns").iterdir() if path.is_dir()]) == 1


def test_what_others_make_in_a_cache_dir_stays(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    others = (".making-step-000000500/part-00001.safetensors", ".making-tea/x", ".making-7/thesis.txt")
    for name in others:
        (cache / name).parent.mkdir(parents=True)
        (cache / name).touch()
    (cache / ".making-8").mkdir()
    (cache / ".making-8" / "rows.npy").touch()
    open_columns(Config(data_path=str(folder), cache_dir=str(cache)))
    assert all((cache / name).is_file() for name in others)
    assert not (cache / ".making-8").exists()


@pytest.mark.parametrize("damage", ["truncated manifest", "missing manifest", "short column"])
def test_damaged_columns_are_made_again(
    folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(data_path=str(folder))
    whole = open_columns(config)
    manifest, rating = (Path(whole.folder) / name for name in ("manifest.json", "rating.npy"))
    if damage == "truncated manifest":
        manifest.write_text(manifest.read_text()[:100])
    elif damage == "missing manifest":
        manifest.unlink()
    else:
        rating.write_bytes(rating.read_bytes()[:-4])
    assert open_columns(config) == whole
    assert "are damaged and are made again" in capsys.readouterr().out


def test_a_folder_that_forbids_writing_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("movielens.DATA_ROOT", folder.parent / "elsewhere")
    folder.chmod(0o555)
    try:
        found = open_columns(Config(data_path=str(folder)))
        assert not (folder / ".columns").exists()
        assert Path(found.folder).is_relative_to(folder.parent / "elsewhere")
        chosen = open_columns(Config(data_path=str(folder), cache_dir=str(folder.parent / "chosen")))
        assert Path(chosen.folder).is_relative_to(folder.parent / "chosen")
    finally:
        folder.chmod(0o755)


def _open(folder: str, start: object, results: object) -> None:
    start.wait(30)  # type: ignore[attr-defined]
    results.put(open_columns(Config(data_path=folder)).folder)  # type: ignore[attr-defined]


def test_two_launches_at_once_share_one_set_of_columns(folder: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=_open, args=(str(folder), start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert len(found) == 1
    assert len([path for path in (folder / ".columns").iterdir() if path.is_dir()]) == 1


def test_a_fraction_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", 1_000, seed=0)
    with pytest.raises(
        UserError, match=r"1000 ratings with --test_fraction 0.0001 .* leaves 990 for training and 0 "
    ):
        open_columns(Config(data_path=str(tmp_path / "data"), test_fraction=0.0001))


def test_the_oracle_is_measured_on_the_test_ratings(folder: Path) -> None:
    found = open_columns(Config(data_path=str(folder)))
    manifest = json.loads((Path(found.folder) / "manifest.json").read_text())
    assert manifest["baselines"] == found.baselines
    oracle, biases, mean = (found.baselines["rating"][name] for name in ("oracle", "biases", "global mean"))
    assert oracle["rmse"] < biases["rmse"] < mean["rmse"]
    assert oracle["log_loss"] < biases["log_loss"] < mean["log_loss"]
    whole = json.loads((folder / "oracle.json").read_text())["rmse"]
    assert oracle["rmse"] == pytest.approx(whole, rel=0.05)


def stored(found: Columns, split: str) -> list[tuple[int, int, int]]:
    """User, movie and time of the ratings of a split."""
    part = slice(found.range_of(split).start, found.range_of(split).stop)
    user, movie, _, _ = column(found, "rows")[part].T
    return list(zip(user.tolist(), movie.tolist(), column(found, "time")[part].tolist(), strict=True))


@pytest.mark.parametrize("split", ["time", "random", "leave_one_out"])
def test_training_validation_and_test_share_no_rating_and_leave_none_out(folder: Path, split: str) -> None:
    found = open_columns(Config(data_path=str(folder), split=split, validation_fraction=0.01))
    parts = [stored(found, part) for part in ("train", "validation", "test")]
    assert list(map(len, parts)) == [found.num_train, found.num_validation, found.num_test]
    assert found.num_validation == round(0.01 * (20_000 - found.num_test))
    # No movie is rated twice by one user here.
    assert len({rating for part in parts for rating in part}) == 20_000


def test_leave_one_out_tests_on_each_users_newest_and_validates_on_the_one_before(folder: Path) -> None:
    found = open_columns(Config(data_path=str(folder), split="leave_one_out", validation_fraction=0.5))
    newest: dict[int, list[int]] = {}
    for part in ("train", "validation", "test"):
        for user, _, time in stored(found, part):
            newest.setdefault(user, []).append(time)
    assert {user: time for user, _, time in stored(found, "test")} == {
        user: max(times) for user, times in newest.items()
    }
    assert found.num_test == found.num_validation == len(newest)
    for user, _, time in stored(found, "validation"):
        assert time == sorted(newest[user])[-2]


def test_a_user_with_one_rating_has_none_in_the_test_and_is_counted(tmp_path: Path) -> None:
    lines = ["userId,movieId,rating,timestamp", "1,1,5,10", "1,2,3,20", "1,3,4,20", "2,1,5,30"]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "movies.csv").write_text(
        "movieId,title,genres\n" + "".join(f"{n},T,Drama\n" for n in (1, 2, 3))
    )
    found = open_columns(Config(data_path=str(tmp_path), split="leave_one_out"))
    # Of two in one second the later one in the file is the newer.
    assert found.ratings("test").tolist() == [4]
    assert found.ratings("train").tolist() == [5, 3, 5]
    assert any("1 users have a single rating" in note for note in found.notes)
    # A hundredth of three ratings is none.
    assert any("no rating is for validation" in note for note in found.notes)


def test_the_validation_part_is_drawn_by_the_seed(folder: Path) -> None:
    for split in ("leave_one_out", "time"):
        config = Config(data_path=str(folder), split=split, validation_fraction=0.002)
        first, second = (open_columns(dataclasses.replace(config, seed=seed)) for seed in (1, 2))
        assert first.num_validation == round(0.002 * (20_000 - first.num_test))
        assert stored(first, "validation") != stored(second, "validation")
        assert stored(first, "test") == stored(second, "test")
