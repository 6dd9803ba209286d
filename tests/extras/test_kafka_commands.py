"""Commands for a stream of a Kafka topic: the same as of files, on any ranks, after a kill and a loss."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recsuite.checkpoint.folder import deltas_in, newest_in
from recsuite.checkpoint.format import read_manifest
from recsuite.training.progress import StreamProgress
from tests.support.kafka import SCHEMA, MockKafka, as_json, ratings
from tests.support.launch import (
    EXAMPLE,
    LAUNCHER,
    free_port,
    python,
    run_command,
    started,
    succeeded,
    wait_for,
)

NUMBER, GLOBAL_BATCH_SIZE = 3_000, 48
MODEL = ("--vocabulary", "dynamic", "--capacity", 1_000, "--embedding_dim", 8, "--mlp_dims", 8)
STREAM = ("--inc_dump", "--window", 240, *MODEL)
ONE_RANK = ("--batch_size", GLOBAL_BATCH_SIZE)


@pytest.fixture(scope="module")
def kafka() -> Iterator[MockKafka]:
    """Brokers with a topic of two partitions; some messages are late, and one is far in the future."""
    with contextlib.closing(MockKafka()) as found:
        found.create("ratings", 2)
        found.send("ratings", as_json(rows()), 2)
        yield found


def rows() -> list[dict[str, object]]:
    found = ratings(NUMBER)
    found[500]["timestamp"] = 4_000_000_000
    return found


def folder_of(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "schema.toml").write_text(SCHEMA)
    return path


def command(data: Path, save_dir: Path, *flags: object) -> list[str]:
    return [str(each) for each in (EXAMPLE, "--data_path", data, "--save_dir", save_dir, *flags)]


def stream_in(save_dir: Path) -> StreamProgress:
    stream = read_manifest(newest(save_dir)).progress.stream
    assert stream is not None
    return stream


def bits(*folders: Path) -> dict[str, str]:
    """Digest of the rows and weights of checkpoints. Manifests have times and names of files."""
    found = {
        f"{folder.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in folder.glob("*.safetensors")
    }
    assert len(found) >= len(folders) > 0
    return found


def newest(save_dir: Path) -> Path:
    found = newest_in(save_dir)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def undisturbed(kafka: MockKafka, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training on one rank, with its data and its dumps."""
    folder = tmp_path_factory.mktemp("topic")
    address = ("--stream", kafka.address("ratings"))
    output = succeeded(
        python(*command(folder_of(folder / "data"), folder / "dumps", *address, *STREAM, *ONE_RANK))
    )
    # Nothing of the topic stays beside the schema.
    assert sorted(path.name for path in (folder / "data").rglob("*")) == [".columns", ".lock", "schema.toml"]
    assert " held back until others are as new" in output
    assert stream_in(folder / "dumps").end == NUMBER - 1
    return folder


def files_of(data: Path) -> Path:
    """A folder with the messages of the topic, in a file for each partition."""
    lines = as_json(rows())
    folder_of(data)
    for partition in range(2):
        (data / f"{partition}.jsonl").write_bytes(b"\n".join(lines[partition::2]) + b"\n")
    return data


def test_a_topic_trains_bit_for_bit_as_a_file_of_each_partition(undisturbed: Path, tmp_path: Path) -> None:
    data = files_of(tmp_path / "data")
    succeeded(python(*command(data, tmp_path / "dumps", "--stream", *STREAM, *ONE_RANK)))
    found, of_topic = stream_in(tmp_path / "dumps"), stream_in(undisturbed / "dumps")
    assert (found.sums, found.time, found.end) == (of_topic.sums, of_topic.time, of_topic.end)
    assert bits(*deltas_in(tmp_path / "dumps")) == bits(*deltas_in(undisturbed / "dumps"))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_read_the_same_windows_of_a_topic_and_train_bit_for_bit_as_on_files(
    kafka: MockKafka, undisturbed: Path, tmp_path: Path, ranks: int
) -> None:
    launcher = (sys.executable, *LAUNCHER, "--standalone", f"--nproc_per_node={ranks}")
    flags = (*STREAM, "--batch_size", GLOBAL_BATCH_SIZE)
    folders = (folder_of(tmp_path / "data"), files_of(tmp_path / "files"))
    save_dirs = (tmp_path / "dumps", tmp_path / "dumps of files")
    for data, save_dir, value in zip(folders, save_dirs, ([kafka.address("ratings")], []), strict=True):
        succeeded(run_command([*launcher, *command(data, save_dir, "--stream", *value, *flags)]))
    of_topic, of_files = (bits(*deltas_in(save_dir)) for save_dir in save_dirs)
    assert of_topic == of_files
    found, alone = stream_in(tmp_path / "dumps"), stream_in(undisturbed / "dumps")
    assert (found.end, found.counts) == (alone.end, alone.counts)
    assert found.position == alone.position
    assert found.sums["rmse"] == pytest.approx(alone.sums["rmse"], rel=1e-3)


def test_a_resume_after_a_kill_equals_the_undisturbed_training_bit_for_bit(
    kafka: MockKafka, undisturbed: Path, tmp_path: Path
) -> None:
    data, save_dir = folder_of(tmp_path / "data"), tmp_path / "dumps"
    address = ("--stream", kafka.address("ratings"))
    # Each step a checkpoint, so that the kill comes in the middle.
    killed = command(data, save_dir, *address, *STREAM, *ONE_RANK, "--dump_every", 1)
    with started([sys.executable, "-u", *killed]) as process:
        while not save_dir.exists() or len(deltas_in(save_dir)) < 3:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert 0 < stream_in(save_dir).end < NUMBER - 1
    whole = tmp_path / "whole"
    shutil.copytree(undisturbed / "dumps", whole, symlinks=True)
    succeeded(python(*command(data, save_dir, "--resume", *address, "--dump_every", 0)))
    assert stream_in(save_dir) == stream_in(whole)
    for folder in (save_dir, whole):
        # Neither the topic nor its address is needed.
        succeeded(python(*command(data, folder, "--compact")))
    assert bits(newest(save_dir)) == bits(newest(whole))


# Ends the process after so many checkpoints, and runs the rest of the command line.
KILLED = """
import os, runpy, sys
from recsuite.checkpoint.writer import CheckpointWriter

write, number = CheckpointWriter.write, int(sys.argv.pop(1))

def counted(self, *values, **named):
    global number
    write(self, *values, **named)
    number -= 1
    if not number:
        self.finish()
        os._exit(9)

CheckpointWriter.write = counted
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_resume_in_a_window_after_the_topic_removed_learned_messages_equals_the_undisturbed_training(
    kafka: MockKafka, tmp_path: Path
) -> None:
    flags = ("--inc_dump", "--dump_every", 1, "--window", "12h", "--history", 5, *MODEL, "--batch_size", 16)
    # Brokers keep 5 MiB of a partition.
    lines = [line[:-1] + b', "more": "' + b"." * 10_000 + b'"}' for line in as_json(ratings(1_060))]
    whole, killed = (folder_of(tmp_path / name) for name in ("whole", "killed"))
    for name in ("whole", "killed"):
        kafka.create(f"in-a-window-{name}", 2)
    kafka.send("in-a-window-whole", as_json(ratings(1_060)), 2)
    commands = {
        data: command(data, data / "dumps", "--stream", kafka.address(f"in-a-window-{data.name}"))
        for data in (whole, killed)
    }
    succeeded(python(*commands[whole], *flags))
    for begin in range(0, 1_000, 4):
        kafka.send("in-a-window-killed", lines[begin : begin + 4], 2)
    # Windows of 8 and of 48 ratings.
    assert python("-c", KILLED, "24", *commands[killed], *flags).returncode == 9
    stream = stream_in(killed / "dumps")
    assert (stream.begin, stream.end) == (344, 392)
    shutil.copytree(killed / "dumps", tmp_path / "too late", symlinks=True)
    for begin in range(1_000, 1_060, 4):
        kafka.send("in-a-window-killed", lines[begin : begin + 4], 2)
    output = succeeded(python(*commands[killed], *flags, "--resume"))
    found = re.findall(r"begins at offset (\d+): the topic removed (\d+) offsets from 0 on", output)
    assert len(found) == 2
    assert all(0 < int(low) == int(number) < 344 / 2 for low, number in found)
    for data in (whole, killed):
        succeeded(python(*commands[data], "--compact"))
    assert stream_in(killed / "dumps") == stream_in(whole / "dumps")
    assert bits(newest(killed / "dumps")) == bits(newest(whole / "dumps"))
    # Now the topic removes ratings of the window too.
    for begin in range(0, 340, 4):
        kafka.send("in-a-window-killed", lines[begin : begin + 4], 2)
    late = tmp_path / "too late"
    for words in ((*flags, "--resume", "--save_dir", late), ("--load", late)):
        refused = python(*commands[killed], *words)
        assert refused.returncode == 2
        left = re.search(r"are not those that this stream .*: (\d+) of 48 in its window", refused.stderr)
        assert left is not None
        assert 0 < int(left[1]) < 48
    other = kafka.address("in-a-window-whole")
    refused = python(*command(killed, killed / "dumps", "--stream", other, "--compact"))
    assert refused.returncode == 2
    assert "has learned from the messages of" in refused.stderr


def wait_for_ratings(process: subprocess.Popen[str], number: int, number_late: int = 0) -> None:
    """Read lines until so many new and late ratings were told, in one look at the topic or in several."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"has (\d+) new ratings?(?:, and (\d+) others? older than the learned)?", line):
            number, number_late = number - int(found[1]), number_late - int(found[2] or 0)
            if number == number_late == 0:
                return
    raise AssertionError(f"{number} new and {number_late} late ratings were not told")


def test_a_training_follows_a_topic_and_late_messages_are_skipped_and_counted(
    kafka: MockKafka, tmp_path: Path
) -> None:
    kafka.create("growing", 2)
    kafka.send("growing", as_json(ratings(1_200)), 2)
    data, save_dir = folder_of(tmp_path / "data"), tmp_path / "dumps"
    flags = ("--stream", kafka.address("growing"), *STREAM, *ONE_RANK, "--follow_data")
    with started([sys.executable, "-u", *command(data, save_dir, *flags)]) as process:
        wait_for(process, "waiting for more ratings")
        assert stream_in(save_dir).end == 1_200
        late = as_json(ratings(3, first=10))
        kafka.send("growing", [*as_json(ratings(237, first=1_200)), *late, None], 2)
        kafka.send("growing", as_json(ratings(3, first=1_437)), 2)
        # They are told when their window is complete.
        wait_for_ratings(process, 240, 3)
        wait_for(process, "waiting for more ratings")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert stream_in(save_dir).end == 1_440


def test_a_window_waits_for_a_late_partition_up_to_the_delay_and_then_its_events_are_late(
    kafka: MockKafka, tmp_path: Path
) -> None:
    kafka.create("late", 2)
    kafka.send("late", as_json(ratings(400)), 2)
    data, save_dir = folder_of(tmp_path / "data"), tmp_path / "dumps"
    follow = ("--follow_data", "--window", "1d", "--partition_delay", "1d")
    flags = ("--stream", kafka.address("late"), *STREAM, *ONE_RANK, *follow)
    with started([sys.executable, "-u", *command(data, save_dir, *flags)]) as process:
        # A day has 96 ratings, the first one only 8.
        wait_for(process, "waiting for more ratings")
        assert stream_in(save_dir).end == 392
        # Two days in one partition, of which one is behind the delay.
        kafka.send("late", as_json(ratings(192, first=400)), 1)
        wait_for(process, "a window waits until partition-00001 has a newer event")
        wait_for(process, "waiting for more ratings")
        assert stream_in(save_dir).end == 488
        kafka.send("late", [None, *as_json([*ratings(1, first=450), *ratings(4, first=592)])], 2)
        wait_for(process, "and 1 other older than the learned events, skipped")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


def test_lost_brokers_end_every_rank_with_one_sentence(tmp_path: Path) -> None:
    data, save_dir = folder_of(tmp_path / "data"), tmp_path / "dumps"
    with contextlib.ExitStack() as stack:
        kafka = MockKafka()
        stack.callback(kafka.close)
        kafka.create("lost", 2)
        kafka.send("lost", as_json(ratings(1_200)), 2)
        flags = ("--stream", kafka.address("lost"), *STREAM, "--follow_data")
        limits = ("--timeout", 20, "--worker_timeout", 10)
        launcher = (sys.executable, "-u", *LAUNCHER, "--standalone", "--nproc_per_node=2")
        with started([*launcher, *command(data, save_dir, *flags, *limits)]) as process:
            wait_for(process, "waiting for more ratings")
            stack.close()
            assert process.wait(60) == 2
            assert process.stderr is not None
            errors = process.stderr.read()
    assert len(re.findall(r"no answer for 1\d s", errors)) == 1
    assert "Traceback" not in errors


def test_a_load_and_a_resume_need_the_topic_and_predict_what_is_not_learned(
    kafka: MockKafka, undisturbed: Path, tmp_path: Path
) -> None:
    save_dir, topic = tmp_path / "dumps", re.escape(kafka.address("ratings"))
    shutil.copytree(undisturbed / "dumps", save_dir, symlinks=True)
    for mode, address in (("--load", ()), ("--resume", ("--stream", kafka.address("rating")))):
        refused = python(*command(undisturbed / "data", save_dir, mode, *address))
        assert refused.returncode == 2
        assert re.search(rf"has learned from the messages of {topic}.*\. Fix: give --stream", refused.stderr)
    # The same messages on other brokers, and more of them.
    with contextlib.closing(MockKafka()) as others:
        others.create("ratings", 2)
        others.send("ratings", [*as_json(rows()), *as_json(ratings(60, first=NUMBER))], 2)
        address = ("--stream", others.address("ratings"))
        output = succeeded(python(*command(undisturbed / "data", save_dir, "--load", *address)))
    assert ": 60 ratings after it, not trained on, predicted with" in output


def test_machines_with_folders_of_their_own_read_up_to_the_same_offsets(
    kafka: MockKafka, tmp_path: Path
) -> None:
    kafka.create("moving", 2)
    kafka.send("moving", as_json(ratings(1_200)), 2)
    endpoint, sent = f"--rdzv_endpoint=127.0.0.1:{free_port()}", 1_200
    where = ["--nnodes=2", "--rdzv_backend=c10d", endpoint, "--nproc_per_node=1"]
    flags = ("--stream", kafka.address("moving"), *STREAM, "--batch_size", GLOBAL_BATCH_SIZE)
    folders = [folder_of(tmp_path / name) for name in ("first", "second")]
    commands = [
        [sys.executable, *LAUNCHER, *where, *command(data, tmp_path / "dumps", *flags)] for data in folders
    ]
    with started(commands[0]) as first, started(commands[1]) as second:
        # Messages arrive while both machines begin.
        while first.poll() is None:
            kafka.send("moving", as_json(ratings(20, first=sent)), 2)
            sent += 20
            time.sleep(0.05)
        outputs = [process.communicate(timeout=60) for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], outputs
    # Both read what rank 0 asked for: otherwise their columns would differ, which is refused.
    assert 1_200 <= stream_in(tmp_path / "dumps").end < sent
