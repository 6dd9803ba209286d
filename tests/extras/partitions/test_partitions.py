"""Partitions in one process: mistakes in files and flags, and columns."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from recsuite.config.config import Config
from recsuite.datasets import source
from recsuite.datasets.columns import Columns
from recsuite.datasets.opening import open_same_columns
from recsuite.datasets.tables.files import find_tables
from recsuite.errors import UserError
from recsuite.extras.partitions import digests, exchange, folders, merging, reading
from recsuite.runtime.process import RuntimeContext
from tests.support.launch import EXAMPLE, launched, python, run_command, succeeded
from tests.support.object_server import serving
from tests.support.partition_files import log, write_parquet, write_partitions

NUMBER = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_partitions(tmp_path_factory.mktemp("partitions") / "data", NUMBER, log(number=800))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of the data set, without columns."""
    return Path(shutil.copytree(written, tmp_path / "data", ignore=shutil.ignore_patterns(".columns")))


def config_of(folder: Path, **flags: Any) -> Config:
    config = Config.of(**{"data_path": str(folder), "split": "files", "partitions": NUMBER, **flags})
    config.validate()
    return config


def part(folder: Path, number: int) -> Path:
    return folder / "events" / f"part={number:05d}"


def test_partitions_of_one_process_give_the_columns_of_the_data_in_one_piece(
    written: Path, context: RuntimeContext
) -> None:
    one, whole = (open_same_columns(config_of(written, partitions=number), context) for number in (NUMBER, 0))
    assert {name: digest for name, digest in one.files.items() if name != "user_numbers.npy"} == whole.files
    assert repr(one.baselines) == repr(whole.baselines)
    assert (one.num_train, one.num_test, one.num_users) == (whole.num_train, whole.num_test, whole.num_users)


def test_columns_are_made_once(written: Path, context: RuntimeContext, monkeypatch: Any) -> None:
    first = open_same_columns(config_of(written), context)
    monkeypatch.setattr(merging, "with_split", None)
    assert open_same_columns(config_of(written), context) == first


def test_a_start_reads_the_files_that_changed_alone(
    folder: Path, context: RuntimeContext, monkeypatch: Any, capsys: Any
) -> None:
    files = list(folder.rglob("*.parquet"))
    for path in files:
        os.utime(path, (1_600_000_000, 1_600_000_000))
    read: list[str] = []
    monkeypatch.setattr(digests, "digests_of_files", spied(read, digests.digests_of_files))
    monkeypatch.setattr(digests, "digest_of", spied(read, digests.digest_of))
    first = open_same_columns(config_of(folder), context)
    assert sorted(read) == sorted(str(path.relative_to(folder)) for path in files)
    read.clear()
    assert open_same_columns(config_of(folder), context) == first
    assert not read
    # Other bytes with the same size, at another time.
    path = part(folder, 1) / "split=test" / "data_0.parquet"
    content = path.read_bytes()
    frame = pandas.read_parquet(path, partitioning=None)
    write_parquet(path, frame.assign(rating=frame["rating"].to_numpy()[::-1]))
    assert path.stat().st_size == len(content)
    assert open_same_columns(config_of(folder), context).digest != first.digest
    assert {*read} == {str(path.relative_to(folder))}
    path.write_bytes(content)
    column = Path(first.folder) / "time.npy"
    column.write_bytes(bytes(column.stat().st_size))
    read.clear()
    assert open_same_columns(config_of(folder), context) == first
    assert f"the columns in {first.folder} are damaged and are made again: {column} has another" in said(
        capsys
    )
    read.clear()
    assert open_same_columns(config_of(folder, rebuild=True), context) == first
    assert {str(path.relative_to(folder)) for path in files} < {*read}
    assert "the new columns are the same as before, to the last bit" in said(capsys)


def spied(read: list[str], function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that notes the names of the files that it reads."""

    def spy(files: Any) -> Any:
        read.extend([str(files)] if isinstance(files, Path) else [file.name for file in files])
        return function(files)

    return spy


def said(capsys: Any) -> str:
    return str(capsys.readouterr().out)


def test_partitions_of_an_object_store_give_the_columns_of_those_on_a_disk(
    written: Path, tmp_path: Path, context: RuntimeContext, monkeypatch: Any
) -> None:
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(source, "DATA_ROOT", tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # The schema of tables on a server is in the working folder.
    shutil.copy(written / "schema.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "served") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.address}")
        ignored = shutil.ignore_patterns(".columns", "schema.toml")
        shutil.copytree(written, server.folder / "bucket" / "data", ignore=ignored)
        config = config_of(
            Path("s3://bucket/data"), data_path="s3://bucket/data", cache_dir=str(tmp_path / "c")
        )
        remote, local = (open_same_columns(each, context) for each in (config, config_of(written)))
        assert remote.files == local.files
        # Of two ranks the second reads its partitions alone, beside the items.
        tables = folders.tables_of_rank(find_tables("s3://bucket/data"), NUMBER, 1, 2, tmp_path)
        assert {folders.number_of(file.name) for file in tables.files} == {1, 3, None}
        shutil.rmtree(server.folder / "bucket" / "data" / "events" / "part=00002")
        with pytest.raises(UserError, match="requires the partitions 0 to 3, and 2 is missing"):
            open_same_columns(config, context)


def test_a_launch_that_waited_for_another_uses_the_columns_of_that(
    folder: Path, context: RuntimeContext, monkeypatch: Any
) -> None:
    locked, read, reads = reading.locked, reading.read, list[Any]()

    def waiting(*arguments: Any) -> Any:
        monkeypatch.setattr(reading, "locked", locked)
        open_same_columns(config_of(folder), context)
        return locked(*arguments)

    def counting(*arguments: Any) -> Any:
        reads.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(reading, "locked", waiting)
    monkeypatch.setattr(reading, "read", counting)
    columns = open_same_columns(config_of(folder), context)
    assert len(reads) == 1
    assert open_same_columns(config_of(folder), context) == columns


def test_a_rank_that_waits_in_vain_says_so_once(context: RuntimeContext, monkeypatch: Any) -> None:
    calls = []

    def waits(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    monkeypatch.setattr(exchange, "all_gather_object", waits)
    with (
        pytest.raises(
            UserError, match=r"Rank 0 waited [\d,]+ s for the other ranks to read their partitions"
        ),
        exchange.together(context) as ranks,
    ):
        ranks.gathered(1)
    assert len(calls) == 1


def without(folder: Path) -> None:
    shutil.rmtree(part(folder, 2))


def doubled(folder: Path) -> None:
    shutil.copytree(part(folder, 1), folder / "events" / "part=1")


def one_more(folder: Path) -> None:
    part(folder, NUMBER).mkdir()


def far(folder: Path) -> None:
    part(folder, 99_999_999).mkdir()


def of_another_type(folder: Path) -> None:
    path = part(folder, 3) / "split=test" / "data_0.parquet"
    write_parquet(path, pandas.read_parquet(path, partitioning=None).astype({"user": str}))


def with_another_column(folder: Path) -> None:
    path = part(folder, 0) / "split=test" / "data_0.parquet"
    write_parquet(path, pandas.read_parquet(path, partitioning=None).assign(more=1))


def with_a_user_of_another(folder: Path) -> None:
    path = part(folder, 3) / "split=test" / "data_0.parquet"
    frame = pandas.read_parquet(path, partitioning=None)
    other = pandas.read_parquet(part(folder, 1) / "split=train" / "data_0.parquet", partitioning=None)
    write_parquet(path, frame.assign(user=other["user"].min()))


def with_users_of_another(folder: Path) -> None:
    path = part(folder, 3) / "split=test" / "data_0.parquet"
    frame = pandas.read_parquet(path, partitioning=None)
    other = pandas.read_parquet(part(folder, 1) / "split=train" / "data_0.parquet", partitioning=None)
    write_parquet(path, frame.assign(user=np.resize(other["user"].unique()[:3], len(frame))))


def damaged(folder: Path) -> None:
    path = part(folder, 2) / "split=train" / "data_0.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def with_more_users(folder: Path) -> None:
    path = folder / "users" / f"part={NUMBER:05d}" / "data_0.parquet"
    write_parquet(path, pandas.DataFrame({"user": [1], "city": ["Ulm"], "age": [1.0]}))


def doubled_users(folder: Path) -> None:
    shutil.copytree(folder / "users" / "part=00001", folder / "users" / "part=1")


def with_users_by_another_hash(folder: Path) -> None:
    one, other = (folder / "users" / f"part={number:05d}" for number in (1, 2))
    one.rename(folder / "users" / "of_1")
    other.rename(one)
    (folder / "users" / "of_1").rename(other)


def outside(folder: Path) -> None:
    for path in folder.glob("events/*"):
        path.rename(folder / "events" / f"number{path.name[4:]}")


def without_split(folder: Path) -> None:
    (part(folder, 0) / "split=test").rename(part(folder, 0) / "split=new")


def without_test(folder: Path) -> None:
    for path in folder.glob("events/*/split=test"):
        shutil.rmtree(path)


def without_rows_of_the_test(folder: Path) -> None:
    for path in folder.glob("events/*/split=test/*"):
        write_parquet(path, pandas.read_parquet(path, partitioning=None)[:0])


def without_schema(folder: Path) -> None:
    (folder / "schema.toml").unlink()


def with_properties_in_events(folder: Path) -> None:
    (folder / "items.parquet").unlink()
    for path in folder.glob("events/*/*/*.parquet"):
        write_parquet(path, pandas.read_parquet(path, partitioning=None).assign(price=1.0, kind="a"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without, r"requires the partitions 0 to 3, and 2 is missing: events/ has 3 partitions"),
        (doubled, r"Partition 1 is there twice, in events/part=00001 and events/part=1; remove"),
        (
            one_more,
            r"must be the number of partitions, got 4, and events/ has 5 partitions, the last part=00004",
        ),
        (
            far,
            r"must be the number of partitions, got 4, and events/ has 5 partitions, the last part=99999999",
        ),
        (
            of_another_type,
            r"user is large_string in events/part=00003.* and int64 in .*; write all partitions",
        ),
        (with_another_column, r"column more is missing in .* and int64 in events/part=00000/split=test/"),
        (
            with_a_user_of_another,
            r"The user 10\d\d is in two partitions, 1 and 3; write all events of a user",
        ),
        (
            with_more_users,
            r"The partition part=00004 of users is none of the events, which are 0 to 3",
        ),
        (doubled_users, r"Partition 1 is there twice, in users/part=00001 and users/part=1; remove"),
        (
            with_users_by_another_hash,
            r"The user 10\d\d is in the events of partition \d and in the users of partition \d \(\d+ user",
        ),
        (with_users_of_another, r"is in two partitions, 1 and 3 \(3 users in all\); write all events of a"),
        (damaged, r"part=00002/split=train/data_0.parquet"),
        (
            outside,
            r"requires Parquet files in folders events/part=0 and so on, and events/number=00000/split",
        ),
        (without_split, r"split=test, and events/part=00000/split=new/data_0.parquet is in none"),
        (without_test, r"requires files in split=test of at least one partition"),
        (without_rows_of_the_test, r"requires files in split=test of at least one partition"),
        (without_schema, r"requires a whole schema.toml"),
        (with_properties_in_events, r"requires the features of items in a table of items, and \w+ is a col"),
    ],
)
def test_a_fault_of_partitions_gives_a_sentence_that_names_it(
    folder: Path, context: RuntimeContext, change: Callable[[Path], None], sentence: str
) -> None:
    change(folder)
    with pytest.raises(UserError, match=sentence):
        open_same_columns(config_of(folder), context)


def test_a_file_that_grows_while_it_is_read_is_refused(
    folder: Path, context: RuntimeContext, monkeypatch: Any
) -> None:
    path, check = part(folder, 1) / "split=test" / "data_0.parquet", merging.check_users

    def grow(*arguments: Any) -> int:
        write_parquet(path, pandas.concat([pandas.read_parquet(path, partitioning=None)] * 2))
        return check(*arguments)

    monkeypatch.setattr(merging, "check_users", grow)
    with pytest.raises(UserError, match="changed while they were read; start again"):
        open_same_columns(config_of(folder), context)


def test_an_empty_partition_needs_its_folder_alone(folder: Path, context: RuntimeContext) -> None:
    before = open_same_columns(config_of(folder), context)
    shutil.rmtree(part(folder, 3))
    part(folder, 3).mkdir()
    after = open_same_columns(config_of(folder), context)
    assert 0 < after.num_train < before.num_train
    assert after.digest != before.digest


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"stream": True}, "--partitions cannot be used with --stream"),
        ({"initial_rows": "gaussian"}, "--initial_rows gaussian cannot be used with --partitions"),
        ({"day_feature": "user"}, "--day_feature user cannot be used with --partitions"),
        ({"order": "rows"}, "--partitions requires events in order of time, got --order rows"),
        ({"dataset": "synthetic"}, "--partitions requires --data_path, without --dataset"),
        ({"cache_dir": "s3://here/there"}, "requires a --cache_dir on this machine, got s3://here/there"),
        ({"partitions": 0, "min_count": 2}, "--min_count requires --partitions"),
        ({"partitions": -1}, "--partitions must be between 0 and 100,000, got -1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path: Path, flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        config_of(tmp_path, **flags)


def test_another_split_than_that_of_the_folders_is_refused(written: Path, context: RuntimeContext) -> None:
    with pytest.raises(UserError, match="--partitions requires --split files, got random"):
        open_same_columns(config_of(written, split="random"), context)


def test_values_with_few_events_share_the_unknown_row(written: Path, context: RuntimeContext) -> None:
    events = log(number=800)
    numbers = events["item"][events["split"] == "train"].value_counts()
    columns = open_same_columns(config_of(written, min_count=20), context)
    assert vocabulary_of(columns)["item"] == sorted(numbers.index[numbers >= 20])
    note = (
        f"--min_count 20: {(numbers < 20).sum()} of {len(numbers)} values of item have fewer training ratings"
    )
    assert [line for line in columns.notes if line.startswith(note)]
    rows = columns.column("item_features")["features"][:, columns.place_of("item")]
    assert np.count_nonzero(rows) == (numbers >= 20).sum()


def vocabulary_of(columns: Columns) -> Any:
    import json

    return json.loads((Path(columns.folder) / "vocabulary.json").read_bytes())


def test_a_mistake_in_the_files_of_one_rank_ends_all_ranks_with_its_sentence(folder: Path) -> None:
    path = part(folder, 1) / "split=train" / "data_0.parquet"
    content = bytearray(path.read_bytes())
    # Among the values, which only rank 1 reads.
    content[100:400] = bytes(300)
    path.write_bytes(content)
    flags = ("--data_path", folder, "--partitions", NUMBER, "--epochs", 1, "--num_workers", 0)
    result = run_command(launched(EXAMPLE, *flags), timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("part=00001/split=train/data_0.parquet") == 1
    assert "Traceback" not in result.stderr


def test_a_worker_imports_neither_torch_nor_arrow_for_the_sampler() -> None:
    code = (
        "import sys, recsuite.extras.partitions.sampler; "
        "print({'torch', 'pandas', 'pyarrow', 'torchrec'} & {*sys.modules})"
    )
    assert succeeded(python("-c", code, real=True)).strip() == "set()"
