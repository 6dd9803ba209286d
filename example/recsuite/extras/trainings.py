"""Trainings in separate processes, and the checkpoints that they write."""

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
    from recsuite.models.tasks import ModelMaker
    from recsuite.serving.served import Follower

# Seconds between two checks of the checkpoint folders.
LOOK_EVERY = 0.2
# Signals that end a script, and the seconds that its trainings then have for a last checkpoint.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_SECONDS = 60


@contextlib.contextmanager
def working_folder(prefix: str) -> Iterator[Path]:
    """Make a temporary folder for trainings, removed at the end, even if a signal ends the script."""

    # An exception from a handler is not lost, because this process runs no callbacks of a backward.
    def end(number: int, _: object) -> None:
        # A second signal would interrupt the removal of the folder.
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def started(commands: Mapping[str, Sequence[object]]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start trainings by name, each with a script and its flags.

    If the block ends before they do, they are ended, after a last checkpoint if they write any.

    Raises:
        UserError: on each rank of a launch of several.
    """
    if read_launch().world_size > 1:
        raise UserError(
            f"{script_name()} starts trainings of its own and cannot run under a launcher; "
            "run it with python alone."
        )
    begun: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            # In separate sessions: only this process receives Ctrl-C, and it signals them once. A second
            # signal would cost their checkpoint.
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
    """Return true if all trainings have ended.

    Raises:
        UserError: when one failed; its output has the reason.
    """
    statuses = {name: process.poll() for name, process in begun.items()}
    for name, status in statuses.items():
        if status:
            raise UserError(f"The {name} ended with status {status}; see its output above.")
    return all(status == 0 for status in statuses.values())


def newest(
    folders: Mapping[str, Path], begun: Mapping[str, subprocess.Popen[bytes]], model: ModelMaker
) -> Iterator[dict[str, Follower]]:
    """Yield the followers of training folders, by name, each time that one is newer and all have a model.

    Ends with the last training. model: makes the models.

    Raises:
        UserError: see `have_ended`, and `Follower`.
    """
    from recsuite.checkpoint.folder import LATEST, newest_in, step_of
    from recsuite.serving.served import Follower

    followers: dict[str, Follower] = {}
    while True:
        # Checked first: the last checkpoint may come after the last check of its folder.
        ended, is_newer = have_ended(begun), False
        for name, folder in folders.items():
            checkpoint = newest_in(folder)
            if name in followers:
                is_newer |= followers[name].refresh()
            elif checkpoint is not None and step_of(checkpoint) > 0:
                followers[name], is_newer = Follower(folder, None, LATEST, model), True
        if is_newer and len(followers) == len(folders):
            yield followers
        elif ended:
            return
        time.sleep(LOOK_EVERY)
