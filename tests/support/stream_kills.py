"""Kills of a training that follows a stream while events arrive: nothing is learned twice or lost."""

from __future__ import annotations

import abc
import collections
import hashlib
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from recsuite.checkpoint.folder import LEFTOVER, NAME, newest_in
from recsuite.checkpoint.format import MANIFEST, STREAM_FILE, read_manifest
from recsuite.places import folder_at
from recsuite.training.progress import StreamProgress
from tests.support.launch import EXAMPLE, LAUNCHER, run_command, started, succeeded

KILLS, RANKS = 50, 2
# Windows of 48 ratings, of three steps each. The mean label is that of the first thousand.
FLAGS = (
    *("--inc_dump", "--dump_every", 2, "--window", "12h", "--batch_size", 16, "--history", 5),
    *("--vocabulary", "dynamic", "--capacity", 500, "--embedding_dim", 4, "--mlp_dims", 4, "--resume"),
)
FIRST, CHUNK = 1_500, 30
NUMBER = FIRST + 2 * KILLS * CHUNK
# Ratings that come together.
PIECES = [(0, FIRST), *((begin, begin + CHUNK) for begin in range(FIRST, NUMBER, CHUNK))]


class Events(abc.ABC):
    """Events of two trainings, "whole" and "killed", see `kill`. folder: of both, in which they run.

    following: flags of a training that follows them.
    """

    following: tuple[object, ...] = ("--follow_data",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abc.abstractmethod
    def add(self, name: str, begin: int, end: int) -> None:
        """Add the ratings from one place to before another to those of a training."""

    @abc.abstractmethod
    def source(self, name: str) -> tuple[object, ...]:
        """Flags of a stream."""

    def dumps(self, name: str) -> str:
        """Folder of checkpoints."""
        return str(self.folder / f"{name}-dumps")

    def command(self, name: str, *flags: object) -> list[str]:
        """Launch of a training."""
        launcher = (sys.executable, "-u", *LAUNCHER, "--standalone", f"--nproc_per_node={RANKS}", EXAMPLE)
        given = (*self.source(name), "--save_dir", self.dumps(name), *flags)
        return [str(each) for each in (*launcher, *given)]

    def content(self, name: str) -> tuple[dict[str, str], StreamProgress | None]:
        """Digest of each tensor of the training in one full checkpoint, and the progress of its stream."""
        succeeded(run_command(self.command(name, "--compact"), cwd=self.folder))
        newest = newest_in(folder_at(self.dumps(name)))
        assert newest is not None
        digests = {
            f"{entry.name[:10]} {tensor}": hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            for entry in read_manifest(newest).files
            # In a store the attempt follows "part-00001".
            if entry.name.endswith(".safetensors") or entry.name == STREAM_FILE
            for tensor, value in load((newest / entry.name).read_bytes()).items()
        }
        return digests, read_manifest(newest).progress.stream

    def stage(self, printed: str) -> str:
        """The stage at which a training was killed."""
        last, dumps = (printed.splitlines() or [""])[-1].partition("] ")[2], folder_at(self.dumps("killed"))
        if not any(word in last for word in ("dumped", "window", "waiting", "loaded", "has ")):
            return "before it has the events"
        if (newest := newest_in(dumps)) is None:
            return "before the first checkpoint"
        if any(map(is_unfinished, dumps.iterdir())):
            return "while a checkpoint is written"
        stream = read_manifest(newest).progress.stream
        if "loaded" in last:
            return "before the first window"
        if "waiting" in last:
            return "while it waits for events"
        return "in a window" if stream is not None and stream.is_under_way else "between windows"


def is_unfinished(path: Path) -> bool:
    """True for a checkpoint that is being written; in a store it has its name from the begin."""
    is_named = NAME.fullmatch(path.name) is not None
    return LEFTOVER.fullmatch(path.name) is not None or (is_named and not (path / MANIFEST).is_file())


def kill(events: Events) -> None:
    """Kill a training fifty times and resume it; in the end it equals the undisturbed one, bit for bit."""
    draw, stages = random.Random(1), collections.Counter[str]()
    for piece in PIECES:
        events.add("whole", *piece)
    succeeded(run_command(events.command("whole", *FLAGS), cwd=events.folder))
    events.add("killed", *PIECES[0])
    printed = events.folder / "printed"
    for number in range(KILLS):
        # One chunk waits for the training, and the other comes while it runs.
        waiting, coming = PIECES[1 + 2 * number : 3 + 2 * number]
        events.add("killed", *waiting)
        sender = threading.Timer(draw.uniform(0, 4), events.add, ("killed", *coming))
        sender.start()
        follow = events.command("killed", *FLAGS, *events.following)
        num_dumps, pause = draw.choice([0, 1, 2, 3, 4]), draw.uniform(0, 0.3)
        with (
            printed.open("w") as output,
            started(follow, cwd=events.folder, stdout=output, stderr=output) as process,
        ):
            until = time.monotonic() + (draw.uniform(0.2, 4) if num_dumps == 0 else 60)
            while time.monotonic() < until:
                assert process.poll() is None, (number, printed.read_text())
                text = printed.read_text()
                if num_dumps and (text.count("dumped") >= num_dumps or "waiting for more" in text):
                    break
                time.sleep(0.01)
            time.sleep(pause)
            # The end of the context kills all processes of the launch.
        stages[events.stage(printed.read_text())] += 1
        sender.join()
    print(f"kills: {dict(stages)}")
    succeeded(run_command(events.command("killed", *FLAGS), cwd=events.folder))
    bits, stream = events.content("killed")
    of_whole, stream_of_whole = events.content("whole")
    assert stream_of_whole is not None
    assert stream_of_whole.end == NUMBER
    assert stream == stream_of_whole
    assert bits.keys() == of_whole.keys()
    assert [name for name in bits if bits[name] != of_whole[name]] == []
    assert stages.total() == KILLS
