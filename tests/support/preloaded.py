"""A Python that has imported torch, TorchRec and FBGEMM, and forks into each Python that a test starts.

    with preloaded():
        process = subprocess.Popen([sys.executable, "example/example.py", "--epochs", "1"])

Those imports take four seconds of a core in every rank, and tests launch hundreds of ranks. So a process that
has done them once becomes, by a fork, what the command says (`program.py`). `Popen` is the ordinary one, of
an ordinary child of this process: only the call of the system that it makes is another. It may run in the
namespaces of another process, as on a machine of `tests/cluster/machines.py`, and stays this one's child.

What a library reads when it is loaded is read before the fork: a test of OMP_NUM_THREADS, TORCH_CPP_LOG_LEVEL
or of a GPU starts a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.program import Fresh, imported
from tests.support.starting import FORK, start

ROOT = Path(__file__).resolve().parents[2]
PR_SET_CHILD_SUBREAPER = 36
# In the order to enter them: "user" gives the right to the others, and in "mnt" /proc is another.
SPACES = ("user", "ipc", "uts", "net", "pid", "mnt")
LARGEST_REQUEST = 2**20
# For the command line and the environment that a fork shows others.
ROOM = "." * 20_000
SECONDS = 600


# --- the process that asks ---

# The server answers on one socket: of two threads that ask at once, each could get the process of the other.
ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def preloaded(within: int | None = None, library: Path | None = None) -> Iterator[None]:
    """Within this, `Popen` starts scripts of this Python as forks of one that has imported.

    within: a process in whose namespaces they run; library: what LD_PRELOAD in their environment would name.
    """
    with ONE_AT_A_TIME:
        ask = functools.partial(_ask, _server(library), within)
        with mock.patch.object(*FORK, functools.partial(start, ask)):
            yield


def _ask(connection: socket.socket, within: int | None, request: dict[str, Any], files: list[int]) -> int:
    """Have the server start a process, which is a child of this one."""
    # The orphan that the server makes becomes a child of this process. Other orphans, whom tests look for,
    # go where they always go.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        message = json.dumps({"parent": os.getpid(), "within": within, **request})
        socket.send_fds(connection, [message.encode()], files)
        assert select.select([connection], [], [], SECONDS)[0], f"no process after {SECONDS} s"
        return int(connection.recv(64))
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _server(library: Path | None) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {
            **os.environ,
            # Packages that the Python of the tests lacks may lie in a folder.
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT / "example"), os.environ.get("PYTHONPATH")])
            ),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            # On a busy machine, threads that spin while they wait take the cores from those they wait for.
            "OMP_WAIT_POLICY": "passive",
            "ROOM": ROOM,
            **({"LD_PRELOAD": str(library)} if library else {}),
        }
        subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.support.preloaded", str(theirs.fileno()), ROOM],
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
    assert select.select([ours], [], [], SECONDS)[0], f"nothing imported after {SECONDS} s"
    assert ours.recv(64) == b"ready"
    return ours


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --- the process that has imported ---


def serve(connection: socket.socket) -> None:
    """Start a process for each request, until who asks is gone."""
    with imported() as fresh:
        connection.send(b"ready")
        while True:
            message, files, *_ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
            if not message:
                return
            fresh.load_loops()
            request = json.loads(message)
            if "AWS_ENDPOINT_URL" in request["env"]:
                # Its import takes a second, and only a client of a store needs it.
                importlib.import_module("s3fs")
            connection.send(str(_orphan(request, files, fresh)).encode())
            for file in files:
                os.close(file)


def _orphan(request: dict[str, Any], files: list[int], fresh: Fresh) -> int:
    """The process id of a new process, whose parent ends at once."""
    parent, within = request.pop("parent"), request.pop("within")
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        if within is not None:
            _enter(within)
        pid = os.fork()
        if pid == 0:
            # In a namespace of processes a parent outside has the number 0.
            while os.getppid() not in (parent, 0):
                time.sleep(0.0005)
            fresh.become(**request, files=files)
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reading, 64))
    os.close(reading)
    os.close(writing)
    return pid


def _enter(pid: int) -> None:
    """Have the forks of this process run in the namespaces of another one."""
    paths = [(f"/proc/{pid}/ns/{name}", f"/proc/self/ns/{name}") for name in SPACES]
    files = [os.open(path, os.O_RDONLY) for path, own in paths if not os.path.samefile(path, own)]
    for file in files:
        if ctypes.CDLL(None).setns(file, 0) != 0:
            raise OSError(f"cannot enter a namespace of process {pid}")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
