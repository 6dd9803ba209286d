"""Kills of a training that follows a topic while messages arrive: nothing is learned twice or lost."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from recsuite.checkpoint.folder import LEFTOVER, newest_in
from recsuite.checkpoint.format import read_manifest
from recsuite.training.progress import StreamProgress
from tests.support.kafka import SCHEMA, MockKafka, as_json, ratings
from tests.support.launch import EXAMPLE, LAUNCHER, run_command, started, succeeded

pytestmark = pytest.mark.soak

KILLS, RANKS, PARTITIONS = 50, 2, 3
# Windows of 48 ratings, of three steps each. The mean label is that of the first thousand.
FLAGS = (
    *("--inc_dump", "--dump_every", 2, "--window", "12h", "--batch_size", 16, "--history", 5),
    *("--vocabulary", "dynamic", "--capacity", 500, "--embedding_dim", 4, "--mlp_dims", 4, "--resume"),
)
FIRST, CHUNK = 1_500, 30
NUMBER = FIRST + 2 * KILLS * CHUNK


def command(kafka: MockKafka, topic: str, folder: Path, *flags: object) -> list[str]:
    launcher = (sys.executable, "-u", *LAUNCHER, "--standalone", f"--nproc_per_node={RANKS}", EXAMPLE)
    data = ("--data_path", folder / "data", "--save_dir", folder / "dumps")
    return [str(each) for each in (*launcher, *data, "--stream", kafka.address(topic), *flags)]


def content(kafka: MockKafka, topic: str, folder: Path) -> tuple[dict[str, str], StreamProgress | None]:
    """Digest of each tensor of the training in one full checkpoint, and the progress of its stream."""
    succeeded(run_command(command(kafka, topic, folder, "--compact")))
    newest = newest_in(folder / "dumps")
    assert newest is not None
    digests = {
        f"{path.name} {name}": hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()
        for path in newest.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    return digests, read_manifest(newest).progress.stream


def stage_of(folder: Path, printed: Path) -> str:
    """The stage at which a training was killed."""
    last = (printed.read_text().splitlines() or [""])[-1].partition("] ")[2]
    if not (folder / "dumps").exists() or not any(
        word in last for word in ("dumped", "window", "waiting", "loaded", "has ")
    ):
        return "before it has the events"
    if any(LEFTOVER.fullmatch(path.name) for path in (folder / "dumps").iterdir()):
        return "while a checkpoint is written"
    newest = newest_in(folder / "dumps")
    stream = None if newest is None else read_manifest(newest).progress.stream
    if "loaded" in last:
        return "before the first window"
    if "waiting" in last:
        return "while it waits for messages"
    return "in a window" if stream is not None and stream.is_under_way else "between windows"


def test_a_training_that_is_killed_fifty_times_equals_the_undisturbed_one(tmp_path: Path) -> None:
    draw, stages = random.Random(1), collections.Counter[str]()
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "schema.toml").write_text(SCHEMA)
    whole, killed = folders
    values = as_json(ratings(NUMBER))
    with contextlib.closing(MockKafka()) as kafka:
        for topic in ("whole", "killed"):
            kafka.create(topic, PARTITIONS)
        kafka.send("whole", values, PARTITIONS)
        succeeded(run_command(command(kafka, "whole", whole, *FLAGS)))
        kafka.send("killed", values[:FIRST], PARTITIONS)
        sent, printed = FIRST, tmp_path / "printed"
        for number in range(KILLS):
            # One chunk waits for the training, and the other comes while it runs.
            kafka.send("killed", values[sent : sent + CHUNK], PARTITIONS)
            rest = values[sent + CHUNK : sent + 2 * CHUNK]
            sent += 2 * CHUNK
            sender = threading.Timer(draw.uniform(0, 4), kafka.send, ("killed", rest, PARTITIONS))
            sender.start()
            follow = command(kafka, "killed", killed, *FLAGS, "--follow_data", "--partition_delay", "2d")
            num_dumps, pause = draw.choice([0, 1, 2, 3, 4]), draw.uniform(0, 0.3)
            with printed.open("w") as output, started(follow, stdout=output, stderr=output) as process:
                until = time.monotonic() + (draw.uniform(0.2, 4) if num_dumps == 0 else 60)
                while time.monotonic() < until:
                    assert process.poll() is None, (number, printed.read_text())
                    text = printed.read_text()
                    if num_dumps and (text.count("dumped") >= num_dumps or "waiting for more" in text):
                        break
                    time.sleep(0.01)
                time.sleep(pause)
                # The end of the context kills all processes of the launch.
            stages[stage_of(killed, printed)] += 1
            sender.join()
        print(f"kills: {dict(stages)}")
        succeeded(run_command(command(kafka, "killed", killed, *FLAGS)))
        bits, stream = content(kafka, "killed", killed)
        of_whole, stream_of_whole = content(kafka, "whole", whole)
    assert stream_of_whole is not None
    assert stream_of_whole.end == NUMBER
    assert stream == stream_of_whole
    assert bits.keys() == of_whole.keys()
    assert [name for name in bits if bits[name] != of_whole[name]] == []
    assert stages.total() == KILLS
