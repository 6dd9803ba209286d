"""Replacements in `Popen` and `multiprocessing` that start a Python as a fork of one that has imported.

    with mock.patch.object(*FORK, functools.partial(start, fork)):
        ...

fork(request, files) makes the process: the request says what the command says, and files are its standard
ones. What starts no such Python is started as ever.
"""

from __future__ import annotations

import multiprocessing.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

MODULES = (
    "recsuite.config",
    "recsuite.extras.launcher",
    "recsuite.extras.reports.compare",
    "recsuite.extras.retrain",
    "torch.distributed.run",
)

# In the environment of a program whose workers are what a test is about: each is a Python that starts.
REAL_WORKERS = {"REAL_WORKERS": "1"}


def is_quick(command: Sequence[str]) -> bool:
    """True if a command starts a Python with a script, or with a module that launches one."""
    words = words_of(command)
    is_script = bool(words) and words[0].endswith(".py")
    return command[0] == sys.executable and (is_script or (words[:1] == ["-m"] and words[1] in MODULES))


def words_of(command: Sequence[str]) -> Sequence[str]:
    """Words of a command after the Python, and after its flag for unbuffered output."""
    return command[2:] if command[1:2] == ["-u"] else command[1:]


def start(fork: Callable[..., int], *arguments: Any) -> int:
    """Start a process for `Popen` and return its process id.

    arguments: as in `subprocess.py`, of which those up to the session are the same in every Python from 3.10.
    """
    command = [os.fsdecode(word) for word in arguments[0]]
    if not is_quick(command):
        return REAL_FORK(*arguments)
    folder, variables, pipes, new_session = arguments[4], arguments[5], arguments[6:12], arguments[15]
    given = os.environb if variables is None else dict(word.split(b"=", 1) for word in variables)
    files = [pipes[0], pipes[3], pipes[5]]
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
    request = _request(command, os.fspath(folder or os.getcwd()), env, bool(new_session))
    return fork(request, [number if file < 0 else file for number, file in enumerate(files)])


def spawn(fork: Callable[..., int], path: bytes, command: Sequence[str], kept: Sequence[int]) -> int:
    """Start a process with some open files for `multiprocessing` and return its process id."""
    if command[-1] != "--multiprocessing-fork":
        return REAL_SPAWN(path, command, kept)
    request = _request([os.fsdecode(path), *command[1:]], os.getcwd(), dict(os.environ), new_session=False)
    return fork(request, [0, 1, 2], kept)


def _request(command: list[str], folder: str, env: dict[str, str], new_session: bool) -> dict[str, Any]:
    """Request for a fork, which may use the cores of this process."""
    cores = sorted(os.sched_getaffinity(0))
    return {"command": command, "folder": folder, "env": env, "new_session": new_session, "cores": cores}


# The function with which `Popen` starts a process: where it is, and its name.
FORK: tuple[Any, str] = (subprocess, "_fork_exec")
if sys.version_info < (3, 11):
    FORK = (subprocess._posixsubprocess, "fork_exec")
# Where its arguments have the `preexec_fn` of `Popen`.
PREEXEC = -2 if sys.version_info >= (3, 11) else -1
REAL_FORK = getattr(*FORK)
REAL_SPAWN = multiprocessing.util.spawnv_passfds
