"""Partitions of a log, by prepare.py on Ray Data and by the page's DuckDB, beside a computation in pandas."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import prepare
from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from tests.support.documents import blocks, commands
from tests.support.launch import ROOT

SCRIPT = ROOT / "example" / "prepare.py"
PAGE = ROOT / "docs" / "extras" / "prepare.md"
KEYS = ["user_id", "item_id", "time"]
EVENTS = [*KEYS, "stars", "device"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start Ray once for all tests. Its processes import prepare.py."""
    ray = pytest.importorskip("ray", reason="needs the package ray, of requirements-dev.txt")
    env = {"PYTHONPATH": f"{SCRIPT.parent}:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}
    with mock.patch.dict(os.environ, env):
        ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)
    yield
    ray.shutdown()


def log_of(number: int) -> pd.DataFrame:
    """A log of 1,000 users and 20 items with repeats, and seconds that several events share."""
    draw = np.random.default_rng(0)
    columns = {
        "user_id": draw.integers(0, 1_000, number),
        "item_id": draw.integers(0, 20, number),
        "time": 1_600_000_000 + draw.integers(0, number // 2, number) * 1_000,
        "stars": draw.integers(1, 6, number),
        "device": draw.choice(["phone", "tablet"], number),
    }
    return pd.DataFrame(columns)


def write_log(folder: Path) -> pd.DataFrame:
    """Write the files of the page's command, and return the log."""
    log = log_of(6_000)
    (folder / "log").mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(log)), 3)):
        log.iloc[part].to_parquet(folder / "log" / f"{number}.parquet")
    pd.DataFrame({"user_id": np.arange(1_000), "country": "DE"}).to_parquet(folder / "users.parquet")
    pd.DataFrame({"item_id": np.arange(20), "title": "a"}).to_parquet(folder / "items.parquet")
    return log


def in_order(events: pd.DataFrame) -> pd.DataFrame:
    """Events in the order of all their columns."""
    return events[EVENTS].sort_values(EVENTS).reset_index(drop=True)


def check_partitions(folder: Path, log: pd.DataFrame) -> pd.DataFrame:
    """Compare written events with those of pandas; return them with their partitions and splits."""
    events = pd.read_parquet(folder / "events")
    left = in_order(log.sort_values([*KEYS, "stars"]).drop_duplicates(KEYS[:2], keep="last"))
    cut = np.sort(left["time"].to_numpy())[len(left) - round(len(left) * 0.2)]
    pd.testing.assert_frame_equal(in_order(events), left, check_dtype=False)
    assert ((events["split"] == "test") == (events["time"] >= cut)).all()
    assert events.groupby("user_id")["part"].nunique().max() == 1
    rest = events[events["split"] != "test"]
    assert 0.03 < (rest["split"] == "validation").mean() < 0.07
    return events


def check_users(folder: Path, events: pd.DataFrame) -> None:
    """The table of users has each user once, in the partition of its events."""
    users = pd.read_parquet(folder / "users")
    assert sorted(users["user_id"]) == [*range(1_000)]
    both = events.merge(users, on="user_id")
    assert len(both) == len(events)
    assert (both["part_x"].astype(int) == both["part_y"].astype(int)).all()


def check_columns(events: pd.DataFrame) -> None:
    """The folder parts can be read in one piece."""
    columns = open_columns(Config.of(data_path="parts", split="files"))
    numbers = columns.num_train, columns.num_validation, columns.num_test
    assert [*numbers] == [(events["split"] == split).sum() for split in prepare.SPLITS]


def test_the_command_of_the_page_writes_each_event_once_and_all_of_a_user_in_one_partition(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path)
    ((command,),) = commands(PAGE)
    # Fewer partitions, which take Ray less time.
    program, script, *flags = shlex.split(command.replace(" 64 ", " 4 "))
    assert (program, ROOT / script) == ("python", SCRIPT)
    assert prepare.main(flags) == 0
    parts = tmp_path / "parts"
    events = check_partitions(parts, log)
    check_users(parts, events)
    assert sorted(path.name for path in (parts / "events").iterdir()) == [f"part={n:05d}" for n in range(4)]
    assert len(pd.read_parquet(parts / "items.parquet")) == 20
    sizes, output = events["part"].value_counts(), capsys.readouterr().out
    of_test = events[events["split"] == "test"]
    assert [*map(str, (len(of_test), of_test["user_id"].nunique(), 20))] == next(
        line.split()[1:] for line in output.splitlines() if line.startswith("test ")
    )
    assert f"partitions: {sizes.min():,} events in the smallest, {sizes.max():,} in the largest" in output
    assert f"dropped: {6_000 - len(events):,} repeated events (--duplicates last)" in output
    script = os.path.relpath(SCRIPT.with_name("example.py"))
    begin = f"next: torchrun --standalone --nproc_per_node 2 {script}"
    assert output.splitlines()[-1] == f"{begin} --data_path parts --partitions 4"
    check_columns(events)
    assert (
        'kind = "rating"\ncolumn = "stars"\nlowest = 1.0\nhighest = 5.0'
        in (parts / "schema.toml").read_text()
    )


def test_texts_of_csv_files_stay_ids_and_first_clicks_are_kept(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(600)
    log["user_id"] = [f"{user:04d}" for user in log["user_id"] % 50]
    log["time"] = pd.to_datetime(log["time"], unit="s").astype(str)
    whole, log = log.copy(), log.astype({"user_id": object, "time": object})
    log.loc[:4, "user_id"] = None
    log.loc[3:9, "time"] = None
    (tmp_path / "log").mkdir()
    log[:300].to_csv(tmp_path / "log" / "a.csv.gz", index=False)
    log[300:].to_csv(tmp_path / "log" / "b.csv.gz", index=False)
    assert main_of(tmp_path, "--partitions=3") == 0
    events = pd.read_parquet(tmp_path / "parts" / "events")
    left = whole[10:].sort_values(KEYS[::-1]).drop_duplicates(["user_id", "item_id"], keep="first")
    keys = ["user_id", "item_id"]
    found = events[[*keys, "time"]].assign(
        time=events["time"].astype(str), item_id=events["item_id"].astype(int)
    )
    assert sorted(found.itertuples(index=False, name=None)) == sorted(
        left[[*keys, "time"]].itertuples(index=False, name=None)
    )
    output = capsys.readouterr().out
    assert "skipped: 10 rows" in output
    assert "example/retrieval.py --data_path" in output
    assert 'kind = "clicks"' in (tmp_path / "parts" / "schema.toml").read_text()


def test_the_partition_of_a_user_is_a_hash_of_its_id_as_a_text() -> None:
    known = [int(hashlib.md5(text).hexdigest()[:8], 16) % 1_000 for text in (b"7", b"12", b"007")]
    for ids, numbers in (([7, 12, 7], [0, 1, 0]), (["7", "007"], [0, 2]), (np.array([12], np.int16), [1])):
        parts = prepare.with_part(pa.table({"user": ids}), "user", 1_000)["part"].to_pylist()
        assert parts == [f"{known[number]:05d}" for number in numbers]


def tied_log() -> pd.DataFrame:
    """A log whose events of a user and item have one time and few labels, and differ in a list."""
    draw, number = np.random.default_rng(0), 400
    log = pd.DataFrame({"user_id": draw.integers(0, 9, number), "item_id": draw.integers(0, 4, number)})
    log["time"], log["stars"] = log["item_id"] % 2, draw.integers(0, 2, number)
    log["tags"] = [[str(tag), None] for tag in draw.integers(0, 300, number)]
    return log


@pytest.mark.parametrize("duplicates", ["last", "first", "keep"])
def test_events_of_one_time_and_label_are_chosen_and_ordered_by_all_their_columns(duplicates: str) -> None:
    log, names = tied_log(), ("user_id", "item_id", "time", "stars", duplicates)
    one = prepare.settled(pa.Table.from_pandas(log), *names).to_pylist()
    assert len(one) == (400 if duplicates == "keep" else 36)
    for seed in range(3):
        other = pa.Table.from_pandas(log.sample(frac=1, random_state=seed), preserve_index=False)
        assert prepare.settled(other, *names).to_pylist() == one


def test_partitions_do_not_depend_on_the_blocks_of_the_log(cluster: None, tmp_path: Path) -> None:
    log, found = tied_log(), []
    for blocks_of_log in (1, 4):
        folder = tmp_path / str(blocks_of_log)
        (folder / "log").mkdir(parents=True)
        log = log.sample(frac=1, random_state=blocks_of_log)
        for number, part in enumerate(np.array_split(np.arange(len(log)), blocks_of_log)):
            log.iloc[part].to_parquet(folder / "log" / f"{number}.parquet", index=False)
        assert main_of(folder, "--partitions=2", "--label=stars", "--test_fraction=0.5") == 0
        events = folder / "parts" / "events"
        names = sorted(str(path.parent.relative_to(events)) for path in events.rglob("*.parquet"))
        found.append([(name, pd.read_parquet(events / name).to_json()) for name in names])
    assert found[0] == found[1]


def main_of(folder: Path, *flags: str) -> int:
    """The status of the script with a log in a folder."""
    names = ("--user=user_id", "--item=item_id", "--time=time")
    return prepare.main([f"--input={folder / 'log'}", f"--output={folder / 'parts'}", *names, *flags])


def test_a_damaged_file_is_refused_in_a_sentence(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.parquet").write_text("a")
    assert main_of(tmp_path) == 2
    assert "Ray stopped: Parquet file size is 1 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "flags", "sentence"),
    [
        (
            "user_id,item_id,time\n1,2,3\n",
            ["--label=stars"],
            "has no column stars; it has user_id, item_id, time",
        ),
        (
            "user_id,item_id,time\n1,2,soon\n",
            [],
            "Ray stopped: ValueError: soon is no time. Fix: write ISO 8601.",
        ),
        ("user_id,item_id,time\n1,,3\n,2,4\n", [], "holds no event with user_id, item_id, time"),
        (
            "user_id,item_id,time\n1,2,3\n",
            ["--label=item_id"],
            "--label item_id must hold numbers, got string",
        ),
        ("user_id,item_id,time,part\n1,2,3,4\n", [], "has a column part"),
        ("user_id,item_id,time\n1,2,3\n4,2,3\n", ["--partitions=1"], "leaves no event for training or test"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_in_a_sentence_and_nothing_is_left(
    cluster: None,
    log: str,
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv").write_text(log)
    assert main_of(tmp_path, *flags) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["new", "--partitions=0"], "--partitions must be between 1 and 33,333, got 0: a training reads at"),
        (
            ["new", "--users=users", "--partitions=25000"],
            "between 1 and 24,999, got 25000: a training reads at most 100,000 files, and a partition has 4.",
        ),
        (["new", "--test_fraction=1"], "--test_fraction must be above 0 and below 1, got 1.0."),
        (["parts"], "--output parts exists. Fix: give a new folder."),
        (["s3://bucket/parts"], "--output s3://bucket/parts is a URL; copy the folder there"),
    ],
)
def test_wrong_flags_are_refused_before_ray_starts(
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts").mkdir()
    names = ("--input=log", "--user=user_id", "--item=item_id", "--time=time", "--output")
    assert prepare.main([*names, *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_the_program_of_the_page_gives_the_same_events_and_splits_by_duckdb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb", reason="needs the package duckdb, of requirements-dev.txt")
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path)
    (program,) = blocks(PAGE, "python")
    exec(compile(program, str(PAGE), "exec"), {})
    events = check_partitions(tmp_path / "parts", log)
    check_users(tmp_path / "parts", events)
    check_columns(events)
    # The partitions of prepare.py.
    table = prepare.with_part(pa.table({"user_id": events["user_id"]}), "user_id", 64)
    assert table["part"].to_pylist() == [f"{int(part):05d}" for part in events["part"]]
    output = capsys.readouterr().out
    assert str((events["split"] == "test").sum()) in output
    assert f"{6_000 - len(events)} " in output
