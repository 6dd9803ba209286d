"""Columns on disk: complete or absent, remade when their source changes, the same from any process."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.config.presets import AUTO
from recsuite.datasets.columns import Columns, MappedColumn
from recsuite.datasets.movielens import source as movielens
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.opening import describe_validation
from recsuite.datasets.preparation import cache, making
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import UNKNOWN_ROW, RawData
from recsuite.datasets.source import locate
from recsuite.errors import UserError
from recsuite.files import parsed, sealed
from tests.support.csv_ratings import Rating, write_ratings
from tests.support.launch import started, wait_for


@pytest.fixture
def folder(synthetic_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(synthetic_folder, tmp_path / "data", ignore=shutil.ignore_patterns(".columns"))
    return tmp_path / "data"


def column(found: Columns, name: str) -> np.ndarray:
    return np.load(Path(found.folder) / f"{name}.npy")


def test_the_time_split_tests_on_the_newest_fifth(folder: Path) -> None:
    found = open_columns(Config.of(data_path=str(folder)))
    time = column(found, "time")
    assert (found.num_train, found.num_validation, found.num_test) == (15_200, 800, 4_000)
    first = found.num_train + found.num_validation
    assert time[:first].max() <= time[first:].min()
    for part in ("train", "validation", "test"):
        positions = found.range_of(part)
        assert (np.diff(time[positions.start : positions.stop]) >= 0).all()


def test_the_random_split_is_drawn_by_the_seed(folder: Path) -> None:
    config = Config.of(data_path=str(folder), split="random", test_fraction=0.1)
    first, same, other = (open_columns(config.replaced(seed=seed)) for seed in (1, 1, 2))
    assert first.num_test == 2_000
    assert first.folder == same.folder != other.folder
    assert (column(first, "time") != column(other, "time")).any()
    # Drawn, and not cut off at either end of time.
    test_time = column(first, "time")[first.num_train + first.num_validation :]
    assert test_time.min() < np.quantile(column(first, "time"), 0.05)


def test_values_that_training_does_not_show_have_the_unknown_row(folder: Path) -> None:
    found = open_columns(Config.of(data_path=str(folder), test_fraction=0.5))
    user, rows = column(found, "rows")["user"], column(found, "user_features")["features"][:, 0]
    trained = np.unique(user[: found.num_train])
    only_tested = np.setdiff1d(user[found.num_train :], trained)
    assert len(only_tested) > 0
    assert (rows[only_tested] == UNKNOWN_ROW).all()
    np.testing.assert_array_equal(np.sort(rows[trained]), np.arange(1, len(trained) + 1))
    assert found.tables[0].rows == len(trained) + 1


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupt_or_error_while_columns_are_made_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def fail(*_: object) -> None:
        assert [*(folder / ".columns").glob(".making-*/rating.npy")]
        raise fault

    monkeypatch.setattr(making, "write_histories", fail)
    with pytest.raises(type(fault)):
        open_columns(Config.of(data_path=str(folder)))
    assert {path.name for path in (folder / ".columns").iterdir()} <= {".lock", "parts"}


def test_columns_are_made_once_and_remade_when_a_source_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = making.make_columns

    def counting_make(*arguments: object) -> None:
        made.append(arguments)
        make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(making, "make_columns", counting_make)
    config = Config.of(data_path=str(folder))
    first = open_columns(config)
    assert open_columns(config) == first
    assert len(made) == 1
    with (folder / "ratings.dat").open("a") as file:
        file.write(f"1::{(folder / 'movies.dat').read_bytes().split(b'::')[0].decode()}::5::1046390399\n")
    assert len(column(open_columns(config), "rating")) == 20_001
    assert len(made) == 2
    monkeypatch.setattr(movielens, "SCHEMA", dataclasses.replace(SCHEMA, features=SCHEMA.features[:-1]))
    assert "genres" not in [table.name for table in open_columns(config).tables]
    monkeypatch.setattr(cache, "VERSION", 0)
    open_columns(config)
    assert len(made) == 4


def test_a_failure_while_writing_leaves_nothing_and_the_next_call_succeeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate
    reserved: list[int] = []

    def full_disk(descriptor: int, first: int, size: int) -> None:
        reserved.append(size)
        # After users, items and labels.
        if len(reserved) > 3:
            raise OSError(28, "No space left on device")
        reserve(descriptor, first, size)

    config = Config.of(data_path=str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full_disk)
        with pytest.raises(
            UserError, match=r"Cannot write the columns of .* to .*No space left on device.*--cache_dir"
        ):
            open_columns(config)
    # What was read of each file stays.
    assert [path.name for path in (folder / ".columns").iterdir() if path.is_dir()] == ["parts"]
    # What a killed process left is swept away by the next.
    (folder / ".columns" / ".making-1").mkdir()
    open_columns(config)
    assert len([path for path in (folder / ".columns").iterdir() if path.is_dir()]) == 2


def test_foreign_files_in_a_cache_dir_stay(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    others = (".making-step-000000500/part-00001.safetensors", ".making-tea/x")
    for name in others:
        (cache / name).parent.mkdir(parents=True)
        (cache / name).touch()
    (cache / ".making-8").mkdir()
    (cache / ".making-8" / "rows.npy").touch()
    open_columns(Config.of(data_path=str(folder), cache_dir=str(cache)))
    assert all((cache / name).is_file() for name in others)
    assert not (cache / ".making-8").exists()


def test_a_program_error_while_checking_columns_is_not_reported_as_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_columns(Config.of(data_path=str(folder)))
    for fault in (TypeError, ValueError, KeyError):
        mock = Mock(side_effect=fault("of the program"))
        monkeypatch.setattr("recsuite.datasets.columns.check_file", mock)
        with pytest.raises(fault, match="of the program"):
            open_columns(Config.of(data_path=str(folder)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tables", "it has no table of the feature user"),
        ("baselines", "it has no baselines for predictions"),
    ],
)
def test_the_missing_baseline_or_identity_of_columns_is_named(
    folder: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = open_columns(Config.of(data_path=str(folder)))
    manifest = Path(whole.folder) / "manifest.json"
    found = json.loads(manifest.read_text())
    if name == "tables":
        found["tables"] = [table for table in found["tables"] if table["feature"]["name"] != "user"]
    else:
        found["baselines"]["user"] = found["baselines"].pop("predictions")
    manifest.write_text(json.dumps(sealed(found)))
    assert open_columns(Config.of(data_path=str(folder))) == whole
    assert words in capsys.readouterr().out


def test_columns_whose_manifest_cannot_be_read_are_made_again_with_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Path(open_columns(Config.of(data_path=str(folder))).folder) / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    open_columns(Config.of(data_path=str(folder)))
    assert "are damaged and are made again: Cannot read manifest.json: Is a directory." in (
        capsys.readouterr().out
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def truncate(chance: random.Random, folder: Path, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def flip(chance: random.Random, folder: Path, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def remove(chance: random.Random, folder: Path, path: Path) -> None:
    path.unlink()


def become_a_folder(chance: random.Random, folder: Path, path: Path) -> None:
    path.unlink()
    (path / "within").mkdir(parents=True)


def stand_beside(chance: random.Random, folder: Path, path: Path) -> None:
    (folder / "another.npy").write_bytes(path.read_bytes()[:50])


def forge(chance: random.Random, manifest: Path) -> None:
    """Change one value of the manifest, perhaps remove another, and have its own digest agree with that."""
    found = json.loads(manifest.read_text())
    where = found
    while isinstance(where, dict | list) and where:
        parent, key = where, chance.choice(sorted(where) if isinstance(where, dict) else range(len(where)))
        where = parent[key]
        if chance.random() < 0.3:
            break
    others: list[Any] = [None, -1, 2**70, "x", [], {}, [[]], {"a": 1}, 0.5, True]
    parent[key] = chance.choice([other for other in others if other != parent[key]])
    if chance.random() < 0.3:
        where = chance.choice([found, found.get("tables"), found.get("files")])
        for held in where if isinstance(where, list) else [where]:
            if isinstance(held, dict) and held:
                held.pop(chance.choice(sorted(held)))
    manifest.write_text(json.dumps(sealed(found)))


@pytest.fixture
def parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of small data, from which columns are made as often as need be."""
    write_synthetic(tmp_path / "data", 1_000, seed=0)
    config = Config.of(data_path=str(tmp_path / "data"))
    raw = read(locate(config.data, config.runtime.seed), config.data)
    # What is made again is always the same; to parse it anew would take most of the time.
    monkeypatch.setattr("recsuite.datasets.preparation.cache.read", lambda *arguments: raw)
    return config


def test_a_manifest_that_was_forged_with_its_digest_never_is_a_fault_of_the_program(
    parsed_once: Config,
) -> None:
    config = parsed_once
    whole = open_columns(config)
    before = contents(Path(whole.folder))
    made_again = 0
    for seed in range(20):
        forge(random.Random(seed), Path(whole.folder) / "manifest.json")
        found = open_columns(config)
        # Another number or text of the right type is no fault that can be seen.
        assert {name: type(value) for name, value in vars(found).items()} == {
            name: type(value) for name, value in vars(whole).items()
        }
        made_again += contents(Path(whole.folder)) == before
        (Path(whole.folder) / "manifest.json").write_bytes(before["manifest.json"])
    assert made_again > 10


def become_nonsense(chance: random.Random, folder: Path, path: Path) -> None:
    nonsense = [
        "",
        "null",
        "[]",
        "{}",
        "7",
        "[" * 100_000,
        '"\\ud800"',
        '{"xxh3_128": "\\ud800"}',
        "9" * 5000,
    ]
    (folder / "manifest.json").write_text(chance.choice(nonsense))


@pytest.mark.parametrize(
    "damage",
    [truncate, flip, remove, become_a_folder, stand_beside, become_nonsense],
)
def test_damage_of_any_kind_is_repaired_or_changes_nothing(
    damage: Callable[[random.Random, Path, Path], None],
    parsed_once: Config,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = parsed_once
    whole = open_columns(config)
    before = contents(Path(whole.folder))
    for seed in range(3):
        chance = random.Random(seed)
        path = Path(whole.folder) / chance.choice(sorted(before))
        damage(chance, Path(whole.folder), path)
        is_same = all(child.is_file() for child in Path(whole.folder).iterdir()) and (
            contents(Path(whole.folder)) == before
        )
        capsys.readouterr()
        assert open_columns(config) == whole
        assert contents(Path(whole.folder)) == before
        assert ("are damaged and are made again" in capsys.readouterr().out) != is_same


def test_ratings_that_changed_within_one_size_and_time_are_read_again(folder: Path) -> None:
    config = Config.of(data_path=str(folder))
    first = open_columns(config)
    path = folder / "ratings.dat"
    before, line = path.stat(), path.read_bytes().splitlines()[0]
    fields = line.split(b"::")
    other = b"::".join([*fields[:2], b"1" if fields[2] == b"5" else b"5", fields[3]])
    path.write_bytes(path.read_bytes().replace(line, other, 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    second = open_columns(config)
    assert second.folder != first.folder
    assert (np.sort(column(second, "rating")) != np.sort(column(first, "rating"))).any()


def test_files_that_change_while_they_are_read_leave_no_columns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing_read(*arguments: Any) -> RawData:
        raw = read(*arguments)
        path = folder / "ratings.dat"
        path.write_bytes(path.read_bytes()[:-1])
        return raw

    monkeypatch.setattr("recsuite.datasets.preparation.cache.read", changing_read)
    with pytest.raises(UserError, match="changed while they were read; start again"):
        open_columns(Config.of(data_path=str(folder)))
    assert sorted(path.name for path in (folder / ".columns").iterdir()) == [".lock", "parts"]


def test_readers_of_columns_keep_their_files_during_a_rebuild(folder: Path) -> None:
    config = Config.of(data_path=str(folder))
    whole = Path(open_columns(config).folder)
    before = contents(whole)
    (whole / "time.npy").write_bytes(before["time.npy"][:-8])
    mapped = MappedColumn(whole / "rows.npy")
    faults, is_over = [], threading.Event()

    def use() -> None:
        while not is_over.is_set():
            for name in before.keys() - {"time.npy"}:
                try:
                    if (whole / name).read_bytes() != before[name]:
                        faults.append(name)
                except OSError as error:
                    faults.append(str(error))

    user = threading.Thread(target=use)
    user.start()
    open_columns(config)
    is_over.set()
    user.join(30)
    assert faults == []
    mapped.check()
    assert mapped.values.tobytes() in before["rows.npy"]
    assert contents(whole) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can become somebody else")
def test_a_cache_of_another_user_is_used_if_whole_and_otherwise_refused(
    synthetic_folder: Path,
) -> None:
    # Not within tmp_path, which nobody else may enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(synthetic_folder, folder / "data", ignore=shutil.ignore_patterns(".columns"))
        folder.chmod(0o755)
        config = Config.of(data_path=str(folder / "data"), cache_dir=str(folder / "cache"))
        whole = open_columns(config)
        (folder / "cache" / ".lock").chmod(0o600)
        os.seteuid(65_534)
        try:
            assert open_columns(config) == whole
            os.seteuid(0)
            flip(random.Random(0), Path(whole.folder), Path(whole.folder) / "rows.npy")
            os.seteuid(65_534)
            with pytest.raises(
                UserError, match=r"Cannot write the columns of .* to .*cache: Permission den.*--cache_dir"
            ):
                open_columns(config)
        finally:
            os.seteuid(0)


def test_a_folder_that_forbids_writing_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsuite.files.DATA_ROOT", folder.parent / "elsewhere")
    folder.chmod(0o555)
    try:
        found = open_columns(Config.of(data_path=str(folder)))
        assert not (folder / ".columns").exists()
        assert Path(found.folder).is_relative_to(folder.parent / "elsewhere")
        chosen = open_columns(Config.of(data_path=str(folder), cache_dir=str(folder.parent / "chosen")))
        assert Path(chosen.folder).is_relative_to(folder.parent / "chosen")
    finally:
        folder.chmod(0o755)


OPENING = """
import sys
from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
print("ready", flush=True)
sys.stdin.readline()
print(open_columns(Config.of(data_path=sys.argv[1])).folder)
"""


def test_two_launches_at_once_share_one_set_of_columns(folder: Path) -> None:
    command = [sys.executable, "-c", OPENING, str(folder)]
    with started(command, stdin=subprocess.PIPE) as one, started(command, stdin=subprocess.PIPE) as other:
        for process in (one, other):
            wait_for(process, "ready")
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        found = {process.communicate(timeout=150)[0].splitlines()[-1] for process in (one, other)}
    assert len(found) == 1
    assert len([*(folder / ".columns").glob("time-*")]) == 1


def test_a_fraction_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", 1_000, seed=0)
    with pytest.raises(
        UserError, match=r"1000 ratings with --test_fraction 0.0001 .* leaves 900 for training and 0 "
    ):
        open_columns(Config.of(data_path=str(tmp_path / "data"), test_fraction=0.0001))


def test_a_metric_that_is_not_defined_is_null_in_the_manifest_and_a_dash_to_people(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", 1_000, seed=0)
    # Of so few validation ratings there is no calibration, and no log loss.
    config = Config.of(data_path=str(tmp_path / "data"), validation_fraction=0.01)
    for _ in range(2):
        found = open_columns(config)
        assert math.isnan(found.baselines["predictions"]["biases"]["log_loss"])
    manifest = parsed((Path(found.folder) / "manifest.json").read_bytes())
    assert manifest["baselines"]["predictions"]["biases"]["log_loss"] is None


def test_the_oracle_is_measured_on_the_test_ratings(folder: Path) -> None:
    found = open_columns(Config.of(data_path=str(folder)))
    manifest = json.loads((Path(found.folder) / "manifest.json").read_text())
    assert manifest["baselines"] == found.baselines
    oracle, biases, mean = (
        found.baselines["predictions"][name] for name in ("oracle", "biases", "global mean")
    )
    assert oracle["rmse"] < biases["rmse"] < mean["rmse"]
    assert oracle["log_loss"] < biases["log_loss"] < mean["log_loss"]
    whole = json.loads((folder / "oracle.json").read_text())["rmse"]
    assert oracle["rmse"] == pytest.approx(whole, rel=0.05)


def stored(found: Columns, split: str) -> list[tuple[int, int, int]]:
    """User, movie and time of the ratings of a split."""
    part = slice(found.range_of(split).start, found.range_of(split).stop)
    user, movie = (column(found, "rows")[name][part].tolist() for name in ("user", "item"))
    return list(zip(user, movie, column(found, "time")[part].tolist(), strict=True))


@pytest.mark.parametrize("split", ["time", "random", "leave_one_out"])
def test_training_validation_and_test_together_have_each_rating_once(folder: Path, split: str) -> None:
    found = open_columns(Config.of(data_path=str(folder), split=split, validation_fraction=0.01))
    parts = [stored(found, part) for part in ("train", "validation", "test")]
    assert list(map(len, parts)) == [found.num_train, found.num_validation, found.num_test]
    assert found.num_validation == round(0.01 * (20_000 - found.num_test))
    # No movie is rated twice by one user here.
    assert len({rating for part in parts for rating in part}) == 20_000


def test_leave_one_out_tests_on_each_users_newest_and_validates_on_the_one_before(folder: Path) -> None:
    found = open_columns(Config.of(data_path=str(folder), split="leave_one_out", validation_fraction=0.5))
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
    write_ratings(tmp_path, [(1, 1, 5, 10), (1, 2, 3, 20), (1, 3, 4, 20), (2, 1, 5, 30)])
    found = open_columns(Config.of(data_path=str(tmp_path), split="leave_one_out"))
    # Of two in one second the later one in the file is the newer.
    assert found.labels("test").tolist() == [4]
    assert found.labels("train").tolist() == [5, 3, 5]
    assert any("1 user has a single rating" in note for note in found.notes)
    # A hundredth of three ratings is none.
    assert any("no rating is for validation" in note for note in found.notes)


def test_the_validation_part_is_drawn_by_the_seed(folder: Path) -> None:
    for split in ("leave_one_out", "time"):
        config = Config.of(data_path=str(folder), split=split, validation_fraction=0.002)
        first, second = (open_columns(config.replaced(seed=seed)) for seed in (1, 2))
        assert first.num_validation == round(0.002 * (20_000 - first.num_test))
        assert stored(first, "validation") != stored(second, "validation")
        assert stored(first, "test") == stored(second, "test")


@pytest.mark.parametrize(
    ("fraction", "number", "line"),
    [
        (AUTO, 800, "800 ratings of 16,000 outside the test (--validation_fraction auto)"),
        (0.05, 800, None),
        (
            0.01,
            160,
            "160 ratings of 16,000 outside the test (--validation_fraction 0.01), which are few; auto takes "
            "800",
        ),
        (0.0, 0, None),
    ],
)
def test_the_share_of_validation_follows_the_number_of_ratings_and_few_are_reported(
    folder: Path, fraction: float | str, number: int, line: str | None
) -> None:
    config = Config.of(data_path=str(folder), validation_fraction=fraction)
    found = open_columns(config)
    assert found.num_validation == number
    lines = describe_validation(found, config.data)
    assert len(lines) == (line is not None)
    assert all(each == f"the epoch is chosen by {line}" for each in lines)


def write_csv(folder: Path, ratings: list[Rating]) -> Config:
    write_ratings(folder, ratings)
    return Config.of(data_path=str(folder), validation_fraction=0.0)


def test_a_test_that_begins_among_ratings_of_one_time_is_reported(tmp_path: Path) -> None:
    # Of ten ratings six have the time 20; the test is the last four, three of which are among them.
    times = [10, 20, 20, 20, 11, 20, 20, 20, 12, 30]
    ratings = [(number, number % 3, 4.0, time) for number, time in enumerate(times)]
    config = write_csv(tmp_path, ratings).replaced(test_fraction=0.4)
    found = open_columns(config)
    told = "6 ratings of one time (1970-01-01T00:00:20): the last 3 of them in the file are in it"
    assert f"the test begins among {told}" in found.notes
    # It begins after them, and then at them.
    for fraction in (0.1, 0.7):
        notes = open_columns(config.replaced(test_fraction=fraction)).notes
        assert not any("of one time" in note for note in notes)


def test_ratings_that_all_have_one_time_cannot_be_split_by_it(tmp_path: Path) -> None:
    config = write_csv(tmp_path, [(number, number % 3, 4.0, 7) for number in range(20)])
    with pytest.raises(
        UserError,
        match=r"All 20 ratings have the time 1970-01-01T00:00:07, so --split time .* give --split random",
    ):
        open_columns(config)
    assert open_columns(config.replaced(split="random")).num_test == 4


def test_users_whose_newest_ratings_have_one_time_are_counted(tmp_path: Path) -> None:
    # The newest of user 1 is alone, those of user 2 are two, those of user 3 are three, user 4 has only one.
    times = {1: [5, 9], 2: [1, 8, 8], 3: [2, 2, 2], 4: [2]}
    ratings = [(user, movie, 4.0, time) for user, of in times.items() for movie, time in enumerate(of)]
    found = open_columns(write_csv(tmp_path, ratings).replaced(split="leave_one_out"))
    assert [note for note in found.notes if "users have" in note or "user has" in note] == [
        "1 user has a single rating, which is for training: the test has none",
        "2 of 3 users have several ratings of the time of their newest: "
        "the last of them in the file is in the test",
    ]
