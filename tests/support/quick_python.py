"""The Python of a clone whose launches start at once: a process that has imported TorchRec forks their ranks.

    with quick_python(clone):
        run_command(["./run.sh", "--epochs", "1"], cwd=clone)

In the clone's `.venv`, `python example.py`, `torchrun` and the launcher of `run.sh` run what they run
anywhere, without the seconds that imports take in each of them. For everything else it is the Python of these
tests. With PRINT_LAUNCH in the environment a launch on several machines is printed instead.

As a script this is either the process that forks, or what asks it for a launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.support.program import Fresh

SOCKET, SERVE = "launches", "--serve"
PYTHON = """#!/usr/bin/env bash
case "${{PRINT_LAUNCH:+$*}}" in *recsuite.extras.launcher\\ --nnodes=*) exec echo "$*" ;; esac
case "$*" in
  *recsuite.extras.launcher\\ * | *recsuite.extras.retrain\\ * | *example.py\\ * | *plan.py\\ *)
    exec "{python}" -S "{script}" "{clone}" "$@" ;;
esac
exec "{python}" "$@"
"""
TORCHRUN = '#!/usr/bin/env bash\nexec "{python}" -S "{script}" "{clone}" -m recsuite.extras.launcher "$@"\n'
ACTIVATE = 'export VIRTUAL_ENV="{clone}/.venv" PATH="{clone}/.venv/bin:$PATH"\n'


@contextlib.contextmanager
def quick_python(clone: Path) -> Iterator[None]:
    """Gives a clone, in which no `.venv` is, one that is installed, whose launches start at once."""
    from tests.support.launch import INSTALLED, started
    from tests.support.starting import REAL_WORKERS

    (clone / ".venv" / "bin").mkdir(parents=True)
    for stamp in (".installed", ".installed-dev"):
        (clone / ".venv" / stamp).symlink_to(INSTALLED / stamp)
    # Where `run.sh` looks for another stack.
    if INSTALLED.name != ".venv":
        (clone / INSTALLED.name).symlink_to(".venv")
    for name, text in (("python", PYTHON), ("torchrun", TORCHRUN), ("activate", ACTIVATE)):
        path = clone / ".venv" / "bin" / name
        path.write_text(text.format(python=sys.executable, script=__file__, clone=clone))
        path.chmod(0o755)
    # It forks by itself: what it starts workers with must be Python's own.
    env = {"PYTHONPATH": str(clone / "example"), **REAL_WORKERS}
    with started([sys.executable, __file__, SERVE, str(clone)], env=env, stderr=None) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield


# --- what asks ---


def ask(clone: str, *words: str) -> int:
    """The status of what `run.sh` or a user would have this Python run."""
    command = [sys.executable, *words]
    request = {"command": command, "folder": os.getcwd(), "env": dict(os.environ), "new_session": False}
    request["cores"] = sorted(os.sched_getaffinity(0))
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{clone}/.venv/{SOCKET}")
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        answers = server.makefile()
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        return int(answers.readline())


# --- the process that forks ---


def serve(clone: str) -> None:
    """Answer one request after another, until this process is killed."""
    from tests.support.preloaded import LARGEST_REQUEST
    from tests.support.program import imported

    # Nobody asks for the status of a fork that answers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with imported() as fresh, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{clone}/.venv/{SOCKET}")
        server.listen()
        print("ready", flush=True)
        while True:
            client, _ = server.accept()
            message, files, *_ = socket.recv_fds(client, LARGEST_REQUEST, 3)
            if os.fork() == 0:
                answer(client, json.loads(message), files, fresh)
            for number in (client.detach(), *files):
                os.close(number)


def answer(client: socket.socket, request: dict[str, Any], files: list[int], fresh: Fresh) -> NoReturn:
    """Run what was asked for, and say its process id and its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        fresh.become(**request, files=files)
    client.sendall(f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(f"{status & 0xFF}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == SERVE:
        serve(sys.argv[2])
    sys.exit(ask(*sys.argv[1:]))
