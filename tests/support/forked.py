"""Ranks of a script, forked from a process that has imported TorchRec, which takes seconds in each of them.

    with forking() as launch:
        succeeded(launch(2, SCRIPT, *arguments))

A rank runs what `torchrun SCRIPT` runs, in the environment that torchrun would make, without the launcher. As
a script this is the process that forks: it reads a request per line, and answers with a status.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from tests.support.launch import Answering, started

Ended = subprocess.CompletedProcess[str]
Launch = Callable[..., Ended]
START_SECONDS = 120


@contextlib.contextmanager
def forking() -> Iterator[Launch]:
    """What launches scripts, as `launch.torchrun` does."""
    command = [sys.executable, "-u", __file__]
    with started(command, stdin=subprocess.PIPE, stderr=None) as process:
        server = Answering(process)

        def launch(
            num_ranks: int, *command: object, timeout: float = 120
        ) -> subprocess.CompletedProcess[str]:
            with tempfile.NamedTemporaryFile("r") as output:
                words = list(map(str, command))
                request = {"num_ranks": num_ranks, "command": words, "output": output.name}
                status = server.ask(START_SECONDS + timeout, seconds=timeout, **request)["status"]
                return subprocess.CompletedProcess(words, status, output.read(), "")

        yield launch


def serve() -> None:
    """Fork ranks until the standard input ends."""
    import_all()
    for line in sys.stdin:
        print(json.dumps({"status": run(**json.loads(line))}), flush=True)


def import_all() -> None:
    """Import what takes long, once for all ranks."""
    for name in (
        "example",
        "recsuite.checkpoint.checkpointer",
        "recsuite.checkpoint.restore",
        "recsuite.monitoring.report",
        "recsuite.training.evaluation",
        "recsuite.training.trainer",
    ):
        importlib.import_module(name)


def run(num_ranks: int, command: list[str], output: str, seconds: float) -> int:
    """The status of some ranks: 0, or that of the first that failed; the others are killed then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    ranks = set()
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank({**world, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost"}, command, output)
        ranks.add(pid)
    deadline, worst = time.monotonic() + seconds, 0
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        ranks.discard(pid)
        is_late = pid == 0 and time.monotonic() > deadline
        if (pid and status) or is_late:
            worst = worst or (os.waitstatus_to_exitcode(status) if pid else -signal.SIGKILL)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        elif pid == 0:
            time.sleep(0.02)
    return worst


def _be_rank(variables: dict[str, object], command: list[str], output: str) -> NoReturn:
    from recsuite.runtime.process import end_process

    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.argv = command
    status = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    end_process(status)


if __name__ == "__main__":
    serve()
