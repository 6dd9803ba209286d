"""The Python of a clone whose launches start at once: a process that has imported TorchRec forks their ranks.

    with quick_python(clone):
        run_command(["./run.sh", "--epochs", "1"], cwd=clone)

In the clone's `.venv`, `python example.py`, `torchrun` and the launcher of `run.sh` run what they run
anywhere, without the seconds that imports take in each of them; on several machines a launch is printed
instead. With REAL_LAUNCH in the environment, and for everything else, it is the Python of these tests.

As a script this is either the process that forks, or what asks it for a launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOCKET = "launches"
PYTHON = """#!/usr/bin/env bash
case "${{REAL_LAUNCH:-$*}}" in
  1 | *--doctor*) ;;
  *recsuite.launcher\\ * | *example.py\\ *) exec "{python}" -S "{script}" "{clone}" "$@" ;;
esac
exec "{python}" "$@"
"""
TORCHRUN = '#!/usr/bin/env bash\nexec "{python}" -S "{script}" "{clone}" -m recsuite.launcher "$@"\n'
ACTIVATE = 'export VIRTUAL_ENV="{clone}/.venv" PATH="{clone}/.venv/bin:$PATH"\n'
SECONDS = 120


@contextlib.contextmanager
def quick_python(clone: Path) -> Iterator[None]:
    """Gives a clone, in which no `.venv` is, one that is installed, whose launches start at once."""
    from tests.support.launch import ROOT, started

    (clone / ".venv" / "bin").mkdir(parents=True)
    for stamp in (".installed", ".installed-dev"):
        (clone / ".venv" / stamp).symlink_to(ROOT / ".venv" / stamp)
    for name, text in (("python", PYTHON), ("torchrun", TORCHRUN), ("activate", ACTIVATE)):
        path = clone / ".venv" / "bin" / name
        path.write_text(text.format(python=sys.executable, script=__file__, clone=clone))
        path.chmod(0o755)
    command = [sys.executable, __file__, str(clone)]
    # On a busy machine, threads that spin while they wait take the cores from those that they wait for.
    env = {"PYTHONPATH": str(clone / "example"), "OMP_WAIT_POLICY": "passive"}
    with started(command, env=env, stderr=None) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield


# --- what asks ---


def ask(clone: str, *words: str) -> int:
    """The status of a launch: what `run.sh` or a user would have this Python run."""
    launch: dict[str, Any] = {"num_ranks": 1, "command": words}
    if words[:2] == ("-m", "recsuite.launcher"):
        where, number, *command = words[2:]
        if where != "--standalone":
            print(*words)
            return 0
        launch = {"num_ranks": int(number.removeprefix("--nproc_per_node=")), "command": command}
    output = f"/proc/{os.getpid()}/fd/1"
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{clone}/.venv/{SOCKET}")
        request = {"output": output, "seconds": SECONDS, **launch}
        server.sendall(json.dumps([os.getcwd(), dict(os.environ), request]).encode() + b"\n")
        return int(server.makefile().readline())


# --- the process that forks ---


def serve(clone: str) -> None:
    """Answer one request after another, until this process is killed."""
    from tests.support.forked import import_all

    import_all()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{clone}/.venv/{SOCKET}")
        server.listen()
        print("ready", flush=True)
        while True:
            with server.accept()[0] as client:
                status = in_fork(*json.loads(client.makefile().readline()))
                client.sendall(f"{status}\n".encode())


def in_fork(folder: str, env: dict[str, str], request: dict[str, Any]) -> int:
    """The status of a launch with the folder and the environment of who asks."""
    from tests.support.forked import run

    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        os._exit(run(**request) & 0xFF)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(*sys.argv[1:]))
    serve(sys.argv[1])
