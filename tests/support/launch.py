"""Running the example as a user does: other processes, a deadline, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from recsuite.runtime.host import PINNED
from tests.support.preloaded import ROOT, preloaded
from tests.support.starting import is_quick

# Where `./run.sh test` has installed what it runs.
INSTALLED = ROOT / (".venv" if os.environ.get("STACK", PINNED) == PINNED else f".venv-{os.environ['STACK']}")
EXAMPLE = ROOT / "example" / "example.py"
LAUNCHER = ("-m", "recsuite.extras.launcher")
# The scripts that tests launch.
SUPPORT = ROOT / "tests" / "support"
# Tests run on the CPU; those marked `gpu` and `multi_gpu` give a command what the machine has. Kept under a
# name of its own: a process that runs tests may be started by another, which has left itself without GPUs.
SEEN = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
GPUS = {"CUDA_VISIBLE_DEVICES": os.environ.setdefault("GPUS_FOR_TESTS", SEEN)}
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
# A deadline is there for what hangs: on a busy machine all takes so many times as long.
PATIENCE = 10
# Of a launch. A test that joins a group in this process may have set the interface, to the loopback.
LAUNCH_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GOMP_SPINCOUNT"),
)


@contextlib.contextmanager
def started(
    command: list[str],
    *,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    real: bool = False,
    within: int | None = None,
    **options: Any,
) -> Iterator[subprocess.Popen[str]]:
    """A running command; at the end it and all below it are killed, if they still run.

    real: whether a Python imports what it needs by itself, and is no fork of one that has (`preloaded.py`);
    within: a process in whose namespaces a fork runs.
    """
    clean = {name: value for name, value in os.environ.items() if name not in (*LAUNCH_VARIABLES, *NO_GPUS)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    # For the scripts of tests, which import each other, and the code beside them; an installation may be that
    # of another checkout, or there may be none. Last the packages that the tests themselves were given.
    given = (env or {}).get("PYTHONPATH", "")
    inherited = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    parts = [str(ROOT), *filter(None, [given]), str(EXAMPLE.parent), *inherited]
    paths = os.pathsep.join(dict.fromkeys(parts))
    env = {**clean, **NO_GPUS, "OMP_NUM_THREADS": "1", **(env or {}), "PYTHONPATH": paths}
    with contextlib.nullcontext() if real or not is_quick(command) else preloaded(within):
        process: subprocess.Popen[str] = subprocess.Popen(command, cwd=cwd, env=env, **pipes)
    try:
        yield process
    finally:
        # torchrun gives ranks sessions of their own, so no signal to a group reaches all.
        for pid in family(process.pid) if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def cores(count: int) -> Iterator[None]:
    """Within this, what is started may use so many cores."""
    with on_cores(sorted(os.sched_getaffinity(0))[:count]):
        yield


@contextlib.contextmanager
def on_cores(allowed: Iterable[int]) -> Iterator[None]:
    """Within this, what is started may use these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Answering:
    """A process that answers each request with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, deadline: float, **request: Any) -> dict[str, Any]:
        """Answer within a number of seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        deadline *= PATIENCE
        assert select.select([self.process.stdout], [], [], deadline)[0], f"nothing after {deadline} s"
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def run_command(
    command: list[str], *, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; at the deadline all of it is killed and the test fails.

    timeout: seconds on a machine that is not busy.
    """
    timeout *= PATIENCE
    with started(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command} still ran after {timeout} s") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    below = [int(child) for child in children.read_text().split()] if children.exists() else []
    return [pid, *(member for child in below for member in family(child))]


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments."""
    return run_command([sys.executable, *map(str, arguments)], **options)


def torchrun(num_ranks: int, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Launch a script on several processes of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return python(*launcher, *arguments, **options)


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a command that ended well."""
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to whoever asks for any: one of a
    training beside this test would take the launcher that comes to it for a rank.
    """
    # Trainings in a test seed Python's generator, and the tests beside it would draw the same ports.
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def read_json(path: Path) -> Any:
    """Content of a JSON file."""
    return json.loads(path.read_text())


def is_alive(pid: int) -> bool:
    """True if a process runs: one that has ended is a zombie until its parent asks for its status."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(process: subprocess.Popen[str], text: str, number: int = 1) -> None:
    """Read what a process prints until a text has come in so many lines."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        number -= text in line
        if number == 0:
            return
    raise AssertionError(f"no {text!r} in {''.join(lines)}; {process.stderr and process.stderr.read()}")


def launched(*arguments: object) -> list[str]:
    """The command that launches two ranks of a script."""
    return [sys.executable, "-u", *LAUNCHER, "--standalone", "--nproc_per_node=2", *map(str, arguments)]


def environment(tmp_path: Path) -> dict[str, str]:
    """A temporary folder of its own for a launch."""
    (tmp_path / "temporary").mkdir()
    return {"TMPDIR": str(tmp_path / "temporary")}
