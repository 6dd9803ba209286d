"""Trainings that go on in processes of their own, and the checkpoints that they write meanwhile."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.errors import UserError, script_name
from recsuite.runtime.process import read_launch

if TYPE_CHECKING:
    from recsuite.serving.served import Follower

# Seconds between two looks at the folders of checkpoints.
LOOK_EVERY = 0.2
# What ends a script, and the seconds that its trainings then have for a last checkpoint.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_SECONDS = 60


@contextlib.contextmanager
def working_folder(prefix: str) -> Iterator[Path]:
    """A folder for what trainings need meanwhile. It is removed in the end, also of a script that a signal
    ends: this process runs no backward, in whose callbacks an exception would be lost.
    """

    def end(number: int, _: object) -> None:
        # Another one would end what removes the folder.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in SIGNALS}
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def started(commands: Mapping[str, Sequence[object]]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Trainings by their names, each by a script and its flags; whoever leaves before their end ends them,
    after a last checkpoint of those that write some.

    Raises:
        UserError: on each rank of a launch of several.
    """
    if read_launch().world_size > 1:
        raise UserError(
            f"{script_name()} starts trainings of its own, which ranks of one launch would take for theirs; "
            "run it with python alone."
        )
    begun: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            # In sessions of their own: Ctrl-C comes to this process alone, which tells them to end once. A
            # second signal would cost their checkpoint.
            begun[name] = subprocess.Popen([sys.executable, *map(str, command)], start_new_session=True)
        yield begun
    finally:
        for process in begun.values():
            process.terminate()
        for process in begun.values():
            _wait_or_kill(process)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def have_ended(begun: Mapping[str, subprocess.Popen[bytes]]) -> bool:
    """Whether all have.

    Raises:
        UserError: when one failed, which has said why.
    """
    statuses = {name: process.poll() for name, process in begun.items()}
    for name, status in statuses.items():
        if status:
            raise UserError(f"The {name} ended with status {status}; see what it said above.")
    return all(status == 0 for status in statuses.values())


def newest(
    folders: Mapping[str, Path], begun: Mapping[str, subprocess.Popen[bytes]]
) -> Iterator[dict[str, Follower]]:
    """What follows the folders of trainings, by their names, each time that one of them has become newer and
    all have learned something; until all have ended.

    Raises:
        UserError: see `have_ended`, and `Follower`.
    """
    from recsuite.checkpoint.storage.directory import LATEST, newest_in, step_of
    from recsuite.serving.served import Follower

    followers: dict[str, Follower] = {}
    while True:
        # Looked at first: the last checkpoint may come after the last look at its folder.
        ended, is_newer = have_ended(begun), False
        for name, folder in folders.items():
            found = newest_in(folder)
            if name in followers:
                is_newer |= followers[name].refresh()
            elif found is not None and step_of(found) > 0:
                followers[name], is_newer = Follower(folder, checkpoint=LATEST), True
        if is_newer and len(followers) == len(folders):
            yield followers
        elif ended:
            return
        time.sleep(LOOK_EVERY)
